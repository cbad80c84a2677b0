"""One entry of a timeline, by itself: the time and the numbers in it, the words that it is shown with, its lane and its level.

An entry is a line of ``timeline.jsonl`` or an event of the diagnosis's own timeline; both are input that anybody may have written.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["KIND_LANES", "QUIET", "clipped", "epoch", "finite", "level_of", "moment_of", "words_of"]

#: Kind of an entry -> lane, where it is not the lane of its source.
KIND_LANES = {
    "hung": "watch", "verdict": "watch", "deadline": "watch", "collecting": "collect", "capture": "collect",
    "unwedge": "experiment", "row states": "experiment", "log": "log", "stats": "log",
}  # fmt: skip
#: Kinds of the classifier's events that say that something ended badly.
_BAD = frozenset(
    {"hung", "died", "fault", "deadline", "rpc-timeout", "fatal", "engine-dead", "worker-died", "engine-proc-died", "xid", "sxid",
     "cuda-error", "coredump-exception", "build-failed", "launch-refused", "nccl-watchdog", "oom"}
)  # fmt: skip
#: Kinds that add nothing to the picture: an artefact is part of its capture, a step is part of the curves.
QUIET = frozenset({"read", "artefact", "step", "sample", "metrics"})
_MOST_TEXT = 300


def finite(value: Any) -> float | None:
    """A finite number; bools and text are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) < 1e15 else None


def epoch(value: Any) -> float | None:
    """Seconds since 1970 from a number or an ISO 8601 text (UTC where it names no zone)."""
    number = finite(value)
    if number is not None:
        return number if 1e8 < number < 1e11 else None
    if not isinstance(value, str) or len(value) > 64:
        return None
    try:
        moment = dt.datetime.fromisoformat(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    try:
        return moment.timestamp()
    except (OverflowError, ValueError):
        return None


def moment_of(entry: Any) -> float | None:
    """When an entry of the diagnosis's timeline happened, seconds since 1970; None if it does not say."""
    if not isinstance(entry, Mapping):
        return None
    return next((found for key in ("seconds", "at", "when", "time") if (found := epoch(entry.get(key))) is not None), None)


def clipped(value: Any, limit: int = _MOST_TEXT) -> str:
    """The text of a value, cut after ``limit`` characters."""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= limit else text[:limit] + "…"


def words_of(kind: str, fields: Mapping[str, Any]) -> str:
    """A line's own words, or its kind with its plain fields."""
    for key in ("text", "description", "state", "message", "line"):
        if isinstance(fields.get(key), str) and fields[key]:
            return f"{kind}: {fields[key]}"
    if kind == "unwedge" and not fields.get("attempted"):
        return f"unwedge: not tried, {fields.get('why_not') or 'no reason given'}"
    if kind == "unwedge":
        after = finite(fields.get("ms"))
        how = (
            f"the kernel retired {after:.2f} ms later"
            if fields.get("retired") and after is not None
            else "the kernel did not retire"
        )
        return f"a large count written into the counter: {'the kernel retired' if fields.get('retired') and after is None else how}"
    plain = [f"{key} {value}" for key, value in fields.items() if isinstance(value, str | int | float) and value != ""][:6]
    return f"{kind}: {', '.join(plain)}" if plain else kind


def level_of(kind: str, fields: Mapping[str, Any]) -> str:
    """``bad``, ``good`` or ``info``: the line's own word for it, else by its kind and its error."""
    level = fields.get("level")
    if isinstance(level, str) and level in ("bad", "good", "info"):
        return level
    if kind in _BAD or fields.get("error"):
        return "bad"
    if kind == "unwedge" and fields.get("retired"):
        return "good"
    return "info"
