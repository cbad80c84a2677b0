"""How many run directories ``watch`` keeps, and how much they take: the oldest go first, the newest never.

Only directories that ``watch`` itself made are touched: the name of a run of ours, directly below the folder, not a link, with a
``run.json`` that says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path

from ...clock import SYSTEM, Clock
from ...forensics.evidence.opening import at_once
from ...reports import paths

__all__ = ["prune_runs", "size_of"]

_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
_MAX_RECORD = 4 << 20
#: A run is written within minutes (capture, diagnosis, report), seconds.
_WRITING_S = 3600.0


def _is_ours(path: Path, now: float) -> bool:
    if not _NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    try:
        with open(path / paths.RUN, "rb", opener=at_once) as stream:
            found = os.fstat(stream.fileno())
            record = json.loads(stream.read(_MAX_RECORD)) if stat.S_ISREG(found.st_mode) else None
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(record, dict) or record.get("scenario") != "watch":
        return False
    # Another watch on the same folder may be writing it; one whose writer was killed is told by its age.
    return record.get("state") != "running" or now - found.st_mtime > _WRITING_S


def size_of(path: Path) -> int:
    """Bytes of the files below ``path``; links are not followed, what cannot be read counts nothing."""
    total = 0
    for folder, _, names in os.walk(path, onerror=lambda _error: None):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


def prune_runs(root: Path, *, keep: int, max_bytes: int, clock: Clock = SYSTEM) -> list[Path]:
    """Remove runs below ``root`` until at most ``keep`` are left that take at most ``max_bytes`` in all; what was removed. The
    newest stays, whatever it takes."""
    try:
        ours = sorted((path for path in root.iterdir() if _is_ours(path, clock.wall())), key=lambda path: path.name)
    except OSError:
        return []
    sizes = {path: size_of(path) for path in ours}
    removed = []
    while len(ours) > 1 and (len(ours) > keep or sum(sizes[path] for path in ours) > max_bytes):
        oldest = ours.pop(0)
        shutil.rmtree(oldest, ignore_errors=True)
        if not os.path.lexists(oldest):
            removed.append(oldest)
    return removed
