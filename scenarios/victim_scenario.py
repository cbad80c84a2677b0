"""A healthy kernel queued behind the wedged one: host frames name the victim, the device names the culprit (flashinfer #5015)."""

from __future__ import annotations

from ..kernels.topk_cases import TopKCase
from .launches import Launch, Row
from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

_DRAINED = TopKCase("drained", 512, 4, (16000, 16001, 12000, 12001, 9000, 9001, -1, 0), 16384, 16384, 2, 8, 8192)
_HEALTHY = TopKCase("drained, clamped", 512, 4, (16000, 16001, 12000, 12001, 9000, 9001, 0, 0), 16384, 16384, 2, 8, 8192)
_VICTIM = "sparse_mla_decode_kernel"

SCENARIO = Scenario(
    name="victim",
    title="The launch queued behind the wedged kernel is blamed (flashinfer #5015)",
    class_="gpu-spin-barrier",
    cause="peer-left",
    signature="vllm-51593",
    grounds={
        "gpu": "a second kernel on the same stream never starts, one on another stream completes; the wedged one is named",
        "cpu": "a device state with the wedged launch and a queued one without CTAs, and a host sentence that names the queued one",
    },
    story=(
        "barrier: the top-k waits for ever, as in the drain.",
        "host: the next launch on the stream, here a sparse attention kernel, is queued. Host stacks, logs and profilers name the "
        "call that does not return: the victim.",
        "device: the victim has no CTA on any SM; the one grid with resident, waiting CTAs is the culprit.",
    ),
    fixes=(Fix("evidence", "ask the device which grid has resident CTAs before a kernel is blamed"),),
    upstream=("flashinfer#5015", "vllm#51593"),
    example="dsv4-repro run victim --on cpu",
    rows=(
        Row(
            "queued-behind",
            Launch(_DRAINED, queued=_VICTIM),
            "gpu-spin-barrier",
            "the victim is queued on the same stream, host stacks name it",
            "peer-left",
            "builtin:unguarded",
            grounds=("cpu", "gpu"),
        ),
        Row(
            "nothing-wedged",
            Launch(_HEALTHY, queued=_VICTIM),
            "not-hung",
            "the same two launches with nothing negative",
            None,
            "builtin:unguarded",
            fixed=True,
            grounds=("cpu", "gpu"),
        ),
    ),
    distinguishes=(
        "device evidence alone: the same class, cause and kernel as the drain, for it is the same defect",
        "host evidence alone: names the victim and cannot tell; the verdict then stays without a culprit",
    ),
)
