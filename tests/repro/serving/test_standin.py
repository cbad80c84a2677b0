"""The stand-in server behaves as it says: what the tests of the server ground, ``why``, ``watch`` and ``unwedge`` stand on."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsv4_repro.forensics.evidence.engine_log import EVENTS
from dsv4_repro.repro.agent_ask import ask_row_states, the_one_alive
from dsv4_repro.repro.agent_show import read_agents

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.run import StandIn

Start = Callable[..., AbstractContextManager["StandIn"]]


@pytest.fixture
def drained(standin: ModuleType) -> Callable[..., AbstractContextManager[None]]:
    """``with drained(server): …``: four streams of which one is short; their children end with the block."""
    run = importlib.import_module("standin.run")

    @contextlib.contextmanager
    def begin(server: StandIn, **more: Any) -> Iterator[None]:
        clients = server.drain(**more)
        try:
            yield
        finally:
            run.stop_clients(clients)

    return begin


Drained = Callable[..., AbstractContextManager[None]]


def _metrics(server: StandIn) -> dict[str, float]:
    """Sample name (labels left out, values added) -> value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").decode()):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def _complete(server: StandIn, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = server.post("/v1/completions", {"model": server.model, "prompt": [1, 2, 3], **body})
    return found


def test_its_processes_are_laid_out_as_those_of_vllm(stand_in: Start) -> None:
    with stand_in(tp=2) as server:
        engine, workers = psutil.Process(server.engine()), server.workers()
        assert engine.ppid() == server.pid
        assert engine.cmdline()[0] == "VLLM::EngineCore"
        assert [psutil.Process(workers[rank]).cmdline()[0] for rank in (0, 1)] == ["VLLM::Worker_TP0", "VLLM::Worker_TP1"]
        assert {psutil.Process(pid).ppid() for pid in workers.values()} == {engine.pid}
        assert sorted([server.pid, engine.pid, *workers.values()]) == server.pids()
    assert server.pids() == []


def test_one_worker_alone_has_no_rank_in_its_title(stand_in: Start) -> None:
    with stand_in() as server:
        assert psutil.Process(server.workers()[0]).cmdline()[0] == "VLLM::Worker"


def test_a_completion_is_counted_as_vllm_counts(stand_in: Start) -> None:
    with stand_in(step_ms=1) as server:
        answer = _complete(server, max_tokens=40, ignore_eos=True)
        assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 43, "completion_tokens": 40}
        found = _metrics(server)
        assert found["vllm:generation_tokens_total"] == 40
        assert found["vllm:prompt_tokens_total"] == 3
        assert found["vllm:request_success_total"] == 1
        assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
        # The prefill gives one token, each later step one and what was accepted of the draft.
        steps = found["vllm:iteration_tokens_total_count"] - 1
        assert found["vllm:spec_decode_num_draft_tokens_total"] == steps
        assert 0 < found["vllm:spec_decode_num_accepted_tokens_total"] <= steps
        assert _complete(server, max_tokens=40, ignore_eos=True)["choices"][0]["text"] == answer["choices"][0]["text"]
        assert _complete(server, prompt="text too", max_tokens=5)["usage"]["completion_tokens"] <= 5


