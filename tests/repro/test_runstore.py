"""A run directory while it is written: private, atomic, append-only, and readable whatever happens."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import RunStoreError
from dsv4_repro.repro.run_records import RunRecord
from dsv4_repro.repro.runread import open_run, read_timeline
from dsv4_repro.repro.runstore import RunStore, dump_json, file_sha256


def test_the_default_place_is_scenario_start_and_short_id(tmp_path: Path) -> None:
    clock = FakeClock(wall=1_800_000_000.0)
    with RunStore.create("drain", root=tmp_path / "runs", clock=clock, short_id="abc123") as store:
        assert store.path == tmp_path / "runs" / "drain" / "20270115T080000Z-abc123"


def test_the_directory_and_its_files_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with RunStore.create("drain", out=tmp_path / "run") as store:
            store.write_run(RunRecord(scenario="drain", ground="cpu"))
            (store.evidence_folder / "a").write_text("x")
            (store.evidence_subfolder("hang-1") / "core").write_text("a tool wrote it")
            store.add_evidence("a", store.evidence_folder / "a")
            store.add_rest(store.evidence_folder / "hang-1")
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [store.path, *store.path.rglob("*")]}
    folders = {"run": 0o700, "evidence": 0o700, "hang-1": 0o700}
    assert modes == {**folders, **dict.fromkeys(("timeline.jsonl", "run.json", "index.json", "a", "core"), 0o600)}


def test_a_directory_in_use_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("data")
    with pytest.raises(RunStoreError, match="not an empty directory"):
        RunStore.create("drain", out=tmp_path)
    assert (tmp_path / "mine").read_text() == "data"
    with pytest.raises(RunStoreError):
        RunStore.create("drain", out=tmp_path / "mine")


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    with RunStore.create("drain", out=tmp_path) as store:
        assert store.path == tmp_path
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_lines_are_whole_and_in_order(store: RunStore) -> None:
    for number in range(100):
        store.emit("step", step=number, text="ünïcode \x00 \ud800")
    lines = list(read_timeline(store.path))
    assert [line["step"] for line in lines if isinstance(line, dict)] == list(range(100))


def test_nan_and_strange_values_are_still_json(store: RunStore) -> None:
    store.emit("step", value=float("nan"), path=Path("x"), nested={"a": (1, float("inf"))})
    (line,) = read_timeline(store.path)
    assert isinstance(line, dict)
    assert line["value"] is None
    assert line["nested"] == {"a": [1, None]}


def test_an_oversized_line_keeps_its_kind_and_says_what_was_cut(store: RunStore) -> None:
    store.emit("capture", blob="x" * (1 << 20), small=1)
    (line,) = read_timeline(store.path)
    assert isinstance(line, dict)
    assert line["kind"] == "capture"
    assert line["cut"] == ["blob", "small"]


def test_evidence_is_numbered_hashed_and_indexed(store: RunStore) -> None:
    for name in ("a", "b"):
        (store.evidence_folder / name).write_bytes(name.encode())
        store.add_evidence("kind", store.evidence_folder / name, "interpreted", collector="c")
    index = json.loads((store.evidence_folder / "index.json").read_text())
    assert index["schema"] == "dsv4-repro/evidence/1"
    assert [entry["id"] for entry in index["entries"]] == ["E1", "E2"]
    assert index["entries"][0]["sha256"] == file_sha256(store.evidence_folder / "a")[0]
    assert index["entries"][0]["path"] == "evidence/a"


def test_evidence_from_elsewhere_or_behind_a_link_is_refused(store: RunStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("x")
    with pytest.raises(RunStoreError, match="outside"):
        store.add_evidence("kind", outside)
    (store.evidence_folder / "link").symlink_to(outside)
    with pytest.raises(RunStoreError, match="outside"):
        store.add_evidence("kind", store.evidence_folder / "link")
    os.mkfifo(store.evidence_folder / "pipe")
    with pytest.raises(RunStoreError, match="not a regular file"):
        store.add_evidence("kind", store.evidence_folder / "pipe")
    assert store.evidence == ()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden"])
def test_evidence_folders_have_plain_names(store: RunStore, name: str) -> None:
    with pytest.raises(RunStoreError):
        store.evidence_subfolder(name)


def test_documents_are_replaced_whole(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_run(RunRecord(scenario="drain", ground="cpu", seed=1))
    before = (store.path / "run.json").read_bytes()

    def full(_fd: int, _data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunStoreError, match="full") as caught:
        store.write_run(RunRecord(scenario="drain", ground="cpu", seed=2))
    assert "--out" in caught.value.help_text
    monkeypatch.undo()
    assert (store.path / "run.json").read_bytes() == before
    assert not list(store.path.glob(".*.tmp"))


def test_a_line_that_fits_only_half_is_taken_back(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.emit("step", step=0)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    with pytest.raises(RunStoreError, match="full"):
        store.emit("step", step=1)
    monkeypatch.undo()
    store.emit("step", step=2)
    lines = list(read_timeline(store.path))
    assert [line["step"] for line in lines if isinstance(line, dict)] == [0, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_real_full_disk_is_a_typed_error(store: RunStore) -> None:
    store._fd, fd = os.open("/dev/full", os.O_WRONLY), store._fd
    os.close(fd)
    with pytest.raises(RunStoreError, match="full"):
        store.emit("step")
    store._fd = -1


def test_a_closed_run_takes_no_lines(store: RunStore) -> None:
    store.close()
    store.close()
    with pytest.raises(RunStoreError, match="closed"):
        store.emit("step")


_VICTIM = """
import sys
from pathlib import Path
from dsv4_repro.repro.runstore import RunStore
from dsv4_repro.repro.run_records import RunRecord
with RunStore.create("drain", out=Path(sys.argv[1])) as store:
    store.write_run(RunRecord(scenario="drain", ground="cpu"))
    number = 0
    while True:
        store.emit("step", step=number)
        if number == 200:
            (store.evidence_folder / "dump").write_bytes(b"x" * 1000)
            store.add_evidence("dump", store.evidence_folder / "dump")
            print("seen", flush=True)
        number += 1
"""


def test_a_killed_run_has_lost_nothing_that_it_had_seen(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", _VICTIM, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"seen\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    view = open_run(tmp_path / "run")
    assert view.run.state == "running"
    assert [entry.kind for entry in view.evidence] == ["dump"]
    assert [item.what for item in view.missing] == ["diagnosis.json"]
    lines = list(read_timeline(tmp_path / "run"))
    assert all(isinstance(line, dict) for line in lines)
    steps = [line["step"] for line in lines if isinstance(line, dict) and line["kind"] == "step"]
    assert steps == list(range(len(steps)))
    assert len(steps) > 200


def test_dump_json_ends_with_a_newline_and_has_no_nan() -> None:
    assert dump_json({"a": float("nan"), "b": "\ud800"}) == b'{\n  "a": null,\n  "b": "\\ud800"\n}\n'
