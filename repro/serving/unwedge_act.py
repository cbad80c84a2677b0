"""The release itself: one at a time on a machine, progress read again right before, ranks side by side, recovery from the metrics.

Nothing here makes things worse than they were: what moves is not touched, each write is guarded by reading the word again (in the
agent and in the debugger's script), a debugger is never ended by force, and what happened to each rank is a typed outcome.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from ...clock import SYSTEM, Clock, Deadline
from ...errors import RefusedError, ReproError
from ...forensics.collect.cuda_release import Releaser, Verdict
from ...kernels.abi import RELEASE_COUNT
from ..agent_ask import ask_release
from ..agent_show import read_agents
from .load_sources import engine_counters
from .ranks import is_same
from .records import EngineSample, Rank, ServerTarget
from .unwedge_plan import RankPlan, judge_diagnosis

__all__ = [
    "Counters",
    "Fillers",
    "RankOutcome",
    "Recovery",
    "counters_of",
    "locked",
    "release_all",
    "still_moving",
    "survivors_done",
    "wait_for_recovery",
]

#: released; nothing: it did not wait any more; refused: another state than expected; died: it ended meanwhile; failed: could not be
#: reached; left: a debugger is still attached; skipped: the plan left it alone.
State = Literal["released", "nothing", "refused", "died", "failed", "left", "skipped"]
MOST_WRITES = 4000
#: Beside other ranks that are being released, a rank without a wait is waited for so long, seconds.
PATIENCE_S = 4.0
_AGENT_ROUNDS = 200
Counters = Callable[[], EngineSample | None]


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What became of one rank. ``writes``: None: not known (a debugger that died, an agent that did not answer)."""

    pid: int
    rank: int | None
    state: State
    why: str
    writes: int | None = 0
    seconds: float = 0.0
    debugger_pid: int | None = None
    guard: bool | None = None


@dataclass(frozen=True, slots=True)
class Recovery:
    """``recovered``: tokens flow and go on flowing; None: the metrics could not be read. ``moved``: tokens since before."""

    recovered: bool | None
    text: str
    moved: float | None = None
    seconds: float = 0.0


class Fillers(Protocol):
    """What is needed of ``completions.FillerRequests``."""

    @property
    def open(self) -> int: ...

    @property
    def accepted(self) -> int: ...


@contextmanager
def locked(target: ServerTarget, folder: Path | None = None) -> Iterator[Path]:
    """Hold the machine's lock on this server; RefusedError where somebody else releases it now. The kernel frees it with us."""
    # By pid, not in the order of ranks: their numbers may be known to one of two callers only.
    workers = sorted(target.ranks, key=lambda rank: rank.pid)
    ranks = "-".join(str(rank.pid) for rank in workers[:4])
    start = workers[0].start_ticks if workers else 0
    path = (folder or Path(tempfile.gettempdir())) / f"dsv4-repro-unwedge-{ranks}-{start}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise RefusedError(f"the lock {path} cannot be taken: {error.strerror or error}") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RefusedError("somebody else is releasing this server now", help_text=f"Its lock: {path}") from None
        yield path
    finally:
        os.close(fd)


def still_moving(before: float | None, counters: Counters, clock: Clock = SYSTEM, seconds: float = 1.0) -> tuple[str, bool]:
    """(what moves, "" if nothing; whether it could be read): the token counter against ``before`` and itself a second on."""
    first = counters()
    clock.sleep(seconds)
    second = counters()
    if first is None or second is None or first.generation_tokens is None or second.generation_tokens is None:
        return "", False
    for old in (before, first.generation_tokens):
        if old is not None and second.generation_tokens != old:
            return f"generated tokens {old:g} -> {second.generation_tokens:g}", True
    return "", True


def _counted(folder: Path, name: str) -> int | None:
    """Releases since the worker started, by its recorder; None: not known."""
    try:
        return next((one.releases for one in read_agents(folder).ranks if one.name == name and one.ring), None)
    except ReproError:
        return None


def _by_agent(rank: Rank, plan: RankPlan, folder: Path, name: str, guard: bool, clock: Clock) -> RankOutcome:
    """Ask again while launches are released; end when it says that nothing is left."""
    began = clock.monotonic()
    before = _counted(folder, name)
    writes, why, armed = 0, "", None

    def outcome(state: State, text: str) -> RankOutcome:
        return RankOutcome(rank.pid, plan.rank, state, text, writes, clock.monotonic() - began, guard=armed)

    idle = 0
    for _ in range(_AGENT_ROUNDS):
        try:
            answer = ask_release(folder, name, guard=guard, timeout=4.0, clock=clock)
        except ReproError as error:
            if not is_same(rank):
                return outcome("died", "the process ended meanwhile")
            # It may have released and been held up before it could say so (seen on a card).
            after = _counted(folder, name)
            if before is None or after is None:
                return replace(outcome("released" if writes else "failed", f"its agent: {error}"), writes=writes or None)
            writes = max(after - before, writes)
            return outcome("released" if writes else "failed", f"its agent: {error}; {writes} released, by its recorder's count")
        writes += answer.released
        why, armed = answer.why_no_more, answer.guard
        idle = 0 if answer.released else idle + 1
        # A rank may wait for another's release before it comes to its own next one.
        if idle >= (1 if writes == 0 else 3) or writes >= MOST_WRITES:
            break
        clock.sleep(0.1)
    return outcome("released" if writes else "nothing", why)


