"""Host threads for the reports, out of stack dumps: the evidence readers' samples in the shape that ``stacks_fold`` folds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import EvidenceError, UsageError
from ..forensics.evidence.gather import read_paths
from ..forensics.evidence.stack_meaning import WAITS
from .stacks_fold import HostThread

__all__ = ["read_threads"]

#: Stack dumps are small; a larger file is a log and is not searched for stacks here.
_MOST_BYTES = 8 << 20
_MOST_FILES = 200
_MARKS = (b"Thread ", b"Traceback for thread", b"most recent call first", b"(LWP", b'"frames"')


def _looks_like_stacks(path: Path) -> bool:
    try:
        if not path.is_file() or path.is_symlink() or path.stat().st_size > _MOST_BYTES:
            return False
        with path.open("rb") as stream:
            head = stream.read(1 << 16)
    except OSError:
        return False
    return any(mark in head for mark in _MARKS)


def read_threads(files: Sequence[tuple[str, Path]]) -> list[HostThread]:
    """Threads of every file that looks like a stack dump; none where nothing can be read. ``files``: (name, path)."""
    wanted = [path for _, path in files[:_MOST_FILES] if _looks_like_stacks(path)]
    if not wanted:
        return []
    try:
        case = read_paths(wanted)
    except (EvidenceError, UsageError, OSError):
        return []
    return [
        HostThread(
            frames=tuple(
                f"{frame.function} ({frame.file}:{frame.line})" if frame.line else f"{frame.function} ({frame.file or '?'})"
                for frame in thread.frames
            ),
            thread=thread.thread or thread.tid,
            process=thread.process,
            rank=thread.rank,
            pid=thread.pid,
            state="active" if thread.active else "idle" if thread.active is False else "",
            waits=WAITS.get(thread.waits, "") if thread.waits != "other" else "",
            sample=thread.sample,
            source=thread.ref.source,
        )
        for thread in case.threads
    ]
