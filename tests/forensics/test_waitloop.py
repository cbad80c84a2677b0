"""The wait loop pattern against an interpreter of the loop's own instructions that shares no code with it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from dsv4_repro.forensics.waitloop import CodeView
from dsv4_repro.kernels.sasstext import Disassembly, SassLine, parse_listing

CONSTANT = 777
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


class Interpreter:
    """One lane in a poll loop: registers by name, a memory that always holds ``value``. Every instruction it meets is exact."""

    def __init__(self, lines: dict[int, SassLine], value: int, rng: random.Random) -> None:
        self.lines = lines
        self.value = value
        self.r = {f"R{n}": rng.getrandbits(32) for n in range(255)} | {f"UR{n}": rng.getrandbits(32) for n in range(63)}
        self.p = {f"P{n}": bool(rng.getrandbits(1)) for n in range(7)}
        self.address: int | None = None

    def word(self, text: str) -> int:
        text = text.replace(".reuse", "")
        if text in ("RZ", "URZ"):
            return 0
        if text.startswith("c["):
            return CONSTANT
        return self.r[text] if text in self.r else int(text, 0) & 0xFFFFFFFF

    def flag(self, text: str) -> bool:
        value = True if text.strip("!@") in ("PT", "UPT") else self.p[text.strip("!@")]
        return value != text.lstrip("@").startswith("!")

    def step(self, pc: int) -> int:
        line, o = self.lines[pc], self.lines[pc].operands
        if line.predicate and not self.flag(line.predicate):
            return pc + 16
        op = line.opcode
        if op.startswith("LDG"):
            base, offset = re.search(r".*\[(U?R\d+)(?:\.64)?(?:\+(0x[0-9a-f]+))?\]", o[-1]).groups()  # type: ignore[union-attr]
            high = re.sub(r"\d+", lambda m: str(int(m[0]) + 1), base)
            self.address = (self.r[base] | self.r[high] << 32) + int(offset or "0", 16)
            self.r[o[0]] = self.value
        elif op in ("IMAD.U32", "IMAD.MOV.U32"):
            self.r[o[0]] = self.word(o[3])
        elif op in ("UMOV", "MOV", "R2UR"):
            self.r[o[0]] = self.word(o[1])
        elif op in ("VOTE.ANY", "VOTEU.ANY"):
            self.r[o[0]] = 1
        elif op == "LOP3.LUT" and o[0].startswith("P"):
            a, b = self.word(o[2]), self.word(o[3])
            assert o[5] == "0xc"
            self.p[o[0]] = bool(~a & b & 0xFFFFFFFF)
        elif op.startswith("ISETP"):
            a, b = self.word(o[2]), self.word(o[3])
            if ".U32" not in op:
                a, b = (x - (1 << 32) if x >> 31 else x for x in (a, b))
            found = {"GE": a >= b, "NE": a != b, "EQ": a == b, "LT": a < b, "GT": a > b, "LE": a <= b}[op.split(".")[1]]
            if o[0] != "PT":
                self.p[o[0]] = found and self.flag(o[4])
        elif op.startswith("BRA"):
            return int(o[-1], 16)
        else:
            assert op.split(".")[0] in ("CCTL", "YIELD", "NOP", "NANOSLEEP", "BSSY", "BSYNC"), line.text
        return pc + 16


def everywhere(code: Disassembly, loops: int, rng: random.Random) -> tuple[int, int]:
    """From any instruction of every loop: address, value and target are those of the machine, or not known; never others.

    Returns from how many instructions the value was found, and of how many.
    """
    view = CodeView(code.lines)
    found_loops = view.wait_loops()
    assert len(found_loops) == loops
    resolved = places = 0
    lines = {line.offset: line for line in code.lines}
    for loop in found_loops:
        target_name = lines[loop.compare].operands[3]
        literal = target_name not in Interpreter(lines, 0, rng).r
        for start in sorted(loop.body):
            site = view.find(start)
            assert site is not None
            assert site.loop.load == loop.load
            machine = Interpreter(lines, 0 if literal else 1, rng)
            if not literal:
                machine.r[target_name] = 2 + rng.randrange(1 << 20)
            pc = loop.load
            rounds = 0
            while (rounds < 3 or pc != start) and rounds < 6:
                pc = machine.step(pc)
                rounds += pc == loop.load
                assert pc in loop.body, "the machine left the loop"
            if pc != start:
                continue  # sm_75: a branch that only a split warp takes
            registers, uniform = [machine.r[f"R{n}"] for n in range(255)], [machine.r[f"UR{n}"] for n in range(63)]
            found = site.resolve(registers, uniform, lambda bank, offset: CONSTANT)
            assert found.address == machine.address, f"the address from {start:#x}"
            assert found.target == machine.word(target_name), f"the target from {start:#x}"
            assert found.value in (machine.value, None)
            assert found.satisfied in (False, None)
            resolved += found.value is not None
            places += 1
    return resolved, places


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_every_pc_of_every_loop(kernels: tuple[Callable[..., tuple[object, Disassembly]], object], sm: int) -> None:
    """The top-k's three barriers: initial, per round, final."""
    resolved, places = everywhere(kernels[0](sm)[1], 3, random.Random(sm))
    assert resolved >= places // 3


