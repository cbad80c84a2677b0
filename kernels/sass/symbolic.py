"""One thread executed over terms: the interpreter's own instruction semantics (``semantics``) with terms for values.

The same code serves symbolic execution (``Terms``) and constant propagation (``Constants``). What a single thread does not
determine (shared
memory, other lanes, floating point of unknown values) is a fresh, unconstrained value: an over-approximation, so that "no such
input" stays
true. An instruction that the decoder does not know raises UnknownInstructionError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...errors import UnknownInstructionError
from .decode import PT, RZ, Guard, Instruction, Operand
from .isa import NO_OPERATION
from .semantics import SEMANTICS, NoSemanticsError, execute
from .symbolic_algebra import TermAlgebra
from .symbolic_terms import MASK, Bit, Terms, Word

__all__ = ["EFFECT_FREE", "Environment", "ThreadState", "guard_of", "step", "truth_operand", "word_operand"]

_Pair = tuple[Any, Any]


@dataclass(slots=True)
class ThreadState:
    """Registers, predicates and the thread's own (local) memory by byte address. What was never written is unknown."""

    regs: dict[int, Word] = field(default_factory=dict)
    uregs: dict[int, Word] = field(default_factory=dict)
    preds: dict[int, Bit] = field(default_factory=dict)
    upreds: dict[int, Bit] = field(default_factory=dict)
    local: dict[int, Word] = field(default_factory=dict)

    def copy(self) -> ThreadState:
        return ThreadState(dict(self.regs), dict(self.uregs), dict(self.preds), dict(self.upreds), dict(self.local))


@dataclass(frozen=True, slots=True)
class Environment:
    """What surrounds the thread. ``constant(offset)``: a 32-bit word of constant bank 0, None if not known. ``special``: special
    registers.

    ``load(instruction, low, high, bytes)``: the words that a global load gives, None if not known.
    """

    terms: Terms
    algebra: TermAlgebra
    constant: Callable[[int], Word | None]
    special: dict[str, Word]
    load: Callable[[Instruction, Word, Word, int], list[Word] | None]


