"""The audit verb: targets opened one after the other, a table for people, JSON and JUnit for machines, the exit status for CI."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from ..clock import SYSTEM, Clock, Deadline, utc_stamp
from ..errors import ReproError, UsageError
from ..forensics.audit.build_audit import AuditOptions, assemble, audit_build
from ..forensics.audit.junit import junit_xml
from ..forensics.audit.recipe import Recipe
from ..forensics.audit.recipe_text import recipe_from_arguments, recipe_from_text
from ..forensics.audit.replay import Replayer
from ..forensics.audit.table import report_lines
from ..forensics.audit.targets import OpenedTarget, ProcessView, expand_targets, open_target
from ..forensics.audit.verdicts import AuditReport, BuildAudit, BuildIdentity, Unread
from .atomic import make_folder, write_atomic
from .console import Screen, wrap
from .options import Common
from .serving.audited_builds import remember_audit

__all__ = ["FAIL_ON", "folded", "parse_arch", "process_view", "run_audit"]

FAIL_ON = ("vulnerable", "recipe", "cannot-tell", "never")
VULNERABLE = 3
INCONCLUSIVE = 5


def parse_arch(text: str) -> int | None:
    """``sm_120`` → 120, ``all`` → None. UsageError for anything else."""
    if text == "all":
        return None
    match = re.fullmatch(r"(?:sm_?)?(\d{2,3})a?", text.strip().lower())
    if match is None:
        raise UsageError(f"--arch {text[:40]!r} is no architecture", help_text="For example: --arch sm_120, or --arch all")
    return int(match[1])


def process_view(pid: int) -> ProcessView:
    """What a running process has loaded, and how it was started. Reads its memory map and command line only; UsageError if it
    cannot."""
    import psutil

    try:
        process = psutil.Process(pid)
        root = Path(f"/proc/{pid}/root")
        libraries = []
        for mapping in process.memory_maps():
            if "/vllm/_C" in mapping.path and mapping.path.endswith(".so"):
                inside = root / mapping.path.lstrip("/")
                libraries.append(str(inside) if inside.exists() else mapping.path)
        arguments: list[str] = []
        for candidate in (process, *process.parents()):
            words = candidate.cmdline()
            if any("vllm" in word for word in words) and any(word.startswith("--") for word in words):
                arguments = words
                break
    except psutil.NoSuchProcess:
        raise UsageError(f"there is no process {pid}") from None
    except (psutil.AccessDenied, PermissionError):
        raise UsageError(
            f"the memory map of process {pid} cannot be read", help_text="Run as the process's user, or as root."
        ) from None
    return ProcessView(pid, tuple(dict.fromkeys(libraries)), tuple(arguments))


def run_audit(
    targets: Sequence[str], common: Common, *, arch: str = "all", recipe: str | None = None, fail_on: str = "vulnerable",
    exhaustive: bool = False,
    relatives: bool = True, offline: bool = False, junit: Path | None = None, clock: Clock = SYSTEM,
) -> int:  # fmt: skip
    """Audit ``targets``; the exit status."""
    if fail_on not in FAIL_ON:
        raise UsageError(f"--fail-on {fail_on[:40]!r}: one of {', '.join(FAIL_ON)}")
    screen = Screen(as_json=common.as_json, clock=clock)
    start = clock.monotonic()
    sm = parse_arch(arch)
    chosen, notes = recipe_from_text(recipe) if recipe is not None else (None, [])
    views = {text: process_view(int(text)) for text in targets if text.isdigit()}
    names = expand_targets([text for text in targets if text not in views]) + list(views)
    if not names:
        raise UsageError("nothing to audit")
    if common.out is not None:
        make_folder(common.out)  # before the work, not after it
    deadline = Deadline(common.timeout, clock) if common.timeout is not None else None
    builds: list[BuildAudit] = []
    used = chosen or Recipe()
    for name in names:
        view = views.get(name)
        if view is not None and chosen is None and view.arguments:
            used, notes = recipe_from_arguments(view.arguments)
        if deadline is not None and deadline.expired:
            builds.append(_not_audited(name, "the time given with --timeout was up"))
            continue
        screen.progress(f"{name}: opening")
        try:
            opened = open_target(
                name, arch=sm, process=view, progress=lambda what, done, total: screen.progress(_fetched(what, done, total))
            )
        except ReproError as error:
            if len(names) == 1:
                raise
            builds.append(_not_audited(name, str(error)))
            continue
        options = AuditOptions(
            recipe=used,
            sm=sm,
            exhaustive=exhaustive,
            relatives=relatives,
            network=not offline,
            replay=Replayer(clock=clock),
            clock=clock,
        )
        builds.append(_audited(opened, options, screen))
        if view is not None and chosen is None:
            # For ``why``, which has ten seconds.
            remember_audit([Path(path) for path in view.libraries], used, builds[-1], utc_stamp(clock))
    screen.end_progress()
    report = assemble(builds, used, clock.monotonic() - start, fail_on=_rule(fail_on))
    lines = report_lines(report, [*used.lines(), *(f"note: {text}" for text in notes)], details=len(builds) <= 3)
    _write(report, lines, common.out, junit)
    screen.say(*folded(lines))
    if common.as_json:
        screen.document(report.document())
    return _status(report, fail_on)


def folded(lines: Iterable[str]) -> Iterator[str]:
    """Lines for a terminal of 80 columns: prose is wrapped under its own indent; tables, instructions and commands stay whole."""
    for line in lines:
        text = line.lstrip()
        if len(line) <= 80 or text.startswith(("+0x", "mitigation ")) or "  " in text:
            yield line
        else:
            yield from wrap(line, indent=" " * (len(line) - len(text) + 2))


def _rule(fail_on: str) -> Literal["vulnerable", "recipe", "never"]:
    return "recipe" if fail_on == "recipe" else "never" if fail_on == "never" else "vulnerable"


def _audited(opened: OpenedTarget, options: AuditOptions, screen: Screen) -> BuildAudit:
    return audit_build(opened, options, lambda text: screen.progress(f"{opened.target}: {text}"))


def _fetched(what: str, done: int, total: int | None) -> str:
    return f"{what}: {done >> 20} of {total >> 20} MiB" if total else f"{what}: {done >> 20} MiB"


def _not_audited(name: str, why: str) -> BuildAudit:
    identity = BuildIdentity(name=name, known=False, how="not audited")
    return BuildAudit(target=name, build=identity, unread=(Unread(what=name, why=why),))


def _status(report: AuditReport, fail_on: str) -> int:
    if report.outcome == "vulnerable":
        return VULNERABLE
    if report.outcome == "inconclusive" and fail_on != "never":
        return VULNERABLE if fail_on == "cannot-tell" else INCONCLUSIVE
    return 0


def _write(report: AuditReport, lines: Sequence[str], out: Path | None, junit: Path | None) -> None:
    import json

    if out is not None:
        write_atomic(out / "audit.json", (json.dumps(report.document(), indent=2, ensure_ascii=False) + "\n").encode(), mode=0o644)
        write_atomic(out / "audit.txt", ("\n".join(lines) + "\n").encode(), mode=0o644)
        write_atomic(out / "junit.xml", junit_xml(report).encode(), mode=0o644)
    if junit is not None:
        write_atomic(junit, junit_xml(report).encode(), mode=0o644)
