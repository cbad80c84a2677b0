"""The verb ``why``: what is it with this server, in ten seconds, without touching it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..clock import SYSTEM, Clock
from ..errors import ReproError, SeveralServersError, UnavailableError, UsageError
from ..forensics.device_state import Unread
from .atomic import keep_document
from .console import Screen, printable
from .server_names import asked_by, server_name
from .serving.permission import as_root, closed
from .serving.questions import Question
from .serving.records import ServerTarget
from .serving.standing import CARDS_GUESSED, SPINS, Standing
from .serving.watch_loop import autopsy_of
from .serving.why_look import Look, look
from .why_document import WhyBuild, WhyCause, WhyDeadline, WhyDocument, WhyRank, why_lines

if TYPE_CHECKING:
    from .options import Common

__all__ = ["attach_step", "document_of", "find_one", "next_steps", "run_why"]

#: An attach with everything around it takes so long at most, seconds (0.7 to 19 s were measured).
ATTACH_S = 30.0
FIND_S = 2.5
#: Of the ten seconds that are promised; the rest is the interpreter's start.
PROMISE_S = 9.4
_Answer = TypeVar("_Answer")
_OUTCOMES = {"hung": "hang", "healthy": "clean", "idle": "clean", "starting": "clean", "ended": "other"}
_STATUS = {"hang": 3, "clean": 0, "other": 4, "inconclusive": 5}


def find_one(named: str | None, clock: Clock = SYSTEM, *, verb: str = "why") -> ServerTarget:
    """The server named by PID or URL, else the only one here. ``verb``: what the help names.

    UsageError: neither a PID nor a URL; UnavailableError: none, or several (listed).
    """
    with asked_by(verb):
        return _find_one(server_name(named) if named is not None else None, clock, verb)


def _find_one(named: str | None, clock: Clock, verb: str) -> ServerTarget:
    from .serving.ranks import find_named, find_servers

    if named is not None:
        return _answered(Question("the server", lambda: find_named(named, clock=clock), FIND_S, clock))
    found = _answered(Question("the servers of this machine", find_servers, FIND_S, clock))
    if not found:
        raise UnavailableError(
            "no vLLM server was found among the processes that can be seen here",
            help_text=f"In a container or as another user it is not seen: name it, dsv4-repro {verb} PID, or dsv4-repro {verb} URL",
        )
    if len(found) > 1:
        listed = ", ".join(f"{item.api_pid or item.engine_pids}: {item.base_url or 'URL not known'}" for item in found[:8])
        pids = [pid for item in found for pid in (item.api_pid, *item.engine_pids)[:1] if pid is not None]
        raise SeveralServersError(f"{len(found)} servers are here ({listed}); each is asked alone", pids)
    return found[0]


def _answered(question: Question[_Answer]) -> _Answer:
    """The answer, or its own error; UnavailableError where none came in time."""
    answer, why = question.answer()
    if question.error is not None:
        raise question.error
    if answer is None:
        raise UnavailableError(f"{why.what}: {why.why}" if why is not None else "no answer")
    return answer


def _power(seen: Look) -> tuple[str, ...]:
    """Of the server's own cards. What a card draws says something only beside what it draws while this server computes."""
    if not seen.snapshots or any(item.signal == CARDS_GUESSED for item in seen.snapshots[-1].blind):
        return ()
    lines = []
    for device in seen.snapshots[-1].devices:
        if device.power_w is None:
            continue
        busy = (
            f"of {device.busy_power_w:.0f} W while this server computed"
            if device.busy_power_w is not None
            else "what it draws at work"
            if seen.standing.state == "healthy"
            else "nothing runs"
            if seen.standing.state in ("idle", "starting")
            else "what it draws when this server computes is not known, so this alone says nothing"
        )
        lines.append(f"GPU {device.index}: {device.power_w:.0f} W; {busy}")
    return tuple(lines)


def _agent(seen: Look) -> tuple[str, ...]:
    """What the agents of its workers have on, by their own status files."""
    from .agent_show import read_agents

    folder = seen.target.agent_folder
    if folder is None:
        return ()
    try:
        agents = read_agents(folder).ranks
    except ReproError as error:
        return (f"its files cannot be read: {error}",)
    lines = []
    for rank in seen.target.ranks:
        found = next((agent for agent in agents if agent.pid == rank.pid), None)
        armed = (found.status or {}).get("armed") if found is not None else None
        on = sorted(str(name) for name, value in armed.items() if value is True) if isinstance(armed, dict) else []
        name = f"rank {rank.rank}" if rank.rank is not None else f"worker {rank.pid}"
        released = f", {found.releases} waits released" if found is not None and found.releases else ""
        state = "has no agent" if found is None else f"armed: {', '.join(on) or 'nothing'}{released}"
        lines.append(printable(f"{name}: {state}", limit=300))
    return tuple(lines)


