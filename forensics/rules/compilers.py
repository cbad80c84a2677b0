"""host-jit-compile and host-jit-lock: a rank compiles, or waits for a build that nobody finishes.

vLLM's monitor prints "JIT compilation during inference" after the compile has ended, so that line alone does not show a compile
under way. A waiting lock is legitimate while somebody builds: the lock class needs a dead holder, a failed build, or nobody at
work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..evidence.facts import LogEvent
from ..evidence.refs import Ref
from .base import FAIR, STRONG, WEAK, Finding, contradicted, supported, unknown
from .lateness import late_ranks
from .view import View

__all__ = ["rule_build_lock", "rule_compile_log", "rule_compile_stacks"]

_RANK = re.compile(r"(?:TP|Worker[-_]|rank[ =_]?)(\d+)", re.IGNORECASE)


def _ended(view: View, event: LogEvent) -> bool:
    """Something later in the log shows that this start-up step or compile ended."""
    finals = view.events("compile-done", "capture-progress", "capture-done", "init-done", "serving")
    return any(view.before(event, final) for final in finals)


def rule_compile_stacks(view: View) -> Iterator[Finding]:
    rule = "compile-stacks"
    at_work = [p for p in view.processes if p.doing("jit-compile") and p.role != "api"]
    alive = view.compilers
    if not at_work and not alive:
        yield unknown(
            rule,
            "host-jit-compile",
            "no stack stands in a compiler and no compiler process was listed",
            "py-spy dump --pid PID of every rank, twice",
        )
        return
    threads = [t for p in at_work for t in p.threads if t.waits == "jit-compile"]
    refs = [*(t.ref for t in threads), *(s.ref for s in alive)]
    names = ", ".join(p.label for p in at_work[:3]) or "a compiler process"
    if at_work:
        moving = any(p.moved for p in at_work)
        still = all(p.moved is False for p in at_work) and not alive
        active = any(t.active for t in threads)
        late = {rank for rank, _ in late_ranks(view)}
        behind = any(p.rank in late for p in at_work if p.rank is not None)
        strength = STRONG if moving or alive or behind else WEAK if still and not active else FAIR
        where = threads[0].inside
        suffix = ", between samples the frames move" if moving else ", its compiler runs" if alive else ""
        yield supported(rule, "host-jit-compile", strength, f"{names} compiles: {where}{suffix}", refs)
        return
    locked = [p for p in view.processes if p.doing("jit-lock")]
    yield supported(
        rule,
        "host-jit-compile",
        FAIR if locked or view.phase == "startup" or view.symptoms else WEAK,
        "compiler processes are alive",
        refs,
    )


def rule_compile_log(view: View) -> Iterator[Finding]:
    """Start-up compile under way, or a JIT notice as the last thing before silence."""
    rule = "compile-log"
    started = [e for e in view.events("compile-start", "compile-step") if not _ended(view, e)]
    done = view.events("compile-done")
    jits = view.events("jit")
    begun = [e for e in view.events("jit-start") if not any(view.before(e, d) for d in view.events("jit-done"))]
    if started and view.phase in ("startup", "unknown") and not done:
        waits = [e for e in view.symptoms if e.kind == "shm-wait"]
        idle = all(g.state in ("idle", "low") for g in view.gpus) if view.gpus else None
        dead = view.events("rpc-timeout", "fatal", "engine-failed-start")
        steps = view.events("compile-step")
        strength = WEAK if dead or idle is False else FAIR if waits or steps or idle else WEAK
        yield supported(
            rule,
            "host-jit-compile",
            strength,
            "start-up: compilation has begun and its end is not in the log",
            [*(e.ref for e in started), *(e.ref for e in waits[-1:])],
        )
        return
    late = {rank for rank, _ in late_ranks(view)}
    matching = [e for e in jits if (m := _RANK.search(e.process)) and int(m.group(1)) in late]
    if matching and late:
        yield supported(
            rule,
            "host-jit-compile",
            FAIR,
            f"the late rank {min(late)} reported compiling during inference",
            [e.ref for e in matching],
        )
        return
    if begun and not view.flow.moving:
        yield supported(
            rule,
            "host-jit-compile",
            FAIR if view.symptoms or view.flow.frozen else WEAK,
            "a build has begun and its end is not in the log",
            [e.ref for e in begun],
        )
        return
    if jits and (view.flow.frozen or view.symptoms or view.case.watchdog):
        last = jits[-1]
        flowed = any(view.before(last, line) and line.generation_rate > 0 for line in view.case.stats)
        if flowed:
            yield contradicted(
                rule, "host-jit-compile", "tokens flowed after the last compile that the log reports", [last.ref], WEAK
            )
        elif (seen := _waits_for_gpu(view)) and view.single_gpu is True:
            yield contradicted(rule, "host-jit-compile", "the only worker waits for its GPU, and nothing compiles", seen)
        else:
            yield supported(
                rule,
                "host-jit-compile",
                WEAK,
                "compiling during inference was reported shortly before the silence",
                [e.ref for e in jits[-3:]],
            )
        return
    if done or (started and view.phase in ("started", "serving")):
        yield contradicted(rule, "host-jit-compile", "the compile ended", [e.ref for e in (done or started)[-1:]], WEAK)
        return
    yield unknown(rule, "host-jit-compile", "no compile in the log")


def _waits_for_gpu(view: View) -> list[Ref]:
    """Threads of workers that wait for an event or in a launch; none if anything was seen to compile."""
    if view.compilers or any(t.waits in ("jit-compile", "jit-lock") for p in view.processes for t in p.threads):
        return []
    return [t.ref for p in view.workers for t in p.threads if t.waits in ("cuda-event", "cuda-launch")]


def _holder_dead(view: View) -> list[Ref]:
    """A lock file's holder that is not there any more: gone, defunct, or absent from a process list."""
    return [s.ref for s in view.case.procs if s.gone or s.state == "Z"]


