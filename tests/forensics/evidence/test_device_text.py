"""Debugger text about a GPU: excerpts of any form, and what code around a program counter means."""

from __future__ import annotations

import pytest

from dsv4_repro.forensics.evidence.device_text import family_of
from dsv4_repro.forensics.evidence.facts import DeviceKernel
from dsv4_repro.forensics.evidence.gather import read_text
from dsv4_repro.forensics.evidence.sass_meaning import CodeLine, find_loop, meaning_at

HEAD = "  Kernel Parent Dev Grid Status   SMs Mask GridDim BlockDim Invocation\n"


def kernel(text: str) -> DeviceKernel:
    (facts,) = read_text("gdb", text).devices
    assert facts.kernels is not None
    return facts.kernels[0]


def test_coalesced_ranges_run_over_the_dimensions() -> None:
    found = kernel(
        HEAD
        + "*      0      -   0    5 Active 0x0f (4,3,1) (128,1,1) k(...)\n  BlockIdx To BlockIdx Count   State\nKernel 0\n*  (2,"
        "0,0)    (1,1,0)     4 running\n"
    )
    assert found.blocks is not None
    assert [b.index for b in found.blocks] == [(2, 0, 0), (3, 0, 0), (0, 1, 0), (1, 1, 0)]
    assert (found.grid, found.block_dim, found.sms) == ((4, 3, 1), (128, 1, 1), 4)


def test_uncoalesced_blocks_and_old_headers() -> None:
    found = kernel(
        "  Kernel Parent Dev Grid Status   SMs Mask GridDim BlockDim Name Args\n*      0      -   1    5 Active 0x01 (4,1,1) "
        "(128,1,1) k a=1\n"
        "  BlockIdx   State Dev SM\nKernel 0\n*  (3,0,0) running   1  0\n"
    )
    assert found.blocks is not None
    assert [b.index for b in found.blocks] == [(3, 0, 0)]
    assert found.device == 1


def test_wrapped_names_are_joined() -> None:
    found = kernel(
        HEAD
        + "*      0      -   0    5 Active 0x0f (4,1,1) (128,1,1) vllm::persistent::kernel<512,\n                                "
        "            4>(params=...)\n"
    )
    assert found.name == "vllm::persistent::kernel<512, 4>(params=...)"


def test_several_kernels_keep_their_blocks() -> None:
    (facts,) = read_text(
        "gdb",
        HEAD
        + "*      0      -   0    5 Active 0x01 (4,1,1) (128,1,1) a(...)\n       1      -   0    6 Active 0x02 (2,1,1) (128,1,1) "
        "ncclDevKernel_AllReduce(x)\n"
        "  BlockIdx To BlockIdx Count   State\nKernel 0\n*  (0,0,0)    (0,0,0)     1 running\nKernel 1\n   (0,0,0)    (1,0,0)    "
        " 2 running\n",
    ).devices
    assert facts.kernels is not None
    assert [(k.family, len(k.blocks or ())) for k in facts.kernels] == [("compute", 1), ("nccl", 2)]


def test_only_a_focus_line_is_still_a_resident_kernel() -> None:
    found = kernel(
        "#0  0x7f in f<<<(16,1,1),(1024,1,1)>>> ()\n[Switching focus to CUDA kernel 0, grid 5, block (12,0,0), thread (0,0,0), "
        "device 0, sm 8, warp 0, lane 0]\n"
    )
    assert found.grid == (16, 1, 1)


@pytest.mark.parametrize(
    "text",
    [
        "No CUDA kernels.\nNo CUDA devices.\n",
        "ptrace: Operation not permitted.\n",
        "warning: process 1 is already traced by process 2\n",
    ],
)
def test_could_not_look_is_never_nothing_there(text: str) -> None:
    case = read_text("gdb", text)
    assert not case.devices
    assert case.failures


@pytest.mark.parametrize(
    "text",
    [
        "CUDA Exception: Cluster target block not present\n",
        'Thread 1 "python" received signal CUDA_EXCEPTION_14, Warp Illegal Address.\n',
        "[03:12:09] coredump: Detected an exception of type CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS (14)\n",
    ],
)
def test_exceptions(text: str) -> None:
    (facts,) = read_text("gdb", text).devices
    assert facts.exception


