"""From a case file to a verdict: run every rule, merge by the table, keep all answers.

Each rule says supported, contradicted or unknown with the lines it used; ``rules.table`` says how they merge. Nothing here reads a
file or a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from .evidence.casefile import CaseFile
from .evidence.recognised import nothing_recognised
from .records import CLASSES
from .rules.agents import rule_agent_step, rule_agent_wait
from .rules.alive import rule_worker_dead
from .rules.base import Finding, Rule, run_rules
from .rules.collectives import rule_collective_stuck, rule_counts, rule_opposing_stacks
from .rules.compilers import rule_build_lock, rule_compile_log, rule_compile_stacks
from .rules.crossrank import rule_crossrank
from .rules.device import full_judgements, rule_device_barrier, rule_device_judged, rule_device_read
from .rules.faults import rule_device_exception, rule_launch_refused, rule_lost_device, rule_wrong_result, rule_xid
from .rules.loading import rule_weight_load
from .rules.next_step import next_step
from .rules.progress import rule_client_gone, rule_idle, rule_recovered, rule_slow, rule_startup
from .rules.queues import rule_ipc_stall, rule_livelock
from .rules.recorders import rule_flight, rule_watchdog_lag
from .rules.scheduling import rule_kv_thrash, rule_kv_transfer, rule_scheduler_stall
from .rules.stuck import rule_host_sees_gpu, rule_power
from .rules.table import CONFIDENCE, Merged, merge
from .rules.view import View

__all__ = ["RULES", "Alternative", "Classification", "classify"]

#: Name, the class that stays unknown if the rule fails, and the rule: in the order of questions (alive, Xid, phase, tokens, queues,
#: power, collectives, device).
RULES: tuple[tuple[str, str, Rule], ...] = (
    ("worker-dead", "worker-dead", rule_worker_dead),
    ("lost-device", "gpu-lost", rule_lost_device),
    ("xid", "gpu-fault", rule_xid),
    ("device-exception", "gpu-fault", rule_device_exception),
    ("launch-refused", "launch-refused", rule_launch_refused),
    ("startup-ended", "not-hung", rule_startup),
    ("weight-load", "host-weight-load", rule_weight_load),
    ("compile-stacks", "host-jit-compile", rule_compile_stacks),
    ("compile-log", "host-jit-compile", rule_compile_log),
    ("build-lock", "host-jit-lock", rule_build_lock),
    ("recovered", "not-hung", rule_recovered),
    ("client-gone", "not-hung", rule_client_gone),
    ("idle", "not-hung", rule_idle),
    ("scheduler-stall", "scheduler-stall", rule_scheduler_stall),
    ("kv-thrash", "kv-pressure-thrash", rule_kv_thrash),
    ("kv-transfer", "kv-transfer-stall", rule_kv_transfer),
    ("power", "gpu-kernel-stuck", rule_power),
    ("gpu-works", "not-hung", rule_slow),
    ("host-sees-gpu", "gpu-kernel-stuck", rule_host_sees_gpu),
    ("ipc-stall", "host-ipc-stall", rule_ipc_stall),
    ("livelock", "host-cpu-livelock", rule_livelock),
    ("ras-counts", "collective-desync", rule_counts),
    ("opposing-stacks", "collective-desync", rule_opposing_stacks),
    ("watchdog-lag", "collective-desync", rule_watchdog_lag),
    ("flight-recorder", "collective-desync", rule_flight),
    ("collective-stuck", "collective-stuck", rule_collective_stuck),
    ("device-judged", "gpu-spin-barrier", rule_device_judged),
    ("device-barrier", "gpu-spin-barrier", rule_device_barrier),
    ("agent-row-states", "gpu-spin-barrier", rule_agent_wait),
    ("agent-recorder", "gpu-kernel-stuck", rule_agent_step),
    ("crossrank", "gpu-crossrank-spin", rule_crossrank),
    ("device-moves", "gpu-kernel-stuck", rule_device_read),
    ("wrong-result", "wrong-result", rule_wrong_result),
)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A class that is still possible, and what would decide it."""

    class_: str
    why_open: str
    decided_by: str


