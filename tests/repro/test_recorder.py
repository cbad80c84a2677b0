"""The flight recorder's reader: what the agent's writer wrote, while it writes, after it died, and damaged in every way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import EvidenceError
from dsv4_repro.repro import recorder
from dsv4_repro.repro.recorder import read_ring
from dsv4_repro.repro.serving.recorded_ranks import recorded_ranks

AGENT = Path(__file__).resolve().parents[2] / "repro" / "agent" / "src"


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(AGENT))
    from dsv4_repro_agent import ring

    return ring


def make(writer: Any, folder: Path, slots: int = 16) -> Any:
    return writer.Ring(folder, slots=slots, rank=3, device=1, vllm="0.23.0", agent="0.1.0")


def test_the_layout_is_written_down_twice_and_is_one(writer: Any) -> None:
    for name in ("MAGIC", "VERSION", "HEADER_SIZE", "SLOT_SIZE", "LIVE_OFFSET", "BEAT_OFFSET", "GUARDED", "EVENT_DROPPED"):
        assert getattr(writer, name) == getattr(recorder, name), name
    for name in ("HEADER", "SLOT", "LIVE", "BEAT"):
        assert getattr(writer, name).format == getattr(recorder, name).format, name
    assert recorder.HEADER.size <= recorder.LIVE_OFFSET
    assert recorder.SLOT.size <= recorder.SLOT_SIZE


def test_a_step_comes_back_as_it_was(writer: Any, tmp_path: Path) -> None:
    ring = make(writer, tmp_path)
    step = ring.begin(1)
    step.requests, step.tokens, step.padded_requests, step.padded_tokens = 3, 6, 4, 8
    step.graph_mode, step.decode_min, step.decode_max, step.decode_slots, step.decode_zero = 2, 0, 2, 4, 1
    step.next_n, step.native, step.launch_ns, step.record_ns = 2, 1, 50, 60
    ring.write(step)
    contents = read_ring(ring.path)
    (found,) = contents.steps
    assert (found.number, found.runner, found.graph_mode, found.native) == (1, "v1", "full", True)
    assert (found.requests, found.tokens, found.padded_requests, found.padded_tokens) == (3, 6, 4, 8)
    assert (found.decode_min, found.decode_max, found.decode_slots, found.decode_zero, found.next_n) == (0, 2, 4, 1, 2)
    assert (found.launch_ns, found.record_ns, found.complete_ns, found.output_ns) == (50, 60, None, None)
    assert not found.finished
    assert contents.unfinished == (found,)
    assert contents.last_progress_ns is None
    header = contents.header
    assert (header.pid, header.rank, header.device, header.vllm, header.begun) == (os.getpid(), 3, 1, "0.23.0", 1)
    assert header.start_ticks > 0
    assert header.armed
    assert abs(header.wall(found.begin_ns or 0) - header.wall_ns) < 60 * 10**9
    assert contents.torn == 0
    assert contents.missing == ()


def test_the_ring_turns_and_late_ends_of_old_steps_do_not_overwrite_new_ones(writer: Any, tmp_path: Path) -> None:
    ring = make(writer, tmp_path)
    first = ring.begin(2)
    for _ in range(40):
        ring.begin(2)
    first.complete_ns = 5
    ring.write(first)
    contents = read_ring(ring.path)
    assert [step.number for step in contents.steps] == list(range(26, 42))
    assert contents.missing == ()
    assert contents.torn == 0


def test_the_newest_steps_alone_are_those_of_the_whole_ring(writer: Any, tmp_path: Path) -> None:
    ring = make(writer, tmp_path)
    for number in range(1, 42):
        step = ring.begin(1)
        step.launch_ns = number
        step.complete_ns = number if number < 40 else 0
        ring.write(step)
    whole, newest = read_ring(ring.path), recorder.read_newest(ring.path, 4)
    assert newest.steps == whole.steps[-4:]
    assert newest.header == whole.header
    assert (newest.unfinished, newest.last_progress_ns) == (whole.unfinished, 39)
    assert (newest.torn, newest.missing) == (0, ())
    assert recorder.read_newest(ring.path, 1000).steps == whole.steps
    with pytest.raises(EvidenceError, match="cannot be read"):
        recorder.read_newest(tmp_path / "none")


def test_the_agents_thread_says_that_it_runs(writer: Any, tmp_path: Path) -> None:
    ring = make(writer, tmp_path)
    ring.begin(1)
    assert read_ring(ring.path).header.heard_ns == 0
    before = time.monotonic_ns()
    ring.beat()
    header = recorder.read_newest(ring.path).header
    assert before <= header.heard_ns <= time.monotonic_ns()
    assert header.begun == 1


def test_what_ended_in_order_is_not_unfinished(writer: Any, tmp_path: Path) -> None:
    ring = make(writer, tmp_path)
    for number in range(1, 6):
        step = ring.begin(1)
        step.launch_ns = step.record_ns = number
        step.complete_ns = 9 if number == 3 else 0
        ring.write(step)
    contents = read_ring(ring.path)
    assert [step.number for step in contents.unfinished] == [4, 5]
    assert contents.last_progress_ns == 9


@pytest.mark.parametrize(("seen_by", "unfinished"), [("record_ns", [1, 2, 3]), ("wait_ns", [1, 2, 3]), (None, [])])
def test_a_step_whose_end_nobody_would_see_is_not_called_unfinished(
    writer: Any, tmp_path: Path, seen_by: str | None, unfinished: list[int]
) -> None:
    """No event (no driver) and an output that nobody waits for: a healthy server's ring looks like this, too."""
    ring = make(writer, tmp_path)
    for number in range(1, 4):
        step = ring.begin(1)
        step.launch_ns = number
        if seen_by is not None:
            setattr(step, seen_by, number)
        ring.write(step)
    assert [step.number for step in read_ring(ring.path).unfinished] == unfinished
    (rank,) = recorded_ranks(tmp_path)
    assert (rank.unfinished_age_s is not None) is bool(unfinished)


