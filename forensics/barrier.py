"""Where each resident block stands: which of its warps poll a word of memory, which wait inside the block, which are at work.

``view_grid`` joins a grid's state with its code. Each polling lane gives an equation ``value comparison target`` with the words it
comes from; a wait whose equation already holds is no wait: its block is about to go on. Pure; memory is read through a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..kernels.abi import param_base
from ..kernels.sasstext import INSTRUCTION_BYTES, SassLine, parse_listing
from .device_state import CtaState, DeviceState, Dim3, GridState, LaneState, WarpState
from .operands import Immediate, operand
from .values import compare
from .waitloop import CodeView, Constants, Resolved, Site, WaitLoop, no_constants

__all__ = [
    "CtaView",
    "GridView",
    "PolledWait",
    "Position",
    "WarpPoint",
    "code_of_text",
    "constants_of",
    "linear_block",
    "view_grid",
]

Word = Callable[[int], int | None]
PositionKind = Literal["wait", "cta-barrier", "named-barrier", "warp-sync", "phase", "cluster-barrier", "running", "unknown"]
CtaKind = Literal["spinning", "leaving", "blocked", "running", "unknown"]


@dataclass(frozen=True, slots=True)
class Position:
    """What a warp's PC means. ``detail``: the barrier's number, or the instruction."""

    kind: PositionKind
    detail: str = ""
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class WarpPoint:
    """Lanes of one warp that stand at one PC. ``lanes``: their mask; ``active``: whether the warp executes them now."""

    warp: int
    pc: int | None
    lanes: int
    active: bool
    position: Position


@dataclass(frozen=True, slots=True)
class PolledWait:
    """One distinct wait of a warp. ``seen``: from registers; ``live``: the polled word in memory at the same moment, if read.

    ``name``: of the polled field, where a debugger printed it by name.
    """

    block: Dim3
    warp: int
    pc: int
    pc_offset: int | None
    lanes: int
    loop: WaitLoop
    seen: Resolved
    live: int | None = None
    name: str = ""

    @property
    def value(self) -> int | None:
        """The counter's value: as polled, else as memory held it."""
        return self.seen.value if self.seen.value is not None else self.live

    @property
    def current(self) -> int | None:
        """The latest value known: memory is newer than the register it was polled into."""
        return self.live if self.live is not None else self.seen.value

    @property
    def satisfied(self) -> bool | None:
        """Whether the wait is over already; None if value or target are not known."""
        if self.live is not None and self.seen.target is not None and self.loop.expression == "value":
            bits = self.loop.bits if self.loop.signed else 0
            return compare(self.loop.comparison, self.live, self.seen.target, bits)
        return self.seen.satisfied


