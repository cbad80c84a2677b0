"""The words of a run: its first lines, its progress, its last lines. Pure: records in, lines out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..forensics.records import Diagnosis
from ..kernels.image import KernelImage
from ..kernels.plan import LaunchPlan
from ..reports.document import equation, output_words, rank_rows, verdict_words
from ..scenarios.drain import DrainPlan
from ..scenarios.drain_steps import DecodeStep, schedule_line
from .console import printable, wrap
from .run_findings import RunResult

__all__ = [
    "autopsy_lines",
    "expectation",
    "first_lines",
    "kernel_line",
    "last_lines",
    "progress_line",
    "proof_lines",
    "with_article",
]


def with_article(name: str) -> str:
    """A device's name as it is spoken: ``an RTX 5090``, ``an H200``, ``a Tesla T4``. A first word in capitals is spelt out."""
    first = name.partition(" ")[0]
    vowels = "AEFHILMNORSX" if first.isupper() else "AEIOaeio"
    return f"{'an' if name.startswith(tuple(vowels)) else 'a'} {name}"


def kernel_line(kernel: KernelImage, guarded: bool | None) -> str:
    """Whose code runs, for which architecture, and whether it bounds the row length."""
    state = {True: "guarded", False: "unguarded", None: "guarded or not: not known"}[guarded]
    return f"kernel {kernel.origin} for sm_{kernel.sm}, instantiation <{kernel.top_k}, {kernel.vec}>: {state}"


def expectation(
    steps: Sequence[DecodeStep], window: Sequence[int], *, guarded: bool | None, clamped: bool, why_no_window: str = ""
) -> list[str]:
    """What this run should do, said before it does it."""
    if not window:
        return [f"no step of this plan can wedge ({why_no_window or 'nothing is padded'}): the answer will be inconclusive"]
    first = next(step for step in steps if step.index == min(window))
    where = f"step {first.index}, {first.live_requests} live requests, {first.rows} rows padded to {first.graph_rows}"
    if clamped:
        reason = "the producer clamps, so nothing negative reaches the kernel"
        return [f"clean is expected: {reason} (--producer raw shows the hang, {where})"]
    if guarded:
        return [f"clean is expected: this kernel is guarded. --kernel builtin (or vllm==0.27.1) shows the hang ({where})"]
    if guarded is None:
        return [f"the danger window is {where}"]
    return [f"a hang is expected at {where}"]


def first_lines(
    *,
    ground: str,
    why: str,
    target: str,
    kernel: KernelImage,
    guarded: bool | None,
    plan: DrainPlan,
    steps: Sequence[DecodeStep],
    window: Sequence[int],
    launches: Mapping[int, LaunchPlan],
    producer: str,
    layers: int,
    trials: int,
    notes: Sequence[str] = (),
    why_no_window: str = "",
) -> list[str]:
    """What will run where, the plan and its defaults, and what to expect."""
    lines = [
        f"run drain --on {ground} ({why}): {target}",
        kernel_line(kernel, guarded),
        *plan.lines(),
        f"live requests by step: {schedule_line(tuple(steps))}; producer {producer}; {layers} indexer layers a step"
        + (f"; {trials} trials" if trials > 1 else ""),
    ]
    if window:
        danger = next(step for step in steps if step.index == min(window))
        launch = launches.get(danger.graph_rows)
        lines += [f"launch at the danger step: {line}" for line in (launch.lines()[:1] if launch else ())]
    lines += expectation(steps, window, guarded=guarded, clamped=producer == "clamped", why_no_window=why_no_window)
    return [*lines, *notes]


def progress_line(trial: int, trials: int, step: DecodeStep, last: int, waiting: str = "") -> str:
    """One line: where the run is and what it waits for."""
    head = f"trial {trial}/{trials} · " if trials > 1 else ""
    rows = f"{step.rows} rows" if step.rows == step.graph_rows else f"{step.rows} rows → graph {step.graph_rows}"
    tail = f" · {waiting}" if waiting else ""
    return f"{head}step {step.index + 1}/{last + 1} · {step.live_requests} live · {rows}{tail}"


def proof_lines(diagnosis: Diagnosis) -> list[str]:
    """The proof in a line or two: the first wait, and who of its group is gone."""
    lines = []
    for wait in diagnosis.waits[:1]:
        where = f"block {wait.block[0]}" + (f" ({wait.role} of group {wait.group})" if wait.role and wait.group is not None else "")
        lines.append(f"{equation(wait)}: {where}" + (f", at +{wait.pc_offset:#x}" if wait.pc_offset is not None else ""))
        group = next((entry for entry in diagnosis.ledger if entry.group == wait.group), None)
        if group is not None:
            gone = [
                f"block {', '.join(map(str, blocks[:8]))} {word}"
                for word, blocks in (("exited", group.exited), ("never started", group.never_started), ("not known", group.unknown))
                if blocks
            ]
            if gone:
                lines.append(f"of its group: {'; '.join(gone)}" + _inference(group.inferred, gone))
    if len(diagnosis.waits) > 1:
        lines.append(f"{len(diagnosis.waits)} waits in all")
    return lines


def _inference(inferred: str | None, gone: Sequence[str]) -> str:
    """Why the missing blocks are believed to have gone so; the fate is not said again where there is only one."""
    if not inferred:
        return ""
    fate, colon, reason = inferred.partition(": ")
    return f"; inferred: {reason if colon and len(gone) == 1 and gone[0].endswith(fate) else inferred}"


