"""At which live counts of a drain an unfixed server can wedge: steps, launches and release of a plan put together. Pure.

A window is a live count whose rows are padded to a FULL graph and whose launch lets peers leave while a leader waits for them. It
says nothing about the producer: without MTP, with the guard or on a fixed release no length is negative there, and such a drain
through the same window is the control.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import PlanError
from ...kernels.plan import DEFAULT_PROFILE, DeviceDescription, LaunchPlan, device_for_sm, plan_launch
from ...kernels.release_profiles import ReleaseProfile, release_profile
from ...scenarios.drain import DrainPlan
from ...scenarios.drain_steps import DecodeStep, decode_steps
from .engine_flags import EngineFacts

if TYPE_CHECKING:
    from .steering import WindowCount

__all__ = ["DrainWindows", "drain_windows", "reached_windows", "takes_cooperative"]

#: Where the server's card is not known: the two ends of the table of cards, and what holds on both.
_ANY_CARD = (90, 120)


@dataclass(frozen=True)
class DrainWindows:
    """``steps``: one for each live count of the drain, falling. ``counts``: those at which an unfixed build can wedge.

    ``why_not``: why there are none. ``notes``: what was assumed. ``launches``: by graph rows, for the device that is known.
    """

    steps: tuple[DecodeStep, ...]
    counts: tuple[int, ...] = ()
    why_not: str = ""
    notes: tuple[str, ...] = ()
    launches: Mapping[int, LaunchPlan] = field(default_factory=dict)

    def step_of(self, live: int | None) -> DecodeStep | None:
        """The step of a live count; None if the drain does not pass it."""
        return next((step for step in self.steps if step.live_requests == live), None)


def takes_cooperative(profile: ReleaseProfile, sm: int, rows: int) -> bool:
    """Whether a release's dispatch prefers ``cooperative_topk`` here for so many rows (no barrier at a counter in memory)."""
    if not profile.cooperative or sm < 90 or ("except sm_120" in profile.cooperative and sm in (120, 121)):
        return False
    most = re.search(r"at most (\d+) rows", profile.cooperative)
    return most is None or rows <= int(most[1])


def _steps(plan: DrainPlan, sm: int | None) -> tuple[DecodeStep, ...]:
    """The first step at each live count, falling."""
    first: dict[int, DecodeStep] = {}
    turns = -(-plan.requests // plan.max_num_seqs)
    try:  # the load goes on until all have ended, however few steps the plan gives the other grounds
        longer = plan.replace(steps=max(plan.steps, (plan.output[1] + 2) * turns))
    except PlanError:
        longer = plan
    for step in decode_steps(longer, "raw", sm=sm):
        first.setdefault(step.live_requests, step)
    return tuple(first[live] for live in sorted(first, reverse=True))


def drain_windows(
    plan: DrainPlan, facts: EngineFacts, *, device: DeviceDescription | None = None, release: str | None = None
) -> DrainWindows:
    """``device`` None: the card is not known; ``release`` None: the server's release is not known. PlanError."""
    steps = _steps(plan, device.sm if device is not None else None)
    if plan.dp > 1:
        raise PlanError(f"dp = {plan.dp}: the server ground drives one engine", help_text="Leave out --dp")
    if not facts.full_graphs:
        return DrainWindows(steps, why_not=facts.why_not_full)
    padded = [step for step in steps if step.padded_requests and not step.eager]
    if not padded:
        return DrainWindows(steps, why_not="no live count of this drain is padded to a larger graph")
    profile = release_profile(release or DEFAULT_PROFILE)
    notes = []
    if release is None:
        notes.append(f"the server's release is not known: launches are computed as of vLLM {DEFAULT_PROFILE}")
    if device is None:
        notes.append("the server's card is not known: only windows that hold on every card of the table count")
    cards = [device] if device is not None else [device_for_sm(sm) for sm in _ANY_CARD]
    limit = plan.max_model_len if release is not None and profile.caller_max_seq_len == "batch" else plan.width
    counts: set[int] | None = None
    launches: dict[int, LaunchPlan] = {}
    cooperative = False
    for card in cards:
        launches = {
            rows: plan_launch(rows, plan.width, limit, plan.top_k, card, release_profile=profile)
            for rows in sorted({step.graph_rows for step in steps})
        }
        here = set()
        for step in padded:
            other = release is not None and takes_cooperative(profile, card.sm, step.graph_rows)
            cooperative = cooperative or other
            if launches[step.graph_rows].wedges_on_negative_length and not other:
                here.add(step.live_requests)
        counts = here if counts is None else counts & here
    found = tuple(sorted(counts or (), reverse=True))
    why = "" if found else _why_not(padded, launches, limit, profile, cooperative=cooperative)
    return DrainWindows(steps, found, why, tuple(notes), launches if device is not None else {})


def _why_not(
    padded: Sequence[DecodeStep], launches: Mapping[int, LaunchPlan], limit: int, profile: ReleaseProfile, *, cooperative: bool
) -> str:
    if cooperative:
        return f"this release takes cooperative_topk there ({profile.cooperative}): no leader waits at a counter"
    launch = launches[padded[-1].graph_rows]
    if not launch.peers_leave:
        return f"peers stay: this release passes max_seq_len {limit}, which allows long rows (--max-model-len decides)"
    sizes = ", ".join(str(rows) for rows in sorted({step.graph_rows for step in padded}))
    return f"padded batches have {sizes} rows, where one CTA holds a row of {launch.stride}: nobody waits for a peer"


def reached_windows(windows: Sequence[WindowCount], counts: Sequence[int]) -> list[WindowCount]:
    """Of what the load saw, the windows at which an unfixed build can wedge, surest first."""
    order = {"measured": 0, "computed": 1}
    found = [one for one in windows if one.reached and one.aim.live in counts and one.aim.padded_requests]
    return sorted(found, key=lambda one: (order.get(one.how, 2), one.aim.live))
