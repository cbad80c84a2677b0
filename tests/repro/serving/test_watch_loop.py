"""The loop of watch, over weeks of a fake clock: once for each hang, across restarts, in flat memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import RunStoreError
from dsv4_repro.repro.serving.records import (
    CARDS_GUESSED,
    Assessment,
    Blind,
    Rank,
    RankProgress,
    ServerState,
    ServerTarget,
    Snapshot,
)
from dsv4_repro.repro.serving.watch_loop import RECENT_LINES, Hang, WatchLoop

TARGET = ServerTarget("http://127.0.0.1:8000", api_pid=7, engine_pids=(8,), ranks=(Rank(9, 0, 1),))


class Script:
    """A server whose state is a function of the time; finds it unless it is down."""

    def __init__(self, clock: FakeClock, state: Callable[[float], ServerState | None]) -> None:
        self.clock, self.state = clock, state
        self.started = self.stopped = 0
        self.hangs: list[Hang] = []
        self.said: list[str] = []
        self.frozen = False
        self.fail = False
        self.lingers = False
        #: What the observer knows of the server's processes, once it was looked up again.
        self.later: ServerTarget | None = None
        self.blind: tuple[Blind, ...] = ()
        self.generation: Callable[[float], int] = lambda _now: 0

    def find(self) -> ServerTarget | None:
        state = self.state(self.clock.monotonic())
        if state in (None, "exited") or (state == "crashed" and not self.lingers):
            return None
        return replace(TARGET, api_pid=7 + self.generation(self.clock.monotonic()))

    def observe(self, target: ServerTarget, emit: Callable[..., None]) -> _Observer:
        return _Observer(self, emit, target)

    def on_hang(self, hang: Hang) -> str:
        self.hangs.append(hang)
        if self.fail:
            raise RunStoreError("disk full", path="runs")
        return f"run-{len(self.hangs)}"

    def say(self, *lines: str, style: str = "") -> None:
        self.said += [line for line in lines if line]

    def loop(self) -> WatchLoop:
        return WatchLoop(self.find, self.observe, self.on_hang, self.say, clock=self.clock)


class _Observer:
    def __init__(self, script: Script, emit: Callable[..., None], target: ServerTarget) -> None:
        self.script, self.emit, self.found = script, emit, target
        self.at = script.clock.monotonic()

    def start(self) -> None:
        self.script.started += 1

    def stop(self) -> None:
        self.script.stopped += 1

    @property
    def target(self) -> ServerTarget:
        return self.script.later or self.found

    def latest(self) -> tuple[Snapshot, Assessment] | None:
        now = self.script.clock.monotonic()
        if not self.script.frozen:
            self.at = now
        state = self.script.state(now) or "crashed"
        self.emit("sample", running=3, at=now)
        return Snapshot(self.at, blind=self.script.blind), Assessment(state, self.at, self.at - 1, ("because",), live_requests=3)


def _until(clock: FakeClock, end: float) -> Callable[[], bool]:
    return lambda: clock.monotonic() >= end


def test_a_hang_is_handed_over_once_and_the_next_one_again() -> None:
    clock = FakeClock()
    script = Script(clock, lambda t: "hung" if 10 <= t < 60 or 100 <= t < 130 else "healthy")
    loop = script.loop()
    loop.run(until=_until(clock, 150))
    assert [hang.number for hang in script.hangs] == [1, 2]
    assert loop.state.hangs == 2
    assert loop.state.run == "run-2"
    assert script.hangs[0].recent
    assert script.hangs[0].recent[-1][0] == "sample"


def test_a_flicker_to_suspect_is_not_another_hang() -> None:
    clock = FakeClock()
    script = Script(clock, lambda t: "healthy" if t < 10 else "suspect" if 20 <= t < 22 else "hung")
    script.loop().run(until=_until(clock, 40))
    assert len(script.hangs) == 1


def test_what_follows_a_hang_is_of_the_processes_of_then() -> None:
    # A watch that began before any worker: the observer has looked the server up again.
    clock = FakeClock()
    late = replace(TARGET, api_pid=7, ranks=(Rank(19, 0, 1, "GPU-1", 1),))
    script = Script(clock, lambda t: "starting" if t < 50 else "healthy" if t < 60 else "hung")
    loop = script.loop()
    loop.run(until=_until(clock, 40))
    script.later = late
    script.started = 0
    loop = script.loop()
    loop.run(until=_until(clock, 80))
    assert script.hangs[-1].target == late
    assert script.said.count("1 worker(s) on GPU 1") == 1


def test_cards_that_are_only_visible_are_said_to_be_so_once_it_serves() -> None:
    clock = FakeClock()
    script = Script(clock, lambda t: "starting" if t < 20 else "healthy")
    script.blind = (Blind(CARDS_GUESSED, "which cards is not known"),)
    loop = script.loop()
    loop.run(until=_until(clock, 15))
    assert not any("which cards" in line for line in script.said)
    loop = script.loop()
    loop.run(until=_until(clock, 60))
    assert [line for line in script.said if "which cards" in line] == [
        "which cards is not known; a sign of them counts only if every one shows it, for 30 s"
    ]


def test_it_survives_the_restart_of_the_server() -> None:
    clock = FakeClock()

    def state(t: float) -> ServerState | None:
        return "healthy" if t < 20 else "crashed" if t < 25 else None if t < 80 else "starting" if t < 150 else "healthy"

    script = Script(clock, state)
    script.generation = lambda t: 0 if t < 25 else 1
    loop = script.loop()
    loop.run(until=_until(clock, 200))
    assert loop.state.restarts == 1
    assert (script.started, script.stopped) == (2, 2)
    assert any("found again" in line for line in script.said)
    assert loop.state.state == "healthy"
    assert script.hangs == []


def test_an_ended_server_whose_api_process_lingers_is_not_a_new_one() -> None:
    clock = FakeClock()
    script = Script(clock, lambda t: "healthy" if t < 20 else "crashed" if t < 50 else "healthy")
    script.generation = lambda t: 0 if t < 50 else 1
    script.lingers = True
    loop = script.loop()
    loop.run(until=_until(clock, 100))
    assert loop.state.restarts == 1
    assert script.started == 2


@pytest.mark.parametrize(
    ("left", "restarts"),
    [
        (replace(TARGET, engine_pids=(), ranks=()), 0),  # the API process alone, as it shuts down
        (replace(TARGET, ranks=()), 0),
        (replace(TARGET, ranks=(Rank(8, 0, 3),)), 0),  # its engine still holds the card
        (replace(TARGET, ranks=(Rank(9, 0, 2),)), 1),  # the worker's pid, begun anew
        (replace(TARGET, engine_pids=(18,), ranks=()), 1),  # the same pid in a new container, another engine
    ],
)
def test_what_is_left_of_an_ended_server_is_not_a_new_one(left: ServerTarget, restarts: int) -> None:
    clock = FakeClock()
    script = Script(clock, lambda t: "healthy" if t < 20 or t >= 30 else "crashed")
    script.find = lambda: TARGET if clock.monotonic() < 20 else left  # type: ignore[method-assign]
    loop = script.loop()
    loop.run(until=_until(clock, 60))
    assert loop.state.restarts == restarts
    assert script.started == 1 + restarts


def test_releases_are_those_that_came_while_it_was_looked_at() -> None:
    """A recorder that is read late, or again after it could not be read, has released nothing just now."""
    clock = FakeClock()
    script = Script(clock, lambda t: "healthy")
    loop = script.loop()
    a, b = RankProgress(9, 0.0, releases=2), RankProgress(10, 0.0, releases=40)
    torn = RankProgress(9, 0.0, error="cannot be read")
    seen = [(a,), (a, b), (torn, b), (a, b), (replace(a, releases=3), b), ()]
    told = []
    for progress in seen:
        script.said.clear()
        told.append(loop._released(Snapshot(0.0, progress=progress)))
        loop._set(releases=told[-1])
        assert any("released" in line for line in script.said) == (progress == seen[4])
    assert told == [2, 42, 42, 42, 43, 43]


def test_one_that_was_taken_for_ended_is_looked_at_again() -> None:
    clock = FakeClock()
    script = Script(clock, lambda t: "crashed" if 20 <= t < 30 else "healthy")
    loop = script.loop()
    loop.run(until=_until(clock, 200))
    assert loop.state.restarts == 0
    assert loop.state.state == "healthy"


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    clock = FakeClock()
    script = Script(clock, lambda t: None if t < 100 else "healthy")
    loop = script.loop()
    loop.run(until=_until(clock, 120))
    assert loop.state.state == "healthy"
    assert loop.state.restarts == 0


def test_an_observer_that_stands_still_is_exchanged() -> None:
    clock = FakeClock()
    script = Script(clock, lambda t: "healthy")
    loop = script.loop()

    def until() -> bool:
        script.frozen = 10 <= clock.monotonic() < 90
        return clock.monotonic() >= 200

    loop.run(until=until)
    assert script.started >= 2
    assert script.started == script.stopped
    assert loop.state.restarts == 0


def test_a_full_disk_does_not_end_the_watch() -> None:
    clock = FakeClock()
    script = Script(clock, lambda t: "hung" if 10 <= t < 20 or 40 <= t < 50 else "healthy")
    script.fail = True
    loop = script.loop()
    loop.run(until=_until(clock, 60))
    assert len(script.hangs) == 2
    assert sum("could not be kept" in line for line in script.said) == 2


def test_twelve_hours_with_a_restart_each_hour_in_flat_memory_without_a_word_too_many() -> None:
    """A look each half second, on a fake clock."""
    clock = FakeClock()
    hour = 3600.0

    def state(t: float) -> ServerState | None:
        rest = t % hour
        return "crashed" if rest < 2 and t > hour else None if rest < 60 and t > hour else "healthy"

    script = Script(clock, state)
    script.generation = lambda t: int(t / hour)
    loop = script.loop()
    sizes: list[int] = []
    halves = 0

    def until() -> bool:
        nonlocal halves
        if clock.monotonic() >= halves * hour / 2:
            halves += 1
            sizes.append(tracemalloc.get_traced_memory()[0])
        return clock.monotonic() >= 12 * hour + 100

    tracemalloc.start()
    try:
        loop.run(until=until)
    finally:
        tracemalloc.stop()
    assert script.hangs == []
    assert loop.state.restarts == 12
    assert (script.started, script.stopped) == (13, 13)
    assert len(sizes) >= 24
    assert max(sizes[3:]) - sizes[3] < 200_000
    # A change of state, and that it is back: nothing else.
    assert len(script.said) <= 1 + 12 * 3 + 1
    assert loop.state.looks > 80_000


def test_the_lines_before_a_hang_are_bounded() -> None:
    clock = FakeClock()
    script = Script(clock, lambda t: "healthy" if t < 3 * RECENT_LINES else "hung")
    script.loop().run(until=_until(clock, 3 * RECENT_LINES + 5))
    assert len(script.hangs[0].recent) == RECENT_LINES
    found: list[Any] = [fields for _, fields in script.hangs[0].recent]
    assert all("wall" in fields for fields in found)
