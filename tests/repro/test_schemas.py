"""The published schemas are those of this code, and what the program writes obeys them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from dsv4_repro.errors import UsageError
from dsv4_repro.repro.__main__ import _error_document, main
from dsv4_repro.repro.run_records import EvidenceEntry, EvidenceIndex, KernelRecord, RunRecord, TrialCounts
from dsv4_repro.repro.schemas import PUBLISHED, schema_of, write_schemas
from dsv4_repro.scenarios.drain import DrainPlan

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "schemas"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_committed_schema_is_what_the_code_says(name: str, tmp_path: Path) -> None:
    write_schemas(tmp_path)
    assert (FOLDER / f"{name}.json").read_text(encoding="utf-8") == (tmp_path / f"{name}.json").read_text(encoding="utf-8"), (
        "run: python -m dsv4_repro.repro.schemas docs/schemas"
    )
    jsonschema.Draft202012Validator.check_schema(schema_of(name))


def test_no_schema_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(PUBLISHED)


@pytest.mark.parametrize("arguments", [["doctor"], ["list"], ["show", "drain"]])
def test_what_a_verb_prints_obeys_its_schema(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--json"]) == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), schema_of(arguments[0]))


def test_an_error_document_obeys_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "nothing", "--json"]) == 2
    jsonschema.validate(json.loads(capsys.readouterr().out), schema_of("error"))
    _error_document(UsageError.__name__, "m", "h", 5)
    jsonschema.validate(json.loads(capsys.readouterr().out), schema_of("error"))


def test_run_documents_obey_theirs() -> None:
    entry = EvidenceEntry(id="E1", kind="k", path="evidence/x", sha256="0" * 64, size=1)
    run = RunRecord(scenario="drain", ground="cpu", kernel=KernelRecord(origin="builtin"), trials=TrialCounts(asked=1))
    jsonschema.validate(run.document(), schema_of("run"))
    jsonschema.validate(EvidenceIndex(entries=(entry,)).document(), schema_of("evidence"))
    jsonschema.validate(DrainPlan().document(), schema_of("drain-plan"))
