"""Each worker by what its agent left: where its GPU stands, since when, and the wait that its row states show. Nothing is decided.

Times are the worker's own CLOCK_MONOTONIC. A ring that was copied while a step was under way shows that step as not ended, too: the
age, from the newest time that anything of this worker states, tells work from a stand-still.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..evidence.agent_facts import AgentReading, AgentRing, KnownWait, waits_in
from ..evidence.refs import Ref
from ..evidence.ring_file import RecordedStep

__all__ = ["AgentRank", "agent_ranks"]

#: A reading counts where the worker's oldest step was this old then, seconds.
_STALLED_S = 1.0


@dataclass(frozen=True, slots=True)
class AgentRank:
    """``ring``: the newest one. ``step``: launched and not seen to end, ``age_s`` old (None: nothing states a later time).

    ``wait``: the known wait in its row states, of ``reading``; ``agreed``: several reads showed it. ``moved_on``: steps ended after
    a reading that showed one.
    """

    pid: int | None
    rank: int | None
    ring: AgentRing | None
    step: RecordedStep | None
    age_s: float | None
    wait: KnownWait | None
    reading: AgentReading | None
    agreed: bool
    moved_on: bool

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else f"process {self.pid}" if self.pid is not None else "a worker"

    @property
    def refs(self) -> tuple[Ref, ...]:
        return tuple(one.ref for one in (self.ring, self.reading) if one is not None)


def agent_ranks(rings: Sequence[AgentRing], readings: Sequence[AgentReading]) -> tuple[AgentRank, ...]:
    """By rank, then pid. A reading without a pid belongs to the only ring, if there is one alone."""
    newest: dict[int, AgentRing] = {}
    for ring in rings:
        old = newest.get(ring.pid)
        if old is None or _progress(ring) >= _progress(old):
            newest[ring.pid] = ring
    alone = next(iter(newest)) if len(newest) == 1 else None
    by_pid: dict[int | None, list[AgentReading]] = {}
    for reading in readings:
        by_pid.setdefault(reading.pid if reading.pid is not None else alone, []).append(reading)
    found = [_rank(pid, newest.get(pid) if pid is not None else None, by_pid.get(pid, [])) for pid in {*newest, *by_pid}]
    return tuple(sorted(found, key=lambda one: (one.rank is None, one.rank or 0, one.pid or 0)))


def _progress(ring: AgentRing) -> tuple[int, int]:
    return ring.contents.header.begun, ring.contents.heard_ns


def _rank(pid: int | None, ring: AgentRing | None, readings: Sequence[AgentReading]) -> AgentRank:
    step = ring.stuck if ring is not None else None
    stands = [reading for reading in readings if not _overtaken(reading, ring, step)]
    wait, reading, agreed = _wait(stands)
    earlier = _wait(readings)[0] if len(stands) < len(readings) else None
    number = ring.rank if ring is not None else None
    if number is None:
        number = next((one.rank for one in readings if one.rank is not None), None)
    return AgentRank(pid, number, ring, step, _age(ring, step, stands), wait, reading, agreed, wait is None and earlier is not None)


def _overtaken(reading: AgentReading, ring: AgentRing | None, step: RecordedStep | None) -> bool:
    """Whether the recorder saw the worker go on after the reading, or saw nothing under way at all."""
    if ring is None:
        return False
    if step is None:
        return True
    ended = ring.contents.last_progress_ns
    return reading.monotonic_ns is not None and ended is not None and ended > reading.monotonic_ns


def _age(ring: AgentRing | None, step: RecordedStep | None, readings: Sequence[AgentReading]) -> float | None:
    ages = [reading.stalled_s for reading in readings if reading.stalled_s is not None]
    if ring is not None and step is not None and step.launch_ns is not None:
        times = [ring.contents.header.heard_ns, *(reading.monotonic_ns for reading in readings if reading.monotonic_ns is not None)]
        if max(times) > step.launch_ns:
            ages.append((max(times) - step.launch_ns) / 1e9)
    return max(ages, default=None)


def _wait(readings: Sequence[AgentReading]) -> tuple[KnownWait | None, AgentReading | None, bool]:
    """The one place that all readings show. None where one shows none, several fit, or one changed while it was read."""
    if not readings or any(reading.unchanged is False for reading in readings):
        return None, None, False
    places: set[tuple[int, int]] | None = None
    known: dict[tuple[int, int], tuple[KnownWait, AgentReading]] = {}
    for reading in readings:
        if reading.stalled_s is None or reading.stalled_s < _STALLED_S:
            return None, None, False
        here = {(wait.launch.workspace, wait.group): wait for wait in waits_in(reading.launches)}
        known.update({place: (wait, reading) for place, wait in here.items()})
        places = set(here) if places is None else places & set(here)
    if places is None or len(places) != 1:
        return None, None, False
    wait, reading = known[places.pop()]
    # A capture stores its last answer, which the agent's own folder holds as well: that is one reading.
    apart = {reading.stalled_s for reading in readings}
    return wait, reading, len(apart) > 1 or any(one.unchanged is True for one in readings)
