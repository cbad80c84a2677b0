"""The diagnosis of a server run: of a drain that ended, and of one that hung, died or stood without an answer.

A drain that ended is clean only if a window was reached in which an unfixed build can wedge; what made this one pass (no MTP, the
guard, a fixed release, the rescue) is said beside it, because then it is a control and no all-clear. What a hang is, is for
``server_verdict`` to say from the evidence of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import EvidenceError
from ...forensics.device_state import Unread
from ...forensics.records import Diagnosis, Evidence, Verdict, Window
from ...scenarios.drain import DrainPlan
from ...scenarios.drain_steps import DecodeStep
from ..agent_show import read_agents
from ..captured import all_unread
from ..ground import CaptureOutcome, StepOutcome
from ..step_facts import computed_step
from ..verdicts import completed, failed_diagnosis, stopped_diagnosis, unreadable_hang, window_of
from .drain_windows import DrainWindows, reached_windows
from .records import Assessment, LoadSample, ServerTarget, Snapshot

if TYPE_CHECKING:
    from .steering import WindowCount

__all__ = ["ServerFacts", "clean_drain", "guard_armed", "judge_server"]

#: The ground puts its own command in this place.
_NEXT = "dsv4-repro run drain --on server --model dummy --trials 3"


#: Client faults that took a request out before it had begun: the others drained all the same.
_TURNED_AWAY = ("too-many-requests", "unavailable")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What is known of the server beside the load. ``release`` None: not known. ``guarded``, ``clamped``: by the table of releases
    or the code, None if not known. ``guard``, ``rescue``: asked for."""

    release: str | None = None
    guarded: bool | None = None
    clamped: bool | None = None
    guard: bool = False
    rescue: bool = False
    plan: DrainPlan | None = None
    agent_folder: Path | None = None


def guard_armed(folder: Path | None) -> bool | None:
    """Whether a worker with a recorder says that its guard is armed; None: no agent says anything."""
    if folder is None:
        return None
    try:
        ranks = [rank for rank in read_agents(folder).ranks if rank.ring is not None and rank.status is not None]
    except EvidenceError:
        return None
    states = [rank.status.get("armed") for rank in ranks if rank.status is not None]
    found = [bool(state.get("guard")) for state in states if isinstance(state, dict)]
    return all(found) if found else None


def _releases(folder: Path | None) -> int:
    if folder is None:
        return 0
    try:
        return sum(rank.releases for rank in read_agents(folder).ranks)
    except EvidenceError:
        return 0


def _controls(facts: ServerFacts) -> list[str]:
    """Why no hang was to be expected, or what was done about it."""
    said = []
    if facts.plan is not None and facts.plan.mtp == 0:
        said.append("without MTP no length is expanded, so this is the control")
    if facts.guard:
        armed = guard_armed(facts.agent_folder)
        said.append(
            "the guard was armed, so this is the control"
            if armed
            else f"the guard was asked for and {'is not armed' if armed is False else 'no agent says whether it is armed'}"
        )
    if facts.clamped or facts.guarded:
        what = " and ".join(
            word for word, on in (("producer clamps", facts.clamped), ("kernel bounds the length", facts.guarded)) if on
        )
        said.append(f"this release's {what}, so no hang was expected")
    if facts.rescue and (count := _releases(facts.agent_folder)):
        waits = "1 wait of the known kind was" if count == 1 else f"{count} waits of the known kind were"
        said.append(f"{waits} released from inside: without the rescue this drain would have hung")
    return said


