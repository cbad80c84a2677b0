"""Time as the sources write it, before it is put on one axis.

``Stamp`` keeps what was written: with or without a year, a zone, or only seconds since boot. ``timeaxis`` places stamps of all
sources on one axis and says which assumptions that took.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["LEAP_YEAR", "Stamp", "find_stamp", "parse_iso"]

#: Times without a year are kept in this (leap) year until a neighbour tells the year.
LEAP_YEAR = 2000

_MONTHS = {
    name: i + 1 for i, name in enumerate(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"])
}
_EPOCH = dt.datetime(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class Stamp:
    """``kind``: utc (a zone was written), local (a year but no zone), yearless (neither) or uptime (seconds since boot).

    ``seconds``: since 1970 as if the written clock were UTC; for utc really so; for yearless in ``LEAP_YEAR``.
    """

    kind: Literal["utc", "local", "yearless", "uptime"]
    seconds: float


def _seconds(year: int, month: int, day: int, hour: int, minute: int, second: int, fraction: str | None) -> float | None:
    try:
        moment = dt.datetime(year, month, day, hour, minute, min(second, 59))
    except ValueError:
        return None
    return (moment - _EPOCH).total_seconds() + (float("0." + fraction[:9]) if fraction else 0.0)


_ISO = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\s?(Z\b|[+-]\d\d:?\d\d(?!\d)|UTC\b)?")
_GLOG = re.compile(r"\[[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_VLLM = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_SYSLOG = re.compile(r"(?:^|\s)(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
_CTIME = re.compile(
    r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? +(?:(\d{1,2}) +)?(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(?:(\d{1,2}) )?"
    r"(?:(\d{4}) )?(\d\d):(\d\d):(\d\d)(?: [AP]M)?(?: ([A-Z]{2,5}))?(?: (\d{4}))?"
)
_UPTIME = re.compile(r"^\s*(?:<\d+>)?\[ *(\d{1,9}\.\d{1,9})\]")
_HEAD = 240


def parse_iso(text: str) -> Stamp | None:
    """``2026-11-28T09:12:41.5Z``, ``2026/11/28 09:12:40.101``, ``2026-11-28 09:12:41,123 +0100`` …"""
    match = _ISO.search(text)
    return _from_iso(match) if match else None


def _from_iso(match: re.Match[str]) -> Stamp | None:
    year, month, day, hour, minute, second = (int(match.group(i)) for i in range(1, 7))
    seconds = _seconds(year, month, day, hour, minute, second, match.group(7))
    if seconds is None:
        return None
    zone = match.group(8)
    if zone is None:
        return Stamp("local", seconds)
    if zone in ("Z", "UTC"):
        return Stamp("utc", seconds)
    digits = zone[1:].replace(":", "")
    offset = int(digits[:2]) * 3600 + int(digits[2:]) * 60
    return Stamp("utc", seconds - offset if zone[0] == "+" else seconds + offset)


def find_stamp(line: str) -> Stamp | None:
    """The first time written in a line, whichever of the known ways it is written in; None if there is none."""
    head = line[:_HEAD]
    match = _VLLM.search(head)
    if match:
        month, day, hour, minute, second = (int(match.group(i)) for i in range(1, 6))
        seconds = _seconds(LEAP_YEAR, month, day, hour, minute, second, match.group(6))
        return Stamp("yearless", seconds) if seconds is not None else None
    match = _ISO.search(head)
    if match:
        return _from_iso(match)
    match = _UPTIME.match(head)
    if match:
        return Stamp("uptime", float(match.group(1)))
    match = _GLOG.search(head)
    if match:
        month, day, hour, minute, second = (int(match.group(i)) for i in range(1, 6))
        seconds = _seconds(LEAP_YEAR, month, day, hour, minute, second, match.group(6))
        return Stamp("yearless", seconds) if seconds is not None else None
    match = _CTIME.search(head)
    if match:
        written_year = match.group(9) or match.group(4)
        day_text = match.group(1) or match.group(3)
        if day_text:
            seconds = _seconds(
                int(written_year) if written_year else LEAP_YEAR, _MONTHS[match.group(2)], int(day_text),
                int(match.group(5)), int(match.group(6)), int(match.group(7)), None,
            )  # fmt: skip
            if seconds is not None:
                if not written_year:
                    return Stamp("yearless", seconds)
                return Stamp("utc" if match.group(8) == "UTC" else "local", seconds)
    match = _SYSLOG.search(head)
    if match:
        seconds = _seconds(
            LEAP_YEAR, _MONTHS[match.group(1)], int(match.group(2)),
            int(match.group(3)), int(match.group(4)), int(match.group(5)), match.group(6),
        )  # fmt: skip
        return Stamp("yearless", seconds) if seconds is not None else None
    return None
