"""Fixed texts of engine logs, in their old and new spellings."""

from __future__ import annotations

import pytest

from dsv4_repro.forensics.evidence.engine_log import EVENTS
from dsv4_repro.forensics.evidence.gather import read_text
from dsv4_repro.forensics.evidence.sections import heading_of

TEXTS = [
    ("shm-wait", "No available shared memory broadcast block found in 60 seconds. This typically happens when some processes "
                 "are hanging", {"seconds": "60"}),
    ("shm-wait", "No available shared memory broadcast block found in 60 second.", {"seconds": "60"}),
    ("shm-wait", "No available block found in 60 second.", {"seconds": "60"}),
    ("rpc-timeout", "TimeoutError: RPC call to sample_tokens timed out.", {"method": "sample_tokens"}),
    ("fatal", "EngineCore encountered a fatal error.", {}),
    ("engine-dead", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the "
                    "root cause.", {}),
    ("worker-died", "Worker proc VllmWorker-1 died unexpectedly, shutting down executor.", {"name": "VllmWorker-1"}),
    ("worker-died", "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", {"code": "-9"}),
    ("worker-died", "RayWorkerProc rank=[0] died unexpectedly, shutting down executor.", {"name": "rank=[0]"}),
    ("engine-proc-died", "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.", {"name": "EngineCore_DP0"}),
    ("load-progress", "Loading safetensors checkpoint shards:   6% Completed | 10/163 [04:11<1:03:55, "
                      "25.07s/it]", {"done": "10", "total": "163"}),
    ("load-done", "Loading weights took 41.32 seconds", {"seconds": "41.32"}),
    ("compile-start", "Dynamo bytecode transform time: 17.51 s", {"seconds": "17.51"}),
    ("compile-step", "Compiling a graph for compile range (1, 8000) takes 203.10 s", {}),
    ("compile-step", "Compiling a graph for dynamic shape takes 31.10 s", {}),
    ("compile-done", "torch.compile takes 220.61 s in total", {"seconds": "220.61"}),
    ("capture-progress", "Capturing CUDA graphs (decode, FULL):  34%|███▍      | 12/35 [00:10<00:20,  "
                         "1.1it/s]", {"done": "12", "total": "35"}),
    ("capture-done", "Graph capturing finished in 29 secs, took 1.44 GiB", {}),
    ("init-done", "init engine (profile, create kv cache, warmup model) took 269.80 seconds", {}),
    ("serving", "INFO:     Application startup complete.", {}),
    ("jit", "Triton kernel JIT compilation during inference: _moe_kernel. This causes a latency spike", {"backend": "Triton"}),
    ("jit", "CuTeDSL JIT compilation during inference: gemm (x).", {"backend": "CuTeDSL"}),
    ("build-failed", "ninja: build stopped: subcommand failed.", {}),
    ("build-failed", "nvcc error   : 'cicc' died due to signal 9 (Kill signal)", {}),
    ("abort", "Aborted request(s) cmpl-1,cmpl-2.", {}),
    ("http-499", '10.0.0.4 - - [16/Jan/2027] "POST /v1/completions HTTP/1.1" 499 0', {}),
    ("cuda-error", "torch.AcceleratorError: CUDA error: an illegal memory access was "
                   "encountered", {"text": "an illegal memory access was encountered"}),
    ("cuda-error", "CUDA_ERROR_MISALIGNED_ADDRESS", {"code": "CUDA_ERROR_MISALIGNED_ADDRESS"}),
    ("launch-refused", "total_ctas=93 > num_sms*occupancy=92", {"ctas": "93", "slots": "92"}),
    ("launch-refused", "CUDA error: too many blocks in cooperative launch", {}),
    ("nccl-warn", "h:1:2 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer", {}),
    ("grid-sync-timeout", 'Assertion failed: deep_gemm/comm/barrier.cuh:45, condition: false and "Grid sync timeout"', {}),
    ("deepep-timeout", "DeepEP dispatch NVL receiver timeout, channel: 3, rank: 1", {"channel": "3"}),
    ("exception", "ERROR 11-28 19:00:31 [core.py:1177] RuntimeError: something else", {"name": "RuntimeError"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "fields"), TEXTS)
@pytest.mark.parametrize(
    "prefix", ["", "(EngineCore_DP0 pid=44) INFO 11-28 09:13:52 [any_file.py:9999] ", "\x1b[0;36m(EngineCore_DP0 pid=44)\x1b[0;0m "]
)
def test_text_is_known(kind: str, text: str, fields: dict[str, str], prefix: str) -> None:
    found = [e for e in read_text("log", prefix + text).events if e.kind == kind]
    assert len(found) == 1
    assert {key: found[0].fields.get(key) for key in fields} == fields
    if prefix:
        assert (found[0].process, found[0].pid) == ("EngineCore_DP0", 44)


def test_every_kind_has_a_text_or_is_used_elsewhere() -> None:
    untested = set(EVENTS) - {kind for kind, _, _ in TEXTS}
    assert untested <= {
        "engine-failed-start", "actor-died", "unit-killed", "pod-oom", "pod-exit", "shutdown", "parent-exited", "startup-complete",
        "load-start",
        "jit-start", "jit-done", "lock-wait", "http-completion-ok", "http-completion-error", "http-health-ok", "http-health-bad",
        "coredump-exception", "kv-transfer", "preempt", "wrong-result", "fr-empty",
    }  # fmt: skip


def test_stats_lines_with_extra_fields() -> None:
    (line,) = read_text(
        "log",
        "Engine 001: Avg prompt throughput: 12.5 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 3 reqs, Waiting: 7 "
        "reqs, Deferred: 2 reqs, "
        "Preemptions: 4, GPU KV cache usage: 98.2%, Prefix cache hit rate: 1.0%, External prefix cache hit rate: 5.0%",
    ).stats
    assert (line.engine, line.prompt_rate, line.running, line.waiting, line.deferred, line.preemptions, line.kv) == (
        "001",
        12.5,
        3,
        7,
        2,
        4,
        98.2,
    )


def test_versions_and_settings() -> None:
    case = read_text(
        "log",
        "Initializing a V1 LLM engine (v0.26.1rc1.dev437+g466ab) with config: model='x', tensor_parallel_size=4, "
        "enforce_eager=False, "
        "compilation_config={'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>, 'cudagraph_capture_sizes': [1, 2, "
        "4, 8]}\n"
        "vLLM is using nccl==2.28.9\nflashinfer-python==0.6.14\n",
    )
    stated = {f.package: f.version for f in case.versions}
    assert stated["vllm"] == "0.26.1rc1.dev437+g466ab"
    assert stated["tensor_parallel_size"] == "4"
    assert stated["cudagraph_capture_sizes"] == "1, 2, 4, 8"
    assert stated["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert stated["nccl"] == "2.28.9"
    assert stated["flashinfer"] == "0.6.14"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("=== engine log ===", "engine log"),
        ("==== a b ====", "a b"),
        ("==> dmesg.txt <==", "dmesg.txt"),
        ("----- py-spy rank 0 -----", "py-spy rank 0"),
        ("=============", None),
        ("======", None),
        ("=== 5 ===", None),
        ("#0-0 (5c1e90d27b43aa08) MISMATCH", None),
        ("|---------|------|", None),
        ("a === b ===", None),
    ],
)
def test_headings(line: str, words: str | None) -> None:
    assert heading_of(line) == words


