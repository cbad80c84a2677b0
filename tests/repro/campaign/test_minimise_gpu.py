"""``minimise --on gpu`` against the stand-in for libcuda: one process for all candidates, the smallest launch diagnosed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics.collect.nvml import Nvml
from dsv4_repro.kernels.image import KernelImage, sha256_hex
from dsv4_repro.kernels.plan import DeviceDescription, device_named
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.campaign.cells import Cell
from dsv4_repro.repro.campaign.launches import LaunchBench
from dsv4_repro.repro.campaign.minimise import minimise_cell
from dsv4_repro.repro.campaign.session import TrialSession
from dsv4_repro.repro.gpu_ground import GpuGround
from dsv4_repro.repro.kernel_choice import ChosenKernel
from dsv4_repro.repro.watchdog import Limits

from ..test_gpu_ground import FUNCTION, FakeNvml, card, library, no_debugger

__all__ = ["card", "library"]  # fixtures

H200 = device_named("H200")


def chosen(_spec: str, _sm: int, top_k: int, vec: int, **_more: Any) -> ChosenKernel:
    cubin = b"\x7fELFplain\0"
    image = KernelImage("fake", cubin, sha256_hex(cubin), 90, FUNCTION, top_k, vec, 0x210, 56, 0, 32, 1024)
    return ChosenKernel(image, "0.27.1", False, "a stand-in")


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stand-in's driver writes: the interpreter's dump of the same defect."""
    assert main(["run", "victim", "--arch", "sm_90", "--out", str(tmp_path / "cpu")]) == 3
    monkeypatch.setenv("FAKE_CUDA_DUMP", str(tmp_path / "cpu" / "evidence" / "interpreted.nvcudmp"))


def test_one_process_for_all_candidates(card: None, dump: None, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[GpuGround] = []
    captured_again: list[int] = []

    class Counted(GpuGround):
        def prepare_again(self, request: Any) -> None:
            captured_again.append(len(request.launches))
            super().prepare_again(request)

    def make(_name: str) -> GpuGround:
        opened.append(Counted(nvml=lambda: Nvml(FakeNvml()), debugger=no_debugger, limits=Limits(floor_s=0.05)))
        return opened[-1]

    for module in ("session", "launches"):
        monkeypatch.setattr(f"dsv4_repro.repro.campaign.{module}.choose_kernel", chosen)
    for module in ("session", "minimise"):
        monkeypatch.setattr(f"dsv4_repro.repro.campaign.{module}.device_of", lambda _cell: (H200, 0))

    def session(cell: Cell, **more: Any) -> TrialSession:
        return TrialSession(cell, make=make, **more)

    def bench(cell: Cell, device: DeviceDescription, ordinal: int) -> LaunchBench:
        return LaunchBench(cell.kernel, device, ground="gpu", ordinal=ordinal, make=make)

    done = minimise_cell(Cell("run", "gpu", plan={"layers": 2}), 1, confirm=2, session=session, bench=bench)
    assert done.case.lengths == (-1,)
    assert done.launch["ctas_per_group"] == 2
    assert done.account.candidates > 30
    # The first hang of the plan and of the launch are diagnosed in full, which costs the context, and the smallest at the end.
    assert len(opened) <= 6, len(opened)
    assert len(captured_again) > 20
    assert all(ground.close().detail == "nothing was started" for ground in opened)
