"""The phases of a start, read from vLLM's own lines, and the reason of a failed one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_repro.repro.serving.startup import Startup, failure_lines

LINES = (
    ("(APIServer pid=10) INFO 11-29 12:00:00 [utils.py:299] vLLM API server version 0.23.0", "starting", ""),
    ("(EngineCore pid=11) INFO 11-29 12:00:03 [core.py:112] Initializing a V1 LLM engine (v0.23.0) with config: x", "starting", ""),
    ("model-00001-of-00046.safetensors:  12%|█▏        | 600M/5.00G [00:10<01:10, 60MB/s]", "download", ""),
    ("(Worker pid=12) INFO 11-29 12:00:09 [gpu_model_runner.py:5093] Starting to load model /models/v4...", "load", ""),
    ("Loading safetensors checkpoint shards:  33% Completed | 1/3 [00:01<00:02,  1.0it/s]", "load", "33 %, 1 of 3"),
    ("INFO 11-29 12:00:30 [backends.py:1090] Using cache directory: /c for vLLM's torch.compile", "compile", ""),
    ("INFO 11-29 12:00:40 [backends.py:1149] Dynamo bytecode transform time: 9.10 s", "compile", ""),
    ("INFO 11-29 12:01:40 [monitor.py:82] Initial profiling/warmup run took 3.10 s", "warm-up", ""),
    ("INFO 11-29 12:01:41 [gpu_worker.py:481] Available KV cache memory: 20.10 GiB", "warm-up", ""),
    ("Capturing CUDA graphs (decode, FULL):  50%|█████     | 3/6 [00:01<00:01,  2.00it/s]", "capture", "50 %, 3 of 6"),
    ("INFO:     Application startup complete.", "serving", ""),
)  # fmt: skip


def test_every_line_has_its_phase() -> None:
    startup = Startup()
    for line, phase, detail in LINES:
        startup.feed([line])
        assert (startup.phase, startup.detail) == (phase, detail), line
        assert startup.waits_for
    assert startup.waits_for == "a first completion to answer"


def test_a_progress_bar_overwrites_itself() -> None:
    startup = Startup()
    assert startup.feed(
        ["Capturing CUDA graphs (decode, FULL):   0%| | 0/6 [00:00<?]\rCapturing CUDA graphs (decode, FULL):  83%|# | 5/6 [00:02]"]
    )
    assert startup.waits_for == "CUDA graphs to be captured (83 %, 5 of 6)"
    assert not startup.feed(["something else"])


FAILED = """\
WARNING 11-29 12:00:00 [import_utils.py:20] Failed to import: ModuleNotFoundError: No module named 'vllm._moe_C'
(Worker_TP1 pid=12) ERROR 11-29 12:00:05 [multiproc_executor.py:888] WorkerProc failed to start.
(Worker_TP1 pid=12) ERROR 11-29 12:00:05 [multiproc_executor.py:888] Traceback (most recent call last):
(Worker_TP1 pid=12) ERROR 11-29 12:00:05 [multiproc_executor.py:888]   File "gpu_worker.py", line 1, in init_device
(Worker_TP1 pid=12) ERROR 11-29 12:00:05 [multiproc_executor.py:888] ValueError: Free memory on device cuda:1 (1.0 GiB)
(EngineCore pid=11) ERROR 11-29 12:00:06 [core.py:1195] EngineCore failed to start.
(EngineCore pid=11) Exception: WorkerProc initialization failed due to an exception. See stack trace for root cause.
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
""".splitlines()


def test_the_reason_is_the_first_exception_and_not_who_passed_it_on() -> None:
    startup = Startup()
    startup.feed(FAILED)
    assert startup.phase == "failed"
    assert startup.reason.startswith("ValueError: Free memory on device cuda:1")
    lines = failure_lines(FAILED)
    assert lines[-1].startswith("RuntimeError: Engine core initialization failed")
    assert not any("_moe_C" in line for line in lines)


def test_a_warning_about_an_import_does_not_fail_the_start() -> None:
    startup = Startup()
    startup.feed(FAILED[:1])
    assert startup.phase == "starting"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["usage: vllm serve", "vllm serve: error: unrecognized arguments: --f"], "error: unrecognized arguments: --f"),
        (["/usr/bin/python3: No module named vllm"], "No module named vllm"),
        (["Traceback (most recent call last):", "  x", "ImportError: libcudart.so.13"], "ImportError: libcudart.so.13"),
        (["OSError: [Errno 98] Address already in use"], "OSError: [Errno 98] Address already in use"),
        (["odd words"], "odd words"),
        ([], ""),
    ],
)  # fmt: skip
def test_what_ended_it_where_no_engine_said_so(lines: list[str], reason: str) -> None:
    startup = Startup()
    startup.feed(lines)
    assert startup.reason == reason


@given(st.lists(st.text(max_size=200), max_size=30))
def test_any_text_is_read(lines: list[str]) -> None:
    startup = Startup()
    startup.feed(lines)
    assert len(startup.reason) <= 300


def test_memory_is_bounded() -> None:
    startup = Startup()
    startup.feed("x" * 10_000 for _ in range(2_000))
    assert sum(map(len, startup.tail)) <= 400 * 4096
