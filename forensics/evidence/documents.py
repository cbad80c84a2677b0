"""Our own documents among the evidence: run records, reports, bundles, an earlier diagnosis. And pages that are no evidence at all.

A report quotes log lines; read as a log it would be counted as a second witness. An earlier verdict is evidence, not truth.
"""

from __future__ import annotations

import json
import re

from .casefile import CaseFile
from .refs import Section

__all__ = ["read_documents", "retelling"]

_SCHEMA = re.compile(r'"schema":\s*"dsv4-repro/([\w-]+)/\d+"')
#: Documents of ours that others have not told: an earlier verdict, and what the agent in a worker wrote.
_EVIDENCE = ("diagnosis", "agent-status", "agent-answer")
_TIMELINE = re.compile(rb'^\{"t": -?[\d.]+, "at": "[^"]+", "kind": "')
_SUMS = re.compile(r"^[0-9a-f]{64}  \S")
_PACKED = re.compile(r"^Evidence of a hang, packed by dsv4-repro ")
_REPORT = re.compile(
    r"dsv4-repro(?:/report)?[ /]\d|dsv4-repro (?:run|autopsy|audit|unwedge|verify|bundle) |### Your current environment"
)


def retelling(section: Section, first_line: bytes = b"") -> str | None:
    """What a part is, if it tells again what others have seen (or is no text of that kind at all): then no reader
    looks at it. ``first_line``: as it was, out of no envelope."""
    head = section.text[:4096].lstrip()
    lowered = head[:200].lower()
    if lowered.startswith(("<!doctype html", "<html")):
        return "a web page"
    if lowered.startswith("<?xml"):
        return "XML"
    found = _SCHEMA.search(head) if head.startswith("{") else None
    if found is not None and found.group(1) not in _EVIDENCE:
        return f"our own record ({found.group(1)})"
    if _TIMELINE.match(first_line):
        return "our own record (timeline)"
    if _PACKED.match(head) or (_SUMS.match(head) and section.source.endswith("SHA256SUMS")):
        return "our own record (bundle)"
    name = section.source.rsplit("/", 1)[-1].rsplit("!", 1)[-1]
    if name == "report.md" and head.startswith("#") and _REPORT.search(section.text[:200_000]):
        return "our own report"
    return None


def read_documents(section: Section, case: CaseFile) -> None:
    """An earlier diagnosis: kept for ``autopsy`` to compare with its own."""
    text = section.text
    if "dsv4-repro/diagnosis/" not in text:
        return
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(document, dict) and str(document.get("schema", "")).startswith("dsv4-repro/diagnosis/"):
        section.claim(0, len(section.lines) - 1)
        case.prior.append((document, section.whole()))
