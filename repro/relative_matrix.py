"""All rows of a scenario side by side, on the CPU or on a card: run, as one document, as lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..clock import SYSTEM, Clock, Deadline
from ..errors import InconclusiveError, NoDeviceError, NoDriverError, PlanError, RefusedError, UnavailableError
from ..scenarios.launches import Launch, Row
from ..scenarios.registry import Scenario
from .console import Screen
from .drain_flags import DEFAULT_ARCH
from .relative_cpu import judge_row
from .row_tries import Tried

if TYPE_CHECKING:
    from .gpu_rows import GpuOptions, GpuTried

__all__ = ["MATRIX_SCHEMA", "MATRIX_STATUS", "matrix_document", "run_gpu_rows", "run_rows", "tell_matrix"]

MATRIX_SCHEMA = "dsv4-repro/relative-matrix/1"
#: Exit status of a matrix by its outcome.
MATRIX_STATUS: Mapping[str, int] = {"clean": 0, "other": 1, "inconclusive": 5}


def run_rows(
    entry: Scenario, rows: tuple[Row, ...], *, sm: int = DEFAULT_ARCH, seed: int = 0, count_all: bool = False,
    timeout_s: float | None = None, screen: Screen | None = None, clock: Clock = SYSTEM,
) -> tuple[list[Tried], list[tuple[Row, str]]]:  # fmt: skip
    """Every row that the CPU can run, and (row, why) for those whose kernel is not to be had here."""
    deadline = Deadline(timeout_s, clock) if timeout_s is not None else None
    tried: list[Tried] = []
    skipped: list[tuple[Row, str]] = []
    for row in rows:
        if "cpu" not in row.grounds:
            needs = "its delays are of time, and the interpreter has none"
            if isinstance(row.what, Launch) and (row.what.beyond is not None or row.what.leave):
                needs = "it is about the slots of a card"
            skipped.append((row, f"needs a GPU: {needs}"))
            continue
        if deadline is not None and deadline.expired:
            skipped.append((row, "no time was left"))
            continue
        progress = screen.progress if screen is not None else (lambda _text: None)
        try:
            tried.append(judge_row(row, sm=sm, seed=seed, count_all=count_all, deadline=deadline, progress=progress))
        except UnavailableError as error:
            skipped.append((row, str(error)))
    return tried, skipped


def run_gpu_rows(
    entry: Scenario, rows: tuple[Row, ...], options: GpuOptions, *, out: Path | None = None, timeout_s: float | None = None,
    screen: Screen | None = None, run: Callable[..., GpuTried] | None = None, clock: Clock = SYSTEM,
) -> tuple[list[GpuTried], list[tuple[Row, str]]]:  # fmt: skip
    """Every row that a card can run, each with a run directory (in ``out``, if given), and (row, why) for the others.

    ``timeout_s``: of the whole; each row gets at most an equal share of what is left.
    """
    from .relative_gpu_run import command_of_row, run_gpu_row

    deadline = Deadline(timeout_s, clock) if timeout_s is not None else None
    tried: list[GpuTried] = []
    skipped: list[tuple[Row, str]] = []
    here = [row for row in rows if "gpu" in row.grounds]
    for row in rows:
        if row not in here:
            skipped.append((row, "runs on the cpu ground only"))
            continue
        if deadline is not None and deadline.expired:
            skipped.append((row, "no time was left"))
            continue
        share = deadline.remaining() / (len(here) - len(tried)) if deadline is not None else options.timeout_s
        progress = screen.progress if screen is not None else (lambda _text: None)
        try:
            tried.append((run or run_gpu_row)(
                entry, row, replace(options, timeout_s=share), command=command_of_row(entry, row, options, None),
                out=out / row.name if out is not None else None, progress=progress, clock=clock,
            ))  # fmt: skip
        except (NoDriverError, NoDeviceError, RefusedError):
            raise  # true of every row
        except (UnavailableError, InconclusiveError, PlanError) as error:
            skipped.append((row, f"{type(error).__name__}: {error}"))
    return tried, skipped


def matrix_document(
    entry: Scenario, tried: Sequence[Tried | GpuTried], skipped: Sequence[tuple[Row, str]], *, ground: str = "cpu"
) -> dict[str, Any]:
    """All rows as one document. ``outcome``: clean if every row that ran came to what it names, inconclusive if none ran."""
    outcome = "inconclusive" if not tried else "clean" if all(item.as_expected for item in tried) else "other"
    return {
        "schema": MATRIX_SCHEMA,
        "outcome": outcome,
        "scenario": entry.name,
        "ground": ground,
        "rows": [item.document() for item in tried],
        "not_run": [{"row": row.name, "kernel": row.kernel, "why": why} for row, why in skipped],
        "not_reproduced": [{"what": what, "takes": takes} for what, takes in entry.not_reproduced],
    }


def tell_matrix(entry: Scenario, document: Mapping[str, Any], screen: Screen) -> None:
    """A line a row, and the document where JSON was asked for."""
    for item in document["rows"]:
        found, wanted = item["found"], item["expected"]
        word = "as expected" if item["as_expected"] else f"NOT AS EXPECTED ({wanted['class']}/{wanted['cause'] or '-'})"
        bad = sum(count["launches"] for count in item["counts"] if count["class"] != "not-hung")
        role = "fix" if item["fixed"] else "defect"
        counted = f"{bad} of {item['launches']} launches not well"
        screen.tell([f"{item['row']} ({role}): {found['class']}/{found['cause'] or '-'}; {counted}; {word}"])
    for item in document["not_run"]:
        screen.tell([f"{item['row']}: not run: {item['why']}"])
    for what, takes in entry.not_reproduced:
        screen.tell([f"not reproduced: {what}. It would take: {takes}"])
    screen.document(document)
