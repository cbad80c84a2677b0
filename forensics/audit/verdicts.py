"""The audit's document (schema ``dsv4-repro/audit/1``): findings of each layer, the answer for the recipe, and the words that may
stand in it.

VULNERABLE (with witness), PROVED (no such input exists), HOLDS (checked, not proved), NOT PRESENT, CANNOT TELL. Pydantic models,
frozen;
``AuditReport.model_json_schema()`` is the published JSON Schema.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "AUDIT_SCHEMA", "ORDER", "AuditReport", "BuildAudit", "BuildIdentity", "ConsumerFinding", "DispatchFinding", "LiveCount",
    "MitigationFinding",
    "ProducerFinding", "RecipeAnswer", "RelativeFinding", "Unread", "Witness", "Word", "worst",
]  # fmt: skip

AUDIT_SCHEMA = "dsv4-repro/audit/1"
Word = Literal["VULNERABLE", "PROVED", "HOLDS", "NOT PRESENT", "CANNOT TELL"]
#: From worst to best: what a summary of several findings says.
ORDER: tuple[Word, ...] = ("VULNERABLE", "CANNOT TELL", "HOLDS", "PROVED", "NOT PRESENT")


def worst(words: list[Word]) -> Word:
    """The word that stands for several: any VULNERABLE wins, then CANNOT TELL; NOT PRESENT only if all are."""
    return next((word for word in ORDER if word in words), "NOT PRESENT")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Unread(_Record):
    """What could not be read, why, and the remedy."""

    what: str
    why: str
    remedy: str = ""


class BuildIdentity(_Record):
    """Which build it is. ``known``: its bytes are those of a published release; ``claims``: what its metadata says about itself."""

    name: str
    known: bool
    claims: str = ""
    how: str = ""
    library: str = ""
    sha256: str = ""
    machine: str = ""
    architectures: tuple[str, ...] = ()


class Witness(_Record):
    """An input that shows the defect. ``length`` as int32. ``replay``: what the machine code did with it on the CPU ground."""

    length: int
    max_seq_len: int
    stride: int
    ctas_per_group: int = 2
    groups: int = 8
    rows: int = 8
    row: int = 6
    launcher: str = ""
    instructions: tuple[tuple[int, str], ...] = ()
    replay: str = "not replayed"
    replayed: bool | None = None


class ConsumerFinding(_Record):
    """One instantiation of the kernel on one architecture. ``question``: ``agreement`` or ``bounds``.

    ``covered``: the group shapes for which it was asked and whether their conditions are the same terms; ``assumptions``: of the
    launcher. ``exhaustive``: lengths of 2^32 that enter the barrier path at the witness's sizes, None if they were not all run.
    """

    arch: str
    top_k: int
    vec: int
    question: Literal["agreement", "bounds"]
    word: Word
    function: str = ""
    condition: str = ""
    witness: Witness | None = None
    covered: str = ""
    assumptions: tuple[str, ...] = ()
    exhaustive: int | None = None
    why: str = ""
    milliseconds: float = 0.0

    @model_validator(mode="after")
    def _shown(self) -> ConsumerFinding:
        if self.word == "VULNERABLE" and self.witness is None:
            raise ValueError("VULNERABLE comes with a witness")
        if self.word == "CANNOT TELL" and not self.why:
            raise ValueError("CANNOT TELL says why")
        return self


class ProducerFinding(_Record):
    """One expansion path. ``lengths``: what it makes of ``input``; ``padding``: those of the padding slot. ``how``: interpreted
    or syntax."""

    path: str
    word: Word
    input: str = ""
    lengths: tuple[int | None, ...] = ()
    padding: tuple[int | None, ...] = ()
    where: str = ""
    how: Literal["interpreted", "syntax"] = "interpreted"
    why: str = ""


class DispatchFinding(_Record):
    """Which operator the recipe reaches on an architecture, for the batch of three live requests; what is passed for max_seq_len.

    ``max_seq_len_is``: ``width``, ``batch`` (the uncompressed maximum), ``constant`` or ``not passed``.
    """

    arch: str
    operator: str
    rows: int = 0
    stride: int = 0
    max_seq_len: int | None = None
    max_seq_len_is: str = ""
    lengths: tuple[int | None, ...] = ()
    zeroed: str = ""
    where: str = ""
    why: str = ""


class LiveCount(_Record):
    """One live-request count. ``word`` VULNERABLE: it wedges. ``graph_rows``: rows after padding."""

    live: int
    graph_rows: int
    word: Word
    operator: str = ""
    why: str = ""


class RecipeAnswer(_Record):
    """Whether the recipe wedges on an architecture, and at which live-request counts of a rank."""

    arch: str
    word: Word
    wedges_at: tuple[int, ...] = ()
    counts: tuple[LiveCount, ...] = ()
    device: str = ""
    why: str = ""


class MitigationFinding(_Record):
    """A change of the recipe or the build, checked by the same machinery. PROVED/HOLDS: it removes the wedge."""

    name: str
    change: str
    arch: str
    word: Word
    why: str = ""


class RelativeFinding(_Record):
    """A related defect, with its upstream number. ``how``: interpreted (machine code run here), computed, syntax, compared."""

    name: str
    number: str
    word: Word
    arch: str = ""
    how: str = ""
    why: str = ""
    evidence: tuple[str, ...] = ()


class BuildAudit(_Record):
    """Everything about one target."""

    target: str
    build: BuildIdentity
    consumer: tuple[ConsumerFinding, ...] = ()
    producer: tuple[ProducerFinding, ...] = ()
    dispatch: tuple[DispatchFinding, ...] = ()
    recipe: tuple[RecipeAnswer, ...] = ()
    mitigations: tuple[MitigationFinding, ...] = ()
    relatives: tuple[RelativeFinding, ...] = ()
    unread: tuple[Unread, ...] = ()
    seconds: float = 0.0

    @property
    def kernel_word(self) -> Word:
        """The agreement verdict over all architectures and instantiations."""
        words = [item.word for item in self.consumer if item.question == "agreement"]
        if words:
            return worst(words)
        return "CANNOT TELL" if self.unread else "NOT PRESENT"

    @property
    def bounds_word(self) -> Word:
        words = [item.word for item in self.consumer if item.question == "bounds"]
        return worst(words) if words else self.kernel_word

    @property
    def producer_word(self) -> Word:
        return worst([item.word for item in self.producer]) if self.producer else "CANNOT TELL"

    @property
    def recipe_word(self) -> Word:
        return worst([item.word for item in self.recipe]) if self.recipe else "CANNOT TELL"


class AuditReport(_Record):
    """The document."""

    schema_: str = Field(default=AUDIT_SCHEMA, alias="schema", serialization_alias="schema")
    outcome: Literal["vulnerable", "clean", "inconclusive"]
    recipe: dict[str, Any] = Field(default_factory=dict)
    builds: tuple[BuildAudit, ...] = ()
    solver: str = ""
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        """The JSON document with its published key names."""
        return self.model_dump(mode="json", by_alias=True)
