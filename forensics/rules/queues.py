"""host-ipc-stall and host-cpu-livelock: the GPU is idle and the host is the reason.

In an IPC stall the engine waits for a reply, every worker waits for a command, and nothing is in flight on the GPU: the copy thread
waits in ``queue.get``. With the copy thread in an event wait it is the GPU that stands (vllm-project/vllm#50835, #52247).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .base import FAIR, STRONG, WEAK, Finding, contradicted, supported, unknown
from .view import Process, View

__all__ = ["rule_ipc_stall", "rule_livelock"]


def _idle_worker(process: Process) -> bool:
    main = process.main
    if main is None or main.waits != "worker-dequeue":
        return False
    copy = process.copy_thread
    if copy is not None and copy.waits not in ("queue-get", "worker-dequeue"):
        return False
    return (
        process.doing("cuda-event", "cuda-launch", "collective", "collective-native", "jit-compile", "jit-lock", "driver") is None
    )


def rule_ipc_stall(view: View) -> Iterator[Finding]:
    rule = "ipc-stall"
    waiting = [p for p in view.engines if p.main is not None and p.main.waits == "engine-wait-reply"]
    workers = [p for p in view.workers if p.main is not None]
    busy_gpus = view.gpus_in("spin", "working", "busy")
    if not waiting or not workers:
        yield unknown(
            rule,
            "host-ipc-stall",
            "both ends of the queue were not seen",
            "py-spy dump --pid PID of the engine process and of every worker",
        )
        return
    idle = [p for p in workers if _idle_worker(p)]
    refs = [
        *(p.main.ref for p in waiting if p.main),
        *(p.main.ref for p in idle if p.main),
        *(c.ref for p in idle if (c := p.copy_thread)),
    ]
    if len(idle) < len(workers):
        held = [p for p in workers if p not in idle]
        yield contradicted(
            rule, "host-ipc-stall", f"{held[0].label} is at work or waits for something else", [p.main.ref for p in held if p.main]
        )
        return
    if busy_gpus:
        yield contradicted(rule, "host-ipc-stall", "a GPU is busy", [r for g in busy_gpus for r in g.refs])
        return
    gpu_idle = bool(view.gpus) and all(g.state in ("idle", "low") for g in view.gpus)
    copies = [c for p in idle if (c := p.copy_thread) is not None]
    expected = view.world
    all_seen = (expected is not None and len(idle) >= expected) or any(t.repeat is not None for p in idle for t in p.threads)
    steady = all(p.moved is False for p in [*waiting, *idle])
    if not gpu_idle:
        yield supported(
            rule,
            "host-ipc-stall",
            WEAK,
            "the engine waits for a reply and the workers seen wait for a command; the GPU was not read",
            refs,
            "lost-wakeup",
        )
        return
    strength = STRONG if steady and all_seen and copies and (view.flow.frozen or view.symptoms) else FAIR
    gpu_refs = [r for g in view.gpus for r in g.refs]
    yield supported(rule, "host-ipc-stall", strength, "the engine waits for a reply, the workers wait for a command, the copy "
                                                      "thread has nothing, the GPUs are idle",
                    [*refs, *gpu_refs], "lost-wakeup")  # fmt: skip


#: Innermost functions of a thread that rests, whatever the tool calls it.
_LOOP_OK = re.compile(r"(?:poll|select|epoll|epoll_wait|accept|sleep|wait|recv\w*|get|dequeue|acquire\w*)$")


def rule_livelock(view: View) -> Iterator[Finding]:
    """The same active frame again and again, while the GPU is idle and no token comes."""
    rule = "livelock"
    candidates = [
        p for p in [*view.engines, *view.workers]
        if (m := p.main) is not None and m.waits in ("other", "schedule") and not _LOOP_OK.match(m.frames[0].function)
    ]  # fmt: skip
    busy = [p for p in candidates if (m := p.main) is not None and (m.active or m.gil)]
    if not busy:
        yield unknown(
            rule,
            "host-cpu-livelock",
            "no engine thread was seen busy in the same place",
            "py-spy dump --pid PID of the engine process, three times",
        )
        return
    gpu_busy = view.gpus_in("spin", "working", "busy")
    if gpu_busy:
        yield contradicted(rule, "host-cpu-livelock", "a GPU is busy", [r for g in gpu_busy for r in g.refs], WEAK)
    process = next((p for p in busy if p.moved is False), busy[0])
    main = process.main
    assert main is not None
    cpu = [s for s in view.procs(process.pid) if (s.cpu or 0) >= 80]
    if not cpu:
        cpu = [s for s in view.case.procs if (s.cpu or 0) >= 80 and s.name and "Engine" in s.name and process.role == "engine"]
    gpu_idle = bool(view.gpus) and all(g.state in ("idle", "low") for g in view.gpus)
    stopped = view.flow.frozen or bool(view.gave_up) or view.flow.counters == "frozen"
    refs = [*(t.ref for t in process.samples), *(s.ref for s in cpu), *(r for g in view.gpus for r in g.refs if gpu_idle)]
    if process.moved:
        same_top = len({t.frames[0].function for t in process.samples}) == 1 and process.count >= 3
        if not (same_top and cpu and gpu_idle and stopped):
            yield unknown(rule, "host-cpu-livelock", "the busy frames move", refs=refs)
            return
    points = (process.moved is False) + (process.count >= 3) + bool(cpu) + gpu_idle + stopped
    if process.moved is False and gpu_idle and points >= 4:
        strength = STRONG
    elif points >= 3 and (process.moved is False or (cpu and stopped)):
        strength = FAIR
    else:
        strength = WEAK
    if points < 2:
        yield unknown(rule, "host-cpu-livelock", "one sample of a busy thread", "two more samples and the CPU time", refs)
        return
    where = f"{main.frames[0].function} ({main.frames[0].file}:{main.frames[0].line})"
    yield supported(rule, "host-cpu-livelock", strength, f"{process.label} burns CPU in {where}, {process.count} sample(s)", refs)
