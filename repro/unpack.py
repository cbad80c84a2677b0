"""A core dump that came compressed (.gz, .xz): unpacked into a private temporary file, within bounds, removed afterwards."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from ..errors import EvidenceError
from ..forensics.evidence.opening import at_once
from ..forensics.evidence.xz_stream import XzStream

__all__ = ["MAX_UNPACKED", "head_of", "peek", "plain_file"]

#: Bytes that a compressed dump may grow to; a full dump of a whole card is not compressed by anybody.
MAX_UNPACKED = 2 << 30
_PIECE = 1 << 20
_MAGICS = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz"}


def head_of(path: Path, size: int = 64) -> bytes:
    """The first bytes of a regular file; EvidenceError for anything else (a pipe or a device is not opened to be read from)."""
    try:
        with open(path, "rb", opener=at_once) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise EvidenceError("not a regular file", path=str(path))
            return stream.read(size) or b""  # None: it has nothing to give now, as /proc/kmsg
    except OSError as error:
        raise EvidenceError(f"cannot be read: {error.strerror or error}", path=str(path)) from error


def _kind(head: bytes) -> str | None:
    return next((kind for magic, kind in _MAGICS.items() if head.startswith(magic)), None)


@contextmanager
def _unpacking(path: Path, kind: str, done: Callable[[], int]) -> Iterator[IO[bytes]]:
    """The unpacked stream; what is damaged or unreadable becomes an EvidenceError with the place."""
    try:
        with path.open("rb") as packed, io.BufferedReader(XzStream(packed)) if kind == "xz" else gzip.open(packed) as stream:
            yield cast("IO[bytes]", stream)
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise EvidenceError(f"damaged {kind} data: {error}", path=str(path), place=f"after {done()} unpacked bytes") from error
    except OSError as error:
        raise EvidenceError(
            f"cannot be unpacked: {error.strerror or error}",
            path=str(path),
            help_text="It is unpacked into the temporary folder; another one: TMPDIR=DIR, or unpack it yourself",
        ) from error


def peek(path: Path, size: int) -> bytes:
    """The first ``size`` bytes of a file, unpacked if it is compressed. EvidenceError."""
    kind = _kind(head_of(path))
    if kind is None:
        return head_of(path, size)
    with _unpacking(path, kind, lambda: 0) as stream:
        return stream.read(size)


def _unpack(path: Path, kind: str, into: IO[bytes], limit: int) -> None:
    done = 0
    with _unpacking(path, kind, lambda: done) as stream:
        while piece := stream.read(_PIECE):
            done += len(piece)
            if done > limit:
                raise EvidenceError(f"unpacks to more than {limit} bytes", path=str(path))
            into.write(piece)


@contextmanager
def plain_file(path: Path, *, limit: int = MAX_UNPACKED) -> Iterator[Path]:
    """``path`` itself, or a temporary file with its unpacked content while the context is open. EvidenceError."""
    kind = _kind(head_of(path))
    if kind is None:
        yield path
        return
    folder = Path(tempfile.mkdtemp(prefix="dsv4-repro-"))
    try:
        target = folder / "unpacked"  # its own name may be none without the suffix: "..gz"
        with target.open("wb") as stream:
            _unpack(path, kind, stream, limit)
        yield target
    finally:
        shutil.rmtree(folder, ignore_errors=True)
