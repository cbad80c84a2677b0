"""The loop of ``watch``: a server is found, looked at, lost and found again; a hang is handed over once.

Nothing here reads the server: finding, observing and keeping the evidence are given, so that weeks are played in a test. Memory is
bounded: one target, one observer, the last ten minutes of samples.
"""

from __future__ import annotations

import shlex
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ...clock import SYSTEM, Clock, Deadline
from ...errors import ReproError
from .agent_counters import agent_counters
from .exporter import WatchState
from .permission import closed
from .records import CARDS_GUESSED, Assessment, ServerTarget, Snapshot
from .renewal import workers_text
from .watch_limits import WatchLimits

__all__ = ["Hang", "ObserverLike", "WatchLoop", "autopsy_of"]

LOOK_S = 0.5
FIND_S = 5.0
#: An observer whose last look is so old stands still itself: it is ended and another one started.
STUCK_S = 60.0
RECENT_LINES = 1200
#: A server that has ended may be found for a while (its API process lingers); it is looked at again only after so long.
SAME_S = 60.0
#: Cards of which none is known to be the server's speak for a hang after so long.
ALL_CARDS_S = WatchLimits().differ_s
_ENDED = ("exited", "crashed")


def _left_of(found: ServerTarget, ended: ServerTarget | None) -> bool:
    """Whether what was found is all that is left of a server that ended: its API process, and no process that it did not have."""
    if ended is None or found.api_pid is None or found.api_pid != ended.api_pid:
        return False
    began = {rank.pid: rank.start_ticks for rank in ended.ranks}
    had = {found.api_pid, *ended.engine_pids, *began, *ended.tree}
    return had >= {*found.engine_pids, *(rank.pid for rank in found.ranks)} and all(
        began.get(rank.pid, rank.start_ticks) == rank.start_ticks for rank in found.ranks
    )


def autopsy_of(log: Path) -> str:
    """The command that reads a server's log, for a shell."""
    return shlex.join(["dsv4-repro", "autopsy", str(log)])


class ObserverLike(Protocol):
    """``observer.Observer``, as far as it is used here."""

    def start(self) -> None: ...

    def latest(self) -> tuple[Snapshot, Assessment] | None: ...

    def stop(self) -> object: ...

    @property
    def target(self) -> ServerTarget: ...


@dataclass(frozen=True)
class Hang:
    """A hang as it was found: handed over once. ``recent``: the timeline lines before it (kind and fields), oldest first.
    ``moved``: what the observer, which goes on looking, has seen move since; "" as long as it still hangs."""

    target: ServerTarget
    snapshot: Snapshot
    assessment: Assessment
    recent: tuple[tuple[str, Mapping[str, Any]], ...]
    number: int
    moved: Callable[[], str] = lambda: ""


