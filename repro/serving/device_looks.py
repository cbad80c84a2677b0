"""Looks at the GPU from outside the worker: cuda-gdb, which freezes it for a while, and the core dump, which ends its context.

cuda-gdb is attached to one worker after another (or to all at once, on request), each time only after progress was read again and
found standing still. A debugger that does not come back is left alone: ending it in its handshake can end the worker too.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...clock import SYSTEM, Clock, Deadline
from ...errors import ReproError
from ...forensics.collect import Collected
from ...forensics.collect.core_trigger import CoreDumpCollector, DumpSettings
from ...forensics.collect.cuda_gdb import CudaGdb, CudaGdbCollector
from ...forensics.collect.proc import process_state
from ...forensics.collect.process_table import inner_pid, read_environment, same_namespace
from ...forensics.device_state import DeviceState, Unread
from ..gpu_capture import DebuggerProbe
from ..ground import CaptureOutcome
from .capture_log import CaptureLog, outcome_of, rank_folder, rank_tag, safely, together, who
from .progress_check import Progress
from .ranks import is_same
from .records import Rank, ServerTarget

__all__ = ["DeviceLooks", "ProcessDump", "dump_settings"]

#: The script inside cuda-gdb gets at most so long, seconds; one attach took 0.7 s (without host symbols), a slow one 19 s.
_SCRIPT_S = 15.0
#: With less time than this left nothing is attached, seconds.
_LEAST_S = 3.0
_DUMP_S = 15.0


@dataclass(frozen=True, slots=True)
class ProcessDump(DumpSettings):
    """The dump of a process that somebody else started: pipe and file by the process's own templates (``%p`` and ``%h``)."""

    pipe: str = ""
    file: str = ""
    host: str = ""
    inner: int = 0

    def _named(self, template: str, pid: int) -> Path:
        return Path(template.replace("%p", str(self.inner or pid)).replace("%h", self.host))

    def pipe_of(self, pid: int) -> Path:
        return self._named(self.pipe, pid)

    def file_of(self, pid: int) -> Path:
        return self._named(self.file, pid)


def dump_settings(pid: int, root: Path = Path("/proc")) -> DumpSettings | Unread:
    """Where the dump of a running process would go, from its environment; or why it cannot be had."""
    what = f"GPU core dump of process {pid}"
    environment = read_environment(pid, root)
    if isinstance(environment, Unread):
        return Unread(what, f"its environment may not be read: {environment.why}", environment.remedy)
    remedy = "Start the server with CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1, CUDA_COREDUMP_PIPE and CUDA_COREDUMP_FILE set."
    if environment.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        return Unread(what, "the server was not started with CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1", remedy)
    pipe, file = environment.get("CUDA_COREDUMP_PIPE", ""), environment.get("CUDA_COREDUMP_FILE", "")
    if not (pipe.startswith("/") and file.startswith("/")) or "%t" in pipe + file:
        return Unread(what, "its pipe and file are not named by whole paths of %p and %h", remedy)
    if same_namespace(pid, "mnt", root) is False:
        return Unread(
            what, "it lives in another mount namespace, and so do its pipe and its file", f"nsenter -t {pid} -m -p -- dsv4-repro …"
        )
    return ProcessDump(Path(pipe).parent, False, pipe, file, os.uname().nodename, inner_pid(pid, root))


