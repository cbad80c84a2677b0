"""Faults while ``run drain --on server`` works: typed answers, a readable run directory, nobody left behind.

The server is the stand-in (a test double). Runs of one test go side by side: they wait more than they compute.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsv4_repro.repro.leftovers import RUN_VARIABLE, end_leftovers, find_leftovers
from dsv4_repro.repro.runread import open_run, read_timeline
from dsv4_repro.repro.serving.load_plan import LoadPlan

SITE = Path(__file__).parents[2] / "standin" / "site"
LENGTHS = [(64, 40), (65, 400), (66, 400), (67, 400)]

pytestmark = pytest.mark.server_faults


@dataclass
class Run:
    """One run of the verb in its own process. ``folder``: its run directory."""

    process: subprocess.Popen[bytes]
    folder: Path
    out: Path
    err: Path
    status: int | None = None

    def wait(self, seconds: float = 90.0) -> int:
        self.status = self.process.wait(seconds)
        return self.status

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.read_text(encoding="utf-8"))
        return found

    @property
    def told(self) -> str:
        return " ".join(self.err.read_text(encoding="utf-8", errors="replace").split())

    def has(self, words: str) -> bool:
        """Whether the timeline has these words (no space after a colon)."""
        path = self.folder / "timeline.jsonl"
        return path.exists() and words in path.read_text(encoding="utf-8").replace(": ", ":")

    def until(self, words: str, seconds: float = 45.0) -> None:
        end = time.monotonic() + seconds
        while not self.has(words):
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {words}: {self.told[-1500:]}"
            assert time.monotonic() < end, f"no {words}"
            time.sleep(0.02)

    def left(self) -> list[int]:
        """Processes that carry the run's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(RUN_VARIABLE) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (psutil.Error, OSError):
                continue
        return found

    def readable(self) -> str:
        """The run directory can be opened and its timeline read; its state."""
        assert self.timeline()
        return open_run(self.folder).run.state

    def timeline(self) -> list[dict[str, Any]]:
        """The lines of its timeline, all of them readable."""
        found = []
        for line in read_timeline(self.folder):
            assert isinstance(line, dict), line
            found.append(line)
        return found


@dataclass
class Runs:
    """Starts runs, and ends all that is left of them after the test."""

    base: Path
    begun: list[Run] = field(default_factory=list)

    def __call__(self, switches: str = "", *words: str, out: Path | None = None, before: tuple[str, ...] = ()) -> Run:
        place = self.base / str(len(self.begun))
        place.mkdir()
        plan = place / "load.json"
        LoadPlan.from_lengths(LENGTHS, live=3, max_model_len=16384).write(plan)
        folder = out or place / "run"
        path = os.pathsep.join(part for part in (str(SITE), os.environ.get("PYTHONPATH", "")) if part)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DSV4_REPRO", "VLLM_", "CUDA_"))}
        command = [
            *before, sys.executable, "-m", "dsv4_repro.repro", "run", "drain", "--on", "server", "--model", "dummy", "--json",
            "--plan", str(plan), "--out", str(folder), *words,
        ]  # fmt: skip
        with (place / "out").open("wb") as stdout, (place / "err").open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**kept, "STANDIN": f"step_ms=4 {switches}", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            )
        self.begun.append(Run(process, folder, place / "out", place / "err"))
        return self.begun[-1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path)
    yield runs
    for one in runs.begun:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
        for pid in one.left():
            os.kill(pid, signal.SIGKILL)


Start = Callable[..., Run]


def test_a_server_that_dies_in_any_phase_of_its_start_is_a_typed_error(run: Start) -> None:
    runs = {phase: run(f"die_in={phase}") for phase in ("config", "download", "compile", "profile", "api")}
    for phase, one in runs.items():
        assert one.wait() == 5, phase
        assert one.document["error"] == "ServerError"
        assert "RuntimeError: stand-in" in one.document["message"], phase
        assert one.readable() == "failed"
        assert one.left() == []


