"""Clopper-Pearson bounds, against published values and their own definition."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.repro import bounds
from dsv4_repro.repro.bounds import at_least, at_most, bounds_of


def _cdf(successes: int, trials: int, p: float) -> float:
    return math.fsum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(successes + 1))


def test_the_rule_of_three() -> None:
    assert at_most(0, 200) == pytest.approx(1 - 0.05 ** (1 / 200))
    assert at_most(0, 1000) == pytest.approx(3 / 1000, rel=0.01)
    assert at_least(200, 200) == pytest.approx(0.985, abs=2e-4)


def test_published_values() -> None:
    # Clopper and Pearson's two-sided 95 % interval for 4 of 20 (one-sided 97.5 %): 0.0573 to 0.4366.
    assert at_least(4, 20, 0.975) == pytest.approx(0.0573, abs=1e-4)
    assert at_most(4, 20, 0.975) == pytest.approx(0.4366, abs=1e-4)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), st.sampled_from([0.9, 0.95, 0.99]))
def test_the_bounds_are_where_the_tail_is_alpha(case: tuple[int, int], confidence: float) -> None:
    trials, successes = case
    low, high = at_least(successes, trials, confidence), at_most(successes, trials, confidence)
    assert 0.0 <= low <= successes / trials <= high <= 1.0
    if successes:
        assert 1 - _cdf(successes - 1, trials, low) == pytest.approx(1 - confidence, abs=1e-6)
    if successes < trials:
        assert _cdf(successes, trials, high) == pytest.approx(1 - confidence, abs=1e-6)


def test_large_counts_stay_finite() -> None:
    assert 0.0 < at_most(3, 100_000) < 2e-4


@pytest.mark.parametrize("trials", [10**6, 10**7, 10**8, 10**12])
def test_a_campaign_of_any_length_has_its_bounds_at_once(trials: int) -> None:
    """The sum over all trials took a minute for a million of them; a store that claims 10^12 never ended."""
    began = time.process_time()
    for hangs in (1, 1000, trials // 2, trials - 1):
        low, high = at_least(hangs, trials, 0.99), at_most(hangs, trials, 0.99)
        share, spread = hangs / trials, math.sqrt(max(hangs / trials * (1 - hangs / trials), 1 / trials) / trials)
        assert share - 9 * spread <= low < share < high <= share + 9 * spread
        if 1000 <= hangs <= trials // 2 and trials <= 10**7:  # there the normal distribution is near
            assert (high - share) / spread == pytest.approx(2.326, rel=0.05)
            assert (share - low) / spread == pytest.approx(2.326, rel=0.05)
    assert time.process_time() - began < 5.0


def test_chernoffs_bounds_are_not_narrower_than_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(1, 10), (3, 200), (100, 200), (199, 200), (1, 5000)]
    exact = [(at_least(*case), at_most(*case)) for case in cases]
    monkeypatch.setattr(bounds, "_EXACT", 0)
    for case, (low, high) in zip(cases, exact, strict=True):
        assert low / 4 < at_least(*case) <= low < high <= at_most(*case)


def test_what_is_said() -> None:
    assert bounds_of(0, 0) == ()
    assert [bound.side for bound in bounds_of(200, 200)] == ["at least"]
    assert [bound.side for bound in bounds_of(0, 10)] == ["at most"]
    assert [bound.side for bound in bounds_of(3, 10)] == ["at least", "at most"]


@pytest.mark.parametrize("case", [(-1, 3, 0.95), (4, 3, 0.95), (0, 0, 0.95), (1, 2, 1.0), (1, 2, 0.0)])
def test_nonsense_is_refused(case: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError):
        at_least(*case)
