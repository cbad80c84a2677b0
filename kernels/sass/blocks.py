"""Basic blocks of a decoded function, and the Python function that each becomes.

A block is compiled once for each *mode* (all threads; some, by index or slice; one thread) and each *key* (which of the
registers it touches are uniform). Registers are read once at the start, results written once at the end, nothing is masked in
between: threads that do not take part are simply not in the arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...errors import UnknownInstructionError
from .accesses import access
from .decode import INSTRUCTION_BYTES, Instruction, SassFunction
from .emit import EmitAlgebra
from .emit_values import Value
from .isa import NO_OPERATION
from .layout import ConstantLayout
from .operands import PT, RZ, Operand
from .semantics import NoSemanticsError, execute
from .warp import warp_operation

__all__ = ["ALL", "ONE", "SOME", "Block", "BlockWriter", "Blocks", "register_number"]

#: Modes: every thread of the machine; some threads (``ix`` is a slice or a sorted index array); one thread (``ix`` is its number).
ALL, SOME, ONE = "all", "some", "one"
UNIFORM_BASE, PREDICATE_BASE, UNIFORM_PREDICATE_BASE = 256, 512, 520
REGISTERS = 528
SYNCHRONISING = frozenset({"BSYNC", "BAR", "WARPSYNC"})
_ENDS = frozenset({"BRA", "EXIT", "RET", "CALL"})


def register_number(operand: Operand) -> int | None:
    """Position in the machine's register file: R at 0, UR at 256, P at 512, UP at 520; None for RZ, URZ, PT and UPT."""
    index = operand.index
    assert index is not None
    if operand.kind in ("reg", "ureg"):
        return None if index == RZ else index + (UNIFORM_BASE if operand.kind == "ureg" else 0)
    return None if index == PT else index + (UNIFORM_PREDICATE_BASE if operand.kind == "upred" else PREDICATE_BASE)


def is_sync(instruction: Instruction) -> bool:
    """Whether threads wait at this instruction for others: BSYNC, BAR, WARPSYNC, and the branches on divergence.

    BRA.DIV leaves for a slow path if the warp has diverged, BRA.CONV jumps over one if it has not: both are taken as a WARPSYNC
    after which the warp is together.
    """
    return instruction.opcode in SYNCHRONISING or (
        instruction.opcode == "BRA" and (instruction.has("DIV") or instruction.has("CONV"))
    )


