"""``verify``: trials of every row of a matrix until the sequential test has decided, and what the rows say together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...clock import SYSTEM, Clock, Deadline
from .cells import TrialResult
from .matrix import FixCell
from .sequential import CONFIDENCE, Rates, SequentialTest, bound_words
from .session import TrialSession

__all__ = ["CellOutcome", "MatrixResult", "ablation_lines", "load_bearing_lines", "markdown_table", "run_matrix"]


@dataclass(slots=True)
class CellOutcome:
    """One row. ``identities``: identity -> hangs. ``reached``: danger window -> trials.
    ``others``: reasons of trials that ended otherwise. ``stopped``: why no more
    trials were made.
    """

    row: FixCell
    test: SequentialTest
    trials: int = 0
    no_window: int = 0
    wrong: int = 0
    other: int = 0
    reused: int = 0
    idle_after: bool | None = None
    identities: dict[str, int] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    signature: str | None = None
    why_no_window: str = ""
    stopped: str = ""
    seconds: float = 0.0

    def add(self, result: TrialResult) -> None:
        """Count one trial. A hang counts as a window reached; wrong results and failures count for nothing but themselves."""
        self.trials += 1
        for window in result.windows[:16] if result.window else ():
            self.reached[window] = self.reached.get(window, 0) + 1
        if result.kind in ("hang", "clean"):
            self.test.add(hang=result.kind == "hang")
        if result.kind == "hang":
            name = result.identity or "not identified"
            self.identities[name] = self.identities.get(name, 0) + 1
            self.signature = self.signature or result.signature
            self.reused += result.reused is True
        elif result.kind == "no window":
            self.no_window += 1
            self.why_no_window = self.why_no_window or result.why
        elif result.kind == "wrong":
            self.wrong += 1
        elif result.kind == "other":
            self.other += 1
        if result.kind in ("wrong", "other") and len(self.others) < 5:
            self.others.append(result.why)

    @property
    def word(self) -> str:
        """HANGS, CLEAN or INCONCLUSIVE; a row with wrong results or failures is never CLEAN."""
        word = self.test.word
        return "INCONCLUSIVE" if word == "CLEAN" and (self.wrong or self.other) else word

    def document(self) -> dict[str, Any]:
        """As JSON."""
        interval = self.test.interval()
        return {
            "name": self.row.cell.name,
            "change": self.row.change,
            "cell": self.row.cell.document(),
            "word": self.word,
            "trials": self.trials,
            "windows": self.test.windows,
            "hangs": self.test.hangs,
            "no_window": self.no_window,
            "wrong": self.wrong,
            "other": self.other,
            "reused": self.reused,
            "device_idle": self.idle_after,
            "hazard": {"low": interval[0], "high": interval[1], "confidence": CONFIDENCE} if interval else None,
            "identities": self.identities,
            "reached": self.reached,
            "signature": self.signature,
            "stopped": self.stopped,
            "why": self.why_no_window or "; ".join(self.others)[:1000],
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class MatrixResult:
    """All rows of one run."""

    rows: tuple[CellOutcome, ...]
    rates: Rates

    def row(self, name: str) -> CellOutcome | None:
        """The row of that name."""
        return next((row for row in self.rows if row.row.cell.name == name), None)


def run_matrix(
    rows: Sequence[FixCell],
    rates: Rates,
    *,
    most_trials: int = 400,
    least_trials: int = 1,
    patience: int = 10,
    seed: int = 0,
    timeout_s: float | None = None,
    watch: Callable[[CellOutcome], None] = lambda _outcome: None,
    session: Callable[..., Any] = TrialSession,
    clock: Clock = SYSTEM,
) -> MatrixResult:
    """Every row, one after the other: trials with seeds from ``seed`` on, the same in all rows, until the test has decided (and at
    least ``least_trials``), ``most_trials`` are made, or the first ``patience`` trials reached no window.

    ``timeout_s``: of the whole; each row gets an equal share of what is left, so that a slow row does not starve the last. Errors
    of usage pass through after the workload is closed.
    """
    whole = Deadline(timeout_s, clock) if timeout_s is not None else None
    identities: dict[str, Any] = {}
    done: list[CellOutcome] = []
    for place, row in enumerate(rows):
        outcome = CellOutcome(row, SequentialTest(rates))
        share = Deadline(whole.remaining() / (len(rows) - place), clock) if whole is not None else None
        began = clock.monotonic()
        one = session(row.cell, identities=identities, clock=clock)
        bound = getattr(one, "bound", None)
        if share is not None and bound is not None:
            bound(share)  # a session whose trials take minutes ends by itself
        try:
            for number in range(most_trials):
                if share is not None and share.expired and number:
                    outcome.stopped = "time"
                    break
                result = one.trial(seed + number)
                if number and result.kind == "other" and share is not None and share.expired:
                    outcome.stopped = "time"  # cut off in the middle: no failure of the row
                    break
                outcome.add(result)
                outcome.seconds = clock.monotonic() - began
                watch(outcome)
                if outcome.trials >= least_trials and outcome.test.decided:
                    outcome.stopped = "decided"
                    break
                if outcome.test.windows == 0 and outcome.trials >= min(patience, most_trials):
                    outcome.stopped = "no window in the first trials"
                    break
            else:
                outcome.stopped = "most trials"
        finally:
            one.close()
            outcome.idle_after = one.device_idle
        done.append(outcome)
    return MatrixResult(tuple(done), rates)


def _hazard(outcome: CellOutcome) -> str:
    interval = outcome.test.interval()
    return "-" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"


def _cell_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def markdown_table(result: MatrixResult, *, first: str = "fix") -> list[str]:
    """A table fit for a pull request; hazards as intervals per danger window, each bound at 99 %."""
    lines = [
        f"| {first} | kernel | producer | trials | windows | hangs | hazard per window (99 %) | verdict | identity |",
        "|---|---|---|--:|--:|--:|---|---|---|",
    ]
    for row in result.rows:
        cell = row.row.cell
        identity = ", ".join(f"`{name}`" for name in row.identities) or "-"
        lines.append(
            f"| {_cell_text(cell.name)} | `{_cell_text(cell.kernel)}` | {cell.producer} | {row.trials} | {row.test.windows} | "
            f"{row.test.hangs} | {_hazard(row)} | {row.word} | {identity} |"
        )
    return lines


def _layer_line(layer: str, other: str, alone: CellOutcome, neither: CellOutcome) -> str:
    bound = bound_words(alone.test.hangs, alone.test.windows)
    if alone.word == "CLEAN":
        note = ""
        if layer == "producer":
            note = " With it nothing negative reaches the kernel, so this row says nothing about the consumer's guard."
        said = f"with it and without the {other}'s, {alone.test.windows} windows, no hang ({bound})."
        return f"The {layer} fix is enough alone: {said}{note}"
    if alone.word == "HANGS":
        return f"The {layer} fix is NOT enough alone: {alone.test.hangs} of {alone.test.windows} windows still hang."
    return f"Whether the {layer} fix is enough alone stays open: {_open_reason(alone)}."


def _open_reason(outcome: CellOutcome) -> str:
    if outcome.test.windows == 0:
        return f"no danger window was reached ({outcome.why_no_window or '; '.join(outcome.others) or 'no trial'})"
    if outcome.wrong or outcome.other:
        return (
            f"{outcome.wrong} trials gave a wrong result and {outcome.other} failed otherwise ({'; '.join(outcome.others)[:200]})"
        )
    return f"{outcome.test.hangs} hangs in {outcome.test.windows} windows decide nothing at these error rates"


def load_bearing_lines(result: MatrixResult) -> list[str]:
    """What the four rows say together. Nothing is claimed of a fix where the unfixed row does not hang."""
    rows = {name: result.row(name) for name in ("neither", "producer only", "consumer only", "both")}
    neither, both = rows["neither"], rows["both"]
    if neither is None or both is None:
        return []
    if neither.word != "HANGS":
        known = bound_words(neither.test.hangs, neither.test.windows) if neither.test.windows else _open_reason(neither)
        said = f"the row without any fix does not hang here ({neither.word}: {known})"
        return [f"Nothing can be said about the fixes: {said}."]
    hazard = bound_words(neither.test.hangs, neither.test.windows)
    lines = [f"Without a fix it hangs: {neither.test.hangs} of {neither.test.windows} windows ({hazard})."]
    for layer, other in (("producer", "consumer"), ("consumer", "producer")):
        alone = rows[f"{layer} only"]
        if alone is not None:
            lines.append(_layer_line(layer, other, alone, neither))
    if both.word == "CLEAN":
        lines.append(f"With both: no hang in {both.test.windows} windows ({bound_words(0, both.test.windows)}).")
    elif both.word == "HANGS":
        lines.append(f"With BOTH fixes it still hangs: {both.test.hangs} of {both.test.windows} windows.")
    else:
        lines.append(f"With both: INCONCLUSIVE: {_open_reason(both)}.")
    lines += _more_kernels(result.rows[4:])
    return lines


def _more_kernels(rows: Iterable[CellOutcome]) -> list[str]:
    lines = []
    for row in rows:
        if row.row.cell.producer != "raw":
            continue
        spec = row.row.cell.kernel
        if row.word == "CLEAN":
            lines.append(
                f"{spec} behind the raw producer: no hang in {row.test.windows} windows ({bound_words(0, row.test.windows)})."
            )
        elif row.word == "HANGS":
            lines.append(f"{spec} behind the raw producer hangs: {row.test.hangs} of {row.test.windows} windows.")
        else:
            lines.append(f"{spec} behind the raw producer: INCONCLUSIVE: {_open_reason(row)}.")
    return lines


def ablation_lines(result: MatrixResult) -> list[str]:
    """Which conditions are necessary, and whether together they are sufficient, in the words people use.

    A condition is called necessary where the hang is gone without it: the row is CLEAN with its window reached, or it cannot even
    reach a danger window by the plan's own arithmetic (which is said, since nothing was tried then).
    """
    base = result.rows[0]
    if base.word != "HANGS":
        return [f"Nothing can be said: with all conditions in place it does not hang here ({base.word}: {_open_reason(base)})."]
    measured, computed, no_condition, still_open = [], [], [], []
    for row in result.rows[1:]:
        name = row.row.cell.name
        if row.word == "HANGS":
            no_condition.append(name)
        elif row.word == "CLEAN":
            measured.append(name)
        elif row.test.windows == 0 and row.no_window == row.trials > 0:
            computed.append(f"{name} ({row.why_no_window})")
        else:
            still_open.append(f"{name} ({_open_reason(row)})")
    lines = [f"Sufficient together: with all conditions in place {base.test.hangs} of {base.test.windows} windows hang."]
    if measured:
        lines.append(f"Turning off any one of these ends the hang, tried in the danger window: {', '.join(measured)}.")
    if computed:
        lines.append(
            "Without any one of these no step can wedge, by the launcher's and the producer's arithmetic (the steps were run "
            f"and did not hang, but none of them is a danger window): {'; '.join(computed)}."
        )
    if no_condition:
        lines.append(f"Not necessary, it hangs without them all the same: {', '.join(no_condition)}.")
    if still_open:
        lines.append(f"Open: {'; '.join(still_open)}.")
    return lines
