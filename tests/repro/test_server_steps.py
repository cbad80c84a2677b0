"""How a step of the server ground ends, with no server: each rule by itself, and which of two comes first."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4_repro.repro.server_steps import SILENT_S, nothing_answered, standing_end, step_detail
from dsv4_repro.repro.serving.aims import Aim
from dsv4_repro.repro.serving.records import Assessment, LoadSample, Snapshot
from dsv4_repro.repro.serving.steering import WindowCount

AIM = Aim(live=3, mtp=1, graph_rows=8)


def _look(state: Any, since: float = 0.0) -> tuple[Snapshot, Assessment]:
    return Snapshot(at=since), Assessment(state, since, since, ("because",), ("ring",))


def _end(look: Any = None, *, now: float = 1.0, age: float | None = 0.1, out_of_time: bool = False) -> Any:
    sample = LoadSample(at=now, last_token_age_s=age)
    return standing_end(look, sample, now=now, began=0.0, suspect_s=60.0, out_of_time=out_of_time)


@pytest.mark.parametrize("look", [None, _look("healthy"), _look("suspect")])
def test_a_step_goes_on_while_nothing_is_certain(look: Any) -> None:
    assert _end(look, now=59.0) is None


def test_only_the_observer_calls_a_server_hung() -> None:
    assert _end(_look("hung")) == ("hung", ("because",))
    assert _end(_look("hung"), now=SILENT_S + 1, age=None, out_of_time=True) == ("hung", ("because",)), "before any other word"


def test_suspect_for_too_long_is_no_hang() -> None:
    state, reasons = _end(_look("suspect"), now=61.0)
    assert state == "unfinished"
    assert reasons == ("nothing moved for 61 s and no sign came from the device", "because")


def test_the_runs_own_deadline_ends_a_step() -> None:
    assert _end(_look("healthy"), out_of_time=True)[0] == "unfinished"
    assert "--timeout" in _end(None, out_of_time=True)[1][0]


@pytest.mark.parametrize("age", [None, SILENT_S + 1])
def test_a_silence_that_nobody_explains_ends_a_step_and_is_no_hang(age: float | None) -> None:
    assert _end(_look("healthy"), now=SILENT_S, age=age) is None
    state, reasons = _end(_look("healthy"), now=SILENT_S + 1, age=age)
    assert state == "unfinished"
    assert reasons[0].startswith("no token for 600 s")


def test_a_silence_counts_from_the_last_token_too() -> None:
    assert _end(_look("healthy"), now=10 * SILENT_S, age=1.0) is None


def test_why_nothing_was_answered_is_ours_the_clients_or_the_plans() -> None:
    assert nothing_answered(LoadSample(at=0.0, faults={"reset": 2}), "a disk is full") == "the load itself failed: a disk is full"
    assert "2 x reset" in nothing_answered(LoadSample(at=0.0, faults={"reset": 2}), "")
    assert "no request was sent" in nothing_answered(LoadSample(at=0.0), "")


def test_the_detail_of_a_hang_says_for_how_long_and_that_of_another_end_does_not() -> None:
    windows = [WindowCount(AIM, "measured", 1, 40, "40 steps"), WindowCount(AIM, "not reached", 0, 0, "")]
    arguments = ("w0", LoadSample(at=9.0, open=3, tokens=7, faults={"slow": 1}), windows, _look("hung", 4.0), 9.0)
    detail = step_detail(*arguments, "hung")
    assert detail["windows"] == [{"window": "40 steps", "waves": 1, "steps": 40}]
    assert (detail["wave"], detail["open"], detail["tokens"], detail["faults"]) == ("w0", 3, 7, {"slow": 1})
    assert (detail["state"], detail["stood_still_s"], detail["device_signals"]) == ("hung", 5.0, ["ring"])
    assert not {"stood_still_s", "device_signals"} & set(step_detail(*arguments, "unfinished"))
    assert "state" not in step_detail("w0", LoadSample(at=0.0), windows, None, 9.0, "unfinished")
