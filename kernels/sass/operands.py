"""One printed SASS operand → a typed record. Anything not understood is a ValueError that quotes it, never a guess."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["PT", "RZ", "Operand", "parse_operand", "split_operands"]

#: Index of the zero register, vector (RZ) and uniform (URZ): reads 0, writes vanish.
RZ = 255
#: Index of the true predicate, vector (PT) and uniform (UPT): reads true, writes vanish.
PT = 7


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand. ``kind`` says which fields mean something:

    ======== ==========================================================================================================
    reg      vector register ``index`` (RZ = 255), with ``negate``, ``absolute``, ``invert`` (~) and ``suffix`` (H0, B1 …)
    ureg     uniform register, the same fields
    pred     predicate ``index`` (PT = 7), ``invert`` for ``!``
    upred    uniform predicate, the same fields
    imm      integer literal: ``value`` is its 32-bit pattern (-0x20 is 0xffffffe0)
    float    floating literal: ``number``
    const    constant memory: ``bank``, ``value`` = byte offset, with ``negate``, ``absolute``, ``invert``
    mem      address: ``index`` base register or None, ``mode`` ("" one register, "64" a pair, "U32", "X4", "X8", "X16"), ``ubase``
             uniform register or None, ``value`` signed byte offset. ``desc[URx]`` in front is dropped: it never changes the address
    label    a symbol name in ``text`` (what RET names; branch targets are resolved by ``decode`` instead)
    special  a special register, by name in ``text`` (SR_TID.X, SRZ)
    barrier  convergence barrier B ``index``
    preds    all predicates together (PR)
    ======== ==========================================================================================================

    The ``.reuse`` hint is dropped. ``text`` is the operand as printed.
    """

    kind: str
    text: str
    index: int | None = None
    value: int = 0
    number: float = 0.0
    bank: int = 0
    negate: bool = False
    absolute: bool = False
    invert: bool = False
    suffix: str = ""
    mode: str = ""
    ubase: int | None = None

    @property
    def is_zero(self) -> bool:
        """RZ or URZ: a register that reads as 0."""
        return self.kind in ("reg", "ureg") and self.index == RZ

    @property
    def is_true(self) -> bool:
        """PT or UPT without ``!``."""
        return self.kind in ("pred", "upred") and self.index == PT and not self.invert


_REGISTER = re.compile(r"(U?)R(\d{1,3}|Z)((?:\.[A-Za-z0-9_]+)*)")
_PREDICATE = re.compile(r"(U?)P([0-6]|T)")
_INTEGER = re.compile(r"(-?)0x([0-9a-f]{1,16})")
_FLOAT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|INF)")
_CONSTANT = re.compile(r"c\[0x([0-9a-f]+)\]\[(?:0x([0-9a-f]+)|RZ)\]")
_MEMORY = re.compile(r"(?:desc\[UR\d+\])?\[([^\[\]]*)\]")
_SPECIAL = re.compile(r"SR_[A-Za-z0-9_.]+|SRZ")
_BARRIER = re.compile(r"B(\d{1,2})")
#: Old releases of nvdisasm (before 13.5) leave out the comma between a destination and the address: ``R9[R10]``.
_MISSING_COMMA = re.compile(r"(?<![A-Za-z0-9_])(U?R(?:\d+|Z)|U?P(?:\d|T))(\[|desc\[)")
_SUFFIXES = frozenset({"H0", "H1", "H0_H0", "H1_H1", "B0", "B1", "B2", "B3", "64"})
_BASE_MODES = frozenset({"", "64", "U32", "X4", "X8", "X16"})


def split_operands(text: str) -> tuple[str, ...]:
    """The operands of one instruction as printed by nvdisasm 13.2 to 13.5, each stripped."""
    if not text:
        return ()
    return tuple(part.strip() for part in _MISSING_COMMA.sub(r"\1,\2", text).split(","))


def _register_index(digits: str) -> int:
    return RZ if digits == "Z" else int(digits)


def _memory(text: str, inner: str) -> Operand:
    base: int | None = None
    ubase: int | None = None
    mode = ""
    offset = 0
    for term in inner.replace("+-", "+~").split("+"):
        if term.startswith(("~0x", "0x", "-0x")):
            offset += int(term.replace("~", "-"), 16)
            continue
        match = _REGISTER.fullmatch(term)
        if match is None:
            raise ValueError(f"address term {term!r} in {text!r}")
        uniform, digits, suffixes = match.groups()
        marks = [mark for mark in suffixes.split(".")[1:] if mark != "reuse"]
        if uniform:
            if ubase is not None or marks not in ([], ["64"]):
                raise ValueError(f"address term {term!r} in {text!r}")
            ubase = _register_index(digits)
        else:
            mode = marks[0] if marks else ""
            if base is not None or len(marks) > 1 or mode not in _BASE_MODES:
                raise ValueError(f"address term {term!r} in {text!r}")
            base = _register_index(digits)
    return Operand("mem", text, index=base, value=offset, mode=mode, ubase=ubase)


@lru_cache(maxsize=65536)
def parse_operand(text: str) -> Operand:
    """One operand; ValueError with the operand quoted if any part of it is not understood."""
    match = _MEMORY.fullmatch(text)
    if match is not None:
        return _memory(text, match.group(1))
    core = text
    negate = absolute = invert = False
    if core[:1] in ("!", "~"):
        invert, core = True, core[1:]
    if core[:1] == "-" and not core.startswith("-0x") and core[1:2] in ("R", "U", "c", "|"):
        negate, core = True, core[1:]
    if core[:1] == "|" and core[-1:] == "|" and len(core) > 2:
        absolute, core = True, core[1:-1]
    match = _REGISTER.fullmatch(core)
    if match is not None and not text.startswith("!"):
        uniform, digits, suffixes = match.groups()
        marks = [mark for mark in suffixes.split(".")[1:] if mark != "reuse"]
        if len(marks) > 1 or (marks and marks[0] not in _SUFFIXES):
            raise ValueError(f"register suffix in {text!r}")
        return Operand(
            "ureg" if uniform else "reg", text, index=_register_index(digits), negate=negate, absolute=absolute, invert=invert,
            suffix=marks[0] if marks else "",
        )  # fmt: skip
    match = _CONSTANT.fullmatch(core)
    if match is not None and not text.startswith("!"):
        bank, offset = (int(group or "0", 16) for group in match.groups())
        return Operand("const", text, value=offset, bank=bank, negate=negate, absolute=absolute, invert=invert)
    if negate or absolute or text.startswith("~"):
        raise ValueError(f"operand {text!r}")
    match = _PREDICATE.fullmatch(core)
    if match is not None:
        uniform, digits = match.groups()
        return Operand("upred" if uniform else "pred", text, index=PT if digits == "T" else int(digits), invert=invert)
    if invert:
        raise ValueError(f"operand {text!r}")
    match = _INTEGER.fullmatch(text)
    if match is not None:
        value = int(match.group(2), 16)
        return Operand("imm", text, value=(-value if match.group(1) else value) & 0xFFFFFFFF if value < 1 << 32 else value)
    if _FLOAT.fullmatch(text) is not None:
        return Operand("float", text, number=float(text))
    match = _BARRIER.fullmatch(text)
    if match is not None:
        return Operand("barrier", text, index=int(match.group(1)))
    if text == "PR":
        return Operand("preds", text)
    if _SPECIAL.fullmatch(text) is not None:
        return Operand("special", text)
    raise ValueError(f"operand {text!r}")
