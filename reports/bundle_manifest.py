"""What a bundle says of itself: the manifest, the redaction report, README.txt and reproduce.sh. Pure: facts in, documents out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "BUNDLE_SCHEMA",
    "ENVIRONMENT",
    "MANIFEST",
    "README",
    "REDACTION",
    "REPRODUCE",
    "SUMS",
    "manifest_document",
    "readme_text",
    "redaction_document",
    "reproduce_script",
]

BUNDLE_SCHEMA = "dsv4-repro/bundle/1"
REDACTION_SCHEMA = "dsv4-repro/redaction/1"
MANIFEST, REDACTION, SUMS = "manifest.json", "redaction.json", "SHA256SUMS"
README, REPRODUCE, ENVIRONMENT = "README.txt", "reproduce.sh", "environment.json"


def manifest_document(
    *,
    created: str,
    version: str,
    diagnosis: Mapping[str, Any] | None,
    raw: bool,
    max_bytes: int,
    files: Sequence[Mapping[str, Any]],
    left_out: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """``manifest.json``. ``files``: an entry a file with its ``how``; ``left_out``: path and why; ``diagnosis``: as JSON."""
    verdict = (diagnosis or {}).get("verdict")
    return {
        "schema": BUNDLE_SCHEMA,
        "created": created,
        "written_by": f"dsv4-repro {version}",
        "outcome": (diagnosis or {}).get("outcome"),
        "verdict": {key: verdict.get(key) for key in ("class", "cause", "confidence", "signature", "identity")}
        if verdict
        else None,
        "raw": raw,
        "redacted": True,
        "max_bytes": max_bytes,
        "files": files,
        "left_out": sorted(left_out, key=lambda item: str(item["path"])),
        "cut": [entry["path"] for entry in files if "cut" in entry["how"]],
        "check": "sha256sum -c SHA256SUMS",
        "judge_again": "dsv4-repro autopsy BUNDLE.zip",
    }


def redaction_document(keep: Sequence[str], replaced: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``redaction.json``. ``keep``: what was kept on request; ``replaced``: of ``redact.Tally.document``."""
    return {
        "schema": REDACTION_SCHEMA,
        "method": "Each value is replaced by a pseudonym: HMAC-SHA256 under a key that was made for this bundle and not kept. "
        "The same value has the same pseudonym everywhere in this bundle, and another one in another bundle.",
        "kept_on_request": sorted(keep),
        "replaced": replaced,
        "limits": "Names are found where something marks them as names (host=, /home/, a log prefix), then everywhere. A name "
        "that nothing marks is not found: read the texts before you send them, and use --hide TEXT.",
    }


def reproduce_script(command: Sequence[str]) -> bytes:
    """``reproduce.sh``: how to judge the evidence again, and the command of the run where it is known."""
    lines = [
        "#!/bin/sh",
        "# Judge the evidence of this bundle again, on any machine, without a GPU:",
        "#     dsv4-repro autopsy BUNDLE.zip",
        "# What was run (values that were private are pseudonyms):",
        "",
        shlex.join(command) if command else "# the run record names no command",
        "",
    ]
    return "\n".join(lines).encode("utf-8", "backslashreplace")


def readme_text(version: str, created: str, verdict: str, manifest: Mapping[str, Any]) -> bytes:
    """``README.txt``. ``verdict``: in words."""
    lines = [
        f"Evidence of a hang, packed by dsv4-repro {version} on {created}.",
        f"Verdict: {verdict}",
        "",
        "report.html     the report for a person (open it in a browser; it loads nothing)",
        "report.md       the same as text for a GitHub issue",
        "diagnosis.json  the same for a program",
        "evidence/       what it rests on; index.json names it",
        "manifest.json   what is in here with hashes, what is not and why",
        "redaction.json  what was replaced by pseudonyms, and where",
        "",
        f"{len(manifest['files'])} files, {len(manifest['left_out'])} left out, {len(manifest['cut'])} cut to size.",
        "Judge it again without a GPU:  dsv4-repro autopsy BUNDLE.zip",
    ]
    return ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace")
