"""Rings, answers and row states of the agent among the evidence: read, or unread with a reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.forensics.evidence.gather import read_paths

from ..agent_recordings import PID, answer, ring, row_states


def test_a_ring_is_known_by_its_bytes_and_gives_its_step_and_version(tmp_path: Path) -> None:
    (tmp_path / "whatever.txt").write_bytes(ring())
    case = read_paths([tmp_path])
    (found,) = case.rings
    assert (found.pid, found.rank) == (PID, 0)
    assert found.stuck is not None
    assert (found.stuck.number, found.stuck.requests, found.stuck.padded_tokens) == (78, 3, 8)
    assert [fact.version for fact in case.versions if fact.package == "vllm"] == ["0.23.0"]
    assert case.parts[0].kinds == ("agent ring",)


def test_a_ring_out_of_an_archive(tmp_path: Path) -> None:
    (tmp_path / "ring.bin.gz").write_bytes(gzip.compress(ring()))
    assert len(read_paths([tmp_path]).rings) == 1


def test_a_damaged_ring_is_unread_with_its_reason(tmp_path: Path) -> None:
    raw = bytearray(ring())
    raw[20] ^= 1
    (tmp_path / "ring-2585-7283.bin").write_bytes(raw)
    case = read_paths([tmp_path])
    assert not case.rings
    assert "checksum" in case.unread[0].why


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_spoilt_ring_gives_anything_but_a_reason(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    raw = bytearray(ring())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(8, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("ring") / "ring.bin"
    file.write_bytes(raw[: data.draw(st.integers(8, len(raw)))])
    case = read_paths([file])
    assert len(case.rings) + len(case.unread) == 1


@pytest.mark.parametrize(
    ("name", "document", "unchanged"),
    [("row_states-rank0-pid-2585.json", row_states(), True), ("answer-2585-7283.json", answer(), None)],
)
def test_row_states_and_answers(tmp_path: Path, name: str, document: dict[str, Any], unchanged: bool | None) -> None:
    (tmp_path / name).write_text(json.dumps(document, indent=1))
    (found,) = read_paths([tmp_path]).readings
    assert (found.pid, found.unchanged, found.stalled_s) == (PID, unchanged, 2.760561785)
    assert found.launches[0].lengths[6] == -1
    assert found.launches[0].counters[6] == 1


def test_a_status_tells_the_version(tmp_path: Path) -> None:
    (tmp_path / "agent-2585-7283.json").write_text('{"schema": "dsv4-repro/agent-status/1", "pid": 2585, "vllm": "0.23.0"}')
    case = read_paths([tmp_path])
    assert [(fact.package, fact.version) for fact in case.versions] == [("vllm", "0.23.0")]
    assert not case.unread
    assert case.parts[0].unrecognised == 0


@pytest.mark.parametrize(
    "document",
    [
        {"stalled_s": 2.0, "unchanged": True, "launches": []},
        {"stalled_s": 2.0, "unchanged": True, "launches": {"a": 1}},
        {"stalled_s": 2.0, "unchanged": True, "launches": [{"workspace": 7}, None, "x"]},
        row_states(launches=[{"workspace": "0x1", "arrival_counters": "abc"}]),
        row_states(stalled_s=float("inf"), launches=[]),
        {"launches": 1, "stalled_s": None, "unchanged": None},
    ],
)
def test_nonsense_is_left_out(tmp_path: Path, document: dict[str, Any]) -> None:
    (tmp_path / "row_states-rank0-pid-1.json").write_text(json.dumps(document))
    assert not read_paths([tmp_path]).readings
