"""What ``unwedge`` looks at before it plans: the proof names how long a server has stood."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.repro.serving import unwedge_look
from dsv4_repro.repro.serving.engine_deadlines import EngineDeadline
from dsv4_repro.repro.serving.live_build import LiveBuild
from dsv4_repro.repro.serving.process_stat import start_ticks
from dsv4_repro.repro.serving.records import Rank, ServerTarget
from dsv4_repro.repro.serving.standing import Standing
from dsv4_repro.repro.serving.why_look import Look

STANDS = ("no counter moved in the 2.0 s of this look", "3 requests run, 0 wait; /health 200", "log: no tokens for 30 s")
SPINS = ("GPU 0: a kernel is resident (100 %) and no memory moves (0 %)",)


@pytest.mark.parametrize(
    ("standing", "begins"),
    [
        (Standing("hung", STANDS, 30.4, "inferred", SPINS), "nothing has moved for at least 30 s (inferred); no counter moved"),
        (Standing("hung", STANDS, None, "not observed", SPINS), "no counter moved"), (Standing("suspect", STANDS), ""),
    ],
)  # fmt: skip
def test_the_proof_says_how_long_it_has_stood(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, standing: Standing, begins: str
) -> None:
    monkeypatch.setattr(unwedge_look, "live_build", lambda *_a, **_k: LiveBuild("possible", "", ("0.23.0",)))
    target = ServerTarget(None, ranks=(Rank(os.getpid(), 0, start_ticks(os.getpid()) or 0),))

    def looks(_target: ServerTarget, **_more: Any) -> Look:
        return Look(target, (), standing, None, EngineDeadline("unknown"), None, None, "", ())

    (rank,) = unwedge_look.look_and_plan(target, via="auto", looks=looks).plan.ranks
    assert rank.proof.startswith(begins)
    assert rank.way == ("debugger" if begins else "none")
