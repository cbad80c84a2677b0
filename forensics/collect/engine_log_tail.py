"""The end of a log that somebody else writes, look by look. Reads the file, touches no process.

Survives what happens to logs: not there yet, renamed and made anew (the rest of the old one is read first), copied and truncated
(also when it has grown past the old length since: the bytes before our place are compared), a burst larger than one look reads
(what was skipped is counted), binary garbage, progress bars that end in a carriage return. One open file at most, bounded memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from ..device_state import Unread

__all__ = ["LogLook", "LogTail"]

#: Bytes that one look reads at most, and of what was there before the first look.
MOST_BYTES = 1 << 20
FIRST_BYTES = 256 << 10
#: Characters of a line that are kept.
MOST_LINE = 4096
_PRINT = 64
_BREAK = re.compile(rb"\r\n|[\r\n]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class LogLook:
    """What is new. ``lines``: whole lines, without their ends. ``skipped``: bytes that were passed over. ``renewed``: the file was
    rotated or truncated since the last look. ``first``: this look began in what was there before. ``unread``: why nothing is read.
    """

    lines: tuple[str, ...] = ()
    skipped: int = 0
    renewed: bool = False
    first: bool = False
    unread: Unread | None = None


class LogTail:
    """Of ``path``. ``first_bytes``: how much of what is already there the first look gives (0: nothing)."""

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES, first_bytes: int = FIRST_BYTES) -> None:
        self.path = path
        self._most = most_bytes
        self._first_bytes = first_bytes
        self._fd: int | None = None
        self._name: tuple[int, int] = (0, 0)
        self._offset = 0
        self._print = b""
        self._rest = b""
        self._first = True

    def read_new(self) -> LogLook:
        """All whole lines since the last look, at most ``most_bytes`` of them (the newest)."""
        try:
            return self._look()
        except OSError as error:
            self.close()
            return LogLook(unread=Unread(f"log {self.path}", error.strerror or str(error), "Give the log with --log FILE"))

    def close(self) -> None:
        """Close the file; the next look opens it again, from its start if it is another one."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = None

    # -- one look ------------------------------------------------------------------------------------------------------------------

    def _look(self) -> LogLook:
        lines: list[str] = []
        skipped = 0
        renewed = False
        first = self._first
        if self._fd is not None:
            try:
                now = os.stat(self.path)
                moved = (now.st_dev, now.st_ino) != self._name
            except FileNotFoundError:
                # Renamed and not made anew yet: its writer may still hold the old one, as we do.
                moved = False
            if moved:
                more, gone = self._read()
                lines += more
                skipped += gone
                if self._rest:
                    lines.append(_clean(self._rest))
                self.close()
                self._rest, self._offset, self._print, renewed = b"", 0, b"", True
        if self._fd is None:
            self._open()
        if self._truncated():
            self._offset, self._rest, self._print, renewed = 0, b"", b"", True
        more, gone = self._read()
        self._first = False
        return LogLook(tuple(lines + more), skipped + gone, renewed, first)

    def _open(self) -> None:
        # Not blocking: a pipe in the log's place must not stop us.
        fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise OSError(0, "is not a regular file")
        name = (found.st_dev, found.st_ino)
        if name != self._name:
            self._rest, self._print = b"", b""
            self._offset = max(found.st_size - self._first_bytes, 0) if self._first else 0
            if self._offset:
                # The line that the window cuts is left out.
                piece = os.pread(fd, min(self._first_bytes, 1 << 16), self._offset)
                end = _BREAK.search(piece)
                self._offset += end.end() if end else len(piece)
        self._fd, self._name = fd, name

    def _truncated(self) -> bool:
        assert self._fd is not None
        if os.fstat(self._fd).st_size < self._offset:
            return True
        if not self._print:
            return False
        return os.pread(self._fd, len(self._print), self._offset - len(self._print)) != self._print

    def _read(self) -> tuple[list[str], int]:
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        skipped = 0
        if size - self._offset > self._most:
            skipped = size - self._offset - self._most
            self._offset += skipped
            self._rest = b""
        pieces: list[bytes] = []
        while (left := size - self._offset) > 0:
            piece = os.pread(self._fd, min(left, 1 << 18), self._offset)
            if not piece:
                break
            pieces.append(piece)
            self._offset += len(piece)
        if not pieces:
            return [], skipped
        fresh = b"".join(pieces)
        data = self._rest + fresh
        self._print = (self._print + fresh)[-_PRINT:] if not skipped else fresh[-_PRINT:]
        *whole, self._rest = _BREAK.split(data)
        if skipped and whole:
            # The rest of a line whose beginning was skipped.
            skipped += len(whole[0]) + 1
            whole = whole[1:]
        if len(self._rest) > 4 * MOST_LINE:
            whole.append(self._rest)
            self._rest = b""
        return [_clean(line) for line in whole if line], skipped


def _clean(line: bytes) -> str:
    return _CONTROL.sub("", line[: 4 * MOST_LINE].decode("utf-8", "replace"))[:MOST_LINE]
