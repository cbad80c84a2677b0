"""Control flow of one function from its instructions as text: successors, natural loops, shortest runs inside a loop.

A listing may have gaps (a debugger shows a window): a stand-in instruction, HOLE, keeps the flow connected there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

from ..kernels.sasstext import INSTRUCTION_BYTES, SassLine
from . import limits
from .operands import branch_target, destinations, operand

__all__ = ["HOLE", "ControlFlow", "written"]

HOLE = "(not listed)"


class ControlFlow:
    """``lines``: instructions by byte offset, holes included; a branch whose target is not listed leads to a hole."""

    def __init__(self, lines: Iterable[SassLine]) -> None:
        self.lines: dict[int, SassLine] = {line.offset: line for line in lines}
        self._order = sorted(self.lines)
        self.successors: dict[int, tuple[int, ...]] = {}
        self._build()
        self._predecessors: dict[int, list[int]] = {}
        for source, targets in self.successors.items():
            for target in targets:
                self._predecessors.setdefault(target, []).append(source)
        self._loops: list[frozenset[int]] | None = None

    def _build(self) -> None:
        following = dict(pairwise(self._order))
        for offset in self._order:
            line = self.lines[offset]
            after = following.get(offset)
            if after is not None and after != offset + INSTRUCTION_BYTES:
                after = self._hole(offset + INSTRUCTION_BYTES, after)
            target = branch_target(line)
            if target is not None and target not in self.lines and target not in self.successors:
                later = next((place for place in self._order if place > target), None)
                if later is not None and target >= 0:
                    target = self._hole(target, later)
            if after is None and _falls_through(line):
                after = self._hole(offset + INSTRUCTION_BYTES, None)  # a listing that ends here: the code goes on
            follow = [place for place in (target, after if _falls_through(line) else None) if place is not None]
            self.successors[offset] = tuple(dict.fromkeys(follow))

    def _hole(self, start: int, end: int | None) -> int:
        """A stand-in for the instructions from ``start`` to ``end`` that the listing does not show."""
        self.lines.setdefault(start, SassLine(start, "", HOLE))
        self.successors[start] = () if end is None else (end,)
        return start

    def natural_loops(self) -> list[frozenset[int]]:
        """Bodies of all loops that are closed by a backward branch, smallest first."""
        if self._loops is None:
            found = set()
            for source, targets in self.successors.items():
                for head in targets:
                    if head <= source:
                        body = self._body(head, source)
                        if body is not None:
                            found.add(body)
            self._loops = sorted(found, key=lambda body: (len(body), min(body)))
        return self._loops

    def _body(self, head: int, tail: int) -> frozenset[int] | None:
        """All instructions that reach ``tail`` without passing ``head``; None if that leaves the loop or is too large."""
        body, stack = {head, tail}, [tail]
        while stack:
            current = stack.pop()
            if current == head:
                continue
            before = self._predecessors.get(current, ())
            if not before:
                return None
            for place in before:
                if place not in body:
                    body.add(place)
                    stack.append(place)
            if len(body) > limits.MAX_LOOP_INSTRUCTIONS:
                return None
        return frozenset(body)

    def path(self, start: int, goal: int, body: frozenset[int]) -> list[int] | None:
        """The shortest run of instructions from ``start`` (included) to ``goal`` (excluded) inside a loop; a round if equal."""
        origin: dict[int, int] = {}
        queue = deque([start])
        while queue:
            current = queue.popleft()
            for place in self.successors[current]:
                if place in body and place not in origin:
                    origin[place] = current
                    if place == goal:
                        run = [current]
                        while run[-1] != start:
                            run.append(origin[run[-1]])
                        return run[::-1]
                    queue.append(place)
        return None


def written(line: SassLine) -> tuple[str, ...]:
    return () if line.opcode == HOLE else destinations(line)


def _falls_through(line: SassLine) -> bool:
    if line.base in ("EXIT", "RET", "KILL", "BRA", "JMP", "BRX", "JMX", "BRXU", "JMXU"):
        guarded = line.predicate not in ("", "@PT", "@UPT")
        extra = len(line.operands) > 1 and operand(line.operands[0]) != operand("PT")
        return guarded or extra or "DIV" in line.modifiers or "CONV" in line.modifiers
    return True
