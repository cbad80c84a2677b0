"""One timeline from what a run wrote down and what the diagnosis placed in time: curves, marks and what could not be placed.

Two sources: lines of ``timeline.jsonl`` (``t`` seconds since the run's start, ``at`` wall time, ``kind``, fields) and the
diagnosis's own ``timeline`` (events of logs, placed by the classifier). Numbers of a line become points of a curve when their key,
or the key of the object that they stand in, is one of ``CURVES``; everything else becomes a mark in a lane. Nothing is
interpolated: a curve is drawn as steps between the looks that were taken.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..forensics.device_state import Unread
from ..forensics.records import Diagnosis
from .timeline_entries import KIND_LANES, QUIET, clipped, epoch, finite, level_of, moment_of, words_of

__all__ = ["CURVES", "LANES", "PANELS", "Curve", "Mark", "Timeline", "build_timeline"]

#: Panel -> its heading, with the unit where the heading does not say it.
PANELS: dict[str, str] = {
    "tokens": "Tokens generated",
    "rate": "Generation rate, tokens/s",
    "steps": "Decode steps done",
    "requests": "Requests",
    "utilisation": "GPU and memory utilisation, %",
    "power": "Power, W",
}
#: Key of a number in a timeline line -> (panel, name of the curve). Prometheus names are vLLM's.
CURVES: dict[str, tuple[str, str]] = {
    "generation_tokens": ("tokens", "generated"),
    "generation_tokens_total": ("tokens", "generated"),
    "vllm:generation_tokens_total": ("tokens", "generated"),
    "tokens": ("tokens", "generated"),
    "generation_rate": ("rate", "generation"),
    "tokens_per_s": ("rate", "generation"),
    "running": ("requests", "running"),
    "num_requests_running": ("requests", "running"),
    "vllm:num_requests_running": ("requests", "running"),
    "live": ("requests", "running"),
    "waiting": ("requests", "waiting"),
    "num_requests_waiting": ("requests", "waiting"),
    "vllm:num_requests_waiting": ("requests", "waiting"),
    "utilisation": ("utilisation", "GPU"),
    "gpu_utilisation": ("utilisation", "GPU"),
    "memory_utilisation": ("utilisation", "memory"),
    "power_w": ("power", "power"),
}
#: Lanes of marks, in drawing order.
LANES: dict[str, str] = {
    "log": "Log",
    "watch": "Watchdog",
    "collect": "Collectors",
    "experiment": "Experiment",
    "run": "Run",
}
#: End of a series' name in the diagnosis's timeline -> (panel, name of the curve without what stands before it).
_SERIES = (
    ("generation tokens/s", "rate", "generation"), ("running requests", "requests", "running"),
    ("waiting requests", "requests", "waiting"), ("busy %", "utilisation", "GPU"), ("memory %", "utilisation", "memory"),
    ("W", "power", "power"),
)  # fmt: skip
_GPU_LINE = re.compile(r"^GPU (\d+) %(?:, memory (\d+) %)?(?:, (\d+) W)?")
_MOST_POINTS = 1500
_MOST_CURVES = 24
_MOST_MARKS = 400
_MOST_LINES = 500_000


@dataclass(frozen=True, slots=True)
class Curve:
    """Numbers over time, sorted. ``points``: (seconds, value)."""

    panel: str
    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at ``t``, or lasted to ``until`` (seconds). ``disturbance``: of a collector, else empty."""

    t: float
    lane: str
    text: str
    until: float | None = None
    level: str = "info"
    disturbance: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """``origin``: what 0 s is, in words. ``notes``: the axis's assumptions, and what is not placed or not drawn, as sentences."""

    start: float
    end: float
    origin: str
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...]
    notes: tuple[str, ...] = ()


