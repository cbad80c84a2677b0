"""Triggering a GPU core dump, against a stand-in for the driver: a thread that reads the pipe and writes the file."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_repro.forensics.collect import Collected, run_collector
from dsv4_repro.forensics.collect.core_trigger import CoreDumpCollector, DumpSettings, announced_size, find_pipe

ME = os.getpid()


def elf(size: int = 4096, *, table: int | None = None, entry: int = 64, count: int = 2) -> bytes:
    """A 64-bit ELF header whose section table ends at ``size`` (unless told otherwise), and as many zeros as that takes."""
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 40, size - entry * count if table is None else table)
    struct.pack_into("<HHH", head, 58, entry, count, 1)
    return bytes(head) + bytes(size - 64)


class Driver(threading.Thread):
    """Waits for a byte on the pipe, then does ``answer(file)``."""

    def __init__(self, settings: DumpSettings, answer: Callable[[Path], object]) -> None:
        super().__init__(daemon=True)
        os.mkfifo(settings.pipe_of(ME))
        self.descriptor = os.open(settings.pipe_of(ME), os.O_RDWR)
        self.file = settings.file_of(ME)
        self.answer = answer
        self.start()

    def run(self) -> None:
        os.read(self.descriptor, 1)
        self.answer(self.file)
        os.close(self.descriptor)


def collect(settings: DumpSettings, folder: Path, deadline_s: float = 5.0, stderr: Path | None = None) -> Collected:
    return run_collector(CoreDumpCollector(ME, settings, folder, deadline_s=deadline_s, stderr=stderr))


def test_a_dump_that_says_all_done(tmp_path: Path) -> None:
    settings = DumpSettings.in_folder(tmp_path / "run")
    log = tmp_path / "child.err"
    log.write_text("coredump: All done (of an earlier one)\n")

    def answer(file: Path) -> None:
        with file.open("wb", buffering=0) as stream:
            for start in range(0, 4096, 1024):
                stream.write(elf()[start : start + 1024])
                time.sleep(0.03)
        with log.open("a") as stream_log:
            stream_log.write("coredump: SM 1/132 has finished state collection\ncoredump: All done\n")

    Driver(settings, answer)
    outcome = collect(settings, tmp_path / "evidence", stderr=log)
    assert outcome.unread == ()
    assert outcome.files[0].path == tmp_path / "evidence" / "gpu.nvcudmp"
    assert outcome.files[0].path.read_bytes() == elf()
    assert outcome.facts["told"]
    assert "SM 1/132" in outcome.facts["log"]
    assert not settings.file_of(ME).exists()


def test_without_progress_lines_the_files_own_size_decides(tmp_path: Path) -> None:
    settings = DumpSettings.in_folder(tmp_path)
    Driver(settings, lambda file: file.write_bytes(elf(100_000)))
    outcome = collect(settings, tmp_path / "evidence")
    assert (outcome.facts["told"], outcome.facts["bytes"], outcome.facts["announced"]) == (False, 100_000, 100_000)


def test_half_a_dump_is_kept_and_called_half(tmp_path: Path) -> None:
    settings = DumpSettings.in_folder(tmp_path)
    Driver(settings, lambda file: file.write_bytes(elf()[:1000]))
    outcome = collect(settings, tmp_path / "evidence", deadline_s=0.6)
    assert [item.kind for item in outcome.files] == ["gpu-core-partial"]
    assert "1000 bytes" in outcome.unread[0].why


def test_a_driver_that_does_nothing_is_a_deadline(tmp_path: Path) -> None:
    settings = DumpSettings.in_folder(tmp_path)
    Driver(settings, lambda _file: None)
    outcome = collect(settings, tmp_path / "evidence", deadline_s=0.2)
    assert outcome.files == ()
    assert "no file 0.2 s after the trigger" in outcome.unread[0].why


def test_no_pipe_and_no_reader_are_two_answers(tmp_path: Path) -> None:
    settings = DumpSettings.in_folder(tmp_path)
    assert "no dump pipe" in collect(settings, tmp_path).unread[0].why
    os.mkfifo(settings.pipe_of(ME))
    outcome = collect(settings, tmp_path)
    assert "nobody reads the pipe" in outcome.unread[0].why
    assert outcome.unread[0].remedy


def test_a_full_pipe_is_told(tmp_path: Path) -> None:
    settings = DumpSettings.in_folder(tmp_path)
    os.mkfifo(settings.pipe_of(ME))
    descriptor = os.open(settings.pipe_of(ME), os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(descriptor, bytes(4096))
    assert "full" in collect(settings, tmp_path).unread[0].why
    os.close(descriptor)


def test_a_pipe_is_found_among_the_open_files_by_its_name(tmp_path: Path) -> None:
    names = {"other": tmp_path / "somebodys.pipe", "default": tmp_path / f"corepipe.cuda.host.{ME}", "own": tmp_path / "t_9_x"}
    for path in names.values():
        os.mkfifo(path)
    process = tmp_path / "proc" / str(ME)
    process.joinpath("fd").mkdir(parents=True)
    process.joinpath("fd", "3").symlink_to(names["other"])
    assert find_pipe(ME, None, tmp_path / "proc") is None, "a byte in somebody else's pipe would be read by somebody"
    process.joinpath("fd", "5").symlink_to(names["default"])
    assert find_pipe(ME, None, tmp_path / "proc") == process / "fd" / "5"
    process.joinpath("fd", "4").symlink_to(names["own"])
    process.joinpath("environ").write_bytes(b"A=1\0CUDA_COREDUMP_PIPE=" + str(tmp_path).encode() + b"/t_%t_x\0")
    assert find_pipe(ME, None, tmp_path / "proc") == process / "fd" / "4"


@pytest.mark.parametrize("name", ["per%cent", "x" * 200 + "/" + "y" * 200 + "/" + "z" * 200 + "/" + "w" * 200 + "/" + "v" * 200])
def test_a_folder_that_the_driver_cannot_use_is_replaced_by_a_short_one(tmp_path: Path, name: str) -> None:
    settings = DumpSettings.in_folder(tmp_path / name)
    assert settings.short
    assert len(settings.pipe_template) < 200
    assert "%" not in str(settings.folder)
    settings.folder.rmdir()


def test_the_environment_is_the_documented_one(tmp_path: Path) -> None:
    settings = DumpSettings.in_folder(tmp_path)
    environment = settings.environment()
    assert environment["CUDA_ENABLE_USER_TRIGGERED_COREDUMP"] == "1"
    assert environment["CUDA_COREDUMP_SHOW_PROGRESS"] == "1"
    assert environment["CUDA_COREDUMP_PIPE"] == f"{tmp_path}/pipe_%p"
    assert environment["CUDA_COREDUMP_FILE"] == f"{tmp_path}/core_%p.nvcudmp"
    assert "skip_abort" not in environment["CUDA_COREDUMP_GENERATION_FLAGS"]
    assert set(environment["CUDA_COREDUMP_GENERATION_FLAGS"].split(",")) == {
        "skip_nonrelocated_elf_images", "skip_global_memory", "skip_shared_memory", "skip_local_memory", "skip_constbank_memory",
    }  # fmt: skip


def test_the_announced_size_of_headers_of_all_kinds(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for raw, size in (
        (elf(4096), 4096),
        (elf(4096)[:63], None),
        (b"\x7fELF\x01" + bytes(100), None),
        (b"text" + bytes(100), None),
        (elf(4096, table=0), None),
    ):
        path.write_bytes(raw)
        assert announced_size(path) == size
    assert announced_size(tmp_path / "none") is None
    many = bytearray(elf(1000, table=200, count=0))
    struct.pack_into("<Q", many, 200 + 32, 70_000)
    path.write_bytes(many)
    assert announced_size(path) == 200 + 64 * 70_000
    path.write_bytes(many[:210])
    assert announced_size(path) is None
