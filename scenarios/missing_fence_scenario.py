"""The arrival is published before the data that it announces (aiter #4007, #4841; flashinfer #4131)."""

from __future__ import annotations

from .launches import BOTH, Launch, Row, SamplerLaunch, long_row
from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

_FOUR = long_row("one row, four CTAs", 4, 40000)
_WIDE = long_row("widened", 4, 65536)
_SPIN = "gpu-spin-barrier"

SCENARIO = Scenario(
    name="missing-fence",
    title="An arrival is seen before the data it announces (aiter #4007, #4841; flashinfer #4131)",
    class_=_SPIN,
    cause="missing-fence",
    signature="aiter-4007",
    grounds={
        "gpu": "wrong results with the arrival 5 us ahead of the data; without the delay rare or never (counted, not claimed)",
        "cpu": "with weak memory order, or with the early arrival, members choose different pivots and leave at different phases",
    },
    story=(
        "barrier: a CTA adds its counts to the group's histogram, then its arrival to the counter.",
        "disagreement: without a fence, or before all its warps have come, the arrival can be seen first. Members that go on read "
        "an incomplete histogram and choose another bin than those that come later.",
        "barrier: where rounds end as soon as a bin is taken whole, members then leave at different phases: the last ones wait for "
        "arrivals that those who left will not make. Where nobody leaves early it is a wrong answer without a hang.",
    ),
    fixes=(
        Fix("consumer", "converge the CTA and fence before the arrival", upstream="aiter #4841, flashinfer #4131, #5251 (0.7.1)"),
    ),
    upstream=("aiter#4007", "aiter#4841", "flashinfer#4131", "flashinfer#5251"),
    example="dsv4-repro run missing-fence --on cpu",
    rows=(
        Row(
            "no-fence",
            Launch(_FOUR, schedule="priority", schedules=40, early_exit=True, weak=True),
            _SPIN,
            "only the fence is missing: additions to the histogram may be seen after the arrival",
            "missing-fence",
            "builtin:missing-fence",
            also=(("wrong-result", None),),
        ),
        Row(
            "fence-weak",
            Launch(_FOUR, schedule="priority", schedules=4, early_exit=True, weak=True),
            "not-hung",
            "the same weak memory order, with the fence",
            None,
            "builtin:early-exit",
            fixed=True,
        ),
        Row(
            "no-fence-on-silicon",
            Launch(_FOUR, early_exit=True),
            "not-hung",
            "only the fence is missing, as silicon runs it: 0 of 200 launches on an H200 hung or were wrong",
            None,
            "builtin:missing-fence",
            fixed=True,
            grounds=("gpu",),
        ),
        Row(
            "early-arrival",
            Launch(_FOUR, schedule="priority", schedules=60, early_exit=True),
            _SPIN,
            "thread 0 arrives before its CTA has converged",
            "missing-fence",
            "builtin:early-arrival",
            also=(("wrong-result", None),),
        ),
        Row(
            "early-arrival-widened",
            Launch(_WIDE, early_exit=True),
            "wrong-result",
            "the data come 5 us after the arrival, so that a real device shows it",
            None,
            "builtin:early-arrival,widen_us=5",
            grounds=("gpu",),
            also=((_SPIN, "missing-fence"),),
        ),
        Row(
            "fenced",
            Launch(_FOUR, schedule="priority", schedules=4, early_exit=True),
            "not-hung",
            "the same early end of rounds, with convergence and fence",
            None,
            "builtin:early-exit",
            fixed=True,
            grounds=BOTH,
        ),
        Row(
            "flashinfer-before",
            SamplerLaunch(schedules=48),
            "wrong-result",
            "FlashInfer's own kernel of the sampler, the last release before #5251: its source, compiled here",
            None,
            "flashinfer==0.7.0.post1",
        ),
        Row(
            "flashinfer-after",
            SamplerLaunch(),
            "not-hung",
            "the first release with #5251: every CTA converges before its arrival is published",
            None,
            "flashinfer==0.7.1",
            fixed=True,
        ),
    ),
    distinguishes=(
        "members that are gone had arrived before they left: the counter exceeds the waiting members' arrivals and misses "
        "the target",
        "no fence (or no convergence) stands before the arrival in the machine code",
    ),
    not_reproduced=(
        (
            "on silicon, an arrival that overtakes its data in the memory system (only the fence missing)",
            "0 wrong and 0 hung in 200 launches on an H200; more launches, another card, or load on its memory. Interpreted, "
            "with weak memory order, it hangs",
        ),
    ),
)
