"""Everything that was read, in one place: what the rules look at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..records import UnreadItem
from .agent_facts import AgentReading, AgentRing
from .facts import (
    DeviceFacts,
    FlightRank,
    GpuSample,
    KernelEvent,
    LogEvent,
    MetricSample,
    ProcSample,
    RasQuery,
    ReadFailure,
    SchedulerDump,
    StatsLine,
    ThreadSample,
    VersionFact,
    WatchdogTimeout,
)
from .refs import Ref
from .stamps import Stamp
from .timeaxis import TimeAxis

__all__ = ["CaseFile", "InputPart"]


@dataclass(frozen=True, slots=True)
class InputPart:
    """One part of the input and what became of it. ``kinds``: what was found in it; ``unrecognised``: lines nobody understood.

    ``status``: read, partly, unread. ``note``: why not, or what was left out.
    """

    path: str
    heading: str
    status: str
    kinds: tuple[str, ...] = ()
    lines: int = 0
    unrecognised: int = 0
    first_unrecognised: int | None = None
    note: str = ""
    size: int | None = None
    sha256: str | None = None


@dataclass(slots=True)
class CaseFile:
    """Lists grow while reading and are only read afterwards."""

    events: list[LogEvent] = field(default_factory=list)
    stats: list[StatsLine] = field(default_factory=list)
    threads: list[ThreadSample] = field(default_factory=list)
    gpus: list[GpuSample] = field(default_factory=list)
    kernel: list[KernelEvent] = field(default_factory=list)
    kernel_log_seen: list[Ref] = field(default_factory=list)
    metrics: list[MetricSample] = field(default_factory=list)
    metrics_repeat: str | None = None
    ras: list[RasQuery] = field(default_factory=list)
    watchdog: list[WatchdogTimeout] = field(default_factory=list)
    flights: list[FlightRank] = field(default_factory=list)
    dumps: list[SchedulerDump] = field(default_factory=list)
    procs: list[ProcSample] = field(default_factory=list)
    devices: list[DeviceFacts] = field(default_factory=list)
    failures: list[ReadFailure] = field(default_factory=list)
    versions: list[VersionFact] = field(default_factory=list)
    rings: list[AgentRing] = field(default_factory=list)
    readings: list[AgentReading] = field(default_factory=list)
    prior: list[tuple[dict[str, Any], Ref]] = field(default_factory=list)
    unread: list[UnreadItem] = field(default_factory=list)
    parts: list[InputPart] = field(default_factory=list)
    stamped: list[tuple[str, Stamp]] = field(default_factory=list)
    clock_pairs: list[tuple[str, Stamp, Stamp]] = field(default_factory=list)
    axis: TimeAxis = field(default_factory=TimeAxis)
    scrapes: int = 0
    stack_counts: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def note_time(self, source: str, stamp: Stamp | None) -> None:
        """Remember a time for building the axis (the first and a sample of the rest is enough)."""
        if stamp is not None and len(self.stamped) < 200_000:
            self.stamped.append((source, stamp))

    def when(self, stamp: Stamp | None, source: str) -> float | None:
        return self.axis.place(stamp, source)
