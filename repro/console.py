"""What a person sees: one screen for terminals, pipes and CI logs.

With ``--json`` standard output carries one document and nothing else; all text goes to standard error. Progress always goes to
standard error: one live line on a terminal, a plain line every few seconds anywhere else. Colour is rich's decision (a terminal,
no NO_COLOR). Text from evidence is stripped of control characters, so that a log line cannot drive the terminal.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from ..clock import SYSTEM, Clock

if TYPE_CHECKING:  # rich takes a twentieth of a second: only verbs that print pay it
    from rich.console import Console
    from rich.status import Status

__all__ = ["Screen", "printable", "wrap"]

_STYLES = {"bad": "bold red", "good": "bold green", "note": "yellow", "head": "bold", "dim": "dim", "": ""}


#: How a paragraph begins that is a command or ends in a path, to be pasted: it stays whole, also where a name holds a space.
_WHOLE = (
    "next: ", "then: ", "run directory: ", "report: ", "bundle: ", "reproducer: ", "Paste this back: ",
    "what was seen until then is in ",
)  # fmt: skip

#: Characters that JSON allows in a string as they are, and that a terminal obeys: C1 controls, separators, changes of direction.
_UNSEEN = re.compile("[\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str, *, limit: int = 4000) -> str:
    """``text`` with control, format and surrogate characters written as escapes, cut at ``limit`` characters."""
    cut = text if len(text) <= limit else text[:limit] + f" … ({len(text) - limit} more characters)"
    if cut.isprintable():
        return cut
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)


def wrap(text: str, *, width: int = 80, indent: str = "") -> list[str]:
    """Lines of at most ``width`` columns, later ones indented; words longer than a line (paths, commands) stay whole."""
    return textwrap.wrap(printable(text), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def _paragraph(text: str, indent: str = "") -> list[str]:
    return [printable(text)] if text.startswith(_WHOLE) else wrap(text, indent=indent)


class Screen:
    """Where a verb writes. ``as_json``: standard output is kept for ``document``."""

    def __init__(
        self,
        *,
        as_json: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        clock: Clock = SYSTEM,
        every_s: float = 5.0,
    ) -> None:
        from rich.console import Console

        self.as_json = as_json
        self._stdout = stdout if stdout is not None else sys.stdout
        self._err = Console(file=stderr if stderr is not None else sys.stderr, highlight=False, markup=False, emoji=False)
        self._out = self._err if as_json else Console(file=self._stdout, highlight=False, markup=False, emoji=False)
        self._clock = clock
        self._every_s = every_s
        self._last_progress: float | None = None
        self._pending = ""
        self._status: Status | None = None

    def say(self, *lines: str, style: str = "") -> None:
        """Print lines as they are (already printable, never wrapped), in a style of the table where colour is wanted."""
        self.end_progress()
        for line in lines:
            self._print(self._out, line, _STYLES[style])

    def tell(self, paragraphs: Iterable[str], *, style: str = "", indent: str = "") -> None:
        """Print paragraphs, wrapped at 80 columns. One that is to be pasted (a command, a path) stays whole."""
        for paragraph in paragraphs:
            self.say(*_paragraph(paragraph, indent), style=style)

    def note(self, text: str) -> None:
        """One paragraph to standard error, whatever the mode: hints, and what went wrong."""
        self.end_progress()
        for line in _paragraph(text):
            self._print(self._err, line, "")

    def progress(self, line: str) -> None:
        """Show what is going on: live on a terminal, else a plain line at most every few seconds."""
        text = printable(line, limit=400)
        if self._err.is_terminal and not self._err.is_dumb_terminal:
            from rich.text import Text

            shown = Text(text, no_wrap=True, overflow="ellipsis")  # one line: a wrapped one leaves its rest behind
            if self._status is None:
                self._status = self._err.status(shown)
                self._status.start()
            else:
                self._status.update(shown)
            return
        now = self._clock.monotonic()
        if self._last_progress is None or now - self._last_progress >= self._every_s:
            self._print(self._err, text, "")
            self._last_progress = now
            self._pending = ""
        else:
            self._pending = text

    def end_progress(self) -> None:
        """Clear the live line; in a log, print the last progress that was held back."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._pending:
            held, self._pending = self._pending, ""
            self._print(self._err, held, "")

    def document(self, document: Mapping[str, Any]) -> None:
        """With ``--json``: the one document on standard output."""
        if self.as_json:
            self.end_progress()
            text = json.dumps(document, indent=2, ensure_ascii=False, default=str)
            self._stdout.write(_UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")
            self._stdout.flush()

    @staticmethod
    def _print(console: Console, line: str, style: str) -> None:
        # The last gate: whatever a caller let through (a title, a log line, an HTTP reason) cannot drive the terminal.
        if not line.isprintable():
            line = "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in line)
        console.print(line, style=style or None, soft_wrap=True)