class _Builder:
    def __init__(self) -> None:
        self.curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self.marks: list[Mark] = []
        self.starts: list[tuple[str, float, str]] = []
        self.zero: float | None = None
        self.steps = 0
        self.unread = 0
        self.unplaced = 0
        self.refused = 0
        self.unlinked = 0
        self.utc = False

    # -- curves ------------------------------------------------------------------------------------------------------------------

    def point(self, panel: str, name: str, t: float, value: float) -> None:
        key = (panel, name)
        if key not in self.curves and len(self.curves) >= _MOST_CURVES:
            self.refused += 1
            return
        self.curves.setdefault(key, []).append((t, value))

    def numbers(self, t: float, fields: Mapping[str, Any], of: str = "", depth: int = 0) -> None:
        """Points of one line, also from objects in it (``nvml``, ``gpus``), which name themselves by device, index or rank."""
        for word in ("device", "gpu", "index", "rank"):
            if isinstance(fields.get(word), int) and not isinstance(fields.get(word), bool):
                of = f"{'rank' if word == 'rank' else 'GPU'} {fields[word]}"
                break
        for key, value in list(fields.items())[:200]:
            if not isinstance(key, str):
                continue
            number = finite(value)
            if number is not None and key in CURVES:
                panel, name = CURVES[key]
                self.point(panel, f"{name} ({of})" if of else name, t, number)
            elif depth < 2 and isinstance(value, Mapping):
                self.numbers(t, value, of, depth + 1)
            elif depth < 2 and isinstance(value, Sequence) and not isinstance(value, str | bytes):
                for item in value[:64]:
                    if isinstance(item, Mapping):
                        self.numbers(t, item, of, depth + 1)
            elif isinstance(value, str) and key in ("line", "before") and (found := _GPU_LINE.match(value)):
                for text, curve in zip(found.groups(), ("utilisation", "memory_utilisation", "power_w"), strict=True):
                    if text is not None:
                        panel, name = CURVES[curve]
                        self.point(panel, name, t, float(text))

    def series(self, name: str, points: Any) -> None:
        """A series of the diagnosis's timeline: pairs of seconds on its axis and a value."""
        found = next(((panel, curve, end) for end, panel, curve in _SERIES if name.endswith(end)), None)
        if found is None or not isinstance(points, Sequence) or isinstance(points, str):
            self.refused += 1
            return
        panel, curve, end = found
        of = name[: len(name) - len(end)].strip()
        for point in points[:20_000]:
            pair = point if isinstance(point, Sequence) and not isinstance(point, str) and len(point) == 2 else (None, None)
            at, value = epoch(pair[0]), finite(pair[1])
            if at is not None and value is not None and self.zero is not None:
                self.point(panel, f"{curve} ({of})" if of else curve, at - self.zero, value)

    # -- marks -------------------------------------------------------------------------------------------------------------------

    def line(self, line: Mapping[str, Any]) -> None:
        kind = str(line.get("kind", ""))[:60]
        t, at = finite(line.get("t")), epoch(line.get("at"))
        if t is None and self.zero is not None and at is not None:
            t = at - self.zero
        if t is None:
            self.unplaced += 1
            return
        if self.zero is None and at is not None:
            self.zero = at - t
        fields = {key: value for key, value in line.items() if key not in ("t", "at", "kind")}
        if kind in ("step", "hung"):
            self._step(t, kind, fields)
            return
        if kind != "cell":
            self.numbers(t, fields)
        if kind == "collecting":
            self.starts.append((str(fields.get("collector", "")), t, str(fields.get("disturbance", ""))))
            return
        if kind == "capture":
            self._capture(t, fields)
            return
        if kind not in QUIET:
            self.mark(Mark(t, KIND_LANES.get(kind, "run"), clipped(words_of(kind, fields)), level=level_of(kind, fields)))

    def _step(self, t: float, kind: str, fields: Mapping[str, Any]) -> None:
        live = finite(fields.get("live"))
        if live is not None:
            self.point("requests", "running", t, live)
        if fields.get("state") == "done":
            self.steps += 1
            self.point("steps", "done", t, float(self.steps))
            return
        self.point("steps", "done", t, float(self.steps))
        reasons = fields.get("reasons")
        why = "; ".join(map(str, reasons[:6])) if isinstance(reasons, Sequence) and not isinstance(reasons, str) else ""
        took = finite(fields.get("ms"))
        began = t - took / 1e3 if kind == "hung" and took is not None and 0 < took < 1e9 else None
        words = clipped(f"step {fields.get('step')} {fields.get('state', kind)}" + (f": {why}" if why else ""))
        self.mark(Mark(began if began is not None else t, "watch", words, t if began is not None else None, "bad"))

    def _capture(self, t: float, fields: Mapping[str, Any]) -> None:
        collector = str(fields.get("collector", "a collector"))
        seconds = finite(fields.get("seconds")) or 0.0
        begun = next((index for index, item in enumerate(self.starts) if item[0] == collector), None)
        start = self.starts.pop(begun)[1] if begun is not None else t - max(seconds, 0.0)
        unread = fields.get("unread")
        lost = len(unread) if isinstance(unread, Sequence) and not isinstance(unread, str) else 0
        words = f"{collector}: {seconds:.3g} s"
        if fields.get("why_not"):
            words = f"{collector}: not taken, {fields['why_not']}"
        elif lost:
            words += f", {lost} thing{'s' if lost > 1 else ''} not read"
        disturbance = str(fields.get("disturbance", ""))
        end = min(start + max(seconds, 0.0), t) if t > start else t
        level = "bad" if lost or fields.get("why_not") else "info"
        self.mark(Mark(start, "collect", clipped(words), end, level, clipped(disturbance, 40)))

    def mark(self, mark: Mark) -> None:
        self.marks.append(mark)

    def event(self, entry: Any) -> None:
        """One entry of the diagnosis's timeline."""
        if not isinstance(entry, Mapping):
            self.unplaced += 1
            return
        at = moment_of(entry)
        t = finite(entry.get("t"))
        if t is None and at is not None and self.zero is not None:
            if self.utc and isinstance(entry.get("when"), str) and not entry["when"].endswith("Z"):
                self.unlinked += 1
                return
            t = at - self.zero
        if t is None:
            self.unplaced += 1
            return
        words = next(
            (entry[key] for key in ("text", "what", "event", "kind") if isinstance(entry.get(key), str) and entry[key]), ""
        )
        place = next(
            (entry[key] for key in ("place", "ref", "where", "source") if isinstance(entry.get(key), str) and entry[key]), ""
        )
        if place and isinstance(entry.get("first"), int) and "place" not in entry:
            place += f":{entry['first']}"
        kind = str(entry.get("kind", "log"))
        if words and kind not in QUIET:
            lane = str(entry.get("lane", "")) or KIND_LANES.get(kind, "log")
            shown = clipped(words) + (f" [{clipped(place, 80)}]" if place else "")
            self.mark(Mark(t, lane if lane in LANES else "log", shown, level=level_of(kind, entry)))


