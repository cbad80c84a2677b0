"""SASS operands as values: what a printed operand such as ``desc[UR16][R4.64+0xc08]`` or ``!P0`` means. Text in, records out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from ..kernels.sasstext import SassLine

__all__ = ["Constant", "Immediate", "Memory", "Operand", "Other", "Register", "branch_target", "destinations", "operand"]


@dataclass(frozen=True, slots=True)
class Register:
    """``name``: R4, UR4, P0 or UP0; "" for the zero register or the true predicate. ``wide``: a 64-bit pair (``R4.64``).

    ``negative``: -R4 (or !P0 for a predicate); ``inverted``: ~R4; ``narrow``: said to be 32 bits wide (``R4.U32``);
    ``plain``: no other modifier, so that the value is the register's.
    """

    name: str
    kind: str
    negative: bool = False
    inverted: bool = False
    wide: bool = False
    narrow: bool = False
    plain: bool = True


@dataclass(frozen=True, slots=True)
class Immediate:
    """An integer literal, as a u64 pattern cut by its user."""

    value: int


@dataclass(frozen=True, slots=True)
class Constant:
    """``c[bank][offset]``, byte offset; an indexed or bindless access is ``Other``."""

    bank: int
    offset: int


@dataclass(frozen=True, slots=True)
class Memory:
    """An address: the sum of ``bases`` and ``offset``. ``exact`` False: there is more in it (a scale, a sign)."""

    bases: tuple[Register, ...] = ()
    offset: int = 0
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Other:
    """Anything else: special registers, labels, floats."""

    text: str = ""
    registers: tuple[str, ...] = field(default=())


Operand = Register | Immediate | Constant | Memory | Other

_REGISTER = re.compile(r"([-~!+]?)(\|?)(UR|UP|R|P)(\d{1,3}|Z|T)\|?((?:\.[A-Za-z0-9_]+)*)")
_NUMBER = re.compile(r"([-+~]?)(0x[0-9a-fA-F]{1,16}|\d{1,10})")
_CONSTANT = re.compile(r"c\[(0x[0-9a-fA-F]{1,4}|\d{1,4})\]\[(0x[0-9a-fA-F]{1,8}|\d{1,8})\]")
_MEMORY = re.compile(r"(?:g?desc\[[^\]]{1,32}\])?\[([^\]]{0,80})\]")
_IGNORED = {"reuse", "64", "U32", "S32"}


@lru_cache(maxsize=1 << 14)
def operand(text: str) -> Operand:
    """Read one operand as nvdisasm or cuda-gdb prints it; never raises."""
    found = _REGISTER.fullmatch(text)
    if found:
        return _register(found)
    number = _NUMBER.fullmatch(text)
    if number:
        value = int(number[2], 0) if number[2].startswith("0x") else int(number[2])
        return Immediate(-value if number[1] == "-" else ~value if number[1] == "~" else value)
    constant = _CONSTANT.fullmatch(text)
    if constant:
        bank, offset = (int(part, 16 if part.startswith("0x") else 10) for part in constant.groups())  # base 0 refuses 007
        return Constant(bank, offset)
    memory = _MEMORY.fullmatch(text)
    if memory:
        return _memory(memory[1])
    return Other(text, tuple(part[0] for part in re.findall(r"\b((?:UR|UP|R|P)\d{1,3})\b()", text[:200])))


def _register(found: re.Match[str]) -> Register:
    sign, absolute, kind, number, suffix = found.groups()
    modifiers = [part for part in suffix.split(".") if part]
    plain = not absolute and all(part in _IGNORED for part in modifiers)
    name = "" if number in "ZT" else kind + number
    return Register(name, kind, sign in ("-", "!") and bool(sign), sign == "~", "64" in modifiers, "U32" in modifiers, plain)


def _memory(text: str) -> Memory:
    bases: list[Register] = []
    offset, exact = 0, True
    for part in re.findall(r"[-+]?[^-+]+", text.replace(" ", "")):
        item = operand(part.lstrip("+"))
        if isinstance(item, Immediate):
            offset += item.value
        elif isinstance(item, Register) and not item.negative and item.plain:
            if item.name:
                bases.append(item)
        else:
            exact = False
    return Memory(tuple(bases), offset, exact)


_WITHOUT = """
    ST STG STS STL STAS RED REDG REDAS BRA BRX BRXU JMP JMX JMXU EXIT RET CALL BSSY BSYNC BREAK BAR WARPSYNC MEMBAR ERRBAR
    CGAERRBAR CCTL CCTLL CCTLT YIELD NANOSLEEP NOP KILL BPT DEPBAR LDGDEPBAR ENDCOLLECTIVE UCGABAR_ARV UCGABAR_WAIT FENCE
    UBLKCP UTMASTG UTMALDG UTMACMDFLUSH UTMACCTL USETMAXREG WARPGROUP ACQBULK PREEXIT
"""
#: Instructions without a destination register.
_NO_DESTINATION = frozenset(_WITHOUT.split())


def destinations(line: SassLine) -> tuple[str, ...]:
    """Registers and predicates that an instruction may write, too many rather than too few.

    Destinations stand first: predicates, one register (with its neighbours where 64 or 128 bits are written), predicates.
    """
    if line.base in _NO_DESTINATION:
        return ()
    if line.base == "R2P":
        return tuple(f"P{bit}" for bit in range(7))
    written: list[str] = []
    seen = "SETP" in line.base or line.base.endswith("PLOP3")  # these write two predicates and nothing else
    for text in line.operands[:2] if seen else line.operands:
        item = operand(text)
        if not isinstance(item, Register):
            break
        if item.kind in ("P", "UP"):
            if item.negative:
                break
            if item.name:
                written.append(item.name)
        elif not seen:
            seen = True
            if item.name:
                start = int(item.name.lstrip("UR"))
                written += [f"{item.kind}{start + step}" for step in range(_width(line))]
        else:
            break
    return tuple(written)


def _width(line: SassLine) -> int:
    """How many 32-bit registers the destination has at most."""
    modifiers = set(line.modifiers)
    if "256" in modifiers:
        return 8
    if "128" in modifiers or line.base in ("LDSM", "HMMA", "IMMA", "QMMA", "OMMA", "DMMA"):
        return 4
    double = {"64", "WIDE", "F64", "S64", "U64", "96"} & modifiers
    return 2 if double or line.base in ("CS2R", "DADD", "DMUL", "DFMA", "DMNMX", "R2UR64") else 1


_BRANCHES = frozenset(("BRA", "JMP", "BRX", "JMX", "BRXU", "JMXU"))


def branch_target(line: SassLine) -> int | None:
    """Byte offset that a direct branch goes to; None for anything else and for an indirect branch."""
    if line.base not in _BRANCHES or not line.operands:
        return None
    item = operand(line.operands[-1])
    return item.value if isinstance(item, Immediate) and item.value >= 0 else None
