"""What n trials say about a probability: exact one-sided bounds of Clopper and Pearson (Biometrika 26, 1934).

With no hang in n windows the upper bound at 95 % is 1 - 0.05^(1/n), about 3/n: the rule of three.
"""

from __future__ import annotations

import math

from .run_records import Bound

__all__ = ["at_least", "at_most", "bounds_of"]


def _tail_at_least(successes: int, trials: int, p: float) -> float:
    """P(X >= successes) for X binomial(trials, p)."""
    if successes <= 0:
        return 1.0
    if p <= 0.0:
        return 0.0
    if p >= 1.0:
        return 1.0
    log_p, log_q = math.log(p), math.log1p(-p)
    whole = math.lgamma(trials + 1)
    terms = (
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * log_p + (trials - k) * log_q)
        for k in range(successes, trials + 1)
    )
    return min(math.fsum(terms), 1.0)


def at_least(successes: int, trials: int, confidence: float = 0.95) -> float:
    """The lower bound on the probability: below it, this many successes or more would be rarer than 1 - confidence."""
    _check(successes, trials, confidence)
    if successes == 0:
        return 0.0
    alpha = 1.0 - confidence
    if successes == trials:
        return float(alpha ** (1.0 / trials))
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if _tail_at_least(successes, trials, middle) < alpha:
            low = middle
        else:
            high = middle
    return low


def at_most(successes: int, trials: int, confidence: float = 0.95) -> float:
    """The upper bound on the probability, by the same argument for failures."""
    _check(successes, trials, confidence)
    return 1.0 - at_least(trials - successes, trials, confidence)


def _check(successes: int, trials: int, confidence: float) -> None:
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials} trials")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence {confidence}")


def bounds_of(hangs: int, windows: int, confidence: float = 0.95) -> tuple[Bound, ...]:
    """What is said about the chance of a hang per danger window reached; nothing if no window was reached."""
    if windows < 1:
        return ()
    of = "hang per danger window reached"
    found = []
    if hangs:
        found.append(Bound(side="at least", value=at_least(hangs, windows, confidence), confidence=confidence, of=of))
    if hangs < windows:
        found.append(Bound(side="at most", value=at_most(hangs, windows, confidence), confidence=confidence, of=of))
    return tuple(found)
