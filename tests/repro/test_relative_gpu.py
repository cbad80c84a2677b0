"""``run NAME --on gpu`` against the stand-in for libcuda: hang, experiment and dump, wrong answer with its cause, companions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import PlanError, ToolMissingError, UsageError
from dsv4_repro.forensics.collect.nvml import Nvml
from dsv4_repro.kernels import build
from dsv4_repro.kernels.build import Compiled
from dsv4_repro.kernels.image import KernelImage, sha256_hex
from dsv4_repro.kernels.plan import device_named
from dsv4_repro.kernels.select import Selection
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.gpu_rows import GpuOptions, GpuTried, gpu_options
from dsv4_repro.repro.relative_gpu import RelativeGround, launch_plan, on_device, row_on_gpu
from dsv4_repro.repro.relative_gpu_run import run_gpu_row
from dsv4_repro.repro.relative_matrix import matrix_document, run_gpu_rows
from dsv4_repro.scenarios.launches import Launch, Row
from dsv4_repro.scenarios.registry import scenario

from .test_gpu_ground import FUNCTION, FakeNvml, card, library, no_debugger

__all__ = ["card", "library"]  # fixtures

H200 = device_named("H200")


def image(defect: str) -> KernelImage:
    cubin = b"\x7fELF" + defect.encode() + b"\0"
    return KernelImage(f"fake:{defect}", cubin, sha256_hex(cubin), 90, FUNCTION, 512, 4, 0x210, 56, 0, 32, 1024)


def row_of(name: str, row: str) -> Row:
    return next(item for item in scenario(name).variants() if item.name == row)


@pytest.fixture
def tried(card: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., GpuTried]:
    """Runs a row whose kernel is the stand-in with that defect."""
    real = build.compile_kernel

    def compiled(file: str, sm: int, **more: Any) -> Compiled:
        return Compiled(b"\x7fELFcompanions\0", (), sm, "") if file == "companions.cu" else real(file, sm, **more)

    monkeypatch.setattr(build, "compile_kernel", compiled)

    def make(what: Launch, **more: Any) -> RelativeGround:
        return RelativeGround(what, nvml=lambda: Nvml(FakeNvml()), debugger=no_debugger, **more)

    def run(name: str, row: str, defect: str, **options: Any) -> GpuTried:
        chosen = Selection(image(defect), True, "a stand-in")
        monkeypatch.setattr("dsv4_repro.kernels.select.select", lambda *_a, **_k: chosen)
        return run_gpu_row(
            scenario(name), row_of(name, row), GpuOptions(**{"dump": False, **options}), out=tmp_path / f"{name}-{row}",
            make=make, describe=lambda _ordinal: H200,
        )  # fmt: skip

    return run


def test_a_group_larger_than_the_card_hangs_and_is_released(tried: Callable[..., GpuTried]) -> None:
    done = tried("oversubscribe", "larger-than-the-card", "resident=264", trials=2)
    assert (done.diagnosis.outcome, done.counts.hang, done.status) == ("hang", 2, 3)
    record = json.loads((done.folder / "run.json").read_text())
    assert record["launches"]["larger-than-the-card"]["grid"] == 300
    assert record["kernel"]["sha256"] == image("resident=264").cubin_sha256
    assert record["environment"]["device"] == "Fake GPU" or record["environment"]["device"] == H200.name
    experiment = done.diagnosis.document()["unwedge"]
    assert experiment["retired"]
    states = json.loads((done.folder / "evidence" / "hang-1" / "row_states.json").read_text())
    assert [group["arrival"] for group in states["groups"]] == [264]
    assert (done.folder / "report.md").is_file()


def test_a_group_that_fits_is_clean_and_said_so(tried: Callable[..., GpuTried]) -> None:
    done = tried("oversubscribe", "as-large-as-the-card", "plain", trials=3)
    assert (done.diagnosis.outcome, done.counts.clean, done.status) == ("clean", 3, 0)
    assert done.as_expected
    assert "3 launches" in done.diagnosis.verdict.sentence


def test_another_kernel_holds_the_slots(tried: Callable[..., GpuTried]) -> None:
    done = tried("oversubscribe", "slots-held", "resident=3")
    assert done.diagnosis.outcome == "hang"
    timeline = (done.folder / "timeline.jsonl").read_text()
    assert "another kernel holds 261 of 264 slots" in timeline


def test_a_dump_names_the_cause(tried: Callable[..., GpuTried], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the driver would write is the interpreter's own dump of the same launch on three slots."""
    assert main(["run", "oversubscribe", "--arch", "sm_90", "--out", str(tmp_path / "cpu")]) == 3
    monkeypatch.setenv("FAKE_CUDA_DUMP", str(tmp_path / "cpu" / "evidence" / "interpreted.nvcudmp"))
    done = tried("oversubscribe", "slots-held", "resident=3", dump=True)
    verdict = done.diagnosis.verdict
    assert (verdict.class_, verdict.cause, verdict.signature) == ("gpu-spin-barrier", "not-co-resident", "vllm-41834")
    assert done.as_expected
    assert done.document()["counts"] == [{"class": "gpu-spin-barrier", "cause": "not-co-resident", "launches": 1}]