def _thinned(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Sorted; beyond the limit the lowest and highest of each slice of time, so that a spike stays."""
    points = sorted(points)
    if len(points) <= _MOST_POINTS:
        return tuple(points)
    kept: list[tuple[float, float]] = []
    size = -(-len(points) // (_MOST_POINTS // 2))
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        kept += sorted({min(part, key=lambda item: item[1]), max(part, key=lambda item: item[1])})
    return tuple(kept)


def _told(diagnosis: Diagnosis) -> tuple[list[Any], dict[str, list[Any]]]:
    """(events, series) of the diagnosis's own timeline; empty where it has none, or one of another shape."""
    told = (diagnosis.model_extra or {}).get("timeline")
    events: Any = told
    series: Any = {}
    if isinstance(told, Mapping):
        events, series = told.get("events"), told.get("series")
    if not isinstance(events, Sequence) or isinstance(events, str):
        events = []
    if not isinstance(series, Mapping):
        series = {}
    kept = {str(key): list(value[:20_000]) for key, value in list(series.items())[:64] if isinstance(value, list | tuple)}
    return list(events[:20_000]), kept


def _assumptions(diagnosis: Diagnosis) -> list[str]:
    """What the classifier assumed to put the sources on one axis."""
    told = (diagnosis.model_extra or {}).get("timeline")
    axis = told.get("axis") if isinstance(told, Mapping) else None
    return [clipped(note) for note in axis[:12] if isinstance(note, str)] if isinstance(axis, list | tuple) else []


def build_timeline(lines: Iterable[Mapping[str, Any] | Unread], diagnosis: Diagnosis) -> Timeline | None:
    """All that can be placed; None if nothing can. ``lines``: as ``repro.runread.read_timeline`` yields them."""
    builder = _Builder()
    for number, line in enumerate(lines):
        if number >= _MOST_LINES:
            builder.unread += 1
            break
        if isinstance(line, Unread):
            builder.unread += 1
        else:
            builder.line(line)
    ours = bool(builder.marks or builder.curves or builder.starts)
    builder.utc = ours and builder.zero is not None
    events, series = _told(diagnosis)
    if builder.zero is None:
        first = [at for entry in events if (at := moment_of(entry)) is not None]
        first += [
            at
            for points in series.values()
            for point in points[:1]
            if isinstance(point, Sequence) and (at := epoch(point[0] if point else None)) is not None
        ]
        builder.zero = min(first, default=None)
    for entry in events:
        builder.event(entry)
    linked = not builder.utc or any(isinstance(e, Mapping) and str(e.get("when", "")).endswith("Z") for e in events)
    for name, points in series.items() if linked else ():
        builder.series(name, points)
    for collector, t, disturbance in builder.starts:
        builder.mark(Mark(t, "collect", clipped(f"{collector}: begun, no end was written"), None, "bad", clipped(disturbance, 40)))
    marks = sorted(builder.marks, key=lambda mark: (mark.t, mark.lane, mark.text))
    notes = _assumptions(diagnosis)
    if len(marks) > _MOST_MARKS:
        worst = sorted(marks, key=lambda mark: (mark.level == "info", mark.t))[:_MOST_MARKS]
        notes.append(
            f"{len(marks) - _MOST_MARKS} of {len(marks)} events are not drawn; they are in timeline.jsonl and diagnosis.json"
        )
        marks = sorted(worst, key=lambda mark: (mark.t, mark.lane, mark.text))
    curves = tuple(
        Curve(panel, name, _thinned(builder.curves[panel, name]))
        for panel in PANELS
        for key_panel, name in sorted(builder.curves)
        if key_panel == panel
    )
    if builder.unread:
        notes.append(f"{builder.unread} lines of timeline.jsonl could not be read")
    if builder.unplaced:
        notes.append(f"{builder.unplaced} events carry no time that could be placed")
    if builder.unlinked:
        notes.append(f"{builder.unlinked} events of logs are in a local clock that nothing links to this axis")
    if builder.refused:
        notes.append(
            f"{builder.refused} points or series are not drawn: more than {_MOST_CURVES} curves, or of a kind not known here"
        )
    times = [t for curve in curves for t, _ in curve.points]
    times += [mark.t for mark in marks] + [mark.until for mark in marks if mark.until is not None]
    if not times:
        return None
    start, end = min([*times, 0.0] if ours else times), max(times)
    origin = _origin(builder, ours, events)
    return Timeline(start, end if end > start + 1e-6 else start + 1.0, origin, curves, tuple(marks), tuple(notes))


def _origin(builder: _Builder, ours: bool, events: list[Any]) -> str:
    """What 0 s is, in words; a date only where the sources give one, and UTC only where they say so."""
    if not ours:
        first = next((e for e in events if isinstance(e, Mapping) and moment_of(e) == builder.zero), None)
        when = str(first.get("when", ""))[:40] if first is not None else ""
        clock = "" if when.endswith("Z") else " in the sources' own clock"
        return f"seconds since the first reading, {when}{clock}" if when and "?" not in when else "seconds since the first reading"
    if builder.zero is None:
        return "seconds since the run's start"
    try:
        moment = dt.datetime.fromtimestamp(builder.zero, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return "seconds since the run's start"
    return f"seconds since the run's start, {moment:%Y-%m-%d %H:%M:%S} UTC"
