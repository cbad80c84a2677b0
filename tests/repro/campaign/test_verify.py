"""The fix matrix and the ablation, on the interpreter and with sessions that play a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import UnavailableError, UsageError
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.campaign import verify_run
from dsv4_repro.repro.campaign.cells import Cell, TrialResult
from dsv4_repro.repro.campaign.matrix import ablation_cells, fix_cells
from dsv4_repro.repro.campaign.sequential import Rates
from dsv4_repro.repro.campaign.verify import MatrixResult, ablation_lines, load_bearing_lines, markdown_table, run_matrix
from dsv4_repro.repro.schemas import schema_of


class Script:
    """Sessions that answer by the row's name: a list of trial kinds, the last repeated."""

    def __init__(self, **kinds: list[str]) -> None:
        self.kinds = {name.replace("_", " "): answers for name, answers in kinds.items()}
        self.clock: FakeClock | None = None
        self.closed: list[str] = []

    def __call__(self, cell: Cell, **_more: Any) -> Any:
        script = self

        class One:
            device_idle = True
            number = 0

            def trial(self, seed: int) -> TrialResult:
                answers = script.kinds.get(cell.name, ["clean"])
                kind: Any = answers[min(self.number, len(answers) - 1)]
                self.number += 1
                if script.clock is not None:
                    script.clock.advance(1.0)
                identity = "0123456789ab" if kind == "hang" else None
                return TrialResult(
                    kind, seed, kind in ("hang", "clean"), identity=identity, why="" if kind == "clean" else f"why {kind}"
                )

            def close(self) -> None:
                script.closed.append(cell.name)

        return One()


def matrix(script: Script, **options: Any) -> MatrixResult:
    return run_matrix(fix_cells("drain", Cell(name="")), Rates(), session=script, **options)


def words(result: MatrixResult) -> dict[str, str]:
    return {row.row.cell.name: row.word for row in result.rows}


