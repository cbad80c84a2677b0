"""gpu-kernel-stuck: a kernel never retires; which one is not proven. The parent of all GPU waits: the answer without a look."""

from __future__ import annotations

from collections.abc import Iterator

from .base import FAIR, WEAK, Finding, contradicted, supported, unknown
from .view import View

__all__ = ["rule_host_sees_gpu", "rule_power"]


def rule_power(view: View) -> Iterator[Finding]:
    """Power and memory utilisation: a full GPU that moves nothing, while no token comes."""
    rule = "power"
    spin, idle, working = view.gpus_in("spin"), view.gpus_in("idle"), view.gpus_in("working")
    stopped = (
        view.flow.frozen or bool(view.gave_up) or any(line.running > 0 and line.generation_rate == 0 for line in view.last_stats())
    )
    if not view.gpus:
        yield unknown(rule, "gpu-kernel-stuck", "no reading of the GPU",
                      "nvidia-smi --query-gpu=timestamp,index,utilization.gpu,utilization.memory,power.draw "
                      "--format=csv -l 5")  # fmt: skip
        return
    refs = [ref for gpu in view.gpus for ref in gpu.refs][:8]
    if spin and not working:
        reading = "; ".join(f"{gpu.label}: {gpu.reading()}" for gpu in spin[:4])
        if idle:
            # Some spin and some are idle: the busy ones wait for an idle rank, whatever holds that one.
            yield unknown(
                rule,
                "gpu-kernel-stuck",
                f"some GPUs spin while others are idle ({reading})",
                "the stacks of the idle rank's process",
                refs,
            )
            return
        if not stopped:
            yield unknown(rule, "gpu-kernel-stuck", f"the GPU is full without memory traffic ({reading}), but nothing shows that "
                                                    "tokens stopped",
                          "two scrapes of /metrics 30 s apart", refs)  # fmt: skip
            return
        alone = view.single_gpu is True
        held = any(p.doing("cuda-event", "cuda-launch") for p in view.processes)
        strength = FAIR if alone and (held or spin[0].steady > 1 or spin[0].power_ratio is not None) else WEAK
        why = (
            "one GPU, so no collective can hold it"
            if alone
            else "several GPUs or an unknown number: a collective would look the same"
        )
        yield supported(rule, "gpu-kernel-stuck", strength, f"no tokens while {reading}; {why}", [*refs, *view.flow.refs])
        return
    if view.gpus and all(gpu.state in ("idle", "low") for gpu in view.gpus):
        yield contradicted(rule, "gpu-kernel-stuck", "no kernel is resident: the GPUs are idle", refs)
        yield contradicted(rule, "gpu-spin-barrier", "no kernel is resident: the GPUs are idle", refs)
        yield contradicted(rule, "gpu-barrier-intra-block", "no kernel is resident: the GPUs are idle", refs)
        yield contradicted(rule, "gpu-crossrank-spin", "no kernel is resident: the GPUs are idle", refs)
        yield contradicted(rule, "collective-stuck", "no kernel is resident: the GPUs are idle", refs)
        return
    states = {run.state for run in view.flow.stats}
    if spin and working and states & {"frozen", "silent"} and "flowing" in states:
        # Data parallel: one engine stands and another serves, and so do the GPUs. Which GPU is whose was not read.
        reading = "; ".join(f"{gpu.label}: {gpu.reading()}" for gpu in spin[:4])
        yield supported(
            rule,
            "gpu-kernel-stuck",
            WEAK,
            f"one engine stands and another serves, while {reading} and other GPUs move memory",
            refs,
        )
        return
    if working and not spin:
        yield contradicted(rule, "gpu-kernel-stuck", "the GPUs move memory", refs, WEAK)
        yield contradicted(rule, "gpu-spin-barrier", "the GPUs move memory", refs, WEAK)
        return
    yield unknown(
        rule,
        "gpu-kernel-stuck",
        "the readings do not tell spin from work",
        "utilization.memory and power against the card's busy level",
        refs,
    )


def rule_host_sees_gpu(view: View) -> Iterator[Finding]:
    """Host threads that wait for an event or stand in a launch: the GPU holds them. Which kernel, they do not know."""
    rule = "host-sees-gpu"
    held = [(p, t) for p in view.processes for t in p.threads if t.waits in ("cuda-event", "cuda-launch") and p.role != "api"]
    if not held:
        waiting = [t for p in view.workers for t in p.threads if t.waits == "queue-get"]
        if waiting and not view.gpus_in("spin", "working", "busy"):
            yield contradicted(
                rule, "gpu-kernel-stuck", "the copy thread waits for work, not for the GPU", [t.ref for t in waiting], WEAK
            )
        else:
            yield unknown(
                rule,
                "gpu-kernel-stuck",
                "no host thread was seen to wait for the GPU",
                "py-spy dump --pid PID of every worker, twice",
            )
        return
    steady = any(p.moved is False for p, _ in held)
    stopped = view.flow.frozen or bool(view.gave_up)
    refs = [t.ref for _, t in held]
    words = "; ".join(
        dict.fromkeys(
            f"{p.label}: {t.thread or t.tid} {'waits for a CUDA event' if t.waits == 'cuda-event' else 'stands in a launch'}"
            for p, t in held[:3]
        )
    )
    if stopped or steady:
        spin = bool(view.gpus_in("spin"))
        strength = FAIR if spin and stopped and view.single_gpu is True else WEAK
        yield supported(rule, "gpu-kernel-stuck", strength, f"{words}: the GPU does not finish", refs)
        if any(t.waits == "cuda-event" for _, t in held):
            yield contradicted(
                rule, "host-ipc-stall", "a worker's thread waits for the GPU, so the queues are not what stands", refs
            )
    else:
        yield unknown(
            rule, "gpu-kernel-stuck", f"{words}, once: that is also what work looks like", "a second py-spy dump 30 s later", refs
        )
