"""Trials on the GPU ground against the stand-in for libcuda: identified, released, reused; what cannot be released is ended and
shown idle.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import ToolMissingError, UsageError
from dsv4_repro.forensics.collect.nvml import Nvml
from dsv4_repro.kernels.image import KernelImage, sha256_hex
from dsv4_repro.kernels.plan import device_named
from dsv4_repro.repro.campaign import session as session_module
from dsv4_repro.repro.campaign.cells import Cell
from dsv4_repro.repro.campaign.hygiene import show_idle
from dsv4_repro.repro.campaign.session import TrialSession, steps_to_run
from dsv4_repro.repro.gpu_ground import GpuGround
from dsv4_repro.repro.ground import CloseOutcome, StepOutcome, UnwedgeOutcome
from dsv4_repro.repro.kernel_choice import ChosenKernel
from dsv4_repro.repro.watchdog import Limits
from dsv4_repro.scenarios.drain import DrainPlan
from dsv4_repro.scenarios.drain_steps import decode_steps

FUNCTION = "_ZN10dsv4_repro10persistent22persistent_topk_kernelILi512ELj4EEEvNS0_20PersistentTopKParamsE"


class FakeNvml:
    """One idle card that nobody holds."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetIndex(self, card: str) -> int:
        return 0

    def nvmlDeviceGetName(self, card: str) -> str:
        return "Fake GPU"

    def nvmlDeviceGetUtilizationRates(self, card: str) -> Any:
        return SimpleNamespace(gpu=0, memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, card: str) -> list[Any]:
        return []


def no_debugger() -> Path:
    raise ToolMissingError("cuda-gdb is not installed here")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of libcuda")
    folder = tmp_path_factory.mktemp("fake-cuda")
    source = Path(__file__).parents[2] / "kernels" / "fake_cuda.c"
    out = str(folder / "libcuda.so.1")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", out, str(source), "-ldl", "-lpthread"], check=True)
    return folder


Make = Callable[..., TrialSession]


@pytest.fixture
def sessions(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setattr(session_module, "device_of", lambda _cell: (device_named("H200"), 0))
    made: list[TrialSession] = []

    def make(defect: str = "plain", *, identify: bool = False, **changes: Any) -> TrialSession:
        cubin = b"\x7fELF" + defect.encode() + b"\0"
        image = KernelImage(f"fake:{defect}", cubin, sha256_hex(cubin), 90, FUNCTION, 512, 4, 0x210, 56, 0, 32, 1024)
        cell = Cell(name="x", ground="gpu", kernel=f"fake:{defect}", plan={"layers": 2}, **changes)

        def ground(_name: str) -> GpuGround:
            return GpuGround(nvml=lambda: Nvml(FakeNvml()), debugger=no_debugger)

        one = TrialSession(cell, make=ground, identify=identify)
        one._chosen = ChosenKernel(image, "0.27.1", None, "a stand-in")
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def test_hangs_are_released_and_the_process_is_used_on(sessions: Make) -> None:
    one = sessions()
    results = [one.trial(seed) for seed in range(3)]
    assert [(result.kind, result.window, result.reused) for result in results] == [("hang", True, True)] * 3
    assert one.opened == 1, "one process for all"
    assert all(result.to_hang_s is not None and result.windows for result in results)
    one.close()
    assert one.device_idle is True


def test_without_a_debugger_a_hang_is_not_identified_and_that_is_not_guessed(sessions: Make) -> None:
    result = sessions(identify=True).trial(0)
    assert result.kind == "hang"
    assert result.signature is None
    assert result.cause is None


@pytest.mark.parametrize(
    ("defect", "changes", "kind"),
    [("guard", {}, "clean"), ("plain", {"producer": "clamped"}, "clean"), ("wrong", {}, "wrong"), ("fault", {}, "other")],
)
def test_what_does_not_hang(sessions: Make, defect: str, changes: dict[str, Any], kind: str) -> None:
    result = sessions(defect, **changes).trial(0)
    assert result.kind == kind, result.why
    assert result.identity is None
    assert (result.why == "") == (kind == "clean")


def test_a_hang_that_cannot_be_released_ends_the_process_and_the_next_trial_gets_a_new_one(
    sessions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = sessions()
    monkeypatch.setattr(session_module, "standing_counter", lambda *_words: None)
    monkeypatch.setattr(session_module, "Deadline", lambda *_words: SimpleNamespace(expired=True))  # not the step's whole time-out
    results = [one.trial(seed) for seed in range(2)]
    assert [(result.kind, result.reused) for result in results] == [("hang", False)] * 2
    assert one.opened == 2


@pytest.mark.parametrize(("slow_ms", "floor"), [(120, 0.02), (300, 0.05)])
def test_a_slow_step_that_the_quick_watchdog_takes_for_hung_is_never_counted_as_a_hang(
    sessions: Make, slow_ms: int, floor: float
) -> None:
    """No counter stands in a barrier, and the step ends by itself at the second look: slow, said so, and no hang."""
    one = sessions(f"guard slow={slow_ms}")
    limits = Limits(floor_s=floor, factor=0.0, unknown_s=floor)
    one._make = lambda _name: GpuGround(nvml=lambda: Nvml(FakeNvml()), debugger=no_debugger, limits=limits)
    result = one.trial(0)
    assert result.kind == "other", result
    assert "ended by itself" in result.why
    assert result.identity is None


def test_a_device_that_stays_busy_is_cleared_by_a_context_and_that_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, dict[str, Any]]] = []

    def emit(kind: str, **fields: Any) -> None:
        events.append((kind, fields))

    readings = iter([100, 60, 3])
    clock = FakeClock()
    assert (
        show_idle(0, emit, touch=lambda _o: (True, {"uuid": "GPU-1", "before": 100}), look=lambda _u: next(readings), clock=clock)
        is True
    )
    assert events[-1][0] == "ghost utilisation"
    assert (events[-1][1]["said"]["before"], events[-1][1]["after"]) == (100, 3)
    assert show_idle(0, emit, touch=lambda _o: (True, {"uuid": "GPU-1"}), look=lambda _u: 100, clock=clock) is False
    assert show_idle(0, emit, touch=lambda _o: (False, {"error": "no driver"}), look=lambda _u: 0, clock=clock) is None

    class Busy:
        def close(self) -> CloseOutcome:
            return CloseOutcome("killed", False, "utilisation 100 %")

    cleared: list[int] = []

    def idle(ordinal: int, _emit: object) -> bool:
        cleared.append(ordinal)
        return True

    monkeypatch.setattr(session_module, "show_idle", idle)
    one = TrialSession(Cell(name="x", ground="gpu"), emit=emit)
    one._ground = Busy()  # type: ignore[assignment]
    one._device = (device_named("H200"), 3)
    one.close()
    assert (cleared, one.device_idle) == ([3], True)


