"""collective-desync and collective-stuck. The rank that waits inside a collective is the victim; why is the late one late?

RAS counts that differ and stay, plus a late rank that was seen elsewhere, are a divergence. The same counts with a late rank that
compiles, sits on the GPU or is dead are that rank's trouble, not a divergence: without a look at it the answer stays weak.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..evidence.facts import FlightEntry, FlightRank, RasComm, WatchdogTimeout
from ..evidence.refs import Ref
from .base import FAIR, STRONG, WEAK, Finding, contradicted, supported, unknown
from .view import Process, View

__all__ = [
    "late_ranks",
    "rule_collective_stuck",
    "rule_counts",
    "rule_flight",
    "rule_opposing_stacks",
    "rule_watchdog_lag",
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
    for operation_key in {(c.name.split(" ")[-1], op) for q in queries for c in q.comms for op in c.groups if op != "status"}:
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
    for rank in _flight_late(view):
        ranks.setdefault(rank, None)
    enqueued = {w.rank: w.last_enqueued for w in view.case.watchdog if w.rank is not None and w.last_enqueued is not None}
    if len(set(enqueued.values())) > 1:
        top = max(enqueued.values())
        for rank, count in enqueued.items():
            if count < top:
                ranks.setdefault(rank, None)
    return sorted(ranks.items())


def _elsewhere(process: Process) -> tuple[str, Ref] | None:
    """What a late rank does, if neither waiting for the GPU nor compiling nor loading: control flow took it elsewhere."""
    main = process.main
    if main is None:
        return None
    if process.doing("jit-compile", "jit-lock", "weight-load", "kv-transfer", "cuda-event", "cuda-launch", "driver"):
        return None
    if main.waits in ("worker-dequeue", "queue-get", "engine-idle", "collective", "collective-native", "schedule"):
        return main.waits, main.ref
    return None


def _watchdog_refs(view: View) -> list[Ref]:
    """The watchdog waited its whole time for a collective."""
    return [w.ref for w in view.case.watchdog if w.waited_ms]


def rule_counts(view: View) -> Iterator[Finding]:
    """RAS launch counts, asked twice."""
    rule = "ras-counts"
    found, moved = mismatches(view)
    if moved and not found:
        yield contradicted(rule, "collective-desync", "the counts move between the queries", [q.ref for q in view.case.ras])
        yield contradicted(rule, "collective-stuck", "the counts move between the queries", [q.ref for q in view.case.ras])
        return
    if not found:
        equal = [q for q in view.case.ras if q.errors and all(word == "OK" for word in q.errors)]
        if equal:
            yield contradicted(rule, "collective-desync", "all ranks have launched the same operations", [q.ref for q in equal])
        elif view.case.ras:
            yield unknown(
                rule,
                "collective-desync",
                "RAS answered, but not with counts of all ranks",
                "the query again in 30 s",
                [q.ref for q in view.case.ras],
            )
        else:
            yield unknown(
                rule, "collective-desync", "NCCL's RAS was not asked", "echo 'verbose status' | nc localhost 28028; sleep 30; again"
            )
        return
    for mismatch in found:
        refs = list(mismatch.refs)
        if mismatch.stays is False:
            yield contradicted(rule, "collective-desync", "the mismatch changes between the queries: normal traffic", refs)
            continue
        timeouts = _watchdog_refs(view)
        stays = mismatch.stays or bool(timeouts)
        what = f"{mismatch.operation}: launched up to {mismatch.amount[0]} and {mismatch.amount[1]}" + (
            f", behind: rank {', '.join(map(str, mismatch.late))}" if mismatch.late else ""
        )
        spots = [
            (rank, process)
            for rank, pid in zip(mismatch.late, mismatch.pids, strict=True)
            if (process := view.process_of_rank(rank, pid)) is not None
        ]
        elsewhere = [(rank, spot) for rank, process in spots if (spot := _elsewhere(process)) is not None]
        if elsewhere and len(elsewhere) == len(mismatch.late):
            places = "; ".join(f"rank {rank} {_PLACES.get(spot[0], spot[0])}" for rank, spot in elsewhere)
            strength = STRONG if stays else FAIR
            yield supported(
                rule,
                "collective-desync",
                strength,
                f"{what}; {places}",
                [*refs, *timeouts[:2], *(spot[1] for _, spot in elsewhere)],
                "diverged",
            )
        elif spots:
            held = "; ".join(f"rank {rank} {p.main.waits if p.main else '?'}" for rank, p in spots)
            yield supported(
                rule,
                "collective-desync",
                WEAK,
                f"{what}, but the late rank is busy with something of its own ({held})",
                [*refs, *(p.main.ref for _, p in spots if p.main)],
            )
        elif stays:
            strength = FAIR if _quiet_log(view) else WEAK
            yield supported(
                rule,
                "collective-desync",
                strength,
                f"{what}, and stays so; what the late rank does was not seen",
                [*refs, *timeouts[:2]],
            )
        else:
            yield supported(rule, "collective-desync", WEAK, f"{what} in one query: normal if it changes", refs)


_PLACES = {
    "worker-dequeue": "is back at the engine's queue", "queue-get": "waits for work", "engine-idle": "is idle",
    "collective": "is in another collective",
    "collective-native": "is in another collective", "schedule": "is scheduling",
}  # fmt: skip


def _quiet_log(view: View) -> bool:
    """An engine log of the serving time is there and shows no compiling: then a late rank is not late for that."""
    return bool(view.case.stats) and not view.events("jit", "jit-start", "build-failed", "lock-wait")


def rule_opposing_stacks(view: View) -> Iterator[Finding]:
    """Some ranks in a collective, another back at its queue. Python frames alone: weak, with the watchdog's word: fair."""
    rule = "opposing-stacks"
    workers = [p for p in view.processes if p.role != "engine" and p.role != "api" and p.main is not None]
    inside = [p for p in workers if p.doing("collective", "collective-native")]
    outside = [
        p for p in workers if p not in inside and (spot := _elsewhere(p)) is not None and spot[0] in ("worker-dequeue", "queue-get")
    ]
    if inside and outside and not any(p.doing("cuda-event", "cuda-launch") for p in outside):
        refs = [p.main.ref for p in [*inside, *outside] if p.main is not None]
        timeouts = [w.ref for w in view.case.watchdog if w.waited_ms]
        strength = FAIR if timeouts or (inside[0].moved is False and outside[0].moved is False) else WEAK
        names = f"{', '.join(p.label for p in inside[:3])} in a collective, {', '.join(p.label for p in outside[:3])} not"
        yield supported(
            rule, "collective-desync", strength, names, [*refs, *timeouts[:2]], "diverged" if strength == FAIR else None
        )
        return
    if len(inside) > 1 and not outside:
        different = {_operation(p) for p in inside}
        if len(different) > 1 and all(different):
            yield supported(rule, "collective-desync", WEAK, "ranks stand in different collectives: "
                f"{', '.join(sorted(different))}",
                            [p.main.ref for p in inside if p.main], None)  # fmt: skip
            return
    yield unknown(rule, "collective-desync", "no opposing stacks", "py-spy dump --pid PID of every rank")


