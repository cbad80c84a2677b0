"""The case as the rules see it: who moved, what each GPU did last, what each rank's threads wait for, and what came before what.

Everything here is derived from the facts and cited; nothing is decided.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from ..evidence.casefile import CaseFile
from ..evidence.facts import DeviceFacts, GpuSample, KernelEvent, LogEvent, MetricSample, ProcSample, StatsLine, ThreadSample
from ..evidence.refs import Ref
from ..evidence.stack_meaning import in_startup
from ..evidence.stamps import Stamp
from .agent_view import AgentRank, agent_ranks
from .gpu_view import GpuState, gpu_states
from .token_view import TokenFlow, token_flow

__all__ = ["Process", "Timed", "View"]

#: Seconds between an entry of the kernel log and everything else, beyond which they are not one story.
_LONG_BEFORE = 1800.0
_COMPILER = re.compile(r"(?:^|/|\s)(?:cicc|ptxas|nvcc|ninja|cc1plus|nvlink|fatbinary|cudafe\+\+)(?:\s|$)")


class Timed(Protocol):
    """Anything with a place in its source and perhaps a time."""

    @property
    def ref(self) -> Ref: ...
    @property
    def order(self) -> tuple[int, int]: ...
    @property
    def at(self) -> Stamp | None: ...


@dataclass(frozen=True, slots=True)
class Process:
    """One process whose threads were seen. ``threads``: last sample of each; ``moved``: main thread's frames differ between samples
    (True/False), None with one sample. ``label``: for sentences."""

    label: str
    pid: int | None
    rank: int | None
    role: Literal["engine", "worker", "api"] | None
    threads: tuple[ThreadSample, ...]
    samples: tuple[ThreadSample, ...]
    moved: bool | None
    count: int

    @property
    def main(self) -> ThreadSample | None:
        named = next((t for t in self.threads if t.thread == "MainThread"), None)
        if named is not None:
            return named
        own = next((t for t in self.threads if t.pid is not None and t.tid == str(t.pid)), None)
        return own or next((t for t in self.threads if t.waits != "queue-get"), self.threads[0] if self.threads else None)

    @property
    def copy_thread(self) -> ThreadSample | None:
        return next(
            (
                t
                for t in self.threads
                if "OutputCopy" in t.thread
                or any(f.function in ("async_output_busy_loop", "_async_output_busy_loop") for f in t.frames)
            ),
            None,
        )

    def doing(self, *words: str) -> ThreadSample | None:
        return next((t for t in self.threads if t.waits in words), None)


class View:
    """Built once per case."""

    def __init__(self, case: CaseFile) -> None:
        self.case = case

    # --- events -----------------------------------------------------------------------------------------------------------------

    @cached_property
    def by_kind(self) -> dict[str, list[LogEvent]]:
        table: dict[str, list[LogEvent]] = defaultdict(list)
        for event in self.case.events:
            table[event.kind].append(event)
        return table

    def events(self, *kinds: str) -> list[LogEvent]:
        return [event for kind in kinds for event in self.by_kind.get(kind, ())]

    def before(self, first: Timed, second: Timed) -> bool | None:
        """Did ``first`` happen before ``second``? By order within one part, by time between parts; None if neither can tell."""
        if first.ref.source == second.ref.source and first.order[0] == second.order[0]:
            return first.order < second.order
        if self.case.axis.comparable(first.at, second.at):
            a = self.case.when(first.at, first.ref.source)
            b = self.case.when(second.at, second.ref.source)
            if a is not None and b is not None and a != b:
                return a < b
        return None

    def time(self, item: Timed) -> float | None:
        return self.case.when(item.at, item.ref.source)

    @cached_property
    def symptoms(self) -> list[LogEvent]:
        """Lines that say "a worker did not answer" and nothing more."""
        return self.events("shm-wait", "rpc-timeout", "fatal", "engine-dead")

    @cached_property
    def gave_up(self) -> list[LogEvent]:
        """The engine gave up on a step: RPC timeout (not the death of a process)."""
        return self.events("rpc-timeout")

    @cached_property
    def flow(self) -> TokenFlow:
        return token_flow(self)

    @cached_property
    def gpus(self) -> tuple[GpuState, ...]:
        return gpu_states(self)

    def gpus_in(self, *states: str) -> list[GpuState]:
        return [gpu for gpu in self.gpus if gpu.state in states]

    # --- phase ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def startup_events(self) -> list[LogEvent]:
        return self.events("load-start", "load-progress", "load-done", "compile-start", "compile-step", "compile-done",
            "capture-progress",
                           "capture-done", "init-done")  # fmt: skip

    @cached_property
    def phase(self) -> Literal["startup", "started", "serving", "unknown"]:
        """started: it was seen to finish its start-up and nothing was served yet. serving: requests were seen."""
        served = self.case.stats or any(m.name == "vllm:num_requests_running" for m in self.case.metrics) or self.case.dumps
        ready = self.events("serving")
        pending = [e for e in self.startup_events if not any(self.before(e, r) for r in ready)] if ready else self.startup_events
        later = [e for e in pending if any(self.before(r, e) for r in ready)]
        if ready and not later:
            return "serving" if served or self.gave_up else "started"
        if served and not self.startup_events:
            return "serving"
        if self.startup_events and not ready:
            if self.case.stats and any(line.running or line.waiting for line in self.case.stats):
                return "serving"
            return "startup"
        if later:
            return "startup"
        if any(in_startup(thread.frames) for thread in self.case.threads):
            return "startup"
        if served or any(t.waits in ("worker-dequeue", "engine-wait-reply", "queue-get", "engine-idle") for t in self.case.threads):
            return "serving"
        return "unknown"

    # --- processes --------------------------------------------------------------------------------------------------------------

    @cached_property
    def processes(self) -> tuple[Process, ...]:
        groups: dict[tuple[object, ...], list[ThreadSample]] = defaultdict(list)
        for thread in self.case.threads:
            key: tuple[object, ...]
            if thread.pid is not None:
                key = ("pid", thread.pid)
            elif thread.rank is not None:
                key = ("rank", thread.rank)
            else:
                key = ("part", thread.order[0]) if thread.role is None else ("role", thread.role, thread.order[0])
            groups[key].append(thread)
        return tuple(_process(threads) for threads in groups.values())

    @cached_property
    def workers(self) -> list[Process]:
        return [p for p in self.processes if p.role == "worker" or (p.role is None and p.rank is not None)]

    @cached_property
    def engines(self) -> list[Process]:
        return [p for p in self.processes if p.role == "engine"]

    def process_of_rank(self, rank: int, pid: int | None = None) -> Process | None:
        for process in self.processes:
            if pid is not None and process.pid == pid:
                return process
        return next((p for p in self.processes if p.rank == rank), None)

    @cached_property
    def world(self) -> int | None:
        """Ranks that work together: tensor x pipeline, else the largest communicator, else the ranks that were seen."""
        sizes = {
            fact.package: int(fact.version)
            for fact in self.case.versions
            if fact.package.endswith("parallel_size") and fact.version.isdigit()
        }
        if "tensor_parallel_size" in sizes:
            return sizes["tensor_parallel_size"] * sizes.get("pipeline_parallel_size", 1)
        for query in self.case.ras:
            for comm in query.comms:
                if comm.size:
                    return comm.size
                total = max((sum(count for count, _ in groups) for groups in comm.groups.values()), default=0)
                if total:
                    return total
        return None

    @cached_property
    def single_gpu(self) -> bool | None:
        """True if exactly one GPU does the work, False if several do, None if not known."""
        if self.world is not None:
            return self.world == 1
        ranks = {p.rank for p in self.workers if p.rank is not None} | {d.rank for d in self.case.devices if d.rank is not None}
        if (
            len(ranks) > 1
            or len({p.pid for p in self.workers if p.pid is not None}) > 1
            or self.case.ras
            or self.case.watchdog
            or self.case.flights
        ):
            return False
        if len([g for g in self.gpus if g.index is not None and g.state in ("spin", "working", "busy")]) > 1:
            return False
        if any(any("uniproc_executor" in f.file for f in t.frames) for t in self.case.threads):
            return True
        names = {e.process for e in self.case.events if e.process}
        if any("TP1" in n or "TP2" in n or "_PP1" in n or "EP1" in n for n in names):
            return False
        return None

    # --- devices ----------------------------------------------------------------------------------------------------------------

    @cached_property
    def devices(self) -> list[DeviceFacts]:
        """The last look at each process's device that showed something."""
        table: dict[tuple[object, ...], DeviceFacts] = {}
        for number, facts in enumerate(self.case.devices):
            key = (facts.pid, facts.rank) if facts.pid is not None or facts.rank is not None else (number,)
            if facts.kernels or facts.exception or key not in table:
                table[key] = facts
        return list(table.values())

    @cached_property
    def agents(self) -> tuple[AgentRank, ...]:
        """What the agent of each worker left."""
        return agent_ranks(self.case.rings, self.case.readings)

    # --- is an entry of the kernel log part of this? ------------------------------------------------------------------------------

    @cached_property
    def engine_speaks(self) -> bool:
        """Is there any evidence of the engine itself (log lines, counters, stacks), so that an error of it would show?"""
        return bool(self.case.stats or self.case.metrics or self.case.threads or self.symptoms or self.case.dumps)

    @cached_property
    def engine_ended(self) -> list[LogEvent]:
        """Lines that say that the engine or a worker ended badly."""
        return self.events("fatal", "engine-dead", "worker-died", "engine-proc-died", "engine-failed-start", "actor-died",
            "cuda-error",
                           "coredump-exception")  # fmt: skip

    def kernel_link(self, event: KernelEvent) -> Literal["old", "linked", "open"]:
        """old: tokens flowed after it, or all else is much later. linked: close in time to the rest, or the engine ended badly.
        open: nothing ties it to the rest."""
        if any(line.generation_rate > 0 and self.before(event, line) for line in self.case.stats):
            return "old"
        placed = self.time(event)
        timed: list[Timed] = [*self.symptoms, *self.case.stats, *self.case.gpus, *self.engine_ended, *self.case.watchdog]
        others = [t for item in timed if self.case.axis.comparable(event.at, item.at) and (t := self.time(item)) is not None]
        if placed is not None and others:
            if min(others) - placed > _LONG_BEFORE:
                return "old"
            if placed <= max(others) + _LONG_BEFORE:
                return "linked"
        if self.engine_ended:
            return "linked"
        return "open"

    # --- processes of the operating system --------------------------------------------------------------------------------------

    def procs(self, pid: int | None) -> list[ProcSample]:
        return [sample for sample in self.case.procs if pid is not None and sample.pid == pid]

    @cached_property
    def compilers(self) -> list[ProcSample]:
        """Compiler processes that are alive in a process listing."""
        return [s for s in self.case.procs if s.table and s.state != "Z" and _COMPILER.search(s.name)]

    @cached_property
    def process_table(self) -> list[ProcSample]:
        return [s for s in self.case.procs if s.table]

    # --- metrics ----------------------------------------------------------------------------------------------------------------

    @cached_property
    def series(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], list[MetricSample]]:
        table: dict[tuple[str, tuple[tuple[str, str], ...]], list[MetricSample]] = defaultdict(list)
        for sample in self.case.metrics:
            table[(sample.name, sample.labels)].append(sample)
        return table

    def metric(self, name: str, **labels: str) -> list[list[MetricSample]]:
        """All series of a name that carry the labels, each in scrape order."""
        return [
            samples
            for (own, own_labels), samples in self.series.items()
            if own == name and all(dict(own_labels).get(key) == value for key, value in labels.items())
        ]

    def last_stats(self) -> list[StatsLine]:
        """The last line of each engine."""
        table: dict[str, StatsLine] = {}
        for line in self.case.stats:
            table[line.engine] = line
        return list(table.values())

    def gpu_samples(self) -> Sequence[GpuSample]:
        return self.case.gpus