def _by_debugger(
    rank: Rank, plan: RankPlan, folder: Path, tool: Any, most: int, total_s: float, alone: bool, keep: list[Releaser], clock: Clock
) -> RankOutcome:
    began = clock.monotonic()
    where = folder / f"rank-{rank.pid}"

    def judge(text: str) -> Verdict:
        from ...forensics.diagnose import diagnose_transcript

        path = where / "first_reading.txt"
        try:
            path.write_text(text, encoding="utf-8")
            return judge_diagnosis(diagnose_transcript(path, ground="process", hung=True))
        except Exception as error:  # a frozen process waits for the answer: whatever fails, it is no, and at once
            return Verdict(why=f"the reading could not be judged: {type(error).__name__}: {error}")

    patience = 0.0 if alone else PATIENCE_S
    releaser = Releaser(
        rank.pid, where, tool, judge, value=RELEASE_COUNT, most=most, total_s=total_s, patience_s=patience, clock=clock
    )
    keep.append(releaser)
    done = releaser.run()
    state: State = done.state  # type: ignore[assignment]
    why = done.why
    if not is_same(rank):
        state, why = "died", f"the process ended while the debugger was attached ({done.why})"
    return RankOutcome(rank.pid, plan.rank, state, why, done.writes, clock.monotonic() - began, done.pid)


def release_all(
    target: ServerTarget,
    plans: Sequence[RankPlan],
    *,
    folder: Path,
    agents: dict[int, str],
    guard: bool,
    tool: Any = None,
    most: int = MOST_WRITES,
    total_s: float = 60.0,
    clock: Clock = SYSTEM,
) -> list[RankOutcome]:
    """Release every rank that the plan says, side by side. ``tool``: a CudaGdb, where a rank is released through it.

    KeyboardInterrupt asks the debuggers to detach at their next stop, waits for that, and goes through.
    """
    ranks = {rank.pid: rank for rank in target.ranks}
    outcomes: dict[int, RankOutcome] = {}
    keep: list[Releaser] = []
    acting = [plan for plan in plans if plan.way != "none"]

    def work(plan: RankPlan) -> None:
        rank = ranks[plan.pid]
        try:
            if not is_same(rank):
                outcomes[plan.pid] = RankOutcome(plan.pid, plan.rank, "died", "the process had ended before it was touched")
            elif plan.way == "agent" and target.agent_folder is not None:
                outcomes[plan.pid] = _by_agent(rank, plan, target.agent_folder, agents[plan.pid], guard, clock)
            else:
                outcomes[plan.pid] = _by_debugger(rank, plan, folder, tool, most, total_s, len(acting) == 1, keep, clock)
        except (ReproError, OSError, LookupError, ValueError) as error:
            outcomes[plan.pid] = RankOutcome(plan.pid, plan.rank, "failed", f"{type(error).__name__}: {error}", None)

    threads = [threading.Thread(target=work, args=(plan,), name=f"dsv4-repro-unwedge-{plan.pid}", daemon=True) for plan in acting]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    except KeyboardInterrupt:
        for releaser in keep:
            releaser.stop()
        end = Deadline(20.0, clock)
        while any(thread.is_alive() for thread in threads) and not end.expired:
            clock.sleep(0.1)
        raise
    return [
        outcomes.get(plan.pid, RankOutcome(plan.pid, plan.rank, "skipped" if plan.way == "none" else "failed", plan.why))
        for plan in plans
    ]


def wait_for_recovery(before: float | None, counters: Counters, *, seconds: float, clock: Clock = SYSTEM) -> Recovery:
    """Wait until tokens flow in two readings in a row; by the metrics alone, never with a debugger."""
    began = clock.monotonic()
    deadline = Deadline(seconds, clock)
    last, rises, read = before, 0, False
    first = before
    while not deadline.expired:
        sample = counters()
        if sample is not None and sample.generation_tokens is not None:
            read = True
            first = sample.generation_tokens if first is None else first
            if last is not None and sample.generation_tokens > last:
                rises += 1
            last = sample.generation_tokens
            moved: float | None = last - first
            if rises >= 2 or (rises and sample.running == 0):
                text = f"tokens flow: {moved:g} more" + ("; no request runs any more" if sample.running == 0 else "")
                return Recovery(True, text, moved, clock.monotonic() - began)
        clock.sleep(0.5)
    if not read:
        return Recovery(None, "the metrics could not be read: whether it recovered is not known", None, clock.monotonic() - began)
    moved = (last - first) if last is not None and first is not None else None
    return Recovery(
        False, f"no lasting flow of tokens within {seconds:g} s ({moved or 0:g} more)", moved, clock.monotonic() - began
    )


def survivors_done(counters: Counters, fillers: Fillers, *, seconds: float, clock: Clock = SYSTEM) -> bool | None:
    """Wait until only the fillers are left in the engine; None: the metrics do not say; False: the time is over."""
    deadline = Deadline(seconds, clock)
    read = False
    while not deadline.expired:
        sample = counters()
        if sample is not None and sample.running is not None and sample.waiting is not None:
            read = True
            if sample.running + sample.waiting <= fillers.open:
                return True
        clock.sleep(0.25)
    return False if read else None


def counters_of(base_url: str, clock: Clock = SYSTEM) -> Counters:
    """Readings of the server's own counters."""
    return engine_counters(base_url, clock=clock)
