"""Reading xz with a bound on memory: a file names the dictionary that its reader must keep, up to 1.5 GiB, and Python's own reader
keeps whatever is named.
"""

from __future__ import annotations

import io
import lzma
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["MEMORY_LIMIT", "XzStream"]

#: Bytes that the decoder may take. ``xz -9`` needs 65 MiB.
MEMORY_LIMIT = 256 << 20
_MAGIC = b"\xfd7zXZ\x00"
_PIECE = 1 << 16


class XzStream(io.RawIOBase):
    """The unpacked bytes of ``source``: one xz stream or several in a row, zeros between them or not. What follows the last one
    and begins no other is not looked at, as in Python's own reader.

    Reading raises lzma.LZMAError for damaged data and for a dictionary above ``limit``, EOFError where the data end too soon.
    """

    def __init__(self, source: IO[bytes], *, limit: int = MEMORY_LIMIT) -> None:
        super().__init__()
        self._source, self._limit = source, limit
        self._decoder = self._new()
        self._pending = b""
        self._ended = False

    def _new(self) -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=self._limit)

    def _read(self) -> bytes:
        pending, self._pending = self._pending, b""
        return pending or self._source.read(_PIECE) or b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        while len(view) and not self._ended:
            if self._decoder.eof:
                self._next()
                continue
            more = self._read() if self._decoder.needs_input else b""
            if self._decoder.needs_input and not more:
                raise EOFError("the xz data end before the end of their stream")
            piece = self._decoder.decompress(more, len(view))
            if piece:
                view[: len(piece)] = piece
                return len(piece)
        return 0

    def _next(self) -> None:
        """Begin the next stream, if one follows."""
        rest = self._decoder.unused_data.lstrip(b"\0")
        while len(rest) < len(_MAGIC) and (piece := self._read()):
            rest = (rest + piece).lstrip(b"\0")
        if rest.startswith(_MAGIC):
            self._decoder, self._pending = self._new(), rest
        else:
            self._ended = True
