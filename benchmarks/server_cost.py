"""What a switch costs a running server, from token arrivals alone: pure, no clock, no server. Used by ``server_experiments.py``.

One long wave of requests; a switch is turned every second; between two turns lies a window. What two waves differ by (prompts,
clocks of the card, a neighbour on the host) is common to the windows of one wave, and what drifts slowly (the context grows with
every token, so each step takes longer) is cancelled by the order: on off, off on, on off, …
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from typing import Any

__all__ = ["Window", "cost_document", "interval", "measure", "order_of"]

Arrivals = Sequence[tuple[float, int]]


@dataclass(frozen=True)
class Window:
    """The time between two turns of the switch, without its first part. Seconds of the arrivals' clock.

    ``confirmed``: the agents themselves said, at its end, that they stand as asked. ``rate``: tokens a second of all streams;
    ``steps``: their chunks a second, one a step, free of how many drafts were taken; ``gap``: median seconds between two chunks of
    a stream; None where they cannot be told (``why``)."""

    on: bool
    begin: float
    end: float
    confirmed: bool = True
    rate: float | None = None
    steps: float | None = None
    gap: float | None = None
    why: str = ""


def order_of(pair: int) -> tuple[bool, bool]:
    """Which of a pair's windows has the switch on: (True, False) for even pairs, (False, True) for odd ones."""
    return (True, False) if pair % 2 == 0 else (False, True)


def _count_at(arrivals: Arrivals, times: Sequence[float], moment: float) -> float | None:
    """Tokens at a moment, on the line between the arrivals around it, so that a window need not hold whole steps."""
    at = bisect_right(times, moment)
    if at == 0 or at == len(times):
        return None
    (before, low), (after, high) = arrivals[at - 1], arrivals[at]
    return low + (high - low) * (moment - before) / (after - before) if after > before else float(high)


def measure(window: Window, streams: Sequence[Arrivals]) -> Window:
    """The window with its numbers. ``streams``: (seconds, tokens so far) of each, rising.

    Not measured where one stream has no arrival before it and after it: then the number of live requests changed inside."""
    rate, steps, gaps = 0.0, 0.0, []
    for arrivals in streams:
        times = [moment for moment, _ in arrivals]
        low, high = _count_at(arrivals, times, window.begin), _count_at(arrivals, times, window.end)
        if low is None or high is None:
            return Window(window.on, window.begin, window.end, window.confirmed, why="a request began or ended in it")
        rate += (high - low) / (window.end - window.begin)
        chunks = [(moment, number) for number, moment in enumerate(times)]
        first, last = _count_at(chunks, times, window.begin), _count_at(chunks, times, window.end)
        assert first is not None
        assert last is not None
        steps += (last - first) / (window.end - window.begin)
        inside = times[bisect_left(times, window.begin) : bisect_right(times, window.end)]
        gaps += [later - earlier for earlier, later in pairwise(inside)]
    if len(gaps) < 10 or rate <= 0.0:
        return Window(window.on, window.begin, window.end, window.confirmed, why="fewer than ten gaps between tokens in it")
    why = "" if window.confirmed else "the agent did not say that it stands as asked"
    return Window(window.on, window.begin, window.end, window.confirmed, rate, steps, statistics.median(gaps), why)


def cost_document(windows: Sequence[Window], *, seed: int = 1) -> dict[str, Any]:
    """Costs in percent of what the switch off gives, from measured windows in their order, two a pair.

    ``throughput_lost_percent`` from tokens, ``steps_lost_percent`` from chunks, ``gap_longer_percent`` from median gaps (which no
    stand-still moves): mean of all pairs and its 95 % interval. All are positive where the switch costs; at a slowdown of 3 % they
    are 2.9, 2.9 and 3.0. A pair with an unmeasured or unconfirmed window
    is left out and counted."""
    rows: list[dict[str, Any]] = []
    left_out: dict[str, int] = {}
    for first, second in zip(windows[::2], windows[1::2], strict=False):
        why = first.why or second.why or ("" if first.on != second.on else "both windows stand alike")
        on, off = (first, second) if first.on else (second, first)
        if why or not (on.rate and off.rate and on.steps and off.steps and on.gap and off.gap):
            left_out[why] = left_out.get(why, 0) + 1
            continue
        rows.append({
            "on_first": first.on, "on_tokens_per_s": on.rate, "off_tokens_per_s": off.rate, "on_gap_ms": 1e3 * on.gap,
            "off_gap_ms": 1e3 * off.gap, "throughput_lost_percent": 100.0 * (off.rate - on.rate) / off.rate,
            "steps_lost_percent": 100.0 * (off.steps - on.steps) / off.steps,
            "gap_longer_percent": 100.0 * (on.gap - off.gap) / off.gap,
        })  # fmt: skip
    return {
        "method": "windows of one long wave",
        "throughput_lost_percent": interval([row["throughput_lost_percent"] for row in rows], seed=seed),
        "steps_lost_percent": interval([row["steps_lost_percent"] for row in rows], seed=seed),
        "gap_longer_percent": interval([row["gap_longer_percent"] for row in rows], seed=seed),
        "tokens_per_s_off": statistics.median(row["off_tokens_per_s"] for row in rows) if rows else None,
        "gap_ms_off": statistics.median(row["off_gap_ms"] for row in rows) if rows else None,
        "on_first": sum(bool(row["on_first"]) for row in rows), "left_out": left_out, "pairs": rows,
    }  # fmt: skip


def interval(values: Sequence[float], *, seed: int = 1, draws: int = 4000) -> dict[str, Any]:
    """Mean of paired differences with a 95 % interval: percentile bootstrap, its tails widened for few values. Beside it their
    median with an exact interval (two of the values themselves), which a few disturbed pairs cannot move.

    Hesterberg, "What Teachers Should Know About the Bootstrap", 2015: the plain percentiles are too narrow by the
    missing n / (n - 1) and by normal quantiles where Student's belong; 12 pairs cover 91 % of the time instead of 95."""
    n = len(values)
    if n < 2:
        return {"n": n, "mean": values[0] if values else None, "low": None, "high": None}
    normal = statistics.NormalDist()
    z, free = normal.inv_cdf(0.975), n - 1
    # Student's quantile by its expansion in 1 / degrees of freedom (Abramowitz and Stegun, 26.7.5).
    student = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    tail = normal.cdf(-student * (n / free) ** 0.5)
    chance = random.Random(seed)
    # Chance that at most ``rank`` of n values lie below their median: the rank-th from each end bounds it.
    rank, ranked = -1, sorted(values)
    while sum(comb(n, k) for k in range(rank + 2)) / 2.0**n <= 0.025:
        rank += 1
    means = sorted(statistics.fmean(chance.choices(values, k=n)) for _ in range(draws))
    return {
        "n": n, "mean": statistics.fmean(values), "median": statistics.median(values),
        "median_low": ranked[rank] if rank >= 0 else None, "median_high": ranked[-1 - rank] if rank >= 0 else None,
        "low": means[int(draws * tail)], "high": means[draws - 1 - int(draws * tail)],
        "method": f"expanded percentile bootstrap over pairs, {draws} draws, seed {seed}",
    }  # fmt: skip
