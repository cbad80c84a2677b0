"""Row state zeroed too late or not at all: by one CTA inside the kernel, or not between graph replays (#41444, #41665)."""

from __future__ import annotations

from .launches import BOTH, Launch, Row, long_row
from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

_TWO = long_row("one row, two CTAs", 2, 40000)
_FOUR = long_row("one row, four CTAs", 4, 40000)
_SPIN = "gpu-spin-barrier"

SCENARIO = Scenario(
    name="init-race",
    title="The barrier's counter is zeroed after a peer has arrived, or not at all (vLLM #41444, #41665)",
    class_=_SPIN,
    cause="init-race",
    signature="vllm-41444",
    grounds={
        "gpu": "with the leader's zeroing delayed 50 us, the launch never retires",
        "cpu": "some legal order of execution lets a peer arrive before the zeroing: proved to wait for ever",
    },
    story=(
        "launch: nobody zeroes the row states before the kernel; the leader of each group does it itself.",
        "disagreement: a peer that is faster adds its arrival first; the leader's zero wipes it out.",
        "barrier: all members wait at the first phase, and the counter lacks exactly the arrivals that were wiped out.",
        "stale: where nobody zeroes between two replays of a graph, the counter starts where the last replay ended. Every wait is "
        "over before it begins; members read histograms that are not complete: a wrong answer, and no hang.",
    ),
    fixes=(
        Fix("host", "zero the row states before every launch, on the same stream", upstream="vLLM #41444, #41665 (from 0.20.2)"),
    ),
    upstream=("vllm#41444", "vllm#41665"),
    example="dsv4-repro run init-race --on cpu",
    rows=(
        Row(
            "zeroed-in-kernel",
            Launch(_FOUR, schedule="priority", schedules=24),
            _SPIN,
            "the leader zeroes the row state inside the kernel",
            "init-race",
            "builtin:init-race",
        ),
        Row(
            "zeroed-in-kernel-two",
            Launch(_TWO, schedule="priority", schedules=24),
            _SPIN,
            "the same with the smallest group",
            "init-race",
            "builtin:init-race",
        ),
        Row(
            "zeroed-in-kernel-widened",
            Launch(long_row("widened", 4, 65536)),
            _SPIN,
            "the leader waits 50 us before it zeroes, so that a real device shows it",
            "init-race",
            "builtin:init-race,widen_us=50",
            grounds=("gpu",),
        ),
        Row("zeroed-by-host", Launch(_FOUR, schedule="priority", schedules=4), "not-hung", "zeroed before the launch", fixed=True),
        Row(
            "stale-one-replay",
            Launch(_FOUR, schedule="priority", schedules=24, counter=24),
            "wrong-result",
            "the counter starts where one replay left it: all waits pass at once",
            grounds=BOTH,
        ),
        Row(
            "stale-one-replay-crowded",
            Launch(_FOUR, counter=24, leave=1),
            "wrong-result",
            "the same where another kernel leaves one slot: members come one after another, so that a real device shows it",
            grounds=("gpu",),
        ),
        Row(
            "stale-one-arrival",
            Launch(_FOUR, schedule="priority", schedules=24, counter=1),
            "wrong-result",
            "the counter starts one too high",
        ),
        Row("fresh", Launch(_FOUR), "not-hung", "the same launch with a zeroed counter", fixed=True, grounds=BOTH),
    ),
    distinguishes=(
        "every member is resident and waits at the first phase; the counter is lower than their own arrivals",
        "the silent form: a finished launch with wrong rows, and counters above six arrivals of each CTA and long row",
    ),
    notes=("A counter that starts too high can never make anybody wait longer: it is a wrong result, never a hang.",),
)
