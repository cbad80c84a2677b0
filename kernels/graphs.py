"""Which CUDA graph sizes a server captures for decode, and how a batch is padded to one of them.

Source: vLLM 0.27.1 ``config/vllm.py`` (``_set_cudagraph_sizes``), ``config/compilation.py``
(``adjust_cudagraph_sizes_for_spec_decode``) and ``v1/cudagraph_dispatcher.py``: 1, 2, 4, then multiples of 8 below 256, then of 16,
up to min(2 * max_num_seqs * next_n, 512); every size is rounded up to a multiple of next_n and dropped where that exceeds the
largest; FULL decode graphs are those of next_n to max_num_seqs * next_n tokens. A batch is padded to the next captured size.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["decode_graph_sizes", "default_capture_sizes", "pad_to_graph"]


def default_capture_sizes(max_num_seqs: int, next_n: int) -> tuple[int, ...]:
    """vLLM's default capture list, in tokens, before it is adjusted for speculative decoding."""
    largest = min(max_num_seqs * next_n * 2, 512)
    sizes = {size for size in (1, 2, 4) if size <= largest}
    sizes.update(range(8, min(largest + 1, 256), 8))
    sizes.update(range(256, largest + 1, 16))
    return tuple(sorted(sizes))


def decode_graph_sizes(max_num_seqs: int, next_n: int, capture_sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Rows (tokens) of the FULL decode graphs, ascending. ``capture_sizes``: as configured, None for vLLM's default list.

    Empty if no configured size gives a FULL decode graph: every batch is then launched as it is.
    """
    configured = default_capture_sizes(max_num_seqs, next_n) if capture_sizes is None else tuple(sorted(set(capture_sizes)))
    if not configured:
        return ()
    largest = configured[-1]
    rounded = {-(-size // next_n) * next_n for size in configured}
    kept = {size for size in rounded if size <= largest}
    if not kept and next_n <= largest:
        kept = {next_n}
    return tuple(sorted(size for size in kept if next_n <= size <= max_num_seqs * next_n))


def pad_to_graph(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest captured size that holds ``rows``; None if none does (the batch runs eagerly, unpadded)."""
    return min((size for size in sizes if size >= rows), default=None)
