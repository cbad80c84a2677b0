"""The canary: off unless asked for; what waits is a sign, what went wrong on the way is none. The server is a stand-in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dsv4_repro.clock import SYSTEM, FakeClock
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.serving.canary import Canary, CanaryAnswer, completion_canary
from dsv4_repro.repro.serving.exporter import WatchState
from dsv4_repro.repro.serving.records import Assessment, EngineSample, ProcessSample, ServerTarget, Snapshot
from dsv4_repro.repro.serving.server_watchdog import ServerWatchdog
from dsv4_repro.repro.watch_verb import _Decided

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.run import StandIn

_Make = Callable[..., AbstractContextManager["StandIn"]]
POST = "POST /v1/completions"


def _wait(what: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_that_is_answered_and_one_that_waits() -> None:
    gate, calls = threading.Event(), []

    def ask(timeout_s: float) -> CanaryAnswer:
        calls.append(timeout_s)
        if len(calls) > 1:
            gate.wait(10)
        return CanaryAnswer("answered")

    canary = Canary(ask, period_s=0.01, clock=SYSTEM)
    canary.start()
    _wait(lambda: len(calls) == 2)
    time.sleep(0.05)
    said = canary.says()
    assert said.age_s is not None
    assert said.waiting_s
    assert said.error == ""
    assert len(calls) == 2  # never two at once
    canary.stop()
    gate.set()


def test_a_silent_one_goes_on_to_wait_and_a_failed_one_does_not() -> None:
    answers = [CanaryAnswer("silent"), CanaryAnswer("silent"), CanaryAnswer("failed", "refused")]
    seen = []

    def ask(_timeout_s: float) -> CanaryAnswer:
        seen.append(canary.says())
        if len(seen) > len(answers):
            raise OSError("gone")
        return answers[len(seen) - 1]

    canary = Canary(ask, period_s=0.05, clock=SYSTEM)
    canary.start()
    _wait(lambda: len(seen) >= 5)
    canary.stop()
    waits = [said.waiting_s or 0.0 for said in seen]
    # The second is sent while the first counts still; the fourth, after a failure, starts anew.
    assert waits[0] < 0.04
    assert 0.04 < waits[1] < waits[2]
    assert waits[3] < 0.04
    assert [said.error for said in seen[:5]] == ["", "", "", "refused", "OSError: gone"]
    assert seen[-1].age_s is None


@pytest.mark.parametrize("refuse", [429, 503, 401])
def test_a_client_error_is_no_silence(stand_in: _Make, refuse: int) -> None:
    with stand_in(refuse=refuse) as server:
        answer = completion_canary(server.base_url, environ={})(5.0)
        assert (answer.kind, bool(answer.why)) == ("failed", True)
        server.set(refuse=0)
        assert completion_canary(server.base_url, environ={"VLLM_API_KEY": "k" * 8})(5.0).kind == "answered"
    assert completion_canary(server.base_url, environ={})(5.0).kind == "failed"


def test_a_wedged_server_is_silent(stand_in: _Make) -> None:
    with stand_in(wedge_step=1, after=0) as server:
        ask = completion_canary(server.base_url, environ={})
        kinds = [ask(1.0).kind for _ in range(3)]
        assert kinds[-1] == "silent"


def _watched(seconds: float, **canary: object) -> Assessment:
    """A server without requests whose counters stand, no card, no recorder."""
    watchdog, at = ServerWatchdog(), 1000.0
    for look in range(int(seconds * 4)):
        at = 1000.0 + look / 4
        waits = canary.get("waits")
        found = watchdog.observe(
            Snapshot(
                at,
                None if canary.get("blind") else EngineSample(at, 0.01, 200, 0, 0, 10.0, 10.0, 10.0),
                processes=(ProcessSample(at, 1, "api", "S"), ProcessSample(at, 2, "worker", "S")),
                canary_waiting_s=look / 4 if waits else None,
                canary_age_s=1.0 if canary.get("answered") else None,
                canary_error=str(canary.get("error") or ""),
            )
        )
    return found


def test_a_hung_canary_makes_an_idle_server_suspect_and_a_client_error_does_not() -> None:
    hung = _watched(30, waits=True)
    assert hung.state == "suspect"
    assert any("--canary" in reason for reason in hung.reasons)
    assert any(item.signal == "vllm:num_requests_running" for item in hung.blind)
    error = _watched(30, error="http-status: 401 Unauthorized")
    assert (error.state, error.reasons[-1]) == ("healthy", "idle: no request in hand")
    assert [item.why for item in error.blind if item.signal == "canary"] == [
        "could not be asked, which says nothing of the engine: http-status: 401 Unauthorized"
    ]
    # Off: that too is said.
    assert [item.why for item in _watched(5).blind if item.signal == "canary"] == ["no completion of our own is sent"]


def test_where_no_counter_is_read_the_canary_tells() -> None:
    # The look that says the server is ready, then nothing but the canary.
    def state(**canary: object) -> Assessment:
        watchdog, at = ServerWatchdog(), 1000.0
        for look in range(120):
            at = 1000.0 + look / 4
            engine = EngineSample(at, 0.01, 200, error="" if look == 0 else "blocked")
            found = watchdog.observe(
                Snapshot(at, engine, processes=(ProcessSample(at, 1, "api", "S"),), **canary)  # type: ignore[arg-type]
            )
        return found

    assert state().state == "suspect"
    assert state(canary_age_s=20.0).state == "healthy"
    assert state(canary_age_s=20.0, canary_error="refused").state == "suspect"
    waits = state(canary_age_s=90.0, canary_waiting_s=40.0)
    assert waits.state == "suspect"
    assert "--canary" in waits.reasons[0]


def test_watch_sends_none_unless_it_is_asked_to(stand_in: _Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--once", "--out", str(tmp_path)]
    with stand_in() as server:
        assert main(["watch", "--url", server.base_url, *more]) == 0
        assert "reads only, sends nothing to it" in " ".join(capsys.readouterr().out.split())
        assert POST not in server.text()
        assert main(["watch", "--url", server.base_url, "--canary", "600", *more]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "a completion of 8 tokens in and 1 out every 600 s" in said
        assert "reads only" not in said
        assert server.text().count(POST) == 1
        # Faster than one in five seconds is no canary but a load.
        assert main(["watch", "--url", server.base_url, "--canary", "1", *more]) == 2


def test_an_idle_server_that_is_wedged_is_found_by_it_alone(
    stand_in: _Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody asks it anything: without the canary it is idle, and well."""
    more = ["--once", "--timeout", "20", "--out", str(tmp_path)]
    with stand_in(wedge_step=1, after=0) as server:
        assert main(["watch", "--pid", str(server.pid), *more]) == 0
        assert "HEALTHY: idle" in capsys.readouterr().out
        assert main(["watch", "--pid", str(server.pid), "--canary", "5", *more]) == 5  # hung needs a sign from the device
        said = " ".join(capsys.readouterr().out.split())
        assert "NOT DECIDED: suspect" in said
        assert "the completion that was sent to try it (--canary) has waited for" in said


def test_once_waits_for_the_canary_and_not_for_one_that_is_not_sent() -> None:
    clock = FakeClock()

    def decided(url: str | None, **canary: Any) -> bool:
        loop: Any = SimpleNamespace(
            state=WatchState(state="healthy"), target=ServerTarget(url, api_pid=7),
            assessment=Assessment("healthy", 10.0, 10.0, ("idle",)),
        )  # fmt: skip
        ask, found = _Decided(loop, clock, canary=lambda: Snapshot(10.0, **canary)), []
        for _ in range(10):
            found.append(ask())
            clock.sleep(0.5)
        return any(found)

    assert not decided("http://h:1")
    assert not decided("http://h:1", canary_waiting_s=1.0)
    assert not decided("http://h:1", canary_age_s=20.0, canary_waiting_s=1.0)
    assert decided("http://h:1", canary_age_s=1.0)
    assert decided("http://h:1", canary_error="401")
    assert decided(None)
