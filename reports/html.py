"""``report.html``: one self-contained page, no script, no network, readable in light, dark and on paper.

Every value passes ``visible`` (no control or direction characters) and HTML's escape; only figures made by ``svg_*`` are printed as
they are. A content security policy in the page forbids everything but its own style sheet, whose hash it names, so that even a
value that slipped through could load or run nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..forensics.records import Wait
from . import paths
from .document import ReportSource, context, equation
from .findings import input_rows, known_cases, open_alternatives, statements, timing_words
from .markdown import visible
from .stacks_fold import FoldedStack, HostThread, fold_stacks
from .svg_chain import chain_svg
from .svg_grid import GridPicture, grid_picture, grid_svg
from .svg_timeline import numbered, timeline_svg
from .timeline_data import Timeline

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["ReportExtras", "html_report"]

#: Widths of the two drawings of each figure: the page shows the one that fits.
_WIDE, _NARROW = 920.0, 372.0
_MOST_STACKS = 24
_MOST_FRAMES = 40
_MOST_INSTRUCTIONS = 60
_MOST_WAITS = 6
_MOST_BLOCKS = 32
_LIMIT = 2000
_OUTCOMES = {
    "hang": ("Hang", "bad", "✕"),
    "clean": ("Not hung", "good", "✓"),
    "other": ("Another failure", "bad", "!"),
    "inconclusive": ("Inconclusive", "note", "?"),
}


@dataclass(frozen=True, slots=True)
class ReportExtras:
    """What a report shows beside the diagnosis and the run record. Empty: it was not there, and the page leaves it out."""

    timeline: Timeline | None = None
    threads: Sequence[HostThread] = ()
    notes: Sequence[str] = field(default_factory=tuple)


def _finalize(value: Any) -> Any:
    """Jinja2's last step before its escape: nothing invisible is printed, nothing is longer than a paragraph."""
    if value is None:
        return ""
    if hasattr(value, "__html__") or isinstance(value, int):
        return value
    return visible(str(value), limit=_LIMIT)


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader(__package__ or "reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )


def _same_wait(wait: Wait) -> tuple[Any, ...]:
    """Waits that read the same but for the block."""
    return (wait.kernel, wait.grid, wait.device, wait.rank, wait.pc_offset, wait.value, wait.comparison, wait.target,
            wait.state_field, wait.instructions)  # fmt: skip


def _waits(waits: Sequence[Wait]) -> list[dict[str, Any]]:
    """Each kind of wait once, with the blocks that share it."""
    kinds: dict[tuple[Any, ...], list[Wait]] = {}
    for wait in waits:
        kinds.setdefault(_same_wait(wait), []).append(wait)
    return [_wait(same[0], [other.block for other in same[1:]]) for same in kinds.values()]


def _wait(wait: Wait, others: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """One wait: the equation in parts, and the loop with the row where the block stands."""
    plain = all(block[1:] == (0, 0) for block in others)
    named = [str(block[0]) if plain else str(block).replace(" ", "") for block in others[:_MOST_BLOCKS]]
    known = wait.value is not None and wait.target is not None and wait.comparison is not None
    rows = []
    for offset, text in wait.instructions[:_MOST_INSTRUCTIONS]:
        rows.append({"offset": f"+{offset:#06x}", "text": text, "here": offset == wait.pc_offset})
    return {
        "wait": wait,
        "others": ", ".join(named) + (f" and {len(others) - _MOST_BLOCKS} more" if len(others) > _MOST_BLOCKS else ""),
        "other_count": len(others),
        "equation": equation(wait),
        "field": wait.state_field or "the polled word",
        "value": "?" if wait.value is None else wait.value,
        "comparison": wait.comparison or "?",
        "target": "?" if wait.target is None else wait.target,
        "known": known,
        "pc": None if wait.pc_offset is None else f"+{wait.pc_offset:#x}",
        "rows": rows,
        "more_rows": max(len(wait.instructions) - _MOST_INSTRUCTIONS, 0),
        "stands": any(row["here"] for row in rows),
    }


def _figures(source: ReportSource, extras: ReportExtras, picture: GridPicture | None) -> dict[str, list[tuple[str, Any]]]:
    """Name of the figure to its two drawings, (class, markup)."""
    from markupsafe import Markup  # jinja2's own dependency

    links = source.diagnosis.chain
    drawn: dict[str, list[tuple[str, Any]]] = {"chain": [], "grid": [], "timeline": []}
    for class_, width in (("wide", _WIDE), ("narrow", _NARROW)):
        made = {
            "chain": chain_svg(links, width, f"chain-{class_}"),
            "grid": grid_svg(picture, width, f"grid-{class_}") if picture is not None else "",
            "timeline": timeline_svg(extras.timeline, width, f"time-{class_}") if extras.timeline is not None else "",
        }
        for name, markup in made.items():
            if markup:
                drawn[name].append((class_, Markup(markup)))
    return drawn


def _stacks(threads: Sequence[HostThread]) -> tuple[list[FoldedStack], int, int]:
    folded = fold_stacks(threads)
    return list(folded[:_MOST_STACKS]), max(len(folded) - _MOST_STACKS, 0), len(threads)


def html_report(source: ReportSource, extras: ReportExtras | None = None) -> str:
    """The whole page."""
    from markupsafe import Markup

    extras = extras or ReportExtras()
    diagnosis = source.diagnosis
    more = diagnosis.model_extra or {}
    environment = _environment()
    css = environment.get_template("report.css.j2").render()
    picture = grid_picture(diagnosis)
    inputs, more_inputs = input_rows(diagnosis)
    stacks, more_stacks, thread_count = _stacks(extras.threads)
    waiting = _waits(diagnosis.waits)
    words, level, sign = _OUTCOMES[diagnosis.outcome]
    values = {
        **context(source),
        "css": Markup(css),
        "css_hash": "sha256-" + base64.b64encode(hashlib.sha256(css.encode()).digest()).decode(),
        "outcome_words": words,
        "level": level,
        "sign": sign,
        "diagnosis": diagnosis,
        "waiting": waiting[:_MOST_WAITS],
        "waiting_more": sum(1 + item["other_count"] for item in waiting[_MOST_WAITS:]),
        "figures": _figures(source, extras, picture),
        "picture": picture,
        "timeline": extras.timeline,
        "collected": extras.timeline is not None and any(mark.lane == "collect" for mark in extras.timeline.marks),
        "marks": numbered(extras.timeline) if extras.timeline is not None else [],
        "decisive": statements(more.get("decisive")),
        "against": statements(more.get("contradicting")),
        "alternatives": open_alternatives(more.get("alternatives")),
        "cases": known_cases(more.get("signatures")),
        "stacks": stacks,
        "stack_frames": _MOST_FRAMES,
        "more_stacks": more_stacks,
        "thread_count": thread_count,
        "inputs": inputs,
        "more_inputs": more_inputs,
        "notes": list(extras.notes),
        "timing_text": timing_words(more.get("timing")),
        "files": {"diagnosis": paths.DIAGNOSIS, "timeline": paths.TIMELINE},
    }
    return environment.get_template("report.html.j2").render(**values)
