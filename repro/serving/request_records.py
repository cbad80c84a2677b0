"""``requests.jsonl``: what the load sent and what came back, a line an event, written as it happens; its reader; and a comparison.

Every line is one write to a file opened for appending, so a killed run loses nothing that it had seen; a line cut short at the end
is what a crash leaves and is left out. The file is bounded: past ``MAX_BYTES`` arrivals are no longer written, sends and ends still
are, and the file says so. Lines of kind:

- ``load``: schema, plan, server and the names of our headers (never their values);
- ``sent``: id, wave, ``prompt_sha256``, ``max_tokens``; ``accepted``: status 200 came;
- ``tokens``: ``at`` (seconds, monotonic), ``n`` (tokens so far), ``ids`` (those that came) or ``text`` (its hash);
- ``end``: kind, finish reason, detail; ``steer``: what the steering did and why; ``window``: how a wave's windows were reached.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import RunStoreError
from ...forensics.evidence.opening import at_once_no_link
from ..atomic import disk_error, make_folder

__all__ = [
    "MAX_BYTES",
    "REQUESTS_SCHEMA",
    "OutputComparison",
    "RecordWriter",
    "RequestRecord",
    "compare_outputs",
    "read_requests",
]

REQUESTS_SCHEMA = "dsv4-repro/requests/1"
MAX_BYTES = 256 << 20
_MAX_LINE = 4 << 20
_MAX_IDS = 100_000


class RecordWriter:
    """Appends lines. A disk that is full ends the records, not the load: ``error`` then says so."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.error = ""
        self._left = max_bytes
        self._said = False
        make_folder(path.parent)
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise disk_error(error, path, "open the records") from error

    def write(self, event: str, /, *, bounded: bool = False, **fields: Any) -> None:
        """One line. ``bounded``: it counts against the file's limit and is left out past it."""
        if self._fd < 0 or self.error:
            return
        line = (json.dumps({"event": event, **fields}, separators=(",", ":")) + "\n").encode()
        if bounded:
            if self._left < len(line):
                if not self._said:
                    self._said = True
                    self.write("truncated", why="the records reached their limit: arrivals are no longer written")
                return
            self._left -= len(line)
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self.error = str(disk_error(error, self.path, "write the records"))

    def close(self) -> None:
        """Flush to the disk and close; safe to call again."""
        if self._fd < 0:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            self.error = self.error or str(disk_error(error, self.path, "flush the records"))
        finally:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as recorded. Times in seconds of the run's monotonic clock. ``arrivals``: (time, tokens so far).

    ``kind``: how it ended, empty if the records end first. ``token_ids``: the output, None if the server sent no ids; ``texts``:
    tokens so far -> hash of the text so far, where there are no ids.
    """

    id: str
    wave: str
    prompt_sha256: str
    max_tokens: int
    sent_at: float
    accepted_at: float | None = None
    ended_at: float | None = None
    kind: str = ""
    finish_reason: str | None = None
    detail: str = ""
    arrivals: tuple[tuple[float, int], ...] = ()
    token_ids: tuple[int, ...] | None = None
    texts: Mapping[int, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens received."""
        return self.arrivals[-1][1] if self.arrivals else 0

    @property
    def first_token_at(self) -> float | None:
        """When the first came."""
        return self.arrivals[0][0] if self.arrivals else None


@dataclass
class _Building:
    fields: dict[str, Any]
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ids: list[int] | None = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)


def read_requests(path: Path, *, max_bytes: int = 2 * MAX_BYTES) -> dict[str, RequestRecord]:
    """The requests of a records file, by id in order of sending. RunStoreError names file and line."""
    found: dict[str, _Building] = {}
    read = 0
    try:
        with open(path, "rb", opener=at_once_no_link) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise RunStoreError("not a regular file", path=str(path))
            number = 0
            while line := stream.readline(_MAX_LINE + 1):
                number += 1
                read += len(line)
                if len(line) > _MAX_LINE or read > max_bytes:
                    raise RunStoreError("larger than any records file is", path=str(path), place=f"line {number}")
                if not line.endswith(b"\n"):
                    break
                try:
                    _take(found, json.loads(line))
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    said = f"{type(error).__name__}: {str(error)[:100]}"
                    raise RunStoreError(f"no record of the load: {said}", path=str(path), place=f"line {number}") from None
                if len(found) > _MAX_IDS:
                    raise RunStoreError(f"more than {_MAX_IDS} requests", path=str(path), place=f"line {number}")
    except OSError as error:
        raise RunStoreError(f"cannot be read: {error.strerror or error}", path=str(path)) from None
    return {
        name: RequestRecord(
            **one.fields,
            arrivals=tuple(one.arrivals),
            token_ids=tuple(one.ids) if one.ids else None,
            texts=one.texts,
        )
        for name, one in found.items()
    }


