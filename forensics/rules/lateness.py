"""Which rank is late, and where it is: RAS counts, flight recorders and watchdogs all name ranks that launched less than others."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..evidence.facts import FlightEntry, RasComm
from ..evidence.refs import Ref
from .view import Process, View

__all__ = [
    "PLACES",
    "Mismatch",
    "flight_groups",
    "flight_late",
    "late_ranks",
    "mismatches",
    "quiet_log",
    "transport_refs",
    "whereabouts",
]

_TRANSPORT = re.compile(
    r"NET/(?:IB|Socket|OFI)|ibv_|IBV_|completion from peer|Connection (?:closed|reset|refused|timed out)|remote peer|socketPoll|"
    r"link|async error|status=12"
    r"|transport|unhandled system error|ncclRemoteError|ncclSystemError|P2P|NVLink|timed out", re.IGNORECASE
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks of one communicator whose launch counts differ. ``late``: ranks with the lower count (known ones). ``stays``: equal in
    two queries; None with one query only. ``amount``: (lowest, highest)."""

    comm: str
    operation: str
    late: tuple[int, ...]
    pids: tuple[int | None, ...]
    stays: bool | None
    amount: tuple[int, int]
    refs: tuple[Ref, ...]


def _groups(comm: RasComm, operation: str) -> tuple[tuple[int, int], ...]:
    return comm.groups.get(operation, ())


def mismatches(view: View) -> tuple[list[Mismatch], bool]:
    """Mismatched communicators in the last RAS answer, and whether any answer was seen to move."""
    queries = view.case.ras
    found: list[Mismatch] = []
    moved = False
    if not queries:
        return found, moved
    keys = dict.fromkeys((c.name.split(" ")[-1], op) for q in queries for c in q.comms for op in c.groups if op != "status")
    for operation_key in keys:
        name, operation = operation_key
        seen = [(q, c) for q in queries for c in q.comms if c.name.split(" ")[-1] == name and operation in c.groups]
        query, comm = seen[-1]
        counts = [count for _, count in _groups(comm, operation)]
        first = sorted(count for _, count in _groups(seen[0][1], operation))
        if len(seen) > 1 and first != sorted(counts):
            moved = True
        if len(set(counts)) < 2:
            continue
        low, high = min(counts), max(counts)
        late = tuple(rank for rank, count in comm.counts.get(operation, {}).items() if count < high)
        stays: bool | None = first == sorted(counts) if len(seen) > 1 else None
        if stays is None and query.repeat is not None:
            stays = query.repeat == "same"
        if (
            stays is None
            and len(queries) > 1
            and query.index == 0
            and not any(c.name == comm.name for q in queries[1:] for c in q.comms)
        ):
            stays = None
        pids = tuple(comm.members.get(rank, ("", None, ""))[1] for rank in late)
        found.append(Mismatch(comm.name, operation, late, pids, stays, (low, high), tuple(c.ref for _, c in seen)))
    return found, moved


def late_ranks(view: View) -> list[tuple[int, int | None]]:
    """(rank, pid) of every rank that RAS, the flight recorder or the watchdog shows behind."""
    ranks = {rank: pid for m in mismatches(view)[0] for rank, pid in zip(m.late, m.pids, strict=True)}
    for rank in flight_late(view):
        ranks.setdefault(rank, None)
    enqueued = {w.rank: w.last_enqueued for w in view.case.watchdog if w.rank is not None and w.last_enqueued is not None}
    if len(set(enqueued.values())) > 1:
        top = max(enqueued.values())
        for rank, count in enqueued.items():
            if count < top:
                ranks.setdefault(rank, None)
    return sorted(ranks.items())


def whereabouts(process: Process) -> tuple[str, Ref] | None:
    """What a late rank does, if neither waiting for the GPU nor compiling nor loading: control flow took it elsewhere."""
    main = process.main
    if main is None:
        return None
    if process.doing("jit-compile", "jit-lock", "weight-load", "kv-transfer", "cuda-event", "cuda-launch", "driver"):
        return None
    if main.waits in ("worker-dequeue", "queue-get", "engine-idle", "collective", "collective-native", "schedule"):
        return main.waits, main.ref
    return None


PLACES = {
    "worker-dequeue": "is back at the engine's queue", "queue-get": "waits for work", "engine-idle": "is idle",
    "collective": "is in another collective",
    "collective-native": "is in another collective", "schedule": "is scheduling",
}  # fmt: skip


def quiet_log(view: View) -> bool:
    """An engine log of the serving time is there and shows no compiling: then a late rank is not late for that."""
    return bool(view.case.stats) and not view.events("jit", "jit-start", "build-failed", "lock-wait")


def flight_groups(view: View) -> dict[str, dict[int, list[FlightEntry]]]:
    table: dict[str, dict[int, list[FlightEntry]]] = {}
    for dump in view.case.flights:
        if dump.rank is None:
            continue
        for entry in dump.entries:
            table.setdefault(entry.group, {}).setdefault(dump.rank, []).append(entry)
    return table


def flight_late(view: View) -> list[int]:
    late: set[int] = set()
    for by_rank in flight_groups(view).values():
        tops = {rank: max(e.sequence for e in entries) for rank, entries in by_rank.items()}
        if len(tops) > 1 and len(set(tops.values())) > 1:
            late.update(rank for rank, top in tops.items() if top < max(tops.values()))
    return sorted(late)


def transport_refs(view: View) -> list[Ref]:
    warned = [e.ref for e in view.events("nccl-warn") if _TRANSPORT.search(e.ref.text)]
    links = [e.ref for e in view.case.kernel if e.kind == "link" or (e.kind == "xid" and e.number == 74)]
    broken = [q.ref for q in view.case.ras if any(c.async_errors for c in q.comms) or "ERROR" in q.errors]
    return [*warned, *links, *broken]
