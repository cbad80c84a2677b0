"""Does a server make progress? The rule of the probe, over recorders or over counters remembered from the last look. Pure but for
one small state file.

The file is private (0600, in a folder of ours that nobody else may write), replaced whole, and doubted when it is read: another
boot, another server, a time in the future or any damage makes it a first look, which never says "stalled".
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import UnavailableError
from ...forensics.evidence.opening import at_once_no_link
from ..atomic import write_atomic
from .recorded_ranks import RecordedRank

__all__ = ["Liveness", "by_counters", "by_recorders", "default_state_path", "read_state", "write_state"]

#: The agent's thread beats ten times a second; silent for longer, it did not look at the events.
HEARD_S = 5.0
COUNTERS = ("generation_tokens", "prompt_tokens", "iterations", "finished", "preemptions")
_MAX_STATE = 4096


@dataclass(frozen=True, slots=True)
class Liveness:
    """``alive``: progress, or nothing to do. ``stalled_s``: since the last progress, None if not known."""

    state: Literal["alive", "stalled", "unknown"]
    text: str
    stalled_s: float | None = None


def by_recorders(ranks: Sequence[RecordedRank], max_stall: float) -> Liveness:
    """A worker whose launched step has not ended for ``max_stall`` seconds is stalled, if its agent looked meanwhile."""
    if not ranks:
        return Liveness("unknown", "no running worker with a recorder")
    late = [rank for rank in ranks if rank.unfinished_age_s is not None and rank.unfinished_age_s >= max_stall]
    deaf = [rank for rank in late if rank.heard_age_s is not None and rank.heard_age_s > HEARD_S]
    sure = [rank for rank in late if rank not in deaf]
    if sure:
        worst = max(sure, key=lambda rank: rank.unfinished_age_s or 0.0)
        text = f"worker {worst.pid}: a launched step has not ended for {worst.unfinished_age_s:.0f} s"
        return Liveness("stalled", text, worst.unfinished_age_s)
    if deaf:
        return Liveness(
            "unknown", f"worker {deaf[0].pid}: its agent has not run for {deaf[0].heard_age_s:.0f} s, so sees no step end"
        )
    ages = [rank.unfinished_age_s for rank in ranks if rank.unfinished_age_s is not None]
    many = f"{len(ranks)} recorder{'' if len(ranks) == 1 else 's'}"
    text = f"{many}, oldest step under way {max(ages):.1f} s" if ages else f"{many}, no step under way"
    return Liveness("alive", text, max(ages, default=0.0))


def by_counters(
    values: Mapping[str, float], previous: Mapping[str, Any] | None, *, server: str, boot: str, now: float, max_stall: float
) -> tuple[Liveness, dict[str, Any]]:
    """(how it stands, the state to remember). ``now``: seconds on the monotonic clock of this boot."""
    counters = {name: values[name] for name in COUNTERS if name in values}
    busy = values.get("running", 0) > 0 or values.get("waiting", 0) > 0
    moved_at = now
    known = _since(previous, server, boot, now)
    if known is not None and busy and previous is not None and previous.get("busy") is True:
        moved_at = known if previous.get("counters") == counters else now
    state = {"server": server, "boot": boot, "moved_at": moved_at, "counters": counters, "busy": busy}
    stalled = now - moved_at
    if not counters:
        return Liveness("unknown", "none of the engine's counters is exported"), state
    if not busy and not {"running", "waiting"} <= values.keys():
        return Liveness(
            "unknown", "how many requests run and wait is not exported: whether there is anything to do is not known"
        ), state
    if not busy:
        return Liveness("alive", "no request runs or waits", 0.0), state
    if stalled >= max_stall:
        return Liveness("stalled", f"requests run and no counter has moved for {stalled:.0f} s", stalled), state
    if known is None:
        return Liveness("alive", "requests run; the first look, so whether a counter moves is seen by the next", stalled), state
    if moved_at == now:
        return Liveness("alive", "requests run; a counter has moved, or they came, since the last look", stalled), state
    return Liveness(
        "alive", f"requests run; no counter has moved for {stalled:.0f} s, {max_stall:.0f} s are allowed", stalled
    ), state


def _since(previous: Mapping[str, Any] | None, server: str, boot: str, now: float) -> float | None:
    if previous is None or previous.get("server") != server or previous.get("boot") != boot:
        return None
    moved_at = previous.get("moved_at")
    if isinstance(moved_at, bool) or not isinstance(moved_at, int | float) or not 0 <= moved_at <= now:
        return None
    return float(moved_at)


def default_state_path(key: str) -> Path:
    """``key``: letters and digits. The user's run-time folder, else one below /tmp with this user's number."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(own) / "dsv4-repro" if own and os.path.isdir(own) else Path(tempfile.gettempdir()) / f"dsv4-repro-{os.getuid()}"
    return folder / f"probe-{key}.json"


def read_state(path: Path) -> dict[str, Any] | None:
    """What the last probe remembered; None for none, or for a file that is not ours or makes no sense."""
    try:
        with open(path, "rb", opener=at_once_no_link) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                return None
            raw = stream.read(_MAX_STATE + 1)
        document = json.loads(raw) if len(raw) <= _MAX_STATE else None
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the file (0600); a folder that is made is private. UnavailableError: the folder is another's, or is no folder."""
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UnavailableError(f"{folder}: {error.strerror or error}", help_text="Name another place: --state FILE") from None
    shared = stat.S_ISLNK(status.st_mode) or status.st_uid not in (os.getuid(), 0)
    # In a folder that others may write, a sticky one apart, the file could be exchanged between two probes.
    if shared or (status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX):
        raise UnavailableError(f"{folder} may be written by others", help_text="Name another place: --state FILE")
    write_atomic(path, json.dumps(state).encode())
