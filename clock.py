"""Time as a parameter: nothing else here calls ``time.monotonic`` or ``time.sleep``.

``Clock`` is what deadlines, watchdogs and campaigns take. ``SYSTEM`` is the real one; ``FakeClock`` moves only when told or
when something sleeps on it, so that rules of 60 and 300 seconds are tested in microseconds.
"""

from __future__ import annotations

import datetime as _dt
import time as _time
from typing import Protocol

__all__ = ["SYSTEM", "Clock", "Deadline", "FakeClock", "SystemClock", "utc_stamp"]


class Clock(Protocol):
    """Seconds since an arbitrary start, seconds since the epoch, and waiting."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return _time.monotonic()

    def wall(self) -> float:
        return _time.time()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            _time.sleep(seconds)


class FakeClock:
    """A clock that moves by ``advance`` and by ``sleep``; wall time follows, and ``jump`` moves wall time alone."""

    def __init__(self, start: float = 0.0, wall: float = 1_800_000_000.0) -> None:
        self._now = start
        self._wall = wall

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall

    def sleep(self, seconds: float) -> None:
        self.advance(max(seconds, 0.0))

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._wall += seconds

    def jump(self, seconds: float) -> None:
        self._wall += seconds


SYSTEM = SystemClock()


class Deadline:
    """A moment on a clock, and how far away it still is (seconds, never negative)."""

    def __init__(self, seconds: float, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._end = clock.monotonic() + seconds
        self.seconds = seconds

    def remaining(self) -> float:
        return max(self._end - self._clock.monotonic(), 0.0)

    @property
    def expired(self) -> bool:
        return self._clock.monotonic() >= self._end


def utc_stamp(clock: Clock = SYSTEM) -> str:
    """Wall time as ISO 8601 in UTC with milliseconds, e.g. ``2026-11-29T14:05:00.123Z``."""
    moment = _dt.datetime.fromtimestamp(clock.wall(), _dt.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
