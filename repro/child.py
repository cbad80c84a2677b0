"""A workload's child process: spawned, heard over a socket pair, ended in steps, never left behind.

Start and run have separate deadlines. The child leads its own session, so Ctrl-C reaches the parent alone, which then decides;
it dies with the parent (``kernels.device_child``). Ending is exit by request, SIGTERM, SIGKILL; one that outlives SIGKILL is a
finding.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .. import errors
from ..clock import SYSTEM, Clock, Deadline
from ..errors import DeadlineError, InconclusiveError, ReproError
from ..forensics.collect.proc import process_state
from ..kernels.channel import CLOSED, Channel
from ..kernels.driver import CudaCallError

__all__ = ["Child", "ChildGoneError", "Ended", "package_path", "raise_from"]

Ended = Literal["clean", "terminated", "killed", "survived"]

#: Variables that would change what is observed: launches that wait, exceptions that freeze the device.
_UNWANTED = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_WAITS_ON_EXCEPTION", "CUDA_ENABLE_COREDUMP_ON_EXCEPTION")

#: What the child left in its group has so long between SIGTERM and SIGKILL, seconds.
_GROUP_GRACE_S = 0.2


class ChildGoneError(InconclusiveError):
    """The child ended while an answer was awaited. ``status``: exit status, negative for a signal, None if not known."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message, help_text="Its output is in the run directory: child.err")
        self.status = status


def package_path() -> str:
    """The folder from which this package is imported, for a child's PYTHONPATH (a link to a clone counts)."""
    module = sys.modules[__name__.partition(".repro")[0]]
    return str(Path(module.__path__[0]).absolute().parent)


def raise_from(message: Mapping[str, Any]) -> None:
    """Raise the error that a child's ``error`` message carries, with its own type where that is one of ours."""
    text, help_text = str(message.get("message", "unknown error")), str(message.get("help", "")) or None
    kind = str(message.get("kind", ""))
    if message.get("call") and message.get("code"):
        raise CudaCallError(str(message["call"]), str(message["code"]))
    cls = getattr(errors, kind, None)
    if isinstance(cls, type) and issubclass(cls, ReproError):
        raise cls(text, help_text=help_text)
    raise InconclusiveError(f"{kind}: {text}", help_text=help_text)


