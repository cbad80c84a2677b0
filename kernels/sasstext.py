"""Instructions as text: the record, nvdisasm's JSON, and what a debugger prints. Pure: bytes and text in, frozen records out.

nvdisasm's JSON differs by version. What 12.8, 13.1, 13.2, 13.3, 13.4 and 13.5 print was compared on all nine persistent top-k
kernels of two vLLM releases for sm_75 to sm_120: after the following it is the same, instruction by instruction (13.0 is on no
package index that was at hand):

* up to 13.4 a function with local subroutines comes as several elements, ``start`` counting from the section's begin; 13.5
  gives one element. Both are merged here into one list by offset.
* up to 13.4 a load or atomic is printed without the comma before its address (``R4[R1+0x94]``). The comma is restored.
* ``P2R R18, PR, RZ, 0x10`` comes with ``predicate: "PR"`` and without that operand. It is put back.
* branch targets are offsets from the section's begin; calls name the subroutine's symbol (``Disassembly.symbols`` resolves them).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import CubinError

__all__ = ["INSTRUCTION_BYTES", "Disassembly", "Listing", "SassLine", "parse_json", "parse_listing", "split_operands"]

#: Every instruction from sm_75 on is 16 bytes long.
INSTRUCTION_BYTES = 16

_GUARD = re.compile(r"@!?U?P(?:[0-9]+|T)")
_MISSING_COMMA = re.compile(r"(?<![\w\]])(U?R(?:\d+|Z)(?:\.reuse)?)\[")


@dataclass(frozen=True, slots=True)
class SassLine:
    """One instruction. ``offset``: bytes from the function's first instruction. ``predicate``: the guard as ``@P0`` or ``@!UP1``,
    "" if none. ``opcode``: with its modifiers, ``LDG.E.STRONG.GPU``. ``operands``: as printed, ``desc[UR4][R2.64+0xc08]``;
    a branch target is a byte offset from the same origin as ``offset``.
    """

    offset: int
    predicate: str
    opcode: str
    operands: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    @property
    def text(self) -> str:
        """As nvdisasm prints it in text mode, without offset and semicolon."""
        guard = f"{self.predicate} " if self.predicate else ""
        tail = " " + ", ".join(self.operands) if self.operands else ""
        return f"{guard}{self.opcode}{tail}"


@dataclass(frozen=True, slots=True)
class Disassembly:
    """One function and its local subroutines, instruction i at ``lines[i]``, offset 16 * i.

    ``symbols``: byte offsets of the functions in the same section (the kernel itself at 0), as calls and returns name them.
    ``producer``: which nvdisasm said so. ``sm``: 90 for sm_90.
    """

    function: str
    sm: int
    lines: tuple[SassLine, ...]
    symbols: Mapping[str, int] = field(default_factory=dict)
    producer: str = ""

    @property
    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """(opcode, operands, guard) of each instruction, the operands joined by commas."""
        return tuple((line.opcode, ",".join(line.operands), line.predicate) for line in self.lines)

    def at(self, offset: int) -> SassLine | None:
        """The instruction at a byte offset; None outside the function or between instructions."""
        index, rest = divmod(offset, INSTRUCTION_BYTES)
        return self.lines[index] if not rest and 0 <= index < len(self.lines) else None


@dataclass(frozen=True, slots=True)
class Listing:
    """What a debugger printed around a PC. ``entry``: virtual address of the function's start, None if the text gives no offsets.

    ``current``: the offset marked ``=>``. A listing may have gaps; ``lines`` is sorted by offset and holds each offset once.
    """

    function: str
    entry: int | None
    lines: tuple[SassLine, ...]
    current: int | None = None


def split_operands(text: str) -> tuple[str, ...]:
    """``R4,desc[UR16][R4.64+0xc08]`` or the same with blanks, as a tuple; commas inside brackets do not split."""
    text = _MISSING_COMMA.sub(r"\1,[", text.strip())
    if not text:
        return ()
    parts: list[str] = []
    depth = 0
    begin = 0
    for position, letter in enumerate(text):
        if letter in "[({":
            depth += 1
        elif letter in "])}":
            depth -= 1
        elif letter == "," and depth <= 0:
            parts.append(text[begin:position].strip())
            begin = position + 1
    parts.append(text[begin:].strip())
    return tuple(parts)


def _sass_line(offset: int, predicate: str, opcode: str, operands: str) -> SassLine:
    fields = split_operands(operands)
    if predicate and not _GUARD.fullmatch(predicate):
        # P2R's register file operand is printed in the guard's place; it is the second operand of P2R and the first of R2P.
        place = 0 if opcode.startswith("R2P") else 1
        fields = (*fields[:place], predicate, *fields[place:])
        predicate = ""
    return SassLine(offset, predicate, sys.intern(opcode), fields)


# ---------------------------------------------------------------------------------------------------------------------------------
# nvdisasm's JSON


def parse_json(document: str | bytes, names: Iterable[str] = (), *, path: str = "nvdisasm -json") -> dict[str, Disassembly]:
    """nvdisasm's JSON document as one ``Disassembly`` a function.

    ``names``: the functions that start a section (the kernels); other elements are subroutines of the one before them. Without
    names every element with ``start`` 0 starts a function. Raises CubinError for anything that does not have the known shape.
    """
    try:
        parsed = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise CubinError(f"not the disassembler's JSON: {str(error)[:120]}", path=path) from None
    try:
        header, elements = parsed
        version = header["SM"]["version"]
        sm = int(version["major"]) * 10 + int(version["minor"])
        producer = str(header.get("Producer", ""))
        heads = frozenset(names)
        found: dict[str, Disassembly] = {}
        function = ""
        lines: list[SassLine] = []
        for element in elements:
            name, start = str(element["function-name"]), int(element["start"])
            if name in heads or (not heads and start == 0) or not function:
                function, origin = name, start
                lines = []
            if start - origin != len(lines) * INSTRUCTION_BYTES:
                raise CubinError(
                    f"{name} starts at {start:#x}, after {len(lines)} instructions of {function}", path=path, place="start"
                )
            for entry in element["sass-instructions"]:
                offset = len(lines) * INSTRUCTION_BYTES
                lines.append(
                    _sass_line(offset, str(entry.get("predicate") or ""), str(entry["opcode"]), str(entry.get("operands") or ""))
                )
            found[function] = Disassembly(function, sm, tuple(lines), producer=producer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CubinError(f"the disassembler's JSON has an unknown shape: {error!r:.120}", path=path) from None
    return found


# ---------------------------------------------------------------------------------------------------------------------------------
# Debugger listings

_LISTING_LINE = re.compile(
    r"^\s*(?P<mark>=>|\*>|\*=>)?\s*(?P<address>0x[0-9a-fA-F]{1,16})\s*"
    r"(?:<(?P<name>.{0,4000}?)(?:\+(?P<plus>0x[0-9a-fA-F]{1,12}|\d{1,12}))?>\s*)?:(?!:)\s*(?P<code>\S.*)$"
)
_HEADER_LINE = re.compile(r"^Dump of assembler code for function (?P<name>.{1,4000}?):?\s*$")
_CODE = re.compile(r"^(?P<guard>@!?U?P(?:\d|T))?\s*(?P<opcode>[A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)(?P<operands>.*)$")
_TARGET = re.compile(r"0x[0-9a-fA-F]{1,16}")
_BRANCHES = frozenset(("BRA", "BRX", "JMP", "CALL", "BSSY", "JMX", "BRXU", "JMXU", "SYNC", "CONT"))
MAX_LISTING_LINES = 200_000


def parse_listing(text: str) -> Listing:
    """Read a disassembly as cuda-gdb prints it: ``=> 0x7fff... <kernel+7392>:\\tLDG.E.STRONG.GPU R4, [R4.64+0xc08]``.

    Lines that are no instruction are skipped. With ``<name+offset>`` on any line, offsets and branch targets count from the
    function's start; without it (``entry`` None) offsets are the printed addresses themselves. Lines of another function than
    that of the marked line (else: of the first) are left out. Raises nothing: no instruction gives an empty listing.
    """
    rows: list[tuple[int, str | None, int | None, bool, str]] = []
    header = None
    for number, line in enumerate(text.splitlines()):
        if number >= MAX_LISTING_LINES:
            break
        match = _LISTING_LINE.match(line[:8192])
        if match:
            address = int(match["address"], 16)
            name = match["name"] or header
            given = match["plus"] or ("0" if match["name"] else "")
            plus = int(given, 16 if given.startswith("0x") else 10) if given else None  # base 0 refuses 007
            rows.append((address, name, plus, bool(match["mark"]), match["code"]))
            continue
        found = _HEADER_LINE.match(line[:8192])
        if found:
            header = found["name"]
    marked = [row for row in rows if row[3]]
    chosen = (marked or rows)[0][1] if rows else None
    rows = [row for row in rows if row[1] == chosen]
    entry = next((address - plus for address, _, plus, _, _ in rows if plus is not None and address >= plus), None)
    origin = entry or 0
    lines: dict[int, SassLine] = {}
    current: int | None = None
    for address, _, _, mark, code in rows:
        # Cut by hand: a pattern for what ends an instruction shares a long run of blanks out in every way there is.
        code = code.partition("/*")[0].strip().removesuffix(";")
        parts = _CODE.match(code) if ";" not in code else None
        if parts is None or address < origin:
            continue
        offset = address - origin
        fields = split_operands(parts["operands"])
        if parts["opcode"].partition(".")[0] in _BRANCHES and fields and _TARGET.fullmatch(fields[-1]):
            target = int(fields[-1], 16)
            if target >= origin:
                fields = (*fields[:-1], hex(target - origin))
        lines[offset] = SassLine(offset, parts["guard"] or "", parts["opcode"], fields)
        if mark:
            current = offset
    return Listing(chosen or "", entry, tuple(lines[key] for key in sorted(lines)), current)
