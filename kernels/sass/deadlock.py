"""When nothing can ever change: the proof of a deadlock, and the weaker one that a run repeats itself."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from .schedule import Schedule
from .state import ThreadVector

__all__ = ["Fixpoint", "Recurrence"]


class Fixpoint:
    """Looks at the machine between two rounds of polls.

    When nobody is ready and no wait can end, the only threads that can act are those that poll. Each then gets one try. If all
    of them come back to the same PC with the same registers and predicates, and nobody wrote a word, left or entered in
    between, then the complete state of the machine is what it was. What a thread does next depends on its own state and on
    memory alone, and nobody else can act, so no order of execution leads out: a deadlock under every scheduler.
    """

    def __init__(self) -> None:
        self._mark: tuple[int, int] | None = None
        self._picture: list[Any] | None = None
        self._quiet = 0

    def settled(self, schedule: Schedule, vector: ThreadVector) -> str:
        """Called when nobody is ready and no wait can end: why nothing can ever change, "" if that is not shown yet."""
        if not schedule.parked:
            return "every resident thread waits at a barrier that needs threads which cannot come"
        mark = (vector.writes, schedule.epoch)
        if mark != self._mark:
            self._mark, self._picture, self._quiet = mark, None, 0
            return ""
        # A wait that counts its polls is quiet for very long: look at two neighbouring rounds ever more rarely.
        self._quiet += 1
        if self._picture is None:
            if self._quiet & (self._quiet - 1) == 0:
                self._picture = self._take(schedule, vector)
            return ""
        before, self._picture = self._picture, None
        if not _equal(self._take(schedule, vector), before):
            return ""
        return (
            "every polling thread came back to the same registers without anybody writing, leaving or entering; "
            "all others wait at barriers that need them"
        )

    def _take(self, schedule: Schedule, vector: ThreadVector) -> list[Any]:
        picture: list[Any] = []
        for pc in sorted(schedule.parked):
            where, n = schedule.merge(schedule.parked[pc])
            positions = vector.iota if where is None else vector.iota[where]
            picture += [pc, n, positions]
            picture += [value[positions] if value.__class__ is np.ndarray else value for value in vector.regs]
        return picture


def _equal(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        np.array_equal(x, y) if x.__class__ is np.ndarray or y.__class__ is np.ndarray else x == y
        for x, y in zip(a, b, strict=True)
    )


class Recurrence:
    """Has the complete state been here before? Brent's method over fingerprints, begun once a run is suspiciously long."""

    def __init__(self, budget: int) -> None:
        self._after = min(65536, max(budget // 64, 8192))
        self._kept: bytes | None = None
        self._kept_at = 0
        self._next = 0

    def seen(self, schedule: Schedule, vector: ThreadVector, executed: int) -> str:
        """Called now and then while the machine runs; a sentence once the state recurs."""
        if executed < self._after or schedule.chance is not None:
            return ""
        print_ = self._fingerprint(schedule, vector)
        if print_ == self._kept:
            return f"the complete state of the machine recurs after {executed - self._kept_at} blocks: this run never ends"
        if executed >= self._next:
            self._kept, self._kept_at = print_, executed
            self._next = 2 * executed
        return ""

    def _fingerprint(self, schedule: Schedule, vector: ThreadVector) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for pc, kind, positions in schedule.groups():
            digest.update(f"{pc} {kind} ".encode())
            digest.update(positions.tobytes())
        for value in (*vector.regs, *vector.bars.values(), *vector.local.values(), vector.H, vector.G):
            digest.update(value.data if value.__class__ is np.ndarray else repr(value).encode())
        return digest.digest()
