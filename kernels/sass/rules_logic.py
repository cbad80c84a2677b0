"""Truth tables, comparisons, shifts, byte selection, predicates as bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from .algebra import Algebra
from .decode import Instruction
from .operands import PT, Operand
from .rules import Context, only_register, require, sources

__all__ = ["combine", "isetp", "lop3", "p2r", "plop3", "prmt", "r2p", "shf"]

V = TypeVar("V")


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


def lop3(i: Instruction, c: Context[V]) -> None:
    a, b, d, table, last = sources(i, 5)
    require(table.kind == "imm" and last.kind in ("pred", "upred") and last.index == PT and last.invert, "operands")
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


def plop3(i: Instruction, c: Context[V]) -> None:
    a, b, d, first, second = sources(i, 5)
    require(first.kind == "imm" and second.kind == "imm" and len(i.dests) == 2, "operands")
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
    require(len(names) == 1, "relation")
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


def combine(i: Instruction, c: Context[V], result: V, other: V) -> None:
    alg = c.algebra
    joins = [m for m in i.modifiers if m in ("AND", "OR", "XOR")]
    require(len(joins) == 1 and len(i.dests) == 2, "combination")
    join = {"AND": alg.both, "OR": alg.either, "XOR": alg.differ}[joins[0]]
    first, second = i.dests
    value = join(result, other)
    inverse = join(alg.negation(result), other) if second.index != PT else None
    c.set_truth(first, value)
    if inverse is not None:
        c.set_truth(second, inverse)


def isetp(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    a, b, other, *low = sources(i, 4) if i.has("EX") else sources(i, 3)
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
    combine(i, c, result, combined)


def shf(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    low, amount, high = sources(i, 3)
    left = i.has("L")
    require(left != i.has("R"), "direction")
    wide = i.has("U64") or i.has("S64")
    signed = i.has("S32") or i.has("S64")
    count = c.word(amount)
    if i.has("W"):
        count = alg.and_(count, alg.word(63 if wide else 31))
    dest = only_register(i)
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


def prmt(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    a, selector, b = sources(i, 3)
    dest = only_register(i)
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


def p2r(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    predicates, base, mask = sources(i, 3)
    require(predicates.kind == "preds" and mask.kind == "imm", "operands")
    chosen = mask.value & 0x7F
    total = alg.and_(c.word(base), alg.word(~chosen & 0xFFFFFFFF))
    for index in range(7):
        if chosen >> index & 1:
            total = alg.or_(total, alg.choose(c.predicate(index), alg.word(1 << index), alg.word(0)))
    c.set_word(only_register(i), total)


def r2p(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    value, mask = sources(i, 2)
    require(mask.kind == "imm" and i.dests[0].kind == "preds", "operands")
    word = c.word(value)
    for index in range(7):
        if mask.value >> index & 1:
            c.set_predicate(index, alg.ne(alg.and_(word, alg.word(1 << index)), alg.word(0)))
