"""Core dumps that a driver wrote, of kernels written here: what the reader makes of each (made by make_fixtures.py)."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.autopsy import autopsy_paths
from dsv4_repro.forensics.corefile import open_core
from dsv4_repro.forensics.diagnose import diagnose_dump
from dsv4_repro.kernels.abi import ROW_STATE_SIZE, TopKParams
from dsv4_repro.kernels.disasm import disassemble

CORES = Path(__file__).resolve().parent.parent / "fixtures" / "cores"
INDEX = json.loads((CORES / "index.json").read_text()) if (CORES / "index.json").is_file() else {"fixtures": {}}
FIXTURES = {
    name: entry for name, entry in INDEX["fixtures"].items() if "error" not in entry and (CORES / entry["packed"]).is_file()
}

#: Verdict of one look, and of a look at something that a watchdog saw standing still.
VERDICTS: dict[str, tuple[tuple[str, str | None], tuple[str, str | None]]] = {
    "hung-topk": (("gpu-spin-barrier", "peer-left"), ("gpu-spin-barrier", "peer-left")),
    "bounded-spin": (("gpu-spin-barrier", "peer-left"), ("gpu-spin-barrier", "peer-left")),
    "two-grids": (("gpu-spin-barrier", "peer-left"), ("gpu-spin-barrier", "peer-left")),
    "not-co-resident": (("gpu-spin-barrier", "not-co-resident"), ("gpu-spin-barrier", "not-co-resident")),
    "healthy": (("unknown", None), ("gpu-kernel-stuck", None)),
    "crossrank": (("unknown", None), ("gpu-kernel-stuck", None)),
    "named-barrier": (("gpu-barrier-intra-block", "named-barrier"), ("gpu-barrier-intra-block", "named-barrier")),
    "mbarrier-phase": (("unknown", None), ("gpu-barrier-intra-block", "phase-wait")),
    "cluster-peer": (("unknown", None), ("gpu-barrier-intra-block", "cluster-peer")),
}

pytestmark = pytest.mark.skipif(not FIXTURES, reason="no core dumps of a real GPU in tests/fixtures/cores")


@pytest.fixture(params=sorted(FIXTURES) or ["none"])
def dump(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any], Path]:
    entry = FIXTURES[request.param]
    path = tmp_path / f"{request.param}.nvcudmp"
    with lzma.open(CORES / entry["packed"]) as source:
        path.write_bytes(source.read())
    return request.param, entry, path


def test_the_verdict(dump: tuple[str, dict[str, Any], Path]) -> None:
    name, _, path = dump
    once, watched = VERDICTS[name]
    found = diagnose_dump(path)
    assert (found.verdict.class_, found.verdict.cause) == once, found.verdict.sentence
    held = diagnose_dump(path, hung=True)
    assert (held.verdict.class_, held.verdict.cause) == watched, held.verdict.sentence


def test_in_a_folder_of_its_own_a_dump_is_no_more_of_a_hang_than_by_itself(dump: tuple[str, dict[str, Any], Path]) -> None:
    """One look at a kernel at work was a hang as soon as the dump was read together with other files."""
    _, _, path = dump
    alone = diagnose_dump(path)
    found = autopsy_paths([path.parent]).diagnosis
    assert (found.outcome, found.verdict.class_, found.verdict.cause) == (
        alone.outcome,
        alone.verdict.class_,
        alone.verdict.cause,
    ), found.verdict.sentence
    if alone.verdict.class_ == "unknown":
        assert found.verdict.sentence == alone.verdict.sentence


def test_the_layout_is_understood(dump: tuple[str, dict[str, Any], Path]) -> None:
    """Nothing of a real dump is left unread but what its flags leave out; every lane has registers and a PC in its kernel."""
    _, entry, path = dump
    with open_core(path) as core:
        state = core.state
        assert core.metadata["driver"].split(".")[0] in INDEX["card_and_driver"]
    device = entry["facts"]["device"]
    (name, sm, sms) = state.devices[0]
    assert (name, sm, sms) == (device["name"], device["sm"], device["sm_count"])
    assert [item.what for item in state.unread if not item.what.startswith("parameters of")] == []
    for grid in state.grids:
        if not grid.ctas:
            continue
        assert grid.code is not None
        size = 16 * len(disassemble(grid.code.cubin, grid.code.function).lines)
        for cta in grid.ctas:
            assert all(0 <= index < size for index, size in zip(cta.block_idx, grid.grid_dim, strict=True))
            for warp in cta.warps:
                assert warp.uniform_registers is not None
                for lane in warp.lanes:
                    assert lane.registers is not None
                    assert lane.predicates is not None
                    assert lane.pc_offset is not None
                    assert 0 <= lane.pc_offset < size
                    assert lane.pc_offset % 16 == 0


def test_the_hung_top_k(dump: tuple[str, dict[str, Any], Path]) -> None:
    """Against what the program that was dumped knows of itself: parameters, address, counter, target, block."""
    name, entry, path = dump
    if name not in ("hung-topk", "bounded-spin", "two-grids"):
        return
    facts = entry["facts"]
    found = diagnose_dump(path)
    (wait,) = found.waits
    assert (wait.block, wait.value, wait.target, wait.state_field, wait.role) == ((12, 0, 0), 1, 2, "arrival_counter", "leader")
    assert wait.address == hex(facts["row_states"] + 6 * ROW_STATE_SIZE + 3080)
    assert found.verdict.confidence == "high"
    assert found.verdict.signature == "vllm-51593"
    with open_core(path) as core:
        grid = next(grid for grid in core.state.grids if "persistent_topk_kernel" in grid.kernel)
    assert grid.params is not None
    assert grid.params.hex() == facts["params"]
    assert TopKParams.unpack(grid.params).ctas_per_group == 2


def test_a_process_with_two_devices(tmp_path: Path) -> None:
    """Written by the driver of two H200 (benchmarks/two_gpus.py): device 0's top-k hangs, device 1 polls a word of device 0 over
    peer memory. The held device is named; the one that waits for it never is."""
    path = tmp_path / "two-devices.nvcudmp"
    with lzma.open(CORES / "two-devices.nvcudmp.xz") as source:
        path.write_bytes(source.read())
    with open_core(path) as core:
        assert [tuple(core.state.devices[number]) for number in (0, 1)] == [("NVIDIA H200", 90, 132)] * 2
        assert {grid.device for grid in core.state.grids if grid.ctas} == {0, 1}
    for hung in (False, True):
        found = diagnose_dump(path, hung=hung)
        assert (found.verdict.class_, found.verdict.cause, found.verdict.signature) == (
            "gpu-spin-barrier",
            "peer-left",
            "vllm-51593",
        )
        assert found.verdict.sentence.startswith("device 0: block 12")
        assert [(wait.device, wait.kernel.rpartition(":")[2], wait.value, wait.target) for wait in found.waits] == [
            (0, "persistent_topk_kernel", 1, 2), (1, "cross_rank_all_reduce", 0, 1),
        ]  # fmt: skip
