"""What a campaign leaves for machines and reviewers: JUnit XML, a summary for GitHub Actions, lines for people."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from ..exits import STATUS
from .compare import Change, comparison_lines
from .sequential import bound_words
from .summary import Summary

__all__ = ["campaign_status", "junit_of", "markdown_summary", "summary_lines"]


def campaign_status(summary: Summary, changes: Sequence[Change] | None, fail_on: str) -> tuple[str, int]:
    """(outcome, exit status): hang 3, other failures 4, no danger window reached 5, clean 0.

    ``fail_on`` "new": with an earlier campaign to compare with, only a new hang or a changed rate counts as a hang.
    """
    hangs = bool(summary.hangs)
    if fail_on == "new" and changes is not None:
        hangs = any(change.word in ("new", "changed") for change in changes)
    if hangs:
        return "hang", STATUS["hang"]
    if summary.kinds.get("wrong", 0) or (summary.kinds.get("other", 0) and not summary.reached):
        return "other", STATUS["other"]
    if summary.reached == 0:
        return "inconclusive", STATUS["inconclusive"]
    return "clean", 0


def summary_lines(summary: Summary, changes: Sequence[Change] | None = None) -> list[str]:
    """For people."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.kinds.items(), key=lambda item: -item[1])) or "none"
    total = sum(hang.hangs for hang in summary.hangs)
    lines = [
        f"{summary.name}: {summary.trials} trials ({kinds}); {summary.reached} reached a danger window, "
        f"{len(summary.windows)} different ones",
        f"hang hazard over all: {bound_words(total, summary.reached)}",
        *(hang.line for hang in summary.hangs),
    ]
    for hang in summary.hangs:
        lines += [f"{hang.identity}: {path}" for path in (hang.minimised, hang.bundle) if path]
    return [*lines, *comparison_lines(list(changes or ()))]


def _md(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def markdown_summary(summary: Summary, changes: Sequence[Change] | None = None) -> str:
    """For ``$GITHUB_STEP_SUMMARY``."""
    lines = [
        f"## {_md(summary.name)}: {summary.trials} trials, {sum(hang.hangs for hang in summary.hangs)} hangs",
        "",
        f"{summary.reached} trials reached a danger window ({len(summary.windows)} different ones); hang hazard "
        f"{bound_words(sum(hang.hangs for hang in summary.hangs), summary.reached)}.",
        "",
    ]
    if summary.hangs:
        lines += ["| identity | hangs | class | case | first trial |", "|---|--:|---|---|--:|"]
        for hang in summary.hangs:
            what = hang.class_ + (f" / {hang.cause}" if hang.cause else "")
            lines.append(f"| `{hang.identity}` | {hang.hangs} | {_md(what)} | {_md(hang.signature or '-')} | {hang.first_trial} |")
        lines.append("")
    if changes:
        lines += ["Compared with the earlier campaign:", "", *(f"- {_md(line)}" for line in comparison_lines(list(changes))), ""]
    return "\n".join(lines) + "\n"


def _xml(text: str) -> str:
    return "".join(char if char.isprintable() and ord(char) < 0xD800 else "?" for char in text)[:2000]


def junit_of(summary: Summary, changes: Sequence[Change] | None = None) -> str:
    """A case for the danger window, one for each hang (a failure), one for other failures."""
    suite = ET.Element("testsuite", name=_xml(f"dsv4-repro.hunt.{summary.name}"), time=f"{summary.seconds:.3f}")
    failures = errors = 0
    window = ET.SubElement(suite, "testcase", classname="hunt", name="danger window reached")
    if summary.reached == 0:
        errors += 1
        ET.SubElement(window, "error", message="no trial reached a danger window: nothing follows")
    words = {change.identity: change.word for change in changes or ()}
    for hang in summary.hangs:
        case = ET.SubElement(suite, "testcase", classname="hunt", name=f"hang {hang.identity}")
        failures += 1
        said = f" ({words[hang.identity]})" if hang.identity in words else ""
        ET.SubElement(case, "failure", type=_xml(hang.class_ or "hang"), message=_xml(hang.line + said))
    if not summary.hangs:
        ET.SubElement(suite, "testcase", classname="hunt", name="no hang")
    other = ET.SubElement(suite, "testcase", classname="hunt", name="no other failure")
    bad = summary.kinds.get("wrong", 0) + summary.kinds.get("other", 0)
    if bad:
        failures += 1
        ET.SubElement(other, "failure", message=f"{bad} trials ended with a wrong result or a failure")
    suite.attrib.update(tests=str(len(suite)), failures=str(failures), errors=str(errors), skipped="0")
    root = ET.Element("testsuites", name="dsv4-repro")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"
