"""Operands, expression evaluation, names and identities, the chain without a device."""

from __future__ import annotations

import random

import pytest

from dsv4_repro.forensics.chain import LINKS, ChainInput, StepFacts, causal_chain
from dsv4_repro.forensics.identity import base_name, hang_identity, readable_name
from dsv4_repro.forensics.operands import Constant, Immediate, Memory, Other, Register, branch_target, destinations, operand
from dsv4_repro.forensics.values import INVERSE, SWAPPED, Trace, Values, compare
from dsv4_repro.kernels.sasstext import SassLine, parse_listing


def line(text: str) -> SassLine:
    (found,) = parse_listing(f"0x0 <k+0>: {text}").lines
    return found


@pytest.mark.parametrize(("text", "kind"), [
    ("R4", Register("R4", "R")), ("-R4", Register("R4", "R", negative=True)), ("~R4", Register("R4", "R", inverted=True)),
    ("RZ", Register("", "R")), ("PT", Register("", "P")), ("!UP3", Register("UP3", "UP", negative=True)),
    ("R4.64", Register("R4", "R", wide=True)), ("R4.reuse", Register("R4", "R")), ("|R4|", Register("R4", "R", plain=False)),
    ("0x10", Immediate(16)), ("-0x10", Immediate(-16)), ("c[0x0][0x240]", Constant(0, 0x240)),
    ("[R2+0x8]", Memory((Register("R2", "R"),), 8)), ("[0x800]", Memory((), 0x800)),
    ("desc[UR16][R4.64+0xc08]", Memory((Register("R4", "R", wide=True),), 0xC08)),
    ("[R4.U32+UR6+-0x10]", Memory((Register("R4", "R", narrow=True), Register("UR6", "UR")), -16)),
    ("[R4.X4+0x10]", Memory((), 16, exact=False)), ("SR_TID.X", Other("SR_TID.X")),
])  # fmt: skip
def test_operands(text: str, kind: object) -> None:
    assert operand(text) == kind


@pytest.mark.parametrize(("text", "written"), [
    ("ISETP.GE.AND P0,PT,R4,R9,PT", ("P0",)), ("IADD3 R4,P0,R5,R6,RZ", ("R4", "P0")), ("IMAD.WIDE.U32 R4,R5,0x4,R6", ("R4", "R5")),
    ("LDG.E.128 R8,[R2.64]", ("R8", "R9", "R10", "R11")), ("STG.E [R2.64],R4", ()), ("LOP3.LUT P0,RZ,R9,UR14,RZ,0xc,!PT", ("P0",)),
    ("ATOMG.E.ADD.STRONG.GPU PT,R4,[R2.64],R5", ("R4",)), ("R2P PR,R2,0x7f", tuple(f"P{n}" for n in range(7))),
    ("ULDC.64 UR4,c[0x0][0x208]", ("UR4", "UR5")), ("BAR.SYNC 0x0", ()), ("PLOP3.LUT P0,PT,P1,PT,PT,0x8,0x0", ("P0",)),
])  # fmt: skip
def test_destinations(text: str, written: tuple[str, ...]) -> None:
    assert destinations(line(text)) == written


def test_branch_targets() -> None:
    assert branch_target(line("@!P0 BRA 0x40")) == 0x40
    assert branch_target(line("BRX R4,-0x10")) is None
    assert branch_target(line("EXIT")) is None


def run(text: str, registers: dict[str, int], wanted: str) -> int | None:
    values = Values()
    trace = Trace(values)
    start = {name: trace.read(name) for name in registers}
    for row in text.strip().splitlines():
        trace.step(line(row.strip()))
    return values.evaluate(trace.read(wanted), {start[name]: word for name, word in registers.items()}, lambda b, o: 0x1000 + o, {})


SEMANTICS = [
    ("MOV R1,R2", lambda a, b: a), ("IADD3 R1,R2,R3,RZ", lambda a, b: a + b), ("IADD3 R1,PT,PT,R2,-R3,RZ", lambda a, b: a - b),
    ("IMAD R1,R2,R3,R2", lambda a, b: a * b + a), ("IMAD.MOV.U32 R1,RZ,RZ,R3", lambda a, b: b),
    ("VIADD R1,R2,0x5", lambda a, b: a + 5),
    ("LOP3.LUT R1,R2,R3,RZ,0xc0,!PT", lambda a, b: a & b), ("LOP3.LUT R1,R2,R3,RZ,0x3c,!PT", lambda a, b: a ^ b),
    ("SHF.L.U32 R1,R2,0x3,RZ", lambda a, b: a << 3), ("SHF.R.U32.HI R1,RZ,0x3,R2", lambda a, b: a >> 3),
    ("LDC R1,c[0x0][0x10]", lambda a, b: 0x1010), ("IADD3 R1,~R2,RZ,RZ", lambda a, b: ~a),
]  # fmt: skip


