"""Diagnoses that follow from how a run ended rather than from a device state, and what a run adds to any diagnosis.

A clean run is ``not-hung`` only if the danger window was reached; otherwise it says nothing and the class is ``unknown``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..forensics.device_state import Unread
from ..forensics.records import CLASSES, Diagnosis, UnreadItem, Verdict, Window
from ..scenarios.drain_steps import DecodeStep
from .ground import Ready, StepOutcome, UnwedgeOutcome

__all__ = [
    "clean_diagnosis",
    "completed",
    "failed_diagnosis",
    "livelock",
    "stopped_diagnosis",
    "stuck_counter",
    "unfinished_diagnosis",
    "unread_at_start",
    "unreadable_hang",
    "unwedge_document",
    "window_of",
]

GroundName = Literal["server", "gpu", "cpu"]

_FAILED: Mapping[str, tuple[str, str]] = {
    "wrong": ("wrong-result", "step {index}: the kernel finished with a wrong answer"),
    "fault": ("gpu-fault", "step {index}: {who} reported a fault"),
    "died": ("worker-dead", "step {index}: the process that ran the workload died"),
    "refused": ("launch-refused", "step {index}: the launch was refused"),
}


def _verdict(class_: str, confidence: str, sentence: str, *, cause: str | None = None) -> Verdict:
    return Verdict.model_validate({"class": class_, "cause": cause, "confidence": confidence, "sentence": sentence})


def window_of(step: DecodeStep | None, *, reached: bool) -> Window:
    """The window record for the step at which the run ended, or for a danger step that was passed."""
    if step is None:
        return Window(reached=reached)
    return Window(
        live_requests=step.live_requests,
        rows=step.rows,
        graph_rows=step.graph_rows,
        padded_requests=step.padded_requests,
        reached=reached,
    )


def clean_diagnosis(ground: GroundName, *, reached: bool, window: DecodeStep | None, steps: int, why_not: str = "") -> Diagnosis:
    """All steps completed with the right answers. ``why_not``: what kept the run out of the danger window."""
    if reached:
        sentence = f"all {steps} steps completed with the right answers, the danger window among them"
        verdict = _verdict("not-hung", "high", sentence)
        return Diagnosis(outcome="clean", ground=ground, verdict=verdict, window=window_of(window, reached=True))
    sentence = (
        f"window not reached: {why_not or 'no step had a padded request that can wedge'}; this run says nothing about the defect"
    )
    return Diagnosis(
        outcome="inconclusive",
        ground=ground,
        verdict=_verdict("unknown", "low", sentence),
        window=Window(reached=False),
        next="dsv4-repro run drain --min-live 3",
    )


def failed_diagnosis(ground: GroundName, outcome: StepOutcome, step: DecodeStep, *, reached: bool) -> Diagnosis:
    """A wrong result, a fault, a dead worker or a refused launch; the cause only where the ground named one of the known words."""
    class_, sentence = _FAILED[outcome.state]
    cause = outcome.detail.get("cause")
    known = cause if isinstance(cause, str) and cause in CLASSES[class_][0] else None
    reasons = "; ".join(outcome.reasons)
    who = "the interpreter" if ground == "cpu" else "the GPU"
    text = sentence.format(index=outcome.index, who=who) + (f": {reasons}" if reasons else "")
    return Diagnosis(
        outcome=CLASSES[class_][1],
        ground=ground,
        verdict=_verdict(class_, "high", text, cause=known),
        window=window_of(step, reached=reached),
    )


def stopped_diagnosis(ground: GroundName, outcome: StepOutcome, step: DecodeStep, *, reached: bool) -> Diagnosis:
    """A step that a budget, a deadline or the memory checker ended: what was seen is no verdict about the kernel."""
    reasons = "; ".join(outcome.reasons) or "no reason given"
    if outcome.detail.get("kind") == "uninitialised":
        sentence = (
            f"step {outcome.index}: the memory checker stopped the kernel: {reasons}. A GPU goes on with whatever lies there, so "
            "this run does not say whether the kernel hangs; without --checks it goes on"
        )
    else:
        sentence = f"step {outcome.index} was stopped: {reasons}; neither an end nor a hang was shown"
    return Diagnosis(
        outcome="inconclusive",
        ground=ground,
        verdict=_verdict("unknown", "low", sentence),
        window=window_of(step, reached=reached),
    )


def livelock(diagnosis: Diagnosis, outcome: StepOutcome) -> Diagnosis:
    """A run that provably repeats itself is no proven wait: the weaker class, and in words what was shown and what was not."""
    document = diagnosis.document()
    seen = diagnosis.verdict
    sentence = (
        f"step {outcome.index}: {'; '.join(outcome.reasons)}; under this schedule it never ends, and that none other ends it "
        "is not shown"
    )
    if seen.class_ not in ("unknown", "gpu-kernel-stuck"):
        sentence += f". What the stopped threads look like: {seen.sentence}"
    document["outcome"] = "hang"
    document["verdict"] |= {
        "class": "gpu-kernel-stuck", "cause": None, "confidence": "medium", "signature": None, "sentence": sentence,
    }  # fmt: skip
    return Diagnosis.model_validate(document)


def unreadable_hang(ground: GroundName, outcome: StepOutcome, step: DecodeStep, unread: Sequence[Unread]) -> Diagnosis:
    """The watchdog is sure and no collector saw the device: the weaker class, and what would say more."""
    reasons = "; ".join(outcome.reasons) or "no progress"
    sentence = f"step {outcome.index} never completed ({reasons}); the device's state could not be read, so the cause is open"
    gaps = [UnreadItem(what=item.what, why=item.why, remedy=item.remedy) for item in unread]
    if not gaps:
        gaps = [UnreadItem(what="device state", why="no collector returned one", remedy="dsv4-repro doctor")]
    return Diagnosis(
        outcome="hang",
        ground=ground,
        verdict=_verdict("gpu-kernel-stuck", "medium", sentence),
        window=window_of(step, reached=True),
        unread=tuple(gaps),
        next="dsv4-repro doctor",
    )


def unfinished_diagnosis(ground: GroundName, why: str) -> Diagnosis:
    """The run was ended before it had an answer."""
    return Diagnosis(
        outcome="inconclusive",
        ground=ground,
        verdict=_verdict("unknown", "low", why),
        window=Window(reached=None),
    )


def completed(diagnosis: Diagnosis, *, window: Window | None = None, unread: Sequence[Unread] = (), **more: Any) -> Diagnosis:
    """The diagnosis with the run's window, further unread items (each once) and extra keys; validated again."""
    document = diagnosis.document()
    if window is not None:
        document["window"] = window.model_dump(mode="json")
    known = {(item["what"], item["why"]) for item in document["unread"]}
    document["unread"] += [
        {"what": item.what, "why": item.why, "remedy": item.remedy} for item in unread if (item.what, item.why) not in known
    ]
    document.update(more)
    return Diagnosis.model_validate(document)


def unread_at_start(ready: Ready | None) -> tuple[Unread, ...]:
    """What the ground could not read when it was set up (NVML, GPM …), as it says in its environment."""
    listed = ready.environment.get("unread", ()) if ready is not None else ()
    return tuple(
        Unread(str(item.get("what", "")), str(item.get("why", "")), str(item.get("remedy", "")))
        for item in listed
        if isinstance(item, Mapping)
    )


def unwedge_document(outcome: UnwedgeOutcome) -> dict[str, Any]:
    """The experiment as the diagnosis carries it; the address as a hex string."""
    return {
        "attempted": outcome.attempted,
        "retired": outcome.retired,
        "milliseconds": outcome.milliseconds,
        "address": f"{outcome.address:#x}" if outcome.address is not None else None,
        "value": outcome.value,
        "why_not": outcome.why_not,
        "detail": dict(outcome.detail),
    }


def stuck_counter(diagnosis: Diagnosis) -> int | None:
    """The address of the counter that the first waiting CTA polls, if it is a counter a write can release."""
    for wait in diagnosis.waits:
        if wait.address is not None and wait.state_field in (None, "arrival_counter"):
            try:
                return int(wait.address, 16)
            except ValueError:
                continue
    return None
