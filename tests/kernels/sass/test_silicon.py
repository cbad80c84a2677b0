"""The interpreter against recordings of a chip: the same sets and counters on an H200 (driver 580), and the same state at the hang.

The recordings are ``benchmarks/silicon_agreement.py record`` of kernels written here, with the very cubins that ran; the dump is
the driver's own (``benchmarks/make_fixtures.py``).
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import lzma
import random
import sys
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4_repro.forensics.corefile import open_core
from dsv4_repro.forensics.device_state import CtaState, DeviceState
from dsv4_repro.kernels.abi import ARRIVAL_COUNTER_OFFSET, PARAMS_SIZE, ROW_STATE_SIZE, TopKParams, param_base
from dsv4_repro.kernels.cubin import kernel_images
from dsv4_repro.kernels.disasm import disassemble
from dsv4_repro.kernels.sass.program import Program
from dsv4_repro.kernels.sass.topk import TopKRun, run_case, run_topk

TESTS = Path(__file__).resolve().parents[2]
FIXTURES = TESTS / "fixtures"
KERNELS = ("builtin", "builtin_guard")


@lru_cache(maxsize=1)
def agreement() -> Any:
    """The benchmark's own module: what it describes of a case, and what it calls a difference."""
    path = TESTS.parent / "benchmarks" / "silicon_agreement.py"
    spec = importlib.util.spec_from_file_location("silicon_agreement", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=2)
def recording(name: str) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress((FIXTURES / "silicon" / f"{name}.sm_90.json.gz").read_bytes())))


@lru_cache(maxsize=2)
def programs(name: str) -> dict[tuple[int, int], Program]:
    raw = lzma.decompress((FIXTURES / "silicon" / f"{name}.sm_90.cubins.tar.xz").read_bytes())
    found: dict[tuple[int, int], Program] = {}
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        for member in archive.getmembers():
            stream = archive.extractfile(member) if member.name.endswith(".cubin") else None
            if stream is not None:
                for image in kernel_images(stream.read(), name.replace("_", ":"), path=member.name):
                    found[image.top_k, image.vec] = Program.from_image(image)
    return found


def compare(name: str, chosen: set[int] | None) -> tuple[int, int, list[str]]:
    """(launches, rows compared, differences) of the cases with those numbers; None: of all."""
    bench = agreement()
    recorded = recording(name)
    (kernel,) = recorded["kernels"]
    cases = list(bench.cases(recorded["seeds"], kernel))
    rows = recorded["kernels"][kernel]
    assert [case.name for case in cases] == [row[0] for row in rows]
    numbers = [number for number in range(len(cases)) if chosen is None or number in chosen]
    mine = []
    for number in numbers:
        case = cases[number]
        run, _ = run_case(programs(name)[case.k, case.vec], case)
        assert run.result.kind in ("completed", "deadlock"), (case.name, run.result.proof)
        described = bench.describe(run.outputs, case.logits(), case)
        mine.append([case.name, case.seed, run.result.kind == "deadlock", list(run.counters), described])
    compared, found = bench.differences(
        {"kernels": {kernel: [rows[number] for number in numbers]}}, {"kernels": {kernel: mine}}
    )  # fmt: skip
    return len(numbers), compared, found


def test_what_was_recorded() -> None:
    """More than 500 random cases of each kernel, measured; hung launches only of the unguarded one."""
    for name in KERNELS:
        recorded = recording(name)
        assert recorded["origin"] == "measured"
        assert (recorded["device"]["name"], recorded["device"]["sm"]) == ("NVIDIA H200", 90)
        (rows,) = recorded["kernels"].values()
        assert sum(row[0].startswith("random") for row in rows) >= 500
        assert any(row[2] for row in rows) == (name == "builtin")


@pytest.mark.parametrize("name", KERNELS)
def test_a_seeded_sample_agrees(name: str) -> None:
    (rows,) = recording(name)["kernels"].values()
    hung = [number for number, row in enumerate(rows) if row[2]]
    choose = random.Random(51593)
    chosen = set(choose.sample(range(len(rows)), 30)) | set(choose.sample(hung, min(len(hung), 10)))
    launches, compared, found = compare(name, chosen)
    assert launches >= 30
    assert compared >= 60
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_all_of_it_agrees(name: str) -> None:
    launches, compared, found = compare(name, None)
    assert launches == 1052
    assert compared > 4000
    assert found == []


def test_a_difference_would_be_seen() -> None:
    bench = agreement()
    (kernel,) = recording("builtin")["kernels"]
    rows = recording("builtin")["kernels"][kernel][2:3]
    name, seed, hung, counters, described = rows[0]
    other = [[*described[0][:3], "0" * 16], *described[1:]]
    assert bench.differences({"kernels": {kernel: rows}}, {"kernels": {kernel: [[name, seed, hung, counters, other]]}})[1]
    assert bench.differences({"kernels": {kernel: rows}}, {"kernels": {kernel: [[name, seed, not hung, counters, described]]}})[1]
    assert bench.differences({"kernels": {kernel: rows}}, {"kernels": {kernel: [[name, seed, hung, [9], described]]}})[1]


# ---- the hang -------------------------------------------------------------------------------------------------------------------