def test_four_rows_one_change_a_row() -> None:
    rows = fix_cells("drain", Cell(name=""), more=["vllm==0.27.1"])
    assert [(row.cell.kernel, row.cell.producer) for row in rows] == [
        ("builtin", "raw"), ("builtin", "clamped"), ("builtin:guard", "raw"), ("builtin:guard", "clamped"),
        ("vllm==0.27.1", "raw"), ("vllm==0.27.1", "clamped"),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no scenario"):
        fix_cells("nothing", Cell(name=""))


def test_each_layer_alone_is_named_load_bearing_and_the_producer_row_does_not_speak_for_the_guard() -> None:
    result = matrix(Script(neither=["hang"]))
    assert words(result) == {"neither": "HANGS", "producer only": "CLEAN", "consumer only": "CLEAN", "both": "CLEAN"}
    said = "\n".join(load_bearing_lines(result))
    assert "producer fix is enough alone" in said
    assert "consumer fix is enough alone" in said
    assert "says nothing about the consumer's guard" in said
    assert "at most" in said
    assert {row.stopped for row in result.rows} == {"decided"}


def test_a_fix_that_is_not_enough_alone_is_said() -> None:
    said = "\n".join(load_bearing_lines(matrix(Script(neither=["hang"], producer_only=["hang"]))))
    assert "producer fix is NOT enough alone" in said


@pytest.mark.parametrize("kind", ["no window", "clean", "other", "wrong"])
def test_nothing_is_claimed_of_a_fix_where_the_unfixed_row_does_not_hang(kind: str) -> None:
    result = matrix(Script(neither=[kind]), most_trials=60)
    said = "\n".join(load_bearing_lines(result))
    assert "Nothing can be said about the fixes" in said
    assert "enough alone" not in said


@pytest.mark.parametrize("kind", ["no window", "other", "wrong"])
def test_a_row_without_a_window_or_with_failures_is_inconclusive_never_clean(kind: str) -> None:
    result = matrix(Script(neither=["hang"], both=[kind]), most_trials=60)
    both = result.row("both")
    assert both is not None
    assert (both.word, both.test.windows) == ("INCONCLUSIVE", 0)
    assert both.trials == 10, "ten trials without a window are enough"
    assert f"why {kind}" in "\n".join(load_bearing_lines(result))


def test_one_failure_among_clean_trials_keeps_the_row_from_being_clean() -> None:
    result = matrix(Script(neither=["hang"], both=["other", "clean"]))
    both = result.row("both")
    assert both is not None
    assert both.test.word == "CLEAN"
    assert both.word == "INCONCLUSIVE"


def test_every_row_gets_its_share_of_the_time() -> None:
    script = Script(neither=["clean"])
    script.clock = FakeClock()
    result = matrix(script, timeout_s=40.0, clock=script.clock)
    assert [row.stopped for row in result.rows] == ["time"] * 4
    assert [row.trials for row in result.rows] == [10] * 4
    assert set(words(result).values()) == {"INCONCLUSIVE"}


def test_the_session_is_closed_whatever_happens() -> None:
    class Broken(Script):
        def __call__(self, cell: Cell, **more: Any) -> Any:
            one = super().__call__(cell, **more)
            one.trial = lambda _seed: (_ for _ in ()).throw(KeyboardInterrupt())
            return one

    script = Broken()
    with pytest.raises(KeyboardInterrupt):
        matrix(script)
    assert script.closed == ["neither"]


def test_the_table_is_markdown_whatever_a_kernel_is_called() -> None:
    rows = fix_cells("drain", Cell(name=""), more=["a|b\nc.so"])
    result = run_matrix(rows, Rates(), most_trials=1, session=Script())
    lines = markdown_table(result)
    assert {line.replace("\\|", "").count("|") for line in lines} == {10}
    assert not any("\n" in line for line in lines)


def test_ablation_separates_what_was_tried_from_what_was_computed() -> None:
    rows = ablation_cells(Cell(name="", kernel="builtin"))
    names = [row.cell.name for row in rows]
    assert names == [
        "all conditions", "MTP", "graphs", "padding", "C4", "layers", "residency", "width", "raw producer", "unguarded kernel",
    ]  # fmt: skip
    script = Script(all_conditions=["hang"], MTP=["no window"], layers=["hang"], width=["other"])
    result = run_matrix(rows, Rates(), session=script)
    said = ablation_lines(result)
    assert "tried in the danger window: graphs, padding, C4, residency, raw producer, unguarded kernel" in said[1]
    assert "MTP (why no window)" in said[2]
    assert said[3] == "Not necessary, it hangs without them all the same: layers."
    assert said[4].startswith("Open: width")
    dull = run_matrix(rows, Rates(), most_trials=50, session=Script())
    assert "Nothing can be said" in ablation_lines(dull)[0]


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_verify_drain_on_the_interpreter(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["verify", "drain", "--on", "cpu", "--json", "--out", "v", "--min-trials", "3"])
    document = json.loads(capsys.readouterr().out)
    assert (status, document["outcome"], document["ground"]) == (0, "clean", "cpu")
    jsonschema.validate(document, schema_of("verify"))
    assert [row["word"] for row in document["rows"]] == ["HANGS", "CLEAN", "CLEAN", "CLEAN"]
    assert document["rows"][0]["signature"] == "vllm-51593"
    assert document["rows"][0]["reused"] == document["rows"][0]["hangs"] == 3
    assert document["rows"][1]["hazard"]["high"] < 0.1
    text = (outside / "v" / "verify.md").read_text()
    assert text.startswith("| fix | kernel |")
    assert "interpreted on a CPU, not measured on a GPU" in text


def test_verify_says_when_a_build_is_not_fixed(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["verify", "drain", "--on", "cpu", "--json", "--kernel", "builtin:guard-after-cast", "--min-trials", "1"])
    document = json.loads(capsys.readouterr().out)
    assert (status, document["outcome"]) == (3, "hang")
    assert any("builtin:guard-after-cast behind the raw producer hangs" in line for line in document["said"])


def test_a_plan_that_never_reaches_the_window_is_inconclusive(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["verify", "drain", "--on", "cpu", "--json", "--mtp", "0"])
    document = json.loads(capsys.readouterr().out)
    assert (status, document["outcome"]) == (5, "inconclusive")
    assert {row["word"] for row in document["rows"]} == {"INCONCLUSIVE"}


@pytest.mark.parametrize(("trials", "warned"), [(43, True), (44, False)])
def test_too_few_trials_to_decide_is_said_first(
    outside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trials: int, warned: bool
) -> None:
    def stop(*_arguments: Any, **_options: Any) -> None:
        raise UnavailableError("nothing is run here")

    monkeypatch.setattr(verify_run, "run_matrix", stop)
    assert Rates().windows_when_clean == 44
    assert main(["verify", "drain", "--on", "cpu", "--trials", str(trials)]) == 5
    assert (f"--trials {trials} is too few to call a row CLEAN" in capsys.readouterr().err) is warned


@pytest.mark.parametrize(
    "flags", [["--alpha", "0"], ["--hazard", "2"], ["--trials", "5", "--min-trials", "9"], ["--schedule", "x"]]
)
def test_wrong_flags_are_usage(outside: Path, flags: list[str]) -> None:
    assert main(["verify", "drain", "--on", "cpu", *flags]) == 2
