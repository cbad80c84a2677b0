"""Write a ``DeviceState`` as a GPU core dump in the driver's own format: test dumps, and the CPU ground's interpreted hang.

The layout is that of ``coretables``; cuda-gdb's documented names, links and rows are kept, so what the reader says of such a file
it says of a real one. A state that was interpreted carries the generator name ``corefile.INTERPRETER`` and reads back as
``interpreted``; it can never be taken for a measurement.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import CubinError, OurFaultError
from ..kernels.abi import param_base
from .codeimage import EmbeddedImage
from .corefile import INTERPRETER
from .coretables import (
    ABI_VERSION,
    CONTEXT,
    CTA,
    DEVICE,
    EM_CUDA,
    ET_CORE,
    GRID,
    LANE,
    META,
    MODULE,
    OSABI_CUDA,
    PREFIX,
    SHT_LOUSER,
    SM,
    WARP,
    Kind,
    Row,
)
from .device_state import CodeImage, CtaState, DeviceState, GridState, LaneState, WarpState

__all__ = ["CoreOptions", "write_core"]

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_SHDR = struct.Struct("<IIQQQQIIQQ")
_GRID_ACTIVE = 2
_SHF_ALLOC = 2
_ENTRY_BASE = 0x7F00_0000_0000


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """How a dump is written. ``omit``: section kinds to leave out (light dumps, older drivers). ``row_bytes``: row sizes by kind.

    ``memory``: further device memory, address to bytes, or to a length in bytes for a hole that reads as zeros.
    ``modules``: cubins of further loaded modules.
    ``generator``, ``driver``, ``cuda``, ``flags``, ``timestamp``: the metadata row; the generator follows the state's origin.
    """

    omit: Collection[Kind] = ()
    row_bytes: Mapping[Kind, int] | None = None
    memory: Mapping[int, bytes | int] | None = None
    modules: Sequence[bytes] = ()
    generator: str | None = None
    driver: tuple[int, int] = (0, 0)
    cuda: tuple[int, int] = (0, 0)
    flags: int = 47
    timestamp: int = 0


def write_core(path: str | Path, state: DeviceState, options: CoreOptions | None = None) -> Path:
    """Write the dump beside its place and rename it there, so that a killed writer leaves no half file under that name."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with partial.open("wb") as stream:
            _Writer(stream, state, options or CoreOptions()).write()
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


