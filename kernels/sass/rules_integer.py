"""Integer arithmetic, moves and special registers."""

from __future__ import annotations

from typing import TypeVar

from .decode import Instruction
from .operands import PT, Operand
from .rules import Context, only_register, register_and_carry, require, sources

__all__ = ["iadd", "iadd3", "imad", "imnmx", "ldc", "lea", "mov", "special", "unary", "viaddmnmx", "vimnmx3"]

V = TypeVar("V")


def iadd3(i: Instruction, c: Context[V]) -> None:
    if i.has("64"):
        a = c.algebra
        x, y, z = sources(i, 3)
        c.set_quad(only_register(i), a.addq(a.addq(c.quad(x), c.quad(y)), c.quad(z)))
        return
    alg = c.algebra
    extended = i.has("X")
    operands = i.sources[:3]
    carries_in = [p for p in i.sources[3:] if not (p.index == PT and p.invert)]
    require(len(operands) == 3 and (extended or len(i.sources) == 3) and len(i.sources) <= 5, "operands")
    dest, carry = register_and_carry(i)
    if not extended and carry is None:
        c.set_word(dest, alg.add(alg.add(c.word(operands[0]), c.word(operands[1])), c.word(operands[2])))
        return
    require(not (extended and any(o.negate for o in operands)), "-R with .X")
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


def iadd(i: Instruction, c: Context[V]) -> None:
    a, b = sources(i, 2)
    if i.has("64"):
        c.set_quad(only_register(i), c.algebra.addq(c.quad(a), c.quad(b)))
    else:
        c.set_word(only_register(i), c.algebra.add(c.word(a), c.word(b)))


def imad(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    wide, high = i.has("WIDE"), i.has("HI")
    if wide or high:
        require(not i.has("X"), ".X with a wide product")
        a, b, d = sources(i, 3)
        extend = alg.zext if i.has("U32") else alg.sext
        total = alg.addq(alg.mulq(extend(c.word(a)), extend(c.word(b))), c.quad(d))
        dest = only_register(i)
        if wide:
            c.set_quad(dest, total)
        else:
            c.set_word(dest, alg.high(total))
        return
    a, b, d, *carry = sources(i, 4) if i.has("X") else sources(i, 3)
    total = alg.add(alg.mul(c.word(a), c.word(b)), c.word(d))
    if carry:
        total = alg.add(total, alg.choose(c.truth(carry[0]), alg.word(1), alg.word(0)))
    c.set_word(only_register(i), total)


def lea(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    dest, carry = register_and_carry(i)
    sources = list(i.sources)
    carry_in = sources.pop() if i.has("X") else None
    if i.has("SX32"):
        require(len(sources) == 3, "operands")
        a, b, shift = sources
        above: V | None = alg.sar(c.word(a), alg.word(31))
    elif i.has("HI"):
        require(len(sources) == 4, "operands")
        a, b, top, shift = sources
        above = c.word(top)
    else:
        require(len(sources) == 3 and not i.has("X"), "operands")
        a, b, shift = sources
        above = None
    require(shift.kind == "imm" and shift.value < 32, "shift amount")
    if above is None:
        shifted = alg.shl(c.word(a), alg.word(shift.value))
        require(carry is None or not b.negate, "carry of a difference")
        total = alg.add(shifted, c.word(b))
        c.set_word(dest, total)
        if carry is not None:
            c.set_truth(carry, alg.ltu(total, shifted))
        return
    require(carry is None, "carry-out of LEA.HI")
    upper = alg.shl(above, alg.word(shift.value))
    if shift.value:
        upper = alg.or_(upper, alg.shr(c.word(a), alg.word(32 - shift.value)))
    total = alg.add(c.word(b), upper)
    if carry_in is not None:
        total = alg.add(total, alg.choose(c.truth(carry_in), alg.word(1), alg.word(0)))
    c.set_word(dest, total)


def _extremum(c: Context[V], i: Instruction, a: V, b: V, least: Operand) -> V:
    alg = c.algebra
    less = (alg.ltu if i.has("U32") else alg.lts)(a, b)
    if least.index == PT:
        return alg.choose(less, b, a) if least.invert else alg.choose(less, a, b)
    return alg.choose(alg.negation(alg.differ(less, c.truth(least))), a, b)


def imnmx(i: Instruction, c: Context[V]) -> None:
    a, b, least = sources(i, 3)
    c.set_word(only_register(i), _extremum(c, i, c.word(a), c.word(b), least))


def viaddmnmx(i: Instruction, c: Context[V]) -> None:
    a, b, d, least = sources(i, 4)
    c.set_word(only_register(i), _extremum(c, i, c.algebra.add(c.word(a), c.word(b)), c.word(d), least))


def vimnmx3(i: Instruction, c: Context[V]) -> None:
    a, b, d, least = sources(i, 4)
    require(least.index == PT, "selection by a predicate")
    c.set_word(only_register(i), _extremum(c, i, _extremum(c, i, c.word(a), c.word(b), least), c.word(d), least))


def mov(i: Instruction, c: Context[V]) -> None:
    source, *lanes = sources(i, 1, 2)
    require(not lanes or (lanes[0].kind == "imm" and lanes[0].value == 0xF), "byte mask")
    if i.has("64"):
        c.set_quad(only_register(i), c.quad(source))
    else:
        c.set_word(only_register(i), c.word(source))


def unary(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    (a,) = sources(i, 1)
    value = c.word(a)
    if i.opcode in ("POPC", "UPOPC"):
        result = alg.popc(value)
    elif i.opcode in ("FLO", "UFLO"):
        require(i.has("U32"), "signed FLO")
        result = alg.flo(value)
        if i.has("SH"):
            result = alg.choose(alg.eq(value, alg.word(0)), result, alg.sub(alg.word(31), result))
    elif i.opcode in ("BREV", "UBREV"):
        result = alg.brev(value)
    else:
        result = alg.choose(alg.lts(value, alg.word(0)), alg.sub(alg.word(0), value), value)
    c.set_word(only_register(i), result)


def special(i: Instruction, c: Context[V]) -> None:
    (name,) = sources(i, 1)
    dest = only_register(i)
    if i.opcode == "CS2R":
        require(name.text == "SRZ", "special register pair")
        if i.has("32"):
            c.set_word(dest, c.algebra.word(0))
        else:
            c.set_quad(dest, c.algebra.quad(0))
        return
    c.set_word(dest, c.algebra.word(0) if name.text == "SRZ" else c.special(name.text))


def ldc(i: Instruction, c: Context[V]) -> None:
    (source,) = sources(i, 1)
    require(source.kind == "const" and not (source.negate or source.invert or source.absolute), "constant operand")
    c.set_words(only_register(i), c.constants(source, {"64": 2, "128": 4}.get(i.modifiers[0], 0) if i.modifiers else 1))
