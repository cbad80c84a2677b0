"""Our own documents among the evidence: the diagnosis of a run directory or a bundle. An earlier verdict is evidence, not truth."""

from __future__ import annotations

import json

from .casefile import CaseFile
from .refs import Section

__all__ = ["read_documents"]


def read_documents(section: Section, case: CaseFile) -> None:
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
