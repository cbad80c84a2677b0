"""``run drain --on server`` end to end; the stand-in plays vLLM (a test double: it proves the wiring, never the defect)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsv4_repro.repro.leftovers import RUN_VARIABLE, end_leftovers, find_leftovers
from dsv4_repro.repro.runread import open_run, read_timeline
from dsv4_repro.repro.serving.load_plan import LoadPlan, read_load_plan

SITE = Path(__file__).parents[1] / "standin" / "site"
#: The shortest load known to wedge a real server, with outputs that a slow machine reaches soon.
LENGTHS = [(64, 40), (65, 400), (66, 400), (67, 400)]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "load.json"
    LoadPlan.from_lengths(LENGTHS, live=3, max_model_len=16384).write(path)
    return path


def _environment(switches: str, **more: str) -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(SITE), os.environ.get("PYTHONPATH", "")) if part)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DSV4_REPRO", "VLLM_", "CUDA_"))}
    return {**kept, "STANDIN": switches, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **more}


Run = Callable[..., tuple[int, Any, str, Path]]


@pytest.fixture
def drain(tmp_path: Path, plan: Path) -> Run:
    """``drain(switches, *words)``: (status, document of --json, standard error, run directory)."""

    def run(switches: str = "", *words: str, model: str = "dummy") -> tuple[int, Any, str, Path]:
        folder = tmp_path / "run"
        command = [
            sys.executable, "-m", "dsv4_repro.repro", "run", "drain", "--on", "server", "--model", model, "--json",
            "--plan", str(plan), "--out", str(folder), *words,
        ]  # fmt: skip
        done = subprocess.run(command, env=_environment(f"step_ms=4 {switches}"), capture_output=True, text=True, timeout=120)
        assert not _left(folder)
        return done.returncode, json.loads(done.stdout), done.stderr, folder

    return run


def _left(folder: Path) -> list[int]:
    """Processes that carry the run's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_timeline(folder) if isinstance(line, dict)]