@dataclass(frozen=True, slots=True)
class Classification:
    """``findings``: every rule's answer. ``next``: a command to paste."""

    class_: str
    cause: str | None
    confidence: Literal["high", "medium", "low"]
    sentence: str
    merged: Merged
    findings: tuple[Finding, ...]
    alternatives: tuple[Alternative, ...]
    next: str


def classify(case: CaseFile, view: View | None = None) -> Classification:
    """Judge a case. Deterministic: the same facts give the same words."""
    view = view or View(case)
    findings = run_rules(RULES, view)
    merged = merge(findings)
    confidence = cast(Literal["high", "medium", "low"], CONFIDENCE[merged.strength])
    alternatives = _alternatives(merged, findings, view)
    return Classification(
        merged.class_, merged.cause, confidence, _sentence(merged, view), merged, findings, alternatives,
        next_step(merged.class_, merged.strength, view, [a.class_ for a in alternatives]),
    )  # fmt: skip


def _sentence(merged: Merged, view: View) -> str:
    if merged.decisive:
        text = merged.decisive[0].text
        return f"{merged.note}: {text}" if merged.note else text
    ended = [e for e in view.events("exception") if "Timeout" not in e.fields.get("name", "")]
    if ended and view.events("fatal", "engine-dead", "engine-failed-start"):
        name, text = ended[0].fields["name"], ended[0].fields.get("text", "")[:120]
        return f"The engine ended on {name}: {text}: an error of its own, not a hang."
    if view.symptoms:
        return "The lines say that a worker did not answer in time, and nothing more: every class prints them."
    looks = [judged.verdict.sentence for _, judged in full_judgements(view) if judged.verdict.class_ == "unknown"]
    return next(filter(None, looks), "") or nothing_recognised(view.case) or "Nothing in the evidence decides."


#: Classes that a silent engine with running requests leaves open, and what separates them.
_SILENT: tuple[tuple[str, str], ...] = (
    ("gpu-spin-barrier", "power and memory utilisation of the GPU, then cuda-gdb: info cuda kernels, blocks, the poll loop"),
    ("collective-desync", "NCCL RAS asked twice; py-spy of every rank"),
    ("host-jit-compile", "py-spy of every rank, twice: a frame in a compiler, or ptxas/cicc/ninja alive"),
    ("host-ipc-stall", "py-spy: does the copy thread wait in queue.get or for a CUDA event?"),
    ("worker-dead", "ps and the kernel log"),
    ("not-hung", "two scrapes of /metrics a minute apart"),
)


def _alternatives(merged: Merged, findings: tuple[Finding, ...], view: View) -> tuple[Alternative, ...]:
    result: dict[str, Alternative] = {}
    for class_, strength in merged.open:
        own = next(f for f in findings if f.answer == "supported" and f.class_ == class_)
        result[class_] = Alternative(class_, own.text, _decider(class_, findings))
        del strength
    if CONFIDENCE[merged.strength] == "high":
        return tuple(result.values())
    ruled_out = {f.class_ for f in findings if f.answer == "contradicted" and f.strength >= 2} | set(merged.explained)
    if merged.class_ in (
        "unknown",
        "gpu-kernel-stuck",
        "collective-desync",
        "collective-stuck",
        "gpu-crossrank-spin",
        "host-jit-compile",
    ):
        for class_, decided_by in _SILENT:
            if class_ != merged.class_ and class_ not in ruled_out:
                result.setdefault(class_, Alternative(class_, "nothing read so far excludes it", decided_by))
    for class_ in merged.explained:
        if merged.strength < 3:
            rival = next(
                (f for f in findings if f.answer == "supported" and f.class_ == class_ and f.strength >= merged.strength), None
            )
            if rival is not None:
                result.setdefault(
                    class_, Alternative(class_, f"explained by {merged.explained[class_]}", _decider(class_, findings))
                )
    result.pop(merged.class_, None)
    return tuple(alternative for alternative in result.values() if alternative.class_ in CLASSES)


def _decider(class_: str, findings: tuple[Finding, ...]) -> str:
    missing = next((f.missing for f in findings if f.class_ == class_ and f.missing), "")
    return missing or dict(_SILENT).get(class_, "one more sample of the same evidence")
