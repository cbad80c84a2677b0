"""What watch prints: 80 columns whatever reads it, first what it will do, last the verdict, what shows it and a real command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dsv4_repro.repro.child import package_path
from dsv4_repro.repro.serving.exporter import STATES, WatchState
from dsv4_repro.repro.serving.records import Assessment, Blind, ServerTarget
from dsv4_repro.repro.watch_actions import WatchFlags
from dsv4_repro.repro.watch_lines import end_lines, first_lines

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.run import StandIn

_Make = Callable[..., AbstractContextManager["StandIn"]]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _run(*words: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_repro.repro", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": package_path(), **(environment or {})}, timeout=90, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(errors="replace")


def too_wide(text: str) -> list[str]:
    """Lines past 80 columns that could have been broken: not a command to paste, not a path, not one long word."""
    lines = [COLOUR.sub("", line) for line in text.splitlines()]
    return [
        line for line in lines if len(line) > 80 and not line.startswith(("next: ", "then: ", "kept in ")) and len(line.split()) > 1
    ]


@pytest.mark.parametrize("kind", ["log file", "colour"])
def test_every_line_fits(stand_in: _Make, tmp_path: Path, kind: str) -> None:
    environment = {"FORCE_COLOR": "1", "TERM": "xterm-256color"} if kind == "colour" else {"NO_COLOR": "1"}
    environment |= {"COLUMNS": "300"} if kind == "colour" else {}
    folder = tmp_path / ("a-folder-with-a-long-name-" * 4)
    with stand_in(wedge=3, agent=True) as server:
        clients: list[Any] = list(server.drain())
        try:
            server.wait_state(device="wedged")
            status, text = _run(
                "watch", "--url", server.base_url, "--once", "--out", str(folder), "--on-hang", "exit 7",
                environment=environment,
            )  # fmt: skip
            assert status == 3
            assert ("\x1b[" in text) is (kind == "colour")
            assert too_wide(text) == []
            lines = [COLOUR.sub("", line) for line in text.splitlines()]
            assert lines[0].startswith("watch: the server of http://127.0.0.1")
            # The command that it names works as it stands, and gives the same word.
            (command,) = [line.removeprefix("next: dsv4-repro ") for line in lines if line.startswith("next: ")]
            assert _run(*shlex.split(command))[0] == 3
        finally:
            for client in clients:
                client.kill()
                client.wait()


def _flags(**more: Any) -> WatchFlags:
    return WatchFlags(**more)


def test_the_first_lines_say_what_is_looked_at_and_what_will_be_done() -> None:
    plain = " ".join(first_lines(_flags(pid=7), Path("runs"), None))
    assert "process 7, until Ctrl-C or SIGTERM; reads only, sends nothing to it" in plain
    assert plain.endswith("on a hang: evidence and report in runs/watch")
    hook = "https://hooks.example/services/T0/SECRET"
    more = " ".join(
        first_lines(_flags(url="http://h:1", attach=True, on_hang="curl -H token:SECRET", webhook=hook, canary_s=30.0, once=True),
                    Path("x"), 60.0)
    )  # fmt: skip
    assert "reads only" not in more
    assert "reads only" not in first_lines(_flags(attach=True), Path("x"), None)[0]
    assert "SECRET" not in more
    for word in ("http://h:1", "60 s at most", "every 30 s", "cuda-gdb is attached", "--on-hang", "--webhook"):
        assert word in more


@pytest.mark.parametrize("state", STATES)
def test_the_last_lines_have_a_verdict_what_shows_it_and_a_next_step(state: Any) -> None:
    target = ServerTarget("http://127.0.0.1:8000", api_pid=7, log_path=Path("/var/log/vllm.log"))
    seen = Assessment(state, 10.0, 9.0, ("the reason",), blind=(Blind("NVML", "no driver"), Blind("canary", "none is sent")))
    found = WatchState(state=state, still_s=1.0, reason="the reason", live_requests=2)
    lines = end_lines(found, seen, target, once=True, why="nobody is there", help_text="See: dsv4-repro why")
    if state == "hung":  # said when it was found, with the run's folder
        assert lines == []
        return
    verdict = {"healthy": "HEALTHY: ", "exited": "ENDED (exited): ", "crashed": "ENDED (crashed): "}
    assert lines[0].startswith(verdict.get(state, f"NOT DECIDED: {state}"))
    assert ("nobody is there" if state == "no server" else "the reason") in lines[0]
    if state not in ("healthy", "no server"):
        assert lines[-1] in ("next: dsv4-repro why 7", "next: dsv4-repro autopsy /var/log/vllm.log")
    if state in ("healthy", "starting", "suspect"):
        assert "not seen: NVML" in lines
    # A watch of weeks ends with what it saw.
    last = end_lines(found, seen, target, once=False, why="", help_text="")[-1]
    assert (last == "next: dsv4-repro autopsy /var/log/vllm.log") is (state in ("exited", "crashed"))
    assert end_lines(found, seen, target, once=False, why="", help_text="")[0].startswith("watch ended; 0 hang(s), 0 restart(s)")


def test_a_watch_that_waits_for_its_server_says_so_once(tmp_path: Path) -> None:
    status, text = _run("watch", "--url", "http://127.0.0.1:9", "--listen", "off", "--timeout", "7", "--out", str(tmp_path))
    said = " ".join(text.split())
    assert status == 0
    assert said.count("no server: http://127.0.0.1:9 does not answer") == 2  # while it waits, and at the end
    assert "looked for every 5 s" in said
    assert too_wide(text) == []


def test_an_attach_that_cannot_be_is_told_before_the_hang(tmp_path: Path) -> None:
    words = ("watch", "--url", "http://127.0.0.1:9", "--listen", "off", "--timeout", "1", "--attach", "--out", str(tmp_path))
    _, text = _run(*words, environment={"DSV4_REPRO_CUDA_GDB": str(tmp_path / "none")})
    assert "--attach: nothing would be attached: cuda-gdb is not installed" in " ".join(text.split())
    (tmp_path / "gdb").write_text("#!/bin/sh\n")
    (tmp_path / "gdb").chmod(0o755)
    _, text = _run(*words, environment={"DSV4_REPRO_CUDA_GDB": str(tmp_path / "gdb")})
    assert "nothing would be attached" not in " ".join(text.split())


def test_a_crash_is_followed_by_the_command_that_reads_the_log(stand_in: _Make, tmp_path: Path) -> None:
    folder = tmp_path / "a folder's logs"
    folder.mkdir()
    with stand_in(folder=folder, linger_s=1) as server:
        log = Path(server.log)
        watch = subprocess.Popen(
            [sys.executable, "-m", "dsv4_repro.repro", "watch", "--pid", str(server.pid), "--log", str(log), "--listen", "off",
             "--timeout", "12", "--out", str(tmp_path / "runs")],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": package_path(), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert watch.stdout is not None
        try:
            for line in watch.stdout:
                if "-> healthy" in line:
                    break
            os.kill(server.engine(), 9)
            rest = watch.stdout.read()
            watch.wait(30)
        finally:
            watch.kill()
            watch.stdout.close()
            watch.wait()
    found = [line for line in rest.splitlines() if line.startswith("next: ")]
    assert len(found) == 2, rest  # as it crashes, and at the end
    assert {tuple(shlex.split(line)[1:]) for line in found} == {("dsv4-repro", "autopsy", str(log))}
