"""Arrivals of a waiting group against its counter: who has added what, what is left for members that are gone or never came.

A barrier's counter that starts at zero holds one arrival of each member for each phase. So the number of resident members, the
phase of those that were read and the counter together say whether a member that was not read has arrived, and whether a member
that is missing can have been there at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .barrier import GridView, PolledWait
from .ledger import Fate, GroupModel, Ledger, members, not_read, waiting_groups

__all__ = ["Arrivals", "arrivals", "at_work", "checked_ledger"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """``waits``: the first wait of each spinning member; ``phases``: of each (None: not known). ``own``: arrivals that the resident
    members have added, ``rest``: the counter minus those (both None if not computable, ``rest`` also while a member is at work).

    ``unread``: resident members of which nothing was read. ``deduced``: ``own`` is not read of every member; it follows from a
    counter that is exactly the number of resident members, all of which are then counted as arrived once.
    """

    waits: tuple[PolledWait, ...]
    value: int | None
    target: int | None
    phases: tuple[int | None, ...]
    own: int | None
    rest: int | None
    resident: int
    unread: tuple[int, ...] = ()
    deduced: bool = False


def arrivals(view: GridView, model: GroupModel, fates: Mapping[Fate, Sequence[int]], group: int, *, hung: bool) -> Arrivals:
    """The count of one group. ``fates``: of its blocks. Nothing is deduced unless somebody watched (``hung``)."""
    blocks = members(view, model, group)
    waits = tuple(cta.waits[0] for cta in blocks if cta.kind == "spinning")
    unread = tuple(cta.linear for cta in blocks if not_read(cta))
    values = {wait.current for wait in waits if wait.current is not None}
    targets = {wait.seen.target for wait in waits if wait.seen.target is not None}
    phases = tuple(_phase(wait, model.ctas) for wait in waits)
    value = max(values, default=None)
    running = fates.get("running", ())
    own = None if None in phases or not phases or unread else sum((phase or 0) + 1 for phase in phases)
    rest = value - own if value is not None and own is not None and not running else None
    known = set(phases) - {None}
    absent = set(fates.get("unknown", ())) - set(unread) or fates.get("exited", ())
    # Each member that polls has arrived at least once; at the first phase, with nobody gone, none can have arrived twice. So a
    # counter as large as the number of resident members is one arrival of each, if it started at zero.
    deduced = own is None and hung and known == {0} and value == len(blocks) and not running and not absent and model.certain
    if deduced:
        own, rest = value, 0
    return Arrivals(waits, value, min(targets, default=None), phases, own, rest, len(blocks), unread, deduced)


def _phase(wait: PolledWait, ctas: int) -> int | None:
    target = wait.seen.target
    if target is None or target % ctas or wait.loop.comparison not in (">=", "==") or wait.loop.expression != "value":
        return None
    return target // ctas - 1


def checked_ledger(ledger: Ledger, view: GridView, model: GroupModel, *, hung: bool) -> Ledger:
    """The ledger with "never started" taken back in each waiting group whose counter does not bear it out.

    Room and order of dispatch speak for a block that never started; a counter that holds more than the resident members' arrivals
    says that somebody else was there, one that holds less was written by something else: then nothing is known of the missing.
    """
    groups, why, firm = list(ledger.groups), list(ledger.why), set(ledger.firm)
    for group in waiting_groups(view, model):
        if group >= len(groups) or not groups[group].get("never_started"):
            continue
        said = _against(arrivals(view, model, groups[group], group, hung=hung), bool(groups[group].get("running")))
        if said:
            fates = dict(groups[group])
            missing = fates.pop("never_started")
            fates["unknown"] = tuple(sorted((*fates.get("unknown", ()), *missing)))
            groups[group] = fates
            why[group] = f"{why[group]}; but {said}: not known"
            firm.discard(group)
    return replace(ledger, groups=tuple(groups), why=tuple(why), firm=frozenset(firm))


def _against(found: Arrivals, running: bool) -> str:
    """What the counter says against members that never started, or nothing."""
    if any(found.phases):
        return "a member waits at a later phase, which all of the group must have reached"
    if found.value is None:
        return ""
    if found.rest is not None:
        return f"the counter is {found.value}, the resident members have added {found.own}" if found.rest else ""
    if found.value > found.resident:
        return f"the counter is {found.value}, more than the {found.resident} resident members can have added"
    if found.unread and not running and found.value < found.resident:
        return f"the counter is {found.value}, and {found.resident} members are resident, {len(found.unread)} of them not read"
    return ""


def at_work(views: Sequence[GridView], own: GridView, model: GroupModel, group: int) -> bool:
    """Whether a resident block outside one group is, or may be, at work. The members themselves are the ledger's."""
    if any(view.grid.ctas is None or not view.grid.complete for view in views):
        return True
    return any(
        cta.kind in ("running", "leaving", "unknown")
        for view in views
        for cta in view.ctas
        if view is not own or model.group(cta.linear) != group
    )
