"""The server ground with a scripted load, observer and process: what ends a step, and what never counts as a hang."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import RunStoreError, UsageError
from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.repro.ground import CloseOutcome, GroundRequest
from dsv4_repro.repro.server_ground import ServerGround
from dsv4_repro.repro.server_opening import ServerSetup
from dsv4_repro.repro.server_steps import Passing
from dsv4_repro.repro.serving.aims import Aim
from dsv4_repro.repro.serving.completions import CompletionOutcome
from dsv4_repro.repro.serving.drain_windows import drain_windows
from dsv4_repro.repro.serving.engine_flags import facts_of
from dsv4_repro.repro.serving.load_plan import LoadPlan
from dsv4_repro.repro.serving.recipe import DUMMY_PLAN, ServeOptions, recipe_flags
from dsv4_repro.repro.serving.records import Assessment, LoadSample, ServerTarget, Snapshot
from dsv4_repro.repro.serving.server_diagnosis import ServerFacts
from dsv4_repro.repro.serving.steering import WindowCount
from dsv4_repro.scenarios.drain import DrainPlan

PLAN = DrainPlan(**{**dict(DUMMY_PLAN), "requests": 5, "min_live": 3, "output": (4, 12)})
LOAD = LoadPlan.from_drain(PLAN, waves=2)
AIM = Aim(live=3, mtp=1, graph_rows=8)
MEASURED = WindowCount(AIM, "measured", 1, 40, "40 steps")


@dataclass
class Load:
    """Plays a list of looks: (wave, live, tokens of each, faults)."""

    looks: list[tuple[str, int, dict[str, int]]]
    faults: dict[str, int] = field(default_factory=dict)
    counts: tuple[WindowCount, ...] = (MEASURED,)
    error: str = ""
    stopped: bool = False
    ends: bool = True
    at: int = -1

    @property
    def wave(self) -> str:
        self.at = min(self.at + 1, len(self.looks) - 1)
        return self.looks[self.at][0]

    def live(self) -> int:
        return self.looks[self.at][1]

    def stream_tokens(self) -> dict[str, int]:
        return self.looks[self.at][2]

    def sample(self) -> LoadSample:
        tokens = sum(self.looks[max(self.at, 0)][2].values())
        return LoadSample(at=0.0, open=self.looks[max(self.at, 0)][1], tokens=tokens, last_token_age_s=0.1, faults=self.faults)

    def done(self) -> bool:
        return self.ends and self.at >= len(self.looks) - 1

    def windows(self) -> tuple[WindowCount, ...]:
        return self.counts

    def stop(self) -> bool:
        self.stopped = True
        return True


class Observer:
    def __init__(self, *states: Any) -> None:
        self.states = list(states) or ["healthy"]
        self.stopped = False

    def latest(self) -> tuple[Snapshot, Assessment]:
        state, since = self.states.pop(0) if len(self.states) > 1 else self.states[0], 0.0
        if isinstance(state, tuple):
            state, since = state
        signals = ("ring",) if state == "hung" else ()
        return Snapshot(at=0.0), Assessment(state, 0.0, since, ("because",), signals, live_requests=3)

    def stop(self) -> bool:
        self.stopped = True
        return True


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``ground(load, observer, status=None, answers=True)``: an opened ground with these parts."""

    def make(load: Load, observer: Observer | None = None, *, answers: bool = True, **more: Any) -> Any:
        facts = facts_of(recipe_flags(PLAN, "dummy"))
        windows = drain_windows(PLAN, facts)
        setup = ServerSetup(windows=windows, load_plan=LOAD, url="http://127.0.0.1:1", facts=ServerFacts(plan=PLAN), **more)
        made: Any = ServerGround(setup, tmp_path, clock=FakeClock())
        made._emit = lambda _kind, **_fields: None
        made._request = GroundRequest(PLAN, windows.steps, None, windows.launches)  # type: ignore[arg-type]
        made._target = ServerTarget(base_url="http://127.0.0.1:1", model="m", agent_folder=None)
        made._observer = observer or Observer()
        outcome = CompletionOutcome("completed" if answers else "refused", 0.0, 0.1)
        monkeypatch.setattr("dsv4_repro.repro.serving.completions.complete_once", lambda *_a, **_k: outcome)

        def start() -> None:
            made._load = load
            made._passing = Passing(made._request.steps[0].live_requests, LOAD)

        made._start_load = start
        return made

    return make


