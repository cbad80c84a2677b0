"""Rows of a campaign's store, each checked: SQLite keeps a value of any type in any column, and a store may be somebody else's."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import RunStoreError

__all__ = ["STORE_ERRORS", "checked_rows", "damaged", "is_seconds", "store_error", "text_of"]

#: What reading a store may raise: SQLite's own error, or that its error cannot be told, because damaged bytes are part of its text.
STORE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
_BACKUP = "Copy the folder from a backup, or start a new campaign."


def store_error(error: Exception, path: Path) -> RunStoreError:
    """What SQLite says of the store at ``path``, with what to do."""
    text = "the database is malformed" if isinstance(error, UnicodeDecodeError) else str(error)
    full = "full" in text or "I/O" in text
    return RunStoreError(
        f"the campaign's store cannot be used: {text}" + ("; what was written before stays" if full else ""),
        path=str(path),
        help_text="Free some space, then: dsv4-repro hunt PLAN --resume" if full else _BACKUP,
    )


def damaged(path: Path, what: str) -> RunStoreError:
    """A store that can be opened and holds what no hunt wrote."""
    return RunStoreError(f"the campaign's store is damaged: {what}", path=str(path), help_text=_BACKUP)


def text_of(data: bytes) -> str:
    """A stored text; bytes that are none are replaced, so that a damaged one can be named at all."""
    return data.decode("utf-8", "replace")


def is_seconds(value: Any) -> bool:
    """A finite number that is not negative."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _inside(value: Any) -> bool:
    """A path that does not lead out of the campaign's folder: the user is told to run what lies there."""
    return isinstance(value, str) and not PurePosixPath(value).is_absolute() and ".." not in PurePosixPath(value).parts


_FITS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "count": lambda value: isinstance(value, int) and value >= 0,
    "seconds": is_seconds,
    "path": _inside,
}


def checked_rows(
    db: sqlite3.Connection, path: Path, table: str, columns: Mapping[str, str], rest: str = "", given: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, ...]]:
    """Rows of ``table``. ``columns``: name -> text, count, seconds or path (inside the folder), with "?" where there may be none.

    ``rest``: what follows in the query, with ``given`` for its question marks. RunStoreError names table, column and value.
    """
    try:
        for row in db.execute(f"SELECT {', '.join(columns)} FROM {table} {rest}", given):
            for (name, kind), value in zip(columns.items(), row, strict=True):
                if not (value is None and kind.endswith("?")) and not _FITS[kind.rstrip("?")](value):
                    raise damaged(path, f"table {table}, {name}: {ascii(value)[:60]} is no {kind.rstrip('?')}")
            yield row
    except STORE_ERRORS as error:
        raise store_error(error, path) from None