@dataclass
class Block:
    """Instructions from ``start`` up to ``end`` (bytes). ``terminator``: the last instruction if it decides where to go, else None.

    ``poll``: the terminator branches back over a region that reads global memory strongly and does nothing else that others see.
    """

    start: int
    end: int
    instructions: tuple[Instruction, ...]
    terminator: Instruction | None
    poll: bool
    reads: int = 0
    writes: int = 0
    functions: dict[tuple[str, int, bool], Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.size = len(self.instructions)
        last = self.terminator
        self.kind = "next" if last is None else last.opcode
        self.target = -1 if last is None or last.target is None else last.target


class BlockWriter:
    """The code generator's side of ``semantics.Context``: symbolic state of one block in one mode under one key."""

    def __init__(self, layout: ConstantLayout, mode: str, uniform: int, single: bool, checks: bool) -> None:
        self.layout = layout
        self.mode = mode
        self.uniform = uniform
        self.single = single
        self.checks = checks
        self.algebra = EmitAlgebra("1" if mode == ONE else "n")
        self.needs: set[str] = set()
        self.live_in: dict[int, Value] = {}
        self.state: dict[int, Value] = {}
        self.guard: Value = self.algebra.truth(True)
        self.offset = 0
        self._tables: dict[str, Value] = {}

    # ---- registers -----------------------------------------------------------------------------------------------------

    def _sort(self, number: int) -> str:
        return "t" if number >= PREDICATE_BASE else "w"

    def read(self, number: int) -> Value:
        """Current value of a register by its position in the register file."""
        value = self.state.get(number)
        if value is None:
            value = self.state[number] = self.live_in[number] = self._load_register(number)
        return value

    def _load_register(self, number: int) -> Value:
        sort = self._sort(number)
        if self.mode == ONE:
            kind = "bool" if sort == "t" else "int"
            return self._lazy(f"r if (r := regs[{number}]).__class__ is {kind} else r.item(ix)", "u", sort)
        if self.uniform >> number & 1:
            return self._lazy(f"regs[{number}]", "u", sort)
        return self._lazy(f"regs[{number}]" if self.mode == ALL else f"regs[{number}][ix]", "v", sort, alias=True)

    def _lazy(self, text: str, kind: str, sort: str, *, alias: bool = False) -> Value:
        value = self.algebra.unnamed(text, kind, sort)
        value.alias = alias
        return value

    def write(self, number: int | None, value: Value) -> None:
        if number is None:
            return
        if self.guard.const != 1:
            value = self.algebra.choose(self.guard, value, self.read(number))
        self.state[number] = value

    # ---- semantics.Context -----------------------------------------------------------------------------------------------

    def bare(self, operand: Operand) -> Value:
        if operand.suffix:
            raise NoSemanticsError(f"operand {operand.text}")
        if operand.kind in ("reg", "ureg"):
            number = register_number(operand)
            return self.algebra.word(0) if number is None else self.read(number)
        if operand.kind == "imm":
            return self.algebra.word(operand.value)
        if operand.kind == "const":
            return self.constants(operand, 1)[0]
        raise NoSemanticsError(f"operand {operand.text}")

    def word(self, operand: Operand) -> Value:
        if operand.absolute:
            raise NoSemanticsError(f"operand {operand.text}")
        value = self.bare(operand)
        if operand.invert:
            value = self.algebra.not_(value)
        return self.algebra.sub(self.algebra.word(0), value) if operand.negate else value

    def quad(self, operand: Operand) -> Value:
        if operand.suffix or operand.absolute or operand.invert:
            raise NoSemanticsError(f"operand {operand.text}")
        if operand.kind in ("reg", "ureg"):
            number = register_number(operand)
            value = self.algebra.quad(0) if number is None else self.algebra.pair(self.read(number), self.read(number + 1))
        elif operand.kind == "const":
            value = self.algebra.pair(*self.constants(operand, 2))
        elif operand.kind == "imm" and operand.value < 1 << 31:
            value = self.algebra.quad(operand.value)
        else:
            raise NoSemanticsError(f"64-bit operand {operand.text}")
        return self.algebra.subq(self.algebra.quad(0), value) if operand.negate else value

    def truth(self, operand: Operand) -> Value:
        if operand.kind not in ("pred", "upred"):
            raise NoSemanticsError(f"predicate operand {operand.text}")
        number = register_number(operand)
        value = self.algebra.truth(True) if number is None else self.read(number)
        return self.algebra.negation(value) if operand.invert else value

    def predicate(self, index: int) -> Value:
        return self.read(PREDICATE_BASE + index)

    def set_predicate(self, index: int, value: Value) -> None:
        self.write(PREDICATE_BASE + index, value)

    def set_word(self, operand: Operand, value: Value) -> None:
        self.write(register_number(operand), value)

    def set_truth(self, operand: Operand, value: Value) -> None:
        self.write(register_number(operand), value)

    def set_quad(self, operand: Operand, value: Value) -> None:
        number = register_number(operand)
        if number is not None:
            self.write(number, self.algebra.low(value))
            self.write(number + 1, self.algebra.high(value))

    def set_words(self, operand: Operand, values: list[Value]) -> None:
        number = register_number(operand)
        if number is not None:
            for step, value in enumerate(values):
                self.write(number + step, value)

    def constants(self, operand: Operand, count: int) -> list[Value]:
        if operand.bank != 0 or not all(self.layout.known(operand.value + 4 * step) for step in range(count)):
            raise NoSemanticsError(f"constant {operand.text} is not one that the launcher sets")
        self.needs.add("K")
        return [self._table(f"K[{operand.value + 4 * step}]", "u") for step in range(count)]

    def _table(self, text: str, kind: str) -> Value:
        value = self._tables.get(text)
        if value is None:
            value = self._tables[text] = self._lazy(text, kind, "w", alias=kind == "v")
        return value

    def special(self, name: str) -> Value:
        if name == "SR_CgaCtaId":
            return self.algebra.word(0)
        if name == "SR_SWINHI":
            return self.algebra.word(self.layout.shared_window)
        if self.single and name in ("SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z"):
            return self._table(f"S.block_index[{name!r}]", "u")
        if name not in ("SR_TID.X", "SR_TID.Y", "SR_TID.Z", "SR_LANEID", "SR_LTMASK", "SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z"):
            raise NoSemanticsError(f"special register {name}")
        return self.per_thread(f"S.special[{name!r}]")

    def per_thread(self, table: str) -> Value:
        """An element a thread from a table over all threads of the machine."""
        if self.mode == ONE:
            return self._table(f"{table}.item(ix)", "u")
        return self._table(table if self.mode == ALL else f"{table}[ix]", "v")

    # ---- one instruction ---------------------------------------------------------------------------------------------------

    def step(self, i: Instruction) -> None:
        """Apply one instruction that does not end the block. NoSemanticsError if it has none."""
        self.guard = self.condition_of_guard(i)
        self.offset = i.offset
        if i.problem:
            raise NoSemanticsError(i.problem)
        if self.guard.const == 0 or i.opcode in NO_OPERATION:
            return
        if execute(i, self) or access(i, self) or warp_operation(i, self):
            return
        if i.opcode == "BSSY" and self.guard.const == 1:
            self.algebra.lines.append(f"S.note_convergence({i.dests[0].index}, ix)")
            return
        if i.opcode == "BREAK":
            guard = "None" if self.guard.const == 1 else self.algebra.ref(self.guard)
            self.algebra.lines.append(f"S.leave_convergence({i.sources[0].index}, ix, {guard})")
            return
        if i.opcode == "BMOV" and i.modifiers == ("32", "CLEAR") and i.dests and i.dests[0].is_zero:
            return
        raise NoSemanticsError("no semantics")

    def condition_of_guard(self, i: Instruction) -> Value:
        if i.guard is None or i.guard.index == PT:
            return self.algebra.truth(i.guard is None or not i.guard.negated)
        value = self.read(i.guard.index + (UNIFORM_PREDICATE_BASE if i.guard.uniform else PREDICATE_BASE))
        return self.algebra.negation(value) if i.guard.negated else value

    def outcome(self, i: Instruction) -> str:
        """Source text of what the block returns: for whom the terminator acts, and for RET where it goes."""
        if i.problem:
            raise NoSemanticsError(i.problem)
        condition = self.condition_of_guard(i)
        if i.opcode == "RET":
            where = self.bare(i.sources[0])
            return f"{self.algebra.ref(condition)}, {self.algebra.ref(where)}"
        for operand in i.sources:
            condition = self.algebra.both(condition, self.truth(operand))
        return self.algebra.ref(condition)

    # ---- the end -----------------------------------------------------------------------------------------------------------

    def changed(self) -> dict[int, Value]:
        return {number: value for number, value in self.state.items() if self.live_in.get(number) is not value}

    def finish(self) -> list[str]:
        """Statements that write the results: every value is computed before the first register changes."""
        algebra = self.algebra
        results = sorted(self.changed().items())
        names: list[tuple[int, Value, str]] = []
        used: set[str] = set()
        for number, value in results:
            name = algebra.ref(value)
            if value.kind == "v" and (value.alias or name in used):
                copy = algebra.fresh()
                algebra.lines.append(f"{copy} = {name}.copy()")
                name = copy
            used.add(name)
            names.append((number, value, name))
        lines: list[str] = []
        now_uniform = now_vector = 0
        for number, value, name in names:
            kind = "bool_" if self._sort(number) == "t" else "u4"
            if self.mode == ALL:
                lines.append(f"regs[{number}] = {name}")
                if value.kind == "u":
                    now_uniform |= 1 << number
                else:
                    now_vector |= 1 << number
            elif self.mode == ONE or (value.kind == "u" and self.uniform >> number & 1):
                lines.append(f"S.put({number}, ix, {name}, {kind})")
            elif self.uniform >> number & 1:
                lines.append(f"regs[{number}] = expand(S.size, regs[{number}], ix, {name}, {kind})")
                now_vector |= 1 << number
            else:
                lines.append(f"regs[{number}][ix] = {name}")
        if now_uniform:
            lines.append(f"S.uniform |= {now_uniform:#x}")
        if now_vector:
            lines.append(f"S.uniform &= ~{now_vector:#x}")
        return lines


class Blocks:
    """All blocks of one function, made when first reached. ``compiled`` counts functions made in this process."""

    def __init__(
        self,
        function: SassFunction,
        layout: ConstantLayout,
        checks: bool,
        loader: Callable[[str, Callable[[], str]], Callable[..., Any]],
    ) -> None:
        self.function = function
        self.layout = layout
        self.checks = checks
        self._loader = loader
        self._blocks: dict[int, Block] = {}
        self.leaders = self._leaders()

    def _leaders(self) -> frozenset[int]:
        leaders = {0}
        for i in self.function.instructions:
            if i.target is not None and i.opcode in ("BRA", "CALL"):
                leaders.add(i.target)
            if i.opcode in _ENDS:
                leaders.add(i.offset + INSTRUCTION_BYTES)
            if is_sync(i):
                leaders.update((i.offset, i.offset + INSTRUCTION_BYTES))
        return frozenset(leaders)

    def _polls(self, i: Instruction) -> bool:
        """A backward branch over a region that loads strongly from global memory, with no CTA barrier in it."""
        if i.opcode != "BRA" or i.target is None or i.target > i.offset:
            return False
        region = self.function.instructions[i.target // INSTRUCTION_BYTES : i.offset // INSTRUCTION_BYTES]
        strong = any(
            x.opcode in ("LDG", "LD", "ATOM", "ATOMG") and (x.has("STRONG") or x.opcode.startswith("ATOM")) for x in region
        )
        return strong and len(region) <= 64 and not any(x.opcode == "BAR" for x in region)

    def at(self, offset: int) -> Block:
        """The block that starts at ``offset``, which need not be a leader (RET may go anywhere)."""
        block = self._blocks.get(offset)
        if block is None:
            block = self._blocks[offset] = self._make(offset)
        return block

    def _make(self, start: int) -> Block:
        instructions: list[Instruction] = []
        offset = start
        terminator = None
        while True:
            i = self.function.at(offset)
            instructions.append(i)
            offset += INSTRUCTION_BYTES
            if i.opcode in _ENDS and not is_sync(i):
                terminator = i
                break
            if offset in self.leaders or offset // INSTRUCTION_BYTES >= len(self.function.instructions):
                break
        block = Block(start, offset, tuple(instructions), terminator, terminator is not None and self._polls(terminator))
        writer = self._write(block, SOME, 0, False)[0]
        for number in writer.live_in:
            block.reads |= 1 << number
        for number in writer.changed():
            block.writes |= 1 << number
        return block

    def _write(self, block: Block, mode: str, uniform: int, single: bool) -> tuple[BlockWriter, str]:
        writer = BlockWriter(self.layout, mode, uniform, single, self.checks)
        result = "None"
        i = block.instructions[0]
        try:
            for i in block.instructions:
                if i is block.terminator:
                    result = writer.outcome(i)
                else:
                    writer.step(i)
        except NoSemanticsError as error:
            raise UnknownInstructionError(f"{error}: {i.where(self.function.name)}") from error
        end = writer.finish()
        lines = [f"{name} = S.{name}" for name in sorted(writer.needs)] + writer.algebra.lines + end + [f"return {result}"]
        return writer, "def block(S, regs, ix, n):\n" + "".join(f"    {line}\n" for line in lines)

    def source(self, block: Block, mode: str, uniform: int, single: bool) -> str:
        """The generated function of a block as source text."""
        return self._write(block, mode, uniform, single)[1]

    def compiled(self, block: Block, mode: str, key: int, single: bool) -> Callable[..., Any]:
        """The generated function, from the loader's cache or made now."""
        name = f"{block.start:x}.{mode}.{key:x}.{int(single)}.{int(self.checks)}"
        function = self._loader(name, lambda: self.source(block, mode, key, single))
        block.functions[mode, key, single] = function
        return function
