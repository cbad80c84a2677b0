"""One place where errors become exit statuses; nothing that a user does shows a traceback."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro import __version__, errors
from dsv4_repro.repro import __main__ as entry
from dsv4_repro.repro.__main__ import main

#: python -m, in an environment in which the package under test is found.
COMMAND = [sys.executable, "-m", "dsv4_repro.repro"]


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Any:
    def arrange(error: BaseException) -> None:
        def run(_arguments: list[str]) -> int:
            raise error

        monkeypatch.setattr(entry, "_run", run)

    return arrange


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "OurFaultError"])
def test_every_error_of_ours_gives_message_help_and_status(raising: Any, capsys: pytest.CaptureFixture[str], name: str) -> None:
    cls = getattr(errors, name)
    raising(cls("the dump is cut off", help_text="take another one"))
    assert main(["autopsy", "x"]) == cls.exit_status
    captured = capsys.readouterr()
    assert captured.err == "dsv4-repro: the dump is cut off\n  take another one\n"
    assert captured.out == ""


def test_with_json_an_error_is_a_document_too(raising: Any, capsys: pytest.CaptureFixture[str]) -> None:
    raising(errors.CoreFileError("cut off", path="x.nvcudmp", place="section 3"))
    assert main(["autopsy", "x", "--json"]) == 5
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dsv4-repro/error/1"
    assert document["outcome"] == "inconclusive"
    assert document["error"] == "CoreFileError"
    assert document["message"] == "x.nvcudmp: section 3: cut off"
    assert document["exit_status"] == 5


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError(), RecursionError("deep"), errors.OurFaultError("invariant")])
def test_a_defect_of_ours_says_so_and_keeps_the_traceback_in_a_file(
    raising: Any, capsys: pytest.CaptureFixture[str], error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    raising(error)
    assert main([]) == 70
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" not in err
    assert "report it" in err
    (kept,) = tmp_path.glob("dsv4-repro-traceback-*.txt")
    assert str(kept) in err
    assert type(error).__name__ in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0


def test_the_traceback_is_shown_where_asked_for(
    raising: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4_REPRO_TRACEBACK", "1")
    raising(ValueError("boom"))
    assert main([]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_traceback_that_cannot_be_kept_is_still_a_70(
    raising: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent/folder")
    raising(ValueError("boom"))
    assert main([]) == 70
    assert "could not be written" in capsys.readouterr().err


def test_ctrl_c_is_130(raising: Any, capsys: pytest.CaptureFixture[str]) -> None:
    raising(KeyboardInterrupt())
    assert main([]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_hostile_text_in_an_error_cannot_drive_the_terminal(raising: Any, capsys: pytest.CaptureFixture[str]) -> None:
    raising(errors.TranscriptError("bad line: \x1b]0;owned\x07\x1b[31m\u202e"))
    main([])
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["run", "nonsense"], ["run", "drain", "--requests", "many"], ["autopsy"], ["--what"], ["run", "drain", "--on"]],
)
def test_a_wrong_command_line_is_2_with_and_without_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Error" in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 2
    captured = capsys.readouterr()
    if captured.out:
        assert json.loads(captured.out)["exit_status"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "drain", "--on", "moon"],
        ["run", "drain", "--arch", "volta"],
        ["run", "drain", "--on", "cpu", "--device", "Voodoo2"],
        ["run", "drain", "--on", "cpu", "--device", "H100", "--arch", "sm_120"],
        ["run", "drain", "--expect", "miracle"],
        ["run", "drain", "--producer", "cooked"],
        ["run", "drain", "--via", "magic"],
        ["run", "drain", "--via", "op", "--kernel", "vllm==0.27.1"],
        ["run", "drain", "--requests", "0"],
        ["run", "drain", "--min-live", "20"],
        ["run", "drain", "--capture-sizes", "2,x"],
        ["run", "drain", "--plan", "/nonexistent.json"],
        ["show", "nonsense"],
    ],
)
def test_what_cannot_be_is_2_and_starts_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"dsv4-repro {__version__}"


def test_help_shows_the_verbs_and_the_statuses_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for verb in ("run", "autopsy", "report", "doctor", "selftest", "list", "show"):
        assert f"\n  {verb} " in text
    assert "130 Ctrl-C" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom dsv4_repro.repro.__main__ import main\nmain(['--help'])\n"
        "heavy = {'numpy', 'pydantic', 'z3', 'jinja2', 'aiohttp', 'cuda', 'torch'}\n"
        "heavy |= {'rich.console', 'psutil', 'elftools', 'pynvml', 'packaging'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    best = float("inf")
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = os.times()
        best = min(best, (after.children_user + after.children_system) - (before.children_user + before.children_system))
        assert done.stderr.strip() == "[]"
    assert best < 0.3, f"{best:.3f} s of CPU"


@pytest.mark.parametrize("verb", [["run", "drain"], ["autopsy"], ["report"], ["doctor"], ["list"], ["show"], ["selftest"]])
def test_the_same_flags_everywhere(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb, "--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("--out", "--json", "--seed", "--timeout", "--yes"):
        assert flag in text


def test_every_field_of_the_plan_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    from dsv4_repro.scenarios.drain import DrainPlan

    assert main(["run", "drain", "--help"]) == 0
    text = capsys.readouterr().out
    for field in DrainPlan.model_fields:
        if field != "top_k":
            assert f"--{field.replace('_', '-')} " in text, field


def test_a_reader_that_goes_away_is_no_error_of_ours() -> None:
    child = subprocess.Popen([*COMMAND, "show", "drain", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert child.wait() in (0, 141)
    assert b"Traceback" not in err


def test_a_terminal_that_knows_only_ascii(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([*COMMAND, "show", "drain"], capture_output=True, env=environment, check=False)
    assert done.returncode == 0
    assert b"drain" in done.stdout


def test_python_dash_m_is_the_same_program() -> None:
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"dsv4-repro {__version__}"


def test_a_real_ctrl_c_is_130(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom dsv4_repro.repro import __main__ as entry\n"
        "def run(_arguments):\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "entry._run = run\nsys.exit(entry.main([]))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(130), type("Abort", (RuntimeError,), {})()])
def test_ctrl_c_says_so_wherever_it_was_caught_and_with_json_in_a_document(
    raising: Any, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    """The command line library turns Ctrl-C into an exception of its own: the same words, the same document."""
    raising(error)
    assert main(["run", "drain", "--json"]) == 130
    captured = capsys.readouterr()
    assert captured.err == "dsv4-repro: interrupted; what was written so far is kept\n"
    assert json.loads(captured.out)["exit_status"] == 130


@pytest.mark.parametrize("form", ["--out {}", "--out={}"])
@pytest.mark.parametrize("inner", ["", "x.json"])
def test_an_out_that_cannot_be_written_is_no_fault_of_ours(
    raising: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str, inner: str
) -> None:
    out = tmp_path / "file"
    raising(FileExistsError(17, "File exists", out / inner))
    assert main(["verify", "drain", *form.format(out).split()]) == 5
    assert capsys.readouterr().err == f"dsv4-repro: {out / inner}: cannot write: File exists\n  Write elsewhere: --out DIR\n"


@pytest.mark.parametrize("arguments", [["verify", "drain"], ["verify", "drain", "--out", "elsewhere"]])
def test_any_other_failure_to_write_stays_our_fault(
    raising: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    raising(FileExistsError(17, "File exists", tmp_path / "file"))
    assert main(arguments) == 70
    assert "our own fault" in capsys.readouterr().err


def test_ctrl_c_inside_a_verb_says_so_through_the_command_line_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(*_arguments: object, **_more: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("dsv4_repro.repro.drain_run.run_drain", pressed)
    assert main(["run", "drain"]) == 130
    assert "dsv4-repro: interrupted; what was written so far is kept" in capsys.readouterr().err


@pytest.mark.parametrize("closed", [False, True])
def test_a_fatal_signal_leaves_the_python_stacks(closed: bool) -> None:
    """A fault inside a driver's library says where it was; without a standard error nothing breaks."""
    program = (
        "import os, signal, sys\n"
        f"{'os.close(2); sys.stderr = None' if closed else ''}\n"
        "sys.argv = ['dsv4-repro', '--version']\n"
        "from dsv4_repro.repro.__main__ import main\n"
        "assert main() == 0\n"
        "sys.stdout.flush()\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout.startswith("dsv4-repro ")
    assert ("Fatal Python error: Segmentation fault" in done.stderr) is not closed


@pytest.mark.parametrize(
    ("arguments", "help_text"),
    [
        (["autopsy", "nowhere"], "See: dsv4-repro autopsy --help"),
        (["verify", "drain", "--alpha", "2"], "See: dsv4-repro verify --help"),
        (["run", "drain", "--expect", "maybe"], "See: dsv4-repro run drain --help"),
        (["unwedge", "--via", "x", "1"], "See: dsv4-repro unwedge --help"),
        (["bisect", "--good", "0.28.0", "--bad", "0.28.0"], "See: dsv4-repro bisect --help"),
    ],
)
def test_a_value_that_cannot_be_names_the_help_of_its_own_verb(
    arguments: list[str], help_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["help"] == help_text
    assert captured.err.rstrip().endswith(help_text)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("list", ["list"]),
        ("show", ["show", "victim"]),
        ("doctor", ["doctor"]),
        ("why", ["why", "999999999"]),
        ("probe", ["probe", "--max-stall", "60", "--agent-dir", "nowhere"]),
        ("agent", ["agent", "install", "--into", "there"]),
    ],
)
def test_a_verb_without_a_folder_of_its_own_writes_its_document_to_out(
    name: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--out`` of every verb does something: a flag that is taken and ignored is worse than none."""
    monkeypatch.chdir(tmp_path)
    status = main([*arguments, "--json", "--out", "a folder"])
    shown = json.loads(capsys.readouterr().out)
    kept = json.loads((tmp_path / "a folder" / f"{name}.json").read_text())
    assert kept["schema"] == shown["schema"] == f"dsv4-repro/{name}/1"
    assert main([*arguments, "--out", "one.json"]) == status
    assert json.loads((tmp_path / "one.json").read_text())["schema"] == kept["schema"]
    (tmp_path / "taken").write_text("")
    capsys.readouterr()
    assert main([*arguments, "--out", "taken/below"]) == 5
    assert "--out" in capsys.readouterr().err


def test_the_help_shows_each_argument_in_one_pair_of_brackets_and_no_marks_of_code(capsys: pytest.CaptureFixture[str]) -> None:
    from dsv4_repro.repro.cli import build

    verbs = [[name] for name in build().commands] + [["run", "cooperative"], ["run", "drain"], ["agent", "show"]]
    for verb in verbs:
        assert main([*verb, "--help"]) == 0
        text = capsys.readouterr().out
        for wrong in ("[[", "]]", "...}", "``"):
            assert wrong not in text, f"{verb}: {wrong}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "drain", "--on", "cpu", "--kernel", "nope"], ["verify", "drain", "--on", "cpu", "--kernel", "builtin:nope"],
        ["verify", "drain", "--on", "cpu", "--unfixed", "nope"], ["verify", "drain", "--on", "cpu", "--fixed", "nope.so"],
        ["verify", "init-race", "--on", "cpu", "--kernel", "nope"],
    ],
)  # fmt: skip
def test_a_kernel_that_is_none_is_refused_before_the_first_row(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("a row was begun")

    monkeypatch.setattr("dsv4_repro.repro.campaign.verify_run.run_matrix", work)
    monkeypatch.setattr("dsv4_repro.repro.campaign.verify_rows.run_rows", work)
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--out", "kept"]) == 2
    assert "nope" in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("verb", ["verify", "bisect", "minimise"])
def test_a_campaign_that_could_not_keep_its_answer_is_refused_before_its_work(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("work was begun")

    for name in ("verify_run.run_matrix", "bisect_run.bisect_builds", "minimise.minimise_cell"):
        monkeypatch.setattr(f"dsv4_repro.repro.campaign.{name}", work)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    (tmp_path / "builds").mkdir()
    for name in ("a.cubin", "b.cubin"):
        (tmp_path / "builds" / name).write_bytes(b"")
    words = {
        "verify": ["drain", "--on", "cpu"], "bisect": ["--builds", "builds", "--good", "a.cubin", "--bad", "b.cubin"],
        "minimise": [str(_run_on_a_card(tmp_path)), "--on", "cpu"],
    }  # fmt: skip
    assert main([verb, *words[verb], "--out", "taken/below"]) == 5
    assert "taken/below" in capsys.readouterr().err


def _run_on_a_card(folder: Path) -> Path:
    """The directory of a drain that hung on a card."""
    from dsv4_repro.repro.run_records import KernelRecord, RunRecord
    from dsv4_repro.repro.runstore import RunStore

    with RunStore.create("drain", out=folder / "run") as store:
        store.write_run(RunRecord(scenario="drain", ground="gpu", state="finished", kernel=KernelRecord(origin="builtin", sm=90)))
    return folder / "run"


_PLAN_OF_A_CARD = 'name = "x"\non = "gpu"\n[matrix]\nmin_live = [3]\n[budget]\ntrials = 2\n'


@pytest.mark.parametrize("gpus", [None, ()])
@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "drain", "--on", "gpu"],
        ["verify", "init-race", "--on", "gpu"],
        ["hunt", "plan.toml", "--out", "kept"],
        ["bisect", "--on", "gpu", "--good", "0.27.0", "--bad", "0.28.0", "--out", "kept"],
        ["minimise", "run", "--out", "kept"],
        ["minimise", "run", "--on", "gpu", "--out", "kept"],
    ],
)
def test_a_campaign_on_a_card_that_is_not_there_is_refused_before_its_first_trial(
    arguments: list[str], gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence and status 5, and no store; not ten trials of a row that failed "otherwise", which is status 4."""
    from dsv4_repro.repro import machine

    here = machine.probe_machine(version=lambda _argv: None)
    monkeypatch.setattr(machine, "probe_machine", lambda **_: dataclasses.replace(here, gpus=gpus))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(_PLAN_OF_A_CARD)
    _run_on_a_card(tmp_path)
    # The range of builds may have to be asked of an index: that, too, is work.
    monkeypatch.setattr("dsv4_repro.repro.campaign.bisect_run._range", lambda _flags: pytest.fail("work was begun"))
    assert main(arguments) == 5
    said = capsys.readouterr().err
    assert ("no NVIDIA driver" if gpus is None else "no GPU") in said
    assert "--on cpu" in said
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("arguments", "said", "hidden"),
    [
        (["audit", "vllm==abc"], "A target is a release", "--kernel"),
        (["audit", "."], "A target is a release", "--kernel"),
        (["audit", "builtin", "--recipe", "max_model_len=x"], "docs/audit.md", "show drain"),
        (["audit", "builtin", "--recipe", "nowhere.toml"], "docs/audit.md", "show drain"),
        (["hunt", "nowhere.toml"], "docs/campaigns.md", "show drain"),
        (["hunt", "."], "docs/campaigns.md", "show drain"),
        (["hunt", "no.toml"], "docs/campaigns.md", "show drain"),
        (["run", "drain", "--on", "cpu", "a word"], "'a word'", "words after"),
    ],
)
def test_the_help_of_an_error_is_of_what_was_asked_for(
    arguments: list[str],
    said: str,
    hidden: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no.toml").write_text("= 3")
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert said in text
    assert hidden not in text


@pytest.mark.parametrize("text", ["", "x"])
def test_a_text_that_cannot_be_hidden_is_refused_and_not_passed_over(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bundle", str(tmp_path), "--hide", text]) == 2
    assert "--hide" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')"])
def test_ctrl_c_is_130_wherever_python_stood(where: str, tmp_path: Path) -> None:
    """Also where a dataclass was being made: CPython would end ``python -m`` by the signal although the interrupt was handled."""
    (tmp_path / "interrupted.py").write_text(
        "import sys\nfrom dsv4_repro.repro import __main__ as program\n\n"
        f"def run(arguments):\n    {where}\n\nprogram._run = run\nsys.exit(program.main(['list']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, "dsv4-repro: interrupted; what was written so far is kept\n")
