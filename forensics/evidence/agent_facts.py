"""What the agent in a worker left: the ring of its flight recorder, and what it read from device memory while a kernel was on it.

The known wait (vLLM #51593) is told from these alone: one arrival in a group whose row has a negative length. No instruction was
seen by them, so no more than a medium confidence rests on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ReproError
from ...kernels.abi import ARRIVAL_COUNTER_OFFSET, RADIX_THRESHOLD, ROW_STATE_SIZE
from ...kernels.devices import DeviceDescription
from ...kernels.plan import LaunchPlan, plan_launch
from ..chain import StepFacts
from .refs import Ref
from .ring_file import RecordedStep, RingContents

__all__ = ["AgentLaunch", "AgentReading", "AgentRing", "KnownWait", "agent_launches", "recorded_step", "waits_in"]

#: Launches and rows of a document that are looked at; an agent keeps fewer.
_MOST_LAUNCHES = 64
_MOST_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class AgentLaunch:
    """One captured launch of the op as the agent read it. ``counters``: int32 by group; ``lengths``: int32 by row."""

    workspace: int
    lengths_address: int
    rows: int
    width: int
    top_k: int
    max_seq_len: int
    counters: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def negative_rows(self) -> tuple[int, ...]:
        """Rows whose length is no legal one."""
        return tuple(row for row, length in enumerate(self.lengths) if length < 0)

    def holds(self, address: int) -> bool:
        """Whether an address lies in this launch's row states."""
        return self.workspace <= address < self.workspace + len(self.counters) * ROW_STATE_SIZE

    def plan(self, device: DeviceDescription | None, rows: int | None = None) -> LaunchPlan | None:
        """The launcher's arithmetic for it, or for a launch of fewer ``rows`` on its workspace (the agent keeps the largest one).

        None where the card is not known, the figures make no launch, or a group handles several rows.
        """
        if device is None:
            return None
        rows = rows if rows is not None and 0 < rows <= self.rows else self.rows
        try:
            plan = plan_launch(rows, self.width, self.max_seq_len, self.top_k, device)
        except ReproError:
            return None
        return plan if plan.path == "persistent" and plan.groups == rows else None


@dataclass(frozen=True, slots=True)
class KnownWait:
    """A leader that waits for a peer that has left, told from memory alone. ``group`` is the row's too."""

    launch: AgentLaunch
    group: int

    @property
    def address(self) -> int:
        return self.launch.workspace + self.group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET

    @property
    def length(self) -> int:
        """Of the row, as read."""
        return self.launch.lengths[self.group]


def agent_launches(facts: Mapping[str, Any]) -> tuple[AgentLaunch, ...]:
    """The launches in a document of row states; what does not make sense is left out."""
    found = []
    listed = facts.get("launches", ())
    for item in listed[:_MOST_LAUNCHES] if isinstance(listed, list | tuple) else ():
        try:
            found.append(
                AgentLaunch(
                    int(item["workspace"], 16), int(item["lengths_address"], 16), int(item["rows"]), int(item["width"]),
                    int(item["top_k"]), int(item["max_seq_len"]), tuple(map(int, item["arrival_counters"][:_MOST_ROWS])),
                    tuple(map(int, item["lengths"][:_MOST_ROWS])),
                )
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return tuple(found)


def waits_in(launches: Sequence[AgentLaunch]) -> list[KnownWait]:
    """Groups with one arrival whose row has a negative length, in launches whose ``max_seq_len`` lets the peers leave."""
    return [
        KnownWait(launch, group)
        for launch in launches
        if 0 < launch.max_seq_len <= RADIX_THRESHOLD and launch.rows <= len(launch.counters)
        for group, count in enumerate(launch.counters[: max(launch.rows, 0)])
        if count == 1 and group < len(launch.lengths) and launch.lengths[group] < 0
    ]


def recorded_step(step: RecordedStep) -> StepFacts | None:
    """A recorded step as the chain reads it; None where the recorder saw no batch in it.

    The padded slots are the decode lengths of 0 where the recorder saw them; else the graph's request slots less the requests.
    """
    if step.requests is None:
        return None
    zero = step.decode_zero
    slots = zero if zero is not None and zero > 0 else None
    if slots is None and step.padded_requests is not None:
        slots = step.padded_requests - step.requests
    return StepFacts(
        live_requests=step.requests,
        next_n=step.next_n,
        rows=step.tokens,
        graph_rows=step.padded_tokens if step.graph_mode == "full" else None,
        padded_requests=slots,
        producer=None if step.native is None else "native" if step.native else "variable-length",
        origin="measured",
    )


@dataclass(frozen=True, slots=True)
class AgentRing:
    """One ring file. ``late_ns``: the newest CLOCK_MONOTONIC time of this process that anything in the case states."""

    ref: Ref
    contents: RingContents

    @property
    def pid(self) -> int:
        return self.contents.header.pid

    @property
    def rank(self) -> int | None:
        return self.contents.header.rank if self.contents.header.rank >= 0 else None

    @property
    def stuck(self) -> RecordedStep | None:
        """The oldest step that was launched and not seen to end: where the GPU stands."""
        return next(iter(self.contents.unfinished), None)


@dataclass(frozen=True, slots=True)
class AgentReading:
    """Counters and lengths that the agent read inside the worker.

    ``stalled_s``: age of its oldest step under way at that time. ``unchanged``: further reads agreed (None: this is one read).
    ``monotonic_ns``: when, on the worker's CLOCK_MONOTONIC. ``pid`` and ``rank``: as the file's name says.
    """

    ref: Ref
    launches: tuple[AgentLaunch, ...]
    pid: int | None = None
    rank: int | None = None
    stalled_s: float | None = None
    unchanged: bool | None = None
    monotonic_ns: int | None = None
