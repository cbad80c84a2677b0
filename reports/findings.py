"""The classifier's findings out of a diagnosis, as plain rows: for, against, still open, read and not read.

A diagnosis may carry further keys (``decisive``, ``contradicting``, ``alternatives``, ``inputs``), written by this release, by a
later one or by a stranger. They are taken as found: what has the expected shape is shown, what has not is shown as its text,
nothing is believed to be complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..forensics.records import Diagnosis

__all__ = ["InputRow", "KnownCase", "Statement", "input_rows", "known_cases", "open_alternatives", "statements", "timing_words"]

_MOST = 40
_MOST_PLACES = 6
_MOST_INPUTS = 400
_TEXT_KEYS = ("text", "sentence", "why_open", "what", "fact", "reason", "why", "note")
_PLACE_KEYS = ("places", "refs", "lines", "where", "place", "ref", "evidence")


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence with the places it rests on (``engine.log:812``) and, where it is known, the rule that said it."""

    text: str
    places: tuple[str, ...] = ()
    quotes: tuple[str, ...] = ()
    rule: str = ""


@dataclass(frozen=True, slots=True)
class InputRow:
    """One thing that was given or kept, and what became of it. ``status``: read, partly, unread, kept."""

    path: str
    status: str
    kinds: str
    amount: str
    note: str


@dataclass(frozen=True, slots=True)
class KnownCase:
    """A published case held against this one. ``standing``: the catalogue's word; the lists: conditions seen, not read, against."""

    name: str
    standing: str
    sentence: str
    seen: tuple[str, ...]
    not_read: tuple[str, ...]
    against: tuple[str, ...]
    workaround: str
    fix: str


def _short(value: Any, limit: int = 600) -> str:
    if isinstance(value, str):
        text = value
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, default=str)
        except (ValueError, RecursionError):
            text = f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else text[:limit] + "…"


def _place(value: Any) -> tuple[str, str]:
    """(place, quoted text) of a citation."""
    if not isinstance(value, Mapping):
        return _short(value, 200), ""
    quote = value.get("text")
    quote = _short(quote, 240) if isinstance(quote, str) else ""
    if isinstance(value.get("place"), str):
        return _short(value["place"], 200), quote
    source = value.get("source") or value.get("file") or value.get("path")
    if source is None:
        return _short(value, 200), ""
    first, last = value.get("first", value.get("line")), value.get("last")
    place = _short(source, 160)
    if isinstance(first, int):
        unit = "@byte " if value.get("unit") == "byte" else ":"
        place += f"{unit}{first}" + (f"-{last}" if isinstance(last, int) and last != first else "")
    return place, quote


def _statement(value: Any) -> Statement:
    if not isinstance(value, Mapping):
        return Statement(_short(value))
    text = next((value[key] for key in _TEXT_KEYS if isinstance(value.get(key), str) and value[key]), "")
    cited: list[tuple[str, str]] = []
    for key in _PLACE_KEYS:
        found = value.get(key)
        if isinstance(found, Sequence) and not isinstance(found, str):
            cited += [_place(item) for item in found[:_MOST_PLACES]]
        elif isinstance(found, str | Mapping) and found:
            cited.append(_place(found))
        if cited:
            break
    rule = value.get("rule")
    quotes = tuple(quote for _, quote in cited if quote)
    return Statement(
        text or _short(value),
        tuple(place for place, _ in cited),
        quotes[:_MOST_PLACES],
        _short(rule, 60) if isinstance(rule, str) else "",
    )


def statements(value: Any) -> list[Statement]:
    """A list of findings, whatever its shape; empty where there is none."""
    if isinstance(value, Mapping | str):
        return [_statement(value)] if value else []
    if not isinstance(value, Sequence):
        return []
    return [_statement(item) for item in value[:_MOST]]


