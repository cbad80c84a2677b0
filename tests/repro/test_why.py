"""why, against a stand-in server (a test double: nothing here is a result of vLLM or of a GPU)."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.forensics.collect.proc import process_state
from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.schemas import schema_of
from dsv4_repro.repro.serving.live_build import LiveBuild, live_build
from dsv4_repro.repro.serving.ranks import find_server
from dsv4_repro.repro.serving.records import (
    Assessment,
    DeviceSample,
    EngineSample,
    LogSample,
    ProcessSample,
    Rank,
    RankProgress,
    ServerTarget,
    Snapshot,
)
from dsv4_repro.repro.serving.standing import standing
from dsv4_repro.repro.serving.why_look import Look, deadline_of, look, observe
from dsv4_repro.repro.why_document import WhyDocument, why_lines
from dsv4_repro.repro.why_verb import document_of, find_one

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.run import StandIn

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TOUCHING = ("os.kill", "os.killpg", "signal.pthread_kill", "os.rename", "os.remove", "os.mkdir", "os.truncate", "os.setxattr")


class _Audit:
    """Every signal, every file opened to be written and every process started by this interpreter while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in _TOUCHING or event == "subprocess.Popen" or (event == "ctypes.dlsym" and "ptrace" in str(arguments)):
            self.seen.append(f"{event} {arguments}"[:300])
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            self.seen.append(f"open {arguments}"[:300])

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.seen.clear()
        self.on = True
        try:
            yield
        finally:
            self.on = False