def test_slots_that_the_driver_counts_otherwise_are_an_error(
    tried: Callable[..., GpuTried], monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr("dsv4_repro.repro.relative_gpu.slots_of", lambda *_a: 100)
    with pytest.raises(PlanError, match="264 CTAs"):
        tried("oversubscribe", "slots-held", "resident=3")


def test_the_queued_kernel_never_ran(tried: Callable[..., GpuTried]) -> None:
    done = tried("victim", "queued-behind", "plain")
    assert done.diagnosis.outcome == "hang"
    states = json.loads((done.folder / "evidence" / "hang-1" / "row_states.json").read_text())
    assert (states["queued_ran"], states["queued_grid"]) == (0, 64)


def test_the_queued_kernel_runs_where_nothing_hangs(tried: Callable[..., GpuTried]) -> None:
    assert tried("victim", "nothing-wedged", "plain").diagnosis.outcome == "clean"


def test_a_reset_race_leaves_zero_and_is_released_all_the_same(tried: Callable[..., GpuTried]) -> None:
    done = tried("reset-race", "leader-resets-widened", "lost=4", trials=4)
    assert (done.diagnosis.outcome, done.counts.hang) == ("hang", 4)
    # The first costs its process; the others are released in the second one.
    assert (done.folder / "timeline.jsonl").read_text().count('"driver started"') == 2
    assert done.diagnosis.document()["unwedge"]["retired"]


def test_a_wrong_answer_is_explained_and_kept(tried: Callable[..., GpuTried]) -> None:
    done = tried("overflow", "dense-builtin", "wrong", trials=2)
    assert (done.diagnosis.outcome, done.status, done.counts.other) == ("other", 4, 2)
    assert done.diagnosis.verdict.class_ == "wrong-result"
    assert not done.as_expected
    answers = json.loads((done.folder / "evidence" / "launch" / "answers.json").read_text())
    assert any("duplicates" in text for text in answers["rows"])
    kinds = {entry["kind"] for entry in json.loads((done.folder / "evidence" / "index.json").read_text())["entries"]}
    assert {"answers", "answers-raw"} <= kinds


def test_all_rows_as_one_document(card: None) -> None:
    entry = scenario("oversubscribe")
    asked: list[str] = []

    def run(_entry: Any, row: Row, _options: GpuOptions, **_more: Any) -> GpuTried:
        asked.append(row.name)
        raise ToolMissingError("no compiler here")

    tried, skipped = run_gpu_rows(entry, entry.variants(), GpuOptions(), run=run)
    assert asked == ["four-slots", "larger-than-the-card", "as-large-as-the-card", "slots-held", "headroom-kept"]
    document = matrix_document(entry, tried, skipped, ground="gpu")
    assert document["outcome"] == "inconclusive"
    assert len(document["not_run"]) == len(entry.variants())


def test_the_launch_is_made_for_the_card() -> None:
    what = row_on_gpu(row_of("oversubscribe", "larger-than-the-card"))
    made = on_device(what, image("plain"), H200)
    plan = launch_plan(made, image("plain"), H200)
    assert (plan.grid, plan.resident_cap, plan.oversubscribed) == (300, 264, True)
    small = dataclasses.replace(H200, num_sms=10)
    assert on_device(what, image("plain"), small).case.grid == 56


def test_cooperative_topk_is_launched_as_clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stand-in reads the parameters as the persistent kernel's: the launch is what is looked at."""
    seen: dict[str, Any] = {}

    def ground(what: Launch, **more: Any) -> RelativeGround:
        seen["case"] = what.case
        raise PlanError("enough was seen")

    fake = dataclasses.replace(image("plain"), function="_ZN4vllm11cooperative20cooperative_topk_cs8ILj512EE")
    monkeypatch.setattr("dsv4_repro.kernels.cooperative.cooperative_image", lambda *_a, **_k: fake)
    entry, row = scenario("cooperative"), row_of("cooperative", "negative-length-0.26.0")
    with pytest.raises(PlanError, match="enough"):
        run_gpu_row(entry, row, GpuOptions(), out=tmp_path / "run", make=ground, describe=lambda _ordinal: H200)
    assert (seen["case"].grid, seen["case"].ctas_per_group) == (64, 8)
    assert 190 << 10 < seen["case"].dynamic_smem < 227 << 10


def test_holders_of_one_warp_take_a_slot_each_by_their_shared_memory() -> None:
    """The launch is limited by threads; with another kernel beside it, by shared memory, to as many CTAs."""
    plain, held = row_on_gpu(row_of("oversubscribe", "four-slots")), row_on_gpu(row_of("oversubscribe", "slots-held"))
    for device in (H200, device_named("RTX PRO 6000 Blackwell")):
        one, other = (launch_plan(on_device(what, image("plain"), device), image("plain"), device) for what in (plain, held))
        assert one.resident_cap == other.resident_cap
        per_sm = other.resident_cap // device.num_sms
        taken = other.dynamic_smem + device.reserved_smem_per_cta
        assert per_sm * taken <= device.smem_per_sm < (per_sm + 1) * taken


def test_rows_of_the_cpu_alone_are_refused() -> None:
    with pytest.raises(UsageError, match="cpu ground only"):
        row_on_gpu(row_of("oversubscribe", "three-slots"))
    with pytest.raises(UsageError, match="GPU number"):
        gpu_options("H200")
