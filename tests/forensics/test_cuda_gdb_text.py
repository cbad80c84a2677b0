"""cuda-gdb's tables rendered from a state and read back, in the layouts of 12.x and 13.x; refusals; text that is something else."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import TranscriptError
from dsv4_repro.forensics.compare import compare_states
from dsv4_repro.forensics.corefile import read_core
from dsv4_repro.forensics.corewriter import write_core
from dsv4_repro.forensics.cuda_gdb_text import looks_like_transcript, parse_transcript, read_transcript
from dsv4_repro.forensics.device_state import CtaState, DeviceState, GridState, LaneState
from dsv4_repro.forensics.diagnose import diagnose_state, diagnose_transcript

ENTRY = 0x7F12_3400_0000


def ctas_of(grid: GridState) -> tuple[CtaState, ...]:
    """The CTAs of a grid whose CTAs were read."""
    assert grid.ctas is not None
    return grid.ctas


def dims(values: tuple[int, int, int]) -> str:
    return "({},{},{})".format(*values)


def render(
    state: DeviceState, lines: Any, *, coalesced: bool = True, prompt: bool = False, spaced: bool = False, clusters: bool = False
) -> str:
    """What cuda-gdb prints of a state's first grid: devices, kernels, blocks, warps, code and registers of the polling lanes."""
    grid = state.grids[0]
    name, sm, sms = state.devices[0]
    out = ["[New LWP 818]", 'Thread 1 "python3" stopped.']

    def command(text: str) -> None:
        if prompt:
            out.append(f"(cuda-gdb) {text}")

    command("info cuda devices")
    out.append("  Dev PCI Bus/Dev ID        Name Description SM Type SMs Warps/SM Lanes/Warp Max Regs/Lane    Active SMs Mask ")
    out.append(f"*   0        00:06.0 {name}   GH100GL-A   sm_{sm} {sms}       64         32           255 0x{1:032x} ")
    command("info cuda kernels")
    out.append("  Kernel Parent Dev Grid Status    SMs Mask  GridDim   BlockDim Invocation ")
    cluster = " (1,1,1)" if clusters else ""
    out.append(
        f"*      0      -   0    {grid.grid_id} Active 0x{1:034x} {dims(grid.grid_dim)} {dims(grid.block_dim)}{cluster} "
        f"ns::{function(grid)}<512, 4u>() "
    )
    command("info cuda blocks")
    blocks = [cta.block_idx for cta in grid.ctas or ()]
    if coalesced:
        out += ["  BlockIdx To BlockIdx Count   State ", "Kernel 0"]
        out += [
            f"{'*' if n == 0 else ' '} {dims(first)}    {dims(last)}     {count} running "
            for n, (first, last, count) in enumerate(runs(blocks))
        ]
    else:
        out += ["  BlockIdx   State Dev SM ", "Kernel 0"]
        out += [f"  {dims(cta.block_idx)} running   0  {cta.sm}" for cta in grid.ctas or ()]
    for cta in grid.ctas or ():
        command(f"cuda kernel 0 block {dims(cta.block_idx)} thread (0,0,0)")
        warp, lane = cta.warps[0], cta.warps[0].lanes[0]
        place = "cluster (0,0,0), " if clusters else ""
        out.append(
            f"[Switching focus to CUDA kernel 0, grid {grid.grid_id}, {place}block {dims(cta.block_idx)}, thread (0,0,0), "
            f"device 0, sm {cta.sm}, "
            f"warp {warp.warp}, lane 0]"
        )
        out.append(
            f"{lane.virtual_pc:#018x} in void ns::{function(grid)}<512, 4u>(Params)"
            f"<<<{dims(grid.grid_dim)},{dims(grid.block_dim)}>>> ()"
        )
        command("info cuda warps")
        head = "Kernel ClusterIdx BlockIdx" if clusters else "Kernel BlockIdx"
        out += [
            f"  Wp Active Lanes Mask Divergent Lanes Mask          Active PC {head} First Active ThreadIdx ",
            f"Device 0 SM {cta.sm}",
        ]
        for warp in cta.warps:
            first = f"({32 * warp.warp},0,0)"
            extra = "    (0,0,0)" if clusters else ""
            out.append(
                f"{'*' if warp.warp == 0 else ' '} {warp.warp:2}        {warp.active_mask:#010x}           "
                f"{warp.valid_mask & ~warp.active_mask:#010x} {warp.virtual_pc:#018x}      0 {extra} {dims(cta.block_idx)}  "
                f"{first} "
            )
        command("x/24i $pc-128")
        for line in lines:
            if abs(line.offset - (lane.pc_offset or 0)) <= 192:
                mark = "=>" if line.offset == lane.pc_offset else "  "
                text = line.text if spaced else line.text.replace(", ", ",")
                if line.base == "BRA":
                    target = int(line.operands[-1], 16)
                    text = text.replace(line.operands[-1], hex(ENTRY + target))
                out.append(f"{mark} {ENTRY + line.offset:#x} <{grid.kernel}+{line.offset}>:\t{text}")
        command("info registers")
        out += registers(lane, warp.uniform_registers if (warp := cta.warps[0]) else None)
    out.append("[Inferior 1 (process 816) detached]")
    return "\n".join(out) + "\n"


