"""Verdict and chain from the agent's evidence: no more than it carries, weaker when files are missing, never a wrong name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.autopsy import autopsy_paths
from dsv4_repro.forensics.records import Diagnosis

from .agent_recordings import BEFORE, COUNTERS, LENGTHS, STUCK, answer, launch, ring, row_states

ENDED = {**STUCK, "times": (*STUCK["times"][:3], 0, STUCK["times"][4], 110_000_000_000)}
LOG = (
    "(EngineCore pid=1764) INFO 11-29 21:34:04 [core.py:113] Initializing a V1 LLM engine (v0.23.0) with config: "
    "model='m', tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1\n"
)


def judge(folder: Path, files: dict[str, Any]) -> Diagnosis:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return autopsy_paths([folder]).diagnosis


def words(diagnosis: Diagnosis) -> tuple[str, str | None, str]:
    return diagnosis.verdict.class_, diagnosis.verdict.cause, diagnosis.verdict.confidence


RING, STATES, LOGGED = {"ring-2585-7283.bin": ring()}, {"row_states-rank0-pid-2585.json": row_states()}, {"log.txt": LOG.encode()}


def test_ring_and_row_states_tell_the_known_wait_and_the_upper_chain(tmp_path: Path) -> None:
    found = judge(tmp_path, {**RING, **STATES})
    assert words(found) == ("gpu-spin-barrier", "peer-left", "medium")
    assert found.verdict.signature == "vllm-51593"
    assert "no instruction was seen" in (found.verdict.sentence or "")
    assert found.unread[0].what == "the wait's instruction and target"
    links = {link.link: link for link in found.chain}
    assert {name: links[name].status for name in ("drain", "mtp", "graph-padding", "producer", "barrier", "disagreement")} == {
        "drain": "measured", "mtp": "measured", "graph-padding": "measured", "producer": "measured", "barrier": "measured",
        "disagreement": "inferred",
    }  # fmt: skip
    assert links["mtp"].text.endswith("3 x 2 = 6 rows")
    assert "6 rows are padded to the captured 8" in links["graph-padding"].text
    kinds = {item.id: item.kind for item in found.evidence}
    assert {kinds[one] for one in links["drain"].evidence} == {"agent ring"}
    assert {kinds[one] for one in links["barrier"].evidence} == {"agent"}
    window = found.window
    assert window is not None
    assert (window.live_requests, window.rows, window.graph_rows, window.padded_requests, window.reached) == (3, 6, 8, 1, True)


def test_row_states_alone_still_tell_the_wait_and_nothing_of_the_batch(tmp_path: Path) -> None:
    found = judge(tmp_path, STATES)
    assert words(found) == ("gpu-spin-barrier", "peer-left", "medium")
    assert "drain" not in {link.link for link in found.chain}


def test_one_read_is_of_low_confidence(tmp_path: Path) -> None:
    assert words(judge(tmp_path, {"answer-2585-7283.json": answer()})) == ("gpu-spin-barrier", "peer-left", "low")


def test_the_same_read_kept_twice_is_one_read_and_a_later_one_is_another(tmp_path: Path) -> None:
    one = row_states(unchanged=None)
    twice = judge(tmp_path / "a", {"answer-2585-7283.json": answer(), "row_states-rank0-pid-2585.json": one})
    assert words(twice) == ("gpu-spin-barrier", "peer-left", "low")
    later = judge(tmp_path / "b", {"answer-2585-7283.json": answer(stalled_s=9.5), "row_states-rank0-pid-2585.json": one})
    assert words(later) == ("gpu-spin-barrier", "peer-left", "medium")


def test_the_ring_alone_says_only_that_the_gpu_holds_the_step(tmp_path: Path) -> None:
    found = judge(tmp_path, RING)
    assert words(found) == ("gpu-kernel-stuck", None, "low")
    assert "2.6 s" in (found.verdict.sentence or "")
    assert found.verdict.signature is None
    assert {link.link for link in found.chain} == {"drain", "mtp", "graph-padding"}


def test_a_long_stand_still_of_the_only_worker_is_surer(tmp_path: Path) -> None:
    late = ring(heard=STUCK["times"][1] + 60_000_000_000)
    assert words(judge(tmp_path, {"ring-2585-7283.bin": late, **LOGGED})) == ("gpu-kernel-stuck", None, "medium")


@pytest.mark.parametrize(
    "raw",
    [
        ring(BEFORE),
        ring(BEFORE, ENDED),
        ring(heard=STUCK["times"][1] + 20_000_000),
        ring(heard=0),
        ring(BEFORE, {**STUCK, "mode": 0}),
    ],
    ids=["all ended", "output came", "20 ms old", "no later time", "a prefill of 2.6 s"],
)
def test_a_ring_of_a_server_at_work_is_no_hang(tmp_path: Path, raw: bytes) -> None:
    found = judge(tmp_path, {"ring-2585-7283.bin": raw})
    assert found.outcome != "hang"
    assert found.verdict.class_ in ("unknown", "not-hung")


@pytest.mark.parametrize(
    "states",
    [
        row_states(unchanged=False),
        row_states(stalled_s=0.2),
        row_states(stalled_s=None),
        row_states(launches=[launch(max_seq_len=65536)]),
        row_states(launches=[launch(arrival_counters=[0] * 16)]),
        row_states(launches=[launch(arrival_counters=[2 if one == 1 else one for one in COUNTERS])]),
        row_states(launches=[launch(lengths=[max(one, 0) for one in LENGTHS])]),
        row_states(launches=[launch(arrival_counters=[1] * 16)]),
        row_states(launches=[launch(arrival_counters=COUNTERS[:4])]),
    ],
    ids=["changed", "young", "no age", "peers stay", "zeroes", "two arrivals", "legal lengths", "several places", "cut short"],
)
def test_row_states_that_do_not_show_the_wait_name_no_barrier(tmp_path: Path, states: dict[str, Any]) -> None:
    found = judge(tmp_path, {"row_states-rank0-pid-2585.json": states})
    assert words(found)[:2] == ("unknown", None)
    with_ring = judge(tmp_path, RING)
    assert with_ring.verdict.class_ == "gpu-kernel-stuck"
    assert "barrier" not in {link.link for link in with_ring.chain}


def test_a_wait_that_ended_since_is_no_hang(tmp_path: Path) -> None:
    found = judge(tmp_path, {"answer-2585-7283.json": answer(), "ring-2585-7283.bin": ring(BEFORE, ENDED, heard=111_000_000_000)})
    assert found.outcome != "hang"


def test_a_step_that_every_worker_launched_is_not_the_hosts_fault(tmp_path: Path) -> None:
    notice = LOG + (
        "(Worker pid=2585) WARNING 11-29 21:34:30 [jit_monitor.py:106] Triton kernel JIT compilation during inference: _kernel\n"
        "(EngineCore pid=1764) INFO 11-29 21:35:30 [shm_broadcast.py:801] No available shared memory broadcast block found in 60 "
        "seconds.\n"
    )
    alone = judge(tmp_path, {"log.txt": notice.encode()})
    assert alone.verdict.class_ in ("host-jit-compile", "unknown")
    found = judge(tmp_path, RING)
    assert found.verdict.class_ == "gpu-kernel-stuck"


def test_two_ranks_each_cite_their_own(tmp_path: Path) -> None:
    found = judge(
        tmp_path,
        {
            "ring-2585-7283.bin": ring(),
            "ring-2586-7284.bin": ring(pid=2586, rank=1),
            "row_states-rank1-pid-2586.json": row_states(),
            "row_states-rank0-pid-2585.json": row_states(),
        },
    )
    assert words(found) == ("gpu-spin-barrier", "peer-left", "medium")
    decisive = (found.model_extra or {})["decisive"]
    assert [row["text"].partition(":")[0] for row in decisive if row["rule"] == "agent-row-states"] == ["rank 0", "rank 1"]


#: What cuda-gdb showed of the same worker, as recorded (lines of its threads left out).
LOOK = (Path(__file__).parent / "recorded" / "cuda_gdb-wedged-vllm-0.23.0.txt").read_bytes()


def test_a_look_at_the_device_decides_and_the_agent_measures_what_it_could_not_see(tmp_path: Path) -> None:
    alone = judge(tmp_path / "a", {"cuda_gdb.txt": LOOK})
    assert words(alone) == ("gpu-spin-barrier", "peer-left", "high")
    assert {link.link: link.status for link in alone.chain}["producer"] == "inferred"
    found = judge(tmp_path / "b", {"cuda_gdb.txt": LOOK, **RING, **STATES})
    assert words(found) == ("gpu-spin-barrier", "peer-left", "high")
    assert found.verdict.identity == alone.verdict.identity
    status = {link.link: link.status for link in found.chain}
    assert [status[name] for name in ("drain", "mtp", "graph-padding", "producer", "barrier")] == ["measured"] * 5


def test_ranks_are_not_mixed_in_one_chain(tmp_path: Path) -> None:
    other = row_states(launches=[launch(workspace="0x7f8dd2000000")])
    two = {"cuda_gdb.txt": LOOK, "ring-2585-7283.bin": ring(), "ring-2586-7284.bin": ring(pid=2586, rank=1)}
    known = {"row_states-rank0-pid-2585.json": row_states(), "row_states-rank1-pid-2586.json": other}
    found = judge(tmp_path / "a", {**two, **known})
    links = {link.link: link for link in found.chain}
    paths = {item.id: item.path for item in found.evidence}
    assert [paths[one] for one in links["drain"].evidence] == ["ring-2585-7283.bin"]
    assert [paths[one] for one in links["producer"].evidence] == ["row_states-rank0-pid-2585.json"]
    # The word that the debugger saw polled is in nobody's row states: whose step this is stays open.
    del known["row_states-rank0-pid-2585.json"]
    strange = judge(tmp_path / "b", {**two, **known})
    assert {link.link: link.status for link in strange.chain}["drain"] == "not observed"


STARTED = LOG + (
    "(Worker pid=2585) INFO 11-29 21:34:28 [gpu_model_runner.py:5092] Starting to load model /m...\n"
    "(EngineCore pid=1764) INFO 11-29 21:34:34 [core.py:313] init engine (profile, create kv cache, warmup model) took 4.9 s\n"
    "(APIServer pid=1158) INFO:     Application startup complete.\n"
)
NOTICE = (
    "(Worker pid=2585) WARNING 11-29 21:34:37 [jit_monitor.py:103] Triton kernel JIT compilation during inference: _kernel. This "
    "causes a latency spike\n"
)


def test_a_finished_start_is_no_proof_that_what_follows_moves(tmp_path: Path) -> None:
    idle = judge(tmp_path / "a", {"log.txt": STARTED.encode()})
    assert words(idle)[:2] == ("not-hung", "startup")
    used = judge(tmp_path / "b", {"log.txt": (STARTED + NOTICE).encode()})
    assert words(used)[0] == "unknown"
    stuck = judge(tmp_path / "c", {"log.txt": STARTED.encode(), **RING})
    assert words(stuck)[0] == "gpu-kernel-stuck"


def test_a_worker_that_waits_for_its_gpu_does_not_compile(tmp_path: Path) -> None:
    stats = (
        "(APIServer pid=1158) INFO 11-29 21:34:{:02d} [loggers.py:310] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg "
        "generation throughput: 0.0 tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%\n"
    )
    log = STARTED + NOTICE + stats.format(48) + stats.format(58)
    stack = (
        "Process 2585: VLLM::Worker\n"
        "Python v3.12.3 (/usr/bin/python3.12)\n\n"
        'Thread 2585 (active): "MainThread"\n'
        "    GPUModelRunner._get_valid_sampled_token_count (vllm/v1/worker/gpu_model_runner.py:4773)\n"
        "    WorkerProc.worker_busy_loop (vllm/v1/executor/multiproc_executor.py:982)\n"
    )
    assert words(judge(tmp_path / "a", {"log.txt": log.encode()}))[0] == "host-jit-compile"
    found = judge(tmp_path / "b", {"log.txt": log.encode(), "stack.txt": stack.encode()})
    assert words(found) == ("gpu-kernel-stuck", None, "low")
