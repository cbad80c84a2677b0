"""Many trials in one process: the same steps again and again, each hang released and the device used on, or a fresh child each
time.

"200 of 200 trials, one process, unwedged and reused": after a hang the row states are read (the counters of every trial are
compared), the count is written, the graph drains, and a healthy step must then be right - which also shows that the graph's
own memset node wiped the row states, since the count written before would satisfy every wait.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..clock import SYSTEM, Clock, Deadline
from ..errors import ReproError
from ..kernels.abi import ARRIVAL_COUNTER_OFFSET, RELEASE_COUNT, ROW_STATE_SIZE
from ..scenarios.drain_steps import DecodeStep
from .bounds import at_least, at_most
from .gpu_ground import GpuGround
from .ground import Emit, GroundRequest

__all__ = ["TrialOutcome", "TrialsResult", "around_the_window", "run_trials"]

Kind = Literal["hang", "clean", "no window", "wrong", "other"]


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """One trial. Times in milliseconds: ``verdict_ms`` from the launch that hung to the verdict, ``first_ms`` from the write to the
    retirement of that launch, ``total_ms`` to that of the whole graph. ``recovered``: a healthy step afterwards was right.
    """

    trial: int
    kind: Kind
    step: int | None = None
    seconds: float = 0.0
    verdict_ms: float | None = None
    first_ms: float | None = None
    total_ms: float | None = None
    arrivals: tuple[int, ...] = ()
    recovered: bool | None = None
    why: str = ""


@dataclass(slots=True)
class TrialsResult:
    """All trials. ``unfinished``: asked for, and not made because the time was over or the workload was lost (``why``)."""

    asked: int
    outcomes: list[TrialOutcome] = field(default_factory=list)
    unfinished: int = 0
    why: str = ""
    processes: int = 1

    def count(self, kind: Kind) -> int:
        return sum(outcome.kind == kind for outcome in self.outcomes)

    def document(self) -> dict[str, Any]:
        """Counts, the bounds that follow (95 %), and minimum, median and maximum of the times."""
        hangs, clean = self.count("hang"), self.count("clean")
        windows = hangs + clean
        counts: Counter[str] = Counter(outcome.kind for outcome in self.outcomes)
        return {
            "asked": self.asked,
            "made": len(self.outcomes),
            "unfinished": self.unfinished,
            "why": self.why,
            "processes": self.processes,
            "counts": dict(counts),
            "hang_probability_at_least_95": at_least(hangs, windows) if windows and hangs else None,
            "hang_probability_at_most_95": at_most(hangs, windows) if windows and clean else None,
            "steps_that_hung": dict(Counter(outcome.step for outcome in self.outcomes if outcome.kind == "hang")),
            "arrival_counters": {
                str(list(key)): count for key, count in Counter(o.arrivals for o in self.outcomes if o.arrivals).items()
            },
            "recovered": sum(outcome.recovered is True for outcome in self.outcomes),
            "hang_to_verdict_ms": _spread([outcome.verdict_ms for outcome in self.outcomes]),
            "write_to_retirement_ms": _spread([outcome.first_ms for outcome in self.outcomes]),
            "write_to_drained_ms": _spread([outcome.total_ms for outcome in self.outcomes]),
            "trial_seconds": _spread([outcome.seconds for outcome in self.outcomes]),
            "others": [f"trial {outcome.trial}: {outcome.why}" for outcome in self.outcomes if outcome.kind in ("other", "wrong")][
                :10
            ],
        }


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return {
        "n": len(known), "min": known[0], "median": statistics.median(known),
        "p95": known[min(int(0.95 * len(known)), len(known) - 1)],
        "max": known[-1],
    }  # fmt: skip


def around_the_window(steps: Sequence[DecodeStep], before: int = 2, after: int = 2) -> tuple[DecodeStep, ...]:
    """The steps from ``before`` before the last size change to a batch that can wedge, to ``after`` behind; all steps if none can.

    The window is the first step of the fewest live requests with a length below 0 or padding.
    """
    if not steps:
        return ()
    fewest = min(step.live_requests for step in steps)
    first = next(number for number, step in enumerate(steps) if step.live_requests == fewest)
    return tuple(steps[max(first - before, 0) : first + 1 + after])


def run_trials(
    request: GroundRequest,
    steps: Sequence[DecodeStep],
    trials: int,
    emit: Emit,
    *,
    window: Callable[[DecodeStep], bool] | None = None,
    fresh: bool = False,
    ground: Callable[[], GpuGround] = GpuGround,
    budget_s: float = float("inf"),
    clock: Clock = SYSTEM,
) -> TrialsResult:
    """Run ``steps`` ``trials`` times; ``window`` says which steps could wedge an unfixed build (None: those with padding slots
    whose launch shares a row among CTAs and lets peers leave). ``fresh``: a new child each time.

    Errors of opening pass through; a workload lost later ends the trials and is told in ``why``.
    """
    if window is None:

        def window(step: DecodeStep) -> bool:
            launch = request.launches.get(step.graph_rows)
            return step.padded_requests > 0 and launch is not None and launch.wedges_on_negative_length

    result = TrialsResult(asked=trials, processes=0)
    deadline = Deadline(budget_s, clock)
    current: GpuGround | None = None
    try:
        for number in range(1, trials + 1):
            if deadline.expired:
                result.why = f"the budget of {budget_s:g} s was over"
                break
            if current is None:
                current = ground()
                current.open(request, emit)
                result.processes += 1
            outcome = _trial(current, steps, number, window, clock)
            result.outcomes.append(outcome)
            emit("trial", trial=number, ended=outcome.kind, step=outcome.step, verdict_ms=outcome.verdict_ms, why=outcome.why)
            lost = outcome.kind == "other" or (outcome.kind == "hang" and not outcome.recovered)
            if fresh or lost:
                current.close()
                current = None
            if lost and not fresh:
                result.why = outcome.why or "the device did not come back after a release"
                break
    except ReproError as error:
        if current is None or not result.outcomes:
            raise
        result.why = f"{type(error).__name__}: {error}"
    finally:
        if current is not None:
            current.close()
    result.unfinished = trials - len(result.outcomes)
    return result


def _trial(
    ground: GpuGround, steps: Sequence[DecodeStep], number: int, window: Callable[[DecodeStep], bool], clock: Clock
) -> TrialOutcome:
    began = clock.monotonic()
    reached = False
    for step in steps:
        outcome = ground.run_step(step)
        if outcome.state == "hung":
            return _release(ground, steps[0], step, number, outcome.detail, began, clock)
        if outcome.state != "done":
            kind: Kind = "wrong" if outcome.state == "wrong" else "other"
            why = "; ".join(outcome.reasons) or outcome.state
            return TrialOutcome(
                number, kind, step.index, clock.monotonic() - began, why=f"step {step.index} {outcome.state}: {why}"[:500]
            )
        reached = reached or window(step)
    return TrialOutcome(number, "clean" if reached else "no window", None, clock.monotonic() - began)


def _release(
    ground: GpuGround, healthy: DecodeStep, hung: DecodeStep, number: int, detail: Mapping[str, Any], began: float, clock: Clock
) -> TrialOutcome:
    states = ground.row_states()
    arrivals = tuple(int(group["arrival"]) for group in states["groups"])
    stuck = [group for group, count in enumerate(arrivals) if count]
    known: dict[str, Any] = {"verdict_ms": detail.get("hang_to_verdict_ms"), "arrivals": arrivals}
    if not stuck:
        return TrialOutcome(
            number,
            "hang",
            hung.index,
            clock.monotonic() - began,
            recovered=False,
            why="no arrival counter moved: nothing to release",
            **known,
        )
    address = int(states["address"]) + stuck[0] * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET
    experiment = ground.unwedge(address, RELEASE_COUNT)
    known.update(first_ms=experiment.milliseconds, total_ms=experiment.detail.get("total_ms"))
    if not experiment.retired:
        return TrialOutcome(number, "hang", hung.index, clock.monotonic() - began, recovered=False, why=experiment.why_not, **known)
    again = ground.run_step(healthy)
    why = "" if again.state == "done" else f"the healthy step afterwards is {again.state}: {'; '.join(again.reasons)}"[:500]
    return TrialOutcome(
        number, "hang", hung.index, clock.monotonic() - began, recovered=again.state == "done", why=why, **known
    )  # fmt: skip
