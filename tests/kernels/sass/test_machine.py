"""The machine: divergence, barriers, memory, warps, calls, residency, verdicts, faults. Kernels are written here as rows of
SASS.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import pytest

from dsv4_repro.clock import Deadline, FakeClock
from dsv4_repro.errors import MachineFaultError, UnknownInstructionError, UsageError
from dsv4_repro.kernels.sass.machine import Machine
from dsv4_repro.kernels.sass.memory import Memory
from dsv4_repro.kernels.sass.program import Program

BASE = 0x210  # parameters of sm_90: one pointer in c[0x210], a word in c[0x218]
SCHEDULES: list[dict[str, Any]] = [{}, {"checks": True}, *({"schedule": "random", "seed": seed} for seed in range(3))]


def program(text: str, sm: int = 90, symbols: dict[str, int] | None = None) -> Program:
    """Rows from lines ``[@P0] OPCODE operands``; ``name:`` at the start of a line is a label that branches may use."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    labels: dict[str, str] = {}
    rows: list[list[str]] = []
    for line in lines:
        while ":" in line.split(" ")[0]:
            name, _, line = line.partition(":")
            labels[name.strip()] = hex(16 * len(rows))
            line = line.strip()
        guard = ""
        if line.startswith("@"):
            guard, _, line = line.partition(" ")
        opcode, _, operands = line.strip().partition(" ")
        rows.append([opcode, operands.replace(" ", ""), guard])
    for row in rows:
        parts = row[1].split(",")
        row[1] = ",".join(labels.get(part, part) for part in parts)
    return Program.from_rows("k", sm, [(a, b, c) for a, b, c in rows], symbols or {}, params_base=BASE, params_size=16)


def launch(
    text: str, words: int = 64, *, grid: int = 1, block: int | tuple[int, ...] = 64, argument: int = 0, fill: Any = None,
    smem: int = 1024, **options: Any,
) -> tuple[Machine, Any, np.ndarray[Any, Any]]:  # fmt: skip
    """Run; the kernel has the address of ``words`` words in c[0x0][0x210] and ``argument`` in c[0x0][0x218]."""
    memory = Memory()
    data = np.zeros(words, np.uint32) if fill is None else np.asarray(fill, np.uint32)
    address = memory.allocate("data", data)
    machine = Machine(program(text), sms=options.pop("sms", grid), slots_per_sm=options.pop("slots", 1), memory=memory,
                      **{k: options.pop(k) for k in ("checks", "schedule", "seed") if k in options})  # fmt: skip
    result = machine.launch(grid, block, struct.pack("<QII", address, argument, 0), smem, **options)
    return machine, result, memory.array(address, words, np.uint32).astype(np.int64)


#: R0 thread, R2:R3 the address of data[thread].
HEAD = """
    S2R R0, SR_TID.X
    LDC.64 R2, c[0x0][0x210]
    IMAD.WIDE.U32 R2, R0, 0x4, R2
"""
TAIL = """
    STG.E desc[UR4][R2.64], R5
    EXIT
"""


@pytest.mark.parametrize("options", SCHEDULES)
def test_divergence_and_reconvergence(options: dict[str, Any]) -> None:
    """Each thread loops thread % 5 times, odd threads add 100; after BSYNC the whole warp votes together."""
    _, result, data = launch(HEAD + """
        IMAD.HI.U32 R6, R0, 0x33333334, RZ
        IMAD R6, R6, -0x5, R0
        MOV R5, RZ
        MOV R7, RZ
        BSSY B0, join
    loop: ISETP.GE.AND P0, PT, R7, R6, PT
        @P0 BRA out
        IADD3 R5, R5, 0x7, RZ
        IADD3 R7, R7, 0x1, RZ
        BRA loop
    out: LOP3.LUT P1, RZ, R0, 0x1, RZ, 0xc0, !PT
        @!P1 BRA join
        IADD3 R5, R5, 0x64, RZ
    join: BSYNC B0
        VOTE.ANY R8, PT, PT
        POPC R8, R8
        IMAD R5, R8, 0x3e8, R5
    """ + TAIL, **options)  # fmt: skip
    assert result.completed
    assert data.tolist() == [32000 + 7 * (t % 5) + 100 * (t & 1) for t in range(64)]


@pytest.mark.parametrize("options", SCHEDULES)
def test_nested_convergence_barriers(options: dict[str, Any]) -> None:
    _, result, data = launch(HEAD + """
        MOV R5, RZ
        LOP3.LUT P0, RZ, R0, 0x1, RZ, 0xc0, !PT
        LOP3.LUT P1, RZ, R0, 0x2, RZ, 0xc0, !PT
        BSSY B0, outer
        @!P0 BRA outer
        BSSY B1, inner
        @!P1 BRA inner
        IADD3 R5, R5, 0x1, RZ
    inner: BSYNC B1
        VOTE.ANY R6, PT, PT
        POPC R6, R6
        IADD3 R5, R5, R6, RZ
    outer: BSYNC B0
        VOTE.ANY R6, PT, PT
        POPC R6, R6
        IMAD R5, R6, 0x64, R5
    """ + TAIL, **options)  # fmt: skip
    assert result.completed
    assert data.tolist() == [3200 + (16 + (t >> 1 & 1) if t & 1 else 0) for t in range(64)]


