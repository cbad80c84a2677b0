"""The decode step that was running when a server hung, as its own recorder and agent measured it; and the known wait in row states.

From the recorder: requests, tokens, padded sizes, query positions per request. From the agent inside the worker: arrival counters
and row lengths of each captured launch, read from device memory while the kernel spins. What neither saw stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import ReproError
from ...forensics.chain import StepFacts
from ...forensics.device_state import DeviceState, GridState
from ...forensics.evidence.agent_facts import AgentLaunch, KnownWait, agent_launches, recorded_step, waits_in
from ...forensics.evidence.ring_file import step_of
from ...forensics.identity import base_name
from ...kernels.abi import TopKParams
from ...kernels.devices import DeviceDescription, device_for_sm, device_named
from ...kernels.plan import LaunchPlan

__all__ = ["AgentLaunch", "KnownWait", "agent_launches", "device_of", "known_wait", "measured_step", "with_parameters"]

_KERNEL = "persistent_topk_kernel"
#: Row states that have not changed count as standing when the oldest step is this old, seconds.
_STALLED_S = 1.0


def known_wait(facts: Mapping[str, Any]) -> KnownWait | None:
    """The wait of vLLM #51593 in two agreeing reads: one arrival where the row's length is negative, while a step does not end.

    None where the reads differ, no step is overdue, more than one place fits, or peers would stay (``max_seq_len``).
    """
    if facts.get("unchanged") is not True or not isinstance(facts.get("stalled_s"), int | float) or facts["stalled_s"] < _STALLED_S:
        return None
    found = waits_in(agent_launches(facts))
    return found[0] if len(found) == 1 else None


def device_of(names: Mapping[str, Any], gpu_index: int | None) -> DeviceDescription | None:
    """The card of a rank, by the name or architecture that NVML gave; where all cards are alike, any of them."""
    entry = names.get(str(gpu_index)) if gpu_index is not None else None
    cards = [item for item in names.values() if isinstance(item, Mapping)]
    if entry is None and cards and len({item.get("name") for item in cards}) == 1:
        entry = cards[0]
    if not isinstance(entry, Mapping):
        return None
    try:
        return device_named(str(entry.get("name")))
    except ReproError:
        pass
    try:
        return device_for_sm(int(entry["sm"])) if entry.get("sm") else None
    except (ReproError, ValueError):
        return None


def measured_step(ring: Mapping[str, Any] | None, launches: Sequence[AgentLaunch], planned: StepFacts | None) -> StepFacts | None:
    """The step that a recorder shows under way; figures of the plan only where nothing was measured and they are no measurement.

    ``ring``: facts of one recorder (``first_sample.ring_state``). None if there is neither a recorded step nor a plan.
    """
    step = step_of(ring.get("step")) if ring is not None else None
    measured = recorded_step(step) if step is not None else None
    if measured is None:
        return planned
    if planned is not None:
        # Of the plan only what a step does not change: the model's compression and widths.
        measured = replace(
            measured, compress=planned.compress, max_model_len=planned.max_model_len, width=planned.width,
            max_seq_len=planned.max_seq_len,
        )  # fmt: skip
    widths = {launch.width for launch in launches}
    return replace(measured, width=widths.pop()) if len(widths) == 1 and measured.width is None else measured


def with_parameters(state: DeviceState, launches: Sequence[AgentLaunch]) -> tuple[DeviceState, bool]:
    """The state with the top-k's parameters from the agent's record of the launch, where the debugger could not read them.

    Only where one launch fits, with its largest number of rows or, since smaller graphs share its workspace, with the number that
    makes this very grid by the launcher's arithmetic. Returns whether anything was filled in. The addresses of input and output are
    not known: 0.
    """
    changed = False
    grids: list[GridState] = []
    for grid in state.grids:
        if grid.params is None and base_name(grid.kernel) == _KERNEL and grid.grid_dim[1:] == (1, 1):
            card = state.devices.get(grid.device)
            device = device_of({"0": {"name": card[0], "sm": card[1]}}, 0) if card is not None else None
            fitting = [
                (launch, plan)
                for launch in launches
                if any(launch.counters) and (plan := _plan_of_grid(launch, device, grid.grid_dim[0])) is not None
            ]
            if len(fitting) == 1:
                launch, plan = fitting[0]
                params = TopKParams(
                    0, 0, launch.lengths_address, launch.workspace, plan.rows, launch.width, launch.top_k, plan.chunk_size,
                    plan.ctas_per_group, launch.max_seq_len,
                )  # fmt: skip
                grid, changed = replace(grid, params=params.pack()), True
        grids.append(grid)
    return replace(state, grids=tuple(grids)), changed


def _plan_of_grid(launch: AgentLaunch, device: DeviceDescription | None, blocks: int) -> LaunchPlan | None:
    """The one number of rows, up to the launch's own, whose grid has so many blocks; None if none or several do."""
    plans = [plan for rows in range(1, min(launch.rows, 256) + 1) if (plan := launch.plan(device, rows)) is not None]
    found = [plan for plan in plans if plan.grid == blocks]
    return found[0] if len(found) == 1 else None
