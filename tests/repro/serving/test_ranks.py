"""Finding a server in ``/proc``: fake process trees with and without titles, containers, Ray, other users, 10000 processes."""

from __future__ import annotations

import importlib
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_repro.clock import Deadline
from dsv4_repro.errors import NoDriverError, UnavailableError, UsageError
from dsv4_repro.forensics.collect.nvml import Nvml
from dsv4_repro.forensics.collect.process_table import output_file, read_process_table, start_ticks
from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.repro.serving import gpu_holders as holders_module
from dsv4_repro.repro.serving.gpu_holders import gpu_holders
from dsv4_repro.repro.serving.ranks import agent_names, find_server, find_servers, is_same, output_rank, refresh
from dsv4_repro.repro.serving.records import Rank, ServerTarget
from dsv4_repro.repro.serving.roles import place_of_title, places_in_log

AGENT = Path(__file__).resolve().parents[3] / "repro" / "agent" / "src"
SERVE = ("/usr/bin/python3", "/usr/local/bin/vllm", "serve", "some/model", "--port", "8011", "--tensor-parallel-size", "2")
SPAWN = (
    "/usr/bin/python3",
    "-c",
    "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)",
    "--multiprocessing-fork",
)
TRACKER = ("/usr/bin/python3", "-c", "from multiprocessing.resource_tracker import main;main(5)")


