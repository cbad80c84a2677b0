"""A server that is looked up again while it is watched: what is taken of the answer, and when it is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import UnavailableError
from dsv4_repro.repro.serving.records import Rank, ServerTarget, Snapshot
from dsv4_repro.repro.serving.renewal import Renewal, complete, renewed, workers_text
from dsv4_repro.repro.serving.server_end import ServerEnd
from dsv4_repro.repro.serving.signals import ProcessReader

URL = "http://127.0.0.1:8000"
BARE = ServerTarget(URL, api_pid=7, tree={7: "api"})
ENGINE = replace(BARE, engine_pids=(8,), tree={7: "api", 8: "engine"})
NO_CARD = replace(ENGINE, ranks=(Rank(9, 0, 90),), tree={7: "api", 8: "engine", 9: "worker"})
WHOLE = replace(NO_CARD, ranks=(Rank(9, 0, 90, "GPU-1", 1),))
MOVED = replace(NO_CARD, ranks=(Rank(9, 0, 90, "GPU-0", 0),))
LATE = replace(WHOLE, ranks=(*WHOLE.ranks, Rank(10, 1, 100, "GPU-0", 0)), tree={**WHOLE.tree, 10: "worker"})
HELPER = replace(WHOLE, ranks=(*WHOLE.ranks, Rank(10, None, 100)), tree={**WHOLE.tree, 10: "worker"})
FORKED = replace(WHOLE, engine_pids=(8, 30), tree={**WHOLE.tree, 30: "engine", 31: "api"})
AS_HELPER = replace(WHOLE, tree={**WHOLE.tree, 30: "other", 31: "other"})
SCALED = replace(LATE, engine_pids=(8, 18), tree={**LATE.tree, 18: "engine"})
INSIDE = replace(ENGINE, ranks=(Rank(8, 0, 80, "GPU-1", 1),))


@pytest.mark.parametrize(
    ("known", "found", "taken"),
    [
        (BARE, ENGINE, ENGINE),
        (BARE, NO_CARD, NO_CARD),
        (NO_CARD, WHOLE, WHOLE),
        (WHOLE, MOVED, MOVED),
        (WHOLE, LATE, LATE),  # more workers, each with its card
        (WHOLE, FORKED, AS_HELPER),  # a fork that has not become the program yet
        (NO_CARD, replace(FORKED, ranks=NO_CARD.ranks), replace(AS_HELPER, ranks=NO_CARD.ranks)),
        (WHOLE, SCALED, SCALED),  # an engine more, which brings its worker
        (
            ENGINE,
            replace(ENGINE, engine_pids=(8, 18), tree={**ENGINE.tree, 18: "engine"}),
            replace(ENGINE, engine_pids=(8, 18), tree={**ENGINE.tree, 18: "engine"}),
        ),  # it starts: nobody is known to be all
        (WHOLE, HELPER, WHOLE),  # all was known, and what is new computes on nothing
        (ENGINE, INSIDE, INSIDE),
        (WHOLE, NO_CARD, WHOLE),  # NVML was silent this time
        (WHOLE, replace(WHOLE, ranks=(Rank(9, None, 90, "GPU-1", 1),)), WHOLE),
        (WHOLE, ENGINE, WHOLE),  # the worker is gone: an end, which the watchdog sees
        (WHOLE, replace(BARE, api_pid=7), WHOLE),
        (WHOLE, replace(WHOLE, ranks=(Rank(9, 0, 91, "GPU-1", 1),)), WHOLE),  # its pid was given to another
        (replace(WHOLE, owned=True), replace(LATE, owned=False), replace(LATE, owned=True)),
        (replace(BARE, base_url=None), WHOLE, WHOLE),
        (WHOLE, replace(WHOLE, base_url="http://other:1"), WHOLE),
        (ServerTarget(URL), WHOLE, WHOLE),
    ],
)
def test_what_is_taken(known: ServerTarget, found: ServerTarget, taken: ServerTarget) -> None:
    assert renewed(known, found) == taken


def test_complete_is_workers_cards_and_a_url() -> None:
    assert [complete(one) for one in (BARE, NO_CARD, WHOLE, LATE, HELPER, replace(WHOLE, base_url=None))] == [
        False, False, True, True, False, False,
    ]  # fmt: skip


def test_the_workers_in_words() -> None:
    assert workers_text(BARE) == "0 worker(s); they are looked for as it starts"
    assert workers_text(ServerTarget(URL)) == "0 worker(s)"
    assert workers_text(NO_CARD) == "1 worker(s), on which GPU is not known"
    assert workers_text(LATE) == "2 worker(s) on GPU 0, 1"


class Asked:
    """Answers with ``now``; each question by its time."""

    def __init__(self, clock: FakeClock, now: ServerTarget) -> None:
        self.clock, self.now, self.times, self.took = clock, now, [], 0.0  # type: ignore[var-annotated]
        self.error: Exception | None = None

    def __call__(self, known: ServerTarget) -> ServerTarget:
        self.times.append(self.clock.monotonic())
        self.clock.advance(self.took)
        if self.error is not None:
            raise self.error
        return self.now

    def run(self, renewal: Renewal, seconds: float, state: str = "") -> None:
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            renewal.told(state)
            renewal.look()
            self.clock.advance(0.5)


def test_often_while_something_is_missing_and_ever_less() -> None:
    clock = FakeClock()
    asked = Asked(clock, BARE)
    asked.run(Renewal(BARE, asked, clock=clock), 600.0, "starting")
    gaps = [later - one for one, later in zip(asked.times, asked.times[1:], strict=False)]
    assert asked.times[0] == 5.0
    assert gaps == sorted(gaps)
    assert gaps[0] <= 6.0
    assert gaps[-1] <= 61.0
    assert len(asked.times) < 25


def test_a_server_that_becomes_ready_is_looked_up_at_once() -> None:
    clock = FakeClock()
    asked = Asked(clock, BARE)
    renewal = Renewal(BARE, asked, clock=clock)
    asked.run(renewal, 300.0, "starting")
    asked.now, ready = WHOLE, clock.monotonic()
    renewal.told("healthy")
    assert renewal.look() == WHOLE or clock.monotonic() < asked.times[-1] + 2.5
    asked.run(renewal, 3.0, "healthy")
    assert renewal.look() == WHOLE
    assert min(one for one in asked.times if one >= ready) <= ready + 2.5
    asked.run(renewal, 600.0, "healthy")
    assert len([one for one in asked.times if one > ready + 3.0]) <= 10


def test_not_while_it_hangs_and_never_for_much_of_the_time() -> None:
    clock = FakeClock()
    asked = Asked(clock, BARE)
    renewal = Renewal(BARE, asked, clock=clock)
    asked.run(renewal, 300.0, "hung")
    assert asked.times == []
    asked.took = 1.5  # a machine full of processes
    for number in range(600):
        asked.run(renewal, 1.0, ("healthy", "suspect")[number % 2])
    assert len(asked.times) <= 5


def test_a_look_that_fails_is_made_again_and_what_was_known_stays() -> None:
    clock = FakeClock()
    asked = Asked(clock, WHOLE)
    renewal = Renewal(NO_CARD, asked, clock=clock)
    asked.error = UnavailableError("not now")
    clock.advance(5.0)
    with pytest.raises(UnavailableError):
        renewal.look()
    assert renewal.look() == NO_CARD
    asked.error = None
    asked.run(renewal, 20.0, "starting")
    assert renewal.look() == WHOLE


@pytest.mark.parametrize("state", ["hung", "exited", "crashed"])
def test_an_answer_that_comes_when_it_hangs_already_is_not_taken(state: str) -> None:
    """The evidence of a hang is of the processes and cards that its verdict rested on."""
    clock = FakeClock()

    def found(_: ServerTarget) -> ServerTarget:
        renewal.told(state)
        return WHOLE

    renewal = Renewal(NO_CARD, found, clock=clock)
    clock.advance(10.0)
    assert renewal.look() == NO_CARD
    clock.advance(100.0)
    assert renewal.look() == NO_CARD
    renewal.told("healthy")
    renewal._find = lambda known: WHOLE
    clock.advance(3.0)
    assert renewal.look() == WHOLE, "once it moves again it is looked up"


def test_the_end_of_a_program_that_the_server_ran_is_no_crash_of_it(tmp_path: Path) -> None:
    """The look-up met it between fork and exec: by its command line it was another engine. For weeks, once a minute."""
    for pid in (7, 8, 9, 30):
        _stat(tmp_path, pid)
    processes, end = ProcessReader(WHOLE, proc=tmp_path), ServerEnd()

    def ended() -> object:
        shot = Snapshot(0.0, processes=processes.look())
        end.replaced(shot, ended=False)
        return end.ended(shot, ready=True)

    assert ended() is None
    processes.retarget(renewed(WHOLE, FORKED))
    assert ended() is None
    (tmp_path / "30" / "stat").unlink()
    assert ended() is None
    (tmp_path / "9" / "stat").unlink()
    assert ended() is not None


def _stat(proc: Path, pid: int) -> None:
    (proc / str(pid)).mkdir()
    fields = ["S", "1", *["0"] * 17, str(10 * pid), *["0"] * 30]
    (proc / str(pid) / "stat").write_text(f"{pid} (python) {' '.join(fields)}")