class WatchLoop:
    """``find``: the server now, None if it is not there. ``observe``: an observer of it, not started yet. ``on_hang`` may take its
    time: a thread of the observer goes on looking. ``say``: one line for a person, at a change only."""

    def __init__(
        self,
        find: Callable[[], ServerTarget | None],
        observe: Callable[[ServerTarget, Callable[..., None]], ObserverLike],
        on_hang: Callable[[Hang], str],
        say: Callable[..., None],
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._find, self._observe, self._on_hang, self._say, self._clock = find, observe, on_hang, say, clock
        self._state = WatchState()
        self._lock = threading.Lock()
        self._recent: deque[tuple[str, Mapping[str, Any]]] = deque(maxlen=RECENT_LINES)
        self._target: ServerTarget | None = None
        self._observer: ObserverLike | None = None
        self._seen_at: float | None = None
        self._seen_when = 0.0
        self._find_at: float | None = None
        self._had_server = False
        self._handled = False
        self._last: Assessment | None = None
        self._ended: ServerTarget | None = None
        self._ended_at = 0.0
        #: Releases by each worker's recorder, as it was last read.
        self._counted: dict[int, int] = {}
        self._guess_told = False

    @property
    def state(self) -> WatchState:
        """The newest state; safe from any thread."""
        with self._lock:
            return self._state

    @property
    def assessment(self) -> Assessment | None:
        return self._last

    @property
    def target(self) -> ServerTarget | None:
        return self._target

    def _set(self, **changes: Any) -> None:
        with self._lock:
            self._state = replace(self._state, **changes)

    def _emit(self, kind: str, **fields: Any) -> None:
        """The observer's lines, from its thread: kept for the run directory of a hang. ``appendleft`` and ``append`` are atomic."""
        self._recent.append((kind, {**fields, "wall": round(self._clock.wall(), 3)}))

    def step(self) -> None:
        """One turn: find or look, and act on what is new."""
        if self._target is None:
            self._look_for_server()
            return
        observer = self._observer
        assert observer is not None
        latest = observer.latest()
        now = self._clock.monotonic()
        if latest is None or latest[0].at == self._seen_at:
            if now - self._seen_when > STUCK_S:
                self._say("the observer stands still; another one is started", style="note")
                self._leave(count_restart=False)
            return
        self._renew(observer.target)
        snapshot, assessment = latest
        self._seen_at, self._seen_when = snapshot.at, now
        self._note(snapshot, assessment)
        if assessment.state == "hung":
            if not self._handled:
                self._handled = True
                self._hand_over(snapshot, assessment)
        elif assessment.state in ("healthy", "starting"):
            self._handled = False
        if assessment.state in ("exited", "crashed"):
            self._leave(count_restart=True)

    def _renew(self, target: ServerTarget) -> None:
        """The observer goes on with the server's processes as they are now: so does all that follows a hang."""
        before, self._target = self._target, target
        if before is not None and workers_text(before) != workers_text(target):
            self._say(workers_text(target), style="note")

    def _note(self, snapshot: Snapshot, assessment: Assessment) -> None:
        before = self.state.state
        self._last = assessment
        self._set(
            state=assessment.state,
            still_s=max(assessment.at - assessment.since, 0.0),
            live_requests=assessment.live_requests,
            looks=self.state.looks + 1,
            reason=assessment.reasons[0] if assessment.reasons else "",
            releases=self._released(snapshot),
        )
        began = {rank.pid: rank.start_ticks for rank in self._target.ranks} if self._target else {}
        counted = agent_counters(self._target.agent_folder, set(began), began) if self._target else None
        if counted is not None:
            self._set(rescues=counted.rescues, averted=counted.averted)
        guessed = next((item.why for item in snapshot.blind if item.signal == CARDS_GUESSED), "")
        if guessed and not self._guess_told and assessment.state not in ("starting", *_ENDED):
            self._guess_told = True
            self._say(f"{guessed}; a sign of them counts only if every one shows it, for {ALL_CARDS_S:g} s", style="note")
        if assessment.state != before:
            style = {"hung": "bad", "crashed": "bad", "healthy": "good"}.get(assessment.state, "note")
            # The first word after a server was found rests on one look: it is no finding yet.
            first = assessment.state == "healthy" and before == "no server"
            why = f": {assessment.reasons[0]}" if assessment.reasons else ": nothing is seen to stand still yet" if first else ""
            log = self._target.log_path if self._target is not None and assessment.state in ("exited", "crashed") else None
            follow = f"next: {autopsy_of(log)}" if log is not None else ""
            self._say(f"{before} -> {assessment.state}{why}", follow, style="note" if first else style)

    def _released(self, snapshot: Snapshot) -> int | None:
        """Releases by the agents' own count; a new one is said. A recorder that is read for the first time, or again, tells of the
        time before."""
        counts = {item.pid: item.releases for item in snapshot.progress if not item.error}
        if not counts:
            return self.state.releases
        more = sum(max(count - self._counted.get(pid, count), 0) for pid, count in counts.items())
        shown = {item.pid for item in snapshot.progress}
        self._counted = {pid: count for pid, count in self._counted.items() if pid in shown} | counts
        now = sum(self._counted.values())
        if more:
            self._say(f"the agent released {more} wait(s): {now} since the workers started", style="note")
        return now

    def _hand_over(self, snapshot: Snapshot, assessment: Assessment) -> None:
        assert self._target is not None
        self._set(hangs=self.state.hangs + 1, last_hang=self._clock.wall())
        observer = self._observer

        def moved() -> str:
            latest = observer.latest() if observer is not None else None
            return f"the watchdog says {latest[1].state}" if latest is not None and latest[1].state != "hung" else ""

        hang = Hang(self._target, snapshot, assessment, tuple(self._recent), self.state.hangs, moved)
        try:
            self._set(run=self._on_hang(hang))
        except ReproError as error:
            # A full disk must not end a watch of weeks: the next hang is found all the same.
            self._say(f"the evidence of this hang could not be kept: {error}", error.help_text, style="bad")

    def _look_for_server(self) -> None:
        now = self._clock.monotonic()
        if self._find_at is not None and now - self._find_at < FIND_S:
            return
        self._find_at = now
        target = self._find()
        if target is None:
            return
        same = _left_of(target, self._ended)
        if same and now - self._ended_at < SAME_S:
            return
        self._target = target
        self._observer = self._observe(target, self._emit)
        self._seen_at, self._seen_when = None, now
        self._handled = False
        self._observer.start()
        where = target.base_url or f"pid {target.api_pid}"
        if self._had_server and not same:
            self._set(restarts=self.state.restarts + 1)
        self._say(f"{'found again' if self._had_server else 'watching'}: {where}, {workers_text(target)}")
        self._guess_told = False
        for item in target.unread:
            if item.what == "the server":
                self._say(f"{item.why}. {item.remedy}".strip(), style="note")
        if names := closed(target.unread):
            self._say(f"closed to this user: {', '.join(names)}; as root, or as the server's user, more is seen", style="note")
        self._had_server = True

    def _leave(self, *, count_restart: bool) -> None:
        if count_restart and self._target is not None:
            self._ended, self._ended_at = self._target, self._clock.monotonic()
        observer, self._observer, self._target = self._observer, None, None
        if observer is not None:
            observer.stop()
        self._recent.clear()
        self._counted = {}
        self._find_at = None if not count_restart else self._clock.monotonic()
        if not count_restart:
            self._had_server = False
        self._set(state=self.state.state if count_restart else "no server", live_requests=None)

    def run(self, *, until: Callable[[], bool], seconds: float | None = None) -> None:
        """Turns until ``until`` says so, or ``seconds`` are over. The observer is always stopped."""
        deadline = Deadline(seconds, self._clock) if seconds is not None else None
        try:
            while not until() and not (deadline is not None and deadline.expired):
                self.step()
                self._clock.sleep(LOOK_S)
        finally:
            if self._observer is not None:
                self._observer.stop()
                self._observer = None
