"""Capture of a hung server: a stand-in server and stand-in tools; what recovers, dies, hangs, or has no room left on the disk."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import lzma
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from dsv4_repro.errors import NoDriverError, RunStoreError
from dsv4_repro.forensics.collect.nvml import Nvml
from dsv4_repro.forensics.collect.proc import process_state
from dsv4_repro.forensics.collect.process_table import start_ticks
from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.repro.atomic import disk_error
from dsv4_repro.repro.gpu_capture import DebuggerProbe, end_left_debuggers
from dsv4_repro.repro.ground import CaptureOutcome
from dsv4_repro.repro.runstore import RunStore
from dsv4_repro.repro.serving import capture_log
from dsv4_repro.repro.serving.device_looks import ProcessDump, dump_settings
from dsv4_repro.repro.serving.ranks import find_server
from dsv4_repro.repro.serving.records import Assessment, LogSample, Rank, ServerTarget, Snapshot
from dsv4_repro.repro.serving.server_capture import capture_server
from dsv4_repro.repro.serving.server_verdict import diagnose_server

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.run import StandIn

Start = Callable[..., AbstractContextManager["StandIn"]]
TRANSCRIPT = """dsv4-repro: stage attaching 0.000
dsv4-repro: stage reading 0.412
(cuda-gdb) info cuda kernels
  Kernel Parent Dev Grid Status SMs Mask GridDim BlockDim Invocation
*      0      -   0    5 Active 0x100 (16,1,1) (1024,1,1) persistent_topk_kernel<512, 4u>()
dsv4-repro: stage detaching 0.600
dsv4-repro: stage done 0.660
"""


class Tools:
    """Stand-ins of py-spy and cuda-gdb. ``gdb_after``, ``spy_before``: shell lines; ``$pid`` is the target's."""

    def __init__(self, folder: Path, *, gdb_after: str = "", spy_before: str = "", transcript: str = TRANSCRIPT) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.calls = folder / "calls"
        said = folder / "said"
        said.write_text(transcript)
        self.py_spy = folder / "py-spy"
        self._script(
            self.py_spy,
            f'for pid; do :; done\necho "py-spy $*" >> {self.calls}\n{spy_before}\n'
            'echo "Process $pid: python"\necho "Thread $pid (idle): \\"MainThread\\""\necho "    wait (threading.py:327)"\n',
        )
        self.gdb = folder / "cuda-gdb"
        self._script(
            self.gdb,
            'case "$*" in *"show version"*) echo "cuda-gdb 13.0"; echo "dsv4-python 3.12.1"; exit 0;; esac\n'
            'pid=""; while [ $# -gt 0 ]; do [ "$1" = "-p" ] && pid="$2"; shift; done\n'
            f'echo "cuda-gdb $pid" >> {self.calls}\ncat {said}\n{gdb_after}\n',
        )

    @staticmethod
    def _script(path: Path, text: str) -> None:
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def attached(self) -> list[int]:
        text = self.calls.read_text() if self.calls.exists() else ""
        return [int(line.split()[1]) for line in text.splitlines() if line.startswith("cuda-gdb")]

    def probe(self, folder: Path) -> DebuggerProbe:
        probe = DebuggerProbe(lambda: self.gdb)
        folder.mkdir(parents=True, exist_ok=True)
        probe.start(folder)
        assert probe.wait(10.0) is not None
        return probe


def no_nvml() -> Nvml:
    raise NoDriverError("NVML does not start: not found")


class Told:
    """The timeline's lines, and what happens when one of a kind comes."""

    def __init__(self, when: Callable[[str, dict[str, Any]], None] = lambda _kind, _fields: None) -> None:
        self.lines: list[tuple[float, str, dict[str, Any]]] = []
        self._when = when
        self._began = time.monotonic()

    def __call__(self, kind: str, **fields: Any) -> None:
        self.lines.append((time.monotonic() - self._began, kind, fields))
        self._when(kind, fields)

    def captures(self) -> list[str]:
        return [fields["collector"] for _, kind, fields in self.lines if kind == "capture"]


