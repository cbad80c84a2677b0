"""Text tools of the redaction: pseudonyms of a form, replacement of one group of a match, ends of literals, line numbers."""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect_right
from collections.abc import Callable

__all__ = ["QUOTED", "Lines", "harmless", "literal_end", "shaped", "span_sub"]

#: A quoted text of Python or JSON, also one that the line cuts off.
QUOTED = re.compile(r"\"(?:[^\"\\\n]|\\.){0,2000000}\"?|'(?:[^'\\\n]|\\.){0,2000000}'?")
_BRACKETS = re.compile(r"[\[({]|[\])}]|[\"']")
_BLANK = frozenset({"none", "null", "true", "false", "***", "redacted", "optional", "required", "str", "string", "auto"})
_WORDS = {
    "secrets": "redacted-secret", "prompts": "text", "users": "user", "hosts": "host", "domains": "domain", "hidden": "hidden",
}  # fmt: skip


def shaped(kind: str, canonical: str, digest: bytes) -> str:
    """A pseudonym with the form of what it replaces: 198.18.0.0/15 and 2001:db8::/64 are reserved for tests and documentation."""
    if kind == "ips":
        if ":" in canonical:
            words = [digest[2 * index : 2 * index + 2].hex() for index in range(4)]
            return str(ipaddress.IPv6Address("2001:db8:0:0:" + ":".join(words)))
        number = int.from_bytes(digest[:4], "big") % ((1 << 17) - 2) + 1
        return str(ipaddress.IPv4Address("198.18.0.0") + number)
    if kind == "macs":
        if ":" in canonical:
            return "02:00:" + ":".join(digest[index : index + 1].hex() for index in range(4))
        return f"serial-{digest[:4].hex()}"
    return f"{_WORDS[kind]}-{digest[: 5 if kind == 'secrets' else 4].hex()}"


def harmless(value: str) -> bool:
    """Values that cannot be a secret: short numbers, variables, what is blank or replaced already."""
    return (
        (value.isdigit() and len(value) < 8)
        or value.startswith(("$", "<", "%(", "{{", "redacted-secret-"))
        or value.lower() in _BLANK
        or set(value) <= set("*x.-_ ")
    )


def span_sub(pattern: re.Pattern[str], text: str, make: Callable[[str, re.Match[str]], str]) -> str:
    """Replace the group ``value`` (or ``value2``) of every match by ``make(value, match)``; the rest of the match stays."""
    second = "value2" in pattern.groupindex

    def one(match: re.Match[str]) -> str:
        group = "value2" if second and match.group("value") is None else "value"
        value = match.group(group)
        made = make(value, match)
        if made == value:
            return match.group()
        whole = match.group()
        start, end = match.start(group) - match.start(), match.end(group) - match.start()
        return f"{whole[:start]}{made}{whole[end:]}"

    return pattern.sub(one, text)


def literal_end(text: str, begin: int) -> int:
    """Where a Python or JSON literal ends that starts at ``begin``, at the line's end at the latest; quoted brackets are text."""
    if text[begin] in "\"'":
        found = QUOTED.match(text, begin)
        return found.end() if found else begin
    stop = text.find("\n", begin)
    stop = len(text) if stop < 0 else stop
    depth, at = 0, begin
    while at < stop:
        found = _BRACKETS.search(text, at, stop)
        if found is None:
            return stop
        sign = found.group()
        at = found.end()
        if sign in "\"'":
            quoted = QUOTED.match(text, found.start())
            at = max(quoted.end(), at) if quoted else at
            continue
        depth += 1 if sign in "[({" else -1
        if depth <= 0:
            return at
    return stop


class Lines:
    """Line numbers of matches in a text that is being changed by replacements that keep every newline."""

    def __init__(self, text: str, first: int) -> None:
        self._first = first
        self._text = text
        self._starts: list[int] | None = None
        self._last: tuple[str, int, int] = ("", 0, 0)

    def at(self, offset: int) -> int:
        """The line of an offset in the text as it was; 0 where lines are not counted."""
        if self._first <= 0:
            return 0
        if self._starts is None:
            self._starts = [0, *(found.end() for found in re.finditer("\n", self._text))]
        return self._first + bisect_right(self._starts, offset) - 1

    def of(self, match: re.Match[str]) -> int:
        """The line of a match; matches of one pass come in order, so each newline is counted once."""
        if self._first <= 0:
            return 0
        start = match.start()
        if "value" in match.re.groupindex and match.start("value") >= 0:
            start = match.start("value")  # a rule may begin at the line end before its value
        text, at, count = self._last
        if match.string is not text or start < at:
            text, at, count = match.string, 0, 0
        count += text.count("\n", at, start)
        self._last = (text, start, count)
        return self._first + count