@pytest.mark.parametrize("sm", [75, 90, 120])
@pytest.mark.parametrize("function", ["grid_barrier_once", "flag_wait", "cluster_peer_stuck"])
def test_every_pc_of_the_patients(
    kernels: tuple[object, Callable[..., tuple[object, Disassembly]]], sm: int, function: str
) -> None:
    if function == "cluster_peer_stuck" and sm < 90:
        return  # there are no clusters before sm_90
    resolved, places = everywhere(kernels[1](sm, function)[1], 1, random.Random(sm))
    assert resolved >= places // 3


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_loops_say_what_they_wait_for(kernels: tuple[Callable[..., tuple[object, Disassembly]], object], sm: int) -> None:
    for loop in CodeView(kernels[0](sm)[1].lines).wait_loops():
        assert (loop.comparison, loop.signed, loop.bits, loop.scope) == (">=", True, 32, "gpu")
        assert loop.address.endswith("+0xc08]")
        assert loop.expression == "value"
        assert not loop.partial
        assert not loop.bounded
        assert not loop.holes
        assert any("LDG" in text for _, text in loop.instructions)
        assert any("ISETP" in text for _, text in loop.instructions)


@pytest.mark.parametrize("sm", [75, 90, 120])
def test_a_spin_limit_is_seen(kernels: tuple[Callable[..., tuple[object, Disassembly]], object], sm: int) -> None:
    loops = CodeView(kernels[0](sm, "bounded-spin")[1].lines).wait_loops()
    assert loops
    assert all(loop.bounded and not loop.partial for loop in loops)


PATIENTS = {"grid_barrier_once": (">=", "gpu"), "flag_wait": ("==", "sys")}


@pytest.mark.parametrize("sm", [75, 90, 120])
@pytest.mark.parametrize("function", sorted(PATIENTS))
def test_patients(kernels: tuple[object, Callable[..., tuple[object, Disassembly]]], sm: int, function: str) -> None:
    (loop,) = CodeView(kernels[1](sm, function)[1].lines).wait_loops()
    assert (loop.comparison, loop.scope) == PATIENTS[function]
    assert not loop.signed


@pytest.mark.parametrize("sm", [75, 90, 120])
def test_work_is_no_wait(kernels: tuple[object, Callable[..., tuple[object, Disassembly]]], sm: int) -> None:
    """A healthy kernel's loops, and all code of the top-k outside of its three barriers, are not taken for waits."""
    assert CodeView(kernels[1](sm, "healthy_worker")[1].lines).wait_loops() == []


def listing(text: str) -> CodeView:
    rows = [line.strip() for line in text.strip().splitlines()]
    return CodeView(parse_listing("\n".join(f"{16 * n:#x} <k+{16 * n}>: {row}" for n, row in enumerate(rows))).lines)


def test_base_overwritten_by_the_load() -> None:
    """The load's destination is its own base: the address is found in the registers that the base was copied from."""
    view = listing("""
        IMAD.U32 R5,RZ,RZ,UR12
        IMAD.MOV.U32 R4,RZ,RZ,R6
        LDG.E.STRONG.GPU R4,desc[UR16][R4.64+0xc08]
        CCTL.IVALL
        ISETP.GE.AND P0,PT,R4,R9,PT
        @!P0 BRA 0x0
        EXIT
    """)
    site = view.find(0x30)
    assert site is not None
    registers = [0] * 16
    registers[4], registers[5], registers[6], registers[9] = 1, 0x7FD6, 0x7BE88A60, 2
    found = site.resolve(registers, [0] * 12 + [0x7FD6])
    assert (found.address, found.value, found.target, found.satisfied) == (0x7FD67BE89668, 1, 2, False)


