"""Text that stays text in GitHub's Markdown, whatever it holds: kernel names, log lines and paths come from strangers.

``prose`` escapes a sentence, ``code`` makes a code span, ``block`` a fenced block whose fence no line of it can close. Templates
render through ``environment``, in which every printed value is escaped as prose unless it is ``Safe`` already.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["Safe", "block", "cell", "code", "environment", "prose", "row", "visible"]

#: Longer values are cut: a report is pasted into an issue (GitHub takes 65 536 characters).
MAX_VALUE = 2000
_LINE_START = re.compile(r"^(\s*)(#(?=#*(?:\s|$))|[+\-=](?=[\s+\-=]|$)|\d+[.)](?=\s|$))")
#: Underscores inside a word mark nothing, and escaping them would make names hard to read in the raw text.
_OUTER_UNDERSCORES = re.compile(r"(?<![^\W_])_+|_+(?![^\W_])")
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_ZERO_WIDTH = "\u200b"


class Safe(str):
    """Markdown made here: printed as it is."""

    __slots__ = ()


def visible(text: str, *, limit: int = MAX_VALUE) -> str:
    """One line: control and format characters as escapes, line ends as spaces, cut at ``limit`` characters."""
    flat = text if len(text) <= limit else text[:limit] + "…"
    flat = " ".join(flat.splitlines())
    if flat.isprintable():
        return flat
    return "".join(ascii(char)[1:-1] if unicodedata.category(char) in _INVISIBLE else char for char in flat)


def prose(value: object) -> Safe:
    """A sentence: HTML, Markdown, mentions, references and bare links in it lose their meaning."""
    if isinstance(value, Safe):
        return value
    text = visible(str(value))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~$])", r"\\\1", text)
    text = _OUTER_UNDERSCORES.sub(lambda match: match.group().replace("_", "\\_"), text)
    text = re.sub(r"@(?=\w)", "@" + _ZERO_WIDTH, text)
    text = re.sub(r"(?i)\b(https?|ftp|www)(?=(://|\.))", lambda match: match.group(1) + _ZERO_WIDTH, text)
    return Safe(_LINE_START.sub(_defuse_start, text))


def _defuse_start(match: re.Match[str]) -> str:
    """A list item, heading, quote or underline at a line's start becomes text: ``1.`` is ``1\\.``, ``#`` is ``\\#``."""
    space, mark = match.groups()
    return f"{space}\\{mark}" if len(mark) == 1 else f"{space}{mark[:-1]}\\{mark[-1]}"


def row(cells: Iterable[object]) -> Safe:
    """A table row."""
    return Safe("| " + " | ".join(prose(cell) for cell in cells) + " |")


def cell(value: object) -> Safe:
    """A code span inside a table cell, where a bar ends the cell even between backticks."""
    return Safe(code(value).replace("|", "\\|"))


def code(value: object) -> Safe:
    """A code span: its fence is longer than any run of backticks in it."""
    text = visible(str(value))
    if not text.strip():
        return Safe("")
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if longest or text[0] == " " or text[-1] == " " else ""
    return Safe(f"{fence}{space}{text}{space}{fence}")


def block(lines: Iterable[str], language: str = "text") -> Safe:
    """A fenced block of the lines; none of them can close it."""
    body = [visible(line) for line in lines]
    longest = max((len(run) for line in body for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return Safe("\n".join([f"{fence}{language}", *body, fence]))


def environment() -> Environment:
    """Jinja2 over the package's templates: undefined names are errors, every value is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader(__package__ or "reports", "templates"),
        autoescape=False,  # HTML's rules would let Markdown through; ``finalize`` is the rule for Markdown
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_finalize,
    )
    made.filters.update(cell=cell, code=code, block=block, prose=prose, row=row)
    return made


def _finalize(value: Any) -> Any:
    return prose("" if value is None else value)
