"""What instruction semantics are written in: a small algebra of 32-bit words, 64-bit words and truth values.

``semantics`` states each instruction once, over any ``Algebra``. Three kinds of values go through it: plain integers
(``IntegerAlgebra``, the reference here), generated NumPy code (``emit``), and solver terms (a symbolic engine brings its own).
"""

from __future__ import annotations

import math
import struct
from typing import Protocol, TypeVar

__all__ = ["Algebra", "IntegerAlgebra", "float_operation"]

V = TypeVar("V")
MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF


class Algebra(Protocol[V]):
    """Words are 32-bit (w), quads 64-bit (q), truths booleans (t). Arithmetic wraps.

    Shifts take their amount as a word and saturate: an amount of 32 (64 for quads) or more gives 0, or the sign for ``sar``.
    """

    def word(self, value: int) -> V: ...
    def quad(self, value: int) -> V: ...
    def truth(self, value: bool) -> V: ...

    # w, w -> w
    def add(self, a: V, b: V) -> V: ...
    def sub(self, a: V, b: V) -> V: ...
    def mul(self, a: V, b: V) -> V: ...
    def and_(self, a: V, b: V) -> V: ...
    def or_(self, a: V, b: V) -> V: ...
    def xor(self, a: V, b: V) -> V: ...
    def shl(self, a: V, n: V) -> V: ...
    def shr(self, a: V, n: V) -> V: ...
    def sar(self, a: V, n: V) -> V: ...
    # w -> w
    def not_(self, a: V) -> V: ...
    def popc(self, a: V) -> V: ...
    def flo(self, a: V) -> V:
        """Index of the highest set bit, 0xffffffff for 0."""
        ...

    def brev(self, a: V) -> V: ...

    # w, w -> t
    def eq(self, a: V, b: V) -> V: ...
    def ne(self, a: V, b: V) -> V: ...
    def ltu(self, a: V, b: V) -> V: ...
    def leu(self, a: V, b: V) -> V: ...
    def lts(self, a: V, b: V) -> V: ...
    def les(self, a: V, b: V) -> V: ...

    # quads
    def zext(self, a: V) -> V: ...
    def sext(self, a: V) -> V: ...
    def pair(self, low: V, high: V) -> V: ...
    def low(self, q: V) -> V: ...
    def high(self, q: V) -> V: ...
    def addq(self, a: V, b: V) -> V: ...
    def subq(self, a: V, b: V) -> V: ...
    def mulq(self, a: V, b: V) -> V: ...
    def shlq(self, q: V, n: V) -> V: ...
    def shrq(self, q: V, n: V) -> V: ...
    def sarq(self, q: V, n: V) -> V: ...
    def eqq(self, a: V, b: V) -> V: ...
    def ltuq(self, a: V, b: V) -> V: ...
    def ltsq(self, a: V, b: V) -> V: ...

    # truths
    def both(self, a: V, b: V) -> V: ...
    def either(self, a: V, b: V) -> V: ...
    def differ(self, a: V, b: V) -> V: ...
    def negation(self, a: V) -> V: ...
    # t, x, x -> x for words and truths alike
    def choose(self, p: V, a: V, b: V) -> V: ...
    def floating(self, name: str, *args: V) -> V:
        """A float operation by name on bit patterns; see ``float_operation``. Names that end in ``?`` give a truth."""
        ...


