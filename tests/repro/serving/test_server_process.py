"""A server of ours: started, ready, failed in each phase, ended with everything it started; the stand-in plays vLLM."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsv4_repro.clock import SYSTEM, Deadline
from dsv4_repro.errors import DeadlineError, ServerError
from dsv4_repro.repro.leftovers import PARENT_VARIABLE, RUN_VARIABLE, end_leftovers, find_leftovers
from dsv4_repro.repro.serving.gpu_holders import GpuHolders, HeldGpu
from dsv4_repro.repro.serving.recipe import DUMMY_PLAN, LaunchSpec, ServeOptions, build_launch
from dsv4_repro.repro.serving.server_process import ServerProcess
from dsv4_repro.scenarios.drain import DrainPlan

SITE = Path(__file__).parents[2] / "standin" / "site"
NO_GPU = GpuHolders({}, 0)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ServerProcess]]:
    """``serve("load_s=1", port=…)``: a server made (not started) whose engine is the stand-in with those switches."""
    made: list[ServerProcess] = []
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    own = psutil.Process()
    monkeypatch.setenv(PARENT_VARIABLE, f"{own.pid}:{own.create_time():.2f}")

    def make(switches: str = "", *, holders: GpuHolders = NO_GPU, **more: Any) -> ServerProcess:
        environ = {**os.environ, "PYTHONPATH": str(SITE), "STANDIN": switches}
        options = ServeOptions(folder=tmp_path, plan=DrainPlan(**dict(DUMMY_PLAN)), environ=environ, **more)
        made.append(ServerProcess(build_launch(options), holders=lambda: holders, grace_s=3.0))
        return made[-1]

    yield make
    for server in made:
        server.end()
        assert server.processes() == ()


def _tree(server: ServerProcess) -> list[psutil.Process]:
    assert server.pid is not None
    return [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]


def test_ready_is_a_completion_and_the_end_leaves_nobody(serve: Callable[..., ServerProcess]) -> None:
    server = serve("load_s=0.3 capture_s=0.3")
    server.start()
    phases: list[str] = []
    took = server.wait_ready(Deadline(60.0), lambda phase, waits, _seconds: phases.append(f"{phase}: {waits}"))
    assert took > 0.0
    assert phases[-1].startswith("serving")
    assert any(phase.startswith("load") for phase in phases)
    tree = _tree(server)
    assert len(tree) >= 3
    target = server.target()
    assert target.owned
    assert target.base_url == server.spec.base_url
    assert target.api_pid == server.pid
    assert len(target.ranks) == 1
    assert "DSV4_REPRO_AGENT" in {change.what for change in target.changes}
    closed = server.end()
    assert closed.how in ("terminated", "killed")
    assert closed.device_idle is True
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in tree)
    assert server.end() == closed


@pytest.mark.parametrize("phase", ["config", "load", "profile", "capture"])
def test_a_server_that_dies_while_it_starts_is_told_with_its_own_words(serve: Callable[..., ServerProcess], phase: str) -> None:
    server = serve(f"die_in={phase}")
    server.start()
    with pytest.raises(ServerError) as error:
        server.wait_ready(Deadline(60.0))
    assert str(server.spec.log_path) in str(error.value)
    assert server.startup.reason.split(":")[0] in str(error.value)


def test_a_start_that_stands_still_ends_at_the_deadline_and_says_what_it_waits_for(serve: Callable[..., ServerProcess]) -> None:
    server = serve("stop_in=capture")
    server.start()
    with pytest.raises(DeadlineError, match=r"not ready after .* it waits for"):
        server.wait_ready(Deadline(3.0))


def test_an_interpreter_that_is_none_is_said(serve: Callable[..., ServerProcess]) -> None:
    server = serve(python="/nonexistent/python")
    with pytest.raises(ServerError, match="/nonexistent/python"):
        server.start()
    assert server.end().how == "clean"


def test_an_interpreter_without_vllm_is_said(serve: Callable[..., ServerProcess], tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed here")
    options = ServeOptions(folder=tmp_path / "x", plan=DrainPlan(**dict(DUMMY_PLAN)), environ={"PATH": os.environ["PATH"]})
    server = ServerProcess(build_launch(options), holders=lambda: NO_GPU)
    server.start()
    with pytest.raises(ServerError, match="No module named") as error:
        server.wait_ready(Deadline(30.0))
    assert "--python" in error.value.help_text
    server.end()


#: Ignores SIGTERM, and starts a child in a session of its own and one whose environment is empty.
STUBBORN = textwrap.dedent("""
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", code], env={})
    print("up", flush=True)
    time.sleep(600)
