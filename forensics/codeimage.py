"""The kernel's machine code inside a core dump: the function at an address, and a small cubin with just that function.

A dump carries one relocated ELF image for each loaded module (megabytes), with addresses of that run in it. ``function_image`` cuts
out one function's section with its symbols, offsets counted from the section's start again: what is left has the same bytes in
every run of the same build, so its disassembly is cached once, and nvdisasm reads it in half the time of the whole module.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CubinError
from . import limits

__all__ = ["EmbeddedImage", "FunctionSymbol", "slim_cubin"]

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_SHDR = struct.Struct("<IIQQQQIIQQ")
_SYM = struct.Struct("<IBBHQQ")
_SHDR_ROWS = np.dtype(
    {
        "names": ["name", "type", "flags", "addr", "offset", "size", "link", "info", "align", "entsize"],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u8", "<u8", "<u4", "<u4", "<u8", "<u8"],
    }
)
_SYM_ROWS = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")])
_SHT_SYMTAB = 2
_STT_FUNC = 2
#: st_other of a kernel entry (STO_CUDA_ENTRY).
_ENTRY = 0x10


@dataclass(frozen=True, slots=True)
class FunctionSymbol:
    """A function of an image. ``start``: byte offset in its section; ``size`` in bytes; ``kernel``: it can be launched."""

    name: str
    section: int
    start: int
    size: int
    kernel: bool


class EmbeddedImage:
    """An ELF image that lies in a larger file. ``read(start, length)`` gives its bytes, fewer at its end.

    Raises CubinError with the place for anything that is not a little-endian ELF64 with a symbol table.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, what: str) -> None:
        self._read = read
        self._what = what
        self._size = size
        head = read(0, _EHDR.size)
        if len(head) < _EHDR.size or head[:6] != b"\x7fELF\x02\x01":
            raise CubinError("not a little-endian ELF64 image", path=what, place="offset 0")
        self._head = head
        _, _, _, _, _, _, shoff, _, _, _, _, shentsize, shnum, shstrndx = _EHDR.unpack(head)
        if shentsize != _SHDR.size or shoff >= size:
            raise CubinError("no readable section table", path=what, place="ELF header")
        if shnum == 0:
            first = read(shoff, _SHDR.size)
            shnum = _SHDR.unpack(first)[5] if len(first) == _SHDR.size else 0
        if shnum > limits.MAX_IMAGE_SECTIONS:
            raise CubinError(f"{shnum} sections", path=what, place="ELF header")
        raw = read(shoff, shnum * _SHDR.size)
        self.sections = np.frombuffer(raw[: len(raw) // _SHDR.size * _SHDR.size], dtype=_SHDR_ROWS)
        self._names_at = shstrndx
        self._load_symbols()

    def _load_symbols(self) -> None:
        tables = np.flatnonzero(self.sections["type"] == _SHT_SYMTAB)
        if not len(tables):
            raise CubinError("no symbol table", path=self._what, place="section table")
        table = self.sections[int(tables[0])]
        count = min(int(table["size"]) // _SYM.size, limits.MAX_IMAGE_SYMBOLS)
        raw = self._part(table, count * _SYM.size)
        symbols = np.frombuffer(raw[: len(raw) // _SYM.size * _SYM.size], dtype=_SYM_ROWS)
        link = int(table["link"])
        if link >= len(self.sections):
            raise CubinError("the symbol table has no string table", path=self._what, place=".symtab")
        self._string_table = link
        self._text_cache: bytes | None = None
        keep = (symbols["info"] & 15 == _STT_FUNC) & (symbols["section"] > 0) & (symbols["section"] < len(self.sections))
        self.functions: npt.NDArray[Any] = symbols[keep]
        self._bases = self.sections["addr"][self.functions["section"]]

    def _part(self, section: Any, limit: int) -> bytes:
        offset, size = int(section["offset"]), int(section["size"])
        if offset > self._size or size > self._size - offset:
            raise CubinError("a section lies past the image's end", path=self._what, place=f"offset {offset:#x}")
        return self._read(offset, min(size, limit))

    @property
    def cost(self) -> int:
        """Bytes of memory that the image's tables take here."""
        return int(self.sections.nbytes + self.functions.nbytes)

    @property
    def _strings(self) -> bytes:
        if self._text_cache is None:
            self._text_cache = self._part(self.sections[self._string_table], limits.MAX_IMAGE_STRINGS)
        return self._text_cache

    def _text(self, at: int) -> str:
        end = self._strings.find(b"\0", at, at + 65536)
        return self._strings[at:end].decode("utf-8", "replace") if end >= 0 else ""

    def _symbol(self, index: int) -> FunctionSymbol:
        row, base = self.functions[index], int(self._bases[index])
        value, length = int(row["value"]), int(self.sections["size"][row["section"]])
        # In a relocated image a symbol's value may be an address or an offset in its section; both were described, either is taken.
        start = value - base if base and base <= value <= base + length else value
        kernel = bool(int(row["other"]) & _ENTRY)
        return FunctionSymbol(self._text(int(row["name"])), int(row["section"]), start, int(row["size"]), kernel)

    def _indices(self, found: npt.NDArray[np.bool_]) -> list[int]:
        return [int(index) for index in np.flatnonzero(found)]

    def _pick(self, found: npt.NDArray[np.bool_]) -> FunctionSymbol | None:
        """The kernel among the functions at one place: subroutines are local symbols of the same section."""
        picked = [self._symbol(index) for index in self._indices(found)[:64]]
        return next((item for item in picked if item.kernel), picked[0] if picked else None)

    def at(self, address: int) -> FunctionSymbol | None:
        """The function whose first instruction lies at a virtual address."""
        values = self.functions["value"]
        return self._pick((values == np.uint64(address)) | (self._bases != 0) & (values + self._bases == np.uint64(address)))

    def containing(self, address: int) -> tuple[FunctionSymbol, int] | None:
        """The kernel whose section holds a virtual address, and the address of its first instruction."""
        starts, sizes = self.sections["addr"], self.sections["size"]
        wanted = np.uint64(address)
        inside = (starts != 0) & (starts <= wanted) & (wanted < starts + sizes)
        found = self._pick(inside[self.functions["section"]])
        return None if found is None else (found, int(starts[found.section]) + found.start)

    def kernels(self, limit: int = 64) -> list[FunctionSymbol]:
        """The functions that can be launched, at most ``limit``."""
        return [self._symbol(index) for index in self._indices(self.functions["other"] & _ENTRY != 0)[:limit]]

    def named(self, name: str) -> FunctionSymbol | None:
        """The function of that mangled name."""
        at = self._strings.find(b"\0" + name.encode() + b"\0")
        return None if at < 0 else self._pick(self.functions["name"] == np.uint32(at + 1))

    def function_image(self, symbol: FunctionSymbol) -> bytes:
        """A cubin with that function's section, the functions in it and the kernel's metadata section, and nothing else.

        Raises CubinError if the code is not in the image.
        """
        section = self.sections[symbol.section]
        if int(section["size"]) > limits.MAX_FUNCTION_BYTES or int(section["type"]) == 8:
            raise CubinError(f"no code of {symbol.name}", path=self._what, place=f"section {symbol.section}")
        code = self._part(section, limits.MAX_FUNCTION_BYTES)
        functions = [
            (item, int(self.functions[index]["info"]) >> 4, int(self.functions[index]["other"]))
            for index in self._indices(self.functions["section"] == symbol.section)[:4096]
            for item in [self._symbol(index)]
        ]
        return slim_cubin(self._head, symbol.name, code, functions, self._metadata(symbol.name), int(section["info"]))

    def _metadata(self, function: str) -> bytes:
        """Content of ``.nv.info.<function>``: parameter layout, registers; empty if absent."""
        if not 0 < self._names_at < len(self.sections):
            return b""
        names = self._part(self.sections[self._names_at], limits.MAX_IMAGE_STRINGS)
        at = names.find(b"\0.nv.info." + function.encode() + b"\0")
        if at < 0:
            return b""
        for index in np.flatnonzero(self.sections["name"] == np.uint32(at + 1)):
            return self._part(self.sections[int(index)], 1 << 20)
        return b""


#: Attribute forms and numbers of ``.nv.info`` (as cuobjdump -elf names them).
_EIFMT_SVAL = 4
_EIATTR_PARAM_CBANK = 0x0A


def _with_symbol(metadata: bytes, own: int) -> bytes:
    """The attributes with the symbol that PARAM_CBANK names (its first word) replaced by one that a slim image has.

    nvdisasm refuses an image whose attributes name a symbol beyond its table. A list that does not parse is left out.
    """
    patched, at = bytearray(metadata), 0
    while at + 4 <= len(patched):
        form, attribute = patched[at], patched[at + 1]
        size = int.from_bytes(patched[at + 2 : at + 4], "little") if form == _EIFMT_SVAL else 0
        if form not in (1, 2, 3, _EIFMT_SVAL) or at + 4 + size > len(patched):
            return b""
        if form == _EIFMT_SVAL and attribute == _EIATTR_PARAM_CBANK and size >= 4:
            patched[at + 4 : at + 8] = own.to_bytes(4, "little")
        at += 4 + size
    return bytes(patched)


def slim_cubin(
    head: bytes,
    function: str,
    code: bytes,
    functions: list[tuple[FunctionSymbol, int, int]],
    metadata: bytes = b"",
    text_info: int = 0,
) -> bytes:
    """Assemble an ELF file from one function's code. ``head``: the 64 header bytes of the cubin it came from (architecture, ABI).

    ``functions``: symbols in the section with their binding and st_other. Deterministic: same input, same bytes.
    """
    text = ".text." + function
    section_names = b"\0.shstrtab\0.strtab\0.symtab\0" + text.encode() + b"\0.nv.info." + function.encode() + b"\0"
    strings, symbols = b"\0", bytes(_SYM.size)
    ordered = sorted(functions, key=lambda item: (item[1] != 0, item[0].start, item[0].name))
    for item, binding, other in ordered:
        symbols += _SYM.pack(len(strings), binding << 4 | _STT_FUNC, other, 4, item.start, item.size)
        strings += item.name.encode() + b"\0"
    locals_ = 1 + sum(1 for item in ordered if item[1] == 0)
    own = next((1 + index for index, (item, _, _) in enumerate(ordered) if item.name == function), 0)
    text_info = text_info & 0xFF000000 | own  # older cubins keep the register count in the upper byte
    metadata = _with_symbol(metadata, own)
    parts = [(section_names, 1), (strings, 1), (symbols, 8), (code, 128), (metadata, 4)]
    body, places = bytearray(_EHDR.size), []
    for content, align in parts:
        body += bytes(-len(body) % align)
        places.append(len(body))
        body += content
    body += bytes(-len(body) % 64)

    def header(
        name: str, kind: int, place: int, link: int = 0, info: int = 0, align: int = 1, entsize: int = 0, flags: int = 0
    ) -> bytes:
        at = section_names.index(b"\0" + name.encode() + b"\0") + 1
        return _SHDR.pack(at, kind, flags, 0, places[place], len(parts[place][0]), link, info, align, entsize)

    headers = [
        bytes(_SHDR.size),
        header(".shstrtab", 3, 0),
        header(".strtab", 3, 1),
        header(".symtab", _SHT_SYMTAB, 2, link=2, info=locals_, align=8, entsize=_SYM.size),
        header(text, 1, 3, link=3, info=text_info, align=128, flags=6),
    ]
    if metadata:
        headers.append(header(".nv.info." + function, 0x70000000, 4, link=3, info=4, align=4))
    ident, kind, machine, version, *_ = _EHDR.unpack(head[: _EHDR.size])
    flags = _EHDR.unpack(head[: _EHDR.size])[7]
    body[: _EHDR.size] = _EHDR.pack(ident, kind, machine, version, 0, 0, len(body), flags, 64, 0, 0, 64, len(headers), 1)
    return bytes(body) + b"".join(headers)
