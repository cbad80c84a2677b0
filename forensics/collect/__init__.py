"""Collectors: the only part of ``forensics`` that touches processes and devices, one module a source.

A collector has a name, says what it does to its target (``disturbance``), has its own deadline, and returns a ``Collected``:
files on disk, small facts, and for whatever it could not read an ``Unread`` with the reason and the remedy. It never returns
an empty list for "could not read". ``run_collector`` holds that an observer may fail but must not break the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from ...clock import SYSTEM, Clock
from ...errors import ReproError
from ..device_state import DeviceState, Unread

__all__ = ["Collected", "CollectedFile", "Collector", "Disturbance", "run_collector", "sha256_of", "write_artefact"]

Disturbance = Literal["none", "pauses", "may end the process"]


@dataclass(frozen=True, slots=True)
class CollectedFile:
    """A file that a collector wrote, complete and on disk. ``path`` is absolute."""

    kind: str
    path: Path
    origin: Literal["measured", "interpreted", "reported"] = "measured"


@dataclass(frozen=True, slots=True)
class Collected:
    """What one collector did, in ``seconds``: its files, the device state it saw (if one), facts, and what could not be read."""

    collector: str
    disturbance: Disturbance
    seconds: float
    files: tuple[CollectedFile, ...] = ()
    state: DeviceState | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[Unread, ...] = ()


class Collector(Protocol):
    """One source. ``deadline_s``: after so many seconds ``collect`` has returned, whatever the target does."""

    name: str
    disturbance: Disturbance
    deadline_s: float

    def collect(self) -> Collected: ...


def run_collector(collector: Collector, clock: Clock = SYSTEM) -> Collected:
    """``collect`` with every failure turned into an Unread; the time is measured here."""
    began = clock.monotonic()
    try:
        outcome = collector.collect()
    except ReproError as error:
        outcome = _failed(collector, str(error), error.help_text)
    except (OSError, ValueError, KeyError, ArithmeticError, LookupError, RuntimeError, MemoryError) as error:
        outcome = _failed(collector, f"{type(error).__name__}: {error}", "Please report this with the run directory.")
    return Collected(
        collector=outcome.collector,
        disturbance=outcome.disturbance,
        seconds=clock.monotonic() - began,
        files=outcome.files,
        state=outcome.state,
        facts=outcome.facts,
        unread=outcome.unread,
    )


def _failed(collector: Collector, why: str, remedy: str) -> Collected:
    return Collected(collector.name, collector.disturbance, 0.0, unread=(Unread(collector.name, why, remedy),))


def write_artefact(path: Path, data: bytes | str) -> Path:
    """Write a whole file or none of it: a temporary name beside it, then a rename. Returns the absolute path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(data.encode("utf-8", "replace") if isinstance(data, str) else data)
    partial.replace(path)
    return path.absolute()


def sha256_of(path: Path, *, block: int = 1 << 20, progress: Callable[[int], None] | None = None) -> str:
    """The hex digest of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while data := stream.read(block):
            digest.update(data)
            if progress is not None:
                progress(len(data))
    return digest.hexdigest()
