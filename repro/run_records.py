"""The documents of a run directory beside the diagnosis: ``run.json``, a line of ``timeline.jsonl``, ``evidence/index.json``.

Pydantic models, frozen; their JSON Schemas are published under ``docs/schemas``. Unknown keys are kept, so that a run written by
a newer release can still be read.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "EVIDENCE_SCHEMA",
    "RUN_SCHEMA",
    "Bound",
    "EvidenceEntry",
    "EvidenceIndex",
    "KernelRecord",
    "RunRecord",
    "TimelineLine",
    "TrialCounts",
]

RUN_SCHEMA = "dsv4-repro/run/1"
EVIDENCE_SCHEMA = "dsv4-repro/evidence/1"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class KernelRecord(_Record):
    """Whose code ran. ``origin`` is what was written after ``--kernel``; ``sha256`` is of the cubin."""

    origin: str
    function: str = ""
    sha256: str = ""
    sm: int | None = None
    guarded: bool | None = None
    label: str = ""


class Bound(_Record):
    """An exact (Clopper-Pearson) one-sided bound on a probability: ``side`` "at least" or "at most", at ``confidence`` (0 to 1)."""

    side: Literal["at least", "at most"]
    value: float
    confidence: float
    of: str


class TrialCounts(_Record):
    """How the trials of a run ended. ``clean``: completed with the danger window reached; ``no_window``: completed without it.

    ``other``: wrong results, faults, dead workers; ``unfinished``: begun and not ended (Ctrl-C, the run's own deadline).
    """

    asked: int
    hang: int = 0
    clean: int = 0
    no_window: int = 0
    other: int = 0
    unfinished: int = 0
    bounds: tuple[Bound, ...] = ()


class RunRecord(_Record):
    """``run.json``. ``state``: ``running`` until the end is written, so a killed run is told from a finished one.

    Times are ISO 8601 in UTC. ``command`` reproduces the run (an argument vector). ``ground``: server, gpu or cpu.
    """

    schema_: str = Field(default=RUN_SCHEMA, alias="schema", serialization_alias="schema")
    scenario: str
    ground: str
    state: Literal["running", "finished", "interrupted", "failed"] = "running"
    command: tuple[str, ...] = ()
    started: str = ""
    ended: str | None = None
    seconds: float | None = None
    seed: int = 0
    versions: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    plan: dict[str, Any] = Field(default_factory=dict)
    kernel: KernelRecord | None = None
    launches: dict[str, Any] = Field(default_factory=dict)
    trials: TrialCounts | None = None
    outcome: str | None = None
    exit_status: int | None = None
    error: str | None = None

    def document(self) -> dict[str, Any]:
        """The JSON document with its published key names."""
        return self.model_dump(mode="json", by_alias=True)


class TimelineLine(_Record):
    """One line: ``t`` seconds since the run's start on a monotonic clock, ``at`` wall time in UTC, ``kind`` what happened."""

    t: float
    at: str
    kind: str


class EvidenceEntry(_Record):
    """One artefact. ``path`` is relative to the run directory and stays inside it; ``size`` in bytes."""

    id: str
    kind: str
    path: str
    sha256: str
    size: int
    origin: Literal["measured", "interpreted", "reported"] = "measured"
    when: str | None = None
    collector: str = ""


class EvidenceIndex(_Record):
    """``evidence/index.json``."""

    schema_: str = Field(default=EVIDENCE_SCHEMA, alias="schema", serialization_alias="schema")
    entries: tuple[EvidenceEntry, ...] = ()

    def document(self) -> dict[str, Any]:
        """The JSON document with its published key names."""
        return self.model_dump(mode="json", by_alias=True)
