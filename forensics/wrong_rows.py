"""Why a finished top-k launch is wrong, from its inputs and answers: which rows are wrong, and what the right ones have in common.

Each cause makes a prediction of exactly which rows can be wrong; it is supported only if the wrong rows are among them and nothing
else is needed. What fits none stays without a cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..kernels.abi import RADIX_THRESHOLD
from ..kernels.reference import RowVerdict

__all__ = ["PUBLISHED", "WrongRows", "bins_of", "explain_wrong_rows", "half_bins", "ring_rows", "shared_bin"]

#: The published case of a cause, where the kernel is vLLM's: all its releases with the defect have the one mechanism.
PUBLISHED = {"histogram-ring": "vllm-49139", "overflow": "vllm-51782"}
#: The unfixed single-CTA paths (vLLM #51782; read from the machine code of release 0.27.1 and confirmed by interpreting it): rows
#: up to 8192 are sorted by the upper 11 bits of their values' half precision and keep 3708 candidates of one bin, longer rows by
#: the upper 8 bits and keep 4096.
_BINS = ((8192, 11, 3708), (RADIX_THRESHOLD, 8, 4096))


@dataclass(frozen=True, slots=True)
class WrongRows:
    """``cause``: a word of the class wrong-result, None where none fits. ``reasons``: facts for it, as sentences."""

    cause: str | None
    reasons: tuple[str, ...]


def ring_rows(lengths: Sequence[int], groups: int) -> frozenset[int]:
    """Long rows at which a histogram ring that counts all rows of its group, not the long ones, is out of step (vLLM #49139).

    Four rounds a long row turn a ring of three by one; a row in between that turns it by none, or by another number, breaks the
    step. A long row is suspect as soon as a short row and a long row came before it in its group. A negative length counts as long:
    a kernel that reads it unsigned takes it for one.
    """
    suspect = set()
    for group in range(groups):
        long_before = short_between = False
        for row in range(group, len(lengths), groups):
            if lengths[row] & 0xFFFFFFFF > RADIX_THRESHOLD:
                if long_before and short_between:
                    suspect.add(row)
                long_before = True
            elif long_before:
                short_between = True
    return frozenset(suspect)


def half_bins(values: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.uint32]:
    """The bin of each value: the upper ``bits`` bits of its half precision, made to keep the order of values. uint32."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    ordered = np.where(half & 0x8000 != 0, ~half & 0xFFFF, half | 0x8000)
    return (ordered >> np.uint32(16 - bits)).astype(np.uint32)


def bins_of(length: int) -> tuple[int, int]:
    """(bits of half precision that make a bin, candidates that are kept of one) for a row of ``length`` in unfixed releases."""
    return next(((bits, kept) for most, bits, kept in _BINS if length <= most), (8, 4096))


def shared_bin(values: npt.NDArray[np.float32], k: int) -> int:
    """How many of a row's values share the bin of its k-th largest value."""
    if len(values) <= k:
        return 0
    bits, _ = bins_of(len(values))
    kth = np.partition(values, len(values) - k)[len(values) - k]
    return int(np.count_nonzero(half_bins(values, bits) == half_bins(np.array([kth], np.float32), bits)))


def explain_wrong_rows(
    verdicts: Sequence[RowVerdict],
    lengths: Sequence[int],
    logits: npt.NDArray[np.float32],
    k: int,
    groups: int,
    *,
    counters: Sequence[int] = (),
    expected_counters: Sequence[int] = (),
) -> WrongRows:
    """The cause of the wrong rows of one launch. ``logits`` float32 [rows, stride]; ``counters``: arrival counters at the end and
    what they would be had they started at zero.
    """
    wrong = [verdict for verdict in verdicts if not verdict.ok]
    rows = [verdict.row for verdict in wrong]
    if not rows:
        return WrongRows(None, ("every row is right",))
    named = f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:8]))}{', …' if len(rows) > 8 else ''}"
    if counters and expected_counters and tuple(counters) != tuple(expected_counters):
        reason = (
            f"arrival counters end at {list(counters)[:8]}, six arrivals of each CTA for each long row make "
            f"{list(expected_counters)[:8]}: they did not start at zero, or were written over"
        )
        return WrongRows(None, (f"{named} wrong", reason))
    if all(lengths[row] <= 0 for row in rows):
        return WrongRows("padding", (f"{named} wrong: all of length <= 0, where only -1 belongs", *(v.text for v in wrong[:3])))
    ring = ring_rows(lengths, groups)
    padded = [row for row in rows if lengths[row] <= 0]
    if ring.intersection(rows) and set(rows) <= ring.union(padded):
        right = [row for row, length in enumerate(lengths) if length > RADIX_THRESHOLD and row not in rows]
        reasons = [f"{named} wrong: long rows that follow a short one after a long one in their group"]
        if padded:
            reasons.append(f"of them {padded} have no positive length; read unsigned they count as long rows")
        return WrongRows("histogram-ring", (*reasons, f"long rows {right or '(none)'} before any such change are right"))
    if all(0 < lengths[row] <= RADIX_THRESHOLD for row in rows):
        return _single(rows, named, lengths, logits, k, wrong)
    return WrongRows(None, (f"{named} wrong", *(verdict.text for verdict in wrong[:3])))


def _single(
    rows: Sequence[int], named: str, lengths: Sequence[int], logits: npt.NDArray[np.float32], k: int, wrong: Sequence[RowVerdict]
) -> WrongRows:
    crowds = {row: shared_bin(logits[row, : lengths[row]], k) for row in rows}
    text = (f"{named} wrong, each done by one CTA alone", *(verdict.text for verdict in wrong[:3]))
    if all(count > bins_of(lengths[row])[1] for row, count in crowds.items()):
        least = min(crowds.values())
        return WrongRows(
            "overflow", (*text, f"at least {least} values share the half-precision bin of the k-th: more than are kept")
        )
    if all(verdict.out_of_range and not verdict.misplaced for verdict in wrong):
        return WrongRows("padding", (*text, "indices beyond the row's length: the padding of the last vector was taken for values"))
    return WrongRows(None, text)