def test_it_is_readable_while_it_is_written(writer: Any, tmp_path: Path) -> None:
    ring = make(writer, tmp_path)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            step = ring.begin(1)
            step.launch_ns = step.begin_ns
            ring.write(step)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(100):
            for step in read_ring(ring.path).steps:
                assert step.launch_ns in (None, step.begin_ns)
    finally:
        stop.set()
        thread.join()


def test_it_outlives_a_kill(tmp_path: Path) -> None:
    """SIGKILL in the middle: what was written is there, nothing was flushed or closed."""
    code = (
        "import sys, os; from pathlib import Path; from dsv4_repro_agent.ring import Ring\n"
        f"ring = Ring(Path({str(tmp_path)!r}), slots=16, rank=0, device=0, vllm='x', agent='y')\n"
        "for number in range(1000): ring.begin(1)\n"
        "print(ring.path, flush=True); import signal; signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(AGENT), "PATH": "/usr/bin"}
    ) as child:
        assert child.stdout is not None
        path = Path(child.stdout.readline().strip())
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    contents = read_ring(path)
    assert contents.header.pid == child.pid
    assert [step.number for step in contents.steps] == list(range(985, 1001))


def damaged(writer: Any, folder: Path) -> tuple[Path, bytearray]:
    ring = make(writer, folder)
    for _ in range(16):
        ring.begin(1)
    return ring.path, bytearray(ring.path.read_bytes())


def test_a_torn_slot_is_counted_and_never_shown(writer: Any, tmp_path: Path) -> None:
    path, raw = damaged(writer, tmp_path)
    raw[recorder.HEADER_SIZE + 5 * recorder.SLOT_SIZE + 20] ^= 0x40
    path.write_bytes(raw)
    contents = read_ring(path)
    assert contents.torn == 1
    assert contents.missing == (5,)
    assert 5 not in {step.number for step in contents.steps}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw.__setitem__(slice(0, 8), b"NOTARING"), "is not a ring file"),
        (lambda raw: raw.__setitem__(30, raw[30] ^ 1), "checksum"),
        (lambda raw: raw.__delitem__(slice(100, None)), "at least 512"),
        (lambda raw: _signed(raw, 8, (2).to_bytes(4, "little")), "version 2"),
        (lambda raw: _signed(raw, 20, (1 << 31).to_bytes(4, "little")), "make no sense"),
        (lambda raw: _signed(raw, 20, bytes(4)), "make no sense"),
        (lambda raw: _signed(raw, 16, bytes(4)), "make no sense"),
    ],
)
def test_a_header_that_makes_no_sense_is_an_error_with_its_place(writer: Any, tmp_path: Path, change: Any, says: str) -> None:
    path, raw = damaged(writer, tmp_path)
    change(raw)
    path.write_bytes(raw)
    with pytest.raises(EvidenceError, match=says) as caught:
        read_ring(path)
    assert str(path) in str(caught.value)


def _signed(raw: bytearray, offset: int, value: bytes) -> None:
    raw[offset : offset + len(value)] = value
    size = recorder.HEADER.size
    raw[size - 4 : size] = zlib.crc32(bytes(raw[: size - 4])).to_bytes(4, "little")


def test_a_file_cut_short_keeps_what_it_has(writer: Any, tmp_path: Path) -> None:
    path, raw = damaged(writer, tmp_path)
    path.write_bytes(raw[: recorder.HEADER_SIZE + 4 * recorder.SLOT_SIZE + 10])
    contents = read_ring(path)
    assert [step.number for step in contents.steps] == [1, 2, 3, 16]
    assert contents.torn == 12
    assert contents.missing == tuple(range(4, 16))


def test_a_pipe_a_folder_and_nothing_are_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "absent"):
        with pytest.raises(EvidenceError):
            read_ring(tmp_path / name)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_give_steps_or_a_typed_error(writer: Any, tmp_path: Path, data: st.DataObject) -> None:
    path, raw = damaged(writer, tmp_path)
    for _ in range(data.draw(st.integers(1, 8))):
        offset = data.draw(st.integers(0, len(raw) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=64))
        raw[offset : offset + len(piece)] = piece
    if data.draw(st.booleans()):
        _signed(raw, 24, data.draw(st.binary(min_size=4, max_size=4)))
    path.write_bytes(raw)
    try:
        contents = read_ring(path)
    except EvidenceError:
        return
    assert len(contents.steps) <= contents.header.slots
    assert len(contents.missing) <= contents.header.slots
