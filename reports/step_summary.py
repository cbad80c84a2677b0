"""The summary of a GitHub Actions step: one screen of Markdown for the job's page. Writing it is the command line's business.

GitHub takes 1 MiB a step and shows it to everybody who may see the job, so this is short: verdict, equation, chain, what next.
"""

from __future__ import annotations

from .document import ReportSource, equation, verdict_words
from .markdown import block, code, prose, row

__all__ = ["step_summary"]

_SIGNS = {"hang": "❌", "other": "❌", "clean": "✅", "inconclusive": "❔"}
_MOST_LINKS = 12
_MOST_UNREAD = 8


def step_summary(source: ReportSource) -> list[str]:
    """Lines without line ends."""
    diagnosis = source.diagnosis
    verdict = diagnosis.verdict
    lines = [
        f"### {_SIGNS[diagnosis.outcome]} {prose(source.title or 'dsv4-repro')}",
        "",
        f"**{diagnosis.outcome}**: {prose(verdict_words(diagnosis))}",
        "",
    ]
    if verdict.sentence:
        lines += [prose(verdict.sentence), ""]
    if diagnosis.waits:
        wait = diagnosis.waits[0]
        lines += [f"{code(equation(wait))} in block {prose(wait.block)} of {code(wait.kernel)}", ""]
    if verdict.signature or verdict.identity:
        named = [
            f"published case {code(verdict.signature)}" if verdict.signature else "",
            f"identity {code(verdict.identity)}" if verdict.identity else "",
        ]
        lines += [", ".join(part for part in named if part), ""]
    if diagnosis.chain:
        lines += ["| link | known how | what |", "| --- | --- | --- |"]
        lines += [row((link.link, link.status, link.text)) for link in diagnosis.chain[:_MOST_LINKS]]
        lines.append("")
    if diagnosis.unread:
        lines.append(f"Not read: {len(diagnosis.unread)}")
        lines += [f"- {prose(item.what)}: {prose(item.why)}" for item in diagnosis.unread[:_MOST_UNREAD]]
        lines.append("")
    if diagnosis.next:
        lines += ["Next:", "", *block([diagnosis.next], "sh").split("\n"), ""]
    return lines
