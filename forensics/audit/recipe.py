"""The recipe: how the server is started, as far as it decides whether a vulnerable kernel wedges. Defaults are those of vLLM
#51593."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import PlanError
from ...kernels.abi import TOP_K_VALUES
from ...kernels.graphs import decode_graph_sizes, pad_to_graph

__all__ = ["GRAPH_MODES", "METHODS", "PaddedShape", "Recipe", "padded_shapes"]

METHODS = ("mtp", "none")
GRAPH_MODES = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE", "NONE")
_FULL = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@dataclass(frozen=True, slots=True)
class Recipe:
    """``capture_sizes``: in tokens, None for vLLM's default list. ``dp``: data-parallel ranks, each padded to the largest rank's
    size.

    ``method``: ``mtp``, ``none``, or another speculative method, which is not modelled. ``compress``: the indexer's compression
    ratio.
    """

    max_model_len: int = 65536
    capture_sizes: tuple[int, ...] | None = None
    method: str = "mtp"
    mtp: int = 1
    max_num_seqs: int = 16
    compress: int = 4
    dp: int = 1
    top_k: int = 512
    max_num_batched_tokens: int = 8192
    graph_mode: str = "FULL_AND_PIECEWISE"

    def __post_init__(self) -> None:
        limits = {
            "max_model_len": (2, (1 << 31) - 1), "mtp": (0, 15), "max_num_seqs": (1, 4096), "compress": (1, 65536), "dp": (1, 1024),
            "max_num_batched_tokens": (1, 1 << 20),
        }  # fmt: skip
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise PlanError(f"recipe: {name} must be {low} to {high}, got {value!r}")
        if self.top_k not in TOP_K_VALUES:
            raise PlanError(f"recipe: top_k must be one of {', '.join(map(str, TOP_K_VALUES))}, got {self.top_k}")
        if self.graph_mode not in GRAPH_MODES:
            raise PlanError(f"recipe: graph_mode must be one of {', '.join(GRAPH_MODES)}, got {self.graph_mode!r}")
        if self.method == "none" and self.mtp:
            raise PlanError("recipe: method none has no speculative tokens; give mtp 0")
        if self.max_model_len // self.compress < 1:
            raise PlanError(f"recipe: max_model_len {self.max_model_len} compressed by {self.compress} leaves rows of no width")
        for size in self.capture_sizes or ():
            if not 1 <= size <= 1 << 20:
                raise PlanError(f"recipe: capture size {size} is not 1 to {1 << 20}")
        if self.capture_sizes is not None and not 1 <= len(self.capture_sizes) <= 4096:
            raise PlanError("recipe: capture_sizes must hold 1 to 4096 sizes")

    @property
    def next_n(self) -> int:
        """Query tokens of a request in a decode step."""
        return self.mtp + 1

    @property
    def width(self) -> int:
        """Candidates of a row: the compressed maximum context length."""
        return self.max_model_len // self.compress

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Rows of the FULL decode graphs, ascending; empty where decode does not run in FULL graphs."""
        if self.graph_mode not in _FULL:
            return ()
        return decode_graph_sizes(self.max_num_seqs, self.next_n, self.capture_sizes)

    @property
    def not_modelled(self) -> str:
        """Why this recipe cannot be judged, or ""."""
        if self.method not in METHODS:
            return f"speculative method {self.method!r} is not modelled: only mtp, and none"
        if self.compress not in (1, 2, 4) and self.compress & (self.compress - 1):
            return f"compression ratio {self.compress} has no indexer in the releases known here"
        return ""

    def lines(self) -> list[str]:
        sizes = "vLLM's default list" if self.capture_sizes is None else ",".join(map(str, self.capture_sizes))
        speculation = f"{self.method} {self.mtp}" if self.mtp else "plain decode"
        graphs = ", ".join(map(str, self.graph_sizes)) or "none"
        return [
            f"recipe: max_model_len {self.max_model_len}, {speculation}, max_num_seqs {self.max_num_seqs}, "
            f"compress {self.compress} (rows of {self.width}), top_k {self.top_k}, dp {self.dp}, {self.graph_mode}, "
            f"capture sizes {sizes} (FULL decode graphs: {graphs})"
        ]


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """A decode batch of ``live`` requests on one rank, padded to ``graph_rows`` rows, and the ranks' largest count that causes it.

    ``why``: in words.
    """

    live: int
    rows: int
    graph_rows: int
    largest: int
    why: str

    @property
    def padding(self) -> int:
        return self.graph_rows - self.rows


def padded_shapes(recipe: Recipe, live_counts: Sequence[int] | None = None) -> list[PaddedShape]:
    """For each live-request count of a rank (default 0 or 1 to max_num_seqs), every graph size that it can be padded to.

    With one rank that is the next captured size. With data parallelism every rank runs the size of the largest rank, so any
    captured size
    from its own upwards is possible, and a rank may have no request at all.
    """
    sizes = recipe.graph_sizes
    shapes: list[PaddedShape] = []
    first = 0 if recipe.dp > 1 else 1
    for live in live_counts if live_counts is not None else range(first, recipe.max_num_seqs + 1):
        rows = live * recipe.next_n
        own = pad_to_graph(max(rows, 1), sizes)
        if own is None:
            shapes.append(PaddedShape(live, rows, rows, live, "no captured size holds it: launched as it is"))
            continue
        targets = [own] if recipe.dp == 1 else [size for size in sizes if size >= own]
        for size in targets:
            largest = live if size == own else size // recipe.next_n
            if size == rows:
                why = "a captured size fits exactly"
            elif size == own:
                why = f"{rows} rows run in the captured graph of {size}"
            else:
                why = f"{rows} rows run in the captured graph of {size}, because another rank has {largest} live requests"
            shapes.append(PaddedShape(live, rows, size, largest, why))
    return shapes
