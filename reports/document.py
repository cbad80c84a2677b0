"""What a report says, as plain values: from the diagnosis and the run record to the context of a template. No file is read here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..forensics.records import ChainLink, Diagnosis, LedgerGroup, Wait
from .changes import change_rows, is_plain

__all__ = [
    "FixText",
    "ReportSource",
    "context",
    "equation",
    "hardware_sentence",
    "inferred_lines",
    "ledger_rows",
    "markdown_report",
    "output_words",
    "rank_of",
    "rank_rows",
    "verdict_words",
]

#: Shown instead of a list that is longer than this.
_MOST_WAITS = 8
_MOST_GROUPS = 32
_MOST_BLOCKS = 24


@dataclass(frozen=True, slots=True)
class FixText:
    """A fix as the report names it. ``flags``: what turns it on here."""

    layer: str
    text: str
    upstream: str = ""
    flags: str = ""


@dataclass(frozen=True, slots=True)
class ReportSource:
    """All that a report is made from. ``run``: the run record's document, empty for an autopsy of a loose file.

    ``targets``: what was read (paths), for a report without a run. ``title``: of the scenario or the target.
    """

    diagnosis: Diagnosis
    run: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    fixes: Sequence[FixText] = ()
    targets: Sequence[str] = ()
    version: str = ""


def verdict_words(diagnosis: Diagnosis) -> str:
    """``gpu-spin-barrier / peer-left, high confidence``."""
    verdict = diagnosis.verdict
    cause = f" / {verdict.cause}" if verdict.cause else ""
    return f"{verdict.class_}{cause}, {verdict.confidence} confidence"


def equation(wait: Wait) -> str:
    """What the waiting CTA waits for, e.g. ``arrival_counter = 1, waits until it is >= 2``; the parts that are not known say so."""
    name = wait.state_field or "the polled word"
    value = "not read" if wait.value is None else str(wait.value)
    if wait.target is None:
        return f"{name} = {value}, the target is not known"
    return f"{name} = {value}, waits until it is {wait.comparison or '(comparison not known)'} {wait.target}"


def _blocks(blocks: Sequence[int]) -> str:
    if not blocks:
        return "-"
    shown = ", ".join(map(str, blocks[:_MOST_BLOCKS]))
    return shown if len(blocks) <= _MOST_BLOCKS else f"{shown} … ({len(blocks)})"


def rank_of(group: LedgerGroup) -> int | None:
    """The rank whose GPU a group of the ledger ran on, where a server of several was read."""
    rank = (group.model_extra or {}).get("rank")
    return rank if isinstance(rank, int) and not isinstance(rank, bool) else None


def rank_rows(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """(rank, process, GPU, what it was doing, class and cause, identity) of each rank of a server, as text.

    Empty where the diagnosis is of no server. A value that is not known is ``-``.
    """
    listed = (diagnosis.model_extra or {}).get("ranks")
    rows = []
    for entry in listed if isinstance(listed, Sequence) and not isinstance(listed, str) else ():
        if not isinstance(entry, Mapping) or "role" not in entry:
            continue
        verdict = " / ".join(str(entry[key])[:60] for key in ("class", "cause") if entry.get(key))
        cells = (entry.get("rank"), entry.get("pid"), entry.get("gpu_index"), entry.get("role"), verdict, entry.get("identity"))
        rows.append(tuple("-" if cell in (None, "") else str(cell)[:80] for cell in cells))
        if len(rows) == _MOST_GROUPS:
            break
    return rows


def output_words(diagnosis: Diagnosis) -> str:
    """Which rank replies to the engine, as one sentence; empty if it is not known."""
    found = (diagnosis.model_extra or {}).get("output_rank")
    if not isinstance(found, Mapping) or not isinstance(found.get("rank"), int):
        return ""
    return f"Rank {found['rank']} replies to the engine: {str(found.get('why', ''))[:300]}."


def ledger_rows(groups: Sequence[LedgerGroup]) -> list[tuple[str, ...]]:
    """(group, running, spinning, exited, never started, unknown) as text, groups that spin first."""
    ordered = sorted(groups, key=lambda group: (not group.spinning, group.group))
    return [
        (
            str(group.group) if (rank := rank_of(group)) is None else f"{group.group} (rank {rank})",
            _blocks(group.running),
            _blocks(group.spinning),
            _blocks(group.exited),
            _blocks(group.never_started),
            _blocks(group.unknown),
        )
        for group in ordered[:_MOST_GROUPS]
    ]


def inferred_lines(groups: Sequence[LedgerGroup]) -> list[str]:
    """What the ledger infers, said once for all groups of which it is true: ``groups 5, 6: exited: …``, in order of the groups."""
    found: dict[str, list[int]] = {}
    for group in sorted(groups, key=lambda group: group.group):
        if group.inferred:
            found.setdefault(group.inferred, []).append(group.group)
    numbers = {text: list(dict.fromkeys(of)) for text, of in found.items()}
    return [f"group{'s' if len(of) > 1 else ''} {_blocks(of)}: {text}" for text, of in numbers.items()]


def _architectures(source: ReportSource) -> set[int]:
    found: set[int] = set()
    environment = source.run.get("environment") or {}
    for value in (environment.get("sm"), (source.run.get("kernel") or {}).get("sm")):
        if isinstance(value, int) and not isinstance(value, bool):
            found.add(value)
    return found


def hardware_sentence(source: ReportSource) -> str:
    """On what this was seen; the case is one of SM120, and a run on anything else must say so."""
    environment = source.run.get("environment") or {}
    name = environment.get("device") or environment.get("name")
    ground = source.diagnosis.ground
    architectures = sorted(_architectures(source))
    words = ", ".join(f"sm_{sm}" for sm in architectures) or "an unknown architecture"
    if ground == "cpu":
        return f"No GPU was used: the kernel's machine code for {words} was interpreted on a CPU. It was not run on that hardware."
    if ground == "file" or not source.run:
        return "What was read comes from files; on which hardware it was recorded is said only where the evidence says so."
    on = f"{name} ({words})" if name else words
    if any(sm // 10 == 12 for sm in architectures):
        return f"Run on {on}."
    return f"Run on {on}; the published case is of SM120 cards, and this run used none."


def _waits(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    return [
        {
            "kernel": wait.kernel,
            "block": wait.block,
            "grid": wait.grid,
            "warp": "-" if wait.warp is None else wait.warp,
            "pc": "-" if wait.pc_offset is None else f"+{wait.pc_offset:#x}",
            "address": wait.address or "not known",
            "equation": equation(wait),
            "group": wait.group,
            "role": wait.role,
            "rank": wait.rank,
            "instructions": [f"+{offset:#06x}  {text}" for offset, text in wait.instructions],
        }
        for wait in diagnosis.waits[:_MOST_WAITS]
    ]


def _environment_rows(source: ReportSource) -> list[tuple[str, str]]:
    rows = [(str(key), str(value)) for key, value in (source.run.get("environment") or {}).items() if is_plain(value)]
    rows += [(f"{key} version", str(value)) for key, value in (source.run.get("versions") or {}).items() if value]
    kernel = source.run.get("kernel") or {}
    if kernel:
        rows.append(("kernel", str(kernel.get("label") or kernel.get("origin"))))
        rows.append(("kernel function", str(kernel.get("function") or "not known")))
        rows.append(("cubin sha256", str(kernel.get("sha256") or "not known")))
    return rows


#: What provokes a published case.
_PROVOKED = {"vllm-51593": "dsv4-repro run drain"}


def _command(source: ReportSource) -> str:
    import shlex

    command = source.run.get("command") or ()
    if command:
        text = shlex.join(str(word) for word in command)
        if command[1:2] == ["watch"] or command[1:2] == ("watch",):
            # Watching again provokes nothing.
            provoked = _PROVOKED.get(source.diagnosis.verdict.signature or "")
            return f"{provoked}    # the same wait, provoked; this one was seen by: {text}" if provoked else text
        return text
    return shlex.join(["dsv4-repro", "autopsy", *source.targets])


def _chain(links: Sequence[ChainLink]) -> list[dict[str, str]]:
    return [{"link": link.link, "status": link.status, "text": link.text, "evidence": ", ".join(link.evidence)} for link in links]


def _trial_lines(trials: Mapping[str, Any] | None) -> list[str]:
    if not trials or trials.get("asked", 1) <= 1:
        return []
    parts = [f"{trials.get(key, 0)} {word}" for key, word in _TRIAL_WORDS if trials.get(key, 0)]
    lines = [f"{trials['asked']} trials: {', '.join(parts) or 'none ended'}."]
    lines += [
        f"{bound['of']}: {bound['side']} {bound['value']:.4f} at {bound['confidence']:.0%} confidence (Clopper-Pearson, one-sided)."
        for bound in trials.get("bounds", ())
    ]
    return lines


_TRIAL_WORDS = (
    ("hang", "hung"),
    ("clean", "clean with the danger window reached"),
    ("no_window", "clean without reaching it"),
    ("other", "failed otherwise"),
    ("unfinished", "not finished"),
)


def context(source: ReportSource) -> dict[str, Any]:
    """The template's values."""
    diagnosis = source.diagnosis
    extra = diagnosis.model_extra or {}
    return {
        "title": source.title or (diagnosis.verdict.signature or "GPU hang"),
        "outcome": diagnosis.outcome,
        "verdict": verdict_words(diagnosis),
        "sentence": diagnosis.verdict.sentence,
        "signature": diagnosis.verdict.signature,
        "identity": diagnosis.verdict.identity,
        "hardware": hardware_sentence(source),
        "chain": _chain(diagnosis.chain),
        "waits": _waits(diagnosis),
        "more_waits": max(len(diagnosis.waits) - _MOST_WAITS, 0),
        "ranks": rank_rows(diagnosis),
        "output_rank": output_words(diagnosis),
        "ledger": ledger_rows(diagnosis.ledger),
        "more_groups": max(len(diagnosis.ledger) - _MOST_GROUPS, 0),
        "inferred": inferred_lines(diagnosis.ledger),
        "window": diagnosis.window,
        "unwedge": extra.get("unwedge"),
        "timing": extra.get("timing") or {},
        "trials": _trial_lines(extra.get("trials") if isinstance(extra.get("trials"), Mapping) else None),
        "environment": _environment_rows(source),
        "changes": change_rows(source.run),
        "unread": diagnosis.unread,
        "evidence": diagnosis.evidence,
        "command": _command(source),
        "fixes": source.fixes,
        "next": diagnosis.next,
        "interpreted": diagnosis.ground == "cpu",
        "version": source.version,
    }


def markdown_report(source: ReportSource) -> list[str]:
    """``report.md`` as lines without line ends."""
    from .markdown import environment

    text = environment().get_template("report.md.j2").render(**context(source))
    lines: list[str] = []
    for line in text.splitlines():
        if line.strip() or (lines and lines[-1]):
            lines.append(line.rstrip())
    while lines and not lines[-1]:
        lines.pop()
    return lines