def code(*lines: str, at: int = 0x1000) -> dict[int, CodeLine]:
    return {at + 16 * i: CodeLine(at + 16 * i, 16 * i, line) for i, line in enumerate(lines)}


LOOPS = [
    (
        ("LDG.E.STRONG.GPU R4, desc[UR16][R6.64+0xc08]", "CCTL.IVALL", "ISETP.GE.AND P0, PT, R4, R9, PT", "@!P0 BRA 0x1000"),
        "R4", "R9", ">=", "gpu",
    ),
    (("LDG.E.STRONG.GPU R4, desc[UR16][R6.64]", "ISETP.LT.AND P2, PT, R4, R9, PT", "@P2 BRA 0x1000"), "R4", "R9", ">=", "gpu"),
    (("LDG.E.STRONG.GPU R4, desc[UR16][R6.64]", "ISETP.GT.U32.AND P2, PT, R9, R4, PT", "@P2 BRA 0x1000"), "R4", "R9", ">=", "gpu"),
    (("LD.E.STRONG.SYS R2, [R6.64]", "ISETP.NE.AND P1, PT, R2, RZ, PT", "@!P1 BRA 0x1000"), "R2", "RZ", "!=", "sys"),
    (
        ("ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR4][R2.64], RZ", "ISETP.EQ.AND P0, PT, R5, 0x10, PT", "@!P0 BRA 0x1000"),
        "R5", "0x10", "==", "gpu",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "loaded", "bound", "comparison", "scope"), LOOPS)
def test_poll_loops(lines: tuple[str, ...], loaded: str, bound: str, comparison: str, scope: str) -> None:
    loop = find_loop(code(*lines), 0x1010)
    assert loop is not None
    assert (loop.loaded, loop.bound, loop.comparison, loop.scope) == (loaded, bound, comparison, scope)
    assert meaning_at(code(*lines), 0x1010) == ("system-poll" if scope == "sys" else "global-poll")


def test_a_register_that_is_not_loaded_yet_is_no_value() -> None:
    lines = code("LDG.E.STRONG.GPU R4, desc[UR16][R4.64+0xc08]", "CCTL.IVALL", "ISETP.GE.AND P0, PT, R4, R9, PT", "@!P0 BRA 0x1000")
    before, after = find_loop(lines, 0x1000), find_loop(lines, 0x1010)
    assert before is not None
    assert after is not None
    assert before.values({"R4": 0x7F, "R9": 2}) == (None, 2)
    assert after.values({"R4": 1, "R9": 2}) == (1, 2)
    assert after.values({}) == (None, None)


@pytest.mark.parametrize(
    ("lines", "pc", "word"),
    [
        (("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ], R6", "@!P0 BRA 0x1000"), 0x1010, "phase-wait"),
        (("STS [R2], R3", "BAR.SYNC.DEFER_BLOCKING 0x0", "LDS R4, [R2]"), 0x1020, "named-barrier"),
        (("UCGABAR_ARV", "UCGABAR_WAIT", "EXIT"), 0x1010, "cluster-wait"),
        (("FADD R1, R2, R3", "FMUL R1, R1, R4"), 0x1000, "other"),
        (("LDS R4, [R2]", "ISETP.GE.AND P0, PT, R4, R9, PT", "@!P0 BRA 0x1000"), 0x1000, "other"),
        ((), 0x1000, "unknown"),
    ],
)
def test_meanings(lines: tuple[str, ...], pc: int, word: str) -> None:
    assert meaning_at(code(*lines), pc) == word


def test_families() -> None:
    assert family_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)") == "nccl"
    assert family_of("vllm::cross_device_reduce_1stage<half, 4>") == "crossrank"
    assert family_of("deep_ep::intranode::notify_dispatch") == "crossrank"
    assert family_of("vllm::persistent::persistent_topk_kernel<512, 4>") == "compute"
