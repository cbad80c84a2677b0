"""Processes that an earlier run of ours left behind, and ending them.

``mark_run`` puts the run's directory and the parent's identity into the environment before a workload starts, so every child
carries them. A leftover is a process of this user with that mark whose parent is gone, or one in the session of such a one: a
process that gives itself a title (vLLM's do) may write over its environment. A process id alone is never trusted: it is used
again; its start time goes with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = [
    "MARKS",
    "PARENT_VARIABLE",
    "RUN_VARIABLE",
    "SESSION_VARIABLE",
    "Leftover",
    "end_leftovers",
    "find_leftovers",
    "mark_run",
]

RUN_VARIABLE = "DSV4_REPRO_RUN"
PARENT_VARIABLE = "DSV4_REPRO_PARENT"
#: The session of the program itself: that of a shell, whose other jobs are none of ours.
SESSION_VARIABLE = "DSV4_REPRO_SESSION"
MARKS = (RUN_VARIABLE, PARENT_VARIABLE, SESSION_VARIABLE)


@dataclass(frozen=True, slots=True)
class Leftover:
    """One process: ``started`` is its start time in seconds since the epoch, ``run`` the run directory that it served."""

    pid: int
    started: float
    run: str
    command: str


def mark_run(run: Path) -> None:
    """Mark this process's environment, and so that of all children it starts from now on."""
    own = psutil.Process()
    os.environ[RUN_VARIABLE] = str(run)
    os.environ[PARENT_VARIABLE] = f"{own.pid}:{own.create_time():.2f}"
    os.environ[SESSION_VARIABLE] = str(os.getsid(0))


def _alive(identity: str) -> bool:
    """Whether the process ``pid:start`` still runs; a mark that cannot be read counts as alive (nothing is ended on a guess)."""
    pid, _, start = identity.partition(":")
    try:
        process = psutil.Process(int(pid))
        return bool(abs(process.create_time() - float(start)) < 1.0 and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except (ValueError, psutil.Error):
        return True


def find_leftovers() -> tuple[Leftover, ...]:
    """This user's processes with our mark whose parent is gone. What cannot be read (another user's) is not ours."""
    found = []
    sessions: dict[int, str] = {}
    unmarked: list[psutil.Process] = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ()
            if RUN_VARIABLE not in environment or PARENT_VARIABLE not in environment:
                unmarked.append(process)
                continue
            if _alive(environment[PARENT_VARIABLE]):
                continue
            command = " ".join(process.cmdline())[:200]
            found.append(Leftover(process.pid, process.create_time(), environment[RUN_VARIABLE], command))
            sessions[process.pid] = environment.get(SESSION_VARIABLE, "")
        except (psutil.Error, OSError):
            continue
    return (*found, *_session_mates(found, sessions, unmarked))


def _session_mates(marked: Sequence[Leftover], own: Mapping[int, str], others: Sequence[psutil.Process]) -> list[Leftover]:
    """Those of ``others`` in a session that a leftover leads, or whose leader is gone and that is not the program's own (``own``,
    by pid of the leftover): a shell may have gone too, and its other jobs are none of ours."""
    runs: dict[int, str] = {}
    pids = {leftover.pid for leftover in marked}
    for leftover in marked:
        try:
            session = os.getsid(leftover.pid)
        except OSError:
            continue
        started_by_us = own.get(leftover.pid, "").isdecimal() and own[leftover.pid] != str(session)
        if session in pids or (started_by_us and not psutil.pid_exists(session)):
            runs[session] = leftover.run
    mates = []
    for process in others:
        try:
            run = runs.get(os.getsid(process.pid))
            if run is not None and os.getsid(process.pid) != os.getsid(0):
                mates.append(Leftover(process.pid, process.create_time(), run, " ".join(process.cmdline())[:200]))
        except (psutil.Error, OSError):
            continue
    return mates


def end_leftovers(leftovers: Sequence[Leftover], *, grace_s: float = 3.0) -> dict[int, str]:
    """SIGTERM, then SIGKILL; by pid: ``ended``, ``killed``, ``gone`` (before we came) or ``survived`` (outlived SIGKILL)."""
    outcome: dict[int, str] = {}
    alive: dict[int, psutil.Process] = {}
    for leftover in leftovers:
        try:
            process = psutil.Process(leftover.pid)
            if abs(process.create_time() - leftover.started) > 0.01:
                outcome[leftover.pid] = "gone"
                continue
            process.terminate()
            alive[leftover.pid] = process
        except psutil.NoSuchProcess:
            outcome[leftover.pid] = "gone"
    ended, rest = psutil.wait_procs(list(alive.values()), timeout=grace_s)
    outcome |= {process.pid: "ended" for process in ended}
    for process in rest:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            outcome[process.pid] = "ended"
    killed, survived = psutil.wait_procs(rest, timeout=grace_s)
    for process in killed:
        outcome.setdefault(process.pid, "killed")
    outcome |= {process.pid: "survived" for process in survived}
    return outcome
