"""The verb ``bisect``: what is asked, the predicate, every step's evidence kept; and one step for ``git bisect run``."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ...clock import SYSTEM, Clock
from ...errors import KernelNotFoundError, ReproError, UnavailableError, UsageError
from ..atomic import make_folder, write_atomic
from ..console import Screen
from ..drain_flags import DEFAULT_ARCH, parse_arch
from ..grounds import require_card, require_ground
from .bisect import Answer, Bisection, Build, Step, bisect_builds, builds_in_folder, builds_of_index, releases_between
from .cells import Cell, TrialResult
from .session import TrialSession, device_of

if TYPE_CHECKING:
    from ..options import Common

__all__ = ["BISECT_SCHEMA", "BisectFlags", "audit_probe", "hang_probe", "present_probe", "run_bisect", "run_git_step", "runnable"]

BISECT_SCHEMA = "dsv4-repro/bisect/1"
PREDICATES = ("hang", "audit", "present")
#: What the answer of a predicate means, for the last sentence.
WORDS = {
    "hang": {"bad": "first build that hangs so", "good": "first build that does not hang"},
    "audit": {"bad": "first build on which the recipe wedges", "good": "first build on which the recipe does not wedge"},
    "present": {"bad": "first build that has the kernel", "good": "first build without the kernel"},
}
#: What ``git bisect run`` understands: good, bad, cannot be tested; from 128 on it stops.
GIT_STATUS: dict[str, int] = {"good": 0, "bad": 1, "skip": 125}
GIT_STOP = 128


@dataclass(frozen=True, slots=True)
class BisectFlags:
    """What the command line says."""

    good: str | None = None
    bad: str | None = None
    builds: Path | None = None
    index: str | None = None
    predicate: str = "hang"
    identity: str | None = None
    on: str = "cpu"
    arch: str | None = None
    recipe: str | None = None
    trials: int = 3
    share: bool = False
    kernel: str | None = None


def runnable(spec: str, sm: int, folder: Path) -> str:
    """What a trial can run of a build: a wheel of an index by its address becomes its kernel's cubin in ``folder`` (read in ranges
    where the server gives them), a ``file:`` address the path; all else as it is. KernelNotFoundError, DownloadError.
    """
    if spec.startswith("file:"):
        return url2pathname(urlsplit(spec).path)
    if not spec.startswith(("http://", "https://")):
        return spec
    from ...forensics.audit.targets import open_target

    opened = open_target(spec, arch=sm)
    if opened.kernels is None:
        raise KernelNotFoundError(f"{spec.rsplit('/', 1)[-1]}: {opened.absent or 'no such kernel'}")
    image = opened.kernels.pick(sm, 512, 4)
    path = folder / f"{image.cubin_sha256[:16]}.cubin"
    path.write_bytes(image.cubin)
    return str(path)


def hang_probe(cell: Cell, identity: str | None, trials: int, session: Callable[..., TrialSession] = TrialSession) -> Any:
    """Bad: hangs with ``identity`` (None: that of the first build seen to hang). Good: every trial reached the window and none
    hung.

    Everything else - another hang, wrong results, no window, a build that cannot run - is skipped, with the reason.
    """
    wanted = identity

    def probe(build: Build) -> tuple[Answer, dict[str, Any]]:
        nonlocal wanted
        results: list[TrialResult] = []
        work = tempfile.TemporaryDirectory(prefix="dsv4-bisect-")
        try:
            remote = build.spec.startswith(("http://", "https://"))
            sm = device_of(cell)[0].sm if remote else 0
            one = session(replace(cell, name=build.label, kernel=runnable(build.spec, sm, Path(work.name))))
            try:
                for seed in range(trials):
                    results.append(one.trial(seed))
                    if results[-1].kind != "clean":
                        break
            finally:
                one.close()
        except (KernelNotFoundError, UsageError) as error:
            return "skip", {"why": f"cannot run: {error}"[:500]}
        finally:
            work.cleanup()
        last = results[-1]
        detail = {"trials": [result.document() for result in results], "why": last.why[:500]}
        if last.kind == "clean":
            return "good", {**detail, "why": f"{len(results)} trials in the danger window, no hang"}
        if last.kind != "hang":
            return "skip", {**detail, "why": f"{last.kind}: {last.why}"[:500]}
        if last.identity is None:
            return "skip", {**detail, "why": "it hangs, and the hang could not be identified"}
        wanted = wanted or last.identity
        if last.identity != wanted:
            return "skip", {**detail, "why": f"another hang: identity {last.identity}, not {wanted}"}
        return "bad", {**detail, "identity": last.identity, "why": f"hangs with identity {last.identity}"}

    return probe


def audit_probe(sm: int, recipe: str | None) -> Any:
    """Bad: the recipe wedges on this build, by audit. Good: proved or checked that it does not. Undecided: skipped."""
    from ...forensics.audit.build_audit import AuditOptions, audit_build
    from ...forensics.audit.recipe import Recipe
    from ...forensics.audit.recipe_text import recipe_from_text
    from ...forensics.audit.targets import open_target

    chosen = recipe_from_text(recipe)[0] if recipe is not None else Recipe()

    def probe(build: Build) -> tuple[Answer, dict[str, Any]]:
        try:
            opened = open_target(build.spec, arch=sm)
            found = audit_build(opened, AuditOptions(recipe=chosen, sm=sm, relatives=False, network=False))
        except ReproError as error:
            return "skip", {"why": f"cannot be audited: {error}"[:500]}
        word = found.recipe_word
        why = "; ".join(f"{answer.arch}: {answer.word}: {answer.why}" for answer in found.recipe)[:1000]
        detail = {"word": word, "kernel": found.kernel_word, "producer": found.producer_word, "why": f"recipe {word}: {why}"}
        if word == "VULNERABLE":
            return "bad", detail
        return ("skip" if word == "CANNOT TELL" else "good"), detail

    return probe


def present_probe(sm: int) -> Any:
    """Bad: the build has the kernel for this architecture. Good: it was read and has none."""
    from ...forensics.audit.targets import open_target

    def probe(build: Build) -> tuple[Answer, dict[str, Any]]:
        try:
            opened = open_target(build.spec, arch=sm)
        except ReproError as error:
            return "skip", {"why": f"cannot be read: {error}"[:500]}
        if opened.kernels is None:
            return "good", {"why": opened.absent or "it has no such kernel"}
        return "bad", {"why": f"it has the kernel for {', '.join(opened.kernels.labels)}"}

    return probe


def _place(builds: list[Build], text: str, what: str) -> int:
    found = [place for place, build in enumerate(builds) if text in (build.label, build.spec)]
    found = found or [place for place, build in enumerate(builds) if text in build.label]
    if len(found) != 1:
        some = ", ".join(build.label for build in builds[:6])
        raise UsageError(f"--{what} {text[:80]!r} names {len(found)} of the {len(builds)} builds; there are {some} …")
    return found[0]


def _range(flags: BisectFlags) -> tuple[list[Build], Answer]:
    """(builds in order, what the first one is said to be)."""
    if flags.builds is not None and flags.index is not None:
        raise UsageError("--builds and --index: one of them")
    if flags.builds is None and flags.index is None:
        if flags.good is None or flags.bad is None:
            raise UsageError("bisect needs --good and --bad", help_text="dsv4-repro bisect --good 0.28.0 --bad 0.27.1")
        builds, good_first = releases_between(flags.good, flags.bad)
        return builds, "good" if good_first else "bad"
    builds = builds_in_folder(flags.builds) if flags.builds is not None else builds_of_index(str(flags.index))
    good = _place(builds, flags.good, "good") if flags.good is not None else None
    bad = _place(builds, flags.bad, "bad") if flags.bad is not None else None
    if good is None and bad is None:
        raise UsageError("bisect needs --good or --bad: which end hangs?")
    if good is None:
        good = 0 if bad else len(builds) - 1
    if bad is None:
        bad = 0 if good else len(builds) - 1
    if good == bad:
        raise UsageError(f"good and bad are both {builds[good].label}")
    return builds[min(good, bad) : max(good, bad) + 1], "good" if good < bad else "bad"


def _probe(flags: BisectFlags) -> Any:
    sm = parse_arch(flags.arch) if flags.arch else DEFAULT_ARCH
    if flags.predicate == "audit":
        return audit_probe(sm, flags.recipe)
    if flags.predicate == "present":
        return present_probe(sm)
    arch = sm if flags.on == "cpu" else None
    return hang_probe(Cell(name="bisect", ground=flags.on, arch=arch, share=flags.share), flags.identity, flags.trials)


def _check(flags: BisectFlags) -> None:
    if flags.predicate not in PREDICATES:
        raise UsageError(f"--predicate {flags.predicate[:40]!r}: one of {', '.join(PREDICATES)}")
    if flags.on not in ("cpu", "gpu"):
        raise UsageError(f"--on {flags.on[:40]}: bisect runs on gpu or cpu")
    if flags.predicate == "hang":
        require_ground(flags.on)
        if flags.on == "gpu":  # of a build on a card that is not there every step would be left open
            from ..machine import probe_machine

            require_card(probe_machine(version=lambda _argv: None).gpus)
    if flags.identity is not None and not re.fullmatch(r"[0-9a-f]{12}", flags.identity):
        raise UsageError(f"--identity {flags.identity[:40]!r}: twelve hex digits, as a report has them")


def run_bisect(common: Common, flags: BisectFlags, *, clock: Clock = SYSTEM) -> int:
    """The verb: 0 with an answer (a build, or a range where some could not be judged: 5), 5 without."""
    _check(flags)
    screen = Screen(as_json=common.as_json, clock=clock)
    builds, first = _range(flags)
    if common.out is not None:
        make_folder(common.out)
    screen.tell([f"bisect {builds[0].label} ({first}) to {builds[-1].label}: {len(builds)} builds, predicate {flags.predicate}"])
    probe = _probe(flags)
    count = 0

    def asked(build: Build) -> tuple[Answer, dict[str, Any]]:
        screen.progress(f"step {count + 1}: {build.label}")
        answer: tuple[Answer, dict[str, Any]] = probe(build)
        return answer

    def keep(step: Step) -> None:
        nonlocal count
        count += 1
        screen.tell([f"{step.build.label}: {step.answer}: {step.detail.get('why', '')}"])
        if common.out is not None:
            name = re.sub(r"[^\w.=-]", "_", step.build.label)[:80]
            document = {"build": step.build.label, "spec": step.build.spec, "answer": step.answer, **step.detail}
            path = common.out / f"step-{count:02d}-{name}.json"
            write_atomic(path, (json.dumps(document, indent=2, default=str) + "\n").encode(), mode=0o644)

    result = bisect_builds(builds, asked, first=first, keep=keep)
    result.words = WORDS[flags.predicate]
    status = 0 if result.before is not None and not result.between else 5
    document = bisect_document(result, flags.predicate, status)
    if common.out is not None:
        write_atomic(common.out / "bisect.json", (json.dumps(document, indent=2, default=str) + "\n").encode(), mode=0o644)
    screen.end_progress()
    screen.tell(result.lines, style="good" if status == 0 else "note")
    screen.document(document)
    return status


def bisect_document(result: Bisection, predicate: str, status: int) -> dict[str, Any]:
    """As JSON."""
    return {
        "schema": BISECT_SCHEMA,
        "outcome": "clean" if status == 0 else "inconclusive",
        "predicate": predicate,
        "before": result.before.label if result.before else None,
        "after": result.after.label if result.after else None,
        "becomes": result.becomes,
        "between": [build.label for build in result.between],
        "why_not": result.why_not,
        "builds": len(result.builds),
        "steps": [{"build": step.build.label, "answer": step.answer, "why": step.detail.get("why", "")} for step in result.steps],
        "said": result.lines,
        "exit_status": status,
    }


def run_git_step(common: Common, flags: BisectFlags, *, clock: Clock = SYSTEM) -> int:
    """One step for ``git bisect run``: 0 good, 1 bad, 125 cannot be tested, 128 stop (a wrong command line must not count as
    bad).
    """
    screen = Screen(as_json=common.as_json, clock=clock)
    try:
        _check(flags)
        if flags.kernel is None:
            raise UsageError("--git-run needs --kernel: the .so, wheel or cubin that this commit built")
        probe = _probe(flags)
    except ReproError as error:
        screen.note(f"dsv4-repro: {error}")
        return GIT_STOP
    if not Path(flags.kernel).expanduser().exists() and "==" not in flags.kernel and not flags.kernel.startswith("builtin"):
        screen.note(f"{flags.kernel}: not built")
        return GIT_STATUS["skip"]
    try:
        answer, detail = probe(Build(flags.kernel, flags.kernel))
    except UnavailableError as error:
        screen.note(f"dsv4-repro: {error}")
        return GIT_STATUS["skip"]
    except ReproError as error:
        screen.note(f"dsv4-repro: {error}")
        return GIT_STOP
    screen.tell([f"{answer}: {detail.get('why', '')}"])
    screen.document({"schema": BISECT_SCHEMA, "outcome": answer, **detail, "exit_status": GIT_STATUS[answer]})
    return GIT_STATUS[answer]