def _windows(seen: Look) -> dict[int, tuple[float | None, str]]:
    found = {}
    for item in seen.snapshots[-1].progress if seen.snapshots else ():
        if item.error or not item.unfinished:
            continue
        padded = item.padded_requests
        text = f"step {item.unfinished[0]} under way"
        if item.requests is not None and padded is not None:
            text += f": {item.requests} requests" + (f" padded to {padded}" if padded > item.requests else ", not padded")
            text += f", graph {item.graph_mode}"
        found[item.pid] = (item.unfinished_age_s, text)
    return found


def _cause(seen: Look) -> WhyCause | None:
    """The classifier's word; where it has none and the device shows a kernel that does not end, that much and no more."""
    stand, judged = seen.standing, seen.classification
    if stand.state not in ("hung", "suspect", "ended") or judged is None:
        return None
    trigger = [text for _, text in _windows(seen).values() if " padded to " in text and text.endswith("graph full")]
    note = f"the recorder shows the trigger of vllm-51593: {trigger[0]}" if trigger else ""
    if stand.state != "hung" or judged.class_ not in ("unknown", "not-hung"):
        return _word(judged.class_, judged.confidence, judged.sentence, note, cause=judged.cause)
    doubt = f"log and counters alone would say {judged.class_}: {judged.sentence}" if judged.class_ == "not-hung" else ""
    if len(seen.target.ranks) != 1:
        text = "several ranks: from outside, a stuck kernel and a collective that waits for a rank look alike"
        return _word("unknown", "low", text, note, doubt)
    resident = any(signal.startswith(("GPU ", SPINS)) for signal in stand.device_signals)
    what = "a kernel is resident and does not end" if resident else "work that was launched on the GPU does not end"
    text = f"{what}; which kernel, and what it waits for, only the device's own state tells"
    return _word("gpu-kernel-stuck", "medium" if resident and not doubt else "low", text, note, doubt)


def _word(class_: str, confidence: str, *sentences: str, cause: str | None = None) -> WhyCause:
    said = ". ".join(text[:1].upper() + text[1:].rstrip(". ") for text in sentences if text)
    return WhyCause.model_validate({"class": class_, "cause": cause, "confidence": confidence, "sentence": said})


def next_steps(stand: Standing, seen: Look) -> tuple[str, ...]:
    """Commands in the order that respects the engine's deadline: evidence first, while there is some; the release; the restart.
    As root where the server is another user's: what those read and write is closed to us."""
    steps = _steps(stand, seen)
    if not closed(seen.unread):
        return steps
    pid = seen.target.api_pid if seen.target.api_pid is not None else next(iter(seen.target.engine_pids), None)
    if stand.state in ("suspect", "unknown") and pid is not None:
        return (f"{as_root(f'dsv4-repro why {pid}')}    # as root, or as the server's user, more is read", *steps[:1])
    return tuple(as_root(step) if step.startswith("dsv4-repro ") and stand.state == "hung" else step for step in steps)


def attach_step(pid: int, engine: int | None = None, words: str = "") -> str:
    """The command that gets the evidence of a stuck kernel: an attach, or, where no debugger is here, all that needs none."""
    from ..forensics.collect.cuda_gdb import find_cuda_gdb

    try:
        find_cuda_gdb()
    except UnavailableError:
        return f"dsv4-repro watch --pid {engine or pid} --once    # evidence without a debugger: cuda-gdb is not installed here"
    return f"dsv4-repro autopsy {pid} --attach{words}"


def _steps(stand: Standing, seen: Look) -> tuple[str, ...]:
    worker = seen.target.ranks[0].pid if seen.target.ranks else None
    engine = seen.target.engine_pids[0] if seen.target.engine_pids else seen.target.api_pid
    pid = worker if worker is not None else engine
    if stand.state == "hung" and pid is not None:
        left = seen.deadline.remaining_s
        steps = []
        if seen.deadline.state == "none" or (left is not None and left - seen.deadline.error_s > 2 * ATTACH_S):
            steps.append(attach_step(pid, engine))
        else:
            # Stopped, the engine cannot end its workers in the middle of the read; what that costs the verb says itself.
            steps.append(attach_step(pid, engine, " --freeze"))
        return (*steps, f"dsv4-repro unwedge {pid}", "restart the server; docs/production.md says what to keep")
    if stand.state in ("suspect", "unknown") and engine is not None:
        return (f"dsv4-repro watch --pid {engine} --once", f"dsv4-repro why {engine}")
    if stand.state == "starting" and engine is not None:
        return (f"dsv4-repro why {engine}",)
    if stand.state == "ended" and seen.target.log_path is not None:
        return (autopsy_of(seen.target.log_path),)
    if stand.state == "unknown":
        return ("dsv4-repro why    # on the server's machine, inside its container: its processes were not seen from here",)
    return ()


