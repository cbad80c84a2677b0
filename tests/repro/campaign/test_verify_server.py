"""``verify drain --on server``: rows, sentences, and the whole verb on the stand-in (a test double: never a result of vLLM)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import ServerError, UsageError
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.campaign.cells import Cell, TrialResult
from dsv4_repro.repro.campaign.sequential import Rates
from dsv4_repro.repro.campaign.server_session import ServerSession, server_job_of
from dsv4_repro.repro.campaign.verify import MatrixResult, run_matrix
from dsv4_repro.repro.campaign.verify_server import PATIENCE, _chosen, server_cells, server_lines, server_table
from dsv4_repro.repro.leftovers import RUN_VARIABLE
from dsv4_repro.repro.schemas import schema_of

SITE = Path(__file__).parents[2] / "standin" / "site"
BASE = Cell(name="", ground="server", server={"model": "dummy"})


class Script:
    """Sessions that answer by the row's name, the last answer repeated."""

    def __init__(self, **kinds: list[str]) -> None:
        self.kinds = {name.replace("_", " "): answers for name, answers in kinds.items()}

    def __call__(self, cell: Cell, **_more: Any) -> Any:
        answers = list(self.kinds.get(cell.name, ["clean"]))

        class One:
            device_idle = True

            def trial(self, seed: int) -> TrialResult:
                kind: Any = answers.pop(0) if len(answers) > 1 else answers[0]
                reached = ("3 live (measured)",) if kind in ("hang", "clean") else ()
                why = "" if reached else f"why {kind}"
                return TrialResult(kind, seed, bool(reached), identity="abc" if kind == "hang" else None, windows=reached, why=why)

            def close(self) -> None:
                """Nothing is open."""

        return One()


def _matrix(script: Script) -> MatrixResult:
    rates = Rates(hazard=0.5, false_rate=1e-3)
    return run_matrix(server_cells(BASE), rates, most_trials=20, patience=PATIENCE, session=script, clock=FakeClock())


def test_the_rows_are_launches_of_one_build() -> None:
    rows = server_cells(BASE, ["--max-num-seqs 8", "--enforce-eager"])
    assert [row.cell.name for row in rows] == ["neither", "producer only", "no MTP", "--max-num-seqs 8", "--enforce-eager"]
    assert rows[1].cell.server == {"model": "dummy", "guard": True}
    assert rows[2].cell.plan == {"mtp": 0}
    assert rows[3].cell.server["flags"] == ("--max-num-seqs", "8")
    assert len({row.cell.key for row in rows}) == 5
    assert Cell.from_document(json.loads(json.dumps(rows[3].cell.document()))).key == rows[3].cell.key
    command = rows[3].cell.command(7)
    assert command[:5] == ("dsv4-repro", "run", "drain", "--on", "server")
    assert command[-3:] == ("--", "--max-num-seqs", "8")
    for wrong in ("", "eager", "--x '"):
        with pytest.raises(UsageError, match="--flag-row"):
            server_cells(BASE, [wrong])


def test_rows_can_be_chosen() -> None:
    rows = server_cells(BASE)
    assert [row.cell.name for row in _chosen(rows, [])] == ["neither", "producer only", "no MTP", "--enforce-eager"]
    assert [row.cell.name for row in _chosen(rows, ["no MTP"])] == ["neither", "no MTP"]
    with pytest.raises(UsageError, match="there are neither, producer only"):
        _chosen(rows, ["both"])


def test_what_the_rows_say_together() -> None:
    result = _matrix(Script(neither=["hang"], __enforce_eager=["no window"]))
    assert {row.row.cell.name: row.word for row in result.rows}["producer only"] == "CLEAN"
    said = "\n".join(server_lines(result))
    assert "As it is it hangs: 1 of 1" in said
    assert "producer only: no hang in 7 drains that reached the window (at most" in said
    assert "windows: 3 live (measured) in 7 trials" in said
    assert "consumer's fix is another build" in said
    assert len(server_table(result)) == 6
    open_ = "\n".join(server_lines(_matrix(Script(neither=["clean"]))))
    assert "Nothing can be said about the others" in open_
    nothing = _matrix(Script(neither=["hang"], producer_only=["no window"]))
    assert (nothing.rows[1].word, nothing.rows[1].trials) == ("INCONCLUSIVE", PATIENCE)
    assert "none hung, and none can: why no window" in "\n".join(server_lines(nothing))
    broken = _matrix(Script(neither=["hang"], producer_only=["other", "clean"]))
    assert broken.rows[1].word == "INCONCLUSIVE", "a trial that failed keeps the row from being clean"


