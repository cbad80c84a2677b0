"""The other defects that vLLM #51538 repaired, and two that were seen beside them: a row each, none reproduced here."""

from __future__ import annotations

from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

SCENARIO = Scenario(
    name="others-51538",
    title="What else vLLM #51538 repaired: five defects beside the drain's, each with what showing it would take",
    class_="unknown",
    cause=None,
    signature=None,
    grounds={},
    story=(
        "swa-width: the index width of a non-causal draft's sliding window is taken as window_size: a crash on a reshape.",
        "shared-workspace: two captured graphs share one view of a workspace: a replay overwrites what the other has not read.",
        "null-block: sample_idx_mapping is zero-filled, so capture's padding rows scatter into request slot 0, and draft KV is "
        "written into block 0, the null block: Xid 31.",
        "swiglu: the SwiGLU constants of one model are given to every mxfp4 model: wrong numbers, no error.",
        "instances: a FlashInfer build without the needed (heads, top_k) instance fails at the first decode instead of at start.",
    ),
    fixes=(Fix("release", "all five are repaired by the same change", upstream="vLLM #51538 (0.28.0)"),),
    upstream=("vllm#51538", "vllm#51042", "flashinfer#4380"),
    example="dsv4-repro show others-51538",
    notes=(
        "That illegal lengths trigger the histogram ring is a row of its own: dsv4-repro run histogram-ring.",
        "instances, before anything is started: dsv4-repro doctor --model DIR --tp N --draft K --flashinfer 0.6.17",
    ),
    not_reproduced=(
        ("SWA index width of non-causal drafts", "the shipped metadata builder of 0.27.1 and 0.28.0 with torch, and a DSpark "
        "draft config"),
        ("two captured graphs sharing one workspace view", "torch with CUDA graphs on a GPU and the workspace manager of "
        "both releases"),
        (
            "sample_idx_mapping zero-filled, draft KV in the null block",
            "the V2 model runner's input preparation of both releases with torch; the Xid needs a GPU and a model",
        ),
        ("SwiGLU constants given to every mxfp4 model", "the mxfp4 MoE backend of both releases with torch, and weights of a "
        "second model"),
        (
            "the failing first decode of a missing (heads, top_k) instance (doctor --model says beforehand that it is missing)",
            "FlashInfer, torch and an SM120 card",
        ),
        (
            "captured outputs freed before a replay reads them (seen beside them)",
            "torch with CUDA graphs on a GPU: an output of the captured pool whose last reference goes before the replay, and both "
            "releases' runners; what is read then depends on who was given the memory since",
        ),
        (
            "draft sampling that shares random-number counters with the sampler (seen beside them)",
            "both releases' samplers with torch and Triton, and enough samples of draft and target for a test of independence",
        ),
    ),
)  # fmt: skip
