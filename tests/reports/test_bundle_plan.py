"""The size rule: essentials stay, the documented order holds, the sum fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_repro.errors import RunStoreError
from dsv4_repro.reports.bundle_plan import Piece, fit

pieces_of = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 8)), max_size=25).map(
    lambda items: [Piece(f"f{index}", size, rank) for index, (size, rank) in enumerate(items)]
)


@given(pieces_of, st.integers(0, 60_000), st.booleans())
def test_it_fits_or_says_that_it_cannot(pieces: list[Piece], limit: int, cutting: bool) -> None:
    sizes = {piece.name: piece.packed for piece in pieces}
    ranks = {piece.name: piece.rank for piece in pieces}

    def shrink(name: str) -> int | None:
        if not cutting or ranks[name] != 4 or sizes[name] < 100:
            return None
        sizes[name] //= 3
        return sizes[name]

    essential = sum(piece.packed for piece in pieces if piece.rank == 0)
    if essential > limit:
        with pytest.raises(RunStoreError, match="alone take"):
            fit(pieces, limit, shrink)
        return
    kept, decisions = fit(pieces, limit, shrink)
    assert sum(piece.packed for piece in kept) <= limit
    names = {piece.name for piece in kept}
    assert {piece.name for piece in pieces if piece.rank == 0} <= names
    dropped = {decision.name for decision in decisions if decision.what == "dropped"}
    assert dropped == {piece.name for piece in pieces} - names
    if dropped:
        least = min(ranks[name] for name in dropped)
        assert all(ranks[name] <= least for name in names)


def test_the_largest_of_the_last_rank_goes_first_and_texts_are_cut_before() -> None:
    pieces = [Piece("log", 900, 4), Piece("small log", 300, 4), Piece("raw", 500, 8), Piece("odd", 10, 7), Piece("report", 100, 0)]
    steps = {"log": [400, 200]}
    kept, decisions = fit(pieces, 520, lambda name: steps.get(name, []).pop(0) if steps.get(name) else None)
    assert [piece.name for piece in kept] == ["log", "report"]
    assert {decision.name: decision.what for decision in decisions} == {
        "raw": "dropped",
        "odd": "dropped",
        "log": "cut",
        "small log": "dropped",
    }


def test_what_fits_is_not_touched() -> None:
    pieces = [Piece("a", 10, 8), Piece("b", 10, 4)]
    assert fit(pieces, 20, lambda _name: pytest.fail("nothing to shrink")) == (pieces, [])
