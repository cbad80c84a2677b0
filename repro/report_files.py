"""The reports of a run as files: ``report.md``, ``report.html``, ``junit.xml``, each replaced whole."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..errors import RunStoreError, UsageError
from ..reports import paths
from ..reports.document import FixText, ReportSource
from ..reports.html import ReportExtras
from ..reports.render import render_all
from ..reports.stack_reader import read_threads
from ..reports.timeline_data import build_timeline
from ..scenarios.registry import Scenario
from .atomic import make_folder, write_atomic
from .runread import read_timeline

__all__ = ["fixes_of", "reports_of", "write_reports"]


def fixes_of(entry: Scenario | None) -> tuple[FixText, ...]:
    """The scenario's fixes as the report names them."""
    if entry is None:
        return ()
    return tuple(FixText(fix.layer, fix.text, fix.upstream, shlex.join(fix.flags)) for fix in entry.fixes)


def reports_of(source: ReportSource, folder: Path | None = None) -> dict[str, bytes]:
    """Every report by file name; with the timeline and the host stacks of ``folder`` (a run directory) that can be read there."""
    extras = ReportExtras(timeline=build_timeline((), source.diagnosis))
    if folder is not None:
        evidence = sorted(path for path in (folder / paths.EVIDENCE).rglob("*") if path.is_file() and not path.is_symlink())
        extras = replace(extras, threads=read_threads([(str(path.relative_to(folder)), path) for path in evidence[:1000]]))
        if (folder / paths.TIMELINE).exists():
            try:
                extras = replace(extras, timeline=build_timeline(read_timeline(folder), source.diagnosis))
            except RunStoreError as error:
                extras = replace(extras, notes=(f"the timeline could not be read: {error}",))
    return render_all(source, extras)


def write_reports(reports: dict[str, bytes], target: Path) -> Iterable[Path]:
    """Write them into a directory (made if its name has no suffix), or the one of its suffix to a file.

    UsageError for a file of another kind; RunStoreError.
    """
    if not target.suffix and not target.exists():
        make_folder(target, mode=0o700)
    if target.is_dir():
        for name, data in reports.items():
            write_atomic(target / name, data)
        return [target / name for name in reports]
    fitting = [data for name, data in reports.items() if Path(name).suffix == target.suffix]
    if not fitting:
        kinds = ", ".join(sorted({Path(name).suffix for name in reports}))
        raise UsageError(f"--out {target}: not a directory, and no report ends so; there are {kinds}")
    write_atomic(target, fitting[0])
    return [target]
