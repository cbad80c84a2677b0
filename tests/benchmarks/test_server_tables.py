"""Tables of the server benchmark's result files, on documents as it writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .by_path import benchmark

if TYPE_CHECKING:
    from dsv4_repro.benchmarks.server_tables import share, tables
else:
    share, tables = benchmark("server_tables").share, benchmark("server_tables").tables

SCHEMA = "dsv4-repro/benchmark-server-experiments/1"


def written(folder: Path, parts: dict[str, Any], port: int = 8011, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    document = {"schema": SCHEMA, "parts": parts, "servers": [], "machine": {}, "options": {}, **more}
    path = folder / f"server_experiments-{port}.json"
    path.write_text(json.dumps(document))
    return path


def drains(**more: Any) -> dict[str, Any]:
    return {
        "drains": 6, "complete": 6, "with_releases": 6, "releases": [8] * 6, "releases_by_rank": [{"0": 4, "1": 4}] * 6,
        "stall_s": [0.06, 0.07, 0.08, 0.06, 0.07, 0.21], "gap_p50_ms": 8.0, "gap_p99_ms": 65.0, "gaps": 1176, **more,
    }  # fmt: skip


def test_each_row_names_its_file_and_hardware(tmp_path: Path) -> None:
    machine = {"gpus": ["0, NVIDIA H200, 580.1"], "cpus": 64, "kernel": "6.1", "python": "3.12.3"}
    written(tmp_path / "a", {"rescue": drains()}, machine=machine, options={"gpu": "0,1", "tp": "2", "layers": "2"})
    written(tmp_path / "b", {"rescue": drains(complete=5, stopped="drain 6 did not end")})
    lines, wrong = tables([tmp_path])
    text = "\n".join(lines)
    assert not wrong
    assert "| a/8011 | 0, NVIDIA H200, 580.1 | 0,1 | 2 | 64, 6.1, Python 3.12.3 | dummy, 2 layers |" in text
    assert "| b/8011 | not recorded |" in text
    assert "| rescue | a/8011 | 6 of 6 (54 to 100 %) | 6 of 6 | 8 each | 0: 4 each; 1: 4 each | 0.070 (0.060 to 0.210) |" in text
    assert "| rescue | b/8011 | 5 of 6 (36 to 100 %) |" in text
    assert "drain 6 did not end" in text


def test_cost_of_both_methods(tmp_path: Path) -> None:
    value = {"n": 30, "mean": 0.4, "low": -0.1, "high": 0.9}
    windows = {
        "throughput_lost_percent": value, "steps_lost_percent": value, "gap_longer_percent": {**value, "mean": 0.5},
        "tokens_per_s_off": 1120.0, "gap_ms_off": 7.1, "left_out": {"x": 2}, "pairs": [{}] * 30, "window_s": 1.0,
    }  # fmt: skip
    waves = {"cost_percent": {"n": 2, "mean": 10.4, "low": -6.1, "high": 27.0}, "tokens_per_s_off": 300.0, "pairs": [{}] * 2}
    written(tmp_path, {"cost": {"recorder, 8 live": windows, "guard, 2 live": waves}})
    text = "\n".join(tables([tmp_path])[0])
    assert (
        "windows of 1 s | 30 | 2 | +0.40 (-0.10 to +0.90) | +0.40 (-0.10 to +0.90) | +0.50 (-0.10 to +0.90) | 1120 | 7.10 |" in text
    )
    assert "two waves a pair | 2 | - | +10.40 (too few for an interval) | - | - |" in text


def test_unwedge_outputs_one_rank_and_failures(tmp_path: Path) -> None:
    same = {"equal": True, "by": "token ids", "requests": [{"tokens": [60, 60], "first_difference": None}] * 4}
    other = {**same, "requests": [*same["requests"][:3], {"tokens": [60, 60], "first_difference": 7}], "equal": False}  # type: ignore[index]
    done = {"status": 0, "seconds": 5.5, "document": {"ranks": [{"rank": 0, "state": "released", "writes": 4, "seconds": 0.7}]}}
    unwedge = {
        "wedged": True, "live": 3, "dry": {"status": 3}, "done": done, "releases_by_rank": {"0": 4},
        "survivors": {"complete": True}, "guarded / guarded again": same, "guarded / unwedged": other,
        "further_requests": {"served": 99, "of": 100},
        "server_alive": True,
    }  # fmt: skip
    step = {
        "asked": 0, "answer": {"released": 1, "why_no_more": "no group has one arrival"}, "tokens_before": 72, "tokens_after": 72,
        "live_after": 3, "releases_by_rank": {"0": 1, "1": 0}, "guard": [True, False],
    }  # fmt: skip
    silent = {**step, "answer": {"error": "DeadlineError: no answer | in time"}}
    pairs = {"guarded / guarded again": {"drain": same, "after": same}, "guarded / rescued": {"drain": other, "after": same}}
    parts = {
        "unwedge": unwedge, "outputs": {"rounds": [pairs]},
        "unwedge-one-rank": {"wedged": True, "live": 3, "steps": [step, silent]},
        "control": {"error": "PartError: control server: not ready"}, "_end": {"failed": 1},
    }  # fmt: skip
    written(tmp_path, parts)
    lines, wrong = tables([tmp_path])
    text = "\n".join(lines)
    assert not wrong
    assert "rank 0: released, 4 writes, 0.7 s | 0: 4 | yes | yes | no | 99 of 100 | yes |" in text
    assert "| guarded / rescued |" in text
    assert "| 1 | 3 of 4 | 240 | token ids |" in text
    assert "| 1 | 0 | 1 released; then: no group has one arrival | 0: 1, 1: 0 | 0 | 3 | yes, no |" in text
    assert "DeadlineError: no answer / in time" in text
    assert "| control | PartError: control server: not ready |" in text


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "other"}', "[" * 100_000, "nul\x00l"])
def test_what_is_no_result_is_told_and_the_others_are_shown(tmp_path: Path, text: str) -> None:
    written(tmp_path / "a", {"guard": drains()})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "server_experiments-1.json").write_text(text)
    lines, wrong = tables([tmp_path, tmp_path / "none"])
    assert any("| guard | a/8011 |" in line for line in lines)
    assert len(wrong) == 2
    assert "server_experiments-1.json" in wrong[0]
    assert "no server_experiments-*.json there" in wrong[1]


def test_a_part_of_another_shape_is_told(tmp_path: Path) -> None:
    written(tmp_path, {"rescue": {"drains": 3}})
    assert "drains: a file is not as this program writes it" in tables([tmp_path])[1][0]


def test_shares_have_exact_intervals() -> None:
    """0 of 10 and 10 of 10 by 1 - 0.025 ** (1 / 10); 5 of 10 by tables of Clopper and Pearson."""
    assert share(0, 10) == "0 of 10 (0 to 31 %)"
    assert share(10, 10) == "10 of 10 (69 to 100 %)"
    assert share(5, 10) == "5 of 10 (19 to 81 %)"
    assert share(0, 0) == "0 of 0"