def _tokens(count: int, each: int) -> dict[str, int]:
    return {f"r{number}": each for number in range(count)}


FALLING = [
    ("warm-up", 1, _tokens(1, 3)), ("w0", 5, _tokens(5, 0)), ("w0", 5, _tokens(5, 2)), ("w0", 5, _tokens(5, 4)),
    ("w0", 3, _tokens(5, 5)),
    ("w0", 3, _tokens(5, 7)), ("w0", 0, _tokens(5, 9)), ("w1", 5, _tokens(5, 1)), ("w1", 0, _tokens(5, 9)),
]  # fmt: skip


def test_steps_follow_the_live_counts_and_the_last_one_ends_with_the_load(ground: Callable[..., Any]) -> None:
    load = Load(FALLING)
    made = ground(load)
    outcomes = [made.run_step(step) for step in made._request.steps]
    assert [step.live_requests for step in made._request.steps] == [5, 4, 3]
    assert [outcome.state for outcome in outcomes] == ["done"] * 3
    assert load.at == len(FALLING) - 1
    diagnosis, reached = made.judge_clean()
    assert reached
    assert (diagnosis.outcome, diagnosis.verdict.confidence) == ("clean", "high")
    assert load.stopped


def test_hung_is_the_observers_word_and_its_step_is_the_live_count(ground: Callable[..., Any]) -> None:
    made = ground(Load(FALLING[:6], ends=False), Observer("healthy", "healthy", "healthy", "hung"))
    outcome = made.run_step(made._request.steps[0])
    assert outcome.state in ("done", "hung")
    while outcome.state == "done":
        outcome = made.run_step(made._request.steps[1])
    assert outcome.state == "hung"
    assert outcome.reasons == ("because",)
    diagnosis = made.judge((), made._request.steps[1], outcome, evidence=())
    assert diagnosis.outcome == "hang"
    assert diagnosis.window.live_requests == 3
    assert diagnosis.window.reached


def test_suspect_without_a_sign_from_the_device_ends_without_an_answer(ground: Callable[..., Any]) -> None:
    made = ground(Load(FALLING[:5], ends=False), Observer("suspect"), suspect_s=5.0)
    outcome = made.run_step(made._request.steps[-1])
    assert outcome.state == "unfinished"
    assert "no sign came from the device" in outcome.reasons[0]
    assert made.judge((), made._request.steps[-1], outcome, evidence=()).outcome == "inconclusive"


@pytest.mark.parametrize("state", ["exited", "crashed"])
def test_an_end_that_the_observer_sees_is_died(ground: Callable[..., Any], state: str) -> None:
    made = ground(Load(FALLING[:5], ends=False), Observer(state))
    outcome = made.run_step(made._request.steps[-1])
    assert outcome.state == "died"
    assert made.judge((), made._request.steps[-1], outcome, evidence=()).outcome == "other"


def test_a_load_of_faults_alone_is_no_hang_and_no_clean_run(ground: Callable[..., Any]) -> None:
    made = ground(Load([("w1", 0, {})], faults={"unavailable": 5}, counts=()))
    outcome = made.run_step(made._request.steps[-1])
    assert outcome.state == "unfinished"
    assert "5 x unavailable" in outcome.reasons[0]


def test_requests_that_were_turned_away_do_not_spoil_a_drain_and_broken_ones_do(ground: Callable[..., Any]) -> None:
    made = ground(Load(FALLING, faults={"too-many-requests": 2}))
    made.run_step(made._request.steps[-1])
    diagnosis, reached = made.judge_clean()
    assert reached
    assert "2 too-many-requests" in diagnosis.verdict.sentence
    made = ground(Load(FALLING, faults={"server-error": 3}))
    made.run_step(made._request.steps[-1])
    diagnosis, reached = made.judge_clean()
    assert not reached
    assert diagnosis.outcome == "inconclusive"


def test_a_server_that_answers_no_more_after_the_drain_is_not_clean(ground: Callable[..., Any]) -> None:
    made = ground(Load(FALLING), answers=False)
    outcome = made.run_step(made._request.steps[-1])
    assert outcome.state == "unfinished"
    assert "completes no further request: refused" in outcome.reasons[0]


