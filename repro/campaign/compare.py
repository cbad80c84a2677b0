"""Two campaigns: which hangs are new, which are gone, whose rate has changed - each with what may be said about it.

A hang that is not seen is called gone only where the later campaign reached enough danger windows that the earlier rate would have
shown it (chance of not seeing it below 1 %); otherwise "not seen, and not enough windows to say". A rate has changed where Fisher's
exact test, two-sided, says p < 0.01; windows are trials that reached any danger window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from .sequential import fisher_two_sided
from .summary import Summary

__all__ = ["CHANGE_LEVEL", "Change", "compare_summaries", "comparison_lines"]

CHANGE_LEVEL = 0.01


@dataclass(frozen=True, slots=True)
class Change:
    """One identity in both campaigns. ``p``: of the test that the rates are one; for a hang that is gone the chance of seeing
    none at the earlier rate.
    """

    identity: str
    word: Literal["new", "gone", "not seen", "changed", "same"]
    hangs: int
    windows: int
    hangs_before: int
    windows_before: int
    p: float

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def compare_summaries(now: Summary, before: Summary) -> list[Change]:
    """Every identity of either campaign, new ones first."""
    hangs = {hang.identity: hang.hangs for hang in now.hangs}
    earlier = {hang.identity: hang.hangs for hang in before.hangs}
    found = [_change(name, hangs.get(name, 0), now.reached, earlier.get(name, 0), before.reached) for name in {**hangs, **earlier}]
    order = ("new", "changed", "gone", "not seen", "same")
    return sorted(found, key=lambda change: (order.index(change.word), change.identity))


def _change(identity: str, hangs: int, windows: int, hangs_before: int, windows_before: int) -> Change:
    word: Literal["new", "gone", "not seen", "changed", "same"]
    if hangs_before == 0:
        return Change(identity, "new", hangs, windows, 0, windows_before, fisher_two_sided(hangs, windows, 0, windows_before))
    if hangs == 0:
        rate = min(hangs_before / windows_before, 1.0) if windows_before else 0.0
        unseen = 0.0 if rate >= 1.0 and windows else math.exp(windows * math.log1p(-rate)) if rate < 1.0 else 1.0
        word = "gone" if unseen < CHANGE_LEVEL else "not seen"
        return Change(identity, word, 0, windows, hangs_before, windows_before, unseen)
    p = fisher_two_sided(hangs, windows, hangs_before, windows_before)
    word = "changed" if p < CHANGE_LEVEL else "same"
    return Change(identity, word, hangs, windows, hangs_before, windows_before, p)


def comparison_lines(changes: list[Change]) -> list[str]:
    """A line an identity."""
    words = {
        "new": "NEW", "gone": "gone", "not seen": "not seen, and not enough windows to say that it is gone",
        "changed": "rate changed", "same": "as before",
    }  # fmt: skip
    return [
        f"{change.identity}: {words[change.word]}: {change.hangs} of {change.windows} windows, before {change.hangs_before} of "
        f"{change.windows_before} (p {change.p:.2g})"
        for change in changes
    ]
