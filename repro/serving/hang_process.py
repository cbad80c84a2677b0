"""The capture of one hang, in a process of its own that ends with it.

What a capture and a diagnosis import (the documents' models, numpy, the reports) would stay in a process that watches for weeks,
and a defect of them would end it. So ``watch`` hands the hang over as a line of JSON (``hang_document``) and hears the answer.

The child leads a session of its own: Ctrl-C reaches the watch alone, which then ends it. It ends by itself when its standard input
closes, so it does not outlive a watch that was killed. Whatever becomes of it costs this capture and no more.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...clock import SYSTEM, Clock, Deadline
from ...errors import EvidenceError
from ...forensics.collect.process_table import read_process_table, start_ticks
from .hang_document import HangVerdict, encode_hang, verdict_of_samples, verdict_of_words
from .watch_loop import Hang

__all__ = ["CAPTURE_PROCESS_S", "HangKept", "capture_in_process", "start_child"]

#: Imports on a busy machine, 40 s of capture, diagnosis with the kernels' code, reports; seconds.
CAPTURE_PROCESS_S = 240.0
#: Between SIGTERM, on which it ends what it started, and SIGKILL.
_GRACE_S = 8.0
#: What it started and did not end has so long to end by itself.
_TOOLS_S = 1.0
_TURN_S = 0.2
_MOST_ANSWER = 1 << 20
_TAIL = 2000
_MODULE = "dsv4_repro.repro.serving.hang_child"


@dataclass(frozen=True, slots=True)
class HangKept:
    """What became of a hang. ``run``: its directory, as far as it was begun; ``lost``: why capture or diagnosis gave nothing, "" if
    they did; ``stopped``: the watch was asked to end meanwhile."""

    verdict: HangVerdict
    run: Path | None
    lost: str = ""
    help_text: str = ""
    stopped: bool = False


def _package_environment() -> dict[str, str]:
    """The environment, with the place where this package was found (a link to a clone counts) for a child's imports."""
    package = sys.modules[__name__.partition(".repro")[0]]
    paths = [str(Path(package.__path__[0]).absolute().parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in paths if part)}


