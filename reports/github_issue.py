"""``report.md``: text to paste into a GitHub issue, in the order that vLLM's bug template asks, under GitHub's length limit.

The template (``.github/ISSUE_TEMPLATE/400-bug-report.yml`` of vllm-project/vllm) has three fields: the environment, the bug, and a
check that duplicates were searched. GitHub renders a filled template as these headings, so the text can go in whole, by the web
form or by ``gh issue create --body-file report.md``. Its parts come from ``document.markdown_report``; this module orders and folds
them, adds what the classifier found and the host's stacks, and drops parts, the least needed first, until the rest fits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .document import ReportSource, markdown_report, verdict_words
from .findings import Statement, input_rows, known_cases, open_alternatives, statements
from .markdown import block, cell, code, prose, row
from .stacks_fold import HostThread, fold_stacks, folded_lines

__all__ = ["GITHUB_LIMIT", "issue_report", "split_sections"]

#: GitHub refuses a longer body (characters; counted here in UTF-8 bytes and UTF-16 units, whichever is more, with a margin).
GITHUB_LIMIT = 65_536
_ROOM = GITHUB_LIMIT - 536
_FENCE = re.compile(r"^(`{3,})([a-z]*)$")
_MOST_INPUTS = 60
#: How the template's last line begins; no value can begin a line so, being in a table.
_FOOT = "Written by dsv4-repro "


@dataclass(slots=True)
class _Part:
    """Lines under a heading or in a fold. ``rank``: parts of a higher rank are dropped first; 0 never."""

    lines: list[str]
    rank: int = 0
    name: str = ""


def split_sections(lines: Sequence[str]) -> tuple[list[str], dict[str, list[str]], dict[str, list[str]]]:
    """(what stands before the first heading, heading to its lines, title of a fold to the lines inside it).

    Only headings and folds that the template wrote count: a line inside a fenced block is nobody's heading.
    """
    head: list[str] = []
    sections: dict[str, list[str]] = {}
    folds: dict[str, list[str]] = {}
    fence = ""
    current, outside = head, head
    for line in lines:
        marked = _FENCE.match(line)
        if fence:
            if line == fence:
                fence = ""
        elif marked:
            fence = marked.group(1)
        elif line.startswith("## "):
            current = outside = sections.setdefault(line[3:], [])
            continue
        elif line.startswith("<details><summary>"):
            current = folds.setdefault(line.removeprefix("<details><summary>").removesuffix("</summary>"), [])
            continue
        elif line == "</details>":
            current = outside
            continue
        current.append(line)
    return head, sections, folds


def _fold(title: str, lines: Sequence[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *_trim(lines), "", "</details>", ""]


def _trim(lines: Sequence[str]) -> list[str]:
    """Without empty lines at the ends, and never two in a row."""
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):
            kept.append(line)
    while kept and not kept[-1]:
        kept.pop()
    return kept


def _found(items: Sequence[Statement]) -> list[str]:
    lines = []
    for item in items:
        places = ", ".join(code(place) for place in item.places)
        lines.append(f"- {prose(item.text)}" + (f" ({places})" if places else ""))
    return lines


def _length(lines: Sequence[str]) -> int:
    text = "\n".join(lines) + "\n"
    return max(len(text.encode("utf-8", "backslashreplace")), len(text.encode("utf-16-le", "backslashreplace")) // 2)


def _environment(source: ReportSource, folded: Mapping[str, list[str]]) -> list[str]:
    rows = folded.get("Environment", [])
    lines = ["### Your current environment", ""]
    if rows:
        lines += _fold("As recorded by dsv4-repro (add the output of <code>python collect_env.py</code>)", rows)
    else:
        lines += ["The evidence does not say. Add the output of `python collect_env.py`.", ""]
    return lines


def _versions_table(source: ReportSource) -> list[str]:
    """The slot for a comparison of builds: this run's row, and one to fill."""
    trials = (source.diagnosis.model_extra or {}).get("trials")
    kernel = source.run.get("kernel") or {}
    build = str(kernel.get("origin") or "this build")
    asked = trials.get("asked") if isinstance(trials, Mapping) else None
    hung = trials.get("hang") if isinstance(trials, Mapping) else None
    if not isinstance(asked, int) or not isinstance(hung, int):
        asked, hung = 1, int(source.diagnosis.outcome == "hang")
    if source.diagnosis.ground not in ("server", "gpu", "cpu"):
        return []
    return [
        "| build | hung | of |", "| --- | --- | --- |", row((build, hung, asked)), "| (another build, same command) | | |", "",
    ]  # fmt: skip


