"""The defining case, vLLM #51593: a draining MTP batch, a padding slot, a length of -1, a leader whose peer has left."""

from __future__ import annotations

from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

SCENARIO = Scenario(
    name="drain",
    title="A draining MTP batch wedges the persistent top-k (vLLM #51593)",
    class_="gpu-spin-barrier",
    cause="peer-left",
    signature="vllm-51593",
    grounds={
        "server": "a real vLLM server stops answering when three requests are left",
        "gpu": "the unguarded kernel never retires at the first step with three live requests",
        "cpu": "the same machine code, interpreted, is proved to wait for ever",
    },
    story=(
        "drain: requests of one wave end at different times; at some step three are left.",
        "mtp: with one speculative token each request has two query positions: 3 x 2 = 6 rows.",
        "graph-padding: only captured CUDA graph sizes can be replayed; 6 rows are padded to 8, a fourth slot with no request.",
        "producer: context lengths are L - next_n + 1 + [0 .. next_n-1]; the padding slot, L = 0, gives [-1, 0]. A context length "
        "cannot be negative.",
        "compression: the indexer divides lengths by 4, rounding down: -1 stays -1.",
        "dispatch: on SM120 the cooperative top-k is ruled out, so the persistent one runs.",
        "disagreement: peers decide from the host's maximum that no row is long, and leave; the leader reads -1 into an unsigned "
        "word, takes the row for a long one and enters the multi-CTA path.",
        "barrier: the leader adds 1 to arrival_counter and waits for it to reach the group's size. Counter 1, target 2, for ever.",
        "host: the kernel never retires, the output copy never completes, the engine reports the broadcast timeout and dies; what "
        "the log names is the last victim.",
    ),
    fixes=(
        Fix(
            layer="producer",
            text="clamp the expanded lengths at 0: [-1, 0] becomes [0, 0], [L-1, L] does not change",
            flags=("--producer", "clamped"),
            upstream="vLLM #51538 (first in 0.28.0)",
        ),
        Fix(
            layer="consumer",
            text="keep the length signed until it is known not to be negative, then bound it by min(stride, max_seq_len); clamping "
            "after the conversion to unsigned is too late",
            flags=("--kernel", "vllm==0.28.0"),
            upstream="vLLM #51538 (first in 0.28.0)",
        ),
    ),
    upstream=("vllm#51593", "vllm#51538"),
    example="dsv4-repro run drain",
    notes=(
        "Either fix alone ends this hang (dsv4-repro verify drain). With the producer fixed nothing negative reaches the kernel, "
        "so only a run with the consumer's alone says anything about the guard.",
    ),
)
