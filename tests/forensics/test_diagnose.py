"""Verdicts: each cause from a state that shows it, the weaker answer where the state does not, on every architecture and PC."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_repro.errors import ToolMissingError
from dsv4_repro.forensics import diagnose
from dsv4_repro.forensics.chain import LINKS, StepFacts
from dsv4_repro.forensics.coretables import Kind
from dsv4_repro.forensics.corewriter import CoreOptions, write_core
from dsv4_repro.forensics.device_state import CtaState, DeviceState, GridState, LaneState, WarpState
from dsv4_repro.forensics.diagnose import diagnose_dump, diagnose_state
from dsv4_repro.forensics.records import Diagnosis, Evidence
from dsv4_repro.forensics.waitloop import CodeView

ENTRY = 0x7F12_3400_0000


def verdict(found: Diagnosis) -> tuple[str, str | None, str]:
    return found.verdict.class_, found.verdict.cause, found.verdict.confidence


def judged(scene: Any, ground: Any = "file", **what: Any) -> Diagnosis:
    hung = what.pop("hung", None)
    return diagnose_state(scene(**what).state(), ground=ground, hung=hung)


# --- the defining case ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sm", [75, 80, 90, 120])
def test_peer_left(scene: Any, sm: int) -> None:
    found = judged(scene, sm=sm)
    assert found.outcome == "hang"
    assert verdict(found) == ("gpu-spin-barrier", "peer-left", "high")
    assert found.verdict.signature == "vllm-51593"
    (wait,) = found.waits
    assert (wait.block, wait.value, wait.target, wait.comparison) == ((12, 0, 0), 1, 2, ">=")
    assert (wait.state_field, wait.group, wait.role, wait.warp) == ("arrival_counter", 6, "leader", 0)
    assert wait.address == hex(scene(sm=sm).address(12))
    assert any("LDG" in text for _, text in wait.instructions)
    assert [group.group for group in found.ledger] == list(range(8))
    assert found.ledger[6].spinning == (12,)
    assert found.ledger[6].exited == (13,)
    assert all(group.inferred for group in found.ledger)
    listed = [
        block
        for group in found.ledger
        for blocks in (group.running, group.spinning, group.exited, group.never_started, group.unknown)
        for block in blocks
    ]
    assert sorted(listed) == list(range(16)), "each block stands in exactly one list"
    assert found.next


@pytest.mark.parametrize("sm", [75, 90, 120])
def test_every_pc_gives_the_same_verdict_and_identity(scene: Any, sm: int) -> None:
    """Wherever in the loop the lane was stopped: never another cause; the full answer wherever the registers hold it."""
    loop = scene(sm=sm).loop()
    full = 0
    for site in range(3):
        for step in range(len(loop.body)):
            found = judged(scene, sm=sm, step=step, site=site, ground="gpu")
            assert found.verdict.class_ == "gpu-spin-barrier"
            assert found.verdict.cause in ("peer-left", None)
            full += found.verdict.cause is not None
    assert full >= 12


def test_one_identity_across_architectures_addresses_and_sites(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        judged(scene, sm=sm, site=site, params=params).verdict.identity
        for sm in (75, 80, 90, 120)
        for site in (0, 1)
        for params in (True, False)
    }
    assert len(found) == 1
    other = judged(scene, spinning={4: (1, 2)}).verdict.identity
    assert {other} == found, "another group of the same launch is the same defect"


def test_through_a_dump(scene: Any, tmp_path: Path) -> None:
    path = write_core(tmp_path / "hang.nvcudmp", scene().state(), CoreOptions(timestamp=1_800_000_000, driver=(580, 159)))
    found = diagnose_dump(path)
    assert verdict(found) == ("gpu-spin-barrier", "peer-left", "high")
    assert found.verdict.identity == judged(scene).verdict.identity
    (item,) = found.evidence
    assert item.sha256 is not None
    assert item.when == "2027-01-15T08:00:00Z"
    links = {link.link: link for link in found.chain}
    assert tuple(links) == LINKS
    assert links["barrier"].status == "measured"
    assert links["barrier"].evidence == ("dump",)
    assert links["drain"].status == "not observed"
    assert links["producer"].status == "inferred"
    assert "not observed" not in {links[name].status for name in ("dispatch", "disagreement", "barrier")}
    assert found.document()["schema"] == "dsv4-repro/diagnosis/1"


def test_an_interpreted_state_says_so(scene: Any, tmp_path: Path) -> None:
    found = diagnose_dump(write_core(tmp_path / "hang.nvcudmp", scene(origin="interpreted").state()), ground="cpu")
    assert found.evidence[0].origin == "interpreted"
    assert {link.link: link.status for link in found.chain}["barrier"] == "interpreted"
    assert verdict(found)[:2] == ("gpu-spin-barrier", "peer-left")


def test_signature_only_where_all_conditions_hold(scene: Any) -> None:
    without = judged(scene, params=False)
    assert verdict(without)[:2] == ("gpu-spin-barrier", "peer-left")
    assert without.verdict.signature is None
    assert "max_seq_len was not read" in str(without.document()["signature_reasons"])
    assert any("parameters" in item.what for item in without.unread)
    longer = judged(scene, max_seq_len=65536)
    assert longer.verdict.signature is None
    assert longer.verdict.confidence != "high"


def test_two_groups_hang(scene: Any) -> None:
    found = judged(scene, spinning={4: (1, 2), 12: (1, 2)})
    assert verdict(found)[:2] == ("gpu-spin-barrier", "peer-left")
    assert {wait.group for wait in found.waits} == {2, 6}


# --- the other causes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sm", "slots"), [(90, 264), (120, 188)])
def test_not_co_resident(scene: Any, sm: int, slots: int) -> None:
    need = slots + 36
    found = judged(
        scene,
        sm=sm,
        grid=need,
        ctas=need,
        spinning=dict.fromkeys(range(slots), (slots, need)),
        max_seq_len=262144,
        warps=1,
        lanes=1,
    )
    assert verdict(found) == ("gpu-spin-barrier", "not-co-resident", "high")
    (group,) = found.ledger
    assert group.never_started == tuple(range(slots, need))
    assert len(group.spinning) == slots
    assert "never started" in group.inferred
    assert len(found.waits) == slots
    assert found.verdict.signature == "vllm-41834"  # one group, alone, larger than the device


@pytest.mark.parametrize(("block", "facts", "firm"), [
    (1024, {"shared_bytes": 120_000}, True), (32, {"shared_bytes": 200_000}, True), (256, {"registers": 255}, True),
    (512, {"registers": 128}, True), (32, {}, False), (32, {"shared_bytes": 1000}, False),
])  # fmt: skip
def test_what_keeps_a_block_from_starting(scene: Any, block: int, facts: dict[str, int], firm: bool) -> None:
    """One block on each SM, 8 more in the grid: firm where threads, registers or shared memory of every SM are used up."""
    base = scene(
        grid=140, ctas=140, spinning=dict.fromkeys(range(132), (132, 140)), max_seq_len=262144, warps=1, lanes=1, params=False
    )
    state = base.state()
    grid = dataclasses.replace(state.grids[0], kernel="grid_barrier", block_dim=(block, 1, 1), **facts)
    found = diagnose_state(dataclasses.replace(state, grids=(grid,)), ground="file")
    assert verdict(found) == ("gpu-spin-barrier", "not-co-resident", "high" if firm else "medium")
    assert found.ledger[0].never_started == tuple(range(132, 140))
    assert ("no SM has" in found.ledger[0].inferred) == firm


def test_room_that_is_there(scene: Any) -> None:
    """An SM without a block, or an uneven spread: a block that is missing is not said to have had no room."""
    facts = {"grid": 140, "ctas": 140, "max_seq_len": 262144, "warps": 1, "lanes": 1, "params": False}
    free = scene(spinning=dict.fromkeys(range(131), (131, 140)), **facts).state()
    free = dataclasses.replace(free, grids=(dataclasses.replace(free.grids[0], kernel="grid_barrier"),))
    assert diagnose_state(free, ground="file").ledger[0].exited == tuple(range(131, 140))
    uneven = scene(spinning=dict.fromkeys(range(135), (135, 140)), **facts).state()
    uneven = dataclasses.replace(uneven, grids=(dataclasses.replace(uneven.grids[0], kernel="grid_barrier", block_dim=(32, 1, 1)),))
    found = diagnose_state(uneven, ground="file")
    assert found.ledger[0].unknown == tuple(range(135, 140))
    assert found.verdict.cause is None


def test_not_co_resident_but_blocks_are_at_work(scene: Any) -> None:
    """While any resident block works it may end and make room: no verdict from one look."""
    found = judged(
        scene,
        grid=300,
        ctas=300,
        spinning=dict.fromkeys(range(263), (263, 300)),
        running=[263],
        max_seq_len=262144,
        warps=1,
        lanes=1,
    )
    assert found.outcome == "inconclusive"
    assert found.verdict.cause is None
    assert len(found.waits) == 263


def test_reset_race(scene: Any) -> None:
    found = judged(scene, variant="reset-race", spinning={13: (0, 12)}, max_seq_len=65536, site=2)
    assert verdict(found)[:2] == ("gpu-spin-barrier", "reset-race")
    assert found.waits[0].role == "peer"
    assert found.ledger[6].exited == (12,)
    assert "reset" in found.verdict.sentence


def test_init_race(scene: Any) -> None:
    found = judged(scene, variant="init-race", spinning={12: (1, 2), 13: (1, 2)}, max_seq_len=65536)
    assert verdict(found)[:2] == ("gpu-spin-barrier", "init-race")


@pytest.mark.parametrize("sm", [75, 90, 120])
@pytest.mark.parametrize(
    ("variant", "cause"), [("missing-fence", "missing-fence"), ("early-arrival", "missing-fence"), ("early-exit", "peer-left")]
)
def test_members_that_left_at_another_phase(scene: Any, sm: int, variant: str, cause: str) -> None:
    """Only the code tells a missing fence from a member that left for another reason; only a watchdog tells it from a race."""
    facts = {"sm": sm, "variant": variant, "spinning": {12: (3, 4)}, "max_seq_len": 65536, "site": 1}
    assert verdict(judged(scene, ground="gpu", **facts))[:2] == ("gpu-spin-barrier", cause)
    lone = judged(scene, **facts)
    assert lone.outcome == "inconclusive"
    assert lone.verdict.cause is None
    address = scene(**facts).address(12)
    assert verdict(judged(scene, memory={address: 3}, **facts))[:2] == ("gpu-spin-barrier", cause)


def test_a_lost_arrival_at_a_later_phase_has_no_name(scene: Any) -> None:
    found = judged(scene, spinning={12: (3, 4), 13: (3, 4)}, max_seq_len=65536, site=1, ground="gpu")
    assert verdict(found)[:2] == ("gpu-spin-barrier", None)


# --- one look at something that lives ---------------------------------------------------------------------------------


def test_a_member_is_still_at_work(scene: Any) -> None:
    found = judged(scene, running=[13])
    assert found.outcome == "inconclusive"
    assert found.verdict.cause is None
    assert found.ledger[6].running == (13,)
    assert found.waits[0].value == 1
    watched = judged(scene, running=[13], ground="gpu")
    assert verdict(watched)[:2] == ("gpu-spin-barrier", None)


def test_the_wait_is_over(scene: Any) -> None:
    assert judged(scene, spinning={12: (2, 2)}).outcome == "inconclusive"
    assert judged(scene, spinning={12: (2, 2)}).waits == ()
    address = scene().address(12)
    later = judged(scene, memory={address: 2})
    assert later.outcome == "inconclusive"
    assert later.waits == ()


def test_memory_is_newer_than_a_register(scene: Any) -> None:
    address = scene().address(12)
    found = judged(scene, memory={address: 1})
    assert (found.waits[0].model_extra or {})["live_value"] == 1
    assert verdict(found) == ("gpu-spin-barrier", "peer-left", "high")


def test_a_healthy_launch(scene: Any) -> None:
    found = judged(scene, spinning={}, running=range(16))
    assert found.outcome == "inconclusive"
    assert "at work" in found.verdict.sentence
    assert found.waits == ()


# --- thin evidence ----------------------------------------------------------------------------------------------------


def test_no_parameters(scene: Any) -> None:
    found = judged(scene, params=False)
    assert (found.waits[0].group, found.waits[0].role, found.waits[0].state_field) == (6, "leader", "arrival_counter")
    assert found.ledger[6].exited == (13,)


def test_no_parameters_and_an_ambiguous_size(scene: Any) -> None:
    """Target 4 in a grid of 16 fits groups of 2 (second phase) and of 4: no group, no ledger, no cause."""
    found = judged(scene, params=False, spinning={12: (1, 4)}, ground="gpu")
    assert verdict(found)[:2] == ("gpu-spin-barrier", None)
    assert found.waits[0].group is None
    assert found.waits[0].role == "leader", "block 12 leads its group in both"
    assert found.ledger == ()


def test_no_code(scene: Any) -> None:
    lone = judged(scene, code=False)
    assert (lone.outcome, lone.waits) == ("inconclusive", ())
    assert verdict(judged(scene, code=False, ground="gpu"))[:2] == ("gpu-kernel-stuck", None)


def test_no_disassembler(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ToolMissingError("nvdisasm is not installed", help_text="pip install nvidia-cuda-nvdisasm")

    monkeypatch.setattr("dsv4_repro.kernels.disasm.disassemble", missing)
    found = judged(scene)
    assert found.outcome == "inconclusive"
    assert any("nvdisasm" in item.why and "pip install" in item.remedy for item in found.unread)


@pytest.mark.parametrize(
    "kind", [Kind.REGISTERS, Kind.LANES, Kind.PARAMETERS, Kind.UNIFORM_REGISTERS, Kind.RELOCATED_IMAGE, Kind.WARPS, Kind.GRIDS]
)
@pytest.mark.parametrize("ground", ["file", "gpu"])
def test_dumps_with_parts_missing(scene: Any, tmp_path: Path, kind: Kind, ground: Any) -> None:
    """Never another cause, never silence: what is missing is said."""
    path = write_core(tmp_path / "part.nvcudmp", scene().state(), CoreOptions(omit={kind}))
    found = diagnose_dump(path, ground=ground)
    assert found.verdict.cause in ("peer-left", None)
    assert found.verdict.class_ in ("gpu-spin-barrier", "gpu-kernel-stuck", "unknown")
    if kind is not Kind.UNIFORM_REGISTERS:
        assert found.unread


def test_nothing_resident(scene: Any) -> None:
    found = judged(scene, spinning={})
    assert (found.outcome, found.verdict.class_) == ("inconclusive", "unknown")
    assert "no block was resident" in found.verdict.sentence


def test_nothing_at_all() -> None:
    found = diagnose_state(DeviceState("x", "measured", ()), ground="file")
    assert found.verdict.class_ == "unknown"
    assert "could not be read" in found.verdict.sentence


def test_unlisted_blocks(scene: Any) -> None:
    """Not all resident blocks are known: those not seen may still arrive."""
    state = scene().state()
    partial = dataclasses.replace(state, grids=(dataclasses.replace(state.grids[0], complete=False),))
    found = diagnose_state(partial, ground="file")
    assert found.verdict.cause is None
    assert found.outcome == "inconclusive"


def test_device_fault(scene: Any) -> None:
    fault = SimpleNamespace(device=0, sm=1, code=14, what="warp illegal address", block=(3, 0, 0), warp=2, lane=7)
    found = diagnose_state(scene().state(), ground="file", faults=[fault])  # type: ignore[list-item]
    assert verdict(found) == ("gpu-fault", "illegal-access", "high")
    assert "block 3, warp 2, lane 7" in found.verdict.sentence


# --- kernels without a known layout -----------------------------------------------------------------------------------


def at(
    kernels: Any, function: str, blocks: dict[int, Callable[[CodeView], int]], registers: dict[str, int] | None = None, **grid: Any
) -> DeviceState:
    """A state of a kernel of patients.cu: each block, one warp, at the PC that a function of the code gives."""
    code, lines = kernels[1](90, function)
    view = CodeView(lines.lines)
    bank = tuple((registers or {}).get(f"R{n}", 0) for n in range(32))
    uniform = tuple((registers or {}).get(f"UR{n}", 0) for n in range(63))
    ctas = []
    for index, (block, where) in enumerate(blocks.items()):
        pc = where(view)
        lane = LaneState(0, (0, 0, 0), pc, bank, 0, ENTRY + pc)
        ctas.append(CtaState((block, 0, 0), index, (WarpState(0, 1, 1, pc, (lane,), uniform, ENTRY + pc),)))
    state = GridState(
        0, 1, function, (grid.pop("grid", len(blocks)), 1, 1), (grid.pop("threads", 32), 1, 1), tuple(ctas), code=code, **grid
    )
    return DeviceState("test", "measured", (state,), {0: ("NVIDIA H200", 90, 132)})


def polled(kernels: Any, function: str, value: int, target: int) -> dict[str, int]:
    """Registers of a lane that polls: the loaded word, its target, an address."""
    _, lines = kernels[1](90, function)
    loop = CodeView(lines.lines).wait_loops()[0]
    load, compare = lines.at(loop.load), lines.at(loop.compare)
    words = dict.fromkeys(re.findall(r"U?R\d+", load.operands[-1]), 28672)
    return {**words, load.operands[0]: value, compare.operands[3]: target}


def behind_load(view: CodeView) -> int:
    return view.wait_loops()[0].load + 16


def line_of(base: str, modifier: str = "", plus: int = 0) -> Callable[[CodeView], int]:
    return lambda view: (
        next(o for o in sorted(view.lines) if view.lines[o].base == base and modifier in view.lines[o].opcode) + plus
    )


def test_grid_wide_barrier(kernels: Any) -> None:
    """The target is the size of the grid: one group, whatever the kernel."""
    params = (0x7000_0000).to_bytes(8, "little") + (400).to_bytes(4, "little")
    words = polled(kernels, "grid_barrier_once", 264, 400)
    blocks: dict[int, Callable[[CodeView], int]] = dict.fromkeys(range(264), behind_load)
    state = at(kernels, "grid_barrier_once", blocks, words, grid=400, threads=1024, params=params)
    ctas = tuple(dataclasses.replace(cta, sm=index % 132) for index, cta in enumerate(state.grids[0].ctas or ()))
    state = dataclasses.replace(state, grids=(dataclasses.replace(state.grids[0], ctas=ctas),))
    found = diagnose_state(state, ground="file")
    assert (found.waits[0].value, found.waits[0].target) == (264, 400)
    assert verdict(found)[:2] == ("gpu-spin-barrier", "not-co-resident")


def test_a_flag_of_another_device(kernels: Any) -> None:
    """A system-scope flag may be written by another GPU or the host: no barrier of this grid is blamed."""
    state = at(kernels, "flag_wait", {0: behind_load}, polled(kernels, "flag_wait", 0, 1), params=bytes(24))
    lone, watched = diagnose_state(state, ground="file"), diagnose_state(state, ground="process", hung=True)
    assert lone.outcome == "inconclusive"
    assert verdict(watched)[:2] == ("gpu-kernel-stuck", None)
    assert watched.waits[0].comparison == "=="
    renamed = dataclasses.replace(state, grids=(dataclasses.replace(state.grids[0], kernel="cross_device_reduce_1stage"),))
    assert verdict(diagnose_state(renamed, ground="server"))[:2] == ("gpu-crossrank-spin", None)
    nccl = dataclasses.replace(
        state, grids=(dataclasses.replace(state.grids[0], kernel="ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)"),)
    )
    collective = diagnose_state(nccl, ground="server")
    assert verdict(collective) == ("gpu-kernel-stuck", None, "low")
    assert "collective-desync" in collective.document()["candidates"]


@pytest.mark.parametrize("plus", [0, 16])
def test_named_barrier(kernels: Any, plus: int) -> None:
    """Half of the block has left and the other half waits for all of it: proven from one look."""
    state = at(kernels, "named_barrier_stuck", {0: line_of("BAR", plus=plus)}, threads=64)
    found = diagnose_state(state, ground="file")
    assert verdict(found)[:2] == ("gpu-barrier-intra-block", "named-barrier")


@pytest.mark.parametrize("plus", [0, 16])
def test_mbarrier_phase(kernels: Any, plus: int) -> None:
    state = at(kernels, "mbarrier_phase_stuck", {0: line_of("SYNCS", "PHASECHK", plus)})
    assert diagnose_state(state, ground="file").outcome == "inconclusive"
    assert verdict(diagnose_state(state, ground="gpu"))[:2] == ("gpu-barrier-intra-block", "phase-wait")


def test_cluster_peer(kernels: Any) -> None:
    state = at(kernels, "cluster_peer_stuck", {0: line_of("UCGABAR_WAIT"), 1: behind_load}, cluster_dim=(2, 1, 1))
    found = diagnose_state(state, ground="gpu")
    assert verdict(found)[:2] == ("gpu-barrier-intra-block", "cluster-peer")
    assert len(found.waits) == 1
    assert diagnose_state(state, ground="file").outcome == "inconclusive", "the peer polls a flag that somebody may write"
    alone = at(kernels, "cluster_peer_stuck", {0: line_of("UCGABAR_WAIT")}, grid=2, cluster_dim=(2, 1, 1))
    assert verdict(diagnose_state(alone, ground="file"))[:2] == ("gpu-barrier-intra-block", "cluster-peer")


def test_cta_barrier_alone_is_no_hang(scene: Any) -> None:
    """All warps at one CTA barrier are about to go on; that is not called a deadlock."""
    state = scene().state()
    cta = state.grids[0].ctas[0]
    same = tuple(dataclasses.replace(cta.warps[1], warp=n) for n in range(4))
    found = diagnose_state(
        dataclasses.replace(state, grids=(dataclasses.replace(state.grids[0], ctas=(dataclasses.replace(cta, warps=same),)),)),
        ground="file",
    )
    assert found.outcome == "inconclusive"


# --- what a run adds --------------------------------------------------------------------------------------------------

STEP = StepFacts(
    live_requests=3, next_n=2, rows=6, graph_rows=8, padded_requests=1,
    query_start_loc=(0, 2, 4, 6, 6), seq_lens=(1000, 900, 800, 0),
    expanded=(999, 1000, 899, 900, 799, 800, -1, 0), lengths=(249, 250, 224, 225, 199, 200, -1, 0), compress=4, producer="raw",
    max_model_len=65536, width=16384, max_seq_len=16384, origin="computed",
)  # fmt: skip


def test_step_facts_fill_the_chain(scene: Any) -> None:
    evidence = (Evidence(id="E1", kind="cuda-gdb-transcript"), Evidence(id="E2", kind="host-stacks"))
    unwedge = SimpleNamespace(attempted=True, retired=True, milliseconds=0.734)
    found = diagnose_state(scene().state(), ground="gpu", step=STEP, evidence=evidence, unwedge=unwedge, host="")
    links = {link.link: link for link in found.chain}
    assert "3 requests" in links["drain"].text
    assert "3 x 2 = 6" in links["mtp"].text
    assert "captured 8" in links["graph-padding"].text
    assert "row 6 has -1" in links["producer"].text
    assert "-1" in links["compression"].text
    assert "0.73 ms" in links["barrier"].text
    assert links["barrier"].evidence == ("E1",)
    assert {links[name].status for name in ("drain", "mtp", "graph-padding", "producer", "compression")} == {"computed"}
    assert (found.window.live_requests, found.window.graph_rows, found.window.reached) == (3, 8, True)


def test_lengths_from_memory_are_measured(scene: Any) -> None:
    found = judged(scene, memory={0x7F00_3000 + 24: 0xFFFFFFFF})
    producer = next(link for link in found.chain if link.link == "producer")
    assert (producer.status, "-1" in producer.text) == ("measured", True)


# --- never another cause ----------------------------------------------------------------------------------------------


def simulate(rng: random.Random, ctas: int, truth: str) -> tuple[dict[int, tuple[int, int]], list[int], int] | None:
    """One group of a barrier kernel, stopped at a random moment or in its hang.

    Returns (spinning block -> (polled value, target), running blocks, counter in memory); None if that run did not get there.
    """
    phases = 6
    started = ctas if truth != "not-co-resident" else rng.randrange(1, ctas)
    arrived = [0] * ctas
    polled: list[int | None] = [None] * ctas
    gone = [False] * ctas
    counter = 0
    leaves = {n for n in range(1, ctas) if rng.random() < 0.7} or {1} if truth == "peer-left" else set()
    quits = {n: rng.randrange(1, phases) for n in range(1, ctas) if rng.random() < 0.5} if truth == "missing-fence" else {}
    reset = False
    steps = rng.randrange(1, 60 * ctas) if truth == "healthy" else 4000
    for _ in range(steps):
        block = rng.randrange(started)
        if gone[block]:
            continue
        if block in leaves or (block in quits and arrived[block] == quits[block] and polled[block] is None):
            gone[block] = True
        elif polled[block] is None:
            if arrived[block] == phases:
                gone[block] = True
                if truth == "reset-race" and block == 0:
                    counter = 0
            else:
                arrived[block] += 1
                counter += 1
                polled[block] = -1
                if truth == "init-race" and not reset and block == 0:
                    counter, reset = 1, True  # its zero came after others had arrived
        else:
            polled[block] = counter
            if counter >= arrived[block] * ctas:
                polled[block] = None
    spinning = {n: (polled[n], arrived[n] * ctas) for n in range(started) if polled[n] not in (None, -1) and not gone[n]}
    running = [n for n in range(started) if not gone[n] and n not in spinning]
    stuck = spinning and not running and all(counter < target for _, target in spinning.values())
    if truth != "healthy" and not stuck:
        return None
    return {n: (value or 0, target) for n, (value, target) in spinning.items()}, running, counter


DEFECTS = ("peer-left", "not-co-resident", "reset-race", "init-race", "missing-fence")


@pytest.mark.parametrize(
    ("truth", "watched"), [("healthy", False), *((defect, watched) for defect in DEFECTS for watched in (False, True))]
)
def test_simulated_barriers_never_get_a_wrong_cause(
    scene: Any, kernels: Any, monkeypatch: pytest.MonkeyPatch, truth: str, watched: bool
) -> None:
    """A barrier simulated with each defect and with none: the verdict names that cause or none; a living launch is no hang."""
    variant = {"missing-fence": "missing-fence", "reset-race": "reset-race", "init-race": "init-race"}.get(truth, "unguarded")
    monkeypatch.setattr(diagnose, "_lines", lambda grid, unread: kernels[0](120, variant)[1].lines)
    rng = random.Random(f"{truth}{watched}")
    named = runs = 0
    for _ in range(2000):
        ctas = rng.choice([2, 2, 3, 4, 8])
        made = simulate(rng, ctas, truth)
        if made is None:
            continue
        spinning, running, counter = made
        memory = {}
        if rng.random() < 0.5 and spinning:
            memory = {scene(ctas=ctas).address(0): counter}
        sms = 132
        started = len(spinning) + len(running)
        if truth == "not-co-resident":
            sms = max(started, 1)  # the device holds exactly what was started
        early = truth == "peer-left" and rng.random() < 0.8
        state = scene(
            sm=120, grid=ctas, ctas=ctas, spinning=spinning, running=running, variant=variant, memory=memory, sms=sms,
            warps=1, lanes=1, max_seq_len=16384 if early else 262144,
        ).state()  # fmt: skip
        found = diagnose_state(state, ground="file", hung=watched)
        runs += 1
        if truth == "healthy":
            assert found.outcome == "inconclusive", f"{found.verdict.sentence}: {spinning} {running} {counter}"
        else:
            assert found.verdict.cause in (truth, None), f"{found.verdict.sentence}: {spinning} {running} {counter}"
            named += found.verdict.cause == truth
        if runs == 60:
            break
    assert runs >= 30
    if truth in ("peer-left", "not-co-resident", "reset-race"):
        assert named >= runs // 3, f"only {named} of {runs} got a cause"
