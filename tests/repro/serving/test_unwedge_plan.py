"""What unwedge would do, and what it refuses: pure, no process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.diagnose import diagnose_transcript
from dsv4_repro.forensics.records import Diagnosis
from dsv4_repro.kernels.abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE
from dsv4_repro.repro.serving.records import Rank
from dsv4_repro.repro.serving.unwedge_plan import (
    KERNEL,
    RankFacts,
    RowStateLaunch,
    judge_diagnosis,
    known_waits,
    plan_fillers,
    plan_unwedge,
    startup_seconds,
)

CASE = Path(__file__).resolve().parents[2] / "cases" / "b02-real-h200-cuda-gdb-peer-left.txt"
KNOWN = RowStateLaunch((0, 0, 0, 0, 0, 0, 1, 0), (3058, 3059, 3060, 3061, 3060, 3061, -1, 0), 8, 16384)
RANK = Rank(pid=100, rank=0, start_ticks=7)
AGENT = RankFacts(RANK, version="0.23.0", agent=True, guard_needed=True, row_states=(KNOWN,))
BARE = RankFacts(RANK, releases=("0.23.0",), agent_why="this process has no agent in it", row_states_why="no agent")
PADDED = (3, 5, 6, 7, 9, 10, 11, 13, 14, 15)


def plan(*facts: RankFacts, **changes: Any) -> Any:
    given = {
        "hung": "a kernel is resident and no memory moves", "healthy": "", "live": 3, "padded": PADDED, "max_num_seqs": 16,
        "layers": 21, **changes,
    }  # fmt: skip
    return plan_unwedge(facts, **given)


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return diagnose_transcript(CASE, ground="process", hung=True)


@pytest.mark.parametrize(
    ("launch", "count", "says"),
    [
        (KNOWN, 1, "the known wait"),
        (replace(KNOWN, counters=(0,) * 8), 0, "no group has one arrival"),
        (replace(KNOWN, counters=(0, 0, 0, 0, 0, 0, 2, 0)), 0, "no group has one arrival"),
        (replace(KNOWN, lengths=(9,) * 8), 0, "no negative length"),
        (replace(KNOWN, counters=(1, 0, 0, 0, 0, 0, 0, 0)), 0, "no negative length"),
        (replace(KNOWN, max_seq_len=65536), 0, "the peers stay"),
        (replace(KNOWN, rows=100), 0, "not known"),
    ],
)
def test_row_states_that_are_the_known_wait(launch: RowStateLaunch, count: int, says: str) -> None:
    found, why = known_waits([launch])
    assert found == count
    assert says in why


def test_a_reading_of_the_card_is_judged_and_its_counters_may_be_written(diagnosis: Diagnosis) -> None:
    verdict = judge_diagnosis(diagnosis)
    assert verdict.kernel == KERNEL
    assert 0x7F3CCCA89668 in verdict.addresses
    base = 0x7F3CCCA89668 - 6 * ROW_STATE_SIZE - ARRIVAL_COUNTER_OFFSET
    assert {(address - base) % ROW_STATE_SIZE for address in verdict.addresses} == {ARRIVAL_COUNTER_OFFSET}
    assert len(verdict.addresses) == 64


def test_without_parameters_the_identity_decides(tmp_path: Path) -> None:
    kept, skipping = [], False
    for line in CASE.read_text().splitlines():
        skipping = "const_bank" in line or (skipping and bool(re.match(r"^\s*0x", line)))
        if not skipping:
            kept.append(line)
    path = tmp_path / "reading.txt"
    path.write_text("\n".join(kept))
    read = diagnose_transcript(path, ground="process", hung=True)
    assert read.verdict.signature is None
    assert 0x7F3CCCA89668 in judge_diagnosis(read).addresses
    other = read.model_copy(update={"verdict": read.verdict.model_copy(update={"identity": "000000000000"})})
    assert judge_diagnosis(other).addresses == ()


def changed(diagnosis: Diagnosis, **wait: Any) -> Diagnosis:
    return diagnosis.model_copy(update={"waits": (diagnosis.waits[0].model_copy(update=wait),)})


@pytest.mark.parametrize(
    ("wait", "says"),
    [
        ({"kernel": "vllm::decode_attention"}, "is not persistent_topk_kernel"),
        ({"value": 0}, "not for 1 >= 2"),
        ({"value": 2, "target": 4}, "not for 1 >= 2"),
        ({"comparison": "=="}, "not for 1 >= 2"),
        ({"state_field": None}, "arrival counter"),
        ({"state_field": "output_counter"}, "arrival counter"),
        ({"role": "peer"}, "leader"),
        ({"address": None}, "address is not known"),
        ({"address": "0x10"}, "no arrival counter"),
        ({"group": 5}, "is not shown to wait in group 5"),
    ],
)
def test_a_reading_that_differs_in_one_thing_is_refused(diagnosis: Diagnosis, wait: dict[str, Any], says: str) -> None:
    verdict = judge_diagnosis(changed(diagnosis, **wait))
    assert verdict.addresses == ()
    assert says in verdict.why


def test_a_peer_that_is_still_there_is_not_the_known_wait(diagnosis: Diagnosis) -> None:
    ledger = tuple(
        group.model_copy(update={"exited": (), "running": (13,)}) if group.group == 6 else group for group in diagnosis.ledger
    )
    assert "is not shown to have left" in judge_diagnosis(diagnosis.model_copy(update={"ledger": ledger})).why
    nothing = diagnosis.model_copy(update={"waits": ()})
    assert judge_diagnosis(nothing).why == "no wait was read"


@pytest.mark.parametrize("cause", ["not-co-resident", "init-race", None])
def test_another_cause_is_refused(diagnosis: Diagnosis, cause: str | None) -> None:
    other = diagnosis.model_copy(update={"verdict": diagnosis.verdict.model_copy(update={"cause": cause})})
    assert judge_diagnosis(other).addresses == ()


def test_with_an_agent_it_is_released_inside_and_the_guard_armed() -> None:
    made = plan(AGENT)
    assert [one.way for one in made.ranks] == ["agent"]
    assert made.guard
    assert made.fillers.count == 0
    assert made.writes == 42
    assert made.seconds is not None
    assert made.seconds[1] < 1.0
    text = "\n".join(made.lines())
    assert "21 indexer layers x 2 steps in flight = 42" in text
    assert "a restart instead: not known" in text


def test_without_one_it_is_cuda_gdb_with_fillers_and_half_a_second_a_write() -> None:
    made = plan(BARE, restart_s=74.0)
    assert [one.way for one in made.ranks] == ["debugger"]
    assert not made.guard
    assert made.fillers.count == 16
    assert made.seconds == pytest.approx((3.6 + 21 * 0.45, 3.6 + 42 * 0.45))
    assert "74 s, its own last start" in "\n".join(made.lines())


@pytest.mark.parametrize(
    ("facts", "changes", "says"),
    [
        (replace(AGENT, version="0.20.1"), {}, "does not zero"),
        (replace(AGENT, version=None), {}, "could not be told"),
        (replace(BARE, releases=("0.20.1", "0.20.2")), {}, "does not zero"),
        (replace(AGENT, moved="steps 4 -> 9"), {}, "it moves"),
        (replace(AGENT, row_states=(replace(KNOWN, counters=(0,) * 8),)), {}, "no group has one arrival"),
        (BARE, {"hung": ""}, "not shown to be wedged"),
        (BARE, {"via": "agent"}, "no answer from an agent"),
    ],
)
def test_what_is_refused(facts: RankFacts, changes: dict[str, Any], says: str) -> None:
    made = plan(facts, **changes)
    assert made.ranks[0].way == "none"
    assert says in made.ranks[0].why
    assert made.refused


def test_a_server_that_moves_is_refused_whatever_its_ranks_say() -> None:
    assert "tokens flow" in plan(AGENT, healthy="tokens flow").refused
    assert plan().refused == "no worker process was found"


def test_one_rank_in_another_state_is_left_alone_and_the_others_are_released() -> None:
    odd = replace(AGENT, rank=Rank(pid=101, rank=1, start_ticks=8), row_states=(replace(KNOWN, lengths=(9,) * 8),))
    made = plan(AGENT, odd)
    assert [one.way for one in made.ranks] == ["agent", "none"]
    assert made.refused == ""
    assert "pid 101): left alone" in "\n".join(made.lines())


def test_via_debugger_is_obeyed_although_there_is_an_agent() -> None:
    made = plan(AGENT, via="debugger")
    assert made.ranks[0].way == "debugger"
    assert "row states" in made.ranks[0].proof
    assert made.fillers.count == 16


@pytest.mark.parametrize(
    ("live", "padded", "most", "count", "says"),
    [
        (3, PADDED, 16, 16, "13 fill the batch to 16"),
        (3, PADDED, None, 1, "on the way down 3 live would wedge again"),
        (4, PADDED, 4, 0, "none: a batch of 4"),
        (3, (3, 4, 5, 6), 6, 0, "none helps"),
        (None, PADDED, 16, 1, "are not known"),
        (3, None, 16, 1, "are not known"),
    ],
)
def test_fillers(live: int | None, padded: tuple[int, ...] | None, most: int | None, count: int, says: str) -> None:
    made = plan_fillers(live, padded, most)
    assert made.count == count
    assert says in made.text


LOG = """(APIServer pid=1) INFO 11-29 23:59:10 [utils.py:1] vLLM API server version 0.23.0
(EngineCore pid=2) INFO 11-29 23:59:40 [core.py:1] Initializing
(APIServer pid=1) INFO 11-30 00:00:25 [api_server.py:1] Starting vLLM server on http://127.0.0.1:8011
"""


def test_the_cost_of_a_restart_is_read_over_midnight() -> None:
    assert startup_seconds(LOG) == 75.0
    assert startup_seconds(LOG.replace("Starting vLLM server", "something else")) is None
    assert startup_seconds("") is None
    assert startup_seconds("Starting vLLM server on x\n") is None
