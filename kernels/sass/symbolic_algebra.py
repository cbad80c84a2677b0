"""``semantics``' algebra over terms: what makes the interpreter's instruction semantics symbolic."""

from __future__ import annotations

from typing import Any

from .algebra import float_operation
from .symbolic_terms import MASK, Bit, Terms, Word

__all__ = ["TermAlgebra"]

_Pair = tuple[Any, Any]


class TermAlgebra:
    """``Algebra`` over terms. A quad is a pair (low word, high word)."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms

    def word(self, value: int) -> Word:
        return value & MASK

    def quad(self, value: int) -> _Pair:
        return value & MASK, value >> 32 & MASK

    def truth(self, value: bool) -> Bit:
        return bool(value)

    def add(self, a: Word, b: Word) -> Word:
        return self.terms.add(a, b)

    def sub(self, a: Word, b: Word) -> Word:
        return self.terms.sub(a, b)

    def mul(self, a: Word, b: Word) -> Word:
        return self.terms.node("mul", a, b)

    def and_(self, a: Word, b: Word) -> Word:
        return self.terms.node("and", a, b)

    def or_(self, a: Word, b: Word) -> Word:
        return self.terms.node("or", a, b)

    def xor(self, a: Word, b: Word) -> Word:
        return self.terms.node("xor", a, b)

    def shl(self, a: Word, n: Word) -> Word:
        return self.terms.node("shl", a, n)

    def shr(self, a: Word, n: Word) -> Word:
        return self.terms.node("lshr", a, n)

    def sar(self, a: Word, n: Word) -> Word:
        return self.terms.node("ashr", a, n)

    def not_(self, a: Word) -> Word:
        return self.terms.node("not", a)

    def popc(self, a: Word) -> Word:
        return self.terms.node("popc", a)

    def flo(self, a: Word) -> Word:
        return self.terms.node("flo", a)

    def brev(self, a: Word) -> Word:
        return self.terms.node("brev", a)

    def eq(self, a: Word, b: Word) -> Bit:
        return self.terms.node("eq", a, b)

    def ne(self, a: Word, b: Word) -> Bit:
        return self.terms.negated(self.terms.node("eq", a, b))

    def ltu(self, a: Word, b: Word) -> Bit:
        return self.terms.node("ult", a, b)

    def leu(self, a: Word, b: Word) -> Bit:
        return self.terms.node("ule", a, b)

    def lts(self, a: Word, b: Word) -> Bit:
        return self.terms.node("slt", a, b)

    def les(self, a: Word, b: Word) -> Bit:
        return self.terms.node("sle", a, b)

    def zext(self, a: Word) -> _Pair:
        return a, 0

    def sext(self, a: Word) -> _Pair:
        return a, self.terms.node("ashr", a, 31)

    def pair(self, low: Word, high: Word) -> _Pair:
        return low, high

    def low(self, q: _Pair) -> Word:
        return q[0]

    def high(self, q: _Pair) -> Word:
        return q[1]

    def addq(self, a: _Pair, b: _Pair) -> _Pair:
        terms = self.terms
        carry = terms.ite(terms.node("carry", a[0], b[0], False), 1, 0)
        return terms.add(a[0], b[0]), terms.add(terms.add(a[1], b[1]), carry)

    def subq(self, a: _Pair, b: _Pair) -> _Pair:
        return self.addq(self.addq(a, (self.not_(b[0]), self.not_(b[1]))), (1, 0))

    def mulq(self, a: _Pair, b: _Pair) -> _Pair:
        terms = self.terms
        cross = terms.add(terms.node("mul", a[0], b[1]), terms.node("mul", a[1], b[0]))
        return terms.node("mul", a[0], b[0]), terms.add(terms.node("mulhu", a[0], b[0]), cross)

    def shlq(self, q: _Pair, n: Word) -> _Pair:
        terms = self.terms  # shifts saturate, and a wrapped amount is huge: each part vanishes where it must
        upper = self.or_(self.shl(q[1], n), self.shr(q[0], terms.sub(32, n)))
        return self.shl(q[0], n), self.or_(upper, self.shl(q[0], terms.sub(n, 32)))

    def shrq(self, q: _Pair, n: Word) -> _Pair:
        terms = self.terms
        lower = self.or_(self.shr(q[0], n), self.shl(q[1], terms.sub(32, n)))
        return self.or_(lower, self.shr(q[1], terms.sub(n, 32))), self.shr(q[1], n)

    def sarq(self, q: _Pair, n: Word) -> _Pair:
        terms = self.terms
        near = self.or_(self.shr(q[0], n), self.shl(q[1], terms.sub(32, n)))
        low = terms.ite(self.ltu(n, 32), near, self.sar(q[1], terms.sub(n, 32)))
        return low, self.sar(q[1], n)

    def eqq(self, a: _Pair, b: _Pair) -> Bit:
        return self.both(self.eq(a[0], b[0]), self.eq(a[1], b[1]))

    def ltuq(self, a: _Pair, b: _Pair) -> Bit:
        return self.either(self.ltu(a[1], b[1]), self.both(self.eq(a[1], b[1]), self.ltu(a[0], b[0])))

    def ltsq(self, a: _Pair, b: _Pair) -> Bit:
        return self.either(self.lts(a[1], b[1]), self.both(self.eq(a[1], b[1]), self.ltu(a[0], b[0])))

    def both(self, a: Bit, b: Bit) -> Bit:
        return self.terms.both(a, b)

    def either(self, a: Bit, b: Bit) -> Bit:
        return self.terms.either(a, b)

    def differ(self, a: Bit, b: Bit) -> Bit:
        return self.terms.node("bxor", a, b)

    def negation(self, a: Bit) -> Bit:
        return self.terms.negated(a)

    def choose(self, p: Bit, a: Any, b: Any) -> Any:
        return self.terms.ite(p, a, b)

    def floating(self, name: str, *args: Word) -> Any:
        """Known values are computed; of unknown ones nothing is known."""
        if all(type(item) is int for item in args):
            return float_operation(name, *args)
        return self.terms.fresh_bit(name) if name.endswith("?") else self.terms.fresh(name)
