"""Ends of a capture that need no GPU: debuggers that were left alone, and how much of the child's stderr is kept."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.clock import SYSTEM
from dsv4_repro.repro import gpu_capture
from dsv4_repro.repro.gpu_capture import GpuCapture, copy_ends


class Debugger:
    """A debugger that ends only when killed, or not even then."""

    def __init__(self, *, dies: bool) -> None:
        self.pid = os.getpid()
        self.status: int | None = None
        self._dies = dies

    def poll(self) -> int | None:
        return self.status

    def kill(self) -> None:
        self.status = -9 if self._dies else None

    def wait(self, timeout: float | None = None) -> int:
        if self.status is None:
            assert timeout is not None, "this would wait for ever"
            raise subprocess.TimeoutExpired("cuda-gdb", timeout)
        return self.status


def capture(*debuggers: Any) -> GpuCapture:
    unused: Any = None
    return GpuCapture(unused, unused, None, unused, None, 0.0, {}, clock=SYSTEM, left_debuggers=list(debuggers))


def test_a_debugger_that_outlives_sigkill_is_told_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_capture, "_DEBUGGER_GRACE_S", 0.0)
    monkeypatch.setattr(gpu_capture, "_DEBUGGER_KILL_WAIT_S", 0.1)
    held = capture(Debugger(dies=True), Debugger(dies=False), Debugger(dies=True))
    (told,) = held.end_debuggers()
    assert told.startswith(f"the debugger {os.getpid()} outlived SIGKILL (state ")
    assert held.left_debuggers == []
    assert held.end_debuggers() == []


def test_one_that_ended_by_itself_is_not_killed() -> None:
    done = Debugger(dies=False)
    done.status = 0
    assert capture(done).end_debuggers() == []


def test_stderr_is_copied_whole_or_by_both_ends(tmp_path: Path) -> None:
    source, target = tmp_path / "child.err", tmp_path / "copy"
    for size in (0, 1, 29, 30):
        source.write_bytes(bytes(range(65, 65 + size)))
        copy_ends(source, target, head=10, tail=20)
        assert target.read_bytes() == source.read_bytes()
    source.write_bytes(b"a" * 10 + b"cut" + b"z" * 20)
    copy_ends(source, target, head=10, tail=20)
    assert target.read_bytes() == b"a" * 10 + b"\n[dsv4-repro: 3 of 33 bytes are left out here]\n" + b"z" * 20


def test_a_child_that_wrote_without_end_costs_a_bounded_copy(tmp_path: Path) -> None:
    source, target = tmp_path / "child.err", tmp_path / "copy"
    with source.open("wb") as stream:
        stream.truncate(1 << 40)
    copy_ends(source, target)
    assert target.stat().st_size < 9 << 20