def _frames_key(thread: ThreadSample) -> tuple[tuple[str, str, int | None], ...]:
    return tuple((f.function, f.file, f.line) for f in thread.frames)


def _process(threads: Iterable[ThreadSample]) -> Process:
    items = list(threads)
    latest: dict[tuple[str, str], ThreadSample] = {}
    first: dict[tuple[str, str], list[ThreadSample]] = defaultdict(list)
    for thread in items:
        key = (thread.thread, thread.tid if not thread.thread or thread.tid else "")
        latest[key] = thread
        first[key].append(thread)
    pid = next((t.pid for t in items if t.pid is not None), None)
    rank = next((t.rank for t in items if t.rank is not None), None)
    role = next((t.role for t in items if t.role is not None), None)
    title = next((t.process for t in items if t.process), "")
    parts = [title or {"engine": "the engine process", "worker": "a worker", "api": "the API server"}.get(role or "", "a process")]
    if rank is not None and not title:
        parts = [f"rank {rank}"]
    if pid is not None:
        parts.append(f"(pid {pid})")
    main = [key for key in first if key[0] == "MainThread" or (pid is not None and key[1] == str(pid))] or list(first)
    longest = max((first[key] for key in main), key=len)
    claim = next((t.repeat for t in items if t.repeat is not None), None)
    claimed = max((t.claimed_samples or 2 for t in items if t.repeat is not None), default=1)
    moved: bool | None = None
    if len(longest) > 1:
        moved = len({_frames_key(t) for t in longest}) > 1
    elif claim is not None:
        moved = claim == "moved"
    return Process(" ".join(parts), pid, rank, role, tuple(latest.values()), tuple(longest), moved, max(len(longest), claimed))
