"""A ground that plays a script, so that every way a run can go is driven without a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.forensics.device_state import CtaState, DeviceState, GridState, LaneState, Unread, WarpState
from dsv4_repro.forensics.records import Diagnosis, Evidence, Verdict, Wait
from dsv4_repro.kernels.abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE
from dsv4_repro.kernels.image import KernelImage
from dsv4_repro.kernels.plan import device_named, plan_launch
from dsv4_repro.repro.ground import (
    Artefact,
    CaptureOutcome,
    CloseOutcome,
    Emit,
    GroundRequest,
    Ready,
    StepOutcome,
    UnwedgeOutcome,
)
from dsv4_repro.repro.runstore import RunStore
from dsv4_repro.scenarios.drain import DrainPlan
from dsv4_repro.scenarios.drain_steps import DecodeStep, decode_steps

COUNTER = 0x7F0000005468


def hung_state(registers: tuple[int, ...] | None = (0, 1, 2)) -> DeviceState:
    """One resident block whose lane 0 polls."""
    lane = LaneState(lane=0, thread_idx=(0, 0, 0), pc_offset=0x1CE0, registers=registers)
    warp = WarpState(warp=0, valid_mask=0xFFFFFFFF, active_mask=1, pc_offset=0x1CE0, lanes=(lane,))
    cta = CtaState(block_idx=(12, 0, 0), sm=3, warps=(warp,))
    grid = GridState(device=0, grid_id=7, kernel="k", grid_dim=(16, 1, 1), block_dim=(1024, 1, 1), ctas=(cta,))
    return DeviceState(source="fake", origin="measured", grids=(grid,), devices={0: ("Fake GPU", 90, 132)})


@dataclass
class FakeGround:
    """Plays ``script``: step index -> state, a list for what it does each time it is run. Records every call in ``calls``."""

    name: Any = "gpu"
    script: dict[int, Any] = field(default_factory=dict)
    retires: bool = True
    sees_device: bool = True
    raises: dict[str, BaseException] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)
    unread: tuple[Unread, ...] = ()
    clock: FakeClock | None = None
    calls: list[str] = field(default_factory=list)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.raises:
            raise self.raises[name]

    def open(self, request: GroundRequest, emit: Emit) -> Ready:
        self._call("open")
        emit("warm", layers=2)
        return Ready("a fake device", {"device": "Fake GPU", "sm": 90})

    def run_step(self, step: DecodeStep) -> StepOutcome:
        self.calls.append(f"step {step.index}")
        if f"step {step.index}" in self.raises:
            raise self.raises[f"step {step.index}"]
        state = self.script.get(step.index, "done")
        if isinstance(state, list):
            state = state.pop(0) if state else "done"
        if self.clock is not None:
            self.clock.advance(1.0)
        reasons = ("no event for 2 s", "GPU busy, no memory traffic") if state == "hung" else ()
        return StepOutcome(step.index, state, milliseconds=1.5, layer=4, reasons=reasons, detail=self.detail)

    def capture(self, folder: Path, emit: Emit, *, allow_dump: bool, attach: bool = True) -> Sequence[CaptureOutcome]:
        self._call("capture+dump" if allow_dump else "capture")
        artefact = folder / "row-states.bin"
        artefact.write_bytes(b"\x01\x00\x00\x00")
        outcomes = [
            CaptureOutcome(
                collector="row states",
                disturbance="none",
                seconds=0.0003,
                artefacts=(Artefact("row states", artefact, "measured"),),
                facts=self.row_states(),
                unread=self.unread,
            )
        ]
        if self.sees_device and (attach or allow_dump):
            outcomes.append(CaptureOutcome(collector="debugger", disturbance="pauses", seconds=0.7, state=hung_state()))
        return outcomes

    def row_states(self) -> dict[str, Any]:
        """Group 6 stands in the middle of a barrier."""
        return {"address": COUNTER - 6 * ROW_STATE_SIZE - ARRIVAL_COUNTER_OFFSET, "arrivals": [0, 0, 0, 0, 0, 0, 1, 0]}

    def unwedge(self, address: int, value: int) -> UnwedgeOutcome:
        self._call("unwedge")
        return UnwedgeOutcome(
            attempted=True, retired=self.retires, milliseconds=0.7 if self.retires else None, address=address, value=value
        )

    def close(self) -> CloseOutcome:
        self._call("close")
        return CloseOutcome("clean", device_idle=True)


def fake_diagnose(
    state: DeviceState, *, step: DecodeStep, evidence: Sequence[Evidence], unwedge: UnwedgeOutcome | None
) -> Diagnosis:
    """Always the same verdict, citing what it was given."""
    cta = state.grids[0].ctas[0] if state.grids[0].ctas else None
    assert cta is not None
    wait = Wait(
        kernel="k", grid=(16, 1, 1), block=cta.block_idx, warp=0, pc_offset=0x1CE0, address=hex(COUNTER), value=1, target=2,
        comparison=">=", state_field="arrival_counter", group=6, role="leader",
    )  # fmt: skip
    verdict = Verdict.model_validate(
        {
            "class": "gpu-spin-barrier",
            "cause": "peer-left",
            "confidence": "high",
            "signature": "vllm-51593",
            "sentence": "peer left",
        }
    )
    return Diagnosis(outcome="hang", ground="gpu", verdict=verdict, waits=(wait,), evidence=tuple(evidence))


@dataclass
class Watched:
    """A watcher that remembers."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)

    def step(self, trial: int, step: DecodeStep) -> None:
        self.steps.append((trial, step.index))

    def waiting(self, what: str) -> None:
        self.waited.append(what)


@pytest.fixture
def plan() -> DrainPlan:
    return DrainPlan(requests=4, min_live=3, output=(8, 8), steps=10)


@pytest.fixture
def kernel() -> KernelImage:
    return KernelImage(
        origin="builtin", cubin=b"\x7fELF", cubin_sha256="0" * 64, sm=90, function="k", top_k=512, vec=4, params_base=0x210,
        params_size=56, static_smem=0, registers=32, max_threads=1024, guarded=False,
    )  # fmt: skip


@pytest.fixture
def request_for(plan: DrainPlan, kernel: KernelImage) -> Callable[..., GroundRequest]:
    def build(**options: Any) -> GroundRequest:
        steps = decode_steps(plan)
        device = device_named("H200")
        launches = {
            rows: plan_launch(rows, plan.width, plan.width, plan.top_k, device) for rows in {step.graph_rows for step in steps}
        }
        return GroundRequest(plan=plan, steps=steps, kernel=kernel, launches=launches, options={"ground": "gpu", **options})

    return build


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.create("drain", out=tmp_path / "run", clock=FakeClock()) as made:
        yield made


@pytest.fixture
def fakes() -> Any:
    """The classes and functions above, for tests that build their own."""

    class Fakes:
        ground = FakeGround
        diagnose = staticmethod(fake_diagnose)
        watched = Watched
        state = staticmethod(hung_state)
        counter = COUNTER

    return Fakes
