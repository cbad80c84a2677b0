"""What several collectors saw: kept in a run's directory, and as one device state with the memory words and the gaps of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..forensics.device_state import DeviceState, GridState, Unread
from ..kernels.abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE
from .ground import CaptureOutcome
from .runstore import RunStore

__all__ = [
    "all_unread",
    "counter_of_row_states",
    "keep_captures",
    "merge_states",
    "only_counter",
    "richness",
    "standing_counter",
    "standing_counters",
]


def keep_captures(store: RunStore, place: Path, captures: Sequence[CaptureOutcome]) -> None:
    """Index the artefacts of a capture and the rest of its folder ``place``, and say in the timeline what each collector saw."""
    for capture in captures:
        for artefact in capture.artefacts:
            store.add_evidence(artefact.kind, artefact.path, artefact.origin, collector=capture.collector)
        store.emit(
            "capture",
            collector=capture.collector,
            disturbance=capture.disturbance,
            seconds=round(capture.seconds, 4),
            saw_device=capture.state is not None,
            facts=dict(capture.facts),
            unread=[{"what": item.what, "why": item.why, "remedy": item.remedy} for item in capture.unread],
        )
    store.add_rest(place)


def _grid_richness(grid: GridState) -> int:
    lanes = sum(lane.registers is not None for cta in grid.ctas or () for warp in cta.warps for lane in warp.lanes)
    return (
        8 * (grid.ctas is not None) + 4 * (lanes > 0) + 2 * (grid.code is not None or bool(grid.sass)) + (grid.params is not None)
    )


def richness(state: DeviceState) -> tuple[int, int]:
    """How much a state can tell: by its best grid (resident CTAs, registers, code, parameters), then by the number of grids."""
    return max((_grid_richness(grid) for grid in state.grids), default=0), len(state.grids)


def merge_states(captures: Sequence[CaptureOutcome]) -> DeviceState | None:
    """The richest state (the first of equals: collectors come in the order of disturbance, so it is the earliest look), with every
    other view's memory words and unread items added. None if no collector saw the device.
    """
    seen = [capture for capture in captures if capture.state is not None]
    states = [capture.state for capture in seen if capture.state is not None]
    if not states:
        return None
    best = max(states, key=richness)
    # Addresses mean something within one process only: words of the first child say nothing of a second one.
    process = next(capture.facts.get("child") for capture in seen if capture.state is best)
    alike = [capture.state for capture in seen if capture.facts.get("child") == process]
    memory: dict[int, int] = {}
    devices = dict(best.devices)
    unread = list(best.unread)
    for state in states:
        if state is not best:
            memory.update(state.memory if any(state is other for other in alike) else {})
            devices = {**state.devices, **devices}
            unread += [item for item in state.unread if item not in unread]
    memory.update(best.memory)
    return dataclasses.replace(best, memory=memory, devices=devices, unread=tuple(unread))


def all_unread(captures: Sequence[CaptureOutcome]) -> tuple[Unread, ...]:
    """What the collectors could not read, each item once, in their order."""
    found: list[Unread] = []
    for capture in captures:
        found += [item for item in capture.unread if item not in found]
    return tuple(found)


def counter_of_row_states(captures: Sequence[CaptureOutcome], ctas_per_group: int) -> int | None:
    """Address of the one arrival counter that stands in the middle of a barrier, from the row states alone; None if not known.

    A launch of one group that hangs can only wait at that group's counter, whatever it holds (a reset race leaves 0 there).
    """
    for capture in captures:
        found = standing_counter(capture.facts, ctas_per_group)
        if found is not None:
            return found
        found = only_counter(capture.facts)
        if found is not None:
            return found
    return None


def only_counter(facts: Mapping[str, Any]) -> int | None:
    """Address of the counter of a launch of one group, whatever it holds; None where there are more, or the words still changed."""
    base, listed = facts.get("address"), facts.get("arrivals", facts.get("groups"))
    if not isinstance(base, int) or not isinstance(listed, list) or len(listed) != 1 or facts.get("unchanged") is False:
        return None
    return base + ARRIVAL_COUNTER_OFFSET


def standing_counters(facts: Mapping[str, Any], ctas_per_group: int) -> list[tuple[int, int]]:
    """(address, value) of every arrival counter that stands in the middle of a barrier; [] where the words change or are unread."""
    base, arrivals = facts.get("address"), facts.get("arrivals")
    if arrivals is None and isinstance(facts.get("groups"), list):
        arrivals = [group.get("arrival") for group in facts["groups"] if isinstance(group, Mapping)]
    if not isinstance(base, int) or not isinstance(arrivals, list) or facts.get("unchanged") is False:
        return []
    return [
        (base + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET, count)
        for group, count in enumerate(arrivals)
        if isinstance(count, int) and count % (6 * ctas_per_group)
    ]


def standing_counter(facts: Mapping[str, Any], ctas_per_group: int) -> int | None:
    """The same from one reading: ``address`` of the first row state, ``arrivals`` by group (or ``groups`` with ``arrival``).

    A row that was finished leaves six arrivals a CTA; a counter at no multiple of that belongs to a group that waits. None if the
    words still changed, or if no counter or several are so: then nothing is guessed.
    """
    standing = standing_counters(facts, ctas_per_group)
    return standing[0][0] if len(standing) == 1 else None
