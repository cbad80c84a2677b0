"""The campaign's page: one HTML file with inline SVG, nothing loaded from elsewhere; every text from the store is escaped.

Hazard by factor: hangs per danger window reached, with exact one-sided bounds at 99 % as whiskers. Time to hang: from a trial's
start to the verdict, as a histogram.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ...reports.svg import Drawing, fitted, nice_ticks
from ..bounds import at_least, at_most
from .compare import Change
from .outputs import summary_lines
from .sequential import CONFIDENCE
from .summary import Summary

__all__ = ["campaign_page", "hazard_figure", "time_figure"]

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--bar:#3566a8;--dim:#6a737d}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ea;--paper:#15181c;--bar:#7aa7e8;--dim:#9aa4ae}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse}td,th{padding:.2rem .7rem;text-align:left;border-bottom:1px solid var(--dim)}
svg{max-width:100%;height:auto}svg text{fill:var(--ink);font:12px system-ui,sans-serif}
.bar{fill:var(--bar)}.whisker,.axis{stroke:var(--ink);stroke-width:1}.grid{stroke:var(--dim);stroke-width:.4}.small{font-size:10px}
"""
_MOST_VALUES = 40
_LEFT, _WIDTH, _ROW = 220.0, 760.0, 22.0


def hazard_figure(name: str, values: Mapping[str, Mapping[str, int]], number: int) -> str:
    """An SVG: a bar a value, with its bounds. Values without a window say so."""
    rows = sorted(values.items(), key=lambda item: -sum(item[1].values()))[:_MOST_VALUES]
    drawing = Drawing(_WIDTH, title=f"Hang hazard by {name}", description="hangs per danger window reached", prefix=f"h{number}")
    span = _WIDTH - _LEFT - 110
    bottom = 10 + _ROW * len(rows)
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawing.line(_LEFT + span * tick, 8, _LEFT + span * tick, bottom, "grid")
        drawing.text(_LEFT + span * tick, bottom + 14, f"{tick:g}", "small", anchor="middle")
    for place, (value, kinds) in enumerate(rows):
        y = 10 + _ROW * place
        hangs = kinds.get("hang", 0)
        windows = hangs + kinds.get("clean", 0)
        drawing.text(_LEFT - 8, y + 14, fitted(value, _LEFT - 16, 12), "t", anchor="end")
        if windows == 0:
            drawing.text(_LEFT + 4, y + 14, f"no window reached in {sum(kinds.values())} trials", "small")
            continue
        drawing.rect(_LEFT, y + 4, span * hangs / windows, 12, "bar", tip=f"{value}: {hangs} of {windows}")
        low = at_least(hangs, windows, CONFIDENCE) if hangs else 0.0
        high = at_most(hangs, windows, CONFIDENCE) if hangs < windows else 1.0
        drawing.line(_LEFT + span * low, y + 10, _LEFT + span * high, y + 10, "whisker")
        drawing.text(_LEFT + span + 8, y + 14, f"{hangs} of {windows}", "small")
    return drawing.render(bottom + 24)


def time_figure(times: Sequence[float]) -> str:
    """An SVG: histogram of the seconds from a trial's start to the hang's verdict."""
    drawing = Drawing(_WIDTH, title="Time to hang", description="seconds from a trial's start to the verdict", prefix="time")
    high = max(times)
    bins = min(max(len(times) // 3, 1), 30)
    counts = [0] * bins
    for value in times:
        counts[min(int(value / high * bins), bins - 1) if high > 0 else 0] += 1
    width, tallest = (_WIDTH - 80) / bins, max(counts)
    for place, count in enumerate(counts):
        tall = 140.0 * count / tallest
        drawing.rect(50 + place * width, 160 - tall, max(width - 1, 1), tall, "bar", tip=f"{count} hangs")
    drawing.line(50, 160, _WIDTH - 30, 160, "axis")
    for tick in nice_ticks(0.0, high, 6) if high > 0 else [0.0]:
        drawing.text(50 + (_WIDTH - 80) * (tick / high if high > 0 else 0), 176, f"{tick:g} s", "small", anchor="middle")
    drawing.text(44, 24, str(tallest), "small", anchor="end")
    return drawing.render(186)


def campaign_page(
    summary: Summary, times: Sequence[tuple[str, float]], changes: Sequence[Change] | None = None, events: Sequence[str] = ()
) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(summary.name)}</h1>", *(f"<p>{escape(line)}</p>" for line in summary_lines(summary, changes))]
    if summary.hangs:
        cells = "".join(
            f"<tr><td><code>{escape(hang.identity)}</code></td><td>{hang.hangs}</td><td>{escape(hang.class_)}</td>"
            f"<td>{escape(hang.cause or '-')}</td><td>{escape(hang.signature or '-')}</td><td>{hang.first_trial}</td></tr>"
            for hang in summary.hangs
        )
        head = "<tr><th>identity</th><th>hangs</th><th>class</th><th>cause</th><th>case</th><th>first trial</th></tr>"
        parts.append(f"<h2>Hangs</h2><table>{head}{cells}</table>")
    for number, (name, values) in enumerate(summary.factors.items()):
        left_out = f"<p>{len(values) - _MOST_VALUES} more values are not drawn.</p>" if len(values) > _MOST_VALUES else ""
        parts.append(f"<h2>Hazard by {escape(name)}</h2>{hazard_figure(name, values, number)}{left_out}")
    if times:
        parts.append(f"<h2>Time to hang</h2>{time_figure([seconds for _identity, seconds in times])}")
    if summary.windows:
        rows = "".join(
            f"<tr><td>{escape(key)}</td><td>{trials}</td><td>{hangs}</td></tr>" for key, trials, hangs in summary.windows[:100]
        )
        parts.append(f"<h2>Danger windows</h2><table><tr><th>window</th><th>trials</th><th>hangs</th></tr>{rows}</table>")
    if events:
        parts.append("<h2>Workers</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in events[:100]) + "</ul>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(summary.name)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
