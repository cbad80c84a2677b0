"""The readers of a server's own windows, each one look at a time: HTTP figures, log, processes.

Each returns a record of ``records`` and has a bound in time or is read from a thread of its own (``observer``); none changes the
server. Rings and cards: ``rank_signals`` and ``card_signals``; a request of our own, where one is asked for: ``canary``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from ...clock import SYSTEM, Clock
from ...forensics.collect.engine_log_tail import LogTail
from ...forensics.collect.engine_metrics import EngineReading, scrape
from ...forensics.device_state import Unread
from ...forensics.evidence.engine_log import EVENTS
from .process_stat import read_stat
from .records import EngineCounters, EngineSample, LogSample, ProcessSample, ServerTarget

__all__ = ["LogReader", "MetricsReader", "ProcessReader", "engine_sample"]

#: Programs that compile, as the kernel names them.
_COMPILERS = frozenset(
    (
        "nvcc",
        "cicc",
        "ptxas",
        "ninja",
        "cc1plus",
        "cc1",
        "cudafe++",
        "fatbinary",
        "nvlink",
        "as",
        "ld",
        "gcc",
        "g++",
        "c++",
        "clang",
    )
)
_STATS = re.compile(
    r"Avg prompt throughput: (?P<prompt>\d+(?:\.\d+)?) tokens/s, "
    r"Avg generation throughput: (?P<generation>\d+(?:\.\d+)?) tokens/s, Running: (?P<running>\d+) reqs"
)
#: A server begins: what was before it in the file was another one's.
_BEGIN = re.compile(r"vLLM API server version|Initializing a V1 LLM engine")
_PROFILER = re.compile(r"Starting (?:torch |CUDA )?profiler")
_PROFILER_END = re.compile(r"Profiler stopped|Stopping profiler|Shutting down profiler")
_WORK = ("load-start", "load-progress", "compile-start", "compile-step", "capture-progress", "jit", "jit-start", "lock-wait")
_WORK_ENDS = {
    "load-done": ("load-start", "load-progress"),
    "compile-done": ("compile-start", "compile-step"),
    "capture-done": ("capture-progress",),
    "jit-done": ("jit-start", "jit", "lock-wait"),
    "init-done": _WORK,
    "serving": _WORK,
}
_LASTING = (
    "serving",
    "startup-complete",
    "shutdown",
    "fatal",
    "engine-dead",
    "worker-died",
    "engine-proc-died",
    "engine-failed-start",
)
_OTHERS = ("shm-wait", "rpc-timeout", "preempt", "abort", "build-failed", "kv-transfer", "cuda-error", "nccl-warn")
_KINDS = tuple(dict.fromkeys((*_WORK, *_WORK_ENDS, *_LASTING, *_OTHERS)))
_PHASES = {
    "load-start": "loading weights", "load-progress": "loading weights", "load-done": "weights are loaded",
    "compile-start": "compiling", "compile-step": "compiling", "compile-done": "compiled",
    "capture-progress": "capturing CUDA graphs", "capture-done": "CUDA graphs are captured", "init-done": "engine is ready",
    "jit-start": "building kernels", "serving": "serving",
}  # fmt: skip
#: A cheap sieve: a line without one of these words is none of ours.
_SIEVE = re.compile(
    r"block found in|RPC call|atchdog|fatal|EngineDead|an issue|failed|unexpectedly|hutdown|[Ss]hutting|Received|grace|Gracefully"
    r"|SIGTERM|startup complete|Uvicorn|server process|vLLM API|V1 LLM|oad|ompil|Dynamo|[Cc]ache|[Cc]aptur|init engine|JIT|[Nn]inja"
    r"|nvcc|lock|reempt|bort|lient|[Nn](?:IXL|ixl)|REMOTE_KV|KV |[Mm][Cc]ache|ooncake|CUDA|cudaError|nccl|NCCL|rofil|throughput"
)


class MetricsReader:
    """``/metrics`` and ``/health`` of one server, in ``timeout_s`` seconds at most."""

    def __init__(self, base_url: str, *, timeout_s: float = 2.0, clock: Clock = SYSTEM) -> None:
        self._url, self._timeout_s, self._clock = base_url, timeout_s, clock

    def look(self) -> EngineSample:
        return engine_sample(scrape(self._url, timeout_s=self._timeout_s, clock=self._clock))


def engine_sample(reading: EngineReading) -> EngineSample:
    """The reading as the shared record; ``error`` says why ``/metrics`` gave nothing."""
    values = reading.values

    def whole(name: str) -> int | None:
        return None if name not in values else min(int(values[name]), 1 << 53)

    errors = [entry for entry in reading.unread if entry.what == "/metrics"]
    if reading.bad_lines and not errors:
        # Sums over the lines that did parse would be of another thing than the sums before.
        errors = [Unread("/metrics", f"{reading.bad_lines} lines of vLLM's counters do not parse: the scrape is torn")]
    return EngineSample(
        at=reading.at,
        took_s=reading.took_s,
        health=reading.health,
        running=whole("running"),
        waiting=whole("waiting"),
        generation_tokens=values.get("generation_tokens"),
        prompt_tokens=values.get("prompt_tokens"),
        iterations=values.get("iterations"),
        preemptions=values.get("preemptions"),
        finished=values.get("finished"),
        drafted=values.get("drafted"),
        accepted=values.get("accepted"),
        kv_usage=values.get("kv_usage"),
        error="; ".join(f"{entry.why}" for entry in errors),
        by_engine={
            name: EngineCounters(own.get("running"), own.get("generation_tokens"), own.get("iterations"), own.get("kv_usage"))
            for name, own in reading.engines.items()
        },
    )


class LogReader:
    """The tail of the server's log: stats lines, phases, host work, words of an end.

    Ages are counted from when a line was read; for what was there before the first look, from when the file was last changed (a
    lower bound), and the age of a stats line from before it is not known.
    """

    def __init__(self, path: Path, *, clock: Clock = SYSTEM) -> None:
        self._path, self._clock = path, clock
        self._tail = LogTail(path)
        self._events: dict[str, int] = {}
        self._phase = ""
        self._line_at: float | None = None
        self._stats_at: float | None = None
        self._stats: tuple[int, float] | None = None
        self._work = ""
        self._work_at = 0.0
        self.skipped = 0

    def look(self) -> LogSample:
        seen = self._tail.read_new()
        now = self._clock.monotonic()
        if seen.unread is not None:
            return LogSample(at=now, error=seen.unread.why, phase=self._phase)
        self.skipped += seen.skipped
        at = now
        if seen.first and seen.lines:
            try:
                at = now - max(self._clock.wall() - os.stat(self._path).st_mtime, 0.0)
            except OSError:
                at = now
        if seen.lines:
            self._line_at = at
        for line in seen.lines:
            self._line(line, at, known=not seen.first)
        return LogSample(
            at=now,
            last_line_age_s=None if self._line_at is None else now - self._line_at,
            stats_age_s=None if self._stats_at is None else now - self._stats_at,
            stats_running=None if self._stats is None else self._stats[0],
            stats_tokens_per_s=None if self._stats is None else self._stats[1],
            events=dict(self._events),
            phase=self._phase,
            work=self._work,
            work_age_s=now - self._work_at if self._work else None,
        )

    def moved(self, at: float) -> None:
        """The server was seen moving at ``at``: what was said before it is over, but for its start and its end."""
        self._events = {kind: count for kind, count in self._events.items() if kind in _LASTING}
        if self._work and at > self._work_at + 0.5:
            self._work = ""

    def close(self) -> None:
        self._tail.close()

    def _line(self, line: str, at: float, *, known: bool) -> None:
        if not _SIEVE.search(line):
            return
        stats = _STATS.search(line)
        if stats is not None:
            rate = min(float(stats["prompt"]) + float(stats["generation"]), 1e15)  # 400 digits would be infinite
            self._stats = (min(int(stats["running"][:9]), 1 << 30), rate)
            self._stats_at = at if known else None
            self._phase = "serving"
            return
        if _BEGIN.search(line):
            if "API server" in line:
                self._events.clear()
            self._phase, self._work, self._stats, self._stats_at = "starting", "", None, None
        for kind in _KINDS:
            if EVENTS[kind].search(line):
                self._events[kind] = self._events.get(kind, 0) + 1
                self._phase = _PHASES.get(kind, self._phase)
                if kind in _WORK:
                    self._work, self._work_at = kind, at
                elif self._work in _WORK_ENDS.get(kind, ()):
                    self._work = ""
        if _PROFILER.search(line):
            self._work, self._work_at = "profiler", at
        elif _PROFILER_END.search(line) and self._work == "profiler":
            self._work = ""


class ProcessReader:
    """States of a server's processes. A pid that was given to another process since is gone.

    ``exit_status``: asked for the API process once it is gone (the caller's, if the server is its child).
    """

    def __init__(
        self,
        target: ServerTarget,
        *,
        clock: Clock = SYSTEM,
        proc: Path = Path("/proc"),
        exit_status: Callable[[], int | None] | None = None,
    ) -> None:
        self._clock, self._proc = clock, proc
        self._exit_status = exit_status
        self._starts: dict[int, int] = {}
        self._next_scan = -1e9
        self._compiler_pids: tuple[int, ...] = ()
        self._roles: dict[int, str] = {}
        self.retarget(target)

    def retarget(self, target: ServerTarget) -> None:
        """The server's processes as they are known now; from any thread. When one that stays began is remembered."""
        roles = dict(target.tree)
        for rank in target.ranks:
            roles.setdefault(rank.pid, "worker")
        for pid in target.engine_pids:
            roles.setdefault(pid, "engine")
        if target.api_pid is not None:
            roles[target.api_pid] = "api"
        starts = {pid: ticks for pid, ticks in list(self._starts.items()) if pid in roles}
        self._starts = {rank.pid: rank.start_ticks for rank in target.ranks if rank.start_ticks} | starts
        self._roles = roles

    @property
    def pids(self) -> frozenset[int]:
        """All pids of the server that were told."""
        return frozenset(self._roles)

    def look(self, *, compilers: bool = False) -> tuple[ProcessSample, ...]:
        """``compilers``: look for compilers below the server, too (one pass over /proc: only while something stands still)."""
        now = self._clock.monotonic()
        found = [self._one(pid, role, now) for pid, role in self._roles.items()]
        if compilers:
            found += self._compilers(now)
        return tuple(found)

    def _one(self, pid: int, role: str, now: float) -> ProcessSample:
        stat = read_stat(pid, self._proc)
        if stat is not None and self._starts.setdefault(pid, stat.start_ticks) != stat.start_ticks:
            stat = None
        status = None
        # Only the first process is anybody's child: the others' ends are their parents' to know.
        if (stat is None or stat.state in "ZX") and role == "api" and self._exit_status is not None:
            status = self._exit_status()
        if stat is None:
            return ProcessSample(now, pid, role, None, None, status)
        return ProcessSample(now, pid, role, stat.state, stat.cpu_s, status)

    def _compilers(self, now: float) -> list[ProcessSample]:
        """The pass over /proc is made at most once a second, and takes a fiftieth of the time on a machine full of processes."""
        if now < self._next_scan:
            again = ((pid, read_stat(pid, self._proc)) for pid in self._compiler_pids)
            return [ProcessSample(now, pid, "compiler", stat.state, stat.cpu_s) for pid, stat in again if stat is not None]
        found = self._scan(now)
        self._compiler_pids = tuple(sample.pid for sample in found)
        took = self._clock.monotonic() - now
        self._next_scan = now + max(1.0, 50 * took)
        return found

    def _scan(self, now: float) -> list[ProcessSample]:
        parents: dict[int, int] = {}
        found = []
        try:
            names = os.listdir(self._proc)
        except OSError:
            return []
        for name in names[:65536]:
            if name.isdigit() and (stat := read_stat(int(name), self._proc)) is not None:
                parents[stat.pid] = stat.parent
                if stat.name in _COMPILERS:
                    found.append(stat)
        return [
            ProcessSample(now, stat.pid, "compiler", stat.state, stat.cpu_s)
            for stat in found[:64]
            if self._below(stat.pid, parents)
        ]

    def _below(self, pid: int, parents: dict[int, int]) -> bool:
        for _ in range(64):
            pid = parents.get(pid, 0)
            if pid in self._roles:
                return True
            if pid <= 1:
                return False
        return False
