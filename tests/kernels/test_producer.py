from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_repro.kernels.producer import compress_lengths, expand_lengths, producer_path


def test_the_native_path_makes_the_negative_length_of_the_report() -> None:
    # vLLM #51593: seq_lens [L0, L1, L2, 0], decode_lens [2, 2, 2, 0].
    slots = (2, 2, 2, 0)
    assert producer_path(slots, 2) == "native"
    raw = expand_lengths((3059, 3060, 3060, 0), slots, rows=8, path="native")
    assert raw == (3058, 3059, 3059, 3060, 3059, 3060, -1, 0)
    clamped = expand_lengths((3059, 3060, 3060, 0), slots, rows=8, path="native", producer="clamped")
    assert clamped == (3058, 3059, 3059, 3060, 3059, 3060, 0, 0)


def test_compression_keeps_minus_one() -> None:
    assert compress_lengths((-1, 0, 3, 4, 1327, -2, -5), 4) == (-1, 0, 0, 1, 331, -1, -2)
    assert compress_lengths((-1, 7), 1) == (-1, 7)


def test_plain_decode_never_shows_it() -> None:
    assert producer_path((1, 1, 1, 0), 1) == "native"
    assert expand_lengths((9, 8, 7, 0), (1, 1, 1, 0), rows=4, path="native") == (9, 8, 7, 0)


def test_the_variable_path_makes_no_row_for_a_padding_slot() -> None:
    # The example in the comments of the metadata builder: seq_lens [10, 7, 12, 0], decode_lens [3, 1, 4, 0].
    assert expand_lengths((10, 7, 12, 0), (3, 1, 4, 0), rows=12, path="variable") == (8, 9, 10, 7, 9, 10, 11, 12, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("slots", "next_n", "sm", "path"),
    [
        ((2, 2), 2, 120, "native"),
        ((2, 2, 0), 2, None, "native"),
        ((3, 3, 3), 3, 120, "uniform"),
        ((3, 3, 0), 3, 120, "variable"),
        ((3, 3, 0), 3, 90, "variable"),
        ((3, 3, 0), 3, 100, "native"),
        ((3, 3, 0), 3, 103, "native"),
        ((4, 4), 4, None, "uniform"),
        ((1, 1, 0), 3, 120, "native"),
        ((0, 0), 2, 120, "native"),
        ((), 2, 120, "native"),
    ],
)
def test_which_path(slots: tuple[int, ...], next_n: int, sm: int | None, path: str) -> None:
    assert producer_path(slots, next_n, sm) == path


def test_the_uniform_path_would_make_them_too_if_padding_slots_carried_queries() -> None:
    assert expand_lengths((9, 0), (3, 3), rows=6, path="uniform") == (7, 8, 9, -2, -1, 0)
    assert expand_lengths((9, 0), (3, 3), rows=6, path="uniform", producer="clamped") == (7, 8, 9, 0, 0, 0)


@given(
    st.lists(st.integers(8, 4000), min_size=1, max_size=16),
    st.integers(0, 8),
    st.integers(1, 4),
    st.sampled_from([None, 90, 100, 120]),
)
def test_live_rows_are_the_same_on_every_path_and_negatives_come_from_padding_alone(
    live: list[int], padding: int, next_n: int, sm: int | None
) -> None:
    slots = (next_n,) * len(live) + (0,) * padding
    rows = len(slots) * next_n
    path = producer_path(slots, next_n, sm)
    lengths = expand_lengths((*live, *([0] * padding)), slots, rows=rows, path=path)
    assert len(lengths) == rows
    real = len(live) * next_n
    assert lengths[:real] == tuple(length - next_n + 1 + token for length in live for token in range(next_n))
    negative = [length for length in lengths[real:] if length < 0]
    assert len(negative) == (padding * (next_n - 1) if path == "native" else 0)
    assert min(expand_lengths((*live, *([0] * padding)), slots, rows=rows, path=path, producer="clamped")) >= 0