def test_the_steps_that_are_run_are_one_of_each_danger_shape_with_neighbours() -> None:
    steps = decode_steps(DrainPlan())
    window = frozenset(step.index for step in steps if step.danger and step.graph_rows == 8)
    kept = [step.index for step in steps_to_run(steps, window)]
    first = min(window)
    assert kept == [first - 1, first, first + 1]
    assert steps_to_run(steps, frozenset()), "without a window the end of the drain is run"


def test_on_the_interpreter_the_identity_is_diagnosed_once_and_matched_afterwards() -> None:
    one = TrialSession(Cell(name="x"))
    results = [one.trial(seed) for seed in range(3)]
    one.close()
    assert [result.identified for result in results] == ["diagnosed", "matched", "matched"]
    assert len({result.identity for result in results}) == 1
    assert results[0].signature == "vllm-51593"


def test_a_plan_of_nothing_but_the_danger_step_is_reused_too() -> None:
    """What must be right after a release is the same batch with harmless lengths, not a step of the plan: there may be none."""
    plan = {"requests": 3, "min_live": 1, "steps": 1, "prompt": [1, 1], "output": [1, 1]}
    one = TrialSession(Cell(name="x", plan=plan))
    results = [one.trial(seed) for seed in range(3)]
    one.close()
    assert [(result.kind, result.reused) for result in results] == [("hang", True)] * 3
    assert one.opened == 1


def test_a_random_schedule_is_another_one_each_trial() -> None:
    one = TrialSession(Cell(name="x", schedule="random"))
    results = [one.trial(seed) for seed in range(2)]
    one.close()
    assert [result.kind for result in results] == ["hang", "hang"]
    assert one.opened == 2


#: Of ours, a reading that fails is no end of a trial: then nothing is released.
PASSING = [KeyboardInterrupt(), SystemExit(1), OSError(28, "the disk is full"), MemoryError(), UsageError("no such")]


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (place, error)
        for place in ("open", "run_step", "row_states", "unwedge")
        for error in PASSING
        if not (place == "row_states" and isinstance(error, UsageError))
    ],
)
def test_whatever_passes_through_a_trial_the_workload_is_closed_first(place: str, error: BaseException) -> None:
    calls: list[str] = []

    class Ground:
        name = "cpu"

        def _at(self, name: str) -> None:
            calls.append(name)
            if name == place:
                raise error

        def open(self, _request: Any, _emit: Any) -> None:
            self._at("open")

        def run_step(self, step: Any) -> StepOutcome:
            self._at("run_step")
            return StepOutcome(step.index, "hung" if step.danger else "done")

        def row_states(self) -> dict[str, Any]:
            self._at("row_states")
            return {"address": 4096, "arrivals": [1]}

        def unwedge(self, _address: int, _value: int) -> UnwedgeOutcome:
            self._at("unwedge")
            return UnwedgeOutcome(attempted=True, retired=True)

        def close(self) -> CloseOutcome:
            calls.append("close")
            return CloseOutcome("clean", device_idle=None)

    cell = Cell(name="x", ground="cpu", kernel="builtin", arch=90, plan={"layers": 1})
    one = TrialSession(cell, make=lambda _name: Ground(), identify=False)  # type: ignore[arg-type,return-value]
    with pytest.raises(type(error)) as raised:
        one.trial(1)
    assert raised.value is error
    assert calls[-1] == "close"
    assert calls.count("close") == 1
