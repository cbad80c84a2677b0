"""watch and probe, against a stand-in server (a test double: nothing here is a result of vLLM or of a GPU)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from dsv4_repro.clock import SYSTEM, FakeClock
from dsv4_repro.repro import watch_verb, watched_server
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.child import package_path
from dsv4_repro.repro.schemas import schema_of
from dsv4_repro.repro.serving.exporter import WatchState
from dsv4_repro.repro.serving.records import Assessment, ServerTarget
from dsv4_repro.repro.serving.unwedge_look import api_pid_of_run

from .webhook_receiver import receiver

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.run import StandIn

_Make = Callable[..., AbstractContextManager["StandIn"]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _wedged(server: StandIn) -> Iterator[None]:
    clients: list[Any] = list(server.drain())
    try:
        server.wait_state(device="wedged")
        yield
    finally:
        for client in clients:
            client.kill()
            client.wait()


def test_once_on_a_wedged_server_keeps_the_evidence_and_tells_everybody_once(
    stand_in: _Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fired = tmp_path / "fired"
    with stand_in(wedge=3, agent=True) as server, receiver("hook") as (hook, bodies), _wedged(server):
        command = f'env | grep ^DSV4_REPRO_ >> {fired}; echo seen; ls "$DSV4_REPRO_RUN"'
        status = main(
            ["watch", "--url", server.base_url, "--once", "--json", "--out", str(tmp_path / "runs"), "--on-hang", command,
             "--webhook", hook]
        )  # fmt: skip
        assert server.state()["device"] == "wedged"
        (kept,) = (tmp_path / "runs" / "watch").iterdir()
        assert api_pid_of_run(kept) == server.pid  # for unwedge RUN
    document = json.loads(capsys.readouterr().out)
    assert (status, document["outcome"], document["exit_status"]) == (3, "hang", 3)
    (run,) = (tmp_path / "runs" / "watch").iterdir()
    assert document["run"] == str(run)
    assert json.loads((run / "diagnosis.json").read_text())["outcome"] == "hang"
    assert json.loads((run / "run.json").read_text())["state"] == "finished"
    assert (run / "report.md").is_file()
    lines = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "start"
    assert kinds.index("sample") < kinds.index("hung") < kinds.index("verdict")
    assert "deadline" in kinds
    # Nothing that needs ptrace was done, and that is said.
    assert any("ptrace" in item["why"] for item in document["unread"])
    assert not list((run / "evidence").rglob("host_stacks*"))
    # Once, with the evidence on the disk.
    names = [line.partition("=")[0] for line in fired.read_text().splitlines()]
    assert names.count("DSV4_REPRO_RUN") == 1
    assert f"DSV4_REPRO_RUN={run}" in fired.read_text()
    assert "DSV4_REPRO_OUTCOME=hang" in fired.read_text()
    assert "diagnosis.json" in (run / "on-hang.log").read_text()
    (body,) = bodies
    assert (body["event"], body["outcome"], body["live_requests"]) == ("hang", "hang", 3)
    assert str(tmp_path) not in json.dumps(body)
    jsonschema.validate(body, schema_of("webhook"))
    # The run directory is one like any other.
    assert main(["autopsy", str(run)]) == 3
    assert main(["report", str(run), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "report.md").is_file()


def test_once_on_a_working_server_is_fine(stand_in: _Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stand_in(agent=True) as server:
        clients = list(server.drain(lengths=(8000, 8000)))
        try:
            status = main(["watch", "--pid", str(server.pid), "--once", "--json", "--out", str(tmp_path)])
        finally:
            for client in clients:
                client.kill()
                client.wait()
    assert status == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["class"] == "not-hung"
    assert list(tmp_path.iterdir()) == []


def test_once_does_not_call_healthy_what_was_not_seen_to_move() -> None:
    clock = FakeClock()

    def decided(still: float | None, **more: Any) -> bool:
        loop: Any = SimpleNamespace(state=WatchState(state="healthy"), assessment=None)
        ask = watch_verb._Decided(loop, clock)
        answers = []
        for _ in range(9):
            now = clock.monotonic()
            since = began if still is None else now - still
            loop.assessment = Assessment("healthy", now, since, **{"live_requests": 3, **more})
            answers.append(ask())
            clock.sleep(0.5)
        return any(answers)

    began = clock.monotonic()
    assert not decided(None)
    assert decided(0.4)
    began = clock.monotonic()
    assert decided(None, reasons=("idle: no request in hand",))
    assert decided(None, live_requests=0)


def test_once_without_a_server_is_not_decided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["watch", "--url", "http://127.0.0.1:9", "--once", "--timeout", "2", "--json", "--out", str(tmp_path)])
    captured = capsys.readouterr()
    assert status == 5
    assert "no server" in captured.err
    assert json.loads(captured.out)["outcome"] == "inconclusive"


def test_pid_and_url_of_one_server_go_together_and_those_of_two_are_refused(
    stand_in: _Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--once", "--out", str(tmp_path)]
    with stand_in() as first, stand_in() as second:
        assert main(["watch", "--pid", str(first.engine()), "--url", first.base_url, *more]) == 0
        assert "cannot be checked" not in capsys.readouterr().err
        assert main(["watch", "--pid", str(first.pid), "--url", second.base_url, *more]) == 2
        assert f"is served by process {second.pid}" in " ".join(capsys.readouterr().err.split())
        # A URL whose listener is not seen from here (another machine, another namespace) is taken, and that is said.
        main(["watch", "--pid", str(first.pid), "--url", f"http://127.0.0.1:{_free_port()}", "--timeout", "3", *more])
        captured = capsys.readouterr()
    assert "cannot be checked" in " ".join((captured.err + captured.out).split())


def test_a_server_named_by_pid_and_url_is_found_again_after_a_restart(stand_in: _Make, tmp_path: Path) -> None:
    with stand_in() as server:
        finder = watched_server.WatchFinder(server.pid, server.base_url, None, SYSTEM)
        before = finder()
        assert before is not None
        assert (before.api_pid, before.base_url) == (server.pid, server.base_url)
        server.restart()
        after = finder()
        assert after is not None
        assert (after.api_pid, after.base_url) == (server.pid, server.base_url)
        assert after.api_pid != before.api_pid


def test_flags_of_watch_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--webhook", "file:///etc/passwd"]) == 2
    assert main(["watch", "--listen", "nowhere"]) == 2


class _Watch:
    """``watch`` as a process of its own, with its exporter."""

    def __init__(self, server: StandIn, folder: Path, *more: str) -> None:
        self.log = folder / "watch.log"
        self._out = self.log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dsv4_repro.repro", "watch", "--url", server.base_url, "--listen", "127.0.0.1:0",
             "--out", str(folder / "runs"), *more],
            stdin=subprocess.DEVNULL, stdout=self._out, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": package_path(), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip

    def text(self) -> str:
        """What it said, however its lines are broken."""
        return " ".join(self.log.read_text(errors="replace").split())

    def wait_for(self, words: str, seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while words not in self.text():
            assert time.monotonic() < until, f"no {words!r}: {self.text()[-3000:]}"
            assert self.process.poll() is None, self.text()[-3000:]
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, str]:
        base = self.text().split("serving ")[1].split("/metrics")[0]
        try:
            with urllib.request.urlopen(base + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._out.close()


def test_a_watch_lives_through_a_hang_and_a_restart(stand_in: _Make, tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    with stand_in(wedge=3, agent=True) as server:
        watch = _Watch(server, tmp_path, "--on-hang", f"echo $DSV4_REPRO_HANG_NUMBER >> {fired}", "--keep", "1")
        try:
            watch.wait_for("watching: ")
            assert watch.get("/livez")[0] == 200
            with _wedged(server):
                watch.wait_for("--on-hang: exit status 0", 60)
                status, text = watch.get("/livez")
                assert (status, text[:5]) == (503, "hung:")
                time.sleep(3.0)
                assert fired.read_text() == "1\n"
            server.restart()
            watch.wait_for("found again", 60)
            until = time.monotonic() + 20
            while watch.get("/livez")[0] != 200 and time.monotonic() < until:
                time.sleep(0.2)
            assert watch.get("/livez")[0] == 200
            with _wedged(server):
                until = time.monotonic() + 60
                while fired.read_text() != "1\n2\n" and time.monotonic() < until:
                    time.sleep(0.1)
            assert fired.read_text() == "1\n2\n"
            metrics = watch.get("/metrics")[1]
            assert "dsv4_repro_watch_hangs_total 2.0" in metrics
            assert "dsv4_repro_watch_restarts_total 1.0" in metrics
            watch.process.send_signal(signal.SIGTERM)
            assert watch.process.wait(20) == 0
        finally:
            watch.end()
    assert len(list((tmp_path / "runs" / "watch").iterdir())) == 1
    assert "Traceback" not in watch.text()


def test_a_watch_that_began_with_its_server_knows_its_workers(stand_in: _Make, tmp_path: Path) -> None:
    with stand_in(wedge=3, agent=True, wait=False, config_s=2.0, load_s=3.0) as server:
        watch = _Watch(server, tmp_path, "--pid", str(server.pid))
        try:
            watch.wait_for("watching: ")
            assert "0 worker(s); they are looked for as it starts" in watch.text()
            server.wait_serving()
            watch.wait_for("1 worker(s)", 40)
            with _wedged(server):
                watch.wait_for("kept in ", 60)
                worker = server.workers()[0]
        finally:
            watch.end()
    (run,) = (tmp_path / "runs" / "watch").iterdir()
    # The evidence is of all its processes.
    assert f"=== /proc/{worker}/status ===" in (run / "evidence" / "processes.txt").read_text()
    assert "Traceback" not in watch.text()


def test_a_canary_is_sent_once_the_server_has_a_url(stand_in: _Make) -> None:
    with stand_in() as server:
        bare = ServerTarget(None, api_pid=server.pid, tree={server.pid: "api"})
        observer = watch_verb._observe(
            bare, lambda *_, **__: None, SYSTEM, 0.3, lambda known: replace(known, base_url=server.base_url)
        )
        errors, until = set(), time.monotonic() + 20
        observer.start()
        try:
            while (seen := observer.latest()) is None or seen[0].canary_age_s is None:
                errors |= {seen[0].canary_error} if seen is not None else set()
                assert time.monotonic() < until, seen
                time.sleep(0.05)
            # With the URL its counters are read, too.
            assert observer.target.base_url == server.base_url
            while (seen := observer.latest()) is None or seen[0].engine is None:
                assert time.monotonic() < until, seen
                time.sleep(0.05)
        finally:
            observer.stop()
    assert "the server's URL is not known yet" in errors


def _resident(pid: int) -> float:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _children(pid: int) -> list[int]:
    """Running processes that it started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if int(parent) == pid and state not in "ZX":
                    found.append(int(entry.name))
    return found


