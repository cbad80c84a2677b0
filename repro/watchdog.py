"""Is the step hung? A pure state machine over samples; nothing here reads a clock or a device.

HUNG needs a signal from the device: the event behind the step has not completed for longer than any healthy step takes, and
the count of finished layers, which the device itself writes, does not move - said by a host process that demonstrably still
runs. NVML and GPM corroborate (a kernel is resident, no memory traffic) or contradict (the device is idle: then the work never
got there, and the verdict stays SUSPECT). A host process that does not answer is SUSPECT, never HUNG: from outside, a driver
call that waits looks the same.

Deadline of a step: 50 x the median of the healthy steps, at least 0.25 s, at most the step's own time-out. A step of 21 top-k
launches takes 1 to 2 ms, so 0.25 s is more than 100 of them, and longer than the 1/6 s over which NVML averages utilisation:
one NVML sample then lies wholly inside the hang. Until a healthy step is known it is 0.75 s.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

from ..forensics.collect.gpm import GpmSample
from ..forensics.collect.nvml import GpuSample

__all__ = ["Assessment", "Limits", "Sample", "Watchdog"]

Level = Literal["healthy", "suspect", "hung"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds, in seconds and percent. ``idle_s``: NVML must have shown 0 % for so long before it contradicts a hang."""

    floor_s: float = 0.25
    factor: float = 50.0
    unknown_s: float = 0.75
    ceiling_s: float = 10.0
    heartbeat_s: float = 0.5
    idle_s: float = 1.2
    busy_percent: int = 90
    quiet_memory_percent: int = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """All that is known at ``at`` (seconds on one clock, as in the GPU samples).

    ``heard_at``: when the child last said that its step is still pending, None if it has not yet. ``layers_done``: by the
    device's own count, as of then. ``host_state``: the child's state letter from /proc.
    """

    at: float
    heard_at: float | None = None
    layers_done: int | None = None
    host_state: str | None = None
    gpu: GpuSample | None = None
    gpm: GpmSample | None = None


@dataclass(frozen=True, slots=True)
class Assessment:
    """The verdict at ``at`` with its reasons: facts with their numbers, the deciding ones first. ``layer``: the one that does
    not end.
    """

    level: Level
    at: float
    reasons: tuple[str, ...] = ()
    layer: int | None = None
    deadline_s: float = 0.0