def test_a_start_that_says_nothing_ends_with_the_time_and_names_its_phase(run: Start) -> None:
    one = run("stop_in=load", "--timeout", "6")
    assert one.wait() == 5
    assert one.document["error"] == "DeadlineError"
    assert "it waits for" in one.document["message"]
    assert one.left() == []


@pytest.mark.parametrize("spoilt", [("metrics=hang", "metrics=malformed"), ("metrics=gone", "metrics=huge", "health=hang")])
def test_a_wedge_is_found_whatever_its_windows_do(run: Start, spoilt: tuple[str, ...]) -> None:
    runs = {how: run(f"wedge=3 {how}") for how in spoilt}
    for how, one in runs.items():
        assert one.wait() == 3, (how, one.told[-800:])
        assert one.document["outcome"] == "hang"
        assert one.document["verdict"]["cause"] == "peer-left"
        assert one.left() == []
        hung = next(line for line in one.timeline() if line["kind"] == "hung")
        assert hung["detail"]["stood_still_s"] <= 5.0, how


def test_a_log_that_is_rotated_or_cut_off_ends_nothing(run: Start) -> None:
    renamed, cut = run("wedge=3"), run("wedge=3")
    for one in (renamed, cut):
        one.until('"kind":"ready"')
    log = renamed.folder / "server" / "vllm.log"
    log.rename(log.with_suffix(".1"))
    os.truncate(cut.folder / "server" / "vllm.log", 0)
    for one in (renamed, cut):
        assert one.wait() == 3, one.told[-800:]
        assert one.document["verdict"]["cause"] == "peer-left"
        assert one.left() == []


def test_a_worker_that_is_killed_under_the_capture_is_told_and_ends_nothing(run: Start) -> None:
    one = run("wedge=3")
    one.until('"kind":"hung"')
    workers = [pid for pid in one.left() if psutil.Process(pid).cmdline()[:1] == ["VLLM::Worker"]]
    os.kill(workers[0], signal.SIGKILL)
    assert one.wait() in (3, 4, 5)
    assert one.document["outcome"] in ("hang", "other", "inconclusive")
    assert one.readable() == "finished"
    assert one.left() == []


def test_clients_that_are_cut_off_are_no_hang(run: Start) -> None:
    one = run("reset=1", "--timeout", "8")
    assert one.wait() in (0, 5)
    assert "hang" not in one.document.get("outcome", "")
    assert one.left() == []