@dataclass
class DeviceLooks:
    """``left``: debuggers that had to be left alone; whoever ends the target ends them after it."""

    target: ServerTarget
    log: CaptureLog
    progress: Progress
    deadline: Deadline
    debugger: DebuggerProbe
    clock: Clock = SYSTEM
    root: Path = Path("/proc")
    left: list[subprocess.Popen[bytes]] = field(default_factory=list)
    attached: set[int] = field(default_factory=set)

    # -- cuda-gdb --------------------------------------------------------------------------------------------------------------

    def attach_all(self, *, parallel: bool = False) -> None:
        """cuda-gdb on every worker; told for each that is not attached, and why."""
        if not self.target.ranks:
            self.log.missing("cuda_gdb", "pauses", Unread("cuda-gdb", "no worker process is known", "Name the worker's pid."))
            return
        tool = self.debugger.wait(min(10.0, self.deadline.remaining()))
        if tool is None:
            missing = self.debugger.missing
            self.log.missing("cuda_gdb", "pauses", Unread("cuda-gdb", str(missing), missing.help_text or ""))
            return
        if parallel and len(self.target.ranks) > 1:
            self._attach_together(tool)
            return
        for position, rank in enumerate(self.target.ranks):
            collector = self._ready(rank, tool, len(self.target.ranks) - position)
            if collector is not None:
                self._told(rank, self._attach(rank, collector))

    def _attach_together(self, tool: CudaGdb) -> None:
        """All at once: progress is read before the first, since a frozen peer stops the others anyway."""
        ready = [(rank, collector) for rank in self.target.ranks if (collector := self._ready(rank, tool, 1)) is not None]

        def job(rank: Rank, collector: CudaGdbCollector) -> Callable[[], Collected]:
            return lambda: self._attach(rank, collector)

        answers = together([job(rank, collector) for rank, collector in ready], seconds=self.deadline.remaining() + 2.0)
        for (rank, collector), answer in zip(ready, answers, strict=True):
            if answer is None:
                self.log.missing("cuda_gdb", "pauses", Unread("cuda-gdb", "no answer in time; left alone"), **who(rank))
                self._leave(collector)
            else:
                self._told(rank, answer)

    def _ready(self, rank: Rank, tool: CudaGdb, to_come: int) -> CudaGdbCollector | None:
        """A collector for the rank, or None after it was told why nothing is attached."""
        why = self._why_not(rank)
        if why is not None:
            self.log.missing("cuda_gdb", "pauses", why, **who(rank))
            return None
        remaining = self.deadline.remaining()
        script = max(min(_SCRIPT_S, (remaining - 1.0) / max(to_come, 1)), 1.0)
        collector = CudaGdbCollector(
            rank.pid, self.log.folder / rank_folder(rank, self.target.ranks), tool, addresses=self._counters(rank),
            deadline_s=script, file_name=f"cuda_gdb-{rank_tag(rank)}.txt", clock=self.clock,
        )  # fmt: skip
        collector.deadline_s = max(remaining - 0.5, script)
        self.log.begin("cuda_gdb", "pauses", collector.deadline_s, **who(rank))
        return collector

    def _why_not(self, rank: Rank) -> Unread | None:
        what = f"cuda-gdb on {rank_tag(rank)}"
        if not is_same(rank, self.root):
            return Unread(what, "the process has ended")
        if self.deadline.remaining() < _LEAST_S:
            return Unread(what, "the capture's time is over", f"dsv4-repro autopsy {rank.pid} --attach")
        if same_namespace(rank.pid, "mnt", self.root) is False:
            enter = f"nsenter -t {rank.pid} -m -p -n -- cuda-gdb -p {inner_pid(rank.pid, self.root)} (or docker exec, kubectl exec)"
            return Unread(what, "the process lives in another mount namespace: its libraries cannot be mapped from here", enter)
        # The last thing before each attach: a worker that recovered meanwhile would be ended by it.
        standing = self.progress.check()
        if standing.moved:
            return Unread(what, f"not attached, it recovered: {'; '.join(standing.moved)}")
        if not standing.still:
            why = "not attached: nothing that could show whether it still hangs can be read (" + "; ".join(standing.blind) + ")"
            return Unread(what, why, f"If it surely hangs: dsv4-repro autopsy {rank.pid} --attach")
        return None

    def _counters(self, rank: Rank) -> list[int]:
        """Counters that the agent read as not 0: the words to read with the debugger as well."""
        from ...kernels.abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE

        found: list[int] = []
        for outcome in self.log.outcomes:
            if outcome.collector != "agent_row_states" or outcome.facts.get("pid") != rank.pid:
                continue
            for launch in outcome.facts.get("launches", ()):
                base = int(launch["workspace"], 16)
                found += [
                    base + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET
                    for group, count in enumerate(launch["arrival_counters"])
                    if count
                ]
        return found[:64]

    def _attach(self, rank: Rank, collector: CudaGdbCollector) -> Collected:
        self.attached.add(rank.pid)
        try:
            return safely(collector, self.clock)
        finally:
            self._leave(collector)

    def _leave(self, collector: CudaGdbCollector) -> None:
        if collector.left_running is not None and collector.left_running not in self.left:
            self.left.append(collector.left_running)

    def _told(self, rank: Rank, found: Collected) -> None:
        afterwards = process_state(rank.pid, self.root) if is_same(rank, self.root) else None
        unread = list(found.unread)
        if any("ptrace is refused" in item.why for item in unread):
            self.attached.discard(rank.pid)  # nothing touched the process: a dump can still be had
        if afterwards is None:
            unread.append(Unread(rank_tag(rank), "the process ended under the debugger, or beside it"))
        elif afterwards in ("T", "t") and not self.left:
            unread.append(Unread(rank_tag(rank), "the process was left stopped by the debugger", f"kill -CONT {rank.pid}"))
        self.log.collected(replace(found, unread=tuple(unread)), process_afterwards=afterwards or "gone", **who(rank))

    # -- the core dump ---------------------------------------------------------------------------------------------------------

    def dump_all(self, settings: DumpSettings | None) -> None:
        """Every worker's GPU, side by side: the first dump ends its worker, and the engine then ends the others.

        ``settings``: those that the server was started with, None to take them from each worker's environment.
        """
        jobs: list[tuple[Rank, CoreDumpCollector]] = []
        for rank in self.target.ranks:
            collector = self._dump(rank, settings)
            if isinstance(collector, Unread):
                self.log.missing("core_dump", "may end the process", collector, **who(rank))
                continue
            self.log.begin("core_dump", "may end the process", collector.deadline_s, **who(rank))
            jobs.append((rank, collector))
        work = [(lambda one=collector: safely(one, self.clock)) for _, collector in jobs]
        answers = together(work, seconds=_DUMP_S + 3.0)
        for (rank, _), answer in zip(jobs, answers, strict=True):
            if answer is None:
                item = Unread("GPU core dump", f"no end within {_DUMP_S + 3.0:g} s; it is left alone")
                self.log.missing("core_dump", "may end the process", item, **who(rank))
                continue
            self.log.add(_with_state(outcome_of(answer, who(rank))))

    def _dump(self, rank: Rank, settings: DumpSettings | None) -> CoreDumpCollector | Unread:
        what = f"GPU core dump of {rank_tag(rank)}"
        if not is_same(rank, self.root):
            return Unread(what, "the process has ended")
        if rank.pid in self.attached:
            # The driver's own words after an attach: "CUDA coredump is not supported with late attach. Disabling coredump."
            return Unread(what, "a debugger was attached before, after which the driver makes no dump", "Capture without --attach.")
        if self.deadline.remaining() < _LEAST_S:
            return Unread(what, "the capture's time is over")
        standing = self.progress.check()
        if standing.moved:
            return Unread(what, f"not dumped, it recovered: {'; '.join(standing.moved)}")
        found = settings or dump_settings(rank.pid, self.root)
        if isinstance(found, Unread):
            return found
        return CoreDumpCollector(
            rank.pid, found, self.log.folder / rank_folder(rank, self.target.ranks), stderr=self.target.log_path,
            deadline_s=min(_DUMP_S, self.deadline.remaining()), file_name=f"gpu-{rank_tag(rank)}.nvcudmp", clock=self.clock,
        )  # fmt: skip


def _with_state(outcome: CaptureOutcome) -> CaptureOutcome:
    """A dump that was kept, read."""
    path = next((artefact.path for artefact in outcome.artefacts if artefact.kind == "gpu-core"), None)
    if path is None:
        return outcome
    from ...forensics.corefile import read_core

    try:
        state: DeviceState = read_core(path)
    except ReproError as error:
        gap = Unread("GPU core dump", f"it was kept but could not be read: {error}", error.help_text or "")
        return replace(outcome, unread=(*outcome.unread, gap))
    return replace(outcome, state=state)
