"""Which counts of live requests wedge an unfixed build, for any device: padding, lengths and launch together, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PlanError
from .abi import RADIX_THRESHOLD
from .devices import DeviceDescription
from .graphs import decode_graph_sizes, pad_to_graph
from .plan import INT32_MAX, LaunchPlan, check_integer, padded_stride, plan_launch
from .producer import compress_lengths, expand_lengths, producer_path
from .release_profiles import DEFAULT_PROFILE, ReleaseProfile

__all__ = ["WedgeRow", "wedge_table", "wedging_live_requests"]


@dataclass(frozen=True, slots=True)
class WedgeRow:
    """What an unfixed build does with ``live_requests`` in flight. ``graph_rows``: rows after padding to a captured graph.

    ``negative_rows``: how many lengths are negative. ``launch`` None: no launch was planned because nothing negative reaches it.
    """

    live_requests: int
    rows: int
    graph_rows: int
    padded_requests: int
    negative_rows: int
    launch: LaunchPlan | None
    wedges: bool
    reason: str


def wedge_table(
    max_model_len: int,
    device: DeviceDescription,
    *,
    next_n: int = 2,
    capture_sizes: Sequence[int] | None = None,
    max_num_seqs: int = 16,
    compress: int = 4,
    stride_padding: int = 1,
    top_k: int = 512,
    release: str | ReleaseProfile = DEFAULT_PROFILE,
    max_seq_len: int | None = None,
    registers: int | None = None,
) -> tuple[WedgeRow, ...]:
    """For 1 to ``max_num_seqs`` live requests: does a kernel without the guard wedge, behind a producer without the clamp, and why.

    ``stride_padding``: the multiple of floats to which logits rows are padded. ``max_seq_len``: the host scalar; None takes the row
    width, as callers from 0.25.0 to 0.30.0 do. PlanError if a value is out of range.
    """
    check_integer("max_model_len", max_model_len, 1, INT32_MAX)
    check_integer("next_n", next_n, 1, 64)
    check_integer("max_num_seqs", max_num_seqs, 1, 4096)
    check_integer("compress", compress, 1, 1 << 16)
    check_integer("stride_padding", stride_padding, 1, 1 << 16)
    for size in capture_sizes or ():
        check_integer("capture_sizes", size, 1, 1 << 20)
    width = max_model_len // compress
    if width < 1:
        raise PlanError(f"max_model_len {max_model_len} compressed by {compress} leaves rows of no width")
    promised = width if max_seq_len is None else max_seq_len
    sizes = decode_graph_sizes(max_num_seqs, next_n, capture_sizes)
    table: list[WedgeRow] = []
    for live in range(1, max_num_seqs + 1):
        rows = live * next_n
        padded = pad_to_graph(rows, sizes)
        graph_rows = rows if padded is None else padded
        padding = graph_rows // next_n - live
        if padding == 0:
            why = "no captured size holds it: launched as it is" if padded is None else "a captured size fits exactly: no padding"
            table.append(WedgeRow(live, rows, graph_rows, 0, 0, None, False, why))
            continue
        slots = (next_n,) * live + (0,) * padding
        path = producer_path(slots, next_n, device.sm)
        context = (max(max_model_len, next_n),) * live + (0,) * padding
        lengths = compress_lengths(expand_lengths(context, slots, rows=graph_rows, path=path), compress)
        negative = sum(length < 0 for length in lengths)
        if negative == 0:
            why = f"the {path} producer path makes no negative length" + (" (next_n 1)" if next_n == 1 else "")
            table.append(WedgeRow(live, rows, graph_rows, padding, 0, None, False, why))
            continue
        launch = plan_launch(
            graph_rows, padded_stride(width, stride_padding), promised, top_k, device, release_profile=release, registers=registers
        )
        if launch.path != "persistent":
            why = f"{graph_rows} rows take the {launch.path} path"
        elif launch.ctas_per_group < 2:
            why = f"one CTA holds a whole row of {launch.stride}: nobody to wait for"
        elif not launch.peers_leave:
            why = f"max_seq_len {promised} > {RADIX_THRESHOLD}: peers stay"
        else:
            why = f"{negative} negative length(s), {launch.ctas_per_group} CTAs a group, peers leave: the leader waits for ever"
        table.append(WedgeRow(live, rows, graph_rows, padding, negative, launch, launch.wedges_on_negative_length, why))
    return tuple(table)


def wedging_live_requests(
    max_model_len: int,
    device: DeviceDescription,
    *,
    next_n: int = 2,
    capture_sizes: Sequence[int] | None = None,
    max_num_seqs: int = 16,
    compress: int = 4,
    stride_padding: int = 1,
    top_k: int = 512,
    release: str | ReleaseProfile = DEFAULT_PROFILE,
    max_seq_len: int | None = None,
) -> tuple[int, ...]:
    """The live-request counts at which an unfixed build wedges; the reasons are in ``wedge_table``."""
    table = wedge_table(
        max_model_len, device, next_n=next_n, capture_sizes=capture_sizes, max_num_seqs=max_num_seqs, compress=compress,
        stride_padding=stride_padding, top_k=top_k, release=release, max_seq_len=max_seq_len,
    )  # fmt: skip
    return tuple(row.live_requests for row in table if row.wedges)
