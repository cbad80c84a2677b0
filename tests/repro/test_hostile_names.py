"""Names that no file can have, or that an unset variable left empty, are said in a sentence; what is unpacked keeps its name."""

from __future__ import annotations

import gzip
import lzma
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_repro.forensics.evidence.opening import read_what_comes
from dsv4_repro.repro.__main__ import main

CORE = Path(__file__).resolve().parent.parent / "fixtures" / "cores" / "healthy.nvcudmp.xz"
PACKERS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress}
VERBS = [
    ["autopsy"], ["report"], ["bundle"], ["minimise"], ["hunt"], ["hunt", "--status"], ["audit", "--offline"],
    ["bisect", "--builds"], ["verify", "drain", "--plan"], ["agent", "show"],
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a/" * 3000, "loop", "loop/x", "file/x"], ids=lambda name: name[:6])
def test_a_path_that_the_system_refuses_is_no_fault_of_ours(
    verb: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("file").write_text("x")
    assert main([*verb, name]) in (2, 5)
    said = capsys.readouterr().err
    assert name[:8] in said
    assert "Traceback" not in said


@pytest.mark.parametrize("out", ["file/x", "file/x.zip", "x" * 300])
def test_a_bundle_that_cannot_be_written_is_said(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("run").mkdir()
    (tmp_path / "run" / "run.json").write_text(
        '{"schema": "dsv4-repro/run/1", "scenario": "drain", "ground": "cpu", "state": "finished"}'
    )
    assert main(["bundle", "run", "--out", out]) == 5
    assert "cannot write" in capsys.readouterr().err


def test_an_empty_name_is_not_the_folder_one_is_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autopsy", ""]) == 2
    assert main(["autopsy", str(CORE), ""]) == 2
    assert "empty name" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["..", ".", "...", "a", "a\nb\x1b[31m", "x" * 250])
@pytest.mark.parametrize("suffix", PACKERS)
def test_a_packed_dump_of_any_name_is_read_and_a_damaged_one_is_named_as_given(
    name: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lzma.open(CORE) as stream:
        raw = stream.read()
    path = tmp_path / (name + suffix)
    path.write_bytes(PACKERS[suffix](raw))
    assert main(["autopsy", str(path)]) == 5
    assert "healthy_worker" in capsys.readouterr().out
    for cut in (4, 63, 9000, len(raw) - 100):
        path.write_bytes(PACKERS[suffix](raw[:cut]))
        for given in (path, tmp_path):  # alone, and as a part of a folder
            assert main(["autopsy", str(given)]) == 5
            said = capsys.readouterr()
            text = (said.err + said.out).replace("\n", "").replace(" ", "")
            assert (str(tmp_path) if given == path else name[:1]) in text
            assert f"{tempfile.gettempdir()}/dsv4" not in text
            assert f"{tempfile.gettempdir()}/tmp" not in text


PIPED = [
    ["hunt", "PIPE"], ["verify", "drain", "--on", "cpu", "--plan", "PIPE"], ["run", "drain", "--on", "cpu", "--plan", "PIPE"],
    ["audit", "--offline", "vllm==0.27.1", "--recipe", "PIPE"], ["autopsy", "PIPE"], ["report", "PIPE"], ["bundle", "PIPE"],
    ["minimise", "PIPE"], ["audit", "--offline", "PIPE"], ["hunt", "--status", "PIPE"],
]  # fmt: skip


@pytest.mark.parametrize("written", [False, True], ids=["nobody writes", "somebody holds it open"])
@pytest.mark.parametrize("words", PIPED, ids=lambda words: " ".join(words[:3]))
def test_a_pipe_in_a_files_place_is_not_waited_for(words: list[str], written: bool, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR) if written else None
    try:
        argv = [sys.executable, "-m", "dsv4_repro.repro", *(str(pipe) if word == "PIPE" else word for word in words)]
        done = subprocess.run(
            argv, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=40.0, check=False
        )
    finally:
        if held is not None:
            os.close(held)
    assert done.returncode in (2, 5)
    assert "Traceback" not in done.stderr
    assert pipe.name in done.stderr


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_a_plan_and_a_recipe_may_come_through_a_pipe_that_is_filled_a_little_later(seconds: float, tmp_path: Path) -> None:
    """``hunt <(command)``: the shell opens the pipe before the command has written a word."""
    reading, writing = os.pipe()
    text = b'name = "piped"\non = "cpu"\n[budget]\ntrials = 3\n[matrix]\nkernel = ["builtin"]\n'

    def write() -> None:
        time.sleep(seconds)
        with os.fdopen(writing, "wb") as stream:
            stream.write(text)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert read_what_comes(Path(f"/dev/fd/{reading}"), 1 << 20) == text
    finally:
        thread.join(10.0)
        os.close(reading)


def test_no_more_is_read_than_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"x" * 100)
    assert read_what_comes(path, 10) == b"x" * 10
    assert read_what_comes(path, 1000) == b"x" * 100
