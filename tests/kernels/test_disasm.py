"""nvdisasm's JSON of several versions, debugger listings, and the tool under a deadline, with and without the cache."""

from __future__ import annotations

import json
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import CubinError, DeadlineError, ToolMissingError
from dsv4_repro.kernels import disasm
from dsv4_repro.kernels.cache import Cache
from dsv4_repro.kernels.disasm import SassLine, parse_json, parse_listing, split_operands

SAMPLES = Path(__file__).parents[1] / "fixtures" / "nvdisasm"
CUBIN = (SAMPLES / "with_subroutine.sm_80.cubin").read_bytes()
VERSIONS = ("12.8", "13.1", "13.4", "13.5")


def sample(version: str) -> bytes:
    return (SAMPLES / f"with_subroutine.sm_80.nvdisasm-{version}.json").read_bytes()


def document(*rows: dict[str, Any], start: int = 0, name: str = "f") -> str:
    return json.dumps(
        [{"SM": {"version": {"major": 9, "minor": 0}}}, [{"function-name": name, "start": start, "sass-instructions": rows}]]
    )


# -- JSON


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_says_the_same(version: str) -> None:
    (found,) = parse_json(sample(version), ["with_subroutine"]).values()
    (newest,) = parse_json(sample("13.5"), ["with_subroutine"]).values()
    assert found.lines == newest.lines
    assert (found.function, found.sm, len(found.lines)) == ("with_subroutine", 80, 152)
    assert f"V{version}" in found.producer
    assert [line.offset for line in found.lines] == [16 * index for index in range(152)]
    # The subroutine's code follows the kernel's: its branches stay offsets from the kernel's first instruction.
    targets = {int(line.operands[-1], 16) for line in found.lines if line.base == "BRA"}
    assert max(targets) > 53 * 16
    assert all(target < 152 * 16 and found.at(target) is not None for target in targets)


@pytest.mark.parametrize("version", VERSIONS)
def test_addresses_are_operands_of_their_own(version: str) -> None:
    (found,) = parse_json(sample(version)).values()
    loads = [line for line in found.lines if line.base in ("LDS", "LDG", "ATOMS", "LDL")]
    assert len(loads) > 10
    assert all("[" not in line.operands[0] and any(part.startswith("[") for part in line.operands[1:]) for line in loads)


def test_predicates_stay_guards_and_pr_becomes_an_operand() -> None:
    (found,) = parse_json(
        document(
            {"opcode": "P2R", "operands": "R18,RZ,0x10", "predicate": "PR"},
            {"opcode": "R2P", "operands": "R18,0x7f", "predicate": "PR"},
            {"opcode": "EXIT", "operands": "P1", "predicate": "@!UP2"},
            {"opcode": "NOP"},
        )
    ).values()
    assert found.rows == (("P2R", "R18,PR,RZ,0x10", ""), ("R2P", "PR,R18,0x7f", ""), ("EXIT", "P1", "@!UP2"), ("NOP", "", ""))
    assert [line.text for line in found.lines] == ["P2R R18, PR, RZ, 0x10", "R2P PR, R18, 0x7f", "@!UP2 EXIT P1", "NOP"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ()),
        ("R4,desc[UR16][R4.64+0xc08]", ("R4", "desc[UR16][R4.64+0xc08]")),
        ("R4, desc[UR16][R4.64+0xc08]", ("R4", "desc[UR16][R4.64+0xc08]")),
        ("R4[R1+0x94]", ("R4", "[R1+0x94]")),
        ("PT,R2[UR14+0xc0c],R2", ("PT", "R2", "[UR14+0xc0c]", "R2")),
        ("RZ[0x800],R5.reuse", ("RZ", "[0x800]", "R5.reuse")),
        ("R4,c[0x0][R2+0x160]", ("R4", "c[0x0][R2+0x160]")),
        ("P0,PT,|R3|,-R5,PT", ("P0", "PT", "|R3|", "-R5", "PT")),
        ("R2,32@lo((f+.L_x_1@srel))", ("R2", "32@lo((f+.L_x_1@srel))")),
    ],
)
def test_operands_split_at_the_outer_commas(text: str, parts: tuple[str, ...]) -> None:
    assert split_operands(text) == parts


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"[1]", b"[{},[]]", b"null", b"[{\"SM\":{}},[]]", b"\xff\xfe", b"[" * 100_000,
        document({"operands": "R1"}).encode(), document({"opcode": "NOP"}).replace('"start": 0', '"start": "x"').encode(),
    ],
)  # fmt: skip
def test_other_documents_are_refused_with_a_reason(raw: bytes) -> None:
    with pytest.raises(CubinError):
        parse_json(raw)


