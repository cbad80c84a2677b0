"""Dumps that the driver wrote when an own kernel faulted on an H200: the fault, its cause and its place, on every way in."""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.autopsy import autopsy_paths
from dsv4_repro.forensics.corefile import open_core
from dsv4_repro.forensics.diagnose import diagnose_dump

CORES = Path(__file__).resolve().parent.parent / "fixtures" / "cores"
FAULTS: dict[str, dict[str, Any]] = json.loads((CORES / "index.json").read_text("utf-8"))["faults"]


@pytest.fixture(params=sorted(FAULTS))
def fault(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    entry = FAULTS[request.param]
    path = tmp_path / "GPU.nvcudmp"
    path.write_bytes(lzma.decompress((CORES / entry["packed"]).read_bytes()))
    return entry, path


def test_the_file_is_what_the_index_says(fault: tuple[dict[str, Any], Path]) -> None:
    entry, path = fault
    assert (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) == (entry["size"], entry["sha256"])


def test_autopsy_names_fault_cause_and_place(fault: tuple[dict[str, Any], Path]) -> None:
    entry, path = fault
    verdict = autopsy_paths([path]).diagnosis.verdict
    assert f"{verdict.class_}/{verdict.cause}" == entry["expected"]
    assert verdict.confidence == "high"
    place = f"SM {entry['sm']}" if entry["pc_offset"] is None else "block (0, 0, 0), warp 0"
    assert place in verdict.sentence, verdict.sentence


def test_the_dump_reader_alone_says_the_same(fault: tuple[dict[str, Any], Path]) -> None:
    entry, path = fault
    verdict = diagnose_dump(path).verdict
    assert f"{verdict.class_}/{verdict.cause}" == entry["expected"]
    assert entry["where"] in verdict.sentence, verdict.sentence
    with open_core(path) as core:
        assert {(item.sm, item.code) for item in core.faults} == {(entry["sm"], entry["exception"])}
        assert all(g.ctas is not None for g in core.state.grids)
        offsets = {lane.pc_offset for g in core.state.grids for cta in g.ctas or () for warp in cta.warps for lane in warp.lanes}
    assert offsets == (set() if entry["pc_offset"] is None else {entry["pc_offset"]})


def test_beside_a_calm_log_the_fault_still_decides(fault: tuple[dict[str, Any], Path]) -> None:
    """The Python frame of the process that noticed it is a bystander, and the queue's lines say nothing."""
    entry, path = fault
    folder = path.parent / "incident"
    folder.mkdir()
    shutil.move(path, folder / path.name)
    line = "No available shared memory broadcast block found in 60 seconds."
    (folder / "engine.log").write_text(f"(EngineCore pid=7) INFO 11-29 16:20:00 [shm_broadcast.py:802] {line}\n")
    (folder / "py-spy.txt").write_text(
        "Process 7: VLLM::Worker_TP0\nPython v3.12.3 (/usr/bin/python3.12)\n\n"
        'Thread 7 (active): "MainThread"\n    forward (vllm/model_executor/layers/layernorm.py:144)\n'
    )
    verdict = autopsy_paths([folder]).diagnosis.verdict
    assert f"{verdict.class_}/{verdict.cause}" == entry["expected"]