def test_sglang_batches_are_stats_lines() -> None:
    case = read_text(
        "log",
        "[2027-07-31 05:00:00 TP4] Decode batch. #running-req: 8, #token: 12345, token usage: 0.05, cuda graph: True, "
        "gen throughput (token/s): 120.50, #queue-req: 3\n"
        "[2027-07-31 05:00:01 TP4] Prefill batch. #new-seq: 1, #new-token: 512, #cached-token: 0, token usage: 0.06, "
        "#running-req: 8, #queue-req: 2\n"
        "[2027-07-31 05:05:01 TP4] Watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n",
    )
    decode, prefill = case.stats
    assert (decode.engine, decode.generation_rate, decode.running, decode.waiting, decode.kv) == ("TP4", 120.5, 8, 3, 5.0)
    assert prefill.prompt_rate > 0
    assert [e.kind for e in case.events if e.kind == "rpc-timeout"] == ["rpc-timeout"]


@pytest.mark.parametrize("mark", ["# ", "    # ", "// ", "\t/// ", "## "])
@pytest.mark.parametrize(
    "words", ["this silently produces incorrect results", "candidate buffer overflow in row 0", "histogram ring reuse"]
)
def test_a_comment_in_source_reports_nothing(mark: str, words: str) -> None:
    assert not read_text("util.py", f"def f():\n{mark}{words}\n    return 1\n").events
    assert read_text("log", f"selfcheck: {words}\n").events
