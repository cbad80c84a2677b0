"""What a capture has so far: outcomes in order, each told in the timeline at once, each file on the disk or said not to be.

A full disk or a closed timeline stops neither the capture nor the verdict: what was read stays in the outcomes' facts.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ...clock import Clock, Deadline
from ...errors import RunStoreError
from ...forensics.collect import Collected, Collector, Disturbance, run_collector
from ...forensics.device_state import Unread
from ..atomic import disk_error, write_atomic
from ..ground import Artefact, CaptureOutcome, Emit
from .records import Rank

__all__ = ["CaptureLog", "PlannedFile", "rank_folder", "rank_tag", "safely", "together", "who"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """Something read that is to become a file: ``name`` relative to the capture's folder."""

    name: str
    kind: str
    data: bytes
    origin: Literal["measured", "reported"] = "measured"


def rank_folder(rank: Rank, ranks: Sequence[Rank]) -> str:
    """``rank-1``; ``pid-816`` where the rank is not known or not the only one of its number."""
    shared = sum(other.rank == rank.rank for other in ranks) > 1
    return f"rank-{rank.rank}" if rank.rank is not None and not shared else f"pid-{rank.pid}"


def rank_tag(rank: Rank) -> str:
    """For file names; readers of evidence take rank and pid from it: ``rank1-pid-816``."""
    return f"rank{rank.rank}-pid-{rank.pid}" if rank.rank is not None else f"pid-{rank.pid}"


def who(rank: Rank) -> dict[str, Any]:
    """A rank as facts of its outcomes. ``child``: addresses mean something within one process only."""
    return {"rank": rank.rank, "pid": rank.pid, "child": rank.pid, "gpu_index": rank.gpu_index}


@dataclass
class CaptureLog:
    """``folder``: where the files go. ``emit``: the timeline; ``kind``: of an outcome's line; ``timeline_lost``: why it takes no
    more lines."""

    folder: Path
    emit: Emit
    kind: str = "capture"
    outcomes: list[CaptureOutcome] = field(default_factory=list)
    timeline_lost: str = ""

    def tell(self, kind: str, **fields: Any) -> None:
        """One line of the timeline; once it fails, its failure is kept and the capture goes on."""
        try:
            self.emit(kind, **fields)
        except (RunStoreError, OSError) as error:
            self.timeline_lost = self.timeline_lost or str(error)

    def begin(self, collector: str, disturbance: Disturbance, deadline_s: float, **facts: Any) -> None:
        """A collector starts: told before, so that a capture that is ended in it says where."""
        self.tell("collecting", collector=collector, disturbance=disturbance, deadline_s=round(deadline_s, 1), **facts)

    def write(self, files: Sequence[PlannedFile]) -> tuple[tuple[Artefact, ...], tuple[Unread, ...]]:
        """Every file whole and flushed to the disk, or why not."""
        written: list[Artefact] = []
        unread: list[Unread] = []
        for planned in files:
            path = (self.folder / planned.name).absolute()
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_atomic(path, planned.data)
            except (RunStoreError, OSError) as error:
                told = error if isinstance(error, RunStoreError) else disk_error(error, path, "write")
                unread.append(Unread(f"{planned.name} (read, not kept)", str(told), told.help_text or ""))
            else:
                written.append(Artefact(planned.kind, path, planned.origin))
        return tuple(written), tuple(unread)

    def add(self, outcome: CaptureOutcome) -> CaptureOutcome:
        """Keep an outcome and tell it."""
        self.outcomes.append(outcome)
        self.tell(
            self.kind,
            collector=outcome.collector,
            disturbance=outcome.disturbance,
            seconds=round(outcome.seconds, 4),
            saw_device=outcome.state is not None,
            facts=dict(outcome.facts),
            unread=[{"what": item.what, "why": item.why, "remedy": item.remedy} for item in outcome.unread],
        )
        return outcome

    def collected(self, found: Collected, **facts: Any) -> CaptureOutcome:
        """A collector's result, with ``facts`` (whose process it was) beside its own."""
        return self.add(outcome_of(found, facts))

    def missing(self, collector: str, disturbance: Disturbance, item: Unread, **facts: Any) -> CaptureOutcome:
        """A collector that was not run, and why."""
        return self.add(CaptureOutcome(collector, disturbance, 0.0, facts=facts, unread=(item,)))


def outcome_of(found: Collected, facts: Mapping[str, Any]) -> CaptureOutcome:
    """A ``Collected`` as an outcome; its facts are made plain JSON."""
    artefacts = tuple(Artefact(item.kind, item.path, item.origin) for item in found.files)
    plain = json.loads(json.dumps({**found.facts, **facts}, default=str))
    outcome = CaptureOutcome(found.collector, found.disturbance, found.seconds, artefacts, found.state, plain, found.unread)
    return replace(outcome, unread=tuple(dict.fromkeys(outcome.unread)))


def safely(collector: Collector, clock: Clock) -> Collected:
    """``run_collector`` for which no fault of ours, either, ends the capture of a server that hangs only once."""
    began = clock.monotonic()
    try:
        return run_collector(collector, clock)
    except Exception as error:  # a bug in one collector must not cost the others their evidence
        why = Unread(collector.name, f"{type(error).__name__}: {error}"[:300], "Please report this with the run directory.")
        return Collected(collector.name, collector.disturbance, clock.monotonic() - began, unread=(why,))


def together(jobs: Sequence[Callable[[], T]], *, seconds: float, width: int = 16) -> list[T | None]:
    """Run jobs side by side in daemon threads, ``width`` at a time; None for one that has not answered after ``seconds``. None is
    begun after that: it would touch a process when the capture is over.

    A job's own exception is a fault of ours and is raised here.
    """
    deadline = Deadline(seconds)
    answers: list[T | None] = [None] * len(jobs)
    errors: list[BaseException] = []
    gate = threading.BoundedSemaphore(width)

    def run(index: int) -> None:
        with gate:
            if deadline.expired:
                return
            try:
                answers[index] = jobs[index]()
            except BaseException as error:  # handed to the thread that waits
                errors.append(error)

    threads = [
        threading.Thread(target=run, args=(index,), name=f"dsv4-repro-capture-{index}", daemon=True) for index in range(len(jobs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.remaining())
    if errors:
        raise errors[0]
    return list(answers)
