"""What is said of a release: counted by the recorder where the agent could not answer, and never 0 for what is not known."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import DeadlineError, RefusedError
from dsv4_repro.repro.serving import unwedge_act
from dsv4_repro.repro.serving.process_stat import start_ticks
from dsv4_repro.repro.serving.records import Rank, ServerTarget
from dsv4_repro.repro.serving.unwedge_act import locked, release_all
from dsv4_repro.repro.serving.unwedge_plan import RankPlan

from ...forensics.agent_recordings import ring

RELEASES_AT = 256 + 12


def _ring(folder: Path, releases: int) -> None:
    raw = bytearray(ring(pid=os.getpid()))
    raw[RELEASES_AT : RELEASES_AT + 4] = releases.to_bytes(4, "little")
    (folder / f"ring-{os.getpid()}-7283.bin").write_bytes(raw)


def _act(folder: Path, answers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> unwedge_act.RankOutcome:
    monkeypatch.setattr(unwedge_act, "ask_release", answers)
    rank = Rank(os.getpid(), 0, start_ticks(os.getpid()) or 0)
    target = ServerTarget(None, ranks=(rank,), agent_folder=folder)
    plan = RankPlan(rank.pid, 0, "agent", "", "")
    (done,) = release_all(target, [plan], folder=folder, agents={rank.pid: f"{rank.pid}-7283"}, guard=True)
    return done


@pytest.mark.parametrize(("before", "after", "state", "writes"), [(2, 5, "released", 3), (2, 2, "failed", 0)])
def test_an_agent_that_does_not_answer_is_counted_by_its_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int, state: str, writes: int
) -> None:
    """Recorded on an H200: three waits were released, the driver then blocked, and the agent answered that it could not."""
    _ring(tmp_path, before)

    def late(*_: Any, **__: Any) -> None:
        _ring(tmp_path, after)
        raise DeadlineError("no answer")

    done = _act(tmp_path, late, monkeypatch)
    assert (done.state, done.writes) == (state, writes)
    assert f"{writes} released" in done.why


def test_without_a_count_the_number_of_writes_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any, **__: Any) -> None:
        raise DeadlineError("no answer")

    done = _act(tmp_path, late, monkeypatch)
    assert (done.state, done.writes) == ("failed", None)


def test_the_lock_is_the_servers_whatever_is_known_of_its_ranks(tmp_path: Path) -> None:
    known = (Rank(30, 0, 3), Rank(20, 1, 2))
    unknown = tuple(replace(rank, rank=None) for rank in sorted(known, key=lambda rank: rank.pid))
    with (
        locked(ServerTarget(None, ranks=known), tmp_path),
        pytest.raises(RefusedError, match="somebody else"),
        locked(ServerTarget(None, ranks=unknown), tmp_path),
    ):
        pass
