"""Where a fact comes from, and one part of a text with its lines.

``Ref`` is the citation that every fact and every rule carries. ``Section`` is a run of lines of one source, already freed of
envelopes (journald, Kubernetes, JSON lines, terminal colours); readers search its joined ``text`` and mark with ``claim`` the
lines that they understood, so that what nobody understood can be listed.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .stamps import Stamp

__all__ = ["EXCERPT_CHARACTERS", "LINE_LIMIT", "Hints", "Ref", "Section"]

#: A citation quotes at most this many characters of its first line.
EXCERPT_CHARACTERS = 240
#: Readers see at most this many characters of a line; only a scheduler dump needs more.
LINE_LIMIT = 16_000


@dataclass(frozen=True, slots=True)
class Ref:
    """``source`` is the file (for a member of an archive ``archive!member``); lines count from 1, bytes from 0, both inclusive."""

    source: str
    first: int
    last: int
    unit: Literal["line", "byte"] = "line"
    text: str = ""

    def place(self) -> str:
        """``file:12``, ``file:12-20`` or ``file@byte 0x40-0x80``."""
        if self.unit == "byte":
            return f"{self.source}@byte {self.first:#x}-{self.last:#x}"
        return f"{self.source}:{self.first}" if self.first == self.last else f"{self.source}:{self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class Hints:
    """What a heading or a file name claims about the part below it. Claims, not measurements: rules quote them as reported.

    ``repeat``: "same" (taken twice, identical), "moved" (samples differ) or None. ``seconds_apart``: between the samples.
    ``samples``: how many were taken, where it says so.
    """

    rank: int | None = None
    pid: int | None = None
    role: Literal["engine", "worker", "api"] | None = None
    ranks_all: bool = False
    repeat: Literal["same", "moved"] | None = None
    seconds_apart: float | None = None
    samples: int | None = None


_RANK = re.compile(r"(?i)\brank[ _#=:-]?(\d{1,5})\b|(?<![A-Za-z])TP[ _]?(\d{1,4})\b|(?i:rank)(\d{1,5})")
_PID = re.compile(r"(?i)(?:--pid|-p|\bpid)[ =:_-]?\s*(\d{1,9})\b|/proc/(\d{1,9})\b")
_REPEAT_SAME = re.compile(
    r"(?i)\bidentical\b|\bunchanged\b|\bsame (?:stack|frame|values|counts|result)s?\b|\bdid not (?:move|change)\b"
)
_REPEAT_MOVED = re.compile(r"(?i)\bdiffer(?:s|ent)?\b|\bmoved\b|\bchang(?:ed|ing)\b|\bthe loop turns\b")
_NEGATED_MOVE = re.compile(r"(?i)\b(?:not|never|nothing|un)[ -]?(?:moved|chang(?:ed|ing)|differ(?:s|ent)?)\b")
_APART = re.compile(r"(?i)(\d+(?:\.\d+)?)\s*(s|sec|seconds|min|minutes|ms)\b\s*(?:apart|later|after|between)")
_ENGINE = re.compile(r"(?i)engine[ _-]?core")
_WORKER = re.compile(r"(?i)\bworkers?\b|VllmWorker|RayWorker|\bTP[ _]?\d")
_API = re.compile(r"(?i)api[ _-]?server|\bfrontend\b")
_ALL_RANKS = re.compile(r"(?i)\b(?:both|all|every|each)\b[^=]{0,20}\b(?:ranks?|workers?)\b")
_SAMPLE_WORDS = {"twice": 2, "two": 2, "three": 3, "thrice": 3, "four": 4, "five": 5}
_SAMPLES_TIMES = re.compile(
    r"(?i)\b(two|three|four|five|\d{1,2})[ -]?(?:times|samples?|dumps?|looks?|scrapes?|queries|x\b)|\b(twice|thrice)\b"
)
_UNIT_SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "minutes": 60.0, "ms": 0.001}


def hints_of(heading: str) -> Hints:
    """Read what a heading or file name says about its part."""
    rank = _RANK.search(heading)
    pid = _PID.search(heading)
    apart = _APART.search(heading)
    repeat: Literal["same", "moved"] | None = None
    if _REPEAT_SAME.search(heading) or _NEGATED_MOVE.search(heading):
        repeat = "same"
    elif _REPEAT_MOVED.search(heading):
        repeat = "moved"
    role: Literal["engine", "worker", "api"] | None = None
    if _ENGINE.search(heading):
        role = "engine"
    elif _WORKER.search(heading):
        role = "worker"
    elif _API.search(heading):
        role = "api"
    return Hints(
        rank=int(next(g for g in rank.groups() if g is not None)) if rank else None,
        pid=int(next(g for g in pid.groups() if g is not None)) if pid else None,
        role=role,
        ranks_all=bool(_ALL_RANKS.search(heading)),
        repeat=repeat,
        seconds_apart=float(apart.group(1)) * _UNIT_SECONDS[apart.group(2).lower()] if apart else None,
        samples=_sample_count(heading),
    )


def _sample_count(heading: str) -> int | None:
    match = _SAMPLES_TIMES.search(heading)
    if match is None:
        return None
    word = (match.group(1) or match.group(2)).lower()
    return int(word) if word.isdigit() else _SAMPLE_WORDS[word]


@dataclass(slots=True)
class Section:
    """``numbers[i]`` is the line number of ``lines[i]``; ``stamps`` maps an index to the envelope's time, where there was one.

    ``order`` rises over all sections of a case in reading order. ``complete`` is False where lines were left out of a large file.
    ``long``: lines that were cut to ``LINE_LIMIT`` characters, whole, by index.
    """

    source: str
    heading: str
    numbers: Sequence[int]
    lines: Sequence[str]
    stamps: Mapping[int, Stamp] = field(default_factory=dict)
    order: int = 0
    complete: bool = True
    kind: str = ""
    hints: Hints = field(default_factory=Hints)
    text: str = ""
    long: Mapping[int, str] = field(default_factory=dict)
    _starts: list[int] = field(default_factory=list)
    claimed: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.text = "\n".join(self.lines)
        self.claimed = bytearray(len(self.lines))
        if self.hints == Hints():
            own = hints_of(self.heading) if self.heading else Hints()
            self.hints = own if own != Hints() else hints_of(self.source.rsplit("/", 1)[-1].rsplit("!", 1)[-1])

    def index_at(self, position: int) -> int:
        """Index of the line that holds a character position of ``text``."""
        if not self._starts:
            total = 0
            for line in self.lines:
                self._starts.append(total)
                total += len(line) + 1
        return bisect_right(self._starts, position) - 1

    def start_of(self, index: int) -> int:
        self.index_at(0)
        return self._starts[index]

    def claim(self, first: int, last: int | None = None) -> None:
        """Mark lines as understood (indices, inclusive)."""
        end = first if last is None else last
        self.claimed[first : end + 1] = b"\x01" * (end + 1 - first)

    def ref(self, first: int, last: int | None = None) -> Ref:
        """Cite lines by index."""
        end = first if last is None else last
        return Ref(self.source, self.numbers[first], self.numbers[end], "line", self.lines[first].strip()[:EXCERPT_CHARACTERS])

    def whole(self) -> Ref:
        """Cite the section."""
        if not self.lines:
            return Ref(self.source, 0, 0)
        excerpt = (self.heading or self.lines[0]).strip()[:EXCERPT_CHARACTERS]
        return Ref(self.source, self.numbers[0], self.numbers[-1], "line", excerpt)

    def cite_match(self, match: re.Match[str], *, claim: bool = True) -> tuple[int, Ref]:
        """Index and citation of the line(s) of a match in ``text``."""
        first = self.index_at(match.start())
        last = self.index_at(max(match.end() - 1, match.start()))
        if claim:
            self.claim(first, last)
        return first, self.ref(first, last)

    def where(self) -> str:
        return f"{self.source} ({self.heading})" if self.heading else self.source
