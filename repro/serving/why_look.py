"""All that ``why`` reads of a live server in a few seconds, every source with its own deadline. Reads only.

No ptrace, no signal, no file written: ``/proc``, NVML, the log's end, the recorder's files, and a
few GET requests to ``/metrics`` and ``/health`` (which the server's access log shows, and which its engine does not see).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...clock import SYSTEM, Clock, Deadline
from ...errors import RefusedError
from ...forensics.classify import Classification
from ...forensics.collect.process_table import read_environment
from ...forensics.device_state import Unread
from .engine_deadlines import EngineDeadline, Start, engine_deadline, executor_of, limits_of
from .live_build import LiveBuild, live_build, server_arguments
from .live_evidence import evidence_text
from .log_history import LogHistory, LogTail, log_history, read_log_tail
from .questions import Question
from .recorded_ranks import recorded_ranks
from .records import Assessment, ServerTarget, Snapshot
from .standing import STATS_S, Standing, standing
from .start_state import StartState, process_age_s, start_state
from .watch_limits import WatchLimits

if TYPE_CHECKING:
    from .observer import Observer

__all__ = ["LongLook", "Look", "Observed", "deadline_of", "engine_above", "look", "observe"]

#: Snapshots wanted, a second apart, and how long they are waited for.
SNAPSHOTS = 3
APART_S = 0.9
WATCH_S = 4.6
#: With something standing still on the device it is looked on for so long in all: without a busy level to compare with, the
#: watchdog wants 8 s of a resident kernel that moves nothing (``WatchLimits.flat_s``).
LONG_S = 8.8
STOP_S = 0.3
SOURCE_S = 4.0
#: The classifier has what is left of so many seconds in all, at least ``JUDGE_S``.
WHOLE_S = 7.0
JUDGE_S = 1.0
#: What is left of it for all the rest after a long look.
REST_S = 0.7
_LOG_NAME = "why"
RECORDER = "the recorder's oldest step that has not ended"

Observed = tuple[list[Snapshot], Assessment | None]


def engine_above(pid: int, *, clock: Clock = SYSTEM) -> tuple[int, ServerTarget]:
    """The engine process that waits for the worker ``pid``, and the server it belongs to. RefusedError where there is none of its
    own: with the executor inside the engine, stopping the engine would stop the worker too."""
    from ...forensics.collect.process_table import read_process_table
    from .ranks import find_server

    target = find_server(pid, clock=clock)
    above = read_process_table().ancestors(pid)
    if pid in target.engine_pids:
        raise RefusedError(f"process {pid} is the engine itself, and computes: it cannot be stopped and read at once")
    engine = next((one for one in above if one in target.engine_pids), None)
    if engine is None:
        raise RefusedError(
            f"no engine process above {pid} was found: nothing was stopped",
            help_text=f"Without it: dsv4-repro autopsy {pid} --attach",
        )
    return engine, target


def deadline_of(target: ServerTarget, *, clock: Clock = SYSTEM, proc: Path = Path("/proc")) -> EngineDeadline:
    """The engine's deadline from recorder, log and environment alone, within a second or two; a step is taken to be waiting."""
    environment = Question("the engine's environment", lambda: _engine_environment(target, proc), 1.0, clock)
    log_path = target.log_path
    log = Question("the log", lambda: _past(log_path, clock), 2.0, clock) if log_path is not None else None
    starts = []
    if target.agent_folder is not None:
        folder = target.agent_folder
        seen, _ = Question("the recorder", lambda: recorded_ranks(folder, clock=clock), 1.0, clock).answer()
        ages = [item.unfinished_age_s for item in seen or () if item.unfinished_age_s is not None]
        starts = [Start(max(ages), "measured", RECORDER)] if ages else []
    history = log.answer()[0] if log is not None else None
    found, why = environment.answer()
    values, reason = found if found is not None else (None, why.why if why is not None else "")
    limits = limits_of(values, executor_of(server_arguments(target, proc), target.tree), why_not=reason)
    return engine_deadline(limits, [*starts, *_starts((), history)], waits=True, ended=history.ended if history is not None else "")


def _past(path: Path, clock: Clock) -> LogHistory:
    from ...forensics.evidence.gather import read_text

    tail = read_log_tail(path)
    return log_history(read_text(_LOG_NAME, tail.text), tail, now=clock.wall(), source=_LOG_NAME)


@dataclass(frozen=True)
class Look:
    """Everything seen. ``case_text`` is what the classifier read, for a run directory."""

    target: ServerTarget
    snapshots: tuple[Snapshot, ...]
    standing: Standing
    history: LogHistory | None
    deadline: EngineDeadline
    build: LiveBuild | None
    classification: Classification | None
    case_text: str
    unread: tuple[Unread, ...]


