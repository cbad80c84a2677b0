"""Compressed files and archives as streams: nothing is unpacked to disk under a name from the archive, nothing is followed.

Members come one after another and must be read before the next is asked for. Links, devices and names that leave the archive are
not opened but reported. What expands too far, too often or into too many members stops with a note and what was read stays.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from ...clock import SYSTEM, Clock
from .detect import HEAD_BYTES, Kind, sniff
from .xz_stream import XzStream

__all__ = ["Budget", "ExpansionStoppedError", "Leaf", "Peeked", "Readable", "expand", "read_up_to"]


class Readable(Protocol):
    """What a stream must do."""

    def read(self, size: int = -1, /) -> bytes: ...


class ExpansionStoppedError(Exception):
    """The budget is used up; carries the sentence for the input list. Caught in ``gather``, never shown as a failure of ours."""


@dataclass(slots=True)
class Budget:
    """Limits of one autopsy: bytes after decompression, members, nesting, expansion ratio once it matters; and how many files,
    bytes and seconds the folders may take together."""

    expanded_bytes: int = 12 << 30
    members: int = 20_000
    depth: int = 4
    ratio: int = 600
    ratio_from: int = 256 << 20
    #: What folders hold, all together; a file that was given by its own name is read whatever its size.
    files: int = 5_000
    read_bytes: int = 32 << 30
    seconds: float = 180.0
    clock: Clock = SYSTEM
    used: int = 0
    opened: int = 0
    files_read: int = 0
    bytes_read: int = 0
    started: float | None = None

    def ended(self, *, within: bool = False) -> str:
        """Why nothing more of a folder is read; "" while there is something left. Time counts from the first question.

        ``within``: asked in the middle of a file, which is counted already.
        """
        now = self.clock.monotonic()
        if self.started is None:
            self.started = now
        reached = (
            f"{self.files} files" if not within and self.files_read >= self.files
            else f"{self.read_bytes >> 20} MiB" if self.bytes_read >= self.read_bytes
            else f"{self.seconds:g} s" if now - self.started >= self.seconds
            else ""
        )  # fmt: skip
        if not reached:
            return ""
        spent = f"{self.files_read} files, {self.bytes_read >> 20} MiB, {now - self.started:.0f} s"
        return f"folders are read for at most {reached}: stopped after {spent}, the rest was not read"

    def take(self, count: int) -> None:
        """``count`` more bytes of a folder's file. ExpansionStoppedError when it is too much or too late."""
        self.bytes_read += count
        why = self.ended(within=True)
        if why:
            raise ExpansionStoppedError(why)


class Peeked:
    """A stream whose first bytes were looked at."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.head = read_up_to(stream, HEAD_BYTES)
        self._given = 0

    def read(self, size: int = -1, /) -> bytes:
        if self._given < len(self.head):
            end = len(self.head) if size < 0 else min(self._given + size, len(self.head))
            part = self.head[self._given : end]
            self._given = end
            return part if size >= 0 else part + self._stream.read(-1)
        return self._stream.read(size)


def read_up_to(stream: Readable, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        part = stream.read(size)
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class _Metered:
    """Counts what comes out of a decompressor and compares it with what went in."""

    def __init__(self, stream: Readable, budget: Budget, name: str, source: _Counted | None = None) -> None:
        self._stream, self._budget, self._name, self._source = stream, budget, name, source
        self.count = 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(1 << 20 if size < 0 else size)
        if size < 0:
            parts = [data]
            while data:
                data = self._stream.read(1 << 20)
                self._tally(len(data))
                parts.append(data)
            return b"".join(parts)
        self._tally(len(data))
        return data

    def _tally(self, count: int) -> None:
        self.count += count
        self._budget.used += count
        if self._budget.used > self._budget.expanded_bytes:
            raise ExpansionStoppedError(
                f"stopped after {self._budget.expanded_bytes >> 20} MiB of unpacked data: the rest was not read"
            )
        if (
            self._source is not None
            and self.count > self._budget.ratio_from
            and self.count > self._budget.ratio * max(self._source.count, 1)
        ):
            raise ExpansionStoppedError(f"stopped: it expands more than {self._budget.ratio} times, like a decompression bomb")


class _Counted(io.RawIOBase):
    """Counts the compressed bytes that a decompressor takes."""

    def __init__(self, stream: Readable) -> None:
        super().__init__()
        self._stream = stream
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)


@dataclass(slots=True)
class Leaf:
    """A file's content. ``stream`` None: it could not be opened, ``note`` says why. ``size``: as stated, if it is."""

    path: str
    kind: Kind
    stream: Readable | None
    note: str = ""
    size: int | None = None
    guards: list[_Guarded] = field(default_factory=list)

    @property
    def packed(self) -> bool:
        """Its bytes are not those of the file that was given, but come out of it."""
        return bool(self.guards)

    def trouble(self) -> str:
        """What went wrong while it was read, known only afterwards."""
        return next((guard.error for guard in self.guards if guard.error), "")


