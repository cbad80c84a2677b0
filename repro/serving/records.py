"""What the parts of the server ground, ``why``, ``watch`` and ``unwedge`` tell each other. Frozen; no live objects.

Times called ``at`` are seconds of ``Clock.monotonic``. A value that could not be read is None and is named in ``unread`` or
``blind``; it is never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...forensics.device_state import Unread

__all__ = [
    "CARDS_GUESSED",
    "Assessment",
    "Blind",
    "Change",
    "DeviceSample",
    "EngineCounters",
    "EngineSample",
    "LoadSample",
    "LogSample",
    "ProcessSample",
    "Rank",
    "RankProgress",
    "ServerState",
    "ServerTarget",
    "Snapshot",
]

#: starting: not yet ready; suspect: something stands still, not shown on the device; exited: ended with status 0; crashed: any
#: other end.
ServerState = Literal["starting", "healthy", "suspect", "hung", "exited", "crashed"]
#: The observer's word (``Blind.signal``) where none of the visible cards is known to be the server's.
CARDS_GUESSED = "NVML mapping"


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that the wrapper changed about the server: an environment variable, an engine flag, a limit; and what for."""

    what: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker process. ``rank``: tensor-parallel rank if known. ``start_ticks``: with the pid it names the process (field 22 of
    /proc/PID/stat). ``gpu_uuid``: the GPU it computes on, by NVML. ``how``: how it was recognised."""

    pid: int
    rank: int | None
    start_ticks: int
    gpu_uuid: str | None = None
    gpu_index: int | None = None
    how: str = ""


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """One server as found or started. ``owned``: we started it, so we may end it. ``base_url`` without a trailing slash.

    ``tree``: every process of it that was seen, pid -> role ("api", "engine", "worker", "other").
    """

    base_url: str | None
    model: str | None = None
    api_pid: int | None = None
    engine_pids: tuple[int, ...] = ()
    ranks: tuple[Rank, ...] = ()
    tree: Mapping[int, str] = field(default_factory=dict)
    log_path: Path | None = None
    agent_folder: Path | None = None
    owned: bool = False
    changes: tuple[Change, ...] = ()
    unread: tuple[Unread, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One reading of ``/metrics`` (summed over engines) and ``/health``. Counters in their own units; None: not exported.

    ``took_s``: how long the scrape took. ``health``: HTTP status, None if it did not answer.
    """

    at: float
    took_s: float = 0.0
    health: int | None = None
    running: int | None = None
    waiting: int | None = None
    generation_tokens: float | None = None
    prompt_tokens: float | None = None
    iterations: float | None = None
    preemptions: float | None = None
    finished: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    kv_usage: float | None = None
    error: str = ""
    by_engine: Mapping[str, EngineCounters] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """One engine's own figures of a scrape (label ``engine``): with data parallelism one may stand while the sum moves."""

    running: float | None = None
    generation_tokens: float | None = None
    iterations: float | None = None
    kv_usage: float | None = None


@dataclass(frozen=True, slots=True)
class LogSample:
    """What the log's tail says: age of its last line and of the last stats line (seconds), last stats' running requests, newest
    kinds of event (those of ``forensics.evidence.engine_log.EVENTS``) with their count since the server was last seen moving.

    ``stats_tokens_per_s``: prompt plus generation rate of the last stats line. ``work``: the newest kind of event that names host
    work (JIT, compile, capture, load), ``work_age_s`` seconds ago; an event that ends such work clears both."""

    at: float
    last_line_age_s: float | None = None
    stats_age_s: float | None = None
    stats_running: int | None = None
    events: Mapping[str, int] = field(default_factory=dict)
    phase: str = ""
    error: str = ""
    stats_tokens_per_s: float | None = None
    work: str = ""
    work_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class RankProgress:
    """A worker's flight recorder: ``begun`` steps, when a step was last seen to end (``last_end_age_s``), the launch age of the
    oldest step not seen to end (``unfinished_age_s``, None: none), and that step's batch.

    ``tokens``: of that step. ``launching_age_s``: since the newest step was begun, if its launches are not all queued yet (the
    host is at work or waits there). ``healthy_s``: longest time from launch to end of the recent steps of the same graph mode,
    None if none was seen. ``heard_age_s``: since the agent's thread last said that it runs, None if this agent does not say."""

    pid: int
    at: float
    rank: int | None = None
    begun: int = 0
    last_end_age_s: float | None = None
    unfinished: tuple[int, ...] = ()
    unfinished_age_s: float | None = None
    requests: int | None = None
    padded_requests: int | None = None
    graph_mode: str = "unknown"
    decode_min: int | None = None
    releases: int = 0
    error: str = ""
    tokens: int | None = None
    launching_age_s: float | None = None
    healthy_s: float | None = None
    heard_age_s: float | None = None
    device: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One GPU by NVML. ``busy_power_w``: the same card's own level while this server computed, None until learnt.

    ``sm_util``, ``sm_occupancy``, ``dram_util``: GPM's averages of the last second in percent. ``others``: compute processes on the
    card that are not this server's, None: not known. ``own``: False where it is not known whether the server computes on it."""

    at: float
    index: int
    uuid: str | None = None
    utilisation: int | None = None
    memory_utilisation: int | None = None
    power_w: float | None = None
    busy_power_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_used: int | None = None
    sm_occupancy: float | None = None
    xids: tuple[int, ...] = ()
    unread: tuple[Unread, ...] = ()
    sm_util: float | None = None
    dram_util: float | None = None
    others: int | None = None
    own: bool = True


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process: state letter of /proc (R, S, D, Z, T; None: gone), CPU seconds so far, role ("compiler": nvcc, ptxas, ninja …
    below one of the server's processes)."""

    at: float
    pid: int
    role: str
    state: str | None = None
    cpu_s: float | None = None
    exit_status: int | None = None


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The client's side of our own load: streams open, tokens received in all, age of the last token, client faults by kind."""

    at: float
    open: int = 0
    tokens: int = 0
    last_token_age_s: float | None = None
    faults: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that one look saw. A source that is None was not looked at; ``blind`` says why where that matters.

    ``canary_age_s``: since a canary completion was last answered; ``canary_waiting_s``: how long the open one has waited;
    ``canary_error``: why the newest could not be asked, which says nothing of the engine.
    ``remote_ranks``: ranks of this server on other machines, as far as its own command line tells."""

    at: float
    engine: EngineSample | None = None
    log: LogSample | None = None
    progress: tuple[RankProgress, ...] = ()
    devices: tuple[DeviceSample, ...] = ()
    processes: tuple[ProcessSample, ...] = ()
    load: LoadSample | None = None
    canary_age_s: float | None = None
    blind: tuple[Blind, ...] = ()
    canary_waiting_s: float | None = None
    canary_error: str = ""
    remote_ranks: int = 0


@dataclass(frozen=True, slots=True)
class Blind:
    """A signal that says nothing here, and why (health 200 while nothing moves; NVML without memory figures)."""

    signal: str
    why: str


@dataclass(frozen=True, slots=True)
class Assessment:
    """How the server stands. ``since``: when it last moved, or when the state began if it never did. ``device_signals``: those
    that show the stand-still on the device; without one there is no HUNG."""

    state: ServerState
    at: float
    since: float
    reasons: tuple[str, ...] = ()
    device_signals: tuple[str, ...] = ()
    blind: tuple[Blind, ...] = ()
    live_requests: int | None = None