def test_a_window_that_nobody_saw_is_not_reached(ground: Callable[..., Any]) -> None:
    made = ground(Load(FALLING, counts=(replace(MEASURED, how="inferred"),)), retry="again and again")
    made.run_step(made._request.steps[-1])
    diagnosis, reached = made.judge_clean()
    assert not reached
    assert diagnosis.outcome == "inconclusive"
    assert diagnosis.next == "again and again"


def test_a_ground_without_a_server_says_what_to_give_and_closes_at_any_time() -> None:
    bare = ServerGround()
    with pytest.raises(UsageError, match="--model"):
        bare.open(None, lambda _kind, **_fields: None)  # type: ignore[arg-type]
    assert bare.close().how == "clean"
    assert not bare.unwedge(1, 2).attempted


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), TypeError("ours"), CancelledError()])
@pytest.mark.parametrize("where", ["load", "observer"])
def test_whatever_is_raised_while_it_closes_our_server_is_not_left_behind(
    ground: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    load, observer = Load(FALLING), Observer()

    def interrupted() -> bool:
        raise error

    monkeypatch.setattr({"load": load, "observer": observer}[where], "stop", interrupted)
    made = ground(load, observer)
    made.run_step(made._request.steps[-1])
    ended: list[str] = []

    class Process:
        def poll(self) -> None:
            return None

        def end(self) -> CloseOutcome:
            ended.append(f"observer stopped: {observer.stopped}")
            return CloseOutcome("terminated", device_idle=True)

    made._process = Process()
    with pytest.raises(type(error)):
        made.close()
    assert ended == [f"observer stopped: {where == 'load'}"]


@pytest.mark.parametrize("error", [RunStoreError("the disk is full"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("ours", "at", "ends"),
    [
        (False, "found", "not ours: left as found"), (False, "unread", "not ours: left as found"),
        (True, "starting", "no server was started"), (True, "change", "no server was started"),
        (True, "loading", "ended: started"), (True, "ready", "ended: started"),
    ],
)  # fmt: skip
def test_a_timeline_that_cannot_be_written_while_a_server_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool, at: str, ends: str, error: BaseException
) -> None:
    """Ours is ended as soon as there is one; of somebody else's what is said at the end still holds."""
    target = ServerTarget(base_url="http://127.0.0.1:1", model="m", agent_folder=None, unread=(Unread("log", "closed"),))
    change = SimpleNamespace(what="w", value="v", why="y")
    spec = SimpleNamespace(shown=("vllm",), log_path=tmp_path / "log", changes=(change,), headers={}, dumps=None)

    class Process:
        pid = None

        def __init__(self, _spec: Any, _clock: Any) -> None:
            self.said = "never started"

        def start(self) -> None:
            self.said = "started"

        def wait_ready(self, _limit: Any, on_phase: Callable[[str, str, float], None]) -> float:
            on_phase("loading", "the weights", 1.0)
            return 2.0

        def end(self) -> CloseOutcome:
            return CloseOutcome("terminated", device_idle=True, detail=f"ended: {self.said}")

    monkeypatch.setattr("dsv4_repro.repro.serving.server_process.ServerProcess", Process)
    monkeypatch.setattr("dsv4_repro.repro.serving.recipe.build_launch", lambda _options: spec)
    monkeypatch.setattr("dsv4_repro.repro.serving.ranks.find_server", lambda _url, clock: target)
    monkeypatch.setattr(
        "dsv4_repro.repro.serving.completions.complete_once", lambda *_a, **_k: CompletionOutcome("completed", 0.0, 0.1)
    )

    def emit(kind: str, **fields: Any) -> None:
        if at in (kind, fields.get("state")):
            raise error

    setup = ServerSetup(
        windows=drain_windows(PLAN, facts_of(recipe_flags(PLAN, "dummy"))), load_plan=LOAD, url=None if ours else "http://127.0.0.1:1",
        options=ServeOptions(Path(), PLAN) if ours else None, facts=ServerFacts(plan=PLAN),
    )  # fmt: skip
    made = ServerGround(setup, tmp_path, clock=FakeClock())
    with pytest.raises(type(error)):
        made.open(None, emit)  # type: ignore[arg-type]
    assert made.close().detail == ends


def test_somebodys_server_is_left_as_found(ground: Callable[..., Any]) -> None:
    load, observer = Load(FALLING), Observer()
    made = ground(load, observer)
    made.run_step(made._request.steps[-1])
    closed = made.close()
    assert "left as found" in closed.detail
    assert load.stopped
    assert observer.stopped
    assert made.close().how == "clean"
