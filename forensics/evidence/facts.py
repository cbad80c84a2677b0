"""The records that the readers make. All frozen; every one cites its lines. None means "not written there", never zero.

Units: seconds, watts, MHz, MiB, per cent; token rates per second. ``at`` is the time as written (``stamps.Stamp``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .refs import Ref
from .stamps import Stamp

__all__ = [
    "DeviceFacts",
    "DeviceKernel",
    "FlightEntry",
    "FlightRank",
    "Frame",
    "GpuSample",
    "KernelEvent",
    "LogEvent",
    "MetricSample",
    "Poll",
    "ProcSample",
    "RasComm",
    "RasQuery",
    "ReadFailure",
    "ResidentBlock",
    "SchedulerDump",
    "StatsLine",
    "ThreadSample",
    "VersionFact",
    "WatchdogTimeout",
]


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One line with a known meaning in an engine's or a server's log. ``kind``: a key of ``engine_log.EVENTS``.

    ``order``: (section order, line index), which orders events of one source when times cannot.
    """

    kind: str
    ref: Ref
    order: tuple[int, int]
    at: Stamp | None = None
    process: str = ""
    pid: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StatsLine:
    """The engine's periodic line of throughput and queue lengths. ``kv``: per cent."""

    engine: str
    prompt_rate: float
    generation_rate: float
    running: int
    waiting: int
    ref: Ref
    order: tuple[int, int]
    at: Stamp | None = None
    kv: float | None = None
    deferred: int | None = None
    preemptions: int | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame, innermost first in a stack. ``file`` may be a Python file or a shared object; ``native`` says which."""

    function: str
    file: str = ""
    line: int | None = None
    native: bool = False


@dataclass(frozen=True, slots=True)
class ThreadSample:
    """One thread at one moment. ``role``: of its process, None if not known. ``sample``: rises with each dump of one process.

    ``waits``: what it is doing, a word of ``stack_meaning.WAITS``. ``repeat``: what the heading claims of several samples, and
    ``claimed_samples`` of how many.
    """

    tool: str
    ref: Ref
    frames: tuple[Frame, ...]
    thread: str = ""
    tid: str = ""
    pid: int | None = None
    process: str = ""
    role: Literal["engine", "worker", "api"] | None = None
    rank: int | None = None
    active: bool | None = None
    gil: bool | None = None
    waits: str = "other"
    inside: str = ""
    sample: int = 0
    repeat: Literal["same", "moved"] | None = None
    claimed_samples: int | None = None
    order: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of one GPU. ``index`` None: the source did not say which."""

    ref: Ref
    order: tuple[int, int]
    at: Stamp | None = None
    index: int | None = None
    host: str = ""
    util: float | None = None
    memory_util: float | None = None
    power: float | None = None
    power_limit: float | None = None
    sm_clock: float | None = None
    temperature: float | None = None
    memory_used: float | None = None
    pstate: str = ""
    lost: bool = False


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """A line of the operating system's kernel log. ``kind``: xid, sxid, oom-kill, gpu-gone, hung-task, segfault, link, uvm.

    ``name`` and ``pid`` are those that the kernel named (host pid namespace).
    """

    kind: str
    ref: Ref
    order: tuple[int, int]
    at: Stamp | None = None
    number: int | None = None
    pid: int | None = None
    name: str = ""
    pci: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One sample of a Prometheus exposition. ``scrape`` rises with each scrape in reading order."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    scrape: int
    ref: Ref


@dataclass(frozen=True, slots=True)
class RasComm:
    """One communicator in one RAS answer: ``counts[operation][rank]`` launched; ``groups[operation]`` (ranks, count) where only
    the text's groups are known. ``missing`` and ``dead``: ranks without an answer. ``members``: rank to (host, pid, gpu)."""

    name: str
    ref: Ref
    size: int | None = None
    counts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    groups: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    missing: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    members: Mapping[int, tuple[str, int | None, str]] = field(default_factory=dict)
    status: str = ""
    async_errors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RasQuery:
    """One answer of NCCL's RAS. ``errors``: words of the summary (OK, MISMATCH, INCOMPLETE, ERROR). ``dead_processes``: pids."""

    index: int
    ref: Ref
    comms: tuple[RasComm, ...] = ()
    errors: tuple[str, ...] = ()
    dead_processes: tuple[int, ...] = ()
    timeouts: int = 0
    repeat: Literal["same", "moved"] | None = None


