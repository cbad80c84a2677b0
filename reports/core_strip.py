"""A GPU core dump without what nobody needs to judge it: its tables as they were, the code of the stuck kernels, a few named words.

A dump holds memory of the device (which may hold somebody's prompts) and the machine code of every loaded module (megabytes, and
somebody's product). The verdict needs neither: it reads the tables of grids, blocks, warps, lanes and registers, the stuck kernel's
own instructions, and single words of memory. ``strip_core`` copies the tables byte for byte, cuts the code down to the kernels that
are on the device, keeps the words that it is given, and writes a dump that every reader of dumps reads. Section numbers stay, so
all links between tables hold; a section that is left out becomes an unused one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ..errors import CoreFileError, CubinError
from ..forensics.codeimage import EmbeddedImage, FunctionSymbol
from ..forensics.coresections import CoreSections
from ..forensics.coretables import SHT_LOUSER, Kind
from ..forensics.device_state import DeviceState

__all__ = ["StrippedCore", "kernel_code", "strip_core"]

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_SHDR_SIZE = 64
_SHDR = np.dtype(
    [
        ("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("addr", "<u8"), ("offset", "<u8"), ("size", "<u8"), ("link", "<u4"),
        ("info", "<u4"), ("align", "<u8"), ("entsize", "<u8"),
    ]
)  # fmt: skip
#: Left out: contents of memory, and code (put back for the stuck kernels).
_DROPPED = frozenset(
    {Kind.MANAGED_MEMORY, Kind.GLOBAL_MEMORY, Kind.LOCAL_MEMORY, Kind.SHARED_MEMORY, Kind.IMAGE, Kind.RELOCATED_IMAGE}
)
_SHT_NULL, _SHT_STRTAB = 0, 3
_PIECE = 1 << 20
#: An offset that lies in no file.
_NOWHERE = 1 << 62
#: Kernels whose code is kept.
_MOST_KERNELS = 4


@dataclass(frozen=True, slots=True)
class StrippedCore:
    """``kept``/``dropped``: sections; ``dropped_bytes``: of contents left out; ``kernels``: functions whose code was kept."""

    kept: int
    dropped: int
    dropped_bytes: int
    kernels: tuple[str, ...]
    words: int


def kernel_code(state: DeviceState, most: int = _MOST_KERNELS) -> list[tuple[str, bytes, int | None]]:
    """(function, slim cubin, entry address) of the kernels with blocks on the device, each once."""
    found: dict[tuple[str, int | None], bytes] = {}
    for grid in state.grids:
        if grid.ctas and grid.code is not None:
            found.setdefault((grid.code.function, grid.code.entry), grid.code.cubin)
    return [(function, cubin, entry) for (function, entry), cubin in list(found.items())[:most]]


def _placed(cubin: bytes, function: str, entry: int | None) -> bytes:
    """The cubin with its code section at the address at which it was loaded, as a dump holds it."""
    image = EmbeddedImage(lambda start, length: cubin[start : start + length], len(cubin), "the stuck kernel's code")
    symbol = image.named(function)
    if symbol is None or entry is None:
        return cubin
    table = _EHDR.unpack(cubin[: _EHDR.size])[6]
    changed = bytearray(cubin)
    struct.pack_into("<Q", changed, table + _SHDR_SIZE * symbol.section + 16, (entry - symbol.start) & 0xFFFFFFFFFFFFFFFF)
    return bytes(changed)


def _image(sections: CoreSections, number: int) -> EmbeddedImage | None:
    try:
        return EmbeddedImage(
            lambda start, length: sections.bytes_of(number, length, start) or b"",
            int(sections.size[number]),
            sections.name_of(number),
        )
    except CubinError:
        return None


def _holders(sections: CoreSections, wanted: Sequence[tuple[str, bytes, int | None]]) -> dict[int, bytes]:
    """Image section -> the slim code that takes its place: the section in which the function lies at its entry address."""
    found: dict[int, bytes] = {}
    left = list(wanted)
    for kind in (Kind.RELOCATED_IMAGE, Kind.IMAGE):
        for number in map(int, sections.of_kind(kind)):
            if not left:
                return found
            image = _image(sections, number)
            if image is None:
                continue
            for item in left:
                function, cubin, entry = item
                symbol = (image.at(entry) or _inside(image, entry)) if entry is not None else image.named(function)
                if symbol is not None and symbol.name == function:
                    found[number] = _placed(cubin, function, entry)
                    left.remove(item)
                    break
    return found


def _inside(image: EmbeddedImage, entry: int) -> FunctionSymbol | None:
    containing = image.containing(entry)
    return containing[0] if containing else None


def _runs(words: Mapping[int, int]) -> list[tuple[int, bytes]]:
    """Words by address as runs of neighbours."""
    runs: list[tuple[int, bytearray]] = []
    for address, word in sorted(words.items()):
        raw = (word & 0xFFFFFFFF).to_bytes(4, "little")
        if runs and address == runs[-1][0] + len(runs[-1][1]):
            runs[-1][1].extend(raw)
        else:
            runs.append((address, bytearray(raw)))
    return [(start, bytes(content)) for start, content in runs]


def _headers(path: Path, table: int, count: int) -> npt.NDArray[np.void]:
    with path.open("rb") as stream:
        stream.seek(table)
        raw = stream.read(count * _SHDR_SIZE)
    return np.frombuffer(raw[: len(raw) // _SHDR_SIZE * _SHDR_SIZE], dtype=_SHDR).copy()


def strip_core(
    path: Path, out: BinaryIO, *, code: Sequence[tuple[str, bytes, int | None]] = (), words: Mapping[int, int] | None = None
) -> StrippedCore:
    """Write the stripped dump. ``code``: as ``kernel_code`` gives it; ``words``: u32 by device address to keep.

    Raises CoreFileError if ``path`` is no GPU core dump.
    """
    with path.open("rb") as stream:
        head = stream.read(_EHDR.size)
    with CoreSections(path) as sections:
        table = _EHDR.unpack(head)[6]
        rows = _headers(path, table, sections.count)
        if len(rows) != sections.count:
            raise CoreFileError("the section table ends early", path=str(path))
        holders = _holders(sections, code)
        names_at = _EHDR.unpack(head)[13]
        if names_at == 0xFFFF:
            names_at = int(rows["link"][0])
        dropped = dropped_bytes = 0
        out.write(bytes(_EHDR.size))
        at = _EHDR.size
        for number in range(1, sections.count):
            kind = int(sections.kind[number])
            content: bytes | None = holders.get(number)
            if content is None and kind in _DROPPED:
                dropped += 1
                dropped_bytes += int(sections.size[number])
                rows[number] = np.zeros((), _SHDR)
                continue
            plain = kind != 0 or int(rows["type"][number]) in (_SHT_STRTAB, _SHT_NULL)
            if not plain:
                dropped += 1
                dropped_bytes += int(sections.size[number])
                rows[number] = np.zeros((), _SHDR)
                continue
            at += -at % 8
            out.seek(at)
            rows["offset"][number] = at
            if content is None and sections.bytes_of(number, 1) is None:
                rows["offset"][number] = _NOWHERE  # it lay past the end of a torn file, and that stays to be seen
            elif content is not None:
                out.write(content)
                rows["size"][number] = len(content)
                at += len(content)
            else:
                at += _copy(sections, number, out, rows)
        extra, at = _memory(out, at, words or {})
        rows = np.concatenate([rows, extra])
        _finish(out, at, head, rows, names_at, torn=-1 in sections.partial)
        kernels = tuple(function for function, _, _ in code[: len(holders)])
        return StrippedCore(sections.count - dropped, dropped, dropped_bytes, kernels, len(words or {}))


def _copy(sections: CoreSections, number: int, out: BinaryIO, rows: npt.NDArray[np.void]) -> int:
    """Copy one section's content; its length as written (less where the file ends before it)."""
    done, size = 0, int(sections.size[number])
    while done < size:
        piece = sections.bytes_of(number, _PIECE, done)
        if not piece:
            break
        out.write(piece)
        done += len(piece)
    rows["size"][number] = done
    return done


