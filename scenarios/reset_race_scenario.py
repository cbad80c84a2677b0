"""The leader zeroes the counter at the end while a peer still polls its last wait (flashinfer #3610, #3615)."""

from __future__ import annotations

from .launches import Launch, Row, SamplerLaunch, long_row
from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

_TWO = long_row("one row, two CTAs", 2, 40000)
_FOUR = long_row("one row, four CTAs", 4, 40000)
_SPIN = "gpu-spin-barrier"

SCENARIO = Scenario(
    name="reset-race",
    title="The leader resets the counter before the last peer has seen it (flashinfer #3610)",
    class_=_SPIN,
    cause="reset-race",
    signature="flashinfer-3610",
    grounds={
        "gpu": "with the peers' last poll delayed 50 us, the launch never retires; the counter is 0",
        "cpu": "some legal order of execution lets the leader leave first: proved to wait for ever",
    },
    story=(
        "barrier: at the last barrier of a launch every member has arrived, and the counter has reached its target.",
        "disagreement: the leader sees it first, goes on, and zeroes the counter for the next launch.",
        "barrier: a peer that polls only now reads 0 and waits for arrivals that nobody will make. The leader is gone.",
    ),
    fixes=(
        Fix("consumer", "let the last CTA that leaves reset the counter, not the leader", upstream="flashinfer #3615 (0.6.14)"),
        Fix("host", "never reset in the kernel: zero before every launch", upstream="vLLM from 0.20.2"),
    ),
    upstream=("flashinfer#3610", "flashinfer#3615", "vllm#43885", "vllm#49203", "vllm#52247"),
    example="dsv4-repro run reset-race --on cpu",
    rows=(
        Row(
            "leader-resets",
            Launch(_FOUR, schedule="priority", schedules=24),
            _SPIN,
            "the leader zeroes the counter at the end",
            "reset-race",
            "builtin:reset-race",
        ),
        Row(
            "leader-resets-two",
            Launch(_TWO, schedule="priority", schedules=24),
            _SPIN,
            "the same with the smallest group",
            "reset-race",
            "builtin:reset-race",
        ),
        Row(
            "leader-resets-widened",
            Launch(long_row("widened", 4, 65536)),
            _SPIN,
            "peers wait 50 us before their last poll, so that a real device shows it",
            "reset-race",
            "builtin:reset-race,widen_us=50",
            grounds=("gpu",),
        ),
        Row(
            "never-reset",
            Launch(_FOUR, schedule="priority", schedules=4),
            "not-hung",
            "no reset in the kernel, zeroed by the host",
            fixed=True,
        ),
        Row(
            "flashinfer-before",
            SamplerLaunch(),
            _SPIN,
            "FlashInfer's own kernel of the sampler, the last release before #3615: its source, compiled here",
            "reset-race",
            "flashinfer==0.6.13",
            also=(("wrong-result", None),),
        ),
        Row(
            "flashinfer-after",
            SamplerLaunch(),
            "not-hung",
            "the first release with #3615; a wrong mask under some orders is another defect of it: missing-fence",
            None,
            "flashinfer==0.6.14",
            fixed=True,
            also=(("wrong-result", None),),
        ),
    ),
    distinguishes=(
        "the counter is 0 while members wait at the last phase, and the leader has left",
        "peer-left has a counter that equals the waiting members' arrivals; here they are gone",
    ),
    not_reproduced=(
        (
            "FlashInfer's kernel hanging on a card",
            "a card of SM120 or SM121, where it was reported: nothing in shipped code can be delayed to widen the window",
        ),
    ),
)
