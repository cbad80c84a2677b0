"""The process that captures a hang: its death, its silence, its garbage and a full disk cost this capture alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.clock import SYSTEM
from dsv4_repro.errors import RunStoreError
from dsv4_repro.repro.child import package_path
from dsv4_repro.repro.runstore import RunStore
from dsv4_repro.repro.serving import hang_process
from dsv4_repro.repro.serving.hang_document import encode_hang
from dsv4_repro.repro.serving.hang_process import HangKept, capture_in_process
from dsv4_repro.repro.serving.hang_run import diagnosis_of_samples, keep_hang
from dsv4_repro.repro.serving.records import Assessment, Rank, ServerTarget, Snapshot
from dsv4_repro.repro.serving.watch_loop import Hang

CHILD = [sys.executable, "-P", "-m", "dsv4_repro.repro.serving.hang_child"]
ANSWER = {"outcome": "hang", "class": "unknown", "cause": None, "confidence": "low", "signature": None, "sentence": "s"}


def _hang(lines: int = 3, **more: Any) -> Hang:
    """Of a worker that is gone: nothing can be read of it, so a capture is quick."""
    now = SYSTEM.monotonic()
    target = ServerTarget(base_url=None, ranks=(Rank(2**22 + 5, 0, 1),))
    assessment = Assessment("hung", now, now - 3, ("nothing moves",), ("its step has not ended",), live_requests=3)
    recent = tuple(("sample", {"wall": 1.0, "state": "healthy", "filler": "x" * 200}) for _ in range(lines))
    return Hang(target, Snapshot(at=now), assessment, recent, 1, **more)


def test_a_diagnosis_that_cannot_be_written_leaves_a_finished_record_and_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any) -> None:
        raise RunStoreError("cannot write: the disk or the quota is full", path="diagnosis.json")

    monkeypatch.setattr(RunStore, "write_diagnosis", full)
    with pytest.raises(RunStoreError, match="the disk or the quota is full"):
        keep_hang(_hang(), tmp_path, lambda hang, *_: diagnosis_of_samples(hang), attach=False, command=[])
    (run,) = (tmp_path / "watch").iterdir()
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["outcome"], record["exit_status"]) == ("finished", "hang", 3)
    assert "diagnosis.json" in record["error"]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _gone(path: Path, seconds: float = 5.0) -> bool:
    """Whether the process whose pid the file has has ended."""
    until = time.monotonic() + seconds
    pid = int(path.read_text())
    while _alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not _alive(pid)


def _with(script: str, folder: Path, **more: Any) -> HangKept:
    """A program of the test in the child's place."""
    return capture_in_process(_hang(), folder, attach=False, argv=[sys.executable, "-c", script], **more)


def _known(kept: HangKept) -> None:
    """What the watchdog knows without the capture is there."""
    assert (kept.verdict.outcome, kept.verdict.class_, kept.verdict.confidence) == ("hang", "gpu-kernel-stuck", "low")
    assert "its step has not ended" in kept.verdict.sentence


def test_a_capture_comes_back_with_its_run_directory(tmp_path: Path) -> None:
    # More lines than a pipe holds: they are written while the child reads.
    kept = capture_in_process(_hang(1200), tmp_path, attach=False)
    assert (kept.lost, kept.stopped) == ("", False)
    assert kept.verdict.outcome == "hang"
    assert kept.run is not None
    assert kept.run.parent == tmp_path / "watch"
    assert json.loads((kept.run / "diagnosis.json").read_text())["outcome"] == "hang"
    assert json.loads((kept.run / "run.json").read_text())["state"] == "finished"
    assert (kept.run / "report.md").is_file()
    lines = [json.loads(line) for line in (kept.run / "timeline.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "sample" for line in lines) == 1200


def test_its_death_is_told_and_what_it_wrote_is_named(tmp_path: Path) -> None:
    kept = _with(f"import json, os\nprint(json.dumps({{'run': {str(tmp_path)!r}}}), flush=True)\nos.kill(os.getpid(), 9)", tmp_path)
    _known(kept)
    assert "ended by signal 9" in kept.lost
    assert kept.run == tmp_path
    assert str(tmp_path) in kept.help_text


def test_a_defect_in_it_is_told_by_its_last_line(tmp_path: Path) -> None:
    kept = _with("raise RuntimeError('boom')", tmp_path)
    _known(kept)
    assert "exit status 1 (RuntimeError: boom)" in kept.lost
    assert kept.run is None


def test_one_that_does_not_end_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_process, "_GRACE_S", 0.5)
    script = (
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "other = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        f"open({str(tmp_path / 'other')!r}, 'w').write(str(other.pid))\n"
        f"open({str(tmp_path / 'own')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(300)\n"
    )
    began = time.monotonic()
    kept = _with(script, tmp_path, seconds=2.0)
    assert time.monotonic() - began < 10
    _known(kept)
    assert "did not end within 2 s" in kept.lost
    assert _gone(tmp_path / "own")
    assert _gone(tmp_path / "other")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("print('hello')", "no answer"),
        ("print('[1]')", "no answer"),
        ("print('[' * 100000)", "no answer"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\0' * 100 + b'\\n')", "no answer"),
        ("print('{\"done\": {}}')", "no verdict"),
        ("print('{\"done\": {\"verdict\": {\"outcome\": \"fine\"}}}')", "none of ours"),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", "wrote more than"),
        ("import sys\nwhile True: sys.stderr.write('x' * 65536 + chr(10))", "did not end within"),
        ("", "exit status 0"),
    ],
)  # fmt: skip
def test_garbage_is_told(script: str, why: str, tmp_path: Path) -> None:
    kept = _with(script, tmp_path, seconds=3.0)
    _known(kept)
    assert why in kept.lost
    assert len(kept.lost) < 1000


