"""Publish the JSON Schemas: ``python -m dsv4_repro.repro.schemas docs/schemas`` writes one file a document.

Other modules publish theirs by a line in ``PUBLISHED``; a test compares the committed files with what this writes.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["PUBLISHED", "main", "schema_of", "write_schemas"]

#: File name -> (module of this package, a pydantic model, or a function that returns the schema).
PUBLISHED: Mapping[str, tuple[str, str]] = {
    "agent": ("repro.agent_show", "AgentDocument"),
    "audit": ("forensics.audit.verdicts", "AuditReport"),
    "bundle": ("reports.bundle_records", "BundleDocument"),
    "bisect": ("repro.campaign.documents", "BisectDocument"),
    "diagnosis": ("forensics.records", "Diagnosis"),
    "doctor": ("repro.doctor", "DoctorReport"),
    "drain-plan": ("scenarios.drain", "schema"),
    "error": ("repro.documents", "ErrorDocument"),
    "evidence": ("repro.run_records", "EvidenceIndex"),
    "explore": ("repro.campaign.documents", "ExploreDocument"),
    "hunt": ("repro.campaign.documents", "HuntDocument"),
    "list": ("repro.documents", "ListDocument"),
    "load-plan": ("repro.serving.load_plan", "schema"),
    "minimise": ("repro.campaign.documents", "MinimiseDocument"),
    "relative-matrix": ("repro.campaign.documents", "MatrixDocument"),
    "probe": ("repro.probe_verb", "probe_schema"),
    "run": ("repro.run_records", "RunRecord"),
    "selftest": ("repro.selftest", "SelftestReport"),
    "show": ("repro.documents", "ShowDocument"),
    "timeline-line": ("repro.run_records", "TimelineLine"),
    "unwedge": ("repro.unwedge_verb", "UnwedgeDocument"),
    "verify": ("repro.campaign.documents", "VerifyDocument"),
    "webhook": ("repro.serving.hang_actions", "webhook_schema"),
    "why": ("repro.why_document", "WhyDocument"),
    "verify-rows": ("repro.campaign.documents", "VerifyRowsDocument"),
}


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema of one published document; KeyError if there is none of that name."""
    module, attribute = PUBLISHED[name]
    package = (__package__ or "").rpartition(".")[0]
    source = getattr(importlib.import_module(f"{package}.{module}"), attribute)
    schema = source.model_json_schema(by_alias=True) if hasattr(source, "model_json_schema") else source()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"dsv4-repro/{name}", **schema}


def write_schemas(folder: Path) -> list[Path]:
    """Write every schema; the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in sorted(PUBLISHED):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(schema_of(name), indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
        written.append(path)
    return written


def main(argv: list[str]) -> int:
    """Write the schemas into the folder given."""
    if len(argv) != 2:
        sys.stderr.write("usage: python -m dsv4_repro.repro.schemas FOLDER\n")
        return 2
    for path in write_schemas(Path(argv[1])):
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
