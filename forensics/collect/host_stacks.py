"""Host stacks of a Python process, by py-spy. Pauses the process for some milliseconds.

py-spy reads another process's memory, so it needs the right to trace it. Its failures are told apart by its own messages: not
installed, not permitted, not a Python process.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ...clock import SYSTEM, Clock
from ...errors import PtraceDeniedError, ToolMissingError
from ..device_state import Unread
from . import Collected, CollectedFile, Disturbance
from .tools import run_tool

__all__ = ["HostStackCollector", "find_py_spy"]

_DENIED = ("permission denied", "operation not permitted", "os error 1)", "os error 13)")


def find_py_spy(extra: Sequence[Path] = ()) -> Path:
    """py-spy beside this Python, or on PATH. ToolMissingError."""
    for folder in (*extra, Path(sys.executable).parent, Path(sys.prefix) / "bin"):
        candidate = folder / "py-spy"
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    found = shutil.which("py-spy")
    if found is None:
        raise ToolMissingError("py-spy is not installed: host stacks were not read", help_text="pip install py-spy")
    return Path(found)


class HostStackCollector:
    """Writes ``file_name``: ``py-spy dump`` of the process. ``nonblocking``: without a pause, so moving frames are garbled."""

    name = "host_stacks"
    disturbance: Disturbance = "pauses"

    def __init__(
        self,
        pid: int,
        folder: Path,
        *,
        deadline_s: float = 10.0,
        clock: Clock = SYSTEM,
        tool: Path | None = None,
        file_name: str = "host_stacks.txt",
        nonblocking: bool = False,
    ) -> None:
        self._pid = pid
        self._file_name = file_name
        self._nonblocking = nonblocking
        if nonblocking:
            self.disturbance = "none"
        self._folder = folder
        self._clock = clock
        self._tool = tool
        self.deadline_s = deadline_s

    def collect(self) -> Collected:
        tool = self._tool or find_py_spy()
        path = (self._folder / self._file_name).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        how = ["--nonblocking"] if self._nonblocking else []
        done = run_tool([str(tool), "dump", *how, "--pid", str(self._pid)], self.deadline_s, output=path, clock=self._clock)
        if done.expired:
            why = Unread(
                "host stacks", f"py-spy did not end within {self.deadline_s:g} s", f"py-spy dump --nonblocking --pid {self._pid}"
            )
            return Collected(self.name, self.disturbance, 0.0, unread=(why,))
        if done.status != 0:
            lowered = done.output.lower()
            if any(mark in lowered for mark in _DENIED):
                raise PtraceDeniedError(f"py-spy may not read process {self._pid}: {_last_line(done.output)}")
            why = Unread(
                "host stacks",
                f"py-spy ended with status {done.status}: {_last_line(done.output)}",
                f"py-spy dump --pid {self._pid}",
            )
            return Collected(self.name, self.disturbance, 0.0, unread=(why,))
        threads = sum(line.startswith("Thread ") for line in done.output.splitlines())
        return Collected(
            self.name,
            self.disturbance,
            0.0,
            files=(CollectedFile("host-stacks", path),),
            facts={"threads": threads, "tool": str(tool), "nonblocking": self._nonblocking},
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