def _take(found: dict[str, _Building], line: Any) -> None:
    if not isinstance(line, dict):
        raise TypeError("not an object")
    kind = line.get("event")
    if kind == "sent":
        fields = {
            "id": str(line["id"]),
            "wave": str(line["wave"]),
            "prompt_sha256": str(line["prompt_sha256"]),
            "max_tokens": int(line["max_tokens"]),
            "sent_at": float(line["at"]),
        }
        found[str(line["id"])] = _Building(fields)
        return
    if kind not in ("accepted", "tokens", "end"):
        return
    one = found[str(line["id"])]
    if kind == "accepted":
        one.fields["accepted_at"] = float(line["at"])
    elif kind == "end":
        one.fields.update(
            ended_at=float(line["at"]),
            kind=str(line["kind"]),
            finish_reason=None if line.get("finish_reason") is None else str(line["finish_reason"]),
            detail=str(line.get("detail", "")),
        )
    else:
        counts = [int(count) for count in line["n"]]
        one.arrivals += zip((float(at) for at in line["at"]), counts, strict=True)
        if "ids" in line and one.ids is not None:
            one.ids += [int(each) for some in line["ids"] for each in some]
        else:
            one.ids = None
            one.texts.update(zip(counts, (str(text) for text in line.get("text", ())), strict=False))


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """Two runs of the same requests.

    ``equal``: ids with the same output to the end of both. ``agree``: id -> tokens up to which both say the same, one of them
    ending there. ``differ``: id -> tokens that agree before the first that does not. ``unknown``: id -> why nothing can be said.
    """

    equal: tuple[str, ...]
    agree: Mapping[str, int]
    differ: Mapping[str, int]
    unknown: Mapping[str, str]

    @property
    def same(self) -> bool | None:
        """No request differs; None if none could be compared."""
        if self.differ:
            return False
        return True if self.equal or self.agree else None

    @property
    def compared_tokens(self) -> int:
        """Tokens that agree in requests that ended differently long, and before the first difference in the others."""
        return sum(self.agree.values()) + sum(self.differ.values())

    def lines(self) -> list[str]:
        """What was found, in words."""
        said = []
        if self.equal:
            said.append(f"{len(self.equal)} requests have the same output, whole")
        if self.agree:
            low, high = min(self.agree.values()), max(self.agree.values())
            said.append(f"{len(self.agree)} agree as far as both go: {low} to {high} tokens")
        said += [f"{name} differs after {tokens} tokens" for name, tokens in list(self.differ.items())[:20]]
        if len(self.differ) > 20:
            said.append(f"{len(self.differ) - 20} more differ")
        for why in sorted(set(self.unknown.values())):
            names = [name for name, reason in self.unknown.items() if reason == why]
            said.append(f"{len(names)} cannot be compared: {why}")
        return said or ["no requests to compare"]


def compare_outputs(a: Mapping[str, RequestRecord], b: Mapping[str, RequestRecord]) -> OutputComparison:
    """Compare two runs of the same plan (``read_requests`` of each), request by request, up to where they agree."""
    equal: list[str] = []
    agree: dict[str, int] = {}
    differ: dict[str, int] = {}
    unknown: dict[str, str] = {}
    for name in [*a, *(name for name in b if name not in a)]:
        one, other = a.get(name), b.get(name)
        if one is None or other is None:
            unknown[name] = "sent in one run only"
        elif one.prompt_sha256 != other.prompt_sha256:
            unknown[name] = "the prompts are not the same"
        elif not one.tokens or not other.tokens:
            unknown[name] = "no tokens in one of the runs"
        else:
            _compare(name, one, other, equal, agree, differ, unknown)
    return OutputComparison(tuple(equal), agree, differ, unknown)


def _compare(
    name: str,
    one: RequestRecord,
    other: RequestRecord,
    equal: list[str],
    agree: dict[str, int],
    differ: dict[str, int],
    unknown: dict[str, str],
) -> None:
    ids, others = one.token_ids, other.token_ids
    if ids is not None and others is not None:
        common = _common(ids, others)
        if common < min(len(ids), len(others)):
            differ[name] = common
        elif len(ids) == len(others):
            equal.append(name)
        else:
            agree[name] = common
        return
    shared = sorted(set(one.texts) & set(other.texts))
    if not shared:
        unknown[name] = "no token ids, and no text at the same token counts"
        return
    common = 0
    for count in shared:
        if one.texts[count] != other.texts[count]:
            differ[name] = common
            return
        common = count
    if common == one.tokens == other.tokens:
        equal.append(name)
    else:
        agree[name] = common


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), min(len(one), len(other)))
