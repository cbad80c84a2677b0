"""Every process that a server of ours is made of, also those that left its session or whose parent has died; and ending them.

A process belongs if it descends from one that belongs, is in the server's session, or carries the run's mark in its environment
(``leftovers.mark_run``). Once seen it is remembered with its start time, so a reused process id is never taken for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from ...clock import SYSTEM, Clock, Deadline
from ...forensics.collect.process_table import read_environment, read_process_table, start_ticks
from ..leftovers import RUN_VARIABLE

__all__ = ["Ended", "ProcessTree"]

Ended = Literal["clean", "terminated", "killed", "survived"]
_POLL_S = 0.05


@dataclass
class ProcessTree:
    """``leader``: the process that was started, leader of its own session. ``run``: the mark that its children carry, or ""."""

    leader: int
    run: str = ""
    clock: Clock = SYSTEM
    seen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.look()

    def look(self, *, marks: bool = False) -> None:
        """Remember who belongs now. ``marks``: read the environment of every process of this user too (slower)."""
        table = read_process_table()
        members = {pid for pid, ticks in self.seen.items() if self._is(pid, ticks)}
        if start_ticks(self.leader) is not None and self.leader not in self.seen:
            members.add(self.leader)
        for pid in table.entries:
            with contextlib.suppress(OSError):
                if os.getsid(pid) == self.leader:
                    members.add(pid)
            if marks and self.run and pid not in members and self._marked(pid):
                members.add(pid)
        for pid in list(members):
            members.update(table.below(pid))
        members.discard(os.getpid())
        for pid in members:
            entry = table.entries.get(pid)
            if entry is not None:
                self.seen.setdefault(pid, entry.start_ticks)

    def _marked(self, pid: int) -> bool:
        try:
            if Path(f"/proc/{pid}").stat().st_uid != os.getuid():
                return False
        except OSError:
            return False
        environment = read_environment(pid)
        return isinstance(environment, dict) and environment.get(RUN_VARIABLE) == self.run and not self._is_ours(pid)

    @staticmethod
    def _is_ours(pid: int) -> bool:
        """This process and those above it carry the mark of the run too, or may."""
        with contextlib.suppress(psutil.Error):
            return pid in {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        return True

    @staticmethod
    def _is(pid: int, ticks: int) -> bool:
        return start_ticks(pid) == ticks

    def alive(self) -> tuple[int, ...]:
        """Those seen that still run (no zombies), by pid."""
        return tuple(sorted(pid for pid, ticks in self.seen.items() if self._is(pid, ticks)))

    def signal(self, number: int) -> int:
        """Send a signal to every member that lives; how many took it."""
        sent = 0
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
                sent += 1
        return sent

    def end(self, *, grace_s: float = 10.0, kill_s: float = 10.0) -> Ended:
        """SIGTERM to the session's leader group, then SIGKILL to every member: ``clean`` (none lived), ``terminated``, ``killed``,
        or ``survived`` (outlived SIGKILL: a process in an uninterruptible wait)."""
        self.look(marks=True)
        if not self.alive():
            return "clean"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.leader, signal.SIGTERM)
        if self._gone(grace_s):
            return "terminated"
        until = Deadline(kill_s, self.clock)
        while True:  # one that was born while we looked is found in the next round
            self.look(marks=True)
            if not self.alive():
                return "killed"
            self.signal(signal.SIGKILL)
            if until.expired:
                return "survived"
            self._gone(0.5)

    def _gone(self, seconds: float) -> bool:
        until = Deadline(seconds, self.clock)
        while self.alive():
            if until.expired:
                return False
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.leader, os.WNOHANG)
            self.look()
            self.clock.sleep(_POLL_S)
        return True
