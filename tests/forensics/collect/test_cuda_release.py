"""Releasing again and again in one attach, with a program in cuda-gdb's place; judged by a reading of the real card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.collect.cuda_gdb import CudaGdb, probe_cuda_gdb
from dsv4_repro.forensics.collect.cuda_release import ReleaseOutcome, Releaser, Verdict, release_events
from dsv4_repro.forensics.diagnose import diagnose_transcript
from dsv4_repro.kernels.abi import RELEASE_COUNT
from dsv4_repro.repro.serving.unwedge_plan import judge_diagnosis

PATIENT = Path(__file__).parent / "gdb_patient.py"


@pytest.fixture
def tool(tmp_path: Path) -> CudaGdb:
    script = tmp_path / "cuda-gdb"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {PATIENT} "$@"\n')
    script.chmod(0o755)
    found = probe_cuda_gdb(script, tmp_path / "probe")
    assert found.python == (3, 11)
    return found


@pytest.fixture
def target() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def release(tool: CudaGdb, target: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(judge: Callable[[str], Verdict] | None = None, more: dict[str, Any] | None = None, **fake: Any) -> ReleaseOutcome:
        monkeypatch.setenv("FAKE_GDB", json.dumps(fake))

        def real(text: str) -> Verdict:
            path = tmp_path / "reading.txt"
            path.write_text(text)
            return judge_diagnosis(diagnose_transcript(path, ground="process", hung=True))

        options = {"most": 100, "total_s": 20.0, "pause_s": 0.02, **(more or {})}
        return Releaser(target.pid, tmp_path / "out", tool, judge or real, value=RELEASE_COUNT, **options).run()

    return run


def test_a_real_reading_is_judged_and_42_launches_are_released_in_one_attach(release: Any) -> None:
    done = release(launches=42)
    assert (done.state, done.writes, done.stops) == ("released", 42, 43)
    assert done.pid is None
    assert done.transcript is not None
    assert "stage done" in done.transcript.read_text()


def test_a_reading_that_is_not_the_known_wait_leaves_everything_as_it_is(release: Any) -> None:
    done = release(lambda text: Verdict(why="another kernel"), launches=3)
    assert (done.state, done.why, done.writes) == ("refused", "another kernel", 0)


def test_a_refused_attach_is_told_with_its_remedy(release: Any) -> None:
    done = release(refuse=True)
    assert done.state == "failed"
    assert "ptrace is refused" in done.why
    assert "SYS_PTRACE" in done.why


def test_a_debugger_that_dies_in_the_middle_is_told(release: Any) -> None:
    done = release(launches=3, die=True)
    assert done.state == "failed"
    assert "without detaching" in done.why
    assert done.writes == 1


def test_nothing_left_to_release_is_no_release(release: Any, tmp_path: Path) -> None:
    done = release(lambda text: Verdict("persistent_topk_kernel", (1,), 1), launches=0)
    assert done.state == "nothing"
    assert "no persistent_topk_kernel is resident" in done.why


def test_asked_to_stop_it_detaches_at_the_next_stop(
    tool: CudaGdb, target: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GDB", json.dumps({"launches": 100_000}))

    def judge(text: str) -> Verdict:
        path = tmp_path / "reading.txt"
        path.write_text(text)
        return judge_diagnosis(diagnose_transcript(path, ground="process", hung=True))

    one = Releaser(target.pid, tmp_path / "out", tool, judge, value=RELEASE_COUNT, most=100_000, pause_s=0.02)
    found: list[ReleaseOutcome] = []
    thread = threading.Thread(target=lambda: found.append(one.run()))
    thread.start()
    end = time.monotonic() + 20
    while not (one.transcript.exists() and '"wrote"' in one.transcript.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    one.stop()
    thread.join(10)
    assert found
    assert found[0].state == "released"
    assert found[0].why == "asked to stop"


def test_it_ends_by_itself_when_its_starter_is_killed(tool: CudaGdb, target: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The tool is killed in the middle: the debugger goes on, releases what is left, detaches, quits."""
    code = (
        "import sys; from pathlib import Path\n"
        "from dsv4_repro.forensics.collect.cuda_gdb import CudaGdb\n"
        "from dsv4_repro.forensics.collect.cuda_release import Releaser, Verdict\n"
        f"Releaser({target.pid}, Path({str(tmp_path / 'out')!r}), CudaGdb(Path({str(tool.path)!r}), '', (3, 11)),\n"
        f"    lambda text: Verdict('persistent_topk_kernel', ({0x7F3CCCA89668},), 1), value={RELEASE_COUNT}, most=100,\n"
        "    total_s=20.0, pause_s=0.1).run()\n"
    )
    environment = {**os.environ, "FAKE_GDB": json.dumps({"launches": 20}), "PYTHONPATH": os.pathsep.join(sys.path)}
    starter = subprocess.Popen([sys.executable, "-c", code], env=environment)
    transcript = tmp_path / "out" / "cuda_gdb_release.txt"
    end = time.monotonic() + 20
    while not (transcript.exists() and '"wrote"' in transcript.read_text()):
        assert time.monotonic() < end
        assert starter.poll() is None
        time.sleep(0.02)
    starter.kill()
    starter.wait()
    before = len(release_events(transcript.read_text()))
    while "stage done" not in transcript.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    events = release_events(transcript.read_text())
    assert len(events) > before
    assert events[-1]["writes"] == 20
    assert target.poll() is None


def test_a_cuda_gdb_without_python_is_refused_before_it_is_started(tmp_path: Path) -> None:
    done = Releaser(1, tmp_path, CudaGdb(tmp_path / "none", "", None), lambda text: Verdict(), value=1, most=1).run()
    assert done.state == "failed"
    assert "no Python" in done.why
