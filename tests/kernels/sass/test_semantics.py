"""What instructions compute: against plain arithmetic written out here, and generated code against the reference algebra.

Every row is run in five ways: over plain integers, and as generated NumPy code with all threads, some threads (by index and by
slice) and one thread, and with all registers uniform. All five must agree.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import UnknownInstructionError
from dsv4_repro.kernels.sass.algebra import IntegerAlgebra, float_operation
from dsv4_repro.kernels.sass.blocks import Blocks, register_number
from dsv4_repro.kernels.sass.decode import Instruction, Operand, decode_row, decode_rows
from dsv4_repro.kernels.sass.lanes import VECTOR
from dsv4_repro.kernels.sass.memory import Memory
from dsv4_repro.kernels.sass.program import Program
from dsv4_repro.kernels.sass.semantics import NoSemanticsError, execute
from dsv4_repro.kernels.sass.state import ThreadVector

M = 0xFFFFFFFF
THREADS = 64
EDGES = (
    0,
    1,
    2,
    7,
    31,
    32,
    33,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    0x8000,
    0x10000,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFE,
    0xFFFFFFFF,
    0x12345678,
)


def signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


class PlainContext:
    """``semantics.Context`` over integers: one thread's registers in a dictionary by register number."""

    def __init__(self, registers: dict[int, int]) -> None:
        self.registers = registers
        self.algebra = IntegerAlgebra()

    def bare(self, operand: Operand) -> int:
        if operand.kind == "imm":
            return operand.value
        if operand.kind not in ("reg", "ureg"):
            raise NoSemanticsError(operand.text)
        number = register_number(operand)
        return 0 if number is None else self.registers.get(number, 0)

    def word(self, operand: Operand) -> int:
        value = self.bare(operand)
        value = value ^ M if operand.invert else value
        return -value & M if operand.negate else value

    def quad(self, operand: Operand) -> int:
        if operand.kind == "imm":
            return operand.value
        number = register_number(operand)
        value = 0 if number is None else self.registers.get(number, 0) | self.registers.get(number + 1, 0) << 32
        return -value & (1 << 64) - 1 if operand.negate else value

    def truth(self, operand: Operand) -> int:
        number = register_number(operand)
        value = True if number is None else bool(self.registers.get(number, 0))
        return value != operand.invert

    def predicate(self, index: int) -> int:
        return bool(self.registers.get(512 + index, 0))

    def special(self, name: str) -> int:
        raise NoSemanticsError(name)

    def constants(self, operand: Operand, count: int) -> list[int]:
        raise NoSemanticsError(operand.text)

    def _set(self, number: int | None, value: int) -> None:
        if number is not None:
            self.registers[number] = value

    def set_word(self, operand: Operand, value: int) -> None:
        self._set(register_number(operand), value)

    set_truth = set_word

    def set_quad(self, operand: Operand, value: int) -> None:
        number = register_number(operand)
        if number is not None:
            self._set(number, value & M)
            self._set(number + 1, value >> 32)

    def set_predicate(self, index: int, value: int) -> None:
        self._set(512 + index, value)

    def set_words(self, operand: Operand, values: list[int]) -> None:
        for step, value in enumerate(values):
            self._set((register_number(operand) or 0) + step, value)


def plain(instruction: Instruction, registers: dict[int, int]) -> dict[int, int]:
    """Registers after one instruction over plain integers."""
    state = dict(registers)
    guard = instruction.guard
    if guard is None or bool(state.get(512 + guard.index, 0)) != guard.negated:
        assert execute(instruction, PlainContext(state))
    return state


@lru_cache(maxsize=512)
def compiled(text: tuple[str, str, str]) -> tuple[Blocks, ThreadVector]:
    program = Program.from_rows("k", 90, [text, ("EXIT", "", "")], {}, params_base=0x210, params_size=56)
    return program.blocks(False), ThreadVector(Memory(), THREADS, 0x400, 1024, 0x7E00)


