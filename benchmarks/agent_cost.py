"""Host time that the flight recorder adds to a step, on a model runner that does nothing: no server, no GPU.

``python benchmarks/agent_cost.py`` prints the medians of alternating pairs. It says what the hooks cost on the host, and nothing of
throughput: that needs a server.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "repro" / "agent" / "src"))

from dsv4_repro_agent.guard import Guard
from dsv4_repro_agent.hooks import Hooks
from dsv4_repro_agent.recorder import Recorder
from dsv4_repro_agent.ring import Ring
from dsv4_repro_agent.said import Said
from dsv4_repro_agent.targets import RUNNER_V1

PAIRS, STEPS = 21, 3000


def module() -> ModuleType:
    """A stand-in of the model runner's module."""
    made = ModuleType(RUNNER_V1)

    class Output:
        def get_output(self) -> None: ...

    class Runner:
        device = SimpleNamespace(index=0)

        def execute_model(self, scheduler_output: Any) -> None:
            self._determine_batch_execution_and_padding(num_tokens=6, num_reqs=3)

        def _determine_batch_execution_and_padding(self, num_tokens: int, num_reqs: int) -> Any:
            return SimpleNamespace(name="FULL"), SimpleNamespace(num_tokens=8, num_reqs=4)

        def sample_tokens(self, grammar_output: Any) -> Any:
            return Output()

    made.GPUModelRunner, made.AsyncGPUModelRunnerOutput = Runner, Output  # type: ignore[attr-defined]
    return made


def spend(runner: Any) -> float:
    """Microseconds of processor time of this thread, per step."""
    scheduled = SimpleNamespace(total_num_scheduled_tokens=6)
    begin = time.thread_time_ns()
    for _ in range(STEPS):
        runner.execute_model(scheduled)
        runner.sample_tokens(None).get_output()
    return (time.thread_time_ns() - begin) / STEPS / 1000


def main() -> None:
    plain, hooked = module(), module()
    said = Said()
    with tempfile.TemporaryDirectory() as name:
        recorder = Recorder(
            said, lambda _: Ring(Path(name), slots=1024, rank=0, device=0, vllm="none", agent="bench"), lambda: None
        )
        recorder._events = False
        Hooks(said, recorder, Guard(said, wanted=False), row_states=False).after_import(hooked)
        rows = []
        for _ in range(PAIRS):
            bare = spend(plain.GPUModelRunner())
            recorder.armed = True
            armed = spend(hooked.GPUModelRunner())
            recorder.armed = False
            rows.append((armed - bare, spend(hooked.GPUModelRunner()) - bare))
    for label, column in (("armed", 0), ("disarmed", 1)):
        values = sorted(row[column] for row in rows)
        middle = statistics.median(values)
        sys.stdout.write(f"{label}: {middle:.1f} us a step more (of {PAIRS} pairs: {values[0]:.1f} to {values[-1]:.1f})\n")


if __name__ == "__main__":
    main()
