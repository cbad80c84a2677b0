"""What the Linux kernel says of a process and its threads: state, wait channel, system call, CPU time, limits. Touches nothing.

Read from ``/proc/PID``; a thread in state D is stuck inside the kernel (also in a driver call), R burns CPU, S sleeps.
``stack`` needs root, ``syscall`` and ``wchan`` the right to trace the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..device_state import Unread
from . import Collected, CollectedFile, Disturbance, write_artefact

__all__ = ["ProcCollector", "process_state", "read_process"]

#: Threads read at most: a process with more is described by its first ones, and the number left out is said.
_MOST_THREADS = 512
#: Bytes read of one file at most.
_MOST_BYTES = 1 << 16


def _read(path: Path) -> str:
    with path.open("rb") as stream:
        return stream.read(_MOST_BYTES).decode("utf-8", "replace").strip()


def process_state(pid: int, root: Path = Path("/proc")) -> str | None:
    """The one-letter state of a process (R, S, D, Z, T …), None if there is no such process or it cannot be read."""
    try:
        # The name in parentheses may hold anything, a ")" too: the state follows the last one.
        return _read(root / str(pid) / "stat").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def _thread(task: Path, note: Callable[[str, OSError], None]) -> dict[str, Any]:
    found: dict[str, Any] = {"tid": int(task.name)}
    for name in ("comm", "wchan", "syscall", "stack"):
        try:
            found[name] = _read(task / name)
        except OSError as error:
            found[name] = None
            note(name, error)
    try:
        fields = _read(task / "stat").rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        found.update(state=fields[0], user_s=int(fields[11]) / ticks, system_s=int(fields[12]) / ticks)
    except (OSError, IndexError, ValueError) as error:
        found.update(state=None, user_s=None, system_s=None)
        note("stat", error if isinstance(error, OSError) else OSError(str(error)))
    return found


def read_process(pid: int, root: Path = Path("/proc")) -> tuple[dict[str, Any], tuple[Unread, ...]]:
    """``/proc/PID`` as a document, and what of it could not be read. OSError if there is no such process."""
    base = root / str(pid)
    tasks = sorted((task for task in (base / "task").iterdir() if task.name.isdigit()), key=lambda task: int(task.name))
    failures: dict[str, str] = {}

    def note(name: str, error: OSError) -> None:
        failures.setdefault(name, error.strerror or str(error))

    document: dict[str, Any] = {"pid": pid, "threads": [_thread(task, note) for task in tasks[:_MOST_THREADS]]}
    if len(tasks) > _MOST_THREADS:
        document["threads_left_out"] = len(tasks) - _MOST_THREADS
    for name in ("status", "cmdline", "cgroup", "limits", "io"):
        try:
            document[name] = _read(base / name).replace("\0", " ")
        except OSError as error:
            document[name] = None
            note(name, error)
    remedies = {
        "stack": "Run as root.",
        "syscall": "Run as root, or as the process's user with ptrace allowed.",
        "io": "Run as root.",
    }
    unread = tuple(Unread(f"/proc/{pid} {name}", why, remedies.get(name, "")) for name, why in sorted(failures.items()))
    return document, unread


class ProcCollector:
    """Writes ``proc.json``."""

    name = "proc"
    disturbance: Disturbance = "none"
    deadline_s = 5.0

    def __init__(self, pid: int, folder: Path) -> None:
        self._pid = pid
        self._folder = folder

    def collect(self) -> Collected:
        try:
            document, unread = read_process(self._pid)
        except OSError as error:
            why = Unread(f"/proc/{self._pid}", error.strerror or str(error), "Is the process still there, in this pid namespace?")
            return Collected(self.name, self.disturbance, 0.0, unread=(why,))
        path = write_artefact(self._folder / "proc.json", json.dumps(document, indent=1))
        states: dict[str, int] = {}
        for thread in document["threads"]:
            key = thread["state"] or "unreadable"
            states[key] = states.get(key, 0) + 1
        return Collected(
            self.name,
            self.disturbance,
            0.0,
            files=(CollectedFile("proc", path),),
            facts={"threads": len(document["threads"]), "states": states},
            unread=unread,
        )
