"""What was found, what is missing and what was done: said once in the log, kept for the status file."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["Said", "write_json"]

_LOG = logging.getLogger("vllm.dsv4_repro_agent")
#: Enough for a drain of 21 layers with two steps in flight several times over; the file is written while the server works.
MAX_EVENTS = 200


def write_json(path: Path, document: Any) -> None:
    """Write a document so that a reader sees the old one or the new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(temporary, flags, 0o600)
    except FileExistsError:
        # Of an earlier process with our pid that was killed while it wrote (in a container pids come again).
        temporary.unlink()
        fd = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(document))  # in one piece: json.dump holds the interpreter several times as long
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class Said:
    """``features``: name to ``{"found": bool, "why": str}``. ``events``: the last 200 things that were done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.features: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.changed = True

    def after_fork(self) -> None:
        """A new process: its lock is its own, and its status file is still to be written."""
        self._lock, self.changed = threading.Lock(), True

    def feature(self, name: str, found: bool, why: str) -> None:
        """The state of a feature; logged when it is new or has changed."""
        with self._lock:
            state = {"found": found, "why": why}
            if self.features.get(name) == state:
                return
            self.features[name] = state
            self.changed = True
        _LOG.log(logging.INFO if found else logging.WARNING, "dsv4-repro agent: %s: %s", name, why)

    def event(self, kind: str, **more: Any) -> None:
        """Something was done (a release, the guard switched on)."""
        with self._lock:
            self.events.append({"kind": kind, "monotonic_ns": time.monotonic_ns(), "wall_ns": time.time_ns(), **more})
            del self.events[:-MAX_EVENTS]
            self.changed = True
        _LOG.warning("dsv4-repro agent: %s %s", kind, more)

    def document(self) -> dict[str, Any]:
        with self._lock:
            self.changed = False
            return {"features": dict(self.features), "events": list(self.events)}
