"""The readers of a server's windows: log, processes, rings, cards; with files and a faked NVML, no server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import EvidenceError
from dsv4_repro.forensics.collect.nvml import Nvml
from dsv4_repro.repro.serving.card_signals import BusyLevel, CardReader
from dsv4_repro.repro.serving.process_stat import read_stat, start_ticks, world_size
from dsv4_repro.repro.serving.rank_signals import RingReader
from dsv4_repro.repro.serving.records import Rank, ServerTarget
from dsv4_repro.repro.serving.signals import LogReader, ProcessReader

AGENT = Path(__file__).resolve().parents[3] / "repro" / "agent" / "src"
STATS = (
    "(APIServer pid=1) INFO 06-20 12:00:10 [loggers.py:259] Engine 000: Avg prompt throughput: {prompt} tokens/s, Avg generation "
    "throughput: {generation} tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%"
)


# -- log ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tuple[LogReader, Any, FakeClock]]:
    path = tmp_path / "log"
    path.write_text("INFO old line\n", encoding="utf-8")
    clock = FakeClock(1000.0, wall=time.time())
    reader = LogReader(path, clock=clock)
    reader.look()

    def say(*lines: str) -> None:
        with path.open("a", encoding="utf-8") as stream:
            stream.writelines(line + "\n" for line in lines)

    yield reader, say, clock
    reader.close()


def test_a_stats_line_and_its_age(log: tuple[LogReader, Any, FakeClock]) -> None:
    reader, say, clock = log
    assert reader.look().stats_age_s is None
    say(STATS.format(prompt="0.0", generation="120.5", running=3))
    sample = reader.look()
    assert (sample.stats_age_s, sample.stats_running, sample.stats_tokens_per_s, sample.phase) == (0.0, 3, 120.5, "serving")
    clock.advance(12)
    assert reader.look().stats_age_s == 12.0
    assert reader.look().last_line_age_s == 12.0


def test_phases_of_a_start(log: tuple[LogReader, Any, FakeClock]) -> None:
    reader, say, clock = log
    for line, phase, work in (
        ("INFO [api_server.py] vLLM API server version 0.23.0", "starting", ""),
        ("INFO [gpu_model_runner.py] Starting to load model m...", "loading weights", "load-start"),
        ("Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03,  1.0s/it]", "loading weights", "load-progress"),
        ("INFO [default_loader.py] Loading weights took 3.10 seconds", "weights are loaded", ""),
        ("INFO [backends.py] Dynamo bytecode transform time: 3.5 s", "compiling", "compile-start"),
        ("INFO [monitor.py] torch.compile takes 12.3 s in total", "compiled", ""),
        ("Capturing CUDA graphs (decode, FULL):  50%|#####     | 3/6 [00:01<00:01]", "capturing CUDA graphs", "capture-progress"),
        ("INFO [gpu_model_runner.py] Graph capturing finished in 5 secs, took 0.3 GiB", "CUDA graphs are captured", ""),
        ("INFO:     Application startup complete.", "serving", ""),
    ):
        say(line)
        clock.advance(1)
        sample = reader.look()
        assert (sample.phase, sample.work) == (phase, work), line
    assert sample.events["serving"] == 1


def test_host_work_is_over_when_the_server_moves(log: tuple[LogReader, Any, FakeClock]) -> None:
    reader, say, clock = log
    say("WARNING [jit_monitor.py] Triton kernel JIT compilation during inference: _k (12.0 ms)")
    say("INFO [shm_broadcast.py:123] No available shared memory broadcast block found in 60 seconds.")
    sample = reader.look()
    assert (sample.work, sample.events["jit"], sample.events["shm-wait"]) == ("jit", 1, 1)
    clock.advance(5)
    reader.moved(clock.monotonic())
    sample = reader.look()
    assert (sample.work, sample.work_age_s) == ("", None)
    assert "shm-wait" not in sample.events


def test_words_of_an_end_last_until_another_server_begins(log: tuple[LogReader, Any, FakeClock]) -> None:
    reader, say, clock = log
    say("ERROR EngineCore encountered a fatal error.", "ERROR Worker proc VllmWorker-0 died unexpectedly, shutting down executor.")
    reader.look()
    reader.moved(clock.monotonic() + 10)
    assert {"fatal", "worker-died"} <= set(reader.look().events)
    say("INFO vLLM API server version 0.23.0")
    assert not {"fatal", "worker-died"} & set(reader.look().events)


def test_what_was_there_before_has_the_age_of_the_file_and_no_stats_age(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(STATS.format(prompt="0.0", generation="0.0", running=8) + "\n", encoding="utf-8")
    os.utime(path, (time.time() - 3600, time.time() - 3600))
    sample = LogReader(path).look()
    assert sample.stats_age_s is None
    assert sample.stats_running == 8
    assert sample.last_line_age_s is not None
    assert 3590 < sample.last_line_age_s < 3700


def test_a_log_that_is_not_there_says_so(tmp_path: Path) -> None:
    assert "No such file" in LogReader(tmp_path / "none").look().error


def test_the_profiler_is_host_work(log: tuple[LogReader, Any, FakeClock]) -> None:
    reader, say, _ = log
    say("INFO [api_router.py:23] Starting profiler...")
    assert reader.look().work == "profiler"
    say("INFO [wrapper.py:66] Profiler stopped successfully.")
    assert reader.look().work == ""


# -- processes ----------------------------------------------------------------------------------------------------------------


def test_a_process_its_end_and_its_status() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        reader = ProcessReader(ServerTarget(None, api_pid=child.pid), exit_status=child.poll)
        (sample,) = reader.look()
        assert (sample.role, sample.exit_status) == ("api", None)
        assert sample.state is not None
        assert sample.cpu_s is not None
        assert child.stdin is not None
        child.stdin.close()
        child.wait(10)
        (sample,) = reader.look()
        assert (sample.state, sample.exit_status) == (None, 0)


def test_a_pid_given_to_another_process_is_gone() -> None:
    own = start_ticks(os.getpid())
    assert own is not None
    rank = Rank(os.getpid(), 0, start_ticks=own - 1)
    (sample,) = ProcessReader(ServerTarget(None, ranks=(rank,))).look()
    assert (sample.role, sample.state) == ("worker", None)


def test_a_compiler_below_a_worker_is_found_and_one_elsewhere_is_not(tmp_path: Path) -> None:
    def entry(pid: int, name: str, parent: int) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir()
        rest = " ".join(["0"] * 9 + ["150", "50"] + ["0"] * 6 + ["777"])
        (folder / "stat").write_text(f"{pid} ({name}) R {parent} {rest}\n", encoding="ascii")

    for item in (
        (10, "vllm", 1),
        (20, "VLLM::Worker", 10),
        (30, "sh) R 1 (", 20),
        (31, "ptxas", 30),
        (40, "bash", 1),
        (41, "cicc", 40),
    ):
        entry(*item)
    target = ServerTarget(None, api_pid=10, tree={10: "api", 20: "worker"})
    reader = ProcessReader(target, proc=tmp_path)
    assert sorted(sample.pid for sample in reader.look()) == [10, 20]
    found = [sample for sample in reader.look(compilers=True) if sample.role == "compiler"]
    assert [(sample.pid, sample.state, sample.cpu_s) for sample in found] == [(31, "R", 200 / os.sysconf("SC_CLK_TCK"))]
    stat = read_stat(30, tmp_path)
    assert stat is not None
    assert (stat.name, stat.parent, stat.start_ticks) == ("sh) R 1 (", 20, 777)


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["vllm", "serve", "m"], 1), (["vllm", "serve", "--tensor-parallel-size", "4"], 4), (["x", "-tp=2", "-pp", "3"], 6),
        (["x", "-tp", "2", "--data-parallel-size", "8"], 16), (["x", "-dp=2"], 2),
        (["x", "--tensor_parallel_size=8"], 8), (["x", "-tp"], 1), (["x", "-tp", "x"], 1), (["x", "-tp", "99999999999"], 1),
    ],
)  # fmt: skip
def test_the_ranks_that_a_command_line_asks_for(tmp_path: Path, words: list[str], size: int) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    assert world_size(7, tmp_path) == size
    assert world_size(8, tmp_path) == 0


# -- rings --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(AGENT))
    from dsv4_repro_agent import ring

    return ring


def steps(ring: Any, count: int, took: float = 0.01, mode: int = 2) -> None:
    """Steps one behind the other, the last one ending now."""
    cursor = time.monotonic_ns() - int(count * took * 1e9)
    for _ in range(count):
        step = ring.begin(1)
        step.graph_mode = mode
        step.launch_ns = step.record_ns = cursor
        cursor = step.complete_ns = cursor + int(took * 1e9)
        ring.write(step)


def test_a_ring_that_goes_on_and_one_that_stands(writer: Any, tmp_path: Path) -> None:
    ring = writer.Ring(tmp_path, slots=64, rank=2, device=0, vllm="0.23.0", agent="1")
    steps(ring, 20)
    ring.beat()
    reader = RingReader(tmp_path, (Rank(os.getpid(), 5, 0, gpu_index=3),))
    (one,) = reader.look()
    assert (one.rank, one.device, one.begun, one.unfinished, one.error) == (5, 3, 20, (), "")
    assert one.heard_age_s is not None
    assert one.heard_age_s < 1.0
    step = ring.begin(1)
    step.graph_mode, step.requests, step.padded_requests, step.tokens = 2, 3, 4, 6
    step.launch_ns = step.record_ns = time.monotonic_ns()
    ring.write(step)
    ring.begin(1)
    time.sleep(0.05)
    (one,) = reader.look()
    assert (one.begun, one.unfinished, one.requests, one.padded_requests, one.graph_mode) == (22, (21,), 3, 4, "full")
    assert one.unfinished_age_s is not None
    assert 0.05 <= one.unfinished_age_s < 5
    assert one.launching_age_s is not None
    assert one.healthy_s == pytest.approx(0.01)


def test_many_open_steps_are_all_seen(writer: Any, tmp_path: Path) -> None:
    """A deep pipeline: the oldest of them is the one that counts."""
    ring = writer.Ring(tmp_path, slots=256, rank=0, device=0, vllm="x", agent="1")
    steps(ring, 30)
    for _ in range(40):
        step = ring.begin(1)
        step.launch_ns = step.record_ns = time.monotonic_ns()
        ring.write(step)
    (one,) = RingReader(tmp_path).look()
    assert one.unfinished == tuple(range(31, 71))
    assert one.last_end_age_s is not None


def test_a_released_hang_teaches_nothing(writer: Any, tmp_path: Path) -> None:
    ring = writer.Ring(tmp_path, slots=64, rank=0, device=0, vllm="x", agent="1")
    reader = RingReader(tmp_path)
    steps(ring, 20)
    reader.look()
    hung = ring.begin(1)
    hung.graph_mode, hung.launch_ns = 2, time.monotonic_ns()
    hung.complete_ns = hung.launch_ns + 300 * 10**9
    ring.write(hung)
    reader.look()
    step = ring.begin(1)
    step.graph_mode, step.launch_ns, step.record_ns = 2, time.monotonic_ns(), time.monotonic_ns()
    ring.write(step)
    (one,) = reader.look()
    assert one.healthy_s == pytest.approx(0.01)


def test_a_step_took_until_its_output_and_not_until_somebody_asked_for_its_event(writer: Any, tmp_path: Path) -> None:
    """Where no step follows, the event is asked for within a tenth of a second: that is no part of a healthy step."""
    ring = writer.Ring(tmp_path, slots=64, rank=0, device=0, vllm="x", agent="1")
    reader = RingReader(tmp_path)
    cursor = time.monotonic_ns() - 10 * 10**9
    for _ in range(20):
        step = ring.begin(1)
        step.graph_mode, step.launch_ns, step.record_ns = 2, cursor, cursor
        step.output_ns, step.complete_ns = cursor + 10**7, cursor + 10**8
        ring.write(step)
        cursor += 3 * 10**8
        reader.look()
    step = ring.begin(1)
    step.graph_mode, step.launch_ns, step.record_ns = 2, cursor, cursor
    ring.write(step)
    (one,) = reader.look()
    assert one.healthy_s == pytest.approx(0.01)


def test_workers_that_are_named_while_the_folder_is_listed_are_looked_for_at_once(writer: Any, tmp_path: Path) -> None:
    writer.Ring(tmp_path, slots=64, rank=0, device=0, vllm="x", agent="1")
    clock = FakeClock()

    class Folder(type(tmp_path)):  # type: ignore[misc]
        def iterdir(self) -> Any:
            names = list(super().iterdir())
            reader.retarget((Rank(os.getpid(), 4, 0),))
            return iter(names)

    reader = RingReader(Folder(tmp_path), (Rank(1, 0, 0),), clock=clock)
    with pytest.raises(EvidenceError, match="none of a process that is alive here"):
        reader.look()
    clock.advance(0.25)
    assert [one.pid for one in reader.look()] == [os.getpid()]


def test_a_neighbours_ring_in_the_folder_of_all_servers_of_a_user_is_not_the_servers(writer: Any, tmp_path: Path) -> None:
    """A server that starts has no worker yet; the ring of another one that serves, or hangs, says nothing of it."""
    writer.Ring(tmp_path, slots=64, rank=0, device=0, vllm="x", agent="1")
    reader = RingReader(tmp_path, pids={1, 2})
    with pytest.raises(EvidenceError, match="none of a process"):
        reader.look()
    reader.retarget((), {1, os.getpid()})  # it computes in its engine
    assert [one.pid for one in reader.look()] == [os.getpid()]
    reader.retarget((Rank(1, 0, 0),), {1, os.getpid()})
    with pytest.raises(EvidenceError, match="none of a process"):
        reader.look()
    reader.retarget(())  # a URL alone: no process of it is seen
    assert [one.pid for one in reader.look()] == [os.getpid()]


def test_a_step_whose_end_nobody_can_see_is_not_unfinished(writer: Any, tmp_path: Path) -> None:
    """No event was recorded and no thread waits for its output: it may have ended long ago."""
    ring = writer.Ring(tmp_path, slots=64, rank=0, device=0, vllm="x", agent="1")
    step = ring.begin(1)
    step.launch_ns = 5
    ring.write(step)
    (one,) = RingReader(tmp_path).look()
    assert (one.unfinished, one.unfinished_age_s) == ((), None)


def test_a_host_that_launches_nothing_is_told_apart(writer: Any, tmp_path: Path) -> None:
    ring = writer.Ring(tmp_path, slots=64, rank=0, device=0, vllm="x", agent="1")
    steps(ring, 3)
    ring.begin(1)
    (one,) = RingReader(tmp_path).look()
    assert one.unfinished == ()
    assert one.launching_age_s is not None


def test_rings_of_the_dead_are_left_out(writer: Any, tmp_path: Path) -> None:
    ring = writer.Ring(tmp_path, slots=64, rank=0, device=0, vllm="x", agent="1")
    steps(ring, 3)
    ring.path.rename(tmp_path / f"ring-{os.getpid()}-1.bin")
    with pytest.raises(EvidenceError, match="none of a process that is alive here"):
        RingReader(tmp_path).look()


def test_a_switched_off_recorder_and_a_broken_ring_say_so(writer: Any, tmp_path: Path) -> None:
    ring = writer.Ring(tmp_path, slots=64, rank=0, device=0, vllm="x", agent="1")
    ring.arm(False)
    (one,) = RingReader(tmp_path).look()
    assert one.error == "its recorder is switched off"
    ring.path.write_bytes(b"nonsense")
    (one,) = RingReader(tmp_path).look()
    assert "bytes, a ring file has at least" in one.error


@pytest.mark.parametrize(
    "name", ["ring-1.bin", "ring-x-y.bin", "ring-1-2-3.bin", "ring-99999999999999999999-1.bin", "status-1-2.json"]
)
def test_names_that_are_no_rings(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(EvidenceError, match="holds no ring yet"):
        RingReader(tmp_path).look()
    with pytest.raises(EvidenceError, match="cannot be read"):
        RingReader(tmp_path / "none").look()


# -- cards --------------------------------------------------------------------------------------------------------------------


class Pynvml:
    """As much of pynvml as is used, for two cards."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_ERROR_TIMEOUT, nvmlEventTypeXidCriticalError = 1, 2, 10, 8  # noqa: N815

    class NVMLError(Exception):
        value = 10

    def __init__(self) -> None:
        self.power = 400_000
        self.rates = SimpleNamespace(gpu=95, memory=40)
        self.events: list[Any] = []
        self.holders = [SimpleNamespace(pid=100, usedGpuMemory=1), SimpleNamespace(pid=200, usedGpuMemory=None)]

    def __getattr__(self, name: str) -> Any:
        simple: dict[str, Any] = {
            "nvmlInit": None, "nvmlDeviceGetCount": 2, "nvmlDeviceGetUtilizationRates": self.rates, "nvmlDeviceGetClockInfo": 1900,
            "nvmlDeviceGetPowerUsage": self.power, "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5, total=9),
            "nvmlDeviceGetComputeRunningProcesses": self.holders, "nvmlEventSetCreate": "set", "nvmlDeviceRegisterEvents": None,
            "nvmlEventSetFree": None, "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=0),
            "nvmlDeviceGetName": "card",
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId="x"), "nvmlSystemGetDriverVersion": "1", "nvmlSystemGetNVMLVersion": "1",
            "nvmlDeviceGetCudaComputeCapability": (9, 0), "nvmlDeviceGetMigMode": (0, 0),
        }  # fmt: skip
        if name in simple:
            return lambda *_: simple[name]
        raise AttributeError(name)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid[-1])

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlEventSetWait_v2(self, *_: Any) -> Any:
        if not self.events:
            raise self.NVMLError("timeout")
        return self.events.pop()