#: Lengths of the recorded hang (``make_fixtures.py``): one is negative.
LENGTHS = (16000, 16001, 12000, 12001, 9000, 9001, -1, 0)


@pytest.fixture(scope="module")
def chip(tmp_path_factory: pytest.TempPathFactory) -> DeviceState:
    path = tmp_path_factory.mktemp("core") / "hung.nvcudmp"
    with lzma.open(FIXTURES / "cores" / "hung-topk.nvcudmp.xz") as source:
        path.write_bytes(source.read())
    with open_core(path) as core:
        return core.state


@pytest.fixture(scope="module")
def interpreted(chip: DeviceState) -> TopKRun:
    """The code out of that very dump, launched as the dump's parameters say."""
    (grid,) = [item for item in chip.grids if item.ctas]
    assert grid.code is not None
    assert grid.params is not None
    code = disassemble(grid.code.cubin, grid.code.function)
    base = param_base(code.sm)
    assert base is not None
    program = Program.from_rows(
        grid.code.function, code.sm, code.rows, code.symbols, params_base=base, params_size=PARAMS_SIZE, registers=32
    )
    params = TopKParams.unpack(grid.params)
    groups = grid.grid_dim[0] // params.ctas_per_group
    logits = np.random.default_rng(0).standard_normal((params.num_rows, params.stride), dtype=np.float32)
    return run_topk(
        program, logits, np.array(LENGTHS, np.int32), k=params.top_k, chunk_size=params.chunk_size,
        ctas_per_group=params.ctas_per_group, groups=groups, max_seq_len=params.max_seq_len,
    )  # fmt: skip


def resident(state: DeviceState) -> list[CtaState]:
    return [cta for grid in state.grids for cta in grid.ctas or ()]


def test_the_same_cta_is_left_and_the_same_ones_have_gone(chip: DeviceState, interpreted: TopKRun) -> None:
    (cta,) = resident(chip)
    assert interpreted.result.kind == "deadlock"
    assert [place.block for place in interpreted.result.resident] == [cta.block_idx[0]] == [12]
    assert interpreted.counters == (0, 0, 0, 0, 0, 0, 1, 0)


def test_the_polling_thread_is_in_the_same_loop(chip: DeviceState, interpreted: TopKRun) -> None:
    """From the load to the backward branch; all other lanes and warps at the same barrier, or at the instruction after it."""
    (cta,) = resident(chip)
    polling = next(item for item in interpreted.result.stuck if item.state == "polling")
    assert polling.threads == (0,)
    function = interpreted.machine.program.function
    loop = [polling.pc]
    while function.at(loop[-1]).target != polling.pc:
        loop.append(loop[-1] + 16)
        assert len(loop) < 16
    lanes = {(warp.warp, lane.lane): lane for warp in cta.warps for lane in warp.lanes}
    assert len(lanes) == 1024
    first = next(warp for warp in cta.warps if any(lane.thread_idx == (0, 0, 0) for lane in warp.lanes))
    leader = next(lane for lane in first.lanes if lane.thread_idx == (0, 0, 0))
    assert first.active_mask == 1
    assert leader.pc_offset in loop
    mine = interpreted.machine.snapshot(12)
    for lane in lanes.values():
        if lane is leader:
            continue
        place = int(mine.pc[lane.thread_idx[0]])
        assert lane.pc_offset in (place, place + 16), (lane.thread_idx, hex(lane.pc_offset or 0), hex(place))


def test_the_registers_that_matter_are_the_same(chip: DeviceState, interpreted: TopKRun) -> None:
    """The wait's instructions name them: the loaded counter, the target, and the pair that holds the row state's address."""
    (cta,) = resident(chip)
    leader = next(lane for warp in cta.warps for lane in warp.lanes if lane.thread_idx == (0, 0, 0))
    assert leader.registers is not None
    mine = interpreted.machine.snapshot(12).registers[0].tolist()
    polling = next(item for item in interpreted.result.stuck if item.state == "polling")
    function = interpreted.machine.program.function
    load = function.at(polling.pc)
    compare = next(function.at(place) for place in range(polling.pc, polling.pc + 256, 16) if function.at(place).opcode == "ISETP")
    loaded = load.dests[0].index
    assert loaded is not None
    compared = {operand.index for operand in compare.sources if operand.kind == "reg" and operand.index not in (None, 255)}
    assert loaded in compared
    (target,) = compared - {loaded}
    assert target is not None
    assert (leader.registers[loaded], leader.registers[target]) == (mine[loaded], mine[target]) == (1, 2)
    (grid,) = [item for item in chip.grids if item.ctas]
    assert grid.params is not None
    asked = TopKParams.unpack(grid.params).row_states
    both = [
        {place for place in range(len(registers) - 1) if registers[place] | registers[place + 1] << 32 in address_words(states)}
        for registers, states in ((leader.registers, asked), (mine, interpreted.params.row_states))
    ]
    assert both[0]
    assert both[0] == both[1]


def address_words(states: int) -> set[int]:
    """Addresses of group 6's row state and of its counter."""
    start = states + 6 * ROW_STATE_SIZE
    return {start, start + ARRIVAL_COUNTER_OFFSET}
