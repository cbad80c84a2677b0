"""``run crossrank --on gpu`` against the stand-in for libcuda with two devices; no word about real ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsv4_repro.errors import DeadlineError, NoDeviceError, RefusedError, UsageError
from dsv4_repro.forensics.collect.nvml import Nvml
from dsv4_repro.kernels import build
from dsv4_repro.kernels.build import Compiled
from dsv4_repro.kernels.plan import device_named
from dsv4_repro.kernels.select import Selection
from dsv4_repro.repro import crossrank_gpu
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.crossrank_gpu import run_crossrank_row
from dsv4_repro.repro.gpu_rows import GpuOptions, GpuTried, gpu_options
from dsv4_repro.repro.machine import run_versions
from dsv4_repro.repro.relative_gpu_run import command_of_row
from dsv4_repro.scenarios.registry import scenario

from .test_gpu_ground import FakeNvml, card, library
from .test_relative_gpu import H200, image, row_of

__all__ = ["card", "library"]  # fixtures


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the driver would write is the interpreter's own dump of the two ranks, one of them held."""
    folder = tmp_path_factory.mktemp("cpu") / "run"
    assert main(["run", "crossrank", "--fix", "held-by-a-barrier", "--arch", "sm_90", "--out", str(folder)]) == 3
    return folder / "evidence" / "interpreted.nvcudmp"


@pytest.fixture
def tried(card: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., GpuTried]:
    real = build.compile_kernel

    def compiled(file: str, sm: int, **more: Any) -> Compiled:
        return Compiled(b"\x7fELFcompanions\0", (), sm, "") if file == "companions.cu" else real(file, sm, **more)

    monkeypatch.setattr(build, "compile_kernel", compiled)
    monkeypatch.setattr(crossrank_gpu, "_WATCH_S", 0.5)
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")

    def run(row: str, defect: str = "plain", nvml: FakeNvml | None = None, **options: Any) -> GpuTried:
        chosen = Selection(image(defect), True, "a stand-in")
        monkeypatch.setattr("dsv4_repro.kernels.select.select", lambda *_a, **_k: chosen)
        asked = GpuOptions(**{"dump": False, "cuda_gdb": False, **options})
        return run_crossrank_row(
            scenario("crossrank"), row_of("crossrank", row), asked, command=("x",), out=tmp_path / row, expect=None,
            tell=lambda _lines: None, progress=lambda _text: None, describe=lambda _ordinal: H200,
            nvml=lambda: Nvml(nvml or FakeNvml()),
        )  # fmt: skip

    return run


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process(os.getpid()).children() if "crossrank_child" in " ".join(child.cmdline())]


def test_both_ranks_arrive(tried: Callable[..., GpuTried]) -> None:
    done = tried("guarded", "guard", trials=2)
    assert (done.diagnosis.outcome, done.counts.clean, done.status) == ("clean", 2, 0)
    assert done.as_expected
    assert (done.folder / "report.md").is_file()
    assert not children()


@pytest.mark.parametrize("row", ["peer-has-not-come", "held-by-a-barrier"])
def test_a_hang_whose_devices_were_not_read_names_nobody(row: str, tried: Callable[..., GpuTried]) -> None:
    done = tried(row)
    assert (done.diagnosis.outcome, done.counts.hang, done.status) == ("inconclusive", 1, 5)
    assert done.diagnosis.verdict.cause is None
    assert not children()


def test_a_dump_of_both_devices_names_the_held_rank(
    two_ranks: Path, tried: Callable[..., GpuTried], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DUMP", str(two_ranks))
    done = tried("held-by-a-barrier", dump=True)
    verdict = done.diagnosis.verdict
    assert (verdict.class_, verdict.cause, done.status) == ("gpu-spin-barrier", "peer-left", 3)
    assert verdict.sentence.startswith("device 0: ")
    assert done.as_expected
    record = json.loads((done.folder / "run.json").read_text())
    assert record["trials"]["hang"] == 1
    assert record["versions"] == run_versions()
    assert done.diagnosis.evidence


def test_only_the_rank_that_the_row_looks_at_is_read(
    two_ranks: Path, tried: Callable[..., GpuTried], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DUMP", str(two_ranks))
    done = tried("only-the-spinning-rank-read", dump=True)
    assert (done.diagnosis.verdict.class_, done.diagnosis.verdict.cause) == ("gpu-crossrank-spin", None)
    assert {wait.device for wait in done.diagnosis.waits} == {1}


def test_a_card_in_use_is_refused(tried: Callable[..., GpuTried]) -> None:
    with pytest.raises(RefusedError, match="already holds"):
        tried("guarded", "guard", FakeNvml(holders=(4711,)))
    assert not children()
    assert tried("peer-has-not-come", nvml=FakeNvml(holders=(4711,)), share=True).counts.hang == 1


def test_a_row_whose_time_was_over_before_its_first_launch_has_failed(tried: Callable[..., GpuTried], tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match="no launch was begun"):
        tried("guarded", "guard", timeout_s=0.0)
    record = json.loads((tmp_path / "guarded" / "run.json").read_text())
    assert (record["state"], record["error"]) == ("failed", "DeadlineError: no launch was begun within 0 s")


def test_one_gpu_is_not_enough(tmp_path: Path) -> None:
    def describe(ordinal: int) -> Any:
        if ordinal:
            raise NoDeviceError(f"no device {ordinal}: the driver shows 1")
        return device_named("H200")

    with pytest.raises(NoDeviceError, match="needs two GPUs that read each other's memory, 0 and 1") as raised:
        run_crossrank_row(
            scenario("crossrank"), row_of("crossrank", "guarded"), GpuOptions(), command=(), out=tmp_path / "none", expect=None,
            tell=lambda _lines: None, progress=lambda _text: None, describe=describe,
        )  # fmt: skip
    assert "--on cpu" in str(raised.value.help_text)
    assert not (tmp_path / "none").exists()


def test_what_the_driver_refuses_is_said(tried: Callable[..., GpuTried], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "1")
    with pytest.raises(NoDeviceError):
        tried("guarded", "guard")
    assert not children()


@pytest.mark.parametrize("text", ["0,0", "0,", ",1", "0,1,2", "x"])
def test_devices_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        gpu_options(text)


def test_two_devices_are_in_the_command() -> None:
    options = gpu_options("2,0")
    assert (options.ordinal, options.second) == (2, 0)
    row = row_of("crossrank", "guarded")
    assert "2,0" in command_of_row(scenario("crossrank"), row, options, None)
