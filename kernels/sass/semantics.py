"""What each instruction computes, stated once over any ``Algebra``. Memory, control flow and warp-wide operations are the engine's.

``execute`` applies one instruction to a ``Context``, which reads operands and takes results; a guard is the context's
business. A form that is not covered raises ``NoSemanticsError``: the engine turns it into an error that names instruction,
offset and kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from .algebra import Algebra
from .decode import Instruction
from .operands import PT, Operand

__all__ = ["SEMANTICS", "Context", "NoSemanticsError", "execute"]

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


Rule = Callable[[Instruction, "Context[V]"], None]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise NoSemanticsError(what)


def _sources(i: Instruction, *counts: int) -> tuple[Operand, ...]:
    _require(len(i.sources) in counts, f"{len(i.sources)} source operands")
    return i.sources


def _only_register(i: Instruction) -> Operand:
    """The one written register; every predicate destination beside it must be PT."""
    registers = [d for d in i.dests if d.kind in ("reg", "ureg")]
    _require(len(registers) == 1, "destination")
    _require(all(d.kind in ("reg", "ureg") or d.index == PT for d in i.dests), "predicate destination")
    return registers[0]


def _register_and_carry(i: Instruction) -> tuple[Operand, Operand | None]:
    register = i.dests[0]
    _require(register.kind in ("reg", "ureg"), "destination")
    carries = [d for d in i.dests[1:] if d.index != PT]
    _require(len(carries) <= 1 and (not carries or carries[0] is i.dests[1]), "second carry-out")
    return register, carries[0] if carries else None


def _iadd3(i: Instruction, c: Context[V]) -> None:
    if i.has("64"):
        a = c.algebra
        x, y, z = _sources(i, 3)
        c.set_quad(_only_register(i), a.addq(a.addq(c.quad(x), c.quad(y)), c.quad(z)))
        return
    alg = c.algebra
    extended = i.has("X")
    operands = i.sources[:3]
    carries_in = [p for p in i.sources[3:] if not (p.index == PT and p.invert)]
    _require(len(operands) == 3 and (extended or len(i.sources) == 3) and len(i.sources) <= 5, "operands")
    dest, carry = _register_and_carry(i)
    if not extended and carry is None:
        c.set_word(dest, alg.add(alg.add(c.word(operands[0]), c.word(operands[1])), c.word(operands[2])))
        return
    _require(not (extended and any(o.negate for o in operands)), "-R with .X")
    present = [o for o in operands if not (o.is_zero and not o.invert and not o.negate)]
    if carry is not None and not extended and len(present) == 2 and not any(o.negate or o.invert for o in present):
        first = c.bare(present[0])
        total = alg.add(first, c.bare(present[1]))
        c.set_word(dest, total)
        c.set_truth(carry, alg.ltu(total, first))
        return
    ones = [alg.choose(c.truth(p), alg.word(1), alg.word(0)) for p in carries_in]
    if carry is None:
        total = alg.add(alg.add(c.word(operands[0]), c.word(operands[1])), c.word(operands[2]))
        for one in ones:
            total = alg.add(total, one)
        c.set_word(dest, total)
        return
    wide = alg.quad(sum(o.negate for o in operands))
    for o in operands:
        # A negated operand enters as its complement plus 1, so that x = 0 gives a carry.
        wide = alg.addq(wide, alg.zext(alg.not_(c.bare(o)) if o.negate or o.invert else c.bare(o)))
    for one in ones:
        wide = alg.addq(wide, alg.zext(one))
    c.set_word(dest, alg.low(wide))
    c.set_truth(carry, alg.ne(alg.and_(alg.high(wide), alg.word(1)), alg.word(0)))


def _iadd(i: Instruction, c: Context[V]) -> None:
    a, b = _sources(i, 2)
    if i.has("64"):
        c.set_quad(_only_register(i), c.algebra.addq(c.quad(a), c.quad(b)))
    else:
        c.set_word(_only_register(i), c.algebra.add(c.word(a), c.word(b)))


def _imad(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    wide, high = i.has("WIDE"), i.has("HI")
    if wide or high:
        _require(not i.has("X"), ".X with a wide product")
        a, b, d = _sources(i, 3)
        extend = alg.zext if i.has("U32") else alg.sext
        total = alg.addq(alg.mulq(extend(c.word(a)), extend(c.word(b))), c.quad(d))
        dest = _only_register(i)
        if wide:
            c.set_quad(dest, total)
        else:
            c.set_word(dest, alg.high(total))
        return
    a, b, d, *carry = _sources(i, 4) if i.has("X") else _sources(i, 3)
    total = alg.add(alg.mul(c.word(a), c.word(b)), c.word(d))
    if carry:
        total = alg.add(total, alg.choose(c.truth(carry[0]), alg.word(1), alg.word(0)))
    c.set_word(_only_register(i), total)


def _lea(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    dest, carry = _register_and_carry(i)
    sources = list(i.sources)
    carry_in = sources.pop() if i.has("X") else None
    if i.has("SX32"):
        _require(len(sources) == 3, "operands")
        a, b, shift = sources
        above: V | None = alg.sar(c.word(a), alg.word(31))
    elif i.has("HI"):
        _require(len(sources) == 4, "operands")
        a, b, top, shift = sources
        above = c.word(top)
    else:
        _require(len(sources) == 3 and not i.has("X"), "operands")
        a, b, shift = sources
        above = None
    _require(shift.kind == "imm" and shift.value < 32, "shift amount")
    if above is None:
        shifted = alg.shl(c.word(a), alg.word(shift.value))
        _require(carry is None or not b.negate, "carry of a difference")
        total = alg.add(shifted, c.word(b))
        c.set_word(dest, total)
        if carry is not None:
            c.set_truth(carry, alg.ltu(total, shifted))
        return
    _require(carry is None, "carry-out of LEA.HI")
    upper = alg.shl(above, alg.word(shift.value))
    if shift.value:
        upper = alg.or_(upper, alg.shr(c.word(a), alg.word(32 - shift.value)))
    total = alg.add(c.word(b), upper)
    if carry_in is not None:
        total = alg.add(total, alg.choose(c.truth(carry_in), alg.word(1), alg.word(0)))
    c.set_word(dest, total)


#: Truth tables of LOP3 that have a short formula; bit 2 of the index is a, bit 1 b, bit 0 c.
_SHORT: Mapping[int, Callable[[Algebra[V], V, V, V], V]] = {
    0xC0: lambda g, a, b, c: g.and_(a, b),
    0x88: lambda g, a, b, c: g.and_(b, c),
    0xA0: lambda g, a, b, c: g.and_(a, c),
    0xFC: lambda g, a, b, c: g.or_(a, b),
    0xEE: lambda g, a, b, c: g.or_(b, c),
    0xFA: lambda g, a, b, c: g.or_(a, c),
    0x3C: lambda g, a, b, c: g.xor(a, b),
    0x66: lambda g, a, b, c: g.xor(b, c),
    0x5A: lambda g, a, b, c: g.xor(a, c),
    0x96: lambda g, a, b, c: g.xor(g.xor(a, b), c),
    0x80: lambda g, a, b, c: g.and_(g.and_(a, b), c),
    0xFE: lambda g, a, b, c: g.or_(g.or_(a, b), c),
    0xF8: lambda g, a, b, c: g.or_(a, g.and_(b, c)),
    0xEA: lambda g, a, b, c: g.or_(g.and_(a, b), c),
    0xA8: lambda g, a, b, c: g.and_(g.or_(a, b), c),
    0x33: lambda g, a, b, c: g.not_(b),
    0x0F: lambda g, a, b, c: g.not_(a),
    0x55: lambda g, a, b, c: g.not_(c),
    0x30: lambda g, a, b, c: g.and_(a, g.not_(b)),
    0x0C: lambda g, a, b, c: g.and_(g.not_(a), b),
    0xF0: lambda g, a, b, c: a,
    0xCC: lambda g, a, b, c: b,
    0xAA: lambda g, a, b, c: c,
    0xCA: lambda g, a, b, c: g.or_(g.and_(a, b), g.and_(g.not_(a), c)),
    0xE2: lambda g, a, b, c: g.or_(g.and_(a, b), g.and_(g.not_(b), c)),
    0xB8: lambda g, a, b, c: g.or_(g.and_(b, c), g.and_(g.not_(b), a)),
}


def _table(alg: Algebra[V], table: int, a: V, b: V, c: V) -> V:
    short = _SHORT.get(table)
    if short is not None:
        return short(alg, a, b, c)
    total = alg.word(0)
    for index in range(8):
        if table >> index & 1:
            term = a if index & 4 else alg.not_(a)
            term = alg.and_(term, b if index & 2 else alg.not_(b))
            total = alg.or_(total, alg.and_(term, c if index & 1 else alg.not_(c)))
    return total


def _lop3(i: Instruction, c: Context[V]) -> None:
    a, b, d, table, last = _sources(i, 5)
    _require(table.kind == "imm" and last.kind in ("pred", "upred") and last.index == PT and last.invert, "operands")
    value = _table(c.algebra, table.value & 0xFF, c.word(a), c.word(b), c.word(d))
    for dest in i.dests:
        if dest.kind in ("reg", "ureg"):
            c.set_word(dest, value)
        else:
            c.set_truth(dest, c.algebra.ne(value, c.algebra.word(0)))


def _truth_table(alg: Algebra[V], table: int, a: V, b: V, c: V) -> V:
    total = alg.truth(False)
    for index in range(8):
        if table >> index & 1:
            term = a if index & 4 else alg.negation(a)
            term = alg.both(term, b if index & 2 else alg.negation(b))
            total = alg.either(total, alg.both(term, c if index & 1 else alg.negation(c)))
    return total


def _plop3(i: Instruction, c: Context[V]) -> None:
    a, b, d, first, second = _sources(i, 5)
    _require(first.kind == "imm" and second.kind == "imm" and len(i.dests) == 2, "operands")
    x, y, z = c.truth(a), c.truth(b), c.truth(d)
    values = [
        _truth_table(c.algebra, t.value & 0xFF, x, y, z) if p.index != PT else x
        for p, t in zip(i.dests, (first, second), strict=True)
    ]
    for dest, value in zip(i.dests, values, strict=True):
        c.set_truth(dest, value)


def _relation(c: Context[V], i: Instruction, a: Operand, b: Operand) -> tuple[str, V, V]:
    """(name, strict-or-named relation, equality) for the comparison that the modifiers name."""
    alg = c.algebra
    names = [m for m in i.modifiers if m in ("LT", "LE", "GT", "GE", "EQ", "NE")]
    _require(len(names) == 1, "relation")
    if i.has("S64") or i.has("U64"):
        x, y = c.quad(a), c.quad(b)
        less = alg.ltsq if i.has("S64") else alg.ltuq
        equal = alg.eqq(x, y)
        table = {
            "LT": lambda: less(x, y), "GE": lambda: alg.negation(less(x, y)), "EQ": lambda: equal,
            "GT": lambda: less(y, x), "LE": lambda: alg.negation(less(y, x)), "NE": lambda: alg.negation(equal),
        }  # fmt: skip
        return names[0], table[names[0]](), equal
    x, y = c.word(a), c.word(b)
    lt, le = (alg.ltu, alg.leu) if i.has("U32") else (alg.lts, alg.les)
    words = {
        "LT": lambda: lt(x, y), "LE": lambda: le(x, y), "GT": lambda: lt(y, x), "GE": lambda: le(y, x), "EQ": lambda: alg.eq(x, y),
        "NE": lambda: alg.ne(x, y),
    }  # fmt: skip
    if i.has("EX") and names[0] in ("LT", "LE", "GT", "GE"):
        return names[0], words[names[0][0] + "T"](), words["EQ"]()
    return names[0], words[names[0]](), alg.truth(False)


def _combine(i: Instruction, c: Context[V], result: V, other: V) -> None:
    alg = c.algebra
    joins = [m for m in i.modifiers if m in ("AND", "OR", "XOR")]
    _require(len(joins) == 1 and len(i.dests) == 2, "combination")
    join = {"AND": alg.both, "OR": alg.either, "XOR": alg.differ}[joins[0]]
    first, second = i.dests
    value = join(result, other)
    inverse = join(alg.negation(result), other) if second.index != PT else None
    c.set_truth(first, value)
    if inverse is not None:
        c.set_truth(second, inverse)


def _isetp(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    a, b, other, *low = _sources(i, 4) if i.has("EX") else _sources(i, 3)
    combined = c.truth(other)
    name, result, equal = _relation(c, i, a, b)
    if low:
        below = c.truth(low[0])
        if name == "EQ":
            result = alg.both(result, below)
        elif name == "NE":
            result = alg.either(result, below)
        else:
            result = alg.either(result, alg.both(equal, below))
    _combine(i, c, result, combined)


def _shf(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    low, amount, high = _sources(i, 3)
    left = i.has("L")
    _require(left != i.has("R"), "direction")
    wide = i.has("U64") or i.has("S64")
    signed = i.has("S32") or i.has("S64")
    count = c.word(amount)
    if i.has("W"):
        count = alg.and_(count, alg.word(63 if wide else 31))
    dest = _only_register(i)
    if not wide and not left and i.has("HI"):
        c.set_word(dest, (alg.sar if signed else alg.shr)(c.word(high), count))
        return
    if not wide and left and not i.has("HI"):
        c.set_word(dest, alg.shl(c.word(low), count))
        return
    if not wide:
        count = alg.choose(alg.ltu(count, alg.word(32)), count, alg.word(32))
    both = alg.pair(c.word(low), c.word(high))
    shifted = alg.shlq(both, count) if left else (alg.sarq if signed else alg.shrq)(both, count)
    c.set_word(dest, alg.high(shifted) if i.has("HI") else alg.low(shifted))


def _prmt(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    a, selector, b = _sources(i, 3)
    dest = _only_register(i)
    x, y = c.word(a), c.word(b)
    if selector.kind != "imm":
        q, select = alg.pair(x, y), c.word(selector)
        total = alg.word(0)
        for byte in range(4):
            code = alg.and_(alg.shr(select, alg.word(4 * byte)), alg.word(15))
            value = alg.and_(alg.low(alg.shrq(q, alg.shl(alg.and_(code, alg.word(7)), alg.word(3)))), alg.word(0xFF))
            sign = alg.choose(alg.ne(alg.and_(value, alg.word(0x80)), alg.word(0)), alg.word(0xFF), alg.word(0))
            value = alg.choose(alg.ne(alg.and_(code, alg.word(8)), alg.word(0)), sign, value)
            total = alg.or_(total, alg.shl(value, alg.word(8 * byte)))
        c.set_word(dest, total)
        return
    sel = selector.value & 0xFFFF
    if sel == 0x9910:
        c.set_word(dest, alg.sar(alg.shl(x, alg.word(16)), alg.word(16)))
        return
    total = alg.word(0)
    nibbles = [sel >> 4 * byte & 15 for byte in range(4)]
    # Runs of neighbouring bytes of one source that keep their distance move by one shift and one mask.
    groups: dict[tuple[bool, int], int] = {}
    for byte, nibble in enumerate(nibbles):
        if nibble & 8:
            source = y if nibble & 4 else x
            value = alg.shl(source, alg.word(24 - 8 * (nibble & 3)))
            value = alg.and_(alg.sar(value, alg.word(31)), alg.word(0xFF << 8 * byte))
            total = alg.or_(total, value)
        else:
            key = (nibble >= 4, byte - (nibble & 3))
            groups[key] = groups.get(key, 0) | 0xFF << 8 * byte
    for (second, move), mask in groups.items():
        source = y if second else x
        moved = alg.shl(source, alg.word(8 * move)) if move >= 0 else alg.shr(source, alg.word(-8 * move))
        reach = (0xFFFFFFFF << 8 * move) & 0xFFFFFFFF if move >= 0 else 0xFFFFFFFF >> -8 * move
        total = alg.or_(total, moved if mask == reach else alg.and_(moved, alg.word(mask)))
    c.set_word(dest, total)


def _extremum(c: Context[V], i: Instruction, a: V, b: V, least: Operand) -> V:
    alg = c.algebra
    less = (alg.ltu if i.has("U32") else alg.lts)(a, b)
    if least.index == PT:
        return alg.choose(less, b, a) if least.invert else alg.choose(less, a, b)
    return alg.choose(alg.negation(alg.differ(less, c.truth(least))), a, b)


def _imnmx(i: Instruction, c: Context[V]) -> None:
    a, b, least = _sources(i, 3)
    c.set_word(_only_register(i), _extremum(c, i, c.word(a), c.word(b), least))


def _viaddmnmx(i: Instruction, c: Context[V]) -> None:
    a, b, d, least = _sources(i, 4)
    c.set_word(_only_register(i), _extremum(c, i, c.algebra.add(c.word(a), c.word(b)), c.word(d), least))


def _vimnmx3(i: Instruction, c: Context[V]) -> None:
    a, b, d, least = _sources(i, 4)
    _require(least.index == PT, "selection by a predicate")
    c.set_word(_only_register(i), _extremum(c, i, _extremum(c, i, c.word(a), c.word(b), least), c.word(d), least))


def _sel(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    a, b, which = _sources(i, 3)
    p = c.truth(which)
    if i.has("64"):
        first, second = c.quad(a), c.quad(b)
        low, high = alg.choose(p, alg.low(first), alg.low(second)), alg.choose(p, alg.high(first), alg.high(second))
        c.set_quad(_only_register(i), alg.pair(low, high))
        return
    x, y = (_float(c, a), _float(c, b)) if i.opcode == "FSEL" else (c.word(a), c.word(b))
    c.set_word(_only_register(i), alg.choose(p, x, y))


def _mov(i: Instruction, c: Context[V]) -> None:
    source, *lanes = _sources(i, 1, 2)
    _require(not lanes or (lanes[0].kind == "imm" and lanes[0].value == 0xF), "byte mask")
    if i.has("64"):
        c.set_quad(_only_register(i), c.quad(source))
    else:
        c.set_word(_only_register(i), c.word(source))


def _unary(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    (a,) = _sources(i, 1)
    value = c.word(a)
    if i.opcode in ("POPC", "UPOPC"):
        result = alg.popc(value)
    elif i.opcode in ("FLO", "UFLO"):
        _require(i.has("U32"), "signed FLO")
        result = alg.flo(value)
        if i.has("SH"):
            result = alg.choose(alg.eq(value, alg.word(0)), result, alg.sub(alg.word(31), result))
    elif i.opcode in ("BREV", "UBREV"):
        result = alg.brev(value)
    else:
        result = alg.choose(alg.lts(value, alg.word(0)), alg.sub(alg.word(0), value), value)
    c.set_word(_only_register(i), result)


def _p2r(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    predicates, base, mask = _sources(i, 3)
    _require(predicates.kind == "preds" and mask.kind == "imm", "operands")
    chosen = mask.value & 0x7F
    total = alg.and_(c.word(base), alg.word(~chosen & 0xFFFFFFFF))
    for index in range(7):
        if chosen >> index & 1:
            total = alg.or_(total, alg.choose(c.predicate(index), alg.word(1 << index), alg.word(0)))
    c.set_word(_only_register(i), total)


def _r2p(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    value, mask = _sources(i, 2)
    _require(mask.kind == "imm" and i.dests[0].kind == "preds", "operands")
    word = c.word(value)
    for index in range(7):
        if mask.value >> index & 1:
            c.set_predicate(index, alg.ne(alg.and_(word, alg.word(1 << index)), alg.word(0)))


def _special(i: Instruction, c: Context[V]) -> None:
    (name,) = _sources(i, 1)
    dest = _only_register(i)
    if i.opcode == "CS2R":
        _require(name.text == "SRZ", "special register pair")
        if i.has("32"):
            c.set_word(dest, c.algebra.word(0))
        else:
            c.set_quad(dest, c.algebra.quad(0))
        return
    c.set_word(dest, c.algebra.word(0) if name.text == "SRZ" else c.special(name.text))


def _ldc(i: Instruction, c: Context[V]) -> None:
    (source,) = _sources(i, 1)
    _require(source.kind == "const" and not (source.negate or source.invert or source.absolute), "constant operand")
    c.set_words(_only_register(i), c.constants(source, {"64": 2, "128": 4}.get(i.modifiers[0], 0) if i.modifiers else 1))


def _float(c: Context[V], operand: Operand) -> V:
    """Bits of a float32 operand, |x| and - applied to the sign bit."""
    alg = c.algebra
    if operand.kind == "float":
        bits = alg.word(int(struct.unpack("<I", struct.pack("<f", operand.number))[0]))
    else:
        bits = c.bare(operand)
    if operand.absolute:
        bits = alg.and_(bits, alg.word(0x7FFFFFFF))
    return alg.xor(bits, alg.word(0x80000000)) if operand.negate else bits


def _farith(i: Instruction, c: Context[V]) -> None:
    _require(not i.has("FTZ"), "flush to zero")
    a, b = _sources(i, 2)
    c.set_word(_only_register(i), c.algebra.floating("fadd" if i.opcode == "FADD" else "fmul", _float(c, a), _float(c, b)))


def _fsetp(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    a, b, other = _sources(i, 3)
    _require(not i.has("FTZ"), "flush to zero")
    combined = c.truth(other)
    names = [m for m in i.modifiers if m.rstrip("U") in ("LT", "LE", "GT", "GE", "EQ", "NE") or m in ("NUM", "NAN")]
    _require(len(names) == 1, "relation")
    x, y = _float(c, a), _float(c, b)
    name = names[0]
    unordered = alg.floating("fun?", x, y)
    kind = name.rstrip("U") if name not in ("NUM", "NAN") else name
    if kind == "NUM":
        result = alg.negation(unordered)
    elif kind == "NAN":
        result = unordered
    elif kind == "NE":
        result = alg.negation(alg.floating("feq?", x, y))
        result = result if name == "NEU" else alg.both(result, alg.negation(unordered))
    else:
        swap = kind in ("GT", "GE")
        operation = {"LT": "flt?", "GT": "flt?", "LE": "fle?", "GE": "fle?", "EQ": "feq?"}[kind]
        result = alg.floating(operation, y, x) if swap else alg.floating(operation, x, y)
        if name.endswith("U"):
            result = alg.either(result, unordered)
    _combine(i, c, result, combined)


def _fmnmx(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    _require(not i.has("FTZ"), "flush to zero")
    a, b, least = _sources(i, 3)
    x, y = _float(c, a), _float(c, b)
    # A NaN loses against a number; of -0 and +0 the minimum is -0.
    keys = [alg.choose(alg.lts(v, alg.word(0)), alg.xor(v, alg.word(0x7FFFFFFF)), v) for v in (x, y)]
    first = alg.negation(alg.differ(alg.lts(keys[0], keys[1]), c.truth(least)))
    first = alg.choose(alg.floating("fun?", x, x), alg.truth(False), alg.choose(alg.floating("fun?", y, y), alg.truth(True), first))
    c.set_word(_only_register(i), alg.choose(first, x, y))


def _convert(i: Instruction, c: Context[V]) -> None:
    (a,) = _sources(i, 1)
    name = {
        "I2F.U32.RP": "u2f_up", "I2F.U32": "u2f", "I2F": "s2f", "I2F.S32": "s2f", "I2FP.F32.U32": "u2f", "I2FP.F32.S32": "s2f",
        "F2I.FTZ.U32.TRUNC.NTZ": "f2u", "F2I.U32.TRUNC.NTZ": "f2u", "F2F.F16.F32": "f2h", "MUFU.RCP": "rcp",
    }.get(i.mnemonic)  # fmt: skip
    _require(name is not None, "conversion")
    assert name is not None
    value = c.word(a) if name in ("u2f", "s2f", "u2f_up") else _float(c, a)
    c.set_word(_only_register(i), c.algebra.floating(name, value))


def _hfma2(i: Instruction, c: Context[V]) -> None:
    a, b, high, low = _sources(i, 4)
    _require(
        a.is_zero and a.negate and b.is_zero and not b.negate and high.kind == low.kind == "float", "HFMA2 that is not a constant"
    )
    halves = [int(struct.unpack("<H", struct.pack("<e", o.number))[0]) for o in (high, low)]
    c.set_word(_only_register(i), c.algebra.word(halves[0] << 16 | halves[1]))


#: Opcode to rule. What is not here is memory, control flow or warp-wide, and belongs to the engine.
SEMANTICS: Mapping[str, Rule[object]] = {
    "IADD3": _iadd3, "UIADD3": _iadd3, "IADD": _iadd, "VIADD": _iadd, "UVIADD": _iadd, "IMAD": _imad, "UIMAD": _imad,
    "LEA": _lea, "ULEA": _lea, "LOP3": _lop3, "ULOP3": _lop3, "PLOP3": _plop3, "UPLOP3": _plop3, "ISETP": _isetp, "UISETP": _isetp,
    "SHF": _shf, "USHF": _shf, "PRMT": _prmt, "UPRMT": _prmt,
    "IMNMX": _imnmx, "UIMNMX": _imnmx, "VIMNMX": _imnmx, "UVIMNMX": _imnmx,
    "VIADDMNMX": _viaddmnmx, "VIMNMX3": _vimnmx3, "SEL": _sel, "USEL": _sel, "FSEL": _sel, "MOV": _mov, "UMOV": _mov, "R2UR": _mov,
    "POPC": _unary, "UPOPC": _unary, "FLO": _unary, "UFLO": _unary, "BREV": _unary, "UBREV": _unary, "IABS": _unary,
    "P2R": _p2r, "R2P": _r2p, "S2R": _special, "S2UR": _special, "CS2R": _special, "LDC": _ldc, "LDCU": _ldc, "ULDC": _ldc,
    "FADD": _farith, "FMUL": _farith, "FSETP": _fsetp, "FMNMX": _fmnmx, "I2F": _convert, "I2FP": _convert, "F2I": _convert,
    "F2F": _convert, "MUFU": _convert, "HFMA2": _hfma2,
}  # fmt: skip


def execute(instruction: Instruction, context: Context[V]) -> bool:
    """Apply a pure instruction; False if its opcode belongs to the engine. NoSemanticsError for a form that is not covered."""
    rule = SEMANTICS.get(instruction.opcode)
    if rule is None:
        return False
    if instruction.problem:
        raise NoSemanticsError(instruction.problem)
    rule(instruction, context)  # type: ignore[arg-type]
    return True
