"""The probe's rule: what is a stall, what is a first look, whose state file is believed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import UnavailableError
from dsv4_repro.repro.serving.liveness import Liveness, by_counters, by_recorders, read_state, write_state
from dsv4_repro.repro.serving.recorded_ranks import RecordedRank

BUSY = {"running": 3.0, "waiting": 0.0, "generation_tokens": 60.0, "iterations": 30.0}


def _look(
    values: dict[str, float], previous: dict[str, Any] | None, now: float, stall: float = 30.0
) -> tuple[Liveness, dict[str, Any]]:
    return by_counters(values, previous, server="u", boot="b", now=now, max_stall=stall)


def test_a_first_look_never_says_stalled() -> None:
    found, state = _look(BUSY, None, 1000.0)
    assert found.state == "alive"
    assert state["moved_at"] == 1000.0


def test_counters_that_stand_while_requests_run_are_a_stall_after_the_limit() -> None:
    _, state = _look(BUSY, None, 1000.0)
    found, state = _look(BUSY, state, 1029.0)
    assert found.state == "alive"
    found, state = _look(BUSY, state, 1031.0)
    assert (found.state, found.stalled_s) == ("stalled", 31.0)
    found, _ = _look({**BUSY, "generation_tokens": 61.0}, state, 1032.0)
    assert (found.state, found.stalled_s) == ("alive", 0.0)


def test_idle_time_is_no_stall() -> None:
    _, state = _look({**BUSY, "running": 0.0}, None, 1000.0)
    found, state = _look(BUSY, state, 9000.0)
    assert (found.state, found.stalled_s) == ("alive", 0.0)


@pytest.mark.parametrize(
    "damage",
    [
        {"boot": "another"},
        {"server": "v"},
        {"moved_at": 2000.0},
        {"moved_at": "x"},
        {"moved_at": True},
        {"moved_at": -1},
        {"busy": 1},
    ],
)
def test_a_state_that_is_not_of_this_server_is_a_first_look(damage: dict[str, Any]) -> None:
    _, state = _look(BUSY, None, 1000.0)
    found, _ = _look(BUSY, {**state, **damage}, 1500.0)
    assert found.state == "alive"


def test_without_counters_nothing_is_known() -> None:
    assert _look({"running": 3.0}, None, 1.0)[0].state == "unknown"


@pytest.mark.parametrize("missing", [("running",), ("waiting",), ("running", "waiting")])
def test_a_number_of_requests_that_is_not_exported_is_not_none(missing: tuple[str, ...]) -> None:
    values = {name: value for name, value in {**BUSY, "running": 0.0, "waiting": 0.0}.items() if name not in missing}
    assert _look(values, None, 1.0)[0].state == "unknown"
    # What is exported may say enough.
    assert _look({**values, "running": 3.0}, None, 1.0)[0].state == "alive"


def test_recorders() -> None:
    fine = RecordedRank(1, 100, 0.02, 0.02, 0.01)
    assert by_recorders([fine], 30).state == "alive"
    assert by_recorders([RecordedRank(1, 100, None, 500.0)], 30).state == "alive"
    assert by_recorders([], 30).state == "unknown"
    late = RecordedRank(2, 100, 31.0, 31.1, 0.01)
    found = by_recorders([fine, late], 30)
    assert (found.state, found.stalled_s) == ("stalled", 31.0)
    assert "worker 2" in found.text
    assert by_recorders([RecordedRank(2, 100, 31.0, 31.1, 31.0)], 30).state == "unknown"
    assert by_recorders([RecordedRank(2, 100, 31.0, 31.1, None)], 30).state == "stalled"


def test_the_state_file_is_private_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "own" / "probe.json"
    write_state(path, {"moved_at": 1.5})
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert oct(path.parent.stat().st_mode & 0o777) == "0o700"
    assert read_state(path) == {"moved_at": 1.5}


def test_a_link_a_pipe_a_long_or_a_damaged_state_is_none(tmp_path: Path) -> None:
    (tmp_path / "real").write_text(json.dumps({"moved_at": 1}))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_text(json.dumps({"x": "y" * 5000}))
    (tmp_path / "bad").write_text("{")
    (tmp_path / "list").write_text("[1]")
    (tmp_path / "deep").write_text("[" * 4000)
    for name in ("link", "pipe", "long", "bad", "list", "none", "deep"):
        assert read_state(tmp_path / name) is None
    os.chmod(tmp_path / "real", 0o666)
    assert read_state(tmp_path / "real") is None


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    os.chmod(open_to_all, 0o777)
    with pytest.raises(UnavailableError, match="written by others"):
        write_state(open_to_all / "probe.json", {})
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UnavailableError):
        write_state(tmp_path / "link" / "probe.json", {})