def _describe(source: ReportSource, sections: Mapping[str, list[str]], head: Sequence[str]) -> list[_Part]:
    more = source.diagnosis.model_extra or {}
    parts = [_Part(["### 🐛 Describe the bug", ""])]
    summary = [line for line in head if not line.startswith("# ")]
    parts.append(_Part([*_trim(summary), ""]))
    parts += [
        _Part([f"#### {name}", "", *_trim(sections[name]), ""], rank, name.lower())
        for name, rank in (("What waits", 1), ("The ranks", 2), ("Who arrived", 4), ("The experiment", 1), ("The chain", 1))
        if name in sections
    ]
    why: list[str] = []
    for title, items in (
        ("Decisive", statements(more.get("decisive"))),
        ("Against it", statements(more.get("contradicting"))),
        ("Still open", open_alternatives(more.get("alternatives"))),
    ):
        if items:
            why += [f"**{title}**", "", *_found(items), ""]
    cases = [
        row((case.name, case.standing, case.sentence or "; ".join((*case.seen, *(f"not read: {item}" for item in case.not_read)))))
        for case in known_cases(more.get("signatures"))
    ]
    if why:
        parts.append(_Part(["#### Why this verdict", "", *why], 2, "the findings"))
    if cases:
        parts.append(
            _Part(
                _fold("Published cases compared", ["| case | standing | conditions |", "| --- | --- | --- |", *cases]),
                5,
                "the published cases",
            )
        )
    parts.append(_Part(["#### Reproduce", "", *_trim(sections.get("Reproduce", [])), "", *_versions_table(source)]))
    if "Fixes" in sections:
        parts.append(_Part(["#### Fixes", "", *_trim(sections["Fixes"]), ""], 3, "the fixes"))
    return parts


def _attachments(
    source: ReportSource, sections: Mapping[str, list[str]], folds: Mapping[str, list[str]], threads: Sequence[HostThread]
) -> list[_Part]:
    parts = []
    if threads:
        lines = folded_lines(fold_stacks(threads))
        parts.append(_Part(_fold(f"Host stacks of {len(threads)} threads, folded", block(lines).split("\n")), 7, "the host stacks"))
    unread = [line for line in sections.get("What could not be read", []) if not line.startswith(_FOOT)]
    parts.append(
        _Part(
            _fold(f"What could not be read: {len(source.diagnosis.unread) or 'nothing that was looked for'}", unread),
            6,
            "the list of what could not be read",
        )
    )
    rows, more = input_rows(source.diagnosis)
    if rows and (source.diagnosis.model_extra or {}).get("inputs"):
        table = ["| part | became | holds | note |", "| --- | --- | --- | --- |"]
        table += [
            f"| {cell(item.path)} | {prose(item.status)} | {prose(item.kinds)} | {prose(item.note)} |"
            for item in rows[:_MOST_INPUTS]
        ]
        left = len(rows) + more - _MOST_INPUTS
        parts.append(
            _Part(
                _fold("What was read", [*table, *(["", f"{left} more parts."] if left > 0 else [])]), 8, "the list of what was read"
            )
        )
    if "What the harness changed" in folds:
        parts.append(_Part(_fold("What the harness changed", folds["What the harness changed"]), 8, "what the harness changed"))
    if "Evidence" in folds:
        parts.append(_Part(_fold("Evidence with hashes", folds["Evidence"]), 9, "the evidence list"))
    return parts


def issue_report(source: ReportSource, threads: Sequence[HostThread] = ()) -> list[str]:
    """Lines without line ends, at most ``GITHUB_LIMIT`` characters in all; what was dropped to fit is named at the end."""
    head, sections, folds = split_sections(markdown_report(source))
    title = next((line[2:] for line in head if line.startswith("# ")), "GPU hang")
    parts = [
        _Part([f"# [Bug]: {title}", "", f"**{source.diagnosis.outcome}**: {prose(verdict_words(source.diagnosis))}", ""]),
        _Part(_environment(source, folds), 0),
        *_describe(source, sections, [line for line in head if not line.startswith(f"**{source.diagnosis.outcome}**")]),
        *_attachments(source, sections, folds, threads),
        _Part(_closing(source, sections)),
    ]
    dropped: list[str] = []
    while _length([line for part in parts for line in part.lines]) + 400 > _ROOM:
        worst = max(parts, key=lambda part: part.rank)
        if worst.rank == 0:
            break
        parts.remove(worst)
        dropped.append(worst.name)
    lines = [line for part in parts for line in part.lines]
    if dropped:
        lines[-1:-1] = ["", f"Left out to fit an issue: {', '.join(dropped)}; report.html and diagnosis.json hold all."]
    if _length(lines) > _ROOM:
        lines = _cut(lines)
    return _trim(lines)


def _closing(source: ReportSource, sections: Mapping[str, list[str]]) -> list[str]:
    foot = [line for line in sections.get("What could not be read", []) if line.startswith(_FOOT)]
    signature = source.diagnosis.verdict.signature
    number = re.match(r"vllm-(\d+)$", signature or "")
    known = f"The evidence matches the published case {code(signature)}" if signature else "No published case matched"
    if number:
        known += f" (vLLM issue {number.group(1)}): look whether the build has its fix before filing again"
    return [
        "### Before submitting a new issue...", "",
        f"- [ ] Duplicates searched. {known}.",
        "- [ ] Nothing private is left in this text and in the attached archive (`dsv4-repro bundle RUN` redacts; read its list).",
        "",
        *foot[-1:],
    ]  # fmt: skip


def _cut(lines: Sequence[str]) -> list[str]:
    """The last resort for a text whose fixed parts alone are too long: cut at a line, fences and folds closed."""
    kept: list[str] = []
    size = 0
    fence, folded = "", 0
    for line in lines:
        size += _length([line])
        if size > _ROOM - 500:
            break
        kept.append(line)
        marked = _FENCE.match(line)
        if fence:
            fence = "" if line == fence else fence
        elif marked:
            fence = marked.group(1)
        elif line.startswith("<details>"):
            folded += 1
        elif line == "</details>":
            folded -= 1
    kept += [fence] if fence else []
    kept += ["", "</details>"] * folded
    return [*kept, "", "Cut here to fit an issue; report.html and diagnosis.json hold all."]