def _experiment_line(unwedge: Mapping[str, Any] | None) -> list[str]:
    if not unwedge or not unwedge.get("attempted"):
        return []
    if unwedge.get("retired"):
        took = unwedge.get("milliseconds")
        when = f" {took:.2f} ms later" if isinstance(took, int | float) else ""
        return [f"experiment: a large count written into the counter, and the kernel retired{when}: that counter was the cause"]
    return ["experiment: a large count written into the counter, and the kernel did not retire"]


def autopsy_lines(diagnosis: Diagnosis, *, most_waits: int = 3) -> list[str]:
    """All of a diagnosis for a terminal: verdict, the equations beside their instructions, ledger, chain, gaps.

    At most 80 columns but for instructions and paths.
    """
    lines = wrap(f"{diagnosis.outcome.upper()}: {verdict_words(diagnosis)}")
    lines += wrap(diagnosis.verdict.sentence) if diagnosis.verdict.sentence else []
    if diagnosis.verdict.signature:
        lines += wrap(f"the published case {diagnosis.verdict.signature}")
    for wait in diagnosis.waits[:most_waits]:
        place = f" at +{wait.pc_offset:#x}" if wait.pc_offset is not None else ""
        role = f", {wait.role} of group {wait.group}" if wait.role and wait.group is not None else ""
        lines += ["", *wrap(f"block {wait.block[0]} of {wait.grid[0]}{role}: {equation(wait)}")]
        lines += wrap(f"{wait.kernel}{place}; the word lies at {wait.address or 'an address that is not known'}", indent="  ")
        lines += [printable(f"  +{offset:#06x}  {text}", limit=160) for offset, text in wait.instructions[:16]]
    if len(diagnosis.waits) > most_waits:
        lines.append(f"and {len(diagnosis.waits) - most_waits} more waits")
    lines += _rank_lines(diagnosis)
    groups = [group for group in diagnosis.ledger if group.spinning] or list(diagnosis.ledger)
    if groups:
        lines.append("")
    for group in groups[:8]:
        words = ("running", "spinning", "exited", "never_started", "unknown")
        parts = [f"{word.replace('_', ' ')} {_some(getattr(group, word))}" for word in words if getattr(group, word)]
        lines += wrap(f"group {group.group}: {'; '.join(parts)}", indent="  ")
        lines += wrap(f"  inferred: {group.inferred}", indent="  ") if group.inferred else []
    if diagnosis.chain:
        lines.append("")
    for link in diagnosis.chain:
        if link.status != "not observed":
            lines += wrap(f"{link.link:<14}{link.status:<13} {link.text}", indent=" " * 28)
    unseen = [link.link for link in diagnosis.chain if link.status == "not observed"]
    lines += wrap(f"not observed in this evidence: {', '.join(unseen)}", indent="  ") if unseen else []
    experiment = _experiment_line((diagnosis.model_extra or {}).get("unwedge"))
    lines += ["", *(part for line in experiment for part in wrap(line))] if experiment else []
    if diagnosis.unread:
        lines.append("")
    for item in diagnosis.unread[:8]:
        lines += wrap(f"not read: {item.what}: {item.why}" + (f" → {item.remedy}" if item.remedy else ""), indent="  ")
    if diagnosis.next:
        lines += ["", printable(f"next: {diagnosis.next}")]
    return lines


def _rank_lines(diagnosis: Diagnosis) -> list[str]:
    """A server's ranks: what each was doing, and which one replies to the engine."""
    lines = []
    for rank, pid, gpu, role, class_, identity in rank_rows(diagnosis)[:16]:
        verdict = f": {class_}" if class_ != "-" else ""
        same = f", identity {identity}" if identity != "-" else ""
        lines += wrap(f"rank {rank} (process {pid}, GPU {gpu}) {role}{verdict}{same}", indent="  ")
    if lines and (words := output_words(diagnosis)):
        lines += wrap(words)
    return ["", *lines] if lines else []


def _some(blocks: Sequence[int], most: int = 12) -> str:
    shown = ", ".join(map(str, blocks[:most]))
    return shown if len(blocks) <= most else f"{shown} … ({len(blocks)})"


def last_lines(result: RunResult, folder: Path) -> list[str]:
    """Verdict, proof, trials, directory, next command."""
    diagnosis = result.diagnosis
    lines = [f"{result.outcome.upper()}: {verdict_words(diagnosis)}"]
    if diagnosis.verdict.sentence:
        lines.append(diagnosis.verdict.sentence)
    lines += proof_lines(diagnosis)
    lines += _experiment_line((diagnosis.model_extra or {}).get("unwedge"))
    counts = result.counts
    if counts.asked > 1:
        lines.append(
            f"trials: {counts.hang} hung, {counts.clean} clean with the window reached, {counts.no_window} without it, "
            f"{counts.other} other, {counts.unfinished} unfinished, of {counts.asked}"
        )
        lines += [f"{bound.of}: {bound.side} {bound.value:.4f} at {bound.confidence:.0%}" for bound in counts.bounds]
    if diagnosis.unread:
        lines.append(f"not read: {'; '.join(f'{item.what} ({item.why})' for item in diagnosis.unread[:4])}")
    if result.closed is not None and result.closed.how == "survived":
        lines.append(f"the workload outlived SIGKILL: {result.closed.detail}")
    lines.append(f"run directory: {folder}")
    following = diagnosis.next or (shlex.join(["dsv4-repro", "report", str(folder)]) if result.outcome == "hang" else "")
    if following:
        lines.append(f"next: {following}")
    return lines
