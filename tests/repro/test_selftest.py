"""The self-test: what it runs, how it judges, and the file to paste back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import DownloadError
from dsv4_repro.kernels.devices import device_for_sm
from dsv4_repro.repro import drain_job, selftest
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.doctor import Check
from dsv4_repro.repro.leftovers import PARENT_VARIABLE, RUN_VARIABLE
from dsv4_repro.repro.machine import Gpu, probe_machine
from dsv4_repro.repro.options import Common
from dsv4_repro.repro.selftest import Cell, CellPlan, cells_to_run, verdict_of


def test_the_cells_are_the_hang_its_controls_and_what_is_cached() -> None:
    known = {"vllm==0.27.1": False, "vllm==0.33.0": True}
    cells = cells_to_run(["vllm==0.27.1", "vllm==0.33.0", "vllm==0.99.dev1"], lambda spec: known.get(spec))
    assert [(cell.kernel, cell.producer, cell.expected) for cell in cells] == [
        ("builtin", "raw", "hang"),
        ("builtin:guard", "raw", "clean"),
        ("builtin", "clamped", "clean"),
        ("vllm==0.27.1", "raw", "hang"),
        ("vllm==0.33.0", "raw", "clean"),
        ("vllm==0.99.dev1", "raw", None),
    ]


@pytest.mark.parametrize(
    ("states", "outcome"),
    [
        (["as expected"], "clean"),
        (["as expected", "not as expected"], "other"),
        (["as expected", "failed"], "other"),
        (["as expected", "open"], "inconclusive"),
        (["as expected", "left out"], "inconclusive"),
        ([], "inconclusive"),
    ],
)
def test_the_outcome(states: list[Any], outcome: str) -> None:
    assert verdict_of([Cell(kernel="k", state=state) for state in states]) == outcome


@pytest.fixture
def on_a_card(fakes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A machine with one card on which unguarded kernels behind a raw producer hang."""
    machine = probe_machine(version=lambda _argv: None)
    values = {**machine.__dict__, "gpus": (Gpu(0, "NVIDIA H200", 90, 1 << 37, ()),), "driver": "580.1", "cuda_driver": "13.0"}
    monkeypatch.setattr(selftest, "probe_machine", lambda: type(machine)(**values))
    monkeypatch.setattr(selftest, "cached_kernels", lambda: ())
    monkeypatch.setattr(drain_job, "require_ground", lambda _name: None)
    monkeypatch.setattr(drain_job, "describe_gpu", lambda _ordinal: device_for_sm(90))
    monkeypatch.setattr(drain_job, "bound_diagnose", lambda *_arguments: fakes.diagnose)
    monkeypatch.setenv(RUN_VARIABLE, "")
    monkeypatch.setenv(PARENT_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    behaves: dict[str, Any] = {"guarded hangs": False}
    grounds: list[Any] = []

    class Ground(fakes.ground):  # type: ignore[misc]
        def open(self, request: Any, emit: Any) -> Any:
            if not request.kernel.guarded or behaves["guarded hangs"]:
                self.script = {step.index: "hung" for step in request.steps if step.danger}
            return super().open(request, emit)

    def make(_name: str) -> Any:
        grounds.append(Ground())
        return grounds[-1]

    monkeypatch.setattr(drain_job, "make_ground", make)
    return behaves, grounds


def test_all_as_expected_is_0_and_leaves_one_small_file(on_a_card: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, grounds = on_a_card
    assert main(["selftest", "--out", str(tmp_path / "t")]) == 0
    text = (tmp_path / "t" / "selftest.txt").read_text()
    assert text.splitlines()[0].startswith("dsv4-repro ")
    assert "H200, sm_90, driver 580.1, CUDA 13.0 (--on gpu)" in text
    assert "clean: 3 of 3 as expected" in text
    assert "released by writing the counter, 0.70 ms later" in text
    assert len(text) < 8000
    assert str(tmp_path) not in text
    document = json.loads((tmp_path / "t" / "selftest.json").read_text())
    assert document["schema"] == "dsv4-repro/selftest/1"
    assert [cell["state"] for cell in document["cells"]] == ["as expected"] * 3
    assert [ground.calls.count("capture+dump") for ground in grounds] == [1, 0, 0], "one dump is enough"


@pytest.mark.parametrize("name", ["x.json", "x.txt"])
def test_out_with_a_files_name_writes_that_file(
    on_a_card: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    assert main(["selftest", "--out", name]) == 0
    assert f"Paste this back: {name}" in capsys.readouterr().out
    assert (tmp_path / name).is_file()
    (run,) = (tmp_path / "runs" / "selftest").iterdir()
    assert (tmp_path / name).read_bytes() == (run / f"selftest{Path(name).suffix}").read_bytes()
    assert main(["selftest", "--out", f"nowhere/{name}"]) == 2
    assert len(list((tmp_path / "runs" / "selftest").iterdir())) == 1, "refused before anything was run"


def test_a_guard_that_hangs_is_4_and_stands_out(on_a_card: Any, capsys: pytest.CaptureFixture[str]) -> None:
    behaves, _ = on_a_card
    behaves["guarded hangs"] = True
    assert main(["selftest"]) == 4
    assert "NOT AS EXPECTED builtin:guard: hang (clean expected)" in capsys.readouterr().out


def test_a_cell_that_fails_does_not_end_the_test(
    on_a_card: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = drain_job.job_of

    def job(common: Any, plan: Any, flags: Any, screen: Any) -> Any:
        if flags.kernel == "builtin:guard":
            raise DownloadError("offline")
        return real(common, plan, flags, screen)

    monkeypatch.setattr(selftest, "job_of", job)
    assert main(["selftest"]) == 4
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "offline" in out
    assert "2 of 3 as expected" in out


def test_out_of_time_names_what_was_left_out(
    on_a_card: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = FakeClock()
    original = vars(drain_job)["make_ground"]
    monkeypatch.setattr(drain_job, "make_ground", lambda name: _slow(original(name), clock))
    assert selftest.run_selftest(Common(timeout=3.0), on=None, device=None, share=False, clock=clock) == 5
    out = capsys.readouterr().out
    assert out.count("LEFT OUT") == 2
    assert "3 s were over" in out


def _slow(ground: Any, clock: FakeClock) -> Any:
    ground.clock = clock
    return ground


def test_a_pasted_check_names_no_path() -> None:
    check = Check(id="x", what="w", state="limited", found="/home/bob/bin/tool: no answer (/x/y), /z", remedy="")
    assert selftest._without_paths(check).found == "(path): no answer ((path)), (path)"


def test_without_a_gpu_it_offers_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    machine = probe_machine(version=lambda _argv: None)
    for gpus in (None, ()):
        values = {**machine.__dict__, "gpus": gpus}
        monkeypatch.setattr(selftest, "probe_machine", lambda values=values: type(machine)(**values))
        assert main(["selftest"]) == 5
        assert "dsv4-repro selftest --on cpu" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["selftest", "--on", "moon"]) == 2


def test_cells_with_no_known_guard_stay_open() -> None:
    assert CellPlan(kernel="x").expected is None


def test_a_device_that_nobody_knows_is_a_wrong_command_line_and_no_failure_of_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["selftest", "--on", "cpu", "--device", "RTX 9090"]) == 2
    assert "RTX 9090" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
