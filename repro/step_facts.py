"""A decode step of a plan as the causal chain wants it: everything computed here, nothing measured on a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..forensics.chain import StepFacts

if TYPE_CHECKING:
    from ..kernels.plan import LaunchPlan
    from ..scenarios.drain import DrainPlan
    from ..scenarios.drain_steps import DecodeStep
    from .prepare import PreparedRun

__all__ = ["computed_step", "step_facts"]


def computed_step(step: DecodeStep, plan: DrainPlan | None, launches: Mapping[int, LaunchPlan]) -> StepFacts:
    """The step as the plan computes it; ``origin`` is ``computed``. No lengths: a server's requests have their own.

    ``plan``: None where a load is sent whose plan is not known. ``launches``: by graph rows, those that are known.
    """
    launch = launches.get(step.graph_rows)
    return StepFacts(
        live_requests=step.live_requests,
        next_n=step.next_n,
        rows=step.rows,
        graph_rows=step.graph_rows,
        padded_requests=step.padded_requests,
        query_start_loc=step.query_start_loc,
        compress=plan.compress if plan is not None else None,
        producer=step.path,
        max_model_len=plan.max_model_len if plan is not None else None,
        width=plan.width if plan is not None else None,
        max_seq_len=launch.max_seq_len if launch is not None else None,
        origin="computed",
    )


def step_facts(step: DecodeStep, plan: DrainPlan, prepared: PreparedRun) -> StepFacts:
    """With the lengths that were launched: in tokens as the producer made them, in candidates as the kernel reads them."""
    computed = computed_step(step, plan, prepared.request.launches)
    return replace(computed, seq_lens=step.seq_lens, expanded=step.expanded, lengths=step.lengths)
