"""The shapes of the ``--json`` documents of verify, hunt, minimise and bisect, for their published JSON Schemas."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "BisectDocument",
    "ExploreDocument",
    "HuntDocument",
    "MatrixDocument",
    "MinimiseDocument",
    "VerifyDocument",
    "VerifyRowsDocument",
]

_Outcome = Literal["hang", "clean", "other", "inconclusive"]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class Hazard(_Document):
    """Two one-sided exact bounds on the hang hazard per danger window."""

    low: float
    high: float
    confidence: float


class VerifyRow(_Document):
    """A row of the matrix. ``identities``: hang identity -> hangs."""

    name: str
    change: str
    word: Literal["HANGS", "CLEAN", "INCONCLUSIVE"]
    trials: int
    windows: int
    hangs: int
    hazard: Hazard | None
    identities: dict[str, int]


class VerifyDocument(_Document):
    """``dsv4-repro verify SCENARIO --json``. ``said``: what the rows say together; ``markdown``: the table."""

    schema_: Literal["dsv4-repro/verify/1"] = Field(alias="schema")
    outcome: _Outcome
    scenario: str
    ground: str
    rates: dict[str, float]
    rows: tuple[VerifyRow, ...]
    said: tuple[str, ...]
    markdown: str
    ablate: bool
    exit_status: int


class RowDocument(_Document):
    """A row of a relative's matrix. ``word``, ``bad``, ``rate``, ``bounds``: of ``verify``; ``run``, ``device``: of a card."""

    row: str
    kernel: str
    fixed: bool
    expected: dict[str, str | None]
    found: dict[str, str | None]
    as_expected: bool
    launches: int
    counts: tuple[dict[str, Any], ...]
    sentence: str
    word: Literal["SHOWN", "NOT SHOWN", "OTHER", "CLEAN", "BROKEN", "OPEN"] | None = None
    bad: int | None = None
    rate: str | None = None
    bounds: tuple[dict[str, Any], ...] = ()
    run: str | None = None
    device: str | None = None


class MatrixDocument(_Document):
    """``dsv4-repro run NAME --all --json``. ``not_run``: row, kernel, why; ``not_reproduced``: what, and what it would take."""

    schema_: Literal["dsv4-repro/relative-matrix/1"] = Field(alias="schema")
    outcome: _Outcome
    scenario: str
    ground: str
    rows: tuple[RowDocument, ...]
    not_run: tuple[dict[str, str], ...]
    not_reproduced: tuple[dict[str, str], ...]


class VerifyRowsDocument(_Document):
    """``dsv4-repro verify NAME --json`` for a scenario with rows of its own."""

    schema_: Literal["dsv4-repro/verify-rows/1"] = Field(alias="schema")
    outcome: _Outcome
    scenario: str
    ground: str
    rates: dict[str, float]
    rows: tuple[RowDocument, ...]
    not_run: tuple[dict[str, str], ...]
    not_reproduced: tuple[dict[str, str], ...]
    said: tuple[str, ...]
    markdown: str
    seconds: float
    exit_status: int


class ExploreEnd(_Document):
    """One end that can be reached: its name, the counters there, and the shortest way."""

    name: str
    counters: tuple[int, ...]
    path: tuple[str, ...]


class ExploreDocument(_Document):
    """``dsv4-repro run NAME --explore --json``: every order of execution over the barrier's model."""

    schema_: Literal["dsv4-repro/explore/1"] = Field(alias="schema")
    outcome: _Outcome
    scenario: str
    row: str
    states: int
    ends: tuple[ExploreEnd, ...]


class HuntHang(_Document):
    """One kind of hang."""

    identity: str
    class_: str = Field(alias="class")
    cause: str | None
    signature: str | None
    first_trial: int
    hangs: int


class HuntDocument(_Document):
    """``dsv4-repro hunt PLAN --json``. ``kinds``: how trials ended -> how many; ``compared``: against an earlier campaign."""

    schema_: Literal["dsv4-repro/hunt/1"] = Field(alias="schema")
    outcome: _Outcome
    ended_by: str
    name: str
    trials: int
    kinds: dict[str, int]
    windows_reached: int
    hangs: tuple[HuntHang, ...]
    factors: dict[str, dict[str, dict[str, int]]]
    compared: tuple[dict[str, Any], ...] | None
    store: str
    exit_status: int


class MinimiseDocument(_Document):
    """``dsv4-repro minimise RUN --json``, and ``minimised.json``."""

    schema_: Literal["dsv4-repro/minimise/1"] = Field(alias="schema")
    outcome: Literal["hang"]
    identity: str
    confidence: dict[str, Any]
    plan: dict[str, Any]
    case: dict[str, Any]
    launch: dict[str, Any]
    candidates: int
    trials: int
    steps: tuple[str, ...]


class BisectDocument(_Document):
    """``dsv4-repro bisect --json``. ``between``: builds between the two neighbours that could not be judged."""

    schema_: Literal["dsv4-repro/bisect/1"] = Field(alias="schema")
    outcome: Literal["clean", "inconclusive"]
    predicate: Literal["hang", "audit", "present"]
    before: str | None
    after: str | None
    becomes: Literal["good", "bad"] | None
    between: tuple[str, ...]
    why_not: str
    steps: tuple[dict[str, str], ...]
    exit_status: int
