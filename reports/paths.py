"""The names of the files in a run directory: one module owns them.

::

    run.json          what was asked, environment, versions, seed, trials, outcome      (rewritten atomically)
    timeline.jsonl    one JSON object a line, in the order in which things happened     (append-only)
    evidence/         raw artefacts, and index.json with their sha256                    (index rewritten atomically)
    diagnosis.json    the diagnosis document, schema dsv4-repro/diagnosis/1              (rewritten atomically)
    report.md         the same for a person                                              (rewritten atomically)
"""

from __future__ import annotations

__all__ = ["DIAGNOSIS", "EVIDENCE", "EVIDENCE_INDEX", "REPORT_MD", "RUN", "TIMELINE"]

RUN = "run.json"
TIMELINE = "timeline.jsonl"
EVIDENCE = "evidence"
EVIDENCE_INDEX = "index.json"
DIAGNOSIS = "diagnosis.json"
REPORT_MD = "report.md"