@pytest.fixture(autouse=True)
def _debugger(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with cuda-gdb: the next command depends on it. None of these tests starts one."""
    place = tmp_path_factory.mktemp("cuda") / "cuda-gdb"
    place.write_text("#!/bin/sh\nexit 1\n")
    place.chmod(0o755)
    monkeypatch.setenv("DSV4_REPRO_CUDA_GDB", str(place))


@pytest.fixture(scope="module")
def audit() -> _Audit:
    return _Audit()


def _why(capsys: pytest.CaptureFixture[str], named: str) -> tuple[int, dict[str, Any], float]:
    capsys.readouterr()
    began = time.monotonic()
    status = main(["why", named, "--json"])
    seconds = time.monotonic() - began
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schema_of("why"))
    return status, document, seconds


def _wedged(server: StandIn) -> list[Any]:
    clients: list[Any] = list(server.drain())
    server.wait_state(device="wedged")
    return clients


def _end(clients: list[Any]) -> None:
    for client in clients:
        client.kill()
        client.wait()


def _deadline(seconds: int) -> dict[str, str]:
    return {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(seconds), "VLLM_RINGBUFFER_WARNING_INTERVAL": "5"}


def _files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def test_a_wedged_server_is_told_and_not_touched(
    stand_in: Callable[..., AbstractContextManager[StandIn]], capsys: pytest.CaptureFixture[str], audit: _Audit
) -> None:
    with stand_in(wedge=3, agent=True, environment=_deadline(120)) as server:
        clients = _wedged(server)
        try:
            time.sleep(2.0)
            before, files = server.state(), _files(server.agent_folder or Path("/nonexistent"))
            states = {pid: process_state(pid) for pid in server.pids()}
            with audit.watching():
                status, document, seconds = _why(capsys, server.base_url)
            after = server.state()
        finally:
            _end(clients)
        assert audit.seen == []
        assert {pid: process_state(pid) is not None for pid in states} == dict.fromkeys(states, True)
        assert {key: before[key] for key in ("phase", "live", "device", "workers")} == {
            key: after[key] for key in ("phase", "live", "device", "workers")
        }
        assert _files(server.agent_folder or Path("/nonexistent")) == files
    assert (status, document["outcome"], document["state"]) == (3, "hang", "hung")
    assert seconds < 10
    assert document["live_requests"] == 3
    assert document["still_known"] == "measured"
    assert 1.5 < document["still_s"] < 60
    assert any("has not" in text for text in document["device_signals"])
    assert document["ranks"][0]["window"].startswith("step ")
    assert "3 requests padded to 4" in document["ranks"][0]["window"]
    deadline = document["deadline"]
    assert (deadline["state"], deadline["limit_s"], deadline["known"]) == ("counting", 120.0, "measured")
    assert 60 < deadline["remaining_s"] < 119
    assert document["next"][0] == f"dsv4-repro autopsy {document['ranks'][0]['pid']} --attach"
    assert document["next"][1] == f"dsv4-repro unwedge {document['ranks'][0]['pid']}"
    # Nothing but a kernel that does not end was seen: no cause is named.
    assert (document["cause"]["class"], document["cause"]["cause"]) == ("gpu-kernel-stuck", None)


def test_close_to_the_deadline_the_engine_is_frozen_first(
    stand_in: Callable[..., AbstractContextManager[StandIn]], capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in(wedge=3, agent=True, environment=_deadline(40)) as server:
        clients = _wedged(server)
        try:
            time.sleep(4.0)
            _, document, _ = _why(capsys, server.base_url)
        finally:
            _end(clients)
    assert document["state"] == "hung"
    assert document["next"][0].endswith("--attach --freeze")


def test_a_healthy_and_an_idle_server_are_fine(
    stand_in: Callable[..., AbstractContextManager[StandIn]], capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in(agent=True) as server:
        status, document, seconds = _why(capsys, str(server.pid))
        assert (status, document["state"], document["live_requests"]) == (0, "idle", 0)
        assert seconds < 10
        clients = list(server.drain(lengths=(8000, 8000)))
        try:
            time.sleep(1.0)
            status, document, _ = _why(capsys, str(server.pid))
        finally:
            _end(clients)
    assert (status, document["state"]) == (0, "healthy")
    assert document["deadline"]["state"] == "not counting"
    assert document["cause"] is None
    assert document["next"] == []


def test_without_a_device_signal_it_is_suspect_and_not_hung(
    stand_in: Callable[..., AbstractContextManager[StandIn]], capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in(wedge=3) as server:
        clients = _wedged(server)
        try:
            time.sleep(2.0)
            status, document, _ = _why(capsys, server.base_url)
        finally:
            _end(clients)
    assert (status, document["outcome"], document["state"]) == (5, "inconclusive", "suspect")
    assert any("NVML" in item["what"] for item in document["unread"])
    assert document["next"][0].startswith("dsv4-repro watch --pid ")


def _looked(server: StandIn, played: ModuleType, **changes: Any) -> tuple[Look, float]:
    """A look with cards that are played; ``changes``: fields of each sample."""

    class Cards(played.PlayedCards):  # type: ignore[name-defined,misc]
        def _make_cards(self, target: ServerTarget, processes: Any) -> Callable[[], Any]:
            take = super()._make_cards(target, processes)
            return lambda: tuple(replace(sample, **changes) for sample in take())

    began = time.monotonic()
    target = find_server(server.pid)
    seen = look(target, watch=lambda target, clock, longer: observe(target, clock, longer, Cards))
    return seen, time.monotonic() - began


@pytest.fixture
def played() -> ModuleType:
    return importlib.import_module("standin.watched")


@pytest.mark.parametrize(("sm_util", "least", "most"), [(0.7, 2.4, 7.0), (None, 7.9, 10.0)])
def test_without_a_recorder_it_is_looked_at_until_the_watchdogs_rule_is_met(
    stand_in: Callable[..., AbstractContextManager[StandIn]], played: ModuleType, sm_util: float | None, least: float, most: float
) -> None:
    """With GPM's word a spin of 2.5 s is enough, with flat power and no busy level it takes 8 s: both inside the ten."""
    with stand_in(wedge=3) as server:
        clients = _wedged(server)
        try:
            time.sleep(1.0)
            seen, seconds = _looked(server, played, sm_util=sm_util, busy_power_w=None)
        finally:
            _end(clients)
    stand = seen.standing
    assert stand.state == "hung", stand
    assert least <= seconds < most
    assert stand.still_known == "measured"
    assert (stand.still_s or 0.0) >= min(least, 2.0)
    assert any("a kernel has been resident" in text for text in stand.device_signals)
    assert not any("recorder" in text for text in stand.device_signals)
    document = document_of(seen, seconds)
    assert document.exit_status == 3
    assert document.next[0].startswith("dsv4-repro autopsy")


def test_a_card_that_spins_under_a_server_that_moves_is_looked_at_no_longer_than_before(
    stand_in: Callable[..., AbstractContextManager[StandIn]], played: ModuleType
) -> None:
    with stand_in() as server:
        clients = list(server.drain(lengths=(8000, 8000)))
        try:
            server.wait_state(live=2)
            seen, seconds = _looked(server, played, utilisation=100, memory_utilisation=0, power_w=120.0, busy_power_w=None)
        finally:
            _end(clients)
    assert seen.standing.state == "healthy"
    assert seconds < 5.2
    power = document_of(seen, seconds).power
    assert power == ("GPU 0: 120 W; what it draws at work",)


def test_a_server_that_starts_is_told_with_its_phase(
    stand_in: Callable[..., AbstractContextManager[StandIn]], capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in(wait=False, load_s=60) as server:
        server.wait_for("Starting to load")
        capsys.readouterr()
        status = main(["why", str(server.pid), "--log", str(server.log), "--json"])
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (status, document["state"]) == (0, "starting")
    text = "\n".join(document["reasons"])
    assert "phase load: it waits for the weights to be loaded" in text
    assert "its process has run for" in text
    assert document["against"] == []
    assert document["power"] == []
    assert document["deadline"]["state"] == "not counting"
    lines = "\n".join(why_lines(WhyDocument.model_validate(document)))
    assert "could not read" not in lines
    assert "not there yet, or not readable: " in lines


def test_a_stopped_engine_is_seen_stopped(
    stand_in: Callable[..., AbstractContextManager[StandIn]], capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in(wedge=3, agent=True, environment=_deadline(120)) as server:
        clients = _wedged(server)
        engine = server.engine()
        os.kill(engine, signal.SIGSTOP)
        try:
            time.sleep(2.0)
            _, document, seconds = _why(capsys, server.base_url)
        finally:
            os.kill(engine, signal.SIGCONT)
            _end(clients)
    assert seconds < 10
    assert "it is stopped, and the deadline runs on" in document["deadline"]["text"]


def test_metrics_that_do_not_answer_do_not_keep_it_beyond_its_time(
    stand_in: Callable[..., AbstractContextManager[StandIn]], capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in(metrics="hang", health="hang") as server:
        status, document, seconds = _why(capsys, str(server.pid))
    assert seconds < 10
    assert status == 5
    assert any("/metrics" in item["what"] or "metrics" in item["what"] for item in document["unread"])


def test_nothing_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    status, document, seconds = _why(capsys, "http://127.0.0.1:9")
    assert status == 5
    assert document["state"] in ("no server", "unknown")
    assert seconds < 10


def test_a_server_that_answers_nothing_is_starting_only_where_its_log_says_so() -> None:
    silent = [Snapshot(1000.0 + n, engine=EngineSample(1000.0 + n, error="refused")) for n in range(3)]
    starting = Assessment("starting", 1002.0, 1000.0, ("it loads",))
    assert standing(silent, starting).state == "unknown"
    told = [*silent, Snapshot(1003.0, log=LogSample(1003.0, phase="load"))]
    assert standing(told, starting).state == "starting"


@pytest.mark.parametrize("health", [401, 404, 426, 502, 503, 504])
def test_what_answers_otherwise_is_starting_only_where_its_processes_are_seen(health: int) -> None:
    """A gateway, or something else that speaks HTTP: "starting" would be exit status 0."""
    shots = [Snapshot(1000.0 + n, EngineSample(1000.0 + n, health=health, error="HTTP status 426")) for n in range(3)]
    starting = Assessment("starting", 1002.0, 1000.0, ("not ready yet",))
    found = standing(shots, starting)
    assert found.state == "unknown"
    assert f"/health {health}" in found.reasons[0]
    here = [replace(shot, processes=(ProcessSample(shot.at, 7, "api", "S"),)) for shot in shots]
    assert standing(here, starting).state == "starting"


# -- what is said, without a server ------------------------------------------------------------------------------------------------


def _target(ranks: int = 1) -> ServerTarget:
    return ServerTarget(
        None,
        engine_pids=(1 << 29,),
        ranks=tuple(Rank((1 << 29) + 1 + n, n, 1) for n in range(ranks)),
        tree={1 << 29: "engine", (1 << 29) + 1: "worker"},
    )


def _snapshots(clock: FakeClock, **device: Any) -> list[Snapshot]:
    values: dict[str, Any] = {"utilisation": 100, "memory_utilisation": 0, "power_w": 123.0, **device}
    return [
        Snapshot(
            clock.monotonic() + n,
            engine=EngineSample(clock.monotonic() + n, health=200, running=3, waiting=0, generation_tokens=60.0),
            progress=(
                RankProgress(
                    (1 << 29) + 1, clock.monotonic() + n, 0, begun=70, unfinished=(69, 70), unfinished_age_s=80.0 + n, requests=3,
                    padded_requests=4, graph_mode="full",
                ),
            ),
            devices=(DeviceSample(clock.monotonic() + n, 0, **values),),
        )
        for n in range(3)
    ]  # fmt: skip


def _document(ranks: int = 1, **device: Any) -> dict[str, Any]:
    clock = FakeClock(1000.0)
    shots = _snapshots(clock, **device)
    assessment = Assessment("suspect", 1002.0, 920.0)
    seen = look(_target(ranks), clock=clock, watch=lambda *_: (shots, assessment), proc=Path("/nonexistent"))
    document = document_of(seen, 1.0)
    assert why_lines(document)
    return document.model_dump(mode="json", by_alias=True)


def test_power_is_told_against_the_busy_level_only_where_it_was_learnt() -> None:
    assert "not known" in _document()["power"][0]
    assert _document(busy_power_w=600.0)["power"] == ["GPU 0: 123 W; of 600 W while this server computed"]


def test_a_card_that_works_is_no_hang() -> None:
    found = _document(memory_utilisation=40)
    assert (found["state"], found["exit_status"]) == ("suspect", 5)
    assert found["against"] == ["GPU 0 moves memory (40 %)"]
    assert _document(power_w=550.0, busy_power_w=600.0)["state"] == "suspect"


def test_no_cause_is_named_from_outside_and_several_ranks_leave_it_open() -> None:
    assert _document()["cause"]["class"] == "gpu-kernel-stuck"
    assert "trigger of vllm-51593" in _document()["cause"]["sentence"]
    several = _document(ranks=2)["cause"]
    assert several["class"] in ("unknown", "gpu-kernel-stuck")
    assert (several["cause"], several["confidence"]) == (None, "low")


def test_an_environment_that_is_closed_gives_an_assumed_deadline() -> None:
    found = _document()["deadline"]
    assert (found["limit_s"], found["known"]) == (300.0, "assumed")
    assert found["remaining_s"] == pytest.approx(218.0)


@pytest.mark.parametrize("engine", [None, b"", b"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=77\0"])
@pytest.mark.parametrize("api", [None, b"PATH=/bin\0VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=99\0"])
def test_the_engines_own_environment_decides_and_else_that_of_its_parent(
    engine: bytes | None, api: bytes | None, tmp_path: Path
) -> None:
    """A process title can be written over an environment: then nothing is left of it."""
    for pid, raw in ((11, engine), (10, api)):
        if raw is not None:
            (tmp_path / str(pid)).mkdir()
            (tmp_path / str(pid) / "environ").write_bytes(raw)
    found = deadline_of(ServerTarget("http://127.0.0.1:1", api_pid=10, engine_pids=(11,)), proc=tmp_path)
    expected = 77.0 if engine else 99.0 if api else 300.0
    assert found.limit_s == expected
    assert ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS in the engine's environment" in found.text) == bool(engine or api), found.text


def test_sources_that_never_answer_cost_their_own_deadline_and_no_more() -> None:
    def stuck(*_: Any) -> Any:
        time.sleep(30)

    began = time.monotonic()
    seen = look(_target(), watch=stuck, proc=Path("/nonexistent"))
    assert time.monotonic() - began < 7.5
    assert seen.standing.state == "unknown"
    assert any("no answer within" in item.why for item in seen.unread)


def test_the_words_of_a_process_that_is_no_server_are_not_taken_for_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, ...]] = []

    def build(pid: int, arguments: tuple[str, ...], **_: Any) -> LiveBuild:
        found.append(tuple(arguments))
        return live_build(pid, arguments)

    monkeypatch.setattr("dsv4_repro.repro.serving.why_look.live_build", build)
    monkeypatch.setattr("dsv4_repro.repro.serving.live_build.read_arguments", lambda *_: ("serve", "m", "--max-num-seqs", "4"))
    unknown = replace(_target(), unread=(Unread("the server", "not recognised as a vLLM server"),))
    for target, affected in ((unknown, "not known"), (_target(), "no")):
        seen = look(target, watch=lambda *_: ([], None), proc=Path("/nonexistent"))
        assert seen.build is not None
        assert seen.build.affected == affected
    assert found == [(), ("serve", "m", "--max-num-seqs", "4")]


def test_it_finds_the_server_by_itself_and_asks_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dsv4_repro.repro.serving import ranks

    found = [ServerTarget("http://127.0.0.1:8000", api_pid=1 << 29), ServerTarget("http://127.0.0.1:8001", api_pid=1 << 28)]
    monkeypatch.setattr(ranks, "find_servers", lambda: found)
    assert main(["why", "--json"]) == 5
    document = json.loads(capsys.readouterr().out)
    assert document["state"] == "unknown"
    assert document["next"] == [f"dsv4-repro why {1 << 29}", f"dsv4-repro why {1 << 28}"]
    assert "2 servers are here" in document["reasons"][0]
    monkeypatch.setattr(ranks, "find_servers", list)
    assert main(["why"]) == 5
    assert "no vLLM server was found" in capsys.readouterr().out
    monkeypatch.setattr(ranks, "find_servers", lambda: found[:1])
    assert find_one(None) == found[0]


def test_what_is_neither_a_pid_nor_a_url_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "ftp://x", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_status"] == 2
    assert main(["why", str(1 << 29), "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["state"] == "no server"


def test_out_keeps_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "http://127.0.0.1:9", "--out", str(tmp_path / "o")]) == 5
    capsys.readouterr()
    jsonschema.validate(json.loads((tmp_path / "o" / "why.json").read_text()), schema_of("why"))


def test_a_log_that_is_named_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "engine.log"
    log.write_text("(EngineCore pid=1) ERROR 11-29 12:00:00 [core.py:1] EngineCore encountered a fatal error.\n")
    assert main(["why", "http://127.0.0.1:9", "--log", str(log), "--json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["state"] == "ended"
    assert "fatal error" in document["deadline"]["text"]
    assert main(["why", "http://127.0.0.1:9", "--log", str(tmp_path / "none")]) == 2
    assert main(["watch", "--url", "http://127.0.0.1:9", "--log", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize("name", ["core.nvcudmp", "a run"])
def test_a_dump_or_a_run_is_not_taken_for_a_host(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "core.nvcudmp").write_bytes(b"x")
    (tmp_path / "a run").mkdir()
    assert main(["why", name]) == 2
    assert f"dsv4-repro autopsy {shlex.quote(name)}" in capsys.readouterr().err
