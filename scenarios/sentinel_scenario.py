"""A caller's index workspace without its -1 sentinel: old memory read as indices (#55299). Not reproduced here."""

from __future__ import annotations

from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

SCENARIO = Scenario(
    name="sentinel",
    title="An index workspace is not filled with -1: old memory is read as KV indices (vLLM #55299)",
    class_="gpu-fault",
    cause="illegal-access",
    signature="vllm-55299",
    grounds={},
    story=(
        "producer: only the valid prefix of each row of the prefill index workspace is written; the rest is whatever was there.",
        "consumer: the sparse kernel reads a whole row and skips -1. Old memory is not -1: it is taken for a KV position.",
        "fault: the position lies outside the cache: an illegal access, Xid 31 or 13, the context is lost.",
    ),
    fixes=(Fix("caller", "fill the workspace with -1 before each use", upstream="vLLM #55299"),),
    upstream=("vllm#55299",),
    example="dsv4-repro show sentinel",
    distinguishes=("the device records an exception; nobody waits at a barrier",),
    not_reproduced=(
        (
            "the shipped function before and after the fix",
            "its Python needs torch tensors of a real workspace and the sparse attention kernel behind it (FlashMLA) to read them: "
            "a GPU with torch and both releases, VLLM_BATCH_INVARIANT=1 and PIECEWISE graphs",
        ),
    ),
)
