"""A drain with five draft tokens (DSpark), beside plain decode and MTP: which producer makes the lengths, and what it makes."""

from __future__ import annotations

from .launches import DrainBatches, Row
from .registry import Fix, Scenario

__all__ = ["SCENARIO"]


def _drain(mtp: int, **more: object) -> dict[str, object]:
    return {"mtp": mtp, **more}


SCENARIO = Scenario(
    name="dspark",
    title="A drain with a draft of five tokens: no negative length arises outside the SM100 family",
    class_="not-hung",
    cause=None,
    signature=None,
    grounds={"cpu": "the lengths of every step of the drain, computed; nothing negative for K = 5 on SM120 and Hopper"},
    story=(
        "mtp: with five drafts a request carries next_n = 6 query tokens; captured sizes are rounded up to multiples of 6.",
        "producer: three or more query tokens are flattened outside the SM100 family: a padded slot has no tokens, so the "
        "variable-length path makes no row of its own for it.",
        "native: one draft (next_n = 2) takes the native path, which expands every slot, padded ones too: there -1 arises.",
    ),
    fixes=(Fix("producer", "clamp at 0 on the native and the uniform path", ("--producer", "clamped"), "vLLM #51538 (0.28.0)"),),
    upstream=("vllm#51538", "vllm#51593"),
    example="dsv4-repro run dspark --on cpu",
    rows=(
        Row("K5-sm120", DrainBatches(_drain(5), sm=120), "not-hung", "five drafts on SM120: flattened, variable", fixed=True),
        Row("K5-sm90", DrainBatches(_drain(5), sm=90), "not-hung", "five drafts on Hopper", fixed=True),
        Row(
            "K5-sm100",
            DrainBatches(_drain(5), sm=100),
            "unknown",
            "five drafts where the native path takes any next_n: lengths below 0 are computed, nothing was run",
        ),
        Row(
            "plain-sm120", DrainBatches(_drain(0), sm=120), "not-hung", "plain decode: the formula is the length itself", fixed=True
        ),
        Row("mtp1-sm120", DrainBatches(_drain(1), sm=120), "unknown", "one draft, native path: the defining case's -1"),
        Row("mtp1-clamped", DrainBatches(_drain(1), "clamped", 120), "not-hung", "one draft, clamped", fixed=True),
        Row(
            "K5-sm120-clamped",
            DrainBatches(_drain(5), "clamped", 120),
            "not-hung",
            "five drafts on SM120 with the clamp: uniform and variable, the same lengths as without",
            fixed=True,
        ),
        Row(
            "mtp2-sm120",
            DrainBatches(_drain(2), sm=120),
            "not-hung",
            "two drafts on SM120: flattened; many padded steps, all of them variable",
            fixed=True,
        ),
        Row("K5-sm100-clamped", DrainBatches(_drain(5), "clamped", 100), "not-hung", "five drafts, native, clamped", fixed=True),
    ),
    distinguishes=("the producer's path: native, uniform or variable, each raw or clamped: all six arise in these rows",),
    notes=(
        "A computed length is no observation: rows with negative lengths say so and leave the class unknown; run drain runs them.",
    ),
)
