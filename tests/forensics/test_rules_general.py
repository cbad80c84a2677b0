"""Mistakes that files written without the rules found, each as a whole kind: another text than the one that found it."""

from __future__ import annotations

import pytest

from dsv4_repro.forensics.classify import Classification, classify
from dsv4_repro.forensics.evidence.gather import read_text

STATS = (
    "(APIServer pid=1) INFO 03-0{day} 10:0{minute}:{second:02d} [loggers.py:259] Engine 000: Avg prompt throughput: 0.0 tokens/s, "
    "Avg generation throughput: {rate} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: 3.0%, "
    "Prefix cache hit rate: 0.0%\n"
)
LOOP = """=> 0x7f0012003000 <barrier_kernel+4096>:\tLDG.E.STRONG.GPU R2, desc[UR4][R6.64]
   0x7f0012003010 <barrier_kernel+4112>:\tCCTL.IVALL
   0x7f0012003020 <barrier_kernel+4128>:\tISETP.GE.AND P0, PT, R2, R9, PT
   0x7f0012003030 <barrier_kernel+4144>:\t@!P0 BRA 0x7f0012003000
"""


def judge(text: str) -> Classification:
    return classify(read_text("case.txt", text))


def stats(minute: int, rate: float, running: int, waiting: int, second: int = 0) -> str:
    return STATS.format(day=1, minute=minute, second=second, rate=rate, running=running, waiting=waiting)


def transcript(blocks: tuple[int, ...], looks: tuple[tuple[int, int, int], ...], ctas: int = 2, grid: int = 4) -> str:
    """``looks``: (block, value, target) as the debugger prints them after a change of focus."""
    rows = "\n".join(f"  ({block},0,0) running   0  {block}" for block in blocks)
    registers = "".join(
        f"(cuda-gdb) cuda block ({block},0,0) thread (0,0,0)\n"
        f"[Switching focus to CUDA kernel 0, grid 5, block ({block},0,0), thread (0,0,0), device 0, sm {block}, warp 0, lane 0]\n"
        f"(cuda-gdb) info registers R2 R9\n"
        f"R2             {value:#x}                 {value}\nR9             {target:#x}                 {target}\n"
        for block, value, target in looks
    )
    return (
        "=== cuda-gdb ===\n  Kernel Parent Dev Grid Status   SMs Mask GridDim  BlockDim Invocation\n"
        f"*      0      -   0    5 Active 0x0000000f ({grid},1,1) (1024,1,1) barrier_kernel(...)\n"
        f"  BlockIdx State Dev SM\nKernel 0\n{rows}\n{LOOP}{registers}ctas_per_group = {ctas}\n"
    )


@pytest.mark.parametrize("number", [13, 31])
@pytest.mark.parametrize("stamp", ["[Mon Mar  1 03:00:00 2027]", "[ 8123.551200]"])
def test_an_xid_that_nothing_ties_to_an_incident_is_weak(number: int, stamp: str) -> None:
    detail = "Graphics SM Warp Exception on (GPC 1, TPC 4, SM 0): MMU Fault" if number == 13 else (
        "pid=880, name=VLLM::Worker_TP, channel 0x2, intr 0. MMU Fault: ENGINE GRAPHICS faulted @ 0x7a10_0. Fault is of type "
        "FAULT_PDE ACCESS_TYPE_VIRT_READ"
    )  # fmt: skip
    found = judge(f"=== dmesg ===\n{stamp} NVRM: Xid (PCI:0000:3b:00): {number}, {detail}\n")
    assert (found.class_, found.confidence) == ("gpu-fault", "low")


def test_registers_belong_to_the_block_in_focus_when_they_were_printed() -> None:
    """Block 3 was looked at first and waits for the second phase; block 2, looked at last, for the third: they diverged."""
    found = judge(transcript((2, 3), ((3, 3, 4), (2, 3, 6))))
    assert (found.class_, found.cause) == ("gpu-spin-barrier", "missing-fence")
    assert judge(transcript((2, 3), ((2, 3, 6), (3, 3, 4)))).cause == "missing-fence", "in either order"


def test_the_peer_that_left_is_told_from_the_block_that_waits() -> None:
    found = judge(transcript((0, 6), ((6, 1, 2),), grid=16))
    assert (found.class_, found.cause) == ("gpu-spin-barrier", "peer-left")


def test_an_initialisation_cannot_lose_arrivals_of_a_later_phase() -> None:
    first = judge(transcript((2, 3), ((2, 1, 2), (3, 1, 2))))
    assert (first.cause, first.confidence) == ("init-race", "medium")
    later = judge(transcript((2, 3), ((2, 3, 4), (3, 3, 4))))
    assert (later.cause, later.confidence) == ("stale-counter", "low")
    one_look = judge(transcript((2, 3), ((2, 3, 4),)))
    assert (one_look.class_, one_look.cause) == ("gpu-spin-barrier", None), "the other member may be in another phase"


