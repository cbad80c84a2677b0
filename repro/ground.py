"""Where a workload runs: the protocol that the GPU ground, the CPU ground and the server ground share.

Everything above it (run loop, capture order, autopsy, unwedge experiment, report) is the same code for all grounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from ..clock import Deadline
from ..forensics.device_state import DeviceState, Unread
from ..forensics.records import Diagnosis, Evidence
from ..kernels.image import KernelImage
from ..kernels.plan import LaunchPlan
from ..scenarios.drain import DrainPlan
from ..scenarios.drain_steps import DecodeStep

__all__ = [
    "Artefact",
    "Bounded",
    "CaptureOutcome",
    "CloseOutcome",
    "Ground",
    "GroundRequest",
    "JudgesItself",
    "ReadsRowStates",
    "Ready",
    "StepOutcome",
    "UnwedgeOutcome",
]

#: ``emit(kind, **fields)``: one line of ``timeline.jsonl``, flushed at once.
Emit = Callable[..., None]


@dataclass(frozen=True, slots=True)
class GroundRequest:
    """All that a ground needs to set a workload up. ``launches``: the frozen launch of each captured size, by graph rows."""

    plan: DrainPlan
    steps: Sequence[DecodeStep]
    kernel: KernelImage
    launches: Mapping[int, LaunchPlan]
    device: int = 0
    seed: int = 0
    step_timeout_s: float = 10.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ready:
    """The workload is set up. ``environment``: device name, SM architecture, driver, clocks … for the report."""

    description: str
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One decode step. ``hung`` comes with the watchdog's reasons, ``wrong`` with the rows whose set is not the reference's.

    ``unfinished``: a budget or a deadline ended it, and neither an end nor a hang was shown. ``detail["kind"]``, where there is
    one, says how sure: ``deadlock`` (proven), ``livelock`` (the state recurs: this schedule never ends), ``budget``, ``fault``,
    ``uninitialised``.
    """

    index: int
    state: Literal["done", "hung", "wrong", "fault", "died", "refused", "unfinished"]
    milliseconds: float = 0.0
    layer: int | None = None
    reasons: tuple[str, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Artefact:
    """A file that a collector wrote, on disk and complete. ``path`` is absolute."""

    kind: str
    path: Path
    origin: Literal["measured", "interpreted", "reported"]


@dataclass(frozen=True, slots=True)
class CaptureOutcome:
    """What one collector did: its artefacts or the reason why not, how long, and what it did to the target.

    ``state``: the device state it saw, if it saw one. ``facts``: small values for the diagnosis, e.g. counters by group.
    """

    collector: str
    disturbance: Literal["none", "pauses", "may end the process"]
    seconds: float
    artefacts: tuple[Artefact, ...] = ()
    state: DeviceState | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[Unread, ...] = ()


@dataclass(frozen=True, slots=True)
class UnwedgeOutcome:
    """The experiment: a count was written into the stuck counter; did the kernel retire, and how long after?"""

    attempted: bool
    retired: bool
    milliseconds: float | None = None
    address: int | None = None
    value: int | None = None
    why_not: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CloseOutcome:
    """How the workload was ended: ``clean``, ``terminated``, ``killed`` or ``survived`` (outlived SIGKILL: a finding)."""

    how: Literal["clean", "terminated", "killed", "survived"]
    device_idle: bool | None = None
    detail: str = ""


class Ground(Protocol):
    """One workload at a time. ``close`` is always called, also after Ctrl-C."""

    name: Literal["server", "gpu", "cpu"]

    def open(self, request: GroundRequest, emit: Emit) -> Ready: ...

    def run_step(self, step: DecodeStep) -> StepOutcome: ...

    def capture(self, folder: Path, emit: Emit, *, allow_dump: bool, attach: bool = True) -> Sequence[CaptureOutcome]:
        """``attach``: whether a debugger may be attached too; a GPU process can write nothing by itself after that."""
        ...

    def unwedge(self, address: int, value: int) -> UnwedgeOutcome: ...

    def close(self) -> CloseOutcome: ...


@runtime_checkable
class ReadsRowStates(Protocol):
    """A ground that can read the row states at once and without disturbance: asked at every hang that is only counted."""

    def row_states(self) -> Mapping[str, Any]: ...


@runtime_checkable
class Bounded(Protocol):
    """A ground that can end a step by itself: it is told when the run has to be over."""

    def bound(self, deadline: Deadline) -> None: ...


@runtime_checkable
class JudgesItself(Protocol):
    """A ground whose evidence is more than one device's state (a server): it judges its own ends, clean ones with their window."""

    def judge(
        self, captures: Sequence[CaptureOutcome], step: DecodeStep, outcome: StepOutcome, *, evidence: Sequence[Evidence]
    ) -> Diagnosis: ...

    def judge_clean(self) -> tuple[Diagnosis, bool]: ...
