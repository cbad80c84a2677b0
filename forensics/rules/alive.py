"""worker-dead: a process is gone. Gone before the engine gave up is a cause; gone after it is a consequence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..evidence.facts import KernelEvent, LogEvent
from ..evidence.refs import Ref
from .base import FAIR, STRONG, WEAK, Finding, contradicted, supported, unknown
from .view import View

__all__ = ["rule_worker_dead"]

_OURS = re.compile(r"vllm|VLLM|EngineCore|Worker|python|pt_main|ray::|sglang", re.IGNORECASE)
_TITLE = re.compile(r"VLLM|EngineCore|VllmWorker|RayWorker|Worker_TP", re.IGNORECASE)
_CODE_SIGNAL = {137: 9, 139: 11, 134: 6, 143: 15, 135: 7}


def _signal(code: str) -> int | None:
    if not code.lstrip("-").isdigit():
        return None
    number = int(code)
    if number < 0:
        return -number
    return _CODE_SIGNAL.get(number)


def _ooms(view: View, pids: set[int]) -> tuple[list[KernelEvent], list[KernelEvent]]:
    """(of the engine's processes by name or pid, others)."""
    events = [e for e in view.case.kernel if e.kind == "oom-kill"]
    ours = [
        e
        for e in events
        if _TITLE.search(e.name)
        or (e.pid in pids and e.pid is not None)
        or (_OURS.search(e.name) and not re.search(r"lmcache", e.name))
    ]
    return ours, [e for e in events if e not in ours]


def _planned(view: View, event: LogEvent) -> bool:
    return any(view.before(stop, event) and "still running after" not in stop.ref.text for stop in view.events("shutdown"))


def rule_worker_dead(view: View) -> Iterator[Finding]:
    rule = "worker-dead"
    pids = {e.pid for e in view.case.events if e.pid is not None and "APIServer" not in e.process} | {
        p.pid for p in view.processes if p.pid is not None
    }
    died = view.events("worker-died")
    engine = view.events("engine-proc-died")
    given_up = [*view.gave_up]
    genuine = [e for e in died if not any(view.before(t, e) for t in given_up) and not _planned(view, e)]
    after = [e for e in died if e not in genuine]
    ours, others = _ooms(view, pids)
    segfaults = [e for e in view.case.kernel if e.kind == "segfault" and _OURS.search(e.name) and view.kernel_link(e) != "old"]
    if genuine:
        yield _death(view, genuine, ours, segfaults)
        return
    if after:
        why = "the process ended only after the engine had given up on the step" if given_up else "the process was asked to stop"
        yield contradicted(
            rule, "worker-dead", f"{why}: a consequence", [*(e.ref for e in given_up[:2]), *(e.ref for e in after)], FAIR
        )
        return
    early_ooms = [e for e in ours if not any(view.before(t, e) for t in given_up) and view.kernel_link(e) != "old"]
    if early_ooms:
        named = [e for e in early_ooms if _TITLE.search(e.name) or e.pid in pids]
        tied = not view.engine_speaks or any(view.kernel_link(e) == "linked" for e in early_ooms)
        yield supported(rule, "worker-dead", FAIR if named and tied else WEAK, f"the OOM killer ended {early_ooms[0].name} (pid "
            f"{early_ooms[0].pid})",
                        [e.ref for e in early_ooms], "oom-killed")  # fmt: skip
        return
    pods = view.events("pod-oom")
    if pods:
        yield supported(
            rule, "worker-dead", FAIR, "the container or unit was ended by the OOM killer", [e.ref for e in pods], "oom-killed"
        )
        return
    if segfaults:
        yield supported(
            rule, "worker-dead", FAIR, f"{segfaults[0].name} (pid {segfaults[0].pid}) crashed", [e.ref for e in segfaults], "signal"
        )
        return
    actors = [e for e in view.events("actor-died") if not any(view.before(t, e) for t in given_up)]
    if actors:
        oom = any("OOM" in e.ref.text or "out of memory" in e.ref.text.lower() for e in actors)
        yield supported(rule, "worker-dead", FAIR, "Ray lost a worker", [e.ref for e in actors], "oom-killed" if oom else None)
        return
    units = [e for e in view.events("unit-killed") if e.fields.get("how") in ("killed", "dumped")]
    if units:
        kill = "KILL" in units[0].fields.get("status", "")
        yield supported(rule, "worker-dead", WEAK if kill else FAIR, "the unit's main process was ended by a signal",
            [e.ref for e in units],
                        None if kill else "signal")  # fmt: skip
        return
    gone = [
        s
        for s in view.case.procs
        if (s.gone and s.pid in pids) or (s.state in ("Z", "X") and (_TITLE.search(s.name) or s.pid in pids))
    ]
    dead = [q for q in view.case.ras if q.dead_processes or any(c.dead for c in q.comms)]
    missing = _missing_from_table(view)
    refs = [*(s.ref for s in gone), *(q.ref for q in dead), *missing]
    if gone or missing:
        yield supported(rule, "worker-dead", FAIR, "a process of the engine is gone", refs)
        return
    if dead:
        yield supported(rule, "worker-dead", WEAK, "NCCL's RAS counts a process as dead (unreachable)", refs)
        return
    if engine and not given_up and not view.events("fatal"):
        code = next((e.fields.get("code", "") for e in engine if e.fields.get("code")), "")
        signal = _signal(code) if code else None
        cause = (
            None
            if signal in (9, None) and not (code.isdigit() and code != "0" and signal is None)
            else "signal"
            if signal
            else "exit"
        )
        yield supported(rule, "worker-dead", FAIR, "the engine's process is gone", [e.ref for e in engine], cause)
        return
    if others:
        yield unknown(
            rule, "worker-dead", f"the OOM killer ended {others[0].name}, which is no worker", refs=[e.ref for e in others]
        )
        return
    alive = [s for s in view.process_table if _TITLE.search(s.name) and s.state not in ("Z", "X")]
    if alive:
        yield contradicted(rule, "worker-dead", "the engine's processes are in the process list", [s.ref for s in alive], WEAK)
        return
    yield unknown(
        rule,
        "worker-dead",
        "no death in what was read",
        "ps -eo pid,ppid,stat,wchan:32,pcpu,etime,args | grep -i -E 'vllm|Engine|Worker'",
    )


def _death(view: View, genuine: list[LogEvent], ours: list[KernelEvent], segfaults: list[KernelEvent]) -> Finding:
    codes = [e.fields.get("code", "") for e in genuine]
    signals = [s for s in (_signal(c) for c in codes) if s is not None]
    refs = [e.ref for e in genuine]
    name = genuine[0].fields.get("name", "a worker")
    killed = [e for e in ours if not any(view.before(d, e) for d in genuine) and view.kernel_link(e) != "old"]
    pods = view.events("pod-oom")
    # Older releases print no exit code; a kill without the kernel's word may be the OOM killer or an operator: no cause then.
    if (killed or pods) and (not signals or 9 in signals):
        text = f"{name} was ended by the OOM killer"
        return supported(
            "worker-dead", "worker-dead", STRONG, text, [*refs, *(e.ref for e in killed), *(e.ref for e in pods)], "oom-killed"
        )
    if signals:
        signal = signals[0]
        clean_log = bool(view.case.kernel_log_seen) and not ours
        cause = "signal" if signal != 9 or clean_log else None
        return supported(
            "worker-dead", "worker-dead", STRONG, f"{name} died by signal {signal}", [*refs, *(e.ref for e in segfaults)], cause
        )
    plain = [c for c in codes if c.isdigit()]
    if plain:
        return supported("worker-dead", "worker-dead", STRONG, f"{name} exited with status {plain[0]}", refs, "exit")
    if segfaults:
        return supported("worker-dead", "worker-dead", STRONG, f"{name} crashed", [*refs, *(e.ref for e in segfaults)], "signal")
    return supported("worker-dead", "worker-dead", STRONG, f"{name} died (this release prints no exit code)", refs)


def _missing_from_table(view: View) -> list[Ref]:
    """Lines of workers that the log names and a listing of the same processes lacks."""
    listed = {s.pid for s in view.process_table}
    if not any(_TITLE.search(s.name) for s in view.process_table):
        return []
    named = {e.pid: e for e in view.case.events if e.pid is not None and re.match(r"Worker|VllmWorker|EngineCore", e.process)}
    if not named or not any(pid in listed for pid in named):
        return []
    absent = [event for pid, event in named.items() if pid not in listed]
    return [event.ref for event in absent] + ([view.process_table[0].ref] if absent else [])
