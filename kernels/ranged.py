"""A file on an HTTP server, read in ranges: a wheel of 300 MB gives up its directory and one member for 60 MB.

``RangedFile`` is a seekable file for ``zipfile``. Small reads come from blocks; a member is fetched as one stream into a window (a
temporary file), with resumption where the connection breaks. A server that refuses ranges is told apart from one that fails, so
that the caller can fall back to the whole file.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ..errors import DownloadError
from .package_index import Connection, copy_limited, shown

__all__ = ["Progress", "RangedFile", "RangesRefusedError", "download_whole"]

#: ``progress(what, bytes done, bytes in all or None)``.
Progress = Callable[[str, int, int | None], None]

BLOCK = 1 << 20
_KEEP_BLOCKS = 16
ATTEMPTS = 4
MAX_FILE_BYTES = 4 << 30


class RangesRefusedError(DownloadError):
    """The server gives whole files only."""


class RangedFile(io.RawIOBase):
    """Seekable, read-only. ``fetched``: bytes that came over the network. DownloadError, RangesRefusedError."""

    def __init__(self, url: str, connection: Connection, *, progress: Progress | None = None, folder: Path | None = None) -> None:
        super().__init__()
        self._url = url
        self._connection = connection
        self._progress = progress
        self._folder = folder
        self._position = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._window: tuple[int, int, IO[bytes]] | None = None
        self._tag: str | None = None
        self.fetched = 0
        self.size = self._probe()

    def _probe(self) -> int:
        with self._connection.open(self._url, {"Range": "bytes=0-0"}) as response:
            if response.status != 206:
                raise RangesRefusedError(f"{shown(self._url)}: the server does not give ranges (HTTP {response.status})")
            size = self._check(response.headers.get("Content-Range"), 0)
            self._tag = response.headers.get("ETag")
        if size > MAX_FILE_BYTES:
            raise DownloadError(f"{shown(self._url)}: {size} bytes, more than {MAX_FILE_BYTES >> 30} GiB")
        return size

    def _check(self, header: str | None, start: int) -> int:
        match = re.fullmatch(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20})", (header or "").strip())
        if match is None or int(match[1]) != start:
            raise RangesRefusedError(f"{shown(self._url)}: asked for a range from {start}, got {header!r}")
        return int(match[3])

    def _stream(self, start: int, end: int) -> Iterator[bytes]:
        """Bytes ``start`` to ``end`` (exclusive), resumed where the connection breaks."""
        attempt = 0
        while start < end:
            headers = {"Range": f"bytes={start}-{end - 1}"}
            if self._tag and not self._tag.startswith("W/"):
                headers["If-Range"] = self._tag
            before = start
            try:
                with self._connection.open(self._url, headers) as response:
                    if response.status != 206:
                        raise RangesRefusedError(
                            f"{shown(self._url)}: the file changed, or ranges are refused (HTTP {response.status})"
                        )
                    if self._check(response.headers.get("Content-Range"), start) != self.size:
                        raise DownloadError(f"{shown(self._url)}: the file changed while it was read")
                    for piece in copy_limited(response, self._url, end - start):
                        start += len(piece)
                        self.fetched += len(piece)
                        yield piece
            except RangesRefusedError:
                raise
            except DownloadError:
                attempt = 0 if start > before else attempt + 1
                if attempt >= ATTEMPTS:
                    raise
                continue
            if start == before:
                attempt += 1
                if attempt >= ATTEMPTS:
                    raise DownloadError(f"{shown(self._url)}: ends at byte {start} of {end}")

    @contextlib.contextmanager
    def window(self, start: int, end: int, what: str) -> Iterator[None]:
        """Fetch ``start`` to ``end`` in one go; reads inside that range are then served from it."""
        end = min(end, self.size)
        with tempfile.TemporaryFile(dir=self._folder) as kept:
            done = 0
            for piece in self._stream(start, end):
                kept.write(piece)
                done += len(piece)
                if self._progress:
                    self._progress(what, done, end - start)
            self._window = (start, end, kept)
            try:
                yield
            finally:
                self._window = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """As of a buffered file: all of ``size`` bytes unless the end comes first."""
        left = max(self.size - self._position, 0)
        size = left if size is None or size < 0 else min(size, left)
        start, end = self._position, self._position + size
        if self._window is not None and self._window[0] <= start and end <= self._window[1]:
            first, _, kept = self._window
            kept.seek(start - first)
            piece = kept.read(size)
        else:
            piece = self._from_blocks(start, end)
        self._position += len(piece)
        return piece

    def _from_blocks(self, start: int, end: int) -> bytes:
        pieces: list[bytes] = []
        number = start // BLOCK
        while number * BLOCK < end:
            block = self._blocks.get(number)
            if block is None:
                block = b"".join(self._stream(number * BLOCK, min((number + 1) * BLOCK, self.size)))
                self._blocks[number] = block
                while len(self._blocks) > _KEEP_BLOCKS:
                    self._blocks.popitem(last=False)
            pieces.append(block[max(start - number * BLOCK, 0) : end - number * BLOCK])
            number += 1
        return b"".join(pieces)


def download_whole(
    url: str, connection: Connection, into: IO[bytes], *, size: int | None, what: str, progress: Progress | None = None
) -> int:
    """The whole file into ``into``; the number of bytes. DownloadError also for one that is shorter or longer than ``size``."""
    done = 0
    with connection.open(url) as response:
        announced = response.headers.get("Content-Length")
        total = size if size is not None else int(announced) if announced and announced.isdigit() else None
        for piece in copy_limited(response, url, total if total is not None else MAX_FILE_BYTES):
            into.write(piece)
            done += len(piece)
            if progress:
                progress(what, done, total)
    if total is not None and done != total:
        raise DownloadError(f"{shown(url)}: ended after {done} of {total} bytes")
    into.flush()
    return done
