"""One evidence file to the files that stand for it in a bundle: texts redacted, dumps stripped, archives opened, the rest left out.

What a file is, is found from its bytes. Nothing is written under a name that a file or an archive chose: names are cleaned, kept
apart, and redacted like every other text. What cannot be redacted (programs, unknown binary data) stays out and is listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from ..errors import EvidenceError
from ..forensics.evidence.archive import Budget, ExpansionStoppedError, Leaf, expand
from ..forensics.evidence.flight_recorder import load_pickle
from .bundle_device import reduce_core
from .bundle_text import Cut, chunks, cut_text, lines_of
from .redact import Redactor
from .redact_json import redact_json

__all__ = ["Made", "Maker", "SourceFile", "clean_name"]

#: A text larger than this is cut before it is redacted: the ends and the neighbourhood of cited lines stay.
_LARGE = 48 << 20
_FIRST_CUT = Cut(8 << 20, 24 << 20)
#: Sizes to which a text is cut step by step when the bundle is too large.
SMALLER = (Cut(1 << 20, 4 << 20), Cut(256 << 10, 1 << 20), Cut(64 << 10, 256 << 10))
_JSON_WHOLE = 16 << 20
_PICKLE_MOST = 64 << 20
#: Binary artefacts of ours that hold numbers only: kind in the evidence index.
_PLAIN_BINARY = frozenset({"row-states", "row states"})
_NAME = re.compile(r"[^A-Za-z0-9._+=@,-]")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the run directory. ``path``: relative, as the index writes it; ``sha256``: as indexed, None if it is not."""

    path: str
    place: Path
    kind: str = ""
    origin: str = "measured"
    sha256: str | None = None


@dataclass(slots=True)
class Made:
    """A file made for the bundle. ``how``: as it was, redacted, cut, stripped, tables, code. ``note``: what a reader must know."""

    name: str
    place: Path
    rank: int
    how: str
    kind: str
    origin: str
    source: str
    note: str = ""
    cited: frozenset[int] = frozenset()
    steps: int = 0


