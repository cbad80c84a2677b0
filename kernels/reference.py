"""What a top-k kernel should have answered, by NumPy: the values to expect, and a verdict on the indices that came back.

Sets are compared by value: of several equal values at the edge any may have been chosen, and -0.0 equals 0.0. NaN, of either sign,
counts above +inf, as the kernel written here and torch.topk have it. A negative length is a row without candidates, a length
beyond the row is bounded by the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowVerdict", "check_row", "check_rows", "reference_topk", "value_keys"]


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """One row's answer. ``expected``: how many indices belong there, in any order, followed by -1 to the end.

    Counts of output slots: ``duplicates`` (an index given again), ``out_of_range`` (neither -1 nor a position below the length),
    ``unfilled`` (-1 where an index belongs), ``spurious`` (something else where -1 belongs), ``misplaced`` (a valid index of a
    value that is not among the largest). Garbage in a padded row is both spurious and out of range.
    """

    row: int
    length: int
    expected: int
    duplicates: int = 0
    out_of_range: int = 0
    unfilled: int = 0
    spurious: int = 0
    misplaced: int = 0

    @property
    def ok(self) -> bool:
        return not (self.duplicates or self.out_of_range or self.unfilled or self.spurious or self.misplaced)

    @property
    def text(self) -> str:
        """``row 6 (length 0): 512 spurious``, or that it is right."""
        counts = ("duplicates", "out_of_range", "unfilled", "spurious", "misplaced")
        found = [f"{getattr(self, name)} {name.replace('_', ' ')}" for name in counts if getattr(self, name)]
        return f"row {self.row} (length {self.length}): {', '.join(found) or 'right'}"


def value_keys(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """float32 → uint32 of the same shape and the same order; equal values have equal keys. 0 is no value's key."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    keys = np.where(bits >> np.uint32(31) != 0, ~bits, bits | np.uint32(0x80000000))
    keys[magnitude == 0] = np.uint32(0x80000000)
    keys[magnitude > 0x7F800000] = np.uint32(0xFFFFFFFF)
    return keys.astype(np.uint32, copy=False)


def reference_topk(row: NDArray[np.float32], length: int, k: int) -> NDArray[np.float32]:
    """The k largest of the first ``length`` values of a row, float32 [min(k, length)], descending (NaN first): a multiset.

    ``row`` is float32 [n]; ValueError for anything but one dimension or for k < 1.
    """
    if row.ndim != 1 or k < 1:
        raise ValueError(f"a row of {row.ndim} dimensions, k {k}")
    bounded = min(max(length, 0), row.shape[0])
    head = np.ascontiguousarray(row[:bounded], dtype=np.float32)
    order = np.argsort(value_keys(head), kind="stable")[::-1][:k]
    return head[order]


def check_row(indices: NDArray[np.int32], row: NDArray[np.float32], length: int, k: int) -> RowVerdict:
    """As ``check_rows`` for one row: indices int32 [k], row float32 [n]."""
    return check_rows(indices.reshape(1, -1), row.reshape(1, -1), np.array([length], dtype=np.int64), k)[0]


def check_rows(
    indices: NDArray[np.int32], logits: NDArray[np.float32], lengths: NDArray[np.integer], k: int
) -> tuple[RowVerdict, ...]:
    """A verdict a row. ``indices`` int32 [rows, k], ``logits`` float32 [rows, n], ``lengths`` integer [rows].

    ValueError if the shapes do not belong together. Work: one partition of ``logits``.
    """
    rows, width = logits.shape if logits.ndim == 2 else (-1, 0)
    if indices.shape != (rows, k) or lengths.shape != (rows,) or k < 1:
        raise ValueError(f"shapes {indices.shape}, {logits.shape}, {lengths.shape} for k {k}")
    if rows == 0:
        return ()
    bounded = np.clip(lengths.astype(np.int64), 0, width)
    expected = np.minimum(bounded, k)
    chosen = indices.astype(np.int64)
    blank = chosen == -1
    inside = (chosen >= 0) & (chosen < bounded[:, None])
    out_of_range = (~blank & ~inside).sum(axis=1)

    # An index counts once: sorted, with a distinct negative number for every slot without one.
    filler = -1 - np.arange(k, dtype=np.int64)
    ordered = np.sort(np.where(inside, chosen, filler), axis=1)
    repeated = np.zeros((rows, k), dtype=bool)
    repeated[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    misplaced = np.zeros(rows, dtype=np.int64)
    if width > k:
        misplaced = _misplaced(ordered, repeated, logits, bounded, expected, k)
    belongs = np.arange(k)[None, :] < expected[:, None]
    counts = np.stack(
        [repeated.sum(axis=1), out_of_range, (blank & belongs).sum(axis=1), (~blank & ~belongs).sum(axis=1), misplaced], axis=1
    )
    return tuple(
        RowVerdict(row, int(lengths[row]), int(expected[row]), *(int(count) for count in counts[row])) for row in range(rows)
    )


def _misplaced(
    ordered: NDArray[np.int64],
    repeated: NDArray[np.bool_],
    logits: NDArray[np.float32],
    bounded: NDArray[np.int64],
    expected: NDArray[np.int64],
    k: int,
) -> NDArray[np.int64]:
    """How many distinct valid indices a row has whose values are not in the multiset of its k largest."""
    width = logits.shape[1]
    keys = value_keys(logits)
    keys[np.arange(width)[None, :] >= bounded[:, None]] = 0
    best = np.partition(keys, width - k, axis=1)[:, width - k :]
    edge = best.min(axis=1)
    valid = (ordered >= 0) & ~repeated
    taken = np.where(valid, np.take_along_axis(keys, np.clip(ordered, 0, width - 1), axis=1), 0)
    # Below the edge nothing belongs; above it everything does and an index comes once; at the edge only as many as are wanted.
    below: NDArray[np.int64] = (valid & (taken < edge[:, None])).sum(axis=1)
    at_edge: NDArray[np.int64] = (valid & (taken == edge[:, None])).sum(axis=1)
    wanted_at_edge = expected - (best > edge[:, None]).sum(axis=1)
    surplus = np.maximum(at_edge - np.maximum(wanted_at_edge, 0), 0)
    # A row no longer than k takes everything, whatever the values.
    return np.where(bounded <= k, 0, below + surplus).astype(np.int64, copy=False)
