"""PyTorch's flight recorder (``TORCH_FR_BUFFER_SIZE``): one dump a rank, JSON or the pickle that torch writes.

The pickle is read by an unpickler that knows no classes at all, so nothing in it can run. Only the collectives that are not
completed, and the last completed one of each process group, are kept.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from typing import Any

from ...errors import TranscriptError
from .casefile import CaseFile
from .facts import FlightEntry, FlightRank
from .refs import Ref, Section

__all__ = ["flight_rank", "load_pickle", "read_flight_recorder"]

_RANK_SUFFIX = re.compile(r"(?:rank[_-]?|_|\.)(\d{1,5})(?:\.(?:json|pkl|pickle))?$")
_MAX_ENTRIES = 20_000


class _NoClasses(pickle.Unpickler):
    """Plain containers and scalars only."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"the dump names the class {module_name}.{global_name}, which a flight recorder never does")


def load_pickle(data: bytes, path: str) -> Any:
    """Read a pickled dump without running anything in it; ``TranscriptError`` for everything that is not one."""
    try:
        return _NoClasses(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, ValueError, EOFError, IndexError, KeyError, TypeError, AttributeError, MemoryError,
            OverflowError, RecursionError, UnicodeDecodeError, NotImplementedError) as error:  # fmt: skip
        raise TranscriptError(f"not a readable flight-recorder pickle: {error}", path=path) from error


def flight_rank(document: Any, ref: Ref, rank: int | None) -> FlightRank | None:
    """A dump as a record; None if the document is no flight recorder's."""
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        return None
    if "pg_config" not in document and "pg_status" not in document and "version" not in document:
        return None
    if isinstance(document.get("rank"), int):
        rank = document["rank"]
    newest: dict[str, FlightEntry] = {}
    pending: list[FlightEntry] = []
    for item in document["entries"][-_MAX_ENTRIES:]:
        if not isinstance(item, dict):
            continue
        group = item.get("process_group") or item.get("pg_id") or item.get("pg_name") or ""
        name = ":".join(str(part) for part in group) if isinstance(group, list | tuple) else str(group)
        sequence = item.get("collective_seq_id", item.get("seq_id"))
        if not isinstance(sequence, int) or item.get("is_p2p") is True:
            continue
        entry = FlightEntry(
            name, sequence, str(item.get("profiling_name", "")).removeprefix("nccl:"), str(item.get("state", "")),
            json.dumps([item.get("input_sizes"), item.get("output_sizes"), item.get("input_dtypes")], default=str)[:200],
        )  # fmt: skip
        if entry.state == "completed":
            if name not in newest or newest[name].sequence < sequence:
                newest[name] = entry
        else:
            pending.append(entry)
    status: dict[str, dict[str, int]] = {}
    for group, values in (document.get("pg_status") or {}).items():
        if isinstance(values, dict):
            status[str(group)] = {str(key): value for key, value in values.items() if isinstance(value, int)}
    return FlightRank(ref, rank, tuple([*newest.values(), *pending][:2000]), status, empty=not document["entries"])


def rank_of_name(name: str) -> int | None:
    found = _RANK_SUFFIX.search(name)
    return int(found.group(1)) if found else None


def read_flight_recorder(section: Section, case: CaseFile) -> None:
    text = section.text
    if '"entries"' not in text or not ('"pg_config"' in text or '"pg_status"' in text or '"collective_seq_id"' in text):
        return
    decoder = json.JSONDecoder()
    position, found = 0, 0
    while found < 4096:
        start = text.find("{", position)
        if start < 0:
            break
        try:
            document, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            following = text.find("\n{", start)
            if following < 0:
                break
            position = following + 1
            continue
        first, last = section.index_at(start), section.index_at(end - 1)
        rank = section.hints.rank if section.hints.rank is not None else rank_of_name(section.source)
        record = flight_rank(document, section.ref(first, last), rank)
        if record is not None:
            section.claim(first, last)
            case.flights.append(record)
            found += 1
        position = end
