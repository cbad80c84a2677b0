"""The summary on the page of a GitHub Actions job: appended to the file that the runner names, nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..reports.document import ReportSource
from ..reports.step_summary import step_summary

__all__ = ["append_step_summary"]

_VARIABLE = "GITHUB_STEP_SUMMARY"
#: GitHub takes 1 MiB a step and shows none of it beyond.
_MOST_BYTES = 1 << 20


def append_step_summary(source: ReportSource, environment: Mapping[str, str] | None = None) -> Path | None:
    """Append the summary where a runner asks for it; the file, or None where none is asked for or it cannot be written."""
    named = (os.environ if environment is None else environment).get(_VARIABLE)
    if not named:
        return None
    path = Path(named)
    data = ("\n".join(step_summary(source)) + "\n\n").encode("utf-8", errors="backslashreplace")
    try:
        with path.open("ab") as stream:
            if stream.tell() + len(data) > _MOST_BYTES:
                return None
            stream.write(data)
    except OSError:
        return None
    return path
