"""The verb ``run drain`` end to end over a scripted ground: directory, words, document, status."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsv4_repro.errors import NoDeviceError, RunStoreError
from dsv4_repro.forensics.records import Diagnosis
from dsv4_repro.kernels.devices import device_for_sm
from dsv4_repro.repro import drain_flags, drain_job, drain_run
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.leftovers import PARENT_VARIABLE, RUN_VARIABLE
from dsv4_repro.repro.narrate import with_article
from dsv4_repro.repro.runread import open_run, read_timeline
from dsv4_repro.repro.runstore import RunStore

#: Four requests, one leaves: the danger step is the first with three live.
SMALL = ["--requests", "4", "--min-live", "3", "--output", "4:4", "--steps", "8"]


@pytest.fixture
def play(fakes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """``play(ground)``: the verb then runs on that ground, as on an H200, with the fake diagnosis."""

    def arrange(ground: Any, *, grounds: list[Any] | None = None) -> Any:
        queue = list(grounds or [])
        monkeypatch.setenv(RUN_VARIABLE, "")
        monkeypatch.setenv(PARENT_VARIABLE, "")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(drain_job, "make_ground", lambda _name: queue.pop(0) if queue else ground)
        monkeypatch.setattr(drain_job, "require_ground", lambda _name: None)
        monkeypatch.setattr(drain_job, "describe_gpu", lambda _ordinal: device_for_sm(90))
        monkeypatch.setattr(drain_job, "bound_diagnose", lambda *_arguments: fakes.diagnose)
        return ground

    return arrange


def _danger(fakes: Any) -> int:
    from dsv4_repro.scenarios.drain import DrainPlan
    from dsv4_repro.scenarios.drain_steps import decode_steps

    steps = decode_steps(DrainPlan(requests=4, min_live=3, output=(4, 4), steps=8))
    return next(step.index for step in steps if step.danger)


def test_a_hang_is_status_3_and_everything_is_in_the_directory(
    play: Any, fakes: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    play(fakes.ground(script={_danger(fakes): "hung"}))
    assert main(["run", "drain", "--on", "gpu", *SMALL, "--out", str(tmp_path / "run")]) == 3
    view = open_run(tmp_path / "run")
    assert view.missing == ()
    assert view.run.state == "finished"
    assert (view.run.outcome, view.run.exit_status) == ("hang", 3)
    assert view.run.kernel is not None
    assert view.run.kernel.guarded is False
    assert view.run.environment["device"] == "Fake GPU"
    assert view.diagnosis is not None
    assert view.diagnosis.verdict.signature == "vllm-51593"
    assert "A draining MTP batch wedges the persistent top-k (vLLM #51593)" in (tmp_path / "run" / "report.md").read_text()
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "run" / "junit.xml").read_text().startswith("<?xml")
    assert all(isinstance(line, dict) for line in read_timeline(tmp_path / "run"))
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("run drain --on gpu (as asked): H200")
    flat = " ".join(out.split())
    assert "a hang is expected at step" in flat
    assert "HANG: gpu-spin-barrier / peer-left, high confidence" in flat
    assert "arrival_counter = 1, waits until it is >= 2: block 12 (leader of group 6), at +0x1ce0" in flat
    assert "the kernel retired 0.70 ms later" in flat
    assert "never run on an SM120 card" in flat
    assert f"run directory: {tmp_path / 'run'}" in flat


def test_the_text_fits_80_columns_but_for_paths(play: Any, fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    play(fakes.ground(script={_danger(fakes): "hung"}))
    main(["run", "drain", "--on", "gpu", *SMALL])
    captured = capsys.readouterr()
    assert [line for line in captured.out.splitlines() if len(line) > 80 and "/" not in line] == []
    assert "\x1b" not in captured.out + captured.err
    assert "\r" not in captured.out + captured.err


def test_json_is_the_diagnosis_document_and_nothing_else(play: Any, fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    play(fakes.ground(script={_danger(fakes): "hung"}))
    assert main(["run", "drain", "--on", "gpu", *SMALL, "--json"]) == 3
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    jsonschema.validate(document, Diagnosis.model_json_schema())
    assert document["schema"] == "dsv4-repro/diagnosis/1"
    assert document["exit_status"] == 3
    assert document["unwedge"]["retired"] is True
    assert Path(document["run"], "diagnosis.json").is_file()
    assert "HANG" in captured.err


@pytest.mark.parametrize(
    ("script", "arguments", "status"),
    [
        ("hung", [], 3),
        ("hung", ["--expect", "hang"], 0),
        ("hung", ["--expect", "clean"], 1),
        ("done", [], 0),
        ("done", ["--expect", "hang"], 1),
        ("done", ["--expect", "clean"], 0),
        ("wrong", [], 4),
        ("died", ["--expect", "hang"], 1),
        ("done", ["--min-live", "4"], 5),
        ("done", ["--min-live", "4", "--expect", "clean"], 5),
    ],
)
def test_statuses(play: Any, fakes: Any, script: str, arguments: list[str], status: int) -> None:
    play(fakes.ground(script={_danger(fakes): script}))
    assert main(["run", "drain", "--on", "gpu", *SMALL, *arguments]) == status


def test_the_producer_clamped_says_that_clean_is_expected_and_reaches_the_window(
    play: Any, fakes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    play(fakes.ground())
    assert main(["run", "drain", "--on", "gpu", *SMALL, "--producer", "clamped"]) == 0
    flat = " ".join(capsys.readouterr().out.split())
    assert "clean is expected: the producer clamps" in flat
    assert "CLEAN: not-hung, high confidence" in flat


def test_a_guarded_kernel_says_which_one_shows_the_hang(play: Any, fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    play(fakes.ground())
    assert main(["run", "drain", "--on", "gpu", *SMALL, "--kernel", "builtin:guard"]) == 0
    flat = " ".join(capsys.readouterr().out.split())
    assert "clean is expected: this kernel is guarded. --kernel builtin (or vllm==0.27.1) shows the hang" in flat


def test_without_a_window_it_is_said_before_and_after(play: Any, fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    play(fakes.ground())
    assert main(["run", "drain", "--on", "gpu", *SMALL, "--min-live", "4"]) == 5
    flat = " ".join(capsys.readouterr().out.split())
    assert "no step of this plan can wedge" in flat
    assert "window not reached" in flat


def test_tp_on_one_gpu_runs_one_rank_and_says_so(play: Any, fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ground = play(fakes.ground())
    main(["run", "drain", "--on", "gpu", *SMALL, "--tp", "4"])
    assert "--tp 4: every rank launches the same top-k" in " ".join(capsys.readouterr().out.split())
    assert ground.calls.count("open") == 1


def test_the_command_in_the_report_makes_the_same_run_again(play: Any, fakes: Any, tmp_path: Path) -> None:
    danger = _danger(fakes)
    play(fakes.ground(script={danger: "hung"}))
    arguments = ["run", "drain", "--on", "gpu", *SMALL, "--mtp", "1", "--capture-sizes", "2,4,8", "--seed", "7", "--no-dump"]
    main([*arguments, "--out", str(tmp_path / "a")])
    first = open_run(tmp_path / "a").run
    assert first.command[:3] == ("dsv4-repro", "run", "drain")
    play(fakes.ground(script={danger: "hung"}))
    main([*first.command[1:], "--out", str(tmp_path / "b")])
    second = open_run(tmp_path / "b").run
    assert second.plan == first.plan
    assert second.command == first.command
    assert shlex.join(first.command) in (tmp_path / "a" / "report.md").read_text()


def test_trials_are_counted_and_bounded_in_words_and_document(
    play: Any, fakes: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    play(fakes.ground(script={_danger(fakes): "hung"}))
    assert main(["run", "drain", "--on", "gpu", *SMALL, "--trials", "10", "--no-dump", "--out", str(tmp_path / "run")]) == 3
    flat = " ".join(capsys.readouterr().out.split())
    assert "trials: 10 hung" in flat
    assert "hang per danger window reached: at least 0.7411 at 95%" in flat
    assert "10 trials: 10 hung." in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.parametrize("error", [NoDeviceError("the card fell off"), KeyboardInterrupt(), ValueError("defect")])
def test_a_run_that_breaks_off_leaves_a_directory_that_says_so(
    play: Any, fakes: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    play(fakes.ground(raises={"step 2": error}))
    status = main(["run", "drain", "--on", "gpu", *SMALL, "--out", str(tmp_path / "run")])
    assert status == {NoDeviceError: 5, KeyboardInterrupt: 130, ValueError: 70}[type(error)]
    view = open_run(tmp_path / "run")
    assert view.run.state == ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
    assert type(error).__name__ in (view.run.error or "")
    assert str(tmp_path / "run") in capsys.readouterr().err


def test_the_children_carry_the_runs_mark(play: Any, fakes: Any, tmp_path: Path) -> None:
    import os

    ground = play(fakes.ground())
    seen: list[str] = []
    opened = ground.open

    def look(*arguments: Any) -> Any:
        seen.append(os.environ[RUN_VARIABLE])
        return opened(*arguments)

    ground.open = look
    main(["run", "drain", "--on", "gpu", *SMALL, "--out", str(tmp_path / "run")])
    assert seen == [str(tmp_path / "run")]


def test_report_renders_again_from_a_copied_directory(
    play: Any, fakes: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import shutil

    play(fakes.ground(script={_danger(fakes): "hung"}))
    main(["run", "drain", "--on", "gpu", *SMALL, "--out", str(tmp_path / "run")])
    first = (tmp_path / "run" / "report.md").read_text()
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "report.md").unlink()
    assert main(["report", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "report.md").read_text() == first
    capsys.readouterr()
    assert main(["report", str(tmp_path / "elsewhere"), "--out", str(tmp_path / "one.md"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reports"] == [str(tmp_path / "one.md")]
    assert main(["report", str(tmp_path / "elsewhere"), "--out", str(tmp_path / "one.pdf")]) == 2
    (tmp_path / "elsewhere" / "diagnosis.json").unlink()
    assert main(["report", str(tmp_path / "elsewhere")]) == 5
    assert "autopsy" in capsys.readouterr().err


def test_a_plan_file_and_flags_over_it(play: Any, fakes: Any, tmp_path: Path) -> None:
    play(fakes.ground())
    (tmp_path / "plan.toml").write_text("requests = 4\nmin_live = 3\noutput = [4, 4]\nsteps = 8\nseed = 3\n")
    main(["run", "drain", "--on", "gpu", "--plan", str(tmp_path / "plan.toml"), "--steps", "6", "--out", str(tmp_path / "run")])
    plan = open_run(tmp_path / "run").run.plan
    assert (plan["requests"], plan["steps"], plan["seed"]) == (4, 6, 3)


def test_gpu_numbers_and_architectures_are_checked(play: Any, fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    play(fakes.ground())
    assert main(["run", "drain", "--on", "gpu", "--device", "first"]) == 2
    assert main(["run", "drain", "--on", "gpu", "--arch", "sm_120"]) == 2
    assert "--on cpu --arch sm_120" in capsys.readouterr().err
    assert main(["run", "drain", "--on", "gpu", "--arch", "sm90", *SMALL]) == 0


@pytest.mark.parametrize(("text", "sm"), [("sm_120", 120), ("SM90", 90), ("100", 100), (" sm_75 ", 75)])
def test_architectures(text: str, sm: int) -> None:
    assert drain_flags.parse_arch(text) == sm


@pytest.mark.parametrize(("script", "status"), [("hung", 3), ("done", 5)])
def test_a_disk_that_is_full_at_the_end_does_not_take_the_answer_along(
    play: Any,
    fakes: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    status: int,
) -> None:
    """A hang that was found is told and counts; a clean run whose directory is not complete is not called clean."""

    def full(*_arguments: Any) -> None:
        raise RunStoreError("cannot write: the disk or the quota is full", path="report.md")

    monkeypatch.setattr(drain_run, "write_reports", full)
    play(fakes.ground(script={_danger(fakes): script}))
    assert main(["run", "drain", "--on", "gpu", *SMALL, "--out", str(tmp_path / "run"), "--json"]) == status
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["outcome"] == {"hung": "hang", "done": "clean"}[script]
    assert document["exit_status"] == status
    assert "the disk or the quota is full" in document["unwritten"]
    assert {"hung": "HANG", "done": "CLEAN"}[script] in captured.err
    assert "the run directory is not complete" in captured.err


@pytest.mark.parametrize(("script", "status"), [("hung", 3), ("done", 5)])
def test_a_diagnosis_that_cannot_be_written_is_said_and_the_record_is_finished(
    play: Any, fakes: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str,
    status: int,
) -> None:  # fmt: skip
    """At "running" it would be taken for the record of a run that was killed."""

    def full(*_arguments: Any) -> None:
        raise RunStoreError("cannot write: the disk or the quota is full", path="diagnosis.json")

    monkeypatch.setattr(RunStore, "write_diagnosis", full)
    play(fakes.ground(script={_danger(fakes): script}))
    assert main(["run", "drain", "--on", "gpu", *SMALL, "--out", str(tmp_path / "run"), "--json"]) == status
    captured = capsys.readouterr()
    assert "the run directory is not complete" in captured.err
    assert "diagnosis.json" in json.loads(captured.out)["unwritten"]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["state"], record["exit_status"]) == ("finished", status)
    assert record["outcome"] == {"hung": "hang", "done": "clean"}[script]
    assert record["ended"]
    assert "diagnosis.json" in record["error"]


@pytest.mark.parametrize("where", ["a file", "in use", "below a file", "closed"])
@pytest.mark.parametrize("scenario", ["drain", "init-race"])
def test_a_directory_that_cannot_be_used_is_refused_before_the_kernel_is_got(
    scenario: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr("dsv4_repro.repro.drain_job.choose_kernel", work)
    monkeypatch.setattr("dsv4_repro.repro.relative_run.judge_row", work)
    out = tmp_path / "out"
    if where == "in use":
        (out / "more").mkdir(parents=True)
    elif where == "closed":
        real = os.access  # root may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode: real(path, mode) and not str(path).startswith(str(tmp_path)))
    else:
        out.write_text("")
        out = out / "below" if where == "below a file" else out
    before = sorted(tmp_path.rglob("*"))
    assert main(["run", scenario, "--on", "cpu", "--out", str(out)]) == 5
    said = capsys.readouterr().err
    assert str(out) in said
    assert "--out DIR" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_a_ground_that_this_release_lacks_is_said_before_any_device_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    from dsv4_repro.repro import grounds

    lacking = [name for name in grounds.GROUNDS if not grounds._installed(name)]
    for name in lacking:
        assert main(["run", "drain", "--on", name]) == 5
        assert f"this release has no {name} ground" in capsys.readouterr().err


def test_report_makes_a_directory_that_is_not_there_and_a_folder_that_is_no_run_gets_a_way_on(
    play: Any, fakes: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    play(fakes.ground(script={_danger(fakes): "hung"}))
    main(["run", "drain", "--on", "gpu", *SMALL, "--out", str(tmp_path / "run")])
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "a new" / "folder")]) == 0
    assert sorted(path.name for path in (tmp_path / "a new" / "folder").iterdir()) == ["junit.xml", "report.html", "report.md"]
    capsys.readouterr()
    for verb in ("report", "bundle"):
        assert main([verb, str(tmp_path)]) == 5
        assert f"dsv4-repro autopsy {tmp_path}" in capsys.readouterr().err


def test_the_next_command_stands_on_one_line(play: Any, fakes: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A command that was broken over two lines cannot be pasted."""
    command = "dsv4-repro autopsy PID --attach    # " + "a remark that does not end " * 5
    monkeypatch.setattr(drain_run, "last_lines", lambda *_arguments: ["HANG", f"next: {command}"])
    play(fakes.ground(script={_danger(fakes): "hung"}))
    main(["run", "drain", "--on", "gpu", *SMALL])
    assert f"next: {command}" in capsys.readouterr().out.splitlines()


def test_vllms_op_needs_a_gpu_and_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["run", "drain", "--via", "op", "--on", "cpu"]) == 2
    assert "--via op needs a GPU" in capsys.readouterr().err
    monkeypatch.setattr(drain_job, "choose_ground", lambda *_arguments, **_given: ("cpu", "no GPU is free"))
    assert main(["run", "drain", "--via", "op"]) == 5
    assert "--via op needs a GPU" in capsys.readouterr().err


def test_help_names_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "drain", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "smallest-pc, random or priority" in shown


@pytest.mark.parametrize("words", [["run", "drain"], ["doctor"], ["verify", "drain"], ["selftest"]])
def test_an_empty_out_is_a_usage_error(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--out", ""]) == 2
    assert "--out" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("RTX 5090", "an RTX 5090"),
        ("NVIDIA H200", "an NVIDIA H200"),
        ("H100 PCIe", "an H100 PCIe"),
        ("L40S", "an L40S"),
        ("B200", "a B200"),
        ("GB200", "a GB200"),
        ("Tesla T4", "a Tesla T4"),
        ("Quadro RTX 6000", "a Quadro RTX 6000"),
    ],
)
def test_a_device_has_the_article_that_is_spoken(name: str, said: str) -> None:
    assert with_article(name) == said
