"""A sequential test of one cell: does it hang, or is the hazard per danger window below what was asked for?

Wald's sequential probability ratio test (Annals of Mathematical Statistics 16, 1945) between "at most ``false_rate`` hang verdicts
per window" (false verdicts only) and "at least ``hazard``". Where a hang is a proof (the interpreter) the false rate is 0 and one
hang decides. The bounds told with it hold under this stopping rule: stopping at the k-th hang is inverse sampling, for which the
exact lower bound is the same as for a fixed number of trials and the upper one only smaller; with no hang the number of windows is
fixed beforehand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...errors import UsageError
from ..bounds import at_least, at_most

__all__ = ["CONFIDENCE", "Rates", "SequentialTest", "bound_words", "fisher_two_sided"]

Word = Literal["HANGS", "CLEAN", "INCONCLUSIVE"]
#: Confidence of the bounds in tables.
CONFIDENCE = 0.99


@dataclass(frozen=True, slots=True)
class Rates:
    """``alpha``: chance that a healthy cell is called HANGS; ``beta``: chance that a cell with ``hazard`` or more hangs per
    window is called CLEAN; both per cell. ``false_rate``: false hang verdicts per window that are reckoned with (0: a hang is a
    proof). UsageError for values that make no test.
    """

    alpha: float = 0.01
    beta: float = 0.01
    hazard: float = 0.1
    false_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not 0.0 < value < 0.5:
                raise UsageError(f"--{name} {value:g}: more than 0 and less than 0.5")
        if not 0.0 < self.hazard < 1.0 or not 0.0 <= self.false_rate < self.hazard:
            raise UsageError(f"--hazard {self.hazard:g}: between the false verdict rate {self.false_rate:g} and 1")

    @property
    def windows_when_clean(self) -> int:
        """Danger windows without a hang after which a cell is CLEAN."""
        step = math.log1p(-self.hazard) - math.log1p(-self.false_rate)
        return math.ceil(math.log(self.beta / (1.0 - self.alpha)) / step)

    def line(self) -> str:
        """The test in words."""
        proof = "a hang is a proof here" if self.false_rate == 0 else f"false hang verdicts at most {self.false_rate:g} per window"
        return (
            f"sequential test per cell: a healthy cell called HANGS at most {self.alpha:g}, one with a hazard of "
            f"{self.hazard:g} or more per window called CLEAN at most {self.beta:g} ({proof}); "
            f"{self.windows_when_clean} windows without a hang decide"
        )


@dataclass(slots=True)
class SequentialTest:
    """Counts of one cell and what follows from them. ``windows`` counts trials that reached the danger window."""

    rates: Rates
    hangs: int = 0
    windows: int = 0

    def add(self, *, hang: bool) -> None:
        """One trial that reached the window."""
        self.windows += 1
        self.hangs += hang

    @property
    def ratio(self) -> float:
        """Log likelihood ratio, hangs against healthy."""
        rates, clean = self.rates, self.windows - self.hangs
        if self.hangs and rates.false_rate == 0:
            return math.inf
        gained = self.hangs * (math.log(rates.hazard) - math.log(rates.false_rate)) if self.hangs else 0.0
        return gained + clean * (math.log1p(-rates.hazard) - math.log1p(-rates.false_rate))

    @property
    def decided(self) -> Word | None:
        """HANGS or CLEAN once the test has crossed a boundary; None while it is open."""
        if self.ratio >= math.log((1.0 - self.rates.beta) / self.rates.alpha):
            return "HANGS"
        if self.ratio <= math.log(self.rates.beta / (1.0 - self.rates.alpha)):
            return "CLEAN"
        return None

    @property
    def word(self) -> Word:
        """The answer as it stands. A cell in which something hung is never called CLEAN; no window is INCONCLUSIVE."""
        if self.windows == 0:
            return "INCONCLUSIVE"
        decided = self.decided
        if decided == "CLEAN" and self.hangs:
            return "INCONCLUSIVE"
        return decided or "INCONCLUSIVE"

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Two one-sided bounds on the hazard per window, each at ``confidence``; None without a window."""
        if self.windows == 0:
            return None
        low = at_least(self.hangs, self.windows, confidence) if self.hangs else 0.0
        high = at_most(self.hangs, self.windows, confidence) if self.hangs < self.windows else 1.0
        return low, high


def bound_words(hangs: int, windows: int, confidence: float = CONFIDENCE) -> str:
    """The hazard in words: "at most 23.6 per 1000 windows at 99 %"."""
    if windows == 0:
        return "no window reached: nothing follows"
    at = f"per 1000 windows at {confidence * 100:g} %"
    if hangs == 0:
        return f"at most {1000 * at_most(0, windows, confidence):.3g} {at}"
    low = f"at least {1000 * at_least(hangs, windows, confidence):.3g}"
    if hangs == windows:
        return f"{low} {at}"
    return f"{low}, at most {1000 * at_most(hangs, windows, confidence):.3g} {at}"


def fisher_two_sided(hangs: int, windows: int, hangs_before: int, windows_before: int) -> float:
    """P value of Fisher's exact test that two rates are one; 1 if one side has no window.

    Above 20 000 windows on both sides together the normal approximation is used, since the exact sum has as many terms as hangs.
    """
    if windows == 0 or windows_before == 0:
        return 1.0
    total, marked = windows + windows_before, hangs + hangs_before
    if total > 20_000:
        pooled = marked / total
        spread = math.sqrt(pooled * (1 - pooled) * (1 / windows + 1 / windows_before))
        return 1.0 if spread == 0 else math.erfc(abs(hangs / windows - hangs_before / windows_before) / spread / math.sqrt(2))

    def log_choose(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    whole = log_choose(total, marked)

    def weight(k: int) -> float:
        return log_choose(windows, k) + log_choose(windows_before, marked - k) - whole

    seen = weight(hangs)
    low, high = max(0, marked - windows_before), min(marked, windows)
    return min(math.fsum(math.exp(w) for k in range(low, high + 1) if (w := weight(k)) <= seen + 1e-9), 1.0)
