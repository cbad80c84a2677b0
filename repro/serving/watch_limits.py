"""Thresholds of the server watchdog, each with where it comes from. Seconds unless a name says otherwise.

The default budget: a stand-still is HUNG at most 5 s after the last progress, with the flight recorder or with NVML and metrics.
What costs longer says so in its reasons (no busy level known, ranks that differ, a step that was never seen to end before).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FATAL_XIDS", "HOST_WORK", "PROCESS_XIDS", "WatchLimits"]

#: Xids that NVML reports as critical and that end or stop work on the card (NVIDIA's Xid catalogue): 13 and 31 illegal access, 43
#: stopped channel, 48 and 94/95 memory errors, 62, 119, 120 firmware, 74 NVLink, 79 off the bus, 109 context switch time-out, 140,
#: 154 recovery needed. 45 (clean-up after a kill) is none.
FATAL_XIDS = frozenset({13, 31, 43, 48, 62, 74, 79, 94, 95, 109, 119, 120, 140, 154})
#: Of these, those that end one process's work and leave the card to others: on a shared card they may be somebody else's.
PROCESS_XIDS = frozenset({13, 31, 43, 94})

#: Kinds of log lines (``forensics.evidence.engine_log.EVENTS``) that name work of the host -> how long, from its newest line, the
#: line explains a silence. Reported: a torch.compile of 2222 s (vllm#34399), loads of an hour with progress lines seconds to a
#: minute apart, Triton JIT during inference that outlasts a 600 s NCCL watchdog (the worst; a minute is usual).
HOST_WORK: dict[str, float] = {
    "load-start": 3600.0, "load-progress": 300.0, "compile-start": 3600.0, "compile-step": 600.0, "capture-progress": 120.0,
    "jit": 120.0, "jit-start": 900.0, "lock-wait": 900.0, "profiler": 120.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """``step_*``: of a launched step with a full graph (decode steps take 1 to 100 ms; the floor is 20 of the slowest).

    ``eager_*``: of any other step (prefill chunks of long contexts take seconds on small cards). A step is overdue after ``factor``
    times the ninth tenth of the healthy ones of its mode, between floor and ceiling; ``unknown`` where none was seen to end.
    """

    step_floor_s: float = 2.0
    step_unknown_s: float = 4.0
    eager_floor_s: float = 8.0
    eager_unknown_s: float = 15.0
    step_factor: float = 8.0
    eager_factor: float = 20.0
    #: The same where no card can be read: silences of tens of seconds that ended by themselves were reported (qwen38#107).
    eager_blind_s: float = 60.0
    step_ceiling_s: float = 60.0
    #: The rings must be seen unchanged for so long, in at least ``least_looks`` looks, also when the clock jumped.
    ring_still_s: float = 1.0
    least_looks: int = 3
    #: The agent's thread beats ten times a second; silent for longer, it did not look at the events (a host thread keeps Python).
    heard_s: float = 1.0
    #: A recorder whose agent does not say that it runs, and no NVML beside it, needs so many times the step's deadline.
    unheard_factor: float = 3.0
    #: Counters unchanged for so long, with requests in hand, count as standing (scrapes come once a second).
    still_s: float = 2.5
    #: NVML averages over 1/6 to 1 s: of 2.5 s that look like a spin, 1.5 s lie inside it whole; fused with ``still_s``.
    spin_s: float = 2.5
    #: Without a power level to compare with, only flat power speaks for a spin: this needs longer.
    flat_s: float = 8.0
    #: Not all cards of the server spin (one rank late, another engine works): a rank that compiles looks the same.
    differ_s: float = 30.0
    #: Spin on NVML's word while a log line of the last minute names host work.
    work_spin_s: float = 20.0
    #: A rank's host that has begun a step and launched nothing for so long explains its peers' wait no more, unless it shows work.
    host_rank_s: float = 30.0
    #: Ranks on other machines are not seen, and one of them may compile: a sign must last so long there.
    remote_s: float = 120.0
    #: Standing still while starting (no step yet, no log line, every card spinning): vllm#8410, 1Cat#652 hang there.
    start_spin_s: float = 180.0
    #: The same where ranks compute on other machines, which may load their weights so long (``HOST_WORK``).
    start_remote_s: float = 3600.0
    #: A step overdue while NVML shows memory traffic: another tenant may make it; after so long the step is hung all the same.
    contradicted_s: float = 60.0
    #: 96 % was seen on GB10, 100 % elsewhere.
    spin_percent: int = 90
    #: A spinning kernel moves no memory: 0 % was seen on every card; decode and prefill of real models show more than 2 %.
    quiet_memory_percent: int = 1
    working_memory_percent: int = 2
    idle_percent: int = 5
    idle_s: float = 1.2
    #: Power of a spin against the same card's busy level: 1/5 to 2/5 was reported for real models (vllm#43885, #49203).
    low_power: float = 0.7
    working_power: float = 0.8
    #: Power that stays within this share (or 3 W) is flat.
    flat_power: float = 0.03
    #: GPM: 0.76 % is one of 132 SMs; DRAM 0.
    few_sms_percent: float = 5.0
    quiet_dram_percent: float = 0.5
    working_dram_percent: float = 2.0
    #: Suspect after so long without progress; at most ``suspect_most_s`` where silences that ended by themselves were longer.
    suspect_s: float = 3.0
    suspect_most_s: float = 30.0
    #: How long working cards alone explain a silence (self-recovering silences of tens of seconds: qwen38#107).
    working_s: float = 120.0
    #: Tokens that stand while the scheduler turns (preemptions, cache usage).
    thrash_s: float = 60.0
    #: Nothing tells whether the server moves, or its cards spin while it says that it is idle: not called healthy after so long.
    unknown_s: float = 10.0
    #: Recovery: this many movements over at least so long.
    recover_moves: int = 3
    recover_s: float = 1.5
    #: A gap between looks longer than this was not watched: nothing that happened in it counts as standing still.
    longest_gap_s: float = 2.5
