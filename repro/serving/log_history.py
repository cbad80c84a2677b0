"""What a server's log says happened before we came: last stats line, first waiting line, words of an end. Bounded; reads only.

vLLM writes its times without year and zone, in the zone of its own process. They become ages by the file's own time: the last
stamped line was written when the file was last changed, so the difference of both clocks, taken to the next quarter of an hour, is
the zone. Where that does not fit, ages are None and ``zone`` says why.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...errors import TranscriptError
from ...forensics.evidence.casefile import CaseFile
from ...forensics.evidence.opening import at_once
from ...forensics.evidence.stamps import LEAP_YEAR, Stamp
from ...forensics.evidence.timeaxis import TimeAxis

__all__ = ["LogHistory", "LogTail", "log_history", "read_log_tail"]

TAIL_BYTES = 512 << 10
_QUARTER_S = 900.0
#: The file's time may be so far from its last stamped line (a traceback without stamps, a slow disk), seconds.
_ZONE_SLACK_S = 300.0
_ENDED = {
    "rpc-timeout": "a call to the workers timed out",
    "engine-dead": "EngineDeadError",
    "fatal": "EngineCore encountered a fatal error",
    "worker-died": "a worker process died",
    "engine-proc-died": "the engine process died",
}


@dataclass(frozen=True, slots=True)
class LogTail:
    """The end of a log file. ``cut``: bytes before it that were not read. ``changed``: when it was last changed, epoch seconds."""

    text: str
    cut: int
    changed: float


@dataclass(frozen=True, slots=True)
class LogHistory:
    """Ages in seconds before now; None: no such line, or its time cannot be placed (``zone``).

    ``flowing_age_s``: the last stats line with tokens generated; ``stats_*``: the last one of all. ``wait_*``: waiting
    (``shm_broadcast``) lines since tokens last flowed, ``wait_interval_s`` as the line itself says. ``ended``: its newest words.
    """

    stats_age_s: float | None = None
    stats_running: int | None = None
    stats_generation: float | None = None
    flowing_age_s: float | None = None
    wait_lines: int = 0
    wait_first_age_s: float | None = None
    wait_interval_s: float | None = None
    ended: str = ""
    version: str | None = None
    zone: str = ""


def read_log_tail(path: Path, limit: int = TAIL_BYTES) -> LogTail:
    """The last ``limit`` bytes of a regular file, whole lines. TranscriptError where it is none or cannot be read."""
    try:
        with open(path, "rb", opener=at_once) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise TranscriptError("is not a regular file", path=str(path))
            cut = max(status.st_size - limit, 0)
            stream.seek(cut)
            raw = stream.read(limit)
    except OSError as error:
        raise TranscriptError(f"cannot be read: {error.strerror or error}", path=str(path)) from None
    if cut:
        head, separator, rest = raw.partition(b"\n")
        raw = rest if separator else head
    return LogTail(raw.decode("utf-8", "replace"), cut, status.st_mtime)


class _Clock:
    """From a stamp to an age, through the zone that the file's own time tells."""

    def __init__(self, stamps: Iterable[Stamp], changed: float, now: float) -> None:
        self._now = now
        self._year = _year_of(changed)
        self.offset: float | None = None
        self.why = "no line carries a time"
        placed = [self._as_written(stamp) for stamp in stamps if stamp.kind in ("local", "yearless", "utc")]
        if placed:
            difference = max(placed) - changed
            quarters = round(difference / _QUARTER_S)
            if abs(difference - quarters * _QUARTER_S) <= _ZONE_SLACK_S and abs(quarters) <= 60:
                self.offset, self.why = quarters * _QUARTER_S, ""
            else:
                self.why = f"its last time and the file's own are {difference:.0f} s apart, which is no time zone"

    def _as_written(self, stamp: Stamp) -> float:
        return TimeAxis(year=self._year).place(stamp, "") or 0.0

    def age(self, stamp: Stamp | None) -> float | None:
        if stamp is None or self.offset is None or stamp.kind == "uptime":
            return None
        age = self._now - (self._as_written(stamp) - (0.0 if stamp.kind == "utc" else self.offset))
        return age if age > -_QUARTER_S else None


def _year_of(moment: float) -> int:
    import datetime

    try:
        return datetime.datetime.fromtimestamp(moment, datetime.UTC).year
    except (OverflowError, OSError, ValueError):
        return LEAP_YEAR


def log_history(case: CaseFile, tail: LogTail, *, now: float, source: str) -> LogHistory:
    """``case``: as read from the tail's text (and perhaps more) under the name ``source``. ``now``: epoch seconds."""
    events = [event for event in case.events if event.ref.source == source]
    stats = [line for line in case.stats if line.ref.source == source]
    stamps = [*(event.at for event in events), *(line.at for line in stats)]
    clock = _Clock([stamp for stamp in stamps if stamp is not None], tail.changed, now)
    last = max(stats, key=lambda line: line.order, default=None)
    flowing = max((line for line in stats if line.generation_rate > 0), key=lambda line: line.order, default=None)
    after = flowing.order if flowing is not None else (-1, -1)
    waits = sorted((event for event in events if event.kind == "shm-wait" and event.order > after), key=lambda event: event.order)
    ends = sorted((event for event in events if event.kind in _ENDED and event.order > after), key=lambda event: event.order)
    versions = [fact.version for fact in case.versions if fact.package == "vllm"]
    return LogHistory(
        stats_age_s=clock.age(last.at) if last is not None else None,
        stats_running=last.running if last is not None else None,
        stats_generation=last.generation_rate if last is not None else None,
        flowing_age_s=clock.age(flowing.at) if flowing is not None else None,
        wait_lines=len(waits),
        wait_first_age_s=clock.age(waits[0].at) if waits else None,
        wait_interval_s=float(waits[0].fields["seconds"][:9]) if waits else None,
        ended=f"{_ENDED[ends[-1].kind]} ({ends[-1].ref.place()})" if ends else "",
        version=versions[-1] if versions else None,
        zone=clock.why,
    )
