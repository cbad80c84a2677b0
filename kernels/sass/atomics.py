"""Atomic operations of many threads at once: they act one after the other, in ascending order of their position."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Atomics"]

Words = npt.NDArray[np.uint32]
_MASK = 0xFFFFFFFF


class Atomics:
    """Read-modify-write on an arena of words. ``writes`` counts what changed memory: a failed compare-and-swap is a read."""

    writes: int

    def atomic_one(self, arena: Words, place: int, operation: str, value: int, other: int = 0) -> int:
        old = arena.item(place)
        new = _apply(operation, old, value, other)
        if new != old:
            arena[place] = new
            self.writes += 1
        return old

    def atomic(
        self, arena: Words, place: Any, operation: str, value: Any, other: Any = 0, *, guard: Any, n: int, wanted: bool
    ) -> Any:
        """Threads act in ascending order. The old value each saw, if ``wanted`` (0 where ``guard`` is false)."""
        chosen = None
        if guard is not None:
            if guard.__class__ is bool:
                if not guard:
                    return np.zeros(n, np.uint32)
            else:
                chosen = guard.nonzero()[0]
                if len(chosen) == 0:
                    return np.zeros(n, np.uint32)
                place = place[chosen] if place.__class__ is np.ndarray else place
                value = value[chosen] if value.__class__ is np.ndarray else value
                other = other[chosen] if other.__class__ is np.ndarray else other
        count = n if chosen is None else len(chosen)
        if operation == "ADD":
            old = self._atomic_add(arena, place, value, count, wanted)
        else:
            old = self._atomic_each(arena, place, operation, value, other, count)
        if chosen is None or not wanted:
            return old
        result = np.zeros(n, np.uint32)
        result[chosen] = old
        return result

    def _atomic_add(self, arena: Words, place: Any, value: Any, n: int, wanted: bool) -> Any:
        self.writes += 1
        if place.__class__ is not np.ndarray:
            total = int(value.sum(dtype=np.uint64)) if value.__class__ is np.ndarray else value * n
            old = arena.item(place)
            arena[place] = (old + total) & _MASK
            if not wanted:
                return None
            if value.__class__ is np.ndarray:
                return value.cumsum(dtype=np.uint32) - value + np.uint32(old)
            return np.arange(n, dtype=np.uint32) * np.uint32(value) + np.uint32(old)
        if not wanted:
            np.add.at(arena, place, value if value.__class__ is np.ndarray else np.uint32(value))
            return None
        if value.__class__ is not np.ndarray:
            value = np.full(n, value, np.uint32)
        first = place[0]
        if n == 1 or (place[-1] == first and (place == first).all()):
            sums = value.cumsum(dtype=np.uint32)
            old = sums - value + arena[first]
            arena[first] += sums[-1]
            return old
        low = place.min()
        span = place - low
        order = span.astype(np.uint16).argsort(kind="stable") if span.max() < 65536 else span.argsort(kind="stable")
        sorted_place, sorted_value = place[order], value[order]
        sums = sorted_value.cumsum(dtype=np.uint32)
        before = sums - sorted_value
        starts = np.flatnonzero(np.concatenate(([True], sorted_place[1:] != sorted_place[:-1])))
        lengths = np.diff(starts, append=n)
        result = np.empty(n, np.uint32)
        result[order] = arena[sorted_place] + before - np.repeat(before[starts], lengths)
        arena[sorted_place[starts]] += sums[starts + lengths - 1] - before[starts]
        return result

    def _atomic_each(self, arena: Words, place: Any, operation: str, value: Any, other: Any, n: int) -> Words:
        old = np.empty(n, np.uint32)
        for k in range(n):
            where, new, third = (int(x[k]) if x.__class__ is np.ndarray else int(x) for x in (place, value, other))
            old[k] = self.atomic_one(arena, where, operation, new, third)
        return old


def _signed(value: int) -> int:
    return value - (value >> 31 << 32)


def _apply(operation: str, old: int, value: int, other: int) -> int:
    """The new value of one atomic. CAS: ``value`` is the comparand and ``other`` the replacement."""
    if operation == "ADD":
        return (old + value) & _MASK
    if operation == "EXCH":
        return value
    if operation == "CAS":
        return other if old == value else old
    if operation == "AND":
        return old & value
    if operation == "OR":
        return old | value
    if operation == "XOR":
        return old ^ value
    if operation == "MIN":
        return min(old, value)
    if operation == "MAX":
        return max(old, value)
    if operation == "MINS":
        return old if _signed(old) <= _signed(value) else value
    return old if _signed(old) >= _signed(value) else value
