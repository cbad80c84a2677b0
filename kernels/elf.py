"""Section headers and function symbols of a little-endian ELF64 image: a cubin, or the shared object that carries cubins.

Written for hostile input, with bounds that a general reader does not have: how many sections, how long a name, how many bytes of
names in all. Everything is checked against the image's length before it is used.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import CubinError

__all__ = ["EM_CUDA", "SHT_NOBITS", "Buffer", "ElfImage", "Section", "Symbol", "is_elf", "read_elf"]

Buffer = bytes | bytearray | memoryview | mmap.mmap

EM_CUDA = 190
SHT_SYMTAB = 2
SHT_NOBITS = 8
STT_FUNC = 2

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_SHDR = struct.Struct("<IIQQQQIIQQ")
_SYM = struct.Struct("<IBBHQQ")

#: Bounds: shipped cubins have about a hundred sections and names of some hundred bytes; the largest seen are some thousands.
MAX_SECTIONS = 65_536
MAX_SYMBOLS = 1 << 20
MAX_NAME = 1 << 16
MAX_NAME_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Section:
    """A section header. ``offset`` and ``size`` in bytes; a NOBITS section has a size and no bytes in the file."""

    index: int
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    entsize: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A function symbol: its index in the symbol table, its section, its offset there and its size in bytes."""

    index: int
    name: str
    section: int
    value: int
    size: int
    bind: int
    other: int


@dataclass(frozen=True)
class ElfImage:
    """A parsed image; ``data`` is the whole file."""

    data: Buffer
    path: str
    machine: int
    type: int
    flags: int
    abi_version: int
    sections: tuple[Section, ...]

    def section(self, name: str) -> Section | None:
        """The first section of that name."""
        return next((section for section in self.sections if section.name == name), None)

    def content(self, section: Section) -> bytes:
        """The section's bytes; empty for NOBITS."""
        if section.type == SHT_NOBITS:
            return b""
        return bytes(self.data[section.offset : section.offset + section.size])


def is_elf(data: Buffer) -> bool:
    """Whether it starts as an ELF file does."""
    return bytes(data[:4]) == b"\x7fELF"


class _Names:
    """Names out of string tables, all of them together within a budget."""

    def __init__(self, data: Buffer, path: str) -> None:
        self._data = data
        self._path = path
        self._left = MAX_NAME_BYTES

    def get(self, table: Section, offset: int, place: str) -> str:
        if offset >= table.size:
            raise CubinError(f"name at {offset} of a string table of {table.size} bytes", path=self._path, place=place)
        start = table.offset + offset
        end = self._data.find(b"\0", start, min(start + MAX_NAME, table.offset + table.size))  # type: ignore[union-attr]
        if end < 0:
            raise CubinError(f"a name without end, or longer than {MAX_NAME} bytes", path=self._path, place=place)
        self._left -= end - start
        if self._left < 0:
            raise CubinError(f"more than {MAX_NAME_BYTES >> 20} MiB of names", path=self._path, place=place)
        return bytes(self._data[start:end]).decode("utf-8", "replace")


def read_elf(data: Buffer, path: str = "") -> ElfImage:
    """The section table of a little-endian ELF64 image. CubinError names the place of what is wrong."""
    if isinstance(data, memoryview):
        data = bytes(data)
    length = len(data)
    place = "ELF header"
    if length < _EHDR.size:
        raise CubinError(f"{length} bytes are no ELF file", path=path, place=place)
    ident, kind, machine, _, _, _, shoff, flags, _, _, _, shentsize, shnum, shstrndx = _EHDR.unpack_from(data, 0)
    if ident[:4] != b"\x7fELF":
        raise CubinError("not an ELF file", path=path, place=place)
    if ident[4:6] != b"\x02\x01":
        raise CubinError("not a little-endian 64-bit ELF file", path=path, place=place)
    place = "section table"
    if shoff == 0 or shnum == 0:
        raise CubinError("no section table", path=path, place=place)
    if shentsize != _SHDR.size or shnum > MAX_SECTIONS or shoff + shnum * _SHDR.size > length:
        raise CubinError(f"{shnum} sections of {shentsize} bytes at {shoff} do not fit {length} bytes", path=path, place=place)
    raw = [_SHDR.unpack_from(data, shoff + index * _SHDR.size) for index in range(shnum)]
    if shstrndx >= shnum:
        raise CubinError(f"section names in section {shstrndx} of {shnum}", path=path, place=place)
    bare: list[Section] = []
    for index, (_, stype, sflags, _, offset, size, link, info, _, entsize) in enumerate(raw):
        if stype not in (0, SHT_NOBITS) and offset + size > length:
            raise CubinError(f"{size} bytes at {offset} of a file of {length}", path=path, place=f"section {index}")
        bare.append(Section(index, "", stype, sflags, offset, size, link, info, entsize))
    table = bare[shstrndx]
    if table.type in (0, SHT_NOBITS):
        raise CubinError("the section names have no bytes", path=path, place=f"section {shstrndx}")
    names = _Names(data, path)
    sections = tuple(
        Section(
            section.index,
            names.get(table, raw[section.index][0], f"section {section.index}") if section.type else "",
            section.type,
            section.flags,
            section.offset,
            section.size,
            section.link,
            section.info,
            section.entsize,
        )
        for section in bare
    )
    return ElfImage(data, path, machine, kind, flags, ident[8], sections)


def function_symbols(image: ElfImage) -> Iterator[Symbol]:
    """The STT_FUNC symbols of every symbol table, in order. CubinError if a table cannot be right."""
    names = _Names(image.data, image.path)
    for section in image.sections:
        if section.type != SHT_SYMTAB:
            continue
        place = section.name
        if section.entsize != _SYM.size or section.size // _SYM.size > MAX_SYMBOLS or section.link >= len(image.sections):
            raise CubinError("symbol table with impossible sizes", path=image.path, place=place)
        strings = image.sections[section.link]
        if strings.type in (0, SHT_NOBITS):
            raise CubinError("the symbol names have no bytes", path=image.path, place=place)
        content = image.content(section)
        for index, (name, info, other, shndx, value, size) in enumerate(
            _SYM.iter_unpack(content[: len(content) - len(content) % _SYM.size])
        ):
            if info & 15 == STT_FUNC:
                yield Symbol(index, names.get(strings, name, f"{place} symbol {index}"), shndx, value, size, info >> 4, other)