def test_a_gap_between_a_function_and_its_subroutine_is_refused() -> None:
    elements = [
        {"function-name": "f", "start": 0, "sass-instructions": [{"opcode": "NOP"}]},
        {"function-name": "$f$g", "start": 48, "sass-instructions": [{"opcode": "NOP"}]},
    ]
    with pytest.raises(CubinError, match="starts at 0x30"):
        parse_json(json.dumps([{"SM": {"version": {"major": 9, "minor": 0}}}, elements]), ["f"])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
@settings(max_examples=150, deadline=None)
def test_any_json_is_read_or_refused(value: Any) -> None:
    for whole in (value, [value, value], [{"SM": {"version": {"major": 9, "minor": 0}}}, value]):
        try:
            assert isinstance(parse_json(json.dumps(whole)), dict)
        except CubinError:
            continue


# -- listings

KERNEL = "_ZN2ns6kernelILi512ELj4EEEvNS_6ParamsE"
MANGLED = f"""
warning: something unrelated 0x12
   0x7fffd8f2ccc0 <{KERNEL}+7360>:\tIMAD.U32 R7, RZ, RZ, UR7
   0x7fffd8f2ccd0 <{KERNEL}+7376>:\tLDG.E.STRONG.GPU R4, desc[UR16][R4.64+0xc08]
=> 0x7fffd8f2cce0 <{KERNEL}+7392>:\tCCTL.IVALL\x20
   0x7fffd8f2ccf0 <{KERNEL}+7408>:\tYIELD
   0x7fffd8f2cd00 <{KERNEL}+7424>:\tISETP.GE.AND P0, PT, R4, R9, PT
   0x7fffd8f2cd10 <{KERNEL}+7440>:\t@!P0 BRA 0x7fffd8f2cc90
"""


def check_poll_listing(text: str, function: str) -> None:
    found = parse_listing(text)
    assert found.function == function
    assert (found.entry, found.current) == (0x7FFFD8F2CCE0 - 7392, 7392)
    assert [line.offset for line in found.lines] == list(range(7360, 7441, 16))
    assert found.lines[1] == SassLine(7376, "", "LDG.E.STRONG.GPU", ("R4", "desc[UR16][R4.64+0xc08]"))
    assert found.lines[2] == SassLine(7392, "", "CCTL.IVALL", ())
    assert found.lines[5] == SassLine(7440, "@!P0", "BRA", (hex(7440 - 0x80),))


def test_listing_with_mangled_names() -> None:
    check_poll_listing(MANGLED, KERNEL)


def test_listing_with_demangled_names() -> None:
    name = "void ns::kernel<512, 4u>(ns::Params<int>)"
    check_poll_listing(MANGLED.replace(KERNEL, name), name)


def test_listing_of_the_disassemble_command() -> None:
    text = f"Dump of assembler code for function {KERNEL}:\n" + MANGLED.replace(KERNEL, "") + "End of assembler dump.\n"
    check_poll_listing(text, KERNEL)
    check_poll_listing(text.replace("=> 0x7fff", "=> 0x00007fff"), KERNEL)


def test_listing_without_names_keeps_addresses() -> None:
    found = parse_listing("=> 0x7f10:\tLDG.E R4,[R2.64] ;\n   0x7f20:\t@P0 BRA 0x7f10\n")
    assert (found.entry, found.current) == (None, 0x7F10)
    assert found.lines == (SassLine(0x7F10, "", "LDG.E", ("R4", "[R2.64]")), SassLine(0x7F20, "@P0", "BRA", ("0x7f10",)))


def test_listing_of_two_functions_keeps_the_marked_one() -> None:
    text = "   0x100 <a+16>:\tNOP\n=> 0x900 <b+32>:\tEXIT\n   0x910 <b+48>:\tBRA 0x910\n"
    found = parse_listing(text)
    assert (found.function, found.entry, [line.text for line in found.lines]) == ("b", 0x8E0, ["EXIT", "BRA 0x30"])


