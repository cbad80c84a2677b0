"""A log's past: what is its age, whatever zone it was written in."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path

import pytest

from dsv4_repro.errors import TranscriptError
from dsv4_repro.forensics.evidence.gather import read_text
from dsv4_repro.repro.serving.log_history import LogHistory, LogTail, log_history, read_log_tail

NOW = dt.datetime(2026, 11, 29, 12, 0, 0, tzinfo=dt.UTC).timestamp()


def _line(age: float, text: str, shift_h: float = 0.0, process: str = "EngineCore pid=48") -> str:
    written = dt.datetime.fromtimestamp(NOW - age + shift_h * 3600, dt.UTC)
    return f"({process}) INFO {written:%m-%d %H:%M:%S} [x.py:1] {text}\n"


def _stats(running: int, generation: float) -> str:
    return (
        f"Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {generation} tokens/s, "
        f"Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%, Prefix cache hit rate: 0.0%"
    )


WAIT = "No available shared memory broadcast block found in 60 seconds. This typically happens"


def _history(text: str, changed_age: float = 30.0) -> LogHistory:
    tail = LogTail(text, 0, NOW - changed_age)
    return log_history(read_text("engine.log", text), tail, now=NOW, source="engine.log")


@pytest.mark.parametrize("shift", [0.0, 9.0, -7.5, 5.75])
def test_ages_in_any_zone(shift: float) -> None:
    found = _history(
        _line(160, _stats(3, 41.5), shift) + _line(150, _stats(3, 0.0), shift) + _line(90, WAIT, shift) + _line(30, WAIT, shift)
    )
    assert found.flowing_age_s == pytest.approx(160, abs=1)
    assert found.stats_age_s == pytest.approx(150, abs=1)
    assert (found.stats_running, found.wait_lines, found.wait_interval_s) == (3, 2, 60.0)
    assert found.wait_first_age_s == pytest.approx(90, abs=1)
    assert (found.ended, found.zone) == ("", "")


def test_a_waiting_line_of_the_start_up_is_not_of_this_stall() -> None:
    found = _history(_line(900, WAIT) + _line(40, _stats(3, 41.5)) + _line(30, _stats(3, 0.0)))
    assert (found.wait_lines, found.wait_first_age_s) == (0, None)


def test_times_that_fit_no_zone_give_no_ages() -> None:
    found = _history(_line(30, _stats(3, 0.0)), changed_age=30 + 400)
    assert found.stats_age_s is None
    assert "no time zone" in found.zone
    assert found.stats_running == 3


def test_words_of_an_end() -> None:
    found = _history(_line(90, WAIT) + _line(30, "TimeoutError: RPC call to sample_tokens timed out."))
    assert found.ended.startswith("a call to the workers timed out (engine.log:2")


def test_an_empty_log_says_nothing() -> None:
    found = _history("")
    assert (found.stats_age_s, found.wait_lines, found.zone) == (None, 0, "no line carries a time")


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("first line that is cut in the middle\n" + "second\n" * 100)
    tail = read_log_tail(path, limit=20)
    assert (tail.text, tail.cut) == ("second\nsecond\n", path.stat().st_size - 20)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TranscriptError, match="not a regular file"):
        read_log_tail(tmp_path / "pipe")
    with pytest.raises(TranscriptError, match="No such file"):
        read_log_tail(tmp_path / "none")
