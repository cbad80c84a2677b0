"""Everything that can be read of a hung server, on all ranks, least disturbing first, within a budget.

Order: a first sample of everything at once (on the disk in two seconds), the kernel log, the agents inside the workers, NCCL's RAS
twice, Python stacks twice, the engine's counters again; then, only if asked for and only while nothing moves, cuda-gdb on each
worker, and last, with consent, the GPU core dump, which ends the worker. Whatever fails is told and holds up nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from ...clock import SYSTEM, Clock, Deadline
from ...forensics.collect import Collected
from ...forensics.collect.core_trigger import DumpSettings
from ...forensics.collect.engine_metrics import parse_metrics, read_page
from ...forensics.collect.kernel_log import KernelLogCollector
from ...forensics.collect.nccl_ras import RasCollector, ras_address
from ...forensics.collect.nvml import Nvml
from ...forensics.collect.process_table import read_environment, same_namespace
from ...forensics.device_state import Unread
from ..gpu_capture import DebuggerProbe
from ..ground import CaptureOutcome, Emit
from .capture_log import CaptureLog, PlannedFile, safely
from .device_looks import DeviceLooks
from .first_sample import first_sample
from .host_looks import ask_agents, look_at_stacks
from .progress_check import Progress
from .records import ServerTarget, Snapshot

__all__ = ["BUDGET_S", "StopClock", "capture_server"]

BUDGET_S = 40.0
#: Between the two looks at stacks, and between the two questions to RAS, seconds.
_APART_S = 3.0
#: With less time left than this a further look at stacks is not begun, seconds.
_STACKS_LEAST_S = 1.5
#: What cuda-gdb and the dump are left of the budget, if they were asked for: 12 of 40 s.
_DEVICE_SHARE = 0.3


class StopClock:
    """A clock on which all deadlines are over as soon as it is stopped: what runs in threads then ends its own children."""

    def __init__(self, inner: Clock = SYSTEM) -> None:
        self._inner = inner
        self._ahead = 0.0

    def stop(self) -> None:
        self._ahead = 1e9

    def monotonic(self) -> float:
        return self._inner.monotonic() + self._ahead

    def wall(self) -> float:
        return self._inner.wall()

    def sleep(self, seconds: float) -> None:
        if not self._ahead:
            self._inner.sleep(seconds)
        else:
            self._inner.sleep(min(seconds, 0.01))


def capture_server(
    target: ServerTarget,
    folder: Path,
    emit: Emit,
    *,
    snapshot: Snapshot | None,
    budget_s: float = BUDGET_S,
    attach: bool,
    allow_dump: bool,
    clock: Clock = SYSTEM,
    dump: DumpSettings | None = None,
    debugger: DebuggerProbe | None = None,
    moved: Callable[[], str] | None = None,
    parallel_attach: bool = False,
    left: list[subprocess.Popen[bytes]] | None = None,
    nvml: Callable[[], Nvml] = Nvml,
    py_spy: Path | None = None,
    root: Path = Path("/proc"),
    stacks: bool = True,
    told: bool = True,
) -> list[CaptureOutcome]:
    """Read the server into ``folder`` (``rank-N/`` for each rank); every outcome is told through ``emit`` as soon as it is there.

    ``moved``: a further signal that it recovered, asked before each attach. ``dump``: the settings that the server was started
    with. ``debugger``: a probe that was started earlier. ``left`` receives debuggers that had to be left alone: end them after the
    target (``gpu_capture.end_left_debuggers``). A full disk does not stop it; what was read is then in the
    outcomes' facts. ``stacks`` False: no py-spy, which needs ptrace.
    ``told`` False: the caller writes the ``capture`` lines itself; then each outcome's line, at its own time, is of kind ``read``.
    """
    deadline = Deadline(budget_s, clock)
    stopping = StopClock(clock)
    log = CaptureLog(folder.absolute(), emit, "capture" if told else "read")
    scratch = Path(tempfile.mkdtemp(prefix="dsv4-cuda-gdb-"))
    probe = debugger or DebuggerProbe(clock=clock)
    if attach and debugger is None:
        # Beside the first sample, and outside the run's folder: what it writes is no evidence.
        probe.start(scratch)
    looks: DeviceLooks | None = None
    try:
        before = first_sample(target, log, snapshot=snapshot, seconds=min(2.0, budget_s), clock=clock, root=root, nvml=nvml)
        progress = Progress(target, before, moved, clock=clock, root=root)
        looks = DeviceLooks(target, log, progress, deadline, probe, stopping, root)
        reserve = _DEVICE_SHARE * budget_s if attach or allow_dump else 0.0
        _host_side(target, log, deadline, reserve, stopping, py_spy, root, stacks=stacks)
        if attach:
            looks.attach_all(parallel=parallel_attach)
        if allow_dump:
            looks.dump_all(dump)
        _counters_again(target, log, deadline)
    except BaseException:
        # Ctrl-C among them: py-spy and the dump's wait end at once; a debugger is never ended by force.
        stopping.stop()
        raise
    finally:
        if left is not None and looks is not None:
            left += looks.left
        shutil.rmtree(scratch, ignore_errors=True)
    log.tell(
        "captured", seconds=round(budget_s - deadline.remaining(), 3), budget_s=budget_s, over=deadline.expired,
        outcomes=len(log.outcomes), timeline_lost=log.timeline_lost,
    )  # fmt: skip
    return log.outcomes


def _host_side(
    target: ServerTarget,
    log: CaptureLog,
    deadline: Deadline,
    reserve: float,
    clock: Clock,
    py_spy: Path | None,
    root: Path,
    *,
    stacks: bool = True,
) -> None:
    """All that leaves the GPU alone. RAS waits between its two questions meanwhile."""

    def time_left() -> float:
        return deadline.remaining() - reserve

    ras = _RasBeside(target, log.folder, clock, root, seconds=min(12.0, max(time_left() - 1.0, 1.0)))
    log.begin("nccl_ras", "none", ras.collector.deadline_s)
    ras.start()
    log.collected(safely(KernelLogCollector(log.folder, since=_since(target)), clock))
    if time_left() > 0:
        ask_agents(target, log, clock=clock, root=root)
    began = clock.monotonic()
    if not stacks:
        why = "py-spy needs ptrace, and nothing that needs it was allowed"
        log.missing("host_stacks", "pauses", Unread("host stacks", why, "Allow it: watch --attach, or run drain --url URL --yes"))
    for number in (1, 2) if stacks else ():
        if time_left() < _STACKS_LEAST_S:
            log.missing("host_stacks", "pauses", Unread(f"host stacks, look {number}", "the capture's time is over"), look=number)
            break
        if not look_at_stacks(target, log, number, seconds=time_left() / (3 - number), clock=clock, py_spy=py_spy, root=root):
            break
        if number == 1:
            wait = _APART_S - (clock.monotonic() - began)
            clock.sleep(max(min(wait, time_left() - _STACKS_LEAST_S), 0.0))
    log.collected(ras.result(max(time_left(), 0.5)))


class _RasBeside:
    """NCCL's RAS asked twice in a thread of its own."""

    def __init__(self, target: ServerTarget, folder: Path, clock: Clock, root: Path, *, seconds: float) -> None:
        worker = next((rank.pid for rank in target.ranks), target.api_pid)
        environment = read_environment(worker, root) if worker is not None else dict(os.environ)
        elsewhere = None
        if worker is not None and same_namespace(worker, "net", root) is False:
            inside = f"nsenter -t {worker} -n -- ncclras -v"
            elsewhere = Unread("NCCL RAS", f"process {worker} has a network namespace of its own", inside)
        self._clock = clock
        self.collector = RasCollector(
            folder,
            world=len(target.ranks) or None,
            address=ras_address(environment if isinstance(environment, dict) else {}),
            elsewhere=elsewhere,
            apart_s=min(_APART_S, seconds / 3),
            deadline_s=seconds,
            clock=clock,
        )
        self._answer: Collected | None = None
        self._thread = threading.Thread(target=self._run, name="dsv4-repro-ras", daemon=True)

    def _run(self) -> None:
        self._answer = safely(self.collector, self._clock)

    def start(self) -> None:
        self._thread.start()

    def result(self, seconds: float) -> Collected:
        self._thread.join(seconds)
        return self._answer or Collected("nccl_ras", "none", seconds, unread=(Unread("NCCL RAS", "the capture's time is over"),))


def _since(target: ServerTarget) -> float:
    """When the server's oldest worker started, seconds since boot."""
    ticks = [rank.start_ticks for rank in target.ranks if rank.start_ticks > 0]
    return min(ticks, default=0) / os.sysconf("SC_CLK_TCK")


def _counters_again(target: ServerTarget, log: CaptureLog, deadline: Deadline) -> None:
    """The engine's counters once more: two scrapes, one before and one after, show that nothing moved meanwhile, or that it did."""
    if target.base_url is None:
        return
    page = read_page(target.base_url, "/metrics", timeout_s=max(min(1.0, deadline.remaining()), 0.3))
    if isinstance(page, Unread):
        log.missing("metrics", "none", page, look=2)
        return
    artefacts, lost = log.write([PlannedFile("metrics-2.prom", "metrics", page[1])])
    values = parse_metrics(page[1])[0] if page[0] == 200 else {}
    log.add(CaptureOutcome("metrics", "none", 0.0, artefacts, None, {"look": 2, "values": dict(values)}, lost))