def open_alternatives(value: Any) -> list[Statement]:
    """What else it may be: class and cause in front, then what would decide."""
    found = []
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value] if value else []
    for item in items[:_MOST]:
        base = _statement(item)
        if isinstance(item, Mapping):
            name = "/".join(str(item[key])[:60] for key in ("class", "cause") if item.get(key))
            decide = next(
                (
                    item[key]
                    for key in ("decided_by", "missing", "next", "would_decide")
                    if isinstance(item.get(key), str) and item[key]
                ),
                "",
            )
            text = base.text if any(isinstance(item.get(key), str) for key in _TEXT_KEYS) else ""
            words = f"{name}: {text}" if name and text else name or text or base.text
            if decide and decide != text:
                words += f" (would decide: {_short(decide, 300)})"
            base = Statement(words, base.places, base.quotes, base.rule)
        found.append(base)
    return found


def known_cases(value: Any) -> list[KnownCase]:
    """The signatures that were compared, those that match first as they come."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []

    def words(item: Mapping[str, Any], key: str) -> tuple[str, ...]:
        found = item.get(key)
        return tuple(_short(entry, 200) for entry in found[:12]) if isinstance(found, list | tuple) else ()

    return [
        KnownCase(
            name=_short(item.get("name", ""), 80),
            standing=_short(item.get("standing", ""), 60),
            sentence=_short(item.get("sentence") or item.get("title") or "", 400),
            seen=words(item, "seen"),
            not_read=words(item, "not_read"),
            against=words(item, "against"),
            workaround=_short(item.get("workaround") or "", 400),
            fix=_short(item.get("fix") or item.get("fixed") or "", 400),
        )
        for item in value[:8]
        if isinstance(item, Mapping)
    ]


def _size(count: Any) -> str:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        return ""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def input_rows(diagnosis: Diagnosis) -> tuple[list[InputRow], int]:
    """(rows, how many more there are): the classifier's inputs, else the evidence that was kept."""
    inputs = (diagnosis.model_extra or {}).get("inputs")
    rows: list[InputRow] = []
    if isinstance(inputs, Sequence) and not isinstance(inputs, str) and inputs:
        for item in inputs[:_MOST_INPUTS]:
            if not isinstance(item, Mapping):
                rows.append(InputRow(_short(item, 200), "", "", "", ""))
                continue
            path = _short(item.get("path", ""), 200) + (f" § {_short(item['heading'], 120)}" if item.get("heading") else "")
            kinds = item.get("kinds")
            kind_words = (
                ", ".join(str(kind)[:60] for kind in kinds[:12])
                if isinstance(kinds, Sequence) and not isinstance(kinds, str)
                else _short(kinds or "", 60)
            )
            lines, unknown = item.get("lines"), item.get("unrecognised")
            amount = f"{lines} lines" if isinstance(lines, int) and lines else _size(item.get("size"))
            note = _short(item.get("note") or "", 300)
            if isinstance(unknown, int) and unknown:
                first = item.get("first_unrecognised")
                note = "; ".join(
                    part
                    for part in (
                        note,
                        f"{unknown} lines not understood" + (f", the first is {first}" if isinstance(first, int) else ""),
                    )
                    if part
                )
            rows.append(InputRow(path, _short(item.get("status", ""), 20), kind_words, amount, note))
        return rows, max(len(inputs) - _MOST_INPUTS, 0)
    for entry in diagnosis.evidence[:_MOST_INPUTS]:
        size = (entry.model_extra or {}).get("size")
        rows.append(InputRow(entry.path or entry.id, "kept", entry.kind, _size(size), f"{entry.id}, {entry.origin}"))
    return rows, max(len(diagnosis.evidence) - _MOST_INPUTS, 0)


def timing_words(value: Any) -> str:
    """``hung 1.44 s after the launch, diagnosis 0.90 s after that``, the parts that are there."""
    if not isinstance(value, Mapping):
        return ""
    parts = []
    for key, words in (
        ("launch_to_hung_s", "called hung {:.2f} s after the launch"),
        ("hung_to_diagnosis_s", "diagnosis {:.2f} s after that"),
    ):
        number = value.get(key)
        if isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < 1e9:
            parts.append(words.format(number))
    return ", ".join(parts)
