"""The GPU ground, its child and its trials, end to end against a stand-in for libcuda (tests/kernels/fake_cuda.c) and for NVML."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_repro.errors import DeadlineError, KernelNotFoundError, NoDeviceError, NoDriverError, RefusedError, ToolMissingError
from dsv4_repro.forensics.collect.nvml import Nvml
from dsv4_repro.forensics.corewriter import write_core
from dsv4_repro.forensics.device_state import CtaState, DeviceState, GridState, LaneState, WarpState
from dsv4_repro.kernels.abi import ARRIVAL_COUNTER_OFFSET, RELEASE_COUNT, ROW_STATE_SIZE, TopKParams
from dsv4_repro.kernels.device_records import counters_of
from dsv4_repro.kernels.image import KernelImage, sha256_hex
from dsv4_repro.kernels.plan import device_named, plan_launch
from dsv4_repro.repro.gpu_ground import GpuGround
from dsv4_repro.repro.gpu_trials import around_the_window, run_trials
from dsv4_repro.repro.ground import CaptureOutcome, Ground, GroundRequest
from dsv4_repro.scenarios.drain import DrainPlan
from dsv4_repro.scenarios.drain_steps import decode_steps

H200 = device_named("H200")
FUNCTION = "_ZN10dsv4_repro10persistent22persistent_topk_kernelILi512ELj4EEEvNS0_20PersistentTopKParamsE"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of libcuda")
    folder = tmp_path_factory.mktemp("fake-cuda")
    source = Path(__file__).parent.parent / "kernels" / "fake_cuda.c"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source), "-ldl", "-lpthread"], check=True
    )
    return folder


@pytest.fixture
def card(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on children see the stand-in as their driver."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))


class FakeNvml:
    """One card. ``idle_after``: how many looks after the workload's end until it shows idle (None: never)."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    def __init__(self, *, holders: tuple[int, ...] = (), unreadable: bool = False, idle: bool = True) -> None:
        self.holders, self.unreadable, self.idle = holders, unreadable, idle
        self.asked: list[str] = []

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetIndex(self, card: str) -> int:
        return 0

    def nvmlDeviceGetName(self, card: str) -> str:
        return "Fake GPU"

    def nvmlDeviceGetUtilizationRates(self, card: str) -> Any:
        return SimpleNamespace(gpu=0 if self.idle else 100, memory=0)

    def nvmlDeviceGetPowerUsage(self, card: str) -> int:
        return 90_000

    def nvmlDeviceGetComputeRunningProcesses(self, card: str) -> list[Any]:
        if self.unreadable:
            raise self.NVMLError("Insufficient Permissions")
        return [SimpleNamespace(pid=pid, usedGpuMemory=1 << 30) for pid in self.holders]


class Events(list[tuple[str, dict[str, Any]]]):
    def __call__(self, kind: str, **fields: Any) -> None:
        self.append((kind, fields))