def test_a_server_that_does_not_start_is_other_and_the_next_trial_starts_anew(tmp_path: Path) -> None:
    class Dead:
        closed = 0

        def bound(self, _deadline: Any) -> None:
            """Told in vain."""

        def open(self, *_arguments: Any) -> Any:
            raise ServerError("the server ended in its start")

        def close(self) -> Any:
            Dead.closed += 1
            return type("Closed", (), {"how": "clean", "device_idle": True, "detail": ""})()

    class Session(ServerSession):
        def prepare(self, seed: int) -> Any:
            prepared = type("Prepared", (), {"request": None})()
            return type("Job", (), {"prepared": prepared})()

    session = Session(BASE, folder=tmp_path, make=lambda _job, _folder: Dead())  # type: ignore[arg-type,return-value]
    for number in (1, 2):
        result = session.trial(number)
        assert (result.kind, result.why) == ("other", "ServerError: the server ended in its start")
        assert (session.opened, Dead.closed) == (number, number)


def test_flags_of_the_other_grounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "drain", "--on", "server", "--model", "dummy", "--ablate", "--arch", "sm_90"]) == 2
    assert "--ablate, --arch" in capsys.readouterr().err
    assert main(["verify", "drain", "--on", "cpu", "--model", "dummy"]) == 2
    assert "of --on server" in capsys.readouterr().err
    assert main(["verify", "drain", "--on", "server", "--model", "dummy", "--python", "/nonexistent/python"]) != 0
    assert "Traceback" not in capsys.readouterr().err


def _environment(switches: str) -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(SITE), os.environ.get("PYTHONPATH", "")) if part)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DSV4_REPRO", "VLLM_", "CUDA_"))}
    return {**kept, "STANDIN": switches, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def _left(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(RUN_VARIABLE, "")
            if mark.startswith(str(folder)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def test_the_verb_on_the_standin(tmp_path: Path) -> None:
    """Two trials of the unfixed row need two servers, all clean trials of a row share one."""
    folder = tmp_path / "v"
    words = ["verify", "drain", "--on", "server", "--model", "dummy", "--hazard", "0.9", "--min-trials", "2", "--trials", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_repro.repro", *words, "--timeout", "150", "--out", str(folder), "--json"],
        env=_environment("step_ms=4 wedge=3"), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert not _left(folder)
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    jsonschema.validate(document, schema_of("verify"))
    rows = {row["name"]: row for row in document["rows"]}
    assert {name: row["word"] for name, row in rows.items()} == {
        "neither": "HANGS", "producer only": "CLEAN", "no MTP": "CLEAN", "--enforce-eager": "INCONCLUSIVE",
    }  # fmt: skip
    assert (rows["neither"]["hangs"], rows["neither"]["windows"]) == (2, 2)
    assert all("(measured)" in name for name in rows["producer only"]["reached"])
    assert rows["--enforce-eager"]["no_window"] == rows["--enforce-eager"]["trials"] == PATIENCE
    logs = {name: len(list((folder / name).rglob("vllm*.log"))) for name in ("neither", "producer-only", "no-MTP")}
    assert logs == {"neither": 2, "producer-only": 1, "no-MTP": 1}
    assert (folder / "neither" / "server-1" / "diagnosis.json").is_file()
    assert "| producer only | `--guard` |" in (folder / "verify.md").read_text()


def test_a_job_of_a_cell_has_the_cells_plan_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")]))
    cell = Cell(
        name="x", ground="server", plan={"prompt": (64, 64), "capture_sizes": [2, 4, 8], "requests": 5, "mtp": 2},
        server={"model": "dummy", "flags": ("--max-num-seqs", "8"), "tp": 2},
    )  # fmt: skip
    job = server_job_of(cell, 9)
    assert (job.plan.prompt, job.plan.requests, job.plan.mtp, job.plan.seed) == ((64, 64), 5, 2, 9)
    assert job.plan.max_num_seqs == 8
    assert "--tp" in job.command