@dataclass(frozen=True, slots=True)
class WatchdogTimeout:
    """ProcessGroupNCCL's watchdog gave up on a collective, or reported what was enqueued and completed."""

    ref: Ref
    order: tuple[int, int]
    at: Stamp | None = None
    rank: int | None = None
    sequence: int | None = None
    operation: str = ""
    waited_ms: int | None = None
    last_enqueued: int | None = None
    last_completed: int | None = None
    group: str = ""


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """One collective in a flight-recorder dump."""

    group: str
    sequence: int
    operation: str
    state: str
    sizes: str = ""


@dataclass(frozen=True, slots=True)
class FlightRank:
    """The flight recorder of one rank: entries that matter (the last completed and all later ones of each group)."""

    ref: Ref
    rank: int | None
    entries: tuple[FlightEntry, ...] = ()
    status: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    empty: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerDump:
    """vLLM's dump of the step that did not come back. ``tokens``: request id to scheduled tokens; ``new``: new requests."""

    ref: Ref
    order: tuple[int, int]
    at: Stamp | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    total: int | None = None
    spec_tokens: int | None = None
    new: int = 0
    finished: int = 0
    preempted: int = 0
    running: int | None = None
    waiting: int | None = None
    kv: float | None = None


@dataclass(frozen=True, slots=True)
class ProcSample:
    """Something of one process from /proc, ps or top. ``state``: R S D T Z X. ``holder_of``: a lock file that it holds."""

    ref: Ref
    order: tuple[int, int]
    pid: int | None = None
    name: str = ""
    state: str = ""
    wchan: str = ""
    rchar: int | None = None
    read_bytes: int | None = None
    cpu: float | None = None
    ticks: int | None = None
    kernel_stack: tuple[str, ...] = ()
    gone: bool = False
    table: bool = False


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """A tool said that it could not look. ``what`` it wanted to read; never evidence of absence."""

    what: str
    why: str
    remedy: str
    ref: Ref


@dataclass(frozen=True, slots=True)
class VersionFact:
    """A version or setting that a log or an environment listing states."""

    package: str
    version: str
    ref: Ref


@dataclass(frozen=True, slots=True)
class ResidentBlock:
    """One CTA that is on the device. ``meaning``: of the code it stands at: global-poll, system-poll, phase-wait, named-barrier,
    cluster-wait, other, unknown."""

    index: tuple[int, int, int]
    meaning: str = "unknown"
    pcs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Poll:
    """A wait equation as read: ``value comparison target`` false. ``source``: registers, memory, printed."""

    block: tuple[int, int, int] | None = None
    value: int | None = None
    target: int | None = None
    comparison: str = ">="
    address: int | None = None
    pc_offset: int | None = None
    instructions: tuple[tuple[int, str], ...] = ()
    scope: Literal["gpu", "sys", ""] = ""
    source: str = ""
    moving: bool = False


@dataclass(frozen=True, slots=True)
class DeviceKernel:
    """One grid on a device. ``blocks`` None: the block table was not read. ``family``: nccl, crossrank, compute."""

    name: str
    ref: Ref
    grid: tuple[int, int, int] | None = None
    block_dim: tuple[int, int, int] | None = None
    device: int | None = None
    grid_id: str = ""
    blocks: tuple[ResidentBlock, ...] | None = None
    polls: tuple[Poll, ...] = ()
    family: str = "compute"
    group_size: int | None = None
    frames: tuple[str, ...] = ()
    sms: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What one look at one process's GPU showed. The seam to the core-dump and transcript readers.

    ``kernels`` None: not readable; empty: read, and nothing was resident (only when the attach is known to have worked).
    ``slots``: blocks that fit at once (SMs x occupancy), where the text states both. ``exception``: CUDBG word or text of a
    GPU exception. ``diagnosis``: the full reader's judgement of the same look, if it could read it; ``diagnosis_hung``: the
    same judged knowing that nothing moves; ``state``: what it read (``DeviceState``).
    """

    ref: Ref
    origin: Literal["measured", "interpreted", "reported"] = "reported"
    pid: int | None = None
    rank: int | None = None
    kernels: tuple[DeviceKernel, ...] | None = None
    exception: str = ""
    num_sms: int | None = None
    sample: int = 0
    repeat: Literal["same", "moved"] | None = None
    unread: tuple[tuple[str, str, str], ...] = ()
    diagnosis: Any = None
    diagnosis_hung: Any = None
    state: Any = None
    slots: int | None = None
