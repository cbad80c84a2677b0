"""Long, short, long rows in one group: the ring of histograms is out of step (#49139). A wrong answer, no hang."""

from __future__ import annotations

from .launches import BOTH, Launch, Row, long_row
from .registry import Fix, Scenario

__all__ = ["SCENARIO"]

_MIXED = long_row("long and short rows", 4, 40000, 1000, 39999, 25, 33000, 9000, 38000)
_LONG = long_row("long rows only", 4, 40000, 39999, 33000)
_SPURIOUS = long_row("a negative length counts as a long row", 4, -1, 25, 40000)

SCENARIO = Scenario(
    name="histogram-ring",
    title="Long, short, long rows in one group give wrong indices (vLLM #49139)",
    class_="wrong-result",
    cause="histogram-ring",
    signature="vllm-49139",
    grounds={
        "gpu": "long rows after a short one hold wrong indices; nothing hangs",
        "cpu": "the same rows, from the same machine code",
    },
    story=(
        "consumer: three histograms are used in turn, one is cleared while another is filled; which one comes next is counted.",
        "disagreement: the count includes rows that do not use the ring. After a short row a round starts in a histogram that "
        "nobody cleared.",
        "result: the counts are too high, another bin is chosen, and the row holds wrong indices. All barriers are passed.",
    ),
    fixes=(
        Fix("consumer", "count the rounds that use the ring, not the rows", ("--kernel", "vllm==0.28.0"), "vLLM #49139 (0.28.0)"),
    ),
    upstream=("vllm#49139",),
    example="dsv4-repro run histogram-ring --on cpu",
    rows=(
        Row(
            "ring-counts-rows",
            Launch(_MIXED),
            "wrong-result",
            "the ring counts all rows of its group",
            "histogram-ring",
            "builtin:ring-misaligned",
            grounds=BOTH,
        ),
        Row("ring-counts-long-rows", Launch(_MIXED), "not-hung", "the ring counts long rows", fixed=True, grounds=BOTH),
        Row(
            "only-long-rows",
            Launch(_LONG),
            "not-hung",
            "the defect without a short row in between: nothing to see",
            None,
            "builtin:ring-misaligned",
            fixed=True,
            grounds=BOTH,
        ),
        Row(
            "vllm-0.27.1",
            Launch(_MIXED),
            "wrong-result",
            "the last release before the repair",
            "histogram-ring",
            "vllm==0.27.1",
            grounds=BOTH,
        ),
        Row(
            "vllm-0.28.0",
            Launch(_MIXED),
            "not-hung",
            "the first release with it",
            None,
            "vllm==0.28.0",
            fixed=True,
            grounds=BOTH,
        ),
        Row(
            "negative-length-0.27.1",
            Launch(_SPURIOUS),
            "wrong-result",
            "cross with #51538: a length of -1 takes the long path and puts the ring out of step for the only real long row",
            "histogram-ring",
            "vllm==0.27.1",
            grounds=BOTH,
        ),
        Row(
            "negative-length-0.28.0",
            Launch(_SPURIOUS),
            "not-hung",
            "the same lengths, both repaired",
            None,
            "vllm==0.28.0",
            fixed=True,
            grounds=BOTH,
        ),
    ),
    distinguishes=(
        "the launch completes with six arrivals a CTA and long row; wrong rows are long ones after a short one in their group",
        "overflow's wrong rows are done by one CTA alone",
    ),
)