SHAPES = {
    "swapped": ("ISETP.GT.AND P0,PT,R9,R4,PT", "@P0 BRA 0x0", ">=", True),
    "continue while different": ("ISETP.NE.AND P0,PT,R4,R9,PT", "@P0 BRA 0x0", "==", False),
    "continue while equal": ("ISETP.EQ.AND P0,PT,R4,R9,PT", "@P0 BRA 0x0", "!=", False),
    "unsigned": ("ISETP.LT.U32.AND P0,PT,R4,R9,PT", "@P0 BRA 0x0", ">=", False),
    "literal target": ("ISETP.GE.AND P0,PT,R4,0x9,PT", "@!P0 BRA 0x0", ">=", True),
    "constant target": ("ISETP.GE.AND P0,PT,R4,c[0x0][0x240],PT", "@!P0 BRA 0x0", ">=", True),
}


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_polarity_and_sides(shape: str) -> None:
    compare, branch, comparison, signed = SHAPES[shape]
    view = listing(f"LDG.E.STRONG.GPU R4,desc[UR4][R2.64]\n{compare}\n{branch}\nEXIT")
    site = view.find(0x10)
    assert site is not None
    assert (site.loop.comparison, site.loop.signed) == (comparison, signed)
    registers = [0] * 16
    registers[2], registers[3], registers[4], registers[9] = 0x1000, 0x7F, 3, 9
    found = site.resolve(registers, None, lambda bank, offset: 9 if (bank, offset) == (0, 0x240) else None)
    assert (found.address, found.value, found.target) == (0x7F00001000, 3, 9)
    assert found.satisfied is (comparison == "!=")


def test_value_through_moves_and_uniform_registers() -> None:
    view = listing("""
        LDG.E.STRONG.GPU R4,desc[UR4][R2.64]
        MOV R7,R4
        R2UR UR9,R7
        UISETP.GE.AND UP0,UPT,UR9,UR5,UPT
        PLOP3.LUT P0,PT,PT,PT,UP0,0x80,0x8
        @!P0 BRA 0x0
        EXIT
    """)
    site = view.find(0x30)
    assert site is not None
    registers, uniform = [0] * 16, [0] * 16
    registers[7], uniform[5] = 4, 6
    found = site.resolve(registers, uniform)
    assert (found.value, found.target, found.satisfied) == (4, 6, False)
    assert site.loop.comparison == ">="


def test_sense_reversing_barrier() -> None:
    """A bit test over the loaded word (a cooperative grid barrier): the equation names the expression."""
    view = listing("""
        LDG.E.STRONG.GPU R4,desc[UR4][R2.64]
        LOP3.LUT R5,R4,R8,RZ,0x3c,!PT
        ISETP.GT.AND P0,PT,R5,-0x1,PT
        @P0 BRA 0x0
        EXIT
    """)
    site = view.find(0x20)
    assert site is not None
    assert site.loop.comparison == "<="
    assert "^" in site.loop.expression
    registers = [0] * 16
    registers[4], registers[8], registers[5] = 0x10, 0x20, 0x30
    assert site.resolve(registers, None).satisfied is False
    registers[4], registers[5] = 0x80000010, 0x80000030
    assert site.resolve(registers, None).satisfied is True


def test_64_bit_flags() -> None:
    view = listing("""
        LDG.E.64.STRONG.SYS R4,desc[UR4][R2.64]
        ISETP.NE.U32.AND P0,PT,R4,R8,PT
        ISETP.NE.AND.EX P0,PT,R5,R9,PT,P0
        @P0 BRA 0x0
        EXIT
    """)
    site = view.find(0x10)
    assert site is not None
    assert (site.loop.bits, site.loop.comparison, site.loop.scope) == (64, "==", "sys")
    registers = [0] * 16
    registers[4], registers[5], registers[8], registers[9] = 1, 2, 3, 4
    found = site.resolve(registers, None)
    assert (found.value, found.target) == (2 << 32 | 1, 4 << 32 | 3)


def test_atomic_polls_and_locks() -> None:
    poll = listing("ATOMG.E.ADD.STRONG.GPU PT,R4,desc[UR4][R2.64],RZ\nISETP.GE.AND P0,PT,R4,R9,PT\n@!P0 BRA 0x0\nEXIT")
    assert poll.find(0x10) is not None
    lock = listing("ATOMG.E.CAS.STRONG.GPU PT,R4,[R2],R6,R7\nISETP.NE.AND P0,PT,R4,RZ,PT\n@P0 BRA 0x0\nEXIT")
    site = lock.find(0x10)
    assert site is not None
    assert site.loop.comparison == "=="


