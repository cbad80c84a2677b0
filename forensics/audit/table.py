"""The audit as lines that a person reads: one summary row a build, then what stands behind the words."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from .verdicts import AuditReport, BuildAudit, ConsumerFinding

__all__ = ["report_lines", "summary_rows"]

HEADER = ("build", "kernel", "bounds", "producer", "max_seq_len", "operator", "this recipe", "wedges at")


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values)) or "-"


def summary_rows(report: AuditReport) -> list[tuple[str, ...]]:
    """One row a build: the kernel's word and the recipe's word are two columns. Of several architectures the one in question is
    shown."""
    rows: list[tuple[str, ...]] = []
    for build in report.builds:
        answers = sorted(build.recipe, key=lambda item: (item.word != "VULNERABLE", item.arch != "sm_120"))
        answer = answers[0] if answers else None
        call = next((item for item in build.dispatch if answer is not None and item.arch == answer.arch), None)
        native = next((item for item in build.producer if item.path == "native"), None)
        rows.append(
            (
                build.build.name if build.build.known else f"{build.target} (unknown build)",
                build.kernel_word,
                build.bounds_word,
                f"{native.word} {list(native.padding)}" if native is not None else "-",
                str(call.max_seq_len if call is not None and call.max_seq_len is not None else "-"),
                f"{call.operator or '?'} on {call.arch}" if call is not None else "-",
                f"{answer.word} on {answer.arch}" if answer is not None else "-",
                _numbers(answer.wedges_at) if answer is not None else "-",
            )
        )
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def report_lines(report: AuditReport, recipe_lines: Sequence[str], *, details: bool) -> list[str]:
    """The whole report. ``details``: every build's findings, else only the summary."""
    lines = [*recipe_lines, f"solver: {report.solver}", ""]
    lines += _aligned([HEADER, *summary_rows(report)])
    for build in report.builds if details else ():
        lines += ["", *_build_lines(build)]
    lines += ["", *_last_lines(report)]
    return lines


def _last_lines(report: AuditReport) -> list[str]:
    """The verdict, what it rests on, and the command that shows it."""
    bad = [build for build in report.builds if build.kernel_word == "VULNERABLE"]
    lines = [f"{report.outcome.upper()}, {report.seconds:.1f} s"]
    for build in bad[:8]:
        wedged = sorted({count for answer in build.recipe if answer.word == "VULNERABLE" for count in answer.wedges_at})
        recipe = f"this recipe wedges at {_numbers(wedged)} live requests" if wedged else "this recipe is not shown to wedge"
        lines.append(f"{build.target}: a negative length wedges its kernel; {recipe}")
    lines += [f"and {len(bad) - 8} more"] if len(bad) > 8 else []
    shown = [build.target for build in bad if _runs_here(build)]
    if shown:
        lines.append(f"next: dsv4-repro run drain --kernel {shlex.quote(shown[-1])}    # the hang itself, on a GPU or interpreted")
    elif bad and bad[0].recipe_word != "VULNERABLE":
        lines.append(
            f"next: dsv4-repro audit {shlex.quote(bad[0].target)} --recipe 'vllm serve …'    # with the flags that you serve with"
        )
    elif bad and bad[0].target.isdigit():
        lines.append(f"next: dsv4-repro why {bad[0].target}    # what the server is doing")
    return lines


def _runs_here(build: BuildAudit) -> bool:
    """Whether ``run drain --kernel`` shows it: a recipe that wedges where code is interpreted, and no process and no URL."""
    wedges = any(item.word == "VULNERABLE" and item.arch == "sm_120" for item in build.recipe)
    return wedges and not build.target.isdigit() and "://" not in build.target


def _build_lines(build: BuildAudit) -> list[str]:
    identity = build.build
    lines = [f"{build.target}: {identity.name}", f"  {identity.how}"]
    if identity.library:
        lines.append(f"  {identity.library}: {', '.join(identity.architectures)}")
    lines += _consumer_lines(build.consumer)
    for item in build.producer:
        shown = f"{item.input} -> {list(item.lengths)}" if item.lengths else item.why
        place = ", ".join(part for part in (item.how if item.lengths else "", item.where) if part)
        lines.append(f"  producer, {item.path} path: {item.word}: {shown}{f' ({place})' if place else ''}")
    for call in build.dispatch:
        if call.operator:
            lines.append(
                f"  dispatch on {call.arch}: {call.operator}, {call.rows} rows of {call.stride}, max_seq_len "
                f"{call.max_seq_len} = {call.max_seq_len_is}"
                f" ({call.where}){'; ' + call.zeroed if call.zeroed else ''}"
            )
        else:
            lines.append(f"  dispatch on {call.arch}: CANNOT TELL: {call.why}")
    for answer in build.recipe:
        at = f" at {_numbers(answer.wedges_at)} live requests" if answer.wedges_at else ""
        lines.append(f"  this recipe on {answer.arch} ({answer.device}): {answer.word}{at}: {answer.why}")
    for mitigation in build.mitigations:
        lines.append(
            f"  mitigation on {mitigation.arch}: {mitigation.name} ({mitigation.change}): {mitigation.word}: {mitigation.why}"
        )
    for relative in build.relatives:
        on = f" on {relative.arch}" if relative.arch else ""
        lines.append(f"  {relative.name} ({relative.number}){on}: {relative.word} ({relative.how}): {relative.why}")
    for missing in build.unread:
        lines.append(f"  not read: {missing.what}: {missing.why}{'; ' + missing.remedy if missing.remedy else ''}")
    lines.append(f"  {build.seconds:.1f} s")
    return lines


def _consumer_lines(findings: Sequence[ConsumerFinding]) -> list[str]:
    lines: list[str] = []
    for question in ("agreement", "bounds"):
        of = [item for item in findings if item.question == question]
        groups: dict[tuple[str, str], list[ConsumerFinding]] = {}
        for item in of:
            groups.setdefault((item.arch, item.word), []).append(item)
        for (arch, word), items in groups.items():
            first = items[0]
            names = ", ".join(f"<{item.top_k},{item.vec}>" for item in items)
            lines.append(f"  {question} on {arch}: {word}: {names}")
            if first.witness is not None and word == "VULNERABLE":
                witness = first.witness
                lines.append(
                    f"    length {witness.length}, max_seq_len {witness.max_seq_len}, stride {witness.stride}: "
                    f"{witness.launcher}; CPU ground: {witness.replay}"
                )
                lines += [f"    +{offset:#x} {text}" for offset, text in witness.instructions]
            elif word == "PROVED":
                lines.append(f"    {first.condition}")
            if first.why:
                lines.append(f"    {first.why}")
            if first.exhaustive is not None:
                lines.append(f"    all 2^32 lengths run: {first.exhaustive} of them make a leader wait for a peer that has left")
        if of:
            lines.append(f"    covered: {of[0].covered}") if of[0].covered else None
            lines += [f"    assuming: {text}" for text in of[0].assumptions]
    return lines
