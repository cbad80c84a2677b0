"""``cooperative_topk`` of the releases that have it: a negative length, 0 .. k-1 where -1 belongs. Not reproduced here."""

from __future__ import annotations

from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

SCENARIO = Scenario(
    name="cooperative",
    title="cooperative_topk answers a negative length with indices 0 .. k-1 (releases with that kernel)",
    class_="wrong-result",
    cause="padding",
    signature=None,
    grounds={},
    story=(
        "dispatch: from 0.24.0 some cards take cooperative_topk for small batches (up to 0.24.0 SM120 too) instead of "
        "persistent_topk.",
        "result: a padded row of negative length is filled with 0 .. k-1 where -1 belongs. No hang; nobody reads the padded row.",
    ),
    fixes=(Fix("producer", "clamp at 0: no negative length reaches it", upstream="vLLM #51538 (0.28.0)"),),
    upstream=("vllm#43008", "vllm#47164"),
    example="dsv4-repro show cooperative",
    distinguishes=("wrong rows are exactly those of length <= 0",),
    not_reproduced=(
        (
            "the kernel itself",
            "it is launched as thread-block clusters and uses distributed shared memory: cluster ranks, cluster barriers and "
            "DSMEM addresses in the interpreter; or on an SM90 or later GPU the op of a release 0.24.0 or later with its torch",
        ),
    ),
)