class _Context:
    """``semantics.Context`` of one thread. A write under a guard keeps the old value where the guard is false."""

    __slots__ = ("algebra", "env", "guard", "state")

    def __init__(self, env: Environment, state: ThreadState, guard: Bit) -> None:
        self.env, self.state, self.guard, self.algebra = env, state, guard, env.algebra

    # -- reading ----------------------------------------------------------------------------------------------------------------
    def bare(self, operand: Operand, upper: int = 0) -> Word:
        """The word, or with ``upper`` 1 the upper half of the pair, before any sign or complement."""
        terms = self.env.terms
        kind = operand.kind
        if kind in ("reg", "ureg"):
            if operand.index == RZ:
                return 0
            file = self.state.regs if kind == "reg" else self.state.uregs
            index = (operand.index or 0) + upper
            value = file.get(index)
            if value is None:
                value = file[index] = terms.fresh(f"{'U' if kind == 'ureg' else ''}R{index}")
            return value
        if kind == "imm":
            return operand.value if not upper else MASK if operand.text.startswith("-") else 0
        if kind == "const":
            found = self.env.constant(operand.value + 4 * upper) if operand.bank == 0 else None
            return terms.fresh(operand.text) if found is None else found
        return terms.fresh(operand.text)

    def word(self, operand: Operand) -> Word:
        if operand.suffix and operand.suffix != "64":
            return self.env.terms.fresh(operand.text)
        value = self.bare(operand)
        if operand.absolute:
            value = self.algebra.choose(self.algebra.lts(value, 0), self.env.terms.node("neg", value), value)
        if operand.invert:
            value = self.algebra.not_(value)
        return self.env.terms.node("neg", value) if operand.negate else value

    def quad(self, operand: Operand) -> _Pair:
        low, high = self.bare(operand), self.bare(operand, 1)
        if operand.invert:
            return self.algebra.not_(low), self.algebra.not_(high)
        return self.algebra.subq((0, 0), (low, high)) if operand.negate else (low, high)

    def truth(self, operand: Operand) -> Bit:
        if operand.kind not in ("pred", "upred"):
            return self.env.terms.fresh_bit(operand.text)
        value = True if operand.index == PT else _predicate(self.env, self.state, operand.kind == "upred", operand.index or 0)
        return self.env.terms.negated(value) if operand.invert else value

    def predicate(self, index: int) -> Bit:
        return _predicate(self.env, self.state, False, index)

    def special(self, name: str) -> Word:
        value = self.env.special.get(name)
        return self.env.terms.fresh(name) if value is None else value

    def constants(self, operand: Operand, count: int) -> list[Word]:
        """Words of constant memory. An address that is not a literal gives unknown words."""
        if operand.kind != "const" or operand.index is not None:
            return [self.env.terms.fresh(operand.text) for _ in range(count)]
        return [self.bare(operand, n) for n in range(count)]

    # -- writing ----------------------------------------------------------------------------------------------------------------
    def _set(self, file: dict[int, Any], index: int, value: Any, bit: bool) -> None:
        if self.guard is not True:
            old = file.get(index)
            if old is None:
                old = self.env.terms.fresh_bit(f"P{index}") if bit else self.env.terms.fresh(f"R{index}")
            value = self.env.terms.ite(self.guard, value, old)
        file[index] = value

    def set_word(self, operand: Operand, value: Word) -> None:
        self.set_words(operand, [value])

    def set_quad(self, operand: Operand, value: _Pair) -> None:
        self.set_words(operand, list(value))

    def set_words(self, operand: Operand, values: list[Word]) -> None:
        if operand.index is None or operand.index == RZ:
            return
        file = self.state.uregs if operand.kind == "ureg" else self.state.regs
        for n, value in enumerate(values):
            self._set(file, operand.index + n, value, False)

    def set_truth(self, operand: Operand, value: Bit) -> None:
        if operand.index is not None and operand.index != PT:
            self._set(self.state.upreds if operand.kind == "upred" else self.state.preds, operand.index, value, True)

    def set_predicate(self, index: int, value: Bit) -> None:
        self._set(self.state.preds, index, value, True)


def _predicate(env: Environment, state: ThreadState, uniform: bool, index: int) -> Bit:
    file = state.upreds if uniform else state.preds
    value = file.get(index)
    if value is None:
        value = file[index] = env.terms.fresh_bit(f"P{index}")
    return value


def guard_of(env: Environment, state: ThreadState, guard: Guard | None) -> Bit:
    """Whether the guard lets the instruction execute."""
    if guard is None or guard.index == PT:
        return guard is None or not guard.negated
    value = _predicate(env, state, guard.uniform, guard.index)
    return env.terms.negated(value) if guard.negated else value


def word_operand(env: Environment, state: ThreadState, operand: Operand) -> Word:
    """A source word with its modifiers applied."""
    return _Context(env, state, True).word(operand)


def truth_operand(env: Environment, state: ThreadState, operand: Operand) -> Bit:
    """A source predicate with its ``!`` applied."""
    return _Context(env, state, True).truth(operand)


def _address(context: _Context, operand: Operand, pair: bool = False) -> _Pair:
    """Low and high word of a memory operand's address. ``pair``: 64-bit although it is not printed (global accesses of sm_75)."""
    algebra = context.algebra
    address: _Pair = (0, 0)
    if operand.index is not None and operand.index != RZ:
        base = Operand("reg", "", index=operand.index)
        if operand.mode == "64" or (pair and operand.mode == "" and operand.ubase is None):
            address = context.bare(base), context.bare(base, 1)
        else:
            low = context.bare(base)
            address = (algebra.mul(low, int(operand.mode[1:])) if operand.mode.startswith("X") else low), 0
    if operand.ubase is not None and operand.ubase != RZ:
        uniform = Operand("ureg", "", index=operand.ubase)
        address = algebra.addq(address, (context.bare(uniform), context.bare(uniform, 1)))
    return algebra.addq(address, algebra.quad(operand.value)) if operand.value else address


