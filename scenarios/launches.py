"""What a scenario's row runs: one launch of a kernel, a launch as the host computes it, or the batches of a drain. Data only.

A row says what must come of it, so that a matrix of rows shows defect and fix apart. The same rows are run by the CPU ground
(interpreted), by the GPU ground (where ``grounds`` says so) and by the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..kernels.topk_cases import TopKCase, make_row

__all__ = [
    "BOTH", "CooperativeLaunch", "CrossRank", "DrainBatches", "Grounds", "HostLaunch", "IndexWorkspace", "Launch", "LeftoverCase",
    "Row", "SamplerLaunch", "long_row",
]  # fmt: skip

Schedule = Literal["smallest-pc", "random", "priority"]
Grounds = tuple[Literal["cpu", "gpu"], ...]
#: Grounds of a row that silicon can show as well.
BOTH: Grounds = ("cpu", "gpu")


@dataclass(frozen=True, slots=True)
class LeftoverCase(TopKCase):
    """Rows of negative length hold plain values, as a server's logits of an earlier step, instead of the largest there are."""

    def logits(self) -> NDArray[np.float32]:
        """float32 [rows, stride]."""
        result = TopKCase.logits(self)
        for row, length in enumerate(self.lengths):
            if length < 0:
                result[row] = make_row("normal", self.stride, np.random.default_rng([self.seed, row]))
        return result


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the top-k kernel.

    ``resident``: CTAs that the interpreted device holds at once (0: all of the grid). ``schedule`` and ``schedules``: order of
    execution, and how many seeds of it are tried at most, until one fails. ``counter``: every arrival counter's value
    before the launch (a healthy host writes 0). ``early_exit``: the build ends rounds early, so the number of arrivals
    at the end is not known beforehand. ``weak``: the interpreter keeps a CTA's additions back
    where no fence orders them (``kernels.sass.weak``). ``queued``: a kernel queued behind this one on the
    stream, the one that host stacks name. On a GPU alone: ``beyond``, the one group is made so many CTAs larger than what the card
    holds (None: as ``case`` says); ``leave``, another kernel holds all slots but so many (0: there is none).
    """

    case: TopKCase
    resident: int = 0
    schedule: Schedule = "smallest-pc"
    schedules: int = 1
    counter: int = 0
    early_exit: bool = False
    weak: bool = False
    queued: str = ""
    beyond: int | None = None
    leave: int = 0


@dataclass(frozen=True, slots=True)
class HostLaunch:
    """The launch that the host of a release makes for ``rows`` of ``stride`` floats on a named card: path, grid, residency."""

    rows: int
    stride: int
    max_seq_len: int
    top_k: int
    device: str
    release: str


@dataclass(frozen=True, slots=True)
class DrainBatches:
    """The lengths that a drain plan's producer makes. ``plan``: fields that differ from the default; ``sm``: whose path."""

    plan: Mapping[str, Any] = field(default_factory=dict)
    producer: Literal["raw", "clamped"] = "raw"
    sm: int | None = 120


@dataclass(frozen=True, slots=True)
class CooperativeLaunch:
    """One launch of a release's ``cooperative_topk`` on rows of ``stride`` floats, one cluster a row, as for up to 8 rows."""

    lengths: tuple[int, ...]
    stride: int = 16384
    top_k: int = 512


@dataclass(frozen=True, slots=True)
class SamplerLaunch:
    """One launch of FlashInfer's multi-CTA top-k mask: one row of ``vocabulary`` floats (a multiple of 4), ``top_k`` of them kept.

    Interpreted, the row is shared by as many CTAs as a card of 99 KiB takes for it, whichever architecture's code it is.
    """

    vocabulary: int = 96000
    top_k: int = 50
    schedule: Schedule = "priority"
    schedules: int = 24


@dataclass(frozen=True, slots=True)
class IndexWorkspace:
    """A prefill chunk whose sparse indices a release's own function combines. ``old``: what the caller's workspace holds before
    (None: no workspace is given). Lengths in tokens; ``rows_per_request``: KV rows gathered for each request.
    """

    old: int | None
    query_lens: tuple[int, ...] = (4, 2)
    seq_lens: tuple[int, ...] = (40, 9)
    topk: int = 512
    window: int = 128
    compress: int = 4
    rows_per_request: int = 1000


@dataclass(frozen=True, slots=True)
class CrossRank:
    """Two ranks, an all-reduce over peer memory behind rank 0's launch of ``held`` (None: rank 0's host launches nothing).

    Rank 1 is in the all-reduce from the start. ``devices``: whose GPU is read, by rank.
    """

    held: Launch | None
    devices: tuple[int, ...] = (0, 1)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a scenario's matrix. ``class_`` and ``cause``: what a run of it must be diagnosed as (``not-hung`` for a row
    that ends well). ``fixed``: the row is a repair or a healthy control. ``kernel``: as after ``--kernel``.
    ``also``: other outcomes of the same defect, or of another one of a repaired release, passed over while schedules are left.
    ``grounds``: where the row can run.
    """

    name: str
    what: Launch | HostLaunch | DrainBatches | CrossRank | CooperativeLaunch | IndexWorkspace | SamplerLaunch
    class_: str
    text: str
    cause: str | None = None
    kernel: str = "builtin:guard"
    fixed: bool = False
    grounds: Grounds = ("cpu",)
    also: tuple[tuple[str, str | None], ...] = ()


def long_row(name: str, ctas: int, *lengths: int, data: tuple[str, ...] = ("normal",)) -> TopKCase:
    """One group of ``ctas`` CTAs for rows of which the longest is shared: stride and max_seq_len are the longest row."""
    stride = -(-max(lengths) // 4) * 4
    chunk = math.ceil(math.ceil(stride / ctas) / 4) * 4
    kind = LeftoverCase if min(lengths) < 0 else TopKCase
    return kind(name, 512, 4, lengths, stride, stride, ctas, 1, chunk, data)
