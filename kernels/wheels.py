"""Reading a wheel that may be hostile: which members it has, and single members, within bounds and without unpacking anything.

No member name ever becomes a path. Directory size, number of members, and the size of what is inflated are bounded before and
while reading; what is read is checked against the CRC of the archive (by ``zipfile``) and, where the wheel has a RECORD, against
the sha256 in there.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import fnmatch
import hashlib
import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import IO

from ..errors import CubinError
from .ranged import RangedFile

__all__ = ["WheelFile", "is_zip"]

#: Bounds. vLLM's wheels have 5 000 to 7 000 members and directories of about 1 MB; the largest member has 308 MB.
MAX_MEMBERS = 200_000
MAX_DIRECTORY_BYTES = 64 << 20
MAX_LIBRARY_BYTES = 1 << 30
MAX_TEXT_BYTES = 8 << 20
MAX_TEXTS_BYTES = 64 << 20

_EOCD = struct.Struct("<4s4H2LH")


def is_zip(head: bytes) -> bool:
    """Whether a file with these first bytes is a zip archive."""
    return head[:4] in (b"PK\x03\x04", b"PK\x05\x06")


class _Guard(io.RawIOBase):
    """The archive's file; while it is being opened, no single read may exceed the bound of a directory."""

    def __init__(self, inner: IO[bytes] | RangedFile, path: str) -> None:
        super().__init__()
        self._inner = inner
        self._path = path
        self.opening = True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET and not 0 <= offset < 1 << 62:
            raise ValueError(f"the archive points to byte {offset}, outside the file")  # the system's own word is EINVAL
        return self._inner.seek(offset, whence)

    def tell(self) -> int:
        return self._inner.tell()

    def read(self, size: int = -1, /) -> bytes:
        if not self.opening:
            return self._inner.read(size)
        piece = self._inner.read(MAX_DIRECTORY_BYTES + 1 if size < 0 else min(size, MAX_DIRECTORY_BYTES + 1))
        if len(piece) > MAX_DIRECTORY_BYTES:
            raise CubinError(
                f"an archive directory of more than {MAX_DIRECTORY_BYTES >> 20} MiB",
                path=self._path,
                place="end of central directory",
            )
        return piece


@contextlib.contextmanager
def _hostile(path: str, place: str) -> Iterator[None]:
    """What ``zipfile`` raises for archives that are not well formed, as a CubinError."""
    try:
        yield
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
        ValueError,
        OverflowError,
        MemoryError,
        KeyError,
        IndexError,
    ) as error:
        raise CubinError(str(error) or type(error).__name__, path=path, place=place) from None


class WheelFile:
    """An open wheel. ``path``: its name for messages. CubinError, and DownloadError where it is read over the network."""

    def __init__(self, file: IO[bytes] | RangedFile, path: str) -> None:
        self.path = path
        self._file = file
        guard = _Guard(file, path)
        with _hostile(path, "archive directory"):
            self._zip = zipfile.ZipFile(guard)
            members = self._zip.infolist()
        guard.opening = False
        if len(members) > MAX_MEMBERS:
            raise CubinError(f"{len(members)} members, more than {MAX_MEMBERS}", path=path, place="archive directory")
        self._members: dict[str, zipfile.ZipInfo] = {}
        for member in members:
            self._members.setdefault(member.filename, member)
        self._record: dict[str, str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all members, folders left out."""
        return tuple(name for name, member in self._members.items() if name and not name.endswith("/"))

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """Names that one of the shell patterns matches; ``*`` goes over slashes and ``**`` means the same."""
        return match_names(self.names, patterns)

    def size(self, name: str) -> int:
        """Bytes of a member as the directory says."""
        return self._member(name).file_size

    def _member(self, name: str) -> zipfile.ZipInfo:
        member = self._members.get(name)
        if member is None:
            raise CubinError("no such member", path=self.path, place=name)
        if member.flag_bits & 1:
            raise CubinError("the member is encrypted", path=self.path, place=name)
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CubinError(f"compression method {member.compress_type} is not read", path=self.path, place=name)
        if stat.S_ISLNK(member.external_attr >> 16):
            raise CubinError("the member is a symbolic link", path=self.path, place=name)
        return member

    def read(self, name: str, limit: int = MAX_TEXT_BYTES) -> bytes:
        """A small member, whole."""
        kept = io.BytesIO()
        self.extract(name, kept, limit)
        return kept.getvalue()

    def extract(self, name: str, into: IO[bytes], limit: int = MAX_LIBRARY_BYTES, what: str = "") -> str:
        """A member's bytes into an open file; their sha256. CubinError past ``limit`` bytes or where CRC or RECORD disagree."""
        member = self._member(name)
        if member.file_size > limit:
            raise CubinError(f"{member.file_size} bytes, more than {limit}", path=self.path, place=name)
        digest = hashlib.sha256()
        done = 0
        with contextlib.ExitStack() as stack:
            if isinstance(self._file, RangedFile) and member.compress_size > 1 << 20:
                # The local header repeats the name and has extra fields of its own: 64 KiB more than the payload is enough.
                end = member.header_offset + 30 + 2 * 65535 + member.compress_size
                stack.enter_context(self._file.window(member.header_offset, end, what or name))
            stack.enter_context(_hostile(self.path, name))
            source = stack.enter_context(self._zip.open(member))
            while piece := source.read(1 << 20):
                done += len(piece)
                if done > min(limit, member.file_size):
                    raise CubinError(f"more than the {member.file_size} bytes announced", path=self.path, place=name)
                digest.update(piece)
                into.write(piece)
        if done != member.file_size:
            raise CubinError(f"{done} bytes, {member.file_size} announced", path=self.path, place=name)
        into.flush()
        found = digest.hexdigest()
        expected = self.record().get(name) if not name.endswith("RECORD") else None
        if expected is not None and expected != found:
            raise CubinError(f"sha256 {found[:16]}…, but the wheel's RECORD says {expected[:16]}…", path=self.path, place=name)
        return found

    def record(self) -> dict[str, str]:
        """Member name to sha256 (hex) as the wheel's own RECORD says; empty if it has none that can be read."""
        if self._record is None:
            self._record = {}
            name = next((name for name in self.names if name.count("/") == 1 and name.endswith(".dist-info/RECORD")), None)
            if name is not None:
                with contextlib.suppress(CubinError, csv.Error):
                    text = self.read(name).decode("utf-8", "replace")
                    for row in csv.reader(text.splitlines()):
                        if len(row) >= 2 and row[1].startswith("sha256="):
                            with contextlib.suppress(ValueError):
                                self._record[row[0]] = base64.urlsafe_b64decode(row[1][7:] + "=").hex()
        return self._record

    def metadata(self) -> dict[str, str]:
        """Name, Version and Tag (platform tags, comma between them) as its METADATA and WHEEL say; what is missing is left out."""
        found: dict[str, str] = {}
        for wanted, keys in (("METADATA", ("Name", "Version")), ("WHEEL", ("Tag",))):
            name = next((name for name in self.names if name.count("/") == 1 and name.endswith(f".dist-info/{wanted}")), None)
            if name is None:
                continue
            for line in self.read(name).decode("utf-8", "replace").splitlines():
                key, colon, value = line.partition(": ")
                if not line.strip():
                    break
                if colon and key in keys:
                    found[key] = f"{found[key]}, {value}" if key in found else value
        return found


def match_names(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Those of ``names`` that one of the shell patterns matches, in order; ``*`` goes over slashes, ``**`` means the same."""
    folded = [pattern.replace("**/", "*").replace("**", "*") for pattern in patterns]
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in folded)]
