"""What the agents of a server's running workers count: stalls that the rescue ended, metadata builds that the guard clamped."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import EvidenceError
from ..agent_document import read_document

__all__ = ["AgentCounters", "agent_counters"]

_MOST_FILES = 4096
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class AgentCounters:
    """Sums over workers, since each of them started. ``averted``: steps in which the guard made a length
    of -1 a 0; with as many rows as their graph has not each of them would have wedged."""

    releases: int
    rescues: int
    guarded: int
    averted: int


def agent_counters(folder: Path | None, pids: Collection[int], began: Mapping[int, int] | None = None) -> AgentCounters | None:
    """From the status files of ``pids`` in ``folder``; None where none of them says anything (an older agent, or none).

    ``began``: start ticks by pid, where known: in a container pids come again, and what another process left is not counted.
    """
    if folder is None:
        return None
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name.startswith("status-"))[:_MOST_FILES]
    except OSError:
        return None
    sums = dict.fromkeys(("releases", "rescues", "guarded_builds", "averted_lengths"), 0)
    found = False
    for name in names:
        pid, _, ticks = name.removeprefix("status-").removesuffix(".json").partition("-")
        if not (pid.isascii() and pid.isdigit() and int(pid[:18]) in pids):
            continue
        start = (began or {}).get(int(pid[:18]), 0)
        if start and ticks not in (str(start), "0"):
            continue
        try:
            counters = read_document(folder / name).get("counters")
        except EvidenceError:
            continue
        if isinstance(counters, dict):
            found = True
            for key in sums:
                value = counters.get(key)
                sums[key] += value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST else 0
    return AgentCounters(sums["releases"], sums["rescues"], sums["guarded_builds"], sums["averted_lengths"]) if found else None
