"""Exhaustive exploration: named deadlocks for defects, none for fixes, and agreement with the interpreter."""

from __future__ import annotations

from collections import Counter

import pytest

from dsv4_repro.errors import BudgetError, UsageError
from dsv4_repro.kernels.build import builtin_image
from dsv4_repro.kernels.sass.program import Program
from dsv4_repro.kernels.sass.topk import run_case
from dsv4_repro.kernels.topk_cases import TopKCase
from dsv4_repro.scenarios.explore import Captured, explore, model_of, place
from dsv4_repro.scenarios.launches import Launch, long_row

TWO = long_row("two", 2, 40000)
THREE = long_row("three", 3, 40000)
DRAINED = TopKCase("drained", 512, 4, (9000, -1), 16384, 16384, 2, 2, 8192)
CLAMPED = TopKCase("clamped", 512, 4, (9000, 0), 16384, 16384, 2, 2, 8192)


@pytest.mark.parametrize(
    ("launch", "variant", "ends"),
    [
        (Launch(TWO), "guard", {"completed"}),
        (Launch(THREE), "guard", {"completed"}),
        (Launch(TWO, resident=1), "guard", {"not-co-resident"}),
        (Launch(THREE, resident=2), "guard", {"not-co-resident"}),
        (Launch(TWO), "init-race", {"completed", "init-race"}),
        (Launch(TWO), "reset-race", {"completed", "reset-race"}),
        (Launch(THREE), "reset-race", {"completed", "reset-race"}),
        (Launch(TWO), "early-arrival", {"completed", "missing-fence"}),
        (Launch(DRAINED), "unguarded", {"peer-left"}),
        (Launch(DRAINED), "guard", {"completed"}),
        (Launch(CLAMPED), "unguarded", {"completed"}),
        (Launch(DRAINED, resident=1), "guard", {"completed"}),
        (Launch(TWO, counter=12), "guard", {"completed"}),
    ],
)
def test_every_end_is_a_completion_or_a_named_deadlock(launch: Launch, variant: str, ends: set[str]) -> None:
    found = explore(model_of(launch, variant))
    assert {end.name for end in found.ends} == ends


def test_the_shortest_counterexample_is_printed() -> None:
    found = explore(model_of(Launch(TWO), "init-race"))
    text = "\n".join(found.lines())
    assert "block 1 arrives (1) · block 0 writes 0" in text
    (end,) = found.deadlocks
    assert len(end.path) == 5
    assert end.state[1] == (1,)


@pytest.mark.parametrize("variant", ["guard", "init-race", "reset-race"])
def test_the_interpreter_ends_in_one_of_the_ends(variant: str) -> None:
    code = Program.from_image(builtin_image(variant, 120, 512, 4))
    found = explore(model_of(Launch(TWO), variant))
    size = [len(program) for program in found.model.programs]
    seen: Counter[str] = Counter()
    for seed in range(12):
        run, _ = run_case(code, TWO, schedule="priority", seed=seed)
        exited = set(run.result.exited)
        ends = [
            end for end in found.final
            if end[1] == run.counters and {block for block, at in enumerate(end[0]) if at == size[block]} == exited
        ]  # fmt: skip
        assert ends, (seed, run.counters, exited)
        seen["completed" if run.result.completed else "deadlock"] += 1
    assert seen["deadlock"] == 0 or variant != "guard"


@pytest.mark.parametrize("resident", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(40000,), (9000, 40000), (40000, 9000)])
def test_the_interpreter_agrees_for_every_residency(lengths: tuple[int, ...], resident: int) -> None:
    """One order of execution decides: the model has one kind of end for these."""
    case = long_row(f"agree {lengths}", 3, *lengths)
    found = explore(model_of(Launch(case, resident=resident), "guard"))
    (end,) = found.ends
    run, _ = run_case(Program.from_image(builtin_image("guard", 120, 512, 4)), case, sms=resident)
    assert (run.result.kind == "deadlock") == (end.name == "not-co-resident")
    assert run.counters == end.state[1]
    assert len(run.result.never_started) == sum(at < 0 for at in end.state[0])


def test_a_captured_state_is_placed() -> None:
    found = explore(model_of(Launch(DRAINED), "unguarded"))
    stuck = Captured({2: 2}, exited=(0, 1, 3), counters=(0, 1))
    assert place(found, stuck) == "no successor"
    assert place(found, Captured({2: 2}, exited=(0, 1), never_started=(3,), counters=(None, 1))) == "goes on"
    assert place(found, Captured({2: 2}, exited=(0, 1, 3), counters=(0, 7))) == "not reachable"


def test_too_much_is_said_not_cut() -> None:
    with pytest.raises(UsageError, match="at most 8"):
        model_of(Launch(long_row("many", 9, 40000)), "guard")
    with pytest.raises(BudgetError, match="more than 10"):
        explore(model_of(Launch(THREE), "guard"), limit=10)
