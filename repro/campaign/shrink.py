"""Shrinking, whatever is shrunk: delta debugging of a list, the smallest number, and an account of what was tried.

``ddmin`` is Zeller and Hildebrandt's minimising delta debugging (IEEE Transactions on Software Engineering 28(2), 2002): its
result is 1-minimal, so that no single element can go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

__all__ = ["Account", "ddmin", "smallest"]

_Item = TypeVar("_Item")


@dataclass(slots=True)
class Account:
    """What was tried: candidates, how many were kept, trials they took, and a line for each that was kept."""

    candidates: int = 0
    kept: int = 0
    trials: int = 0
    lines: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        """One candidate was kept."""
        self.kept += 1
        self.lines.append(line)


def ddmin(items: Sequence[_Item], fails: Callable[[list[_Item]], bool]) -> list[_Item]:
    """A smallest sub-list that still ``fails`` (never called with an empty list). ``items`` itself must fail."""
    kept = list(items)
    parts = 2
    while len(kept) >= 2:
        parts = min(parts, len(kept))
        bounds = [len(kept) * place // parts for place in range(parts + 1)]
        chunks = [kept[low:high] for low, high in pairwise(bounds)]
        found = next((chunk for chunk in chunks if fails(chunk)), None)
        if found is not None:
            kept, parts = found, 2
            continue
        rests = ([item for other, chunk in enumerate(chunks) if other != place for item in chunk] for place in range(parts))
        rest = next((one for one in rests if len(one) < len(kept) and fails(one)), None) if parts > 2 else None
        if rest is not None:
            kept, parts = rest, max(parts - 1, 2)
            continue
        if parts >= len(kept):
            break
        parts *= 2
    return kept


def smallest(high: int, fails: Callable[[int], bool], *, low: int = 1, beside: int = 8) -> int:
    """The smallest number in ``low`` … ``high`` that fails, where ``high`` does: halving, then ``beside`` numbers below the
    answer are tried one by one, since what fails need not be an interval (vector widths change with a number's divisors).
    """
    best = high
    floor = low
    while floor < best:
        middle = (floor + best) // 2
        if fails(middle):
            best = middle
        else:
            floor = middle + 1
    while True:
        lower = next((number for number in range(best - 1, max(best - beside, low) - 1, -1) if fails(number)), None)
        if lower is None:
            return best
        best = lower
