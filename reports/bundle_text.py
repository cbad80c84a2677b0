"""Texts on their way into a bundle: decoded, cut around what matters when they are huge, redacted chunk by chunk.

Bytes that are no UTF-8 are kept as they are. A chunk ends at a line's end and never inside a private key; a line that is longer
than a chunk may be is cut, and says so. A text that is cut keeps its first and last bytes and the neighbourhood of lines that the
verdict cites; each gap is one line that gives the numbers of the lines left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

__all__ = ["Cut", "Readable", "chunks", "cut_text", "lines_of"]

#: Characters of a chunk: small enough that a rule whose words are not in it costs nothing.
_CHUNK = 128 << 10
#: A longer line is cut: its first bytes are kept.
MAX_LINE = 4 << 20
_KEPT_OF_LONG_LINE = 64 << 10
#: Lines kept on either side of a cited one.
_AROUND = 120
#: A private key is at most so many characters away from its end.
_LONGEST_KEY = 64 << 10


class Readable(Protocol):
    """What a stream must do."""

    def read(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """How much of a text stays: bytes at its head and tail, besides the neighbourhood of cited lines."""

    head: int
    tail: int


def lines_of(stream: Readable, encoding: str = "utf-8") -> Iterator[str]:
    """Lines with their ends. Undecodable bytes survive as surrogates; of an overlong line the head stays, with a mark."""
    if encoding != "utf-8":
        data = stream.read(64 << 20)
        yield from data.decode(encoding, "replace").splitlines(keepends=True)
        return
    rest = b""
    skipping = 0
    while block := stream.read(1 << 20):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if skipping:
                yield f" [… {skipping + len(line)} more bytes of this line were left out]\n"
                skipping = 0
                continue
            yield line.decode("utf-8", "surrogateescape") + "\n"
        if skipping:
            skipping += len(rest)
            rest = b""
        elif len(rest) > MAX_LINE:
            yield rest[:_KEPT_OF_LONG_LINE].decode("utf-8", "surrogateescape")
            skipping = len(rest) - _KEPT_OF_LONG_LINE
            rest = b""
    if skipping:
        yield f" [… {skipping + len(rest)} more bytes of this line were left out]"
    elif rest:
        yield rest.decode("utf-8", "surrogateescape")


def chunks(lines: Iterator[str]) -> Iterator[tuple[str, int]]:
    """(text, number of its first line), split at line ends and not inside a private key."""
    held: list[str] = []
    size = 0
    first = number = 1
    for line in lines:
        held.append(line)
        size += len(line)
        number += line.count("\n")
        if size >= _CHUNK:
            text = "".join(held)
            opened = text.rfind("PRIVATE KEY-----")
            begun = opened >= 0 and "-----BEGIN" in text[max(opened - 60, 0) : opened]
            if begun and size < _CHUNK + _LONGEST_KEY:
                continue
            yield text, first
            held, size, first = [], 0, number
    if held:
        yield "".join(held), first


def cut_text(lines: Iterator[str], out: BinaryIO, cut: Cut, cited: Collection[int] = ()) -> frozenset[int] | None:
    """Write what stays of a text. ``cited``: numbers of lines whose neighbourhood stays.

    Returns the cited lines' numbers in what was written, None if nothing was left out.
    """
    return _Cutter(out, cut, frozenset(list(cited)[:2000])).run(lines)


class _Cutter:
    def __init__(self, out: BinaryIO, cut: Cut, cited: frozenset[int]) -> None:
        self._out = out
        self._cut = cut
        self._cited = cited
        self._near = {around for line in cited for around in range(line - _AROUND, line + _AROUND + 1)}
        self._gap: list[int] = []
        self._written = 0
        self._bytes = 0
        self._moved: set[int] = set()
        self._left_out = False

    def run(self, lines: Iterator[str]) -> frozenset[int] | None:
        tail: deque[tuple[int, bytes]] = deque()
        held = 0
        for number, line in enumerate(lines, 1):
            raw = line.encode("utf-8", "surrogateescape")
            if self._bytes < self._cut.head:
                self._line(number, raw)
                continue
            tail.append((number, raw))
            held += len(raw)
            while held > self._cut.tail and tail:
                old, data = tail.popleft()
                held -= len(data)
                self._old(old, data)
        self._end_gap()
        for number, data in tail:
            self._line(number, data)
        return frozenset(self._moved) if self._left_out else None

    def _line(self, number: int, raw: bytes) -> None:
        self._out.write(raw)
        self._written += 1
        self._bytes += len(raw)
        if number in self._cited:
            self._moved.add(self._written)

    def _old(self, number: int, data: bytes) -> None:
        """A line that fell out of the tail: kept beside a cited line, else part of a gap."""
        if number in self._near:
            self._end_gap()
            self._line(number, data)
        elif self._gap:
            self._gap[1] = number
            self._gap[2] += len(data)
        else:
            self._gap = [number, number, len(data)]

    def _end_gap(self) -> None:
        if self._gap:
            first, last, size = self._gap
            self._gap = []
            self._left_out = True
            self._written += 1
            self._out.write(f"[… lines {first} to {last} ({size} bytes) were left out of this bundle …]\n".encode())
