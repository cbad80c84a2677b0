"""All reports of one diagnosis as bytes by file name: what ``run``, ``autopsy``, ``report`` and ``bundle`` write.

A diagnosis that a stranger sent may carry values of any shape under further keys. ``usable`` drops those that a template would
stumble over, and says so in the page, so that a report is always rendered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..forensics.records import Diagnosis
from . import paths
from .document import ReportSource
from .github_issue import issue_report
from .html import ReportExtras, html_report
from .junit import junit_xml

__all__ = ["JUNIT", "REPORT_HTML", "render_all", "usable"]

REPORT_HTML = "report.html"
JUNIT = "junit.xml"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 1e12


def _good_unwedge(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and {"attempted", "retired", "milliseconds", "address", "why_not"} <= set(value)
        and (value["milliseconds"] is None or _number(value["milliseconds"]))
    )


def _good_timing(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_number(value.get(key)) for key in ("launch_to_hung_s", "hung_to_diagnosis_s"))


def _good_trials(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("asked"), int):
        return False
    counts = all(isinstance(value.get(key, 0), int) for key in ("hang", "clean", "no_window", "other", "unfinished"))
    bounds = value.get("bounds", ())
    return (
        counts
        and isinstance(bounds, Sequence)
        and not isinstance(bounds, str)
        and all(
            isinstance(bound, Mapping)
            and {"of", "side"} <= set(bound)
            and _number(bound.get("value"))
            and _number(bound.get("confidence"))
            for bound in bounds
        )
    )


_CHECKS = {"unwedge": _good_unwedge, "timing": _good_timing, "trials": _good_trials}


def usable(diagnosis: Diagnosis) -> tuple[Diagnosis, list[str]]:
    """(the diagnosis without further keys that are not of the expected shape, sentences that name them)."""
    extra = diagnosis.model_extra or {}
    bad = [key for key, check in _CHECKS.items() if extra.get(key) not in (None, {}) and not check(extra[key])]
    if not bad:
        return diagnosis, []
    document = {key: value for key, value in diagnosis.document().items() if key not in bad}
    return Diagnosis.model_validate(document), [
        f"{paths.DIAGNOSIS}: {key} is not of the expected shape and is not shown" for key in bad
    ]


def _plain_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run record with the parts that reports read in the shape that they expect."""
    made = dict(run)
    for key in ("environment", "versions", "kernel"):
        if not isinstance(made.get(key), Mapping):
            made[key] = {}
    if not isinstance(made.get("command"), list | tuple):
        made["command"] = []
    return made


def render_all(source: ReportSource, extras: ReportExtras | None = None) -> dict[str, bytes]:
    """``report.md``, ``report.html`` and ``junit.xml``."""
    extras = extras or ReportExtras()
    diagnosis, notes = usable(source.diagnosis)
    source = dataclasses.replace(source, diagnosis=diagnosis, run=_plain_run(source.run) if source.run else {})
    extras = dataclasses.replace(extras, notes=(*extras.notes, *notes))
    markdown = "\n".join(issue_report(source, extras.threads)) + "\n"
    texts = {paths.REPORT_MD: markdown, REPORT_HTML: html_report(source, extras), JUNIT: junit_xml(source)}
    return {name: text.encode("utf-8", errors="backslashreplace") for name, text in texts.items()}
