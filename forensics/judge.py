"""From judged grids to one verdict: class, cause, confidence, and the sentence that says it. Pure; the weaker answer wins in doubt.

One look at a device proves a hang only where nobody is left who could end the wait. A member that is still at work may arrive, so
then the answer is inconclusive, unless a watchdog has already seen that nothing moves (``hung``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from . import limits
from .arrivals import at_work, checked_ledger
from .barrier import CtaView, GridView, PolledWait
from .causes import GroupFacts, Rule, causes, decide, group_facts
from .device_state import DeviceState
from .identity import base_name, hang_identity, readable_name
from .intrablock import IntraBlock, intra_block
from .judge_words import (
    GridCase,
    blocks_named,
    comparison_of,
    equation,
    grids_beside,
    how_many,
    verdict_sentence,
    wait_identity,
    waiter,
)
from .ledger import GroupModel, Ledger, build_ledger, group_model, members, place_of, waiting_groups
from .records import Confidence, LedgerGroup, Wait

__all__ = ["Judged", "judge"]

#: Kernels whose blocks wait for other GPUs: communication libraries' own device code.
_COLLECTIVE = re.compile(r"^nccl(?:Dev)?Kernel|^ncclDevFunc")
_CROSS_RANK = re.compile(
    r"cross_device_reduce|(?:one|two)_?shot|multimem|nvshmem|deep_?ep|internode|intranode|all2all|all_?reduce|lamport|"
    r"quick_?reduce|symm_mem",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Judged:
    """The verdict in parts. ``rules``: each cause of the deciding group, judged; ``facts``: that group's numbers; ``primary``: its
    first wait; ``model`` and ``view``: its grouping and grid. ``candidates``: classes that fit but are not proven.
    """

    class_: str
    cause: str | None
    confidence: Confidence
    sentence: str
    waits: tuple[Wait, ...] = ()
    ledger: tuple[LedgerGroup, ...] = ()
    rules: tuple[Rule, ...] = ()
    facts: GroupFacts | None = None
    primary: PolledWait | None = None
    model: GroupModel | None = None
    view: GridView | None = None
    identity: str | None = None
    candidates: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def judge(state: DeviceState, views: Sequence[GridView], *, hung: bool) -> Judged:
    """The verdict over all grids. ``hung``: somebody watched and saw no progress."""
    grids = [_grid(state, view, hung=hung) for view in views]
    waits = tuple(_waits(grids))
    ledger = _ledger_records(grids)
    spinning = [grid for grid in grids if grid.view.spinning()]
    inside = intra_block(views)
    if inside is not None and inside.cause == "cluster-peer" and not any(grid.model for grid in spinning):
        return _inside(inside, waits, hung=hung)
    judged = [_judge_grid(grid, views, hung=hung) for grid in spinning]
    if inside is not None and judged and all(_waits_outside(item) for item in judged):
        # A wait inside one GPU explains why another rank spins; the other way round it does not.
        return _with(_inside(inside, waits, hung=hung), waits, ledger, judged)
    if judged:
        best = min(judged, key=_rank_of)  # the first of equals
        others = [item for item in judged if item is not best]
        if best.class_ == "gpu-crossrank-spin" and best.cause is None:
            best = _peer_behind(best, state, views)
        return _with(_placed(best, state), waits, ledger, others)
    if inside is not None:
        return _inside(inside, waits, hung=hung)
    return _nobody_waits(views, waits, ledger, hung=hung)


def _waits_outside(item: Judged) -> bool:
    """Whether what the grid waits for is written by another GPU or the host: it is somebody's victim, whoever that is."""
    wait = item.primary
    if item.view is None:
        return False
    return bool(_COLLECTIVE.search(base_name(item.view.grid.kernel))) or (wait is not None and wait.loop.scope == "sys")


def _rank_of(item: Judged) -> tuple[int, bool]:
    """How near a grid's wait is to the culprit: inside its own GPU before waits for somebody outside; what is not proven last."""
    if item.class_ == "unknown":
        return 3, False
    return (2 if _waits_outside(item) else 1), item.cause is None


