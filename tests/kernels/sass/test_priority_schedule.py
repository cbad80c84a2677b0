"""The priority schedule: legal (healthy code stays right), reproducible, and it finds the races that even choice misses."""

from __future__ import annotations

import pytest

from dsv4_repro.errors import UsageError
from dsv4_repro.kernels.build import builtin_image
from dsv4_repro.kernels.sass.machine import Machine
from dsv4_repro.kernels.sass.program import Program
from dsv4_repro.kernels.sass.topk import TopKRun, run_case
from dsv4_repro.kernels.topk_cases import TopKCase

#: One row of 40000 shared by two CTAs: six barriers.
TWO = TopKCase("two CTAs", 512, 4, (40000,), 40000, 40000, 2, 1, 20000)
#: Schedules tried at most; a race is met in one of two or three of them.
TRIES = 24


def program(variant: str) -> Program:
    return Program.from_image(builtin_image(variant, 120, 512, 4))


def first_hang(variant: str) -> TopKRun | None:
    code = program(variant)
    for seed in range(TRIES):
        run, _ = run_case(code, TWO, schedule="priority", seed=seed)
        if run.result.kind == "deadlock":
            return run
        assert run.result.kind == "completed"
    return None


def test_healthy_code_is_right_under_every_schedule() -> None:
    code = program("guard")
    for seed in range(6):
        run, verdicts = run_case(code, TWO, schedule="priority", seed=seed)
        assert run.result.completed
        assert run.counters == (12,)
        assert all(verdict.ok for verdict in verdicts)


def test_a_peer_ahead_of_the_leader_loses_its_arrival_to_the_zeroing() -> None:
    run = first_hang("init-race")
    assert run is not None
    assert len(run.result.resident) == 2
    assert run.counters == (1,)


def test_a_peer_behind_the_leader_finds_the_counter_zeroed() -> None:
    run = first_hang("reset-race")
    assert run is not None
    assert run.result.exited == (0,)
    assert run.counters == (0,)


def test_the_same_seed_is_the_same_schedule() -> None:
    code = program("guard")
    runs = [run_case(code, TWO, schedule="priority", seed=seed)[0].result for seed in (3, 3, 4)]
    assert runs[0].block_executions == runs[1].block_executions
    assert runs[0].block_executions != runs[2].block_executions


def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match="priority"):
        Machine(program("guard"), schedule="fair")