def test_a_wedge_is_status_3_with_evidence_and_a_report(drain: Run) -> None:
    status, document, _, folder = drain("wedge=3")
    assert status == 3
    assert document["outcome"] == "hang"
    assert document["ground"] == "server"
    assert document["exit_status"] == 3
    assert (document["verdict"]["class"], document["verdict"]["cause"]) == ("gpu-spin-barrier", "peer-left")
    assert document["window"]["live_requests"] == 3
    assert document["window"]["reached"] is True
    assert document["state"]["state"] == "hung"
    assert document["state"]["device_signals"]
    assert {"DSV4_REPRO_AGENT", "PYTHONFAULTHANDLER", "SPT_NOENV"} <= {change["what"] for change in document["changes"]}
    view = open_run(folder)
    assert (view.run.state, view.run.outcome, view.run.exit_status) == ("finished", "hang", 3)
    assert view.run.kernel is None
    assert view.run.environment["server_vllm"] == "not known"
    assert {change["what"] for change in view.run.environment["details"]["changes"]} >= {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"}
    assert (folder / "report.md").stat().st_size > 500
    assert (folder / "requests.jsonl").stat().st_size > 0
    assert (folder / "server" / "vllm.log").stat().st_size > 0
    kinds = [line["kind"] for line in _lines(folder)]
    assert kinds.index("ready") < kinds.index("hung") < kinds.index("capture") < kinds.index("verdict") < kinds.index("close")
    hung = next(line for line in _lines(folder) if line["kind"] == "hung")
    assert hung["live"] == 3
    assert hung["detail"]["stood_still_s"] <= 5.0
    # Not since the live count was reached: that is the step's own time.
    assert document["timing"]["launch_to_hung_s"] == hung["detail"]["stood_still_s"]
    assert "run drain --no-attach --dump" in document["next"]


def test_a_healthy_server_with_the_window_reached_is_status_0_and_the_plan_can_be_replayed(drain: Run, plan: Path) -> None:
    status, document, _, folder = drain("")
    assert status == 0
    assert (document["outcome"], document["verdict"]["class"]) == ("clean", "not-hung")
    assert document["window"] == {"live_requests": 3, "rows": 6, "graph_rows": 8, "padded_requests": 1, "reached": True}
    assert "measured" in document["verdict"]["sentence"]
    assert (folder / "plan.json").read_bytes() == plan.read_bytes()
    assert read_load_plan(folder / "plan.json").sha256 == open_run(folder).run.environment["load_plan_sha256"]


def test_the_guard_is_a_control_and_says_so(drain: Run) -> None:
    status, document, err, _ = drain("wedge=3", "--guard", "--expect", "clean")
    assert status == 0
    assert "the guard was armed, so this is the control" in document["verdict"]["sentence"]
    assert "clean is expected" in " ".join(err.split())


def test_without_padding_nothing_is_said_about_the_defect(drain: Run) -> None:
    status, document, err, _ = drain("wedge=3", "--", "--enforce-eager")
    assert status == 5
    assert document["window"]["reached"] is False
    assert "--enforce-eager" in document["verdict"]["sentence"]
    assert "the answer will be inconclusive" in " ".join(err.split())


@pytest.mark.server_faults
def test_a_bare_server_without_a_device_side_sign_stays_suspect(drain: Run) -> None:
    """No NVML here and no recorder: the stand-still is seen, and it is not called a hang."""
    status, document, _, folder = drain("wedge=3", "--bare", "--timeout", "14")
    assert document["outcome"] in ("inconclusive", "hang")
    assert document["verdict"]["class"] != "gpu-spin-barrier"
    assert status in (3, 5)
    assert not (folder / "agent").exists()
    states = [line["state"] for line in _lines(folder) if line["kind"] == "state"]
    assert "suspect" in states
    assert "hung" not in states
    assert any(item["what"] == "GPU core dump" for item in document["unread"])


@pytest.mark.server_faults
@pytest.mark.parametrize("switch", ["kill_worker=1", "kill_engine=1"])
def test_a_server_that_dies_while_it_serves_is_status_4(drain: Run, switch: str) -> None:
    status, document, _, folder = drain(f"after=60 {switch}")
    assert status == 4
    assert document["outcome"] == "other"
    assert document["verdict"]["class"] == "worker-dead"
    assert open_run(folder).run.exit_status == 4


@pytest.mark.server_faults
def test_an_api_process_that_is_killed_is_status_4(tmp_path: Path, plan: Path) -> None:
    process, folder = _begin(tmp_path, plan, "step_ms=20")
    with process:
        _until(process, folder, '"kind":"load"')
        ready = next(line for line in _lines(folder) if line["kind"] == "server" and line.get("state") == "ready")
        os.kill(ready["pid"], signal.SIGKILL)
        assert _status(process, 60) == 4
    assert not _left(folder)
    assert "worker-dead" in (folder / "diagnosis.json").read_text()


@pytest.mark.parametrize("phase", ["load", "capture"])
def test_a_server_that_dies_while_it_starts_is_a_typed_error_with_its_words(drain: Run, phase: str) -> None:
    status, document, _, folder = drain(f"die_in={phase}")
    assert status == 5
    assert document["error"] == "ServerError"
    assert "its log:" in document["message"]
    assert open_run(folder).run.state == "failed"


def test_a_server_that_never_answers_is_not_ready(drain: Run) -> None:
    status, document, _, _ = drain("refuse=503", "--timeout", "4")
    assert status == 5
    assert document["error"] == "DeadlineError"
    assert "unavailable" in document["message"]


def test_a_port_that_is_taken_is_named(drain: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, document, _, _ = drain("", "--port", str(port))
    assert status == 5
    assert f"port {port} is taken" in document["message"]


@pytest.mark.parametrize(
    ("words", "said", "not_said"),
    [
        ([], "cuda-gdb is attached to each worker", "a GPU core dump is taken"),
        (["--yes"], "cuda-gdb is attached to each worker", "a GPU core dump is taken"),
        (["--no-attach", "--dump"], "a GPU core dump is taken, which ends the worker", "cuda-gdb is attached"),
        (["--no-attach"], "only what disturbs nothing is read", "cuda-gdb is attached"),
    ],
)
def test_what_a_hang_will_be_read_with_is_said_first(drain: Run, words: list[str], said: str, not_said: str) -> None:
    """After an attach the driver makes no dump: only one of the two is promised."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        _, _, error, _ = drain("", "--port", str(taken.getsockname()[1]), *words)
    text = " ".join(error.split())
    assert said in text
    assert not_said not in text


@pytest.mark.parametrize(
    ("words", "piece"),
    [
        (["--kernel", "builtin"], "--kernel"),
        (["--producer", "clamped"], "--producer"),
        (["--unwedge"], "--unwedge"),
        (["--url", "http://127.0.0.1:1", "--guard"], "--guard"),
        (["--requests", "5"], "--requests"),
        (["--", "word"], "belongs to no flag"),
    ],
)
def test_what_cannot_be_asked_of_a_server_is_a_usage_error(drain: Run, words: list[str], piece: str) -> None:
    status, document, _, folder = drain("", *words)
    assert status == 2
    assert piece in document["message"]
    assert not folder.exists()


def test_an_interpreter_without_vllm_is_said_before_anything_starts(drain: Run, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho \'{"python": "3.12.0", "vllm": null, "torch": null, "folder": null}\'\n')
    fake.chmod(0o755)
    status, document, _, folder = drain("", "--python", str(fake))
    assert status == 5
    assert "there is no vLLM to start" in document["message"]
    assert not folder.exists()


def _await(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _begin(tmp_path: Path, plan: Path, switches: str) -> tuple[subprocess.Popen[bytes], Path]:
    folder = tmp_path / "run"
    command = [
        sys.executable, "-m", "dsv4_repro.repro", "run", "drain", "--on", "server", "--model", "dummy", "--plan", str(plan),
        "--out", str(folder),
    ]  # fmt: skip
    out = (tmp_path / "out").open("wb")
    with out:
        return subprocess.Popen(command, env=_environment(switches), stdout=out, stderr=out), folder


def _status(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Exit status; one that does not end is killed, so that the test fails instead of waiting."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def _until(process: subprocess.Popen[bytes], folder: Path, words: str) -> None:
    """Until the timeline has these words."""
    path = folder / "timeline.jsonl"
    end = time.monotonic() + 60.0
    while not (path.exists() and words in path.read_text().replace(": ", ":")):
        assert process.poll() is None, (folder.parent / "out").read_text()
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ('"state":"starting"', signal.SIGINT),
        ('"kind":"ready"', signal.SIGINT),
        ('"state":"hung"', signal.SIGINT),
        ('"kind":"load"', signal.SIGTERM),
    ],
)
def test_ctrl_c_at_any_point_leaves_nobody_behind(tmp_path: Path, plan: Path, moment: str, number: signal.Signals) -> None:
    process, folder = _begin(tmp_path, plan, "step_ms=4 wedge=3 load_s=0.6")
    with process:
        _until(process, folder, moment)
        process.send_signal(number)
        assert _status(process, 60) == 130
    assert not _left(folder)
    assert open_run(folder).run.state == "interrupted"


@pytest.mark.server_faults
@pytest.mark.parametrize("moment", ['"state":"starting"', '"kind":"ready"', '"state":"hung"'])
def test_a_user_who_presses_ctrl_c_again_and_again_leaves_nobody_behind(tmp_path: Path, plan: Path, moment: str) -> None:
    process, folder = _begin(tmp_path, plan, "step_ms=4 wedge=3 load_s=0.6")
    with process:
        _until(process, folder, moment)
        end = time.monotonic() + 60.0
        while process.poll() is None and time.monotonic() < end:
            process.send_signal(signal.SIGINT)
            time.sleep(0.15)
        # The last one may meet the interpreter's own end; a shell says 130 of both.
        assert _status(process, 1) in (130, -signal.SIGINT)
    assert not _left(folder)
    assert "Traceback" not in (tmp_path / "out").read_text()


def test_after_kill_9_the_run_is_readable_and_the_doctor_ends_the_server(tmp_path: Path, plan: Path) -> None:
    process, folder = _begin(tmp_path, plan, "step_ms=4 wedge=3")
    with process:
        _until(process, folder, '"kind":"hung"')
        process.kill()
        process.wait(10)
    time.sleep(0.3)
    leftovers = [item for item in find_leftovers() if item.run == str(folder)]
    assert len(leftovers) >= 3
    end_leftovers(leftovers)
    assert not _left(folder)
    view = open_run(folder)
    assert view.run.state == "running"
    assert any(line["kind"] == "hung" for line in _lines(folder))


@pytest.mark.server_faults
def test_two_runs_at_once_do_not_meet(tmp_path: Path, plan: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, one = _begin(tmp_path / "a", plan, "step_ms=4 wedge=3")
    second, two = _begin(tmp_path / "b", plan, "step_ms=4")
    with first, second:
        assert _status(first, 90) == 3
        assert _status(second, 90) == 0
    assert not _left(one) + _left(two)


def test_a_server_that_runs_is_drained_and_left_as_found(tmp_path: Path, plan: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "/m", "--served-model-name", "theirs", "--port", str(port),
        "--max-num-seqs", "16", "--max-model-len", "16384", "--speculative-config", '{"method":"mtp","num_speculative_tokens":1}',
    ]  # fmt: skip
    log = (tmp_path / "theirs.log").open("wb")
    with log, subprocess.Popen(argv, env=_environment("step_ms=4"), stdout=log, stderr=log, start_new_session=True) as server:
        try:
            _await(lambda: "startup complete" in (tmp_path / "theirs.log").read_text())
            command = [
                sys.executable, "-m", "dsv4_repro.repro", "run", "drain", "--url", f"http://127.0.0.1:{port}", "--json",
                "--plan", str(plan), "--compress", "1", "--out", str(tmp_path / "run"),
            ]  # fmt: skip
            done = subprocess.run(command, env=_environment(""), capture_output=True, text=True, timeout=120)
            document = json.loads(done.stdout)
            assert done.returncode in (0, 5), done.stderr
            assert document["ground"] == "server"
            if done.returncode == 0:
                assert "computed" in document["verdict"]["sentence"]
            assert "left as found" in " ".join(done.stderr.split())
            assert server.poll() is None
            view = open_run(tmp_path / "run")
            assert view.run.environment["model"] == "theirs"
            assert view.run.environment["details"]["changes"] == []
        finally:
            os.killpg(server.pid, signal.SIGKILL)


@pytest.mark.server_faults
def test_each_trial_after_a_hang_gets_a_server_of_its_own(drain: Run) -> None:
    status, document, _, folder = drain("wedge=3", "--trials", "2")
    assert status == 3
    assert document["trials"]["hang"] == 2
    assert sorted(path.name for path in (folder / "server").glob("*.log")) == ["vllm-2.log", "vllm.log"]
    assert {"agent", "agent-2"} <= {path.name for path in folder.iterdir()}
    ready = [line for line in _lines(folder) if line["kind"] == "server" and line.get("state") == "ready"]
    assert len({line["pid"] for line in ready}) == 2
