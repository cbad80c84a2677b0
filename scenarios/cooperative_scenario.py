"""``cooperative_topk`` of the releases that have it: a negative length gives indices 0 .. k-1 where -1 belongs. A wrong answer."""

from __future__ import annotations

from .launches import BOTH, CooperativeLaunch, Row
from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

_DRAINED = CooperativeLaunch((500, 501, 400, 401, 300, 301, -1, 0))
_CLAMPED = CooperativeLaunch((500, 501, 400, 401, 300, 301, 0, 0))
_WRONG = "wrong-result"

SCENARIO = Scenario(
    name="cooperative",
    title="cooperative_topk answers a negative length with indices 0 .. k-1 (releases with that kernel)",
    class_=_WRONG,
    cause="padding",
    signature=None,
    grounds={
        "cpu": "the padded row of the releases before 0.28.0 holds 0 .. k-1; the shipped sm_90 code is interpreted",
        "gpu": "the same, on a card of sm_90 or sm_100",
    },
    story=(
        "dispatch: from 0.24.0 some cards take cooperative_topk for small batches (up to 0.24.0 SM120 too) instead of "
        "persistent_topk.",
        "consumer: a row of at most k candidates is done by one CTA. The length is compared as an int, so -1 is short, and then "
        "filled as a uint32: every index up to k is below 4294967295.",
        "result: a padded row of negative length is filled with 0 .. k-1 where -1 belongs. No hang; nobody reads the padded row, "
        "unless a later kernel trusts the -1.",
    ),
    fixes=(
        Fix("consumer", "clamp the length at 0 first", ("--kernel", "vllm==0.28.0"), "vLLM #51538 (0.28.0)"),
        Fix("producer", "clamp at 0: no negative length reaches it", upstream="vLLM #51538 (0.28.0)"),
    ),
    upstream=("vllm#43008", "vllm#47164", "vllm#51538"),
    example="dsv4-repro run cooperative --on cpu",
    rows=(
        Row("negative-length-0.26.0", _DRAINED, _WRONG, "a padded slot of length -1", "padding", "vllm==0.26.0", grounds=BOTH),
        Row(
            "negative-length-0.27.1",
            _DRAINED,
            _WRONG,
            "the last release before the repair",
            "padding",
            "vllm==0.27.1",
            grounds=BOTH,
        ),
        Row("clamped-in-the-kernel-0.28.0", _DRAINED, "not-hung", "the first release with it", None, "vllm==0.28.0", True, BOTH),
        Row("clamped-by-the-producer-0.26.0", _CLAMPED, "not-hung", "nothing negative", None, "vllm==0.26.0", True, BOTH),
    ),
    distinguishes=("wrong rows are exactly those of length < 0, and hold 0 .. k-1 in order",),
    notes=(
        "Only rows of at most k candidates: longer ones use clusters and distributed shared memory, which are not interpreted.",
    ),
)
