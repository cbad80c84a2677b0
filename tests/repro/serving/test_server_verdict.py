"""One verdict over all ranks: the same state, different states, a victim beside the held rank, and less and less to read."""

from __future__ import annotations

import dataclasses
import json
import lzma
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.chain import StepFacts
from dsv4_repro.forensics.corefile import open_core
from dsv4_repro.forensics.device_state import DeviceState, Unread
from dsv4_repro.forensics.records import Diagnosis
from dsv4_repro.kernels.abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE, TopKParams
from dsv4_repro.repro.ground import Artefact, CaptureOutcome
from dsv4_repro.repro.serving.capture_log import rank_folder, rank_tag, who
from dsv4_repro.repro.serving.host_looks import AgentAskCollector
from dsv4_repro.repro.serving.measured_step import agent_launches, known_wait, measured_step, with_parameters
from dsv4_repro.repro.serving.records import Assessment, EngineSample, Rank, ServerTarget, Snapshot
from dsv4_repro.repro.serving.server_verdict import diagnose_server

CORES = Path(__file__).resolve().parents[2] / "fixtures" / "cores"
HUNG = Assessment("hung", 100.0, 90.0, ("tokens stand still",), ("the recorder's step does not end",))
RANKS = (Rank(816, 0, 1, gpu_uuid="GPU-0", gpu_index=0), Rank(817, 1, 2, gpu_uuid="GPU-1", gpu_index=1))
STEP = {
    "number": 44, "requests": 3, "tokens": 6, "padded_requests": 4, "padded_tokens": 8, "graph_mode": "full", "native": True,
    "next_n": 2, "decode_min": 0, "decode_max": 2, "decode_slots": 4, "decode_zero": 1,
}  # fmt: skip


@lru_cache(maxsize=8)
def core(name: str) -> DeviceState:
    """A dump that a driver wrote of a kernel of ours."""
    with lzma.open(CORES / f"{name}.nvcudmp.xz") as packed, tempfile.NamedTemporaryFile(suffix=".nvcudmp") as plain:
        plain.write(packed.read())
        plain.flush()
        with open_core(plain.name) as dump:
            return dump.state


def renamed(state: DeviceState, kernel: str) -> DeviceState:
    return dataclasses.replace(state, grids=tuple(dataclasses.replace(grid, kernel=kernel) for grid in state.grids))


class Case:
    """Captures under construction."""

    def __init__(self, folder: Path, ranks: Sequence[Rank] = RANKS) -> None:
        self.folder, self.ranks = folder, ranks
        self.captures: list[CaptureOutcome] = []

    def file(self, rank: Rank | None, kind: str, name: str, data: str | bytes = "x") -> Artefact:
        place = self.folder / rank_folder(rank, self.ranks) if rank is not None else self.folder
        place.mkdir(parents=True, exist_ok=True)
        path = place / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return Artefact(kind, path.absolute(), "measured")

    def add(self, collector: str, rank: Rank | None = None, *, artefacts: Sequence[Artefact] = (), **more: Any) -> None:
        facts = {**more.pop("facts", {}), **(who(rank) if rank is not None else {})}
        self.captures.append(CaptureOutcome(collector, "none", 0.1, tuple(artefacts), facts=facts, **more))

    def device(self, rank: Rank, state: DeviceState) -> None:
        kept = self.file(rank, "cuda-gdb", f"cuda_gdb-{rank_tag(rank)}.txt", "kept\n")
        self.add("cuda_gdb", rank, artefacts=[kept], state=state)

    def not_read(self, rank: Rank, why: str = "ptrace is refused", what: str = "cuda-gdb attach") -> None:
        self.add("cuda_gdb", rank, unread=(Unread(what, why, "sysctl …"),))

    def rings(self, step: Mapping[str, Any] | None = STEP) -> None:
        files = [self.file(rank, "recorder-ring", f"ring-{rank.pid}-{rank.start_ticks}.bin") for rank in self.ranks]
        state = {"begun": 44, "releases": 0, "unfinished": [44], "step": step}
        self.add("recorder_rings", artefacts=files, facts={"rings": {str(rank.pid): state for rank in self.ranks}})

    def asked(self, rank: Rank, *, unchanged: bool = True, stalled_s: float = 3.0, **more: Any) -> None:
        facts = {"unchanged": unchanged, "stalled_s": stalled_s, "launches": [launch(**more)]}
        kept = self.file(rank, "row-states-list", f"row_states-{rank_tag(rank)}.json", json.dumps(facts))
        self.add("agent_row_states", rank, artefacts=[kept], facts=facts)

    def cards(self, name: str = "NVIDIA H200") -> None:
        self.add("nvml", facts={"names": {str(index): {"name": name, "sm": 90} for index in range(len(self.ranks))}})

    def judge(self, assessment: Assessment = HUNG, snapshot: Snapshot | None = None, **more: Any) -> Diagnosis:
        target = ServerTarget("http://127.0.0.1:8000", ranks=tuple(self.ranks))
        return diagnose_server(self.captures, snapshot, assessment, self.folder, target=target, **more)


