"""What the drain load learns of the engine while it steers: its own counters, and the steps that a worker's recorder holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...clock import SYSTEM, Clock
from ...errors import EvidenceError
from ...forensics.collect.engine_metrics import scrape
from ...forensics.collect.process_table import start_ticks
from ..recorder import RecordedStep, read_newest, read_ring
from .records import EngineSample
from .signals import engine_sample

__all__ = ["engine_counters", "ring_reader"]

_TIMEOUT_S = 1.0
_MOST_RINGS = 256


def engine_counters(base_url: str, *, clock: Clock = SYSTEM) -> Callable[[], EngineSample | None]:
    """A reading of ``/metrics`` at each call; None where nothing was exported, or a part of it: between sums over all lines and
    over some, counters seem to stand, fall and grow."""

    def read() -> EngineSample | None:
        reading = scrape(base_url, timeout_s=_TIMEOUT_S, clock=clock, health=False)
        sample = engine_sample(reading)
        return sample if reading.values and not sample.error else None

    return read


def _number(text: str) -> bool:
    """Digits as the agent writes them in a file's name: others (²) are no number to ``int``."""
    return text.isascii() and text.isdigit() and len(text) < 20


def _running_ring(folder: Path) -> Path | None:
    """The ring of the running worker of the lowest rank that has begun a step. All ranks run the same batches."""
    try:
        names = sorted(path for path in folder.iterdir() if path.name.startswith("ring-") and path.name.endswith(".bin"))
    except OSError:
        return None
    found: list[tuple[int, int, Path]] = []
    for path in names[:_MOST_RINGS]:
        pid, _, ticks = path.name[5:-4].partition("-")
        if not (_number(pid) and _number(ticks)) or start_ticks(int(pid)) != int(ticks):
            continue
        try:
            header = read_newest(path, steps=1).header
        except EvidenceError:
            continue
        if header.begun:
            found.append((header.rank if header.rank >= 0 else 1 << 30, -header.begun, path))
    return min(found)[2] if found else None


def ring_reader(folder: Path) -> Callable[[], Sequence[RecordedStep]]:
    """The steps that the recorder holds at each call; none where no worker of the folder runs. EvidenceError: a damaged ring."""
    known: list[Path] = []

    def read() -> Sequence[RecordedStep]:
        if not known:
            ring = _running_ring(folder)
            if ring is None:
                return ()
            known.append(ring)
        return read_ring(known[0]).steps

    return read