def test_a_hang_leaves_nothing_of_its_capture_in_the_watch(stand_in: _Make, tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    with stand_in(wedge=3, agent=True) as server:
        watch = _Watch(server, tmp_path, "--on-hang", f"echo x >> {fired}")
        try:
            with _wedged(server):
                watch.wait_for("--on-hang: exit status 0", 60)
                assert "kept in " in watch.text()
                # What it takes is promised in docs/production.md; of the libraries that a capture needs none is mapped (typer
                # itself brings pydantic).
                assert _resident(watch.process.pid) < 100
                maps = Path(f"/proc/{watch.process.pid}/maps").read_text()
                assert [name for name in ("numpy", "z3", "psutil", "aiohttp") if name in maps] == []
                assert _children(watch.process.pid) == []
        finally:
            watch.end()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_an_end_during_a_capture_ends_that_too(stand_in: _Make, tmp_path: Path, number: signal.Signals, status: int) -> None:
    with stand_in(wedge=3, agent=True) as server:
        watch = _Watch(server, tmp_path)
        try:
            with _wedged(server):
                until = time.monotonic() + 60
                while not (children := _children(watch.process.pid)) and time.monotonic() < until:
                    time.sleep(0.02)
                time.sleep(0.5)
                watch.process.send_signal(number)
                assert watch.process.wait(30) == status
                until = time.monotonic() + 5
                while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < until:
                    time.sleep(0.05)
                assert children
                assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
        finally:
            watch.end()
    assert "Traceback" not in watch.text()


@pytest.mark.parametrize("trouble", ["killed", "full"])
def test_a_watch_survives_what_happens_to_a_capture(stand_in: _Make, tmp_path: Path, trouble: str) -> None:
    fired = tmp_path / "fired"
    with stand_in(wedge=3, agent=True) as server:
        if trouble == "full":
            # The folder of the runs cannot be made, as on a disk without space.
            (tmp_path / "runs").write_text("")
        watch = _Watch(server, tmp_path, "--on-hang", f"echo $DSV4_REPRO_HANG_NUMBER $DSV4_REPRO_OUTCOME >> {fired}")
        try:
            with _wedged(server):
                until = time.monotonic() + 60
                while trouble == "killed" and time.monotonic() < until:
                    if children := _children(watch.process.pid):
                        os.kill(children[0], signal.SIGKILL)
                        break
                    time.sleep(0.02)
                watch.wait_for("could not be kept", 60)
                watch.wait_for("--on-hang: exit status 0", 60)
                # The command went out with what the watch itself knows, and it goes on.
                assert fired.read_text() == "1 hang\n"
                assert watch.get("/livez")[0] == 503
            if trouble == "full":
                (tmp_path / "runs").unlink()
            server.restart()
            watch.wait_for("found again", 60)
            with _wedged(server):
                watch.wait_for("kept in ", 60)
        finally:
            watch.end()
    assert "Traceback" not in watch.text()


def test_ctrl_c_ends_it_with_its_command(stand_in: _Make, tmp_path: Path) -> None:
    with stand_in(wedge=3, agent=True) as server:
        # One that does not want to end, and a user who presses again and again.
        watch = _Watch(server, tmp_path, "--on-hang", f"trap '' TERM INT; echo $$ > {tmp_path}/pid; sleep 300")
        try:
            with _wedged(server):
                until = time.monotonic() + 60
                while not (tmp_path / "pid").exists() and time.monotonic() < until:
                    time.sleep(0.1)
                time.sleep(0.2)
                until = time.monotonic() + 30
                while watch.process.poll() is None and time.monotonic() < until:
                    watch.process.send_signal(signal.SIGINT)
                    time.sleep(0.3)
                # The last one may meet the interpreter's own end; a shell says 130 of both.
                assert watch.process.wait(1) in (130, -signal.SIGINT)
        finally:
            watch.end()
    command = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{command}").exists()


# -- probe -------------------------------------------------------------------------------------------------------------------------


def _probe(*words: str) -> tuple[int, dict[str, Any], float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_repro.repro", "probe", "--json", *words],
        capture_output=True, env={**os.environ, "PYTHONPATH": package_path()}, timeout=30, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    document: dict[str, Any] = json.loads(done.stdout)
    assert b"Traceback" not in done.stderr
    assert document["exit_status"] == done.returncode
    return done.returncode, document, seconds


def test_probe_with_recorders(stand_in: _Make) -> None:
    with stand_in(wedge=3, agent=True) as server:
        folder = str(server.agent_folder)
        clients = list(server.drain(lengths=(4000,)))
        time.sleep(1.0)
        assert _probe("--max-stall", "2", "--agent-dir", folder)[0] == 0
        for client in clients:
            client.kill()
            client.wait()
        with _wedged(server):
            time.sleep(2.5)
            status, document, seconds = _probe("--max-stall", "2", "--agent-dir", folder)
            assert (status, document["state"], document["outcome"]) == (3, "stalled", "hang")
            assert document["stalled_s"] > 2
            # It is called every few seconds on two slow cores.
            assert seconds < 5
            assert _probe("--max-stall", "2", "--pid", str(server.pid))[0] == 3
            assert _probe("--max-stall", "500", "--agent-dir", folder)[0] == 0


def test_probe_by_counters_needs_two_looks(stand_in: _Make, tmp_path: Path) -> None:
    state = tmp_path / "own" / "probe.json"
    with stand_in(wedge=3) as server, _wedged(server):
        words = ("--max-stall", "1.5", "--url", server.base_url, "--state", str(state))
        assert _probe(*words)[0] == 0
        time.sleep(1.6)
        status, document, _ = _probe(*words)
        assert (status, document["state"]) == (3, "stalled")
        assert oct(state.stat().st_mode & 0o777) == "0o600"
    status, document, _ = _probe(*words)
    assert (status, document["state"]) == (5, "unknown")


def test_probe_of_nothing_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--max-stall", "10"]) == 2
    assert "nothing to probe" in capsys.readouterr().err


@pytest.mark.parametrize("modules", ["probe_verb", "watch_verb, dsv4_repro.repro.serving.observer, dsv4_repro.repro.serving.ranks"])
def test_probe_and_watch_import_little(modules: str) -> None:
    code = (
        "import sys, time\n"
        f"import dsv4_repro.repro.{modules}\n"
        "heavy = {'torch', 'aiohttp', 'pydantic', 'numpy', 'pynvml', 'z3', 'rich', 'jinja2', 'psutil'} & set(sys.modules)\n"
        "print(sorted(heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONPATH": package_path()}, timeout=30, check=True
    )
    assert done.stdout.decode().strip() == "[]"