def capture(target: ServerTarget, folder: Path, timeline: Told, tools: Tools, **more: Any) -> list[CaptureOutcome]:
    settings: dict[str, Any] = {
        "snapshot": Snapshot(at=0.0, log=LogSample(0.0, events=MappingProxyType({"shm-wait": 1}))),
        "attach": True, "allow_dump": False, "nvml": no_nvml, "py_spy": tools.py_spy,
        "debugger": tools.probe(folder.parent / "probe"),
    }  # fmt: skip
    return capture_server(target, folder, timeline, **{**settings, **more})


def of(outcomes: list[CaptureOutcome], collector: str) -> list[CaptureOutcome]:
    return [outcome for outcome in outcomes if outcome.collector == collector]


def whys(outcomes: list[CaptureOutcome]) -> str:
    return " | ".join(f"{item.what}: {item.why}" for outcome in outcomes for item in outcome.unread)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two looks 0.2 s apart instead of 3 s."""
    monkeypatch.setattr("dsv4_repro.repro.serving.server_capture._APART_S", 0.2)


@pytest.fixture
def wedged(stand_in: Start, standin: ModuleType) -> Callable[..., AbstractContextManager[tuple[StandIn, ServerTarget]]]:
    """A stand-in that has wedged at 3 live requests, and what the search finds of it."""
    run = importlib.import_module("standin.run")

    @contextlib.contextmanager
    def begin(**switches: Any) -> Iterator[tuple[StandIn, ServerTarget]]:
        with stand_in(**{"wedge": "3", "agent": True, "tp": 2, **switches}) as server:
            clients = server.drain()
            try:
                server.wait_state(device="wedged", seconds=20.0)
                time.sleep(1.1)
                yield server, find_server(server.pid, nvml=no_nvml)
            finally:
                run.stop_clients(clients)

    return begin


Wedged = Callable[..., AbstractContextManager[tuple["StandIn", ServerTarget]]]


def test_every_rank_is_read_in_the_order_of_disturbance(wedged: Wedged, tmp_path: Path) -> None:
    tools, told = Tools(tmp_path / "tools"), Told()
    with wedged() as (server, target):
        outcomes = capture(target, tmp_path / "ev", told, tools)
        assert server.state()["device"] == "wedged"
    order = list(dict.fromkeys(told.captures()))
    assert order[:5] == ["recorder_rings", "metrics", "engine_log", "proc", "nvml"]
    assert order[5:] == ["kernel_log", "agent_row_states", "host_stacks", "nccl_ras", "cuda_gdb"]
    assert tools.attached() == [rank.pid for rank in target.ranks]
    first = next(fields for _, kind, fields in told.lines if kind == "first sample")
    assert first["seconds"] < 2.0
    assert len(of(outcomes, "agent_row_states")) == 2
    assert all(outcome.facts["unchanged"] is True and outcome.facts["launches"] for outcome in of(outcomes, "agent_row_states"))
    # Four processes, twice.
    assert len(of(outcomes, "host_stacks")) == 8
    for outcome in outcomes:
        for artefact in outcome.artefacts:
            assert artefact.path.is_file()
    for rank in target.ranks:
        place = tmp_path / "ev" / f"rank-{rank.rank}"
        names = {path.name for path in place.iterdir() if path.is_file()}
        assert f"cuda_gdb-rank{rank.rank}-pid-{rank.pid}.txt" in names
        assert f"row_states-rank{rank.rank}-pid-{rank.pid}.json" in names
        assert any(name.startswith("ring-") for name in names)
    assert {outcome.disturbance for outcome in of(outcomes, "cuda_gdb") + of(outcomes, "host_stacks")} == {"pauses"}
    assert of(outcomes, "cuda_gdb")[0].state is not None
    assert {outcome.facts["rank"] for outcome in of(outcomes, "cuda_gdb")} == {0, 1}
    # A transcript that names the kernel and shows no block leaves the counters that the agents read.
    found = diagnose_server(
        outcomes, None, Assessment("hung", 1.0, 0.0, ("x",), ("a step does not end",)), tmp_path / "ev", target=target
    )
    assert (found.verdict.class_, found.verdict.cause) == ("gpu-spin-barrier", "peer-left")
    assert found.window.live_requests == 3
    assert found.window.padded_requests == 1
    assert {row["rank"] for row in found.document()["ranks"]} == {0, 1}


def test_a_run_s_store_takes_it_all(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools")
    with wedged(tp=1) as (_, target), RunStore.create("drain", out=tmp_path / "run") as store:
        outcomes = capture(
            target, store.evidence_subfolder("hang-1"), Told(lambda kind, fields: store.emit(kind, **fields)), tools, told=False
        )
        for outcome in outcomes:
            for artefact in outcome.artefacts:
                store.add_evidence(artefact.kind, artefact.path, artefact.origin, collector=outcome.collector)
        assert len(store.evidence) == sum(len(outcome.artefacts) for outcome in outcomes)
    lines = [json.loads(line) for line in (tmp_path / "run" / "timeline.jsonl").read_text().splitlines()]
    # The run loop writes the capture lines; ours, at their own time, are of another kind.
    assert sum(line["kind"] == "read" for line in lines) == len(outcomes)
    assert not [line for line in lines if line["kind"] == "capture"]
    assert whys(of(outcomes, "nccl_ras")).startswith("NCCL RAS: not applicable")


def test_a_server_that_recovers_meanwhile_is_not_attached_to(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools")
    released = threading.Event()
    with wedged() as (server, target):

        def when(kind: str, fields: dict[str, Any]) -> None:
            if kind == "capture" and fields["collector"] == "nccl_ras" and not released.is_set():
                released.set()
                server.release()
                time.sleep(0.3)

        outcomes = capture(target, tmp_path / "ev", Told(when), tools)
    assert tools.attached() == []
    assert len(of(outcomes, "cuda_gdb")) == 2
    assert all("it recovered" in item.why for outcome in of(outcomes, "cuda_gdb") for item in outcome.unread)


def test_one_that_recovers_between_two_attaches(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools")
    with wedged() as (server, target):

        def when(kind: str, fields: dict[str, Any]) -> None:
            if kind == "capture" and fields["collector"] == "cuda_gdb":
                server.release()
                time.sleep(0.3)

        outcomes = capture(target, tmp_path / "ev", Told(when), tools)
    assert tools.attached() == [target.ranks[0].pid]
    assert "it recovered" in whys(of(outcomes, "cuda_gdb")[1:])


def test_a_fault_of_ours_in_one_collector_costs_its_own_evidence_only(
    wedged: Wedged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise AttributeError("a bug")

    monkeypatch.setattr("dsv4_repro.repro.serving.first_sample.read_page", broken)
    monkeypatch.setattr("dsv4_repro.repro.serving.host_looks.ask_row_states", broken)
    tools = Tools(tmp_path / "tools")
    with wedged(tp=1) as (_, target):
        outcomes = capture(target, tmp_path / "ev", Told(), tools)
    assert "AttributeError: a bug" in whys(of(outcomes, "metrics")[:1])
    assert "AttributeError: a bug" in whys(of(outcomes, "agent_row_states"))
    assert of(outcomes, "recorder_rings")[0].artefacts
    assert of(outcomes, "cuda_gdb")[0].state is not None


def test_a_further_signal_holds_the_debugger_back(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools")
    with wedged(tp=1) as (_, target):
        outcomes = capture(target, tmp_path / "ev", Told(), tools, moved=lambda: "the canary was answered")
    assert tools.attached() == []
    assert "the canary was answered" in whys(of(outcomes, "cuda_gdb"))


def test_nothing_is_attached_where_nothing_can_show_that_it_hangs(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools")
    with wedged(agent=False, metrics="gone", tp=1) as (_, target):
        outcomes = capture(target, tmp_path / "ev", Told(), tools)
    assert tools.attached() == []
    assert "nothing that could show whether it still hangs can be read" in whys(of(outcomes, "cuda_gdb"))
    assert "this server has no agent" in whys(of(outcomes, "recorder_rings"))


def test_a_metrics_page_that_hangs_holds_up_nothing(wedged: Wedged, tmp_path: Path) -> None:
    tools, told = Tools(tmp_path / "tools"), Told()
    with wedged(tp=1) as (server, target):
        server.set(metrics="hang")
        outcomes = capture(target, tmp_path / "ev", told, tools)
    first = next((at, fields) for at, kind, fields in told.lines if kind == "first sample")
    assert first[1]["seconds"] < 2.0
    assert first[1]["files"] >= 5
    assert "/metrics" in whys(of(outcomes, "metrics"))
    # The recorder still shows that it hangs.
    assert tools.attached() == [target.ranks[0].pid]


def test_a_dead_rank_is_told_and_the_others_are_read(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools")
    with wedged() as (_, target):
        # An engine that sees a worker die ends the others; here it has not looked yet.
        os.kill(target.engine_pids[0], signal.SIGSTOP)
        os.kill(target.ranks[1].pid, signal.SIGKILL)
        while start_ticks(target.ranks[1].pid) is not None:
            time.sleep(0.01)
        outcomes = capture(target, tmp_path / "ev", Told(), tools)
    assert tools.attached() == [target.ranks[0].pid]
    gone = [outcome for outcome in outcomes if outcome.facts.get("pid") == target.ranks[1].pid]
    assert "the process has ended" in whys(gone)
    assert of(outcomes, "cuda_gdb")[0].state is not None


def test_a_rank_that_dies_under_the_debugger_is_told(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools", gdb_after='kill -9 "$pid"; sleep 0.2')
    with wedged() as (_, target):
        outcomes = capture(target, tmp_path / "ev", Told(), tools)
    (first, *_) = of(outcomes, "cuda_gdb")
    assert first.facts["process_afterwards"] == "gone"
    assert "ended under the debugger" in whys([first])
    assert len(of(outcomes, "cuda_gdb")) == 2


def test_a_budget_that_is_over_leaves_the_first_sample(wedged: Wedged, tmp_path: Path) -> None:
    tools, told = Tools(tmp_path / "tools"), Told()
    with wedged() as (_, target):
        began = time.monotonic()
        outcomes = capture(target, tmp_path / "ev", told, tools, budget_s=0.4)
        took = time.monotonic() - began
    assert took < 4.0
    assert tools.attached() == []
    assert "time is over" in whys(of(outcomes, "cuda_gdb") + of(outcomes, "host_stacks"))
    assert (tmp_path / "ev" / "rank-0").is_dir()
    assert any(path.name.startswith("ring-") for path in (tmp_path / "ev" / "rank-1").iterdir())
    assert next(fields for _, kind, fields in told.lines if kind == "first sample")["files"] > 8


def test_py_spy_that_hangs_is_asked_without_stopping_the_process(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools", spy_before='case "$*" in *--nonblocking*) ;; *) sleep 60;; esac')
    with wedged(tp=1) as (_, target):
        outcomes = capture(target, tmp_path / "ev", Told(), tools, budget_s=24.0)
    looks = of(outcomes, "host_stacks")
    assert looks
    read = [outcome for outcome in looks if outcome.artefacts]
    assert read
    assert all(outcome.facts["nonblocking"] is True and outcome.disturbance == "none" for outcome in read)


def test_a_full_disk_loses_files_and_not_the_capture(wedged: Wedged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(tmp_path / "tools")

    def full(path: Path, data: bytes, **_: Any) -> None:
        raise disk_error(OSError(errno.ENOSPC, "No space left on device"), path, "write")

    def emit(kind: str, **_: Any) -> None:
        raise RunStoreError("cannot append: the disk or the quota is full")

    monkeypatch.setattr(capture_log, "write_atomic", full)
    probe = tools.probe(tmp_path / "probe")
    with wedged() as (_, target):
        outcomes = capture_server(
            target, tmp_path / "ev", emit, snapshot=None, attach=True, allow_dump=False, nvml=no_nvml, py_spy=tools.py_spy,
            debugger=probe, budget_s=20.0,
        )  # fmt: skip
    rings = of(outcomes, "recorder_rings")[0]
    assert rings.artefacts == ()
    assert "the disk or the quota is full" in whys([rings])
    assert {state["step"]["requests"] for state in rings.facts["rings"].values()} == {3}
    assert of(outcomes, "metrics")[0].facts["values"]["running"] == 3.0


def test_a_debugger_that_does_not_come_back_is_left_alone(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools", transcript="dsv4-repro: stage attaching 0.000\n", gdb_after="sleep 30 & wait $!")
    left: list[subprocess.Popen[bytes]] = []
    with wedged(tp=1) as (_, target):
        began = time.monotonic()
        outcomes = capture(target, tmp_path / "ev", Told(), tools, budget_s=5.0, left=left)
        assert time.monotonic() - began < 8.0
        assert len(left) == 1
        assert left[0].poll() is None
    assert "left alone" in whys(of(outcomes, "cuda_gdb"))
    assert end_left_debuggers(left) == []
    assert left[0].poll() is not None


@pytest.mark.parametrize("parallel", [False, True])
def test_workers_are_attached_to_one_after_another_or_at_once(wedged: Wedged, tmp_path: Path, parallel: bool) -> None:
    tools, told = Tools(tmp_path / "tools", gdb_after="sleep 1"), Told()
    with wedged() as (_, target):
        outcomes = capture(target, tmp_path / "ev", told, tools, parallel_attach=parallel)
    times = [at for at, kind, fields in told.lines if kind in ("collecting", "capture") and fields["collector"] == "cuda_gdb"]
    took = max(times) - min(times)
    assert (took < 1.9) is parallel
    assert all(outcome.state is not None for outcome in of(outcomes, "cuda_gdb"))
    assert sorted(tools.attached()) == [rank.pid for rank in target.ranks]


def test_ctrl_c_leaves_no_tool_behind(wedged: Wedged, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    tools = Tools(tmp_path / "tools", spy_before=f"echo $$ >> {pids}; sleep 60")
    with wedged(tp=1) as (_, target):

        def interrupt() -> None:
            while not pids.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            capture(target, tmp_path / "ev", Told(), tools)
    end = time.monotonic() + 5.0
    numbers = [int(line) for line in pids.read_text().split()]
    assert numbers
    while any(process_state(number) not in (None, "Z") for number in numbers):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_dump_after_an_attach_is_not_tried(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools")
    with wedged(tp=1) as (_, target):
        outcomes = capture(target, tmp_path / "ev", Told(), tools, allow_dump=True)
        again = capture(target, tmp_path / "again", Told(), tools, allow_dump=True, attach=False)
    (dump,) = of(outcomes, "core_dump")
    assert dump.disturbance == "may end the process"
    assert "a debugger was attached before" in whys([dump])
    assert "CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1" in whys(of(again, "core_dump"))
    assert of(again, "cuda_gdb") == []


def test_ptrace_that_is_refused_leaves_the_dump_possible(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools", transcript="ptrace: Operation not permitted.\n", gdb_after="exit 1")
    with wedged(tp=1) as (_, target):
        outcomes = capture(target, tmp_path / "ev", Told(), tools, allow_dump=True)
    assert "ptrace is refused" in whys(of(outcomes, "cuda_gdb"))
    assert "was not started with" in whys(of(outcomes, "core_dump"))


def test_without_ptrace_no_stacks_are_taken(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools")
    with wedged(tp=1) as (_, target):
        outcomes = capture(target, tmp_path / "ev", Told(), tools, attach=False, stacks=False)
    assert not tools.calls.exists()
    assert {outcome.disturbance for outcome in outcomes if outcome.artefacts} == {"none"}
    assert of(outcomes, "agent_row_states")[0].facts["unchanged"] is True


def test_the_dump_of_somebody_else_s_process_is_named_by_its_environment(tmp_path: Path) -> None:
    environment = {
        "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1", "CUDA_COREDUMP_PIPE": f"{tmp_path}/p_%h_%p",
        "CUDA_COREDUMP_FILE": f"{tmp_path}/c_%p",
    }  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], env=environment) as child:
        try:
            time.sleep(0.2)
            found = dump_settings(child.pid)
            assert isinstance(found, ProcessDump)
            assert found.file_of(child.pid) == tmp_path / f"c_{child.pid}"
            assert found.pipe_of(child.pid) == tmp_path / f"p_{os.uname().nodename}_{child.pid}"
        finally:
            child.kill()
    bare = dump_settings(os.getpid())
    assert isinstance(bare, Unread)
    assert "CUDA_COREDUMP_PIPE" in bare.remedy


DRIVER = """
import os, shutil, sys
names = ("CUDA_COREDUMP_PIPE", "CUDA_COREDUMP_FILE", "SOURCE")
pipe, dump, source = (os.environ[name].replace("%p", str(os.getpid())) for name in names)
os.mkfifo(pipe)
print("ready", flush=True)
with open(pipe, "rb") as stream:
    stream.read(1)
