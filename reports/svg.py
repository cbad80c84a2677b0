"""SVG as text: a small writer that escapes everything, and the estimates that a figure needs to place words.

Figures carry class names only; the colours for light, dark and paper are the page's (``templates/report.css.j2``). A browser lays
text out, not this module: widths are estimated from average glyph widths and rounded up, so that words keep clear of edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .markdown import visible

__all__ = ["Drawing", "fitted", "nice_ticks", "text_width", "wrap_words"]

#: Glyph widths over font size, rounded up from DejaVu Sans, the widest of the common system fonts.
_NARROW, _WIDE = frozenset("iljtfrI.,:;|!'()[]{}/\\\" "), frozenset("mwMW@%—…")
#: No word of a figure is longer: what follows is cut.
_LONGEST = 400


def _glyph(char: str) -> float:
    if char in _NARROW:
        return 0.42
    if char in _WIDE or ord(char) > 0x2E80:
        return 1.03
    return 0.73 if char.isupper() else 0.645


def text_width(text: str, size: float) -> float:
    """Estimated width in user units of a proportional face."""
    return size * sum(map(_glyph, text))


def fitted(text: str, width: float, size: float) -> str:
    """``text``, cut with an ellipsis where it would be wider."""
    shown = visible(text, limit=_LONGEST)
    if text_width(shown, size) <= width:
        return shown
    room = width - size * _glyph("…")
    kept = 0
    for char in shown:
        room -= size * _glyph(char)
        if room < 0:
            break
        kept += 1
    return shown[:kept] + "…"


def wrap_words(text: str, width: float, size: float, *, most: int = 12) -> list[str]:
    """Lines that fit ``width``; a word that is longer is broken; after ``most`` lines the rest is cut with an ellipsis."""
    lines: list[str] = []
    line, used = "", 0.0
    for word in visible(text, limit=2000).split():
        need = text_width(word, size)
        gap = size * _glyph(" ") if line else 0.0
        if line and used + gap + need > width:
            lines.append(line)
            line, used, gap = "", 0.0, 0.0
        while need > width:  # one word wider than a line: broken anywhere
            kept = max(len(fitted(word, width + size, size)) - 1, 1)
            lines.append(word[:kept])
            word = word[kept:]
            need = text_width(word, size)
        line, used = (f"{line} {word}" if line else word), used + gap + need
    if line:
        lines.append(line)
    if len(lines) > most:
        lines = [*lines[: most - 1], fitted(lines[most - 1] + " …" + "…" * 3, width, size)]
    return lines or [""]


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most ``most`` of them: steps of 1, 2 or 5 times a power of ten."""
    if not high > low or most < 1:
        return [low]
    span = high - low
    power = 10.0
    exponent = 0
    while span / power**exponent > most:
        exponent += 1
    while exponent > -12 and span / power ** (exponent - 1) <= most:
        exponent -= 1
    base = power**exponent
    step = next((base / 10 * factor for factor in (2, 5, 10) if span / (base / 10 * factor) <= most), base)
    first = int(low / step) if low >= 0 else -int(-low / step)
    ticks = [round((first + index) * step, 12) for index in range(most + 3)]
    return [tick for tick in ticks if low - step * 1e-9 <= tick <= high + step * 1e-9][: most + 1]


def _number(value: float) -> str:
    text = f"{value:.1f}"
    return text.removesuffix(".0")


class Drawing:
    """An inline SVG of fixed width (user units) whose height grows. Every text and attribute goes through an escape.

    ``prefix`` keeps the ids of one drawing apart from another's on the same page.
    """

    def __init__(self, width: float, *, title: str, description: str, prefix: str) -> None:
        self.width = width
        self.prefix = prefix
        self._title = title
        self._description = description
        self._parts: list[str] = []
        self._defs: list[str] = []

    def define(self, raw: str) -> None:
        """Add a definition made by the caller from constants: never from data."""
        self._defs.append(raw)

    def _attributes(self, values: dict[str, str | float | None]) -> str:
        return "".join(
            f' {name.rstrip("_").replace("_", "-")}="{escape(value if isinstance(value, str) else _number(value), quote=True)}"'
            for name, value in values.items()
            if value is not None
        )

    def element(self, name: str, *, tip: str = "", **attributes: str | float | None) -> None:
        """An element without children but, where given, a tooltip."""
        inside = f"<title>{escape(visible(tip, limit=_LONGEST))}</title>" if tip else ""
        self._parts.append(f"<{name}{self._attributes(attributes)}>{inside}</{name}>")

    def rect(self, x: float, y: float, w: float, h: float, class_: str, *, rx: float | None = None, tip: str = "") -> None:
        self.element("rect", tip=tip, x=x, y=y, width=max(w, 0), height=max(h, 0), rx=rx, class_=class_)

    def line(self, x1: float, y1: float, x2: float, y2: float, class_: str) -> None:
        self.element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)

    def circle(self, x: float, y: float, r: float, class_: str, *, tip: str = "") -> None:
        self.element("circle", tip=tip, cx=x, cy=y, r=r, class_=class_)

    def path(self, data: str, class_: str, *, tip: str = "") -> None:
        self.element("path", tip=tip, d=data, class_=class_)

    def text(self, x: float, y: float, text: str, class_: str = "t", *, anchor: str = "start") -> None:
        shown = escape(visible(text, limit=_LONGEST))
        place = self._attributes({"x": x, "y": y, "class": class_, "text_anchor": anchor if anchor != "start" else None})
        self._parts.append(f"<text{place}>{shown}</text>")

    def lines(self, x: float, y: float, lines: Sequence[str], class_: str, step: float) -> float:
        """Lines of text under one another; returns the base line after the last."""
        for line in lines:
            self.text(x, y, line, class_)
            y += step
        return y

    def render(self, height: float, class_: str = "") -> str:
        """The finished element."""
        label = f"{self.prefix}-title"
        more = f"{self.prefix}-desc"
        defs = f"<defs>{''.join(self._defs)}</defs>" if self._defs else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{escape(class_, quote=True)}" role="img" '
            f'aria-labelledby="{label}" aria-describedby="{more}" '
            f'viewBox="0 0 {_number(self.width)} {_number(height)}" width="{_number(self.width)}" height="{_number(height)}">'
            f'<title id="{label}">{escape(visible(self._title))}</title>'
            f'<desc id="{more}">{escape(visible(self._description))}</desc>'
            f"{defs}{''.join(self._parts)}</svg>"
        )
