"""Only processes of a run whose parent is gone are leftovers, and only they are ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dsv4_repro.repro.leftovers import (
    PARENT_VARIABLE,
    RUN_VARIABLE,
    SESSION_VARIABLE,
    Leftover,
    end_leftovers,
    find_leftovers,
    mark_run,
)

_SLEEP = "import time; time.sleep(60)"
_STUBBORN = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"


@pytest.fixture
def child() -> Iterator[list[subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []
    yield children
    for process in children:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _start(code: str, run: Path, parent: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, RUN_VARIABLE: str(run), PARENT_VARIABLE: parent}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)


def _gone_parent() -> str:
    done = subprocess.Popen([sys.executable, "-c", ""])
    identity = f"{done.pid}:{psutil.Process(done.pid).create_time():.2f}"
    done.wait()
    return identity


def _wait_seen(pid: int) -> tuple[Leftover, ...]:
    for _ in range(100):
        found = tuple(item for item in find_leftovers() if item.pid == pid)
        if found:
            return found
        time.sleep(0.02)
    return ()


def test_an_orphan_of_a_run_is_found_and_ended(tmp_path: Path, child: list[subprocess.Popen[bytes]]) -> None:
    process = _start(_SLEEP, tmp_path, _gone_parent())
    child.append(process)
    (leftover,) = _wait_seen(process.pid)
    assert leftover.run == str(tmp_path)
    assert end_leftovers([leftover]) == {process.pid: "ended"}


def test_one_that_ignores_the_polite_signal_is_killed(tmp_path: Path, child: list[subprocess.Popen[bytes]]) -> None:
    process = _start(_STUBBORN, tmp_path, _gone_parent())
    child.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    (leftover,) = _wait_seen(process.pid)
    assert end_leftovers([leftover], grace_s=0.3) == {process.pid: "killed"}


def test_a_child_whose_parent_lives_is_left_alone(tmp_path: Path, child: list[subprocess.Popen[bytes]]) -> None:
    own = psutil.Process()
    process = _start(_STUBBORN, tmp_path, f"{own.pid}:{own.create_time():.2f}")
    child.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    assert process.pid not in {item.pid for item in find_leftovers()}


def test_a_mark_that_cannot_be_read_is_not_a_reason_to_end_anything(tmp_path: Path, child: list[subprocess.Popen[bytes]]) -> None:
    process = _start(_STUBBORN, tmp_path, "nonsense")
    child.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    assert process.pid not in {item.pid for item in find_leftovers()}


def test_a_process_id_that_was_used_again_is_not_ended(child: list[subprocess.Popen[bytes]]) -> None:
    process = subprocess.Popen([sys.executable, "-c", _SLEEP])
    child.append(process)
    assert end_leftovers([Leftover(process.pid, 12345.0, "/r", "x")]) == {process.pid: "gone"}
    assert process.poll() is None


def test_marking_names_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "")
    monkeypatch.setenv(PARENT_VARIABLE, "")
    monkeypatch.setenv(SESSION_VARIABLE, "")
    mark_run(tmp_path)
    assert os.environ[SESSION_VARIABLE] == str(os.getsid(0))
    assert os.environ[RUN_VARIABLE] == str(tmp_path)
    assert os.environ[PARENT_VARIABLE].startswith(f"{os.getpid()}:")


def test_a_process_without_the_mark_is_found_by_its_session(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], env={}); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, RUN_VARIABLE: str(tmp_path), PARENT_VARIABLE: _gone_parent()}
    leader = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    with leader, leader.stdout:
        unmarked = int(leader.stdout.readline())
        assert RUN_VARIABLE not in psutil.Process(unmarked).environ()
        found = {item.pid: item for item in find_leftovers()}
        assert {leader.pid, unmarked} <= set(found)
        assert found[unmarked].run == str(tmp_path)
        assert os.getpid() not in found
        end_leftovers([found[leader.pid], found[unmarked]], grace_s=5.0)
    assert not psutil.pid_exists(unmarked) or psutil.Process(unmarked).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("whose", "ends"), [("the server's", True), ("the shell's", False), (None, False)])
def test_the_jobs_of_a_shell_that_has_gone_too_are_none_of_ours(tmp_path: Path, whose: str | None, ends: bool) -> None:
    """A session leader starts a marked process and another job, and is gone: a server's API process, or the shell of the run."""
    code = (
        "import os, subprocess, sys; sleep = [sys.executable, '-c', 'import time; time.sleep(60)']; mark = dict(os.environ); "
        "mark.update({sys.argv[1]: str(os.getpid())} if sys.argv[1] else {}); "
        "print(subprocess.Popen(sleep, env=mark).pid, subprocess.Popen(sleep, env={}).pid, flush=True)"
    )
    environment = {**os.environ, RUN_VARIABLE: str(tmp_path), PARENT_VARIABLE: _gone_parent()}
    environment.pop(SESSION_VARIABLE, None)
    if whose == "the server's":
        environment[SESSION_VARIABLE] = str(os.getsid(0))
    leader = subprocess.Popen(
        [sys.executable, "-c", code, SESSION_VARIABLE if whose == "the shell's" else ""],
        env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert leader.stdout is not None
    with leader, leader.stdout:
        marked, other = map(int, leader.stdout.readline().split())
    try:
        found = {item.pid for item in find_leftovers()}
        assert marked in found
        assert (other in found) is ends
    finally:
        for pid in (marked, other):
            psutil.Process(pid).kill()
