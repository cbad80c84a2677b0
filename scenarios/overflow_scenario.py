"""Candidate buffers overflow when very many values share one half-precision bin (#51782, #52149, #55314). A wrong answer."""

from __future__ import annotations

from ..kernels.topk_cases import TopKCase
from .launches import BOTH, Launch, Row
from .registry import Fix, Scenario

__all__ = ["SCENARIO"]


def _alone(data: str, length: int = 16384) -> Launch:
    stride = -(-length // 4) * 4
    return Launch(TopKCase(f"{data} {length}", 512, 4, (length,) * 2, stride, stride, 1, 2, stride, (data,)))


SCENARIO = Scenario(
    name="overflow",
    title="Very many values in one fp16 bin overflow the candidate buffers (vLLM #51782, #52149, #55314)",
    class_="wrong-result",
    cause="overflow",
    signature="vllm-51782",
    grounds={
        "gpu": "releases before the repair select wrong elements, silently (seen with 0.27.1 on an H200)",
        "cpu": "the same wrong elements from the same machine code",
    },
    story=(
        "consumer: rows that one CTA does alone are first sorted into bins by the upper 11 bits of their values' half precision "
        "(rows up to 8192) or the upper 8 (longer ones: 8 to 10 is one bin); the values of the bin "
        "in which the k-th falls are copied into a buffer of some thousand entries.",
        "disagreement: the buffer (3708 or 4096 entries) is smaller than a bin can be. Values 1000 to 1000.01, subnormals, +-1e38 "
        "share one bin; so do half of all values of mean 8 and deviation 1 in a long row.",
        "result: what does not fit is dropped; smaller values are selected in its place. Nothing hangs, no error.",
        "padding: a row of 513 values, -inf among them, can give an index beyond its length: the padding of the last vector "
        "is -inf "
        "too.",
    ),
    fixes=(Fix("consumer", "recover from an overflow by another pass", ("--kernel", "vllm==0.33.0"), "first in vLLM 0.33.0"),),
    upstream=("vllm#51782", "vllm#52149", "vllm#55314"),
    example="dsv4-repro run overflow --on cpu",
    rows=(
        Row("dense-0.27.1", _alone("dense"), "wrong-result", "values 1000 to 1000.01", "overflow", "vllm==0.27.1", grounds=BOTH),
        Row(
            "dense-0.33.0",
            _alone("dense"),
            "not-hung",
            "the same values, repaired",
            None,
            "vllm==0.33.0",
            fixed=True,
            grounds=BOTH,
        ),
        Row(
            "dense-0.32.0",
            _alone("dense"),
            "wrong-result",
            "the last release before the repair",
            "overflow",
            "vllm==0.32.0",
            grounds=BOTH,
        ),
        Row("subnormal-0.27.1", _alone("denormal"), "wrong-result", "subnormal values", "overflow", "vllm==0.27.1", grounds=BOTH),
        Row(
            "normal-0.27.1",
            _alone("normal"),
            "not-hung",
            "plain normal values: no bin is that full",
            None,
            "vllm==0.27.1",
            fixed=True,
            grounds=BOTH,
        ),
        Row(
            "minus-inf-513-0.27.1",
            Launch(TopKCase("inf513", 512, 4, (513,), 516, 516, 1, 1, 516, ("infinities",), 0)),
            "wrong-result",
            "a row of 513 with -inf among its values: indices beyond its length",
            "padding",
            "vllm==0.27.1",
            grounds=BOTH,
        ),
        Row("dense-builtin", _alone("dense"), "not-hung", "the kernel written here keeps no such buffer", fixed=True, grounds=BOTH),
    ),
    distinguishes=("wrong rows are done by one CTA alone, and thousands of their values share the fp16 bin of the k-th",),
)