def _bytes_moved(instruction: Instruction) -> int:
    for modifier, size in (("128", 16), ("64", 8), ("U8", 1), ("S8", 1), ("U16", 2), ("S16", 2)):
        if instruction.has(modifier):
            return size
    return 4


def _load(context: _Context, i: Instruction) -> None:
    env, state = context.env, context.state
    size = _bytes_moved(i)
    memory = next((s for s in i.sources if s.kind == "mem"), None)
    values: list[Word] | None = None
    if memory is not None and i.opcode in ("LDL", "LDG", "LD"):
        low, high = _address(context, memory, i.has("E"))
        if i.opcode != "LDL":
            values = env.load(i, low, high, size)
        elif type(low) is int and size >= 4:
            values = [state.local[low + n] if low + n in state.local else env.terms.fresh(i.text) for n in range(0, size, 4)]
    _unknown_results(context, i)
    target = next((d for d in i.dests if d.kind in ("reg", "ureg")), None)
    if target is not None and values is not None:
        context.set_words(target, values)


def _store_local(context: _Context, i: Instruction) -> None:
    """A store to the thread's own memory; one to an address that is not known forgets all of it."""
    memory, data = i.sources[0], i.sources[1]
    low, _ = _address(context, memory)
    size = _bytes_moved(i)
    if type(low) is not int or size < 4 or low % 4:
        context.state.local.clear()
        return
    for n in range(size // 4):
        context._set(context.state.local, low + 4 * n, context.bare(data, n), False)


def _vote(context: _Context, i: Instruction) -> None:
    """Any over the warp: true if this thread's is, else unknown; all: false if this thread's is, else unknown."""
    value = context.truth(i.sources[-1])
    _unknown_results(context, i)
    if (i.has("ANY") and value is True) or (i.has("ALL") and value is False):
        for item in i.dests:
            if item.kind in ("pred", "upred"):
                context.set_truth(item, value)


def _unknown_results(context: _Context, i: Instruction) -> None:
    """Every destination unknown, with all the registers that the instruction can write."""
    terms = context.env.terms
    wide = _bytes_moved(i) // 4 if i.opcode.startswith(("LD", "ATOM")) else 2 if i.has("WIDE") or i.has("64") else 1
    for item in i.dests:
        if item.kind in ("pred", "upred"):
            context.set_truth(item, terms.fresh_bit(i.text))
        elif item.kind in ("reg", "ureg"):
            context.set_words(item, [terms.fresh(i.text) for _ in range(max(wide, 1))])
        elif item.kind == "preds":
            for index in range(PT):
                context.set_predicate(index, terms.fresh_bit(i.text))


#: Instructions that change nothing that one thread can see in its own registers.
EFFECT_FREE = NO_OPERATION | {
    "BSSY", "BSYNC", "BREAK", "BMOV", "BAR", "WARPSYNC", "ENDCOLLECTIVE", "ST", "STG", "STS", "RED", "REDG", "BPT",
}  # fmt: skip


def step(env: Environment, state: ThreadState, instruction: Instruction, kernel: str) -> None:
    """Executes one instruction that does not branch, in place. UnknownInstructionError if the decoder does not know it."""
    if instruction.problem:
        raise UnknownInstructionError(f"{instruction.problem}: {instruction.where(kernel)}")
    opcode = instruction.opcode
    if opcode in EFFECT_FREE:
        return
    guard = guard_of(env, state, instruction.guard)
    if guard is False:
        return
    context = _Context(env, state, guard)
    if opcode in SEMANTICS:
        try:
            execute(instruction, context)
        except NoSemanticsError:
            _unknown_results(context, instruction)
    elif opcode in ("LDL", "LDG", "LD"):
        _load(context, instruction)
    elif opcode == "STL":
        _store_local(context, instruction)
    elif opcode in ("VOTE", "VOTEU"):
        _vote(context, instruction)
    else:
        _unknown_results(context, instruction)
