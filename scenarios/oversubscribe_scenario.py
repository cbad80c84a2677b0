"""More CTAs in a barrier group than can be resident at once: a member never starts, the others wait for it (#41189, #41834)."""

from __future__ import annotations

from .launches import HostLaunch, Launch, Row, long_row
from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

_ROW = long_row("one group of 4 CTAs", 4, 40000)
_SPIN = "gpu-spin-barrier"

SCENARIO = Scenario(
    name="oversubscribe",
    title="A barrier group larger than what can be resident never completes (vLLM #41189, #41834)",
    class_=_SPIN,
    cause="not-co-resident",
    signature="vllm-41189",
    grounds={
        "gpu": "a group of more CTAs than the card holds, or one whose slots another kernel's CTAs occupy, never retires",
        "cpu": "four CTAs, three slots: proved to wait for ever; the hosts' launches of each release and card are computed",
    },
    story=(
        "launch: the host asks how many CTAs fit an SM and makes the grid from the answer; members of a group wait for each other.",
        "disagreement: the answer is for another instantiation, or counts slots that another kernel's CTAs occupy, or one "
        "group alone "
        "needs more CTAs than the device has slots.",
        "barrier: every resident member has arrived and waits; those that never started cannot arrive. Counter: resident members, "
        "target: all of them.",
    ),
    fixes=(
        Fix("launch", "ask for the occupancy of the instantiation that is launched", upstream="vLLM #41189 (first in 0.20.1)"),
        Fix(
            "launch",
            "keep slots free when the barrier is needed: one a SM where more than one CTA fits, else one",
            upstream="vLLM #41189 (first in 0.20.1)",
        ),
        Fix(
            "fallback",
            "where one group cannot be resident, take a single-CTA kernel instead of an error or a hang",
            upstream="vLLM #41834, #54110",
        ),
    ),
    upstream=("vllm#41189", "vllm#41834", "vllm#54110"),
    example="dsv4-repro run oversubscribe --on cpu",
    rows=(
        Row("three-slots", Launch(_ROW, resident=3), _SPIN, "four CTAs a group, three slots", "not-co-resident"),
        Row(
            "four-slots",
            Launch(_ROW, resident=4),
            "not-hung",
            "the same launch where all four fit",
            fixed=True,
            grounds=("cpu", "gpu"),
        ),
        Row(
            "one-slot",
            Launch(long_row("two rows", 2, 40000, 40000), resident=1),
            _SPIN,
            "two CTAs a group, one slot: not even two members are ever resident together",
            "not-co-resident",
        ),
        Row(
            "larger-than-the-card",
            Launch(_ROW, beyond=36),
            _SPIN,
            "one group of 36 CTAs more than the card holds",
            "not-co-resident",
            grounds=("gpu",),
        ),
        Row(
            "as-large-as-the-card",
            Launch(_ROW, beyond=0),
            "not-hung",
            "one group that just fits the card",
            fixed=True,
            grounds=("gpu",),
        ),
        Row(
            "slots-held",
            Launch(_ROW, leave=3),
            _SPIN,
            "a kernel on another stream holds all slots of the card but three",
            "not-co-resident",
            grounds=("gpu",),
        ),
        Row(
            "headroom-kept",
            Launch(_ROW, leave=4),
            "not-hung",
            "the same kernel on the other stream, with room for all four",
            fixed=True,
            grounds=("gpu",),
        ),
        Row(
            "single-cta",
            Launch(long_row("single CTA", 1, 32768), resident=1),
            "not-hung",
            "the fallback: one CTA does the row alone, one slot is enough",
            fixed=True,
        ),
        Row(
            "launched-all-the-same",
            HostLaunch(1, 9_200_000, 9_200_000, 512, "RTX PRO 6000 Blackwell", "0.20.0"),
            "unknown",
            "99 KiB card, the first release: a group of 1086 CTAs is launched onto 188 slots; computed, nothing was run",
        ),
        Row(
            "no-headroom",
            HostLaunch(47, 99296, 99296, 1024, "RTX PRO 6000 Blackwell", "0.20.0"),
            "unknown",
            "99 KiB card, the first release: members take all 188 slots, so one CTA of another kernel keeps one out; computed",
        ),
        Row(
            "headroom-in-the-launcher",
            HostLaunch(47, 99296, 99296, 1024, "RTX PRO 6000 Blackwell", "0.26.0"),
            "not-hung",
            "the same batch, a release that keeps slots free",
            fixed=True,
        ),
        Row(
            "refused",
            HostLaunch(1, 9_200_000, 9_200_000, 512, "RTX PRO 6000 Blackwell", "0.26.0"),
            "launch-refused",
            "99 KiB card: one row needs more CTAs than 188 SMs hold, and there is no room for the other kernel: an error, "
            "not a hang",
            "oversubscribed",
        ),
        Row(
            "not-refused-227KiB",
            HostLaunch(1, 9_200_000, 9_200_000, 512, "H200", "0.26.0"),
            "not-hung",
            "227 KiB card, the same row: the single-CTA kernel takes it",
            fixed=True,
        ),
        Row(
            "decode-fallback",
            HostLaunch(1, 9_200_000, 9_200_000, 512, "RTX PRO 6000 Blackwell", "0.33.0"),
            "not-hung",
            "99 KiB card, a release with the single-CTA fallback",
            fixed=True,
        ),
    ),
    distinguishes=(
        "members that never started, in a grid whose resident CTAs all wait; no member has left",
        "the counter equals the resident members' arrivals exactly, so nothing was lost or zeroed",
    ),
    not_reproduced=(
        (
            "occupancy asked for the wrong vector width (0.20.0)",
            "a card on which the vec-4 instantiation of 0.20.0 and the one it launches differ in occupancy; computed launches "
            "say that it asks for the wrong one",
        ),
    ),
    notes=(
        "The row three-slots needs a device of three slots; on a GPU the same is made with a group larger than the card, and with "
        "a kernel on another stream that holds all slots but three.",
    ),
)
