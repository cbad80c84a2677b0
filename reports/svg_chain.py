"""The causal chain as a figure: a spine of links from the first cause to what the host saw, each drawn by how it is known.

Measured and inferred links differ in marker shape, outline and words, never in colour alone: a black-and-white print says the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..forensics.records import ChainLink
from .svg import Drawing, fitted, text_width, wrap_words

__all__ = ["STATUS_WORDS", "chain_svg"]

#: Status -> (class, what it means, for the legend).
STATUS_WORDS: dict[str, tuple[str, str]] = {
    "measured": ("measured", "read from the device or the host"),
    "interpreted": ("interpreted", "read from the interpreted machine"),
    "computed": ("computed", "follows by arithmetic"),
    "inferred": ("inferred", "concluded, not seen"),
    "not observed": ("missing", "nothing in the evidence says"),
}
_TITLES = {
    "drain": "the batch drains",
    "mtp": "speculative tokens",
    "graph-padding": "padding to the graph",
    "producer": "the producer's lengths",
    "compression": "compression",
    "dispatch": "which kernel runs",
    "disagreement": "blocks disagree",
    "barrier": "the barrier",
    "host": "what the host sees",
}
_SIZE, _STEP = 13.0, 17.0
_MOST = 32


def _marker(drawing: Drawing, x: float, y: float, status: str) -> None:
    """Disc, disc in a ring, square, hollow diamond, cross: told apart without colour."""
    kind = STATUS_WORDS[status][0]
    tip = f"{status}: {STATUS_WORDS[status][1]}"
    if status == "measured":
        drawing.circle(x, y, 7, f"mk mk-{kind}", tip=tip)
    elif status == "interpreted":
        drawing.circle(x, y, 7.5, "mk mk-hollow", tip=tip)
        drawing.circle(x, y, 4, f"mk mk-{kind}")
    elif status == "computed":
        drawing.rect(x - 6, y - 6, 12, 12, f"mk mk-{kind}", tip=tip)
    elif status == "inferred":
        drawing.path(f"M {x} {y - 8.5} L {x + 8.5} {y} L {x} {y + 8.5} L {x - 8.5} {y} Z", "mk mk-hollow mk-dash", tip=tip)
    else:
        drawing.path(f"M {x - 6} {y - 6} L {x + 6} {y + 6} M {x + 6} {y - 6} L {x - 6} {y + 6}", "mk mk-cross", tip=tip)


def _legend(drawing: Drawing, x: float, y: float, statuses: Sequence[str]) -> float:
    at = x
    for status in STATUS_WORDS:
        if status not in statuses:
            continue
        words = f"{status}: {STATUS_WORDS[status][1]}"
        need = 24 + text_width(words, 12) + 14
        if at > x and at + need > drawing.width:
            at, y = x, y + 22
        _marker(drawing, at + 9, y, status)
        drawing.text(at + 24, y + 4, words, "t t-note")
        at += need
    return y + 24


def chain_svg(links: Sequence[ChainLink], width: float, prefix: str) -> str:
    """The figure, ``width`` user units wide; empty text if there are no links."""
    if not links:
        return ""
    shown = links[:_MOST]
    known = sum(link.status in ("measured", "interpreted") for link in shown)
    inferred = sum(link.status == "inferred" for link in shown)
    drawing = Drawing(
        width,
        title="Causal chain",
        description=f"{len(links)} links, {known} measured or interpreted, {inferred} inferred; the same text stands in report.md",
        prefix=prefix,
    )
    y = _legend(drawing, 2, 14, [link.status for link in shown])
    spine, left = 14.0, 34.0
    inside = width - left - 2
    previous: float | None = None
    for link in shown:
        kind = STATUS_WORDS[link.status][0]
        lines = wrap_words(link.text, inside - 24, _SIZE)
        head = _TITLES.get(link.link, link.link)
        height = 30 + _STEP * len(lines) + 6
        middle = y + 18
        if previous is not None:
            drawing.line(spine, previous + 10, spine, middle - 11, f"edge edge-{kind}")
            drawing.path(f"M {spine - 4} {middle - 17} L {spine} {middle - 11} L {spine + 4} {middle - 17}", "edge edge-head")
        _marker(drawing, spine, middle, link.status)
        drawing.rect(left, y, inside, height, f"box box-{kind}", rx=6)
        badge = link.status if not link.evidence else f"{link.status} · {', '.join(link.evidence[:4])}"
        if len(link.evidence) > 4:
            badge += f" +{len(link.evidence) - 4}"
        if text_width(head, 13) + text_width(badge, 12) + 40 > inside:
            badge = link.status
        drawing.text(left + 12, y + 21, fitted(head, inside - text_width(badge, 12) - 40, 13), "t t-head")
        drawing.text(left + inside - 12, y + 21, badge, f"t t-status t-{kind}", anchor="end")
        drawing.lines(left + 12, y + 41, lines, "t", _STEP)
        previous = middle
        y += height + 12
    if len(links) > _MOST:
        drawing.text(left, y + 8, f"{len(links) - _MOST} more links are listed in diagnosis.json", "t t-note")
        y += 20
    return drawing.render(y - 6, "fig")
