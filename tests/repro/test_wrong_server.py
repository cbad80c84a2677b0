"""What the verbs of a night say of a server that is not there, not one, dead, starting, another user's: never that all is well.

Each verb as a process of its own against stand-ins (a test double); whatever it prints is read, and a command that it names last is
run as it stands.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dsv4_repro.errors import UnavailableError
from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.repro import agent_verbs, why_verb
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.child import package_path
from dsv4_repro.repro.serving import ranks
from dsv4_repro.repro.serving.exporter import WatchState
from dsv4_repro.repro.serving.permission import as_root, closed
from dsv4_repro.repro.serving.records import Rank, ServerTarget
from dsv4_repro.repro.unwedge_verb import _after_refusal
from dsv4_repro.repro.watch_lines import end_lines

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.run import StandIn

_Make = Callable[..., AbstractContextManager["StandIn"]]
WELL = re.compile(r"HEALTHY|STARTING|alive:|not wedged|idle")


def _run(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_repro.repro", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": package_path()}, timeout=90, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(errors="replace")


def _verbs(pid: int, out: Path) -> list[list[str]]:
    name = str(pid)
    return [
        ["why", name], ["watch", "--pid", name, "--once", "--timeout", "3", "--out", str(out)],
        ["probe", "--pid", name, "--max-stall", "10"], ["unwedge", name], ["agent", "show", name], ["agent", "ask", name],
        ["doctor", "--pid", name],
    ]  # fmt: skip


def _follow(text: str) -> None:
    """The first command that it names is one: it ends by itself, and not with a usage error or a fault of ours."""
    found = [line.removeprefix("next: dsv4-repro ") for line in text.splitlines() if line.startswith("next: dsv4-repro ")]
    if found:
        assert _run(*shlex.split(found[0], comments=True))[0] not in (2, 70), found[0]


@contextmanager
def _process(kind: str) -> Iterator[int]:
    if kind == "no process":
        yield 1 << 22  # PID_MAX_LIMIT: never a pid
        return
    child = subprocess.Popen(["sleep", "300"])
    try:
        if kind == "zombie":
            child.kill()
            end = time.monotonic() + 5
            while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < end
                time.sleep(0.01)
        yield child.pid
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("kind", ["no process", "not a server", "zombie"])
def test_a_wrong_pid_is_told_by_every_verb_and_never_called_well(kind: str, tmp_path: Path) -> None:
    with _process(kind) as pid:
        for words in _verbs(pid, tmp_path):
            status, text = _run(*words)
            assert status == 5, (words, text)
            assert not WELL.search(text), (words, text)
            assert str(pid) in text
            assert "our own fault" not in text
        _follow(_run("why", str(pid))[1])


def test_a_pid_above_several_servers_is_asked_which(stand_in: _Make, capsys: pytest.CaptureFixture[str]) -> None:
    with stand_in() as first, stand_in() as second:
        assert main(["why", str(os.getpid())]) == 5
        said = " ".join(capsys.readouterr().out.split())
        assert f"servers run below process {os.getpid()}: " in said
        assert str(first.pid) in said
        assert str(second.pid) in said


def test_a_server_that_starts_is_alive_by_its_pid_and_not_known_by_its_url(stand_in: _Make) -> None:
    with stand_in(wait=False, stop_in="load") as server:
        server.wait_for("Initializing a V1 LLM engine")
        status, text = _run("probe", "--max-stall", "10", "--pid", str(server.pid))
        assert (status, "it is starting, or ending" in text) == (0, True), text
        assert _run("probe", "--max-stall", "10", "--url", server.base_url)[0] == 5
        status, text = _run("why", str(server.pid))
        assert (status, text.splitlines()[1].startswith("STARTING")) == (0, True)
        _follow(text)
    assert _run("probe", "--max-stall", "10", "--pid", str(server.pid))[0] == 5


def test_the_agent_of_a_server_is_found_by_its_pid(stand_in: _Make, capsys: pytest.CaptureFixture[str]) -> None:
    with stand_in(agent=True) as server:
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 4})  # a recorder is there from the first step on
        assert main(["agent", "show", str(server.pid)]) == 0
        text = capsys.readouterr().out
        assert f"pid {server.workers()[0]} (running)" in text
        assert text.splitlines()[-1] == f"next: dsv4-repro why {server.workers()[0]}"
        assert all(len(line) <= 80 for line in text.splitlines())
        _follow(text)
    with stand_in() as bare:
        assert main(["agent", "show", str(bare.pid)]) == 5
        assert "shows no agent" in " ".join(capsys.readouterr().err.split())


# --- another user's ---------------------------------------------------------------------------------------------------------------

CLOSED = (
    Unread("NVML", "NVML does not start"),
    Unread("environment of process 9", "Permission denied"),
    Unread("process 7 from inside", "another user's process: namespaces, environment are closed to us"),
)
TARGET = ServerTarget("http://127.0.0.1:8000", api_pid=7, engine_pids=(8,), unread=CLOSED)
SUDO = 'sudo "$(command -v dsv4-repro)" '


def test_what_is_closed_is_told_apart_and_the_command_is_one_for_a_shell(tmp_path: Path) -> None:
    assert closed(CLOSED) == ("environment of process 9", "process 7 from inside")
    assert closed(CLOSED[:1]) == ()
    (tmp_path / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "dsv4-repro").write_text('#!/bin/sh\necho "ran $*"\n')
    for name in ("sudo", "dsv4-repro"):
        (tmp_path / name).chmod(0o755)
    line = f"{as_root('dsv4-repro why 7')}    # as root"
    done = subprocess.run(["sh", "-c", line], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, check=False)
    assert done.stdout == b"ran why 7\n"


@pytest.mark.parametrize("unread", [CLOSED, CLOSED[:1]])
@pytest.mark.parametrize("state", ["suspect", "unknown", "hung", "healthy"])
def test_the_next_command_is_one_that_may_read(unread: tuple[Unread, ...], state: Any) -> None:
    target = ServerTarget("http://127.0.0.1:8000", api_pid=7, engine_pids=(8,), unread=unread)
    seen: Any = SimpleNamespace(
        target=target, unread=unread, deadline=SimpleNamespace(state="none", remaining_s=None, error_s=0.0)
    )  # fmt: skip
    stand: Any = SimpleNamespace(state=state)
    steps = why_verb.next_steps(stand, seen)
    if state != "healthy":
        assert steps[0].startswith(SUDO) is (len(unread) > 1)
        lines = end_lines(WatchState(state="suspect"), None, target, once=True, why="", help_text="")
        assert lines[-1].startswith(f"next: {SUDO}why 7") is (len(unread) > 1)
    looked: Any = SimpleNamespace(target=target, unread=unread)
    assert _after_refusal("no rank may be released", looked, "7").startswith(f"{SUDO}unwedge 7") is (len(unread) > 1)


def test_an_agent_that_may_not_be_seen_is_not_called_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "find_named", lambda *_: TARGET)
    with pytest.raises(UnavailableError, match="cannot be told: environment of process 9 is closed") as told:
        agent_verbs._folder(Path("7"))
    assert SUDO in told.value.help_text


@pytest.mark.parametrize("there", [True, False])
def test_an_attach_is_named_where_there_is_a_debugger(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "cuda-gdb"
    if there:
        place.write_text("#!/bin/sh\n")
        place.chmod(0o755)
    monkeypatch.setenv("DSV4_REPRO_CUDA_GDB", str(place))
    target = ServerTarget("http://127.0.0.1:8000", api_pid=7, engine_pids=(8,), ranks=(Rank(9, 0, 1),))
    seen: Any = SimpleNamespace(target=target, unread=(), deadline=SimpleNamespace(state="none", remaining_s=None, error_s=0.0))
    stand: Any = SimpleNamespace(state="hung")
    looked: Any = SimpleNamespace(target=target, unread=())
    first = why_verb.next_steps(stand, seen)[0]
    refused = _after_refusal("no rank may be released", looked, "7")
    if there:
        assert first == "dsv4-repro autopsy 9 --attach"
        assert refused.startswith("dsv4-repro autopsy 9 --attach    # ")
    else:
        assert first.startswith("dsv4-repro watch --pid 8 --once    # ")
        assert refused.startswith("dsv4-repro watch --pid 9 --once    # ")
        assert "cuda-gdb is not installed" in first
