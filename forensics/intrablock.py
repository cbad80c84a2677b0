"""Waits inside a block: named barriers, mbarrier phases, cluster barriers. Which of them can be proven from one look is said.

A plain CTA barrier is released by the hardware once all live warps have arrived, so a block that stands at one with all its warps
is about to go on; with a warp elsewhere it simply waits for that warp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .barrier import CtaView, GridView, WarpPoint
from .identity import base_name, readable_name

__all__ = ["IntraBlock", "intra_block"]


@dataclass(frozen=True, slots=True)
class IntraBlock:
    """``cause``: phase-wait, named-barrier or cluster-peer. ``proven``: no warp is left that could end the wait."""

    kernel: str
    cause: str
    sentence: str
    proven: bool


def intra_block(views: Sequence[GridView]) -> IntraBlock | None:
    """The wait inside blocks that explains why a grid stands still; None if no block is in one."""
    for view in views:
        found = _cluster(view)
        if found is not None:
            return found
    if any(cta.kind == "spinning" for view in views for cta in view.ctas):
        return None
    for view in views:
        for cta in view.ctas:
            if cta.kind == "blocked":
                found = _named(view, cta) or _phase(view, cta)
                if found is not None:
                    return found
    return None


def _standing(points: Sequence[WarpPoint], kind: str) -> list[WarpPoint]:
    return [point for point in points if point.position.kind == kind]


def _threads(points: Sequence[WarpPoint]) -> int:
    return sum(point.lanes.bit_count() for point in points)


def _named(view: GridView, cta: CtaView) -> IntraBlock | None:
    """Every warp waits inside the block, at least one at a named barrier: fewer threads are there than it counts, or at others."""
    here = _standing(cta.points, "named-barrier")
    if not here:
        return None
    barriers = sorted({point.position.detail for point in here})
    alive, size = _threads(cta.points), view.grid.block_dim[0] * view.grid.block_dim[1] * view.grid.block_dim[2]
    elsewhere = len(cta.points) - len(here)
    split = len(barriers) > 1 or elsewhere > 0
    gone = size - alive
    if not split and gone <= 0:
        return None
    where = f"block {cta.block[0]} of {readable_name(view.grid.kernel)}"
    if split:
        text = f"{where}: its warps wait at different barriers ({'; '.join(barriers)}{' and others' if elsewhere else ''})"
    else:
        text = (
            f"{where}: {_threads(here)} threads wait at named barrier {barriers[0]}, and {gone} of its {size} threads have exited"
        )
    return IntraBlock(base_name(view.grid.kernel), "named-barrier", text, True)


def _phase(view: GridView, cta: CtaView) -> IntraBlock | None:
    here = _standing(cta.points, "phase")
    if not here:
        return None
    text = (
        f"block {cta.block[0]} of {readable_name(view.grid.kernel)}: {_threads(here)} threads wait for a phase of an mbarrier "
        f"({here[0].position.detail}), and no other warp of it is at work"
    )
    return IntraBlock(base_name(view.grid.kernel), "phase-wait", text, False)


def _cluster(view: GridView) -> IntraBlock | None:
    """A block at the cluster barrier whose cluster peer is elsewhere: gone, or waiting for something else."""
    here = [cta for cta in view.ctas if _standing(cta.points, "cluster-barrier")]
    dim = view.grid.cluster_dim
    size = dim[0] * dim[1] * dim[2]
    if not here:
        return None
    arrived = {cta.linear for cta in here if len(_standing(cta.points, "cluster-barrier")) == len(cta.points)}
    for cta in here:
        first = cta.linear - cta.linear % max(size, 1)
        mates = [other for other in view.ctas if first <= other.linear < first + size]
        late = [other for other in mates if other.linear not in arrived]
        if size <= 1 or any(mate.kind == "running" for mate in late):
            continue
        gone = len(mates) < size
        if late or gone:
            what = (
                f"block {late[0].block[0]} of its cluster is {late[0].kind}" if late else "a block of its cluster is not resident"
            )
            text = f"block {cta.block[0]} of {readable_name(view.grid.kernel)} waits at the cluster barrier, and {what}"
            polls = any(mate.kind in ("spinning", "leaving") for mate in late)
            return IntraBlock(base_name(view.grid.kernel), "cluster-peer", text, not polls)
    return None
