"""Citations in the document: every part that held something is evidence with an id, and every line that a rule used names it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .evidence.casefile import CaseFile, InputPart
from .evidence.refs import Ref
from .records import Evidence
from .rules.base import Finding

__all__ = ["EvidenceIds", "cite", "finding_row"]


class EvidenceIds:
    """Ids of the parts that held something, and the id of a citation."""

    def __init__(self, case: CaseFile) -> None:
        self.records: list[Evidence] = []
        self._by_source: dict[str, list[tuple[InputPart, str]]] = {}
        for part in case.parts:
            if not part.kinds:
                continue
            name = f"e{len(self.records) + 1}"
            interpreted = any(d.ref.source == part.path and d.origin == "interpreted" for d in case.devices)
            measured = bool({"GPU core dump", "agent ring", "agent"} & set(part.kinds))
            origin = "interpreted" if interpreted else "measured" if measured else "reported"
            self.records.append(
                Evidence.model_validate(
                    {"id": name, "kind": part.kinds[0], "path": part.path, "sha256": part.sha256, "origin": origin,
                        "heading": part.heading,
                     "kinds": list(part.kinds)}
                )
            )  # fmt: skip
            self._by_source.setdefault(part.path, []).append((part, name))
        self._spans = _spans(case)

    def of(self, ref: Ref) -> str | None:
        entries = self._by_source.get(ref.source, [])
        if len(entries) == 1:
            return entries[0][1]
        for part, name in entries:
            first, last = self._spans.get(id(part), (0, -1))
            if ref.unit == "line" and first <= ref.first <= last:
                return name
        return entries[0][1] if entries else None

    def of_all(self, refs: Sequence[Ref]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for ref in refs if (name := self.of(ref)) is not None))


def _spans(case: CaseFile) -> dict[int, tuple[int, int]]:
    """Line spans of the parts of each source: a part begins where the one before it ended."""
    spans: dict[int, tuple[int, int]] = {}
    ends: dict[str, int] = {}
    for part in case.parts:
        start = ends.get(part.path, 0) + 1
        last = start + part.lines + (1 if part.heading else 0) - 1
        spans[id(part)] = (start, last)
        ends[part.path] = last
    return spans


def cite(ref: Ref, ids: EvidenceIds) -> dict[str, Any]:
    return {
        "evidence": ids.of(ref),
        "source": ref.source,
        "first": ref.first,
        "last": ref.last,
        "unit": ref.unit,
        "text": ref.text,
        "place": ref.place(),
    }


def finding_row(finding: Finding, ids: EvidenceIds) -> dict[str, Any]:
    return {
        "rule": finding.rule, "class": finding.class_, "cause": finding.cause, "answer": finding.answer,
        "strength": finding.strength,
        "text": finding.text, "missing": finding.missing, "error": finding.error, "lines": [cite(ref,
        ids) for ref in finding.refs],
    }  # fmt: skip
