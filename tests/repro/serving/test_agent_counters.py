"""Counters of the agents, from files that may hold anything."""

from __future__ import annotations

import json
from pathlib import Path

from dsv4_repro.repro.serving.agent_counters import AgentCounters, agent_counters


def test_sums_over_the_running_workers(tmp_path: Path) -> None:
    good = {"releases": 4, "rescues": 1, "guarded_builds": 90, "averted_lengths": 7}
    (tmp_path / "status-10-1.json").write_text(json.dumps({"counters": good}))
    (tmp_path / "status-11-1.json").write_text(json.dumps({"counters": {**good, "rescues": "x", "averted_lengths": -3}}))
    (tmp_path / "status-12-1.json").write_text(json.dumps({"counters": good}))
    assert agent_counters(tmp_path, {10, 11}) == AgentCounters(8, 1, 180, 7)


def test_nothing_said_is_not_0(tmp_path: Path) -> None:
    assert agent_counters(None, {1}) is None
    assert agent_counters(tmp_path / "none", {1}) is None
    (tmp_path / "status-1-1.json").write_text("{")
    (tmp_path / "status-2-1.json").write_text(json.dumps({"counters": [1]}))
    (tmp_path / "status-x-1.json").write_text("{}")
    assert agent_counters(tmp_path, {1, 2}) is None


def test_what_an_earlier_process_of_the_same_pid_left_is_not_counted(tmp_path: Path) -> None:
    counters = {"releases": 4, "rescues": 1, "guarded_builds": 90, "averted_lengths": 7}
    (tmp_path / "status-10-100.json").write_text(json.dumps({"counters": counters}))
    (tmp_path / "status-10-900.json").write_text(json.dumps({"counters": {**counters, "rescues": 0}}))
    assert agent_counters(tmp_path, {10}, {10: 900}) == AgentCounters(4, 0, 90, 7)
    assert agent_counters(tmp_path, {10}, {10: 500}) is None
    both = agent_counters(tmp_path, {10}, {10: 0})
    assert both is not None, "when it began is not known"
    assert both.releases == 8