shutil.copy(source, dump)
sys.exit(0)
"""


def test_two_ranks_are_dumped_side_by_side_and_read(tmp_path: Path) -> None:
    """A stand-in of the driver: one byte in the pipe, and the dump of a real wedge is there. The worker is gone after it."""
    cores = Path(__file__).resolve().parents[2] / "fixtures" / "cores"
    source = tmp_path / "source"
    with lzma.open(cores / "hung-topk.nvcudmp.xz") as packed:
        source.write_bytes(packed.read())
    environment = {
        **os.environ, "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1", "CUDA_COREDUMP_PIPE": f"{tmp_path}/pipe_%p",
        "CUDA_COREDUMP_FILE": f"{tmp_path}/core_%p.nvcudmp", "SOURCE": str(source),
    }  # fmt: skip
    children = [
        subprocess.Popen([sys.executable, "-c", DRIVER], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        ranks = tuple(
            Rank(child.pid, number, start_ticks(child.pid) or 0, gpu_index=number) for number, child in enumerate(children)
        )
        target = ServerTarget(base_url=None, ranks=ranks, tree={rank.pid: "worker" for rank in ranks})
        outcomes = capture(
            target, tmp_path / "ev", Told(), Tools(tmp_path / "tools"), attach=False, allow_dump=True, stacks=False, budget_s=20.0
        )
    finally:
        for child in children:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
    dumps = of(outcomes, "core_dump")
    assert [outcome.facts["rank"] for outcome in dumps] == [0, 1]
    for rank, outcome in zip(ranks, dumps, strict=True):
        assert outcome.state is not None
        assert "persistent_topk_kernel" in outcome.state.grids[0].kernel
        (artefact,) = outcome.artefacts
        assert artefact.path == tmp_path / "ev" / f"rank-{rank.rank}" / f"gpu-rank{rank.rank}-pid-{rank.pid}.nvcudmp"
    found = diagnose_server(
        outcomes, None, Assessment("hung", 1.0, 0.0, ("x",), ("the GPU is held",)), tmp_path / "ev", target=target
    )
    assert (found.verdict.class_, found.verdict.cause, found.verdict.confidence) == ("gpu-spin-barrier", "peer-left", "high")
    assert [(wait.rank, wait.device) for wait in found.waits] == [(0, 0), (1, 1)]


def test_a_target_of_which_nothing_is_known(tmp_path: Path) -> None:
    """Only a URL that nobody answers: every collector says what is missing, and nothing raises."""
    tools = Tools(tmp_path / "tools")
    outcomes = capture(ServerTarget(base_url="http://127.0.0.1:9"), tmp_path / "ev", Told(), tools, budget_s=10.0)
    assert all(not outcome.artefacts or outcome.collector == "kernel_log" or outcome.collector == "proc" for outcome in outcomes)
    said = whys(outcomes)
    for part in (
        "this server has no agent",
        "where it goes is not known",
        "no process of the server is known",
        "no worker process is known",
    ):
        assert part in said


def test_a_process_that_is_not_the_one_it_was_is_left_alone(wedged: Wedged, tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools")
    with wedged(tp=1) as (_, target):
        rank = target.ranks[0]
        other = ServerTarget(
            base_url=target.base_url, ranks=(Rank(rank.pid, 0, rank.start_ticks + 5),), agent_folder=target.agent_folder
        )
        outcomes = capture(other, tmp_path / "ev", Told(), tools, budget_s=16.0)
    assert tools.attached() == []
    assert "the process has ended" in whys(of(outcomes, "cuda_gdb"))
