"""However a run ends, its directory says how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.clock import SYSTEM, FakeClock
from dsv4_repro.errors import DeadlineError, NoDeviceError, RunStoreError
from dsv4_repro.forensics.records import Diagnosis
from dsv4_repro.repro.run_end import breaks_noted, finish_row, flat_environment
from dsv4_repro.repro.run_records import RunRecord, TrialCounts
from dsv4_repro.repro.runstore import RunStore
from dsv4_repro.scenarios.registry import scenario

RECORD = RunRecord(scenario="crossrank", ground="gpu", seed=3, environment={"sm": 90}, versions={"python": "3.11"})


def kept(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return document


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (KeyboardInterrupt(), "interrupted"), (DeadlineError("late"), "failed"), (NoDeviceError("none"), "failed"),
        (RuntimeError("x" * 5000), "failed"), (SystemExit(1), "failed"),
    ],
)  # fmt: skip
def test_what_broke_a_run_off_is_in_its_record_and_goes_on(error: BaseException, state: str, tmp_path: Path) -> None:
    clock = FakeClock()
    with RunStore.create("crossrank", out=tmp_path / "run") as store:
        store.write_run(RECORD)

        def broken() -> None:
            with breaks_noted(store, RECORD, clock):
                clock.sleep(2.5)
                raise error

        with pytest.raises(type(error)) as raised:
            broken()
    assert raised.value is error
    found = kept(tmp_path / "run")
    assert found["state"] == state
    assert found["error"] == f"{type(error).__name__}: {error}"[:2000]
    assert found["ended"]
    assert found["seconds"] == 2.5
    assert (found["seed"], found["versions"]) == (3, {"python": "3.11"})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NoDeviceError("the card fell off"), RunStoreError("full")])
def test_a_record_that_cannot_be_written_does_not_take_the_place_of_what_broke_the_run_off(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any) -> None:
        raise RunStoreError("cannot write: the disk is full", path="run.json")

    with RunStore.create("crossrank", out=tmp_path / "run") as store:
        monkeypatch.setattr(RunStore, "write_run", full)
        with pytest.raises(type(error)) as raised, breaks_noted(store, RECORD, SYSTEM):
            raise error
    assert raised.value is error
    assert any("the disk is full" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(("class_", "outcome", "fixes"), [("gpu-crossrank-spin", "hang", True), ("not-hung", "clean", False)])
def test_a_finished_row_has_record_diagnosis_and_reports(class_: str, outcome: str, fixes: bool, tmp_path: Path) -> None:
    entry = scenario("crossrank")
    diagnosis = Diagnosis.model_validate({
        "outcome": outcome, "ground": "gpu",
        "verdict": {"class": class_, "cause": None, "confidence": "high", "sentence": "so it is"},
    })  # fmt: skip
    with RunStore.create("crossrank", out=tmp_path / "run") as store:
        store.write_run(RECORD)
        with breaks_noted(store, RECORD, SYSTEM):
            pass
        assert kept(store.path)["state"] == "running"
        finish_row(
            store, entry, RECORD, diagnosis, TrialCounts(asked=2, hang=2), status=3, seconds=1.23456, clock=SYSTEM,
            environment={"driver": "580"},
        )  # fmt: skip
    found = kept(tmp_path / "run")
    assert (found["state"], found["outcome"], found["exit_status"], found["seconds"]) == ("finished", outcome, 3, 1.235)
    assert found["environment"] == {"sm": 90, "driver": "580"}
    assert found["trials"]["hang"] == 2
    assert json.loads((tmp_path / "run" / "diagnosis.json").read_text())["verdict"]["sentence"] == "so it is"
    report = (tmp_path / "run" / "report.md").read_text()
    assert (entry.fixes[0].text in report) == fixes


@pytest.mark.parametrize("record_too", [False, True])
def test_a_diagnosis_that_cannot_be_written_leaves_a_finished_record_and_is_raised(
    record_too: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diagnosis = Diagnosis.model_validate({
        "outcome": "clean", "ground": "gpu",
        "verdict": {"class": "not-hung", "cause": None, "confidence": "high", "sentence": "so it is"},
    })  # fmt: skip

    def full(*_arguments: Any) -> None:
        raise RunStoreError("cannot write: the disk is full", path="diagnosis.json")

    with RunStore.create("crossrank", out=tmp_path / "run") as store:
        store.write_run(RECORD)
        monkeypatch.setattr(RunStore, "write_diagnosis", full)
        if record_too:
            monkeypatch.setattr(RunStore, "write_run", full)
        with pytest.raises(RunStoreError, match=r"diagnosis\.json") as raised:
            finish_row(
                store, scenario("crossrank"), RECORD, diagnosis, TrialCounts(asked=1, clean=1), status=0, seconds=1.0, clock=SYSTEM
            )
    found = kept(tmp_path / "run")
    if record_too:
        assert found["state"] == "running"
        assert any("record could not be written" in note for note in raised.value.__notes__)
    else:
        assert (found["state"], found["outcome"], found["exit_status"]) == ("finished", "clean", 5)
        assert "diagnosis could not be written" in found["error"]


@pytest.mark.parametrize(
    ("environment", "flat"),
    [
        ({}, {}),
        ({"a": 1, "b": "x", "c": True, "d": 1.5}, {"a": 1, "b": "x", "c": True, "d": 1.5}),
        ({"a": 1, "list": [1], "none": None}, {"a": 1, "details": {"list": [1], "none": None}}),
        (
            {"nvml": {"driver": "580", "uuid": "GPU-1", "index": 3}},
            {"driver": "580", "uuid": "GPU-1", "details": {"nvml": {"driver": "580", "uuid": "GPU-1", "index": 3}}},
        ),
        ({"nvml": {"driver": 580, "uuid": None}}, {"details": {"nvml": {"driver": 580, "uuid": None}}}),
        ({"nvml": None}, {"details": {"nvml": None}}),
    ],
)
def test_a_grounds_environment_for_the_record(environment: dict[str, Any], flat: dict[str, Any]) -> None:
    assert flat_environment(environment) == flat
