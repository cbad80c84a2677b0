"""What the load learns of the engine: its counters, and the ring of a worker that runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import EvidenceError
from dsv4_repro.forensics.collect.engine_metrics import EngineReading
from dsv4_repro.forensics.collect.process_table import start_ticks
from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.repro.serving import load_sources
from dsv4_repro.repro.serving.load_sources import engine_counters, ring_reader


@pytest.mark.parametrize(
    ("more", "seen"),
    [
        ({}, True), ({"bad_lines": 1}, False), ({"unread": (Unread("/metrics", "one family did not parse"),)}, False),
        ({"unread": (Unread("/health", "refused"),)}, True),
    ],
)  # fmt: skip
def test_a_scrape_becomes_a_sample_and_a_part_of_one_does_not(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], seen: bool
) -> None:
    reading = EngineReading(5.0, 0.1, None, {"running": 3.0, "iterations": 17.0}, **more)
    monkeypatch.setattr(load_sources, "scrape", lambda *_a, **_k: reading)
    sample = engine_counters("http://127.0.0.1:1")()
    assert (sample is not None) is seen
    if sample is not None:
        found = (sample.at, sample.running, sample.iterations, sample.waiting, sample.generation_tokens)
        assert found == (5.0, 3, 17.0, None, None)


def test_nobody_to_ask_gives_no_sample() -> None:
    assert engine_counters("http://127.0.0.1:1")() is None


def test_rings_of_ended_processes_and_strange_files_are_passed_over(tmp_path: Path) -> None:
    read = ring_reader(tmp_path)
    assert read() == ()
    (tmp_path / "ring-1-1.bin").write_bytes(b"not ours: another start time")
    (tmp_path / "ring-x-y.bin").write_bytes(b"")
    (tmp_path / f"ring-{os.getpid()}-{start_ticks(os.getpid())}.bin").write_bytes(b"no ring at all")
    assert read() == ()
    assert ring_reader(tmp_path / "nowhere")() == ()


def test_the_ring_of_the_lowest_running_rank_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"ring-{os.getpid()}-{start_ticks(os.getpid())}.bin"
    (tmp_path / own).write_bytes(b"")

    class Header:
        rank, begun = 0, 4

    class Contents:
        header = Header()
        steps = ("a step",)

    monkeypatch.setattr(load_sources, "read_newest", lambda _path, steps: Contents())
    monkeypatch.setattr(load_sources, "read_ring", lambda path: Contents() if path.name == own else None)
    assert list(map(str, ring_reader(tmp_path)())) == ["a step"]


def test_a_ring_that_is_damaged_later_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"ring-{os.getpid()}-{start_ticks(os.getpid())}.bin"
    path.write_bytes(b"")

    class Contents:
        class header:  # noqa: N801 - a record's field
            rank, begun = 0, 4

    monkeypatch.setattr(load_sources, "read_newest", lambda _path, steps: Contents())
    with pytest.raises(EvidenceError):
        ring_reader(tmp_path)()
