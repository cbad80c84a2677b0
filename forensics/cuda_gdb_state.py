"""What was collected from a cuda-gdb transcript, table by table, put together as a ``DeviceState``.

``cuda_gdb_text`` fills the tables line by line. What is not in them is an item of ``unread``, never an empty table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..kernels.sasstext import parse_listing
from . import limits
from .device_state import CtaState, DeviceState, Dim3, GridState, LaneState, Unread, WarpState

__all__ = ["Collected", "KernelRow", "LaneRow", "Place", "WarpRow"]

#: Device, SM, warp.
Place = tuple[int, int, int]


@dataclass
class WarpRow:
    """A warp: masks of its active and divergent lanes; both 0 where only a focus line told of it."""

    active: int
    divergent: int
    pc: int | None
    block: Dim3
    kernel: int


@dataclass
class LaneRow:
    """A lane, and what was read while it was in focus."""

    thread: Dim3
    pc: int | None = None
    registers: dict[str, int] = field(default_factory=dict)


@dataclass
class KernelRow:
    """A kernel; dimensions of 0 where only a focus line told of it."""

    device: int
    grid: int
    name: str
    grid_dim: Dim3
    block_dim: Dim3
    cluster: Dim3 = (1, 1, 1)


@dataclass
class Collected:
    """All tables. ``blocks``: SM of each resident block by kernel, None where no row said. ``counted``: kernels whose blocks were
    listed; ``cut``: those whose list is not whole. ``tables``: (device, SM) whose warps were listed. ``printed``: None for a name
    that had several values. ``params``: words of each kernel's constant bank.
    """

    unread: list[Unread] = field(default_factory=list)
    devices: dict[int, tuple[str, int | None, int | None]] = field(default_factory=dict)
    kernels: dict[int, KernelRow] = field(default_factory=dict)
    frames: dict[int, tuple[str, Dim3, Dim3]] = field(default_factory=dict)
    blocks: dict[int, dict[Dim3, int | None]] = field(default_factory=dict)
    counted: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    tables: set[tuple[int, int]] = field(default_factory=set)
    warps: dict[Place, WarpRow] = field(default_factory=dict)
    lanes: dict[Place, dict[int, LaneRow]] = field(default_factory=dict)
    code: dict[str, list[str]] = field(default_factory=dict)
    code_kernel: dict[str, int] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    printed: dict[str, int | None] = field(default_factory=dict)
    params: dict[int, dict[int, int]] = field(default_factory=dict)

    def state(self, source: str, origin: str) -> DeviceState:
        """The device state; what turns out to be missing is added to ``unread``."""
        grids = tuple(self._grid(number, kernel) for number, kernel in sorted(self.kernels.items()))
        printed = {name: value for name, value in self.printed.items() if value is not None}
        return DeviceState(source, origin, grids, self.devices, self.memory, tuple(self.unread), printed)

    def _grid(self, number: int, kernel: KernelRow) -> GridState:
        frame = self.frames.get(number)
        if frame is not None and not all(kernel.grid_dim):
            kernel = KernelRow(kernel.device, kernel.grid, kernel.name or frame[0], frame[1], frame[2], kernel.cluster)
        function, sass, entry = self._listing(number)
        name = function if function.startswith("_Z") or not kernel.name else kernel.name
        known = self.blocks.get(number)
        complete = number in self.counted and number not in self.cut
        what = f"resident blocks of kernel {number}" + (f" ({name})" if name else "")
        if number in self.cut:
            self.unread.append(Unread(what, "the list in the transcript is not whole", "cuda-gdb: info cuda blocks"))
        elif not complete:
            self.unread.append(Unread(what, "no `info cuda blocks` in the transcript", "cuda-gdb: info cuda blocks"))
        bare = brief = 0
        ctas = []
        for block, sm in sorted((known or {}).items(), key=lambda item: (item[0][2], item[0][1], item[0][0])):
            warps = self._warps_of(number, kernel.device, block, entry)
            bare += not warps
            partial = bool(warps) and (kernel.device, sm) not in self.tables and 32 * len(warps) < _threads(kernel.block_dim)
            brief += partial
            ctas.append(CtaState(block, sm, warps, partial=partial))
        if brief:
            what = f"the other warps of {brief} resident blocks of kernel {number}"
            why = "only the thread that was in focus was read"
            self.unread.append(Unread(what, why, "cuda-gdb: info cuda warps on each SM"))
        if bare:
            self.unread.append(
                Unread(
                    f"warps of {bare} resident blocks of kernel {number}",
                    "not in the transcript",
                    "cuda-gdb: info cuda warps on each SM",
                )
            )
        return GridState(
            kernel.device, kernel.grid, name, kernel.grid_dim, kernel.block_dim, tuple(ctas) if known is not None else None,
            kernel.cluster, self._params(number), None, sass, complete,
        )  # fmt: skip

    def _listing(self, number: int) -> tuple[str, dict[int, str], int | None]:
        """The kernel's code as far as it was printed: function, text by offset (by address if the start is not known), start."""
        for name, lines in self.code.items():
            if self.code_kernel.get(name, number) == number:
                listing = parse_listing("\n".join(lines))
                return listing.function, {line.offset: line.text for line in listing.lines}, listing.entry
        return "", {}, None

    def _params(self, number: int) -> bytes | None:
        """Kernel parameters read from the constant bank: the words from the lowest address on, as far as they are contiguous."""
        words = self.params.get(number)
        if not words:
            return None
        first = min(words)
        values: list[int] = []
        while first + 4 * len(values) in words:
            values.append(words[first + 4 * len(values)])
        return b"".join(value.to_bytes(4, "little") for value in values)

    def _warps_of(self, number: int, device: int, block: Dim3, entry: int | None) -> tuple[WarpState, ...]:
        found = []
        for place, warp in sorted(self.warps.items()):
            if warp.kernel == number and warp.block == block and place[0] == device:
                found.append(self._warp_state(place, warp, entry))
        return tuple(found)

    def _warp_state(self, place: Place, warp: WarpRow, entry: int | None) -> WarpState:
        lanes, uniform = [], None
        for number, lane in sorted(self.lanes.get(place, {}).items()):
            pc = lane.pc if lane.pc is not None else warp.pc
            registers = _bank(lane.registers, "R", 256)
            uniform = _bank(lane.registers, "UR", 64) or uniform
            flags = [bit for bit in range(7) if f"P{bit}" in lane.registers]
            predicates = sum(1 << bit for bit in flags if lane.registers[f"P{bit}"]) if flags else None
            banked = {f"R{index}" for index in range(len(registers or ()))} | {f"UR{index}" for index in range(len(uniform or ()))}
            named = {name: value for name, value in lane.registers.items() if name[0] in "RU" and name not in banked}
            lanes.append(LaneState(number, lane.thread, _offset(pc, entry), registers, predicates, pc, named))
        if warp.active == 0 and lanes:  # only a focus line told of this warp
            mask = sum(1 << lane.lane for lane in lanes)
            pc = lanes[0].virtual_pc
            return WarpState(place[2], mask, mask, _offset(pc, entry), tuple(lanes), uniform, pc)
        valid = warp.active | warp.divergent
        return WarpState(place[2], valid, warp.active, _offset(warp.pc, entry), tuple(lanes), uniform, warp.pc)


def _bank(registers: Mapping[str, int], kind: str, limit: int) -> tuple[int, ...] | None:
    """Registers 0, 1, 2 … as printed; up to the first one that is missing, so that no value is invented."""
    values: list[int] = []
    while len(values) < limit and f"{kind}{len(values)}" in registers:
        values.append(registers[f"{kind}{len(values)}"])
    return tuple(values) or None


def _offset(pc: int | None, entry: int | None) -> int | None:
    if pc is None or entry is None or not entry <= pc < entry + limits.MAX_FUNCTION_BYTES:
        return None
    return pc - entry


def _threads(dim: Dim3) -> int:
    return dim[0] * dim[1] * dim[2]
