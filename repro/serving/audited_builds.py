"""What an earlier audit of a running server's code said, kept in the user's cache for ``why``, which has no half minute.

The key is the loaded file itself (device, inode, size, time of change; its name may be any) and the recipe that the flags make: a
rebuilt library or other flags make it another question. Nothing is kept that the audit did not say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...forensics.audit.recipe import Recipe
from ...forensics.audit.verdicts import BuildAudit
from ...kernels.cache import Cache, content_key

__all__ = ["Audited", "recall_audit", "remember_audit"]

_KIND = "audit-live"
_WORDS = frozenset({"VULNERABLE", "PROVED", "HOLDS", "NOT PRESENT", "CANNOT TELL"})


@dataclass(frozen=True, slots=True)
class Audited:
    """``answers``: architecture -> (word, live-request counts at which it wedges). ``when``: ISO 8601."""

    answers: dict[str, tuple[str, tuple[int, ...]]]
    when: str


def _key(libraries: Sequence[Path], recipe: Recipe) -> str | None:
    parts = []
    for path in sorted(libraries, key=lambda item: item.name):
        try:
            status = os.stat(path)
        except OSError:
            return None
        parts.append(f"{path.name} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}")
    return content_key(*parts, repr(recipe)) if parts else None


def remember_audit(libraries: Sequence[Path], recipe: Recipe, audit: BuildAudit, when: str) -> bool:
    """Keep the answers for these loaded files (paths that can be opened here); False if there is nothing to keep, or no cache."""
    key = _key(libraries, recipe)
    if key is None or not audit.recipe:
        return False
    answers = {item.arch: [item.word, list(item.wedges_at)] for item in audit.recipe}
    return Cache(_KIND).store(key, json.dumps({"when": when, "answers": answers}).encode())


def recall_audit(libraries: Sequence[Path], recipe: Recipe) -> Audited | None:
    """What was kept; None for nothing, or for what makes no sense."""
    key = _key(libraries, recipe)
    raw = Cache(_KIND).load(key) if key is not None else None
    if raw is None:
        return None
    try:
        document = json.loads(raw)
        answers = {
            str(arch): (str(word), tuple(int(count) for count in counts)) for arch, (word, counts) in document["answers"].items()
        }
        when = str(document["when"])[:40]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not answers or any(word not in _WORDS for word, _ in answers.values()):
        return None
    return Audited(answers, when)
