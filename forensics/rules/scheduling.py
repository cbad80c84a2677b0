"""scheduler-stall, kv-pressure-thrash, kv-transfer-stall: the engine's loop turns and admits nothing, or admits and preempts."""

from __future__ import annotations

from collections.abc import Iterator

from ..evidence.refs import Ref
from .base import FAIR, STRONG, WEAK, Finding, contradicted, supported, unknown
from .view import View

__all__ = ["rule_kv_thrash", "rule_kv_transfer", "rule_scheduler_stall"]

_LONG = 20.0


def _admission(view: View) -> tuple[bool, bool, list[Ref]]:
    """(nothing runs while something waits, seen twice or for long, citations)."""
    flow = view.flow
    refs = list(flow.gauge_refs)
    runs = [run for run in flow.stats if run.state == "admission"]
    lines = bool(runs) and not any(run.state == "flowing" for run in flow.stats)
    gauges = flow.running == 0 and (flow.waiting or 0) > 0
    if not (lines or gauges):
        return False, False, []
    twice = any(run.lines > 1 and (run.seconds is None or run.seconds >= _LONG) for run in runs) or (
        gauges and flow.counters == "frozen"
    )
    refs += [ref for run in runs for ref in (run.first.ref, run.last.ref)]
    return True, twice, list(dict.fromkeys([*refs, *flow.counter_refs]))


def rule_scheduler_stall(view: View) -> Iterator[Finding]:
    rule = "scheduler-stall"
    stalled, twice, refs = _admission(view)
    flow = view.flow
    if not stalled:
        if flow.frozen:
            yield contradicted(rule, "scheduler-stall", "requests are running, not waiting", list(flow.refs), WEAK)
        else:
            yield unknown(
                rule,
                "scheduler-stall",
                "the queue lengths do not show it",
                "two scrapes of /metrics: num_requests_running, num_requests_waiting_by_reason",
            )
        return
    turning = [t for p in view.engines if (t := p.doing("schedule")) is not None]
    busy = view.gpus_in("spin", "working", "busy")
    idle = bool(view.gpus) and not busy
    if busy:
        yield contradicted(rule, "scheduler-stall", "a GPU is busy", [r for g in busy for r in g.refs], WEAK)
        return
    full = flow.kv is not None and flow.kv >= 95.0
    cause = None
    if (flow.capacity or 0) > 0 and not flow.deferred:
        cause = "admission"
    elif (flow.deferred or 0) > 0 and not flow.capacity:
        cause = "deferred"
    if cause is None and flow.deferred is None and not full and twice:
        cause = "admission"
    parked = _parked(view)
    support = twice + bool(turning) + idle + (flow.capacity is not None or flow.deferred is not None)
    strength = STRONG if twice and support >= 2 and not full else FAIR if twice else WEAK
    notices = view.events("kv-transfer")
    if notices and flow.capacity is None:
        # The engine says that requests wait for KV from elsewhere: refusing them is then what a scheduler has to do.
        cause = "deferred" if cause == "deferred" else None
    if cause == "deferred" or parked or notices:
        strength = min(strength, WEAK if cause == "deferred" and not _no_connector(view) else FAIR)
    text = (
        f"nothing runs, {flow.waiting or 0:g} wait"
        + (f", KV {flow.kv:g} %" if flow.kv is not None else "")
        + (", the loop turns" if turning else "")
    )
    yield supported(
        rule,
        "scheduler-stall",
        strength,
        text,
        [*refs, *(t.ref for t in turning), *(r for g in view.gpus for r in g.refs if idle)],
        cause,
    )


def _no_connector(view: View) -> bool:
    return bool(view.case.versions) and not view.events("kv-transfer") and not _parked(view)


def _parked(view: View) -> list[Ref]:
    return [t.ref for p in view.processes for t in p.threads if t.waits == "kv-transfer"]


