"""When nothing can ever change: the proof of a deadlock, and the weaker one that a run repeats itself."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from .schedule import Schedule
from .state import ThreadVector

__all__ = ["Fixpoint", "Recurrence"]


class Fixpoint:
    """Looks at the machine between two rounds of polls.

    When nobody is ready and no wait can end, the only threads that can act are those that poll. Each then gets one try. If all
    of them come back to the same PC with the same registers and predicates, everybody who waits waits where he did, whoever was
    let go in between is in his old state too, and nobody wrote a word, left or entered, then the complete state of the machine is
    what it was. What a thread does next depends on its own state and on memory alone, and nobody else can act, so no order of
    execution leads out: a deadlock under every scheduler.
    """

    def __init__(self) -> None:
        self._mark: tuple[int, int] | None = None
        self._picture: _Picture | None = None
        self._quiet = 0

    def settled(self, schedule: Schedule, vector: ThreadVector) -> str:
        """Called when nobody is ready and no wait can end: why nothing can ever change, "" if that is not shown yet."""
        if not schedule.parked:
            return "every resident thread waits at a barrier that needs threads which cannot come"
        freed = np.flatnonzero(schedule.freed)
        schedule.freed[:] = False
        mark = (vector.writes, schedule.epoch)
        if mark != self._mark:
            self._mark, self._picture, self._quiet = mark, None, 0
            return ""
        # A wait that counts its polls is quiet for very long: look at two neighbouring rounds ever more rarely.
        self._quiet += 1
        before, self._picture = self._picture, None
        if before is None:
            if self._quiet & (self._quiet - 1) == 0:
                self._picture = _Picture(schedule, vector, freed)
            return ""
        if not before.covers(schedule, freed) or not before.same(vector):
            return ""
        return (
            "every polling thread came back to the same registers without anybody writing, leaving or entering; "
            "all others wait at barriers that need them"
        )


class _Picture:
    """Who polls and who waits, where, and the registers of all that could act: pollers, and those freed in the round before."""

    def __init__(self, schedule: Schedule, vector: ThreadVector, freed: npt.NDArray[np.intp]) -> None:
        self.places = schedule.groups()
        actors = [positions for _, kind, positions in self.places if kind == "parked"]
        self.actors = np.unique(np.concatenate([*actors, freed]))
        self.values = self._values(vector)

    def _values(self, vector: ThreadVector) -> list[Any]:
        state = [*vector.regs, *(vector.bars[number] for number in sorted(vector.bars))]
        return [value[self.actors] if value.__class__ is np.ndarray else value for value in state]

    def covers(self, schedule: Schedule, freed: npt.NDArray[np.intp]) -> bool:
        """Whether everybody stands where he stood, and nobody acted whose registers were not looked at."""
        now = schedule.groups()
        return (
            len(now) == len(self.places)
            and all(a[:2] == b[:2] and np.array_equal(a[2], b[2]) for a, b in zip(now, self.places, strict=True))
            and bool(np.isin(freed, self.actors).all())
        )

    def same(self, vector: ThreadVector) -> bool:
        values = self._values(vector)
        return len(values) == len(self.values) and all(
            np.array_equal(x, y) if x.__class__ is np.ndarray or y.__class__ is np.ndarray else x == y
            for x, y in zip(values, self.values, strict=True)
        )


class Recurrence:
    """Has the complete state been here before? Brent's method over fingerprints, begun once a run is suspiciously long.

    Asked only when the schedule's own counters are where they were at every other time, so that an equal state has an equal future.
    """

    def __init__(self, budget: int, already: int) -> None:
        self._after = already + min(65536, max(budget // 64, 8192))
        self._kept: bytes | None = None
        self._kept_at = 0
        self._next = 0

    def seen(self, schedule: Schedule, vector: ThreadVector, executed: int) -> str:
        """A sentence once the state recurs, "" otherwise."""
        if executed < self._after or schedule.chance is not None:
            return ""
        print_ = self._fingerprint(schedule, vector)
        if print_ == self._kept:
            return f"the complete state of the machine recurs after {executed - self._kept_at} blocks: this run never ends"
        if executed >= self._next:
            self._kept, self._kept_at = print_, executed
            self._next = executed + (executed - self._after) + 1
        return ""

    def _fingerprint(self, schedule: Schedule, vector: ThreadVector) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for pc, kind, positions in schedule.groups():
            digest.update(f"{pc} {kind} ".encode())
            digest.update(positions.tobytes())
        for value in (*vector.regs, *vector.bars.values(), *vector.local.values(), vector.H, vector.G):
            digest.update(value.data if value.__class__ is np.ndarray else repr(value).encode())
        return digest.digest()
