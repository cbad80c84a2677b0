"""Per-thread tables of one geometry (resident CTAs, threads a CTA, shared memory), which launches of a machine share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_KEPT_TABLES", "TableKey", "Tables"]

Index = npt.NDArray[np.intp]
Words = npt.NDArray[np.uint32]
Dim3 = tuple[int, int, int]
TableKey = tuple[tuple[int, ...], int, int, Dim3, Dim3]
MAX_KEPT_TABLES = 16


class _Special(dict[str, Words]):
    """Special registers by name, each an array over all threads, made when first read."""

    def __init__(self, ctas: list[int], stride: int, block: Dim3, grid: Dim3) -> None:
        super().__init__()
        rows = len(ctas)
        width, height, _ = (np.uint32(n) for n in block)
        across, down, _ = (np.uint32(n) for n in grid)
        one = np.uint32(1)

        def thread() -> Words:
            return np.tile(np.arange(stride, dtype=np.uint32), rows)

        def cta() -> Words:
            return np.array(ctas, np.uint32).repeat(stride)

        def lane() -> Words:
            return thread() & np.uint32(31)

        self._makers: dict[str, Callable[[], Any]] = {
            "SR_LANEID": lane,
            "SR_LTMASK": lambda: (one << lane()) - one,
            "SR_TID.X": lambda: thread() % width,
            "SR_TID.Y": lambda: thread() // width % height,
            "SR_TID.Z": lambda: thread() // (width * height),
            "SR_CTAID.X": lambda: cta() % across,
            "SR_CTAID.Y": lambda: cta() // across % down,
            "SR_CTAID.Z": lambda: cta() // (across * down),
        }

    def __missing__(self, name: str) -> Words:
        made: Words = self._makers[name]()
        self[name] = made
        return made


class Tables:
    """Never written, but for the three scratch arrays, which every user leaves as it found them (``place`` may hold anything)."""

    def __init__(self, ctas: list[int], stride: int, shared_words: int, block: Dim3, grid: Dim3) -> None:
        rows = len(ctas)
        size = rows * stride
        self.iota: Index = np.arange(size, dtype=np.intp)
        self.warp_of: Index = self.iota >> 5
        self.special = _Special(ctas, stride, block, grid)
        #: Where a thread's CTA starts in the arena of shared memory: in words, halves of words, bytes.
        self.shared_base: Index = (np.arange(rows, dtype=np.intp) * shared_words).repeat(stride)
        self.shared_base2: Index = self.shared_base * 2
        self.shared_base1: Index = self.shared_base * 4
        self.bits = np.zeros(size, np.bool_)
        self.place: Index = np.zeros(size, np.intp)
        self.sums: Words = np.zeros(size, np.uint32)