def _single(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _round_single(value: float) -> int:
    """float64 → bits of the nearest float32, ties to even, overflow to infinity."""
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def _round_up(value: int) -> int:
    """Unsigned integer → bits of the smallest float32 that is not below it."""
    bits = _round_single(float(value))
    return bits if int(_single(bits)) >= value else bits + 1


def _half(bits: int) -> int:
    value = _single(bits)
    if math.isnan(value):
        return 0x7FFF
    try:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    except OverflowError:
        return 0x7C00 if value > 0 else 0xFC00


def _reciprocal(bits: int) -> int:
    value = _single(bits)
    if value == 0.0:
        return 0x7F800000 | bits & 0x80000000
    return 0x7FFFFFFF if math.isnan(value) else _round_single(1.0 / value)


def _to_unsigned(bits: int) -> int:
    value = _single(bits)
    if math.isnan(value) or value <= 0.0:
        return 0
    return MASK32 if value >= 4294967296.0 else int(value)


def float_operation(name: str, *args: int) -> int | bool:
    """Reference of every float operation on float32 bit patterns, correctly rounded.

    ``u2f`` ``s2f`` (nearest), ``u2f_up`` (towards +inf), ``f2u`` (truncate, saturate, NaN to 0), ``f2h`` (to float16, NaN to
    0x7fff), ``rcp``, ``fadd``, ``fmul``; ``flt?`` ``fle?`` ``feq?`` (false on NaN) and ``fun?`` (either is NaN).
    """
    if name == "u2f":
        return _round_single(float(args[0]))
    if name == "s2f":
        return _round_single(float(args[0] - (args[0] >> 31 << 32)))
    if name == "u2f_up":
        return _round_up(args[0])
    if name == "f2u":
        return _to_unsigned(args[0])
    if name == "f2h":
        return _half(args[0])
    if name == "rcp":
        return _reciprocal(args[0])
    a, b = (_single(bits) for bits in args)
    if name == "flt?":
        return a < b
    if name == "fle?":
        return a <= b
    if name == "feq?":
        return a == b
    if name == "fun?":
        return math.isnan(a) or math.isnan(b)
    if name == "fadd":
        value = a + b
    elif name == "fmul":
        value = a * b
    else:
        raise ValueError(f"no float operation {name!r}")
    return 0x7FFFFFFF if math.isnan(value) else _round_single(value)


def _signed(value: int, bits: int = 32) -> int:
    return value - (value >> (bits - 1) << bits)


class IntegerAlgebra:
    """The algebra over plain Python integers and booleans."""

    def word(self, value: int) -> int:
        return value & MASK32

    def quad(self, value: int) -> int:
        return value & MASK64

    def truth(self, value: bool) -> int:
        return bool(value)

    def add(self, a: int, b: int) -> int:
        return (a + b) & MASK32

    def sub(self, a: int, b: int) -> int:
        return (a - b) & MASK32

    def mul(self, a: int, b: int) -> int:
        return (a * b) & MASK32

    def and_(self, a: int, b: int) -> int:
        return a & b

    def or_(self, a: int, b: int) -> int:
        return a | b

    def xor(self, a: int, b: int) -> int:
        return a ^ b

    def shl(self, a: int, n: int) -> int:
        return (a << n) & MASK32 if n < 32 else 0

    def shr(self, a: int, n: int) -> int:
        return a >> n if n < 32 else 0

    def sar(self, a: int, n: int) -> int:
        return (_signed(a) >> min(n, 31)) & MASK32

    def not_(self, a: int) -> int:
        return a ^ MASK32

    def popc(self, a: int) -> int:
        return a.bit_count()

    def flo(self, a: int) -> int:
        return (a.bit_length() - 1) & MASK32

    def brev(self, a: int) -> int:
        return int(f"{a:032b}"[::-1], 2)

    def eq(self, a: int, b: int) -> int:
        return a == b

    def ne(self, a: int, b: int) -> int:
        return a != b

    def ltu(self, a: int, b: int) -> int:
        return a < b

    def leu(self, a: int, b: int) -> int:
        return a <= b

    def lts(self, a: int, b: int) -> int:
        return _signed(a) < _signed(b)

    def les(self, a: int, b: int) -> int:
        return _signed(a) <= _signed(b)

    def zext(self, a: int) -> int:
        return a

    def sext(self, a: int) -> int:
        return _signed(a) & MASK64

    def pair(self, low: int, high: int) -> int:
        return high << 32 | low

    def low(self, q: int) -> int:
        return q & MASK32

    def high(self, q: int) -> int:
        return q >> 32

    def addq(self, a: int, b: int) -> int:
        return (a + b) & MASK64

    def subq(self, a: int, b: int) -> int:
        return (a - b) & MASK64

    def mulq(self, a: int, b: int) -> int:
        return (a * b) & MASK64

    def shlq(self, q: int, n: int) -> int:
        return (q << n) & MASK64 if n < 64 else 0

    def shrq(self, q: int, n: int) -> int:
        return q >> n if n < 64 else 0

    def sarq(self, q: int, n: int) -> int:
        return (_signed(q, 64) >> min(n, 63)) & MASK64

    def eqq(self, a: int, b: int) -> int:
        return a == b

    def ltuq(self, a: int, b: int) -> int:
        return a < b

    def ltsq(self, a: int, b: int) -> int:
        return _signed(a, 64) < _signed(b, 64)

    def both(self, a: int, b: int) -> int:
        return bool(a and b)

    def either(self, a: int, b: int) -> int:
        return bool(a or b)

    def differ(self, a: int, b: int) -> int:
        return bool(a) != bool(b)

    def negation(self, a: int) -> int:
        return not a

    def choose(self, p: int, a: int, b: int) -> int:
        return a if p else b

    def floating(self, name: str, *args: int) -> int:
        return float_operation(name, *args)
