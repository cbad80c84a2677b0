"""The first hang of a kind is run again under its own schedule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4_repro.repro.campaign.cells import Cell
from dsv4_repro.repro.campaign.first_of_kind import captured_run

PLAN = {"requests": 3, "min_live": 1, "steps": 1, "prompt": [1, 1], "output": [1, 1], "acceptance": 1.0, "layers": 1}


@pytest.mark.parametrize("schedule", ["smallest-pc", "priority"])
def test_the_capture_keeps_the_schedule_and_the_seed(schedule: str, tmp_path: Path) -> None:
    run = captured_run(Cell("c", plan=PLAN, schedule=schedule), 3, tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    assert (record["outcome"], record["seed"]) == ("hang", 3)
    words = record["command"]
    said = words[words.index("--schedule") + 1] if "--schedule" in words else "smallest-pc"
    assert said == schedule
