"""not-hung: what was seen to end by itself, or never was a hang. Never said over a standing sign of a hang."""

from __future__ import annotations

from collections.abc import Iterator

from ..evidence.facts import LogEvent
from .agents import overdue
from .base import FAIR, STRONG, WEAK, Finding, contradicted, supported, unknown
from .view import View

__all__ = ["rule_client_gone", "rule_idle", "rule_recovered", "rule_slow", "rule_startup"]


def _later_trouble(view: View, event: LogEvent) -> bool:
    """Something after ``event`` says that the engine stopped."""
    bad = view.events("rpc-timeout", "fatal", "worker-died", "engine-proc-died")
    return any(view.before(event, b) for b in bad)


def rule_startup(view: View) -> Iterator[Finding]:
    """The waiting lines stand before "startup complete", and nothing bad after it."""
    rule = "startup-ended"
    ready = view.events("serving")
    work = view.startup_events
    if ready:
        last = ready[-1]
        before = [e for e in view.symptoms if view.before(e, last)]
        after = [e for e in view.symptoms if view.before(last, e)]
        unplaced = [e for e in view.symptoms if e not in before and e not in after]
        calm = not after and not unplaced and not _later_trouble(view, last) and not view.flow.frozen
        calm = calm and not any(overdue(one) for one in view.agents)
        served = [line for line in view.case.stats if line.generation_rate > 0 and view.before(last, line)]
        if calm and served and any(run.state in ("idle", "admission") for run in view.flow.stats):
            yield unknown(rule, "not-hung", "it started, served and then stopped serving: the start-up explains the old lines only",
                          refs=[last.ref, served[-1].ref])  # fmt: skip
            return
        if before and calm:
            yield supported(
                rule,
                "not-hung",
                STRONG,
                "the engine waited during start-up and then finished it",
                [*(e.ref for e in before[-2:]), *(e.ref for e in work[-2:]), last.ref],
                "startup",
            )
            return
        used = [e for e in view.events("jit") if view.before(last, e)]
        if calm and used and view.phase == "started":
            yield unknown(rule, "not-hung", "it started and computed something; what follows is another question",
                          refs=[last.ref, used[-1].ref])  # fmt: skip
            return
        if calm and work and view.phase == "started":
            yield supported(
                rule,
                "not-hung",
                FAIR,
                "start-up finished and nothing bad follows",
                [*(e.ref for e in work[-2:]), last.ref],
                "startup",
            )
            return
        yield unknown(rule, "not-hung", "start-up finished; what follows is another question", refs=[last.ref])
        return
    capture = view.events("capture-progress")
    if capture and view.phase == "startup" and not view.gave_up:
        steps = {e.fields.get("done") for e in capture}
        if len(steps) > 1:
            yield supported(
                rule, "not-hung", FAIR, "start-up captures graphs, and it moves", [capture[0].ref, capture[-1].ref], "startup"
            )
            return
        yield supported(rule, "not-hung", WEAK, "start-up captures graphs", [capture[-1].ref], "startup")
        return
    yield unknown(rule, "not-hung", "no finished start-up in what was read")


def rule_recovered(view: View) -> Iterator[Finding]:
    """A silence that ended by itself: tokens flow after it."""
    rule = "recovered"
    flow = view.flow
    flowing = bool(flow.stats) and all(run.state == "flowing" for run in flow.stats)
    if flow.stalls and flowing and flow.counters != "frozen":
        here, after, gap = flow.stalls[-1]
        bad = [e for e in view.events("rpc-timeout", "fatal", "worker-died", "engine-proc-died") if not view.before(e, after)]
        if bad:
            yield unknown(
                rule, "not-hung", "an earlier silence ended by itself, a later one did not", refs=[here.ref, after.ref, bad[0].ref]
            )
            return
        yield supported(
            rule,
            "not-hung",
            STRONG,
            f"a silence of {gap:.0f} s ended by itself: tokens flow after it",
            [here.ref, after.ref],
            "slow-step",
        )
        return
    waits = [e for e in view.symptoms if e.kind == "shm-wait"]
    if waits and flowing and not view.events("rpc-timeout", "fatal"):
        last = [run.last for run in flow.stats]
        if all(view.before(waits[-1], line) for line in last):
            yield supported(
                rule,
                "not-hung",
                STRONG,
                "tokens flow after the waiting lines",
                [waits[-1].ref, *(line.ref for line in last)],
                "slow-step",
            )
            return
    if flow.counters == "moving" and (flow.running or 0) > 0:
        strength = FAIR if not view.gave_up else WEAK
        yield supported(rule, "not-hung", strength, "tokens move between two scrapes", list(flow.counter_refs), "slow-step")
        return
    if flow.counters == "unplaced":
        yield unknown(
            rule,
            "not-hung",
            "tokens moved between two scrapes of unknown time, and the log ends with requests that get none",
            "one more scrape of /metrics in 60 s",
            refs=list(flow.refs),
        )
        return
    if flow.frozen:
        strength = WEAK if view.gpus_in("working") and not view.gpus_in("spin") else FAIR
        yield contradicted(rule, "not-hung", "requests run and no token comes", list(flow.refs), strength)
        return
    yield unknown(rule, "not-hung", "no silence that ended was seen", "one more scrape of /metrics in 60 s")


