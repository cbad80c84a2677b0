"""The shapes of the small ``--json`` documents: errors, list, show, for their JSON Schemas; larger ones lie with their verbs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ErrorDocument", "ListDocument", "ListEntry", "ShowDocument"]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class ErrorDocument(_Document):
    """Standard output of a verb that ended with an error, with ``--json``."""

    schema_: Literal["dsv4-repro/error/1"] = Field(alias="schema")
    outcome: Literal["inconclusive", "error"]
    error: str
    message: str
    help: str
    exit_status: int


class ListEntry(_Document):
    """A scenario in ``list``. ``here``: ground -> "yes" or why not; ``rows_on``: ground -> rows that can run there."""

    name: str
    title: str
    class_: str = Field(alias="class")
    cause: str | None
    signature: str | None
    upstream: tuple[str, ...]
    here: dict[str, str]
    rows: tuple[str, ...] = ()
    rows_on: dict[str, tuple[str, ...]] = {}
    not_reproduced: tuple[str, ...] = ()


class ListDocument(_Document):
    """``dsv4-repro list --json``."""

    schema_: Literal["dsv4-repro/list/1"] = Field(alias="schema")
    outcome: Literal["clean"]
    scenarios: tuple[ListEntry, ...]


class ShowDocument(_Document):
    """``dsv4-repro show NAME --json``; ``plan_schema``: JSON Schema of the scenario's plan, where it has one."""

    schema_: Literal["dsv4-repro/show/1"] = Field(alias="schema")
    outcome: Literal["clean"]
    scenario: dict[str, Any]
    here: dict[str, str]
    plan_schema: dict[str, Any] | None = None
