"""At which live counts an unfixed server can wedge: by card, release, flags; and that a window counts only if it was seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv4_repro.errors import PlanError
from dsv4_repro.kernels.plan import device_for_sm
from dsv4_repro.kernels.release_profiles import release_profile
from dsv4_repro.repro.serving.aims import Aim
from dsv4_repro.repro.serving.drain_windows import drain_windows, reached_windows, takes_cooperative
from dsv4_repro.repro.serving.engine_flags import EngineFacts
from dsv4_repro.repro.serving.recipe import DUMMY_PLAN
from dsv4_repro.repro.serving.steering import WindowCount
from dsv4_repro.scenarios.drain import DrainPlan

TINY = DrainPlan(**dict(DUMMY_PLAN))


@pytest.mark.parametrize(
    ("plan", "sm", "release", "counts", "why"),
    [
        # The published case and the run on an H200 with the dummy model (both seen), and what the source says of others.
        (DrainPlan(), 120, "0.27.1", (3,), ""),
        (TINY, 90, "0.23.0", (3,), ""),
        (DrainPlan(), 120, "0.23.0", (), "peers stay"),
        (DrainPlan(), 120, "0.24.0", (), "cooperative_topk"),
        (TINY, 90, "0.24.0", (), "cooperative_topk"),
        (TINY, 90, "0.26.0", (), "cooperative_topk"),
        (DrainPlan(max_model_len=131072), 120, "0.27.1", (15, 14, 13, 11, 10, 9, 7, 6, 5, 3), ""),
        (DrainPlan(max_model_len=47072), 120, "0.27.1", (), "one CTA holds a row"),
        (DrainPlan(capture_sizes=tuple(range(2, 33, 2))), 120, "0.27.1", (), "no live count of this drain is padded"),
    ],
)
def test_counts_by_card_and_release(plan: DrainPlan, sm: int, release: str, counts: tuple[int, ...], why: str) -> None:
    found = drain_windows(plan, EngineFacts(mtp=plan.mtp), device=device_for_sm(sm), release=release)
    assert set(found.counts) <= set(counts)
    assert bool(found.counts) == bool(counts)
    assert (3 in found.counts) == (3 in counts)
    assert why in found.why_not
    assert bool(found.why_not) != bool(found.counts)


def test_every_live_count_of_the_drain_is_a_step() -> None:
    found = drain_windows(replace_mtp(0), EngineFacts(mtp=0), device=device_for_sm(90), release="0.23.0")
    lives = [step.live_requests for step in found.steps]
    assert lives == sorted(lives, reverse=True)
    assert lives[-1] == 3
    assert 3 in found.counts
    step = found.step_of(3)
    assert step is not None
    assert (step.rows, step.graph_rows, step.danger) == (3, 4, False)
    assert found.step_of(None) is None


def replace_mtp(mtp: int) -> DrainPlan:
    return TINY.replace(mtp=mtp)


def test_an_unknown_card_or_release_is_said() -> None:
    found = drain_windows(TINY, EngineFacts(mtp=1))
    assert found.counts == (3,)
    assert any("card is not known" in note for note in found.notes)
    assert any("release is not known" in note for note in found.notes)
    assert found.launches == {}


def test_without_full_graphs_there_is_no_window() -> None:
    found = drain_windows(TINY, EngineFacts(mtp=1, full_graphs=False, why_not_full="eager"), device=device_for_sm(90))
    assert (found.counts, found.why_not) == ((), "eager")


def test_several_engines_are_refused() -> None:
    with pytest.raises(PlanError, match="dp"):
        drain_windows(TINY.replace(dp=2), EngineFacts(mtp=1))


def test_the_cooperative_rows_of_the_table() -> None:
    assert takes_cooperative(release_profile("0.24.0"), 120, 8)
    assert not takes_cooperative(release_profile("0.27.1"), 120, 8)
    assert takes_cooperative(release_profile("0.27.1"), 90, 32)
    assert not takes_cooperative(release_profile("0.27.1"), 90, 33)
    assert not takes_cooperative(release_profile("0.23.0"), 90, 8)
    assert takes_cooperative(release_profile("0.31.0"), 100, 4096)


def test_only_what_was_seen_counts_and_the_surest_comes_first() -> None:
    aim = Aim(live=3, mtp=1, graph_rows=8)
    computed = WindowCount(aim, "computed", 1, 9, "")
    measured = replace(computed, how="measured")
    other = replace(computed, aim=Aim(live=5, mtp=1, graph_rows=16), how="measured")
    assert reached_windows([replace(computed, how="inferred"), other], (3,)) == []
    assert reached_windows([computed, measured, other], (3,)) == [measured, computed]
    assert reached_windows([replace(measured, aim=Aim(live=4, mtp=1, graph_rows=8))], (4,)) == []
