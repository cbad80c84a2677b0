"""Opening evidence without waiting for it: files that ``stat`` calls regular may block (``/proc/kmsg``, ``trace_pipe``).

The file is opened with O_NONBLOCK and read with a deadline. What came until then is kept, and the reading says that it ended early.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...clock import SYSTEM, Clock

__all__ = [
    "ENDLESS_SECONDS",
    "PATIENCE_SECONDS",
    "PatientFile",
    "at_once",
    "at_once_no_link",
    "open_patiently",
    "read_what_comes",
]

#: Seconds without a byte after which a file is one that waits to be written to.
PATIENCE_SECONDS = 2.0
#: Seconds that a file may take whose size is stated as 0 and that gives data all the same (the kernel makes them while one reads).
ENDLESS_SECONDS = 20.0
_PIECE = 1 << 20


class PatientFile:
    """Reads a descriptor that may have nothing to give. ``trouble``: why it ended before its end, "" if it did not.

    ``endless``: the size is not known beforehand, so the whole reading has a deadline, too.
    """

    def __init__(self, fd: int, *, endless: bool, clock: Clock = SYSTEM) -> None:
        self._fd, self._clock = fd, clock
        self._until = clock.monotonic() + ENDLESS_SECONDS if endless else None
        self.trouble = ""

    def read(self, size: int = -1, /) -> bytes:
        if size >= 0:
            return self._some(size)
        parts: list[bytes] = []
        while part := self._some(_PIECE):
            parts.append(part)
        return b"".join(parts)

    def _some(self, size: int) -> bytes:
        """One step. OSError as the system gives it, but never for having to wait."""
        waited_from = self._clock.monotonic()
        while not self.trouble:
            now = self._clock.monotonic()
            if self._until is not None and now > self._until:
                self.trouble = f"it goes on for more than {ENDLESS_SECONDS:g} s: what came until then was read"
                break
            try:
                return os.read(self._fd, size)
            except BlockingIOError:
                if now - waited_from > PATIENCE_SECONDS:
                    self.trouble = f"it gave nothing more for {PATIENCE_SECONDS:g} s and did not end: what came before was read"
                    break
                self._clock.sleep(0.05)
        return b""


def at_once(name: str, flags: int) -> int:
    """An ``opener`` for ``open``: a pipe or a terminal in a file's place does not hold us up.

    Unlike ``os.open`` with ``os.fdopen``, it leaves no descriptor open where a directory lies in the file's place.
    """
    return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)


def at_once_no_link(name: str, flags: int) -> int:
    """The same, and a link in the file's place is an error."""
    return at_once(name, flags | os.O_NOFOLLOW)


def read_what_comes(path: Path, most: int, clock: Clock = SYSTEM) -> bytes:
    """At most ``most`` bytes of a file, or of a pipe that somebody is about to fill (``<(command)`` of a shell).

    OSError, also where nothing comes for ``PATIENCE_SECONDS`` or it does not end."""
    fd = at_once(os.fspath(path), os.O_RDONLY)
    try:
        file = PatientFile(fd, endless=not stat.S_ISREG(os.fstat(fd).st_mode), clock=clock)
        raw = b""
        while len(raw) < most and (piece := file.read(most - len(raw))):
            raw += piece
        if file.trouble:
            raise OSError(errno.EAGAIN, "has nothing to give, or does not end", str(path))
        return raw
    finally:
        os.close(fd)


@contextmanager
def open_patiently(path: Path, clock: Clock = SYSTEM) -> Iterator[tuple[PatientFile, int]]:
    """A regular file and its descriptor, open while the context is. OSError, also if it is no regular file (any more)."""
    fd = at_once(os.fspath(path), os.O_RDONLY)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "a pipe, socket or device: not read", str(path))
        yield PatientFile(fd, endless=found.st_size == 0, clock=clock), fd
    finally:
        os.close(fd)