@pytest.mark.parametrize("options", SCHEDULES)
def test_cta_barrier_and_shared_memory(options: dict[str, Any]) -> None:
    """Reverse through shared memory: every thread reads what another wrote before the barrier; two CTAs, apart."""
    text = (
        HEAD
        + """
        S2R R9, SR_CTAID.X
        IMAD R10, R9, 0x100, RZ
        IADD3 R10, R10, R0, RZ
        LEA R4, R0, 0x400, 0x2
        STS [R4], R10
        BAR.SYNC.DEFER_BLOCKING 0x0
        IADD3 R6, -R0, 0x5f, RZ
        LEA R6, R6, 0x400, 0x2
        LDS R5, [R6]
        IMAD R9, R9, 0x180, RZ
        IADD3 R2, P0, PT, R2, R9, RZ
        IADD3.X R3, PT, PT, R3, RZ, RZ, P0, !PT
    """
        + TAIL
    )
    _, result, data = launch(text, 192, grid=2, block=96, **options)
    assert result.completed
    assert data.tolist() == [95 - t for t in range(96)] + [0x100 + 95 - t for t in range(96)]


@pytest.mark.parametrize("options", SCHEDULES)
def test_atomics_give_every_thread_its_own_number(options: dict[str, Any]) -> None:
    _, result, data = launch(HEAD + """
        LDC.64 R6, c[0x0][0x210]
        MOV R8, 0x1
        ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR4][R6.64+0x200], R8
        MOV R9, 0x400
        @P0 NOP
        STS [R9], RZ
        BAR.SYNC.DEFER_BLOCKING 0x0
        ATOMS.POPC.INC.32 RZ, [R9]
        BAR.SYNC.DEFER_BLOCKING 0x0
        LDS R10, [R9]
        IMAD R5, R10, 0x3e8, R5
    """ + TAIL, 160, block=128, **options)  # fmt: skip
    assert result.completed
    assert data[128] == 128
    assert sorted(int(v) % 1000 for v in data[:128]) == list(range(128))
    assert {int(v) // 1000 for v in data[:128]} == {128}


@pytest.mark.parametrize("operation", ["MIN.S32", "MAX", "AND", "OR", "XOR", "EXCH", "CAS"])
def test_other_atomics(operation: str) -> None:
    name, _, kind = operation.partition(".")
    opcode = f"ATOMS.{name}" + (f".{kind}" if kind else "")
    values = "R0, R8" if name == "CAS" else "R8"
    _, result, data = launch(HEAD + f"""
        IADD3 R8, R0, -0x3, RZ
        MOV R9, 0x400
        STS [R9], RZ
        BAR.SYNC.DEFER_BLOCKING 0x0
        {opcode} R5, [R9], {values}
        BAR.SYNC.DEFER_BLOCKING 0x0
        LDS R5, [R9]
    """ + TAIL, block=32, words=32)  # fmt: skip
    assert result.completed
    values_ = [(t - 3) & 0xFFFFFFFF for t in range(32)]
    folded = 0
    for value in values_:
        folded = {"MIN": min(folded, value, key=lambda v: v - (v >> 31 << 32)), "MAX": max(folded, value), "AND": folded & value,
                  "OR": folded | value, "XOR": folded ^ value, "EXCH": value, "CAS": folded}[name]  # fmt: skip
    if name == "CAS":  # thread 0 finds the 0 it expects and leaves -3; nobody after it finds its own number
        folded = 0xFFFFFFFD
    assert set(data.tolist()) == {folded}


def test_atomics_with_many_addresses_keep_order() -> None:
    """Old values of colliding lanes are the running sums of the lanes below."""
    _, result, data = launch(HEAD + """
        LOP3.LUT R6, R0, 0x7, RZ, 0xc0, !PT
        LEA R6, R6, 0x400, 0x2
        STS [R6], RZ
        BAR.SYNC.DEFER_BLOCKING 0x0
        ATOMS.ADD R5, [R6], R0
    """ + TAIL, block=64)  # fmt: skip
    assert result.completed
    assert data.tolist() == [sum(range(t & 7, t, 8)) for t in range(64)]


SHUFFLES = {
    "IDX R5, R7, R8, 0x1f": lambda t: 31 - t % 32, "UP R5, R7, 0x3, RZ": lambda t: t % 32 - 3 if t % 32 >= 3 else t % 32,
    "DOWN R5, R7, 0x10, 0x1f": lambda t: t % 32 + 16 if t % 32 < 16 else t % 32, "BFLY R5, R7, 0x5, 0x1f": lambda t: t % 32 ^ 5,
    "DOWN R5, R7, 0x2, 0x181f": lambda t: t % 32 + 2 if t % 8 < 6 else t % 32,
}  # fmt: skip


@pytest.mark.parametrize("name", SHUFFLES)
def test_shuffles(name: str) -> None:
    kind, _, operands = name.partition(" ")
    _, result, data = launch(HEAD + f"""
        IADD3 R7, R0, 0x3e8, RZ
        LOP3.LUT R8, R0, 0x1f, RZ, 0x3c, !PT
        SHFL.{kind} P0, {operands}
        SEL R6, R5, RZ, P0
        IADD3 R5, R5, -0x3e8, RZ
    """ + TAIL)  # fmt: skip
    assert result.completed
    assert [int(v) for v in data] == [SHUFFLES[name](t) + t // 32 * 32 for t in range(64)]


def test_warp_operations_of_some_lanes() -> None:
    """Votes, sums and shuffles count only the lanes that are there; an absent source lane gives a value that shows."""
    _, result, data = launch(HEAD + """
        LOP3.LUT P0, RZ, R0, 0x3, RZ, 0xc0, !PT
        MOV R5, RZ
        BSSY B0, join
        @P0 BRA join
        VOTE.ANY R6, P1, PT
        REDUX.SUM UR6, R0
        SHFL.IDX PT, R8, R0, 0x4, 0x1f
        SHFL.IDX PT, R9, R0, 0x5, 0x1f
        ISETP.NE.AND P2, PT, R9, 0xdead5f1, PT
        SEL R9, RZ, 0x1, P2
        POPC R6, R6
        IMAD R5, R6, 0x2710, UR6
        IMAD R5, R9, 0x186a0, R5
        IMAD R5, R8, 0xf4240, R5
    join: BSYNC B0
    """ + TAIL)  # fmt: skip
    assert result.completed
    for t in range(64):
        warp = range(t // 32 * 32, t // 32 * 32 + 32)
        members = [m for m in warp if m % 4 == 0]
        want = 0 if t % 4 else (len(members) * 10000 + sum(members) + 100000 + (warp[0] + 4) * 1000000)
        assert data[t] == want & 0xFFFFFFFF


def test_calls_return_to_their_callers() -> None:
    """Odd threads call from one place, even ones from another; RET goes where a register says."""
    text = (
        HEAD
        + """
        LOP3.LUT P0, RZ, R0, 0x1, RZ, 0xc0, !PT
        MOV R5, R0
        @P0 BRA odd
        MOV R8, back1
        CALL.REL.NOINC sub
    back1: IADD3 R5, R5, 0x3e8, RZ
        BRA end
    odd: MOV R8, back2
        CALL.REL.NOINC sub
    back2: IADD3 R5, R5, 0x7d0, RZ
    end: STG.E desc[UR4][R2.64], R5
        EXIT
    sub: IMAD R5, R5, 0x2, RZ
        RET.REL.NODEC R8, k
    """
    )
    _, result, data = launch(text)
    assert result.completed
    assert data.tolist() == [2 * t + (2000 if t & 1 else 1000) for t in range(64)]


def test_local_memory_is_each_threads_own() -> None:
    _, result, data = launch(HEAD + """
        LDC R1, c[0x0][0x28]
        IADD3 R1, R1, -0x20, RZ
        STL.64 [R1+0x8], R0
        LOP3.LUT R6, R0, 0x1, RZ, 0xc0, !PT
        LEA R6, R6, R1, 0x2
        IADD3 R7, R0, 0x64, RZ
        STL [R6+0x10], R7
        LDL R5, [R1+0x8]
        LDL.LU R8, [R6+0x10]
        LDL.U16 R9, [R6+0x10]
        IADD3 R5, R5, R8, R9
    """ + TAIL)  # fmt: skip
    assert result.completed
    assert data.tolist() == [3 * t + 200 for t in range(64)]


def test_generic_addresses_reach_shared_and_global() -> None:
    _, result, data = launch(HEAD + """
        S2UR UR5, SR_SWINHI
        LEA R6, R0, 0x400, 0x2
        MOV R7, UR5
        IADD3 R8, R0, 0x5, RZ
        ST.E desc[UR4][R6.64], R8
        LDS R9, [R6]
        LD.E R5, desc[UR4][R6.64]
        IADD3 R5, R5, R9, RZ
        ST.E desc[UR4][R2.64], R5
        EXIT
    """)  # fmt: skip
    assert result.completed
    assert data.tolist() == [2 * t + 10 for t in range(64)]


def test_parts_of_words() -> None:
    _, result, data = launch(HEAD + """
        MOV R5, 0x81828384
        STS [0x400], R5
        LDS.U8 R6, [0x401]
        LDS.S8 R7, [0x403]
        LDS.U16 R8, [0x402]
        STS.U8 [0x400], R0
        STG.E.U8 desc[UR4][R2.64+0x1], R6
        LDG.E.U8 R9, desc[UR4][R2.64+0x1]
        IADD3 R5, R6, R7, R8
        IADD3 R5, R5, R9, RZ
    """ + TAIL, block=32)  # fmt: skip
    assert result.completed
    assert set(data.tolist()[:32]) == {(0x83 + 0xFFFFFF81 + 0x8182 + 0x83) & 0xFFFFFFFF}


def test_vectors_of_words() -> None:
    _, result, data = launch(HEAD + """
        LDC.64 R2, c[0x0][0x210]
        IMAD.WIDE.U32 R2, R0, 0x10, R2
        LDG.E.128 R4, desc[UR4][R2.64]
        IADD3 R4, R4, R7, RZ
        LEA R10, R0, 0x400, 0x4
        STS.128 [R10], R4
        LDS.64 R12, [R10+0x8]
        STG.E.64 desc[UR4][R2.64+0x8], R4
        STG.E.64 desc[UR4][R2.64], R12
        EXIT
    """, 64, block=16, fill=np.arange(64))  # fmt: skip
    assert result.completed
    assert data.reshape(16, 4)[3].tolist() == [14, 15, 27, 13]


@pytest.mark.parametrize("options", SCHEDULES)
@pytest.mark.parametrize("block", [1, 31, 33, 64, 100])
def test_threads_that_leave_early_do_not_hold_barriers(block: int, options: dict[str, Any]) -> None:
    _, result, data = launch(HEAD + """
        ISETP.EQ.AND P0, PT, R0, 0x3, PT
        @P0 EXIT
        BAR.SYNC.DEFER_BLOCKING 0x0
        WARPSYNC.ALL
        MOV R5, 0x1
    """ + TAIL, 128, block=block, **options)  # fmt: skip
    assert result.completed
    assert data.tolist() == [int(t < block and t != 3) for t in range(128)]


def test_thread_coordinates() -> None:
    text = """
        S2R R4, SR_TID.X
        S2R R5, SR_TID.Y
        S2R R6, SR_TID.Z
        S2R R7, SR_CTAID.X
        S2R R8, SR_CTAID.Y
        LDC R9, c[0x0][0x0]
        LDC R10, c[0x0][0x10]
        IMAD R11, R6, 0x3, R5
        IMAD R11, R11, R9, R4
        IMAD R12, R8, 0x2, R7
        IMAD R12, R12, 0x18, R11
        IMAD R13, R10, 0x64, R12
        LDC.64 R2, c[0x0][0x210]
        IMAD.WIDE.U32 R2, R12, 0x4, R2
        STG.E desc[UR4][R2.64], R13
        EXIT
    """
    memory = Memory()
    address = memory.allocate("data", np.zeros(144, np.uint32))
    machine = Machine(program(text), sms=6, memory=memory, checks=True)
    result = machine.launch((2, 3), (4, 3, 2), struct.pack("<QQ", address, 0))
    assert result.completed
    assert memory.array(address, 144, np.uint32).tolist() == [300 + k for k in range(144)]


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_barrier_counts_arrivals_at_any_instruction(options: dict[str, Any]) -> None:
    """Two warps meet at barrier 0 from different places; two others at barrier 2, which counts 64 threads."""
    _, result, data = launch(HEAD + """
        MOV R6, 0x40
        STS [R0.X4+0x400], R0
        ISETP.GT.U32.AND P0, PT, R0, 0x3f, PT
        ISETP.GT.U32.AND P1, PT, R0, 0x1f, PT
        @P0 BRA named
        @P1 BRA other
        BAR.SYNC.DEFER_BLOCKING 0x1, 0x40
        BRA end
    other: BAR.SYNC.DEFER_BLOCKING 0x1, R6
        BRA end
    named: BAR.SYNC.DEFER_BLOCKING 0x2, 0x40
    end: LOP3.LUT R7, R0, 0x20, RZ, 0x3c, !PT
        LDS R5, [R7.X4+0x400]
        BAR.SYNC.DEFER_BLOCKING 0x0
    """ + TAIL, 128, block=128, **options)  # fmt: skip
    assert result.completed
    assert data.tolist() == [t ^ 32 for t in range(128)]


def test_a_named_barrier_that_waits_for_threads_which_left() -> None:
    _, result, _ = launch(HEAD + """
        ISETP.GT.U32.AND P0, PT, R0, 0x1f, PT
        @P0 EXIT
        BAR.SYNC.DEFER_BLOCKING 0x1, 0x40
        EXIT
    """)  # fmt: skip
    assert (result.kind, result.spin) == ("deadlock", False)
    assert [(s.pc, len(s.threads)) for s in result.stuck] == [(0x50, 32)]


# ---- residency and verdicts ----------------------------------------------------------------------------------------------------

#: CTA 0 waits until CTA 1 has set a flag. c[0x218] says how often CTA 1 writes (0: never).
FLAG = """
    S2R R0, SR_TID.X
    S2R R9, SR_CTAID.X
    LDC.64 R2, c[0x0][0x210]
    ISETP.NE.AND P0, PT, R9, RZ, PT
    @P0 BRA setter
    ISETP.NE.AND P1, PT, R0, RZ, PT
    @P1 BRA meet
poll: LDG.E.STRONG.GPU R4, desc[UR4][R2.64]
    CCTL.IVALL
    ISETP.GE.AND P2, PT, R4, 0x1, PT
    @!P2 BRA poll
meet: BAR.SYNC.DEFER_BLOCKING 0x0
    EXIT
setter: LDC R6, c[0x0][0x218]
    ISETP.EQ.AND P0, PT, R6, RZ, PT
    @P0 EXIT
    MOV R7, 0x1
    REDG.E.ADD.S32.STRONG.GPU desc[UR4][R2.64], R7
    EXIT
"""


@pytest.mark.parametrize("options", SCHEDULES)
def test_waiting_for_another_cta_ends(options: dict[str, Any]) -> None:
    _, result, data = launch(FLAG, grid=2, argument=1, **options)
    assert result.completed
    assert data[0] == 64
    assert result.exited == (0, 1)


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_flag_that_nobody_sets_is_a_proven_deadlock(options: dict[str, Any]) -> None:
    machine, result, _ = launch(FLAG, grid=2, argument=0, **options)
    assert (result.kind, result.spin) == ("deadlock", True)
    assert result.exited == (1,)
    assert [(s.block, s.pc, s.state, len(s.threads)) for s in result.stuck] == [(0, 0x70, "polling", 1), (0, 0xB0, "waiting", 63)]
    assert [(r.block, r.sm, r.slot) for r in result.resident] == [(0, 0, 0)]
    snapshot = machine.snapshot(0)
    assert snapshot.pc.tolist() == [0x70] + [0xB0] * 63
    assert snapshot.registers[0, 4] == 0
    assert snapshot.registers[:, 0].tolist() == list(range(64))
    assert int(snapshot.registers[5, 2]) | int(snapshot.registers[5, 3]) << 32 == machine.memory.allocations[0].address
    assert [int(p) & 2 for p in snapshot.predicates] == [0] + [2] * 63
    # The same write that a debugger makes lets it go.
    machine.poke(machine.memory.allocations[0].address, 0x3FFFFFFF)
    after = machine.resume()
    assert after.completed
    assert after.exited == (0, 1)
    with pytest.raises(UsageError, match="nothing to resume"):
        machine.resume()


def test_a_cta_without_a_slot_is_reported_as_never_started() -> None:
    machine, result, _ = launch(FLAG, grid=2, argument=1, sms=1, slots=1)
    assert (result.kind, result.never_started, result.exited) == ("deadlock", (1,), ())
    machine.poke(machine.memory.allocations[0].address, 1)
    after = machine.resume()
    assert after.completed
    assert after.exited == (0, 1)
    _, result, _ = launch(FLAG, grid=2, argument=1, sms=1, slots=2)
    assert result.completed


def test_slots_are_handed_on() -> None:
    """Seven CTAs on 2 x 1 slots: each adds its number; late ones take the slots of those that left."""
    _, result, data = launch("""
        S2R R0, SR_TID.X
        S2R R9, SR_CTAID.X
        LDC.64 R2, c[0x0][0x210]
        ISETP.NE.AND P0, PT, R0, RZ, PT
        LEA R4, R0, 0x400, 0x2
        STS [R4], R9
        BAR.SYNC.DEFER_BLOCKING 0x0
        LDS R5, [0x47c]
        @P0 EXIT
        IMAD.WIDE.U32 R2, R9, 0x4, R2
        STG.E desc[UR4][R2.64], R5
        EXIT
    """, 8, grid=7, block=32, sms=2, slots=1)  # fmt: skip
    assert result.completed
    assert data.tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert result.exited == tuple(range(7))


def test_barriers_alone_can_deadlock() -> None:
    """Half a warp waits for the other half, which waits for it at the CTA barrier."""
    _, result, _ = launch("""
        S2R R0, SR_LANEID
        ISETP.GT.AND P0, PT, R0, 0xf, PT
        @P0 BRA other
        WARPSYNC.ALL
        EXIT
    other: BAR.SYNC.DEFER_BLOCKING 0x0
        EXIT
    """)  # fmt: skip
    assert (result.kind, result.spin) == ("deadlock", False)
    assert {(s.pc, s.state, len(s.threads)) for s in result.stuck} == {(0x30, "waiting", 32), (0x50, "waiting", 32)}


def test_a_wait_that_counts_its_polls_is_no_deadlock() -> None:
    """Bounded spin: gives up after c[0x218] polls."""
    _, result, data = launch("""
        LDC.64 R2, c[0x0][0x210]
        LDC R6, c[0x0][0x218]
    poll: LDG.E.STRONG.GPU R4, desc[UR4][R2.64]
        IADD3 R6, R6, -0x1, RZ
        ISETP.EQ.AND P1, PT, R6, RZ, PT
        ISETP.EQ.AND P0, PT, R4, RZ, !P1
        @P0 BRA poll
        MOV R5, 0x7
        STG.E desc[UR4][R2.64+0x4], R5
        EXIT
    """, block=32, argument=700)  # fmt: skip
    assert result.completed
    assert data[1] == 7
    assert result.rounds == 699


@pytest.mark.parametrize(
    "loop",
    ["here: BRA here", "here: IADD3 R4, R4, 0x1, RZ; LOP3.LUT R4, R4, 0xff, RZ, 0xc0, !PT; BRA here",
     "MOV R6, 0x400; here: LDS R4, [R6]; ISETP.NE.AND P0, PT, R4, -0x7, PT; @P0 BRA here"],
)  # fmt: skip
def test_an_endless_loop_is_a_livelock(loop: str) -> None:
    start = ["LDC.64 R2, c[0x0][0x210]", "MOV R4, RZ", "STS [0x400], R4"]
    _, result, _ = launch("\n".join([*start, *loop.split("; "), "EXIT"]), block=32)
    assert result.kind == "livelock"
    assert "recurs" in result.proof
    assert result.stuck


def test_polls_that_write_are_never_called_a_deadlock() -> None:
    """Two CTAs pass a counter back and forth for ever: it grows, so no state recurs and only the budget ends it."""
    _, result, _ = launch("""
        LDC.64 R2, c[0x0][0x210]
        MOV R7, 0x1
    poll: ATOMG.E.ADD.STRONG.GPU PT, R4, desc[UR4][R2.64], R7
        ISETP.NE.AND P0, PT, R4, -0x1, PT
        @P0 BRA poll
        EXIT
    """, grid=2, block=32, budget=20000)  # fmt: skip
    assert result.kind == "budget"
    assert "20000" in result.proof


def test_a_failing_compare_and_swap_is_a_read() -> None:
    """A lock that nobody releases: polls by CAS write nothing, so the deadlock is proven."""
    _, result, _ = launch("""
        LDC.64 R2, c[0x0][0x210]
        MOV R6, RZ
        MOV R7, 0x1
    poll: ATOMG.E.CAS.STRONG.GPU PT, R4, desc[UR4][R2.64], R6, R7
        ISETP.NE.AND P0, PT, R4, RZ, PT
        @P0 BRA poll
        EXIT
    """, 2, block=32, fill=[5, 0])  # fmt: skip
    assert (result.kind, result.spin) == ("deadlock", True)


def test_budget_and_deadline_end_a_run() -> None:
    text = """
        MOV R4, RZ
    here: IADD3 R4, R4, 0x1, RZ
        BRA here
    """
    clock = FakeClock()
    machine, result, _ = launch(text, block=32, budget=5000)
    assert result.kind == "budget"
    assert 5000 <= result.warp_instructions < 5100
    again = machine.resume(budget=1000)
    assert again.kind == "budget"
    assert again.warp_instructions > result.warp_instructions
    deadline = Deadline(5.0, clock)
    timer = threading.Timer(0.2, lambda: clock.advance(6.0))
    timer.start()
    _, result, _ = launch(text, block=32, deadline=deadline)
    timer.join()
    assert result.kind == "budget"
    assert "5 s" in result.proof


def test_runs_repeat() -> None:
    chosen: tuple[dict[str, Any], ...] = ({}, {"schedule": "random", "seed": 5})
    for options in chosen:
        runs = [launch(FLAG, grid=2, argument=1, **options)[1] for _ in range(2)]
        assert runs[0] == runs[1]


def test_one_machine_runs_many_launches() -> None:
    memory = Memory()
    address = memory.allocate("data", np.zeros(64, np.uint32))
    machine = Machine(program(HEAD + "LDG.E R5, desc[UR4][R2.64]\n IADD3 R5, R5, R0, RZ\n" + TAIL), memory=memory)
    for _ in range(3):
        assert machine.launch(1, 64, struct.pack("<QQ", address, 0)).completed
    assert memory.array(address, 64, np.uint32).tolist() == [3 * t for t in range(64)]


# ---- faults ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind", "space", "thread"),
    [
        ("LDG.E R5, desc[UR4][R2.64+0x40]", "out-of-bounds", "global", 48),
        ("STG.E desc[UR4][R2.64+-0x4], R0", "out-of-bounds", "global", 0),
        ("LDG.E R5, desc[UR4][R2.64+0x2]", "misaligned", "global", 0),
        ("LDG.E.64 R4, desc[UR4][R2.64]", "misaligned", "global", 1),
        ("LDS R5, [R0.X4+0x400]", "uninitialised", "shared", 0),
        ("STS [R0.X16+0x700], R0", "out-of-bounds", "shared", 16),
        ("STS [R0.X4+0x300], R0", "out-of-bounds", "shared", 0),
        ("STL [R0.X16+0x200], R0", "out-of-bounds", "local", 32),
        ("MOV R7, 0x55\n LDG.E R5, desc[UR4][R6.64]", "out-of-bounds", "global", 0),
        ("RED.E.ADD.STRONG.GPU desc[UR4][R2.64+0x80], R0", "out-of-bounds", "global", 32),
    ],
)  # fmt: skip
def test_the_checker_names_thread_instruction_and_address(body: str, kind: str, space: str, thread: int) -> None:
    _, result, _ = launch(HEAD + "MOV R6, RZ\n" + body + "\nEXIT", checks=True)
    assert result.kind == "fault"
    fault = result.fault
    assert fault is not None
    assert (fault.kind, fault.space, fault.thread, fault.block) == (kind, space, thread, 0)
    instruction = body.split("\n")[-1].strip()
    for part in (kind, space, f"thread {thread} of CTA 0", f"{fault.address:#x}", instruction.split(" ")[0], f"+{fault.offset:#x}"):
        assert part in fault.message


@pytest.mark.parametrize("checks", [False, True])
def test_a_reload_of_a_slot_that_was_never_spilled_is_a_note(checks: bool) -> None:
    """Compilers emit it where the value is not used; once an instruction, with the thread, and the launch goes on."""
    body = "LDL R5, [R0.X4]\n LDL R6, [R0.X4+0x40]\n LDL R5, [R0.X4]\n IADD3 R5, R0, 0x1, RZ\n"
    _, result, words = launch(HEAD + body + TAIL, checks=checks)
    assert result.kind == "completed"
    assert words.tolist() == list(range(1, 65))
    assert len(result.notes) == (4 if checks else 1)
    for note in result.notes[1:]:
        assert "uninitialised local load of 4 bytes" in note
        assert "by thread 0 of CTA 0: +0x" in note


def test_the_checker_keeps_ctas_apart() -> None:
    """CTA 0 runs past its shared block: into its neighbour's in this machine's arena, so bounds are per CTA."""
    body = "S2R R9, SR_CTAID.X\n ISETP.NE.AND P0, PT, R9, RZ, PT\n @!P0 STS [R0.X4+0x800], R0\n EXIT"
    _, result, _ = launch(HEAD + body, grid=2, checks=True)
    assert result.fault is not None
    assert (result.fault.kind, result.fault.space, result.fault.block) == ("out-of-bounds", "shared", 0)


def test_uninitialised_global_memory_is_seen() -> None:
    memory = Memory()
    address = memory.allocate("fresh", 256)
    machine = Machine(program(HEAD + "LDG.E R5, desc[UR4][R2.64]\n EXIT"), memory=memory, checks=True)
    result = machine.launch(1, 64, struct.pack("<QQ", address, 0))
    assert result.fault is not None
    assert result.fault.kind == "uninitialised"
    assert "fresh+0x0" in result.fault.message


def test_an_address_outside_the_arena_is_a_fault_without_checks_too() -> None:
    _, result, _ = launch(HEAD + "MOV R2, 0xfffffff0\n LDG.E R5, desc[UR4][R2.64]\n EXIT")
    assert result.kind == "fault"
    assert result.fault is not None
    assert "run with checks" in result.fault.message


def test_guard_words_show_an_overrun_afterwards() -> None:
    machine, result, _ = launch(HEAD + "STG.E desc[UR4][R2.64+0x10], R0\n EXIT", checks=False)
    assert result.completed
    assert not machine.memory.intact()


# ---- launches and instructions that cannot be ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [(1, 1025, b"\0" * 16), (1, 0, b"\0" * 16), (0, 32, b"\0" * 16), (1, 32, b"\0" * 12), (1 << 32, 32, b"\0" * 16),
     ((1, 2, 3, 4), 32, b"\0" * 16)],
)  # fmt: skip
def test_impossible_launches(arguments: tuple[Any, Any, bytes]) -> None:
    machine = Machine(program("EXIT"))
    with pytest.raises(UsageError):
        machine.launch(*arguments)
    with pytest.raises(UsageError):
        machine.launch(1, 32, b"\0" * 16, 228 * 1024)


