"""One line of ``/proc/PID/stat``: state, parent, CPU time, start. Touches nothing; a process that is gone is None."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessStat", "read_stat", "start_ticks", "world_size"]

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """``name``: the kernel's, at most 15 characters. ``cpu_s``: user and system of all threads. ``start_ticks``: since boot."""

    pid: int
    name: str
    state: str
    parent: int
    cpu_s: float
    start_ticks: int


def read_stat(pid: int, root: Path = Path("/proc")) -> ProcessStat | None:
    """The process as it stands, or None if there is none (or its entry cannot be read)."""
    try:
        fd = os.open(f"{root}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 4096).decode("utf-8", "replace")
        finally:
            os.close(fd)
        # The name in parentheses may hold anything, a ")" too: the fields follow the last one.
        head, _, tail = text.rpartition(")")
        fields = tail.split()
        return ProcessStat(
            pid=pid,
            name=head.partition("(")[2][:64],
            state=fields[0],
            parent=int(fields[1]),
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
            start_ticks=int(fields[19]),
        )
    except (OSError, ValueError, IndexError):
        return None


def world_size(pid: int, root: Path = Path("/proc")) -> int:
    """Ranks that a server's own command line asks for (tensor times pipeline times data parallel; 1 if it does not say). 0: not
    readable. Ranks of data parallelism wait for each other too, where they share experts."""
    try:
        fd = os.open(f"{root}/{pid}/cmdline", os.O_RDONLY | os.O_CLOEXEC)
        try:
            words = os.read(fd, 1 << 16).decode("utf-8", "replace").split("\0")
        finally:
            os.close(fd)
    except OSError:
        return 0
    size = 1
    for names in (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"), ("--data-parallel-size", "-dp")):
        for index, word in enumerate(words):
            name, _, value = word.partition("=")
            text = value or (words[index + 1] if index + 1 < len(words) else "")
            if name.replace("_", "-") in names and text.isdecimal() and len(text) < 5:
                size *= max(int(text), 1)
                break
    return size


def start_ticks(pid: int, root: Path = Path("/proc")) -> int | None:
    """With the pid it names a process; None if there is none."""
    found = read_stat(pid, root)
    return found.start_ticks if found is not None else None
