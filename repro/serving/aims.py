"""The windows that a drain load aims at, and what all parts of its plan share: frozen fields, and errors that name place and rule.

A window is (live requests, rows of the graph that they are padded to, MTP depth): ``window`` does the arithmetic with the server's
own capture rule (kernels/graphs.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...errors import PlanError
from ...kernels.graphs import pad_to_graph
from ...scenarios.drain import invalid_fields

__all__ = ["MAX_LIVE", "MAX_MTP", "PLAN_HELP", "Aim", "PlanPart", "plan_errors", "window"]

#: Most requests that decode at once, and speculative tokens per step.
MAX_LIVE, MAX_MTP = 4096, 15
PLAN_HELP = "See the fields and an example: dsv4-repro show drain; make a new plan: leave --plan out"


class PlanPart(BaseModel):
    """A part of a load plan: frozen, and no field that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


@contextmanager
def plan_errors() -> Iterator[None]:
    """A plan that makes no sense is a PlanError that names place, value and rule."""
    try:
        yield
    except ValidationError as error:
        raise PlanError(invalid_fields(error), help_text=PLAN_HELP) from None


class Aim(PlanPart):
    """One window: ``live`` requests of ``mtp`` + 1 rows each, in a FULL graph of ``graph_rows`` rows (null: launched eagerly)."""

    live: int = Field(ge=1, le=MAX_LIVE, description="Live requests, exactly.")
    mtp: int = Field(ge=0, le=MAX_MTP, description="Speculative tokens per request and step.")
    graph_rows: int | None = Field(default=None, ge=1, le=1 << 20, description="Rows of the graph they are padded to; null: eager.")
    steps: int = Field(default=2, ge=1, le=100_000, description="Decode steps in the window before it may be left.")
    required: bool = Field(default=True, description="The load is steered into it; others are only counted when they happen.")

    @model_validator(mode="after")
    def _holds(self) -> Aim:
        if self.graph_rows is not None and (self.graph_rows < self.rows or self.graph_rows % (self.mtp + 1)):
            raise ValueError(f"a graph of {self.graph_rows} rows does not hold {self.live} x {self.mtp + 1} rows")
        return self

    @property
    def rows(self) -> int:
        """Rows without padding."""
        return self.live * (self.mtp + 1)

    @property
    def padded_requests(self) -> int:
        """Request slots without a request."""
        return 0 if self.graph_rows is None else (self.graph_rows - self.rows) // (self.mtp + 1)

    @property
    def text(self) -> str:
        """The window in words."""
        rows = f"{self.live} live x {self.mtp + 1} = {self.rows} rows"
        if self.graph_rows is None:
            return f"{rows}, eager"
        return f"{rows} in a graph of {self.graph_rows}" + (f", {self.padded_requests} padded" if self.padded_requests else "")


def window(live: int, mtp: int, graph_sizes: Sequence[int], *, steps: int = 2, required: bool = True) -> Aim:
    """The window of ``live`` requests on a server that captured ``graph_sizes`` rows (empty: eager). PlanError."""
    with plan_errors():
        return Aim(live=live, mtp=mtp, graph_rows=pad_to_graph(live * (mtp + 1), graph_sizes), steps=steps, required=required)