def test_an_old_start_up_is_no_answer_about_an_engine_that_served_since() -> None:
    start = (
        "(EngineCore pid=7) INFO 03-01 09:50:00 [shm_broadcast.py:802] No available shared memory broadcast block found in 60 "
        "seconds.\n(APIServer pid=1) INFO:     Application startup complete.\n"
    )
    idle = judge(start + stats(0, 51.0, 2, 0) + stats(1, 0.0, 0, 0))
    assert (idle.class_, idle.cause) in (("not-hung", "idle"), ("unknown", None))
    refused = judge(start + stats(0, 51.0, 2, 0) + stats(1, 0.0, 0, 4) + stats(2, 0.0, 0, 4))
    assert refused.class_ == "scheduler-stall"
    fresh = judge(start)
    assert (fresh.class_, fresh.cause) == ("not-hung", "startup")


@pytest.mark.parametrize("notice", [
    "Request cmpl-1 is in state WAITING_FOR_REMOTE_KVS",
    "NIXL transfer failure for request cmpl-1",
    "Mooncake store: no response from 10.0.0.4, timed out",
])  # fmt: skip
def test_the_scheduler_is_not_blamed_while_kv_is_awaited(notice: str) -> None:
    log = stats(0, 0.0, 0, 5) + f"(EngineCore pid=8) WARNING 03-01 10:00:30 [connector.py:9] {notice}\n" + stats(3, 0.0, 0, 5)
    found = judge(log)
    assert found.class_ == "kv-transfer-stall" or found.confidence == "low", found.sentence


def test_an_empty_process_list_means_the_holder_is_gone() -> None:
    waiting = (
        'Process 41: VLLM::Worker_TP0\nPython v3.12.3 (/usr/bin/python3.12)\n\nThread 41 (idle): "MainThread"\n'
        "    acquire (filelock/_api.py:344)\n    build_and_load (flashinfer/jit/core.py:290)\n\n"
    )
    header = "    PID TTY          TIME CMD\n"
    dead = judge(f"=== py-spy ===\n{waiting}=== lock ===\n$ cat x.lock\n977\n$ ps -p 977\n{header}")
    assert (dead.class_, dead.cause) == ("host-jit-lock", "holder-dead")
    alive = judge(
        f"=== py-spy ===\n{waiting}=== lock ===\n$ cat x.lock\n977\n$ ps -p 977\n{header}    977 ?        00:00:10 python3\n"
    )
    assert alive.cause != "holder-dead"


def test_a_rank_at_its_request_broadcast_has_left_the_step() -> None:
    ranks = "".join(
        f"=== py-spy {rank} ===\nProcess {900 + rank}: sglang::scheduler_TP{rank}\nPython v3.12.3 (/usr/bin/python3.12)\n\n"
        f'Thread {900 + rank} (idle): "MainThread"\n{frames}\n'
        for rank, frames in enumerate((
            "    all_gather_into_tensor (torch/distributed/distributed_c10d.py:4021)\n"
            "    forward (sglang/srt/layers/logits_processor.py:5)\n",
            "    broadcast (torch/distributed/distributed_c10d.py:2701)\n    broadcast_pyobj (sglang/srt/utils/common.py:1210)\n"
            "    recv_requests (sglang/srt/managers/scheduler.py:1102)\n"
            "    event_loop_overlap (sglang/srt/managers/scheduler.py:905)\n",
        ))
    )  # fmt: skip
    found = judge(ranks)
    assert found.class_ == "collective-desync"


@pytest.mark.parametrize(("text", "cause"), [
    ("E   AssertionError: wrong indices in row 4\nE   histogram ring misaligned after a short row\n", "histogram-ring"),
    ("selfcheck: incorrect results in row 0\nselfcheck: candidate buffer overflow in row 0\n", "overflow"),
    ("persistent_topk: wrong rows: 6, 7 (padded, length 0)\n", "padding"),
    ("top-k: indices differ from the reference while ringing the doorbell string\n", None),
])  # fmt: skip
def test_wrong_results_in_other_words(text: str, cause: str | None) -> None:
    found = judge(text)
    assert (found.class_, found.cause) == ("wrong-result", cause)


def test_a_failed_test_alone_is_no_wrong_result() -> None:
    assert judge("FAILED tests/kernels/test_top_k_per_row.py::test_top_k - RuntimeError: CUDA out of memory\n").class_ == "unknown"


@pytest.mark.parametrize("late", [False, True])
def test_clients_that_went_while_others_are_served(late: bool) -> None:
    abort = "(APIServer pid=1) INFO 03-01 10:02:15 [async_llm.py:401] Request chatcmpl-1 aborted.\n"
    log = stats(2, 80.0, 3, 0) + stats(2, 80.0, 3, 0, 10) + (abort if late else abort + stats(2, 61.0, 2, 0, 20))
    found = judge(log)
    assert (found.class_, found.cause) == ("not-hung", "client-gone")
    assert found.confidence == ("medium" if late else "high"), "what came after the last abort was not seen"