""")


def _stubborn(tmp_path: Path, spec: LaunchSpec) -> ServerProcess:
    from dataclasses import replace

    return ServerProcess(replace(spec, argv=(sys.executable, "-c", STUBBORN)), holders=lambda: NO_GPU, grace_s=0.3)


def _await(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    until = Deadline(seconds)
    while not condition():
        assert not until.expired
        SYSTEM.sleep(0.05)


def test_who_ignores_sigterm_or_left_the_session_is_killed(serve: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = _stubborn(tmp_path, serve().spec)
    server.start()
    _await(lambda: "up" in server.spec.log_path.read_text())
    tree = _tree(server)
    assert len(tree) == 3
    assert server.end().how == "killed"
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in tree)


def test_a_card_that_is_still_held_is_not_called_idle(serve: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    server.start()
    assert server.pid is not None
    held = GpuHolders({server.pid: (HeldGpu(0, "GPU-1"),)}, 1)
    monkeypatch.setattr(server, "_holders", lambda: held)
    closed = server.end()
    assert closed.device_idle is False
    assert str(server.pid) in closed.detail


def test_without_nvml_idle_is_not_known(serve: Callable[..., ServerProcess]) -> None:
    server = serve(holders=GpuHolders())
    server.start()
    closed = server.end()
    assert closed.device_idle is None
    assert "not known" in closed.detail


#: Starts a server as a run does, and is then killed.
RUN = """
import os, sys, time
from pathlib import Path
from dsv4_repro.repro.leftovers import mark_run
from dsv4_repro.repro.serving.recipe import DUMMY_PLAN, ServeOptions, build_launch
from dsv4_repro.repro.serving.server_process import ServerProcess
from dsv4_repro.scenarios.drain import DrainPlan
folder = Path(sys.argv[1])
mark_run(folder)
server = ServerProcess(build_launch(ServeOptions(folder=folder, plan=DrainPlan(**dict(DUMMY_PLAN)))))
server.start()
server.wait_ready()
print(server.pid, flush=True)
time.sleep(600)
"""


def test_after_our_own_kill_the_doctor_finds_the_whole_tree(tmp_path: Path) -> None:
    environ = {**os.environ, "STANDIN": "", "PYTHONPATH": os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], env=environ, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run, run.stdout:
        pid = int(run.stdout.readline())
        tree = {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        run.send_signal(signal.SIGKILL)
        run.wait(10)
    time.sleep(0.2)
    leftovers = [item for item in find_leftovers() if item.run == str(tmp_path)]
    assert tree <= {item.pid for item in leftovers}
    assert set(end_leftovers(leftovers).values()) <= {"ended", "killed", "gone"}
    assert not [item for item in find_leftovers() if item.run == str(tmp_path)]


def test_ctrl_c_while_the_process_is_made_is_not_lost_and_the_process_is_known(
    serve: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.Popen

    def interrupted(*arguments: Any, **more: Any) -> Any:
        process = real(*arguments, **more)
        os.kill(os.getpid(), signal.SIGINT)  # between the fork and the return
        return process

    server = serve()
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    monkeypatch.undo()
    assert server.pid is not None
    assert server.end().how in ("terminated", "killed")
    assert not psutil.pid_exists(server.pid)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