class Child:
    """One child process. ``close`` is safe to call at any time and more than once."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel, folder: Path, clock: Clock) -> None:
        self._process = process
        self.channel = channel
        self._clock = clock
        self.folder = folder
        self.stderr_path = folder / "child.err"
        self.ended: Ended | None = None
        #: Sees every message that was not the one waited for: heartbeats, notes.
        self.on_message: Callable[[dict[str, Any]], None] = lambda _message: None

    @classmethod
    def spawn(
        cls,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
        clock: Clock = SYSTEM,
    ) -> Child:
        """Start ``python -m module FD *arguments PARENT_PID`` with output into ``folder``. ``command`` replaces the first
        three words.

        The caller must be the main thread: the kernel ties "die with the parent" to the thread that spawned.
        """
        folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        env = dict(os.environ)
        for name in _UNWANTED:
            env.pop(name, None)
        env["PYTHONPATH"] = os.pathsep.join(part for part in (package_path(), env.get("PYTHONPATH", "")) if part)
        env["PYTHONUNBUFFERED"] = "1"
        env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        env.update(environment or {})
        argv = [*(command or (sys.executable, "-P", "-m", module)), str(theirs.fileno()), *arguments, str(os.getpid())]
        try:
            with (folder / "child.out").open("ab") as out, (folder / "child.err").open("ab") as err:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=env,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:  # ValueError: a zero byte in an argument or a variable
            ours.close()
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise InconclusiveError(f"the child process cannot be started: {why}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, Channel(ours), folder, clock)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status once it has ended, None while it lives."""
        return self._process.poll()

    def state(self) -> str | None:
        """Its state letter from ``/proc``; None when it is gone."""
        return process_state(self.pid)

    def stderr_tail(self, size: int = 2000) -> str:
        """The last ``size`` bytes of what it wrote to stderr; no more than those are read."""
        try:
            with self.stderr_path.open("rb") as stream:
                stream.seek(max(stream.seek(0, os.SEEK_END) - size, 0))
                data = stream.read(size)
        except OSError:
            return ""
        return data.decode("utf-8", "replace").strip()

    def send(self, message: Mapping[str, Any]) -> None:
        """ChildGoneError if nobody takes it."""
        if not self.channel.send(message):
            raise self._gone(f"it did not take the command {message.get('cmd')}")

    def _gone(self, doing: str) -> ChildGoneError:
        # The end of the socket comes a moment before the process can be reaped.
        grace = Deadline(1.0, self._clock)
        while self._process.poll() is None and not grace.expired:
            self._clock.sleep(0.01)
        status = self._process.poll()
        tail = self.stderr_tail().splitlines()[-1:] or ["nothing on its stderr"]
        return ChildGoneError(f"the child process ended ({_how(status)}) while {doing}: {tail[0][:300]}", status)

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, whatever it is; None when none came in time. ChildGoneError."""
        message = self.channel.receive(timeout_s)
        if message is CLOSED:
            raise self._gone("a message was awaited")
        return message if isinstance(message, dict) else None

    def ask(self, message: Mapping[str, Any], expect: str, timeout_s: float) -> dict[str, Any]:
        """Send a command and wait for its answer. An ``error`` answer is raised; DeadlineError after ``timeout_s`` seconds."""
        self.send(message)
        return self.await_message(expect, timeout_s, str(message.get("cmd", "")))

    def await_message(self, expect: str, timeout_s: float, command: str = "") -> dict[str, Any]:
        """Wait for a message of type ``expect``; others go to ``on_message``."""
        deadline = Deadline(timeout_s, self._clock)
        while True:
            message = self.receive(min(deadline.remaining(), 0.2))
            if message is not None:
                if message.get("type") == expect:
                    return message
                if message.get("type") == "error" and message.get("re") in (command, "hello"):
                    raise_from(message)
                self.on_message(message)
            elif deadline.expired:
                raise DeadlineError(
                    f"the child process (state {self.state() or 'gone'}) gave no '{expect}' within {timeout_s:g} s",
                    help_text=f"Its output is in {self.stderr_path}",
                )

    def close(self, *, ask: bool = True, grace_s: float = 2.0, kill_wait_s: float = 10.0) -> Ended:
        """End it and everything in its process group: by request, then SIGTERM, then SIGKILL, then say that it survived.

        What it left in its group when it ended is ended too; the answer is how the child itself ended.
        """
        if self.ended is not None and self.ended != "survived":
            return self.ended
        how: Ended = "clean"
        if self._process.poll() is None and ask:
            self.channel.send({"cmd": "exit"}, timeout_s=0.5)
            self._wait(grace_s)
        # The far end of the socket closes too, so a child that only waits for commands leaves by itself.
        self.channel.close()
        for number, name in ((signal.SIGTERM, "terminated"), (signal.SIGKILL, "killed")):
            if self._process.poll() is not None:
                break
            how = "terminated" if name == "terminated" else "killed"
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                break
            self._wait(grace_s if number == signal.SIGTERM else kill_wait_s)
        if self._process.poll() is None:
            how = "survived"
        else:
            self._end_group()
        self.ended = how
        return how

    def _end_group(self) -> None:
        """SIGTERM, then SIGKILL for what outlived the child in its group.

        While a group has members the kernel gives its number to no new process, so a process of that number, now that the child
        is reaped, means that the group is empty and the number somebody else's.
        """
        grace = Deadline(_GROUP_GRACE_S, self._clock)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process_state(self.pid) is not None or not _signal_group(self.pid, number):
                return
            while number == signal.SIGTERM and _signal_group(self.pid, 0) and not grace.expired:
                self._clock.sleep(0.005)

    def _wait(self, seconds: float) -> None:
        deadline = Deadline(seconds, self._clock)
        while self._process.poll() is None and not deadline.expired:
            self._clock.sleep(0.005)


def _signal_group(group: int, number: int) -> bool:
    """Send it; False when the group has no member that can be told."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _how(status: int | None) -> str:
    if status is None:
        return "still being cleaned up"
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
