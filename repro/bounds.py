"""What n trials say about a probability: exact one-sided bounds of Clopper and Pearson (Biometrika 26, 1934).

With no hang in n windows the upper bound at 95 % is 1 - 0.05^(1/n), about 3/n: the rule of three. Above ten million trials the
bounds are Chernoff's, a little wider and never narrower.
"""

from __future__ import annotations

import math

from .run_records import Bound

__all__ = ["at_least", "at_most", "bounds_of"]

#: Trials up to which the distribution is summed; the terms that count grow with the root of it.
_EXACT = 10_000_000


def _tail_at_least(successes: int, trials: int, p: float) -> float:
    """P(X >= successes) for X binomial(trials, p)."""
    if successes <= 0:
        return 1.0
    if p <= 0.0:
        return 0.0
    if p >= 1.0:
        return 1.0
    # The shorter way out of the distribution's middle: what is far from it adds nothing, however many trials there were.
    upwards = successes > trials * p
    k = successes if upwards else successes - 1
    log_first = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
    term = math.exp(log_first + k * math.log(p) + (trials - k) * math.log1p(-p))
    odds, total = p / (1.0 - p), 0.0
    while term > total * 1e-17 and 0 <= k <= trials:
        total += term
        if upwards:
            term *= (trials - k) / (k + 1) * odds
            k += 1
        else:
            term *= k / ((trials - k + 1) * odds)
            k -= 1
    return min(total, 1.0) if upwards else max(1.0 - total, 0.0)


def _rarer_than(successes: int, trials: int, p: float, alpha: float) -> bool:
    """Whether so many successes or more have a chance below ``alpha``; of very many trials by Chernoff's bound, which errs to
    the side of "no" and costs nothing."""
    if trials <= _EXACT:
        return _tail_at_least(successes, trials, p) < alpha
    share = successes / trials
    if p <= 0.0 or p >= 1.0 or share <= p:
        return p <= 0.0
    rest = 0.0 if share >= 1.0 else (1.0 - share) * math.log((1.0 - share) / (1.0 - p))
    return -trials * (share * math.log(share / p) + rest) < math.log(alpha)


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
        if _rarer_than(successes, trials, middle, alpha):
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
