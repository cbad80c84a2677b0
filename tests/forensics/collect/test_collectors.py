"""The collectors that read processes and logs, on processes and files made here; and the rule that a collector never breaks a
run.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import PtraceDeniedError, ToolMissingError
from dsv4_repro.forensics.collect import Collected, run_collector, sha256_of, write_artefact
from dsv4_repro.forensics.collect.host_stacks import HostStackCollector, find_py_spy
from dsv4_repro.forensics.collect.kernel_log import KernelLogCollector, nvidia_lines, read_kernel_log
from dsv4_repro.forensics.collect.proc import ProcCollector, process_state, read_process
from dsv4_repro.forensics.collect.tools import run_tool


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time\ndef waits_here():\n    time.sleep(60)\nwaits_here()"])
    yield process
    process.kill()
    process.wait()


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# -- the base ----------------------------------------------------------------------------------------------------------------------


class _Raises:
    name = "bad"
    disturbance = "none"
    deadline_s = 1.0

    def __init__(self, error: Exception, clock: FakeClock) -> None:
        self.error, self.clock = error, clock

    def collect(self) -> Collected:
        self.clock.advance(0.25)
        raise self.error


@pytest.mark.parametrize(
    ("error", "why", "remedy"),
    [
        (PtraceDeniedError("not allowed"), "not allowed", PtraceDeniedError.help_text),
        (ToolMissingError("no tool", help_text="pip install tool"), "no tool", "pip install tool"),
        (OSError(5, "Input/output error"), "OSError: [Errno 5] Input/output error", "Please report this with the run directory."),
        (KeyError("field"), "KeyError: 'field'", "Please report this with the run directory."),
    ],
)
def test_a_collector_that_fails_is_a_result_with_reason_and_time(error: Exception, why: str, remedy: str) -> None:
    clock = FakeClock()
    outcome = run_collector(_Raises(error, clock), clock)  # type: ignore[arg-type]
    assert [(item.what, item.why, item.remedy) for item in outcome.unread] == [("bad", why, remedy)]
    assert (outcome.seconds, outcome.files) == (0.25, ())


def test_an_artefact_is_whole_or_not_there(tmp_path: Path) -> None:
    path = write_artefact(tmp_path / "a" / "b.txt", "ä")
    assert path.read_bytes() == "ä".encode()
    assert [item.name for item in path.parent.iterdir()] == ["b.txt"]
    assert sha256_of(path) == hashlib.sha256("ä".encode()).hexdigest()


# -- /proc -------------------------------------------------------------------------------------------------------------------------


def test_a_process_and_its_threads(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    deadline = time.monotonic() + 5
    while process_state(sleeper.pid) != "S" and time.monotonic() < deadline:
        time.sleep(0.01)
    document, _unread = read_process(sleeper.pid)
    assert [thread["state"] for thread in document["threads"]] == ["S"]
    assert "waits_here" in document["cmdline"]
    outcome = run_collector(ProcCollector(sleeper.pid, tmp_path))
    assert outcome.facts["states"] == {"S": 1}
    assert json.loads(outcome.files[0].path.read_text())["pid"] == sleeper.pid


def test_a_process_that_is_gone_is_unread(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert process_state(process.pid) is None
    outcome = run_collector(ProcCollector(process.pid, tmp_path))
    assert outcome.files == ()
    assert outcome.unread[0].remedy


def test_names_with_brackets_and_unreadable_files(tmp_path: Path) -> None:
    task = tmp_path / "77" / "task" / "77"
    task.mkdir(parents=True)
    (tmp_path / "77" / "stat").write_text("77 (a) b (c) D 1 1 1")
    (task / "stat").write_text("77 (a) R) D " + " ".join(str(number) for number in range(40)))
    (task / "comm").write_text("a) R")
    document, unread = read_process(77, tmp_path)
    assert process_state(77, tmp_path) == "D"
    assert document["threads"][0]["state"] == "D"
    assert document["threads"][0]["stack"] is None
    assert {item.what for item in unread} >= {"/proc/77 stack", "/proc/77 wchan", "/proc/77 syscall", "/proc/77 status"}
    assert all(item.why for item in unread)


# -- programs ----------------------------------------------------------------------------------------------------------------------


def test_a_program_past_its_deadline_is_ended_with_its_children(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    tool = script(tmp_path / "tool", f"echo begun\nsleep 60 & echo $! > {marker}\ntrap '' TERM\nwhile :; do sleep 1; done\n")
    began = time.monotonic()
    done = run_tool([str(tool)], 0.3, output=tmp_path / "out")
    assert (done.status, done.expired, done.output) == (None, True, "begun\n")
    assert time.monotonic() - began < 6
    assert process_state(int(marker.read_text())) in (None, "Z")


def test_host_stacks_of_a_python_process(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    try:
        find_py_spy()
    except ToolMissingError:
        pytest.skip("py-spy is not installed")
    time.sleep(0.3)
    outcome = run_collector(HostStackCollector(sleeper.pid, tmp_path))
    if any("may not read" in item.why for item in outcome.unread):
        pytest.skip(f"ptrace is refused here: {outcome.unread[0].why}")
    assert "waits_here" in outcome.files[0].path.read_text()
    assert outcome.facts["threads"] == 1


@pytest.mark.parametrize(
    ("text", "why", "remedy"),
    [
        ("echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1", "may not read", "SYS_PTRACE"),
        ("echo 'Error: Operation not permitted (os error 1)'; exit 1", "may not read", "ptrace_scope"),
        ("echo 'Error: Failed to find python version'; exit 1", "status 1: Error: Failed to find python version", "py-spy dump"),
        ("sleep 30", "did not end within 0.2 s", "--nonblocking"),
    ],
)
def test_what_py_spy_refuses_is_told_apart(tmp_path: Path, text: str, why: str, remedy: str) -> None:
    tool = script(tmp_path / "py-spy", text + "\n")
    outcome = run_collector(HostStackCollector(1, tmp_path, tool=tool, deadline_s=0.2 if "sleep" in text else 5.0))
    assert why in outcome.unread[0].why
    assert remedy in outcome.unread[0].remedy
    assert outcome.files == ()


def test_py_spy_that_is_missing_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    outcome = run_collector(HostStackCollector(1, tmp_path))
    assert outcome.unread[0].remedy == "pip install py-spy"


# -- kernel log --------------------------------------------------------------------------------------------------------------------

LOG = (
    "6,1,1000000,-;Linux version\n"
    "3,2,5000000,-;NVRM: Xid (PCI:0000:06:00): 31, pid=816, name=python3, MMU Fault\n"
    " SUBSYSTEM=pci\n"
    "4,3,9000000,-;NVRM: RC watchdog: GPU is probably locked!\n"
    "broken line\n"
)


def test_nvidias_lines_and_xids(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(LOG)
    records = read_kernel_log(path)
    assert len(records) == 3
    assert nvidia_lines(records) == (
        [
            "[5.000000] NVRM: Xid (PCI:0000:06:00): 31, pid=816, name=python3, MMU Fault",
            "[9.000000] NVRM: RC watchdog: GPU is probably locked!",
        ],
        [("PCI:0000:06:00", 31)],
    )
    outcome = run_collector(KernelLogCollector(tmp_path / "out", since=6.0, path=path))
    assert (outcome.facts["nvidia_lines"], outcome.facts["xids"], outcome.unread) == (1, [], ())


def test_a_log_that_may_not_be_read_is_not_an_empty_log(tmp_path: Path) -> None:
    outcome = run_collector(KernelLogCollector(tmp_path, path=tmp_path / "none"))
    assert outcome.files == ()
    assert "dmesg_restrict" in outcome.unread[0].remedy
    (tmp_path / "empty").touch()
    quiet = run_collector(KernelLogCollector(tmp_path, path=tmp_path / "empty"))
    assert quiet.unread == ()
    assert quiet.facts["records"] == 0


def test_a_log_that_never_ends_does_not_hold_the_reader(tmp_path: Path) -> None:
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR)
    os.write(writer, LOG.encode())
    assert len(read_kernel_log(fifo)) == 3
    os.close(writer)