def test_impossible_machines() -> None:
    impossible: tuple[dict[str, Any], ...] = ({"sms": 0}, {"slots_per_sm": 0}, {"schedule": "fifo"})
    for options in impossible:
        with pytest.raises(UsageError):
            Machine(program("EXIT"), **options)
    with pytest.raises(UsageError, match="threads at once"):
        Machine(program("EXIT"), sms=100000).launch(100000, 1024, b"\0" * 16)


def test_an_unknown_instruction_matters_only_when_reached() -> None:
    text = """
        LDC R4, c[0x0][0x218]
        ISETP.EQ.AND P0, PT, R4, RZ, PT
        @P0 EXIT
        FROBNICATE R4, R5
        EXIT
    """
    assert launch(text, argument=0)[1].completed
    with pytest.raises(UnknownInstructionError, match=r"unknown mnemonic FROBNICATE: \+0x30 FROBNICATE R4,R5 in k"):
        launch(text, argument=1)


@pytest.mark.parametrize(
    "line",
    [
        "BAR.SYNC.DEFER_BLOCKING R4",
        "BAR.SYNC 0x10",
        "BAR.SYNC.DEFER_BLOCKING 0x0, P0",
        "@P0 BAR.SYNC 0x0",
        "WARPSYNC.COLLECTIVE R4, end",
    ],
)
def test_waits_of_another_form_are_errors(line: str) -> None:
    with pytest.raises(UnknownInstructionError):
        launch(f"MOV R4, RZ\n{line}\nend: EXIT")


