"""The verb ``report RUN``: render a run directory again, here or wherever it was copied to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import RunStoreError
from ..reports import paths
from ..reports.document import ReportSource, verdict_words
from ..scenarios.registry import Scenario, all_scenarios, scenario_for_signature
from .console import Screen
from .report_files import fixes_of, reports_of, write_reports
from .runread import RunView, open_run
from .step_summary_file import append_step_summary

if TYPE_CHECKING:
    from .options import Common

__all__ = ["report_source", "run_report"]


def _scenario_of(view: RunView) -> Scenario | None:
    named = next((entry for entry in all_scenarios() if entry.name == view.run.scenario), None)
    return named or scenario_for_signature(view.diagnosis.verdict.signature if view.diagnosis else None)


def report_source(view: RunView) -> ReportSource:
    """What the report of a run is made from. RunStoreError if it has no diagnosis that can be read."""
    if view.diagnosis is None:
        why = next((item.why for item in view.missing if item.what == paths.DIAGNOSIS), "it is missing")
        raise RunStoreError(
            f"no {paths.DIAGNOSIS} to report on ({why})",
            path=str(view.path),
            help_text=f"Judge its evidence: dsv4-repro autopsy {view.path}",
        )
    entry = _scenario_of(view)
    return ReportSource(
        diagnosis=view.diagnosis,
        run=view.run.document(),
        title=entry.title if entry else view.run.scenario,
        fixes=fixes_of(entry) if view.diagnosis.outcome == "hang" else (),
        version=__version__,
    )


def run_report(run: Path, common: Common) -> int:
    """The verb: writes every report into the run directory, or into ``--out`` (a directory, or a file of one kind); 0."""
    screen = Screen(as_json=common.as_json)
    view = open_run(run)
    source = report_source(view)
    written = write_reports(reports_of(source, run), common.out or run)
    append_step_summary(source)
    screen.tell(
        [f"{source.diagnosis.outcome.upper()}: {verdict_words(source.diagnosis)}", *(f"report: {path}" for path in written)]
    )
    screen.document({**source.diagnosis.document(), "reports": [str(path) for path in written]})
    return 0
