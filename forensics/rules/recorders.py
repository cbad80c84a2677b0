"""What recorders of a distributed job say: PyTorch's flight recorder of each rank, and the watchdogs' last enqueued operations."""

from __future__ import annotations

from collections.abc import Iterator

from ..evidence.facts import WatchdogTimeout
from .base import FAIR, STRONG, WEAK, Finding, contradicted, supported, unknown
from .lateness import PLACES, flight_groups, flight_late, quiet_log, transport_refs, whereabouts
from .view import View

__all__ = ["rule_flight", "rule_watchdog_lag"]


def rule_watchdog_lag(view: View) -> Iterator[Finding]:
    """The watchdogs print what each rank enqueued last: ranks of one group that differ are a lag, like RAS counts that stay."""
    rule = "watchdog-lag"
    groups: dict[str, dict[int, WatchdogTimeout]] = {}
    for entry in view.case.watchdog:
        if entry.rank is not None and entry.last_enqueued is not None:
            groups.setdefault(entry.group, {})[entry.rank] = entry
    for by_rank in groups.values():
        top = max(entry.last_enqueued or 0 for entry in by_rank.values())
        late = sorted(rank for rank, entry in by_rank.items() if (entry.last_enqueued or 0) < top)
        if not late:
            continue
        refs = [entry.ref for entry in by_rank.values()]
        spots = [p for rank in late if (p := view.process_of_rank(rank)) is not None]
        elsewhere = [spot for p in spots if (spot := whereabouts(p)) is not None]
        text = f"rank {', '.join(map(str, late))} enqueued fewer operations than the others ({top})"
        if elsewhere and len(elsewhere) == len(late):
            places = "; ".join(PLACES.get(word, word) for word, _ in elsewhere)
            yield supported(
                rule, "collective-desync", STRONG, f"{text} and {places}", [*refs, *(ref for _, ref in elsewhere)], "diverged"
            )
        else:
            strength = FAIR if quiet_log(view) and not spots else WEAK
            yield supported(rule, "collective-desync", strength, f"{text}; what it does was not seen", refs)
        return
    yield unknown(rule, "collective-desync", "no watchdog lines of several ranks")


def rule_flight(view: View) -> Iterator[Finding]:
    """PyTorch's flight recorder: the same sequence number must be the same collective of the same size on every rank."""
    rule = "flight-recorder"
    dumps = [d for d in view.case.flights if not d.empty]
    if len(dumps) < 2:
        yield unknown(rule, "collective-desync", "fewer than two ranks' flight-recorder dumps"
            if view.case.flights else "no flight recorder",
                      "TORCH_FR_BUFFER_SIZE=2000 and the dump of every rank")  # fmt: skip
        return
    refs = [d.ref for d in dumps]
    for group, by_rank in flight_groups(view).items():
        at: dict[int, dict[int, tuple[str, str]]] = {}
        for rank, entries in by_rank.items():
            for entry in entries:
                at.setdefault(entry.sequence, {})[rank] = (
                    entry.operation,
                    entry.sizes if entry.operation.startswith("all_reduce") else "",
                )
        for sequence, ops in sorted(at.items()):
            if len(ops) > 1 and len(set(ops.values())) > 1:
                names = "; ".join(f"rank {rank} {op}" for rank, (op, _) in sorted(ops.items())[:8])
                yield supported(rule, "collective-desync", STRONG, f"group {group}, number {sequence}: {names}", refs, "diverged")
                return
    late = flight_late(view)
    if late:
        spots = [p for rank in late if (p := view.process_of_rank(rank)) is not None]
        elsewhere = [s for p in spots if (s := whereabouts(p)) is not None]
        if elsewhere and len(elsewhere) == len(late):
            yield supported(rule, "collective-desync", STRONG, f"rank {', '.join(map(str, late))} enqueued fewer collectives and "
                "is elsewhere",
                            [*refs, *(s[1] for s in elsewhere)], "diverged")  # fmt: skip
        else:
            strength = FAIR if quiet_log(view) and not spots else WEAK
            yield supported(
                rule,
                "collective-desync",
                strength,
                f"rank {', '.join(map(str, late))} enqueued fewer collectives; why was not seen",
                refs,
            )
        return
    pending = {d.rank: [e for e in d.entries if e.state in ("started", "scheduled")] for d in dumps}
    states = {rank: entries[0].state for rank, entries in pending.items() if entries}
    if len(states) == len(dumps):
        if all(state == "started" for state in states.values()):
            yield supported(
                rule,
                "collective-stuck",
                FAIR,
                "every rank started the same collective and none finished it",
                refs,
                "transport" if transport_refs(view) else None,
            )
            yield contradicted(rule, "collective-desync", "all ranks enqueued the same collectives", refs)
            return
        waiting = [rank for rank, state in states.items() if state == "scheduled"]
        yield contradicted(
            rule,
            "collective-stuck",
            f"on rank {', '.join(map(str, waiting))} the collective has not started: something ahead of it holds the stream",
            refs,
        )
        yield supported(
            rule,
            "gpu-kernel-stuck",
            WEAK,
            f"something ahead of the collective holds the stream of rank {', '.join(map(str, waiting))}",
            refs,
        )
        return
    yield unknown(rule, "collective-desync", "the dumps show nothing pending", refs=refs)