def _open_zstd(source: IO[bytes]) -> Readable:
    try:
        import zstandard

        reader: Readable = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(source, read_across_frames=True)
        return reader
    except ImportError:
        return _ZstdProgram(source)


class _ZstdProgram:
    """The ``zstd`` program as a filter, where the Python package is missing."""

    def __init__(self, source: IO[bytes]) -> None:
        program = shutil.which("zstd")
        if program is None:
            raise OSError("zstd data, and neither the zstandard package nor the zstd program is there: pip install zstandard")
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115
        shutil.copyfileobj(source, self._spool, 1 << 20)
        self._spool.seek(0)
        self._process = subprocess.Popen(  # a fixed program, no shell, no name from the evidence
            [program, "-dc", "--memory=256MB"], stdin=self._spool, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def read(self, size: int = -1, /) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if not data:
            self.close()
        return data

    def close(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._spool.close()

    def __del__(self) -> None:
        if hasattr(self, "_process") and not self._spool.closed:
            self.close()


_DECODE_ERRORS = (
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    ValueError,
    RuntimeError,
    tarfile.TarError,
    zipfile.BadZipFile,
    NotImplementedError,
)


class _Guarded:
    """Turns a decompressor's errors into an end of data that is remembered."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.error = ""

    def read(self, size: int = -1, /) -> bytes:
        if self.error:
            return b""
        try:
            # One step at a time: a step that fails must not take with it what the steps before it gave.
            step = getattr(self._stream, "read1", None)
            return bytes(step(size)) if step is not None and size > 0 else self._stream.read(size)
        except ExpansionStoppedError:
            raise
        except _DECODE_ERRORS as error:
            self.error = f"damaged or torn: {error}"
            return b""
        except Exception as error:
            if type(error).__module__.split(".")[0] not in ("zstandard", "backports"):
                raise
            self.error = f"damaged or torn: {error}"
            return b""


def expand(path: str, stream: Readable, budget: Budget, *, size: int | None = None, depth: int = 0) -> Iterator[Leaf]:
    """The leaves of a file: itself, or what is packed in it."""
    budget.opened += 1
    if budget.opened > budget.members:
        raise ExpansionStoppedError(f"stopped after {budget.members} members: the rest was not read")
    peeked = Peeked(stream)
    kind = sniff(peeked.head)
    if kind in ("gzip", "zstd", "xz", "bz2", "zip", "tar") and depth >= budget.depth:
        yield Leaf(path, kind, None, f"packed more than {budget.depth} times: not opened", size)
        return
    if kind in ("gzip", "zstd", "xz", "bz2"):
        counted = _Counted(peeked)
        source = io.BufferedReader(counted, 1 << 16)
        opened: Readable
        try:
            if kind == "gzip":
                opened = gzip.GzipFile(fileobj=source, mode="rb")
            elif kind == "xz":
                opened = io.BufferedReader(XzStream(source))
            elif kind == "bz2":
                opened = bz2.BZ2File(source, "rb")
            else:
                opened = _open_zstd(source)
        except _DECODE_ERRORS as error:
            yield Leaf(path, kind, None, str(error), size)
            return
        guarded = _Guarded(opened)
        yield from _inner(path, _Metered(guarded, budget, path, counted), guarded, budget, depth + 1)
        return
    if kind == "tar":
        yield from _tar(path, peeked, budget, depth)
        return
    if kind == "zip":
        yield from _zip(path, peeked, budget, depth)
        return
    yield Leaf(path, kind, peeked, "", size)


def _inner(path: str, stream: Readable, guarded: _Guarded, budget: Budget, depth: int) -> Iterator[Leaf]:
    for leaf in expand(path, stream, budget, depth=depth):
        leaf.guards.append(guarded)
        yield leaf


def _unsafe(name: str) -> bool:
    return name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or (len(name) > 1 and name[1] == ":")


def _shown(name: str) -> str:
    return "".join(ch if ch.isprintable() else "?" for ch in name)[:200]


def _tar(path: str, stream: Readable, budget: Budget, depth: int) -> Iterator[Leaf]:
    guarded = _Guarded(stream)
    try:
        archive = tarfile.open(fileobj=io.BufferedReader(_Counted(guarded), 1 << 16), mode="r|")  # noqa: SIM115
        for member in archive:
            name = f"{path}!{_shown(member.name)}"
            if member.isdir():
                continue
            if not member.isfile():
                yield Leaf(name, "binary", None, "a link or special file in an archive: not followed")
                continue
            note = "the name leaves the archive: read in place, never written" if _unsafe(member.name) else ""
            handle = archive.extractfile(member)
            if handle is None:
                continue
            own = _Guarded(handle)
            for leaf in expand(name, own, budget, size=member.size, depth=depth + 1):
                leaf.note = leaf.note or note
                leaf.guards += [own, guarded]
                yield leaf
    except ExpansionStoppedError:
        raise
    except _DECODE_ERRORS as error:
        yield Leaf(path, "tar", None, f"damaged or torn archive: {error}")


def _zip(path: str, stream: Readable, budget: Budget, depth: int) -> Iterator[Leaf]:
    with tempfile.SpooledTemporaryFile(max_size=32 << 20) as spool:
        while block := stream.read(1 << 20):
            spool.write(block)
            if spool.tell() > budget.expanded_bytes:
                raise ExpansionStoppedError("a zip larger than the limit")
        spool.seek(0)
        try:
            with zipfile.ZipFile(spool) as archive:
                for info in archive.infolist():
                    name = f"{path}!{_shown(info.filename)}"
                    if info.filename.endswith("/"):  # is_dir() of an empty name is an IndexError
                        continue
                    if (info.external_attr >> 16) & 0o170000 == 0o120000:
                        yield Leaf(name, "binary", None, "a link in an archive: not followed")
                        continue
                    if info.flag_bits & 1:
                        yield Leaf(name, "binary", None, "encrypted: not read")
                        continue
                    note = "the name leaves the archive: read in place, never written" if _unsafe(info.filename) else ""
                    try:
                        handle = archive.open(info)
                    except _DECODE_ERRORS as error:
                        yield Leaf(name, "binary", None, f"damaged: {error}")
                        continue
                    with handle:
                        counted = _Fixed(max(info.compress_size, 1))
                        guarded = _Guarded(handle)
                        metered = _Metered(guarded, budget, name, counted)
                        for leaf in expand(name, metered, budget, size=info.file_size, depth=depth + 1):
                            leaf.note = leaf.note or note
                            leaf.guards.append(guarded)
                            yield leaf
        except ExpansionStoppedError:
            raise
        except _DECODE_ERRORS as error:
            yield Leaf(path, "zip", None, f"damaged archive: {error}")


class _Fixed(_Counted):
    """A compressed size known from the directory."""

    def __init__(self, count: int) -> None:
        super().__init__(io.BytesIO())
        self.count = count