def clean_drain(
    seen: Sequence[WindowCount], load: LoadSample, windows: DrainWindows, facts: ServerFacts, load_error: str = ""
) -> tuple[Diagnosis, bool]:
    """(diagnosis, window reached) of a load that ended by itself."""
    found = reached_windows(seen, windows.counts)
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(load.faults.items()))
    tail = [f"client faults: {faults}"] if faults else []
    tail += [f"the load's own records are not complete: {load_error}"] if load_error else []
    broken = sum(count for kind, count in load.faults.items() if kind not in _TURNED_AWAY)
    document: dict[str, Any] = {
        "windows": [{"window": one.aim.text, "how": one.how, "waves": one.waves, "steps": one.steps} for one in seen]
    }
    if found and broken:
        sentence = f"{broken} requests of the drain ended in errors, so that it ended by itself is not shown"
        verdict = _verdict("unknown", "low", "; ".join([sentence, *tail]))
        return completed(
            Diagnosis(outcome="inconclusive", ground="server", verdict=verdict, window=Window(reached=True), next=_NEXT), **document
        ), False
    if found:
        best = found[0]
        words = "; ".join(f"{one.aim.text} ({one.how}, {one.steps} steps)" for one in found[:4])
        sentence = f"the drain ended by itself after {load.tokens} tokens, with the window reached: {words}"
        verdict = _verdict(
            "not-hung", "high" if best.how == "measured" else "medium", "; ".join([sentence, *_controls(facts), *tail])
        )
        window = Window(
            live_requests=best.aim.live,
            rows=best.aim.rows,
            graph_rows=best.aim.graph_rows,
            padded_requests=best.aim.padded_requests,
            reached=True,
        )
        return completed(Diagnosis(outcome="clean", ground="server", verdict=verdict, window=window), **document), True
    why = windows.why_not or _not_seen(seen, windows)
    sentence = f"window not reached: {why}; this run says nothing about the defect"
    diagnosis = Diagnosis(
        outcome="inconclusive",
        ground="server",
        verdict=_verdict("unknown", "low", "; ".join([sentence, *tail])),
        window=Window(reached=False),
        next=_NEXT if windows.counts else "",
    )
    return completed(diagnosis, **document), False


def _not_seen(seen: Sequence[WindowCount], windows: DrainWindows) -> str:
    wanted = [one for one in seen if one.aim.live in windows.counts]
    counts = " or ".join(map(str, windows.counts))
    if not wanted:
        return f"the load does not aim at {counts} live requests"
    told = "; ".join(f"{one.aim.text}: {one.text}" for one in wanted[:3])
    return f"neither the recorder nor the engine's counters show a step at {counts} live requests ({told})"


def _verdict(class_: str, confidence: str, sentence: str) -> Verdict:
    return Verdict.model_validate({"class": class_, "cause": None, "confidence": confidence, "sentence": sentence})


def judge_server(
    captures: Sequence[CaptureOutcome],
    last: tuple[Snapshot, Assessment] | None,
    folder: Path,
    *,
    outcome: StepOutcome,
    step: DecodeStep,
    live: int | None,
    windows: DrainWindows,
    seen: Sequence[WindowCount],
    facts: ServerFacts,
    evidence: Sequence[Evidence],
    target: ServerTarget | None,
) -> Diagnosis:
    """The diagnosis of a step that was hung, died or was stopped. ``live``: requests that were running, None if not known."""
    unread: tuple[Unread, ...] = all_unread(captures)
    reached = bool(reached_windows(seen, windows.counts)) or (outcome.state == "hung" and live in windows.counts)
    extra: dict[str, Any] = {
        "windows": [{"window": one.aim.text, "how": one.how, "waves": one.waves, "steps": one.steps} for one in seen],
        "changes": [
            {"what": one.what, "value": one.value, "why": one.why} for one in (target.changes if target is not None else ())
        ],
    }
    if last is not None:
        extra["state"] = {
            "state": last[1].state,
            "reasons": list(last[1].reasons),
            "device_signals": list(last[1].device_signals),
            "blind": [{"signal": one.signal, "why": one.why} for one in last[1].blind],
            "live_requests": last[1].live_requests,
        }
    plain = {
        "hung": lambda: unreadable_hang("server", outcome, step, unread),
        "unfinished": lambda: stopped_diagnosis("server", outcome, step, reached=reached),
    }.get(outcome.state, lambda: failed_diagnosis("server", outcome, step, reached=reached))()
    diagnosis = plain
    if last is not None and captures and (outcome.state != "unfinished" or last[1].state == "suspect"):
        from .server_verdict import diagnose_server

        planned = computed_step(step, facts.plan, windows.launches)
        diagnosis = diagnose_server(captures, last[0], last[1], folder, target=target, step=planned, evidence=evidence)
        if outcome.state == "died" and diagnosis.outcome in ("clean", "inconclusive"):
            diagnosis = plain  # that a process ended is certain, whatever the rest of the evidence says
    # What the step measured stands; a window that only the plan names is said to be reached if the load saw it.
    if diagnosis.window.live_requests is None or diagnosis is plain:
        return completed(diagnosis, window=window_of(step, reached=reached), unread=unread, **extra)
    return completed(diagnosis, unread=unread, **extra)
