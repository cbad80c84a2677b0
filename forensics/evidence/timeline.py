"""What happened when, on one axis: events for reading, series for drawing. Long series are thinned to extremes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .refs import Ref

if TYPE_CHECKING:
    from ..rules.view import View

__all__ = ["Timeline", "TimelineEvent", "timeline"]

_MAX_EVENTS = 1_000
_MAX_POINTS = 600
#: Event kinds worth a mark, and their words.
_MARKS = {
    "shm-wait": "engine waits for a worker", "rpc-timeout": "RPC timed out", "fatal": "engine fatal error",
    "engine-dead": "engine dead",
    "worker-died": "worker died", "engine-proc-died": "engine process died", "serving": "start-up complete",
    "load-start": "weights: begin",
    "load-done": "weights: done", "compile-start": "compile: begin", "compile-done": "compile: done",
    "capture-done": "graphs captured",
    "init-done": "engine initialised", "jit": "compiled during inference", "build-failed": "a build failed",
    "abort": "client abort",
    "cuda-error": "CUDA error", "coredump-exception": "GPU exception", "launch-refused": "launch refused",
    "nccl-warn": "NCCL warning",
    "shutdown": "shutdown", "kv-transfer": "KV transfer", "deepep-timeout": "DeepEP timeout",
    "grid-sync-timeout": "grid sync timeout",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """``seconds``: on the axis, None if it cannot be placed. ``when``: as text."""

    seconds: float | None
    when: str
    kind: str
    text: str
    ref: Ref

    def row(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "when": self.when,
            "kind": self.kind,
            "text": self.text,
            "source": self.ref.source,
            "first": self.ref.first,
        }


@dataclass(frozen=True, slots=True)
class Timeline:
    """``series``: name to points (seconds, value). ``notes``: the axis's assumptions."""

    events: tuple[TimelineEvent, ...]
    series: dict[str, list[tuple[float, float]]]
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        return {
            "axis": list(self.notes),
            "events": [e.row() for e in self.events],
            "series": {k: [list(p) for p in v] for k, v in self.series.items()},
        }


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= _MAX_POINTS:
        return list(points)
    step = len(points) / (_MAX_POINTS / 2)
    kept: list[tuple[float, float]] = []
    at = 0.0
    while at < len(points):
        part = points[int(at) : max(int(at + step), int(at) + 1)]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        kept.extend(sorted({low, high}))
        at += step
    return kept


def timeline(view: View) -> Timeline:
    case = view.case
    events: list[TimelineEvent] = []

    def add(item: Any, kind: str, text: str) -> None:
        seconds = view.time(item)
        events.append(TimelineEvent(seconds, case.axis.iso(seconds) if seconds is not None else "", kind, text, item.ref))

    repeated: dict[str, int] = {}
    for event in case.events:
        words = _MARKS.get(event.kind)
        if words is None:
            continue
        repeated[event.kind] = repeated.get(event.kind, 0) + 1
        if repeated[event.kind] <= 200:
            add(event, event.kind, words)
    for entry in case.kernel[:200]:
        add(
            entry,
            entry.kind,
            f"Xid {entry.number}" if entry.kind in ("xid", "sxid") else f"{entry.kind}: {entry.name or entry.detail[:80]}",
        )
    for wait in case.watchdog[:200]:
        if wait.waited_ms:
            add(wait, "nccl-watchdog", f"NCCL watchdog: rank {wait.rank}, {wait.operation} {wait.sequence}")
    for dump in case.dumps[:50]:
        if dump.tokens:
            add(dump, "scheduler-dump", f"scheduler dump: {len(dump.tokens)} requests, {dump.total} tokens")
    series: dict[str, list[tuple[float, float]]] = {}
    for line in case.stats:
        seconds = view.time(line)
        if seconds is not None:
            series.setdefault("generation tokens/s", []).append((seconds, line.generation_rate))
            series.setdefault("running requests", []).append((seconds, float(line.running)))
            series.setdefault("waiting requests", []).append((seconds, float(line.waiting)))
    for sample in case.gpus:
        seconds = view.time(sample)
        if seconds is None:
            continue
        name = f"GPU {sample.index if sample.index is not None else ''}".strip()
        for words, value in (("busy %", sample.util), ("memory %", sample.memory_util), ("W", sample.power)):
            if value is not None:
                series.setdefault(f"{name} {words}", []).append((seconds, value))
    placed = sorted((e for e in events if e.seconds is not None), key=lambda e: e.seconds or 0.0)
    loose = [e for e in events if e.seconds is None]
    kept = [*placed, *loose]
    if len(kept) > _MAX_EVENTS:
        kept = [*kept[: _MAX_EVENTS // 2], *kept[-_MAX_EVENTS // 2 :]]
    return Timeline(tuple(kept), {name: _thin(sorted(points)) for name, points in series.items()}, case.axis.notes)
