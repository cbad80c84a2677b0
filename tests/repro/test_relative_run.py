"""run NAME for the relatives: verb, exit status, run directory; --all; errors as sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.cli_run import relatives
from dsv4_repro.scenarios.registry import all_scenarios


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_verb_knows_every_scenario() -> None:
    assert set(relatives()) == {entry.name for entry in all_scenarios()} - {"drain"}
    assert all(len(about) > 20 for about in relatives().values())


def test_a_hang_leaves_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["run", "oversubscribe", "--out", str(folder), "--json"]) == 3
    found = document(capsys)
    assert found["outcome"] == "hang"
    for name in ("run.json", "diagnosis.json", "report.md", "report.html", "junit.xml", "timeline.jsonl"):
        assert (folder / name).is_file(), name
    record = json.loads((folder / "run.json").read_text())
    assert record["state"] == "finished"
    assert record["scenario"] == "oversubscribe"
    assert record["exit_status"] == 3
    kinds = {entry["kind"] for entry in json.loads((folder / "evidence" / "index.json").read_text())["entries"]}
    assert {"gpu-core", "row-states", "interpreter"} <= kinds
    # The directory judged again, on its own, says the same.
    assert main(["autopsy", str(folder), "--json"]) == 3
    verdict = document(capsys)["verdict"]
    assert isinstance(verdict, dict)
    assert (verdict["class"], verdict["cause"]) == ("gpu-spin-barrier", "not-co-resident")


def test_after_a_hang_the_next_command_is_told_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a run"
    assert main(["run", "oversubscribe", "--out", str(folder)]) == 3
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    assert line == "next: dsv4-repro show oversubscribe    # the fixes, and what runs where"


def test_a_dump_of_two_devices_is_judged_again_on_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["run", "crossrank", "--fix", "held-by-a-barrier", "--out", str(folder), "--json"]) == 3
    capsys.readouterr()
    dump = folder / "evidence" / "interpreted.nvcudmp"
    assert main(["autopsy", str(dump), "--json"]) == 3
    found = document(capsys)
    assert isinstance(found["verdict"], dict)
    assert isinstance(found["waits"], list)
    assert (found["verdict"]["class"], found["verdict"]["cause"]) == ("gpu-spin-barrier", "peer-left")
    assert {wait["device"] for wait in found["waits"]} == {0, 1}


def test_a_wrong_answer_is_another_failure_and_a_fix_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "histogram-ring", "--out", str(tmp_path / "a"), "--json"]) == 4
    capsys.readouterr()
    assert main(["run", "histogram-ring", "--fix", "ring-counts-long-rows", "--out", str(tmp_path / "b"), "--json"]) == 0
    assert document(capsys)["outcome"] == "clean"


def test_all_rows_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "dspark", "--all", "--json"]) == 0
    found = document(capsys)
    assert found["outcome"] == "clean"
    assert isinstance(found["rows"], list)
    assert len(found["rows"]) == 9


def test_every_order_of_execution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "init-race", "--fix", "zeroed-in-kernel-two", "--explore", "--json"]) == 3
    found = document(capsys)
    assert isinstance(found["ends"], list)
    assert {end["name"] for end in found["ends"]} == {"completed", "init-race"}
    assert main(["run", "oversubscribe", "--fix", "four-slots", "--explore"]) == 0
    assert "ends: completed" in capsys.readouterr().out
    assert main(["run", "dspark", "--explore"]) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "others-51538"], "would take"),
        (["run", "init-race", "--fix", "nobody"], "there are"),
        (["run", "init-race", "--on", "server"], "cpu or the gpu"),
        (["run", "init-race", "--on", "gpu", "--count"], "--trials N"),
        (["run", "init-race", "--trials", "3"], "--on gpu"),
        (["run", "init-race", "--on", "gpu", "--fix", "zeroed-by-host"], "cpu ground only"),
        (["run", "init-race", "--arch", "x"], "architecture"),
    ],
)
def test_what_cannot_be_is_a_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in " ".join(capsys.readouterr().err.split())
