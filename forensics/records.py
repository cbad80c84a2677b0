"""The diagnosis document (schema ``dsv4-repro/diagnosis/1``) and the words that may stand in it.

The words are tables, so that a verdict with a class nobody defined cannot be built. Pydantic models, frozen; ``model_json_schema``
of ``Diagnosis`` is the published JSON Schema.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "CLASSES",
    "DIAGNOSIS_SCHEMA",
    "ChainLink",
    "Confidence",
    "Diagnosis",
    "Evidence",
    "Fact",
    "LedgerGroup",
    "Outcome",
    "UnreadItem",
    "Verdict",
    "Wait",
    "Window",
    "outcome_of",
    "weaker_parent",
]

DIAGNOSIS_SCHEMA = "dsv4-repro/diagnosis/1"

Outcome = Literal["hang", "clean", "other", "inconclusive"]
Confidence = Literal["high", "medium", "low"]
#: How a fact came to be known; interpreted: the same as measured, by the interpreter instead of a device.
Fact = Literal["measured", "interpreted", "computed", "inferred", "not observed"]
Ground = Literal["server", "gpu", "cpu", "process", "file"]

#: class -> (causes, outcome, weaker parent). A right parent is a weaker right answer; a sibling is a wrong one.
CLASSES: dict[str, tuple[tuple[str, ...], Outcome, str | None]] = {
    "gpu-spin-barrier": (
        ("peer-left", "not-co-resident", "init-race", "stale-counter", "reset-race", "missing-fence"),
        "hang", "gpu-kernel-stuck",
    ),
    "gpu-barrier-intra-block": (("phase-wait", "named-barrier", "cluster-peer"), "hang", "gpu-kernel-stuck"),
    "gpu-crossrank-spin": (("peer-behind", "two-streams"), "hang", "gpu-kernel-stuck"),
    "gpu-kernel-stuck": ((), "hang", "unknown"),
    "collective-desync": (("diverged",), "hang", "unknown"),
    "collective-stuck": (("transport",), "hang", "unknown"),
    "host-jit-lock": (("holder-dead", "build-failed"), "hang", "host-jit-compile"),
    "host-jit-compile": ((), "other", "unknown"),
    "host-weight-load": ((), "other", "unknown"),
    "host-ipc-stall": (("lost-wakeup",), "hang", "unknown"),
    "host-cpu-livelock": ((), "hang", "unknown"),
    "scheduler-stall": (("admission", "deferred"), "hang", "unknown"),
    "kv-pressure-thrash": (("admission", "deferred"), "hang", "unknown"),
    "kv-transfer-stall": (("admission", "deferred"), "hang", "unknown"),
    "worker-dead": (("oom-killed", "signal", "exit"), "other", "unknown"),
    "gpu-fault": (("illegal-access", "misaligned", "cluster-target"), "other", "unknown"),
    "gpu-lost": (("xid",), "other", "unknown"),
    "launch-refused": (("oversubscribed",), "other", "unknown"),
    "wrong-result": (("histogram-ring", "overflow", "padding"), "other", "unknown"),
    "not-hung": (("slow-step", "startup", "client-gone", "idle"), "clean", "unknown"),
    "unknown": ((), "inconclusive", None),
}  # fmt: skip


def outcome_of(class_: str) -> Outcome:
    """The outcome that a class means."""
    return CLASSES[class_][1]


def weaker_parent(class_: str) -> str | None:
    """The class to fall back to when the evidence is too thin; None for ``unknown``."""
    return CLASSES[class_][2]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class Verdict(_Record):
    """What it is. ``class`` and ``cause`` are words of CLASSES; ``signature`` names a published case or is None."""

    class_: str = Field(alias="class", serialization_alias="class")
    cause: str | None = None
    confidence: Confidence = "low"
    signature: str | None = None
    identity: str | None = None
    sentence: str = ""

    @model_validator(mode="after")
    def _known_words(self) -> Verdict:
        if self.class_ not in CLASSES:
            raise ValueError(f"no such class: {self.class_}")
        if self.cause is not None and self.cause not in CLASSES[self.class_][0]:
            raise ValueError(f"class {self.class_} has no cause {self.cause}")
        return self


class Wait(_Record):
    """One CTA that waits: the equation ``value comparison target`` that is false, and where its words lie.

    ``pc_offset``: bytes from the function's start. ``address``: of the polled word, as hex, None if not known. ``value``: as
    loaded. ``instructions``: the loop's instructions (offset, text) that prove the equation. ``role``: leader, peer or None.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    warp: int | None = None
    pc_offset: int | None = None
    address: str | None = None
    value: int | None = None
    target: int | None = None
    comparison: str | None = None
    state_field: str | None = None
    group: int | None = None
    role: Literal["leader", "peer"] | None = None
    device: int | None = None
    rank: int | None = None
    instructions: tuple[tuple[int, str], ...] = ()


class LedgerGroup(_Record):
    """Arrivals of one CTA group. Lists of blockIdx.x; each block of the group stands in exactly one list.

    ``inferred``: which of the lists are inference (an exited block leaves no trace in a dump) and from what.
    """

    group: int
    running: tuple[int, ...] = ()
    spinning: tuple[int, ...] = ()
    exited: tuple[int, ...] = ()
    never_started: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    inferred: str = ""


class ChainLink(_Record):
    """One link of the causal chain; ``link`` is one of: drain, mtp, graph-padding, producer, compression, dispatch, disagreement,
    barrier, host. ``evidence``: ids."""

    link: str
    status: Fact
    text: str
    evidence: tuple[str, ...] = ()


class Window(_Record):
    """The danger window: the live-request count and padding that can wedge, and whether the run reached it."""

    live_requests: int | None = None
    rows: int | None = None
    graph_rows: int | None = None
    padded_requests: int | None = None
    reached: bool | None = None


class UnreadItem(_Record):
    """What could not be read, why, and the remedy."""

    what: str
    why: str
    remedy: str = ""


class Evidence(_Record):
    """One artefact. ``path`` is relative to the run directory, or the file that was given."""

    id: str
    kind: str
    path: str | None = None
    sha256: str | None = None
    origin: Literal["measured", "interpreted", "reported"] = "measured"
    when: str | None = None


class Diagnosis(_Record):
    """The document. Extra keys are welcome; these are always there."""

    schema_: str = Field(default=DIAGNOSIS_SCHEMA, alias="schema", serialization_alias="schema")
    outcome: Outcome
    ground: Ground
    verdict: Verdict
    waits: tuple[Wait, ...] = ()
    ledger: tuple[LedgerGroup, ...] = ()
    chain: tuple[ChainLink, ...] = ()
    window: Window = Window()
    unread: tuple[UnreadItem, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    next: str = ""

    @model_validator(mode="after")
    def _honest(self) -> Diagnosis:
        if self.verdict.class_ == "not-hung" and self.waits:
            raise ValueError("a not-hung verdict must not carry waiting CTAs")
        if self.verdict.class_ == "gpu-spin-barrier" and not self.waits and not self.unread:
            raise ValueError("a gpu-spin-barrier verdict carries the wait or says what could not be read")
        known = {item.id for item in self.evidence}
        for link in self.chain:
            missing = set(link.evidence) - known
            if missing:
                raise ValueError(f"chain link {link.link} cites evidence that is not listed: {sorted(missing)}")
        return self

    def document(self) -> dict[str, Any]:
        """The JSON document with its published key names."""
        return self.model_dump(mode="json", by_alias=True)
