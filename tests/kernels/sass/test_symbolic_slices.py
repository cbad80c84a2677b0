"""The prologue of small hand-written kernels: flow, liveness, exploration, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dsv4_repro.errors import BudgetError, UnknownInstructionError
from dsv4_repro.kernels.sass.decode import SassFunction, decode_rows
from dsv4_repro.kernels.sass.layout import layout_for
from dsv4_repro.kernels.sass.slice import GroupShape, Prologue, condition_of, slice_facts, substitute
from dsv4_repro.kernels.sass.slice_flow import analyse_flow
from dsv4_repro.kernels.sass.slice_liveness import live_registers, liveness, read_registers, written_registers
from dsv4_repro.kernels.sass.symbolic_terms import evaluate

BASE = 0x210  # parameters of sm_90: lengths +0x10, num_rows +0x20, stride +0x24, ctas +0x30, max_seq_len +0x34

#: One row per group: the leader reads its length and waits if it is above the threshold; peers leave when max_seq_len is not.
#: ``GUARD`` is replaced by what stands between the load and the comparison.
KERNEL = """
0x000 S2R R0, SR_CTAID.X
0x010 S2R R9, SR_TID.X
0x020 SHF.R.U32.HI R1, RZ, 0x1, R0
0x030 LOP3.LUT R2, R0, 0x1, RZ, 0xc0, !PT
0x040 LDC R10, c[0x0][0x244]
0x050 ULDC.64 UR10, c[0x0][0x228]
0x060 ISETP.LT.U32.AND P0, PT, R10, 0x8001, PT
0x070 ISETP.NE.AND P1, PT, R2, RZ, PT
0x080 @P1 EXIT P0
0x090 ULDC.64 UR6, c[0x0][0x220]
0x0a0 MOV R6, UR6
0x0b0 MOV R7, UR7
0x0c0 IMAD.WIDE.U32 R4, R1, 0x4, R6
0x0d0 LDG.E R3, desc[UR8][R4.64]
0x0e0 {guard}
0x0f0 ISETP.GT.U32.AND P2, PT, R3, 0x8000, PT
0x100 @!P2 BRA 0x190
0x110 ISETP.NE.AND P3, PT, R9, RZ, PT
0x120 @P3 BRA 0x170
0x130 REDG.E.ADD.S32.STRONG.GPU desc[UR8][UR10+0xc08], R9
0x140 LDG.E.STRONG.GPU R8, desc[UR8][UR10+0xc08]
0x150 ISETP.GE.AND P4, PT, R8, 0x2, PT
0x160 @!P4 BRA 0x140
0x170 BAR.SYNC.DEFER_BLOCKING 0x0
0x180 STG.E desc[UR8][R6.64], R3
0x190 EXIT
0x1a0 BRA 0x1a0
"""
BOUNDED = "VIMNMX.U32 R3, R3, R10, PT"


def assembled(text: str, sm: int = 90, symbols: dict[str, int] | None = None) -> SassFunction:
    rows: list[tuple[str, str, str]] = []
    for line in text.strip().splitlines():
        words = line.split(None, 1)[1] if line.startswith("0x") else line
        guard = ""
        if words.startswith("@"):
            guard, words = words.split(None, 1)
        opcode, _, operands = words.partition(" ")
        rows.append((opcode, operands.replace(" ", ""), guard))
    return decode_rows("kernel", sm, rows, {"kernel": 0, **(symbols or {})}, strict=False)


def prologue(guard: str = "NOP") -> Prologue:
    function = assembled(KERNEL.format(guard=guard))
    return Prologue(slice_facts(function, analyse_flow(function, BASE)), layout_for(90, BASE, 56), 512, tracing=True)


def both(found: Prologue, ctas: int = 2) -> tuple[Any, Any]:
    leader = found.first_row(GroupShape(ctas, 4, 4, 1, 0))
    peer = found.first_row(GroupShape(ctas, 4, 4, 1, 1))
    return condition_of(leader, found.terms, ("barrier",)), condition_of(peer, found.terms, ("exit", "alone"))


def inputs(length: int, promised: int = 16384) -> dict[str, int]:
    return {"len": length & 0xFFFFFFFF, "max_seq_len": promised, "stride": 16384, "chunk": 8192}


def test_the_flow_of_thread_0() -> None:
    function = assembled(KERNEL.format(guard="NOP"))
    flow = analyse_flow(function, BASE)
    assert (flow.polls, flow.arrivals, flow.lengths, flow.counter_stores) == ((0x140,), (0x130,), (0xD0,), ())
    # Threads other than 0 step over the arrival: thread 0 does not, so from 0x110 on the row cannot end without the poll.
    assert 0x110 in flow.barrier
    assert 0x110 not in flow.alone
    assert 0x190 in flow.alone


@pytest.mark.parametrize(("length", "waits"), [(-1, True), (32769, True), (32768, False), (0, False), (-(1 << 31), True)])
def test_the_unguarded_leader_waits_on_what_is_long_as_unsigned(length: int, waits: bool) -> None:
    leader, peer = both(prologue())
    assert evaluate(leader, inputs(length)) is waits
    assert evaluate(peer, inputs(length)) is True
    assert evaluate(peer, inputs(length, 32769)) is not waits


def test_a_bounded_leader_never_waits_when_peers_leave() -> None:
    leader, peer = both(prologue(BOUNDED))
    for length in (-1, 40000, 32769, 5):
        assert evaluate(leader, inputs(length)) is False
        assert evaluate(leader, inputs(length, 65536)) is (length & 0xFFFFFFFF > 32768)
    assert evaluate(peer, inputs(7)) is True


def test_the_instructions_that_decide_are_shown_and_no_others() -> None:
    found = prologue(BOUNDED)
    path = next(item for item in found.first_row(GroupShape(2, 4, 4, 1, 0)) if item.outcome == "barrier")
    shown = [offset for offset, _ in found.relevant(path)]
    assert shown == [0x40, 0xD0, 0xE0, 0xF0, 0x100]


def test_trimmed_facts_give_the_same_answers_and_miss_what_they_dropped() -> None:
    found = prologue()
    expected = both(found)
    kept = Prologue(found.facts.trimmed(frozenset(found.touched)), found.layout, 512)
    assert [repr(item) for item in both(kept)] == [repr(item) for item in expected]
    empty = Prologue(found.facts.trimmed(frozenset()), found.layout, 512)
    with pytest.raises(KeyError):
        empty.first_row(GroupShape(2, 4, 4, 1, 0))


def test_an_instruction_without_semantics_is_named() -> None:
    with pytest.raises(UnknownInstructionError, match=r"0xe0.*FROB"):
        analyse_flow(assembled(KERNEL.format(guard="FROB R3, R3")), BASE)


def test_an_endless_prologue_is_cut_off() -> None:
    """A loop whose condition is new each turn (a counter against a value that is not known) ends with the budget, not never."""
    text = KERNEL.format(guard="NOP").replace("0x050 ULDC.64 UR10, c[0x0][0x228]", "0x050 LDS R11, [R12]")
    text = text.replace("0x080 @P1 EXIT P0", "0x080 @P6 BRA 0x040").replace(
        "0x070 ISETP.NE.AND P1, PT, R2, RZ, PT", "0x070 ISETP.NE.AND P6, PT, R11, RZ, PT"
    )
    function = assembled(text)
    endless = Prologue(slice_facts(function, analyse_flow(function, BASE)), layout_for(90, BASE, 56), 512)
    with pytest.raises(BudgetError):
        endless.first_row(GroupShape(2, 4, 4, 1, 0))


def test_a_value_that_the_loop_writes_is_forgotten_for_later_rows() -> None:
    found = prologue()
    starts = found.first_row(GroupShape(2, 4, 4, 1, 0), stop_at_loop=True)
    assert {path.outcome for path in starts} <= {"barrier", "alone", "exit"}  # this kernel has no row loop


def test_substitution_replaces_a_variable_everywhere() -> None:
    found = prologue()
    leader, _ = both(found)
    assert substitute(leader, found.terms, {"len": 5}) is False
    assert substitute(leader, found.terms, {"len": 0xFFFFFFFF}) is True


def function_of(lines: Sequence[str]) -> SassFunction:
    return assembled("\n".join(f"{16 * position:#05x} {line}" for position, line in enumerate(lines)))


def live_at_entry(lines: Sequence[str]) -> set[tuple[str, int]]:
    function = function_of([*lines, "EXIT"])
    end = 16 * len(function.instructions)
    return set(live_registers(liveness(function, {0: ()}, {0: end})[0]))


def test_liveness_is_exact_about_guards() -> None:
    """Written and read under one guard: not live. Written under both: overwritten. The guard changed in between: live."""
    assert ("reg", 5) not in live_at_entry(["@P0 MOV R5, R1", "@P0 STG.E desc[UR4][R2.64], R5"])
    assert ("reg", 5) in live_at_entry(["@P0 MOV R5, R1", "STG.E desc[UR4][R2.64], R5"])
    assert ("reg", 5) not in live_at_entry(["@P0 MOV R5, R1", "@!P0 MOV R5, R6", "STG.E desc[UR4][R2.64], R5"])
    changed = ["@P0 MOV R5, R1", "ISETP.EQ.AND P0, PT, R1, RZ, PT", "@P0 STG.E desc[UR4][R2.64], R5"]
    assert ("reg", 5) in live_at_entry(changed)


def test_a_comparison_under_a_predicate_reads_under_it() -> None:
    """``ISETP … P3`` is false where P3 is, whatever R5 holds; and its result implies P3."""
    lines = ["@P3 MOV R5, R1", "ISETP.GE.AND P0, PT, R5, RZ, P3", "@P0 STG.E desc[UR4][R2.64], R5"]
    assert ("reg", 5) not in live_at_entry(lines)
    lines[1] = "ISETP.GE.OR P0, PT, R5, RZ, P3"
    assert ("reg", 5) in live_at_entry(lines)


def test_pairs_and_vectors_are_read_and_written_whole() -> None:
    function = function_of(
        ["LDG.E.128 R8, desc[UR4][R2.64+0x10]", "IMAD.WIDE.U32 R4, R1, 0x4, R6", "STG.E.64 desc[UR4][R4.64], R8"]
    )
    first, wide, store = function.instructions
    assert [index for _, index in written_registers(first)] == [8, 9, 10, 11]
    assert {index for kind, index in live_registers(read_registers(first)) if kind == "reg"} == {2, 3}
    assert {index for kind, index in live_registers(read_registers(wide)) if kind == "reg"} == {1, 6, 7}
    assert {index for kind, index in live_registers(read_registers(store)) if kind == "reg"} == {4, 5, 8, 9}


def test_addresses_of_sm_75_are_pairs_although_they_are_not_printed_so() -> None:
    function = assembled("0x000 LDG.E.SYS R17, [R4]\n0x010 EXIT", 75)
    assert {index for _, index in live_registers(read_registers(function.instructions[0]))} == {4, 5}


def test_calls_return_to_their_own_site_with_what_the_callee_left() -> None:
    """The callee saves and restores the thread number: the branch behind the call still is thread 0's."""
    text = """
0x000 LDC R1, c[0x0][0x28]
0x010 S2R R9, SR_TID.X
0x020 MOV R20, 0x40
0x030 CALL.REL.NOINC 0x90
0x040 ISETP.NE.AND P3, PT, R9, RZ, PT
0x050 @P3 EXIT
0x060 LDG.E.STRONG.GPU R8, desc[UR8][R6.64+0xc08]
0x070 @!P4 BRA 0x060
0x080 EXIT
0x090 STL [R1+-0x8], R9
0x0a0 MOV R9, 0x55
0x0b0 LDL R9, [R1+-0x8]
0x0c0 RET.REL.NODEC R20 0x0
"""
    flow = analyse_flow(assembled(text, symbols={"callee": 0x90}), BASE)
    assert flow.polls == (0x60,)
    assert flow.exits == {0x80}
