"""What the wrapper around a server changed so that evidence can be taken: each setting with its value and its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MOST_CHANGES", "change_rows", "is_plain"]

MOST_CHANGES = 64


def is_plain(value: Any) -> bool:
    """A value that one cell of a table can show; what has a structure of its own stays in ``run.json``."""
    return not isinstance(value, Mapping | list | tuple | set | bytes)


def change_rows(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(setting, value, why) of ``environment.details.changes``, at most ``MOST_CHANGES``; what is of another shape is left out."""
    environment = run.get("environment")
    details = environment.get("details") if isinstance(environment, Mapping) else None
    changes = details.get("changes") if isinstance(details, Mapping) else None
    rows = []
    for item in changes[:MOST_CHANGES] if isinstance(changes, list | tuple) else ():
        if isinstance(item, Mapping) and item.get("what"):
            values = [item.get(key) for key in ("what", "value", "why")]
            rows.append(tuple("" if value is None else str(value) if is_plain(value) else "…" for value in values))
    return [(what, value, why) for what, value, why in rows]