def _peer_behind(best: Judged, state: DeviceState, views: Sequence[GridView]) -> Judged:
    """A rank that polls a peer, and another device of the process that was read and has no block at all: that peer has not come."""
    assert best.view is not None
    busy = {view.grid.device for view in views if view.ctas or view.grid.ctas is None or not view.grid.complete}
    idle = sorted(set(state.devices) - busy)
    if not idle:
        return best
    who = "device " + " and ".join(map(str, idle))
    return replace(
        best, cause="peer-behind", sentence=f"{best.sentence}; {who} was read and has no resident block: it has not come"
    )


def _placed(best: Judged, state: DeviceState) -> Judged:
    """The sentence with the device, where more than one was read."""
    several = len(state.devices) > 1 and best.view is not None
    return replace(best, sentence=f"device {best.view.grid.device}: {best.sentence}") if several and best.view else best


def _grid(state: DeviceState, view: GridView, *, hung: bool) -> GridCase:
    model = group_model(view)
    if model is None or not model.certain:
        return GridCase(view, model, None)
    return GridCase(view, model, checked_ledger(build_ledger(state, view, model), view, model, hung=hung))


def _part_of(item: Judged, best: Judged) -> str:
    """What another wait has to do with the one that was chosen."""
    if (
        best.view is not None
        and item.view is not None
        and best.cause == "not-co-resident"
        and grids_beside(best.view, (item.view,))
    ):
        return "; its blocks hold room that the group lacks"
    if not _waits_outside(best) and _waits_outside(item):
        return "; it waits for the rank that is held, and is not the culprit"
    return ""


def _with(best: Judged, waits: tuple[Wait, ...], ledger: tuple[LedgerGroup, ...], others: list[Judged]) -> Judged:
    notes = tuple(f"also: {item.sentence}{_part_of(item, best)}" for item in others)
    cause = best.cause
    if any(item.class_ == best.class_ and item.cause not in (cause, None) for item in others):
        cause, notes = None, (*notes, "several grids wait for different causes")
    return replace(best, waits=waits, ledger=ledger, cause=cause, notes=(*best.notes, *notes))


# ---------------------------------------------------------------------------------------------------------------------------------
# Records


def _waits(grids: Sequence[GridCase]) -> list[Wait]:
    found: list[Wait] = []
    for grid in grids:
        for cta in grid.view.ctas:
            found += [_record(wait, cta, grid) for wait in cta.waits if wait.satisfied is not True]
            if len(found) >= limits.MAX_WAITS:
                return found[: limits.MAX_WAITS]
    return found


def _record(wait: PolledWait, cta: CtaView, grid: GridCase) -> Wait:
    model, view = grid.model, grid.view
    place = place_of(wait, model, view)
    group = place.group
    if group is None and model is not None and model.certain:
        group = model.group(cta.linear)
    loop = wait.loop
    seen = wait.seen
    value_status = seen.value_status if seen.value is not None else "measured" if wait.live is not None else "unknown"
    # Keys beyond the record's own: which lanes, how wide and signed, how each word is known, what memory held, the loop's load.
    return Wait.model_validate({
        "kernel": readable_name(view.grid.kernel), "grid": view.grid.grid_dim, "block": cta.block, "warp": wait.warp,
        "pc_offset": wait.pc_offset, "address": None if seen.address is None else hex(seen.address), "value": wait.value,
        "target": seen.target, "comparison": comparison_of(wait) or None, "group": group, "device": view.grid.device,
        "state_field": place.name,
        "role": model.role(cta.linear) if model is not None else None, "instructions": loop.instructions,
        "lanes": wait.lanes, "signed": loop.signed, "scope": loop.scope, "bits": loop.bits, "bounded": loop.bounded,
        "address_status": seen.address_status, "value_status": value_status, "target_status": seen.target_status,
        "live_value": wait.live, "load_offset": loop.load,
    })  # fmt: skip


def _ledger_records(grids: Sequence[GridCase]) -> tuple[LedgerGroup, ...]:
    records: list[LedgerGroup] = []
    for grid in grids:
        if grid.ledger is None or not grid.view.spinning():
            continue
        for number, fates in enumerate(grid.ledger.groups):
            records.append(LedgerGroup(group=number, inferred=grid.ledger.why[number], **fates))
    return tuple(records)


# ---------------------------------------------------------------------------------------------------------------------------------
# A grid with spinning blocks