NOT_WAITS = {
    "a queue: the atomic itself moves on": "ATOMG.E.ADD.STRONG.GPU PT,R4,[R2],R6\nISETP.GE.AND P0,PT,R4,R9,PT\n@!P0 BRA 0x0\nEXIT",
    "plain load": "LDG.E R4,[R2]\nISETP.GE.AND P0,PT,R4,R9,PT\n@!P0 BRA 0x0\nEXIT",
    "it stores: it works": "LDG.E.STRONG.GPU R4,[R2]\nSTG.E [R6],R4\nISETP.GE.AND P0,PT,R4,R9,PT\n@!P0 BRA 0x0\nEXIT",
    "pointer chase: the target moves along": "LDG.E.STRONG.GPU R4,[R2]\nMOV R9,R4\nISETP.GE.AND P0,PT,R4,R9,PT\n@!P0 BRA 0x0\nEXIT",
    "exit does not depend on the load": "LDG.E.STRONG.GPU R4,[R2]\nISETP.GE.AND P0,PT,R5,R9,PT\n@!P0 BRA 0x0\nEXIT",
    "guarded load: it may not have run": "@P3 LDG.E.STRONG.GPU R4,[R2]\nISETP.GE.AND P0,PT,R4,R9,PT\n@!P0 BRA 0x0\nEXIT",
    "no way out": "LDG.E.STRONG.GPU R4,[R2]\nISETP.GE.AND P0,PT,R4,R9,PT\nBRA 0x0\nEXIT",
    "no loop": "LDG.E.STRONG.GPU R4,[R2]\nISETP.GE.AND P0,PT,R4,R9,PT\n@!P0 BRA 0x30\nEXIT",
}


@pytest.mark.parametrize("why", sorted(NOT_WAITS))
def test_not_a_wait(why: str) -> None:
    view = listing(NOT_WAITS[why])
    assert view.wait_loops() == []
    assert view.find(0x10) is None


def test_unknown_instruction_makes_its_result_unknown() -> None:
    """What has no semantics here may write anything it names: the answer gets poorer, never wrong."""
    view = listing("""
        LDG.E.STRONG.GPU R4,desc[UR4][R2.64]
        ISETP.GE.AND P0,PT,R4,R9,PT
        FROBNICATE R2,R9
        @!P0 BRA 0x0
        EXIT
    """)
    site = view.find(0x30)
    assert site is not None
    registers = [5] * 16
    found = site.resolve(registers, None)
    assert found.address is None, "R2 was written between the load and the PC, and the PC's R2 is not the load's"
    assert found.value == 5


def window(text: str, first: int) -> CodeView:
    """A debugger's window that begins ``first`` instructions behind the loop's head."""
    rows = [line.strip() for line in text.strip().splitlines()]
    shown = [f"{16 * n:#x} <k+{16 * n}>: {row}" for n, row in enumerate(rows) if n >= first]
    return CodeView(parse_listing("\n".join(shown)).lines)


PARTIAL = """
    IMAD.U32 R6,RZ,RZ,UR6
    IMAD.U32 R5,RZ,RZ,UR12
    IMAD.MOV.U32 R4,RZ,RZ,R6
    LDG.E.STRONG.GPU R4,desc[UR16][R4.64+0xc08]
    CCTL.IVALL
    ISETP.GE.AND P0,PT,R4,R9,PT
    @!P0 BRA 0x0
"""


@pytest.mark.parametrize(("first", "address"), [(0, 0x7FD67BE89668), (1, 0x7FD67BE89668), (2, None), (3, None)])
def test_window_that_begins_inside_the_loop(first: int, address: int | None) -> None:
    """What the window shows is used; what it does not show may have written anything, so an address needs its copies in it."""
    site = window(PARTIAL, first).find(0x40)
    assert site is not None
    assert site.loop.holes == (first > 0)
    registers = [0] * 16
    registers[4], registers[5], registers[6], registers[9] = 1, 0x7FD6, 0x7BE88A60, 2
    found = site.resolve(registers, [0] * 12 + [0x7FD6])
    assert (found.value, found.target, found.satisfied) == (1, 2, False)
    if first == 2:
        # R5 is not copied inside the window, but nothing between the load and the PC writes it either
        assert found.address in (None, 0x7FD67BE89668)
    else:
        assert found.address == address


def test_window_without_the_load() -> None:
    assert window(PARTIAL, 4).find(0x50) is None


def test_robust_against_nonsense() -> None:
    rng = random.Random(7)
    words = [
        "LDG.E.STRONG.GPU",
        "ISETP.GE.AND",
        "BRA",
        "@P0 BRA",
        "EXIT",
        "MOV",
        "CALL.REL.NOINC",
        "BRX",
        "PLOP3.LUT",
        "IADD3.X",
        "LOP3.LUT",
    ]
    operands = [
        "R4",
        "[R2.64]",
        "P0",
        "PT",
        "0x0",
        "0x20",
        "R255",
        "UR7",
        "c[0x0][0x240]",
        "desc[UR4][R2.64+-0x8]",
        "!P1",
        "0x7fffffff0",
        "-R3",
    ]
    for _ in range(300):
        rows = [
            f"{rng.choice(words)} " + ",".join(rng.choice(operands) for _ in range(rng.randrange(7)))
            for _ in range(rng.randrange(1, 14))
        ]
        view = listing("\n".join(rows))
        view.wait_loops()
        for pc in range(0, 16 * len(rows), 16):
            site = view.find(pc)
            if site is not None:
                site.resolve([1] * 255, [2] * 63)
