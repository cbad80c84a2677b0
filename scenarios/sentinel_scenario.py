"""A caller's index workspace without its -1 sentinel: old memory is left where it is read as KV indices (vLLM #55299)."""

from __future__ import annotations

from .launches import IndexWorkspace, Row
from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

_OLD = IndexWorkspace(0x7F7F7F7F)
_OWN = IndexWorkspace(None)

SCENARIO = Scenario(
    name="sentinel",
    title="An index workspace is not filled with -1: old memory is read as KV indices (vLLM #55299)",
    class_="gpu-fault",
    cause="illegal-access",
    signature="vllm-55299",
    grounds={"cpu": "the release's own function and kernel, executed over NumPy: old memory behind the valid prefix of each row"},
    story=(
        "producer: only the valid prefix of each row of the prefill index workspace is written; the rest is whatever was there. A "
        "tensor that the function makes itself is filled with -1 first, one that the caller gives is not (0.27.1 to 0.29.0).",
        "consumer: the sparse kernel reads a whole row and skips -1. Old memory is not -1: it is taken for a KV position.",
        "fault: the position lies outside the cache: an illegal access, Xid 31 or 13, the context is lost.",
    ),
    fixes=(Fix("caller", "fill the workspace with -1 before each use", ("--kernel", "vllm==0.30.0"), "vLLM #55299 (0.30.0)"),),
    upstream=("vllm#55299",),
    example="dsv4-repro run sentinel --on cpu",
    rows=(
        Row("old-memory-0.29.0", _OLD, "wrong-result", "a workspace that was used before", None, "vllm==0.29.0"),
        Row("old-memory-0.27.1", _OLD, "wrong-result", "an earlier release with the defect", None, "vllm==0.27.1"),
        Row("filled-0.30.0", _OLD, "not-hung", "the first release with the repair", None, "vllm==0.30.0", fixed=True),
        Row(
            "own-tensor-0.29.0", _OWN, "not-hung", "no workspace is given: filled by the function", None, "vllm==0.29.0", fixed=True
        ),
    ),
    distinguishes=(
        "entries behind each row's valid prefix hold what the workspace held before; on a GPU the device records an exception",
    ),
    not_reproduced=(
        (
            "the illegal access in FlashMLA (benchmarks/sentinel_gpu.py reads the rows with a kernel of ours)",
            "the sparse attention kernel with torch on a GPU, VLLM_BATCH_INVARIANT=1 and PIECEWISE graphs",
        ),
    ),
)
