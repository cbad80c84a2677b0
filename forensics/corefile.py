"""A GPU core dump as a ``DeviceState``: resident CTAs, warps, lanes, PCs, registers, parameters and code. Pure Python, no toolkit.

``open_core(path)`` reads all that is needed for a diagnosis in one pass over the tree of ``coretables``; memory sections of a full
dump stay on disk and are read word by word (``CoreDump.word``). What cannot be read is in ``state.unread``; only a file that is
no GPU core dump at all raises (CoreFileError).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from . import limits
from .codeimage import FunctionSymbol
from .corecode import CodeFinder, rows_as_dicts
from .corefaults import Fault, exception_name
from .coresections import CoreSections
from .coretables import CTA, DEVICE, GRID, LANE, META, SM, WARP, Kind
from .device_state import CodeImage, CtaState, DeviceState, Dim3, GridState, LaneState, WarpState

__all__ = ["INTERPRETER", "CoreDump", "Fault", "open_core", "read_core"]

#: Generator name that the writer here gives to a state that was interpreted, not measured.
INTERPRETER = "dsv4-repro interpreter"

#: Stands for every grid of a device.
_ALL = -1


@dataclass(frozen=True, slots=True)
class _Grid:
    """A row of a grid table, and its code."""

    device: int
    section: int
    row: int
    values: Mapping[str, int]
    symbol: FunctionSymbol | None = None
    code: CodeImage | None = None


@dataclass
class CoreDump:
    """An open dump. ``metadata``: generator, driver, cuda, flags, timestamp (absent before driver r565: empty).

    ``faults``: exceptions recorded by the hardware; a hang has none. A context manager; after ``close`` only ``word`` is gone.
    """

    state: DeviceState
    metadata: Mapping[str, Any]
    faults: tuple[Fault, ...]
    _sections: CoreSections
    _memory: list[tuple[int, int, int]] = field(default_factory=list)

    def word(self, address: int) -> int | None:
        """The u32 of device memory at a byte address; None where the dump holds no memory there (light dumps hold none)."""
        at = bisect_right(self._memory, (address, 1 << 64, 0)) - 1
        if at < 0:
            return None
        start, size, section = self._memory[at]
        if not start <= address <= start + size - 4:
            return None
        raw = self._sections.bytes_of(section, 4, address - start)
        return int.from_bytes(raw, "little") if raw is not None and len(raw) == 4 else None

    def close(self) -> None:
        self._sections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_core(path: str | Path) -> DeviceState:
    """The device state in a GPU core dump. Raises CoreFileError naming file and place."""
    with open_core(path) as dump:
        return dump.state


def open_core(path: str | Path) -> CoreDump:
    """Open and read a GPU core dump. Raises CoreFileError naming file and place; partial results say what is missing."""
    sections = CoreSections(path)
    try:
        return _Reader(sections).read()
    except BaseException:
        sections.close()
        raise


class _Reader:
    def __init__(self, sections: CoreSections) -> None:
        self.s = sections
        self.faults: list[Fault] = []
        self.ctas = 0
        self.warps = 0
        self.lanes = 0
        self.clusters: dict[tuple[int, int], Dim3] = {}
        self.shared: dict[tuple[int, int], int] = {}
        self.code = CodeFinder(sections)
        self.gaps: set[tuple[int, int]] = set()
        """(device, grid) whose list of resident blocks may lack some: a block that is not in it need not have left."""

    def read(self) -> CoreDump:
        s = self.s
        tables = s.of_kind(Kind.DEVICES)
        if not len(tables):
            s.note("device table", "no such section in the dump", "the file is no complete GPU core dump: take another one")
        if len(tables) > 1:
            s.note(f"{len(tables) - 1} further device tables", "a dump has one; the first is read")
        devices: dict[int, tuple[str, int | None, int | None]] = {}
        grids: list[_Grid] = []
        resident: dict[tuple[int, int], list[CtaState]] = {}
        section = int(tables[0]) if len(tables) else -1
        rows = rows_as_dicts(s.rows_of(section, DEVICE, limits.MAX_DEVICES)) if section >= 0 else []
        self.full = self._lanes() <= limits.MAX_FULL_LANES
        smem = [s.child(Kind.SMS, section, index) for index in range(len(rows))]
        for index, row in enumerate(rows):
            number = row["device"]
            if number in devices:
                s.note(f"device table row {index}", f"a second device {number}; read as {number + 1000 * index}")
                number += 1000 * index
            sm = row["sm_major"] * 10 + row["sm_minor"] if row["sm_major"] else None
            table = smem[index]
            sms: int | None = row["sms"] or None
            if sms and table is not None and sms != (listed := s.row_count(table)):
                # Blocks may be on an SM whose row was lost, and room on SMs that are not there proves nothing.
                s.note(f"number of SMs of device {number}", f"the device table says {sms}, the SM table has {listed} rows")
                sms = None
                self.gaps.add((number, _ALL))
            devices[number] = (s.string(row["name_at"]) or s.string(row["type_at"]), sm, sms)
            own = self._grids(section, index, number, sm)
            grids += own
            if table is None:
                s.note(f"SM table of device {number}", "no such section in the dump")
                self.gaps.add((number, _ALL))
                continue
            entries = {grid.values["grid"]: grid for grid in own}
            if len(entries) < len(own):
                self.gaps.add((number, _ALL))
            for grid_id, cta in self._resident(table, number, entries):
                resident.setdefault((number, grid_id), []).append(cta)
        torn = self._orphans() or -1 in s.partial or len(tables) > 1 or (section in s.partial)
        states = [self._grid_state(grid, resident.pop((grid.device, grid.values["grid"]), []), section) for grid in grids]
        for (number, grid_id), found in resident.items():
            s.note(f"grid {grid_id} of device {number}", f"{len(found)} resident CTAs belong to it, the grid table has no such row")
            states.append(GridState(number, grid_id, "", (0, 0, 0), (0, 0, 0), tuple(found)))
        if rows and not states:
            s.note("grids", "the dump holds no grid: no kernel was on the device, or its table was not written")
        if not self.full:
            why = f"more than {limits.MAX_FULL_LANES} lanes are resident: one lane for each PC of each warp was read"
            s.note("registers of most lanes", why)
        metadata = self._metadata()
        origin = "interpreted" if str(metadata.get("generator", "")).startswith(INTERPRETER) else "measured"
        incomplete = [state for state in states if torn or {(state.device, state.grid_id), (state.device, _ALL)} & self.gaps]
        if incomplete:
            s.note("the list of resident blocks", "tables of the dump are damaged: a block that they do not show may be resident")
            states = [replace(state, complete=state not in incomplete) for state in states]
        memory = self._memory()
        words = self._small_memory(memory)
        state = DeviceState(s.path, origin, tuple(states), devices, words, tuple(s.unread))
        return CoreDump(state, metadata, tuple(self.faults), s, memory)

    def _small_memory(self, memory: list[tuple[int, int, int]]) -> dict[int, int]:
        """All memory words, if the dump holds only a few (a full dump's are read by ``CoreDump.word``)."""
        if sum(size for _, size, _ in memory) > limits.MAX_STATE_MEMORY:
            return {}
        words: dict[int, int] = {}
        for address, size, section in memory:
            raw = self.s.bytes_of(section, size) or b""
            words.update((address + at, int.from_bytes(raw[at : at + 4], "little")) for at in range(0, len(raw) - 3, 4))
        return words

    def _lanes(self) -> int:
        """An upper bound of the resident lanes, from the sizes of all lane tables."""
        numbers = self.s.of_kind(Kind.LANES)
        step = np.maximum(self.s.entsize[numbers], LANE.minimum)
        return int(np.minimum(self.s.size[numbers] // step, limits.MAX_LANES).sum())

    def _metadata(self) -> dict[str, Any]:
        found = self.s.of_kind(Kind.METADATA)
        rows = rows_as_dicts(self.s.rows_of(int(found[0]), META, 1)) if len(found) else []
        if not rows:
            return {}
        row = rows[0]
        return {
            "generator": self.s.string(row["generator_at"]),
            "driver": f"{row['driver_major']}.{row['driver_minor']}",
            "cuda": f"{row['cuda_major']}.{row['cuda_minor']}",
            "flags": row["flags"],
            "timestamp": row["timestamp"],
        }

    def _memory(self) -> list[tuple[int, int, int]]:
        """Start address, size and number of every memory section, by address."""
        found = np.concatenate([self.s.of_kind(Kind.GLOBAL_MEMORY), self.s.of_kind(Kind.MANAGED_MEMORY)])
        found = found[: limits.MAX_MEMORY_SECTIONS]
        addresses = self.s.addresses([int(number) for number in found])
        return sorted((address, int(self.s.size[number]), int(number)) for number, address in zip(found, addresses, strict=True))

    def _orphans(self) -> bool:
        """Note sections whose parent is not there; whether there are any below a table of blocks: then one of those is lost."""
        parents = {
            Kind.CTAS: Kind.SMS, Kind.WARPS: Kind.CTAS, Kind.LANES: Kind.WARPS, Kind.REGISTERS: Kind.LANES,
            Kind.PREDICATES: Kind.LANES, Kind.UNIFORM_REGISTERS: Kind.WARPS, Kind.PARAMETERS: Kind.GRIDS,
            Kind.MODULES: Kind.CONTEXTS, Kind.RELOCATED_IMAGE: Kind.MODULES,
        }  # fmt: skip
        torn = False
        for kind, parent in parents.items():
            lost = self.s.orphans(kind, parent)
            if lost:
                torn |= kind in (Kind.CTAS, Kind.WARPS, Kind.LANES, Kind.REGISTERS)
                self.s.note(f"{lost} sections with {kind.name.lower()}", f"they do not hang on a table of {parent.name.lower()}")
        return torn

    # --- grids and code ------------------------------------------------------------------------------------------------------

    def _grids(self, devices: int, index: int, number: int, sm: int | None) -> list[_Grid]:
        table = self.s.child(Kind.GRIDS, devices, index)
        if table is None:
            self.s.note(f"grid table of device {number}", "no such section in the dump")
            return []
        images = self.code.modules(devices, index)
        grids = []
        for row, values in enumerate(rows_as_dicts(self.s.rows_of(table, GRID, limits.MAX_GRIDS))):
            symbol, code = self.code.find(values, images, sm)
            grids.append(_Grid(number, table, row, values, symbol, code))
        return grids

    def _grid_state(self, grid: _Grid, ctas: list[CtaState], devices: int) -> GridState:
        v = grid.values
        name = grid.symbol.name if grid.symbol is not None else ""
        section = self.s.child(Kind.PARAMETERS, grid.section, grid.row)
        params = self.s.bytes_of(section, limits.MAX_PARAMETERS) if section is not None else None
        if params is None:
            self.s.note(
                f"parameters of grid {v['grid']}", "the dump holds none",
                "cuda-gdb reads them from the constant bank of a live process; in a dump: without skip_constbank_memory",
            )  # fmt: skip
        cluster = (v.get("cluster_x") or 1, v.get("cluster_y") or 1, v.get("cluster_z") or 1)
        if cluster == (1, 1, 1):  # each block says it too, since driver r565
            cluster = self.clusters.get((grid.device, v["grid"]), cluster)
        return GridState(
            grid.device, v["grid"], name, (v["grid_x"], v["grid_y"], v["grid_z"]), (v["block_x"], v["block_y"], v["block_z"]),
            tuple(ctas), cluster, params, grid.code, shared_bytes=self.shared.get((grid.device, v["grid"])),
            registers=v["registers"] or None,
        )  # fmt: skip

    # --- resident blocks -----------------------------------------------------------------------------------------------------

    def _resident(self, sms: int, device: int, grids: Mapping[int, _Grid]) -> list[tuple[int, CtaState]]:
        found: list[tuple[int, CtaState]] = []
        seen: set[tuple[int, Dim3]] = set()
        if self.s.beyond_rows(Kind.CTAS, sms):
            self.gaps.add((device, _ALL))
        for row, values in enumerate(rows_as_dicts(self.s.rows_of(sms, SM, limits.MAX_SMS))):
            number = values["sm"]
            if values.get("exception"):
                self._fault(device, number, values["exception"])
            table = self.s.child(Kind.CTAS, sms, row)
            if table is None:
                continue
            for index, cta in enumerate(rows_as_dicts(self.s.rows_of(table, CTA, limits.MAX_CTAS_PER_SM))):
                if self.ctas >= limits.MAX_CTAS:
                    self.s.note("further resident CTAs", f"more than {limits.MAX_CTAS}")
                    self.gaps.add((device, _ALL))
                    return found
                self.ctas += 1
                block = (cta["x"], cta["y"], cta["z"])
                grid = grids.get(cta["grid"])
                wrong = _why_wrong(block, grid, twice=(cta["grid"], block) in seen)
                seen.add((cta["grid"], block))
                if wrong:  # which block it really is, is not known: then none of the grid can be said to have left
                    self.s.note(f"row {index} of {self.s.name_of(table)}, on SM {number}", f"block {block} {wrong}")
                    self.gaps.add((device, cta["grid"] if grid is not None else _ALL))
                    if grid is not None:
                        continue
                cluster = (cta["cluster_x"], cta["cluster_y"], cta["cluster_z"]) if "cluster_z" in cta else None
                size = tuple(cta.get(f"cluster_dim_{axis}", 0) or 1 for axis in "xyz")
                self.clusters.setdefault((device, cta["grid"]), (size[0], size[1], size[2]))
                warps = self._warps(table, index, (device, number, block), grid)
                found.append((cta["grid"], CtaState(block, number, warps, cluster)))
            if table in self.s.partial:
                self.gaps.add((device, _ALL))
        if sms in self.s.partial:
            self.gaps.add((device, _ALL))
        return found

    def _fault(
        self, device: int, sm: int, code: int, block: Dim3 | None = None, warp: int | None = None, lane: int | None = None
    ) -> None:
        what = exception_name(code)
        if what is None:
            self.s.note(f"an exception on SM {sm} of device {device}", f"its field holds {code}, which is no exception's number")
        elif len(self.faults) < limits.MAX_UNREAD:
            self.faults.append(Fault(device, sm, code, what, block, warp, lane))

    def _warps(self, ctas: int, row: int, where: tuple[int, int, Dim3], grid: _Grid | None) -> tuple[WarpState, ...]:
        table = self.s.child(Kind.WARPS, ctas, row)
        rows = rows_as_dicts(self.s.rows_of(table, WARP, limits.MAX_WARPS_PER_CTA)) if table is not None else None
        if rows is None or table is None:
            self.s.note(f"warps of block {where[2]}", "no warp table in the dump")
            return ()
        warps = []
        for index, values in enumerate(rows):
            if self.warps >= limits.MAX_WARPS:
                self.s.note("further warps", f"more than {limits.MAX_WARPS}")
                break
            self.warps += 1
            if grid is not None and values.get("shared_bytes"):
                self.shared.setdefault((grid.device, grid.values["grid"]), values["shared_bytes"])
            lanes = self._lane_states(table, index, values, where, grid)
            active = [lane for lane in lanes if values["active"] >> lane.lane & 1] or lanes
            uniform = self._words(self.s.child(Kind.UNIFORM_REGISTERS, table, index))
            first = active[0] if active else None
            warps.append(
                WarpState(
                    values["warp"], values["valid"], values["active"], first.pc_offset if first else None, tuple(lanes), uniform,
                    first.virtual_pc if first else None,
                )
            )  # fmt: skip
        return tuple(warps)

    def _lane_states(
        self, warps: int, row: int, warp: Mapping[str, int], where: tuple[int, int, Dim3], grid: _Grid | None
    ) -> list[LaneState]:
        table = self.s.child(Kind.LANES, warps, row)
        rows = rows_as_dicts(self.s.rows_of(table, LANE, limits.MAX_LANES)) if table is not None else []
        lanes: list[LaneState] = []
        seen: set[tuple[int, bool]] = set()
        entry = grid.values["entry"] if grid is not None else 0
        for index, values in enumerate(rows):
            lane = values["lane"]
            if lane >= limits.MAX_LANES or not warp["valid"] >> lane & 1:
                continue
            thread = (values["x"], values["y"], values["z"])
            if grid is not None and not _inside(thread, grid, "block"):
                self.s.note(f"row {index} of {self.s.name_of(table or 0)}", f"thread {thread} does not lie inside its block")
                continue
            if values["exception"]:
                self._fault(where[0], where[1], values["exception"], where[2], warp["warp"], lane)
            key = (values["virtual_pc"], bool(warp["active"] >> lane & 1))
            if (not self.full and key in seen) or self.lanes >= limits.MAX_KEPT_LANES:
                continue
            seen.add(key)
            self.lanes += 1
            assert table is not None
            registers = self._words(self.s.child(Kind.REGISTERS, table, index))
            flags = self._words(self.s.child(Kind.PREDICATES, table, index))
            predicates = sum(1 << bit for bit, word in enumerate(flags[:7]) if word) if flags is not None else None
            pc = _pc_offset(values["virtual_pc"], values["function_pc"], entry, values["call_depth"])
            lanes.append(LaneState(lane, thread, pc, registers, predicates, values["virtual_pc"]))
        return lanes

    def _words(self, section: int | None) -> tuple[int, ...] | None:
        raw = self.s.bytes_of(section, 4 * limits.MAX_REGISTERS) if section is not None else None
        if not raw:
            return None
        return tuple(np.frombuffer(raw[: len(raw) // 4 * 4], dtype="<u4").tolist())


def _inside(index: Dim3, grid: _Grid, what: str) -> bool:
    return all(at < max(grid.values[f"{what}_{axis}"], 1) for at, axis in zip(index, "xyz", strict=True))


def _why_wrong(block: Dim3, grid: _Grid | None, *, twice: bool) -> str:
    """Why a row of a table of resident blocks cannot be right, "" if it can."""
    if grid is None:
        return "belongs to a grid that the grid table does not have"
    if not _inside(block, grid, "grid"):
        return f"does not lie inside its grid ({grid.values['grid_x']},{grid.values['grid_y']},{grid.values['grid_z']})"
    return "is resident twice" if twice else ""


def _pc_offset(virtual: int, function_pc: int, entry: int, depth: int) -> int | None:
    """Bytes from the kernel's first instruction. The address difference also holds inside a subroutine of the kernel's section."""
    if entry and entry <= virtual < entry + limits.MAX_FUNCTION_BYTES:
        return virtual - entry
    return function_pc if depth <= 1 and function_pc < limits.MAX_FUNCTION_BYTES else None