def _judge_grid(grid: GridCase, views: Sequence[GridView], *, hung: bool) -> Judged:
    if grid.model is not None and grid.ledger is not None:
        return _judge_groups(grid, grid.model, grid.ledger, views, hung=hung)
    listed = all(view.grid.ctas is not None and view.grid.complete for view in views)
    others_run = not listed or any(cta.kind in ("running", "leaving", "unknown") for view in views for cta in view.ctas)
    return _judge_plain(grid, others_run=others_run, hung=hung)


def _judge_groups(grid: GridCase, model: GroupModel, ledger: Ledger, views: Sequence[GridView], *, hung: bool) -> Judged:
    decided: list[tuple[Rule | None, GroupFacts, PolledWait, tuple[Rule, ...]]] = []
    for group in waiting_groups(grid.view, model)[:256]:
        facts = group_facts(grid.view, model, ledger, group, hung=hung)
        open_waits = [wait for cta in members(grid.view, model, group) for wait in cta.waits if wait.satisfied is not True]
        wait = min(open_waits, key=lambda item: item.seen.target is None)  # the first whose target was read
        rules = causes(facts, model, grid.view, wait, others_run=at_work(views, grid.view, model, group))
        decided.append((decide(rules), facts, wait, rules))
    words = {rule.cause for rule, *_ in decided if rule is not None}
    rule, facts, wait, rules = next((item for item in decided if item[0] is not None), decided[0])
    cause = rule.cause if rule is not None and len(words) == 1 else None
    stuck = hung or cause is not None or _nobody_left(facts, wait, others_run=at_work(views, grid.view, model, facts.group))
    if not stuck:
        return _perhaps(grid, facts, wait, rules)
    place = place_of(wait, model, grid.view)
    notes = []
    if place.group is not None and model.certain and place.group != facts.group:
        notes.append(f"the polled word lies in row state {place.group}, the block belongs to group {facts.group}")
        cause = None
    known = wait.current is not None and wait.seen.target is not None and not wait.loop.partial
    confidence: Confidence = "high" if cause and rule is not None and rule.firm and known else "medium" if cause or known else "low"
    return Judged(
        "gpu-spin-barrier", cause, confidence, verdict_sentence(grid, facts, wait, cause, views), rules=rules, facts=facts,
        primary=wait, model=model, view=grid.view, identity=wait_identity(grid, facts, wait, cause), notes=tuple(notes),
    )  # fmt: skip


def _nobody_left(facts: GroupFacts, wait: PolledWait, *, others_run: bool) -> bool:
    """Whether no block is left that could end the wait: then it lasts for ever."""
    if facts.running or facts.unknown or wait.satisfied is not False or not (facts.settled or facts.missing_arrivals == 0):
        return False
    if facts.value is not None and facts.target is not None and facts.value >= facts.target and not facts.settled:
        return False  # another member has already seen enough arrivals: this one is about to go on
    return not (facts.never_started and others_run)


def _perhaps(grid: GridCase, facts: GroupFacts, wait: PolledWait, rules: tuple[Rule, ...]) -> Judged:
    able = facts.running or facts.unknown or facts.never_started
    head = f"{waiter(grid, wait)} waits for {equation(grid, wait)}"
    if able:
        late = blocks_named(able)
        sentence = f"{head}, and {late} of its group may still arrive: one look cannot tell a slow member from a lost one"
    else:
        sentence = f"{head}, and the last arrival may have come after this value was polled: memory was not read"
    return Judged(
        "unknown", None, "low", sentence, rules=rules, facts=facts, primary=wait, model=grid.model, view=grid.view,
        candidates=("gpu-spin-barrier", "not-hung"),
    )  # fmt: skip