def observe(
    target: ServerTarget, clock: Clock, longer: LongLook | None = None, make: Callable[..., Observer] | None = None
) -> Observed:
    """Snapshots about a second apart, and the watchdog's last word: until there are three and what they say is settled, for
    ``WATCH_S`` seconds at most. While something stands still on the device, as long as ``longer`` allows: until the watchdog's own
    rule is met or broken."""
    from .observer import Observer, Periods

    # Quicker than a watchdog that stays: of eight seconds at most half a second may be lost between two looks.
    observer = (make or Observer)(target, clock=clock, periods=Periods(metrics_still=0.25, cards=0.25))
    seen: list[Snapshot] = []
    last: tuple[Snapshot, Assessment] | None = None
    deadline = Deadline(WATCH_S, clock)
    observer.start()
    try:
        while not deadline.expired or (longer is not None and longer.wanted(seen, last)):
            clock.sleep(0.1)
            last = observer.latest() or last
            if last is None or not (last[0].engine is not None or last[0].progress or last[0].devices or last[0].blind):
                continue
            if not seen or last[0].at >= seen[-1].at + APART_S:
                seen.append(last[0])
            if len(seen) >= SNAPSHOTS and _settled(seen, last[1]):
                break
    finally:
        observer.stop(STOP_S)
    if last is not None and (not seen or last[0].at > seen[-1].at):
        seen.append(last[0])
    return seen, last[1] if last is not None else None


def _settled(seen: Sequence[Snapshot], assessment: Assessment) -> bool:
    """The watchdog's "healthy" alone may only mean that nothing has stood for long yet."""
    if assessment.state in ("hung", "crashed", "exited"):
        return True
    return assessment.state == "healthy" and standing(seen, assessment).state in ("healthy", "idle")