def test_one_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    kept = capture_in_process(_hang(), tmp_path, attach=False, argv=["/nonexistent/python"])
    _known(kept)
    assert "could not be started" in kept.lost


def test_a_full_disk_costs_the_evidence_and_not_the_verdict(tmp_path: Path) -> None:
    kept = capture_in_process(
        _hang(), tmp_path, attach=False, argv=["/bin/sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *CHILD]
    )  # fmt: skip
    assert kept.verdict.outcome == "hang"
    assert "write" in kept.lost
    assert "no answer" not in kept.lost
    assert "Traceback" not in kept.lost


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = capture_in_process(_hang(), tmp_path / "file", attach=False)
    assert kept.verdict.outcome == "hang"
    assert "create the run directory" in kept.lost


def test_a_debugger_that_is_attached_is_never_killed(tmp_path: Path) -> None:
    debugger = tmp_path / "cuda-gdb"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", debugger)
    debugger.chmod(0o755)
    script = (
        "import os, subprocess, time\n"
        f"one = subprocess.Popen([{str(debugger)!r}, '300'], start_new_session=True)\n"
        "two = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        f"open({str(tmp_path / 'other')!r}, 'w').write(str(two.pid))\n"
        f"open({str(tmp_path / 'one')!r}, 'w').write(str(one.pid))\n"
        "time.sleep(300)\n"
    )
    try:
        said: list[str] = []
        kept = _with(script, tmp_path, seconds=2.0, say=lambda text, **_: said.append(text))
        _known(kept)
        assert _gone(tmp_path / "other")
        assert [f"(pid {(tmp_path / 'one').read_text()}) is left alone" in text for text in said] == [True]
        assert _alive(int((tmp_path / "one").read_text()))
    finally:
        os.kill(int((tmp_path / "one").read_text()), signal.SIGKILL)


def test_an_end_of_the_watch_ends_it(tmp_path: Path) -> None:
    began = time.monotonic()
    script = f"import os, time; open({str(tmp_path / 'own')!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    kept = _with(script, tmp_path, stop=lambda: time.monotonic() - began > 1.0)
    assert kept.stopped
    assert time.monotonic() - began < 8
    assert _gone(tmp_path / "own")


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    def interrupt() -> bool:
        if (tmp_path / "own").exists():
            raise KeyboardInterrupt
        return False

    script = f"import os, time; open({str(tmp_path / 'own')!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    with pytest.raises(KeyboardInterrupt):
        _with(script, tmp_path, stop=interrupt)
    assert _gone(tmp_path / "own")


def test_that_the_server_moves_again_is_heard(tmp_path: Path) -> None:
    script = (
        "import json, sys\nsys.stdin.readline()\nmoved = json.loads(sys.stdin.readline())['moved']\n"
        f"verdict = {ANSWER!r}\nverdict['sentence'] = moved\nprint(json.dumps({{'say': 'a'}}))\n"
        "print(json.dumps({'done': {'verdict': verdict}}))\n"
    )
    said: list[str] = []
    argv = [sys.executable, "-c", script]
    hang = _hang(moved=lambda: "it is healthy")
    kept = capture_in_process(hang, tmp_path, attach=False, argv=argv, say=lambda text, **_: said.append(text), seconds=20)
    assert (kept.lost, kept.verdict.sentence, said) == ("", "it is healthy", ["a"])


def test_the_real_one_does_not_outlive_a_watch_that_was_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": package_path()}
    with subprocess.Popen(CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(encode_hang(_hang(), root=tmp_path, attach=False))
        child.stdin.flush()
        assert "run" in json.loads(child.stdout.readline())
        child.stdin.close()
        try:
            assert child.wait(20) == 130
        finally:
            child.kill()


@pytest.mark.parametrize("line", [b"", b"{}\n", b"garbage"])
def test_the_real_one_refuses_what_is_no_hang(line: bytes) -> None:
    environment = {**os.environ, "PYTHONPATH": package_path()}
    done = subprocess.run(CHILD, input=line, capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (70, b"")
    assert done.stderr.startswith(b"EvidenceError: ")
