"""What a drain plan comes to: its requests, and the batches of each decode step.

``decode_steps`` pads the batches as FULL CUDA graphs pad, expands them to one context length per row as the producer does, and
compresses. Pure and seeded: the same plan gives the same steps on every ground and every Python version (``random.Random`` is
seeded with integers and only ``random()`` is drawn).

Simplifications, said here because a server does more: prefill is not modelled (a request joins the decode batch when it is
prefilled, waiting requests join as soon as a slot is free); every live request carries mtp + 1 query tokens in every step; with
``dp`` > 1 requests go to the ranks in turn and every rank is padded to the size of the largest (an idle rank has only zeros).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..errors import PlanError
from ..kernels.graphs import pad_to_graph
from ..kernels.producer import Producer, ProducerPath, compress_lengths, expand_lengths, producer_path
from .drain import DrainPlan

__all__ = ["DecodeStep", "RequestPlan", "decode_steps", "plan_requests", "schedule_line"]


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request: prompt and output length in tokens, and the rank that serves it. ``outlasts``: it is one of those left."""

    id: int
    prompt: int
    output: int
    rank: int
    outlasts: bool


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decode step of one rank.

    ``live_requests`` requests of ``next_n`` query tokens are ``rows`` rows, padded to ``graph_rows`` (equal where the step runs
    eagerly: ``eager``). Per request slot, padding last: ``query_start_loc`` (slots + 1), ``seq_lens`` (context length with this
    step's tokens, 0 for padding), ``decode_lens``. Per row: ``expanded`` context lengths in tokens after the producer and
    ``lengths`` in compressed entries (int32). ``finished``: ids that left since the step before. ``danger``: some
    length is negative. ``requests``: ids in the batch. ``total_live``: over all ranks.
    """

    index: int
    live_requests: int
    next_n: int
    rows: int
    graph_rows: int
    padded_requests: int
    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    decode_lens: tuple[int, ...]
    expanded: tuple[int, ...]
    lengths: tuple[int, ...]
    finished: tuple[int, ...]
    danger: bool
    path: ProducerPath
    eager: bool = False
    requests: tuple[int, ...] = ()
    total_live: int = 0


def plan_requests(plan: DrainPlan) -> tuple[RequestPlan, ...]:
    """Every request with its lengths, in order of arrival.

    Outputs of those that leave are spread over the range, one to each of as many equal parts, so that they end one after another;
    which request gets which, and which are left at the end, is drawn.
    """
    rng = random.Random(plan.seed)
    order = _shuffled(list(range(plan.requests)), rng)
    leaving = plan.requests - plan.min_live
    low, high = plan.output
    outputs = dict.fromkeys(order, plan.survivor_output)
    for position, request in enumerate(order[:leaving]):
        share = (position + rng.random()) / leaving
        outputs[request] = low + int(share * (high - low + 1))
    survivors = frozenset(order[leaving:])
    first, last = plan.prompt
    return tuple(
        RequestPlan(
            id=request,
            prompt=first + int(rng.random() * (last - first + 1)),
            output=outputs[request],
            rank=request % plan.dp,
            outlasts=request in survivors,
        )
        for request in range(plan.requests)
    )


def _shuffled(items: list[int], rng: random.Random) -> list[int]:
    for last in range(len(items) - 1, 0, -1):
        other = int(rng.random() * (last + 1))
        items[last], items[other] = items[other], items[last]
    return items


@dataclass(slots=True)
class _Live:
    request: RequestPlan
    generated: int
    rng: random.Random

    def seq_len(self, next_n: int) -> int:
        return self.request.prompt + self.generated - 1 + next_n

    def advance(self, mtp: int, acceptance: float) -> None:
        """One sampled token and the drafts up to the first one rejected. Always ``mtp`` draws."""
        draws = [self.rng.random() < acceptance for _ in range(mtp)]
        self.generated += 1 + (draws.index(False) if False in draws else mtp)


def decode_steps(plan: DrainPlan, producer: Producer = "raw", *, sm: int | None = None, rank: int = 0) -> tuple[DecodeStep, ...]:
    """The decode steps of ``rank`` until ``min_live`` requests would be left by fewer, at most ``plan.steps``.

    ``producer``: ``raw`` as before vLLM 0.28.0, ``clamped`` as since. ``sm``: the GPU's architecture, for the producer's path; None
    stands for any outside the SM100 family. The steps end when the plan's step count is used up, or when nobody is left to decode.
    PlanError for a rank that the plan does not have.
    """
    if producer not in ("raw", "clamped"):
        raise PlanError(f"producer = {producer!r}: it is raw or clamped")
    if not 0 <= rank < plan.dp:
        raise PlanError(f"rank = {rank}: the plan has ranks 0 to {plan.dp - 1}")
    sizes = plan.graph_sizes
    waiting = [[_start(plan, request) for request in plan_requests(plan) if request.rank == number] for number in range(plan.dp)]
    live: list[list[_Live]] = [[] for _ in range(plan.dp)]
    finished: tuple[int, ...] = ()
    steps: list[DecodeStep] = []
    for index in range(plan.steps):
        for batch, queue in zip(live, waiting, strict=True):
            while queue and len(batch) < plan.max_num_seqs:
                batch.append(queue.pop(0))
        total = sum(map(len, live))
        if total == 0:
            break
        largest = max(map(len, live))
        steps.append(_step(plan, producer, sm, index, live[rank], largest, total, sizes, finished))
        gone: list[int] = []
        for number, batch in enumerate(live):
            for member in batch:
                member.advance(plan.mtp, plan.acceptance)
            left = [member for member in batch if member.generated < member.request.output]
            if number == rank:
                gone.extend(member.request.id for member in batch if member.generated >= member.request.output)
            live[number] = left
        finished = tuple(gone)
    return tuple(steps)


def _start(plan: DrainPlan, request: RequestPlan) -> _Live:
    return _Live(request, 1, random.Random(plan.seed * 1_000_003 + request.id + 1))


def _step(
    plan: DrainPlan,
    producer: Producer,
    sm: int | None,
    index: int,
    batch: list[_Live],
    largest: int,
    total: int,
    sizes: tuple[int, ...],
    finished: tuple[int, ...],
) -> DecodeStep:
    next_n = plan.next_n
    rows = len(batch) * next_n
    padded = pad_to_graph(largest * next_n, sizes)
    graph_rows = padded if padded is not None else max(largest * next_n, rows)
    padding = graph_rows // next_n - len(batch)
    seq_lens = tuple(member.seq_len(next_n) for member in batch) + (0,) * padding
    decode_lens = (next_n,) * len(batch) + (0,) * padding
    starts = [0]
    for count in decode_lens:
        starts.append(starts[-1] + count)
    path = producer_path(decode_lens, next_n, sm)
    expanded = expand_lengths(seq_lens, decode_lens, rows=graph_rows, path=path, producer=producer)
    lengths = compress_lengths(expanded, plan.compress)
    return DecodeStep(
        index=index,
        live_requests=len(batch),
        next_n=next_n,
        rows=rows,
        graph_rows=graph_rows,
        padded_requests=padding,
        query_start_loc=tuple(starts),
        seq_lens=seq_lens,
        decode_lens=decode_lens,
        expanded=expanded,
        lengths=lengths,
        finished=finished,
        danger=any(length < 0 for length in lengths),
        path=path,
        eager=padded is None,
        requests=tuple(member.request.id for member in batch),
        total_live=total,
    )


def schedule_line(steps: tuple[DecodeStep, ...]) -> str:
    """Live requests of the steps as runs, e.g. ``16 x 5, 15 x 3, … 3 x 22``."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][0] == step.live_requests:
            runs[-1][1] += 1
        else:
            runs.append([step.live_requests, 1])
    return ", ".join(f"{live} x {count}" for live, count in runs)
