"""The timeline as a figure: curves in panels above lanes of numbered marks, all on one axis of seconds.

Curves of a panel differ in dash and carry their name at their end. A mark's number refers to the table under the figure
(``numbered``), so the figure itself holds no long text; marks too close to tell apart share one sign.
"""

from __future__ import annotations

from collections.abc import Sequence

from .svg import Drawing, fitted, nice_ticks, text_width
from .timeline_data import LANES, PANELS, Curve, Mark, Timeline

__all__ = ["numbered", "timeline_svg"]

_PANEL_HEIGHT = 74.0
_LANE_HEIGHT = 30.0
#: Marks drawn and listed at most: more make neither a picture nor a table.
_MOST_NUMBERED = 60
_DASHES = 4
_MOST_NAMED = 4


def numbered(timeline: Timeline) -> list[tuple[int, Mark]]:
    """The marks that the figure numbers, in time order; of more than fit, mere information is left out."""
    marks = list(timeline.marks)
    if len(marks) > _MOST_NUMBERED:
        order = sorted(range(len(marks)), key=lambda index: (marks[index].level == "info", marks[index].lane == "run", index))
        keep = set(order[:_MOST_NUMBERED])
        marks = [mark for index, mark in enumerate(marks) if index in keep]
    return list(enumerate(marks, 1))


class _Axis:
    """Seconds to user units."""

    def __init__(self, timeline: Timeline, left: float, right: float) -> None:
        span = timeline.end - timeline.start
        pad = span * 0.015
        self.low, self.high = timeline.start - pad, timeline.end + pad
        self.left, self.right = left, right

    def x(self, t: float) -> float:
        return self.left + (t - self.low) / (self.high - self.low) * (self.right - self.left)


def _amount(value: float) -> str:
    for size, word in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if word == 'k' else size):.4g}{word}"
    return f"{value:.4g}"


def _seconds(value: float) -> str:
    if abs(value) >= 7200:
        return f"{value / 3600:.4g} h"
    if abs(value) >= 600:
        return f"{value / 60:.4g} min"
    return f"{value:.4g} s"


def _label(curve: Curve) -> str:
    return f"{curve.name} {_amount(curve.points[-1][1])}"


def _named(curves: Sequence[Curve]) -> set[int]:
    """Which curves carry their name at their end: all of a few, else those that end lowest and highest."""
    if len(curves) <= _MOST_NAMED:
        return set(range(len(curves)))
    order = sorted(range(len(curves)), key=lambda index: (curves[index].points[-1][1], index))
    return {order[0], order[-1]}


def _ends(curves: Sequence[Curve]) -> list[Curve]:
    return [curves[index] for index in sorted(_named(curves))] if curves else []


def _panel(drawing: Drawing, axis: _Axis, curves: Sequence[Curve], panel: str, top: float) -> float:
    drawing.text(axis.left, top + 12, PANELS[panel], "t t-panel")
    y0, y1 = top + 22, top + 22 + _PANEL_HEIGHT - 28
    values = [value for curve in curves for _, value in curve.points]
    low, high = min([0.0, *values]), max([0.0, *values])
    if panel == "utilisation":
        high = max(high, 100.0)
    if high <= low:
        high = low + 1.0
    drawing.rect(axis.left, y0, axis.right - axis.left, y1 - y0, "panel")
    for tick in nice_ticks(low, high, 3):
        y = y1 - (tick - low) / (high - low) * (y1 - y0)
        drawing.line(axis.left, y, axis.right, y, "rule")
        drawing.text(axis.left - 5, y + 4, _amount(tick), "t t-num", anchor="end")
    taken: list[float] = []
    named = _named(curves)
    for index, curve in enumerate(curves):
        shape = index % _DASHES
        data: list[str] = []
        y = y1
        for t, value in curve.points:
            x, y = axis.x(t), y1 - (value - low) / (high - low) * (y1 - y0)
            data.append(f"M{x:.1f} {y:.1f}" if not data else f"H{x:.1f}V{y:.1f}")
        drawing.path("".join(data), f"curve curve-{shape}", tip=f"{_label(curve)} at the end, {len(curve.points)} points")
        if len(curve.points) <= 40 and len(curves) <= _MOST_NAMED:
            for t, value in curve.points:
                drawing.circle(axis.x(t), y1 - (value - low) / (high - low) * (y1 - y0), 2.2, f"dot dot-{shape}")
        if index not in named:
            continue
        place = min(max(y + 4, y0 + 6), y1 + 4)
        for offset in (0, 13, -13, 26, -26, 39, -39):
            if y0 - 8 <= place + offset <= y1 + 8 and all(abs(place + offset - other) >= 12 for other in taken):
                place += offset
                break
        taken.append(place)
        drawing.text(axis.right + 6, place, fitted(_label(curve), drawing.width - axis.right - 6, 11), f"t t-curve t-curve-{shape}")
    if len(named) < len(curves):
        drawing.text(axis.right, top + 12, f"{len(curves)} curves, lowest and highest named", "t t-note", anchor="end")
    return top + _PANEL_HEIGHT + 4