def test_what_is_no_request_is_refused(stand_in: Start) -> None:
    with stand_in() as server:
        for body, status in (({"max_tokens": 99999}, 400), ({"model": "other"}, 404), ({"prompt": None, "max_tokens": "x"}, 400)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                _complete(server, **body)
            refused.value.close()
            assert refused.value.code == status


def test_a_drain_to_three_wedges_and_everything_else_says_well(stand_in: Start, drained: Drained) -> None:
    with stand_in(wedge=3, agent=True) as server, drained(server):
        server.wait_state(wedged=True, live=3)
        before = _metrics(server)
        time.sleep(0.3)
        assert _metrics(server) == before
        assert before["vllm:num_requests_running"] == 3
        assert server.get("/health") == b""
        assert json.loads(server.get("/v1/models"))["data"][0]["id"] == server.model
        assert server.agent_folder is not None
        (rank,) = read_agents(server.agent_folder).ranks
        assert len(rank.unfinished) == 2, "two steps in flight"
        assert rank.last is not None
        assert (rank.last["requests"], rank.last["padded_requests"], rank.last["decode_zero"]) == (3, 4, 1)
        states = ask_row_states(server.agent_folder, the_one_alive(server.agent_folder, None))
        (launch,) = states.launches
        assert launch.lengths[6:] == [-1, 0]
        assert launch.arrival_counters == [0, 0, 0, 0, 0, 0, 1, 0]
        assert states.stalled_s > 0.3


@pytest.mark.parametrize("control", [{"mtp": 0}, {"guard": True}, {"capture": "2,4,6,8"}, {"eager": True}])
def test_the_controls_drain_clean(stand_in: Start, standin: ModuleType, control: dict[str, Any]) -> None:
    with stand_in(wedge=3, step_ms=1, **control) as server:
        clients = server.drain(lengths=(20, 60, 60, 60))
        assert clients[0].wait(20) == 0
        assert _metrics(server)["vllm:generation_tokens_total"] == 200


def test_a_released_wedge_goes_on_and_a_rescue_releases_by_itself(stand_in: Start, drained: Drained) -> None:
    with stand_in(wedge=3, agent=True, step_ms=2) as server:
        with drained(server, lengths=(20, 60, 60, 60)):
            server.wait_state(wedged=True)
            server.release()
            # The shape is the same, so the next step wedges again.
            server.wait_state(wedged=True, live=3)
            server.set(guard=True)
            server.release()
            server.wait_state(wedged=False, live=0)
        server.set(guard=False, rescue=True, after=20)
        with drained(server, lengths=(20, 60, 60, 60)):
            end = time.monotonic() + 10
            while _metrics(server)["vllm:generation_tokens_total"] < 400:
                assert time.monotonic() < end
                time.sleep(0.05)


def test_a_wedge_ends_as_vllm_ends_it(stand_in: Start) -> None:
    with stand_in(wedge=3, speed=60, step_ms=300, stats_s=10) as server:
        clients = server.drain()
        assert server.process is not None
        assert server.process.wait(30) == 0, "uvicorn is asked to end; that is no failure to it"
        assert clients[0].wait(5) == 3
        text = server.text()
    counts = {kind: len(EVENTS[kind].findall(text)) for kind in ("shm-wait", "rpc-timeout", "fatal", "engine-dead", "serving")}
    assert counts["serving"] == counts["rpc-timeout"] == counts["fatal"] == 1
    assert counts["shm-wait"] in (4, 5), "one each 60 s of 300"
    assert counts["engine-dead"] >= 1
    assert "Dumping scheduler stats: SchedulerStats(num_running_reqs=3" in text
    # One line of zeros, then silence: nothing moved for two intervals.
    zeros = re.findall(r"prompt throughput: 0\.0 tokens/s, Avg generation throughput: 0\.0 tokens/s, Running: 3", text)
    assert len(zeros) == 1


def test_a_dead_engine_shows_in_health_before_the_server_ends(stand_in: Start) -> None:
    with stand_in(linger_s=30) as server:
        os.kill(server.engine(), signal.SIGKILL)
        server.wait_for("died unexpectedly")
        for path in ("/health",):
            with pytest.raises(urllib.error.HTTPError) as dead:
                server.get(path)
            dead.value.close()
            assert dead.value.code == 503
        assert b"vllm:num_requests_running" in server.get("/metrics")


def test_a_killed_worker_ends_the_engine_with_its_name(stand_in: Start, tmp_path: Path) -> None:
    kernel = tmp_path / "kern.log"
    with stand_in(linger_s=0.5, kernel_log=kernel, kill_worker=True, after=5) as server:
        with pytest.raises(urllib.error.HTTPError) as failed:
            _complete(server, max_tokens=400, ignore_eos=True)
        failed.value.close()
        assert server.process is not None
        server.process.wait(10)
        assert EVENTS["worker-died"].search(server.text())
    assert "Memory cgroup out of memory: Killed process" in kernel.read_text(encoding="utf-8")


@pytest.mark.parametrize("phase", ["config", "download", "load", "compile", "profile", "capture", "api"])
def test_it_dies_in_each_phase_of_its_start(stand_in: Start, phase: str) -> None:
    with stand_in(wait=False, die_in=phase, load_s=0.02) as server:
        assert server.process is not None
        assert server.process.wait(15) == 1
        assert EVENTS["engine-failed-start"].search(server.text())
        assert not EVENTS["serving"].search(server.text())


def test_a_taken_port_is_said_and_ends_it(stand_in: Start) -> None:
    with stand_in() as first, stand_in(port=first.port, wait=False) as second:
        assert second.process is not None
        assert second.process.wait(15) == 1
        assert "Address already in use" in second.text()


def test_a_client_that_leaves_is_an_abort(stand_in: Start, drained: Drained) -> None:
    with stand_in() as server:
        with drained(server, lengths=(2000,)):
            server.wait_state(live=1)
        server.wait_state(live=0)
        assert _metrics(server)["vllm:request_success_total"] == 1
        assert 'finished_reason="abort"} 1' in server.get("/metrics").decode()


STALLS: dict[str, tuple[dict[str, Any], str, float]] = {
    "wedge": ({"wedge_step": 25}, "wedged", 0),
    "jit": ({"jit_s": 60}, "idle", 1),
    "pause": ({"pause_s": 60}, "idle", 0),
    "prefill": ({"long_prefill_s": 60, "after": 0}, "busy", 0),
    "ipc": ({"ipc": True}, "idle", 0),
    "livelock": ({"livelock": True}, "idle", 0),
    "admission": ({"admission": True}, "idle", 0),
    "desync": ({"desync": True, "tp": 2}, "wedged", 0),
}


@pytest.mark.parametrize("name", list(STALLS))
def test_each_stall_stops_tokens_and_shows_what_it_should(stand_in: Start, drained: Drained, name: str) -> None:
    switches, device, children = STALLS[name]
    with stand_in(step_ms=5, agent=True, **switches) as server:
        prompt = 1500 if name == "prefill" else 64
        with drained(server, lengths=(400, 400), prompt=prompt), drained(server, lengths=(30,) if name == "admission" else ()):
            end = time.monotonic() + 10
            before, same = -1.0, 0
            while same < 5:
                assert time.monotonic() < end, server.state()
                time.sleep(0.1)
                now = _metrics(server)["vllm:generation_tokens_total"] + 1 if server.state()["step"] else -1.0
                same = same + 1 if now == before and now >= 0 else 0
                before = now
            state = server.state()
            if name not in ("admission", "livelock"):
                assert state["device"] == device
            if name == "ipc":
                # The step's result is there and its answer is lost: nothing unfinished on the device.
                assert server.agent_folder is not None
                assert read_agents(server.agent_folder).ranks[0].unfinished == ()
            if children:
                names = [child.cmdline()[0] for child in psutil.Process(server.workers()[0]).children()]
                assert names == ["cicc"]


def test_slow_steps_come_slowly_and_thrash_gives_preemptions(stand_in: Start, drained: Drained) -> None:
    with stand_in(slow_ms=300, after=5, step_ms=2) as server, drained(server, lengths=(50,)):
        server.wait_state(step=8)
        assert 0 < _metrics(server)["vllm:generation_tokens_total"] < 30
    with stand_in(thrash=True, after=5, step_ms=2) as server, drained(server, lengths=(50, 50)):
        server.wait_state(live=2)
        time.sleep(0.5)
        first = _metrics(server)
        time.sleep(0.3)
        second = _metrics(server)
        assert second["vllm:num_preemptions_total"] > first["vllm:num_preemptions_total"]
        assert second["vllm:generation_tokens_total"] == first["vllm:generation_tokens_total"]


def test_its_windows_can_be_spoilt(stand_in: Start) -> None:
    with stand_in() as server:
        server.set(running_zero=True)
        assert _metrics(server)["vllm:num_requests_running"] == 0
        server.set(metrics="malformed")
        with pytest.raises(ValueError):
            _metrics(server)
        server.set(metrics="partial")
        assert not server.get("/metrics").endswith(b"\n")
        server.set(metrics="gone")
        with pytest.raises((OSError, ValueError)):
            server.get("/metrics")
        server.set(metrics="slow:0.3")
        began = time.monotonic()
        server.get("/metrics")
        assert time.monotonic() - began > 0.25
        server.set(metrics="", refuse=503)
        with pytest.raises(urllib.error.HTTPError) as refused:
            _complete(server)
        refused.value.close()
        assert refused.value.code == 503


def test_its_log_survives_rotation_and_truncation(stand_in: Start) -> None:
    with stand_in() as server:
        old = server.rotate()
        server.get("/health")
        assert '"GET /health' in server.text()
        assert "Application startup complete" in old.read_text(encoding="utf-8")
        server.truncate()
        server.get("/ping")
        assert "/ping" in server.text()
        assert "/health" not in server.text()
        server.set(log_silent=True)
        size = len(server.text())
        server.get("/health")
        assert len(server.text()) == size


def test_a_restart_begins_its_counters_anew(stand_in: Start) -> None:
    with stand_in(step_ms=1) as server:
        _complete(server, max_tokens=30, ignore_eos=True)
        assert _metrics(server)["vllm:generation_tokens_total"] == 30
        server.restart()
        assert _metrics(server)["vllm:generation_tokens_total"] == 0


def test_it_ends_by_itself_on_sigterm_and_leaves_nothing(stand_in: Start) -> None:
    with stand_in(tp=2) as server:
        assert len(server.pids()) == 4
        os.kill(server.pid, signal.SIGTERM)
        assert server.process is not None
        assert server.process.wait(10) == 0
        assert server.pids() == []
