"""Which run directories go, and which never do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dsv4_repro.repro.serving.run_retention import prune_runs, size_of


def _run(root: Path, number: int, size: int = 1000, scenario: str = "watch") -> Path:
    path = root / f"20261129T12{number:04d}Z-{number:06x}"
    (path / "evidence").mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"scenario": scenario}))
    (path / "evidence" / "x").write_bytes(b"x" * size)
    return path


def test_the_oldest_beyond_the_number_go(tmp_path: Path) -> None:
    runs = [_run(tmp_path, number) for number in range(5)]
    assert prune_runs(tmp_path, keep=3, max_bytes=1 << 30) == runs[:2]
    assert sorted(tmp_path.iterdir()) == runs[2:]


def test_the_oldest_beyond_the_size_go_but_never_the_newest(tmp_path: Path) -> None:
    runs = [_run(tmp_path, number, size=5000) for number in range(4)]
    assert prune_runs(tmp_path, keep=99, max_bytes=2 * size_of(runs[0]) + 10) == runs[:2]
    assert prune_runs(tmp_path, keep=99, max_bytes=1) == [runs[2]]
    assert runs[3].exists()


def test_what_is_not_of_watch_stays(tmp_path: Path) -> None:
    other = _run(tmp_path, 0, scenario="drain")
    named = tmp_path / "notes"
    named.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "run.json").write_text(json.dumps({"scenario": "watch"}))
    link = tmp_path / "20261129T110000Z-0000ff"
    link.symlink_to(outside)
    damaged = tmp_path / "20261129T110001Z-0000fe"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    newest = _run(tmp_path, 9)
    assert prune_runs(tmp_path, keep=1, max_bytes=1) == []
    for path in (other, named, outside, link, damaged, newest):
        assert path.exists()


def test_no_folder_is_no_error(tmp_path: Path) -> None:
    assert prune_runs(tmp_path / "none", keep=1, max_bytes=1) == []


def test_what_another_watch_still_writes_stays_and_what_a_killed_one_left_goes(tmp_path: Path) -> None:
    runs = [_run(tmp_path, number) for number in range(4)]
    for path in runs[:2]:
        (path / "run.json").write_text(json.dumps({"scenario": "watch", "state": "running"}))
    os.utime(runs[0] / "run.json", (1.0, 1.0))
    assert prune_runs(tmp_path, keep=1, max_bytes=1 << 30) == [runs[0], runs[2]]
    assert sorted(tmp_path.iterdir()) == [runs[1], runs[3]]


def test_a_pipe_in_the_records_place_holds_nobody_up(tmp_path: Path) -> None:
    runs = [_run(tmp_path, number) for number in range(3)]
    (runs[0] / "run.json").unlink()
    os.mkfifo(runs[0] / "run.json")
    assert prune_runs(tmp_path, keep=1, max_bytes=1 << 30) == [runs[1]]


def test_what_cannot_be_removed_is_not_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [_run(tmp_path, number) for number in range(2)]
    monkeypatch.setattr("shutil.rmtree", lambda *_args, **_more: None)
    assert prune_runs(tmp_path, keep=1, max_bytes=1 << 30) == []
    assert runs[0].exists()
