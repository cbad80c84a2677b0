"""Evidence that blocks, that is packed, that is too much, that is nothing: each is said, by name, in bounded time."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.forensics.autopsy import AutopsyResult, autopsy_paths
from dsv4_repro.forensics.corewriter import write_core
from dsv4_repro.forensics.evidence import gather, opening
from dsv4_repro.forensics.evidence.archive import Budget
from dsv4_repro.forensics.evidence.gather import read_paths
from dsv4_repro.forensics.evidence.opening import ENDLESS_SECONDS, PATIENCE_SECONDS, PatientFile

LINE = b"[12.0] NVRM: Xid (PCI:0000:c1:00): 31, pid=2200, name=VLLM::Worker, MMU Fault: ACCESS_TYPE_VIRT_WRITE\n"


def in_tar(data: bytes) -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w:xz") as archive:
        info = tarfile.TarInfo("x")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return into.getvalue()


def in_zip(data: bytes) -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", data)
    return into.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes, "gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "tar": in_tar, "zip": in_zip,
    "twice": lambda data: gzip.compress(lzma.compress(data)),
}  # fmt: skip


@pytest.mark.parametrize("where", ["alone", "folder", "mixture"])
@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("name", ["a.nvcudmp.xz", "odd!name"])
def test_a_core_dump_is_read_however_it_is_packed(
    name: str, packer: str, where: str, core: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / name).write_bytes(PACKERS[packer](core))
    (tmp_path / "dmesg").write_bytes(LINE)
    given = {"alone": [folder / name], "folder": [folder], "mixture": [folder, tmp_path / "dmesg"]}[where]
    case = read_paths(given)
    assert len(case.devices) == 1
    assert case.devices[0].kernels
    assert not any("ELF" in item.why or "recognised" in item.why for item in case.unread)
    (part,) = [part for part in case.parts if part.kinds == ("GPU core dump",)]
    assert part.status == "read"
    assert part.path.startswith(name)
    assert list(scratch.iterdir()) == []


@pytest.fixture
def core(scene: Any, tmp_path: Path) -> bytes:
    return write_core(tmp_path / "made", scene().state()).read_bytes()


def test_a_torn_or_bombing_packed_core_is_said(core: bytes, tmp_path: Path) -> None:
    packed = lzma.compress(core)
    (tmp_path / "torn.xz").write_bytes(packed[: len(packed) // 2])
    case = read_paths([tmp_path / "torn.xz"])
    assert any("torn" in item.why for item in case.unread)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(core + b"\0" * (8 << 20)))
    case = read_paths([tmp_path / "bomb.gz"], Budget(expanded_bytes=1 << 20))
    assert any("stopped after 1 MiB" in item.why for item in case.unread)


def test_a_descriptor_with_nothing_to_give_ends_after_the_patience() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    clock = FakeClock()
    os.write(writing, b"first")
    file = PatientFile(reading, endless=False, clock=clock)
    assert file.read() == b"first"
    assert "gave nothing more" in file.trouble
    assert PATIENCE_SECONDS < clock.monotonic() < PATIENCE_SECONDS + 1
    assert file.read(10) == b""
    os.close(writing)
    os.close(reading)


def test_a_file_without_end_ends_at_the_deadline() -> None:
    class Ticking(FakeClock):
        def monotonic(self) -> float:
            self.advance(0.5)
            return super().monotonic()

    with Path("/dev/zero").open("rb") as zeros:
        file = PatientFile(zeros.fileno(), endless=True, clock=Ticking())
        pieces = 0
        while file.read(16):
            pieces += 1
    assert 0 < pieces < 2 * ENDLESS_SECONDS
    assert "goes on" in file.trouble


@pytest.mark.parametrize("first", [b"", LINE])
def test_a_file_that_stat_calls_regular_but_blocks(first: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    holder = os.open(path, os.O_RDWR)  # a writer that never closes
    os.write(holder, first)
    monkeypatch.setattr(stat, "S_ISREG", lambda mode: True)
    begin = time.monotonic()
    case = read_paths([path], Budget(clock=FakeClock()))
    assert time.monotonic() - begin < 5
    os.close(holder)
    assert len(case.kernel) == bool(first)
    (item,) = case.unread
    assert item.what == "kmsg"
    assert "gave nothing more" in item.why


def test_what_turns_into_a_pipe_between_look_and_opening_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe"), opening.open_patiently(tmp_path / "pipe"):
        pass


NOTHING: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"), "random": (bytes(range(256)) * 16, "recognised"),
    "passwd": (b"root:x:0:0:root:/root:/bin/bash\n" * 3, "nothing in its 3 line(s) was recognised"),
    "zeros": (b"\0" * 100_000, "recognised"), "packed": (gzip.compress(b"hello\n"), "nothing in its 1 line(s)"),
    "program": (Path("/bin/true").read_bytes(), "a program or binary data"), "picture": (b"\x89PNG\r\n" + b"x" * 99, "recognised"),
}  # fmt: skip


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("name", NOTHING)
def test_what_is_not_recognised_is_named(name: str, folder: bool, tmp_path: Path) -> None:
    data, why = NOTHING[name]
    within = tmp_path / "given"
    within.mkdir()
    (within / name).write_bytes(data)
    result = autopsy_paths([within if folder else within / name])
    diagnosis = result.diagnosis
    assert diagnosis.outcome == "inconclusive"
    assert name in diagnosis.verdict.sentence
    assert "recognised" in diagnosis.verdict.sentence or "empty" in diagnosis.verdict.sentence
    (item,) = diagnosis.unread
    assert item.what.endswith("given" if folder else name)
    assert ("nothing in its 1 file(s) was recognised" if folder else why) in item.why
    assert "what is recognised: a GPU core dump" in item.remedy


def test_beside_evidence_only_what_was_given_by_name_is_listed(tmp_path: Path) -> None:
    (tmp_path / "dmesg").write_bytes(LINE)
    (tmp_path / "notes").write_bytes(b"hello\n")
    assert not read_paths([tmp_path]).unread
    (item,) = read_paths([tmp_path / "dmesg", tmp_path / "notes"]).unread
    assert item.what.endswith("notes")


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    result: AutopsyResult = autopsy_paths([tmp_path])
    assert "no file" in result.diagnosis.verdict.sentence
    assert "no file" in result.diagnosis.unread[0].why


def _many(folder: Path, count: int, data: bytes) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03}").write_bytes(data)
    return folder


def _budgets() -> dict[str, tuple[Budget, str]]:
    return {
        "files": (Budget(files=5), "at most 5 files"), "bytes": (Budget(read_bytes=2 << 20), "at most 2 MiB"),
        "time": (Budget(seconds=10, clock=FakeClock()), "at most 10 s"),
    }  # fmt: skip


@pytest.mark.parametrize("kind", _budgets())
def test_folders_are_read_within_one_budget(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget, words = _budgets()[kind]
    original = gather._read_leaf

    def slow(*args: Any) -> None:
        budget.clock.sleep(3 if kind == "time" else 0)
        original(*args)

    monkeypatch.setattr(gather, "_read_leaf", slow)
    first = _many(tmp_path / "first", 4, LINE + b"x\n" * 350_000)
    second = _many(tmp_path / "second", 20, LINE)
    (tmp_path / "named").write_bytes(LINE)
    case = read_paths([first, second, tmp_path / "named"], budget)
    stopped = [item for item in case.unread if words in item.why]
    assert stopped
    assert str(second) in [item.what for item in stopped]
    assert all("the rest was not read" in item.why for item in stopped)
    read = {part.path for part in case.parts if part.kinds}
    assert 3 <= len(read) <= 7
    assert "named" in read, "a file given by its name is read whatever the folders took"


def test_the_budget_is_enough_for_what_is_in_it(tmp_path: Path) -> None:
    assert not read_paths([_many(tmp_path / "in", 5, LINE)], Budget(files=6)).unread
    assert not read_paths([_many(tmp_path / "exactly", 5, LINE)], Budget(files=5)).unread


def test_a_programs_source_is_no_evidence_and_a_log_that_quotes_it_is(tmp_path: Path) -> None:
    said = "selfcheck: candidate buffer overflow in row 0"
    source = f'import sys\n\n\ndef main():\n    """Prints:\n\n    {said}\n    """\n    print("{said}", "\\d")\n'
    (tmp_path / "check").write_text(source)
    result = autopsy_paths([tmp_path / "check"])
    assert result.diagnosis.outcome == "inconclusive"
    assert "source" in result.inputs[0].note
    (tmp_path / "log").write_text(f"{said}\n{source}")
    assert read_paths([tmp_path / "log"]).events
    assert read_paths([tmp_path]).events
