"""nvdisasm's JSON → frozen, typed instructions. Needs neither NumPy nor a solver: the interpreter and the symbolic engine share it.

Instruction i of a section is at byte 16*i; scheduling (stall counts, ``.reuse``) is not in the JSON and not needed by an in-order
interpreter. JSON of nvdisasm 13.2 to 13.5 is accepted: before 13.5 each subroutine is a function entry of its own and the comma
between a loaded register and its address is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import CubinError, UnknownInstructionError
from .isa import destination_count, unknown_part
from .operands import PT, RZ, Operand, parse_operand, split_operands

__all__ = ["PT", "RZ", "Guard", "Instruction", "Operand", "SassFunction", "decode", "decode_row", "decode_rows"]

INSTRUCTION_BYTES = 16
#: More instructions than any kernel of this family has by a factor of 100: a bound on hostile input.
MAX_INSTRUCTIONS = 1_000_000
_GUARD = re.compile(r"@(!?)(U?)P([0-6T])")
_OFFSET = re.compile(r"0x[0-9a-f]{1,8}")
_TARGETED = frozenset({"BRA", "BSSY", "CALL", "JMP"})


@dataclass(frozen=True, slots=True)
class Guard:
    """``@P0`` / ``@!P0`` / ``@UP0`` in front of an instruction: it executes only where the predicate holds."""

    index: int
    negated: bool
    uniform: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. ``offset``: bytes from the function's start. ``opcode``: the mnemonic before the first dot.

    ``dests`` and ``sources`` are the printed operands in order, split by the opcode's shape: dests come first (predicates such
    as carry-outs included). A memory operand is always a source; a store has no dests. ``target``: where BRA, BSSY, CALL and
    WARPSYNC.COLLECTIVE point to, bytes from the function's start; their label is not among the sources. ``problem``: why
    nothing here knows what it does ("" if known); such an instruction must not be executed or reasoned about.
    """

    offset: int
    opcode: str
    modifiers: tuple[str, ...]
    guard: Guard | None
    dests: tuple[Operand, ...]
    sources: tuple[Operand, ...]
    target: int | None
    text: str
    problem: str = ""

    @property
    def mnemonic(self) -> str:
        """Opcode with modifiers, e.g. ``ISETP.GT.U32.AND``."""
        return ".".join((self.opcode, *self.modifiers))

    def has(self, modifier: str) -> bool:
        return modifier in self.modifiers

    def where(self, kernel: str) -> str:
        """For messages: ``+0x1c20 LDG.E R5,[R10.64] in kernel``."""
        return f"+{self.offset:#x} {self.text} in {kernel}"


@dataclass(frozen=True)
class SassFunction:
    """One kernel function with its subroutines: ``instructions[i].offset == 16 * i``.

    ``symbols``: subroutine name to byte offset. ``sm``: architecture such as 90 or 120. ``rows``: what was decoded, as (opcode,
    operands, predicate) text, for caches.
    """

    name: str
    sm: int
    instructions: tuple[Instruction, ...]
    symbols: Mapping[str, int]
    rows: tuple[tuple[str, str, str], ...] = field(repr=False, default=())

    def at(self, offset: int) -> Instruction:
        """The instruction at a byte offset; CubinError if there is none."""
        index, rest = divmod(offset, INSTRUCTION_BYTES)
        if rest or not 0 <= index < len(self.instructions):
            raise CubinError(f"no instruction at offset {offset:#x} of {self.name}")
        return self.instructions[index]

    @property
    def unknown(self) -> tuple[Instruction, ...]:
        """Instructions without semantics here."""
        return tuple(instruction for instruction in self.instructions if instruction.problem)


def _guard_and_operands(opcode: str, predicate: str, operands: str) -> tuple[Guard | None, list[str], str]:
    parts = list(split_operands(operands))
    if not predicate:
        return None, parts, ""
    match = _GUARD.fullmatch(predicate)
    if match is not None:
        return Guard(PT if match.group(3) == "T" else int(match.group(3)), match.group(1) == "!", match.group(2) == "U"), parts, ""
    if predicate in ("PR", "UPR") and opcode in ("P2R", "R2P"):
        # nvdisasm's JSON puts the PR operand of P2R and R2P where a guard belongs.
        parts.insert(1 if opcode == "P2R" else 0, "PR")
        return None, parts, ""
    return None, parts, f"guard {predicate!r}"


