"""For which rows the candidate buffers of releases 0.20.2 to 0.32.0 overflow: expected crowd of the k-th value's bin, as a table.

A row's values are taken as normal with a mean and a deviation; what decides is their ratio and where the mean lies in its
octave, for bins are of half precision. Expected counts, computed; interpreting release 0.27.1 confirms
them (see the tests).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ..forensics.wrong_rows import bins_of, half_bins

__all__ = ["LENGTHS", "RATIOS", "MapCell", "expected_crowd", "overflow_map"]

RATIOS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 20.0, 50.0)
LENGTHS = (4096, 8192, 9000, 16384, 32768)
#: Positions of the mean in its octave that are looked at.
_STEPS = 64


@dataclass(frozen=True, slots=True)
class MapCell:
    """Rows of ``length`` with mean / deviation = ``ratio``: the ``share`` of positions in an octave that overflow the buffer."""

    length: int
    ratio: float
    share: float


def _edges(value: float, bits: int) -> tuple[float, float]:
    """The bin of a value: lowest value in it, lowest value above it; by bisection over half precision's 65536 values."""
    codes = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    mine = half_bins(np.array([value], np.float32), bits)[0]
    inside = codes[half_bins(codes, bits) == mine]
    above = codes[codes > inside[-1]]
    # A value rounds to the nearest half: the bin begins halfway below its lowest one.
    below = codes[codes < inside[0]]
    low = (float(inside[0]) + float(below[-1])) / 2 if len(below) else -math.inf
    high = (float(inside[-1]) + float(above[0])) / 2 if len(above) else math.inf
    return low, high


def expected_crowd(mean: float, deviation: float, length: int, k: int = 512) -> float:
    """How many of ``length`` normal values are expected in the bin of the k-th largest."""
    if length <= k:
        return 0.0
    values = NormalDist(mean, deviation)
    bits, _ = bins_of(length)
    low, high = _edges(values.inv_cdf(1 - k / length), bits)
    mass = (values.cdf(high) if math.isfinite(high) else 1.0) - (values.cdf(low) if math.isfinite(low) else 0.0)
    return length * mass


def overflow_map(k: int = 512) -> tuple[MapCell, ...]:
    """A cell for each length and ratio."""
    cells = []
    for length in LENGTHS:
        kept = bins_of(length)[1]
        for ratio in RATIOS:
            over = 0
            for step in range(_STEPS):
                scale = 2.0 ** (step / _STEPS)
                mean, deviation = (scale, scale / ratio) if ratio else (0.0, scale)
                over += expected_crowd(mean, deviation, length, k) > kept
            cells.append(MapCell(length, ratio, over / _STEPS))
    return tuple(cells)
