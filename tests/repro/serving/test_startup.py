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


#: A start of vLLM 0.23.0 on an H200 (a tiny model, random weights), as recorded: paths and all but a few settings left out.
RECORDED = (
    ("(APIServer pid=886) INFO 11-29 21:33:47 [api_utils.py:339]   █▄█▀ █     █     █     █  model   /m", "starting"),
    ("(APIServer pid=886) INFO 11-29 21:33:47 [api_utils.py:273] non-default args: {'model_tag': '/m', 'load_format': 'dummy', "
     "'compilation_config': {'cudagraph_mode': <CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)>, 'cudagraph_num_of_warmups': 0}}",
     "starting"),
    ("(EngineCore pid=1757) INFO 11-29 21:34:04 [core.py:113] Initializing a V1 LLM engine (v0.23.0) with config: model='/m', "
     "compilation_config={'mode': <CompilationMode.NONE: 0>, 'cudagraph_num_of_warmups': 0, 'compile_ranges_endpoints': [2048]}",
     "starting"),
    ("(EngineCore pid=1757) INFO 11-29 21:34:04 [multiproc_executor.py:142] world_size=1, local_world_size=1", "starting"),
    ("(Worker pid=2565) INFO 11-29 21:34:23 [gpu_model_runner.py:5092] Starting to load model /m...", "load"),
    ("(Worker pid=2565) INFO 11-29 21:34:27 [gpu_model_runner.py:6412] Profiling CUDA graph memory: FULL=6 (largest=32)",
     "warm-up"),
    ("(Worker pid=2565) INFO 11-29 21:34:29 [gpu_model_runner.py:6517] Estimated CUDA graph memory: 2.59 GiB total", "warm-up"),
    ("(Worker pid=2565) INFO 11-29 21:34:29 [gpu_worker.py:480] Available KV cache memory: 22.57 GiB", "warm-up"),
    ("(Worker pid=2565) INFO 11-29 21:34:29 [gpu_worker.py:495] CUDA graph memory profiling is enabled (default since v0.21.0).",
     "warm-up"),
    ("(EngineCore pid=1757) INFO 11-29 21:34:29 [kv_cache_utils.py:1744] GPU KV cache size: 6,291,520 tokens", "warm-up"),
    ("Capturing CUDA graphs (decode, FULL):   0%|          | 0/6 [00:00<?, ?it/s]", "capture"),
    ("(Worker pid=2565) INFO 11-29 21:34:31 [jit_monitor.py:54] Kernel JIT monitor activated — Triton JIT compilations during "
     "inference will be logged as warnings", "capture"),
    ("(EngineCore pid=1757) INFO 11-29 21:34:31 [core.py:313] init engine (profile, create kv cache, warmup model) took 6.5 s",
     "capture"),
    ("(APIServer pid=886) INFO:     Application startup complete.", "serving"),
    ("(Worker pid=2565) WARNING 11-29 21:34:34 [jit_monitor.py:103] Triton kernel JIT compilation during inference: _k. This "
     "causes a latency spike; consider extending warmup to cover this shape/config.", "serving"),
)  # fmt: skip


def test_a_recorded_start_goes_forward() -> None:
    startup = Startup()
    for line, phase in RECORDED:
        startup.feed([line])
        assert startup.phase == phase, line


def test_a_late_rank_does_not_take_the_start_back_and_a_compile_after_capture_is_seen() -> None:
    startup = Startup()
    startup.feed(["Capturing CUDA graphs (decode, FULL):  50%|# | 3/6 [00:01<00:01]"])
    assert not startup.feed(["Loading safetensors checkpoint shards:  33% Completed | 1/3 [00:01<00:02,  1.0it/s]"])
    assert startup.feed(["INFO 11-29 12:00:00 [jit.py:1] JIT compiling a kernel"])
    seen = [startup.phase]
    assert startup.feed(["Capturing CUDA graphs (decode, FULL):  83%|# | 5/6 [00:01<00:01]"])
    assert [*seen, startup.phase] == ["jit", "capture"]


def test_a_server_that_fails_while_it_serves_is_failed() -> None:
    startup = Startup()
    startup.feed(["INFO:     Application startup complete."])
    startup.feed(FAILED[1:2])
    assert startup.phase == "failed"