def decode_row(offset: int, row: Sequence[str], symbols: Mapping[str, int]) -> Instruction:
    """One (opcode, operands, predicate) row. Never raises for what it does not know: ``problem`` says it."""
    mnemonic, operand_text, predicate = row
    opcode, *rest = mnemonic.split(".")
    modifiers = tuple(rest)
    text = f"{predicate + ' ' if predicate else ''}{mnemonic}{' ' + operand_text if operand_text else ''}"
    guard, parts, problem = _guard_and_operands(opcode, predicate, operand_text)
    operands: list[Operand] = []
    labels: list[Operand] = []
    target: int | None = None
    if opcode in _TARGETED or (opcode == "WARPSYNC" and "COLLECTIVE" in modifiers):
        label = parts.pop() if parts else ""
        if label in symbols:
            target = symbols[label]
        elif _OFFSET.fullmatch(label) is not None:
            target = int(label, 16)
        else:
            problem = problem or f"target {label!r}"
    elif opcode == "RET" and parts:
        labels.append(Operand("label", parts.pop()))
    for part in parts:
        try:
            operands.append(parse_operand(part))
        except ValueError as error:
            problem = problem or str(error)
            operands.append(Operand("unknown", part))
    operands += labels
    problem = problem or unknown_part(opcode, modifiers)
    count = destination_count(opcode, operands)
    return Instruction(offset, opcode, modifiers, guard, tuple(operands[:count]), tuple(operands[count:]), target, text, problem)


def _functions(document: Any) -> tuple[int, list[Mapping[str, Any]]]:
    try:
        header, functions = document
        version = header["SM"]["version"]
        sm = int(version["major"]) * 10 + int(version["minor"])
        listed = sorted(functions, key=lambda item: int(item["start"]))
        for item in listed:
            if not isinstance(item["function-name"], str) or not isinstance(item["sass-instructions"], list):
                raise TypeError("function entry")
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CubinError(f"not the JSON of nvdisasm 13: {error!r}") from error
    if not listed:
        raise CubinError("the disassembly holds no function")
    return sm, listed


def _rows(functions: Iterable[Mapping[str, Any]], name: str) -> tuple[list[tuple[str, str, str]], dict[str, int]]:
    rows: list[tuple[str, str, str]] = []
    symbols: dict[str, int] = {}
    for item in functions:
        start = int(item["start"])
        if start != len(rows) * INSTRUCTION_BYTES:
            raise CubinError(
                f"instructions of {item['function-name']} start at {start:#x}, {len(rows) * INSTRUCTION_BYTES:#x} expected"
            )
        symbols[item["function-name"]] = start
        for raw in item["sass-instructions"]:
            try:
                row = (raw["opcode"], raw.get("operands", ""), raw.get("predicate", ""))
            except (TypeError, KeyError, AttributeError) as error:
                raise CubinError(f"instruction {len(rows)} of {name} has no opcode") from error
            if not all(isinstance(part, str) for part in row):
                raise CubinError(f"instruction {len(rows)} of {name} is not text")
            rows.append(row)
            if len(rows) > MAX_INSTRUCTIONS:
                raise CubinError(f"{name} has more than {MAX_INSTRUCTIONS} instructions")
    return rows, symbols


def decode(document: Any, *, symbols: Mapping[str, int] | None = None, strict: bool = True) -> SassFunction:
    """``nvdisasm -json -fun IDX`` as parsed JSON → one function with its subroutines.

    ``symbols``: subroutine offsets from the cubin's symbol table (bytes from the function's start), needed for nvdisasm 13.5,
    which names callees without saying where they are. CubinError if the document is not of that form. With ``strict`` an
    instruction without semantics raises UnknownInstructionError (instruction, offset, kernel); without, it stays in place with
    ``problem`` set and whoever reaches it must raise.
    """
    sm, functions = _functions(document)
    name = functions[0]["function-name"]
    rows, found = _rows(functions, name)
    found.update(symbols or {})
    return decode_rows(name, sm, rows, found, strict=strict)


def decode_rows(
    name: str, sm: int, rows: Sequence[tuple[str, str, str]], symbols: Mapping[str, int], *, strict: bool = True
) -> SassFunction:
    """The same from (opcode, operands, predicate) rows, as a cache or the package holds them."""
    instructions = tuple(decode_row(index * INSTRUCTION_BYTES, row, symbols) for index, row in enumerate(rows))
    function = SassFunction(name, sm, instructions, dict(symbols), tuple(rows))
    for instruction in instructions:
        target = instruction.target
        if target is not None and (target % INSTRUCTION_BYTES or not 0 <= target < len(rows) * INSTRUCTION_BYTES):
            raise CubinError(f"branch target {target:#x} is outside the function: {instruction.where(name)}")
        if strict and instruction.problem:
            raise UnknownInstructionError(f"{instruction.problem}: {instruction.where(name)}")
    return function