class _Writer:
    def __init__(self, stream: BinaryIO, state: DeviceState, options: CoreOptions) -> None:
        self.stream = stream
        self.state = state
        self.options = options
        self.headers: list[bytes] = [bytes(_SHDR.size)]
        self.names = bytearray(b"\0")
        self.name_at: dict[str, int] = {"": 0}
        self.strings = bytearray(b"\0")
        self.at = _EHDR.size

    # --- sections ------------------------------------------------------------------------------------------------------------

    def _section(
        self,
        name: str,
        kind: int,
        content: bytes | int,
        *,
        address: int = 0,
        link: int = 0,
        info: int = 0,
        entsize: int = 0,
        align: int = 8,
    ) -> int:
        """Write one section's content (an int: that many zero bytes as a hole) and remember its header; its number."""
        if name not in self.name_at:
            self.name_at[name] = len(self.names)
            self.names += name.encode() + b"\0"
        self.at = -(-self.at // align) * align
        size = content if isinstance(content, int) else len(content)
        self.stream.seek(self.at)
        if not isinstance(content, int):
            self.stream.write(content)
        self.headers.append(_SHDR.pack(self.name_at[name], kind, _SHF_ALLOC, address, self.at, size, link, info, align, entsize))
        self.at += size
        return len(self.headers) - 1

    def _part(
        self, kind: Kind, suffix: str, content: bytes | int, *, link: int = 0, info: int = 0, entsize: int = 0, address: int = 0
    ) -> int:
        if kind in self.options.omit:
            return 0
        return self._section(
            PREFIX[kind] + suffix, SHT_LOUSER + kind, content, address=address, link=link, info=info, entsize=entsize
        )

    def _table(self, row: Row, suffix: str, rows: list[bytes], *, link: int = 0, info: int = 0) -> int:
        size = (self.options.row_bytes or {}).get(row.kind, row.size)
        return self._part(
            row.kind, suffix, b"".join(raw[:size].ljust(size, b"\0") for raw in rows), link=link, info=info, entsize=size
        )

    def _string(self, text: str) -> int:
        if not text:
            return 0
        at = len(self.strings)
        self.strings += text.encode() + b"\0"
        return at

    # --- the tree ------------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        o = self.options
        self.stream.write(bytes(_EHDR.size))
        generator = o.generator
        if generator is None:
            generator = INTERPRETER if self.state.origin == "interpreted" else "dsv4-repro writer"
        meta = META.pack(
            generator_at=self._string(generator), driver_major=o.driver[0], driver_minor=o.driver[1], cuda_major=o.cuda[0],
            cuda_minor=o.cuda[1], flags=o.flags, timestamp=o.timestamp,
        )  # fmt: skip
        self._part(Kind.METADATA, "", meta)  # without a row size, as driver 580 writes it
        for index, (address, content) in enumerate(sorted(self._memory().items())):
            self._part(Kind.GLOBAL_MEMORY, f".{index}", content, address=address)
        ordinals = sorted({*self.state.devices, *(grid.device for grid in self.state.grids)})
        described = [self._device_row(ordinal) for ordinal in ordinals]
        devices = self._table(DEVICE, "", described)
        for index, ordinal in enumerate(ordinals):
            self._device(devices, index, ordinal)
        self._finish()

    def _memory(self) -> dict[int, bytes | int]:
        """The state's words joined into runs, and what the options add."""
        runs: dict[int, bytes | int] = {}
        start, content = 0, bytearray()
        for address, word in sorted(self.state.memory.items()):
            if not content or address != start + len(content):
                if content:
                    runs[start] = bytes(content)
                start, content = address, bytearray()
            content += (word & 0xFFFFFFFF).to_bytes(4, "little")
        if content:
            runs[start] = bytes(content)
        return {**runs, **(self.options.memory or {})}

    def _device_row(self, ordinal: int) -> bytes:
        name, sm, sms = self.state.devices.get(ordinal, ("", None, None))
        major, minor = divmod(sm, 10) if sm else (0, 0)
        return DEVICE.pack(
            name_at=self._string(name), sm_type_at=self._string(f"sm_{sm}" if sm else ""), device=ordinal, sms=sms or 0,
            warps_per_sm=64, lanes_per_warp=32, registers=255, predicates=8, sm_major=major, sm_minor=minor, instruction_bytes=16,
            uniform_registers=64, uniform_predicates=8,
        )  # fmt: skip

    def _device(self, devices: int, index: int, ordinal: int) -> None:
        tag = f".dev{index}"
        grids = [grid for grid in self.state.grids if grid.device == ordinal]
        context = 0x1000 + ordinal
        contexts = self._table(CONTEXT, tag, [CONTEXT.pack(context=context, device=ordinal)], link=devices, info=index)
        codes: dict[tuple[str, bytes], tuple[int, CodeImage]] = {}
        for grid in grids:
            if grid.code is not None and (grid.code.function, grid.code.cubin) not in codes:
                number = len(codes)
                entry = grid.code.entry or _ENTRY_BASE + (ordinal << 36) + (number << 28)
                codes[grid.code.function, grid.code.cubin] = (
                    number,
                    CodeImage(grid.code.cubin, grid.code.function, entry, grid.code.sm),
                )
        images = [_relocated(code) for _, code in codes.values()] + [bytes(cubin) for cubin in self.options.modules]
        handles = [MODULE.pack(module=0x2000 + number) for number in range(len(images))]
        modules = self._table(MODULE, f"{tag}.ctx0", handles, link=contexts, info=0)
        for number, image in enumerate(images):
            self._part(Kind.RELOCATED_IMAGE, f"{tag}.ctx0", image, link=modules, info=number)
        entries: dict[int, int] = {}
        rows = []
        for grid in grids:
            found = codes.get((grid.code.function, grid.code.cubin)) if grid.code is not None else None
            entry = (found[1].entry or 0) if found else 0
            entries[grid.grid_id] = entry
            rows.append(self._grid_row(grid, context, 0x2000 + found[0] if found else 0, entry))
        table = self._table(GRID, tag, rows, link=devices, info=index)
        for row, grid in enumerate(grids):
            if grid.params is not None:
                self._part(Kind.PARAMETERS, f"{tag}.grid{row}", grid.params, link=table, info=row)
        self._sms(devices, index, ordinal, grids, entries)

    def _grid_row(self, grid: GridState, context: int, module: int, entry: int) -> bytes:
        sm = self.state.devices.get(grid.device, ("", None, None))[1] or 0
        registers = grid.registers or max(
            (len(lane.registers or ()) for cta in grid.ctas or () for warp in cta.warps for lane in warp.lanes), default=0
        )
        return GRID.pack(
            grid=grid.grid_id, context=context, function=module and 0x3000 + module, entry=entry, module=module,
            params_offset=param_base(sm) or 0, status=_GRID_ACTIVE, registers=registers,
            grid_x=grid.grid_dim[0], grid_y=grid.grid_dim[1], grid_z=grid.grid_dim[2],
            block_x=grid.block_dim[0], block_y=grid.block_dim[1], block_z=grid.block_dim[2],
            cluster_x=grid.cluster_dim[0], cluster_y=grid.cluster_dim[1], cluster_z=grid.cluster_dim[2],
        )  # fmt: skip

    def _sms(self, devices: int, index: int, ordinal: int, grids: list[GridState], entries: Mapping[int, int]) -> None:
        placed: dict[int, list[tuple[GridState, CtaState]]] = {}
        for grid in grids:
            for cta in grid.ctas or ():
                placed.setdefault(cta.sm or 0, []).append((grid, cta))
        count = max([self.state.devices.get(ordinal, ("", None, None))[2] or 1, *(sm + 1 for sm in placed)])
        tag = f".dev{index}"
        table = self._table(SM, tag, [SM.pack(sm=sm) for sm in range(count)], link=devices, info=index)
        for sm in range(count):
            own = placed.get(sm, [])
            rows = [self._cta_row(grid, cta) for grid, cta in own]
            ctas = self._table(CTA, f"{tag}.sm{sm}", rows, link=table, info=sm)
            for row, (grid, cta) in enumerate(own):
                self._warps(f"{tag}.sm{sm}.cta{row}", ctas, row, cta, entries.get(grid.grid_id, 0), grid.shared_bytes or 0)

    def _cta_row(self, grid: GridState, cta: CtaState) -> bytes:
        cluster = cta.cluster_idx or (0, 0, 0)
        return CTA.pack(
            grid=grid.grid_id, x=cta.block_idx[0], y=cta.block_idx[1], z=cta.block_idx[2],
            cluster_x=cluster[0], cluster_y=cluster[1], cluster_z=cluster[2],
            cluster_dim_x=grid.cluster_dim[0], cluster_dim_y=grid.cluster_dim[1], cluster_dim_z=grid.cluster_dim[2],
        )  # fmt: skip

    def _warps(self, tag: str, ctas: int, row: int, cta: CtaState, entry: int, shared: int) -> None:
        rows = [
            WARP.pack(
                warp=warp.warp, valid=warp.valid_mask, active=warp.active_mask, cbu_active=warp.active_mask, shared_bytes=shared,
                registers=max((len(lane.registers or ()) for lane in warp.lanes), default=0),
            )
            for warp in cta.warps
        ]  # fmt: skip
        table = self._table(WARP, tag, rows, link=ctas, info=row)
        for index, warp in enumerate(cta.warps):
            self._warp(f"{tag}.wp{index}", table, index, warp, entry)

    def _warp(self, tag: str, warps: int, index: int, warp: WarpState, entry: int) -> None:
        if warp.uniform_registers is not None:
            self._part(Kind.UNIFORM_REGISTERS, tag, _words(warp.uniform_registers), link=warps, info=index, entsize=4)
        lanes = self._table(LANE, tag, [_lane_row(lane, entry) for lane in warp.lanes], link=warps, info=index)
        for row, lane in enumerate(warp.lanes):
            if lane.registers is not None:
                self._part(Kind.REGISTERS, f"{tag}.ln{row}", _words(lane.registers), link=lanes, info=row, entsize=4)
            if lane.predicates is not None:
                flags = _words((*(lane.predicates >> bit & 1 for bit in range(7)), 1))
                self._part(Kind.PREDICATES, f"{tag}.ln{row}", flags, link=lanes, info=row, entsize=4)

    def _finish(self) -> None:
        self._section(".strtab", 3, bytes(self.strings), align=1)
        names_section = len(self.headers)
        for name in (".shstrtab",):
            self.name_at[name] = len(self.names)
            self.names += name.encode() + b"\0"
        self._section(".shstrtab", 3, bytes(self.names), align=1)
        count = len(self.headers)
        large = count >= 0xFF00
        if large:  # ELF gABI: too many sections for the header's 16 bits, the counts move into section 0
            self.headers[0] = _SHDR.pack(0, 0, 0, 0, 0, count, names_section, 0, 0, 0)
        self.at = -(-self.at // 64) * 64
        self.stream.seek(self.at)
        for begin in range(0, count, 1 << 14):
            self.stream.write(b"".join(self.headers[begin : begin + (1 << 14)]))
        self.stream.seek(0)
        ident = b"\x7fELF\x02\x01\x01" + bytes((OSABI_CUDA, ABI_VERSION)) + bytes(7)
        shnum, shstrndx = (0, 0xFFFF) if large else (count, names_section)
        self.stream.write(_EHDR.pack(ident, ET_CORE, EM_CUDA, 1, 0, 0, self.at, 0, 64, 0, 0, 64, shnum, shstrndx))


def _words(values: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(values)}I", *(value & 0xFFFFFFFF for value in values))


def _lane_row(lane: LaneState, entry: int) -> bytes:
    virtual = lane.virtual_pc if lane.virtual_pc is not None else entry + (lane.pc_offset or 0)
    x, y, z = lane.thread_idx
    return LANE.pack(virtual_pc=virtual, function_pc=lane.pc_offset or 0, lane=lane.lane, x=x, y=y, z=z)


def _relocated(code: CodeImage) -> bytes:
    """The cubin as the driver leaves it in a dump: the function's section carries the address at which it was loaded."""
    cubin = code.cubin
    try:
        image = EmbeddedImage(lambda start, length: cubin[start : start + length], len(cubin), "cubin")
    except CubinError as error:
        raise OurFaultError(f"the state's code image is no cubin: {error}") from None
    symbol = image.named(code.function)
    if symbol is None:
        return cubin
    shoff = _EHDR.unpack(cubin[: _EHDR.size])[6]
    changed = bytearray(cubin)
    struct.pack_into("<Q", changed, shoff + _SHDR.size * symbol.section + 16, (code.entry or 0) - symbol.start)
    return bytes(changed)