def start_child(module: str, argv: Sequence[str] | None, *, stderr: int) -> subprocess.Popen[bytes]:
    """``python -m module`` in a session of its own, spoken to by its standard streams. ``argv``: another program in its place.

    Raises OSError, ValueError: it could not be started.
    """
    return subprocess.Popen(
        argv or [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=_package_environment(), start_new_session=True,
    )  # fmt: skip


def capture_in_process(
    hang: Hang,
    root: Path,
    *,
    attach: bool,
    stop: Callable[[], bool] = lambda: False,
    say: Callable[..., None] = lambda *_lines, **_style: None,
    seconds: float = CAPTURE_PROCESS_S,
    argv: Sequence[str] | None = None,
    clock: Clock = SYSTEM,
) -> HangKept:
    """Capture, diagnose and report ``hang`` below ``root``. ``argv``: another program in the child's place (tests)."""
    try:
        process = start_child(_MODULE, argv, stderr=subprocess.PIPE)
    except (OSError, ValueError) as error:
        return HangKept(verdict_of_samples(hang), None, f"its process could not be started: {error}")
    talk = _Talk(process, encode_hang(hang, root=root.absolute(), attach=attach), say)
    deadline = Deadline(seconds, clock)
    why = ""
    stopped = False
    try:
        while process.poll() is None and not why:
            talk.turn(_TURN_S)
            if talk.fault:
                why = talk.fault
            elif stop():
                stopped, why = True, "the watch was asked to end"
            elif deadline.expired:
                why = f"it did not end within {seconds:g} s"
            else:
                talk.moved(hang.moved())
    finally:
        ended = _end(process, talk, clock)
        talk.close()
    return _kept(hang, talk, why, ended, stopped=stopped)


def _kept(hang: Hang, talk: _Talk, why: str, ended: str, *, stopped: bool) -> HangKept:
    why = why or talk.fault
    try:
        if not why and talk.answer is not None:
            error, help_text = talk.answer.get("error"), talk.answer.get("help")
            verdict = verdict_of_words(talk.answer.get("verdict"))
            return HangKept(verdict, talk.run, str(error or "")[:1000], str(help_text or "")[:1000])
    except EvidenceError as error:
        why = str(error)
    tail = talk.tail()
    lost = f"the capture's process gave no answer: {why or ended}{f' ({tail})' if tail and not stopped else ''}"
    partly = f"What was read until then is in {talk.run}" if talk.run is not None else ""
    return HangKept(verdict_of_samples(hang), talk.run, lost, partly, stopped)


class _Talk:
    """Both directions at once, with bounds: the child may be slow to read, write anything, or nothing."""

    def __init__(self, process: subprocess.Popen[bytes], line: bytes, say: Callable[..., None]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._in, self._out, self._err = process.stdin, process.stdout, process.stderr
        self._left = memoryview(line)
        self.say = say
        self._lines = bytearray()
        self._heard = 0
        self._stderr = b""
        self._told = ""
        self.answer: dict[str, Any] | None = None
        self.run: Path | None = None
        self.fault = ""
        self._selector = selectors.DefaultSelector()
        reads = selectors.EVENT_READ
        for stream, what in ((self._in, selectors.EVENT_WRITE), (self._out, reads), (self._err, reads)):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, what)

    def turn(self, seconds: float) -> bool:
        """Wait so long for something to write or to read; whether there was anything."""
        found = self._selector.select(seconds) if self._selector.get_map() else []
        for key, _ in found:
            if key.fileobj is self._in:
                self._write()
            else:
                self._read(key.fileobj is self._out)
        return bool(found)

    def _forget(self, stream: IO[bytes]) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(stream)

    def _write(self) -> None:
        try:
            sent = os.write(self._in.fileno(), self._left)
        except BlockingIOError:
            return
        except OSError:  # it reads no more: its end is heard on the other side
            self._left = memoryview(b"")
            self._forget(self._in)
            return
        self._left = self._left[sent:]
        if not self._left:
            # It stays open: its end tells the child that we are gone.
            self._left = memoryview(b"")
            self._forget(self._in)

    def moved(self, why: str) -> None:
        """Tell the child, once, that the server moves again: nothing is to be attached any more."""
        if why and not self._told and not self._left:
            self._told = why
            self._left = memoryview(json.dumps({"moved": why[:300]}).encode("ascii") + b"\n")
            self._selector.register(self._in, selectors.EVENT_WRITE)

    def _read(self, is_answer: bool) -> None:
        stream = self._out if is_answer else self._err
        try:
            piece = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._forget(stream)
        elif is_answer:
            self._hear(piece)
        else:
            self._stderr = (self._stderr + piece)[-_TAIL:]

    def _hear(self, piece: bytes) -> None:
        self._heard += len(piece)
        if self.fault or self._heard > _MOST_ANSWER:
            self.fault = self.fault or f"it wrote more than {_MOST_ANSWER >> 10} KiB"
            self._lines.clear()
            return
        self._lines += piece
        while not self.fault and (at := self._lines.find(b"\n")) >= 0:
            line = bytes(self._lines[:at])
            del self._lines[: at + 1]
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self.fault = "it wrote something that is no answer"
        elif isinstance(run := message.get("run"), str):
            self.run = Path(run)
        elif isinstance(text := message.get("say"), str):
            self.say(text[:1000], style="bad")
        elif isinstance(answer := message.get("done"), dict):
            self.answer = answer

    def tail(self) -> str:
        """The last line of its standard error."""
        lines = self._stderr.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def close(self) -> None:
        self._selector.close()
        for stream in (self._in, self._out, self._err):
            with suppress(OSError):
                stream.close()


def _end(process: subprocess.Popen[bytes], talk: _Talk, clock: Clock) -> str:
    """Its end, in words; what is still in its pipes is heard. One that lives is asked, then killed with what it started."""
    if process.poll() is None:
        below, debuggers = _descendants(process.pid)
        with suppress(ProcessLookupError):
            process.terminate()
        _wait(process, talk, Deadline(_GRACE_S, clock))
        if process.poll() is None:
            late = _descendants(process.pid)
            below, debuggers = below | late[0], debuggers | late[1]
            process.kill()
            _wait(process, talk, Deadline(_GRACE_S, clock))
        _end_descendants(below, clock)
        for pid in (pid for pid, ticks in debuggers.items() if start_ticks(pid) == ticks):
            talk.say(f"a debugger (pid {pid}) is left alone, perhaps attached; ending it can end the server", style="bad")
    last = Deadline(1.0, clock)
    while talk.turn(0.0) and not last.expired:
        pass
    status = process.poll()
    if status is None:
        return f"process {process.pid} did not even end on SIGKILL"
    return f"exit status {status}" if status >= 0 else f"ended by signal {-status}"


def _wait(process: subprocess.Popen[bytes], talk: _Talk, deadline: Deadline) -> None:
    while process.poll() is None and not deadline.expired:
        if not talk.turn(0.05):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)


def _descendants(pid: int) -> tuple[dict[int, int], dict[int, int]]:
    """pid -> start time of what is below ``pid``: what may be killed, and the debuggers. Ending one that is attached, or what
    belongs to it, can end the server."""
    table = read_process_table()
    below = {one: table.entries[one] for one in table.below(pid)[1:] if one in table.entries}
    debuggers = {one: entry.start_ticks for one, entry in below.items() if "gdb" in entry.comm}
    spared = {one for debugger in debuggers for one in table.below(debugger)}
    return {one: entry.start_ticks for one, entry in below.items() if one not in spared}, debuggers


def _end_descendants(below: dict[int, int], clock: Clock) -> None:
    """SIGKILL for what is left a moment later: tools lead sessions of their own, and their threads end them, if there was time."""
    grace = Deadline(_TOOLS_S, clock)
    while (left := [pid for pid, ticks in below.items() if start_ticks(pid) == ticks]) and not grace.expired:
        clock.sleep(0.02)
    for pid in left:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
