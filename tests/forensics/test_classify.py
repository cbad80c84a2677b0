"""Rules answer with three values, fail alone, and merge by the table."""

from __future__ import annotations

import pytest

from dsv4_repro.forensics import classify as module
from dsv4_repro.forensics.classify import RULES, classify
from dsv4_repro.forensics.evidence.gather import read_text
from dsv4_repro.forensics.evidence.refs import Ref
from dsv4_repro.forensics.records import CLASSES, outcome_of
from dsv4_repro.forensics.rules.base import FAIR, STRONG, WEAK, Finding, run_rules
from dsv4_repro.forensics.rules.table import EXPLAINS, merge
from dsv4_repro.forensics.rules.view import View

HERE = (Ref("x", 1, 1),)


def yes(class_: str, strength: int, cause: str | None = None) -> Finding:
    return Finding("t", class_, "supported", strength, "because", HERE, cause)


def no(class_: str, strength: int) -> Finding:
    return Finding("t", class_, "contradicted", strength, "not so", HERE)


def test_every_rule_answers_even_with_no_evidence() -> None:
    result = classify(read_text("empty", ""))
    assert (result.class_, result.confidence) == ("unknown", "low")
    assert {f.rule for f in result.findings} == {name for name, _, _ in RULES}
    assert all(f.answer == "unknown" for f in result.findings)
    assert result.next


def test_a_rule_that_raises_is_unknown_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(view: View) -> list[Finding]:
        raise KeyError("no such thing")

    text = "(EngineCore pid=1) ERROR 07-08 07:00:40 [x.py:1] Worker proc VllmWorker-0 died unexpectedly (exit code: 1), bye.\n"
    monkeypatch.setattr(module, "RULES", (("broken", "gpu-fault", broken), *RULES))
    result = classify(read_text("x", text))
    assert result.class_ == "worker-dead"
    failed = next(f for f in result.findings if f.rule == "broken")
    assert failed.answer == "unknown"
    assert "no such thing" in failed.error


def test_findings_take_known_words_only() -> None:
    with pytest.raises(ValueError, match="no such class"):
        yes("gpu-hungry", 1)
    with pytest.raises(ValueError, match="no such class or cause"):
        yes("gpu-fault", 1, "peer-left")
    found = run_rules([("r", "unknown", lambda view: [])], View(read_text("x", "")))
    assert found[0].answer == "unknown"


def test_the_table_names_known_classes_and_never_itself() -> None:
    for row in EXPLAINS:
        assert row.culprit in CLASSES
        assert set(row.victims) <= set(CLASSES) - {"unknown", row.culprit}
        assert row.needs in ("fair", "equal")
        assert row.why


@pytest.mark.parametrize("row", EXPLAINS, ids=lambda row: row.culprit)
def test_a_strong_culprit_stands_before_its_victims(row) -> None:  # type: ignore[no-untyped-def]
    for victim in row.victims:
        merged = merge([yes(row.culprit, STRONG), yes(victim, FAIR)])
        assert merged.class_ == row.culprit
        assert victim in merged.explained or (victim, FAIR) in merged.open


def test_ties_fall_to_the_common_parent_or_to_unknown() -> None:
    merged = merge([yes("gpu-crossrank-spin", FAIR), yes("gpu-kernel-stuck", STRONG), no("gpu-kernel-stuck", FAIR)])
    assert merged.class_ == "gpu-crossrank-spin"
    merged = merge([yes("scheduler-stall", FAIR), yes("launch-refused", FAIR)])
    assert (merged.class_, merged.cause) in (("unknown", None), ("launch-refused", None))
    merged = merge([yes("wrong-result", FAIR), yes("scheduler-stall", FAIR)])
    assert merged.class_ == "unknown"
    assert merged.strength == WEAK
    assert {c for c, _ in merged.open} == {"wrong-result", "scheduler-stall"}


