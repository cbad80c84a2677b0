"""The causal chain of vLLM #51593, link by link, each with how it is known: measured, computed, inferred, not observed.

A lone dump knows what the device did, not what the scheduler did; what a run or a server adds comes in ``StepFacts``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..kernels.abi import RADIX_THRESHOLD, TopKParams
from .records import ChainLink, Fact

__all__ = ["LINKS", "ChainInput", "StepFacts", "causal_chain"]

LINKS = ("drain", "mtp", "graph-padding", "producer", "compression", "dispatch", "disagreement", "barrier", "host")


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The decode step that was running. Lengths in tokens; ``rows`` are query rows (requests x next_n).

    ``query_start_loc`` and ``seq_lens``: as the padded batch has them; ``expanded``: one context length per row, as the producer
    made it; ``lengths``: the same after compression, as the kernel reads them. ``width``: row width of the logits;
    ``max_seq_len``: the host scalar of the launch. ``origin``: how all this is known: measured on a server, computed from a plan.
    """

    live_requests: int | None = None
    next_n: int | None = None
    rows: int | None = None
    graph_rows: int | None = None
    padded_requests: int | None = None
    query_start_loc: tuple[int, ...] = ()
    seq_lens: tuple[int, ...] = ()
    expanded: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    compress: int | None = None
    producer: str | None = None
    max_model_len: int | None = None
    width: int | None = None
    max_seq_len: int | None = None
    origin: Literal["measured", "interpreted", "computed", "inferred"] = "computed"


@dataclass(frozen=True, slots=True)
class ChainInput:
    """What the chain is told of the device. ``seen``: measured or interpreted. ``row``: the row that the waiting group handles.

    ``grouped_early_exit``: whether the device state shows leaders waiting for peers that are gone while max_seq_len lets them go.
    ``row_length``: that row's length as read from device memory. ``equation``: the wait in words. ``host``: what is known of it.
    """

    seen: Literal["measured", "interpreted"]
    kernel: str = ""
    grid: tuple[int, int, int] = (0, 0, 0)
    params: TopKParams | None = None
    row: int | None = None
    row_length: int | None = None
    cause: str | None = None
    early_exit: bool = False
    disagreement: str = ""
    equation: str = ""
    experiment: str = ""
    host: str = ""


def causal_chain(seen: ChainInput, step: StepFacts | None, evidence: Sequence[str]) -> tuple[ChainLink, ...]:
    """All nine links in order. ``evidence``: ids that a measured link cites."""
    texts: Mapping[str, tuple[Fact, str]] = {
        "drain": _drain(step),
        "mtp": _mtp(step),
        "graph-padding": _padding(step, seen),
        "producer": _producer(step, seen),
        "compression": _compression(step, seen),
        "dispatch": _dispatch(seen),
        "disagreement": _disagreement(seen),
        "barrier": _barrier(seen),
        "host": ("measured", seen.host) if seen.host else ("not observed", "what the host did is not in this evidence"),
    }
    cited = tuple(evidence)
    return tuple(
        ChainLink(link=link, status=status, text=text, evidence=cited if status in ("measured", "interpreted") else ())
        for link, (status, text) in ((link, texts[link]) for link in LINKS)
    )


def _drain(step: StepFacts | None) -> tuple[Fact, str]:
    if step is None or step.live_requests is None:
        return "not observed", "how many requests were running is not in this evidence"
    live = step.live_requests
    return step.origin, f"{live} request{'s were' if live != 1 else ' was'} left in the decode batch"


def _mtp(step: StepFacts | None) -> tuple[Fact, str]:
    if step is None or step.next_n is None:
        return "not observed", "the number of query tokens per request is not in this evidence"
    if step.live_requests is not None and step.rows is not None:
        return (
            step.origin,
            f"each request carries {step.next_n} query positions: {step.live_requests} x {step.next_n} = {step.rows} rows",
        )
    return step.origin, f"each request carries {step.next_n} query positions"


def _padding(step: StepFacts | None, seen: ChainInput) -> tuple[Fact, str]:
    if step is not None and step.rows is not None and step.graph_rows is not None:
        if step.rows == step.graph_rows:
            return step.origin, f"{step.rows} rows are a captured size: no padding"
        one = step.padded_requests == 1
        slots = f", {step.padded_requests} request slot{'' if one else 's'} without a request" if step.padded_requests else ""
        starts = f"; query_start_loc {list(step.query_start_loc)}" if step.query_start_loc else ""
        lengths = f"; seq_lens {list(step.seq_lens)}" if step.seq_lens else ""
        return step.origin, f"{step.rows} rows are padded to the captured {step.graph_rows}{slots}{_short(starts)}{_short(lengths)}"
    if seen.params is not None:
        return (
            "not observed",
            f"the launch has {seen.params.num_rows} rows; how many of them belong to requests is not in this evidence",
        )
    return "not observed", "the graph's size is not in this evidence"


def _producer(step: StepFacts | None, seen: ChainInput) -> tuple[Fact, str]:
    if seen.row_length is not None and seen.row is not None:
        verdict = " (a context length cannot be negative)" if seen.row_length < 0 else ""
        return seen.seen, f"length of row {seen.row}, read from device memory: {seen.row_length}{verdict}"
    if step is not None and step.expanded:
        negative = [row for row, length in enumerate(step.expanded) if length < 0]
        source = f" by the {step.producer} producer" if step.producer else ""
        if negative:
            first = negative[0]
            return "computed", f"lengths expanded per row{source}: row {first} has {step.expanded[first]}, the first illegal value"
        return "computed", f"lengths expanded per row{source}: none is negative"
    if seen.early_exit and seen.params is not None:
        row = f"row {seen.row}" if seen.row is not None else "a row"
        return "inferred", (
            f"the leader entered the path for lengths above {RADIX_THRESHOLD} although max_seq_len is {seen.params.max_seq_len}: "
            f"the length of {row}, read as unsigned, is larger than any legal one"
        )
    return "not observed", "the lengths were not read"


def _compression(step: StepFacts | None, seen: ChainInput) -> tuple[Fact, str]:
    if step is not None and step.compress is not None:
        negative = next((length for length in step.lengths if length < 0), None)
        kept = f"; floor division keeps the negative length at {negative}" if negative is not None else ""
        width = ""
        if step.max_model_len is not None and step.width is not None:
            width = f"; max_model_len {step.max_model_len} becomes rows of {step.width}"
        return "computed", f"lengths are divided by {step.compress}{kept}{width}"
    if seen.params is not None:
        p = seen.params
        return "not observed", f"rows are {p.stride} wide with max_seq_len {p.max_seq_len}; the ratio is not in this evidence"
    return "not observed", "the compression ratio is not in this evidence"


def _dispatch(seen: ChainInput) -> tuple[Fact, str]:
    if not seen.kernel:
        return "not observed", "no resident kernel was seen"
    x, y, z = seen.grid
    more = f", {seen.params.ctas_per_group} CTAs a group, top_k {seen.params.top_k}" if seen.params is not None else ""
    return seen.seen, f"{seen.kernel} is resident with grid ({x},{y},{z}){more}"


def _disagreement(seen: ChainInput) -> tuple[Fact, str]:
    if seen.disagreement:
        return "inferred", seen.disagreement
    return "not observed", "why members of a group went different ways is not in this evidence"


def _barrier(seen: ChainInput) -> tuple[Fact, str]:
    if not seen.equation:
        return "not observed", "no block waits on a word of device memory, as far as could be read"
    return seen.seen, seen.equation + (f"; {seen.experiment}" if seen.experiment else "")


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "…"
