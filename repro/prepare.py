"""From a drain plan, a kernel and a device to what a ground is asked to run, and where the danger window lies. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..kernels.plan import DeviceDescription, LaunchPlan, plan_launch
from ..kernels.producer import Producer
from ..scenarios.drain import DrainPlan
from ..scenarios.drain_steps import DecodeStep, decode_steps
from .ground import GroundRequest
from .kernel_choice import ChosenKernel

__all__ = ["PreparedRun", "danger_window", "prepare_drain"]


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """``window``: indices of the steps at which an unguarded kernel behind an unclamped producer would wait for ever.

    ``notes``: what a reader should know about this workload, e.g. steps that another kernel takes.
    """

    request: GroundRequest
    chosen: ChosenKernel
    device: DeviceDescription
    window: frozenset[int]
    why_no_window: str
    layers: int
    notes: tuple[str, ...] = ()


def danger_window(raw: tuple[DecodeStep, ...], launches: Mapping[int, LaunchPlan]) -> tuple[frozenset[int], str]:
    """(steps that can wedge an unfixed build, why there is none). ``raw``: the steps as the unclamped producer makes them."""
    padded = [step for step in raw if step.danger]
    if not padded:
        return frozenset(), "no step has a padded slot with a negative length"
    wedging = {rows for rows, launch in launches.items() if launch.wedges_on_negative_length}
    window = frozenset(step.index for step in padded if step.graph_rows in wedging)
    if window:
        return window, ""
    launch = launches.get(padded[0].graph_rows)
    if launch is None or launch.path != "persistent":
        return window, f"{padded[0].graph_rows} rows are taken by another kernel"
    if launch.ctas_per_group < 2:
        sizes = ", ".join(str(rows) for rows in sorted({step.graph_rows for step in padded}))
        return window, f"padded steps have {sizes} rows, where one CTA holds a row of {launch.stride}: nobody waits for a peer"
    return window, f"peers stay: max_seq_len {launch.max_seq_len} allows long rows"


def prepare_drain(
    plan: DrainPlan,
    ground: str,
    chosen: ChosenKernel,
    device: DeviceDescription,
    *,
    producer: Producer = "raw",
    ordinal: int = 0,
    step_timeout_s: float = 10.0,
    options: Mapping[str, Any] | None = None,
) -> PreparedRun:
    """Steps, the frozen launch of each captured size, and the danger window.

    Steps whose batch another kernel takes (more rows than this one is used for) stay in, so that step numbers are those of the
    plan; a ground launches nothing for them, and a note says so. PlanError for a plan that makes no sense.
    """
    raw = decode_steps(plan, "raw", sm=device.sm)
    steps = raw if producer == "raw" else decode_steps(plan, producer, sm=device.sm)
    image = chosen.image
    launches = {
        rows: plan_launch(
            rows,
            plan.width,
            plan.width,
            plan.top_k,
            device,
            release_profile=chosen.release,
            registers=image.registers,
            static_smem=image.static_smem,
        )
        for rows in sorted({step.graph_rows for step in steps})
    }
    notes = [
        f"steps of {rows} rows: " + (launch.refusal or f"the {launch.path} kernel takes them, without a barrier; nothing is run")
        for rows, launch in launches.items()
        if launch.path != "persistent"
    ]
    window, why = danger_window(raw, launches)
    layers = plan.layers_on(ground)
    request = GroundRequest(
        plan=plan,
        steps=steps,
        kernel=image,
        launches=launches,
        device=ordinal,
        seed=plan.seed,
        step_timeout_s=step_timeout_s,
        options={"ground": ground, "layers": layers, **(options or {})},
    )
    return PreparedRun(request, chosen, device, window, why, layers, tuple(notes))
