"""The cuda-gdb collector against stand-in debuggers (shell scripts), and against the machine's gdb where there is one."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_repro.errors import ToolMissingError
from dsv4_repro.forensics.collect import Collected, run_collector
from dsv4_repro.forensics.collect.cuda_gdb import (
    SCRIPTS,
    CudaGdb,
    CudaGdbCollector,
    debugger_command,
    find_cuda_gdb,
    probe_cuda_gdb,
    stages_of,
)

STAGES = "dsv4-repro: stage attaching 0.000\ndsv4-repro: stage reading 0.412\n"
ENDED = "dsv4-repro: stage detaching 0.600\ndsv4-repro: stage done 0.660\n"
KERNELS = (
    "(cuda-gdb) info cuda kernels\n"
    "  Kernel Parent Dev Grid Status SMs Mask GridDim BlockDim Invocation\n"
    "*      0      -   0    5 Active 0x100 (16,1,1) (1024,1,1) persistent_topk_kernel<512, 4u>()\n"
)


def debugger(folder: Path, text: str = "", *, after: str = "", python: tuple[int, int] | None = (3, 12)) -> CudaGdb:
    path = folder / "cuda-gdb"
    transcript = folder / "said"
    transcript.write_text(text)
    path.write_text(f"#!/bin/sh\ncat {transcript}\n{after}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return CudaGdb(path, "13.0", python)


def collect(folder: Path, tool: CudaGdb, **more: float) -> tuple[Collected, CudaGdbCollector]:
    collector = CudaGdbCollector(816, folder / "out", tool, addresses=[0x7F00], **more)  # type: ignore[arg-type]
    return run_collector(collector), collector


def test_a_transcript_is_kept_as_it_came_and_its_stages_are_told(tmp_path: Path) -> None:
    text = STAGES + KERNELS + ENDED
    outcome, _ = collect(tmp_path, debugger(tmp_path, text))
    assert outcome.files[0].path.read_text() == text
    assert outcome.facts["stages"] == {"attaching": 0.0, "reading": 0.412, "detaching": 0.6, "done": 0.66}
    assert outcome.facts["status"] == 0
    assert not [item for item in outcome.unread if item.what.startswith("cuda-gdb attach")]


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        ("ptrace: Operation not permitted.\n", "cuda-gdb attach", "ptrace is refused"),
        ("Error: cudbgApiAttach failed\n", "cuda-gdb attach", "the CUDA attach failed"),
        ("CUDA-GDB hit an internal error while attaching\n", "cuda-gdb attach", "the CUDA attach failed inside the driver"),
        ("could not allocate operating system resources for attaching\n", "cuda-gdb attach", "the driver has no resources"),
        ("ptrace: No such process.\n", "cuda-gdb attach", "there is no such process"),
        ("Segmentation fault\n", "cuda-gdb attach", "before it read anything"),
        ("", "cuda-gdb attach", "before it read anything"),
        (STAGES + "No CUDA kernels.\ndsv4-repro: no kernels\n" + ENDED, "cuda-gdb kernels", "no kernel is shown"),
        (STAGES + KERNELS + "dsv4-repro: out of time: OutOfTimeError('x')\n" + ENDED, "cuda-gdb", "deadline"),
    ],
)
def test_every_way_to_fail_is_told_apart(tmp_path: Path, text: str, what: str, why: str) -> None:
    outcome, _ = collect(tmp_path, debugger(tmp_path, text, after="exit 1"))
    assert any(item.what == what and why in item.why for item in outcome.unread), outcome.unread
    assert outcome.files[0].path.read_text() == text


def test_a_debugger_in_its_handshake_is_never_ended_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_repro.forensics.collect.cuda_gdb._PATIENCE_S", 0.2)
    signals = tmp_path / "signals"
    after = f'for s in INT TERM HUP; do trap "echo $s >> {signals}" $s; done; sleep 3 & wait $!'
    tool = debugger(tmp_path, "dsv4-repro: stage attaching 0.000\n", after=after)
    outcome, collector = collect(tmp_path, tool, deadline_s=0.1)
    assert collector.left_running is not None
    assert collector.left_running.poll() is None
    assert not signals.exists()
    assert any("left alone" in item.why and "stage attaching" in item.why for item in outcome.unread)
    collector.left_running.kill()
    collector.left_running.wait()


def test_without_python_inside_the_deadline_is_ctrl_c_and_only_after_the_attach(tmp_path: Path) -> None:
    after = "trap 'echo interrupted; exit 0' INT; sleep 5 & wait $!"
    tool = debugger(tmp_path, "dsv4-repro: stage reading 0\n" + KERNELS, after=after, python=None)
    outcome, _ = collect(tmp_path, tool, deadline_s=0.2)
    assert outcome.facts["status"] == 0
    assert outcome.files[0].path.read_text().endswith("interrupted\n")


def test_the_command_attaches_without_host_symbols(tmp_path: Path) -> None:
    command = debugger_command(CudaGdb(Path("/x/cuda-gdb"), "13.0", (3, 12)), 816)
    assert command.index("set auto-solib-add off") < command.index("-p")
    assert command[command.index("-p") + 1] == "816"
    assert command.index("echo dsv4-repro: stage attaching 0\\n") < command.index("-p")
    plain = debugger_command(CudaGdb(Path("/x/cuda-gdb"), "13.0", None), 816)
    assert not [word for word in plain if "hang.py" in word or "python " in word]
    assert "info cuda kernels" in plain
    assert plain.index("info registers") < plain.index("detach")


def test_the_scripts_are_files_for_a_person_too() -> None:
    assert {path.name for path in SCRIPTS.iterdir() if path.suffix in (".py", ".gdb", ".md")} == {
        "README.md", "hang.gdb", "hang.py", "release.py",
    }  # fmt: skip
    for name in ("hang.py", "hang.gdb", "release.py"):
        assert name in (SCRIPTS / "README.md").read_text()


# -- finding it --------------------------------------------------------------------------------------------------------------------


def test_where_it_is_looked_for(tmp_path: Path) -> None:
    for folder in ("home/bin", "path", "conda/bin"):
        tool = tmp_path / folder / "cuda-gdb"
        tool.parent.mkdir(parents=True)
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    environment = {"CUDA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path"), "CONDA_PREFIX": str(tmp_path / "conda")}
    assert find_cuda_gdb(environment) == tmp_path / "home/bin/cuda-gdb"
    (tmp_path / "home/bin/cuda-gdb").chmod(0o644)
    assert find_cuda_gdb(environment) == tmp_path / "conda/bin/cuda-gdb"
    del environment["CONDA_PREFIX"]
    assert find_cuda_gdb(environment) == tmp_path / "path/cuda-gdb"
    with pytest.raises(ToolMissingError, match="/nowhere/cuda-gdb") as caught:
        find_cuda_gdb({"DSV4_REPRO_CUDA_GDB": "/nowhere/cuda-gdb"})
    assert "conda install" in caught.value.help_text


def test_the_probe_tells_version_and_python(tmp_path: Path) -> None:
    tool = debugger(tmp_path, "NVIDIA (R) cuda-gdb 13.0\nPortions Copyright\ndsv4-python 3.12.3\n")
    assert probe_cuda_gdb(tool.path, tmp_path) == CudaGdb(tool.path, "NVIDIA (R) cuda-gdb 13.0", (3, 12))
    tool = debugger(tmp_path, "NVIDIA (R) cuda-gdb 12.4\nPython scripting is not supported in this copy of GDB.\n", after="exit 1")
    assert probe_cuda_gdb(tool.path, tmp_path).python is None
    tool = debugger(tmp_path, "cuda-gdb: error while loading shared libraries: libtinfo.so.5", after="exit 127")
    with pytest.raises(ToolMissingError, match=r"libtinfo\.so\.5"):
        probe_cuda_gdb(tool.path, tmp_path)


# -- a real gdb: attach, deadline, detach ------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    time.sleep(0.2)
    yield process
    process.kill()
    process.wait()


def real_gdb(folder: Path, init: str = "") -> CudaGdb:
    """The machine's gdb as if it were cuda-gdb; ``init``: Python run before the scripts. Skips without it."""
    found = shutil.which("gdb")
    if found is None:
        pytest.skip("no gdb on this machine")
    path = folder / "cuda-gdb"
    (folder / "init.py").write_text(init)
    path.write_text(f'#!/bin/sh\nexec {found} -iex "source {folder}/init.py" "$@"\n')
    path.chmod(0o755)
    tool = probe_cuda_gdb(path, folder)
    if tool.python is None:
        pytest.skip("the gdb of this machine has no Python")
    return tool


