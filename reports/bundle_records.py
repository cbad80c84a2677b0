"""The documents of a bundle, for their JSON Schemas: the manifest, and what ``bundle --json`` prints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["BundleDocument", "BundleFileEntry", "LeftOut", "RedactedKind", "RedactedPlace", "RedactionReport"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class BundleFileEntry(_Record):
    """A file in the bundle. ``how``: made, redacted, redacted and cut, stripped, tables, code, as it was. ``size`` in bytes."""

    path: str
    sha256: str
    size: int
    how: str
    kind: str
    origin: str = ""
    note: str = ""


class LeftOut(_Record):
    """What is not in the bundle, and why."""

    path: str
    why: str


class RedactedPlace(_Record):
    """Where a rule replaced values: ``file`` (``#`` and a path of keys in a document), the first ``lines`` of the original."""

    file: str
    rule: str
    count: int
    lines: tuple[int, ...] = ()


class RedactedKind(_Record):
    """One kind of value: how many were replaced, how many different ones, and where."""

    kind: str
    what: str
    replaced: int
    different_values: int
    places: tuple[RedactedPlace, ...]


class RedactionReport(_Record):
    """``redaction.json``: what was replaced where; never the values."""

    schema_: Literal["dsv4-repro/redaction/1"] = Field(alias="schema")
    method: str
    kept_on_request: tuple[str, ...] = ()
    replaced: tuple[RedactedKind, ...] = ()
    limits: str


class BundleDocument(_Record):
    """``manifest.json``; ``bundle --json`` adds ``path``, ``bytes`` and ``redaction``."""

    schema_: Literal["dsv4-repro/bundle/1"] = Field(alias="schema")
    created: str
    written_by: str
    outcome: str | None = None
    verdict: dict[str, Any] | None = None
    raw: bool
    redacted: bool
    max_bytes: int
    files: tuple[BundleFileEntry, ...]
    left_out: tuple[LeftOut, ...] = ()
    cut: tuple[str, ...] = ()
    path: str | None = None
    bytes: int | None = None
    redaction: RedactionReport | None = None