def rule_slow(view: View) -> Iterator[Finding]:
    """Busy with memory traffic and near its busy power: work. Whether the step ends has to be waited for."""
    rule = "gpu-works"
    working = view.gpus_in("working")
    if not working:
        spin = view.gpus_in("spin")
        if spin:
            yield contradicted(rule, "not-hung", "the GPU is full without memory traffic", [r for g in spin for r in g.refs], FAIR)
        else:
            yield unknown(rule, "not-hung", "no GPU was seen at work")
        return
    if view.gpus_in("spin"):
        yield unknown(rule, "not-hung", "some GPUs work and others spin", refs=[r for g in view.gpus for r in g.refs])
        return
    refs = [r for g in working for r in g.refs]
    steady = all(g.steady > 1 for g in working)
    text = "; ".join(f"{g.label}: {g.reading()}" for g in working[:3])
    if view.gave_up:
        yield supported(rule, "not-hung", WEAK, f"the GPU moves memory ({text}), yet the engine gave up", refs, "slow-step")
    elif view.flow.frozen:
        yield supported(
            rule,
            "not-hung",
            FAIR if steady else WEAK,
            f"no token yet, but the GPU works: {text}",
            [*refs, *view.flow.refs],
            "slow-step",
        )
    else:
        yield supported(rule, "not-hung", WEAK, f"the GPU works: {text}", refs, "slow-step")


def rule_client_gone(view: View) -> Iterator[Finding]:
    rule = "client-gone"
    aborts = view.events("abort", "http-499")
    if not aborts:
        yield unknown(rule, "not-hung", "no aborts in the log (they are only logged with --enable-log-requests)")
        return
    flow = view.flow
    standing = flow.frozen or view.gave_up or view.events("fatal")
    spin = view.gpus_in("spin")
    if standing or spin:
        yield unknown(
            rule,
            "not-hung",
            "clients went away, but the engine stands: aborts pile up behind a hang too",
            refs=[e.ref for e in aborts[:3]],
        )
        return
    empty = (flow.running == 0 and not flow.waiting) or any(run.state == "idle" for run in flow.stats)
    healthy = flow.moving or bool(view.events("http-completion-ok"))
    refs = [*(e.ref for e in aborts[:4]), *flow.gauge_refs, *(run.last.ref for run in flow.stats)]
    if empty or healthy:
        idle_after = [run.last for run in flow.stats if run.state == "idle" and view.before(aborts[-1], run.last)]
        others = [run for run in flow.stats if run.state == "flowing" and view.before(aborts[-1], run.last)]
        both = (
            bool(idle_after)
            or (bool(others) and len(others) == len(flow.stats))
            or (
                empty
                and (
                    healthy
                    or (bool(view.gpus) and all(g.state in ("idle", "low") for g in view.gpus))
                    or any(t.waits == "engine-idle" for t in view.case.threads)
                )
            )
        )
        yield supported(
            rule,
            "not-hung",
            STRONG if both else FAIR,
            "the clients closed their requests; the engine has nothing left to do",
            refs,
            "client-gone",
        )
        return
    yield supported(rule, "not-hung", WEAK, "clients closed requests", refs, "client-gone")


def rule_idle(view: View) -> Iterator[Finding]:
    """Nothing runs, nothing waits, and the engine waits for requests. Gauges alone go blind, so they never carry this alone."""
    rule = "idle"
    flow = view.flow
    idle_lines = bool(flow.stats) and all(run.state == "idle" for run in flow.stats)
    idle_gauges = flow.running == 0 and not flow.waiting and bool(flow.gauge_refs)
    parked = [p for p in view.engines if p.main is not None and p.main.waits == "engine-idle"]
    if not (idle_lines or idle_gauges or parked):
        yield unknown(rule, "not-hung", "the engine was not seen idle")
        return
    ready = view.events("serving")
    standing = [e for e in view.symptoms if not any(view.before(e, r) for r in ready)]
    if standing or view.gpus_in("spin"):
        yield unknown(
            rule, "not-hung", "the gauges say idle, other signs do not: gauges of a stuck engine read 0", refs=list(flow.gauge_refs)
        )
        return
    busy = [
        p for p in view.engines if p.main is not None and p.main.waits in ("other", "schedule") and (p.main.active or p.main.gil)
    ]
    if busy:
        yield contradicted(
            rule, "not-hung", "the gauges say idle while the engine's thread burns CPU", [p.main.ref for p in busy if p.main], WEAK
        )
        return
    gpu_idle = bool(view.gpus) and all(g.state in ("idle", "low") for g in view.gpus)
    answered = bool(view.events("http-completion-ok"))
    quiet = idle_lines or idle_gauges
    refs = [
        *flow.gauge_refs,
        *(run.last.ref for run in flow.stats),
        *(p.main.ref for p in parked if p.main),
        *(r for g in view.gpus for r in g.refs if gpu_idle),
    ]
    if parked and quiet:
        strength = STRONG if gpu_idle or answered else FAIR
    elif (parked and (gpu_idle or answered)) or (idle_lines and idle_gauges and gpu_idle and flow.scrapes > 1):
        strength = FAIR
    else:
        strength = WEAK
    yield supported(
        rule,
        "not-hung",
        strength,
        "nothing runs, nothing waits" + (", the engine waits for requests" if parked else ""),
        refs,
        "idle",
    )
