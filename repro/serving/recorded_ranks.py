"""How far each worker is by its flight recorder, for those who have a moment only: the probe, and the engine's deadline.

Reads ring files and ``/proc/PID/stat``; imports nothing beyond the standard library and the ring's reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...clock import SYSTEM, Clock
from ...errors import EvidenceError
from ..recorder import read_newest

__all__ = ["RecordedRank", "recorded_ranks"]

MOST_RINGS = 1024


@dataclass(frozen=True, slots=True)
class RecordedRank:
    """A running worker. ``begun``: steps so far. ``unfinished_age_s``: since the launch of the oldest step not seen to end, None
    if there is none; ``last_end_age_s``: since a step was last seen to end. ``heard_age_s``: since the agent's thread that looks at
    events last ran, None if this agent does not say: a thread that does not run sees no step end."""

    pid: int
    begun: int
    unfinished_age_s: float | None
    last_end_age_s: float | None
    heard_age_s: float | None = None


def _same(pid: int, ticks: int, proc: Path) -> bool:
    try:
        with open(proc / str(pid) / "stat", "rb") as stream:
            fields = stream.read(4096).rpartition(b")")[2].split()
        return fields[0] not in (b"Z", b"X") and (not ticks or int(fields[19]) == ticks)
    except (OSError, ValueError, IndexError):
        return False


def recorded_ranks(folder: Path, *, clock: Clock = SYSTEM, proc: Path = Path("/proc")) -> tuple[RecordedRank, ...]:
    """The workers that run and have a recorder in ``folder``; rings of ended processes are passed over. EvidenceError: no folder,
    or a ring of a running process that cannot be read."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name.startswith("ring-") and path.name.endswith(".bin"))
    except OSError as error:
        raise EvidenceError(f"cannot be read: {error.strerror or error}", path=str(folder)) from None
    now = clock.monotonic()
    found = []
    for name in names[:MOST_RINGS]:
        pid_text, _, ticks_text = name[5:-4].partition("-")
        if not ((pid_text + ticks_text).isascii() and pid_text.isdigit() and ticks_text.isdigit() and len(name) < 64):
            continue
        if not _same(int(pid_text), int(ticks_text), proc):
            continue
        contents = read_newest(folder / name)
        begun = [step.launch_ns for step in contents.unfinished if step.launch_ns is not None]
        ended = contents.last_progress_ns
        found.append(
            RecordedRank(
                int(pid_text),
                contents.header.begun,
                max(now - min(begun) / 1e9, 0.0) if begun else None,
                max(now - ended / 1e9, 0.0) if ended is not None else None,
                max(now - contents.header.heard_ns / 1e9, 0.0) if contents.header.heard_ns else None,
            )
        )
    return tuple(found)
