"""The sequential test: its error rates by simulation, its bounds, and what it never says."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import UsageError
from dsv4_repro.repro.campaign.sequential import Rates, SequentialTest, bound_words, fisher_two_sided


def outcome(rates: Rates, hazard: float, dice: random.Random, most: int = 5000) -> str:
    test = SequentialTest(rates)
    while test.decided is None and test.windows < most:
        test.add(hang=dice.random() < hazard)
    return test.decided or "open"


def test_the_stated_error_rates_hold_by_simulation() -> None:
    rates = Rates(alpha=0.05, beta=0.05, hazard=0.1, false_rate=0.01)
    dice = random.Random(1)
    healthy = [outcome(rates, 0.01, dice) for _ in range(1500)]
    sick = [outcome(rates, 0.1, dice) for _ in range(1500)]
    # Wald: at most alpha / (1 - beta); three standard deviations of the simulation on top.
    allowed = 0.05 / 0.95 + 3 * math.sqrt(0.05 * 0.95 / 1500)
    assert healthy.count("HANGS") / 1500 <= allowed
    assert sick.count("CLEAN") / 1500 <= allowed
    assert "open" not in {*healthy, *sick}


def test_where_a_hang_is_a_proof_one_decides_and_clean_windows_are_counted_beforehand() -> None:
    rates = Rates()
    test = SequentialTest(rates)
    for number in range(rates.windows_when_clean):
        assert test.decided is None, number
        test.add(hang=False)
    assert test.decided == test.word == "CLEAN"
    assert (1 - rates.hazard) ** rates.windows_when_clean <= rates.beta / (1 - rates.alpha)
    one = SequentialTest(rates)
    one.add(hang=True)
    assert one.decided == one.word == "HANGS"


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=60), st.sampled_from([0.0, 1e-4, 0.01]))
def test_a_cell_in_which_something_hung_is_never_clean_and_none_without_a_window_is_anything(
    trials: list[bool], rate: float
) -> None:
    test = SequentialTest(Rates(false_rate=rate))
    before = test.word
    assert before == "INCONCLUSIVE"
    assert test.interval() is None
    for hang in trials:
        test.add(hang=hang)
    if any(trials):
        assert test.word != "CLEAN"
    if trials:
        low, high = test.interval() or (1.0, 0.0)
        assert 0.0 <= low <= sum(trials) / len(trials) <= high <= 1.0


def test_words() -> None:
    assert bound_words(0, 44) == "at most 99.4 per 1000 windows at 99 %"
    assert bound_words(20, 20) == "at least 794 per 1000 windows at 99 %"
    assert "no window" in bound_words(0, 0)
    assert "at least" in bound_words(3, 20)
    assert "at most" in bound_words(3, 20)


@pytest.mark.parametrize("wrong", [{"alpha": 0.0}, {"beta": 0.5}, {"hazard": 1.0}, {"hazard": 1e-5, "false_rate": 1e-4}])
def test_rates_that_make_no_test(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="--"):
        Rates(**wrong)


def test_fisher_against_known_values() -> None:
    # Fisher's tea tasting, 3 of 4 and 1 of 4: two-sided 34/70.
    assert fisher_two_sided(3, 4, 1, 4) == pytest.approx(34 / 70)
    assert fisher_two_sided(10, 10, 0, 10) == pytest.approx(2 / math.comb(20, 10))
    assert fisher_two_sided(0, 0, 5, 5) == 1.0
    assert fisher_two_sided(500, 20_000, 100, 20_000) < 1e-30
    exact, normal = fisher_two_sided(60, 9_999, 40, 9_999), fisher_two_sided(60, 10_001, 40, 10_001)
    assert exact == pytest.approx(normal, abs=0.02)
