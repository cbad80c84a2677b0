"""One time axis for all sources, and the assumptions that it took.

The axis counts seconds since 1970 in UTC where any source tells UTC, else in the engine's own clock. Logs write local time
without a zone and often without a year: the year comes from the nearest stamp that has one; the offset of the local clock comes
from lines that carry both clocks (a Kubernetes or Docker prefix in UTC around the engine's own time). What cannot be linked is
placed as it is written, and ``notes`` says so; ``comparable`` tells whether two kinds of stamps may be compared at all.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .stamps import LEAP_YEAR, Stamp

__all__ = ["TimeAxis", "build_axis"]

_QUARTER = 900.0
_LINK_SLACK = 120.0


def _with_year(seconds: float, year: int) -> float:
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC).replace(tzinfo=None)
    try:
        moved = moment.replace(year=year)
    except ValueError:
        moved = moment.replace(year=year, day=28)
    return (moved - dt.datetime(1970, 1, 1)).total_seconds()


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """``offsets``: source to local-minus-UTC seconds, measured; ``default_offset``: for sources without a measurement of their
    own, None if no source has one. ``year``: for stamps without one, None if unknown."""

    offsets: dict[str, float] = field(default_factory=dict)
    default_offset: float | None = None
    year: int | None = None
    notes: tuple[str, ...] = ()

    def place(self, stamp: Stamp | None, source: str) -> float | None:
        """Seconds on the axis, None for seconds since boot (not placeable without the boot time)."""
        if stamp is None or stamp.kind == "uptime":
            return None
        if stamp.kind == "utc":
            return stamp.seconds
        seconds = _with_year(stamp.seconds, self.year) if stamp.kind == "yearless" and self.year is not None else stamp.seconds
        offset = self.offsets.get(source, self.default_offset)
        return seconds - offset if offset is not None else seconds

    def comparable(self, first: Stamp | None, second: Stamp | None) -> bool:
        """May these two be compared? Uptime only with uptime; a local clock with UTC only where an offset is known."""
        if first is None or second is None:
            return False
        kinds = {first.kind, second.kind}
        if "uptime" in kinds:
            return False
        if "utc" in kinds and len(kinds) > 1 and self.default_offset is None:
            return False
        return not ("yearless" in kinds and kinds & {"local", "utc"} and self.year is None)

    def iso(self, seconds: float) -> str:
        """Text of a placed time."""
        moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
        text = moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}"
        if self.year is None and moment.year == LEAP_YEAR:
            text = "????" + text[4:]
        return text + ("Z" if self.default_offset is not None else "")


def build_axis(stamps: Iterable[tuple[str, Stamp]], pairs: Iterable[tuple[str, Stamp, Stamp]]) -> TimeAxis:
    """``stamps``: (source, stamp) of everything seen. ``pairs``: (source, carrier's UTC stamp, inner local stamp) of one line."""
    notes: list[str] = []
    years: Counter[int] = Counter()
    kinds: dict[str, set[str]] = {}
    newest = 0.0
    for source, stamp in stamps:
        kinds.setdefault(stamp.kind, set()).add(source)
        if stamp.kind in ("utc", "local"):
            years[dt.datetime.fromtimestamp(stamp.seconds, dt.UTC).year] += 1
            newest = max(newest, stamp.seconds)
    year = years.most_common(1)[0][0] if years else None
    if "yearless" in kinds:
        if year is None:
            notes.append("no source writes a year: times are in an unknown year")
        else:
            notes.append(f"year {year} taken from the sources that write one for those that do not")
            if len(years) > 1:
                notes.append(
                    f"the sources span the years {min(years)} to {max(years)}: a time without a year may be off by one year"
                )
    offsets: dict[str, float] = {}
    votes: dict[str, Counter[float]] = {}
    for source, outer, inner in pairs:
        inner_seconds = _with_year(inner.seconds, dt.datetime.fromtimestamp(outer.seconds, dt.UTC).year)
        if inner.kind == "local":
            inner_seconds = inner.seconds
        raw = inner_seconds - outer.seconds
        rounded = round(raw / _QUARTER) * _QUARTER
        if abs(raw - rounded) <= _LINK_SLACK and abs(rounded) <= 14 * 3600:
            votes.setdefault(source, Counter())[rounded] += 1
    for source, counter in votes.items():
        offset, count = counter.most_common(1)[0]
        offsets[source] = offset
        notes.append(f"{source}: its local clock is UTC{offset / 3600:+g} h (from {count} lines that carry both clocks)")
    default: float | None = None
    if offsets:
        default = Counter(offsets.values()).most_common(1)[0][0]
        others = (kinds.get("local", set()) | kinds.get("yearless", set())) - set(offsets)
        if others:
            notes.append(f"the same offset is assumed for {len(others)} other source(s) that write local time")
    elif "utc" in kinds and ("local" in kinds or "yearless" in kinds):
        notes.append("some sources write UTC, others local time, and no line links the two: they are not compared with each other")
    if len(set(offsets.values())) > 1:
        notes.append("the sources' local clocks differ: " + ", ".join(f"{s} {o / 3600:+g} h" for s, o in sorted(offsets.items())))
    if "uptime" in kinds:
        notes.append("kernel log lines in seconds since boot cannot be placed without the boot time (dmesg -T writes it)")
    return TimeAxis(offsets, default, year, tuple(notes))
