"""A rank spins in an all-reduce over peer memory: its peer is held by a barrier, or has not come; the held one is named."""

from __future__ import annotations

from ..kernels.topk_cases import TopKCase
from .launches import BOTH, CrossRank, Launch, Row
from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

_LENGTHS = (16000, 16001, 12000, 12001, 9000, 9001)
_HELD = Launch(TopKCase("drained", 512, 4, (*_LENGTHS, -1, 0), 16384, 16384, 2, 8, 8192))
_BARRIER, _CROSS = "gpu-spin-barrier", "gpu-crossrank-spin"

SCENARIO = Scenario(
    name="crossrank",
    title="One rank waits for another in an all-reduce: the rank that is held is the culprit, not the one that spins",
    class_=_CROSS,
    cause="peer-behind",
    signature=None,
    grounds={
        "cpu": "two grids over one memory: rank 1 polls rank 0's word, which rank 0 never publishes",
        "gpu": "two GPUs: own kernels over peer memory (a torch.distributed all-reduce beside a held rank: benchmarks/two_gpus.py)",
    },
    story=(
        "barrier: on rank 0 the top-k waits for ever, as in the drain; the all-reduce behind it on its stream never starts.",
        "host: rank 1's top-k, with other lengths or a repaired kernel, was done; its all-reduce runs and polls rank 0's word. "
        "Whoever looks at rank 1 alone sees a communication kernel that spins, and blames the network or the collective.",
        "device: the word that rank 1 polls is written by another GPU. The rank with a wait inside its own GPU is the one to name.",
    ),
    fixes=(
        Fix("consumer", "the length check on the held rank: both arrive", ("--fix", "guarded")),
        Fix("evidence", "read the devices of all ranks before a communication kernel is blamed"),
    ),
    upstream=("vllm#51593", "vllm#48720"),
    example="dsv4-repro run crossrank --on cpu --fix held-by-a-barrier",
    rows=(
        Row(
            "peer-has-not-come",
            CrossRank(None),
            _CROSS,
            "rank 1 polls, rank 0's GPU is idle: its host has not launched anything",
            "peer-behind",
            grounds=BOTH,
            also=((_CROSS, None),),
        ),
        Row(
            "held-by-a-barrier",
            CrossRank(_HELD),
            _BARRIER,
            "rank 0 is held by the top-k's barrier, rank 1 polls: rank 0 is named",
            "peer-left",
            "builtin:unguarded",
            grounds=BOTH,
        ),
        Row(
            "only-the-spinning-rank-read",
            CrossRank(_HELD, devices=(1,)),
            _CROSS,
            "the same, and only rank 1's GPU was read: a weaker answer, and no rank is blamed",
            None,
            "builtin:unguarded",
            grounds=BOTH,
        ),
        Row(
            "guarded",
            CrossRank(_HELD),
            "not-hung",
            "the same lengths, the repaired kernel: both ranks arrive",
            fixed=True,
            grounds=BOTH,
        ),
    ),
    distinguishes=(
        "the polled word is read at system scope, in a communication kernel: somebody outside this GPU writes it",
        "a rank whose own kernel waits inside its GPU is held; a rank that polls a peer's word waits for it",
    ),
)