@dataclass(frozen=True, slots=True)
class CtaView:
    """One resident block. ``kind``: spinning (a wait that is not satisfied), leaving (only satisfied ones), blocked (every warp
    waits inside the block), running, unknown (PCs or code not read). ``linear``: block number in launch order, x fastest.
    """

    block: Dim3
    linear: int
    sm: int | None
    kind: CtaKind
    waits: tuple[PolledWait, ...] = ()
    points: tuple[WarpPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class GridView:
    """A grid with its blocks judged. ``code`` None: neither machine code nor a listing was there."""

    grid: GridState
    ctas: tuple[CtaView, ...]
    code: CodeView | None

    @property
    def blocks(self) -> int:
        x, y, z = self.grid.grid_dim
        return x * y * z

    def spinning(self) -> list[CtaView]:
        return [cta for cta in self.ctas if cta.kind == "spinning"]


def linear_block(block: Dim3, grid_dim: Dim3) -> int:
    """Number of a block in launch order: x runs fastest."""
    return block[0] + grid_dim[0] * (block[1] + grid_dim[1] * block[2])


def code_of_text(sass: Iterable[tuple[int, str]]) -> CodeView | None:
    """The code of a transcript (text by offset) as a view; None if there is none."""
    text = "\n".join(f"{offset:#x} <k+{offset}>:\t{line}" for offset, line in sass)
    lines = parse_listing(text).lines
    return CodeView(lines) if lines else None


def constants_of(grid: GridState, sm: int | None) -> Constants:
    """Constant bank 0 as far as the evidence holds it: the kernel's parameters, at the architecture's base."""
    base = param_base(sm) if sm else None
    params = grid.params
    if base is None or params is None:
        return no_constants

    def read(bank: int, offset: int) -> int | None:
        at = offset - base
        return int.from_bytes(params[at : at + 4], "little") if bank == 0 and 0 <= at <= len(params) - 4 else None

    return read


def view_grid(state: DeviceState, grid: GridState, lines: Sequence[SassLine] | None, memory: Word | None = None) -> GridView:
    """Judge every resident block of a grid. ``lines``: its machine code, None to use the grid's own listing text."""
    code = CodeView(lines) if lines else code_of_text(sorted(grid.sass.items()))
    sm = (grid.code.sm if grid.code is not None else None) or state.devices.get(grid.device, ("", None, None))[1]
    reader = _Reader(code, constants_of(grid, sm), memory or state.memory.get)
    return GridView(grid, tuple(reader.cta(cta, grid.grid_dim) for cta in grid.ctas or ()), code)


class _Reader:
    def __init__(self, code: CodeView | None, constants: Constants, memory: Word) -> None:
        self.code = code
        self.constants = constants
        self.memory = memory
        self._positions: dict[int, tuple[Position, Site | None]] = {}

    def cta(self, cta: CtaState, grid_dim: Dim3) -> CtaView:
        waits: list[PolledWait] = []
        points: list[WarpPoint] = []
        for warp in cta.warps:
            for pc, offset, mask, lanes in _by_pc(warp):
                position, site = self._position(pc)
                points.append(WarpPoint(warp.warp, pc, mask, bool(mask & warp.active_mask), position))
                if site is not None and pc is not None:
                    waits += self._waits(cta.block_idx, warp, pc, offset, mask, lanes, site)
        return CtaView(
            cta.block_idx, linear_block(cta.block_idx, grid_dim), cta.sm, self._kind(waits, points, partial=cta.partial),
            tuple(waits), tuple(points),
        )  # fmt: skip

    @staticmethod
    def _kind(waits: list[PolledWait], points: list[WarpPoint], *, partial: bool) -> CtaKind:
        if any(wait.satisfied is not True for wait in waits):
            return "spinning"
        if waits:
            return "leaving"
        kinds = {point.position.kind for point in points}
        if not points or kinds == {"unknown"}:
            return "unknown"
        if kinds & {"running", "unknown"}:
            return "running"
        return "unknown" if partial else "blocked"  # a warp that was not looked at may be at work

    def _position(self, pc: int | None) -> tuple[Position, Site | None]:
        if pc is None or self.code is None or pc not in self.code.lines:
            return Position("unknown"), None
        if pc not in self._positions:
            site = self.code.find(pc)
            self._positions[pc] = (Position("wait", offset=site.loop.load) if site else self._inside(pc), site)
        return self._positions[pc]

    def _inside(self, pc: int) -> Position:
        """A wait inside the block, from the instruction at the PC or the one before: a blocked warp's PC may stand behind it."""
        assert self.code is not None
        phase = self.code.phase_wait(pc)
        if phase is not None:
            return Position("phase", self.code.lines[phase].text, phase)
        for offset in (pc, pc - INSTRUCTION_BYTES):
            line = self.code.lines.get(offset)
            if line is None:
                continue
            if line.base == "SYNCS" and "TRYWAIT" in line.modifiers:  # suspends the warp by itself, for a while
                return Position("phase", line.text, offset)
            if line.base == "BAR" and {"SYNC", "RED", "SYNCALL"} & set(line.modifiers):
                number = operand(line.operands[0]) if line.operands else Immediate(0)
                plain = number == Immediate(0) and len(line.operands) <= 1
                return Position("cta-barrier" if plain else "named-barrier", ", ".join(line.operands), offset)
            if line.base in ("UCGABAR_WAIT", "CGABAR_WAIT"):
                return Position("cluster-barrier", line.text, offset)
            if line.base in ("WARPSYNC", "BSYNC") and offset == pc:
                return Position("warp-sync", line.text, offset)
        return Position("running", self.code.lines[pc].text, pc)

    def _waits(
        self, block: Dim3, warp: WarpState, pc: int, offset: int | None, mask: int, lanes: list[LaneState], site: Site
    ) -> list[PolledWait]:
        found: dict[Resolved, int] = {}
        for lane in lanes:
            seen = site.resolve(lane.registers, warp.uniform_registers, self.constants, lane.named)
            found[seen] = found.get(seen, 0) | 1 << lane.lane
        if not lanes:
            found[site.resolve(None, warp.uniform_registers, self.constants)] = mask
        return [
            PolledWait(block, warp.warp, pc, offset, bits, site.loop, seen, self._live(seen.address, site.loop.bits))
            for seen, bits in found.items()
        ]

    def _live(self, address: int | None, bits: int) -> int | None:
        if address is None:
            return None
        words = [self.memory(address + 4 * at) for at in range(bits // 32)]
        return None if None in words else sum((word or 0) << 32 * at for at, word in enumerate(words))


def _by_pc(warp: WarpState) -> list[tuple[int | None, int | None, int, list[LaneState]]]:
    """Lanes of a warp by PC: (PC in the code's own coordinate, offset from the function's start, lane mask, lanes read)."""
    groups: dict[tuple[int | None, int | None], list[LaneState]] = {}
    for lane in warp.lanes:
        groups.setdefault((lane.pc_offset, lane.virtual_pc if lane.pc_offset is None else None), []).append(lane)
    rows = [
        (offset if offset is not None else virtual, offset, sum(1 << lane.lane for lane in lanes), lanes)
        for (offset, virtual), lanes in groups.items()
    ]
    covered = sum(row[2] for row in rows)
    rest = warp.active_mask & ~covered
    pc = warp.pc_offset if warp.pc_offset is not None else warp.virtual_pc
    if rest and pc is not None:
        same = next((index for index, row in enumerate(rows) if row[0] == pc), None)
        if same is None:
            rows.append((pc, warp.pc_offset, rest, []))
        else:
            rows[same] = (rows[same][0], rows[same][1], rows[same][2] | rest, rows[same][3])
    return rows
