"""Do two sources agree on what they both saw? Field by field, so that a debugger and a core dump check each other.

A field that one of them did not read is no disagreement. Grid numbers, warp slots and SM are compared only where both name them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .device_state import CtaState, DeviceState, GridState, LaneState, WarpState

__all__ = ["Disagreement", "compare_states"]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """``where``: grid, block, warp, lane; ``field``: what; the two values as text."""

    where: str
    field: str
    first: str
    second: str


def compare_states(first: DeviceState, second: DeviceState) -> list[Disagreement]:
    """Every field on which two looks at the same stopped device differ; an empty list if they agree on all they share."""
    found: list[Disagreement] = []
    for device in sorted(set(first.devices) & set(second.devices)):
        names = ("name", "architecture", "SMs")
        for name, a, b in zip(names, first.devices[device], second.devices[device], strict=True):
            if a and b:
                found += _differ(f"device {device}", name, a, b)
    for address in sorted(set(first.memory) & set(second.memory)):
        found += _differ("memory", hex(address), first.memory[address], second.memory[address])
    for one, two in _pairs(first, second):
        found += _grids(one, two)
    return found


def _differ(where: str, field: str, first: object, second: object) -> list[Disagreement]:
    return [] if first == second else [Disagreement(where, field, _text(first), _text(second))]


def _text(value: object) -> str:
    return hex(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 9999 else str(value)


def _pairs(first: DeviceState, second: DeviceState) -> Iterator[tuple[GridState, GridState]]:
    """Grids by device and id; a grid that only one source has is paired with nothing (the other may not have listed it)."""
    others = {(grid.device, grid.grid_id): grid for grid in second.grids}
    for grid in first.grids:
        if (grid.device, grid.grid_id) in others:
            yield grid, others[grid.device, grid.grid_id]


def _grids(one: GridState, two: GridState) -> list[Disagreement]:
    where = f"device {one.device} grid {one.grid_id}"
    found: list[Disagreement] = []
    if one.kernel and two.kernel and one.kernel[:2] == "_Z" == two.kernel[:2]:
        found += _differ(where, "kernel", one.kernel, two.kernel)
    for field in ("grid_dim", "block_dim"):
        a, b = getattr(one, field), getattr(two, field)
        if any(a) and any(b):
            found += _differ(where, field, a, b)
    if one.params is not None and two.params is not None:
        length = min(len(one.params), len(two.params))
        found += _differ(where, "parameters", one.params[:length].hex(), two.params[:length].hex())
    if one.ctas is None or two.ctas is None:
        return found
    blocks = [{cta.block_idx: cta for cta in grid.ctas or ()} for grid in (one, two)]
    if one.complete and two.complete:
        found += _differ(where, "resident blocks", sorted(blocks[0]), sorted(blocks[1]))
    for block in sorted(set(blocks[0]) & set(blocks[1])):
        found += _ctas(f"{where} block {block}", blocks[0][block], blocks[1][block])
    return found


def _ctas(where: str, one: CtaState, two: CtaState) -> list[Disagreement]:
    found: list[Disagreement] = []
    if one.sm is not None and two.sm is not None:
        found += _differ(where, "SM", one.sm, two.sm)
    warps = [{warp.warp: warp for warp in cta.warps} for cta in (one, two)]
    if warps[0] and warps[1] and len(warps[0]) == len(warps[1]):
        found += _differ(where, "warps", sorted(warps[0]), sorted(warps[1]))
    for number in sorted(set(warps[0]) & set(warps[1])):
        found += _warps(f"{where} warp {number}", warps[0][number], warps[1][number])
    return found


def _warps(where: str, one: WarpState, two: WarpState) -> list[Disagreement]:
    found = _differ(where, "valid lanes", one.valid_mask, two.valid_mask)
    found += _differ(where, "active lanes", one.active_mask, two.active_mask)
    found += _shared(where, one, two, ("pc_offset", "virtual_pc"))
    found += _registers(where, "UR", one.uniform_registers, two.uniform_registers)
    lanes = [{lane.lane: lane for lane in warp.lanes} for warp in (one, two)]
    for number in sorted(set(lanes[0]) & set(lanes[1])):
        found += _lanes(f"{where} lane {number}", lanes[0][number], lanes[1][number])
    return found


def _lanes(where: str, one: LaneState, two: LaneState) -> list[Disagreement]:
    found = _differ(where, "thread index", one.thread_idx, two.thread_idx)
    found += _shared(where, one, two, ("pc_offset", "virtual_pc", "predicates"))
    return found + _registers(where, "R", one.registers, two.registers)


def _shared(where: str, one: object, two: object, fields: tuple[str, ...]) -> list[Disagreement]:
    found: list[Disagreement] = []
    for field in fields:
        a, b = getattr(one, field), getattr(two, field)
        if a is not None and b is not None:
            found += _differ(where, field, a, b)
    return found


def _registers(where: str, kind: str, one: tuple[int, ...] | None, two: tuple[int, ...] | None) -> list[Disagreement]:
    if one is None or two is None:
        return []
    return [
        Disagreement(where, f"{kind}{number}", hex(a), hex(b))
        for number, (a, b) in enumerate(zip(one, two, strict=False))
        if a != b
    ]
