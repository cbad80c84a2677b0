"""The reference against plain Python, and a verdict for every way to be wrong."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.kernels.reference import check_row, check_rows, reference_topk, value_keys
from dsv4_repro.kernels.topk_cases import DATA_KINDS, make_row

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
SPECIAL = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0])


def plain_order(value: float) -> tuple[int, float]:
    """NaN first, then by value, -0.0 as 0.0."""
    return (1, 0.0) if math.isnan(value) else (0, value + 0.0)


def plain_topk(row: list[float], length: int, k: int) -> list[tuple[int, float]]:
    return sorted((plain_order(value) for value in row[: max(length, 0)]), reverse=True)[:k]


@given(row=st.lists(FLOATS | SPECIAL, max_size=40), length=st.integers(-3, 45), k=st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_reference_equals_plain_sorting(row: list[float], length: int, k: int) -> None:
    expected = reference_topk(np.array(row, dtype=np.float32), length, k)
    rounded = [float(value) for value in np.array(row, dtype=np.float32)]
    assert [plain_order(float(value)) for value in expected] == plain_topk(rounded, length, k)


@given(row=st.lists(FLOATS | SPECIAL, min_size=1, max_size=40), length=st.integers(-3, 45), k=st.integers(1, 12), data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_right_choice_passes_and_any_worse_one_does_not(row: list[float], length: int, k: int, data: st.DataObject) -> None:
    values = np.array(row, dtype=np.float32)
    bounded = min(max(length, 0), len(row))
    count = min(bounded, k)
    positions = data.draw(st.permutations(range(bounded)))
    chosen = sorted(positions, key=lambda i: plain_order(float(values[i])), reverse=True)[:count]
    answer = np.array(data.draw(st.permutations(chosen)) + [-1] * (k - count), dtype=np.int32)
    assert check_row(answer, values, length, k).ok
    left = [i for i in range(bounded) if i not in chosen]
    if not chosen or not left:
        return
    out, into = data.draw(st.sampled_from(chosen)), data.draw(st.sampled_from(left))
    answer[list(answer).index(out)] = into
    same = plain_order(float(values[out])) == plain_order(float(values[into]))
    verdict = check_row(answer, values, length, k)
    assert verdict.ok == same
    assert verdict.misplaced == (0 if same else 1)


def test_each_mistake_has_its_count() -> None:
    row = np.arange(20, dtype=np.float32)
    right = np.array([19, 18, 17, 16], dtype=np.int32)
    assert check_row(right, row, 20, 4).text == "row 0 (length 20): right"
    assert check_row(np.array([19, 18, 18, 16], dtype=np.int32), row, 20, 4).duplicates == 1
    assert check_row(np.array([19, 18, 17, 3], dtype=np.int32), row, 20, 4).misplaced == 1
    for wild in (20, -2, 1 << 30, -(1 << 31)):
        assert check_row(np.array([19, 18, 17, wild], dtype=np.int32), row, 20, 4).out_of_range == 1
    unfilled = check_row(np.array([19, 18, 17, -1], dtype=np.int32), row, 20, 4)
    assert (unfilled.unfilled, unfilled.ok) == (1, False)
    padded = check_row(right, row, 0, 4)
    assert (padded.spurious, padded.out_of_range, padded.expected) == (4, 4, 0)
    hole = check_row(np.array([-1, 1, 0, -1], dtype=np.int32), row, 2, 4)
    assert (hole.unfilled, hole.spurious, hole.ok) == (1, 1, False)
    assert "1 unfilled, 1 spurious" in hole.text
    assert check_row(np.array([1, 0, -1, -1], dtype=np.int32), row, 2, 4).ok


def test_of_ties_at_the_edge_only_as_many_as_are_wanted() -> None:
    row = np.array([5, 1, 1, 1, 0], dtype=np.float32)
    assert check_row(np.array([0, 3, 1], dtype=np.int32), row, 5, 3).ok
    assert check_row(np.array([1, 2, 3], dtype=np.int32), row, 5, 3).misplaced == 1


def test_negative_zero_equals_zero_and_nan_is_above_infinity() -> None:
    zeros = np.array([0.0, -0.0, -0.0, 0.0], dtype=np.float32)
    assert all(check_row(np.array([a, b], dtype=np.int32), zeros, 4, 2).ok for a in range(4) for b in range(4) if a != b)
    row = np.array([math.inf, math.nan, 1.0, -math.nan], dtype=np.float32)
    assert check_row(np.array([3, 1], dtype=np.int32), row, 4, 2).ok
    assert check_row(np.array([0, 1], dtype=np.int32), row, 4, 2).misplaced == 1


@pytest.mark.parametrize("kind", DATA_KINDS)
def test_many_rows_at_once_give_what_rows_one_by_one_give(kind: str) -> None:
    rng = np.random.default_rng(7)
    rows, width, k = 9, 300, 64
    logits = np.stack([make_row(kind, width, rng) for _ in range(rows)])
    lengths = np.array([-1, 0, 1, 63, 64, 65, 299, 300, 4000])
    answers = rng.integers(-1, width, (rows, k)).astype(np.int32)
    for row in range(5, rows):
        bounded = min(lengths[row], width)
        answers[row] = np.argsort(value_keys(logits[row, :bounded]), kind="stable")[::-1][:k]
    together = check_rows(answers, logits, lengths, k)
    single = [check_row(answers[row], logits[row], int(lengths[row]), k) for row in range(rows)]
    assert list(together) == [dataclasses.replace(verdict, row=row) for row, verdict in enumerate(single)]
    assert all(verdict.ok for verdict in together[5:])


def test_keys_keep_the_order_and_leave_zero_free() -> None:
    values = np.array([-math.inf, -3.4e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3.4e38, math.inf, math.nan], dtype=np.float32)
    keys = value_keys(values)
    assert keys[4] == keys[5]
    assert (np.diff(np.delete(keys, 4).astype(np.int64)) > 0).all()
    assert keys.min() > 0


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    row = np.zeros((2, 8), dtype=np.float32)
    for indices, lengths, k in (
        (np.zeros((2, 3), dtype=np.int32), np.zeros(2, dtype=np.int32), 4),
        (np.zeros((1, 4), dtype=np.int32), np.zeros(2, dtype=np.int32), 4),
        (np.zeros((2, 4), dtype=np.int32), np.zeros(3, dtype=np.int32), 4),
    ):
        with pytest.raises(ValueError, match="shapes"):
            check_rows(indices, row, lengths, k)
    with pytest.raises(ValueError, match="k 0"):
        reference_topk(row[0], 3, 0)
    assert check_rows(np.zeros((0, 4), np.int32), np.zeros((0, 8), np.float32), np.zeros(0, np.int32), 4) == ()