@given(st.text() | st.text(alphabet="0x123456789abcdef<>+: =>\tLDG.ER,[]\n@!P;", max_size=400))
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_listing(text: str) -> None:
    found = parse_listing(text)
    assert len({line.offset for line in found.lines}) == len(found.lines)


def test_a_long_hostile_line_costs_little() -> None:
    hostile = "=> 0x1 <" + "<" * 5000 + "+1" * 20000 + ":\tNOP\n"
    assert parse_listing(hostile * 50).lines == ()
    began = time.process_time()
    for head in (
        "0x10: ",
        "0x10 <f+0>: ",
        "=> 0x10 <f+16>:\t@!P0 BRA 0x7c000",
        "0x10: @P0 A",
        "0x10: A.B ",
        "0x",
        "Dump of assembler code",
    ):
        for filler in (" ", "\t", "A", ".A", "A ", ",", ";", "; ", "/*", "/* ", "(", "[", "0", "<", "+1"):
            for end in ("!", ";", "; x", "/*", "x;x"):
                parse_listing(f"{head}{(filler * 8000)[:8000]}{end}\n" * 5)
    assert time.process_time() - began < 10.0


def test_an_offset_with_zeros_in_front_is_one() -> None:
    assert parse_listing("0x7c10 <f+0016>:\tNOP\n").entry == 0x7C00


def test_what_ends_an_instruction_is_no_operand() -> None:
    for end in ("", ";", " ;", " ; ", "; /* 0x000fe */", " /* 0x000fe */", "/*"):
        (line,) = parse_listing(f"0x10 <f+16>:\t@!P0 LDG.E R4, [R2+0x8]{end}\n").lines
        assert (line.predicate, line.opcode, line.operands) == ("@!P0", "LDG.E", ("R4", "[R2+0x8]"))
    assert parse_listing("0x10 <f+16>:\tNOP; NOP;\n0x20 <f+32>:\tNOP;;\n").lines == ()


# -- nvdisasm


def fake_tool(folder: Path, body: str, version: str = "13.9.1") -> Path:
    """A program in nvdisasm's place: answers --version, else runs ``body``."""
    path = folder / "nvdisasm"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "release 13.9, V{version}"; exit 0; fi\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_root: Path) -> Any:
    def install(body: str, **more: str) -> None:
        path = fake_tool(tmp_path, body, **more)
        monkeypatch.setattr(disasm, "nvdisasm_path", lambda: path)

    return install


