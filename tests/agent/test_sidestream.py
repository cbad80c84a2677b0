"""Side stream, rescue and answers against the stand-in for libcuda (tests/kernels/fake_cuda.c); no word about a real driver."""

from __future__ import annotations

import ctypes
import inspect
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dsv4_repro_agent import control
from dsv4_repro_agent.control import Agent
from dsv4_repro_agent.driver import Driver, DriverError
from dsv4_repro_agent.guard import Guard
from dsv4_repro_agent.hooks import Hooks
from dsv4_repro_agent.recorder import Recorder
from dsv4_repro_agent.rescue import RELEASE_COUNT, find_wait, zeroed_before_launch
from dsv4_repro_agent.ring import Ring
from dsv4_repro_agent.said import Said
from dsv4_repro_agent.settings import Settings
from dsv4_repro_agent.sidestream import ARRIVAL_OFFSET, ROW_STATE_SIZE, Launch, SideStream, SideStreamBusyError

from dsv4_repro.errors import UnavailableError
from dsv4_repro.kernels import abi
from dsv4_repro.kernels.abi import TopKParams
from dsv4_repro.repro.agent_ask import ask_release, ask_row_states, row_state_lines, the_one_alive
from dsv4_repro.repro.recorder import read_ring
from dsv4_repro.repro.serving.unwedge_plan import zeroed_before_launch as main_rule

#: What the stand-in of the other tests lacks.
MORE = "int cuThreadExchangeStreamCaptureMode(int *mode) { *mode = 0; return 0; }\n"
KNOWN = (3058, 3059, 3060, 3061, 3060, 3061, -1, 0)


def until(ready: Callable[[], bool], seconds: float = 20.0) -> float:
    """Seconds until ``ready``."""
    begin = time.monotonic()
    while not ready():
        assert time.monotonic() - begin < seconds, "not within the time"
        time.sleep(0.002)
    return time.monotonic() - begin


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of libcuda")
    folder = tmp_path_factory.mktemp("agent-cuda")
    (folder / "more.c").write_text(MORE)
    source = Path(__file__).parent.parent / "kernels" / "fake_cuda.c"
    path = folder / "libagentcuda.so"
    subprocess.run(
        [
            compiler,
            "-O1",
            "-shared",
            "-fPIC",
            "-Wl,-Bsymbolic",
            "-o",
            str(path),
            str(source),
            str(folder / "more.c"),
            "-ldl",
            "-lpthread",
        ],
        check=True,
    )
    return path


