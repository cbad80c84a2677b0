"""Which blocks wait together, and what became of each: spinning, running, exited, never started.

A dump lists resident blocks only. Whether a missing block has left or never came is inference, and said to be: from the order of
dispatch (lower block numbers start first), from room on the device, from what the kernel's own parameters make a peer do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import KernelNotFoundError
from ..kernels.abi import RADIX_THRESHOLD, ROW_STATE_SIZE, Field, TopKParams, row_state_field
from ..kernels.devices import arch_limits
from . import limits
from .barrier import CtaView, GridView, PolledWait
from .device_state import DeviceState, GridState
from .identity import base_name

__all__ = ["Fate", "GroupModel", "Ledger", "Place", "Room", "build_ledger", "group_model", "place_of", "room_on"]

#: Kernels in which the blocks of a group are neighbours (group = block // blocks per group), leader first.
_GROUPED = re.compile(r"persistent_topk_kernel|RadixTopK\w*MultiCTA|radix_topk\w*_multi_cta", re.IGNORECASE)
#: The kernel whose parameters and row state ``kernels.abi`` describes.
_ABI = "persistent_topk_kernel"
#: No GPU that runs these kernels has fewer SMs.
_FEWEST_SMS = 8


@dataclass(frozen=True, slots=True)
class GroupModel:
    """How the blocks of a grid are grouped. ``ctas``: blocks of a group; ``count``: groups.

    ``kind``: abi (parameters known), grouped (the family is known, the size follows from the numbers), grid (one group: the whole
    grid). ``certain`` False: more than one size fits; ``sizes`` lists them. ``row_states``: address of the first row state.
    """

    kind: Literal["abi", "grouped", "grid"]
    ctas: int
    count: int
    source: str
    sizes: tuple[int, ...]
    params: TopKParams | None = None
    row_states: int | None = None

    @property
    def certain(self) -> bool:
        return len(self.sizes) == 1

    def group(self, linear: int) -> int:
        return linear // self.ctas

    def role(self, linear: int) -> Literal["leader", "peer"] | None:
        """Leader or peer, if all sizes that fit agree."""
        if self.kind == "grid":
            return None
        roles = {linear % size == 0 for size in self.sizes}
        return None if len(roles) > 1 else "leader" if roles.pop() else "peer"


def group_model(view: GridView) -> GroupModel | None:
    """The grouping of a grid's blocks; None where neither kernel nor waits say anything about it."""
    name = base_name(view.grid.kernel)
    total = view.blocks
    params = abi_params(view)
    if params is not None:
        ctas = params.ctas_per_group
        states = params.row_states or None
        return GroupModel("abi", ctas, -(-total // ctas), "kernel parameters", (ctas,), params, states)
    targets = {wait.seen.target for cta in view.ctas for wait in cta.waits if wait.seen.target}
    if _GROUPED.search(name) and total > 1:
        sizes = tuple(
            size
            for size in range(2, min(total, 1 << 16) + 1)
            if total % size == 0 and all(target % size == 0 for target in targets)
        )  # fmt: skip
        sizes = _by_addresses(view, sizes)
        if sizes:
            source = f"the only size that fits the target and a grid of {total}" if len(sizes) == 1 else f"sizes that fit: {sizes}"
            return GroupModel("grouped", sizes[0], total // sizes[0], source, sizes)
        return None
    addresses = {wait.seen.address for cta in view.ctas for wait in cta.waits}
    if total > 1 and targets and len(addresses) == 1 and all(target % total == 0 for target in targets):
        return GroupModel("grid", total, 1, f"target is a multiple of the grid's {total} blocks", (total,))
    return None


def abi_params(view: GridView) -> TopKParams | None:
    """The kernel's parameters, if it is the kernel whose layout is known and they make sense for the grid."""
    raw = view.grid.params
    if raw is None or _ABI not in view.grid.kernel:
        return None
    try:
        params = TopKParams.unpack(raw)
    except ValueError:
        return None
    return params if params.plausible and params.ctas_per_group <= max(view.blocks, 1) else None


def _by_addresses(view: GridView, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes that also fit where the waits lie: blocks of one group poll one word, row states are equally spaced."""
    waits = {(cta.linear, wait.seen.address) for cta in view.ctas for wait in cta.waits if wait.seen.address is not None}
    fitting = []
    for size in sizes:
        pairs = [(linear // size, address) for linear, address in waits]
        lowest = min(pairs, default=(0, 0))
        if all(address - lowest[1] == (group - lowest[0]) * ROW_STATE_SIZE for group, address in pairs):
            fitting.append(size)
    return tuple(fitting) if waits else sizes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a polled word lies. ``group``: as the address says (None: not known); ``inferred``: from the load's offset alone."""

    field: Field | None
    group: int | None
    inferred: bool = False
    printed: str = ""

    @property
    def name(self) -> str | None:
        """The field's name, as the layout says, else as a debugger printed it."""
        return self.field.name if self.field is not None else self.printed or None


def place_of(wait: PolledWait, model: GroupModel | None, view: GridView) -> Place:
    """Which field of which row state a wait polls; by address where the row states' place is known, else by the load's offset."""
    address = wait.seen.address
    if model is not None and model.row_states is not None and address is not None:
        group, inside = divmod(address - model.row_states, ROW_STATE_SIZE)
        if 0 <= group < max(model.count, 1):
            return Place(row_state_field(inside), group)
        return Place(None, None)
    if _ABI in view.grid.kernel:
        found = re.search(r"\+(0x[0-9a-fA-F]+)\]", wait.loop.address)
        field = row_state_field(int(found[1], 16)) if found else None
        if field is not None and field.size == 4:
            return Place(field, model.group(_linear(wait, view)) if model is not None and model.certain else None, True)
    return Place(None, None, printed=wait.name)


def _linear(wait: PolledWait, view: GridView) -> int:
    return next((cta.linear for cta in view.ctas if cta.block == wait.block), 0)


# ---------------------------------------------------------------------------------------------------------------------------------
# Room on the device


@dataclass(frozen=True, slots=True)
class Room:
    """Whether another block of a grid could have started. ``certain``: from hard limits, not from an even spread of blocks."""

    state: Literal["free", "full", "unknown"]
    why: str
    certain: bool = True


def room_on(state: DeviceState, view: GridView) -> Room:
    """Room for one more block on the grid's device, from which SMs hold how many threads."""
    device = view.grid.device
    grids = [grid for grid in state.grids if grid.device == device]
    if any(grid.ctas is None or not grid.complete for grid in grids):
        return Room("unknown", "not all resident blocks of the device are known", False)
    _, sm, sms = state.devices.get(device, ("", None, None))
    per_sm = Counter(cta.sm for grid in grids for cta in grid.ctas or ())
    resident = per_sm.total()
    if None in per_sm or not sms:
        if resident < (sms or _FEWEST_SMS) and state.origin != "interpreted":
            few = "only 1 block is" if resident == 1 else f"only {resident} blocks are"
            return Room("free", f"{few} resident, " + (f"on {sms} SMs" if sms else "fewer than any such GPU has SMs"))
        return Room("unknown", "which SM holds which block is not known", False)
    if len(per_sm) < sms:
        return Room("free", f"{sms - len(per_sm)} of {sms} SMs hold no block")
    filled = _filled(grids, view.grid, sm, sms)
    if filled:
        return Room("full", f"no SM has {filled} for another block ({resident} blocks on {sms} SMs)")
    if len(set(per_sm.values())) == 1:
        each = resident // sms
        return Room("full", f"every one of {sms} SMs holds {each} block{'s' if each > 1 else ''}", False)
    return Room("unknown", f"{resident} blocks are spread unevenly over {sms} SMs", False)


def _filled(grids: Sequence[GridState], own: GridState, sm: int | None, sms: int) -> str:
    """The resource that every SM lacks for one more block of ``own``: threads, registers or shared memory; "" if none is known to.

    Limits: CUDA C++ Programming Guide, per compute capability; registers are allocated per warp in units of 256.
    """
    try:
        most = arch_limits(sm) if sm else None
    except KernelNotFoundError:
        most = None
    if most is None:
        return ""
    have = {"threads": most.max_threads_per_sm, "registers": most.registers_per_sm, "shared memory": most.smem_per_sm}
    used: dict[int | None, Counter[str]] = {}
    for grid in grids:
        for cta in grid.ctas or ():
            used.setdefault(cta.sm, Counter()).update(_need(grid))
    if len(used) < sms:
        return ""
    need = _need(own)
    lacking = [word for word in have if need[word] and all(held[word] + need[word] > have[word] for held in used.values())]
    return " and ".join(lacking)


def _need(grid: GridState) -> Counter[str]:
    """What one block of a grid takes of an SM; what is not known counts as nothing."""
    threads = grid.block_dim[0] * grid.block_dim[1] * grid.block_dim[2]
    per_warp = -(-(grid.registers or 0) * 32 // 256) * 256
    return Counter({"threads": threads, "registers": per_warp * -(-threads // 32), "shared memory": grid.shared_bytes or 0})


# ---------------------------------------------------------------------------------------------------------------------------------
# The ledger

Fate = Literal["spinning", "running", "exited", "never_started", "unknown"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Fate of every block of every group. ``why``: what the inferred fates of a group rest on; ``firm``: groups whose missing
    blocks' fate rests on order of dispatch, room by hard limits or the kernel's parameters.
    """

    groups: tuple[dict[Fate, tuple[int, ...]], ...]
    why: tuple[str, ...]
    firm: frozenset[int]
    room: Room


def build_ledger(state: DeviceState, view: GridView, model: GroupModel) -> Ledger:
    """The ledger of a grid; at most ``limits.MAX_LEDGER_BLOCKS`` blocks are named."""
    room = room_on(state, view)
    resident = {cta.linear: cta for cta in view.ctas}
    highest = max(resident, default=-1)
    listed = view.grid.ctas is not None and view.grid.complete
    total = min(view.blocks, limits.MAX_LEDGER_BLOCKS)
    groups: list[dict[Fate, tuple[int, ...]]] = []
    reasons, firm = [], set()
    for group in range(-(-total // model.ctas)):
        fates: dict[Fate, list[int]] = {}
        why: dict[str, bool] = {}
        unread = 0
        for linear in range(group * model.ctas, min((group + 1) * model.ctas, total)):
            cta = resident.get(linear)
            if cta is not None and not_read(cta):
                fates.setdefault("unknown", []).append(linear)
                unread += 1
                continue
            if cta is not None:
                fates.setdefault("spinning" if cta.kind == "spinning" else "running", []).append(linear)
                continue
            fate, reason, sure = _missing(linear, highest, room, model, listed)
            fates.setdefault(fate, []).append(linear)
            why[reason] = sure
        if unread:
            said = (
                f"{unread} blocks are resident, but where they stand" if unread > 1 else "1 block is resident, but where it stands"
            )
            why[f"{said} was not read"] = False
        groups.append({fate: tuple(blocks) for fate, blocks in fates.items()})
        reasons.append("; ".join(why))
        if all(why.values()):
            firm.add(group)
    return Ledger(tuple(groups), tuple(reasons), frozenset(firm), room)


def not_read(cta: CtaView) -> bool:
    """Whether nothing says where a resident block stands. One that stands somewhere, not at a wait, is another matter."""
    return cta.kind == "unknown" and all(point.pc is None for point in cta.points)


def _missing(linear: int, highest: int, room: Room, model: GroupModel, listed: bool) -> tuple[Fate, str, bool]:
    """What became of a block that is not resident: fate, reason, and whether the reason is firm."""
    if not listed:
        return "unknown", "the list of resident blocks is not complete", False
    if linear < highest:
        return "exited", "exited: blocks start in order and a later one is resident", True
    if room.state == "free":
        return "exited", f"exited: there is room, so a block that had not started would have started ({room.why})", room.certain
    if model.params is not None and model.params.max_seq_len > RADIX_THRESHOLD:
        held = f"no member leaves a group early when max_seq_len {model.params.max_seq_len} > {RADIX_THRESHOLD}"
        if room.state == "full":
            return "never_started", f"never started: {room.why}; {held}", True
        return "never_started", f"never started: blocks start in order, this one is after the last resident; {held}", False
    if room.state == "full" and room.certain:
        return "never_started", f"never started: {room.why}", True
    if model.params is not None and model.role(linear) == "peer":
        early = f"a peer leaves at entry when max_seq_len {model.params.max_seq_len} <= {RADIX_THRESHOLD}"
        return ("unknown", room.why, False) if room.state == "full" else ("exited", f"exited: {early}", False)
    if room.state == "full":
        return "never_started", f"never started: {room.why}, and it is after the last resident block", False
    return "unknown", room.why, False


def members(view: GridView, model: GroupModel, group: int) -> list[CtaView]:
    """Resident blocks of a group, in order."""
    return sorted((cta for cta in view.ctas if model.group(cta.linear) == group), key=lambda cta: cta.linear)


def waiting_groups(view: GridView, model: GroupModel) -> list[int]:
    """Groups with at least one spinning block, in order."""
    return sorted({model.group(cta.linear) for cta in view.spinning()})


def distinct(values: Iterable[int | None]) -> set[int]:
    """The known ones among values."""
    return {value for value in values if value is not None}