def rule_build_lock(view: View) -> Iterator[Finding]:
    rule = "build-lock"
    waiting = [p for p in view.processes if p.doing("jit-lock")]
    texts = view.events("lock-wait")
    failed = view.events("build-failed")
    ooms = [e for e in view.case.kernel if e.kind == "oom-kill" and re.search(r"cicc|nvcc|ptxas|ninja|cc1plus|cudafe", e.name)]
    building = [p for p in view.processes if p.doing("jit-compile")]
    if not waiting and not texts and not failed:
        yield unknown(rule, "host-jit-lock", "nobody waits for the lock of a build")
        return
    threads = [t for p in waiting for t in p.threads if t.waits == "jit-lock"]
    refs = [*(t.ref for t in threads), *(e.ref for e in texts[-3:])]
    if building or view.compilers:
        yield contradicted(rule, "host-jit-lock", "somebody is building: the others wait for it rightly",
                           [*(p.main.ref for p in building if p.main), *(s.ref for s in view.compilers)])  # fmt: skip
        yield supported(
            rule, "host-jit-compile", FAIR if waiting else WEAK, "a build is under way and the other ranks wait for its lock", refs
        )
        return
    if waiting or texts:
        cause_refs = [*(e.ref for e in failed), *(e.ref for e in ooms)]
        if cause_refs:
            yield supported(
                rule,
                "host-jit-lock",
                STRONG if waiting else FAIR,
                "the build failed and its lock is still waited for",
                [*refs, *cause_refs],
                "build-failed",
            )
            return
        dead = _holder_dead(view)
        if dead:
            yield supported(
                rule, "host-jit-lock", STRONG if waiting else FAIR, "the lock's holder is gone", [*refs, *dead], "holder-dead"
            )
            return
        listed = view.process_table
        everyone = bool(waiting) and len(waiting) == len([p for p in view.workers if p.main]) and len(waiting) > 1
        if waiting and listed:
            yield supported(
                rule,
                "host-jit-lock",
                FAIR,
                "ranks wait for a build's lock and no compiler is in the process list",
                [*refs, listed[0].ref],
            )
            return
        if everyone and all(p.moved is False for p in waiting):
            yield supported(rule, "host-jit-lock", FAIR, "every rank waits for the lock of a build, unmoved: nobody builds", refs)
            return
        # Without a look at the others, a builder may be at work: the parent is the right answer then.
        yield supported(
            rule,
            "host-jit-compile",
            FAIR if waiting else WEAK,
            "a rank waits for the lock of a build; whether somebody builds was not seen",
            refs,
        )
        yield supported(rule, "host-jit-lock", WEAK, "a rank waits for the lock of a build; its holder was not seen", refs)
        return
    yield supported(
        rule, "host-jit-lock", WEAK, "a build failed; who waits for it was not seen", [e.ref for e in failed], "build-failed"
    )
