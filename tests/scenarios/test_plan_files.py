"""Plan files that are no files: a typed error at once, never a wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsv4_repro.errors import PlanError
from dsv4_repro.scenarios.drain import load_plan


@pytest.mark.parametrize("what", ["fifo", "folder", "device", "loop", "missing"])
def test_it_is_refused_at_once(what: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    match what:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
    with pytest.raises(PlanError, match=r"plan\.json"):
        load_plan(path)


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text('{"requests": 4}')
    (tmp_path / "plan.json").symlink_to("real.json")
    assert load_plan(tmp_path / "plan.json").requests == 4
