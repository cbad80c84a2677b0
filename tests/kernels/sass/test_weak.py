"""Weak memory order: a missing fence shows, a fence hides it, and nothing that is right under every order goes wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from dsv4_repro.kernels.build import builtin_image
from dsv4_repro.kernels.sass.program import Program
from dsv4_repro.kernels.sass.topk import run_case
from dsv4_repro.kernels.topk_cases import TopKCase

TWO = TopKCase("two", 512, 4, (40000,), 40000, 40000, 2, 1, 20000)
DRAINED = TopKCase("drained", 512, 4, (9000, -1), 16384, 16384, 2, 2, 8192)


def ends(variant: str, seeds: int, *, weak: bool) -> Counter[tuple[str, bool]]:
    code = Program.from_image(builtin_image(variant, 120, 512, 4))
    found: Counter[tuple[str, bool]] = Counter()
    for seed in range(seeds):
        run, verdicts = run_case(code, TWO, schedule="priority", seed=seed, weak=weak)
        found[run.result.kind, all(verdict.ok for verdict in verdicts)] += 1
        assert ("weak" in run.result.notes[0]) == weak
    return found


def test_without_the_fence_members_leave_at_different_phases() -> None:
    found = ends("missing-fence", 10, weak=True)
    assert found["deadlock", False] > 0


@pytest.mark.parametrize("variant", ["early-exit", "guard"])
def test_with_the_fence_every_order_is_right(variant: str) -> None:
    assert ends(variant, 4, weak=True) == {("completed", True): 4}


def test_sequential_order_never_shows_a_missing_fence() -> None:
    assert ends("missing-fence", 4, weak=False) == {("completed", True): 4}


def test_the_deadlock_of_a_peer_that_left_is_still_proved() -> None:
    code = Program.from_image(builtin_image("unguarded", 120, 512, 4))
    run, _ = run_case(code, DRAINED, weak=True)
    assert run.result.kind == "deadlock"
    assert run.counters == (0, 1)


@pytest.mark.parametrize("kind", ["normal", "dense", "byte-ladder"])
def test_single_cta_paths_and_ties_are_right(kind: str) -> None:
    case = TopKCase(f"weak {kind}", 512, 4, (5000, 33000, 600), 33000, 33000, 2, 1, 16500, (kind,))
    code = Program.from_image(builtin_image("guard", 120, 512, 4))
    for schedule in ("smallest-pc", "random"):
        run, verdicts = run_case(code, case, schedule=schedule, seed=3, weak=True)
        assert run.result.completed
        assert all(verdict.ok for verdict in verdicts)
        assert run.counters == case.counters()
