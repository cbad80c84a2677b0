"""Is the agent armed in a worker, and if not, why: every reason, and each with its remedy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.repro.agent_show import AgentRank
from dsv4_repro.repro.armed import WorkerSettings, armed_checks, judge_worker
from dsv4_repro.repro.serving.records import Rank, ServerTarget

FOUND = {"found": True, "why": "fine"}


def worker(environment: dict[str, str] | None, why: str = "") -> WorkerSettings:
    return WorkerSettings(7, "worker", 3, environment, why)


def agent(**status: Any) -> AgentRank:
    return AgentRank(name="7-1", pid=7, alive=True, releases=status.pop("releases", 0), status=status)


@pytest.mark.parametrize(
    ("status", "state", "says"),
    [
        ({"armed": {"recorder": True, "guard": False}, "features": {"events": FOUND}}, "yes", "armed: recorder"),
        (
            {"armed": {"recorder": True, "rescue": True}, "features": {"side stream": {"found": False, "why": "no driver"}}},
            "limited",
            "side stream: no driver",
        ),
        ({"armed": {"recorder": False}, "features": {}}, "no", "armed: nothing"),
        ({"armed": 5, "features": [1]}, "no", "armed: nothing"),
        (
            {"armed": {"guard": True}, "features": {}, "releases": 4, "counters": {"averted_lengths": 9}},
            "yes",
            "released: 4; steps with a length of -1 that the guard made 0: 9",
        ),
    ],
)
def test_what_its_own_status_says(status: dict[str, Any], state: str, says: str) -> None:
    found = judge_worker(worker({}), agent(**status), None)
    assert found.state == state
    assert says in found.found
    assert "rank 3" in found.what


@pytest.mark.parametrize(
    ("environment", "server", "state", "says", "remedy"),
    [
        ({}, {}, "no", "not asked for", "DSV4_REPRO_AGENT=1"),
        ({}, {"DSV4_REPRO_RESCUE": "1"}, "no", "Ray copies only some prefixes", "VLLM_DSV4_REPRO_RESCUE=1"),
        ({"VLLM_DSV4_REPRO_AGENT": "1"}, {"DSV4_REPRO_AGENT": "1"}, "no", "no status was written", "agent install"),
        ({"DSV4_REPRO_AGENT": "1", "VLLM_PLUGINS": "other"}, None, "no", "leaves it out", "Add dsv4_repro_agent"),
        ({"DSV4_REPRO_AGENT": "1", "VLLM_PLUGINS": "other, dsv4_repro_agent"}, None, "no", "not installed", "agent install"),
        ({"DSV4_REPRO_AGENT": "0"}, None, "no", "not asked for", "DSV4_REPRO_AGENT=1"),
    ],
)
def test_why_there_is_none(environment: dict[str, str], server: dict[str, str] | None, state: str, says: str, remedy: str) -> None:
    found = judge_worker(worker(environment), None, server)
    assert found.state == state
    assert says in found.found
    assert remedy in found.remedy


def test_an_environment_that_cannot_be_read_is_not_an_absent_agent() -> None:
    found = judge_worker(worker(None, "Permission denied"), None, None)
    assert found.state == "unknown"
    assert "Permission denied" in found.found


def test_each_worker_of_a_server_is_asked(tmp_path: Path) -> None:
    proc, own = tmp_path / "proc", os.getpid()  # a status counts while its process is there
    for pid, environment in ((1, "DSV4_REPRO_AGENT=1"), (own, "DSV4_REPRO_AGENT=1"), (own + 1, "A=1")):
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "environ").write_bytes(environment.encode() + b"\0")
    folder = tmp_path / "agents"
    folder.mkdir()
    target = ServerTarget(None, api_pid=1, ranks=(Rank(own, 0, 1), Rank(own + 1, 1, 1)), agent_folder=folder)
    first, second = armed_checks(target, proc=proc)
    assert (first.id, first.state) == (f"agent-{own}", "no")
    assert "no status was written" in first.found
    assert "Ray" in second.found
    (folder / f"status-{own}-0.json").write_text(json.dumps({"armed": {"recorder": True}, "features": {}}))
    assert armed_checks(target, proc=proc)[0].state == "yes"
    assert armed_checks(ServerTarget(None), proc=proc)[0].state == "unknown"