def _lane(drawing: Drawing, axis: _Axis, lane: str, marks: Sequence[tuple[int, Mark]], top: float) -> float:
    """One row of marks: bars for what lasted, numbers in a ring; close neighbours share a pill ``3-6``."""
    middle = top + _LANE_HEIGHT / 2
    drawing.text(axis.left - 5, middle + 4, LANES[lane], "t t-lane", anchor="end")
    drawing.line(axis.left, middle, axis.right, middle, "rule")
    for _, mark in marks:
        if mark.until is not None:
            x1, x2 = axis.x(mark.t), axis.x(mark.until)
            kind = {"none": "none", "pauses": "pauses"}.get(mark.disturbance, "ends" if mark.disturbance else mark.level)
            drawing.rect(x1, middle - 10, max(x2 - x1, 2.0), 20, f"span span-{kind}", rx=2, tip=mark.text)
    runs: list[list[tuple[int, Mark, float]]] = []
    for number, mark in marks:
        x = axis.x(mark.t)
        if runs and x - runs[-1][-1][2] < 22:
            runs[-1].append((number, mark, x))
        else:
            runs.append([(number, mark, x)])
    for run in runs:
        numbers = [number for number, _, _ in run]
        joined = numbers == list(range(numbers[0], numbers[-1] + 1))
        label = str(numbers[0]) if len(run) == 1 else f"{numbers[0]}–{numbers[-1]}" if joined else f"{numbers[0]}…{numbers[-1]}"
        x = min(max(run[0][2], axis.left + 10), axis.right - 10)
        wide = max(text_width(label, 11) + 10, 20)
        x = min(max(x, axis.left + wide / 2), axis.right - wide / 2)
        worst = next((level for level in ("bad", "good") if any(mark.level == level for _, mark, _ in run)), "info")
        tip = "; ".join(f"{number}: {mark.text}" for number, mark, _ in run[:6])
        drawing.rect(x - wide / 2, middle - 10, wide, 20, f"pill pill-{worst}", rx=10, tip=tip)
        drawing.text(x, middle + 4, label, f"t t-pill t-pill-{worst}", anchor="middle")
    return top + _LANE_HEIGHT


def timeline_svg(timeline: Timeline, width: float, prefix: str) -> str:
    """The figure, ``width`` user units wide."""
    narrow = width < 600
    marks = numbered(timeline)
    named = [_label(curve) for panel in PANELS for curve in _ends([c for c in timeline.curves if c.panel == panel and c.points])]
    margin = min(max((text_width(label, 11) for label in named), default=0.0) + 12, width * 0.36)
    left, right = (80.0 if narrow else 84.0), width - max(margin, 20.0)
    drawing = Drawing(
        width,
        title="Timeline",
        description=f"{len(timeline.curves)} curves and {len(marks)} events over {_seconds(timeline.end - timeline.start)}; "
        "the numbers refer to the table below",
        prefix=prefix,
    )
    axis = _Axis(timeline, left, right)
    y = 4.0
    for panel in PANELS:
        curves = [curve for curve in timeline.curves if curve.panel == panel and curve.points]
        if curves:
            y = _panel(drawing, axis, curves, panel, y)
    for lane in LANES:
        own = [(number, mark) for number, mark in marks if mark.lane == lane]
        if own:
            y = _lane(drawing, axis, lane, own, y)
    y += 4
    drawing.line(left, y, right, y, "axis")
    for tick in nice_ticks(max(axis.low, timeline.start), axis.high, 4 if narrow else 9):
        x = axis.x(tick)
        drawing.line(x, y, x, y + 5, "axis")
        drawing.text(x, y + 19, _seconds(tick), "t t-num", anchor="middle")
    return drawing.render(y + 26, "fig")