class LongLook:
    """Whether it is worth to look on, and until when. ``on``: set once it is."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.deadline = Deadline(seconds, clock)
        self.on = threading.Event()

    def wanted(self, seen: Sequence[Snapshot], last: tuple[Snapshot, Assessment] | None) -> bool:
        """Something stands still, and a card holds a kernel that moves no memory, or a recorder an unfinished step."""
        if self.deadline.expired or last is None or not seen or standing(seen, last[1]).state != "suspect":
            return False
        limits, devices = WatchLimits(), last[0].devices
        spins = [
            item
            for item in devices
            if (item.utilisation or 0) >= limits.spin_percent and (item.memory_utilisation or 0) <= limits.quiet_memory_percent
        ]
        if spins or any(item.unfinished and not item.error for item in last[0].progress):
            self.on.set()
            return True
        return False


def _engine_environment(target: ServerTarget, proc: Path) -> tuple[dict[str, str] | None, str]:
    """Of the engine; else of the API process, whose environment the engine was given at its start."""
    why = ""
    for pid in (*target.engine_pids, *((target.api_pid,) if target.api_pid else ())):
        found = read_environment(pid, proc)
        if isinstance(found, dict) and found:
            return found, ""
        # Empty: a process title was written over it.
        why = why or (found.why if not isinstance(found, dict) else "nothing is left of it: the process wrote its title there")
    return None, why or "the engine process was not found"


def _stopped(target: ServerTarget, snapshots: Sequence[Snapshot]) -> bool:
    states = {item.pid: item.state for item in snapshots[-1].processes} if snapshots else {}
    return any(states.get(pid) == "T" for pid in target.engine_pids)


def _starts(snapshots: Sequence[Snapshot], history: LogHistory | None) -> list[Start]:
    found = []
    if snapshots:
        ages = [item.unfinished_age_s for item in snapshots[-1].progress if item.unfinished_age_s is not None and not item.error]
        if ages:
            found.append(Start(max(ages), "measured", RECORDER))
    if history is None:
        return found
    if history.wait_first_age_s is not None and history.wait_interval_s is not None:
        age = history.wait_first_age_s + history.wait_interval_s
        found.append(Start(age, "inferred", "the log's first waiting line and its interval", 2.0))
    elif history.flowing_age_s is not None and history.stats_generation == 0:
        # Tokens came within the ten seconds before that line, and none after it: the step was sent then. The earliest is taken.
        found.append(Start(history.flowing_age_s + STATS_S, "inferred", "the log's last stats line with tokens", STATS_S))
    return found


def look(
    target: ServerTarget,
    *,
    clock: Clock = SYSTEM,
    watch: Callable[[ServerTarget, Clock, LongLook], Observed] = observe,
    proc: Path = Path("/proc"),
    seconds: float = LONG_S + REST_S,
) -> Look:
    """Look at a server for some five seconds and judge what was seen; at most eight seconds whatever does not answer.

    ``seconds``: of all, where something stands still and is looked at for longer.
    """
    whole, all_of_it = Deadline(WHOLE_S, clock), Deadline(seconds, clock)
    longer = LongLook(min(max(seconds - REST_S, WATCH_S), LONG_S), clock)
    watched = Question("the server's samples", lambda: watch(target, clock, longer), longer.deadline.seconds + STOP_S, clock)
    # Its modules are loaded while the server is looked at.
    Question("the classifier's modules", _warm, SOURCE_S, clock)
    environment = Question("the engine's environment", lambda: _engine_environment(target, proc), SOURCE_S, clock)
    # The words of a process that is not seen to be a server's are no flags of one: what they leave out says nothing.
    arguments = () if any(item.what == "the server" for item in target.unread) else server_arguments(target, proc)
    builder = next(iter((*(rank.pid for rank in target.ranks), *target.engine_pids)), target.api_pid)
    build = (
        Question("the build", lambda: live_build(builder, arguments, proc=proc), SOURCE_S, clock) if builder is not None else None
    )
    log_path = target.log_path
    log = Question("the log", lambda: read_log_tail(log_path), SOURCE_S, clock) if log_path is not None else None
    unread = list(target.unread)

    (values, why) = environment.answer()
    engine_environment, environment_why = values if values is not None else (None, why.why if why is not None else "")
    tail: LogTail | None = None
    if log is not None:
        tail, why = log.answer()
        unread += [why] if why is not None else []
    elif not any("log" in item.what for item in unread):
        unread.append(
            Unread("the log", "its file is not known", "The output goes to a terminal, a pipe or the journal: autopsy LOG")
        )
    seen, why = watched.answer(max(WATCH_S + 0.6 - (WHOLE_S - whole.remaining()), 0.0))
    if seen is None and longer.on.is_set():
        seen, why = watched.answer()
    unread += [why] if why is not None else []
    snapshots, assessment = seen if seen is not None else ([], None)
    unread += _unread_of(snapshots)

    text = evidence_text(snapshots, wall=clock.wall(), log=tail.text if tail is not None else "")
    judged: Question[tuple[LogHistory | None, Classification]] = Question(
        "the classifier", lambda: _judge(text, tail, clock),
        max(all_of_it.remaining(), REST_S) if longer.on.is_set() else max(whole.remaining(), JUDGE_S), clock,
    )  # fmt: skip
    answer, why = judged.answer()
    unread += [why] if why is not None else []
    history, classification = answer if answer is not None else (None, None)
    stand = standing(snapshots, assessment, history, _start(target, snapshots, tail, clock, proc))
    found, why = build.answer() if build is not None else (None, None)
    unread += [why] if why is not None else []
    unread += found.unread if found is not None else ()
    limits = limits_of(engine_environment, executor_of(arguments, target.tree), why_not=environment_why)
    waits = {"hung": True, "suspect": True, "healthy": False, "idle": False, "starting": False}.get(stand.state)
    deadline = engine_deadline(
        limits,
        _starts(snapshots, history),
        waits=waits,
        ended=history.ended if history is not None and stand.state == "ended" else "",
        stopped=_stopped(target, snapshots),
    )
    return Look(target, tuple(snapshots), stand, history, deadline, found, classification, text, tuple(dict.fromkeys(unread)))


def _start(
    target: ServerTarget, snapshots: Sequence[Snapshot], tail: LogTail | None, clock: Clock, proc: Path
) -> StartState | None:
    """Of a server whose API process lives; None else."""
    states = {item.pid: item.state for item in snapshots[-1].processes} if snapshots else {}
    if target.api_pid is None or states.get(target.api_pid) in (None, "Z", "X"):
        return None
    return start_state(tail, age_s=process_age_s(target.api_pid, proc), now=clock.wall())


def _warm() -> None:
    from ...forensics import classify  # noqa: F401
    from ...forensics.evidence import gather  # noqa: F401


def _judge(text: str, tail: LogTail | None, clock: Clock) -> tuple[LogHistory | None, Classification]:
    from ...forensics.classify import classify
    from ...forensics.evidence.gather import read_text

    case = read_text(_LOG_NAME, text)
    history = log_history(case, tail, now=clock.wall(), source=_LOG_NAME) if tail is not None else None
    return history, classify(case)


def _unread_of(snapshots: Sequence[Snapshot]) -> list[Unread]:
    if not snapshots:
        return []
    last = snapshots[-1]
    found = [item for device in last.devices for item in device.unread]
    if not last.devices:
        found.append(Unread("the GPUs", "no device was seen by NVML", "See: dsv4-repro doctor"))
    if last.engine is None or last.engine.error:
        found.append(Unread("/metrics", last.engine.error if last.engine is not None else "was not looked at"))
    found += [Unread(f"recorder of {item.pid}", item.error) for item in last.progress if item.error]
    return found