def resident(rank: int, kernel: str = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL") -> str:
    return (
        f"=== cuda-gdb (rank {rank}) ===\n  Kernel Parent Dev Grid Status   SMs Mask GridDim  BlockDim Invocation\n"
        f"*      0      -   {rank}  700 Active 0x00000003 (2,1,1) (544,1,1) {kernel}(...)\n"
    )


def test_a_gap_in_the_ranks_is_a_rank_that_was_not_read() -> None:
    seen = judge(resident(0) + resident(1) + resident(2))
    assert (seen.class_, seen.confidence) == ("collective-stuck", "low"), "there may be a rank 3"
    gpus = "=== nvidia-smi csv ===\n" + "".join(
        f"2026/03/01 10:0{minute}:00.000, {rank}, P0, 100 %, 0 %, 1980 MHz, 130.00 W, 45\n"
        for minute in (0, 1)
        for rank in range(3)
    )
    every = judge(resident(0) + resident(1) + resident(2) + gpus)
    assert (every.class_, every.confidence) == ("collective-stuck", "medium"), "three GPUs, three ranks"
    gap = judge(resident(0) + resident(1) + resident(3))
    assert gap.confidence == "low", "rank 2 may be held by a kernel of its own"


@pytest.mark.parametrize(("idle", "cause"), [(True, "peer-behind"), (False, None)])
def test_a_peer_is_behind_only_if_its_gpu_is_seen_idle(idle: bool, cause: str | None) -> None:
    """Under asynchronous scheduling a worker's main thread is back at its queue while its GPU is still stuck."""
    poll = (
        "=> 0x7fab10008800 <cross_device_reduce_1stage+2048>:\tLDG.E.STRONG.SYS R4, desc[UR6][R2.64]\n"
        "   0x7fab10008810 <cross_device_reduce_1stage+2064>:\tISETP.NE.AND P0, PT, R4, R7, PT\n"
        "   0x7fab10008820 <cross_device_reduce_1stage+2080>:\t@P0 BRA 0x7fab10008800\n"
    )
    worker = (
        "=== py-spy rank 1 ===\nProcess 52: VLLM::Worker_TP1\nPython v3.12.3 (/usr/bin/python3.12)\n\n"
        'Thread 52 (idle): "MainThread"\n'
        "    dequeue (vllm/distributed/device_communicators/shm_broadcast.py:808)\n"
        "    worker_busy_loop (vllm/v1/executor/multiproc_executor.py:957)\n"
    )
    busy, power = (0, 80) if idle else (100, 140)
    gpus = "=== nvidia-smi csv ===\n" + "".join(
        f"2026/10/01 10:0{minute}:00.000, {rank}, P0, {use} %, 0 %, 1980 MHz, {watts}.00 W, 45\n"
        for minute in (0, 1)
        for rank, use, watts in ((0, 100, 140), (1, busy, power))
    )
    found = judge(resident(0, "vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>") + poll + worker + gpus)
    assert found.class_ in ("gpu-crossrank-spin", "gpu-kernel-stuck")
    assert found.cause == cause


def test_a_grid_sync_timeout_may_be_of_one_gpu() -> None:
    found = judge('Assertion failed: /x/deep_gemm/comm/barrier.cuh:45, condition: false and "Grid sync timeout"\n')
    assert (found.class_, found.confidence) == ("gpu-crossrank-spin", "low")


@pytest.mark.parametrize("stuck_engine", [0, 1])
def test_one_engine_of_several_with_its_gpu_full(stuck_engine: int) -> None:
    log = "".join(
        stats(2, 0.0 if engine == stuck_engine and second else 80.0, 3, 0, second).replace("Engine 000", f"Engine 00{engine}")
        for second in (0, 10, 20, 30)
        for engine in (0, 1)
    )
    gpus = "=== nvidia-smi csv ===\n" + "".join(
        f"2026/03/01 10:02:{second}.000, {engine}, P0, 100 %, {0 if engine == stuck_engine else 44} %, 1980 MHz, "
        f"{130 if engine == stuck_engine else 560}.00 W, 45\n"
        for second in (12, 32)
        for engine in (0, 1)
    )
    assert (judge(log + gpus).class_, judge(log + gpus).confidence) == ("gpu-kernel-stuck", "low")
    assert judge(log).class_ == "unknown"


@pytest.mark.parametrize("waits", [0, 1, 2])
@pytest.mark.parametrize("counter", ["vllm:generation_tokens_total", "vllm:iteration_tokens_total_count"])
def test_scrapes_of_unknown_time_do_not_outrank_a_log_that_ends_in_a_stand_still(waits: int, counter: str) -> None:
    """One scrape from before the wedge and one from within it differ; that is no recovery."""
    wait = "(EngineCore pid=2) INFO 03-01 10:0{}:30 [shm_broadcast.py:705] No available block found in 60 seconds.\n"
    log = stats(1, 23.4, 3, 0) + stats(2, 0.0, 3, 0) + "".join(wait.format(minute) for minute in range(3, 3 + waits))
    scrapes = "".join(
        f'=== metrics {number} ===\n{counter}{{engine="0"}} {value}.0\nvllm:num_requests_running{{engine="0"}} {running}.0\n'
        for number, value, running in ((1, 500, 0), (2, 719, 3))
    )
    found = judge(f"=== log ===\n{log}{scrapes}")
    assert found.class_ != "not-hung"
