"""A text cut into sections at headings: ``=== … ===`` as people write them, ``==> file <==`` as ``tail`` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .envelope import clean, open_line
from .refs import LINE_LIMIT, Hints, Section, hints_of
from .stamps import Stamp

__all__ = ["HEADING", "split_sections"]

#: A heading needs words: RAS underlines its titles with bare ``====``.
HEADING = re.compile(
    r"^\s*(?:={3,}\s*(?P<a>\S[^\n]*?)\s*={3,}|==>\s*(?P<b>\S.*?)\s*<==|#{3,}\s+(?P<c>\S.*?)\s+#{3,}|-{4,}\s*(?P<d>[A-Za-z/][^|+\n]{2,}?)\s*-{4,})\s*$"
)

_LONGEST = 400


def heading_of(line: str) -> str | None:
    """The words of a heading line, None for other lines."""
    # What is longer is no heading; on a long line of signs alone the pattern would try every way to share them out.
    if not line or len(line) > _LONGEST or line.lstrip()[:1] not in ("=", "#", "-"):
        return None
    match = HEADING.match(line)
    if match is None:
        return None
    words = next(group for group in match.groups() if group is not None)
    return words if any(ch.isalpha() for ch in words) else None


def split_sections(
    source: str, raw: Iterable[tuple[int, bytes]], *, first_order: int, complete: bool, whole: bool = False
) -> Iterator[Section]:
    """``raw``: (line number, bytes). Lines are decoded, cleaned and taken out of their envelopes; nothing else is changed.
    ``whole``: a JSON document, whose lines must not be cut."""
    heading = ""
    numbers: list[int] = []
    lines: list[str] = []
    stamps: dict[int, Stamp] = {}
    long: dict[int, str] = {}
    order = first_order

    def section() -> Section:
        return Section(
            source,
            heading,
            tuple(numbers),
            tuple(lines),
            dict(stamps),
            order,
            complete,
            hints=hints_of(heading) if heading else Hints(),
            long=dict(long),
        )

    for number, data in raw:
        text = clean(data.decode("utf-8", "replace").rstrip("\r"))
        words = heading_of(text)
        if words is not None:
            if lines or heading:
                yield section()
                order += 1
            heading = words
            numbers, lines, stamps, long = [], [], {}, {}
            continue
        message, stamp = open_line(text)
        for piece in message.split("\n") if "\n" in message else (message,):
            if stamp is not None:
                stamps[len(lines)] = stamp
            if len(piece) > LINE_LIMIT and not whole:
                long[len(lines)] = piece
                piece = piece[:LINE_LIMIT]
            numbers.append(number)
            lines.append(piece)
    if lines or heading:
        yield section()