def _judge_plain(grid: GridCase, *, others_run: bool, hung: bool) -> Judged:
    """A wait in a kernel whose groups are not known: the equation stands, the cause does not."""
    cta = grid.view.spinning()[0]
    wait = next(wait for wait in cta.waits if wait.satisfied is not True)
    name = base_name(grid.view.grid.kernel)
    known = wait.satisfied is False
    who, what = waiter(grid, wait), equation(grid, wait)
    identity = wait_identity(grid, None, wait, None)
    if _COLLECTIVE.search(name):
        text = f"{who} waits for {what} in a collective ({name}): for another rank or a transport, this GPU cannot say which"
        class_ = "gpu-kernel-stuck" if hung else "unknown"
        return _plain(class_, "low", text, grid, wait, identity, ("collective-desync", "collective-stuck"))
    if wait.loop.scope == "sys":
        text = f"{who} waits for {what}, a word that other GPUs or the host may write: somebody outside this GPU has not written it"
        if _CROSS_RANK.search(name):
            class_ = "gpu-crossrank-spin" if hung else "unknown"
            return _plain(class_, "medium" if known and hung else "low", text, grid, wait, identity, ("gpu-crossrank-spin",))
        return _plain("gpu-kernel-stuck" if hung else "unknown", "low", text, grid, wait, identity, ("gpu-crossrank-spin",))
    rest = "" if others_run else "; no resident block is left that could write it"
    if hung:
        return _plain("gpu-spin-barrier", "medium" if known else "low", f"{who} waits for {what}{rest}", grid, wait, identity)
    if known and not others_run:
        return _plain("gpu-kernel-stuck", "low", f"{who} waits for {what}{rest}", grid, wait, identity, ("gpu-spin-barrier",))
    why = "other blocks are, or may be, at work and may write it" if others_run else "value or target could not be read"
    return _plain("unknown", "low", f"{who} waits for {what}: {why}", grid, wait, None, ("gpu-spin-barrier", "not-hung"))


def _plain(
    class_: str,
    confidence: Confidence,
    text: str,
    grid: GridCase,
    wait: PolledWait,
    identity: str | None,
    candidates: tuple[str, ...] = (),
) -> Judged:
    return Judged(
        class_, None, confidence, text, primary=wait, view=grid.view, model=grid.model,
        identity=identity if class_ != "unknown" else None, candidates=candidates,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------------------
# Nobody polls


def _inside(inside: IntraBlock, waits: tuple[Wait, ...], *, hung: bool) -> Judged:
    if inside.proven or hung:
        confidence: Confidence = "high" if inside.proven and hung else "medium"
        identity = hang_identity(
            inside.kernel, class_="gpu-barrier-intra-block", cause=inside.cause, field=None, comparison=None, bits=None,
            scope="cta", phase="", missing=inside.cause or "",
        )  # fmt: skip
        return Judged("gpu-barrier-intra-block", inside.cause, confidence, inside.sentence, waits, identity=identity)
    text = f"{inside.sentence}; one look cannot tell this from a wait that is about to end"
    return Judged("unknown", None, "low", text, waits, candidates=("gpu-barrier-intra-block", "not-hung"))


def _nobody_waits(views: Sequence[GridView], waits: tuple[Wait, ...], ledger: tuple[LedgerGroup, ...], *, hung: bool) -> Judged:
    resident = [cta for view in views for cta in view.ctas]
    unread = any(view.grid.ctas is None or not view.grid.complete for view in views)
    names = ", ".join(sorted({readable_name(view.grid.kernel) or "an unnamed kernel" for view in views if view.ctas})[:4])
    if not resident:
        if unread or not views:
            text = "which blocks are resident could not be read"
        else:
            text = "no block was resident on the GPU at this moment: what waits, waits on the host"
        return Judged("gpu-kernel-stuck" if hung and unread else "unknown", None, "low", text, waits, ledger)
    blind = all(cta.kind == "unknown" for cta in resident)
    if hung:
        why = "where they stand could not be read" if blind else "no wait loop was recognised at their PCs"
        text = f"{how_many(resident)} resident ({names}) and nothing moves; {why}"
        return Judged("gpu-kernel-stuck", None, "low" if blind else "medium", text, waits, ledger)
    if blind:
        text = f"{how_many(resident)} resident ({names}); where they stand could not be read"
        return Judged("unknown", None, "low", text, waits)
    leaving = sum(cta.kind == "leaving" for cta in resident)
    more = f", {leaving} of them at a wait that is already over" if leaving else ""
    text = f"{how_many(resident)} at work ({names}){more}: none waits, at this one look"
    return Judged("unknown", None, "low", text, waits, ledger, candidates=("not-hung", "gpu-kernel-stuck"))