@pytest.mark.parametrize(("text", "meaning"), SEMANTICS)
def test_semantics(text: str, meaning: object) -> None:
    rng = random.Random(text)
    for _ in range(50):
        a, b = rng.getrandbits(32), rng.getrandbits(32)
        assert run(text, {"R2": a, "R3": b}, "R1") == meaning(a, b) & 0xFFFFFFFF  # type: ignore[operator]


def test_the_unknown_stays_unknown() -> None:
    assert run("POPC R1,R2", {"R2": 3}, "R1") is None
    assert run("@P0 MOV R1,R2", {"R1": 1, "R2": 3}, "R1") is None
    assert run("CALL.REL.NOINC 0x100", {"R1": 1}, "R1") is None
    assert run("IADD3.X R1,R2,R3,RZ,P0,!PT", {"R2": 1, "R3": 2}, "R1") is None
    assert run("IMAD.WIDE R4,R2,R3,R6", {"R2": 1, "R3": 2, "R6": 3, "R7": 0}, "R5") is None


@pytest.mark.parametrize("table", range(0, 256, 5))
def test_predicate_tables(table: int) -> None:
    """PLOP3 with two free inputs, by truth table; what is not understood is not known."""
    for first, second in ((0, 0), (0, 1), (1, 0), (1, 1)):
        values = Values()
        trace = Trace(values)
        p1, p2 = trace.read("P1"), trace.read("P2")
        trace.step(line(f"PLOP3.LUT P0,PT,P1,P2,PT,{table:#x},0x0"))
        found = values.evaluate(trace.read("P0"), {p1: first, p2: second}, lambda b, o: None, {})
        assert found in (table >> (4 * first + 2 * second + 1) & 1, None)


def test_relations() -> None:
    rng = random.Random(1)
    for _ in range(500):
        a, b = rng.choice([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, rng.getrandbits(32)]), rng.getrandbits(32)
        for relation in INVERSE:
            for signed in (0, 32):
                assert compare(relation, a, b, signed) != compare(INVERSE[relation], a, b, signed)
                assert compare(relation, a, b, signed) == compare(SWAPPED[relation], b, a, signed)
    assert compare("<", 0xFFFFFFFF, 0, 32)
    assert not compare("<", 0xFFFFFFFF, 0)


NAMES = [
    ("_ZN4vllm10persistent22persistent_topk_kernelILi512ELj4EEEvNS0_20PersistentTopKParamsE", "persistent_topk_kernel"),
    ("void vllm::persistent::persistent_topk_kernel<512, 4u>(vllm::persistent::PersistentTopKParams)", "persistent_topk_kernel"),
    ("vllm::persistent::persistent_topk_kernel<512, 4>(params=...)", "persistent_topk_kernel"),
    ("flashinfer::sampling::RadixTopKMaskLogitsKernel_MultiCTA<512, 4, float, int>(...)", "RadixTopKMaskLogitsKernel_MultiCTA"),
    ("_Z9flag_waitPKjjPj", "flag_wait"), ("flag_wait", "flag_wait"),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
    ("_ZN12_GLOBAL__N_16kernelEv", "kernel"), ("(anonymous namespace)::kernel<int>(float*)", "kernel"), ("", ""), ("_Z", "_Z"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name"), NAMES)
def test_base_names(text: str, name: str) -> None:
    assert base_name(text) == name
    assert readable_name(text).split("::")[-1] == name


def test_identity_depends_on_what_the_defect_is() -> None:
    facts = {
        "class_": "gpu-spin-barrier", "cause": "peer-left", "field": "arrival_counter", "comparison": ">=", "bits": 32,
        "scope": "gpu", "phase": "first; others' arrivals none", "missing": "leader spins; exited",
    }  # fmt: skip
    mangled, readable = NAMES[0][0], NAMES[1][0]
    one = hang_identity(mangled, **facts)  # type: ignore[arg-type]
    assert len(one) == 12
    assert hang_identity(readable, **facts) == one  # type: ignore[arg-type]
    for key, value in (
        ("cause", "reset-race"),
        ("field", None),
        ("comparison", "=="),
        ("phase", "later"),
        ("missing", "x"),
        ("class_", "gpu-kernel-stuck"),
    ):
        assert hang_identity(mangled, **{**facts, key: value}) != one  # type: ignore[arg-type]


def test_chain_without_anything() -> None:
    chain = causal_chain(ChainInput("measured"), None, ["E1"])
    assert tuple(link.link for link in chain) == LINKS
    assert {link.status for link in chain} == {"not observed"}
    assert all(not link.evidence for link in chain)
    assert all(link.text for link in chain)


def test_chain_says_when_lengths_are_legal() -> None:
    step = StepFacts(
        live_requests=4, next_n=2, rows=8, graph_rows=8, expanded=(1, 2), lengths=(0, 0), compress=4, origin="measured"
    )
    links = {link.link: link for link in causal_chain(ChainInput("measured"), step, ["E1"])}
    assert "no padding" in links["graph-padding"].text
    assert "none is negative" in links["producer"].text
    assert links["drain"].status == "measured"
    assert links["drain"].evidence == ("E1",)
