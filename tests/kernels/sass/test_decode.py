"""Decoding: every operand form that nvdisasm prints for this kernel family, and loud failure on everything else."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4_repro.errors import CubinError, UnknownInstructionError
from dsv4_repro.kernels.sass.decode import RZ, Guard, decode
from dsv4_repro.kernels.sass.operands import parse_operand, split_operands


def document(*rows: tuple[str, ...], sm: int = 90) -> list[Any]:
    instructions = [{"opcode": row[0], "operands": row[1], **({"predicate": row[2]} if len(row) == 3 else {})} for row in rows]
    header = {"SM": {"version": {"major": sm // 10, "minor": sm % 10}}, "SchemaVersion": {"major": 13, "minor": 5}}
    return [header, [{"function-name": "k", "start": 0, "length": 16 * len(rows), "sass-instructions": instructions}]]


def one(*row: str) -> object:
    return decode(document(row)).instructions[0]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("R12", {"kind": "reg", "index": 12}),
        ("R12.reuse", {"kind": "reg", "index": 12, "suffix": ""}),
        ("-R8", {"kind": "reg", "index": 8, "negate": True}),
        ("-R5.reuse", {"kind": "reg", "index": 5, "negate": True}),
        ("~R7", {"kind": "reg", "index": 7, "invert": True}),
        ("-|R12|", {"kind": "reg", "index": 12, "negate": True, "absolute": True}),
        ("-RZ", {"kind": "reg", "index": RZ, "negate": True}),
        ("URZ", {"kind": "ureg", "index": RZ}),
        ("~URZ", {"kind": "ureg", "index": RZ, "invert": True}),
        ("-UR5", {"kind": "ureg", "index": 5, "negate": True}),
        ("!P0", {"kind": "pred", "index": 0, "invert": True}),
        ("!PT", {"kind": "pred", "index": 7, "invert": True}),
        ("UPT", {"kind": "upred", "index": 7}),
        ("0x20", {"kind": "imm", "value": 0x20}),
        ("-0x20", {"kind": "imm", "value": 0xFFFFFFE0}),
        ("c[0x0][0x3b4]", {"kind": "const", "bank": 0, "value": 0x3B4}),
        ("c[0x0][RZ]", {"kind": "const", "bank": 0, "value": 0}),
        ("-c[0x0][0x180]", {"kind": "const", "value": 0x180, "negate": True}),
        ("5.9604644775390625e-08", {"kind": "float", "number": 2.0**-24}),
        ("0", {"kind": "float", "number": 0.0}),
        ("SR_TID.X", {"kind": "special"}),
        ("SRZ", {"kind": "special"}),
        ("B11", {"kind": "barrier", "index": 11}),
        ("PR", {"kind": "preds"}),
        ("[R10.64+0xc08]", {"kind": "mem", "index": 10, "mode": "64", "value": 0xC08, "ubase": None}),
        ("[R8.64+-0x2000]", {"kind": "mem", "index": 8, "mode": "64", "value": -0x2000}),
        ("[R4+UR18+0x4]", {"kind": "mem", "index": 4, "ubase": 18, "value": 4}),
        ("[UR14+0xc0c]", {"kind": "mem", "index": None, "ubase": 14, "value": 0xC0C}),
        ("[0x800]", {"kind": "mem", "index": None, "ubase": None, "value": 0x800}),
        ("[RZ]", {"kind": "mem", "index": RZ}),
        ("[R0.X4+0x820]", {"kind": "mem", "index": 0, "mode": "X4", "value": 0x820}),
        ("[R3.X8]", {"kind": "mem", "index": 3, "mode": "X8"}),
        ("desc[UR22][R12.64+-0x2000]", {"kind": "mem", "index": 12, "mode": "64", "value": -0x2000}),
    ],
)
def test_operand_forms(text: str, fields: dict[str, object]) -> None:
    operand = parse_operand(text)
    assert {name: getattr(operand, name) for name in fields} == fields
    assert operand.text == text


@pytest.mark.parametrize(
    "text",
    ["R1.X4", "R1.H2", "[R1.X3]", "[R1.X4.64]", "[R1+R2]", "[UR1+UR2]", "[R1*4]", "c[0x0][R4+0x10]", "!R1", "-P0", "~P0",
     "P8", "R1234", "", "|R1", "0xg", "QNAN", "SR", "c[0x0]", "-0x", "R"],
)  # fmt: skip
def test_operands_not_understood_are_errors(text: str) -> None:
    with pytest.raises(ValueError):
        parse_operand(text)


def test_missing_comma_of_older_nvdisasm() -> None:
    assert split_operands("R9[R10]") == ("R9", "[R10]")
    assert split_operands("PT,R2[UR14+0xc0c],R2") == ("PT", "R2", "[UR14+0xc0c]", "R2")
    assert split_operands("RZ[R4+URZ]") == ("RZ", "[R4+URZ]")
    assert split_operands("R6,desc[UR20][R4.64]") == ("R6", "desc[UR20][R4.64]")
    assert split_operands("R1,c[0x0][0x28]") == ("R1", "c[0x0][0x28]")


@pytest.mark.parametrize(
    ("row", "dests", "sources"),
    [
        (("IADD3", "R1,R1,-0x20,RZ"), 1, 3),
        (("IADD3", "R1,P0,PT,R1,R2,RZ"), 3, 3),
        (("IADD3.X", "R17,PT,PT,~R17,UR15,RZ,P0,!PT"), 3, 5),
        (("LEA", "R8,P3,R5,c[0x0][0x160],0x2"), 2, 3),
        (("LOP3.LUT", "P0,RZ,R1,R2,RZ,0xc0,!PT"), 2, 5),
        (("PLOP3.LUT", "P0,PT,PT,PT,UP0,0x80,0x0"), 2, 5),
        (("ISETP.EQ.AND.EX", "P2,PT,RZ,RZ,PT,P2"), 2, 4),
        (("SHFL.IDX", "PT,R9,R10,R11,0x1f"), 2, 3),
        (("VOTE.ANY", "R0,PT,PT"), 2, 1),
        (("VOTEU.ANY", "UP2,P5"), 1, 1),
        (("VIMNMX", "R9,PT,PT,R12,0x1000,PT"), 3, 3),
        (("SEL", "R7,R4,RZ,!P0"), 1, 3),
        (("ATOMG.E.ADD.STRONG.GPU", "PT,R4,[UR14+0xc0c],R4"), 2, 2),
        (("STG.E", "[R10.64],RZ"), 0, 2),
        (("REDG.E.ADD.S32.STRONG.GPU", "desc[UR20][R4.64+0xc08],R7"), 0, 2),
        (("BMOV.32.CLEAR", "RZ,B0"), 1, 1),
        (("R2UR", "UR5,R2"), 1, 1),
    ],
)  # fmt: skip
def test_destinations_and_sources(row: tuple[str, str], dests: int, sources: int) -> None:
    instruction = decode(document(row)).instructions[0]
    assert (len(instruction.dests), len(instruction.sources)) == (dests, sources)
    assert instruction.mnemonic == row[0]


def test_guards_and_the_misplaced_pr_operand() -> None:
    rows = document(("MOV", "R1,R2", "@!P3"), ("MOV", "R1,R2", "@UP0"), ("P2R", "R18,RZ,0x10", "PR"), ("R2P", "R4,0x7f", "PR"))
    a, b, c, d = decode(rows).instructions
    assert a.guard == Guard(3, True, False)
    assert b.guard == Guard(0, False, True)
    assert c.guard is None
    assert [operand.kind for operand in (*c.dests, *c.sources)] == ["reg", "preds", "reg", "imm"]
    assert [operand.kind for operand in d.dests] == ["preds"]


def test_targets_and_calls() -> None:
    rows = document(("BSSY", "B0,0x20"), ("CALL.REL.NOINC", "$k$sub"), ("BRA", "P1,0x0", "@P0"), ("EXIT", ""))
    function = decode(rows, symbols={"$k$sub": 0x30})
    assert [instruction.target for instruction in function.instructions] == [0x20, 0x30, 0, None]
    assert [operand.text for operand in function.instructions[2].sources] == ["P1"]
    with pytest.raises(UnknownInstructionError, match=r"\+0x10 CALL"):
        decode(rows)


def test_subroutines_listed_apart_are_joined() -> None:
    joined = document(("CALL.REL.NOINC", "$k$sub"), ("EXIT", ""), ("RET.REL.NODEC", "R2,k"))
    apart = document(("CALL.REL.NOINC", "$k$sub"), ("EXIT", ""))
    apart[1].append(
        {
            "function-name": "$k$sub",
            "start": 32,
            "length": 16,
            "sass-instructions": [{"opcode": "RET.REL.NODEC", "operands": "R2,k"}],
        }
    )
    assert decode(apart).instructions == decode(joined, symbols={"$k$sub": 32}).instructions


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (("FROB", "R1,R2"), "unknown mnemonic FROB"),
        (("IADD3.SAT", "R1,R2,R3,R4"), "unknown modifier .SAT of IADD3"),
        (("LDS", "R1,[R2.X3]"), "X3"),
        (("MOV", "R1,R2", "P0"), "guard 'P0'"),
        (("BRA", "R2"), "target"),
    ],
)  # fmt: skip
def test_unknown_is_loud_or_marked(row: tuple[str, ...], problem: str) -> None:
    rows = document(("NOP", ""), row)
    with pytest.raises(UnknownInstructionError) as caught:
        decode(rows)
    assert problem in str(caught.value)
    assert "+0x10" in str(caught.value)
    assert "in k" in str(caught.value)
    lenient = decode(rows, strict=False)
    assert [instruction.offset for instruction in lenient.unknown] == [0x10]
    assert problem in lenient.unknown[0].problem


@pytest.mark.parametrize(
    "bad",
    [None, [], [{}], {}, [{}, []], [{"SM": {"version": {"major": 9, "minor": 0}}}, []], [{"SM": 1}, [{}]],
     [{"SM": {"version": {"major": 9, "minor": 0}}}, [{"function-name": "k", "start": 16, "sass-instructions": []}]],
     [{"SM": {"version": {"major": 9, "minor": 0}}}, [{"function-name": "k", "start": 0, "sass-instructions": [{}]}]],
     [{"SM": {"version": {"major": 9, "minor": 0}}}, [{"function-name": "k", "start": 0, "sass-instructions": [{"opcode": 3}]}]]],
)  # fmt: skip
def test_documents_of_another_form(bad: object) -> None:
    with pytest.raises(CubinError):
        decode(bad)


def test_branches_out_of_the_function_are_refused() -> None:
    with pytest.raises(CubinError, match="outside"):
        decode(document(("BRA", "0x100")))
