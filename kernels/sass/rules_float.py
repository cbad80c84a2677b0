"""Float arithmetic and comparison on bit patterns, conversions, and selection."""

from __future__ import annotations

import struct
from typing import TypeVar

from .decode import Instruction
from .operands import Operand
from .rules import Context, only_register, require, sources
from .rules_logic import combine

__all__ = ["convert", "farith", "float_bits", "fmnmx", "fsetp", "hfma2", "sel"]

V = TypeVar("V")


def float_bits(c: Context[V], operand: Operand) -> V:
    """Bits of a float32 operand, |x| and - applied to the sign bit."""
    alg = c.algebra
    if operand.kind == "float":
        bits = alg.word(int(struct.unpack("<I", struct.pack("<f", operand.number))[0]))
    else:
        bits = c.bare(operand)
    if operand.absolute:
        bits = alg.and_(bits, alg.word(0x7FFFFFFF))
    return alg.xor(bits, alg.word(0x80000000)) if operand.negate else bits


def sel(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    a, b, which = sources(i, 3)
    p = c.truth(which)
    if i.has("64"):
        first, second = c.quad(a), c.quad(b)
        low, high = alg.choose(p, alg.low(first), alg.low(second)), alg.choose(p, alg.high(first), alg.high(second))
        c.set_quad(only_register(i), alg.pair(low, high))
        return
    x, y = (float_bits(c, a), float_bits(c, b)) if i.opcode == "FSEL" else (c.word(a), c.word(b))
    c.set_word(only_register(i), alg.choose(p, x, y))


def farith(i: Instruction, c: Context[V]) -> None:
    require(not i.has("FTZ"), "flush to zero")
    a, b = sources(i, 2)
    c.set_word(only_register(i), c.algebra.floating("fadd" if i.opcode == "FADD" else "fmul", float_bits(c, a), float_bits(c, b)))


def fsetp(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    a, b, other = sources(i, 3)
    require(not i.has("FTZ"), "flush to zero")
    combined = c.truth(other)
    names = [m for m in i.modifiers if m.rstrip("U") in ("LT", "LE", "GT", "GE", "EQ", "NE") or m in ("NUM", "NAN")]
    require(len(names) == 1, "relation")
    x, y = float_bits(c, a), float_bits(c, b)
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
    combine(i, c, result, combined)


def fmnmx(i: Instruction, c: Context[V]) -> None:
    alg = c.algebra
    require(not i.has("FTZ"), "flush to zero")
    a, b, least = sources(i, 3)
    x, y = float_bits(c, a), float_bits(c, b)
    # A NaN loses against a number; of -0 and +0 the minimum is -0.
    keys = [alg.choose(alg.lts(v, alg.word(0)), alg.xor(v, alg.word(0x7FFFFFFF)), v) for v in (x, y)]
    first = alg.negation(alg.differ(alg.lts(keys[0], keys[1]), c.truth(least)))
    first = alg.choose(alg.floating("fun?", x, x), alg.truth(False), alg.choose(alg.floating("fun?", y, y), alg.truth(True), first))
    c.set_word(only_register(i), alg.choose(first, x, y))


def convert(i: Instruction, c: Context[V]) -> None:
    (a,) = sources(i, 1)
    name = {
        "I2F.U32.RP": "u2f_up", "I2F.U32": "u2f", "I2F": "s2f", "I2F.S32": "s2f", "I2FP.F32.U32": "u2f", "I2FP.F32.S32": "s2f",
        "F2I.FTZ.U32.TRUNC.NTZ": "f2u", "F2I.U32.TRUNC.NTZ": "f2u", "F2F.F16.F32": "f2h", "MUFU.RCP": "rcp",
    }.get(i.mnemonic)  # fmt: skip
    require(name is not None, "conversion")
    assert name is not None
    value = c.word(a) if name in ("u2f", "s2f", "u2f_up") else float_bits(c, a)
    c.set_word(only_register(i), c.algebra.floating(name, value))


def hfma2(i: Instruction, c: Context[V]) -> None:
    a, b, high, low = sources(i, 4)
    require(
        a.is_zero and a.negate and b.is_zero and not b.negate and high.kind == low.kind == "float", "HFMA2 that is not a constant"
    )
    halves = [int(struct.unpack("<H", struct.pack("<e", o.number))[0]) for o in (high, low)]
    c.set_word(only_register(i), c.algebra.word(halves[0] << 16 | halves[1]))
