"""The stand-in's switches, each a trouble of the field or a property of the server, read from ``NAME=VALUE`` words."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

__all__ = ["LIVE", "PHASES", "Settings", "from_arguments", "parse_words"]

#: Phases of a start, in order.
PHASES = ("config", "download", "load", "compile", "profile", "capture", "api")


@dataclass(frozen=True)
class Settings:
    """All switches. Times are seconds of the stand-in's clock (``speed`` times ours) unless a name says ``_ms``."""

    # -- the healthy server
    speed: float = 1.0
    seed: int = 1
    step_ms: float = 10.0
    prefill_us: float = 20.0  # a prompt token
    mtp: int = 1
    acceptance: float = 0.5
    capture: str = "2,4,8,16,24,32"  # graph sizes in rows
    eager: bool = False
    max_num_seqs: int = 16
    max_tokens_step: int = 2048
    max_model_len: int = 16384
    kv_blocks: int = 4096  # of 64 tokens
    tp: int = 1
    # -- start-up: how long each phase takes; progress lines come by
    config_s: float = 0.05
    download_s: float = 0.0
    load_s: float = 0.1
    compile_s: float = 0.0
    profile_s: float = 0.05
    capture_s: float = 0.05
    api_s: float = 0.02
    die_in: str = ""  # a phase
    stop_in: str = ""  # a phase that never ends and says nothing
    # -- troubles while serving; those that begin do so ``after`` steps (of real work)
    after: int = 20
    wedge: str = ""  # live counts, "3" or "3,5": the padded-graph wedge (needs MTP, a padded FULL graph and no guard)
    wedge_step: int = 0  # wedges at this step whatever the batch
    recover_s: float = 0.0  # a wedge or stall lifts by itself after this time
    slow_ms: float = 0.0  # each step takes this long from ``after`` on
    long_prefill_s: float = 0.0  # a prompt of 1000 tokens or more takes this long, in one step
    jit_s: float = 0.0  # one step stands still while a child compiles
    jit_log: bool = True
    pause_s: float = 0.0  # a profiler starts: one step stands still, said in the log
    thrash: bool = False  # the scheduler preempts and recomputes, no token comes
    admission: bool = False  # nothing is admitted: running 0, waiting grows
    ipc: bool = False  # the worker's answer is lost: both ends wait, GPU idle
    livelock: bool = False  # the engine burns CPU, GPU idle
    desync: bool = False  # the last rank runs one step ahead, the others wait (needs tp >= 2)
    kill_worker: bool = False  # the last worker gets SIGKILL
    kernel_log: str = ""  # file that gets the OOM killer's words when a worker is killed
    kill_engine: bool = False
    api_dies: bool = False
    # -- deadlines of the engine
    deadline_s: float = 300.0
    shm_s: float = 60.0
    stats_s: float = 10.0
    linger_s: float = 5.0  # from the engine's death to the API process's end
    # -- what its windows show
    metrics: str = ""  # slow:SECONDS, malformed, gone, huge, partial, hang
    health: str = ""  # slow:SECONDS, gone, hang
    running_zero: bool = False
    refuse: int = 0  # status given to each completion instead of an answer: 429, 503
    reset: bool = False  # completions are cut off after their first token
    log: str = ""  # file to write to instead of stderr; reopened when it was renamed
    log_silent: bool = False
    access_log: bool = True
    # -- the agent
    agent: str = ""  # its folder
    ring_slots: int = 64
    agent_mute: bool = False  # agent asked, no answer
    guard: bool = False
    rescue: bool = False

    def changed(self, words: Mapping[str, Any]) -> Settings:
        """With other values. Raises ValueError, naming the switch."""
        types = get_type_hints(Settings)
        values: dict[str, Any] = {}
        for name, raw in words.items():
            if name not in types:
                raise ValueError(f"no switch {name!r}")
            kind = types[name]
            if kind is bool:
                values[name] = raw if isinstance(raw, bool) else str(raw).lower() not in ("0", "false", "no", "")
            else:
                values[name] = kind(raw)
        return replace(self, **values)

    @property
    def sizes(self) -> list[int]:
        """Graph sizes in rows, rising."""
        return sorted(int(word) for word in self.capture.split(",") if word)

    @property
    def wedge_at(self) -> frozenset[int]:
        """Live counts that wedge."""
        return frozenset(int(word) for word in self.wedge.split(",") if word)

    def document(self) -> dict[str, Any]:
        """All values, for the processes below."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


#: What ``POST /standin/set`` may change while it runs (all but the shape of the server).
LIVE = frozenset(item.name for item in fields(Settings)) - {
    "speed", "seed", "tp", "kv_blocks", "max_model_len", "agent", "ring_slots", "log",
}  # fmt: skip


def parse_words(words: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` or ``NAME`` (true)."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        found[name] = value if equals else "1"
    return found


def from_arguments(flags: Mapping[str, Any], words: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """vLLM's flags and environment, then the stand-in's own words; later ones win."""
    values: dict[str, Any] = {}
    for name, variable in (
        ("deadline_s", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
        ("shm_s", "VLLM_RINGBUFFER_WARNING_INTERVAL"),
        ("stats_s", "VLLM_LOG_STATS_INTERVAL"),
    ):
        if variable in environment:
            values[name] = environment[variable]
    if environment.get("DSV4_REPRO_AGENT") == "1" and environment.get("DSV4_REPRO_AGENT_DIR"):
        values["agent"] = environment["DSV4_REPRO_AGENT_DIR"]
    values["guard"] = environment.get("DSV4_REPRO_GUARD") == "1"
    values["rescue"] = environment.get("DSV4_REPRO_RESCUE") == "1"
    speculative = json.loads(flags["speculative_config"]) if flags.get("speculative_config") else {}
    values["mtp"] = int(speculative.get("num_speculative_tokens", 0))
    compilation = json.loads(flags["compilation_config"]) if flags.get("compilation_config") else {}
    if compilation.get("cudagraph_capture_sizes"):
        values["capture"] = ",".join(str(int(size)) for size in compilation["cudagraph_capture_sizes"])
    if compilation.get("cudagraph_mode") in ("NONE", "PIECEWISE"):
        values["eager"] = True
    for name, flag in (
        ("tp", "tensor_parallel_size"),
        ("max_num_seqs", "max_num_seqs"),
        ("max_tokens_step", "max_num_batched_tokens"),
        ("max_model_len", "max_model_len"),
        ("eager", "enforce_eager"),
    ):
        if flags.get(flag) is not None:
            values[name] = flags[flag]
    values |= parse_words(environment.get("STANDIN", "").split())
    values |= parse_words(words)
    return Settings().changed(values)