def test_a_cubin_is_disassembled_and_kept(cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = disasm.disassemble(CUBIN, "with_subroutine")
    assert found.lines == parse_json(sample("13.5"), ["with_subroutine"])["with_subroutine"].lines
    assert found.symbols == {"with_subroutine": 0, "$with_subroutine$_Z3mixPKjj": 848}
    (call,) = [line for line in found.lines if line.base == "CALL"]
    assert found.at(found.symbols[call.operands[-1]]) is not None

    def refuse(*_: object) -> bytes:
        raise AssertionError("nvdisasm was run again")

    monkeypatch.setattr(disasm, "_run", refuse)
    assert disasm.disassemble(CUBIN, "with_subroutine") == found


def test_a_damaged_cache_entry_is_made_again(cache_root: Path) -> None:
    found = disasm.disassemble(CUBIN, "with_subroutine")
    (entry,) = [path for path in cache_root.rglob("*") if path.is_file()]
    for damage in (b"", b"dsv4-repro-cache 1 0\n", entry.read_bytes()[:-7], entry.read_bytes()[:-1] + b"x"):
        entry.write_bytes(damage)
        assert disasm.disassemble(CUBIN, "with_subroutine") == found
    Cache("sass").store(entry.name, b"a valid entry with another content")
    assert disasm.disassemble(CUBIN, "with_subroutine") == found


def test_another_version_of_the_tool_is_asked_again(tool: Any) -> None:
    tool(f"cat {SAMPLES}/with_subroutine.sm_80.nvdisasm-13.1.json")
    older = disasm.disassemble(CUBIN, "with_subroutine")
    tool(f"cat {SAMPLES}/with_subroutine.sm_80.nvdisasm-13.5.json", version="13.10.12345")
    newer = disasm.disassemble(CUBIN, "with_subroutine")
    assert older.lines == newer.lines
    assert older.producer != newer.producer


def test_code_without_an_elf_is_the_same_code(cache_root: Path) -> None:
    raw = disasm.disassemble_section(CUBIN, "with_subroutine", 80)
    whole = disasm.disassemble(CUBIN, "with_subroutine")
    assert (raw.function, raw.sm, len(raw.lines)) == ("with_subroutine", 80, 152)
    for mine, theirs in zip(raw.lines, whole.lines, strict=True):
        if mine.base not in ("CALL", "RET"):
            assert mine == theirs
    # Without symbols a call says where it goes, as an offset.
    (call,) = [line for line in raw.lines if line.base == "CALL"]
    assert int(call.operands[-1], 16) == whole.symbols["$with_subroutine$_Z3mixPKjj"]
    assert disasm.disassemble_section(CUBIN, "with_subroutine", 80) == raw
    with pytest.raises(CubinError, match=r"no section \.text\.other"):
        disasm.disassemble_section(CUBIN, "other", 80)


@pytest.mark.parametrize("damage", ["empty", "short", "no elf", "half", "garbage code", "no symbols"])
def test_a_cubin_that_cannot_be_read_is_a_typed_error(damage: str, cache_root: Path) -> None:
    from dsv4_repro.kernels.elf import read_elf

    image = read_elf(CUBIN)
    section = image.section(".text.with_subroutine")
    assert section is not None
    spoiled = {
        "empty": b"",
        "short": CUBIN[:40],
        "no elf": b"\x7fELG" + CUBIN[4:],
        "half": CUBIN[: len(CUBIN) // 2],
        "garbage code": CUBIN[: section.offset] + b"\xff" * section.size + CUBIN[section.offset + section.size :],
        "no symbols": CUBIN.replace(b"with_subroutine", b"with_subroutinf"),
    }[damage]
    with pytest.raises(CubinError):
        disasm.disassemble(spoiled, "with_subroutine")
    assert not [path for path in cache_root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("size", [0, 8, 24])
def test_code_of_no_whole_instruction_is_refused(size: int, cache_root: Path) -> None:
    with pytest.raises(CubinError, match="whole number"):
        disasm.disassemble_raw(b"\0" * size, 90)


def test_a_tool_that_never_answers_is_ended(tool: Any) -> None:
    tool("exec sleep 60")
    with pytest.raises(DeadlineError, match=r"0\.2 s"):
        disasm.disassemble(CUBIN, "with_subroutine", deadline_s=0.2)


def test_a_tool_that_closes_its_output_and_stays_is_ended(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tool("exec >&- 2>&-; exec sleep 60")
    with pytest.raises(DeadlineError):
        disasm.disassemble(CUBIN, "with_subroutine", deadline_s=0.2)


def test_a_tool_that_never_stops_talking_is_ended(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disasm, "MAX_OUTPUT_BYTES", 1 << 20)
    tool("exec yes")
    with pytest.raises(CubinError, match="more than 1 MiB"):
        disasm.disassemble(CUBIN, "with_subroutine")


def test_what_the_tool_complains_about_is_passed_on(tool: Any) -> None:
    tool("echo 'nvdisasm fatal   : Unknown architecture SM999' >&2; exit 1")
    with pytest.raises(CubinError, match="Unknown architecture SM999"):
        disasm.disassemble(CUBIN, "with_subroutine")


def test_an_answer_without_the_function_is_refused(tool: Any) -> None:
    tool(f"cat <<'END'\n{document({'opcode': 'NOP'})}\nEND")
    with pytest.raises(CubinError, match="gave no instruction of with_subroutine"):
        disasm.disassemble(CUBIN, "with_subroutine")


def test_a_missing_tool_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissingError) as caught:
        disasm.nvdisasm_path()
    assert caught.value.help_text == "pip install nvidia-cuda-nvdisasm"
    on_path = fake_tool(tmp_path, "true")
    assert disasm.nvdisasm_path() == on_path
    assert disasm.nvdisasm_version() == "13.9.1"


def test_a_tool_that_does_not_run_is_a_missing_tool(tmp_path: Path) -> None:
    broken = tmp_path / "nvdisasm"
    broken.write_bytes(b"\x7fELF, but of no machine")
    broken.chmod(0o755)
    with pytest.raises(ToolMissingError, match="does not run"):
        disasm.nvdisasm_version(broken)


def test_a_cache_in_an_impossible_place_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DSV4_REPRO_CACHE", str(tmp_path / "file" / "cache"))
    assert disasm.disassemble(CUBIN, "with_subroutine").lines
