"""A hang as one line of JSON, for the process that captures it, and what ``watch`` needs of the answer.

Only the standard library, and no model of a document: the watching process imports this and lives for weeks. Both ends are ours
and of one version, so a line that does not fit is a defect, told as one.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import EvidenceError
from .records import Assessment, ServerTarget, Snapshot
from .watch_loop import Hang

__all__ = ["HangVerdict", "decode_hang", "encode_hang", "verdict_of_samples", "verdict_of_words"]

_PARTS = {"target": ServerTarget, "snapshot": Snapshot, "assessment": Assessment}
_OUTCOMES = ("hang", "clean", "other", "inconclusive")
_CONFIDENCES = ("high", "medium", "low")
_MOST = 4000


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """What is told of a hang: the head of ``diagnosis.json``."""

    outcome: str
    class_: str
    cause: str | None
    confidence: Literal["high", "medium", "low"] | str
    signature: str | None
    sentence: str

    def words(self) -> dict[str, str | None]:
        """As the answer of the capturing process carries it."""
        return {
            "outcome": self.outcome, "class": self.class_, "cause": self.cause, "confidence": self.confidence,
            "signature": self.signature, "sentence": self.sentence,
        }  # fmt: skip


def verdict_of_words(words: object) -> HangVerdict:
    """``HangVerdict.words`` read back; EvidenceError if it is anything else."""
    if not isinstance(words, dict):
        raise EvidenceError("the answer has no verdict")
    found = {name: words.get(name) for name in ("outcome", "class", "cause", "confidence", "signature", "sentence")}
    if any(value is not None and not (isinstance(value, str) and len(value) <= _MOST) for value in found.values()):
        raise EvidenceError("the answer's verdict holds something that is no text")
    if found["outcome"] not in _OUTCOMES or found["confidence"] not in _CONFIDENCES or not found["class"]:
        raise EvidenceError("the answer's verdict is none of ours")
    return HangVerdict(
        str(found["outcome"]), str(found["class"]), found["cause"], str(found["confidence"]), found["signature"],
        found["sentence"] or "",
    )  # fmt: skip


def verdict_of_samples(hang: Hang) -> HangVerdict:
    """That it hangs, on the device's own sign, is the watchdog's finding; the samples alone name no cause. With more than one
    worker they do not say either whether a kernel or a collective is stuck."""
    single = len(hang.target.ranks) == 1
    sentence = "; ".join((*hang.assessment.device_signals, *hang.assessment.reasons))[:1000]
    kind = "gpu-kernel-stuck" if single else "unknown"
    return HangVerdict("hang" if single else "inconclusive", kind, None, "low", None, sentence)


def encode_hang(hang: Hang, **more: Any) -> bytes:
    """One line. ``more``: what else the capture is told, as plain values."""
    document = {name: _plain(getattr(hang, name)) for name in _PARTS}
    document |= {"recent": _plain(hang.recent), "number": hang.number, "more": _plain(more)}
    return json.dumps(document).encode("ascii") + b"\n"


def decode_hang(line: bytes) -> tuple[Hang, dict[str, Any]]:
    """The hang (its ``moved`` says nothing yet) and ``more``. EvidenceError if the line is none of ``encode_hang``."""
    try:
        document = json.loads(line)
        parts = {name: _built(kind, document[name]) for name, kind in _PARTS.items()}
        recent = tuple((str(kind), dict(found)) for kind, found in document["recent"])
        return Hang(**parts, recent=recent, number=int(document["number"])), dict(document["more"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise EvidenceError(f"no hang could be read: {type(error).__name__}: {error}"[:300]) from error


def _plain(value: Any) -> Any:
    """Dictionaries, lists, numbers and texts; anything else as its text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _built(kind: Any, value: Any) -> Any:
    """``value`` as the record type that it was: records, paths, tuples and the keys of mappings are made again."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _built(hints[name], item) for name, item in value.items()})
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _built(next(one for one in inner if one is not type(None)), value)
    if origin is tuple:
        return tuple(_built(inner[0], item) for item in value)
    if origin is Mapping:
        return {inner[0](key): _built(inner[1], item) for key, item in value.items()}
    return Path(value) if kind is Path else value
