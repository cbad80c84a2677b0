"""What a few SASS lines around a program counter mean: a poll loop on memory, a phase wait, a barrier.

Patterns, not offsets: registers and addresses differ by compiler and architecture. A poll loop is a load, a comparison of what it
loaded, and a branch back over both; ``.STRONG.GPU`` polls this GPU's memory, ``.STRONG.SYS`` memory that a peer or the host writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["CodeLine", "PollLoop", "find_loop", "meaning_at"]

_LOAD = re.compile(r"(?:@!?U?P\d\s+)?\b(LDG|LD|ATOMG|ATOM)(?:\.([\w.]+))?\s+(?:P[T\d],\s*)?(R\d+|UR\d+),\s*(.*)")
_COMPARE = re.compile(r"(?:@!?U?P\d\s+)?U?ISETP\.(GE|GT|LT|LE|EQ|NE)((?:\.\w+)*)\s+(U?P\d),\s*U?PT,\s*([^,]+),\s*([^,]+)")
_BRANCH = re.compile(r"@(!?)(U?P\d)\s+(?:BRA|JMP|BRX)(?:\.\w+)*\s+(?:U?P\d,\s*)?[`(]*(0x[0-9a-fA-F]+)")
_WINDOW = 24
_FLIP = {">=": "<", "<": ">=", ">": "<=", "<=": ">", "==": "!=", "!=": "=="}
_SWAP = {">=": "<=", "<=": ">=", ">": "<", "<": ">", "==": "==", "!=": "!="}
_SIGN = {"GE": ">=", "GT": ">", "LT": "<", "LE": "<=", "EQ": "==", "NE": "!="}
_PHASE = re.compile(r"SYNCS\.PHASECHK|MBARRIER\.TRY_?WAIT|TRYWAIT|SYNCS\.\w*WAIT|UTMACMDFLUSH|UTCBAR|DEPBAR\.LE SB")
_CLUSTER = re.compile(r"UCGABAR_WAIT|BARRIER\.CLUSTER|CGABAR|CLUSTER_?BAR|UCGABAR_ARV")
_BAR = re.compile(r"\bB(?:AR|ARRIER)\.(?:SYNC|RED|ARV)|WARPSYNC|BSYNC|BSSY")


@dataclass(frozen=True, slots=True)
class CodeLine:
    """One disassembled instruction; ``offset`` from the function's start where the text has it."""

    address: int
    offset: int | None
    text: str


@dataclass(frozen=True, slots=True)
class PollLoop:
    """``loaded comparison bound`` ends the loop. ``bound``: the operand as text."""

    first: int
    last: int
    loaded: str
    bound: str
    comparison: str
    scope: Literal["gpu", "sys", ""]
    pc_offset: int | None
    instructions: tuple[tuple[int, str], ...]
    pc: int
    load_address: int
    overwrites_base: bool

    def holds(self, pc: int) -> bool:
        return self.first <= pc <= self.last

    def values(self, registers: Mapping[str, int]) -> tuple[int | None, int | None]:
        """(loaded value, bound), each None where its register was not read or does not hold it at this PC."""
        value = registers.get(self.loaded)
        if self.overwrites_base and self.pc <= self.load_address:
            value = None
        bound = self.bound.strip()
        if bound in ("RZ", "URZ"):
            return value, 0
        if re.fullmatch(r"-?(?:0x[0-9a-fA-F]{1,16}|\d{1,20})", bound):
            return value, int(bound, 16 if "0x" in bound else 10)
        return value, registers.get(bound.removesuffix(".reuse"))


def _around(code: Mapping[int, CodeLine], pc: int) -> list[CodeLine]:
    near = sorted(address for address in code if abs(address - pc) <= _WINDOW * 16)
    return [code[address] for address in near]


def find_loop(code: Mapping[int, CodeLine], pc: int) -> PollLoop | None:
    """The poll loop that holds ``pc``; None if the lines there show none."""
    lines = _around(code, pc)
    for branch_at, line in enumerate(lines):
        branch = _BRANCH.search(line.text)
        if branch is None or line.address < pc:
            continue
        goal = int(branch.group(3), 16)
        if goal not in code and line.offset is not None and goal < 1 << 24:
            goal += line.address - line.offset
        if goal > pc or goal > line.address or line.address - goal > _WINDOW * 16:
            continue
        body = [item for item in lines if goal <= item.address <= line.address]
        loop = _loop_of(body, branch, pc, goal, lines[branch_at].address)
        if loop is not None:
            return loop
    return None


def _loop_of(body: list[CodeLine], branch: re.Match[str], pc: int, first: int, last: int) -> PollLoop | None:
    negated, predicate = branch.group(1) == "!", branch.group(2)
    compare = next((found for item in body if (found := _COMPARE.search(item.text)) and found.group(3) == predicate), None)
    if compare is None:
        return None
    left, right = compare.group(4).strip().removesuffix(".reuse"), compare.group(5).strip().removesuffix(".reuse")
    stays = _SIGN[compare.group(1)]
    ends = stays if negated else _FLIP[stays]
    for item in body:
        load = _LOAD.search(item.text)
        if load is None or load.group(3) not in (left, right):
            continue
        loaded = load.group(3)
        if loaded == right:
            left, right, ends = right, left, _SWAP[ends]
        modifiers = load.group(2) or ""
        scope: Literal["gpu", "sys", ""] = (
            "sys" if "SYS" in modifiers or "MMIO" in modifiers else "gpu" if "GPU" in modifiers or "STRONG" in modifiers else ""
        )
        address_text = load.group(4)
        number = int(loaded[1:]) if loaded.startswith("R") else -1
        overwrites = bool(re.search(rf"\bR{number}\b", address_text)) or bool(re.search(rf"\bR{number - 1}\.64", address_text))
        offset = next((entry.offset for entry in body if entry.address == pc), None)
        return PollLoop(
            first, last, loaded, right, ends, scope, offset,
            tuple((entry.offset if entry.offset is not None else entry.address, entry.text) for entry in body), pc, item.address,
                overwrites,
        )  # fmt: skip
    return None


def meaning_at(code: Mapping[int, CodeLine], pc: int) -> str:
    """global-poll, system-poll, phase-wait, cluster-wait, named-barrier, other or unknown (no code there)."""
    loop = find_loop(code, pc)
    if loop is not None and loop.holds(pc):
        inside = " ".join(text for _, text in loop.instructions)
        if _PHASE.search(inside):
            return "phase-wait"
        return "system-poll" if loop.scope == "sys" else "global-poll"
    here = [code[pc - step].text for step in (0, 16, 32) if pc - step in code]
    after = [code[pc + step].text for step in (16, 32) if pc + step in code]
    if not here and not after:
        return "unknown"
    for pattern, word in ((_CLUSTER, "cluster-wait"), (_PHASE, "phase-wait")):
        if any(pattern.search(text) for text in [*here, *after]):
            return word
    if any(_BAR.search(text) for text in here[:2]):
        return "named-barrier"
    return "other"
