"""A wrong answer's cause from which rows are wrong; what fits nothing stays without one."""

from __future__ import annotations

import numpy as np

from dsv4_repro.forensics.wrong_rows import explain_wrong_rows, ring_rows, shared_bin
from dsv4_repro.kernels.reference import RowVerdict

K = 512


def verdicts(lengths: tuple[int, ...], *wrong: int, **what: int) -> list[RowVerdict]:
    counts = what or {"misplaced": 3}
    return [RowVerdict(row, length, K, **(counts if row in wrong else {})) for row, length in enumerate(lengths)]


def logits(rows: int, stride: int, value: float | None = None) -> np.ndarray:
    random = np.random.default_rng(0).standard_normal((rows, stride)).astype(np.float32)
    return random if value is None else np.float32(value) + np.abs(random) * np.float32(1e-3)


def test_the_ring_is_suspect_only_after_long_then_short() -> None:
    assert ring_rows((40000, 1000, 39999, 25, 33000), 1) == {2, 4}
    assert ring_rows((25, 40000, 40000), 1) == frozenset()
    assert ring_rows((40000, 25, 40000, 25), 2) == frozenset()  # each group has rows of one kind
    assert ring_rows((-1, 25, 40000), 1) == {2}


def test_long_rows_after_a_short_one_are_the_ring() -> None:
    lengths = (40000, 1000, 39999)
    found = explain_wrong_rows(verdicts(lengths, 2), lengths, logits(3, 40000), K, 1)
    assert found.cause == "histogram-ring"
    first = explain_wrong_rows(verdicts(lengths, 0), lengths, logits(3, 40000), K, 1)
    assert first.cause is None


def test_a_full_bin_is_an_overflow_and_a_thin_one_is_not() -> None:
    lengths = (16384,)
    assert explain_wrong_rows(verdicts(lengths, 0), lengths, logits(1, 16384, 1000.0), K, 1).cause == "overflow"
    assert explain_wrong_rows(verdicts(lengths, 0), lengths, logits(1, 16384), K, 1).cause is None
    assert shared_bin(np.zeros(10, np.float32), K) == 0


def test_padded_rows_and_indices_beyond_the_end_are_padding() -> None:
    lengths = (9000, -1)
    found = explain_wrong_rows(verdicts(lengths, 1, spurious=512), lengths, logits(2, 16384), K, 1)
    assert found.cause == "padding"
    beyond = explain_wrong_rows(verdicts((513,), 0, out_of_range=3), (513,), logits(1, 516), K, 1)
    assert beyond.cause == "padding"


def test_counters_that_did_not_start_at_zero_take_every_other_cause_away() -> None:
    lengths = (40000, 1000, 39999)
    found = explain_wrong_rows(
        verdicts(lengths, 2), lengths, logits(3, 40000), K, 1, counters=(72,), expected_counters=(48,)
    )  # fmt: skip
    assert found.cause is None
    assert "72" in found.reasons[1]


def test_nothing_wrong_is_no_cause() -> None:
    assert explain_wrong_rows(verdicts((9000,)), (9000,), logits(1, 16384), K, 1).cause is None
