"""The log's tail through everything that happens to logs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_repro.forensics.collect.engine_log_tail import MOST_LINE, LogTail


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


def append(path: Path, text: str | bytes) -> None:
    with path.open("ab") as stream:
        stream.write(text.encode() if isinstance(text, str) else text)


def test_whole_lines_come_once_and_a_part_waits(log: Path) -> None:
    append(log, "one\ntwo\nthr")
    tail = LogTail(log)
    first = tail.read_new()
    assert (first.lines, first.first) == (("one", "two"), True)
    assert tail.read_new().lines == ()
    append(log, "ee\nfour\n")
    look = tail.read_new()
    assert (look.lines, look.first, look.renewed) == (("three", "four"), False, False)


def test_only_the_end_of_what_was_there_is_read(log: Path) -> None:
    append(log, "".join(f"line {number}\n" for number in range(10_000)))
    look = LogTail(log, first_bytes=100).read_new()
    assert look.lines[-1] == "line 9999"
    assert 5 <= len(look.lines) <= 10
    assert all(line.startswith("line 99") for line in look.lines)
    assert LogTail(log, first_bytes=0).read_new().lines == ()


def test_missing_then_there(log: Path) -> None:
    tail = LogTail(log)
    look = tail.read_new()
    assert look.unread is not None
    assert "No such file" in look.unread.why
    append(log, "born\n")
    assert tail.read_new().lines == ("born",)


def test_renamed_and_made_anew(log: Path) -> None:
    append(log, "a\n")
    tail = LogTail(log)
    tail.read_new()
    append(log, "last of the old\nand a part")
    log.rename(log.with_suffix(".1"))
    # Not there yet: the old one is still read.
    assert tail.read_new().lines == ("last of the old",)
    append(log.with_suffix(".1"), " of it\n")
    append(log, "first of the new\n")
    look = tail.read_new()
    assert (look.lines, look.renewed) == (("and a part of it", "first of the new"), True)


@pytest.mark.parametrize(
    "after", ["new\n", "new line that is far longer than all that was there before, so that the size alone tells nothing\n"]
)
def test_copied_and_truncated(log: Path, after: str) -> None:
    append(log, "old line one\nold line two\n")
    tail = LogTail(log)
    tail.read_new()
    os.truncate(log, 0)
    append(log, after)
    look = tail.read_new()
    assert (look.lines, look.renewed) == ((after.strip(),), True)


def test_a_burst_is_bounded_and_what_was_skipped_is_said(log: Path) -> None:
    append(log, "begin\n")
    tail = LogTail(log, most_bytes=10_000)
    tail.read_new()
    append(log, b"x" * 99 + b"\n" + b"".join(f"{number:098d}\n".encode() for number in range(5000)))
    look = tail.read_new()
    assert look.lines[-1] == f"{4999:098d}"
    assert sum(len(line) + 1 for line in look.lines) <= 10_000
    assert look.skipped + sum(len(line) + 1 for line in look.lines) == 100 + 5000 * 99
    assert tail.read_new().lines == ()


def test_binary_garbage_and_endless_lines(log: Path) -> None:
    append(log, b"\x00\xff\x1b[31mred\x07\n" + b"y" * 3_000_000)
    tail = LogTail(log, first_bytes=1 << 22, most_bytes=1 << 22)
    lines = tail.read_new().lines
    assert lines[0] == "�[31mred"
    assert all(len(line) <= MOST_LINE for line in lines)
    append(log, b"\nnext\n")
    assert tail.read_new().lines[-1] == "next"


def test_progress_bars_end_in_a_carriage_return(log: Path) -> None:
    append(log, b"Loading:  10%|#\rLoading:  20%|##\rLoading: 100%|####\r\ndone\n")
    assert LogTail(log).read_new().lines == ("Loading:  10%|#", "Loading:  20%|##", "Loading: 100%|####", "done")


def test_a_pipe_or_a_folder_in_its_place_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        look = LogTail(tmp_path / name).read_new()
        assert look.unread is not None


def test_handles_stay_flat_through_a_thousand_rotations(log: Path) -> None:
    tail = LogTail(log)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        append(log, f"{number}\n")
        assert tail.read_new().lines[-1:] == (str(number),)
        log.rename(log.with_suffix(".1"))
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    tail.close()
    assert len(os.listdir("/proc/self/fd")) == before


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.binary(max_size=60), st.sampled_from(["rotate", "truncate", "remove", "look"])), max_size=25))
def test_every_line_of_an_undisturbed_stretch_comes_in_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list[bytes | str]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    tail = LogTail(path)
    for step in steps:
        if isinstance(step, bytes):
            append(path, step)
        elif step == "rotate" and path.exists():
            path.rename(path.with_suffix(".1"))
        elif step == "truncate" and path.exists():
            os.truncate(path, 0)
        elif step == "remove":
            path.unlink(missing_ok=True)
        else:
            tail.read_new()
    append(path, "\nmark one\nmark two\n")
    tail.read_new()
    append(path, "mark three\n")
    assert tail.read_new().lines == ("mark three",)
    tail.close()
