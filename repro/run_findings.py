"""What the trials of a run have found so far, and the one answer that is made of it: a hang before all else, a clean run last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..forensics.device_state import Unread
from ..forensics.records import Diagnosis, Evidence, Outcome
from .bounds import bounds_of
from .ground import CloseOutcome, Ready, UnwedgeOutcome
from .run_records import TrialCounts
from .verdicts import GroundName, completed, unfinished_diagnosis, unread_at_start, unwedge_document

__all__ = ["Findings", "RunResult", "Tally"]


@dataclass(slots=True)
class RunResult:
    """How the run ended. ``diagnosis`` is that of the first hang, else of the first other failure, else of the clean run."""

    outcome: Outcome
    diagnosis: Diagnosis
    counts: TrialCounts
    ready: Ready | None = None
    unwedge: UnwedgeOutcome | None = None
    closed: CloseOutcome | None = None
    evidence: tuple[Evidence, ...] = ()
    timing: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """Trials by how they ended; see ``TrialCounts``."""

    hang: int = 0
    clean: int = 0
    no_window: int = 0
    other: int = 0
    unfinished: int = 0

    @property
    def next_stop(self) -> str:
        """The evidence folder of the next end that is no hang."""
        return f"stopped-{self.other + self.unfinished + 1}"


@dataclass(slots=True)
class Findings:
    """``hang``, ``other``, ``clean``, ``stopped``: the first diagnosis of each kind; ``unwedge`` and ``timing`` are of that hang.

    ``cut_short``: trials that could not be had after an answer was found, with the reason.
    """

    tally: Tally = field(default_factory=Tally)
    hang: Diagnosis | None = None
    other: Diagnosis | None = None
    clean: Diagnosis | None = None
    stopped: Diagnosis | None = None
    ready: Ready | None = None
    unwedge: UnwedgeOutcome | None = None
    closed: CloseOutcome | None = None
    timing: dict[str, float] = field(default_factory=dict)
    cut_short: tuple[Unread, ...] = ()

    def result(self, ground: GroundName, trials: int, evidence: tuple[Evidence, ...]) -> RunResult:
        """The answer. ``ground``: its name, for a run that never opened one; ``trials``: how many were asked for."""
        tally = self.tally
        windows = tally.hang + tally.clean
        counts = TrialCounts(
            asked=trials,
            hang=tally.hang,
            clean=tally.clean,
            no_window=tally.no_window,
            other=tally.other,
            unfinished=tally.unfinished,
            bounds=bounds_of(tally.hang, windows) if trials > 1 else (),
        )
        diagnosis = self.hang or self.other or (self.stopped if tally.unfinished else self.clean)
        if diagnosis is None:
            diagnosis = unfinished_diagnosis(ground, "the run's own deadline came before an answer: --timeout")
        extra: dict[str, Any] = {"trials": counts.model_dump(mode="json")}
        if self.unwedge is not None:
            extra["unwedge"] = unwedge_document(self.unwedge)
        if self.timing:
            extra["timing"] = self.timing
        extra["evidence"] = [item.model_dump(mode="json") for item in evidence] if evidence else diagnosis.document()["evidence"]
        return RunResult(
            outcome=diagnosis.outcome,
            diagnosis=completed(diagnosis, unread=(*unread_at_start(self.ready), *self.cut_short), **extra),
            counts=counts,
            ready=self.ready,
            unwedge=self.unwedge,
            closed=self.closed,
            evidence=evidence,
            timing=self.timing,
        )