def _operation(process: Process) -> str:
    thread = process.doing("collective", "collective-native")
    return thread.inside.split(" ")[0] if thread is not None else ""


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
        elsewhere = [spot for p in spots if (spot := _elsewhere(p)) is not None]
        text = f"rank {', '.join(map(str, late))} enqueued fewer operations than the others ({top})"
        if elsewhere and len(elsewhere) == len(late):
            places = "; ".join(_PLACES.get(word, word) for word, _ in elsewhere)
            yield supported(
                rule, "collective-desync", STRONG, f"{text} and {places}", [*refs, *(ref for _, ref in elsewhere)], "diverged"
            )
        else:
            strength = FAIR if _quiet_log(view) and not spots else WEAK
            yield supported(rule, "collective-desync", strength, f"{text}; what it does was not seen", refs)
        return
    yield unknown(rule, "collective-desync", "no watchdog lines of several ranks")


def _flight_groups(view: View) -> dict[str, dict[int, list[FlightEntry]]]:
    table: dict[str, dict[int, list[FlightEntry]]] = {}
    for dump in view.case.flights:
        if dump.rank is None:
            continue
        for entry in dump.entries:
            table.setdefault(entry.group, {}).setdefault(dump.rank, []).append(entry)
    return table


def _flight_late(view: View) -> list[int]:
    late: set[int] = set()
    for by_rank in _flight_groups(view).values():
        tops = {rank: max(e.sequence for e in entries) for rank, entries in by_rank.items()}
        if len(tops) > 1 and len(set(tops.values())) > 1:
            late.update(rank for rank, top in tops.items() if top < max(tops.values()))
    return sorted(late)