class Watchdog:
    """Told of steps and samples, it says how things stand. ``sm_count`` is only for the wording."""

    def __init__(self, limits: Limits | None = None, *, sm_count: int | None = None) -> None:
        self.limits = limits or Limits()
        self._sm_count = sm_count
        self._healthy_ms: deque[float] = deque(maxlen=101)
        self._step = 0
        self._layers = 0
        self._began = 0.0
        self._moved_at = 0.0
        self._layers_done: int | None = None
        self._idle_since: float | None = None
        self._busy: GpuSample | None = None
        self._gpm: GpmSample | None = None

    def healthy_step(self, milliseconds: float) -> None:
        """A step ended by itself after so many milliseconds."""
        self._healthy_ms.append(milliseconds)

    @property
    def deadline_s(self) -> float:
        """How long a step may go on without any layer ending, seconds."""
        limits = self.limits
        if not self._healthy_ms:
            return min(limits.unknown_s, limits.ceiling_s)
        return min(max(limits.floor_s, limits.factor * statistics.median(self._healthy_ms) / 1e3), limits.ceiling_s)

    def begin(self, step: int, layers: int, at: float) -> None:
        """A step was launched at ``at``."""
        self._step, self._layers, self._began, self._moved_at = step, layers, at, at
        self._layers_done = None
        self._idle_since = None
        self._busy = None
        self._gpm = None

    def observe(self, sample: Sample) -> Assessment:
        """How the pending step stands."""
        if sample.layers_done is not None and sample.layers_done != self._layers_done:
            # The first report only tells where the step stands; movement is a change after it.
            if self._layers_done is not None and sample.heard_at is not None:
                self._moved_at = max(self._moved_at, sample.heard_at)
            self._layers_done = sample.layers_done
        self._note_device(sample)
        deadline = self.deadline_s
        heard = sample.heard_at
        still_s = (heard if heard is not None else sample.at) - self._moved_at
        silence_s = sample.at - (heard if heard is not None else self._began)
        if silence_s > self.limits.heartbeat_s:
            return Assessment("suspect", sample.at, self._silent(sample, silence_s), None, deadline)
        if heard is None or still_s < deadline:
            return Assessment("healthy", sample.at, (), None, deadline)
        idle = self._idle_reason(sample.at)
        facts = self._facts(sample, still_s, deadline)
        if idle:
            return Assessment("suspect", sample.at, (idle, *facts), self._layers_done, deadline)
        if self._layers_done is None:
            return Assessment("suspect", sample.at, ("the count of finished layers was never read", *facts), None, deadline)
        return Assessment("hung", sample.at, facts, self._layers_done, deadline)

    def _note_device(self, sample: Sample) -> None:
        gpu = sample.gpu
        if gpu is not None and gpu.at > self._began and gpu.utilisation is not None:
            if gpu.utilisation == 0:
                self._idle_since = gpu.at if self._idle_since is None else self._idle_since
            else:
                self._idle_since = None
            self._busy = gpu
        if sample.gpm is not None and sample.gpm.begin >= self._began:
            self._gpm = sample.gpm

    def _idle_reason(self, at: float) -> str:
        """Why the device seems to do nothing, or nothing. GPM alone does not say so against an NVML that shows a busy card."""
        never = "the step may never have reached the device"
        busy = self._busy is not None and (self._busy.utilisation or 0) >= self.limits.busy_percent
        if self._gpm is not None and self._gpm.graphics_util == 0.0 and not busy:
            return f"contradiction: GPM saw no work at all for {self._gpm.end - self._gpm.begin:.2f} s: {never}"
        if self._idle_since is not None and at - self._idle_since >= self.limits.idle_s:
            return f"contradiction: NVML has shown 0 % for {at - self._idle_since:.1f} s: {never}"
        return ""

    def _silent(self, sample: Sample, silence_s: float) -> tuple[str, ...]:
        state = sample.host_state or "not readable"
        return (
            f"the child has said nothing for {silence_s:.2f} s (process state {state}): a host thread inside a driver call "
            "and a hung device cannot be told apart from outside",
            *self._corroboration(),
        )

    def _facts(self, sample: Sample, still_s: float, deadline: float) -> tuple[str, ...]:
        known = len(self._healthy_ms)
        basis = (
            f"median of {known} healthy steps {statistics.median(self._healthy_ms):.2f} ms"
            if known
            else "no healthy step known yet"
        )
        age_ms = 1e3 * (sample.at - (sample.heard_at if sample.heard_at is not None else sample.at))
        facts = [
            f"step {self._step}: the event behind it has not completed {1e3 * (sample.at - self._began):.0f} ms after the launch "
            f"(deadline {1e3 * deadline:.0f} ms; {basis})"
        ]
        if self._layers_done is not None:
            facts.append(
                f"{self._layers_done} of {self._layers} layers finished by the device's own count, "
                f"unchanged for {1e3 * still_s:.0f} ms"
            )
        facts.append(
            f"the host thread still answers: last word {max(age_ms, 0.0):.0f} ms ago, state {sample.host_state or 'not read'}"
        )
        return (*facts, *self._corroboration())

    def _corroboration(self) -> tuple[str, ...]:
        lines: list[str] = []
        gpu, limits = self._busy, self.limits
        if gpu is not None and gpu.utilisation is not None:
            busy = gpu.utilisation >= limits.busy_percent
            quiet = gpu.memory_utilisation is not None and gpu.memory_utilisation <= limits.quiet_memory_percent
            meaning = "a kernel is resident and moves no memory" if busy and quiet else "does not corroborate by itself"
            lines.append(f"NVML: {gpu.line()}: {meaning}")
        if self._gpm is not None:
            lines.append(f"GPM: {self._gpm.line(self._sm_count)}")
        return tuple(lines)