class Proc:
    """A fake ``/proc``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self" / "ns").mkdir(parents=True)
        (root / "net").mkdir()
        for kind in ("mnt", "net", "pid"):
            (root / "self" / "ns" / kind).symlink_to(f"{kind}:[1]")
        self.add(1, 0, ("/sbin/init",))

    def add(
        self,
        pid: int,
        parent: int,
        argv: Sequence[str],
        *,
        ticks: int | None = None,
        environment: Mapping[str, str] | None = None,
        fds: Mapping[int, str] | None = None,
        namespace: int = 1,
        inner: int | None = None,
        comm: str = "python3",
        state: str = "S",
    ) -> None:
        folder = self.root / str(pid)
        (folder / "ns").mkdir(parents=True)
        rest = " ".join(["0"] * 17)
        (folder / "stat").write_text(f"{pid} ({comm}) {state} {parent} {rest} {ticks if ticks is not None else pid * 10} 0 0\n")
        (folder / "cmdline").write_bytes(b"\0".join(word.encode() for word in argv) + (b"\0" if argv else b""))
        (folder / "status").write_text(f"Name:\t{comm}\nNSpid:\t{pid}" + (f"\t{inner}" if inner else "") + "\n")
        if environment is not None:
            (folder / "environ").write_bytes(b"\0".join(f"{name}={value}".encode() for name, value in environment.items()))
        for kind in ("mnt", "net", "pid"):
            (folder / "ns" / kind).symlink_to(f"{kind}:[{namespace}]")
        if fds is not None:
            (folder / "fd").mkdir()
            for number, target in fds.items():
                (folder / "fd" / str(number)).symlink_to(target)

    def listen(self, port: int, inode: int, *, pid: int | None = None) -> None:
        folder = self.root / "net" if pid is None else self.root / str(pid) / "net"
        folder.mkdir(exist_ok=True)
        line = f"   0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000 0 {inode} 1 0"
        (folder / "tcp").write_text("  sl  local_address rem_address   st …\n" + line + "\n")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


def no_nvml() -> Nvml:
    raise NoDriverError("NVML does not start: not found")


def cards(held: Mapping[int, Sequence[tuple[int, int]]], count: int = 2) -> Callable[[], Nvml]:
    """An NVML whose GPUs are held: index -> (pid, bytes)."""

    class NVMLError(Exception):
        pass

    def processes(handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in held.get(handle, ())]

    module = SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=processes, nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
    )  # fmt: skip
    return lambda: Nvml(module)


def titled(proc: Proc) -> None:
    """A server of two ranks with setproctitle."""
    proc.add(100, 1, SERVE, environment={"HOME": "/root"}, fds={1: "pipe:[9]", 2: "pipe:[9]"})
    proc.add(101, 100, ("VLLM::EngineCore",), environment={})
    proc.add(102, 100, TRACKER)
    proc.add(110, 101, ("VLLM::Worker_TP0",), environment={})
    proc.add(111, 101, ("VLLM::Worker_TP1",), environment={})


def find(proc: Proc, which: int | str | None = None, nvml: Callable[[], Nvml] = no_nvml) -> ServerTarget:
    return find_server(which, root=proc.root, nvml=nvml)


def whys(target: ServerTarget) -> str:
    return " | ".join(f"{item.what}: {item.why}" for item in target.unread)


def test_titles_tell_roles_and_ranks(proc: Proc) -> None:
    titled(proc)
    target = find(proc, nvml=cards({0: [(110, 8)], 1: [(111, 8)]}))
    assert target.tree == {100: "api", 101: "engine", 102: "other", 110: "worker", 111: "worker"}
    assert (target.api_pid, target.engine_pids) == (100, (101,))
    assert [(rank.rank, rank.pid, rank.gpu_index, rank.gpu_uuid) for rank in target.ranks] == [
        (0, 110, 0, "GPU-0"),
        (1, 111, 1, "GPU-1"),
    ]
    assert target.ranks[0].start_ticks == 1100
    assert target.model == "some/model"
    assert output_rank(target) == (0, "the engine takes each step's output from rank 0 alone, the first worker")
    assert "goes to a pipe" in whys(target)
    assert "docker logs" in next(item.remedy for item in target.unread if item.what.startswith("log of"))


@pytest.mark.parametrize("which", [None, 100, 101, 111, "110"])
def test_any_process_of_it_names_it(proc: Proc, which: int | str | None) -> None:
    titled(proc)
    proc.add(50, 1, ("bash",))
    assert find(proc, which).api_pid == 100


def test_without_titles_generations_tell_and_the_log_numbers_the_ranks(proc: Proc, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("(Worker_TP1 pid=121) INFO loaded\n(Worker_TP0 pid=120) INFO loaded\n(EngineCore pid=101) x\n")
    proc.add(100, 1, SERVE, environment={}, fds={1: str(log)})
    proc.add(101, 100, SPAWN)
    proc.add(102, 100, TRACKER)
    proc.add(120, 101, SPAWN)
    proc.add(121, 101, SPAWN)
    proc.add(130, 120, ("/usr/bin/nvcc", "-c", "x.cu"))
    target = find(proc)
    assert target.tree == {100: "api", 101: "engine", 102: "other", 120: "worker", 121: "worker", 130: "other"}
    assert [(rank.rank, rank.pid) for rank in target.ranks] == [(0, 120), (1, 121)]
    assert "rank by log" in target.ranks[0].how
    assert target.log_path == log


def test_a_rank_that_nothing_tells_stays_without_number(proc: Proc) -> None:
    proc.add(100, 1, SERVE, environment={}, fds={1: "pipe:[9]"})
    proc.add(101, 100, SPAWN)
    for pid in (120, 121):
        proc.add(pid, 101, SPAWN)
    target = find(proc)
    assert [rank.rank for rank in target.ranks] == [None, None]
    assert "neither title, log, agent nor environment" in whys(target)
    assert output_rank(target)[0] is None


def test_forked_children_are_told_by_generation_too(proc: Proc) -> None:
    proc.add(100, 1, SERVE, environment={}, fds={1: "pipe:[9]"})
    proc.add(101, 100, SERVE)
    proc.add(120, 101, SERVE)
    target = find(proc)
    assert target.tree == {100: "api", 101: "engine", 120: "worker"}
    assert target.ranks[0].rank == 0
    assert "being the only one" in target.ranks[0].how


def test_an_executor_inside_the_engine(proc: Proc) -> None:
    proc.add(100, 1, SERVE, environment={}, fds={1: "pipe:[9]"})
    proc.add(101, 100, ("VLLM::EngineCore",), fds={7: "/dev/nvidia-uvm", 8: "/dev/nvidia0"})
    target = find(proc)
    assert [(rank.rank, rank.pid) for rank in target.ranks] == [(0, 101)]
    assert find(proc, nvml=cards({0: [(101, 8)]}, count=1)).ranks[0].gpu_index == 0


def test_a_helper_that_holds_a_card_is_no_worker_beside_its_engine(proc: Proc) -> None:
    proc.add(100, 1, SERVE[:6], environment={}, fds={})
    proc.add(101, 100, ("VLLM::EngineCore",), environment={}, fds={5: "/dev/nvidia-uvm"})
    proc.add(105, 100, ("/usr/bin/python3", "-m", "vllm.model_executor.models.registry"), environment={}, fds={})
    target = find(proc, 100, cards({0: ((105, 2 << 30),), 1: ((101, 1 << 30),)}))
    assert [(rank.pid, rank.gpu_index) for rank in target.ranks] == [(101, 1)]


@pytest.mark.parametrize(("parent", "title", "role"), [(101, "VLLM::EngineCore", "engine"), (110, "VLLM::Worker_TP0", "worker")])
def test_a_fork_with_the_title_of_its_parent_is_none_of_its_own(proc: Proc, parent: int, title: str, role: str) -> None:
    titled(proc)
    proc.add(120, parent, (title,), environment={})
    target = find(proc)
    assert target.engine_pids == (101,)
    assert [rank.pid for rank in target.ranks] == [110, 111]
    assert target.tree[120] == "other"
    assert target.tree[parent] == role


def test_a_server_is_looked_up_again_with_the_workers_it_has_now(proc: Proc) -> None:
    proc.add(100, 1, SERVE, environment={}, fds={1: "pipe:[9]", 4: "socket:[77]"})
    early = find(proc, 100)
    assert early.ranks == ()
    proc.add(101, 100, ("VLLM::EngineCore",), environment={})
    proc.add(110, 101, ("VLLM::Worker_TP0",), environment={})
    proc.add(111, 101, ("VLLM::Worker_TP1",), environment={})
    proc.listen(8011, 77)
    held = cards({1: ((110, 1 << 30),), 2: ((111, 1 << 30),)}, 4)
    later = refresh(early, root=proc.root, nvml=held)
    assert [(rank.pid, rank.gpu_index) for rank in later.ranks] == [(110, 1), (111, 2)]
    assert later.engine_pids == (101,)
    # One that was known by its URL alone, too.
    by_url = refresh(ServerTarget("http://127.0.0.1:8011", log_path=Path("/l")), root=proc.root, nvml=held)
    assert (by_url.api_pid, by_url.log_path, len(by_url.ranks)) == (100, Path("/l"), 2)
    assert refresh(ServerTarget(None), root=proc.root, nvml=held) == ServerTarget(None)
    assert refresh(ServerTarget(None, api_pid=999), root=proc.root, nvml=held) == ServerTarget(None, api_pid=999)


def test_an_nvml_that_never_answers_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders_module, "_WAITING", [])
    asleep = threading.Event()
    begun = []

    def never() -> Nvml:
        begun.append(1)
        asleep.wait(30)
        raise NoDriverError("late")

    try:
        for _ in range(50):
            found = gpu_holders(never, seconds=0.01)
            assert found.unread
        assert len(begun) <= 8
        assert "is not asked again" in found.unread[0].why
    finally:
        asleep.set()


def test_a_server_that_still_starts_has_no_worker_and_says_so(proc: Proc) -> None:
    proc.add(100, 1, SERVE, environment={}, fds={1: "pipe:[9]"})
    proc.add(101, 100, ("VLLM::EngineCore",), fds={8: "/dev/nvidia0", 9: "/dev/nvidiactl"})
    target = find(proc)
    assert target.ranks == ()
    assert "worker processes: none is shown" in whys(target)


def test_pipeline_stages(proc: Proc) -> None:
    proc.add(100, 1, SERVE, environment={}, fds={1: "pipe:[9]"})
    proc.add(101, 100, ("VLLM::EngineCore",))
    for index, name in enumerate(("PP0_TP0", "PP0_TP1", "PP1_TP0", "PP1_TP1")):
        proc.add(110 + index, 101, (f"VLLM::Worker_{name}_EP{index}",))
    target = find(proc)
    assert [rank.rank for rank in target.ranks] == [0, 1, 2, 3]
    assert output_rank(target)[0] == 2
    assert "PP1" in output_rank(target)[1]


def test_two_servers_are_not_mixed_up(proc: Proc) -> None:
    titled(proc)
    proc.add(200, 1, SERVE, environment={}, fds={1: "pipe:[9]"})
    proc.add(201, 200, ("VLLM::EngineCore",))
    proc.add(210, 201, ("VLLM::Worker",))
    with pytest.raises(UnavailableError, match="2 servers are running: 100"):
        find(proc)
    assert [target.api_pid for target in find_servers(root=proc.root, nvml=no_nvml)] == [100, 200]
    assert [rank.pid for rank in find(proc, 210).ranks] == [210]


def test_a_program_that_only_starts_it_is_stepped_over(proc: Proc) -> None:
    proc.add(90, 1, ("numactl", "--cpunodebind=0", "vllm", "serve", "m"))
    proc.add(100, 90, SERVE, environment={}, fds={1: "pipe:[9]"})
    assert find(proc).api_pid == 100
    assert find(proc, 90).api_pid == 100


def test_ray_workers_are_no_descendants(proc: Proc) -> None:
    proc.add(100, 1, SERVE, environment={}, fds={1: "pipe:[9]"})
    proc.add(101, 100, ("VLLM::EngineCore",))
    for index in (0, 1):
        proc.add(300 + index, 250, ("ray::RayWorkerWrapper.execute_method",), environment={"RANK": str(index)})
    target = find(proc)
    assert [(rank.rank, rank.pid) for rank in target.ranks] == [(0, 300), (1, 301)]
    assert target.tree[300] == "worker"
    assert "Ray workers on other nodes" in whys(target)
    proc.add(400, 1, SERVE, environment={}, fds={1: "pipe:[9]"})
    other = find(proc, 100)
    assert other.ranks == ()
    assert "whose they are is not known" in whys(other)


def test_a_url_by_its_socket(proc: Proc) -> None:
    titled(proc)
    proc.listen(8011, 555)
    (proc.root / "100" / "fd" / "6").symlink_to("socket:[555]")
    target = find(proc, "http://127.0.0.1:8011/v1/")
    assert (target.api_pid, target.base_url) == (100, "http://127.0.0.1:8011")


def test_the_url_of_a_pid(proc: Proc) -> None:
    titled(proc)
    proc.listen(8011, 555, pid=100)
    (proc.root / "100" / "fd" / "6").symlink_to("socket:[555]")
    assert find(proc, 100).base_url == "http://127.0.0.1:8011"


def test_a_url_elsewhere_gives_no_processes_and_says_how_to_get_them(proc: Proc) -> None:
    titled(proc)
    target = find(proc, "http://gpu7.example:8000")
    assert (target.api_pid, target.ranks, target.base_url) == (None, (), "http://gpu7.example:8000")
    assert "no process shown here listens on port 8000" in whys(target)
    assert "kubectl exec" in target.unread[-1].remedy


def test_a_published_port_of_a_container(proc: Proc) -> None:
    proc.add(100, 1, SERVE, fds={1: "pipe:[9]"}, namespace=7, inner=1)
    proc.add(101, 100, ("VLLM::EngineCore",), namespace=7, inner=20)
    proc.add(110, 101, ("VLLM::Worker_TP0",), namespace=7, inner=30)
    proc.listen(8011, 77, pid=100)
    target = find(proc, "http://127.0.0.1:8011")
    assert target.api_pid == 100
    said = whys(target)
    assert "another mount namespace" in said
    assert "network namespace of its own" in said
    assert any("nsenter -t 100" in item.remedy for item in target.unread)


def test_another_user_s_server_says_exactly_what_is_closed(proc: Proc) -> None:
    proc.add(100, 1, SERVE)
    proc.add(110, 100, ("VLLM::Worker_TP0",))
    for kind in ("mnt", "net", "pid"):
        (proc.root / "100" / "ns" / kind).unlink()
    target = find(proc)
    said = whys(target)
    for part in ("environment of process 110", "log of process 100", "process 100 from inside"):
        assert part in said
    assert any("as root" in item.remedy for item in target.unread)
    # Its command line is open to everybody.
    assert target.base_url == "http://127.0.0.1:8011"


def test_the_agent_s_rings_are_found_by_the_pid_that_the_worker_has_inside(proc: Proc, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(AGENT))
    ring = importlib.import_module("dsv4_repro_agent.ring")
    folder = tmp_path / "agent"
    folder.mkdir()
    made = ring.Ring(folder, slots=16, rank=1, device=0, vllm="x", agent="y")
    made.path.rename(folder / "ring-30-1100.bin")
    environment = {"VLLM_DSV4_REPRO_AGENT": "1", "VLLM_DSV4_REPRO_AGENT_DIR": str(folder)}
    proc.add(100, 1, SERVE, environment=environment, fds={1: "pipe:[9]"})
    proc.add(101, 100, SPAWN)
    proc.add(110, 101, SPAWN, inner=30)
    proc.add(111, 101, SPAWN, inner=31)
    target = find(proc)
    assert target.agent_folder == folder
    assert agent_names(folder, target.ranks, proc.root) == {110: "30-1100"}
    assert {rank.pid: rank.rank for rank in target.ranks} == {110: 1, 111: None}


def test_the_shared_folder_of_another_server_s_agent_is_not_this_one_s(proc: Proc, tmp_path: Path) -> None:
    uid = (proc.root / "1").stat().st_uid
    folder = tmp_path / f"dsv4-repro-agent-{uid}"
    folder.mkdir()
    (folder / "ring-999-5.bin").write_bytes(b"x")
    proc.add(100, 1, SERVE, environment={"TMPDIR": str(tmp_path)}, fds={1: "pipe:[9]"})
    proc.add(101, 100, SPAWN)
    proc.add(110, 101, SPAWN, environment={"TMPDIR": str(tmp_path)})
    assert find(proc).agent_folder is None
    (folder / "ring-110-1100.bin").write_bytes(b"x")
    assert find(proc).agent_folder == folder


def test_a_reused_pid_is_another_process(proc: Proc) -> None:
    titled(proc)
    rank = find(proc).ranks[0]
    assert is_same(rank, proc.root)
    assert not is_same(Rank(rank.pid, 0, rank.start_ticks + 1), proc.root)
    assert not is_same(Rank(99999, 0, 1), proc.root)
    (proc.root / "110" / "stat").write_text(f"110 (x) Z 101 {' '.join(['0'] * 17)} 1100 0\n")
    assert start_ticks(110, proc.root) is None


def test_gpus_by_rank_number_are_said_to_be_inferred(proc: Proc) -> None:
    titled(proc)
    target = find(proc, nvml=cards({}, count=2))
    assert [rank.gpu_index for rank in target.ranks] == [0, 1]
    assert all("inferred" in rank.how for rank in target.ranks)
    lone = find(proc, nvml=cards({}, count=8))
    assert [rank.gpu_index for rank in lone.ranks] == [None, None]
    assert "NVML lists no compute process of this pid" in whys(lone)


def test_a_process_on_two_gpus_computes_on_its_own(proc: Proc) -> None:
    titled(proc)
    target = find(proc, nvml=cards({0: [(110, 9 << 30), (111, 1 << 20)], 1: [(111, 9 << 30)]}))
    assert [rank.gpu_index for rank in target.ranks] == [0, 1]


def test_an_nvml_that_hangs_costs_its_share_of_the_time(proc: Proc) -> None:
    titled(proc)

    def hangs() -> Nvml:
        time.sleep(3.0)
        raise NoDriverError("late")

    began = time.monotonic()
    target = find(proc, nvml=hangs)
    assert time.monotonic() - began < 2.0
    assert "NVML: it gave no answer in time" in whys(target)
    assert [rank.rank for rank in target.ranks] == [0, 1]


def test_what_is_neither_a_pid_nor_a_url(proc: Proc) -> None:
    for text in ("http://[bad", "ftp://x", "http://"):
        with pytest.raises(UsageError):
            find(proc, text)
    with pytest.raises(UnavailableError, match="no process 424242"):
        find(proc, 424242)
    with pytest.raises(UnavailableError, match="no vLLM server is running here"):
        find(proc)


def test_a_program_that_is_no_server_is_taken_as_it_is_and_told(proc: Proc) -> None:
    proc.add(70, 1, ("python", "train.py"), fds={1: "pipe:[9]"})
    target = find(proc, 70, nvml=cards({0: [(70, 8)]}, count=1))
    assert "not recognised as a vLLM server" in whys(target)
    assert [rank.pid for rank in target.ranks] == [70]


def test_ten_thousand_processes_and_a_deadline(proc: Proc) -> None:
    for pid in range(20_000, 30_000):
        folder = proc.root / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (x) S 1 {' '.join(['0'] * 17)} {pid} 0\n")
        (folder / "cmdline").write_bytes(b"sleep\0")
    titled(proc)
    began = time.monotonic()
    target = find(proc)
    assert time.monotonic() - began < 2.5
    assert target.api_pid == 100 or "were read in" in whys(target)
    cut = read_process_table(proc.root, deadline=Deadline(0.0))
    assert 0 < len(cut.entries) <= 64
    assert "the rest was not looked at" in cut.unread[0].why


def test_a_table_without_its_first_process_is_said_to_be_hidden(proc: Proc) -> None:
    import shutil

    shutil.rmtree(proc.root / "1")
    titled(proc)
    assert "hidepid" in read_process_table(proc.root).unread[0].why


def test_a_log_that_was_deleted_is_read_through_the_process(tmp_path: Path) -> None:
    log = tmp_path / "gone.log"
    with log.open("wb") as sink, subprocess.Popen(["sleep", "30"], stdout=sink, stderr=subprocess.PIPE) as child:
        try:
            assert output_file(child.pid) == log
            log.unlink()
            assert output_file(child.pid) == Path(f"/proc/{child.pid}/fd/1")
        finally:
            child.kill()
    gone = output_file(child.pid)
    assert isinstance(gone, Unread)
    assert "--log FILE" in gone.remedy


def test_hostile_titles_and_names(proc: Proc) -> None:
    proc.add(100, 1, SERVE, environment={}, fds={1: "pipe:[9]"}, comm=") S 1 (((")
    proc.add(101, 100, ("VLLM::Worker_TP99999999999999999999",))
    (proc.root / "102").mkdir()
    (proc.root / "102" / "stat").write_bytes(b"\xff\xfe garbage")
    target = find(proc)
    assert target.tree[100] == "api"
    assert place_of_title("VLLM::Worker_DP1_PP2_TP3_DCP0_EP3") is not None
    assert place_of_title("python3") is None
    place = places_in_log("(Worker_DP1_PP2_TP3 pid=9) a\n(Worker pid=10) b\n")[9]
    assert (place.dp, place.pp, place.tp) == (1, 2, 3)


def test_this_machine() -> None:
    """The real ``/proc``: nothing raises, and a look is quick."""
    began = time.monotonic()
    find_servers()
    assert time.monotonic() - began < 2.5
    assert gpu_holders(no_nvml).unread[0].what == "NVML"
