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
    from .view import View

__all__ = ["GpuState", "gpu_states"]

BUSY_UTIL = 85.0
IDLE_UTIL = 5.0
QUIET_MEMORY = 2.0
TRAFFIC_MEMORY = 5.0
SPIN_OF_BUSY = 0.5
SPIN_OF_LIMIT = 0.4


@dataclass(frozen=True, slots=True)
class GpuState:
    """``state``: spin (resident, no traffic), working (resident and traffic), busy (resident, traffic unknown), low (some
    utilisation), idle, lost, unknown. ``steady``: that state held in this many last samples. ``power_ratio``: last power against
    the busy level seen on the same card."""

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
            parts.append(f"{self.last.power:g} W{ratio}")
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
        last = samples[-1]
        state = _state(last, busy)
        run = []
        for sample in reversed(samples):
            if _state(sample, busy) != state:
                break
            run.append(sample)
        first, final = view.time(run[-1]), view.time(run[0])
        seconds = final - first if first is not None and final is not None and len(run) > 1 else None
        cited = [samples[0], run[-1], run[0]] if busy is not None else [run[-1], run[0]]
        ratio = last.power / busy if busy and last.power is not None and last is not samples[0] else None
        result.append(GpuState(host, index, state, len(run), seconds, tuple(dict.fromkeys(s.ref for s in cited)), last, ratio))
    return tuple(result)