def test_contradictions_lower_or_remove() -> None:
    assert merge([yes("gpu-fault", STRONG), no("gpu-fault", FAIR)]).strength == FAIR
    assert merge([yes("gpu-fault", STRONG), no("gpu-fault", WEAK)]).strength == STRONG
    assert merge([yes("gpu-fault", WEAK), no("gpu-fault", FAIR)]).class_ == "unknown"
    assert merge([yes("gpu-fault", FAIR), no("gpu-fault", FAIR)]).against


def test_causes_that_disagree_leave_none() -> None:
    merged = merge([yes("gpu-fault", STRONG, "misaligned"), yes("gpu-fault", STRONG, "illegal-access")])
    assert (merged.class_, merged.cause) == ("gpu-fault", None)
    merged = merge([yes("gpu-fault", STRONG, "misaligned"), yes("gpu-fault", FAIR, "illegal-access")])
    assert merged.cause == "misaligned"
    merged = merge([yes("gpu-fault", STRONG), yes("gpu-fault", WEAK, "illegal-access")])
    assert merged.cause is None


def test_a_weak_fault_does_not_hide_a_proven_barrier() -> None:
    merged = merge([yes("gpu-fault", WEAK), yes("gpu-spin-barrier", STRONG, "peer-left"), yes("worker-dead", FAIR)])
    assert (merged.class_, merged.cause) == ("gpu-spin-barrier", "peer-left")


def test_outcomes_are_those_of_the_table() -> None:
    assert outcome_of("gpu-spin-barrier") == "hang"
    assert outcome_of("worker-dead") == "other"


LOG = (
    "(APIServer pid=1) INFO 11-28 09:{m}:{s} [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 tokens/s, "
    "Avg generation throughput: {g} tokens/s, Running: {r} reqs, Waiting: {w} reqs, GPU KV cache usage: 4.1%, "
    "Prefix cache hit rate: 0.0%\n"
)


def test_running_gauge_zero_is_no_proof_of_idleness() -> None:
    text = LOG.format(m="00", s="00", g="0.0", r=0, w=0) * 3
    result = classify(read_text("x", text))
    assert result.confidence == "low"


def test_a_death_before_the_timeout_is_the_cause_and_after_it_a_consequence() -> None:
    death = "(EngineCore pid=1) ERROR 11-28 09:05:00 [x.py:1] Worker proc VllmWorker-0 died unexpectedly (exit code: -11), bye.\n"
    timeout = "(EngineCore pid=1) ERROR 11-28 09:05:01 [x.py:1] TimeoutError: RPC call to sample_tokens timed out.\n"
    assert classify(read_text("x", death + timeout)).class_ == "worker-dead"
    assert classify(read_text("x", timeout + death)).class_ == "unknown"


def test_a_planned_shutdown_is_no_death() -> None:
    text = (
        "(EngineCore pid=1) INFO 11-28 09:05:00 [core.py:1] [shutdown] EngineCore: trigger received signal=SIGTERM\n"
        "(EngineCore pid=1) ERROR 11-28 09:05:09 [x.py:1] Worker proc VllmWorker-0 died unexpectedly (exit code: -15), shutting "
        "down executor.\n"
    )
    assert classify(read_text("x", text)).class_ == "unknown"


def test_no_cuda_kernels_is_never_an_argument_against_a_hang() -> None:
    result = classify(read_text("x", "=== cuda-gdb ===\nNo CUDA kernels.\n"))
    assert not [f for f in result.findings if f.answer == "contradicted"]


def test_the_loudest_rank_is_not_the_guilty_one() -> None:
    line = (
        "[rank0]:[E823 07:10:02.5 ProcessGroupNCCL.cpp:688] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=7, NumelOut=7, Timeout(ms)=600000) "
        "ran for 600044 milliseconds before timing out."
    )
    text = f"""=== watchdog ===
{line}
=== py-spy rank 1 ===
Process 9: VLLM::Worker_TP1

Thread 9 (active): "MainThread"
    make_cubin (triton/backends/nvidia/compiler.py:460)
    compile (triton/compiler/compiler.py:320)
"""
    result = classify(read_text("x", text))
    assert result.class_ == "host-jit-compile"
