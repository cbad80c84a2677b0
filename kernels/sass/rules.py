"""What semantics rules share: the engine's view of a thread, and the shape of an instruction's operands."""

from __future__ import annotations

from typing import Protocol, TypeVar

from .algebra import Algebra
from .decode import Instruction
from .operands import PT, Operand

__all__ = ["Context", "NoSemanticsError", "only_register", "register_and_carry", "require", "sources"]

V = TypeVar("V")


class NoSemanticsError(Exception):
    """A form of a known instruction that has no semantics here."""


class Context(Protocol[V]):
    """One engine's view of one thread (or of many at once): operand values in, results out."""

    @property
    def algebra(self) -> Algebra[V]: ...
    def word(self, operand: Operand) -> V:
        """32-bit value with the operand's integer modifiers applied (``-`` two's complement, ``~`` complement)."""
        ...

    def bare(self, operand: Operand) -> V:
        """32-bit value without modifiers."""
        ...

    def quad(self, operand: Operand) -> V:
        """64-bit value: register pair (low first), constant pair or literal, negated if the operand says so."""
        ...

    def truth(self, operand: Operand) -> V: ...
    def predicate(self, index: int) -> V:
        """P0..P6 by number, for P2R."""
        ...

    def special(self, name: str) -> V: ...
    def set_word(self, operand: Operand, value: V) -> None: ...
    def set_quad(self, operand: Operand, value: V) -> None: ...
    def set_truth(self, operand: Operand, value: V) -> None: ...
    def set_predicate(self, index: int, value: V) -> None: ...
    def constants(self, operand: Operand, count: int) -> list[V]:
        """``count`` words of constant memory from the operand's offset."""
        ...

    def set_words(self, operand: Operand, values: list[V]) -> None:
        """Consecutive registers from the operand's index."""
        ...


def require(condition: bool, what: str) -> None:
    if not condition:
        raise NoSemanticsError(what)


def sources(i: Instruction, *counts: int) -> tuple[Operand, ...]:
    require(len(i.sources) in counts, f"{len(i.sources)} source operands")
    return i.sources


def only_register(i: Instruction) -> Operand:
    """The one written register; every predicate destination beside it must be PT."""
    registers = [d for d in i.dests if d.kind in ("reg", "ureg")]
    require(len(registers) == 1, "destination")
    require(all(d.kind in ("reg", "ureg") or d.index == PT for d in i.dests), "predicate destination")
    return registers[0]


def register_and_carry(i: Instruction) -> tuple[Operand, Operand | None]:
    register = i.dests[0]
    require(register.kind in ("reg", "ureg"), "destination")
    carries = [d for d in i.dests[1:] if d.index != PT]
    require(len(carries) <= 1 and (not carries or carries[0] is i.dests[1]), "second carry-out")
    return register, carries[0] if carries else None