def _dump_of(view: View, rank: int) -> FlightRank | None:
    return next((d for d in view.case.flights if d.rank == rank), None)


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
    for group, by_rank in _flight_groups(view).items():
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
    late = _flight_late(view)
    if late:
        spots = [p for rank in late if (p := view.process_of_rank(rank)) is not None]
        elsewhere = [s for p in spots if (s := _elsewhere(p)) is not None]
        if elsewhere and len(elsewhere) == len(late):
            yield supported(rule, "collective-desync", STRONG, f"rank {', '.join(map(str, late))} enqueued fewer collectives and "
                "is elsewhere",
                            [*refs, *(s[1] for s in elsewhere)], "diverged")  # fmt: skip
        else:
            strength = FAIR if _quiet_log(view) and not spots else WEAK
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
                _transport(view),
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


def _transport(view: View) -> str | None:
    return "transport" if _transport_refs(view) else None


def _transport_refs(view: View) -> list[Ref]:
    warned = [e.ref for e in view.events("nccl-warn") if _TRANSPORT.search(e.ref.text)]
    links = [e.ref for e in view.case.kernel if e.kind == "link" or (e.kind == "xid" and e.number == 74)]
    broken = [q.ref for q in view.case.ras if any(c.async_errors for c in q.comms) or "ERROR" in q.errors]
    return [*warned, *links, *broken]


def rule_collective_stuck(view: View) -> Iterator[Finding]:
    """All ranks are in the same collective. What is resident on the GPUs decides: the watchdog cannot tell a kernel ahead of it."""
    rule = "collective-stuck"
    resident = {
        (d.rank if d.rank is not None else d.pid): next((k for k in d.kernels or () if k.family == "nccl"), None)
        for d in view.devices
        if d.kernels
    }
    others = [k for d in view.devices for k in d.kernels or () if k.family != "nccl" and (k.blocks is None or k.blocks)]
    inside = [key for key, kernel in resident.items() if kernel is not None]
    transport = _transport_refs(view)
    kernels = [k for k in resident.values() if k is not None]
    names = {re.sub(r"[(<].*", "", k.name) for k in kernels}
    expected = view.world or len(resident)
    equal = [q for q in view.case.ras if q.errors and all(word == "OK" for word in q.errors)]
    late = late_ranks(view)
    refs = [*(k.ref for k in kernels), *(q.ref for q in equal), *transport[:4]]
    cause = "transport" if transport else None
    if inside and not others and not late:
        if len(inside) >= max(expected, 2):
            if len(names) > 1:
                yield supported(
                    rule, "collective-desync", FAIR, f"the ranks are in different collectives: {', '.join(sorted(names))}", refs
                )
                return
            strength = STRONG if equal or transport else FAIR
            yield supported(
                rule,
                "collective-stuck",
                strength,
                f"{', '.join(sorted(names))} is resident on all {len(inside)} ranks and does not end",
                refs,
                cause,
            )
            return
        yield supported(
            rule,
            "collective-stuck",
            WEAK,
            f"{', '.join(sorted(names))} is resident where it was looked at; the other ranks were not read",
            refs,
            cause,
        )
        return
    if inside and (others or late):
        yield contradicted(rule, "collective-stuck", "a rank is held by something else: those in the collective wait for it",
                           [*(k.ref for k in others), *refs], FAIR)  # fmt: skip
        return
    waiting = {w.rank: w.sequence for w in view.case.watchdog if w.waited_ms and w.rank is not None}
    watch_refs = [w.ref for w in view.case.watchdog if w.waited_ms]
    same = len(waiting) > 1 and len({s for s in waiting.values() if s is not None}) <= 1
    if late:
        yield contradicted(
            rule,
            "collective-stuck",
            f"rank {', '.join(str(r) for r, _ in late)} has not launched it",
            watch_refs or [q.ref for q in view.case.ras],
            FAIR,
        )
        return
    native = [p for p in view.workers if p.doing("collective-native")]
    everyone = bool(native) and len(native) == len([p for p in view.workers if p.main is not None]) and len(native) > 1
    if transport and (watch_refs or everyone or equal):
        strength = FAIR if same or everyone or (equal and view.gpus_in("spin")) else WEAK
        yield supported(
            rule,
            "collective-stuck",
            strength,
            "a collective does not end and the transport reports errors",
            [*watch_refs, *transport, *(p.main.ref for p in native if p.main)],
            "transport",
        )
        return
    if same or everyone:
        yield supported(rule, "collective-stuck", WEAK, "all ranks seen wait for the same collective; a kernel ahead of it would "
                                                        "look the same",
                        [*watch_refs, *(p.main.ref for p in native if p.main)])  # fmt: skip
        return
    yield unknown(rule, "collective-stuck", "no collective was seen on all ranks", "cuda-gdb of every rank: info cuda kernels")