def launch(**more: Any) -> dict[str, Any]:
    return {
        "workspace": "0x7f0000000000", "lengths_address": "0x7f0000200000", "rows": 8, "width": 16384, "top_k": 2048,
        "max_seq_len": 16384, "arrival_counters": [0, 0, 0, 0, 0, 0, 1, 0],
        "lengths": [3058, 3059, 3059, 3060, 3059, 3060, -1, 0], "read_ns": 1, **more,
    }  # fmt: skip


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path / "ev")


def verdict(found: Diagnosis) -> tuple[str, str | None, str]:
    return found.verdict.class_, found.verdict.cause, found.verdict.confidence


def row(found: Diagnosis, rank: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = found.document()["ranks"]
    return next(entry for entry in rows if entry["rank"] == rank)


def link(found: Diagnosis, name: str) -> tuple[str, str]:
    one = next(entry for entry in found.chain if entry.link == name)
    return one.status, one.text


def test_the_same_on_both_ranks_is_one_verdict_that_lists_them(case: Case) -> None:
    case.rings()
    for rank in RANKS:
        case.device(rank, core("hung-topk"))
    found = case.judge()
    assert verdict(found) == ("gpu-spin-barrier", "peer-left", "high")
    assert found.outcome == "hang"
    assert found.verdict.signature == "vllm-51593"
    assert found.verdict.sentence.startswith("ranks 0, 1: block 12")
    assert "the same on 2 ranks" in found.verdict.sentence
    assert [(wait.rank, wait.device, wait.value, wait.target) for wait in found.waits] == [(0, 0, 1, 2), (1, 1, 1, 2)]
    assert {group["rank"] for group in found.document()["ledger"]} == {0, 1}
    identities = {row(found, rank)["identity"] for rank in (0, 1)}
    assert identities == {found.verdict.identity}
    assert found.document()["output_rank"]["rank"] == 0
    assert found.window.model_dump() == {
        "live_requests": 3, "rows": 6, "graph_rows": 8, "padded_requests": 1, "reached": True,
    }  # fmt: skip


def test_the_upper_links_are_measured_by_the_recorder_and_cite_it(case: Case) -> None:
    case.rings()
    case.device(RANKS[0], core("hung-topk"))
    case.device(RANKS[1], core("hung-topk"))
    found = case.judge(step=StepFacts(compress=4, max_model_len=65536, width=16384, live_requests=99))
    assert link(found, "drain") == ("measured", "3 requests were left in the decode batch")
    assert link(found, "mtp") == ("measured", "each request carries 2 query positions: 3 x 2 = 6 rows")
    assert link(found, "graph-padding")[0] == "measured"
    assert link(found, "compression")[0] == "computed"
    assert link(found, "barrier")[0] == "measured"
    kinds = {item.id: item.kind for item in found.evidence}
    cited = next(entry for entry in found.chain if entry.link == "drain").evidence
    assert {kinds[number] for number in cited} == {"recorder-ring"}
    barrier = next(entry for entry in found.chain if entry.link == "barrier").evidence
    assert {kinds[number] for number in barrier} == {"cuda-gdb"}
    assert all("rank-0" in str(item.path) for item in found.evidence if item.id in barrier)


@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("kernel", ["cross_device_reduce_1stage", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"])
def test_the_rank_that_spins_in_an_all_reduce_is_the_victim(case: Case, held: int, kernel: str) -> None:
    case.device(RANKS[held], core("hung-topk"))
    case.device(RANKS[1 - held], renamed(core("crossrank"), kernel))
    found = case.judge()
    assert verdict(found)[:2] == ("gpu-spin-barrier", "peer-left")
    assert found.verdict.sentence.startswith(f"rank {held}: block 12")
    assert f"rank {1 - held} waits for it in {kernel}: a victim, not the cause" in found.verdict.sentence
    assert row(found, held)["role"] == "held"
    assert row(found, 1 - held)["role"] == "waits for a peer"
    assert {wait.rank for wait in found.waits if wait.target == 2 and wait.state_field == "arrival_counter"} == {held}
    assert {group["rank"] for group in found.document()["ledger"]} == {held}


def test_a_barrier_under_a_communication_kernel_s_name_is_no_culprit(case: Case) -> None:
    """Whatever scope its load has, a kernel of a communication library waits for somebody else."""
    case.device(RANKS[0], renamed(core("hung-topk"), "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 2>(x)"))
    case.not_read(RANKS[1])
    found = case.judge()
    assert row(found, 0)["role"] == "waits for a peer"
    assert verdict(found) == ("gpu-kernel-stuck", None, "low")
    assert "what holds the peer is open" in found.verdict.sentence
    assert found.next == "dsv4-repro autopsy 817 --attach"


def test_a_spinning_rank_whose_peer_was_not_seen_is_not_given_a_class_that_may_be_wrong(case: Case) -> None:
    case.device(RANKS[0], renamed(core("crossrank"), "cross_device_reduce_1stage"))
    case.not_read(RANKS[1])
    found = case.judge()
    assert verdict(found) == ("gpu-kernel-stuck", None, "low")
    assert "rank 0 waits for a peer" in found.verdict.sentence
    assert "rank 1 was not seen" in found.verdict.sentence


def test_all_ranks_in_communication(case: Case) -> None:
    for rank in RANKS:
        case.device(rank, renamed(core("crossrank"), "cross_device_reduce_1stage"))
    found = case.judge()
    assert found.verdict.class_ in ("gpu-crossrank-spin", "gpu-kernel-stuck")
    assert found.outcome == "hang"
    assert found.verdict.cause is None
    assert found.ledger == ()


def test_held_by_different_things(case: Case) -> None:
    case.device(RANKS[0], core("hung-topk"))
    case.device(RANKS[1], core("named-barrier"))
    found = case.judge()
    assert verdict(found) == ("gpu-kernel-stuck", None, "medium")
    assert "held by different things: rank 0:" in found.verdict.sentence
    assert found.verdict.signature is None


def test_two_causes_of_one_class_leave_the_cause_open(case: Case) -> None:
    case.device(RANKS[0], core("hung-topk"))
    case.device(RANKS[1], core("not-co-resident"))
    found = case.judge()
    assert verdict(found)[:2] == ("gpu-spin-barrier", None)
    assert "do not agree on the cause" in found.verdict.sentence


def test_one_rank_read_and_the_other_dead(case: Case) -> None:
    case.device(RANKS[0], core("hung-topk"))
    case.add("cuda_gdb", RANKS[1], unread=(Unread("cuda-gdb on rank1-pid-817", "the process has ended"),))
    found = case.judge()
    assert verdict(found)[:2] == ("gpu-spin-barrier", "peer-left")
    assert row(found, 1)["role"] == "ended"
    assert "rank 1 was not seen" in found.verdict.sentence


def test_row_states_alone_tell_counter_and_target_without_ptrace(case: Case) -> None:
    case.rings()
    case.cards()
    for rank in RANKS:
        case.asked(rank)
        case.not_read(rank)
    found = case.judge()
    assert verdict(found) == ("gpu-spin-barrier", "peer-left", "medium")
    assert found.verdict.signature == "vllm-51593"
    assert found.verdict.identity is None
    wait = found.waits[0]
    assert (wait.value, wait.target, wait.comparison, wait.group, wait.block, wait.role) == (1, 2, ">=", 6, (12, 0, 0), "leader")
    assert int(str(wait.address), 16) == 0x7F0000000000 + 6 * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET
    extra = wait.model_extra or {}
    assert (extra["value_status"], extra["target_status"], extra["block_status"]) == ("measured", "computed", "inferred")
    assert link(found, "producer") == (
        "measured",
        "length of row 6, read from device memory: -1 (a context length cannot be negative)",
    )
    assert link(found, "barrier")[0] == "measured"
    assert link(found, "dispatch")[0] == "not observed"
    assert {row(found, rank)["read_by"] for rank in (0, 1)} == {"memory alone"}


def test_a_debugger_that_shows_the_kernel_and_no_block_is_completed_by_the_row_states(case: Case) -> None:
    blind = core("hung-topk")
    blind = dataclasses.replace(blind, grids=tuple(dataclasses.replace(grid, ctas=None, params=None) for grid in blind.grids))
    case.cards()
    for rank in RANKS:
        case.device(rank, blind)
    assert verdict(case.judge())[:2] == ("gpu-kernel-stuck", None)
    for rank in RANKS:
        case.asked(rank)
    found = case.judge()
    assert verdict(found) == ("gpu-spin-barrier", "peer-left", "medium")
    assert [(wait.rank, wait.value, wait.target) for wait in found.waits] == [(0, 1, 2), (1, 1, 2)]
    assert "row states told it" in found.document()["notes"][0]


def test_a_known_wait_in_memory_does_not_overrule_another_kernel_that_was_seen(case: Case) -> None:
    case.cards()
    case.device(RANKS[0], renamed(core("crossrank"), "cross_device_reduce_1stage"))
    case.asked(RANKS[0])
    case.not_read(RANKS[1])
    found = case.judge()
    assert row(found, 0)["role"] == "waits for a peer"
    assert found.verdict.class_ == "gpu-kernel-stuck"


def test_without_a_known_card_the_target_is_not_made_up(case: Case) -> None:
    case.asked(RANKS[0])
    case.not_read(RANKS[1])
    found = case.judge()
    assert verdict(found)[:2] == ("gpu-spin-barrier", "peer-left")
    assert found.waits == ()
    assert "its target is more than 1" in found.verdict.sentence
    assert found.unread


@pytest.mark.parametrize(
    "more",
    [
        {"unchanged": False},
        {"stalled_s": 0.2},
        {"max_seq_len": 40000},
        {"lengths": [3058, 3059, 3059, 3060, 3059, 3060, 0, 0]},
        {"arrival_counters": [0, 0, 0, 0, 0, 0, 2, 0]},
        {"arrival_counters": [0] * 8},
        {"lengths": [1, 1, 1, 1, 1, 1, -1, -1], "arrival_counters": [0, 0, 0, 0, 0, 0, 1, 1]},
    ],
)
def test_row_states_that_do_not_show_the_known_wait_show_nothing(case: Case, more: dict[str, Any]) -> None:
    """Counters that move, a step that is not overdue, peers that stay, legal lengths, other counts, two places: none is guessed."""
    case.cards()
    case.asked(RANKS[0], **more)
    case.not_read(RANKS[0])
    found = case.judge()
    assert verdict(found) == ("gpu-kernel-stuck", None, "medium")
    assert found.verdict.signature is None


def test_a_wait_that_was_read_is_not_a_hang_before_the_watchdog_says_so(case: Case) -> None:
    case.cards()
    case.asked(RANKS[0])
    found = case.judge(dataclasses.replace(HUNG, state="suspect", device_signals=()))
    assert verdict(found) == ("unknown", None, "low")
    assert found.outcome == "inconclusive"


def test_nothing_readable(case: Case) -> None:
    for rank in RANKS:
        case.not_read(rank)
    found = case.judge()
    assert verdict(found) == ("gpu-kernel-stuck", None, "medium")
    assert "the device's state could not be read" in found.verdict.sentence
    assert "the recorder's step does not end" in found.verdict.sentence
    assert any(item.why == "ptrace is refused" for item in found.unread)
    suspect = case.judge(Assessment("suspect", 1.0, 0.0, ("no token for 5 s",)))
    assert verdict(suspect) == ("unknown", None, "low")
    assert suspect.outcome == "inconclusive"
    assert "no token for 5 s" in suspect.verdict.sentence


def test_nothing_at_all(tmp_path: Path) -> None:
    found = diagnose_server([], None, Assessment("suspect", 0.0, 0.0), tmp_path)
    assert found.outcome == "inconclusive"
    assert found.document()["output_rank"]["rank"] is None


def test_what_moved_again_is_not_hung(case: Case) -> None:
    for rank in RANKS:
        case.not_read(rank, "not attached, it recovered: generation_tokens 812 -> 900", "cuda-gdb on a rank")
    found = case.judge()
    assert verdict(found) == ("not-hung", None, "medium")
    assert found.outcome == "clean"
    assert "generation_tokens 812 -> 900" in found.verdict.sentence


def test_no_kernel_on_any_gpu_points_at_the_host(case: Case) -> None:
    for rank in RANKS:
        case.not_read(rank, "attached, and no kernel is shown", "cuda-gdb kernels")
    found = case.judge()
    assert verdict(found)[0] == "unknown"
    assert "waits on the host" in found.verdict.sentence
    assert {row(found, rank)["role"] for rank in (0, 1)} == {"idle"}


def test_one_rank_alone_needs_no_collective(tmp_path: Path) -> None:
    case = Case(tmp_path / "ev", RANKS[:1])
    case.rings()
    case.device(RANKS[0], core("hung-topk"))
    case.add("nccl_ras", unread=(Unread("NCCL RAS", "not applicable: one rank, so no communicator between GPUs"),))
    found = case.judge()
    assert verdict(found) == ("gpu-spin-barrier", "peer-left", "high")
    assert any(item.why.startswith("not applicable") for item in found.unread)


def test_the_engine_s_counter_stands_in_where_there_is_no_recorder(case: Case) -> None:
    case.add("metrics", artefacts=[case.file(None, "metrics", "metrics-1.prom", "vllm:num_requests_running 3\n")])
    case.device(RANKS[0], core("hung-topk"))
    case.device(RANKS[1], core("hung-topk"))
    snapshot = Snapshot(at=1.0, engine=EngineSample(at=1.0, running=3))
    found = case.judge(snapshot=snapshot)
    assert link(found, "drain") == ("measured", "3 requests were running, by the engine's own counter")
    assert found.window.live_requests == 3
    assert found.window.reached is None


def test_host_threads_are_told_with_their_rank(case: Case) -> None:
    stack = (
        "Process 816: VLLM::Worker_TP0\nPython v3.12.3 (/usr/bin/python3.12)\n\n"
        'Thread 900 (idle): "WorkerAsyncOutputCopy"\n    synchronize (torch/cuda/streams.py:231)\n'
        "    get_output (vllm/v1/worker/gpu_model_runner.py:250)\n"
    )
    case.rings()
    case.add("host_stacks", RANKS[0], artefacts=[case.file(RANKS[0], "host-stacks", "host_stacks-rank0-pid-816-look1.txt", stack)])
    case.device(RANKS[0], core("hung-topk"))
    case.not_read(RANKS[1])
    found = case.judge()
    status, text = link(found, "host")
    assert status == "measured"
    assert text == "WorkerAsyncOutputCopy of rank 0 waits for the GPU (a CUDA event or stream)"
    cited = next(entry for entry in found.chain if entry.link == "host").evidence
    assert {item.kind for item in found.evidence if item.id in cited} == {"host-stacks"}


def test_a_collective_that_one_rank_never_launched_is_judged_by_the_classifier(case: Case) -> None:
    """NCCL on one rank, nothing on the other's GPU; RAS twice, and the late rank back at its queue."""
    answer = (
        "NCCL version 2.27.5 compiled with CUDA 13.0\n\nJob summary\n===========\n\nCommunicators... (0.00s)\n=============\n\n"
        "Errors\n======\n\n#0-0 (27a079b828ff1a75) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
        "  1 ranks have launched up to operation 41\n  1 ranks have launched up to operation 40\n"
        "  Rank 0 has launched up to operation 41 -- GPU 0 managed by process 816 on node 10.0.0.1\n"
        "  Rank 1 has launched up to operation 40 -- GPU 1 managed by process 817 on node 10.0.0.1\n"
    )
    case.add("nccl_ras", artefacts=[case.file(None, "nccl-ras", f"nccl_ras-{number}.txt", answer) for number in (1, 2)])
    case.device(RANKS[0], renamed(core("crossrank"), "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"))
    case.not_read(RANKS[1], "attached, and no kernel is shown", "cuda-gdb kernels")
    found = case.judge()
    assert found.outcome == "hang"
    assert found.verdict.class_ in ("collective-desync", "gpu-kernel-stuck")
    assert not found.verdict.sentence.startswith("rank 0:")
    ras = found.document()["ras"]
    assert (ras["answers"], ras["unchanged"]) == (2, True)
    assert ras["communicators"][0]["groups"] == {"AllReduce": [[1, 41], [1, 40], [1, 41], [1, 40]]}


def test_workers_that_died_are_the_classifier_s_to_judge(case: Case) -> None:
    log = (
        "(EngineCore pid=810) ERROR 11-29 14:05:00 [multiproc_executor.py:300] Worker proc VllmWorker-1 died unexpectedly, "
        "shutting down executor.\n"
        "(APIServer pid=800) ERROR 11-29 14:05:01 [async_llm.py:700] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
        "encountered an issue. See stack trace (above) for the root cause.\n"
    )
    case.add("engine_log", artefacts=[case.file(None, "engine-log", "engine_log.txt", log)])
    for rank in RANKS:
        case.not_read(rank, "the process has ended", "cuda-gdb on a rank")
    found = case.judge(Assessment("crashed", 1.0, 0.0, ("the engine has ended",)))
    assert found.verdict.class_ == "worker-dead"
    assert found.outcome == "other"
    assert {row(found, rank)["role"] for rank in (0, 1)} == {"ended"}


def test_parameters_come_from_the_agent_s_launch_where_one_fits() -> None:
    state = core("hung-topk")
    bare = dataclasses.replace(state, grids=tuple(dataclasses.replace(grid, params=None) for grid in state.grids))
    launches = agent_launches({"launches": [launch()]})
    filled, changed = with_parameters(bare, launches)
    assert changed
    params = TopKParams.unpack(filled.grids[0].params or b"")
    assert (params.num_rows, params.ctas_per_group, params.max_seq_len, params.row_states) == (8, 2, 16384, 0x7F0000000000)
    assert with_parameters(state, launches) == (state, False)
    assert with_parameters(bare, [*launches, *launches])[1] is False
    # Eight blocks are the graph of four rows, whose launch shares the workspace of the largest.
    small = dataclasses.replace(bare, grids=tuple(dataclasses.replace(grid, grid_dim=(8, 1, 1)) for grid in bare.grids))
    filled, changed = with_parameters(small, launches)
    assert changed
    params = TopKParams.unpack(filled.grids[0].params or b"")
    assert (params.num_rows, params.ctas_per_group) == (4, 2)
    assert with_parameters(bare, agent_launches({"launches": [launch(rows=5)]}))[1] is False
    assert with_parameters(dataclasses.replace(bare, devices={}), launches)[1] is False
    assert agent_launches({"launches": [{"workspace": "x"}, {}, launch(lengths="a")]}) == ()


def test_a_step_is_measured_or_the_plan_s() -> None:
    planned = StepFacts(live_requests=5, compress=4, origin="computed")
    assert measured_step(None, (), planned) is planned
    assert measured_step({"step": None}, (), planned) is planned
    found = measured_step({"step": STEP}, (), planned)
    assert found is not None
    assert (found.live_requests, found.rows, found.graph_rows, found.padded_requests, found.origin) == (3, 6, 8, 1, "measured")
    assert (found.compress, found.producer, found.seq_lens) == (4, "native", ())
    eager = measured_step({"step": {**STEP, "graph_mode": "none", "decode_zero": None}}, (), None)
    assert eager is not None
    assert eager.graph_rows is None


def test_the_known_wait_asks_for_numbers() -> None:
    assert known_wait({}) is None
    assert known_wait({"unchanged": True, "stalled_s": "long", "launches": [launch()]}) is None
    assert known_wait({"unchanged": True, "stalled_s": 2.0, "launches": [launch()]}) is not None


def test_the_agent_s_answer_becomes_words_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_repro.repro.agent_ask import RowStates
    from dsv4_repro.repro.serving import host_looks

    answers = iter([launch(), launch(arrival_counters=[0] * 8)])

    def ask(*_: object, **__: object) -> RowStates:
        return RowStates.model_validate({"launches": [next(answers)], "stalled_s": 2.0})

    monkeypatch.setattr(host_looks, "ask_row_states", ask)
    found = AgentAskCollector(tmp_path, tmp_path, "816-1", "rank0-pid-816").collect()
    assert found.facts["unchanged"] is False
    assert found.state is not None
    assert found.state.grids == ()
    assert found.state.memory[0x7F0000200000 + 4 * 6] == 0xFFFFFFFF