def registers(lane: LaneState, uniform: tuple[int, ...] | None) -> list[str]:
    rows = [f"pc             {lane.virtual_pc:#x}      {lane.virtual_pc:#x} <f>", "errorpc        <unavailable>"]
    rows += [f"R{n:<14}{value:#x}            {value}" for n, value in enumerate(lane.registers or ())]
    rows += ["RZ             0x0                 0"]
    rows += [f"P{n:<14}{(lane.predicates or 0) >> n & 1:#x}                 0" for n in range(7)]
    rows += [f"UR{n:<13}{value:#x}            {value}" for n, value in enumerate(uniform or ())]
    return [
        *rows,
        "URZ            0x0                 0",
        "UP0            0x0                 0",
        "CC             0x0                 0",
    ]


def function(grid: GridState) -> str:
    return "persistent_topk_kernel" if "persistent_topk_kernel" in grid.kernel else grid.kernel


def runs(blocks: list[tuple[int, int, int]]) -> list[tuple[tuple[int, int, int], tuple[int, int, int], int]]:
    found: list[tuple[tuple[int, int, int], tuple[int, int, int], int]] = []
    for block in blocks:
        if found and found[-1][1][0] + 1 == block[0]:
            found[-1] = (found[-1][0], block, found[-1][2] + 1)
        else:
            found.append((block, block, 1))
    return found


