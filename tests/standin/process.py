"""What the stand-in's processes share: a title, a clock that may run faster, vLLM's log format."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

__all__ = ["Log", "SimClock", "set_title"]

PR_SET_NAME = 15


def set_title(title: str) -> None:
    """Make ``ps`` show ``title``: the argument area is overwritten, as setproctitle does, and the thread gets the name."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, title.encode()[:15], 0, 0, 0)
    rest = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    # Fields 48 and 49: where the arguments begin and end.
    start, end = int(rest[45]), int(rest[46])
    raw = title.encode()[: max(end - start - 1, 0)]
    ctypes.memmove(start, raw + b"\0" * (end - start - len(raw)), end - start)


class SimClock:
    """Seconds of the stand-in: ``speed`` of them pass in one of ours."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._zero = time.monotonic()

    def now(self) -> float:
        return (time.monotonic() - self._zero) * self.speed

    def real(self, seconds: float) -> float:
        """Our seconds for that many of the stand-in's."""
        return seconds / self.speed

    def sleep(self, seconds: float) -> None:
        time.sleep(max(seconds, 0.0) / self.speed)


class Log:
    """Lines in vLLM's format, to stderr or to a file that is opened anew when somebody renamed it."""

    def __init__(self, name: str, path: str = "") -> None:
        self.name, self.path = name, path
        self.pid = os.getpid()
        self.silent = False
        self._fd = -1
        self._inode = 0

    def _out(self, text: str) -> None:
        if self.silent:
            return
        data = "".join(f"({self.name} pid={self.pid}) {line}\n" for line in text.split("\n")).encode()
        if not self.path:
            try:
                os.write(sys.stderr.fileno(), data)
            except OSError:
                self.silent = True  # nobody reads it any more
            return
        try:
            found = os.stat(self.path).st_ino
        except OSError:
            found = -1
        if found != self._inode or self._fd < 0:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._inode = os.fstat(self._fd).st_ino
        os.write(self._fd, data)

    def say(self, level: str, where: str, text: str) -> None:
        """``LEVEL 11-29 21:03:35 [file.py:12] text``, the prefix on each line."""
        prefix = f"{level} {time.strftime('%m-%d %H:%M:%S')} [{where}] "
        self._out("\n".join(prefix + line for line in text.split("\n")))

    def info(self, where: str, text: str) -> None:
        self.say("INFO", where, text)

    def warning(self, where: str, text: str) -> None:
        self.say("WARNING", where, text)

    def error(self, where: str, text: str) -> None:
        self.say("ERROR", where, text)

    def plain(self, text: str) -> None:
        """A line of uvicorn or of a progress bar."""
        self._out(text)
