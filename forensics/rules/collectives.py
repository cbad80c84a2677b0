"""collective-desync and collective-stuck. The rank that waits inside a collective is the victim; why is the late one late?

RAS counts that differ and stay, plus a late rank that was seen elsewhere, are a divergence. The same counts with a late rank that
compiles, sits on the GPU or is dead are that rank's trouble, not a divergence: without a look at it the answer stays weak.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..evidence.refs import Ref
from .base import FAIR, STRONG, WEAK, Finding, contradicted, supported, unknown
from .lateness import PLACES, late_ranks, mismatches, quiet_log, transport_refs, whereabouts
from .view import Process, View

__all__ = ["rule_collective_stuck", "rule_counts", "rule_opposing_stacks"]


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
        elsewhere = [(rank, spot) for rank, process in spots if (spot := whereabouts(process)) is not None]
        if elsewhere and len(elsewhere) == len(mismatch.late):
            places = "; ".join(f"rank {rank} {PLACES.get(spot[0], spot[0])}" for rank, spot in elsewhere)
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
            strength = FAIR if quiet_log(view) else WEAK
            yield supported(
                rule,
                "collective-desync",
                strength,
                f"{what}, and stays so; what the late rank does was not seen",
                [*refs, *timeouts[:2]],
            )
        else:
            yield supported(rule, "collective-desync", WEAK, f"{what} in one query: normal if it changes", refs)


def rule_opposing_stacks(view: View) -> Iterator[Finding]:
    """Some ranks in a collective, another back at its queue. Python frames alone: weak, with the watchdog's word: fair."""
    rule = "opposing-stacks"
    workers = [p for p in view.processes if p.role != "engine" and p.role != "api" and p.main is not None]
    inside = [p for p in workers if p.doing("collective", "collective-native")]
    outside = [
        p
        for p in workers
        if p not in inside and (spot := whereabouts(p)) is not None and spot[0] in ("worker-dequeue", "queue-get")
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
    transport = transport_refs(view)
    kernels = [k for k in resident.values() if k is not None]
    names = {re.sub(r"[(<].*", "", k.name) for k in kernels}
    numbers = [key for key in [d.rank for d in view.devices] if key is not None]
    # Ranks 0, 1 and 3 seen: then there is a rank 2, whatever else is not known.
    expected = view.world or max(len(resident), max(numbers, default=-1) + 1)
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
            # How many ranks there are must come from somewhere else than from those that were looked at.
            counted = view.world is not None or len({g.index for g in view.gpus if g.index is not None}) == len(inside)
            strength = STRONG if equal or transport else FAIR if counted else WEAK
            which = f"all {len(inside)} ranks" if counted or equal else f"the {len(inside)} ranks that were looked at"
            yield supported(
                rule,
                "collective-stuck",
                strength,
                f"{', '.join(sorted(names))} is resident on {which} and does not end",
                refs,
                cause,
            )
            return
        timed_out = {w.rank: w.sequence for w in view.case.watchdog if w.waited_ms and w.rank is not None}
        everyone = len(timed_out) >= max(expected, 2) and len(set(timed_out.values())) == 1
        yield supported(
            rule,
            "collective-stuck",
            FAIR if everyone and equal and len(names) == 1 else WEAK,
            f"{', '.join(sorted(names))} is resident where it was looked at; "
            + ("every rank's watchdog waits for the same operation" if everyone else "the other ranks were not read"),
            [*refs, *(w.ref for w in view.case.watchdog if w.waited_ms and everyone)],
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
