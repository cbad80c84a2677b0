"""What may be written, from readings with anything changed in them: nothing, unless every condition of the known wait is there."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import ReproError
from dsv4_repro.forensics.diagnose import diagnose_transcript
from dsv4_repro.forensics.records import Diagnosis
from dsv4_repro.repro.serving.records import Rank
from dsv4_repro.repro.serving.unwedge_plan import RankFacts, RowStateLaunch, judge_diagnosis, plan_unwedge, zeroed_before_launch

CASE = Path(__file__).resolve().parents[2] / "cases" / "b02-real-h200-cuda-gdb-peer-left.txt"
KERNEL = "persistent_topk_kernel"
WAYS = st.sampled_from(["auto", "agent", "debugger"])
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def reading() -> Diagnosis:
    return diagnose_transcript(CASE, ground="process", hung=True)


def judged(text: str) -> tuple[int, ...]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reading.txt"
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        return judge_diagnosis(diagnose_transcript(path, ground="process", hung=True)).addresses


WAIT = st.fixed_dictionaries(
    {},
    optional={
        "kernel": st.sampled_from(
            ["persistent_topk_kernel", "vllm::persistent_topk_kernel<4>(P)", "persistent_topk_kernel_2", "x"]
        ),
        "value": st.sampled_from([None, 0, 1, 2]),
        "target": st.sampled_from([None, 1, 2, 4]),
        "comparison": st.sampled_from([">=", ">", "=="]),
        "state_field": st.sampled_from([None, "arrival_counter", "output_counter"]),
        "role": st.sampled_from([None, "leader", "peer"]),
        "group": st.sampled_from([None, 0, 6, 7]),
        "address": st.sampled_from([None, "0x0", "0x10", "0x7f3ccca89668", "0x7f3ccca89669", "0x7f3ccca8a278"]),
        "block": st.sampled_from([(12, 0, 0), (13, 0, 0), (0, 0, 0)]),
    },
)
GROUP = st.fixed_dictionaries(
    {},
    optional={
        name: st.sampled_from([(), (12,), (13,), (12, 13), (13, 14, 15)])
        for name in ("running", "spinning", "exited", "never_started", "unknown")
    },
)
VERDICT = st.fixed_dictionaries(
    {},
    optional={
        "class_": st.sampled_from(["gpu-spin-barrier", "gpu-kernel-stuck"]),
        "cause": st.sampled_from([None, "peer-left", "not-co-resident"]),
        "signature": st.sampled_from([None, "vllm-51593", "vllm-1"]),
        "identity": st.sampled_from([None, "dd4289b0e668", "0"]),
    },
)


@QUICK
@given(st.lists(WAIT, max_size=3), GROUP, VERDICT)
def test_every_wait_is_the_known_one_or_nothing_may_be_written(waits: list[Any], group: Any, verdict: Any) -> None:
    known = reading()
    changed = known.model_copy(
        update={
            "waits": tuple(known.waits[0].model_copy(update=one) for one in waits),
            "ledger": tuple(one.model_copy(update=group) if one.group == 6 else one for one in known.ledger),
            "verdict": known.verdict.model_copy(update=verdict),
        }
    )
    found = judge_diagnosis(changed)
    if not found.addresses:
        assert found.why
        return
    assert (changed.verdict.class_, changed.verdict.cause) == ("gpu-spin-barrier", "peer-left")
    assert changed.verdict.signature == "vllm-51593" or (changed.verdict.signature, changed.verdict.identity) == (
        None,
        "dd4289b0e668",
    )
    assert changed.waits
    ledger = {one.group: one for one in changed.ledger}
    for wait in changed.waits:
        assert wait.kernel.rpartition("::")[2].partition("<")[0] == KERNEL
        assert (wait.value, wait.target, wait.comparison, wait.role) == (1, 2, ">=", "leader")
        assert wait.state_field == "arrival_counter"
        assert wait.group is not None
        own = ledger[wait.group]
        assert set(own.spinning) == {wait.block[0]}
        assert len(set(own.exited)) == 1
        assert (*own.running, *own.never_started, *own.unknown) == ()
        assert int(wait.address or "0", 16) in found.addresses
        assert all(address > 0 and address % 4 == 0 for address in found.addresses)


@SLOW
@given(
    st.lists(st.tuples(st.sampled_from(["drop", "twice", "cut", "swap", "noise"]), st.integers(0, 10**6)), min_size=1, max_size=6),
    st.text(max_size=30),
)
def test_a_damaged_transcript_permits_the_words_of_the_whole_one_or_none(damage: list[tuple[str, int]], noise: str) -> None:
    lines = CASE.read_text(encoding="utf-8").splitlines()
    whole = set(judge_diagnosis(reading()).addresses)
    for what, number in damage:
        at = number % len(lines)
        if what == "drop":
            del lines[at : at + 1 + number % 7]
        elif what == "twice":
            lines.insert(at, lines[at])
        elif what == "cut":
            lines[at] = lines[at][: number % (len(lines[at]) + 1)]
        elif what == "swap":
            lines[at], lines[-1 - at] = lines[-1 - at], lines[at]
        else:
            lines[at] = noise
        lines = lines or [""]
    try:
        found = set(judged("\n".join(lines)))
    except ReproError:
        return
    assert found <= whole


NUMBERS = st.integers(-(1 << 31), (1 << 31) - 1)
LAUNCHES = st.builds(
    RowStateLaunch,
    st.lists(st.one_of(st.sampled_from([0, 1]), NUMBERS), max_size=9).map(tuple),
    st.lists(st.one_of(st.sampled_from([-1, 3000]), NUMBERS), max_size=9).map(tuple),
    st.sampled_from([0, 1, 8, 9, 100]),
    st.sampled_from([0, 16384, 32768, 32769, 1 << 31]),
)
FACTS = st.builds(
    RankFacts,
    st.just(Rank(pid=100, rank=0, start_ticks=7)),
    releases=st.sampled_from([(), ("0.23.0",), ("0.20.1",), ("0.23.0", "0.19.0")]),
    version=st.sampled_from([None, "0.23.0", "0.34.0", "0.23.0\n", "\u0660.\u0662\u0663.\u0660", "0.23.0+cu128"]),
    agent=st.booleans(),
    row_states=st.one_of(st.none(), st.lists(LAUNCHES, max_size=3).map(tuple)),
    moved=st.sampled_from(["", "tokens"]),
)


@QUICK
@given(
    FACTS,
    st.sampled_from(["", "a kernel is resident"]),
    st.sampled_from(["", "tokens flow"]),
    st.sampled_from(["auto", "agent", "debugger"]),
)
def test_no_rank_is_touched_without_a_known_build_and_a_shown_wedge(facts: RankFacts, hung: str, healthy: str, via: str) -> None:
    plan = plan_unwedge([facts], hung=hung, healthy=healthy, live=3, padded=(3,), max_num_seqs=16, layers=21, via=via)
    acts = plan.ranks[0].way != "none"
    if healthy or not acts:
        assert plan.refused
    if not acts:
        return
    names = facts.releases or (facts.version or "",)
    assert all(zeroed_before_launch(name)[0] for name in names)
    assert all(name == "0.23.0" for name in names)
    assert not facts.moved
    if facts.row_states is None:
        assert hung
    else:
        assert any(
            launch.max_seq_len <= 32768
            and launch.rows <= len(launch.counters)
            and any(count == 1 and length < 0 for count, length in zip(launch.counters, launch.lengths, strict=False))
            for launch in facts.row_states
        )
    assert plan.ranks[0].way == "debugger" or (facts.agent and facts.row_states is not None)
