"""The words of a verdict over grids: who waits, for which equation, the sentence that says why, and the identity of the hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .barrier import CtaView, GridView, PolledWait
from .causes import GroupFacts
from .identity import base_name, hang_identity
from .ledger import GroupModel, Ledger, place_of

__all__ = [
    "GridCase",
    "blocks_named",
    "comparison_of",
    "equation",
    "grids_beside",
    "how_many",
    "verdict_sentence",
    "wait_identity",
    "waiter",
]


@dataclass(frozen=True)
class GridCase:
    """A grid under judgement: its blocks, its grouping, and who has arrived; None where that is not known."""

    view: GridView
    model: GroupModel | None
    ledger: Ledger | None


def comparison_of(wait: PolledWait) -> str:
    """The comparison as it is written behind a value."""
    if wait.loop.expression == "value":
        return wait.loop.comparison
    return f"{wait.loop.expression} {wait.loop.comparison}"


def how_many(resident: Sequence[CtaView]) -> str:
    """The number of blocks, with its verb."""
    return "1 block is" if len(resident) == 1 else f"{len(resident)} blocks are"


def waiter(grid: GridCase, wait: PolledWait) -> str:
    """The block that waits, with its role in its group where that is known."""
    x, y, z = wait.block
    block = f"block {x}" if not y and not z else f"block ({x},{y},{z})"
    cta = next(cta for cta in grid.view.ctas if cta.block == wait.block)
    if grid.model is None or not grid.model.certain or grid.model.kind == "grid":
        return block
    role = grid.model.role(cta.linear)
    return f"{block} ({role} of group {grid.model.group(cta.linear)})"


def equation(grid: GridCase, wait: PolledWait) -> str:
    """What the wait compares: name, value, comparison and target, as far as they were read."""
    place = place_of(wait, grid.model, grid.view)
    name = place.name or (f"the word at {wait.seen.address:#x}" if wait.seen.address else "a word")
    value = "?" if wait.current is None else str(wait.current)
    target = "a target that was not read" if wait.seen.target is None else str(wait.seen.target)
    return f"{name} = {value} to become {comparison_of(wait)} {target}"


def blocks_named(blocks: Sequence[int]) -> str:
    """Blocks by number: a run as its ends, at most eight one by one."""
    if len(blocks) == 1:
        return f"block {blocks[0]}"
    if len(blocks) > 4 and blocks[-1] - blocks[0] == len(blocks) - 1:
        return f"blocks {blocks[0]} to {blocks[-1]}"
    return "blocks " + ", ".join(map(str, blocks[:8])) + (", …" if len(blocks) > 8 else "")


def verdict_sentence(grid: GridCase, facts: GroupFacts, wait: PolledWait, cause: str | None, views: Sequence[GridView]) -> str:
    """The sentence of a verdict over a group: who waits for what, and why for ever, by cause."""
    who, what = waiter(grid, wait), equation(grid, wait)
    if cause == "peer-left":
        return f"{who} waits for {what}, and {blocks_named(facts.exited)} of its group left without arriving: it waits for ever"
    if cause == "not-co-resident":
        have, need = len(facts.spinning) + len(facts.counted), facts.ctas
        read = f" (by the counter: {len(facts.counted)} of them not read)" if facts.counted else ""
        return (
            f"{have} of the {need} blocks of group {facts.group} are resident and wait for {what}{read}; "
            f"{blocks_named(facts.never_started)} never started, because {_holders(grid.view, views)} hold the room"
        )
    if cause == "reset-race":
        return f"{who} waits for {what}, but the counter no longer holds its own arrival: it was reset while the block still waited"
    if cause == "init-race":
        return (
            f"all {facts.ctas} blocks of group {facts.group} wait for {what}: an arrival was lost when the counter was initialised"
        )
    if cause == "missing-fence":
        return f"{who} waits for {what}, and {blocks_named(facts.exited)} left at another phase: members did not see the same data"
    return f"{who} waits for {what}; why it cannot be met is not known"


def _holders(own: GridView, views: Sequence[GridView]) -> str:
    """Who holds the device's slots: the waiting grid alone, or other kernels with it."""
    others = Counter(base_name(view.grid.kernel) for view in grids_beside(own, views) for _ in view.ctas)
    if not others:
        return "the waiting blocks"
    return "these and " + ", ".join(
        f"{number} block{'s' if number > 1 else ''} of {name or 'an unnamed kernel'}" for name, number in others.most_common(3)
    )


def grids_beside(own: GridView, views: Sequence[GridView]) -> list[GridView]:
    """The other grids with resident blocks on the same device."""
    return [view for view in views if view is not own and view.grid.device == own.grid.device and view.ctas]


def wait_identity(grid: GridCase, facts: GroupFacts | None, wait: PolledWait, cause: str | None) -> str:
    """The hang's identity: the same for the same hang on every card, so no address, number or block is in it."""
    place = place_of(wait, grid.model, grid.view)
    phase, missing = "", ""
    if facts is not None:
        first = facts.phases[0] if facts.phases else None
        rest = facts.missing_arrivals
        arrivals = "unknown" if rest is None else "none" if rest == 0 else "some" if rest > 0 else "negative"
        phase = f"{'first' if first == 0 else 'later' if first is not None else 'irregular'}; others' arrivals {arrivals}"
        fates = [word for word in ("running", "exited", "never_started", "unknown") if getattr(facts, word)]
        missing = f"{'leader' if facts.leader_spins else 'peer'} spins; {','.join(fates) or 'all'}"
    return hang_identity(
        grid.view.grid.kernel, class_="gpu-spin-barrier", cause=cause, field=place.name,
        comparison=comparison_of(wait), bits=wait.loop.bits, scope=wait.loop.scope, phase=phase, missing=missing,
    )  # fmt: skip