def attached(folder: Path, tool: CudaGdb, pid: int, deadline_s: float) -> Collected:
    outcome = run_collector(CudaGdbCollector(pid, folder / "out", tool, deadline_s=deadline_s))
    if any("ptrace is refused" in item.why for item in outcome.unread):
        pytest.skip("ptrace is refused here")
    return outcome


def test_attach_and_detach_leave_the_process_running(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    outcome = attached(tmp_path, real_gdb(tmp_path), sleeper.pid, 20.0)
    assert list(outcome.facts["stages"]) == ["attaching", "reading", "detaching", "done"]
    assert f"(process {sleeper.pid}) detached" in outcome.files[0].path.read_text()
    assert any(item.what == "cuda-gdb kernels" for item in outcome.unread), "a plain gdb shows no kernels"
    time.sleep(0.1)
    assert sleeper.poll() is None
    with open(f"/proc/{sleeper.pid}/stat") as stream:
        assert stream.read().rpartition(")")[2].split()[0] == "S"


SLOW = """
import gdb, time
class Slow(gdb.Command):
    def __init__(self):
        super().__init__("info cuda", gdb.COMMAND_STATUS)
    def invoke(self, argument, from_tty):
        end = time.monotonic() + 30
        while time.monotonic() < end:
            time.sleep(0.05)
Slow()
"""


def test_a_command_that_never_ends_is_interrupted_from_inside(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    outcome = attached(tmp_path, real_gdb(tmp_path, SLOW), sleeper.pid, 1.0)
    assert time.monotonic() - began < 10
    text = outcome.files[0].path.read_text()
    assert "dsv4-repro: out of time" in text or "Quit" in text or "failed" in text
    assert "done" in stages_of(text)
    assert "detached" in text
    assert sleeper.poll() is None


def test_the_users_own_gdb_settings_are_not_read(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gdbinit").write_text("echo SETTINGS-READ\\n\n")
    monkeypatch.setenv("HOME", str(home))
    outcome = attached(tmp_path, real_gdb(tmp_path), sleeper.pid, 20.0)
    assert "SETTINGS-READ" not in outcome.files[0].path.read_text()
    assert os.environ["HOME"] == str(home)
