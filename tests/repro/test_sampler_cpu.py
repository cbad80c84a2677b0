"""The mask of a sampler is judged by every value."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4_repro.repro.campaign.verify_rows import judged_row
from dsv4_repro.repro.sampler_cpu import mask_faults, pivots_differ
from dsv4_repro.scenarios.registry import scenario

LOGITS = np.array([[3.0, 1.0, 2.0, 2.0, -1.0]], np.float32)
INF = np.float32(np.inf)


@pytest.mark.parametrize(
    ("masked", "good"),
    [
        ([3, -INF, 2, 2, -INF], True),  # ties at the k-th stay
        ([3, -INF, 2, -INF, -INF], False),
        ([3, 1, 2, 2, -INF], False),
        ([4, -INF, 2, 2, -INF], False),
        ([0, 0, 0, 0, 0], False),
    ],
)
def test_the_mask(masked: list[float], good: bool) -> None:
    assert (mask_faults(np.array([masked], np.float32), LOGITS, 2) == []) is good


@pytest.mark.parametrize(
    ("kept", "differ"),
    [
        ([0, 2, 5], False),  # the three largest
        ([0, 1, 5], True),  # block 0 cut at 1 or below, block 1 above 2.5
        ([1, 2, 5], False),  # block 0 kept 1 and not 3: no cut explains it
        ([], False),
        ([0, 1, 2, 3, 4, 5], False),
    ],
)
def test_blocks_that_cut_at_different_values(kept: list[int], differ: bool) -> None:
    logits = np.array([3, 1, 2.5, 2, -1, 2.7], np.float32)
    masked = np.full(6, -INF)
    masked[kept] = logits[kept]
    assert pivots_differ(masked, logits, 2) is differ


def test_another_defect_of_a_repaired_release_is_passed_over_and_said() -> None:
    row = next(item for item in scenario("reset-race").variants() if item.name == "flashinfer-after")
    counts = [{"class": "not-hung", "cause": None, "launches": 43}, {"class": "wrong-result", "cause": None, "launches": 1}]
    found = {"class": "not-hung", "cause": None}
    document = {"found": found, "expected": found, "launches": 44, "counts": counts, "as_expected": True, "kernel": row.kernel}
    judged = judged_row(document, row, 44)
    assert (judged["word"], judged["bad"]) == ("CLEAN", 0)
    assert judged["rate"].endswith("1 ended as another defect of it does")
    hung = [{"class": "gpu-spin-barrier", "cause": "reset-race", "launches": 1}]
    assert judged_row({**document, "counts": hung}, row, 44)["word"] == "BROKEN"