def rule_kv_thrash(view: View) -> Iterator[Finding]:
    """Preempt, re-add, preempt, at no tokens."""
    rule = "kv-thrash"
    flow = view.flow
    counts = [line.preemptions for line in view.case.stats if line.preemptions is not None]
    # The engine prints preemptions of each interval, so two lines that have some are a rise, too.
    rising_lines = len(counts) > 1 and (counts[-1] > counts[0] or sum(1 for count in counts if count) > 1)
    rising = flow.preemptions is not None and flow.preemptions[1] > flow.preemptions[0]
    notices = view.events("preempt")
    if not (rising or rising_lines or len(notices) > 2):
        if flow.preemptions is not None:
            yield contradicted(rule, "kv-pressure-thrash", "no preemptions between the scrapes", list(flow.counter_refs), WEAK)
        else:
            yield unknown(rule, "kv-pressure-thrash", "no count of preemptions", "two scrapes of vllm:num_preemptions_total")
        return
    refs = [*flow.counter_refs, *flow.gauge_refs, *(line.ref for line in view.case.stats[-2:]), *(e.ref for e in notices[-3:])]
    tokens = [s for s in view.metric("vllm:generation_tokens_total") if len(s) > 1]
    frozen = (
        any(s[-1].value == s[0].value for s in tokens)
        if tokens
        else view.flow.frozen or any(r.state in ("frozen", "admission") for r in flow.stats)
    )
    last = view.last_stats()
    crawling = any(line.generation_rate < 1.0 for line in last) if last else False
    full = flow.kv is not None and flow.kv >= 80.0
    if view.flow.moving and not crawling:
        yield contradicted(rule, "kv-pressure-thrash", "tokens flow", refs, WEAK)
        return
    if frozen or crawling:
        strength = STRONG if (rising or rising_lines) and full else FAIR if (rising or rising_lines) or full else WEAK
        amount = f"{flow.preemptions[0]:g} to {flow.preemptions[1]:g}" if rising and flow.preemptions else "rising"
        yield supported(
            rule,
            "kv-pressure-thrash",
            strength,
            f"preemptions {amount} and no tokens" + (f", KV {flow.kv:g} %" if flow.kv is not None else ""),
            refs,
        )
        return
    yield unknown(
        rule,
        "kv-pressure-thrash",
        "preemptions rise; whether tokens flow was not seen",
        "two scrapes of vllm:generation_tokens_total",
        refs,
    )


def rule_kv_transfer(view: View) -> Iterator[Finding]:
    """Requests parked for KV that does not arrive."""
    rule = "kv-transfer"
    notices = view.events("kv-transfer")
    parked = _parked(view)
    stalled, twice, refs = _admission(view)
    flow = view.flow
    deferred = (flow.deferred or 0) > 0
    server = [
        e
        for e in view.case.kernel
        if e.kind == "oom-kill" and any(w in e.name.lower() for w in ("lmcache", "mooncake", "nixl", "redis", "kv"))
    ]
    if not notices and not parked and not server:
        yield unknown(rule, "kv-transfer-stall", "no KV connector in what was read")
        return
    stopped = stalled or view.flow.frozen or any(r.state in ("admission", "frozen") for r in flow.stats)
    evidence = [*(e.ref for e in notices[-4:]), *parked[:4], *(e.ref for e in server)]
    busy = view.gpus_in("spin", "working")
    if busy:
        yield contradicted(rule, "kv-transfer-stall", "a GPU is busy", [r for g in busy for r in g.refs], WEAK)
        return
    kinds = bool(notices) + bool(parked) + bool(server) + deferred
    if stopped and kinds >= 2:
        strength = STRONG if twice or deferred else FAIR
    elif stopped or kinds >= 2:
        strength = FAIR
    else:
        strength = WEAK
    yield supported(
        rule,
        "kv-transfer-stall",
        strength,
        "requests wait for KV that does not arrive",
        [*refs, *evidence],
        "deferred" if deferred else None,
    )