LAYOUTS = [
    {}, {"coalesced": False}, {"prompt": True}, {"spaced": True}, {"clusters": True},
    {"clusters": True, "coalesced": False, "prompt": True},
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("sm", [90, 120])
def test_the_debugger_and_the_dump_agree_on_every_field(
    scene: Any, kernels: Any, tmp_path: Path, layout: dict[str, bool], sm: int
) -> None:
    state = scene(sm=sm, spinning={4: (1, 2), 12: (1, 2)}).state()
    dumped = read_core(write_core(tmp_path / "hang.nvcudmp", state))
    printed = parse_transcript(render(state, kernels[0](sm)[1].lines, **layout))
    assert compare_states(dumped, printed) == []
    assert compare_states(printed, dumped) == []
    assert [cta.block_idx for cta in printed.grids[0].ctas or ()] == [(4, 0, 0), (12, 0, 0)]
    assert printed.grids[0].kernel == dumped.grids[0].kernel
    assert printed.grids[0].complete
    lanes = ctas_of(printed.grids[0])[0].warps[0].lanes
    assert len(lanes) == 1
    assert lanes[0].registers == state.grids[0].ctas[0].warps[0].lanes[0].registers
    assert ctas_of(printed.grids[0])[0].warps[0].uniform_registers == state.grids[0].ctas[0].warps[0].uniform_registers


def test_compare_finds_each_difference(scene: Any) -> None:
    one: DeviceState = scene().state()
    cta = ctas_of(one.grids[0])[0]
    warp, lane = cta.warps[0], cta.warps[0].lanes[0]
    assert lane.registers is not None

    def changed(**fields: Any) -> DeviceState:
        warps = (dataclasses.replace(warp, lanes=(dataclasses.replace(lane, **fields), *warp.lanes[1:])), *cta.warps[1:])
        return dataclasses.replace(one, grids=(dataclasses.replace(one.grids[0], ctas=(dataclasses.replace(cta, warps=warps),)),))

    (found,) = compare_states(one, changed(registers=(99, *lane.registers[1:])))
    assert (found.field, found.second) == ("R0", "0x63")
    assert found.where.endswith("warp 0 lane 0")
    assert [item.field for item in compare_states(one, changed(pc_offset=16))] == ["pc_offset"]
    assert [item.field for item in compare_states(one, changed(predicates=1))] == ["predicates"]
    assert compare_states(one, changed(registers=None)) == [], "not read is no disagreement"
    other = dataclasses.replace(one, devices={0: ("NVIDIA H200", 90, 131)}, memory={8: 1})
    assert [item.field for item in compare_states(one, other)] == ["SMs"]
    assert [item.field for item in compare_states(dataclasses.replace(other, memory={8: 2}), other)] == ["0x8"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_verdict_from_a_transcript(scene: Any, kernels: Any, tmp_path: Path, layout: dict[str, bool]) -> None:
    """Without parameters in the text: group, role and cause all the same; the signature needs max_seq_len."""
    path = tmp_path / "gdb.txt"
    path.write_text(render(scene().state(), kernels[0](90)[1].lines, **layout))
    found = diagnose_transcript(path)
    assert (found.verdict.class_, found.verdict.cause, found.verdict.confidence) == ("gpu-spin-barrier", "peer-left", "high")
    assert (found.waits[0].group, found.waits[0].role, found.waits[0].pc_offset) == (6, "leader", scene().loop().load + 16)
    assert found.verdict.signature is None
    assert found.verdict.identity == diagnose_state(scene().state(), ground="file").verdict.identity
    assert found.evidence[0].origin == "reported"


def test_memory_and_parameters_by_command(scene: Any, kernels: Any) -> None:
    state = scene().state()
    params = state.grids[0].params
    words = [int.from_bytes(params[at : at + 4], "little") for at in range(0, 56, 4)]
    text = render(state, kernels[0](90)[1].lines, prompt=True)
    rows = "\n".join(
        f"0x{0x210 + 4 * at:x}:\t" + "\t".join(f"0x{word:08x}" for word in words[at : at + 4]) for at in range(0, 14, 4)
    )
    more = (
        f"(cuda-gdb) x/14xw $_cuda_const_bank(0,0x210)\n{rows}\n(cuda-gdb) print *(@global int*)0x7fd67be89668\n$1 = 1\n"
        "(cuda-gdb) x/2xw 0x7fd67be89700\n0x7fd67be89700:\t0x00000005\t0x00000006\n"
    )
    found = parse_transcript(text.replace("[Inferior 1", more + "[Inferior 1"))
    assert found.grids[0].params == params
    assert found.memory == {0x7FD67BE89668: 1, 0x7FD67BE89700: 5, 0x7FD67BE89704: 6}
    assert diagnose_state(found, ground="process").verdict.signature == "vllm-51593"


def test_mi_records_and_colours(scene: Any, kernels: Any) -> None:
    text = render(scene().state(), kernels[0](90)[1].lines)
    records = "\n".join(
        '~"' + line.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t") + '\\n"' for line in text.splitlines()
    )
    assert compare_states(parse_transcript(text), parse_transcript(records)) == []
    coloured = text.replace("running", "\x1b[32mrunning\x1b[0m")
    assert compare_states(parse_transcript(text), parse_transcript(coloured)) == []


def test_tables_that_are_missing_are_not_empty(scene: Any, kernels: Any) -> None:
    text = render(scene().state(), kernels[0](90)[1].lines)
    lines = text.splitlines()
    start, end = lines.index("Kernel 0"), next(n for n, line in enumerate(lines) if line.startswith("[Switching"))
    without = parse_transcript("\n".join(lines[:start] + lines[end:]))
    assert not without.grids[0].complete
    assert any("info cuda blocks" in item.why for item in without.unread)
    judged = diagnose_state(without, ground="file")
    assert judged.outcome == "inconclusive"
    bare = parse_transcript("\n".join(lines[: start + 2]))
    assert ctas_of(bare.grids[0])[0].warps == ()
    assert any("warps of 1 resident block" in item.what for item in bare.unread)


def test_single_registers_by_name() -> None:
    text = """
      Kernel Parent Dev Grid Status  SMs Mask GridDim BlockDim Invocation
    *      0      -   0 77 Active 0x0000000000000004 (16,1,1) (1024,1,1) a::persistent_topk_kernel<512, 4>(params=...)
      BlockIdx To BlockIdx Count   State
    Kernel 0
    * (12,0,0)    (12,0,0)     1 running
    [Switching focus to CUDA kernel 0, grid 77, block (12,0,0), thread (0,0,0), device 0, sm 2, warp 0, lane 0]
    => 0x7f4be1b3a9f0 <persistent_topk_kernel+64>:	LDG.E.STRONG.GPU R0, desc[UR8][R2.64]
       0x7f4be1b3aa00 <persistent_topk_kernel+80>:	ISETP.GE.AND P0, PT, R0, R5, PT
       0x7f4be1b3aa10 <persistent_topk_kernel+96>:	@!P0 BRA 0x7f4be1b3a9f0
    #0  0x00007f4be1b3a9f0 in a::persistent_topk_kernel<512, 4><<<(16,1,1),(1024,1,1)>>> ()
    $1 = {arrival_counter = 1, output_counter = 0}
    R5             0x2 2
    """
    state = parse_transcript("\n".join(line.strip() for line in text.splitlines()))
    assert ctas_of(state.grids[0])[0].warps[0].lanes[0].named == {"R5": 2}
    assert state.printed == {"arrival_counter": 1, "output_counter": 0}
    found = diagnose_state(state, ground="file")
    assert (found.waits[0].value, found.waits[0].target, found.waits[0].state_field) == (1, 2, "arrival_counter")
    assert found.verdict.cause == "peer-left"


@pytest.mark.parametrize(("grid", "block", "counter", "cause"), [
    (18, 5, 0, "reset-race"), (16, 0, 1, "peer-left"), (16, 12, 1, None), (16, 13, 1, None), (18, 6, 0, None), (16, 0, 3, None),
])  # fmt: skip
def test_only_a_counter_and_a_block(grid: int, block: int, counter: int, cause: str | None) -> None:
    """No code, no registers: what follows from the counter alone, for every group size that fits the grid, and no more."""
    text = f"""  Kernel Parent Dev Grid Status SMs Mask GridDim BlockDim Invocation
*      0      -   0 7712 Active 0x00000200 ({grid},1,1) (1024,1,1) x::RadixTopKMaskLogitsKernel_MultiCTA<512, 4, float, int>(...)
  BlockIdx To BlockIdx Count   State
Kernel 0
*  ({block},0,0)     ({block},0,0)     1 running
$1 = {{arrival_counter = {counter}}}
R7             0x6 6
"""
    found = diagnose_state(parse_transcript(text), ground="file", hung=True)
    assert found.verdict.cause == cause
    assert found.verdict.confidence != "high"
    assert diagnose_state(parse_transcript(text), ground="file").outcome == "inconclusive", "that it waits was not seen"


REFUSALS = {
    "ptrace: Operation not permitted.": "SYS_PTRACE",
    "warning: process 4101 is already traced by process 4990": "end it",
    "No CUDA kernels.": "each rank",
    "The CUDA driver hit an internal error while attaching.": "newer cuda-gdb",
    "fatal: could not allocate operating system resources for attaching": "file handles",
}


@pytest.mark.parametrize("line", sorted(REFUSALS))
def test_a_refusal_is_not_an_empty_device(line: str) -> None:
    state = parse_transcript(line + "\n")
    assert state.grids == ()
    assert any(REFUSALS[line] in item.remedy for item in state.unread)
    found = diagnose_state(state, ground="process")
    assert found.outcome == "inconclusive"
    assert "could not be read" in found.verdict.sentence


def test_several_values_of_one_name_are_left_out() -> None:
    assert parse_transcript("$1 = {arrival_counter = 1}\n$2 = {arrival_counter = 2}\n").printed == {}


def test_not_a_transcript() -> None:
    with pytest.raises(TranscriptError, match="nothing that cuda-gdb prints"):
        parse_transcript("INFO 11-28 09:12:41 [loggers.py:271] Engine 000: Running: 3 reqs\n" * 50, source="server.log")
    assert not looks_like_transcript("INFO: Application startup complete.\n")
    assert looks_like_transcript("  Wp Active Lanes Mask Divergent Lanes Mask          Active PC Kernel BlockIdx")


def test_coalesced_blocks_over_y_and_hostile_counts() -> None:
    head = "*      0      -   0 1 Active 0x00000200 (4,3,1) (32,1,1) f(...)\n  BlockIdx To BlockIdx Count   State\nKernel 0\n"
    state = parse_transcript(head + "*  (2,0,0)     (1,1,0)     4 running\n")
    assert [cta.block_idx for cta in ctas_of(state.grids[0])] == [(2, 0, 0), (3, 0, 0), (0, 1, 0), (1, 1, 0)]
    huge = parse_transcript(head + "*  (0,0,0)     (4294967295,0,0)     4294967296 running\n")
    assert huge.grids[0].ctas == ()
    assert any("4294967296 blocks" in item.what for item in huge.unread)


def test_shuffled_and_cut_lines_never_fail(scene: Any, kernels: Any) -> None:
    lines = render(scene(warps=2).state(), kernels[0](90)[1].lines, prompt=True).splitlines()
    rng = random.Random(3)
    for _ in range(60):
        some = [line[: rng.randrange(1, 200)] for line in rng.sample(lines, rng.randrange(1, len(lines)))]
        try:
            state = read_transcript("\n".join(some)).state
        except TranscriptError:
            continue
        diagnose_state(state, ground="file")


_FOCUSED = "[Switching focus to CUDA kernel 0, grid 1, block (0,0,0), thread (0,0,0), device 0, sm 0, warp 0, lane 0]\n"
_TABLES = ("", "BlockIdx Count State\n", "Wp Active Lanes Mask\n", "Ln ThreadIdx\n", "Parent GridDim\n", "Dev SMs Type\n")
_HEADS = (
    "", "*", "* 1", "1 ", "0  NVIDIA H200  sm_", "0 0 0 1 Active 0x1 ", "0 0 1", "(0,0,0) ", "(", "*  (0,0,0) (1,0,0) ",
    "0 active 0x1 ",
    "0 0x00000001 0x00000001 0x1 ", "#0  0x1 in ", "0x1 in ", "R0 ", "pc ", "0x10", "0x10 <a", "0x10:", "$1 = ",
    "count = ", "Kernel ",
    "Device 0 SM ", "Device 0 SM 0 Warp ", "=> 0x10 <f", "x (process ", "Detaching from program: a, process ",
    "dsv4-repro: kernel 0: ", "CUDA kernel ", "CUDA kernel 0, grid ", "(cuda-gdb) print *(@global ",
)  # fmt: skip


@pytest.mark.parametrize("table", _TABLES, ids=repr)
@pytest.mark.parametrize("filler", [" ", "\t", " 1", "1", "0", "a", "(", " (0,0,0)", " 0x00000001", "<", ">", "x = 1 "], ids=repr)
def test_a_long_line_of_anything_is_read_in_no_time_and_raises_nothing(table: str, filler: str) -> None:
    began = time.process_time()
    for head in _HEADS:
        for end in ("!", "", ")", "0x1"):
            read_transcript(f"{_FOCUSED}{table}{head}{(filler * 8000)[:8000]}{end}\n{head}{filler * 3}{end}\n")
    assert time.process_time() - began < 10.0


def test_numbers_with_zeros_in_front_are_numbers() -> None:
    found = read_transcript(f"{_FOCUSED}(cuda-gdb) print *(@global unsigned int *) 0x7f00\n$1 = 007\n$2 = {{arrivals = 007}}\n")
    assert found.state.printed["arrivals"] == 7