def generated(text: tuple[str, str, str], threads: list[dict[int, int]], mode: str) -> list[dict[int, int]]:
    """Registers of each thread after the generated code of one instruction. ``mode``: all, index, slice, one, uniform."""
    blocks, vector = compiled(text)
    block = blocks.at(0)
    vector.start([0])
    numbers = sorted({number for state in threads for number in state})
    count = len(threads)
    if mode == "uniform":
        for number in numbers:
            vector.regs[number] = bool(threads[0][number]) if number >= 512 else threads[0][number]
    else:
        for number in numbers:
            kind = np.bool_ if number >= 512 else np.uint32
            array: np.ndarray[Any, Any] = np.zeros(THREADS, kind)
            array[:count] = [state[number] for state in threads]
            vector.regs[number] = array
            vector.uniform &= ~(1 << number)
    where: Any = {"all": None, "uniform": None, "index": np.arange(count), "slice": slice(0, count), "one": 0}[mode]
    word = {"all": "all", "uniform": "all", "index": "some", "slice": "some", "one": "one"}[mode]
    size = THREADS if where is None else 1 if mode == "one" else count
    key = {"all": vector.uniform & block.reads, "some": vector.uniform & (block.reads | block.writes), "one": 0}[word]
    function = block.functions.get((word, key, True)) or blocks.compiled(block, word, key, True)
    with np.errstate(all="ignore"):
        function(vector, vector.regs, where, size)
    found = []
    for position in range(1 if mode in ("one", "uniform") else count):
        after = {}
        for number in range(528):
            value = vector.regs[number]
            after[number] = int(value[position]) if isinstance(value, np.ndarray) else int(value)
        found.append(after)
    return found


def agree(text: tuple[str, str, str], threads: list[dict[int, int]]) -> list[dict[int, int]]:
    """All five ways give the same; returns the plain result."""
    instruction = decode_row(0, text, {})
    assert not instruction.problem, instruction.problem
    expected = [plain(instruction, state) for state in threads]
    for mode in ("all", "index", "slice", "one", "uniform"):
        for want, got in zip(expected, generated(text, threads, mode), strict=False):
            different = {n: (want.get(n, 0), got[n]) for n in range(528) if int(want.get(n, 0)) != got[n]}
            assert not different, (mode, text, different)
    return expected


def run(mnemonic: str, operands: str, registers: dict[int, int], guard: str = "") -> dict[int, int]:
    return agree((mnemonic, operands, guard), [registers])[0]


R1, R2, R3, R4, R5, R6, R7 = range(1, 8)
P0, P1, P2, P3 = range(512, 516)


