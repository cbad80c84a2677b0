"""A drain that ended: clean only with the window seen, and what made it pass is said beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_repro.repro.serving import server_diagnosis
from dsv4_repro.repro.serving.aims import Aim
from dsv4_repro.repro.serving.drain_windows import drain_windows
from dsv4_repro.repro.serving.engine_flags import EngineFacts
from dsv4_repro.repro.serving.recipe import DUMMY_PLAN
from dsv4_repro.repro.serving.records import LoadSample
from dsv4_repro.repro.serving.server_diagnosis import ServerFacts, clean_drain, guard_armed
from dsv4_repro.repro.serving.steering import WindowCount
from dsv4_repro.repro.step_facts import computed_step, step_facts
from dsv4_repro.scenarios.drain import DrainPlan

PLAN = DrainPlan(**dict(DUMMY_PLAN))
WINDOWS = drain_windows(PLAN, EngineFacts(mtp=1))
SEEN = WindowCount(Aim(live=3, mtp=1, graph_rows=8), "measured", 2, 41, "41 recorded steps")
LOAD = LoadSample(at=1.0, tokens=900)


def _clean(facts: ServerFacts, **more: Any) -> Any:
    return clean_drain((more.pop("seen", SEEN),), more.pop("load", LOAD), more.pop("windows", WINDOWS), facts, **more)


def test_a_measured_window_is_sure_and_a_computed_one_less_so() -> None:
    diagnosis, reached = _clean(ServerFacts(plan=PLAN))
    assert reached
    assert (diagnosis.outcome, diagnosis.verdict.confidence) == ("clean", "high")
    assert diagnosis.window.model_dump() == {
        "live_requests": 3, "rows": 6, "graph_rows": 8, "padded_requests": 1, "reached": True,
    }  # fmt: skip
    diagnosis, _ = _clean(ServerFacts(plan=PLAN), seen=replace(SEEN, how="computed"))
    assert diagnosis.verdict.confidence == "medium"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (ServerFacts(plan=PLAN.replace(mtp=0)), "without MTP no length is expanded, so this is the control"),
        (ServerFacts(plan=PLAN, guard=True), "no agent says whether it is armed"),
        (
            ServerFacts(plan=PLAN, clamped=True, guarded=True),
            "producer clamps and kernel bounds the length, so no hang was expected",
        ),
        (ServerFacts(plan=PLAN, guarded=True), "this release's kernel bounds the length"),
    ],
)
def test_why_it_passed_is_said(facts: ServerFacts, said: str) -> None:
    assert said in _clean(facts)[0].verdict.sentence


def _status(folder: Path, monkeypatch: pytest.MonkeyPatch, *, armed: bool, releases: int = 0) -> None:
    class Rank:
        ring = "ring"
        status = json.loads(json.dumps({"armed": {"guard": armed}}))

    Rank.releases = releases  # type: ignore[attr-defined]

    class Document:
        ranks = (Rank(),)

    monkeypatch.setattr(server_diagnosis, "read_agents", lambda _folder: Document())


def test_the_guard_is_a_control_only_if_a_worker_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert guard_armed(None) is None
    assert guard_armed(tmp_path / "nowhere") is None
    facts = ServerFacts(plan=PLAN, guard=True, agent_folder=tmp_path)
    _status(tmp_path, monkeypatch, armed=True)
    assert "the guard was armed, so this is the control" in _clean(facts)[0].verdict.sentence
    _status(tmp_path, monkeypatch, armed=False)
    assert "the guard was asked for and is not armed" in _clean(facts)[0].verdict.sentence


def test_a_drain_that_the_rescue_carried_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _status(tmp_path, monkeypatch, armed=True, releases=690)
    sentence = _clean(ServerFacts(plan=PLAN, rescue=True, agent_folder=tmp_path))[0].verdict.sentence
    assert "690 waits of the known kind were released from inside: without the rescue this drain would have hung" in sentence


def test_without_the_window_nothing_is_said_and_the_reason_is() -> None:
    diagnosis, reached = _clean(ServerFacts(plan=PLAN), seen=replace(SEEN, how="not reached", text="never 3 at once"))
    assert not reached
    assert (diagnosis.outcome, diagnosis.verdict.class_, diagnosis.window.reached) == ("inconclusive", "unknown", False)
    assert "never 3 at once" in diagnosis.verdict.sentence
    eager = replace(WINDOWS, counts=(), why_not="every step runs eagerly")
    diagnosis, _ = _clean(ServerFacts(plan=PLAN), windows=eager)
    assert "every step runs eagerly" in diagnosis.verdict.sentence
    assert diagnosis.next == ""


def test_requests_that_broke_are_no_clean_end() -> None:
    broken = replace(LOAD, faults={"reset": 2, "unavailable": 1})
    diagnosis, reached = _clean(ServerFacts(plan=PLAN), load=broken)
    assert not reached
    assert diagnosis.outcome == "inconclusive"
    assert "2 requests of the drain ended in errors" in diagnosis.verdict.sentence


def test_the_planned_step_is_computed_and_invents_no_lengths() -> None:
    step = WINDOWS.step_of(3)
    assert step is not None
    facts = computed_step(step, PLAN, WINDOWS.launches)
    assert (facts.origin, facts.rows, facts.graph_rows, facts.width) == ("computed", 6, 8, 16384)
    assert facts.seq_lens == ()
    assert facts.lengths == ()
    assert facts.max_seq_len is None
    unplanned = computed_step(step, None, WINDOWS.launches)
    assert replace(facts, compress=None, max_model_len=None, width=None) == unplanned


def test_a_run_of_our_own_adds_the_lengths_that_it_launched() -> None:
    step = WINDOWS.step_of(3)
    assert step is not None
    launches: Any = {step.graph_rows: SimpleNamespace(max_seq_len=777)}
    prepared: Any = SimpleNamespace(request=SimpleNamespace(launches=launches))
    facts = step_facts(step, PLAN, prepared)
    assert (facts.seq_lens, facts.expanded, facts.lengths) == (step.seq_lens, step.expanded, step.lengths)
    assert min(facts.lengths) < 0
    assert facts.max_seq_len == 777
    assert replace(facts, seq_lens=(), expanded=(), lengths=()) == computed_step(step, PLAN, launches)
