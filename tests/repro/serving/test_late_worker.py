"""A worker that may only be late, seen or unseen, holds back what the recorders of its peers say: both by the same rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv4_repro.repro.serving.device_signs import Signs, recorder_signs
from dsv4_repro.repro.serving.movement import Movement, Standing
from dsv4_repro.repro.serving.records import RankProgress
from dsv4_repro.repro.serving.watch_limits import WatchLimits

LIMITS = WatchLimits()
#: Rank 0 stands in a launched step, and its agent's thread runs.
STUCK = RankProgress(pid=10, at=1.0, rank=0, begun=9, unfinished=(9,), graph_mode="full", healthy_s=0.1, heard_age_s=0.0)
LATE = "rank 1 has begun a step and launched nothing for"
UNSEEN = "the recorders of 1 of 2 workers say nothing"


def signs_of(kind: str, age: float, host_works: str = "") -> Signs:
    stuck = replace(STUCK, unfinished_age_s=max(age, 5.0))
    ranks = {
        "late": (stuck, RankProgress(pid=11, at=1.0, rank=1, begun=9, launching_age_s=age)), "unseen": (stuck,),
        "neither": (stuck, RankProgress(pid=11, at=1.0, rank=1, begun=9)),
    }[kind]  # fmt: skip
    movement = Movement(60.0)
    movement.rings[10] = Standing(moved=0.0, seen=max(age, 5.0), looks=9)
    return recorder_signs(ranks, movement, {}, LIMITS, host_works=host_works, workers=frozenset({10, 11}))


def test_without_a_late_worker_the_step_speaks() -> None:
    assert len(signs_of("neither", 5.0).signals) == 1


@pytest.mark.parametrize(("kind", "words", "limit"), [("late", LATE, LIMITS.host_rank_s), ("unseen", UNSEEN, LIMITS.differ_s)])
@pytest.mark.parametrize("host_works", ["", "it compiles"])
def test_it_holds_back_until_it_was_so_for_long_and_no_host_works(kind: str, words: str, limit: float, host_works: str) -> None:
    soon = signs_of(kind, limit - 1.0, host_works)
    assert not soon.signals
    assert [text.endswith(f" ({host_works})") for text in soon.against if text.startswith(words)] == [bool(host_works)]
    assert [fact for fact in soon.facts if fact.startswith("rank 0: step 9")], "what was held back is still told"
    late = signs_of(kind, limit + 1.0, host_works)
    assert bool(late.signals) == (not host_works)
    assert [text for text in (late.against if host_works else late.facts) if text.startswith(words)]