@pytest.mark.parametrize("a", EDGES)
@pytest.mark.parametrize("b", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_iadd3_and_its_carries(a: int, b: int) -> None:
    state = {R1: a, R2: b, R3: 5}
    assert run("IADD3", "R4,R1,R2,R3", state)[R4] == (a + b + 5) & M
    assert run("IADD3", "R4,-R1,R2,RZ", state)[R4] == (b - a) & M
    after = run("IADD3", "R4,P0,PT,R1,R2,RZ", state)
    assert (after[R4], after[P0]) == ((a + b) & M, a + b > M)
    # A negated operand enters as its complement plus 1: 0 gives a carry.
    after = run("IADD3", "R4,P0,R1,-R2,RZ", state)
    assert (after[R4], after[P0]) == ((a - b) & M, a >= b)
    after = run("IADD3", "R4,P0,R1,R2,R3", state)
    assert (after[R4], after[P0]) == ((a + b + 5) & M, bool((a + b + 5) >> 32 & 1))
    for carry in (0, 1):
        after = run("IADD3.X", "R4,PT,PT,R1,R2,RZ,P1,!PT", state | {P1: carry})
        assert after[R4] == (a + b + carry) & M
        after = run("IADD3.X", "R4,P0,PT,R1,~R2,RZ,P1,!PT", state | {P1: carry})
        total = a + (b ^ M) + carry
        assert (after[R4], after[P0]) == (total & M, total > M)


def test_64_bit_addition_by_carry_is_exact() -> None:
    for a, b in ((0xFFFFFFFF, 1), (0x1_FFFFFFFF, 0x2_00000001), (0x8000000080000000, 0x8000000080000000)):
        low = run("IADD3", "R5,P0,PT,R1,R3,RZ", {R1: a & M, R2: a >> 32, R3: b & M, R4: b >> 32})
        both = run("IADD3.X", "R6,PT,PT,R2,R4,RZ,P0,!PT", low)
        assert both[R5] | both[R6] << 32 == (a + b) & (1 << 64) - 1
        pairs = run("IADD.64", "R5,R1,R3", {R1: a & M, R2: a >> 32, R3: b & M, R4: b >> 32})
        assert pairs[R5] | pairs[R6] << 32 == (a + b) & (1 << 64) - 1
        pairs = run("IADD.64", "R5,R1,-R3", {R1: a & M, R2: a >> 32, R3: b & M, R4: b >> 32})
        assert pairs[R5] | pairs[R6] << 32 == (a - b) & (1 << 64) - 1


@pytest.mark.parametrize("a", EDGES)
@pytest.mark.parametrize("b", [0, 3, 0x80000000, 0xFFFFFFFF])
def test_imad(a: int, b: int) -> None:
    c = 0x8_FFFFFFFF
    state = {R1: a, R2: b, R3: c & M, R4: c >> 32, P0: 1}
    assert run("IMAD", "R5,R1,R2,R3", state)[R5] == (a * b + (c & M)) & M
    assert run("IMAD.MOV.U32", "R5,RZ,RZ,R1", state)[R5] == a
    assert run("IMAD.X", "R5,R1,R2,R3,P0", state)[R5] == (a * b + (c & M) + 1) & M
    wide = run("IMAD.WIDE", "R5,R1,R2,R3", state)
    assert wide[R5] | wide[R6] << 32 == (signed(a) * signed(b) + c) % (1 << 64)
    wide = run("IMAD.WIDE.U32", "R5,R1,R2,R3", state)
    assert wide[R5] | wide[R6] << 32 == (a * b + c) % (1 << 64)
    assert run("IMAD.HI.U32", "R5,R1,-0x55555555,R3", state)[R5] == (a * 0xAAAAAAAB + c) >> 32 & M
    assert run("IMAD.HI.U32", "R5,R1,R2,RZ", state)[R5] == a * b >> 32


def test_division_by_reciprocal_is_exact() -> None:
    """The compiler's unsigned division: a rounded-up reciprocal, two corrections."""
    for n, d in ((16, 2), (300, 300), (4294967295, 7), (1000000007, 3), (0xFFFFFFFF, 0xFFFFFFFF), (12345, 65537)):
        up = float_operation("u2f_up", d)
        assert struct.unpack("<f", struct.pack("<I", int(up)))[0] >= d
        start = float_operation("f2u", (int(float_operation("rcp", up)) + 0x0FFFFFFE) & M)
        error = -start * d & M
        better = (start + (start * error >> 32)) & M
        quotient = better * n >> 32
        rest = n - quotient * d
        while rest >= d:
            quotient, rest = quotient + 1, rest - d
        assert (quotient, rest) == divmod(n, d)


@pytest.mark.parametrize(
    "table", sorted({*range(0, 256, 7), 0xC0, 0xFC, 0xF8, 0xEA, 0xA8, 0x33, 0x30, 0x3C, 0xE2, 0xCA, 0xB8, 0x96, 0x80, 0xFE})
)
def test_lop3_by_bits(table: int) -> None:
    a, b, c = 0x0F0F3355, 0xC3A55A00, 0xFFFF00AA
    want = 0
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        want |= (table >> index & 1) << bit
    after = run("LOP3.LUT", f"P0,R4,R1,R2,R3,{table:#x},!PT", {R1: a, R2: b, R3: c})
    assert (after[R4], after[P0]) == (want, want != 0)
    truths = [(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)]
    for x, y, z in truths:
        after = run("PLOP3.LUT", f"P3,PT,P0,!P1,P2,{table:#x},0x0", {P0: x, P1: 1 - y, P2: z})
        assert after[P3] == table >> (x << 2 | y << 1 | z) & 1


def byte_select(a: int, b: int, selector: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    out = 0
    for byte in range(4):
        nibble = selector >> 4 * byte & 15
        value = source[nibble & 7]
        out |= (0xFF if nibble & 8 and value & 0x80 else 0 if nibble & 8 else value) << 8 * byte
    return out


@pytest.mark.parametrize(
    "selector", [0x9910, 0x5410, 0x7770, 0x7610, 0x7632, 0x3210, 0x0123, 0x4567, 0x8888, 0xFEDC, 0x6540, 0x7771, 0xBA98]
)
def test_prmt(selector: int) -> None:
    for a, b in ((0x80FF7F01, 0x11223344), (0x12348765, 0xFEDCBA98)):
        state = {R1: a, R2: b, R3: selector}
        want = byte_select(a, b, selector)
        assert run("PRMT", f"R4,R1,{selector:#x},R2", state)[R4] == want
        assert run("PRMT", "R4,R1,R3,R2", state)[R4] == want


@pytest.mark.parametrize("amount", [0, 1, 8, 31, 32, 33, 63, 64, 255, 0x80000000, 0xFFFFFFFF])
def test_shifts_saturate(amount: int) -> None:
    for a in (0xFFFFFFFF, 0x80000001, 0x00FF00FF):
        state = {R1: a, R2: amount, R3: 0x89ABCDEF}
        plain_shift = amount < 32
        assert run("SHF.L.U32", "R4,R1,R2,RZ", state)[R4] == (a << amount & M if plain_shift else 0)
        assert run("SHF.R.U32.HI", "R4,RZ,R2,R1", state)[R4] == (a >> amount if plain_shift else 0)
        assert run("SHF.R.S32.HI", "R4,RZ,R2,R1", state)[R4] == signed(a) >> min(amount, 31) & M
        wide = a | 0x89ABCDEF << 32
        assert run("SHF.R.U64", "R4,R1,R2,R3", state)[R4] == (wide >> amount & M if amount < 64 else 0)
        assert run("SHF.L.U64.HI", "R4,R1,R2,R3", state)[R4] == ((wide << amount) >> 32 & M if amount < 64 else 0)
        assert run("SHF.L.W.U32.HI", "R4,R1,R2,R1", state)[R4] == (a << amount % 32 | a >> 32 - amount % 32) & M
        if amount < 32:
            assert run("SHF.R.U32.HI", f"R4,RZ,{amount:#x},R1", state)[R4] == a >> amount


@pytest.mark.parametrize("shift", [0, 1, 2, 10, 22, 31])
def test_lea(shift: int) -> None:
    for a, b, c in ((0xFFFFFFFF, 0x10, 3), (0x80000001, 0xFFFFFFF0, 0x7FFFFFFF), (5, 0, 0)):
        state = {R1: a, R2: b, R3: c, P1: 1}
        after = run("LEA", f"R4,P0,R1,R2,{shift:#x}", state)
        low = a << shift & M
        assert (after[R4], after[P0]) == ((low + b) & M, low + b > M)
        high = (c << 32 | a) << shift >> 32 & M
        assert run("LEA.HI", f"R4,R1,R2,R3,{shift:#x}", state)[R4] == (b + high) & M
        assert run("LEA.HI.X", f"R4,R1,R2,R3,{shift:#x},P1", state)[R4] == (b + high + 1) & M
        extended = (signed(a) << shift) >> 32 & M
        assert run("LEA.HI.X.SX32", f"R4,R1,R2,{shift:#x},P1", state)[R4] == (b + extended + 1) & M


RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda x, y: x < y, "LE": lambda x, y: x <= y, "GT": lambda x, y: x > y, "GE": lambda x, y: x >= y,
    "EQ": lambda x, y: x == y, "NE": lambda x, y: x != y,
}  # fmt: skip


@pytest.mark.parametrize("name", RELATIONS)
def test_comparisons(name: str) -> None:
    relation = RELATIONS[name]
    for a in EDGES:
        for b in (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, a):
            state = {R1: a, R2: b, R3: b, R4: a, P1: 1}
            assert run(f"ISETP.{name}.U32.AND", "P0,PT,R1,R2,PT", state)[P0] == relation(a, b)
            after = run(f"ISETP.{name}.AND", "P0,P2,R1,R2,P1", state)
            assert (after[P0], after[P2]) == (relation(signed(a), signed(b)), not relation(signed(a), signed(b)))
            assert run(f"ISETP.{name}.OR", "P0,PT,R1,R2,!P1", state)[P0] == relation(signed(a), signed(b))
            x, y = a | b << 32, b | a << 32
            pairs = state | {R2: b, R3: b, R4: a}
            assert run(f"ISETP.{name}.S64.AND", "P0,PT,R1,R3,PT", pairs)[P0] == relation(signed(x, 64), signed(y, 64))
            low = run(f"ISETP.{name}.U32.AND", "P0,PT,R1,R3,PT", pairs)
            assert run(f"ISETP.{name}.AND.EX", "P0,PT,R2,R4,PT,P0", low)[P0] == relation(signed(x, 64), signed(y, 64))


def test_extrema_and_selection() -> None:
    for a in EDGES:
        for b in (0, 0x80000000, 0xFFFFFFFF, 5):
            state = {R1: a, R2: b, R3: 9, P0: 1, P1: 0}
            assert run("VIMNMX", "R4,PT,PT,R1,R2,PT", state)[R4] == (a if signed(a) < signed(b) else b)
            assert run("IMNMX.U32", "R4,R1,R2,!PT", state)[R4] == max(a, b)
            assert run("VIMNMX.S32", "R4,RZ,R1,!PT", state)[R4] == max(signed(a), 0)
            assert run("IMNMX.U32", "R4,R1,R2,P1", state)[R4] == max(a, b)
            assert run("VIADDMNMX.U32", "R4,R1,R3,R2,PT", state)[R4] == min((a + 9) & M, b)
            assert run("VIMNMX3.U32", "R4,R1,R2,R3,PT", state)[R4] == min(a, b, 9)
            assert run("SEL", "R4,R1,R2,!P0", state)[R4] == b
            assert run("IABS", "R4,R1", state)[R4] == abs(signed(a)) & M
            after = run("SEL.64", "R4,R1,R2,P1", state)
            assert (after[R4], after[R5]) == (b, 9)


def test_bits() -> None:
    for a in EDGES:
        state = {R1: a}
        assert run("POPC", "R4,R1", state)[R4] == a.bit_count()
        assert run("POPC", "R4,~R1", state)[R4] == 32 - a.bit_count()
        assert run("FLO.U32", "R4,R1", state)[R4] == (a.bit_length() - 1 if a else M)
        assert run("FLO.U32.SH", "R4,R1", state)[R4] == (32 - a.bit_length() if a else M)
        assert run("BREV", "R4,R1", state)[R4] == int(f"{a:032b}"[::-1], 2)


def test_predicates_as_bits() -> None:
    for mask in (0x10, 0x7F, 0x55):
        for bits in (0, 0x7F, 0x2A):
            state = {R1: 0xABCDEF80, **{512 + k: bits >> k & 1 for k in range(7)}}
            after = agree(("P2R", f"R4,PR,R1,{mask:#x}", ""), [state])[0]
            assert after[R4] == (0xABCDEF80 & ~mask | bits & mask) & M
            after = agree(("R2P", f"PR,R2,{mask:#x}", ""), [state | {R2: bits ^ 0x7F}])[0]
            assert [after[512 + k] for k in range(7)] == [(bits ^ 0x7F if mask >> k & 1 else bits) >> k & 1 for k in range(7)]


@pytest.mark.parametrize(
    ("text", "value"),
    [("0,0", 0), ("0,5.9604644775390625e-08", 1), ("0,1.1920928955078125e-07", 2), ("0,9.5367431640625e-07", 16),
     ("1,1", 0x3C003C00), ("-2,0", 0xC0000000), ("0,-0", 0x8000), ("INF,0", 0x7C000000)],
)  # fmt: skip
def test_hfma2_as_a_constant_loader(text: str, value: int) -> None:
    assert run("HFMA2", f"R4,-RZ,RZ,{text}", {})[R4] == value


def test_hfma2_with_other_operands_has_no_semantics() -> None:
    with pytest.raises(UnknownInstructionError, match="not a constant"):
        generated(("HFMA2", "R4,-R1,RZ,0,0", ""), [{R1: 0}], "all")


FLOATS = (0.0, -0.0, 1.0, -1.5, 65504.0, 65520.0, 1e38, -3e38, 2.0**-24, 2.0**-25, 2.0**-149, math.inf, -math.inf, 1000.005, 8.1)


def bits_of(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def test_half_conversion() -> None:
    for value in FLOATS:
        single = struct.unpack("<f", struct.pack("<f", value))[0]
        with np.errstate(over="ignore"):
            want = int(np.float32(single).astype(np.float16).view(np.uint16))
        assert run("F2F.F16.F32", "R4,R1", {R1: bits_of(value)})[R4] == want
    assert run("F2F.F16.F32", "R4,R1", {R1: 0xFFC00001})[R4] == 0x7FFF


def test_fadd_makes_the_ordered_key() -> None:
    for value in FLOATS:
        assert run("FADD", "R4,-|R1|,-RZ", {R1: bits_of(value)})[R4] == bits_of(value) | 0x80000000


@pytest.mark.parametrize("name", ["u2f", "s2f", "u2f_up", "f2u", "f2h", "rcp", "fadd", "fmul", "flt?", "fle?", "feq?", "fun?"])
def test_vector_floats_equal_the_reference(name: str) -> None:
    chance = random.Random(1)
    words = [*EDGES, *map(bits_of, FLOATS), 0x7FC00000, *(chance.getrandbits(32) for _ in range(300))]
    others = words[::-1]
    two = name in ("fadd", "fmul", "flt?", "fle?", "feq?", "fun?")
    arrays = [np.array(words, np.uint32)] + ([np.array(others, np.uint32)] if two else [])
    with np.errstate(all="ignore"):
        found = VECTOR[name](*arrays)
    for k, word in enumerate(words):
        want = float_operation(name, word, others[k]) if two else float_operation(name, word)
        if name in ("f2h", "rcp") and math.isnan(struct.unpack("<f", struct.pack("<I", word))[0]):
            continue  # a NaN's bits are set by the instruction, not by arithmetic
        assert int(found[k]) == int(want), (name, hex(word), hex(others[k]))


def test_float_comparison_and_extremum() -> None:
    nan = 0x7FC00000
    for a in (*map(bits_of, FLOATS), nan):
        for b in (*map(bits_of, FLOATS[:6]), nan):
            x, y = (struct.unpack("<f", struct.pack("<I", v))[0] for v in (a, b))
            state = {R1: a, R2: b}
            assert run("FSETP.GT.AND", "P0,PT,R1,R2,PT", state)[P0] == (x > y)
            assert run("FSETP.NEU.AND", "P0,PT,R1,R2,PT", state)[P0] == (x != y)
            assert run("FSETP.GEU.AND", "P0,PT,R1,R2,PT", state)[P0] == (not x < y)
            least = run("FMNMX", "R4,R1,R2,PT", state)[R4]
            if not math.isnan(x) and not math.isnan(y):
                assert struct.unpack("<f", struct.pack("<I", least))[0] == min(x, y)
            elif math.isnan(x) != math.isnan(y):
                assert least == (b if math.isnan(x) else a)


def test_guard_leaves_the_destination() -> None:
    states = [{R1: 7, R4: 100 + k, P0: k & 1} for k in range(40)]
    after = agree(("IADD3", "R4,R1,0x1,RZ", "@P0"), states)
    assert [state[R4] for state in after] == [8 if k & 1 else 100 + k for k in range(40)]
    after = agree(("IMAD.WIDE", "R4,R1,R1,R4", "@!P0"), [state | {R5: 0} for state in states])
    assert [state[R4] for state in after] == [100 + k if k & 1 else 149 + k for k in range(40)]


TEMPLATES = (
    ("IADD3", "R4,{a},{b},{c}"), ("IADD3", "R4,P0,PT,{a},{b},RZ"), ("IADD3", "R4,P0,{n},{b},{c}"),
    ("IADD3.X", "R4,PT,PT,{a},{b},{c},P1,!PT"), ("IMAD", "R4,{a},{b},{c}"), ("IMAD.WIDE", "R4,{r},{b},R2"),
    ("IMAD.WIDE.U32", "R4,{r},{b},R2"), ("IMAD.HI.U32", "R4,{r},{b},R2"), ("LEA", "R4,P0,{r},{r},0x2"),
    ("LEA.HI", "R4,{r},{b},RZ,0x16"), ("LEA.HI.X", "R5,{r},{b},R2,0x2,P1"), ("SHF.R.U32.HI", "R4,RZ,{b},{r}"),
    ("SHF.L.U32", "R4,{r},{b},RZ"), ("SHF.R.S32.HI", "R4,RZ,{b},{r}"), ("SHF.R.U64", "R4,R1,{r},R2"),
    ("PRMT", "R4,{r},0x7632,{r}"), ("LOP3.LUT", "P2,R4,{r},{b},{r},0xe2,!PT"), ("LOP3.LUT", "R4,{r},{r},{r},0x96,!PT"),
    ("ISETP.GT.U32.AND", "P0,P3,{r},{b},P1"), ("ISETP.LT.OR", "P0,PT,{r},{b},!P1"),
    ("ISETP.NE.AND.EX", "P0,PT,{r},{r},PT,P1"), ("ISETP.EQ.S64.AND", "P2,PT,R1,R2,P1"), ("VIMNMX.U32", "R4,{r},{b},PT"),
    ("VIMNMX.S32", "R4,{r},{b},!PT"), ("IMNMX", "R4,{r},{r},P1"), ("SEL", "R4,{r},{b},!P1"), ("POPC", "R4,{r}"),
    ("FLO.U32", "R4,{r}"), ("BREV", "R4,{r}"), ("MOV", "R4,{b}"), ("IADD.64", "R4,R1,R2"), ("MOV.64", "R4,R2"),
    ("PLOP3.LUT", "P0,P2,P1,!P3,PT,0x2a,0x74"), ("I2F.U32.RP", "R4,{r}"), ("F2I.FTZ.U32.TRUNC.NTZ", "R4,{r}"),
    ("FADD", "R4,-|{r}|,-RZ"), ("VIADD", "R4,{r},{b}"), ("IABS", "R4,{r}"), ("VIADDMNMX.U32", "R4,{r},{b},{r},PT"),
    ("R2UR", "UR4,{r}"), ("CS2R", "R4,SRZ"),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_generated_code_equals_plain_arithmetic(data: st.DataObject) -> None:
    word = st.one_of(st.sampled_from(EDGES), st.integers(0, M))
    register = st.sampled_from(["R1", "R2", "R3", "R4", "R5", "RZ"])
    either = st.one_of(register, word.map(hex))
    mnemonic, form = data.draw(st.sampled_from(TEMPLATES))
    operands = form
    while "{" in operands:
        mark = operands[operands.index("{") : operands.index("}") + 1]
        value = data.draw(
            {"{r}": register, "{a}": register, "{b}": either, "{c}": either, "{n}": register.map(lambda r: "-" + r)}[mark]
        )
        operands = operands.replace(mark, value, 1)
    guard = data.draw(st.sampled_from(["", "", "@P1", "@!P3"]))
    threads = [
        {**{number: data.draw(word) for number in range(1, 7)}, **{512 + k: data.draw(st.integers(0, 1)) for k in range(4)}}
        for _ in range(data.draw(st.integers(2, 5)))
    ]
    agree((mnemonic, operands, guard), threads)


@pytest.mark.parametrize(
    ("mnemonic", "operands"),
    [("IADD3", "R4,P0,P1,R1,R2,RZ"), ("IADD3.X", "R4,PT,PT,-R1,R2,RZ,P0,!PT"), ("LEA.HI", "R4,P0,R1,R2,RZ,0x2"), ("FLO", "R4,R1"),
     ("MOV", "R4,R1,0x3"), ("VIMNMX3", "R4,R1,R2,R3,P0"), ("LOP3.LUT", "R4,R1,R2,RZ,0xc0,P0"), ("S2R", "R4,SR_CLOCKLO"),
     ("LDC", "R4,c[0x0][0x999]"), ("MOV", "R4,c[0x3][0x210]"), ("MOV", "R4,c[0x0][0x500]"), ("FADD.FTZ", "R4,R1,R2"),
     ("IMAD.WIDE.X", "R4,R1,R2,R3,P0"), ("IADD3", "R4,R1.H0,R2,RZ"), ("I2F.S32.RP", "R4,R1"), ("ATOMS.INC", "R4,[R1],R2"),
     ("LDG", "R4,[R2]"), ("LDG.E", "R4,[R2+UR4]"), ("LDS", "R4,[R2.64]"), ("ENDCOLLECTIVE", ""), ("BMOV.32.CLEAR", "R1,B0")],
)  # fmt: skip
def test_forms_without_semantics_are_errors(mnemonic: str, operands: str) -> None:
    function = decode_rows("k", 90, [(mnemonic, operands, ""), ("EXIT", "", "")], {}, strict=False)
    program = Program.from_rows("k", 90, function.rows, {}, params_base=0x210, params_size=56)
    with pytest.raises(UnknownInstructionError, match=r"\+0x0 .* in k"):
        program.blocks(False).at(0)