def _deadline_text(seen: Look) -> str:
    """Where it was not observed when the step was sent, it was before the stand-still that was seen: that much is certain."""
    text, limit, still = seen.deadline.text, seen.deadline.limit_s, seen.standing.still_s
    if seen.standing.state != "hung" or seen.deadline.known != "not observed" or limit is None or not still or still >= limit:
        return text
    return f"{text}; it was {still:.0f} s ago or more, so at most {limit - still:.0f} s are left"


def document_of(seen: Look, seconds: float) -> WhyDocument:
    """What was seen as the published document."""
    stand = seen.standing
    outcome = _OUTCOMES.get(stand.state, "inconclusive")
    windows = _windows(seen)
    ranks = tuple(
        WhyRank(
            pid=rank.pid,
            rank=rank.rank,
            gpu=str(rank.gpu_index) if rank.gpu_index is not None else rank.gpu_uuid,
            unfinished_s=windows.get(rank.pid, (None, ""))[0],
            window=windows.get(rank.pid, (None, ""))[1],
        )
        for rank in seen.target.ranks
    )
    build = seen.build
    return WhyDocument.model_validate(
        {
            "outcome": outcome,
            "state": stand.state,
            "exit_status": _STATUS[outcome],
            "base_url": seen.target.base_url,
            "engine_pids": seen.target.engine_pids,
            "ranks": ranks,
            "still_s": stand.still_s,
            "still_known": stand.still_known,
            "live_requests": stand.live_requests,
            "reasons": stand.reasons,
            "device_signals": stand.device_signals,
            "against": stand.against,
            "power": _power(seen),
            "cause": _cause(seen),
            "deadline": WhyDeadline(
                state=seen.deadline.state, limit_s=seen.deadline.limit_s, remaining_s=seen.deadline.remaining_s,
                known=seen.deadline.known, text=_deadline_text(seen),
            ),
            "agent": _agent(seen),
            "build": WhyBuild(
                affected=build.affected, text=build.text, releases=build.releases, live_requests=build.live_counts
            )
            if build is not None
            else None,
            "unread": [{"what": item.what, "why": item.why, "remedy": item.remedy} for item in _blind(seen)],
            "next": next_steps(stand, seen),
            "seconds": round(seconds, 2),
        }
    )  # fmt: skip


def _blind(seen: Look) -> Sequence[Unread]:
    blind = seen.snapshots[-1].blind if seen.snapshots else ()
    known = {item.why for item in seen.unread}
    return (*seen.unread, *(Unread(item.signal, item.why) for item in blind if item.why not in known))


def run_why(named: str | None, common: Common, *, log: Path | None = None, clock: Clock = SYSTEM) -> int:
    """The verb. Exit status: 3 a hang, 0 fine (healthy, idle, starting), 4 it has ended, 5 not decided, or there is no server."""
    if log is not None and not os.path.isfile(log):
        raise UsageError(f"--log {str(log)[:200]}: there is no such file")
    from .serving.ranks import with_log

    screen = Screen(as_json=common.as_json, clock=clock)
    began = clock.monotonic()
    screen.progress("looking, without touching anything")
    try:
        target = with_log(find_one(named, clock), log)
    except UnavailableError as error:
        several = isinstance(error, SeveralServersError)
        following = (
            tuple(f"dsv4-repro why {pid}" for pid in error.pids[:8])
            if isinstance(error, SeveralServersError)
            else ("dsv4-repro why    # which servers are seen here",)
            if named is not None
            else ("dsv4-repro doctor    # whether other processes can be seen from here",)
        )
        # Help that is a command is among the commands.
        hint = "" if several or (named is not None and "dsv4-repro" in error.help_text) else error.help_text
        reasons = (f"{error}. {hint}" if hint else str(error),)
        document = WhyDocument(
            outcome="inconclusive", state="unknown" if several else "no server", exit_status=5, reasons=reasons,
            next=following, seconds=round(clock.monotonic() - began, 2),
        )  # fmt: skip
        return _show(document, screen, common.out)
    seen = look(target, clock=clock, seconds=PROMISE_S - (clock.monotonic() - began))
    document = document_of(seen, clock.monotonic() - began)
    return _show(document, screen, common.out)


def _show(document: WhyDocument, screen: Screen, out: Path | None) -> int:
    screen.end_progress()
    kept = document.model_dump(mode="json", by_alias=True)
    keep_document(out, "why", kept)
    lines = why_lines(document)
    style = {"hang": "bad", "other": "bad", "clean": "good"}.get(document.outcome, "note")
    screen.say(*lines[:1], style=style)
    screen.say(*lines[1:])
    screen.document(kept)
    return document.exit_status
