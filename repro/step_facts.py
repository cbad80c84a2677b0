"""A decode step of a plan as the causal chain wants it: everything computed here, nothing measured on a server."""

from __future__ import annotations

from ..forensics.chain import StepFacts
from ..scenarios.drain import DecodeStep, DrainPlan
from .prepare import PreparedRun

__all__ = ["step_facts"]


def step_facts(step: DecodeStep, plan: DrainPlan, prepared: PreparedRun) -> StepFacts:
    """Lengths in tokens as the producer made them and in candidates as the kernel reads them; ``origin`` is ``computed``."""
    launch = prepared.request.launches.get(step.graph_rows)
    return StepFacts(
        live_requests=step.live_requests,
        next_n=step.next_n,
        rows=step.rows,
        graph_rows=step.graph_rows,
        padded_requests=step.padded_requests,
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        expanded=step.expanded,
        lengths=step.lengths,
        compress=plan.compress,
        producer=step.path,
        max_model_len=plan.max_model_len,
        width=plan.width,
        max_seq_len=launch.max_seq_len if launch is not None else None,
        origin="computed",
    )
