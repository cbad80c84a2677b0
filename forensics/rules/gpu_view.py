"""What each GPU did last: spin, working, busy, idle, lost or unknown.

NVML's utilisation says that a kernel is resident, not that it works. A spin shows as full utilisation without memory traffic and
with little power: about 1/5 to 2/5 of what the same card draws when busy (a threshold of one half leaves room). Where the memory
utilisation is not available (GB10), the power against the card's own busy level or limit decides, else nothing does.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..evidence.facts import GpuSample
from ..evidence.refs import Ref

if TYPE_CHECKING:
    from .view import Timed, View

__all__ = ["GpuState", "gpu_states"]

BUSY_UTIL = 85.0
IDLE_UTIL = 5.0
QUIET_MEMORY = 2.0
TRAFFIC_MEMORY = 5.0
SPIN_OF_BUSY = 0.5
SPIN_OF_LIMIT = 0.4
#: Seconds by which clocks and intervals of two sources may differ, and over which a stats line averages.
_SLACK = 20.0
_STATS_SPAN = 10.0


@dataclass(frozen=True, slots=True)
class GpuState:
    """``state``: spin (resident, no traffic), working (resident and traffic), busy (resident, traffic unknown), low (some
    utilisation), idle, lost, unknown, stale (taken before tokens stopped or after the engine ended). ``steady``: that state held in
    this many last samples. ``power_ratio``: last power against the busy level seen on the same card.
    """

    host: str
    index: int | None
    state: str
    steady: int
    seconds: float | None
    refs: tuple[Ref, ...]
    last: GpuSample
    power_ratio: float | None = None

    @property
    def label(self) -> str:
        name = "the GPU" if self.index is None else f"GPU {self.index}"
        return f"{name} on {self.host}" if self.host else name

    def reading(self) -> str:
        """The last values as text."""
        parts = []
        if self.last.util is not None:
            parts.append(f"{self.last.util:g} % busy")
        parts.append("memory traffic unknown" if self.last.memory_util is None else f"{self.last.memory_util:g} % memory")
        if self.last.power is not None:
            ratio = f" ({self.power_ratio:.0%} of its busy level)" if self.power_ratio is not None else ""
            parts.append(f"{self.last.power:.0f} W{ratio}")
        return ", ".join(parts)


def _busy_level(samples: list[GpuSample]) -> float | None:
    levels = [s.power for s in samples if s.power is not None and (s.memory_util or 0) >= TRAFFIC_MEMORY and (s.util or 0) >= 30]
    return max(levels) if levels else None


def _state(sample: GpuSample, busy: float | None) -> str:
    if sample.lost:
        return "lost"
    if sample.util is None:
        return "unknown"
    if sample.util <= IDLE_UTIL:
        return "idle"
    if sample.util >= BUSY_UTIL:
        if sample.memory_util is not None:
            if sample.memory_util >= TRAFFIC_MEMORY:
                return "working"
            if sample.memory_util <= QUIET_MEMORY:
                if busy and sample.power is not None and sample.power > 0.85 * busy:
                    return "busy"
                return "spin"
            return "busy"
        if sample.power is not None and busy:
            return "spin" if sample.power <= SPIN_OF_BUSY * busy else "busy"
        if sample.power is not None and sample.power_limit:
            return "spin" if sample.power <= SPIN_OF_LIMIT * sample.power_limit else "busy"
        return "busy"
    return "working" if (sample.memory_util or 0) >= TRAFFIC_MEMORY else "low"


def _comparable(view: View, sample: GpuSample, other: Timed) -> tuple[float, float] | None:
    if not view.case.axis.comparable(sample.at, other.at):
        return None
    here, there = view.time(sample), view.time(other)
    return (here, there) if here is not None and there is not None else None


def _after_the_end(view: View, sample: GpuSample) -> bool:
    """Taken after the engine had ended: it shows what was left, not what held it."""
    for event in view.events("engine-dead", "worker-died", "engine-proc-died"):
        pair = _comparable(view, sample, event)
        if pair is not None and pair[0] > pair[1] + _SLACK:
            return True
    return False


def _before_the_stop(view: View, sample: GpuSample) -> bool:
    """Taken before tokens stopped: it shows the healthy card."""
    starts: list[tuple[Timed, float]] = [(run.first, _STATS_SPAN) for run in view.flow.stats if run.state == "frozen"]
    starts += [(run.last, 0.0) for run in view.flow.stats if run.state == "silent"]
    first_wait = next((e for e in view.symptoms if e.kind == "shm-wait"), None)
    if not starts and first_wait is not None and view.phase == "serving":
        starts.append((first_wait, float(first_wait.fields.get("seconds", "60"))))
    for event, span in starts:
        pair = _comparable(view, sample, event)
        if pair is not None and pair[0] < pair[1] - span - _SLACK:
            return True
    return False


def gpu_states(view: View) -> tuple[GpuState, ...]:
    groups: dict[tuple[str, int | None], list[GpuSample]] = defaultdict(list)
    for sample in view.case.gpus:
        groups[(sample.host, sample.index)].append(sample)
    result = []
    for (host, index), samples in groups.items():
        times = [view.time(s) for s in samples]
        if all(t is not None for t in times):
            samples = [s for _, s in sorted(zip(times, samples, strict=True), key=lambda pair: (pair[0] or 0.0, pair[1].order))]
        busy = _busy_level(samples)
        within = [s for s in samples if not _after_the_end(view, s)]
        if not within:
            samples, stale = samples, True
        else:
            samples, stale = within, _before_the_stop(view, within[-1])
        last = samples[-1]
        state = "stale" if stale and not last.lost else _state(last, busy)
        run: list[GpuSample] = []
        for sample in reversed(samples):
            if run and _state(sample, busy) != _state(last, busy):
                break
            run.append(sample)
        first, final = view.time(run[-1]), view.time(run[0])
        seconds = final - first if first is not None and final is not None and len(run) > 1 else None
        cited = [samples[0], run[-1], run[0]] if busy is not None else [run[-1], run[0]]
        ratio = last.power / busy if busy and last.power is not None and last is not samples[0] else None
        result.append(GpuState(host, index, state, len(run), seconds, tuple(dict.fromkeys(s.ref for s in cited)), last, ratio))
    return tuple(result)
