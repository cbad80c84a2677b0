"""``verify NAME`` for a scenario with rows: words, rates, exit status, table, schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.campaign.verify_rows import judged_row, outcome_of_rows, rows_table, said_of
from dsv4_repro.repro.campaign.verify_run import chosen_ground
from dsv4_repro.repro.schemas import schema_of
from dsv4_repro.scenarios.launches import Row
from dsv4_repro.scenarios.registry import scenario


def row_of(name: str, row: str) -> Row:
    return next(item for item in scenario(name).variants() if item.name == row)


def document(row: Row, *, bad: int, good: int, class_: str = "", cause: str | None = None, **more: Any) -> dict[str, Any]:
    found = (class_, cause) if class_ else (row.class_, row.cause) if bad else ("not-hung", None)
    counts = [{"class": found[0], "cause": found[1], "launches": bad}] if bad else []
    counts += [{"class": "not-hung", "cause": None, "launches": good}] if good else []
    return {
        "row": row.name, "kernel": row.kernel, "fixed": row.fixed, "expected": {"class": row.class_, "cause": row.cause},
        "found": {"class": found[0], "cause": found[1], "confidence": "high"}, "as_expected": found == (row.class_, row.cause),
        "launches": bad + good, "counts": counts, "sentence": "as it ended", **more,
    }  # fmt: skip


DEFECT, FIX = row_of("init-race", "zeroed-in-kernel"), row_of("init-race", "zeroed-by-host")
NOTHING: dict[str, Any] = {"not_run": [], "not_reproduced": []}


@pytest.mark.parametrize(
    ("row", "bad", "good", "more", "word"),
    [
        (DEFECT, 3, 9, {}, "SHOWN"),
        (DEFECT, 0, 9, {}, "NOT SHOWN"),
        (DEFECT, 2, 9, {"class_": "gpu-kernel-stuck"}, "OTHER"),
        (FIX, 0, 44, {}, "CLEAN"),
        (FIX, 0, 43, {}, "OPEN"),
        (FIX, 1, 43, {"class_": "wrong-result"}, "BROKEN"),
        (FIX, 1, 43, {"class_": "unknown"}, "OPEN"),
    ],
)
def test_the_word_of_a_row(row: Row, bad: int, good: int, more: dict[str, Any], word: str) -> None:
    assert judged_row(document(row, bad=bad, good=good, **more), row, 44)["word"] == word


def test_one_fixed_order_on_the_cpu_is_no_rate_and_on_a_card_it_is() -> None:
    row = row_of("init-race", "fresh")
    alone = judged_row(document(row, bad=0, good=1), row, 44)
    assert (alone["word"], alone["bounds"], alone["rate"]) == ("CLEAN", [], "one order of execution")
    card = judged_row(document(row, bad=0, good=20, device="H200"), row, 44)
    assert (card["word"], len(card["bounds"])) == ("OPEN", 1)


def test_a_computed_row_says_so_and_names_no_kernel() -> None:
    row = row_of("oversubscribe", "refused")
    found = judged_row(document(row, bad=1, good=0), row, 44)
    assert (found["word"], found["rate"], found["kernel"], found["bounds"]) == ("SHOWN", "computed", "-", [])
    held = row_of("crossrank", "held-by-a-barrier")
    found = judged_row(document(held, bad=1, good=0), held, 44)
    assert (found["rate"], found["kernel"]) == ("one order of execution", "builtin:unguarded")
    cluster = row_of("cooperative", "clamped-in-the-kernel-0.28.0")
    assert judged_row(document(cluster, bad=0, good=1), cluster, 44)["word"] == "CLEAN"
    assert judged_row(document(cluster, bad=0, good=20, device="H200"), cluster, 44)["word"] == "OPEN"


def test_what_the_rows_say_together() -> None:
    shown = judged_row(document(DEFECT, bad=3, good=9), DEFECT, 44)
    clean = judged_row(document(FIX, bad=0, good=44), FIX, 44)
    broken = judged_row(document(FIX, bad=1, good=44, class_="gpu-spin-barrier", cause="init-race"), FIX, 44)
    hidden = judged_row(document(DEFECT, bad=0, good=9), DEFECT, 44)
    assert outcome_of_rows([shown, clean]) == "clean"
    assert outcome_of_rows([shown, broken]) == "hang"
    assert outcome_of_rows([hidden, clean]) == "inconclusive"
    assert outcome_of_rows([]) == "inconclusive"
    assert any("holds" in line for line in said_of([shown, clean], NOTHING))
    said = said_of([hidden, clean], NOTHING)
    assert not any("holds" in line for line in said)
    assert any("Nothing can be said" in line for line in said)
    assert len(rows_table([shown, clean])) == 4


def test_the_verb_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "oversubscribe", "--on", "cpu", "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, schema_of("verify-rows"))
    words = {row["row"]: row["word"] for row in found["rows"]}
    assert words["three-slots"] == "SHOWN"
    assert words["four-slots"] == "CLEAN"
    assert {item["row"] for item in found["not_run"]} >= {"slots-held", "larger-than-the-card"}
    assert (tmp_path / "verify.md").read_text().startswith("| row |")
    assert json.loads((tmp_path / "verify.json").read_text())["markdown"] == found["markdown"]


def test_a_kernel_of_the_users_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "victim", "--on", "cpu", "--kernel", "builtin:guard", "--kernel", "builtin:unguarded", "--json"]) == 3
    words = {row["row"]: row["word"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert words["kernel builtin:guard"] == "CLEAN"
    assert words["kernel builtin:unguarded"] == "BROKEN"


@pytest.mark.parametrize(
    ("words", "says"),
    [(["others-51538"], "has no rows"), (["init-race", "--ablate"], "only the drain"), (["nothing"], "no scenario"),
     (["dspark", "--kernel", "builtin"], "launches a kernel")],
)  # fmt: skip
def test_what_cannot_be_verified(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words, "--on", "cpu"]) == 2
    assert says in capsys.readouterr().err


def test_a_server_is_never_chosen_for_trials(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DSV4_REPRO_MODEL", "some/model")
    assert chosen_ground(None)[0] in ("gpu", "cpu")
    assert chosen_ground("server")[0] == "server"
    assert main(["verify", "dspark", "--on", "server"]) == 2
    assert "only the drain" in capsys.readouterr().err


def test_the_other_documents_obey_their_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "dspark", "--all", "--json"]) == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), schema_of("relative-matrix"))
    assert main(["run", "oversubscribe", "--fix", "three-slots", "--explore", "--json"]) == 3
    jsonschema.validate(json.loads(capsys.readouterr().out), schema_of("explore"))
