"""The producer: how the indexer's metadata builder turns request lengths into one context length per row of logits.

Source: vLLM 0.27.1 ``v1/attention/backends/mla/indexer.py`` (``_prepare_decode_tensors``) and the text of vLLM #51593.

* native: ``[L - n + 1 + j for j in range(n)]`` for every request slot, n the longest query of the batch; taken by plain decode
  (where it is L itself) and by speculative decoding with next_n 2, on the SM100 family with any next_n. A padding slot with L = 0
  yields negative lengths for n >= 2: the defect.
* uniform: the same formula in a Triton kernel; next_n >= 3 elsewhere, where all queries are equally long. A padding slot has query
  length 0, so a padded batch does not come this way (it could, if padding slots carried full query lengths).
* variable: one row per query token that exists, zeros behind: a padding slot makes no row. next_n >= 3 elsewhere, otherwise.

The fix (vLLM #51538, first in 0.28.0) clamps at 0 on the native and the uniform path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

__all__ = ["Producer", "ProducerPath", "compress_lengths", "expand_lengths", "producer_path"]

Producer = Literal["raw", "clamped"]
ProducerPath = Literal["native", "uniform", "variable"]


def producer_path(decode_lens: Sequence[int], next_n: int, sm: int | None = None) -> ProducerPath:
    """The path that the builder takes. ``decode_lens``: query tokens per request slot, 0 for padding. ``sm``: e.g. 120; None stands
    for any GPU outside the SM100 family (whose paged logits kernel takes any next_n).
    """
    flattening = next_n not in (1, 2) and (sm is None or sm // 10 != 10)
    longest = max(decode_lens, default=0)
    if (not flattening and longest <= next_n) or longest <= 1:
        return "native"
    return "uniform" if min(decode_lens) == longest else "variable"


def expand_lengths(
    seq_lens: Sequence[int],
    decode_lens: Sequence[int],
    *,
    rows: int,
    path: ProducerPath,
    producer: Producer = "raw",
) -> tuple[int, ...]:
    """Context length of each row, in tokens; ``rows`` of them (what is behind the last one is 0).

    ``seq_lens``: context length of each request slot including this step's query tokens, 0 for padding.
    """
    longest = max(decode_lens, default=0)
    expanded: list[int] = []
    if path == "variable" or longest == 0:
        for length, count in zip(seq_lens, decode_lens, strict=True):
            expanded.extend(length - count + 1 + token for token in range(count))
    else:
        for length in seq_lens:
            expanded.extend(length - longest + 1 + token for token in range(longest))
        if producer == "clamped":
            expanded = [max(length, 0) for length in expanded]
    return tuple(expanded[:rows]) + (0,) * (rows - len(expanded))


def compress_lengths(expanded: Sequence[int], ratio: int) -> tuple[int, ...]:
    """Lengths in compressed KV entries: floor division, so -1 stays -1."""
    return tuple(length // ratio for length in expanded)
