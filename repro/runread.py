"""Reading a run directory that somebody may have sent: bounded sizes, no way out of the directory, partial runs welcome.

A run that was killed has no ``diagnosis.json`` and maybe half a last line: what is there is returned, what is not is said in
``RunView.missing``.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from ..errors import RunStoreError
from ..forensics.device_state import Unread
from ..forensics.records import Diagnosis
from ..reports import paths
from .run_records import EvidenceEntry, EvidenceIndex, RunRecord

__all__ = ["RunView", "is_run_directory", "open_run", "read_json_file", "read_timeline"]

_MAX_DOCUMENT = 32 << 20
_MAX_LINE = 1 << 20
_MAX_LINES = 1_000_000


@dataclass(frozen=True, slots=True)
class RunView:
    """A run directory as read. ``missing``: what is not there or cannot be read, and why."""

    path: Path
    run: RunRecord
    diagnosis: Diagnosis | None
    evidence: tuple[EvidenceEntry, ...]
    missing: tuple[Unread, ...] = ()

    def artefact(self, entry: EvidenceEntry) -> Path:
        """The absolute path of an artefact; RunStoreError if it is gone, not a regular file, or outside the directory."""
        return _inside(self.path, entry.path)


def is_run_directory(path: Path) -> bool:
    """Whether ``path`` looks like a run directory (a directory that holds ``run.json``)."""
    return path.is_dir() and (path / paths.RUN).is_file()


def _inside(root: Path, relative: str) -> Path:
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts or "\\" in relative or "\0" in relative or not pure.parts:
        raise RunStoreError("an artefact's path leads out of the run directory", path=str(root), place=ascii(relative))
    target = root / pure
    try:
        resolved = target.resolve(strict=True)
        if not resolved.is_relative_to(root.resolve()):
            raise RunStoreError("an artefact's path leads out of the run directory", path=str(root), place=ascii(relative))
        if not stat.S_ISREG(resolved.stat().st_mode):
            raise RunStoreError("an artefact is not a regular file", path=str(root), place=ascii(relative))
    except (OSError, RuntimeError) as error:
        raise RunStoreError(f"an artefact cannot be read: {error}", path=str(root), place=ascii(relative)) from error
    return resolved


def _open_regular(path: Path) -> int:
    """A descriptor of a regular file: never blocks on a FIFO, never follows a link in the last place."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise RunStoreError(f"cannot open: {error.strerror or error}", path=str(path)) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RunStoreError("not a regular file", path=str(path))
    return fd


def read_json_file(path: Path, *, limit: int = _MAX_DOCUMENT) -> dict[str, Any]:
    """One JSON object from a file of at most ``limit`` bytes; RunStoreError with the place otherwise."""
    with os.fdopen(_open_regular(path), "rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise RunStoreError(f"larger than {limit} bytes", path=str(path))
    try:
        document = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RunStoreError("not UTF-8", path=str(path), place=f"byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise RunStoreError(f"not JSON: {error.msg}", path=str(path), place=f"line {error.lineno}") from error
    except (RecursionError, ValueError) as error:
        raise RunStoreError(f"not a JSON document of ours: {type(error).__name__}", path=str(path)) from error
    if not isinstance(document, dict):
        raise RunStoreError("not a JSON object", path=str(path))
    return document


def _first(error: ValidationError) -> str:
    detail = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in detail["loc"])
    return f"{place}: {detail['msg']}" if place else str(detail["msg"])


def open_run(path: Path) -> RunView:
    """Read a run directory, whoever wrote it. RunStoreError if there is no readable ``run.json``; all else may be missing."""
    if not path.exists():
        raise RunStoreError("there is no such run directory", path=str(path), help_text="Those of here are under runs/.")
    if not path.is_dir():
        raise RunStoreError("not a run directory", path=str(path), help_text="A run directory holds run.json.")
    missing: list[Unread] = []
    run_file = path / paths.RUN
    if not run_file.exists():
        raise RunStoreError(
            f"not a run directory: it holds no {paths.RUN}",
            path=str(path),
            help_text=f"Judge what it holds: dsv4-repro autopsy {path}",
        )
    try:
        run = RunRecord.model_validate(read_json_file(run_file))
    except ValidationError as error:
        raise RunStoreError(f"not a run record: {_first(error)}", path=str(run_file)) from error
    if not run.schema_.startswith("dsv4-repro/run/"):
        raise RunStoreError(f"schema {run.schema_[:80]!r}, dsv4-repro/run/1 expected", path=str(run_file))
    diagnosis = None
    try:
        diagnosis = Diagnosis.model_validate(read_json_file(path / paths.DIAGNOSIS))
    except (RunStoreError, ValidationError) as error:
        why = _first(error) if isinstance(error, ValidationError) else str(error)
        missing.append(Unread(paths.DIAGNOSIS, why, f"dsv4-repro autopsy {path}"))
    entries: tuple[EvidenceEntry, ...] = ()
    try:
        index = EvidenceIndex.model_validate(read_json_file(path / paths.EVIDENCE / paths.EVIDENCE_INDEX))
        entries = index.entries
    except (RunStoreError, ValidationError) as error:
        why = _first(error) if isinstance(error, ValidationError) else str(error)
        missing.append(Unread(f"{paths.EVIDENCE}/{paths.EVIDENCE_INDEX}", why))
    return RunView(path=path, run=run, diagnosis=diagnosis, evidence=entries, missing=tuple(missing))


def read_timeline(path: Path, *, limit: int = _MAX_LINES) -> Iterator[dict[str, Any] | Unread]:
    """The timeline of a run directory, line by line; a line that is not a JSON object comes as an Unread with its number."""
    file = path / paths.TIMELINE
    with os.fdopen(_open_regular(file), "rb") as stream:
        number = 0
        while raw := stream.readline(_MAX_LINE):
            number += 1
            if number > limit:
                yield Unread(f"{paths.TIMELINE} after line {limit}", "more lines than are read")
                return
            if not raw.endswith(b"\n") and len(raw) == _MAX_LINE:
                yield Unread(f"{paths.TIMELINE} line {number}", f"longer than {_MAX_LINE} bytes")
                while (rest := stream.readline(_MAX_LINE)) and not rest.endswith(b"\n"):
                    continue
                continue
            try:
                line = json.loads(raw.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                yield Unread(f"{paths.TIMELINE} line {number}", f"not a JSON object ({type(error).__name__})")
                continue
            if isinstance(line, dict) and isinstance(line.get("kind"), str):
                yield line
            else:
                yield Unread(f"{paths.TIMELINE} line {number}", "not a timeline object")
