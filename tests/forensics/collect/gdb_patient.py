"""A program in cuda-gdb's place: runs ``scripts/release.py`` in its own Python over a process that is not there. A test double.

It answers with the transcript of a real card (case b02) while launches are left; each write of a release count frees one launch.
``FAKE_GDB`` (JSON): ``launches``, and troubles ``kill`` (the process dies at the attach), ``refuse`` (ptrace is denied), ``die``
(the debugger dies after its reading), ``ask`` (the last release is also asked of the process's agent: a stand-in server goes on).
"""

from __future__ import annotations

import json
import os
import re
import runpy
import secrets
import signal
import sys
import time
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CASE = ROOT / "tests" / "cases" / "b02-real-h200-cuda-gdb-peer-left.txt"
COUNTER = 0x7F3CCCA89668


class GdbError(Exception):
    """gdb.error of the stand-in."""


def banner(path: Path = CASE) -> str:
    """What cuda-gdb prints while it attaches."""
    lines = path.read_text(encoding="utf-8").partition("stage attaching 0\n")[2].splitlines()
    end = next(index for index, line in enumerate(lines) if line.startswith(("(cuda-gdb)", "dsv4-repro:")))
    return "\n".join(lines[:end])


def answers(path: Path = CASE) -> dict[str, str]:
    """Command -> output, as the transcript has them."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("(cuda-gdb) "):
            current = found.setdefault(line[len("(cuda-gdb) ") :], [])
        elif not line.startswith("dsv4-repro:"):
            current.append(line)
    return {command: "\n".join(lines) for command, lines in found.items()}


class EventLoop(types.ModuleType):
    """The ``gdb`` module's part that a script lives in: what it posts is run in order, and it is told when the process stops."""

    error = GdbError

    def __init__(self) -> None:
        super().__init__("gdb")
        self.queue: deque[Callable[[], None]] = deque()
        self.handlers: list[Callable[[Any], None]] = []
        self.events = SimpleNamespace(stop=SimpleNamespace(connect=self.handlers.append))
        self.quit = False

    def post_event(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def stopped(self) -> None:
        """Tell the script that the process has stopped."""
        for handler in self.handlers:
            handler(None)

    def loop(self, seconds: float = 20.0) -> None:
        """gdb's own loop, until the script quits."""
        end = time.monotonic() + seconds
        while not self.quit:
            assert time.monotonic() < end, "the script did not end"
            if self.queue:
                self.queue.popleft()()
            else:
                time.sleep(0.002)


class Patient(EventLoop):
    """The process with a hung kernel in it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        self.left = int(settings.get("launches", 1))
        self.counter = 1
        self.answers = answers()
        self.registers = {
            match[1]: int(match[2], 16)
            for match in re.finditer(r"^(U?R\d+|pc)\s+(0x[0-9a-f]+)", self.answers["info registers"], re.MULTILINE)
        }

    def execute(self, command: str, to_string: bool = False) -> str:
        if command == "continue &":
            if self.counter != 1:
                self.left -= 1
                self.counter = 1
        elif command == "interrupt":
            self.stopped()
        elif command == "quit":
            self.quit = True
        elif command.startswith("info cuda kernels"):
            return self.answers[command] if self.left > 0 else "No CUDA kernels."
        elif command.startswith("print *(@global int*)"):
            return f"$1 = {self.counter}"
        elif found := re.fullmatch(r"set var \*\(@global int\*\)(0x[0-9a-f]+) = (\d+)", command):
            assert int(found[1], 16) == COUNTER, command
            self.counter = int(found[2])
            self.released()
        elif command in self.answers:
            return self.answers[command]
        return ""

    def released(self) -> None:
        """Tell a stand-in server's worker."""
        if self.settings.get("ask") and self.left == 1:
            pid = self.settings["pid"]
            pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            folder = next(pair.partition(b"=")[2] for pair in pairs if pair.startswith(b"DSV4_REPRO_AGENT_DIR=")).decode()
            start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
            place = Path(folder) / f"ask-{pid}-{start}.json"
            partial = place.with_suffix(".tmp")
            partial.write_text(json.dumps({"id": secrets.token_hex(8), "kind": "release", "guard": False}))
            partial.replace(place)

    def parse_and_eval(self, expression: str) -> int:
        name = expression.lstrip("$")
        if name not in self.registers:
            raise GdbError(f"no register {name}")
        return self.registers[name]


def main(argv: list[str]) -> int:
    if "-batch" in argv:
        print("NVIDIA (R) cuda-gdb 13.0 (a stand-in)\nGNU gdb 14\ndsv4-python 3.11.7", flush=True)
        return 0
    settings = json.loads(os.environ.get("FAKE_GDB", "{}"))
    pid = int(argv[argv.index("-p") + 1])
    print("dsv4-repro: stage attaching 0", flush=True)
    if settings.get("refuse"):
        print("ptrace: Operation not permitted.", flush=True)
        return 1
    if settings.get("kill"):
        os.kill(pid, signal.SIGKILL)
    print(banner(), flush=True)
    patient = Patient({**settings, "pid": pid})
    sys.modules["gdb"] = patient
    if settings.get("die"):
        patient.post_event = lambda work: os._exit(3)  # type: ignore[method-assign]
    runpy.run_path(argv[argv.index("-x") + 1])
    patient.loop(float("inf"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
