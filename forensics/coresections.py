"""The section table of a GPU core dump, read within bounds: a million sections, cyclic links, sizes past the end are data.

Only headers are held (36 bytes a section, in numpy columns); contents are read on demand with one ``pread`` of a bounded length,
never mapped, so resident memory does not follow the file's size. The tree cannot recurse: each level is another section type and
is found by (type, parent's index, row).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..errors import CoreFileError
from . import limits
from .coretables import EM_CUDA, ET_CORE, SHT_LOUSER, Kind, Row
from .device_state import Unread

__all__ = ["CoreSections"]

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_SHDR_SIZE = 64
_SHDR = np.dtype(
    {
        "names": ["name", "type", "addr", "offset", "size", "link", "info", "entsize"],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u8", "<u4", "<u4", "<u8"],
        "offsets": [0, 4, 16, 24, 32, 40, 44, 56],
        "itemsize": _SHDR_SIZE,
    }
)
_SHN_XINDEX = 0xFFFF
_SHT_STRTAB = 3
_MACHINES = {3: "Intel 80386", 62: "x86-64", 183: "AArch64", 21: "PowerPC64", 243: "RISC-V", 224: "AMD GPU"}
_TRUNCATED = "the dump was cut off: copy it again, or wait until its writer says that it is done"


class CoreSections:
    """An open dump. Columns ``kind`` (0: not a dump section), ``link``, ``info``, ``offset``, ``size``, ``entsize``, by section.

    Raises CoreFileError, naming file and place, for anything that is not a little-endian ELF64 core file of a CUDA device with a
    readable section table. What is wrong but can be lived with is in ``unread``; ``partial``: tables of which rows are missing
    (-1: headers of whole sections are), so that what they do not list may be there all the same.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.unread: list[Unread] = []
        self.partial: set[int] = set()
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CoreFileError(f"cannot be opened: {error.strerror}", path=self.path) from None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- opening -------------------------------------------------------------------------------------------------------------

    def _fail(self, message: str, place: str, help_text: str | None = None) -> CoreFileError:
        return CoreFileError(message, path=self.path, place=place, help_text=help_text)

    def _open(self) -> None:
        facts = os.fstat(self._fd)
        if not _is_plain(facts.st_mode):
            raise self._fail("not a plain file", "")
        self.file_size = facts.st_size
        head = self._pread(0, _EHDR.size)
        if not head:
            raise self._fail("the file is empty", "offset 0", _TRUNCATED)
        if head[:2] == b"\x1f\x8b":
            raise self._fail("the dump is gzip-compressed", "offset 0", f"gunzip < {self.path} > dump.nvcudmp, then read that")
        if head[:4] != b"\x7fELF"[: len(head)] or len(head) < 4:
            raise self._fail("not an ELF file", "offset 0", "a GPU core dump is an ELF file that ends in .nvcudmp")
        if len(head) < _EHDR.size:
            raise self._fail(f"ends after {len(head)} of {_EHDR.size} header bytes", "ELF header", _TRUNCATED)
        ident, kind, machine, _, _, _, shoff, _, _, _, _, shentsize, shnum, shstrndx = _EHDR.unpack(head)
        if ident[4] != 2:
            raise self._fail("a 32-bit ELF file; GPU core dumps are 64-bit", "ELF header, EI_CLASS")
        if ident[5] != 1:
            raise self._fail("not little-endian", "ELF header, EI_DATA")
        if machine != EM_CUDA:
            name = _MACHINES.get(machine, f"machine {machine}")
            raise self._fail(
                f"made for {name}, not for an NVIDIA GPU (machine {EM_CUDA})", "ELF header, e_machine",
                "a host core dump is another thing: the GPU's is written by the driver (CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1)",
            )  # fmt: skip
        if kind != ET_CORE:
            raise self._fail(
                f"an NVIDIA GPU ELF file of type {kind}, not a core dump (type {ET_CORE})", "ELF header, e_type",
                "this looks like a cubin: dsv4-repro audit FILE reads code",
            )  # fmt: skip
        self.abi = (ident[7], ident[8])
        if shoff == 0:
            raise self._fail("no section table", "ELF header, e_shoff", _TRUNCATED)
        if shentsize != _SHDR_SIZE:
            raise self._fail(f"section headers of {shentsize} bytes, {_SHDR_SIZE} expected", "ELF header, e_shentsize")
        self._read_table(shoff, shnum, shstrndx)

    def _read_table(self, shoff: int, shnum: int, shstrndx: int) -> None:
        readable = max(self.file_size - shoff, 0) // _SHDR_SIZE
        if readable == 0:
            raise self._fail(
                f"the section table at {shoff:#x} lies past the file's end ({self.file_size} bytes)", "section table", _TRUNCATED
            )
        first = np.frombuffer(self._pread(shoff, _SHDR_SIZE), dtype=_SHDR)[0]
        # More than 65279 sections do not fit the header: their count stands in the size field of section 0 (ELF gABI).
        claimed = int(first["size"]) if shnum == 0 else shnum
        if shstrndx == _SHN_XINDEX:
            shstrndx = int(first["link"])
        if claimed == 0:
            raise self._fail("an empty section table", "section table")
        count = min(claimed, readable, limits.MAX_SECTIONS)
        if count < claimed:
            why = "the file ends before them" if readable < claimed else f"more than {limits.MAX_SECTIONS} are not read"
            self.note(f"{claimed - count} of {claimed} section headers", why, _TRUNCATED if readable < claimed else "")
            self.partial.add(-1)
        self.count = count
        self._table = shoff
        self._name = np.zeros(count, np.uint32)
        raw_type = np.zeros(count, np.uint32)
        self.link = np.zeros(count, np.uint32)
        self.info = np.zeros(count, np.uint32)
        self.offset = np.zeros(count, np.uint64)
        self.size = np.zeros(count, np.uint64)
        self.entsize = np.zeros(count, np.uint32)
        step = 1 << 15
        for begin in range(0, count, step):
            end = min(begin + step, count)
            raw = self._pread(shoff + begin * _SHDR_SIZE, (end - begin) * _SHDR_SIZE)
            rows = np.frombuffer(raw[: len(raw) // _SHDR_SIZE * _SHDR_SIZE], dtype=_SHDR)
            part = slice(begin, begin + len(rows))
            self._name[part], raw_type[part], self.link[part], self.info[part] = (
                rows["name"],
                rows["type"],
                rows["link"],
                rows["info"],
            )
            self.offset[part], self.size[part] = rows["offset"], rows["size"]
            self.entsize[part] = np.minimum(rows["entsize"], np.uint64(0xFFFFFFFF))
        known = (raw_type > SHT_LOUSER) & (raw_type <= SHT_LOUSER + max(Kind))
        self.kind = np.where(known, raw_type - np.uint32(SHT_LOUSER), 0).astype(np.uint8)
        self.kind[0] = 0
        self._drop_overlapping()
        self.unknown_kinds = int(np.count_nonzero((raw_type > SHT_LOUSER + max(Kind)) & (raw_type < SHT_LOUSER + 0x1000)))
        self._strings = [int(i) for i in np.flatnonzero(raw_type == _SHT_STRTAB)[:16] if i != shstrndx]
        self._section_names = shstrndx if 0 < shstrndx < count else 0
        self._index: dict[Kind, tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]] = {}

    def _drop_overlapping(self) -> None:
        """Two sections that claim the same bytes of the file cannot both be what their headers say: neither is read.

        The very same range under the same type is one content named twice, and stays.
        """
        numbers = np.flatnonzero((self.kind != 0) & (self.size != 0) & (self.offset < self.file_size))
        order = numbers[np.lexsort((self.size[numbers], self.offset[numbers]))]
        begin, end = self.offset[order], self.offset[order] + np.minimum(self.size[order], np.uint64(self.file_size))
        reach = np.maximum.accumulate(end) if len(order) else end
        holder = np.maximum.accumulate(np.where(end == reach, np.arange(len(order)), 0)) if len(order) else np.zeros(0, np.intp)
        inside = np.flatnonzero(begin[1:] < reach[:-1]) + 1
        before = holder[inside - 1]
        twin = (begin[inside] == begin[before]) & (end[inside] == end[before])
        twin &= self.kind[order[inside]] == self.kind[order[before]]
        lost = np.unique(np.concatenate([order[inside[~twin]], order[before[~twin]]]))
        if len(lost):
            self.note(f"{len(lost)} sections", "they claim the same bytes of the file as others do: their headers are damaged")
            self.kind[lost] = 0
            self.partial.add(-1)

    # --- reading -------------------------------------------------------------------------------------------------------------

    def note(self, what: str, why: str, remedy: str = "") -> None:
        """Remember something that could not be read; the list is bounded and its last item says how many more there were."""
        if len(self.unread) < limits.MAX_UNREAD:
            self.unread.append(Unread(what, why, remedy))
        elif len(self.unread) == limits.MAX_UNREAD:
            self.unread.append(Unread("further parts of the dump", "more defects than are listed here"))

    def _pread(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes; less at the file's end, nothing past it."""
        if offset >= 1 << 63 or length <= 0:
            return b""
        pieces = []
        while length > 0:
            try:
                piece = os.pread(self._fd, min(length, 1 << 26), offset)
            except OSError as error:
                raise self._fail(f"reading failed: {error.strerror}", f"offset {offset:#x}") from None
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def bytes_of(self, section: int, limit: int, start: int = 0) -> bytes | None:
        """``limit`` bytes of a section's content from ``start``, fewer where it ends; None if it lies past the file's end."""
        offset, size = int(self.offset[section]), int(self.size[section])
        if offset > self.file_size or size > self.file_size - offset:
            return None
        return self._pread(offset + start, min(limit, max(size - start, 0)))

    def rows_of(self, section: int, row: Row, limit: int) -> npt.NDArray[np.void] | None:
        """The table in a section, at most ``limit`` rows; None (and a note) if it cannot be read. ``dtype.names``: the fields."""
        entsize, size = int(self.entsize[section]), int(self.size[section])
        if size == 0:
            return np.zeros(0, row.dtype(row.size))
        if entsize == 0:
            entsize = size  # seen with driver r580: the metadata section is one row and has no row size
        self.partial.add(section)  # until all of it was read
        if not row.minimum <= entsize <= 1 << 16:
            self.note(self.name_of(section), f"rows of {entsize} bytes, at least {row.minimum} expected")
            return None
        count = size // entsize
        raw = self.bytes_of(section, min(count, limit) * entsize)
        if raw is None:
            self.note(self.name_of(section), f"lies past the file's end ({self.file_size} bytes)", _TRUNCATED)
            return None
        if count > limit:
            self.note(
                f"{count - limit} of {count} rows of {self.name_of(section)}", f"more than the {limit} that a device can have"
            )
        if len(raw) == size:
            self.partial.discard(section)
        return np.frombuffer(raw[: len(raw) // entsize * entsize], dtype=row.dtype(entsize))

    def name_of(self, section: int) -> str:
        """The section's name for messages; its number if the name cannot be read."""
        raw = self.bytes_of(self._section_names, 256, int(self._name[section])) if self._section_names else None
        text = raw.split(b"\0", 1)[0].decode("ascii", "replace") if raw else ""
        text = "".join(letter if letter.isprintable() else "?" for letter in text)
        return f"section {section} ({text})" if text else f"section {section}"

    def addresses(self, sections: list[int]) -> list[int]:
        """The sh_addr of some sections: where memory sections began on the device. Not held for all, they are read again."""
        rows = [self._pread(self._table + number * _SHDR_SIZE, _SHDR_SIZE) for number in sections]
        return [int(np.frombuffer(raw, dtype=_SHDR)[0]["addr"]) if len(raw) == _SHDR_SIZE else 0 for raw in rows]

    def string(self, at: int) -> str:
        """The text at a table's string index, "" if none. The format does not say which string table: .strtab first."""
        for section in [*self._strings, self._section_names]:
            raw = self.bytes_of(section, 256, at) if section else None
            text = raw.split(b"\0", 1)[0].decode("utf-8", "replace") if raw else ""
            if text and text.isprintable():
                return text
        return ""

    # --- the tree ------------------------------------------------------------------------------------------------------------

    def of_kind(self, kind: Kind) -> npt.NDArray[np.intp]:
        """Numbers of all sections of a kind, ascending."""
        return np.flatnonzero(self.kind == np.uint8(kind))

    def _sorted(self, kind: Kind) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        found = self._index.get(kind)
        if found is None:
            numbers = self.of_kind(kind).astype(np.uint32)
            keys = self.link[numbers].astype(np.uint64) << np.uint64(32) | self.info[numbers]
            order = np.argsort(keys, kind="stable")
            found = self._index[kind] = (keys[order], numbers[order])
        return found

    def child(self, kind: Kind, parent: int, row: int) -> int | None:
        """The section of ``kind`` that belongs to a row of the table in section ``parent``; the first one if there are several."""
        keys, numbers = self._sorted(kind)
        key = np.uint64(parent << 32 | row & 0xFFFFFFFF)
        at = int(np.searchsorted(keys, key))
        return int(numbers[at]) if at < len(keys) and keys[at] == key else None

    def children(self, kind: Kind, parent: int) -> Iterator[tuple[int, int]]:
        """(row, section) of every section of ``kind`` under the table in section ``parent``, by row; duplicates of a row once."""
        keys, numbers = self._sorted(kind)
        low = int(np.searchsorted(keys, np.uint64(parent << 32)))
        high = int(np.searchsorted(keys, np.uint64((parent + 1) << 32)))
        last = -1
        for key, number in zip(keys[low:high].tolist(), numbers[low:high].tolist(), strict=True):
            row = key & 0xFFFFFFFF
            if row != last:
                last = row
                yield row, number

    def row_count(self, section: int) -> int:
        """Rows of a table, as its header says."""
        return int(self.size[section]) // max(int(self.entsize[section]), 1)

    def beyond_rows(self, kind: Kind, parent: int) -> bool:
        """Whether a section of ``kind`` belongs to a row that the table in section ``parent`` does not have, or two to one row."""
        keys, _ = self._sorted(kind)
        low, high = np.searchsorted(keys, np.array([parent << 32, (parent + 1) << 32], np.uint64))
        rows = keys[low:high] & np.uint64(0xFFFFFFFF)
        return bool(len(rows) and (int(rows[-1]) >= self.row_count(parent) or np.any(rows[1:] == rows[:-1])))

    def orphans(self, kind: Kind, parent: Kind) -> int:
        """How many sections of ``kind`` hang on something that is not a ``parent`` table."""
        links = self.link[self.of_kind(kind)]
        inside = links < self.count
        return int(np.count_nonzero(~inside) + np.count_nonzero(self.kind[links[inside]] != np.uint8(parent)))


def _is_plain(mode: Any) -> bool:
    import stat

    return stat.S_ISREG(mode)
