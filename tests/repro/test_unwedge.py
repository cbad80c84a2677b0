"""``unwedge`` from the command line, against the stand-in server and, for cuda-gdb, a program in its place."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dsv4_repro.clock import SYSTEM
from dsv4_repro.errors import UnavailableError, UsageError
from dsv4_repro.forensics.collect.process_table import boot_id, start_ticks
from dsv4_repro.repro.options import Common
from dsv4_repro.repro.serving.drain_load import DrainLoad
from dsv4_repro.repro.serving.load_plan import LoadPlan
from dsv4_repro.repro.serving.load_sources import engine_counters
from dsv4_repro.repro.serving.ranks import find_server
from dsv4_repro.repro.serving.unwedge_act import locked, still_moving, wait_for_recovery
from dsv4_repro.repro.serving.unwedge_look import api_pid_of_run
from dsv4_repro.repro.unwedge_verb import run_unwedge

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.run import StandIn

    Start = Callable[..., AbstractContextManager[StandIn]]

PATIENT = Path(__file__).resolve().parents[1] / "forensics" / "collect" / "gdb_patient.py"
PLAN = LoadPlan.from_lengths([(3000, 30), (3001, 120), (3002, 120), (3003, 120)], live=3, max_model_len=16384)


@contextmanager
def wedged(stand_in: Start, folder: Path, **switches: Any) -> Iterator[tuple[StandIn, DrainLoad]]:
    with stand_in(wedge=3, agent=True, **switches) as server:
        load = DrainLoad(
            server.base_url, server.model, PLAN, folder=folder, counters=engine_counters(server.base_url), ring_steps=None
        )
        load.start()
        end = SYSTEM.monotonic() + 30
        while not server.state()["wedged"]:
            assert SYSTEM.monotonic() < end
            SYSTEM.sleep(0.05)
        SYSTEM.sleep(1.0)
        try:
            yield server, load
        finally:
            load.stop()


@pytest.fixture
def unwedge(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run(server: StandIn, *, yes: bool = False, **options: Any) -> tuple[int, dict[str, Any]]:
        common = Common(as_json=True, yes=yes, out=tmp_path / "unwedge")
        capsys.readouterr()
        status = run_unwedge(str(server.pid), common, url=server.base_url, agent_folder=server.agent_folder, **options)
        captured = capsys.readouterr()
        document: dict[str, Any] = json.loads(captured.out)
        assert document["exit_status"] == status
        return status, {**document, "said": captured.err}

    return run


@pytest.fixture
def debugger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(**settings: Any) -> None:
        script = tmp_path / "cuda-gdb"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {PATIENT} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setenv("DSV4_REPRO_CUDA_GDB", str(script))
        monkeypatch.setenv("FAKE_GDB", json.dumps(settings))

    return use


def test_a_dry_run_touches_nothing_and_the_agent_gets_it_going(stand_in: Start, tmp_path: Path, unwedge: Any) -> None:
    with wedged(stand_in, tmp_path) as (server, load):
        status, document = unwedge(server)
        assert (status, document["outcome"], document["dry_run"]) == (3, "hang", True)
        assert document["plan"]["ranks"][0]["way"] == "agent"
        assert server.state()["wedged"]
        assert f"{server.base_url}: WEDGED in the known wait" in document["said"]
        asked = f"--url {server.base_url} --agent-folder {server.agent_folder} --yes"
        assert document["said"].splitlines()[-1] == f"next: dsv4-repro unwedge {server.pid} {asked}"
        before = load.sample().tokens
        status, document = unwedge(server, yes=True)
        assert (status, document["outcome"]) == (0, "clean")
        assert document["ranks"][0]["state"] == "released"
        assert document["recovery"]["recovered"] is True
        assert "take it out of the load balancer" in document["cordon"][0]
        end = SYSTEM.monotonic() + 20
        while not load.done():
            assert SYSTEM.monotonic() < end
            SYSTEM.sleep(0.05)
        assert load.sample().tokens >= 30 + 3 * 120 > before
        status, document = unwedge(server, yes=True)
        assert status == 5
        assert "not wedged" in document["refused"]


def test_through_a_debugger_with_fillers_first(stand_in: Start, tmp_path: Path, unwedge: Any, debugger: Any) -> None:
    debugger(launches=6, ask=True)
    with wedged(stand_in, tmp_path) as (server, load):
        status, document = unwedge(server, yes=True, via="debugger", fillers=4, hold=30.0)
        assert (status, document["outcome"]) == (0, "clean"), document
        assert document["ranks"][0]["writes"] == 6
        assert document["fillers"]["accepted"] == 4
        assert load.sample().faults == {}
        assert (
            "stage done"
            in (tmp_path / "unwedge" / "round-1" / f"rank-{document['ranks'][0]['pid']}")
            .joinpath("cuda_gdb_release.txt")
            .read_text()
        )


def test_a_rank_that_dies_under_the_attach_is_told(stand_in: Start, tmp_path: Path, unwedge: Any, debugger: Any) -> None:
    debugger(launches=6, kill=True)
    with wedged(stand_in, tmp_path) as (server, _):
        status, document = unwedge(server, yes=True, via="debugger", fillers=0)
        assert (status, document["outcome"]) == (4, "other")
        assert document["ranks"][0]["state"] == "died"


def test_a_refused_attach_leaves_it_as_it_was(stand_in: Start, tmp_path: Path, unwedge: Any, debugger: Any) -> None:
    debugger(refuse=True)
    with wedged(stand_in, tmp_path) as (server, _):
        status, document = unwedge(server, yes=True, via="debugger", fillers=0)
        assert status == 5
        assert "ptrace is refused" in document["why"]
        assert document["ranks"][0]["state"] == "failed"
        assert document["cordon"] == []
        assert server.state()["wedged"]


def test_two_at_once_the_second_is_refused(stand_in: Start, tmp_path: Path, unwedge: Any) -> None:
    with wedged(stand_in, tmp_path) as (server, _), locked(find_server(server.pid)):
        status, document = unwedge(server, yes=True)
        assert status == 5
        assert "somebody else is releasing" in document["refused"]
        assert "Refused: somebody else" in document["said"]
        assert server.state()["wedged"]


def test_a_healthy_server_is_refused(stand_in: Start, unwedge: Any) -> None:
    with stand_in(agent=True) as server:
        status, document = unwedge(server, yes=True)
        assert status == 5
        assert document["ranks"] == []
        assert f"next: dsv4-repro why {server.pid}" in document["said"]


def test_without_an_answer_of_the_agent_a_fresh_stall_is_not_proof(
    stand_in: Start, tmp_path: Path, unwedge: Any, debugger: Callable[..., None]
) -> None:
    debugger()  # on PATH, and not started
    with wedged(stand_in, tmp_path, agent_mute=True) as (server, _):
        status, document = unwedge(server, yes=True, via="agent")
        assert status == 5
        assert document["plan"]["ranks"][0]["way"] == "none"
        assert f"next: dsv4-repro autopsy {document['plan']['ranks'][0]['pid']} --attach" in document["said"]
        assert server.state()["wedged"]


def test_a_run_names_its_server(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run directory"):
        api_pid_of_run(tmp_path)
    timeline = tmp_path / "timeline.jsonl"
    timeline.write_text('{"kind": "server", "state": "ready", "pid": "x"}\n{"kind": "step", "pid": 9}\nnot json\n')
    with pytest.raises(UsageError, match="names no server process"):
        api_pid_of_run(tmp_path)
    own = {"kind": "server", "state": "ready", "pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "boot": boot_id()}
    timeline.write_text(json.dumps(own) + "\n")
    assert api_pid_of_run(tmp_path) == os.getpid()
    for change, why in (
        ({"start_ticks": 1}, "another one"), ({"boot": "x"}, "another one"), ({"boot": None}, "does not say"),
        ({"start_ticks": None}, "does not say"), ({"pid": 2**31 - 2}, "no such process"),
    ):  # fmt: skip
        timeline.write_text(json.dumps({**own, **change}) + "\n")
        with pytest.raises(UsageError, match=why):
            api_pid_of_run(tmp_path)
    with pytest.raises(UsageError, match="--via"):
        run_unwedge(None, Common(), via="luck")
    with pytest.raises(UsageError, match="not an HTTP address") as caught:
        run_unwedge(None, Common(), url="ftp://user:hunter2@host")
    assert "hunter2" not in str(caught.value)


def test_a_number_is_a_pid_whatever_folder_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / str(2**31 - 2)).mkdir()
    with pytest.raises(UnavailableError, match="no process"):
        run_unwedge(str(2**31 - 2), Common())


def test_progress_is_read_again_and_what_cannot_be_read_is_not_still() -> None:
    from dsv4_repro.clock import FakeClock
    from dsv4_repro.repro.serving.records import EngineSample

    clock = FakeClock()
    samples = iter([EngineSample(0, generation_tokens=5.0), EngineSample(1, generation_tokens=5.0)] * 2)
    assert still_moving(5.0, lambda: next(samples), clock) == ("", True)
    assert still_moving(4.0, lambda: next(samples), clock) == ("generated tokens 4 -> 5", True)
    assert still_moving(5.0, lambda: None, clock) == ("", False)
    assert wait_for_recovery(5.0, lambda: None, seconds=2, clock=clock).recovered is None
    assert wait_for_recovery(5.0, lambda: EngineSample(0, generation_tokens=5.0), seconds=2, clock=clock).recovered is False
    one = wait_for_recovery(5.0, lambda: EngineSample(0, generation_tokens=9.0, running=3), seconds=2, clock=clock)
    assert one.recovered is False, "one step more is not a flow"


def test_every_rank_is_released(stand_in: Start, tmp_path: Path, unwedge: Any) -> None:
    with wedged(stand_in, tmp_path, tp=2) as (server, load):
        status, document = unwedge(server, yes=True)
        assert status == 0, document
        assert len(document["ranks"]) == 2
        assert "released" in {row["state"] for row in document["ranks"]}
        assert load.sample().faults == {}