@dataclass
class Maker:
    """Makes the files of one bundle in ``folder`` (private). ``left_out``: (path, why)."""

    redactor: Redactor
    folder: Path
    raw: bool = False
    cited: Mapping[str, Collection[int]] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    shortened: dict[str, tuple[Path, frozenset[int] | None]] = field(default_factory=dict)

    # -- first pass ----------------------------------------------------------------------------------------------------------------

    def learn(self, file: SourceFile) -> None:
        """Collect names from a file's texts."""
        try:
            with file.place.open("rb") as stream:
                for leaf in expand(file.path, stream, Budget(expanded_bytes=4 << 30), size=file.place.stat().st_size):
                    if leaf.kind in ("text", "utf16") and leaf.stream is not None:
                        self._learn_text(file, leaf)
        except (OSError, ExpansionStoppedError):
            return  # the second pass meets the same trouble and lists the file

    def _learn_text(self, file: SourceFile, leaf: Leaf) -> None:
        """Names are learned from what will be kept: a huge text is shortened first, once for both passes."""
        assert leaf.stream is not None
        lines = lines_of(leaf.stream, "utf-16" if leaf.kind == "utf16" else "utf-8")
        if leaf.size is not None and leaf.size <= _LARGE:
            for text, _ in chunks(lines):
                self.redactor.learn(text)
            return
        place = self.folder / f"short-{len(self.shortened)}"
        with place.open("wb") as out:
            moved = cut_text(lines, out, _FIRST_CUT, self._cited(file, leaf))
        self.shortened[leaf.path] = (place, moved)
        with place.open("rb") as stream:
            for text, _ in chunks(lines_of(stream)):
                self.redactor.learn(text)

    def _cited(self, file: SourceFile, leaf: Leaf) -> frozenset[int]:
        return frozenset(self.cited.get(leaf.path, ())) | frozenset(self.cited.get(file.path, ()))

    # -- second pass ---------------------------------------------------------------------------------------------------------------

    def make(self, file: SourceFile) -> list[Made]:
        """The files that stand for ``file``; what has none is in ``left_out``."""
        made: list[Made] = []
        try:
            size = file.place.stat().st_size
            with file.place.open("rb") as stream:
                for leaf in expand(file.path, stream, Budget(expanded_bytes=4 << 30), size=size):
                    made += self._leaf(file, leaf)
        except ExpansionStoppedError as stop:
            self.left_out.append((file.path, str(stop)))
        except OSError as error:
            self.left_out.append((file.path, f"cannot be read: {error.strerror or error}"))
        if self.raw and any(item.how == "stripped" for item in made):
            made.append(self._raw(file))
        return made

    def _leaf(self, file: SourceFile, leaf: Leaf) -> list[Made]:
        name = leaf.path.replace("!", "/") if leaf.path.startswith(file.path) else file.path
        if leaf.stream is None:
            self.left_out.append((leaf.path, leaf.note))
            return []
        if leaf.kind in ("text", "utf16", "empty"):
            return [self._text(file, leaf, _unpacked_name(name, leaf.path == file.path and leaf.kind != "empty", file.place))]
        if leaf.kind == "gpu-core":
            return self._core(file, leaf, _unpacked_name(name, leaf.path == file.path, file.place))
        if leaf.kind == "pickle":
            return self._pickle(file, leaf, name)
        if file.kind in _PLAIN_BINARY and leaf.path == file.path:
            return [self._copy(file, leaf.stream, name, 6, "as it was", "numbers of device memory, no text")]
        why = "a program or machine code" if leaf.kind == "elf" else "binary data that cannot be redacted"
        if self.raw and leaf.path == file.path:
            return [self._copy(file, leaf.stream, name, 7, "as it was", f"{why}: included because of --raw, not redacted")]
        self.left_out.append((leaf.path, f"{why} (--raw includes it)"))
        return []

    # -- kinds ---------------------------------------------------------------------------------------------------------------------

    def _text(self, file: SourceFile, leaf: Leaf, name: str) -> Made:
        assert leaf.stream is not None
        target, final = self._target(name)
        cited = self._cited(file, leaf)
        head = getattr(leaf.stream, "head", b"")
        if leaf.path not in self.shortened and head.lstrip()[:1] in (b"{", b"[") and (leaf.size or 0) <= _JSON_WHOLE:
            data = leaf.stream.read(_JSON_WHOLE + 1)
            document = _document(data)
            if document is not None:
                document = redact_json(self.redactor, document, final)
                target.write_bytes((json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass"))
                return Made(final, target, 4, "redacted", file.kind, file.origin, file.path, cited=cited)
            lines = lines_of(_Joined(data, leaf.stream))
        else:
            lines = lines_of(leaf.stream, "utf-16" if leaf.kind == "utf16" else "utf-8")
        how = "redacted"
        short = self.shortened.get(leaf.path)
        if short is not None:
            place, moved = short
            if moved is not None:
                how, cited = "redacted and cut", moved
            with place.open("rb") as stream, target.open("wb") as out:
                self._redact(lines_of(stream), out, final)
        else:
            with target.open("wb") as out:
                self._redact(lines, out, final)
        note = "; ".join(part for part in (leaf.note, _trouble(leaf)) if part)
        return Made(final, target, 4, how, file.kind, file.origin, file.path, note, cited)

    def _redact(self, lines: Iterator[str], out: BinaryIO, name: str) -> None:
        for text, first in chunks(lines):
            done = self.redactor.text(text, name, first)
            if "Arguments:" in text or "Locals:" in text:
                done = self.redactor.locals_of_stacks(done, name, first)
            out.write(done.encode("utf-8", "surrogateescape"))

    def _core(self, file: SourceFile, leaf: Leaf, name: str) -> list[Made]:
        assert leaf.stream is not None
        place = file.place
        spooled = None
        if leaf.path != file.path or place.suffix in (".gz", ".xz", ".zst", ".bz2"):
            spooled = place = self.folder / f"spool-{len(self.taken)}"
            with spooled.open("wb") as out:
                while block := leaf.stream.read(1 << 20):
                    out.write(block)
        target, final = self._target(name)
        try:
            reduced = reduce_core(place, target)
        except EvidenceError as error:
            self.left_out.append((leaf.path, f"a GPU core dump that cannot be read: {error}"))
            self.taken.discard(final)
            return []
        finally:
            if spooled is not None:
                spooled.unlink(missing_ok=True)
        stripped = reduced.stripped
        about = (
            f"{stripped.kept} sections as they were, {stripped.dropped} left out ({stripped.dropped_bytes} bytes), "
            f"{stripped.words} words of memory kept"
        )
        note = f"{about}; {reduced.note}" if reduced.note else f"{about}; judged alone it gives the same verdict as the whole dump"
        made = [Made(final, target, 3, "stripped", file.kind or "gpu-core", file.origin, file.path, note)]
        made.append(self._data(file, f"{name}.tables.json", reduced.tables, 5, "tables", "the same tables as JSON"))
        for number, (function, cubin) in enumerate(reduced.code, 1):
            made.append(
                self._data(
                    file, f"{name}.kernel-{number}.cubin", cubin, 3, "code", f"machine code of {function}, and of nothing else"
                )
            )
        return made

    def _pickle(self, file: SourceFile, leaf: Leaf, name: str) -> list[Made]:
        assert leaf.stream is not None
        try:
            document = load_pickle(leaf.stream.read(_PICKLE_MOST), leaf.path)
        except EvidenceError as error:
            self.left_out.append((leaf.path, str(error)))
            return []
        document = redact_json(self.redactor, _plain(document), name)
        data = (json.dumps(document, indent=1, default=str) + "\n").encode("utf-8", "backslashreplace")
        return [self._data(file, f"{name}.json", data, 4, "redacted", "a pickle, written as JSON")]

    # -- places --------------------------------------------------------------------------------------------------------------------

    def _target(self, name: str) -> tuple[Path, str]:
        """(where to write, the name in the bundle): cleaned, redacted, unique."""
        parts = [
            clean_name(self.redactor.text(part, "file names", 0))
            for part in PurePosixPath(name).parts
            if part not in ("/", "..", ".")
        ]
        base = final = "/".join(parts) or "file"
        number = 1
        while final.lower() in self.taken:
            number += 1
            final = f"{base}-{number}"
        self.taken.add(final.lower())
        return self.folder / f"made-{len(self.taken)}", final

    def _data(self, file: SourceFile, name: str, data: bytes, rank: int, how: str, note: str) -> Made:
        target, final = self._target(name)
        target.write_bytes(data)
        return Made(final, target, rank, how, file.kind, file.origin, file.path, note)

    def _copy(self, file: SourceFile, stream: Any, name: str, rank: int, how: str, note: str) -> Made:
        target, final = self._target(name)
        with target.open("wb") as out:
            while block := stream.read(1 << 20):
                out.write(block)
        return Made(final, target, rank, how, file.kind, file.origin, file.path, note)

    def _raw(self, file: SourceFile) -> Made:
        with file.place.open("rb") as stream:
            return self._copy(
                file,
                stream,
                f"raw/{file.path}",
                8,
                "as it was",
                "the whole dump, because of --raw: not redacted, holds device memory",
            )

    def shrink(self, made: Made) -> bool:
        """Cut a text further; False if there is no smaller step."""
        if made.rank not in (2, 4) or made.steps >= len(SMALLER):
            return False
        cut = SMALLER[made.steps]
        smaller = made.place.with_name(made.place.name + f".{made.steps}")
        with made.place.open("rb") as stream, smaller.open("wb") as out:
            moved = cut_text(lines_of(stream), out, cut, made.cited)
        made.cited = made.cited if moved is None else moved
        made.steps += 1
        made.place = smaller
        made.how = "redacted and cut"
        return True


def clean_name(part: str) -> str:
    """One component of a path that no file system and no shell stumbles over."""
    cleaned = _NAME.sub("_", part)[:120].lstrip(".-")
    return cleaned or "_"


def _unpacked_name(name: str, alone: bool, place: Path) -> str:
    """A compressed file's own name without the ending that no longer holds."""
    return (
        name[: -len(place.suffix)]
        if alone and place.suffix in (".gz", ".xz", ".zst", ".bz2") and name.endswith(place.suffix)
        else name
    )


def _trouble(leaf: Leaf) -> str:
    trouble: Callable[[], str] | None = getattr(leaf, "trouble", None)
    return trouble() if trouble is not None else ""


def _document(data: bytes) -> Any:
    """A JSON object or list of at most the size that is read whole; None if it is not one (JSON lines are text)."""
    if len(data) > _JSON_WHOLE:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | list) else None


def _plain(value: Any, depth: int = 0) -> Any:
    """A value of a pickle as JSON can hold it."""
    if depth > 40:
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth + 1) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


class _Joined:
    """Bytes that were read already, then the rest of a stream."""

    def __init__(self, head: bytes, rest: Any) -> None:
        self._head = head
        self._rest = rest

    def read(self, size: int = -1, /) -> bytes:
        if self._head:
            head, self._head = (self._head, b"") if size < 0 else (self._head[:size], self._head[size:])
            return head
        data: bytes = self._rest.read(size)
        return data