def request(
    defect: str = "plain", *, layers: int = 3, producer: str = "raw", step_timeout_s: float = 10.0,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> GroundRequest:  # fmt: skip
    plan = DrainPlan(layers=layers, **(changes or {}))
    steps = around_the_window(decode_steps(plan, producer, sm=90))  # type: ignore[arg-type]
    cubin = b"\x7fELF" + defect.encode() + b"\0"
    kernel = KernelImage(f"fake:{defect}", cubin, sha256_hex(cubin), 90, FUNCTION, 512, 4, 0x210, 56, 0, 32, 1024)
    launches = {rows: plan_launch(rows, plan.width, plan.width, 512, H200) for rows in {step.graph_rows for step in steps}}
    return GroundRequest(plan, steps, kernel, launches, step_timeout_s=step_timeout_s, options=options)


def no_debugger() -> Path:
    raise ToolMissingError("cuda-gdb is not installed here", help_text="install the toolkit")


@pytest.fixture
def ground(card: None) -> Iterator[Callable[..., GpuGround]]:
    made: list[GpuGround] = []

    def make(nvml: FakeNvml | None = None, **more: Any) -> GpuGround:
        one = GpuGround(nvml=lambda: Nvml(nvml or FakeNvml()), debugger=no_debugger, **more)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def run_to_end(ground: GpuGround, asked: GroundRequest, events: Events | None = None) -> list[Any]:
    ground.open(asked, events if events is not None else Events())
    outcomes = []
    for step in asked.steps:
        outcomes.append(ground.run_step(step))
        if outcomes[-1].state != "done":
            break
    return outcomes


def by_name(captures: list[CaptureOutcome]) -> dict[str, CaptureOutcome]:
    return {capture.collector: capture for capture in captures}


# -- the drain ---------------------------------------------------------------------------------------------------------------------


def test_the_drain_hangs_at_three_live_and_is_read_released_and_reused(ground: Callable[..., GpuGround], tmp_path: Path) -> None:
    asked, events = request(), Events()
    one: Ground = ground()
    assert isinstance(one, GpuGround)
    outcomes = run_to_end(one, asked, events)
    assert [outcome.state for outcome in outcomes] == ["done", "done", "hung"]
    hung = asked.steps[2]
    assert (hung.live_requests, hung.graph_rows, hung.lengths[6]) == (3, 8, -1)
    assert outcomes[-1].layer == 0
    assert "has not completed" in outcomes[-1].reasons[0]
    assert 240 < outcomes[-1].detail["hang_to_verdict_ms"] < 1000
    assert outcomes[0].detail["rows_checked"] > 0

    captures = list(one.capture(tmp_path, events, allow_dump=False))
    assert [capture.collector for capture in captures] == ["row_states", "nvml", "kernel_log", "proc", "host_stacks", "cuda_gdb"]
    disturbance = ["none", "pauses", "may end the process"]
    order = [disturbance.index(capture.disturbance) for capture in captures]
    assert order == sorted(order), "least disturbing first"
    states = by_name(captures)["row_states"]
    assert states.facts["arrivals"] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert states.facts["unchanged"] is True
    raw = (tmp_path / "row_states.bin").read_bytes()
    assert [group["arrival"] for group in counters_of(raw)] == states.facts["arrivals"]
    params = TopKParams.unpack(bytes.fromhex(states.facts["params"]))
    assert (params.row_states, params.num_rows, params.ctas_per_group) == (states.facts["address"], 8, 2)
    address = params.row_states + 6 * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET
    assert states.state is not None
    assert states.state.memory[address] == 1
    assert by_name(captures)["cuda_gdb"].unread[0].remedy == "install the toolkit"
    assert all(artefact.path.is_file() for capture in captures for artefact in capture.artefacts)

    experiment = one.unwedge(address, RELEASE_COUNT)
    assert (experiment.attempted, experiment.retired, experiment.why_not) == (True, True, "")
    assert experiment.milliseconds is not None
    assert 0 < experiment.milliseconds < 1000
    assert 1 <= len(experiment.detail["layers_ms"]) <= 3, "each layer hangs in turn, and one write can release two of them"
    assert (experiment.detail["rows_wrong"], experiment.detail["padding_rows_wrong"]) == ([], [6])
    assert one.run_step(asked.steps[0]).state == "done"
    assert one.row_states()["groups"][6]["arrival"] == 0, "the graph's own memset wiped what was written"
    closed = one.close()
    assert (closed.how, closed.device_idle) == ("clean", True)


def test_a_count_that_satisfies_nothing_releases_nothing(ground: Callable[..., GpuGround]) -> None:
    one = ground()
    run_to_end(one, request(layers=5, unwedge_timeout_s=0.3))
    base = one.row_states()["address"]
    outcome = one.unwedge(base + 6 * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET, 1)
    assert (outcome.attempted, outcome.retired) == (True, False)
    assert "had not retired" in outcome.why_not
    elsewhere = one.unwedge(0x1000, RELEASE_COUNT)
    assert (elsewhere.attempted, elsewhere.retired) == (False, False)
    assert "not a word of the row states" in elsewhere.why_not


@pytest.mark.parametrize(
    ("asked", "last"),
    [
        (lambda: request("guard"), 3),
        (lambda: request(producer="clamped"), 3),
        (lambda: request(changes={"min_live": 4}), 4),
    ],
    ids=["guarded kernel", "clamped producer", "four live"],
)
def test_controls_run_clean(ground: Callable[..., GpuGround], asked: Callable[[], GroundRequest], last: int) -> None:
    made = asked()
    outcomes = run_to_end(ground(), made)
    assert [outcome.state for outcome in outcomes] == ["done"] * len(made.steps)
    assert made.steps[-1].live_requests == last
    assert all(not outcome.detail.get("padding_rows_wrong") for outcome in outcomes if last == 3)


def test_a_wrong_answer_is_found_with_layer_row_and_reason(ground: Callable[..., GpuGround]) -> None:
    outcomes = run_to_end(ground(), request("wrong guard", layers=2))
    assert outcomes[0].state == "wrong"
    assert outcomes[0].reasons[0].startswith("layer 0: row 0 (length ")
    assert "duplicates" in outcomes[0].reasons[0]


def test_a_slow_kernel_is_not_a_hang(ground: Callable[..., GpuGround]) -> None:
    outcomes = run_to_end(ground(), request("slow=120 guard", layers=4))
    assert [outcome.state for outcome in outcomes] == ["done"] * len(outcomes)
    assert outcomes[0].milliseconds > 400


def test_a_fault_at_warm_up_names_the_call(ground: Callable[..., GpuGround]) -> None:
    with pytest.raises(Exception, match="CUDA_ERROR_LAUNCH_FAILED"):
        ground().open(request("fault"), Events())


def test_a_child_that_dies_in_a_step_is_an_outcome(ground: Callable[..., GpuGround]) -> None:
    one = ground()
    asked = request("slow=300 guard")
    one.open(asked, Events())
    assert one._child is not None
    pid = one._child.pid
    watched = one._child.receive

    def kill_then_receive(timeout_s: float) -> Any:
        os.kill(pid, 9)
        return watched(timeout_s)

    one._child.receive = kill_then_receive  # type: ignore[method-assign]
    outcome = one.run_step(asked.steps[0])
    assert outcome.state == "died"
    assert "SIGKILL" in outcome.reasons[0]
    assert one.close().how == "clean"


def test_a_stopped_child_is_never_called_hung(ground: Callable[..., GpuGround]) -> None:
    one = ground()
    asked = request(step_timeout_s=0.5)
    one.open(asked, Events())
    assert one._child is not None
    os.kill(one._child.pid, 19)
    try:
        with pytest.raises(DeadlineError, match="is not called hung: the child has said nothing"):
            one.run_step(asked.steps[2])
    finally:
        os.kill(one._child.pid, 18)


def test_batches_of_other_kernels_and_refused_launches(ground: Callable[..., GpuGround]) -> None:
    one = ground()
    asked = request("guard")
    step = asked.steps[0]
    other = plan_launch(64, 16384, 16384, 512, H200)
    assert other.path == "filtered"
    refused = dataclasses.replace(asked.launches[8], path="refused", refusal="RuntimeError: oversubscribe")
    one.open(dataclasses.replace(asked, launches={**asked.launches, 64: other, 49: refused}), Events())
    assert "filtered" in one.run_step(dataclasses.replace(step, graph_rows=64)).detail["not_launched"]
    assert one.run_step(dataclasses.replace(step, graph_rows=49)).reasons == ("RuntimeError: oversubscribe",)
    assert one.run_step(dataclasses.replace(step, graph_rows=50)).state == "refused"
    assert one.run_step(step).state == "done"


# -- the card ----------------------------------------------------------------------------------------------------------------------


def test_a_card_that_somebody_holds_is_refused_and_shared_on_request(ground: Callable[..., GpuGround]) -> None:
    nvml = FakeNvml(holders=(4242,))
    with pytest.raises(RefusedError, match=r"4242 \(1024 MiB\)") as caught:
        ground(nvml).open(request("guard"), Events())
    assert "--share" in caught.value.help_text
    assert nvml.asked == ["GPU-01020304-0506-0708-090a-0b0c0d0e0f10"], "asked for by the driver's own UUID"
    one = ground(nvml)
    one.open(request("guard", share=True), Events())
    assert one.close().device_idle is None, "left as found says nothing about idle"


def test_holders_that_cannot_be_read_are_said_and_do_not_refuse(ground: Callable[..., GpuGround]) -> None:
    one = ground(FakeNvml(unreadable=True))
    ready = one.open(request("guard"), Events())
    assert any(item["what"] == "NVML compute processes" for item in ready.environment["unread"])
    assert one.close().device_idle is None


def test_a_card_that_stays_busy_is_said(ground: Callable[..., GpuGround], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_repro.repro.gpu_card._IDLE_WAIT_S", 0.2)
    one = ground(FakeNvml(idle=False))
    one.open(request("guard"), Events())
    closed = one.close()
    assert closed.device_idle is False
    assert "100 %" in closed.detail


def test_the_ready_record_holds_what_was_captured(ground: Callable[..., GpuGround]) -> None:
    ready = ground().open(request("guard", layers=4), Events())
    sizes = {size["rows"]: size for size in ready.environment["graphs"]["sizes"]}
    assert sizes[8]["kernel_nodes"] == 4
    assert sizes[8]["differences"] == []
    assert sizes[8]["launched"][0] == {
        "grid": [16, 1, 1], "block": [1024, 1, 1], "dynamic_smem": 35968, "num_rows": 8, "stride": 16384, "top_k": 512,
        "chunk_size": 8192, "ctas_per_group": 2, "max_seq_len": 16384,
    }  # fmt: skip
    assert sizes[8]["warmup"]["state"] == "done"
    assert ready.environment["device"]["sm"] == 90
    json.dumps(ready.environment)


def test_no_driver_no_device_no_kernel_and_no_torch(
    ground: Callable[..., GpuGround], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = request("guard")
    with pytest.raises(NoDeviceError, match="no device 5"):
        ground().open(dataclasses.replace(asked, device=5), Events())
    with pytest.raises(KernelNotFoundError, match="does not fit this GPU"):
        ground().open(dataclasses.replace(asked, kernel=dataclasses.replace(asked.kernel, cubin=b"not an ELF")), Events())
    with pytest.raises(KernelNotFoundError, match="lacks the function"):
        ground().open(dataclasses.replace(asked, kernel=dataclasses.replace(asked.kernel, function="other")), Events())
    with pytest.raises(ToolMissingError, match="--via op needs"):
        ground().open(dataclasses.replace(asked, options={"via": "op"}), Events())
    monkeypatch.setenv("FAKE_CUDA_NO_DEVICE", "1")
    with pytest.raises(NoDeviceError):
        ground().open(asked, Events())


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    one = GpuGround(nvml=lambda: Nvml(FakeNvml()), debugger=no_debugger)
    try:
        with pytest.raises((NoDriverError, NoDeviceError, KernelNotFoundError)) as caught:
            one.open(request("guard"), Events())
        if caught.type is not NoDriverError:
            pytest.skip("this machine has a driver")
        assert "--on cpu" in caught.value.help_text
    finally:
        one.close()


# -- dump and debugger -------------------------------------------------------------------------------------------------------------


def small_dump(path: Path) -> Path:
    lane = LaneState(0, (0, 0, 0), 0x100, registers=(1, 2, 3, 4))
    cta = CtaState((12, 0, 0), 8, (WarpState(0, 0xFFFFFFFF, 1, 0x100, (lane,)),))
    grid = GridState(0, 5, FUNCTION, (16, 1, 1), (1024, 1, 1), (cta,), params=bytes(56))
    return write_core(path, DeviceState("test", "measured", (grid,), devices={0: ("Fake GPU", 90, 132)}))


def test_the_step_hangs_again_and_is_dumped_which_ends_the_context(
    ground: Callable[..., GpuGround], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DUMP", str(small_dump(tmp_path / "made.nvcudmp")))
    one, asked = ground(), request()
    run_to_end(one, asked)
    first = list(one.capture(tmp_path / "hang", Events(), allow_dump=False, attach=False))
    assert "cuda_gdb" not in by_name(first), "after a debugger the side stream writes nothing any more"
    address = by_name(first)["row_states"].facts["address"] + 6 * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET
    assert one.unwedge(address, RELEASE_COUNT).retired
    assert one.run_step(asked.steps[2]).state == "hung"
    second = list(one.capture(tmp_path / "again", Events(), allow_dump=True, attach=False))
    assert [capture.collector for capture in second] == ["row_states", "core_dump"], "what was read is not read again"
    dump = by_name(second)["core_dump"]
    assert dump.artefacts[0].path == tmp_path / "again" / "gpu.nvcudmp"
    assert dump.facts["told"]
    assert dump.state is not None
    assert [cta.block_idx for cta in dump.state.grids[0].ctas or ()] == [(12, 0, 0)]
    assert "All done" in (tmp_path / "again" / "child.err").read_text()
    outcome = one.run_step(asked.steps[0])
    assert outcome.state == "fault"
    assert "CUDA_ERROR_LAUNCH_FAILED" in outcome.reasons[0]


def test_without_consent_there_is_no_dump(ground: Callable[..., GpuGround], tmp_path: Path) -> None:
    one = ground()
    run_to_end(one, request(dump=False))
    captures = by_name(list(one.capture(tmp_path, Events(), allow_dump=True)))
    assert "--dump" in captures["core_dump"].unread[0].remedy
    assert one._child is not None
    assert "CUDA_COREDUMP" not in Path(f"/proc/{one._child.pid}/environ").read_text()


def test_the_debuggers_view_is_completed_by_what_the_launcher_knows(
    ground: Callable[..., GpuGround], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "cuda-gdb"
    tool.write_text(
        "#!/bin/sh\necho 'dsv4-python 3.12.3'\necho 'dsv4-repro: stage reading 0.1'\necho 'dsv4-repro: stage done 0.2'\n"
    )
    tool.chmod(0o755)
    grid = GridState(0, 5, "persistent_topk_kernel<512, 4u>", (16, 1, 1), (1024, 1, 1), ())
    stranger = GridState(0, 6, "somebody_elses_kernel", (16, 1, 1), (1024, 1, 1), ())
    seen = DeviceState("cuda-gdb", "measured", (grid, stranger))
    monkeypatch.setattr("dsv4_repro.forensics.collect.cuda_gdb.CudaGdbCollector._parse", lambda *_arguments: seen)
    one = GpuGround(nvml=lambda: Nvml(FakeNvml()), debugger=lambda: tool)
    try:
        run_to_end(one, request())
        captures = by_name(list(one.capture(tmp_path / "out", Events(), allow_dump=False)))
    finally:
        one.close()
    debugger = captures["cuda_gdb"]
    assert debugger.facts["child_afterwards"] == "still pending"
    assert debugger.state is not None
    mine, other = debugger.state.grids
    assert mine.params is not None
    assert TopKParams.unpack(mine.params).num_rows == 8
    assert mine.code is not None
    assert mine.code.function == FUNCTION
    assert (other.params, other.code) == (None, None), "nothing is added to a kernel that is not ours"


def test_a_healthy_workload_is_not_attached_to(ground: Callable[..., GpuGround], tmp_path: Path) -> None:
    tool = tmp_path / "cuda-gdb"
    tool.write_text("#!/bin/sh\necho 'dsv4-python 3.12.3'\n")
    tool.chmod(0o755)
    one = GpuGround(nvml=lambda: Nvml(FakeNvml()), debugger=lambda: tool)
    try:
        run_to_end(one, request("guard"))
        captures = by_name(list(one.capture(tmp_path, Events(), allow_dump=False)))
    finally:
        one.close()
    assert "nothing hangs" in captures["cuda_gdb"].unread[0].why


def test_nothing_is_left_behind(ground: Callable[..., GpuGround], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one = ground()
    run_to_end(one, request())
    assert one._child is not None
    pid = one._child.pid
    assert list(tmp_path.iterdir())
    one.close()
    assert list(tmp_path.iterdir()) == []
    assert not Path(f"/proc/{pid}").exists()
    assert one.close().how == "clean"


# -- trials ------------------------------------------------------------------------------------------------------------------------


def test_trials_in_one_process(ground: Callable[..., GpuGround]) -> None:
    asked = request()
    began = time.monotonic()
    result = run_trials(asked, asked.steps, 4, Events(), ground=ground)
    assert time.monotonic() - began < 10
    document = result.document()
    assert (document["counts"], document["processes"], document["recovered"], document["unfinished"]) == ({"hang": 4}, 1, 4, 0)
    assert document["steps_that_hung"] == {asked.steps[2].index: 4}
    assert document["arrival_counters"] == {"[0, 0, 0, 0, 0, 0, 1, 0]": 4}
    assert document["hang_probability_at_least_95"] == pytest.approx(0.05 ** (1 / 4))
    assert document["write_to_retirement_ms"]["n"] == 4


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (lambda: request("guard"), "clean"),
        (lambda: request(changes={"min_live": 4}), "no window"),
        (lambda: request("wrong guard"), "wrong"),
    ],
)
def test_trials_that_do_not_hang(ground: Callable[..., GpuGround], asked: Callable[[], GroundRequest], kind: str) -> None:
    made = asked()
    document = run_trials(made, made.steps, 3, Events(), ground=ground).document()
    assert document["counts"] == {kind: 3}
    assert (document["hang_probability_at_most_95"] is not None) == (kind == "clean")


def test_a_fresh_child_a_trial(ground: Callable[..., GpuGround]) -> None:
    asked = request("guard")
    assert run_trials(asked, asked.steps, 2, Events(), ground=ground, fresh=True).document()["processes"] == 2


def test_trials_stop_at_their_budget_and_count_what_was_not_made(ground: Callable[..., GpuGround]) -> None:
    asked = request()
    result = run_trials(asked, asked.steps, 50, Events(), ground=ground, budget_s=1.0)
    assert 1 <= len(result.outcomes) < 50
    assert result.unfinished == 50 - len(result.outcomes)
    assert "budget" in result.why


def test_a_workload_that_is_lost_ends_the_trials(ground: Callable[..., GpuGround]) -> None:
    asked = request()
    made: list[GpuGround] = []

    def losing() -> GpuGround:
        one = ground()
        original = one.unwedge

        def lose(address: int, value: int) -> Any:
            assert one._child is not None
            os.kill(one._child.pid, 9)
            return original(address, value)

        one.unwedge = lose  # type: ignore[method-assign]
        made.append(one)
        return one

    result = run_trials(asked, asked.steps, 5, Events(), ground=losing)
    assert (len(result.outcomes), result.unfinished) == (1, 4)
    assert result.outcomes[0].recovered is False
    assert result.why


def test_a_child_that_cannot_be_dumped_is_followed_by_a_second_one(
    ground: Callable[..., GpuGround], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DUMP", str(small_dump(tmp_path / "made.nvcudmp")))
    one = ground()
    run_to_end(one, request())
    assert one._dump is not None
    assert one._child is not None
    one._dump.pipe_of(one._child.pid).unlink()
    captures = [capture for capture in one.capture(tmp_path / "out", Events(), allow_dump=True) if capture.collector == "core_dump"]
    assert "no dump pipe" in captures[0].unread[0].why
    assert captures[1].facts["child"].startswith("a second one")
    assert captures[1].state is not None
    assert captures[1].artefacts[0].path.is_file()


# -- vLLM's own launcher, by a stand-in for torch ----------------------------------------------------------------------------------

TORCH = """
import contextlib, ctypes, struct, types
__version__ = "2.11.0+stand-in"
_driver = ctypes.CDLL("libcuda.so.1")
_module, _function, _current = ctypes.c_void_p(), ctypes.c_void_p(), []
class _Cuda:
    is_available = staticmethod(lambda: True)
    set_device = staticmethod(lambda device: None)
    class ExternalStream:
        def __init__(self, handle, device=None):
            self.handle = handle
    @staticmethod
    @contextlib.contextmanager
    def stream(stream):
        _current.append(stream.handle)
        yield
        _current.pop()
cuda = _Cuda()
def as_tensor(array, device=None):
    about = array.__cuda_array_interface__
    return types.SimpleNamespace(address=about["data"][0], shape=about["shape"])
def _topk(logits, lengths, output, workspace, k, max_seq_len):
    stream, groups = ctypes.c_void_p(_current[-1]), min(logits.shape[0], GROUPS)
    _driver.cuMemsetD32Async(ctypes.c_uint64(workspace.address), 0, ctypes.c_size_t(772 * groups), stream)
    params = ctypes.create_string_buffer(struct.pack("<4Q6I", logits.address, output.address, lengths.address, workspace.address,
                                                     logits.shape[0], logits.shape[1], k, 8192, 2, max_seq_len))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    _driver.cuLaunchKernel(_function, 2 * groups, 1, 1, 1024, 1, 1, 35968, stream, pointers, None)
class ops:
    class _C:
        persistent_topk = staticmethod(_topk)
    @staticmethod
    def load_library(path):
        if "topk" not in path:
            raise OSError(f"{path}: cannot open shared object file")
        _driver.cuModuleLoadData(ctypes.byref(_module), ctypes.c_char_p(b"\\x7fELFplain"))
        _driver.cuModuleGetFunction(ctypes.byref(_function), _module, b"persistent_topk_kernel")
        _driver.cuFuncSetAttribute(_function, 8, 232448)
"""


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def install(groups: int) -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "torch.py").write_text(f"GROUPS = {groups}\n" + TORCH)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    return install


def only_eight_rows(asked: GroundRequest) -> GroundRequest:
    steps = tuple(step for step in asked.steps if step.graph_rows == 8)
    return dataclasses.replace(asked, steps=steps, launches={8: asked.launches[8]})


def test_via_op_hangs_alike_and_the_plan_is_checked_against_its_launch(
    ground: Callable[..., GpuGround], torch: Callable[[int], None], tmp_path: Path
) -> None:
    torch(8)
    one, asked = ground(), only_eight_rows(request(via="op", library="/x/topk.so"))
    ready = one.open(asked, Events())
    (size,) = ready.environment["graphs"]["sizes"]
    assert (size["differences"], size["kernel_nodes"], size["launched"][0]["grid"]) == ([], 3, [16, 1, 1])
    assert "NOT as planned" not in ready.description
    assert next(outcome for outcome in map(one.run_step, asked.steps) if outcome.state != "done").state == "hung"
    states = by_name(list(one.capture(tmp_path / "out", Events(), allow_dump=False)))["row_states"]
    assert states.facts["arrivals"][6] == 1
    assert TopKParams.unpack(bytes.fromhex(states.facts["params"])).row_states == states.facts["address"]


def test_via_op_tells_a_launch_that_is_not_the_planned_one(ground: Callable[..., GpuGround], torch: Callable[[int], None]) -> None:
    torch(4)
    ready = ground().open(only_eight_rows(request(via="op", library="/x/topk.so")), Events())
    (size,) = ready.environment["graphs"]["sizes"]
    assert "launched grid (8, 1, 1)" in size["differences"][0]
    assert "NOT as planned: launched grid (8, 1, 1)" in ready.description


def test_via_op_with_a_library_that_cannot_be_loaded(ground: Callable[..., GpuGround], torch: Callable[[int], None]) -> None:
    torch(8)
    with pytest.raises(KernelNotFoundError, match="cannot load") as caught:
        ground().open(only_eight_rows(request(via="op", library="/x/other.so")), Events())
    assert "--via driver" in caught.value.help_text
