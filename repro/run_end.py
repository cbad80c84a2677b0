"""How a run directory ends: with the word for what broke the run off, or, of a row, with diagnosis, record and reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..clock import Clock, utc_stamp
from ..errors import ReproError, RunStoreError
from ..reports.document import ReportSource
from .report_files import fixes_of, reports_of, write_reports

if TYPE_CHECKING:
    from ..forensics.records import Diagnosis
    from ..scenarios.registry import Scenario
    from .run_records import RunRecord, TrialCounts
    from .runstore import RunStore

__all__ = ["breaks_noted", "finish_row", "flat_environment", "write_end"]

#: Characters of an error's text that the record keeps.
_MOST_TEXT = 2000


@contextmanager
def breaks_noted(store: RunStore, record: RunRecord, clock: Clock) -> Iterator[None]:
    """Whatever is raised inside, Ctrl-C too, ``run.json`` says how the run ended and after how many seconds; then it is raised on.

    Without it the record would stay at ``running``, like that of a run which was killed. Where it cannot be written (a full disk),
    what was raised inside stays the answer.
    """
    began = clock.monotonic()
    try:
        yield
    except BaseException as error:
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        ended = {
            "state": state, "ended": utc_stamp(clock), "seconds": round(clock.monotonic() - began, 3),
            "error": f"{type(error).__name__}: {error}"[:_MOST_TEXT],
        }  # fmt: skip
        try:
            store.write_run(record.model_copy(update=ended))
        except ReproError as second:
            error.add_note(f"the run's record could not be written either: {second}")
        raise


def write_end(store: RunStore, finished: RunRecord, diagnosis: Diagnosis, *, unwritten_status: int) -> None:
    """The diagnosis, then the record. RunStoreError where one cannot be written.

    Where that is the diagnosis, the record is finished all the same and says so, with ``unwritten_status``: at ``running`` it would
    be taken for that of a run that was killed.
    """
    try:
        store.write_diagnosis(diagnosis.document())
    except RunStoreError as error:
        said = {"error": f"the diagnosis could not be written: {error}"[:_MOST_TEXT], "exit_status": unwritten_status}
        try:
            store.write_run(finished.model_copy(update=said))
        except RunStoreError as second:
            error.add_note(f"the run's record could not be written either: {second}")
        raise
    store.write_run(finished)


def finish_row(
    store: RunStore, entry: Scenario, record: RunRecord, diagnosis: Diagnosis, trials: TrialCounts, *, status: int, seconds: float,
    clock: Clock, environment: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write the diagnosis, then the record of a finished run, then the reports. RunStoreError.

    ``seconds``: how long the row took; ``environment``: what was learnt while it ran, added to the record's.
    """
    finished = record.model_copy(update={
        "state": "finished", "ended": utc_stamp(clock), "seconds": round(seconds, 3), "trials": trials,
        "environment": {**record.environment, **(environment or {})}, "outcome": diagnosis.outcome, "exit_status": status,
    })  # fmt: skip
    write_end(store, finished, diagnosis, unwritten_status=RunStoreError.exit_status)
    fixes = fixes_of(entry) if diagnosis.outcome in ("hang", "other") else ()
    source = ReportSource(diagnosis=diagnosis, run=finished.document(), title=entry.title, fixes=fixes, version=__version__)
    write_reports(reports_of(source, store.path), store.path)


def flat_environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The ground's environment: scalars as they are, everything of structure under ``details``, which reports do not print."""
    plain = {key: value for key, value in environment.items() if isinstance(value, str | int | float | bool)}
    nvml = environment.get("nvml")
    if isinstance(nvml, Mapping):
        plain |= {key: value for key in ("driver", "uuid") if isinstance(value := nvml.get(key), str)}
    rest = {key: value for key, value in environment.items() if key not in plain}
    return {**plain, "details": rest} if rest else plain