def _room(size: str, place: Path) -> tuple[str, ...]:
    """Words before a command that give it a file system of that size at ``place``; skips where that is not allowed."""
    unshare = shutil.which("unshare")
    mount = f"mount -t tmpfs -o size={size} tmpfs {place}"
    if unshare is None or subprocess.run([unshare, "-r", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here (unshare -r -m)")
    return (unshare, "-r", "-m", "sh", "-c", f'{mount} && exec "$@"; status=$?', "sh")


@pytest.mark.parametrize("size", ["100k", "330k"])
def test_a_full_disk_is_said_and_the_server_is_ended(run: Start, tmp_path: Path, size: str) -> None:
    """Full before the server is up: an error. Full after the hang was found: the hang is told all the same, and what is missing."""
    place = tmp_path / "small"
    place.mkdir()
    one = run("wedge=3", out=place / "run", before=_room(size, place))
    status = one.wait()
    if size == "330k" and status == 3:
        assert one.document["outcome"] == "hang"
        assert any("full" in item["why"] for item in one.document["unread"])
    else:
        assert status == 5, one.told[-800:]
        assert one.document["error"] == "RunStoreError"
        assert "full" in one.document["message"]
    assert "full" in one.told
    assert one.left() == []


def test_a_run_directory_that_vanishes_leaves_nobody_behind(run: Start) -> None:
    one = run("wedge=3", "--timeout", "12")
    one.until('"kind":"ready"')
    shutil.rmtree(one.folder)
    assert one.wait() in (3, 4, 5), one.told[-800:]
    assert "Traceback" not in one.told
    assert one.left() == []


def test_two_runs_into_one_directory_do_not_mix(run: Start) -> None:
    first = run("wedge=3")
    first.until('"kind":"ready"')
    second = run("", out=first.folder)
    assert second.wait() in (2, 5)
    assert "Traceback" not in second.told
    assert first.wait() == 3, first.told[-800:]
    assert first.readable() == "finished"


def test_ctrl_c_at_many_points_is_130_and_leaves_nobody(run: Start) -> None:
    """Four at a time, a new point each 0.7 s from before the run directory exists to after the verdict."""
    for batch in range(3):
        runs = [run("wedge=3 load_s=0.5") for _ in range(4)]
        begun = time.monotonic()
        for place, one in enumerate(runs):
            time.sleep(max(begun + 0.35 + 0.7 * (4 * batch + place) - time.monotonic(), 0.0))
            one.process.send_signal(signal.SIGINT)
        for one in runs:
            status = one.wait(60)
            assert status in (130, 3), (status, one.told[-800:])
            assert "Traceback" not in one.told
            assert one.left() == []
            if (one.folder / "run.json").exists():
                assert one.readable() == ("interrupted" if status == 130 else "finished")


def test_a_cancelled_job_leaves_nobody(run: Start) -> None:
    runs = [run("wedge=3"), run("wedge=3")]
    for one, number in zip(runs, (signal.SIGTERM, signal.SIGHUP), strict=True):
        one.until('"kind":"ready"')
        one.process.send_signal(number)
    for one in runs:
        assert one.wait(60) == 130
        assert one.left() == []
        assert one.readable() == "interrupted"


def test_after_kill_9_at_any_point_the_doctor_cleans_up(run: Start) -> None:
    runs = [run("wedge=3 load_s=1"), run("wedge=3"), run("wedge=3"), run("wedge=3")]
    for one, words in zip(runs, ('"state":"starting"', '"kind":"ready"', '"state":"hung"', '"kind":"capture"'), strict=True):
        one.until(words)
        one.process.kill()
        one.wait()
    time.sleep(0.3)
    assert all(one.left() for one in runs), "the servers run on"
    done = subprocess.run([sys.executable, "-m", "dsv4_repro.repro", "doctor", "--json"], capture_output=True, timeout=120)
    told = {item["pid"] for item in json.loads(done.stdout)["leftovers"]}
    folders = {str(one.folder) for one in runs}
    # Those of this test alone: other tests have theirs.
    mine = [item for item in find_leftovers() if item.run in folders]
    assert {item.pid for item in mine} <= told
    assert set(end_leftovers(mine).values()) <= {"ended", "killed", "gone"}
    for one in runs:
        assert one.left() == []
        assert one.readable() == "running"
    hung = [line["kind"] for line in runs[3].timeline()]
    assert "hung" in hung


def test_a_watch_that_cannot_keep_evidence_still_calls_for_help(stand_in: Any, tmp_path: Path) -> None:
    """Where its run directory should be is a file; the command writes more than a pipe holds before it does its work."""
    fired = tmp_path / "fired"
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "watch").write_text("in the way")
    with stand_in(wedge=3, agent=True, step_ms=4) as server:
        clients = server.drain()
        try:
            server.wait_state(wedged=True)
            command = f'head -c 300000 /dev/zero; echo "$DSV4_REPRO_OUTCOME [$DSV4_REPRO_RUN]" > {fired}'
            done = subprocess.run(
                [sys.executable, "-m", "dsv4_repro.repro", "watch", "--url", server.base_url, "--once", "--listen", "off",
                 "--out", str(tmp_path / "runs"), "--on-hang", command],
                capture_output=True, text=True, timeout=90,
            )  # fmt: skip
        finally:
            for client in clients:
                client.kill()
                client.wait()
    assert done.returncode == 3, done.stderr
    assert "could not be kept" in done.stdout + done.stderr
    assert fired.read_text() == "hang []\n"
