"""The cost estimator of the server benchmark, on arrivals that are simulated with a known slowdown, drift and scatter."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from .by_path import benchmark

if TYPE_CHECKING:
    from dsv4_repro.benchmarks.server_cost import Window, cost_document, interval, measure, order_of
else:
    _COST = benchmark("server_cost")
    Window, cost_document, interval = _COST.Window, _COST.cost_document, _COST.interval
    measure, order_of = _COST.measure, _COST.order_of

STEP_S, SETTLE_S, WINDOW_S = 0.0075, 0.35, 1.0


def simulated(
    slower: float, *, seed: int, pairs: int = 30, live: int = 8, drift: float = 0.0, scatter: float = 0.1, seen_after: float = 0.1
) -> tuple[list[Window], list[list[tuple[float, int]]]]:
    """Windows in the benchmark's order, and what ``live`` streams got meanwhile: each step brings every stream one token, or two.

    ``slower``: of each step while the switch is on; ``drift``: each step is longer by this share each second; ``scatter``: of
    single steps; ``seen_after``: seconds from the turn of the switch until it acts."""
    chance = random.Random(seed)
    turns = [(1.0 + number * WINDOW_S, which) for number, which in enumerate(on for pair in range(pairs) for on in order_of(pair))]
    end = turns[-1][0] + WINDOW_S + 0.5
    streams: list[list[tuple[float, int]]] = [[] for _ in range(live)]
    counts = [0] * live
    now, at, on = 0.0, 0, False
    while now < end:
        while at < len(turns) and turns[at][0] + seen_after <= now:
            on, at = turns[at][1], at + 1
        now += STEP_S * (1.0 + slower * on) * (1.0 + drift * now) * max(chance.gauss(1.0, scatter), 0.2)
        for index in range(live):
            counts[index] += 1 + (chance.random() < 0.1)
            streams[index].append((now + chance.random() * 1e-4, counts[index]))
    return [Window(which, turn + SETTLE_S, turn + WINDOW_S) for turn, which in turns], streams


def document(slower: float, **more: float) -> dict[str, Any]:
    seed = int(more.pop("seed", 1))
    windows, streams = simulated(slower, seed=seed, **more)  # type: ignore[arg-type]
    return cost_document([measure(window, streams) for window in windows])


@pytest.mark.parametrize("slower", [0.03, 0.0, -0.02])
def test_intervals_cover_the_injected_slowdown_in_most_runs(slower: float) -> None:
    lost = 100.0 * (1.0 - 1.0 / (1.0 + slower))
    truth = {"throughput_lost_percent": lost, "steps_lost_percent": lost, "gap_longer_percent": 100.0 * slower}
    covered = dict.fromkeys(truth, 0)
    for seed in range(20):
        found = document(slower, seed=seed, pairs=12, live=2)
        for name, value in truth.items():
            assert found[name]["n"] == 12
            covered[name] += found[name]["low"] <= value <= found[name]["high"]
    assert all(count >= 17 for count in covered.values()), covered


def test_three_percent_is_told_from_nothing_with_thirty_pairs() -> None:
    slow, same = document(0.03), document(0.0)
    for name in ("throughput_lost_percent", "steps_lost_percent", "gap_longer_percent"):
        assert slow[name]["low"] > 1.0
        assert same[name]["low"] < 0.0 < same[name]["high"]


def test_drift_is_cancelled_by_the_order() -> None:
    """Each step is 2 % longer every second: more than the cost, in each pair, and with both signs."""
    found = document(0.03, drift=0.02, scatter=0.01)
    assert abs(found["gap_longer_percent"]["mean"] - 3.0) < 0.3
    costs = [row["gap_longer_percent"] for row in found["pairs"]]
    assert max(costs) - min(costs) > 2.0


def test_the_dropped_part_of_a_window_keeps_the_turn_out() -> None:
    """A switch that acts 0.3 s after it is turned costs the same; the whole second would lose a third of it."""
    assert abs(document(0.1, seen_after=0.3, scatter=0.01)["gap_longer_percent"]["mean"] - 10.0) < 0.3


def test_a_stand_still_inside_a_window_counts() -> None:
    arrivals = [(step * 0.01, step + 1) for step in range(100)]
    stalled = [(moment + (0.25 if moment > 0.5 else 0.0), count) for moment, count in arrivals]
    window = Window(True, 0.2, 0.9)
    whole, less = measure(window, [arrivals]), measure(window, [stalled])
    assert whole.rate == pytest.approx(100.0)
    assert less.rate == pytest.approx(100.0 * 0.45 / 0.7, rel=0.02)
    assert less.gap == pytest.approx(0.01)


def test_a_window_in_which_the_number_of_requests_changed_is_left_out_with_its_pair() -> None:
    windows, streams = simulated(0.0, seed=1, pairs=4, live=2)
    streams[0] = [one for one in streams[0] if one[0] < windows[3].begin + 0.2]
    found = cost_document([measure(window, streams) for window in windows])
    assert found["gap_longer_percent"]["n"] == 1
    assert found["left_out"] == {"a request began or ended in it": 3}


def test_a_window_that_no_agent_confirmed_is_left_out() -> None:
    windows, streams = simulated(0.0, seed=1, pairs=2, live=1)
    measured = [measure(window, streams) for window in windows]
    measured[2] = measure(Window(windows[2].on, windows[2].begin, windows[2].end, confirmed=False), streams)
    found = cost_document(measured)
    assert found["gap_longer_percent"]["n"] == 1
    assert found["left_out"] == {"the agent did not say that it stands as asked": 1}


def test_nothing_measured_is_no_cost_of_zero() -> None:
    found = cost_document([])
    assert found["throughput_lost_percent"] == {"n": 0, "mean": None, "low": None, "high": None}
    assert found["tokens_per_s_off"] is None
    assert interval([1.0])["low"] is None


def test_the_median_and_its_interval_are_not_moved_by_a_disturbed_pair() -> None:
    """Of 20 values the 6th from each end bounds the median (tables of the sign test)."""
    values = [float(value) for value in range(1, 20)] + [1000.0]
    found = interval(values)
    assert (found["median"], found["median_low"], found["median_high"]) == (10.5, 6.0, 15.0)
    assert found["mean"] == 59.5
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0])["median_low"] is None
