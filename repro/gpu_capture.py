"""Capture of a hung GPU child, least disturbing first: row states, card, kernel log, ``/proc``, host stacks, cuda-gdb, core dump.

The dump ends the context, which the unwedge experiment needs; a run that wants both does the experiment first, replays the step -
it hangs again, in the same child - and dumps that. A second capture of one step therefore repeats only the row states.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..clock import SYSTEM, Clock, Deadline
from ..errors import ReproError, UnavailableError
from ..forensics.collect import Collected, Collector, Disturbance, run_collector
from ..forensics.collect.core_trigger import CoreDumpCollector, DumpSettings
from ..forensics.collect.cuda_gdb import CudaGdb, CudaGdbCollector, find_cuda_gdb, probe_cuda_gdb
from ..forensics.collect.gpm import GpmSample
from ..forensics.collect.host_stacks import HostStackCollector
from ..forensics.collect.kernel_log import KernelLogCollector
from ..forensics.collect.nvml import NvmlDevice
from ..forensics.collect.proc import ProcCollector, process_state
from ..forensics.device_state import CodeImage, DeviceState, GridState, Unread
from ..kernels.abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE, THREADS_PER_CTA
from ..kernels.plan import LaunchPlan
from ..scenarios.drain_steps import DecodeStep
from .child import Child
from .gpu_collectors import GpuSnapshotCollector, RowStateCollector
from .ground import Artefact, CaptureOutcome, Emit, GroundRequest

__all__ = ["DebuggerProbe", "GpuCapture", "copy_ends", "end_left_debuggers"]

#: After its target's end a debugger that was left alone is given so long to end by itself, seconds.
_DEBUGGER_GRACE_S = 5.0
#: And so long after SIGKILL, seconds.
_DEBUGGER_KILL_WAIT_S = 5.0
#: Of the child's stderr at most so much of its beginning and of its end is kept as evidence, bytes.
_STDERR_HEAD, _STDERR_TAIL = 1 << 20, 7 << 20


class DebuggerProbe:
    """Finds cuda-gdb and asks for its version in a thread, beside the child's start: 0.3 s that a hang need not wait for."""

    def __init__(self, find: Callable[[], Path] = find_cuda_gdb, clock: Clock = SYSTEM) -> None:
        self._find = find
        self._clock = clock
        self._thread: threading.Thread | None = None
        self.tool: CudaGdb | None = None
        self.missing: ReproError = UnavailableError("cuda-gdb was not looked for, or did not answer in time")

    def start(self, folder: Path) -> None:
        self._thread = threading.Thread(target=self._look, args=(folder,), name="dsv4-repro-cuda-gdb", daemon=True)
        self._thread.start()

    def _look(self, folder: Path) -> None:
        try:
            self.tool = probe_cuda_gdb(self._find(), folder, clock=self._clock)
        except ReproError as error:
            self.missing = error

    def wait(self, seconds: float = 15.0) -> CudaGdb | None:
        """The debugger, None (and ``missing``) if there is none."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self.tool


@dataclass
class GpuCapture:
    """Collectors over one child. ``second_child``: hangs a new child at the step and dumps that one, if this one cannot be.

    ``since``: seconds since boot at which the workload began (for the kernel log). ``launches``: those that were captured.
    """

    request: GroundRequest
    child: Child
    card: NvmlDevice | None
    debugger: DebuggerProbe
    dump: DumpSettings | None
    since: float
    launches: Mapping[int, LaunchPlan]
    gpm: Callable[[], GpmSample | None] = lambda: None
    second_child: Callable[[DecodeStep, Path], list[CaptureOutcome]] | None = None
    clock: Clock = SYSTEM
    left_debuggers: list[Any] = field(default_factory=list)
    _captured: set[int] = field(default_factory=set)
    _attached: bool = False
    _params: bytes = b""
    _outcomes: list[CaptureOutcome] = field(default_factory=list)
    _emit: Emit = lambda *_arguments, **_fields: None

    def capture(
        self, folder: Path, emit: Emit, step: DecodeStep | None, *, allow_dump: bool, attach: bool = True
    ) -> list[CaptureOutcome]:
        """Read the child into ``folder``; ``step``: the one that hangs, None if nothing does.

        ``attach`` False leaves the debugger for a later call: after it this child can neither write from its side stream nor be
        dumped.
        """
        folder.mkdir(parents=True, exist_ok=True)
        again = step is not None and step.index in self._captured
        if step is not None:
            self._captured.add(step.index)
        self._outcomes, self._emit = [], emit
        states = self._take(RowStateCollector(self.child, folder))
        self._params = bytes.fromhex(str(states.facts.get("params", "")))
        if not again:
            if self.card is not None:
                self._take(GpuSnapshotCollector(self.card, folder, gpm=self.gpm, clock=self.clock))
            self._take(KernelLogCollector(folder, since=self.since))
            self._take(ProcCollector(self.child.pid, folder))
            self._take(HostStackCollector(self.child.pid, folder, clock=self.clock))
        if attach and not self._attached:
            self._attach(folder, _counters(states), hangs=step is not None)
        if allow_dump:
            self._take_dump(folder, step)
        if self.child.stderr_path.exists():
            copy_ends(self.child.stderr_path, folder / "child.err")
        return self._outcomes

    def at_other_launches(self, request: GroundRequest, launches: Mapping[int, LaunchPlan]) -> None:
        """The child has captured other launches: nothing that was read of the earlier ones holds for them."""
        self.request, self.launches = request, launches
        self._captured, self._params = set(), b""

    def end_debuggers(self) -> list[str]:
        """After the child's end: a debugger that had to be left alone has nothing to hold any more, and may be ended.

        One that outlives SIGKILL (it hangs in the driver, state D) is not waited for: a sentence for each is returned.
        """
        survivors = end_left_debuggers(self.left_debuggers, self.clock)
        self.left_debuggers = []
        return survivors

    def _take(self, collector: Collector) -> Collected:
        self._emit("collecting", collector=collector.name, disturbance=collector.disturbance, deadline_s=collector.deadline_s)
        collected = run_collector(collector, self.clock)
        self._outcomes.append(_outcome(collected, self._known(collected.state)))
        return collected

    def _not_read(self, collector: str, disturbance: Disturbance, what: str, why: str, remedy: str) -> None:
        self._outcomes.append(CaptureOutcome(collector, disturbance, 0.0, unread=(Unread(what, why, remedy),)))

    def _attach(self, folder: Path, addresses: list[int], *, hangs: bool) -> None:
        if not self.request.options.get("cuda_gdb", True):
            return None
        tool = self.debugger.wait()
        if tool is not None and self.request.options.get("plain_debugger"):
            tool = dataclasses.replace(tool, python=None)
        if tool is None:
            missing = self.debugger.missing
            return self._not_read("cuda_gdb", "pauses", "cuda-gdb", str(missing), missing.help_text)
        if not hangs:
            why = "not attached: nothing hangs"
            return self._not_read("cuda_gdb", "pauses", "cuda-gdb", why, "Attaching to a healthy process can end it.")
        base = self.request.kernel.params_base
        collector = CudaGdbCollector(self.child.pid, folder, tool, addresses=addresses, params_base=base, clock=self.clock)
        self._attached = True
        try:
            collected = self._take(collector)
        finally:
            if collector.left_running is not None:
                self.left_debuggers.append(collector.left_running)
        facts = {**collected.facts, "child_afterwards": self._answers()}
        self._outcomes[-1] = dataclasses.replace(self._outcomes[-1], facts=facts)
        return None

    def _answers(self) -> str:
        """How the child stands after it was frozen: pending, retired, or what went wrong."""
        try:
            status = self.child.ask({"cmd": "status"}, "status", 10.0)
        except ReproError as error:
            return f"{type(error).__name__}: {error}"
        return "still pending" if status.get("pending") else "no longer pending"

    def _take_dump(self, folder: Path, step: DecodeStep | None) -> None:
        what = "GPU core dump"
        if self.dump is None:
            why = "the child was started without the dump's environment"
            return self._not_read("core_dump", "may end the process", what, why, "Run with --dump.")
        if self._attached and step is not None and self.second_child is not None:
            # The driver's own words after an attach: "CUDA coredump is not supported with late attach. Disabling coredump."
            self._outcomes.extend(self.second_child(step, folder / "second-child"))
            return None
        collector = CoreDumpCollector(self.child.pid, self.dump, folder, stderr=self.child.stderr_path, clock=self.clock)
        collected = self._take(collector)
        dumped = next((item.path for item in collected.files if item.kind == "gpu-core"), None)
        if dumped is None:
            if not collected.files and step is not None and self.second_child is not None:
                self._outcomes.extend(self.second_child(step, folder / "second-child"))
            return None
        from ..forensics.corefile import read_core

        try:
            state = read_core(dumped)
        except ReproError as error:
            gap = Unread(what, f"it was kept but could not be read: {error}", error.help_text)
            self._outcomes[-1] = dataclasses.replace(self._outcomes[-1], unread=(*self._outcomes[-1].unread, gap))
        else:
            self._outcomes[-1] = dataclasses.replace(self._outcomes[-1], state=state)
        return None

    def _known(self, state: DeviceState | None) -> DeviceState | None:
        """The state with what this process knows because it made the launch: parameters and code, where the source had none."""
        if state is None:
            return None
        return dataclasses.replace(state, grids=tuple(self._known_grid(grid) for grid in state.grids))

    def _known_grid(self, grid: GridState) -> GridState:
        kernel = self.request.kernel
        ours = any((plan.grid, 1, 1) == grid.grid_dim for plan in self.launches.values())
        if "topk" not in grid.kernel or grid.block_dim != (THREADS_PER_CTA, 1, 1) or not ours:
            return grid
        code = grid.code
        # With ``--via op`` the launched code is that of torch's library, which need not be this image.
        if code is None and kernel.cubin and self.request.options.get("via", "driver") == "driver":
            code = CodeImage(kernel.cubin, kernel.function, sm=kernel.sm)
        return dataclasses.replace(grid, params=grid.params or self._params or None, code=code)


def end_left_debuggers(debuggers: Sequence[Any], clock: Clock = SYSTEM) -> list[str]:
    """Wait a moment for each, then end it; a sentence for each that outlives SIGKILL."""
    survivors = []
    for debugger in debuggers:
        deadline = Deadline(_DEBUGGER_GRACE_S, clock)
        while debugger.poll() is None and not deadline.expired:
            clock.sleep(0.05)
        if debugger.poll() is None:
            debugger.kill()
            try:
                debugger.wait(timeout=_DEBUGGER_KILL_WAIT_S)
            except subprocess.TimeoutExpired:
                state = process_state(debugger.pid) or "not known"
                survivors.append(f"the debugger {debugger.pid} outlived SIGKILL (state {state})")
    return survivors


def copy_ends(source: Path, target: Path, *, head: int = _STDERR_HEAD, tail: int = _STDERR_TAIL) -> None:
    """Copy a text file that may still grow: whole up to ``head + tail`` bytes, else both ends and a line that says what is cut."""
    with source.open("rb") as reading, target.open("wb") as writing:
        size = reading.seek(0, os.SEEK_END)
        reading.seek(0)
        if size <= head + tail:
            writing.write(reading.read(size))
            return
        writing.write(reading.read(head))
        writing.write(f"\n[dsv4-repro: {size - head - tail} of {size} bytes are left out here]\n".encode())
        reading.seek(size - tail)
        writing.write(reading.read(tail))


def _counters(states: Collected) -> list[int]:
    """Addresses of the arrival counters that are not 0: the words to read with the debugger as well."""
    base = states.facts.get("address")
    if not isinstance(base, int):
        return []
    groups = states.facts.get("arrivals", ())
    return [base + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET for group, count in enumerate(groups) if count][:64]


def _outcome(collected: Collected, state: DeviceState | None) -> CaptureOutcome:
    """A collector's result as the run loop wants it."""
    return CaptureOutcome(
        collector=collected.collector,
        disturbance=collected.disturbance,
        seconds=collected.seconds,
        artefacts=tuple(Artefact(item.kind, item.path, item.origin) for item in collected.files),
        state=state,
        facts=json.loads(json.dumps(dict(collected.facts), default=str)),
        unread=collected.unread,
    )