def test_a_return_out_of_the_function_is_an_error() -> None:
    with pytest.raises(MachineFaultError, match="return to 0x12345"):
        launch("MOV R4, 0x12345\n RET.REL.NODEC R4, k\n EXIT")


def test_host_access_stays_in_its_allocation() -> None:
    memory = Memory()
    address = memory.allocate("a", 100)
    memory.allocate("b", b"xyz")
    memory.fill(address, 100, 7)
    assert memory.read(address + 96, 4) == b"\7\7\7\7"
    with pytest.raises(MachineFaultError, match="a"):
        memory.read(address + 98, 4)
    with pytest.raises(MachineFaultError):
        memory.write(0x1234, b"abcd")
    assert memory.intact()


def test_a_spinning_loop_starves_nobody() -> None:
    """Warp 0 spins on a shared word; warps 1 and 2 stand at larger PCs, and both must run for it to end."""
    _, result, data = launch(HEAD + """
        SHF.R.U32.HI R6, RZ, 0x5, R0
        STS [0x400], RZ
        STS [0x404], RZ
        BAR.SYNC.DEFER_BLOCKING 0x0
        ISETP.EQ.AND P0, PT, R6, 0x1, PT
        ISETP.EQ.AND P1, PT, R6, 0x2, PT
        MOV R8, 0x1
        @P0 BRA one
        @P1 BRA two
    spin: LDS R5, [0x400]
        LDS R7, [0x404]
        IADD3 R5, R5, R7, RZ
        ISETP.NE.AND P2, PT, R5, 0x2, PT
        @P2 BRA spin
        BRA end
    one: LDS R7, [0x404]
        ISETP.NE.AND P2, PT, R7, 0x1, PT
        @P2 BRA one
        STS [0x400], R8
        MOV R5, 0x5
        BRA end
    two: STS [0x404], R8
        MOV R5, 0x6
    end: NOP
    """ + TAIL, 96, block=96)  # fmt: skip
    assert result.completed
    assert data.tolist() == [2] * 32 + [5] * 32 + [6] * 32


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_poll_with_a_wait_inside_is_proven_too(options: dict[str, Any]) -> None:
    """The whole warp polls and converges in every turn: others' waits end within the round, and still nothing changes."""
    _, result, _ = launch("""
        S2R R0, SR_LANEID
        LDC.64 R2, c[0x0][0x210]
    poll: BSSY B0, join
        ISETP.NE.AND P1, PT, R0, RZ, PT
        @P1 BRA join
        LDG.E.STRONG.GPU R4, desc[UR4][R2.64]
    join: BSYNC B0
        SHFL.IDX PT, R5, R4, RZ, 0x1f
        WARPSYNC.ALL
        ISETP.EQ.AND P0, PT, R5, RZ, PT
        @P0 BRA poll
        EXIT
    """, grid=2, **options)  # fmt: skip
    assert (result.kind, result.spin) == ("deadlock", True)


@pytest.mark.parametrize("options", SCHEDULES)
def test_who_breaks_out_is_not_waited_for(options: dict[str, Any]) -> None:
    """Odd threads leave the barrier of their warp by BREAK and never come to its BSYNC: the others go on without them."""
    _, result, data = launch(HEAD + """
        MOV R5, 0x1
        LOP3.LUT P0, RZ, R0, 0x1, RZ, 0xc0, !PT
        BSSY B0, join
        @P0 BREAK.RELIABLE B0
        @P0 BRA away
    join: BSYNC B0
        VOTE.ANY R6, PT, PT
        POPC R6, R6
        IADD3 R5, R5, R6, RZ
    away: NOP
    """ + TAIL, **options)  # fmt: skip
    assert result.completed
    assert data.tolist() == [1 if t & 1 else 17 for t in range(64)]
