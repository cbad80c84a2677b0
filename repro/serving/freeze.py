"""Stop an engine process for a while, and thaw it whatever becomes of us.

SIGSTOP keeps the engine from ending its workers in the middle of a read. A guard, a small process of its own session that holds
the read end of a pipe, sends SIGCONT when the pipe closes (we were killed) or after ``most_s``; it checks by the start time that
the pid is still that process. The engine's deadline runs on while it is stopped (``engine_deadlines``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ...clock import SYSTEM, Clock, Deadline
from ...errors import RefusedError, UnavailableError
from ...forensics.collect.proc import process_state
from ...forensics.collect.process_table import start_ticks
from .engine_deadlines import EngineDeadline

__all__ = ["Frozen", "freeze_warning", "frozen"]

READY_S = 10.0
STOPPED_S = 2.0
MOST_S = 300.0

#: Runs alone (``python -I -S -c``): thaws when our end of the pipe closes without the word, or when the time is over.
_GUARD = """
import os, select, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
pid, ticks, most = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
os.write(1, b"r")
readable = select.select([0], [], [], most)[0]
word = os.read(0, 1) if readable else b""
if word != b"k":
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            same = stream.read(4096).rpartition(b")")[2].split()[19].decode() == ticks
        if same:
            os.kill(pid, signal.SIGCONT)
    except (OSError, IndexError):
        pass
"""


@dataclass
class Frozen:
    """A stopped process. ``seconds``: how long it was stopped, known after the thaw; ``thawed``: it runs again or has ended."""

    pid: int
    seconds: float = 0.0
    thawed: bool = False


def freeze_warning(deadline: EngineDeadline, attach_s: float) -> list[str]:
    """What stopping the engine means here, before it is done."""
    lines = [
        "the engine process alone is stopped (SIGSTOP) while its worker is read, and goes on after it (SIGCONT), whatever happens",
        "its deadline runs on meanwhile. When it goes on it looks for the answer first: if the wait is gone by then it lives, also "
        "beyond the deadline; if the wait is still there and the deadline has passed, it ends at once, and its workers with it "
        "(two steps are in flight with async scheduling: both waits must be gone)",
    ]
    if deadline.remaining_s is None:
        lines.append(f"deadline: {deadline.text}")
    elif deadline.remaining_s < attach_s:
        lines.append(
            f"about {max(deadline.remaining_s, 0):.0f} s are left, and the read takes up to {attach_s:.0f}: take it as the last "
            "look, or release the wait first (dsv4-repro unwedge PID)"
        )
    else:
        lines.append(f"about {deadline.remaining_s:.0f} s are left, and the read takes up to {attach_s:.0f}")
    return lines


@contextmanager
def frozen(pid: int, *, clock: Clock = SYSTEM, most_s: float = MOST_S) -> Iterator[Frozen]:
    """Stop ``pid`` inside the block. RefusedError for a process that is none to stop, UnavailableError if it cannot be done.

    One that was stopped already is left as it is, also afterwards: it is somebody else's doing.
    """
    ticks = start_ticks(pid)
    if ticks is None or pid in (os.getpid(), os.getppid(), 1):
        raise RefusedError(f"process {pid} is not there, or is not one to stop")
    if process_state(pid) in ("T", "t"):
        raise RefusedError(f"process {pid} is stopped already, by somebody else", help_text=f"To let it go on: kill -CONT {pid}")
    guard = _start_guard(pid, ticks, most_s)
    outcome = Frozen(pid)
    began = clock.monotonic()
    try:
        _stop(pid, ticks, clock)
        yield outcome
    finally:
        # The guard is told only after our own thaw: killed in between, it thaws once more, which does no harm.
        with suppress(ProcessLookupError, PermissionError):
            if start_ticks(pid) == ticks:
                os.kill(pid, signal.SIGCONT)
        outcome.seconds = clock.monotonic() - began
        outcome.thawed = _settled(pid, ticks, clock)
        _end_guard(guard, told=outcome.thawed)


def _start_guard(pid: int, ticks: int, most_s: float) -> subprocess.Popen[bytes]:
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, str(pid), str(ticks), str(most_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert guard.stdout is not None
    import select

    ready = select.select([guard.stdout], [], [], READY_S)[0]
    if not ready or guard.stdout.read(1) != b"r":
        guard.kill()
        _end_guard(guard, told=False)
        raise UnavailableError("the guard that lets the engine go on if this ends could not be started: nothing was stopped")
    return guard


def _end_guard(guard: subprocess.Popen[bytes], *, told: bool) -> None:
    assert guard.stdin is not None
    assert guard.stdout is not None
    with suppress(OSError):
        if told:
            guard.stdin.write(b"k")
            guard.stdin.flush()
    with suppress(OSError):
        guard.stdin.close()
    guard.stdout.close()
    try:
        guard.wait(5.0)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def _stop(pid: int, ticks: int, clock: Clock) -> None:
    try:
        if start_ticks(pid) == ticks:
            os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        raise UnavailableError(f"process {pid} has ended") from None
    except PermissionError:
        raise UnavailableError(f"process {pid} may not be stopped", help_text="Run as the server's user, or as root.") from None
    deadline = Deadline(STOPPED_S, clock)
    while process_state(pid) not in ("T", "t", None):
        if deadline.expired:
            raise UnavailableError(f"process {pid} did not stop within {STOPPED_S:g} s")
        clock.sleep(0.01)


def _settled(pid: int, ticks: int, clock: Clock) -> bool:
    deadline = Deadline(STOPPED_S, clock)
    while start_ticks(pid) == ticks and process_state(pid) in ("T", "t"):
        if deadline.expired:
            return False
        clock.sleep(0.01)
    return True
