"""A worker child of the stand-in: takes steps from the engine, waits, answers; keeps the agent's ring and answers ``agent ask``.

No GPU: the "copy thread" sleeps for the step's time, or waits for a release where the step is told to wedge. Names of threads and
functions are those that a stack sampler shows of vLLM.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .process import Log, set_title

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
RELEASE_POLL_S = 0.02
RESCUE_S = 0.2


class Agent:
    """The agent's files: ring, status, answers."""

    def __init__(self, settings: dict[str, Any], rank: int) -> None:
        sys.path.insert(0, str(ROOT / "repro" / "agent" / "src"))
        ring = importlib.import_module("dsv4_repro_agent.ring")
        self.write_json = importlib.import_module("dsv4_repro_agent.said").write_json
        self.folder = Path(settings["agent"])
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.ring = ring.Ring(
            self.folder, slots=settings["ring_slots"], rank=rank, device=rank, vllm="0.23.0", agent="0.1.0+standin"
        )
        self.name = f"{os.getpid()}-{ring.process_start()}"
        self.settings = settings
        self.stuck: dict[str, Any] | None = None
        self.stuck_since = 0.0
        self.asked = ""
        self.release: Any = None
        self.armed = {"recorder": True, "guard": settings["guard"], "rescue": settings["rescue"]}
        self.releases = 0
        self.status()
        threading.Thread(target=self._watch, name="dsv4-repro-agent_watch", daemon=True).start()

    def status(self) -> None:
        found = {"found": True, "why": "stand-in"}
        self.write_json(
            self.folder / f"status-{self.name}.json",
            {
                "schema": "dsv4-repro/agent-status/1", "pid": os.getpid(), "vllm": "0.23.0", "ring": str(self.ring.path),
                "armed": self.armed, "releases": self.releases,
                "features": {
                    "recorder": found, "events": found, "side stream": found,
                    "guard": {"found": True, "why": "ready, not armed: this build's producer makes -1 of a padding slot"},
                },
                "events": [],
            },
        )  # fmt: skip

    def _watch(self) -> None:
        while True:
            time.sleep(0.05)
            self.ring.beat()
            try:
                self._control()
                ask = json.loads((self.folder / f"ask-{self.name}.json").read_text(encoding="utf-8"))
                asked = ask["id"]
            except (OSError, ValueError, KeyError):
                continue
            if asked != self.asked and not self.settings["agent_mute"]:
                self.asked = asked
                answer = self._release(asked, bool(ask.get("guard"))) if ask.get("kind") == "release" else self._answer(asked)
                self.write_json(self.folder / f"answer-{self.name}.json", answer)

    def _control(self) -> None:
        try:
            control = json.loads((self.folder / "control.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        wanted = {name: control.get(name, self.armed[name]) for name in ("recorder", "guard")}
        if wanted != {name: self.armed[name] for name in wanted}:
            self.armed |= wanted
            self.settings["guard"] = wanted["guard"]
            self.ring.arm(wanted["recorder"])
            self.status()

    def _release(self, asked: str, guard: bool) -> dict[str, Any]:
        """Releases the wait that there is, and arms the guard through the control file, which the engine reads too."""
        if guard:
            self.write_json(self.folder / "control.json", {"guard": True})
        stuck = self.stuck is not None
        if stuck and self.release is not None:
            self.releases += 1
            self.ring.released()
            self.release()
        return {
            "schema": "dsv4-repro/agent-answer/1", "id": asked, "monotonic_ns": time.monotonic_ns(), "launches": [],
            "released": int(stuck), "why_no_more": "no group has one arrival", "guard": guard, "guard_needed": True,
            "stalled_s": 0.0,
        }  # fmt: skip

    def _answer(self, asked: str) -> dict[str, Any]:
        """The row states of #51593: in a wedge the padded slot's first row has the length -1, and its group's counter is 1 of 2."""
        step = self.stuck
        rows = step["padded_rows"] if step else 8
        counters, lengths = [0] * rows, [3000] * rows
        if step is not None:
            each = max(rows // max(step["padded_requests"], 1), 1)
            lengths = [max(context, each) - each + 1 + place for context in step["contexts"] for place in range(each)]
            lengths += ([1 - each, *range(2 - each, 1)] * rows)[: rows - len(lengths)]
            counters = [1 if length < 0 else 0 for length in lengths]
        launch = {
            "workspace": "0x7f0000000000", "lengths_address": "0x7f0000200000", "rows": rows, "width": 16384, "top_k": 2048,
            "max_seq_len": 16384, "arrival_counters": counters, "lengths": lengths, "read_ns": 120_000,
        }  # fmt: skip
        stalled = time.monotonic() - self.stuck_since if step else 0.0
        return {
            "schema": "dsv4-repro/agent-answer/1", "id": asked, "monotonic_ns": time.monotonic_ns(), "launches": [launch],
            "stalled_s": stalled,
        }  # fmt: skip


class Worker:
    """``settings`` is the document of ``Settings``; steps come as JSON lines on stdin, answers go to stdout."""

    def __init__(self, settings: dict[str, Any], rank: int) -> None:
        self.settings, self.rank = settings, rank
        self.speed = settings["speed"]
        self.steps: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.released = threading.Event()
        self.agent: Agent | None = None
        self.log = Log("Worker" if settings["tp"] == 1 else f"Worker_TP{rank}", settings["log"])
        threading.Thread(target=self.async_output_busy_loop, name="WorkerAsyncOutputCopy", daemon=True).start()

    def worker_busy_loop(self) -> None:
        """The main thread: reads the queue from the engine."""
        for line in sys.stdin:
            message = json.loads(line)
            kind = message["kind"]
            if kind == "step":
                self.execute_model(message)
            elif kind == "release":
                self.released.set()
            elif kind == "set":
                self.settings.update(message["values"])
            elif kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)

    def execute_model(self, message: dict[str, Any]) -> None:
        """Record what the flight recorder would, and hand the step to the copy thread."""
        if self.settings["agent"] and self.agent is None:
            self.agent = Agent(self.settings, self.rank)
            self.agent.release = self.released.set
        if self.agent is not None and self.agent.armed["recorder"]:
            step = message["ring"] = self.agent.ring.begin(1)
            step.graph_mode = {"NONE": 0, "PIECEWISE": 1, "FULL": 2}[message["mode"]]
            step.native, step.next_n = 1, 1 + self.settings["mtp"]
            step.requests, step.tokens = message["live"], message["rows"]
            step.padded_requests, step.padded_tokens = message["padded_requests"], message["padded_rows"]
            padding = message["padded_requests"] - message["live"]
            if message["decode"]:
                step.decode_max = 1 + self.settings["mtp"]
                step.decode_slots, step.decode_zero = message["padded_requests"], padding
                step.decode_min = 0 if padding else step.decode_max
            step.flags |= 1 if self.settings["guard"] else 0
        # What the host does before it launches: a compiler, a profiler that starts.
        if message.get("compile_s"):
            self._compile(message["compile_s"])
        time.sleep(message.get("host_s", 0) / self.speed)
        if (step := message.get("ring")) is not None and self.agent is not None:
            step.launch_ns = step.record_ns = time.monotonic_ns()
            step.wait_ns = step.launch_ns
            self.agent.ring.write(step)
        self.steps.put(message)

    def async_output_busy_loop(self) -> None:
        """The copy thread: ``queue.get``, then the wait for the step's event."""
        while (message := self.steps.get()) is not None:
            self.enqueue_output(message)

    def enqueue_output(self, message: dict[str, Any]) -> None:
        self.synchronize(message)
        step = message.get("ring")
        if step is not None and self.agent is not None:
            step.complete_ns = step.output_ns = time.monotonic_ns()
            self.agent.ring.write(step)
        if not message.get("lost"):
            os.write(1, (json.dumps({"kind": "done", "number": message["number"]}) + "\n").encode())

    def synchronize(self, message: dict[str, Any]) -> None:
        """Wait for the step's end: its time, or a release."""
        if message.get("wedged"):
            if self.agent is not None:
                self.agent.stuck, self.agent.stuck_since = message, time.monotonic()
            limit = message.get("recover_s") or (RESCUE_S if self.settings["rescue"] else None)
            self.released.wait(None if limit is None else limit / self.speed)
            self.released.clear()
            if self.agent is not None:
                self.agent.stuck = None
                if self.settings["rescue"]:
                    self.agent.releases += 1
                    self.agent.ring.released()
                    self.agent.status()
        else:
            time.sleep(message["step_s"] / self.speed)

    def _compile(self, seconds: float) -> None:
        """A child with a compiler's name at work."""
        if self.settings["jit_log"]:
            self.log.warning(
                "jit_monitor.py:104",
                "Triton kernel JIT compilation during inference: standin_kernel. This slows one step down; warm it up before.",
            )
        real = seconds / self.speed
        subprocess.run(
            [sys.executable, "-c", _COMPILER, str(Path(__file__).resolve().parents[1]), str(real), " " * 40],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip


_COMPILER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from standin.process import set_title
end = time.monotonic() + float(sys.argv[2])
set_title("cicc")
while time.monotonic() < end:
    sum(range(20000)); time.sleep(0.01)
"""


def main(arguments: list[str]) -> int:
    """``worker RANK SETTINGS``: until stdin ends."""
    rank, settings = int(arguments[0]), json.loads(arguments[1])
    set_title("VLLM::Worker" if settings["tp"] == 1 else f"VLLM::Worker_TP{rank}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(1, b'{"kind": "up"}\n')
    Worker(settings, rank).worker_busy_loop()
    return 0