def _memory(out: BinaryIO, at: int, words: Mapping[int, int]) -> tuple[npt.NDArray[np.void], int]:
    runs = _runs(words)
    extra = np.zeros(len(runs), _SHDR)
    for index, (address, content) in enumerate(runs):
        at += -at % 8
        out.seek(at)
        out.write(content)
        extra[index] = (0, SHT_LOUSER + Kind.GLOBAL_MEMORY, 0, address, at, len(content), 0, 0, 4, 0)
        at += len(content)
    return extra, at


def _finish(out: BinaryIO, at: int, head: bytes, rows: npt.NDArray[np.void], names_at: int, *, torn: bool) -> None:
    """The section table at the end, the counts where ELF wants them, and the file header.

    ``torn``: sections of the whole dump were lost. Then one more is counted than is there: a reader must not take the list of
    resident blocks for complete.
    """
    at += -at % 64
    count = len(rows)
    count += torn
    large = count >= 0xFF00
    rows["size"][0] = count if large else 0
    rows["link"][0] = names_at if large else 0
    out.seek(at)
    out.write(rows.tobytes())
    fields = list(_EHDR.unpack(head))
    fields[4:9] = [0, 0, at, fields[7], _EHDR.size]  # entry, program headers: a dump needs none; section table, flags, header size
    fields[9:14] = [0, 0, _SHDR_SIZE, 0 if large else count, 0xFFFF if large else names_at]
    out.seek(0)
    out.write(_EHDR.pack(*fields))
