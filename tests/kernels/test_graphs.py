from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_repro.kernels.graphs import decode_graph_sizes, default_capture_sizes, pad_to_graph


def test_the_default_list_of_the_recipe() -> None:
    # vLLM 0.27.1, max_num_seqs 16, one speculative token: up to 64.
    assert default_capture_sizes(16, 2) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert decode_graph_sizes(16, 2) == (2, 4, 8, 16, 24, 32)


def test_the_default_list_has_steps_of_16_from_256_and_ends_at_512() -> None:
    sizes = default_capture_sizes(512, 2)
    assert sizes[:4] == (1, 2, 4, 8)
    assert 248 in sizes
    assert 256 in sizes
    assert 264 not in sizes
    assert sizes[-1] == 512
    assert default_capture_sizes(1, 1) == (1, 2)


@pytest.mark.parametrize(
    ("max_num_seqs", "next_n", "configured", "sizes"),
    [
        (16, 2, (6,), (6,)),
        (16, 2, (1, 2, 4, 6, 8), (2, 4, 6, 8)),
        (16, 2, (8, 2, 2, 5, 40), (2, 6, 8)),
        (16, 2, (5,), (2,)),
        (16, 4, (2,), ()),
        (4, 2, (16, 32), ()),
        (16, 3, None, (3, 6, 9, 18, 24, 33, 42, 48)),
        (16, 1, None, (1, 2, 4, 8, 16)),
    ],
)
def test_sizes_are_rounded_to_the_query_length_and_limited(
    max_num_seqs: int, next_n: int, configured: tuple[int, ...] | None, sizes: tuple[int, ...]
) -> None:
    assert decode_graph_sizes(max_num_seqs, next_n, configured) == sizes


@pytest.mark.parametrize(("rows", "padded"), [(1, 2), (2, 2), (6, 8), (10, 16), (32, 32), (33, None)])
def test_a_batch_is_padded_to_the_next_size(rows: int, padded: int | None) -> None:
    assert pad_to_graph(rows, (2, 4, 8, 16, 24, 32)) == padded
    assert pad_to_graph(rows, ()) is None


@given(st.integers(1, 300), st.integers(1, 8), st.none() | st.lists(st.integers(1, 600), min_size=1, max_size=20).map(tuple))
def test_every_decode_graph_holds_whole_requests(max_num_seqs: int, next_n: int, configured: tuple[int, ...] | None) -> None:
    sizes = decode_graph_sizes(max_num_seqs, next_n, configured)
    assert list(sizes) == sorted(set(sizes))
    assert all(size % next_n == 0 and next_n <= size <= max_num_seqs * next_n for size in sizes)