def test_cards_busy_level_others_and_xids() -> None:
    module, clock = Pynvml(), FakeClock(50.0)
    reader = CardReader((Rank(100, 0, 1, gpu_uuid="GPU-1"),), lambda: {100}, nvml=Nvml(module), clock=clock)
    assert not reader.guessed
    (sample,) = reader.look()
    assert (sample.index, sample.uuid, sample.utilisation, sample.power_w, sample.others, sample.xids) == (
        1,
        "GPU-1",
        95,
        400.0,
        1,
        (),
    )
    assert sample.busy_power_w is None
    assert any(entry.what == "GPM" for entry in sample.unread)
    for _ in range(5):
        clock.advance(1)
        reader.learn(True)
        (sample,) = reader.look()
    assert sample.busy_power_w == 400.0
    module.power = 123_000
    for _ in range(5):
        clock.advance(1)
        reader.learn(False)
        (sample,) = reader.look()
    assert (sample.power_w, sample.busy_power_w) == (123.0, 400.0)
    module.events = [SimpleNamespace(eventType=8, eventData=79, device=1), SimpleNamespace(eventType=1, eventData=5, device=1)]
    (sample,) = reader.look()
    assert sample.xids == (79,)
    reader.close()


def test_an_xid_that_came_just_before_other_cards_are_looked_at_is_not_lost() -> None:
    """The server is looked up anew when it becomes suspect, which a fault makes it."""
    module, clock = Pynvml(), FakeClock(50.0)
    made: list[str] = []

    def anew() -> str:
        made.append("set")
        return f"set {len(made)}"

    module.nvmlEventSetCreate = anew  # type: ignore[attr-defined]
    module.nvmlEventSetFree = lambda _: module.events.clear()  # type: ignore[attr-defined]
    reader = CardReader((Rank(100, 0, 1, gpu_uuid="GPU-1"),), lambda: {100}, nvml=Nvml(module), clock=clock)
    reader.look()
    module.events = [SimpleNamespace(eventType=8, eventData=79, device=1)]
    reader.retarget((Rank(100, 0, 1, gpu_uuid="GPU-1"), Rank(101, 1, 1, gpu_uuid="GPU-0")))
    assert [(one.index, one.xids) for one in reader.look()] == [(0, ()), (1, (79,))]
    assert len(made) == 2
    reader.close()


def test_cards_that_are_guessed_and_pids_of_another_namespace() -> None:
    reader = CardReader((), lambda: {7}, nvml=Nvml(Pynvml()), clock=FakeClock())
    assert reader.guessed
    assert [(sample.index, sample.others) for sample in reader.look()] == [(0, None), (1, None)]


def test_the_busy_level_is_high_and_not_the_highest() -> None:
    level = BusyLevel()
    for number in range(100):
        level.learn(100.0 + number)
    assert level.watts == 189.0