class Card:
    """The server's own use of the stand-in: one stream, the op launched on it as a graph would."""

    def __init__(self, library: Path) -> None:
        self.cuda = ctypes.CDLL(str(library))
        self.stream = self._made("cuStreamCreateWithPriority", 1, 0)
        image = ctypes.create_string_buffer(b"\x7fELFplain\0" + bytes(64))
        module = self._made("cuModuleLoadData", image)
        self.function = self._made("cuModuleGetFunction", module, b"persistent_topk_kernel")
        self.states, self.lengths = self.memory(1 << 20), self.memory(4096)
        self.input, self.output = self.memory(8 * 16384 * 4), self.memory(8 * 512 * 4)

    def _made(self, name: str, *arguments: Any) -> int:
        out = ctypes.c_void_p()
        given = [ctypes.c_void_p(one) if isinstance(one, int) and one > 1 << 20 else one for one in arguments]
        assert getattr(self.cuda, name)(ctypes.byref(out), *given) == 0
        return out.value or 0

    def memory(self, size: int) -> int:
        return self._made("cuMemAlloc", ctypes.c_size_t(size))

    def set_lengths(self, values: tuple[int, ...]) -> None:
        ctypes.memmove(self.lengths, (ctypes.c_int32 * len(values))(*values), 4 * len(values))

    def counter(self, group: int) -> int:
        return ctypes.c_int32.from_address(self.states + group * ROW_STATE_SIZE + ARRIVAL_OFFSET).value

    def launch(self, times: int = 1) -> int:
        """Zero the states and launch, ``times`` times; the handle of an event behind it all."""
        params = TopKParams(self.input, self.output, self.lengths, self.states, 8, 16384, 512, 8192, 2, 16384).pack()
        raw = ctypes.create_string_buffer(params)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(raw))
        stream = ctypes.c_void_p(self.stream)
        for _ in range(times):
            assert (
                self.cuda.cuMemsetD32Async(ctypes.c_uint64(self.states), 0, ctypes.c_size_t(8 * ROW_STATE_SIZE // 4), stream) == 0
            )
            assert self.cuda.cuLaunchKernel(ctypes.c_void_p(self.function), 16, 1, 1, 1024, 1, 1, 0, stream, pointers, None) == 0
        event = self._made("cuEventCreate", 2)
        assert self.cuda.cuEventRecord(ctypes.c_void_p(event), stream) == 0
        return event

    def describe(self, **changes: Any) -> Launch:
        return Launch(**{
            "workspace": self.states, "workspace_size": 1 << 20, "lengths": self.lengths, "rows": 8, "width": 16384, "top_k": 512,
            "max_seq_len": 16384, "captured": True, **changes,
        })  # fmt: skip

    def free(self, group: int) -> None:
        ctypes.c_int32.from_address(self.states + group * ROW_STATE_SIZE + ARRIVAL_OFFSET).value = RELEASE_COUNT


class Rig:
    """An agent in this process, with a model runner that launches on the card."""

    def __init__(self, library: Path, folder: Path, *, vllm: str = "0.23.0", rescue: bool = True, needed: bool = True) -> None:
        self.card = Card(library)
        self.said = Said()
        self.agent: Any = None
        settings = Settings(agent=True, guard=False, rescue=rescue, row_states=True, folder=folder)
        self.recorder = Recorder(self.said, self.ring, self.start)
        self.guard = Guard(self.said, wanted=False)
        self.guard.needed = needed
        hooks = Hooks(self.said, self.recorder, self.guard, row_states=True)
        self.agent = Agent(settings, self.said, self.recorder, self.guard, hooks, vllm=vllm)
        self.agent.library = str(library)
        self.hooks = hooks
        self.folder = folder
        self.event = 0
        self.recorder._record_event = self.record_event

    def start(self) -> None:
        self.agent.start()

    def record_event(self, step: Any) -> Any:
        step.record_ns = time.monotonic_ns()
        return SimpleNamespace(cuda_event=self.event)

    def ring(self, runner: Any) -> Ring:
        return Ring(self.folder, slots=16, rank=0, device=0, vllm="0.23.0", agent="0.1.0")

    def step(self, lengths: tuple[int, ...] = KNOWN, times: int = 1) -> Any:
        self.card.set_lengths(lengths)
        launch = self.card.describe()
        self.hooks.launches[(launch.workspace, launch.lengths, launch.rows)] = launch
        step = self.recorder.begin(SimpleNamespace(device=SimpleNamespace(index=0)), 1)
        assert step is not None
        self.event = self.card.launch(times)
        self.recorder.launched(step)
        return step

    def ask(self, name: str = "one") -> dict[str, Any]:
        (self.folder / f"ask-{self.agent.name}.json").write_text(json.dumps({"id": name}))
        path = self.folder / f"answer-{self.agent.name}.json"
        until(lambda: path.exists() and json.loads(path.read_text())["id"] == name)
        document: dict[str, Any] = json.loads(path.read_text())
        return document


@pytest.fixture
def rig(library: Path, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(library, tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.agent.stop()
        for group in range(8):
            one.card.free(group)


def test_the_numbers_are_those_of_the_main_package() -> None:
    assert (ROW_STATE_SIZE, ARRIVAL_OFFSET, RELEASE_COUNT) == (abi.ROW_STATE_SIZE, abi.ARRIVAL_COUNTER_OFFSET, abi.RELEASE_COUNT)


def test_the_known_wait_is_released_and_the_guard_armed(rig: Callable[..., Rig]) -> None:
    one = rig()
    step = one.step()
    until(lambda: step.complete_ns != 0)
    assert one.agent.releases == 1
    assert one.guard.active
    assert one.card.counter(6) >= RELEASE_COUNT
    until(lambda: len(one.said.events) == 3)
    assert [event["kind"] for event in one.said.events] == ["guard on", "released", "rescued"]
    assert one.said.events[2]["launches"] == 1
    assert one.said.events[1]["group"] == 6
    assert one.said.events[1]["length"] == -1
    contents = read_ring(one.recorder.ring.path)
    until(lambda: read_ring(one.recorder.ring.path).header.releases == 1)
    assert contents.steps[0].number == 1
    status = one.folder / f"status-{one.agent.name}.json"
    until(lambda: status.exists() and json.loads(status.read_text())["releases"] == 1)


def test_every_layer_and_step_in_flight_is_released(rig: Callable[..., Rig]) -> None:
    """21 indexer layers, two steps in flight: 42 waits one behind the other."""
    one = rig()
    step = one.step(times=42)
    took = until(lambda: step.complete_ns != 0, 60)
    assert one.agent.releases == 42
    # The budget is 1 s for a drain, 50 ms of it until the step counts as overdue; here a loaded machine is allowed for.
    assert took < 2.0
    until(lambda: one.agent.rescues == 1)
    assert [event["kind"] for event in one.said.events] == ["guard on", "released", "rescued"], "one line a drain, not 42"
    assert one.said.events[2]["launches"] == 42


def test_a_healthy_step_is_left_alone(rig: Callable[..., Rig]) -> None:
    one = rig()
    step = one.step((3058, 3059, 3060, 3061, 3060, 3061, 0, 0))
    until(lambda: step.complete_ns != 0)
    time.sleep(0.2)
    assert one.agent.releases == 0
    assert not one.guard.active


def test_a_wait_without_a_negative_length_is_not_touched(rig: Callable[..., Rig]) -> None:
    one = rig()
    step = one.step((3058, 3059, 3060, 3061, 3060, 3061, 40000, 0))
    until(lambda: "stall" in one.said.features, 30)
    assert one.agent.releases == 0
    assert "no negative length" in one.said.features["stall"]["why"]
    assert one.card.counter(6) == 1
    one.card.free(6)
    until(lambda: step.complete_ns != 0)


@pytest.mark.parametrize("version", ["0.20.1", "0.34.0", "0.27.1.dev3", ""])
def test_builds_whose_launcher_is_not_known_to_zero_are_refused(rig: Callable[..., Rig], version: str) -> None:
    one = rig(vllm=version)
    one.step()
    until(lambda: "rescue" in one.said.features)
    time.sleep(0.3)
    assert one.said.features["rescue"]["found"] is False
    assert one.agent.releases == 0
    assert one.card.counter(6) == 1


def test_it_answers_while_the_device_is_wedged(rig: Callable[..., Rig]) -> None:
    one = rig(rescue=False)
    step = one.step()
    until(lambda: one.card.counter(6) == 1)
    begin = time.monotonic()
    answer = one.ask()
    assert time.monotonic() - begin < 1.0
    (launch,) = answer["launches"]
    assert launch["arrival_counters"] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert launch["lengths"] == list(KNOWN)
    assert step.complete_ns == 0
    assert one.agent.releases == 0
    assert read_ring(one.recorder.ring.path).unfinished[0].number == 1


def test_the_main_package_asks_and_is_answered(rig: Callable[..., Rig]) -> None:
    one = rig(rescue=False)
    one.step()
    until(lambda: one.card.counter(6) == 1 and "side stream" in one.said.features)
    states = ask_row_states(one.folder, the_one_alive(one.folder, None))
    (launch,) = states.launches
    assert launch.arrival_counters == [0, 0, 0, 0, 0, 0, 1, 0]
    assert launch.lengths == list(KNOWN)
    assert launch.workspace == hex(one.card.states)
    assert states.stalled_s > 0
    assert any("[0, 0, 0, 0, 0, 0, 1, 0]" in line for line in row_state_lines(states))


def test_asked_to_it_releases_and_arms_the_guard_although_no_rescue_was_asked_for(rig: Callable[..., Rig]) -> None:
    one = rig(rescue=False)
    step = one.step(times=5)
    until(lambda: one.card.counter(6) == 1 and one.recorder.stalled_for() > 0.1 and "side stream" in one.said.features)
    assert one.agent.releases == 0
    answer = ask_release(one.folder, one.agent.name, guard=True)
    assert answer.released == 5
    assert answer.guard
    assert answer.guard_needed
    until(lambda: step.complete_ns != 0)
    again = ask_release(one.folder, one.agent.name, guard=True)
    assert again.released == 0
    assert "no step is overdue" in again.why_no_more
    status = one.folder / f"status-{one.agent.name}.json"
    until(lambda: json.loads(status.read_text())["counters"]["releases"] == 5)
    assert json.loads(status.read_text())["counters"]["rescues"] == 1


@pytest.mark.parametrize(
    ("version", "lengths", "says"),
    [("0.20.1", KNOWN, "does not zero"), ("0.23.0", (3058, 3059, 3060, 3061, 3060, 3061, 40000, 0), "no negative length")],
)
def test_a_release_that_is_asked_for_has_the_conditions_of_the_rescue(
    rig: Callable[..., Rig], version: str, lengths: tuple[int, ...], says: str
) -> None:
    one = rig(rescue=False, vllm=version)
    one.step(lengths)
    until(lambda: one.card.counter(6) == 1 and one.recorder.stalled_for() > 0.1 and "side stream" in one.said.features)
    answer = ask_release(one.folder, one.agent.name, guard=False)
    assert answer.released == 0
    assert says in answer.why_no_more
    assert one.card.counter(6) == 1
    assert not one.guard.active


def test_a_request_to_read_never_releases_although_one_to_release_comes_in_between(rig: Callable[..., Rig]) -> None:
    one = rig(rescue=False)

    def asked(self: Any) -> Any:
        """Between two looks at what is asked, the other thread takes in a request to release."""
        found, self.reads = self.waiting, self.reads + 1
        if self.reads == 1:
            (one.folder / f"ask-{self.name}.json").write_text(json.dumps({"id": "two", "kind": "release"}))
            self._files(0.0)
        return found

    def ask(self: Any, value: Any) -> None:
        self.waiting = value

    racing: Any = type("Racing", (Agent,), {"waiting": None, "reads": 0, "_ask": property(asked, ask)})
    agent = racing(one.agent.settings, one.said, one.recorder, one.guard, one.hooks, vllm="0.23.0")
    done: list[str] = []

    def does(what: str) -> Any:
        return lambda _stream: done.append(what) or {}  # type: ignore[func-returns-value]

    agent.releasing.row_states, agent.releasing.release = does("read"), does("release")
    agent.waiting = ("one", False)
    stream: Any = None
    agent._work(stream)
    assert done == ["read"]
    assert json.loads((one.folder / f"answer-{agent.name}.json").read_text())["id"] == "one"
    agent._work(stream)
    assert done == ["read", "release"]
    assert json.loads((one.folder / f"answer-{agent.name}.json").read_text())["id"] == "two"


def test_a_step_that_cannot_launch_is_overdue_too(rig: Callable[..., Rig]) -> None:
    """The launch queue is full: the step has begun and its launches do not come to an end."""
    one = rig()
    one.recorder.arm(True)
    one.step((1, 1, 1, 1, 1, 1, 1, 1))
    until(lambda: one.recorder.stalled_for() == 0)
    one.card.set_lengths(KNOWN)
    assert one.recorder.begin(SimpleNamespace(device=SimpleNamespace(index=0)), 1) is not None
    one.card.launch()
    until(lambda: one.agent.releases == 1)
    assert one.recorder.stalled_for() == 0
    assert one.recorder.overdue_for() > 0


def test_a_write_that_does_not_come_back_is_told_and_not_counted(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded on an H200: after three releases the driver was held up, and the fourth write stayed in its queue."""
    from dsv4_repro_agent.sidestream import SideStream, SideStreamBusyError

    def held(*_: Any) -> None:
        raise SideStreamBusyError("a copy on the side stream did not end within 0.5 s")

    monkeypatch.setattr(SideStream, "write_word", held)
    one = rig()
    one.step()
    until(lambda: any(event["kind"] == "write not confirmed" for event in one.said.events))
    event = next(event for event in one.said.events if event["kind"] == "write not confirmed")
    assert (event["group"], event["releases"]) == (6, 0)
    assert one.agent.releases == 0
    assert read_ring(one.recorder.ring.path).header.releases == 0


def test_a_busy_side_stream_is_tried_again(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig()
    looks: list[int] = []
    real: Callable[[SideStream, Launch], tuple[int, ...]] = SideStream.counters

    def counters(stream: SideStream, launch: Launch) -> tuple[int, ...]:
        looks.append(1)
        if len(looks) < 3:
            raise SideStreamBusyError("a copy on the side stream did not end within 0.5 s")
        return real(stream, launch)

    monkeypatch.setattr(SideStream, "counters", counters)
    step = one.step()
    until(lambda: step.complete_ns != 0)
    assert one.agent.releases == 1
    assert len(looks) > 3


def test_a_copy_that_comes_back_late_frees_the_stream(rig: Callable[..., Rig]) -> None:
    one = rig(rescue=False)
    stream = SideStream(Driver(one.agent.library), 0)
    answers = [600, 600, 0]
    stream.driver.event_query = lambda handle: answers.pop(0)
    with pytest.raises(SideStreamBusyError, match="did not end within"):
        stream.read(one.card.lengths, 4, timeout=0.0)
    with pytest.raises(SideStreamBusyError, match="earlier copy"):
        stream.read(one.card.lengths, 4)
    stream.driver.event_query = lambda handle: 0
    assert len(stream.read(one.card.lengths, 4)) == 4


def test_a_blocked_driver_is_said_once_and_so_is_its_end(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig()
    monkeypatch.setattr("dsv4_repro_agent.control.BLOCKED_S", 0.2)
    held = threading.Event()
    real: Callable[[SideStream, Launch], tuple[int, ...]] = SideStream.counters

    def counters(stream: SideStream, launch: Launch) -> tuple[int, ...]:
        held.wait(20)
        return real(stream, launch)

    monkeypatch.setattr(SideStream, "counters", counters)
    step = one.step()
    until(lambda: "has not returned" in one.said.features.get("side stream", {}).get("why", ""))
    assert one.said.features["side stream"]["found"] is False
    held.set()
    until(lambda: one.said.features["side stream"]["found"] is True)
    until(lambda: step.complete_ns != 0)


def test_what_the_guard_averts_is_counted(rig: Callable[..., Rig]) -> None:
    one = rig(rescue=False)
    step = one.step((1,) * 8)
    late = SimpleNamespace(device=SimpleNamespace(type="cpu"), tolist=lambda: [2, 2, 2])
    one.recorder.decode(late, next_n=2, native=True, guarded=True)
    assert step.decode_slots == -1, "the draft's batch is not the step's"
    one.recorder.begin(SimpleNamespace(device=SimpleNamespace(index=0)), 1)
    lengths = SimpleNamespace(device=SimpleNamespace(type="cpu"), tolist=lambda: [2, 2, 2, 0])
    one.recorder.decode(lengths, next_n=2, native=True, guarded=True)
    one.recorder.decode(lengths, next_n=2, native=True, guarded=False)
    one.recorder.decode(lengths, next_n=1, native=True, guarded=True)
    assert one.recorder.averted == 1


def test_without_a_driver_it_says_so_and_the_rest_works(rig: Callable[..., Rig]) -> None:
    one = rig(rescue=True)
    one.agent.library = "libabsent-cuda.so"
    one.step()
    until(lambda: "side stream" in one.said.features)
    assert one.said.features["side stream"]["found"] is False
    assert "no answer" in one.ask()["error"]
    assert [step.number for step in read_ring(one.recorder.ring.path).steps] == [1]


def test_nothing_is_made_on_the_device_during_graph_capture(rig: Callable[..., Rig]) -> None:
    one = rig(rescue=False)
    one.recorder.capturing = True
    one.step()
    time.sleep(0.3)
    assert "side stream" not in one.said.features
    one.recorder.capturing = False
    until(lambda: "side stream" in one.said.features)


def test_the_control_file_switches_recorder_and_guard(rig: Callable[..., Rig]) -> None:
    one = rig(rescue=False)
    one.step((1, 1, 1, 1, 1, 1, 1, 1))
    control = one.folder / "control.json"
    control.write_text(json.dumps({"recorder": False, "guard": True}))
    until(lambda: not one.recorder.armed and one.guard.active)
    assert one.recorder.begin(SimpleNamespace(device=None), 1) is None
    control.write_text("{")
    until(lambda: "control" in one.said.features)
    control.write_text(json.dumps({"recorder": True, "guard": False}))
    until(lambda: one.recorder.armed and not one.guard.active)


def test_a_missing_call_is_a_typed_error(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = Path(__file__).parent.parent / "kernels" / "fake_cuda.c"
    path = tmp_path / "libold.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", str(path), str(source), "-ldl", "-lpthread"], check=True)
    with pytest.raises(DriverError, match="cuThreadExchangeStreamCaptureMode"):
        Driver(str(path))


LAUNCH = Launch(0x1000, 1 << 20, 0x2000, 8, 16384, 512, 16384, True)
ONE = (0, 0, 0, 0, 0, 0, 1, 0)


@pytest.mark.parametrize(
    ("reads", "launch", "lengths", "says"),
    [
        ([ONE] * 4, LAUNCH, KNOWN, "the known wait"),
        ([ONE] * 3, LAUNCH, KNOWN, "3 reads"),
        ([ONE] * 3 + [(0,) * 8], LAUNCH, KNOWN, "move"),
        ([(0, 0, 0, 0, 0, 0, 2, 0)] * 4, LAUNCH, KNOWN, "no group"),
        ([ONE] * 4, LAUNCH, (5,) * 8, "no negative length"),
        ([(1, 0, 0, 0, 0, 0, 0, 0)] * 4, LAUNCH, KNOWN, "no negative length"),
        ([ONE] * 4, Launch(0x1000, 1 << 20, 0x2000, 8, 65536, 512, 65536, True), KNOWN, "peers stay"),
        ([ONE] * 4, Launch(0x1000, 1 << 20, 0x2000, 100, 16384, 512, 16384, True), KNOWN, "not known"),
    ],
)
def test_only_the_known_wait_is_known(reads: Any, launch: Launch, lengths: Any, says: str) -> None:
    wait, why = find_wait(reads, launch, lengths)
    assert says in why
    assert (wait is not None) == (says == "the known wait")
    if wait is not None:
        assert (wait.group, wait.address) == (6, 0x1000 + 6 * 3088 + 3080)


@pytest.mark.parametrize(
    ("version", "able"), [("0.20.0", False), ("0.20.2", True), ("0.33.0", True), ("0.33.1", False), ("1", False)]
)
def test_which_launchers_zero(version: str, able: bool) -> None:
    assert zeroed_before_launch(version)[0] is able
    assert main_rule(version)[0] is able, "the main package has the same rule"


@pytest.mark.parametrize(("rescue", "most"), [(False, 22), (True, 60)])
def test_the_threads_seldom_take_the_interpreter(rig: Callable[..., Rig], rescue: bool, most: int) -> None:
    """Each wake of a thread of ours takes Python from the model's: two hundred a second cost a server some 4 % of its steps."""
    one = rig(rescue=rescue)
    step = one.step((16000, 16001, 12000, 12001, 9000, 9001, 8000, 8001))
    until(lambda: step.complete_ns != 0)
    until(lambda: "side stream" in one.said.features)
    wakes: list[float] = []
    for event in (one.agent._stop, one.agent._wake):
        inner = event.wait

        def wait(timeout: float | None = None, inner: Callable[[float | None], bool] = inner) -> bool:
            wakes.append(time.monotonic())
            return inner(timeout)

        event.wait = wait
    time.sleep(2.0)
    in_a_second = len([moment for moment in wakes if moment > wakes[-1] - 1.0])
    assert 1 <= in_a_second <= most


def test_an_event_that_two_threads_find_done_is_spare_once(tmp_path: Path) -> None:
    """Twice spare, it would be recorded for two steps and tell the end of one as that of the other."""
    ring = Ring(tmp_path, slots=16, rank=0, device=0, vllm="none", agent="test")
    recorder = Recorder(Said(), lambda _: ring, lambda: None)
    both, event = threading.Barrier(2, timeout=10.0), object()
    step = ring.begin(1)
    recorder._open.append((step, event))

    def asked(_: Any) -> int:
        both.wait()
        return 0

    threads = [threading.Thread(target=recorder.poll, args=(asked,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert recorder._spare == [event]
    assert not recorder._open
    assert step.complete_ns != 0


def test_a_step_is_seen_to_end_when_a_later_one_begins(tmp_path: Path) -> None:
    """Not only ten times a second: the model's own thread asks."""
    ring = Ring(tmp_path, slots=16, rank=0, device=0, vllm="none", agent="test")
    recorder = Recorder(Said(), lambda _: ring, lambda: None)
    recorder._torch = SimpleNamespace(cuda=SimpleNamespace(is_current_stream_capturing=lambda: True))
    first = ring.begin(1)
    recorder._open.append((first, SimpleNamespace(query=lambda: True)))
    later = ring.begin(1)
    recorder._open.append((later, SimpleNamespace(query=lambda: False)))
    recorder.begin(SimpleNamespace(device=SimpleNamespace(index=0)), 1)
    assert first.complete_ns != 0
    assert later.complete_ns == 0
    assert [step for step, _ in recorder._open] == [later]


@pytest.mark.parametrize("held_by", ["a copy that is behind a kernel", "a capture"])
def test_a_request_that_cannot_be_answered_at_once_is_tried_again_in_its_time(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, held_by: str
) -> None:
    """The request wakes the thread once; where it finds no way, it does not sleep over the time that the asker waits."""
    one = rig(rescue=False)
    step = one.step((1,) * 8)
    until(lambda: step.complete_ns != 0 and "side stream" in one.said.features)
    looks: list[int] = []
    real: Callable[[SideStream, Launch], tuple[int, ...]] = SideStream.counters

    def counters(stream: SideStream, launch: Launch) -> tuple[int, ...]:
        looks.append(1)
        if held_by.startswith("a copy") and len(looks) < 4:
            raise SideStreamBusyError("a copy on the side stream did not end within 0.5 s")
        return real(stream, launch)

    monkeypatch.setattr(SideStream, "counters", counters)
    monkeypatch.setattr("dsv4_repro_agent.control.IDLE_S", 30.0)
    one.ask("first")  # from here on the thread sleeps for as long as it is let
    looks.clear()
    if held_by == "a capture":
        one.recorder.capturing = True
        threading.Timer(0.5, setattr, (one.recorder, "capturing", False)).start()
    answer = one.ask("second")
    assert "error" not in answer
    assert len(answer["launches"]) == 1


def test_an_asker_outlasts_the_answer_that_there_is_none(rig: Callable[..., Rig]) -> None:
    waits = inspect.signature(ask_row_states).parameters["timeout"].default
    assert waits - 0.2 >= control.ANSWER_S + 2 * control.FILES_S, "seen by one look of the files, refused by another"
    one = rig(rescue=True)
    one.agent.library = "libabsent-cuda.so"
    one.step()
    until(lambda: "side stream" in one.said.features)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="gave no answer"):
            ask_row_states(one.folder, one.agent.name)


def test_a_step_that_has_ended_is_not_told_as_under_way(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_repro_agent.control.EVENTS_S", 60.0)
    one = rig(rescue=False)
    until_ready = time.monotonic()
    one.step((1,) * 8)
    until(lambda: "side stream" in one.said.features)
    time.sleep(max(0.3 - (time.monotonic() - until_ready), 0.0))
    assert one.ask()["stalled_s"] == 0.0


def test_where_nothing_can_be_released_an_overdue_step_wakes_no_thread(rig: Callable[..., Rig]) -> None:
    """A prefill of seconds on a build whose launcher is not known: nobody looks two hundred times a second for nothing."""
    one = rig(rescue=True, vllm="0.20.0")
    one.step()
    until(lambda: "side stream" in one.said.features and one.recorder.stalled_for() > 0.2)
    wakes: list[float] = []
    inner = one.agent._wake.wait

    def wait(timeout: float | None = None) -> bool:
        wakes.append(time.monotonic())
        return bool(inner(timeout))

    one.agent._wake.wait = wait
    time.sleep(1.5)
    assert len(wakes) <= 5
    assert one.agent.releases == 0


def test_a_batch_after_the_launches_is_not_the_steps(tmp_path: Path) -> None:
    """A dummy step of data parallelism pads a batch of its own while the last real step is still the newest one."""
    ring = Ring(tmp_path, slots=16, rank=0, device=0, vllm="none", agent="test")
    recorder = Recorder(Said(), lambda _: ring, lambda: None)
    recorder._events = False
    step = recorder.begin(SimpleNamespace(device=SimpleNamespace(index=0)), 1)
    assert step is not None
    mode = SimpleNamespace(name="FULL")
    recorder.batch(requests=3, tokens=6, mode=mode, padded_requests=4, padded_tokens=8)
    recorder.launched(step)
    recorder.batch(requests=1, tokens=1, mode=SimpleNamespace(name="NONE"), padded_requests=1, padded_tokens=1)
    recorder.returned(step)
    (read,) = read_ring(ring.path).steps
    assert (read.requests, read.tokens, read.padded_requests, read.padded_tokens, read.graph_mode) == (3, 6, 4, 8, "full")


def test_two_pollers_beside_the_model_lose_no_end(tmp_path: Path) -> None:
    """The model's thread and both of ours ask at once, events are used again: each step is seen to end, none before its time."""
    ring = Ring(tmp_path, slots=4096, rank=0, device=0, vllm="none", agent="test")
    recorder = Recorder(Said(), lambda _: ring, lambda: None)
    made: list[Any] = []

    class Event:
        def __init__(self) -> None:
            self.of = 0
            made.append(self)

        def record(self) -> None:
            self.of = ring._count

        def query(self) -> bool:
            return self.of <= ended[0]

    ended = [0]
    recorder._torch = SimpleNamespace(cuda=SimpleNamespace(is_current_stream_capturing=lambda: False, Event=Event))
    over, wrong = threading.Event(), []

    def poll() -> None:
        while not over.is_set():
            recorder.poll(lambda event: 0 if event.query() else 600)

    threads = [threading.Thread(target=poll) for _ in range(2)]
    for thread in threads:
        thread.start()
    steps = []
    try:
        for number in range(1, 1500):
            step = recorder.begin(SimpleNamespace(device=SimpleNamespace(index=0)), 1)
            assert step is not None
            recorder.launched(step)
            steps.append(step)
            wrong += [one.number for one in steps[-4:] if one.complete_ns and one.number > ended[0]]
            ended[0] = max(number - 2, 0)
    finally:
        over.set()
        for thread in threads:
            thread.join(10.0)
    ended[0] = len(steps)
    recorder.poll(lambda event: 0)
    assert not wrong
    assert all(step.complete_ns for step in steps)
    assert len(made) < 20
    assert len({id(event) for event in recorder._spare}) == len(recorder._spare)
    assert all(step.finished for step in read_ring(ring.path).steps)


def test_a_rescue_that_sees_no_steps_is_not_called_armed(rig: Callable[..., Rig]) -> None:
    one = rig(rescue=True)
    one.step((1,) * 8)
    path = one.folder / f"status-{one.agent.name}.json"

    def armed() -> dict[str, bool]:
        found: dict[str, bool] = json.loads(path.read_text())["armed"] if path.exists() else {}
        return found

    until(lambda: armed() == {"recorder": True, "guard": False, "rescue": True})
    one.recorder.step_aside("launch", RuntimeError("something new"))
    until(lambda: armed() == {"recorder": False, "guard": False, "rescue": False})
