"""``verify NAME`` for the relatives: defect and fixes of a scenario side by side, with rates, on the CPU or on a card.

On the CPU each row is launched under so many orders of execution (one, where its order is fixed: a hang there is a proof, and so is
nothing else); on a card so many times. A repaired row is CLEAN when so many launches ended well that a hazard of ``--hazard`` would
have shown with a chance of at least 1 - ``--beta``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...clock import SYSTEM, Clock
from ...errors import UsageError
from ...scenarios.launches import CooperativeLaunch, CrossRank, DrainBatches, HostLaunch, IndexWorkspace, Launch, Row, SamplerLaunch
from ...scenarios.registry import Scenario
from ..atomic import make_folder, write_atomic
from ..bounds import bounds_of
from ..console import Screen
from ..drain_flags import DEFAULT_ARCH, parse_arch
from ..kernel_choice import require_kernel
from ..relative_matrix import matrix_document, run_gpu_rows, run_rows
from .cells import Cell
from .sequential import CONFIDENCE, Rates, bound_words
from .session import device_of

if TYPE_CHECKING:
    from ..options import Common
    from .verify_run import VerifyFlags

__all__ = ["ROWS_SCHEMA", "judged_row", "rows_table", "run_verify_rows", "said_of"]

ROWS_SCHEMA = "dsv4-repro/verify-rows/1"
_STATUS = {"clean": 0, "hang": 3, "other": 4, "inconclusive": 5}
_RANDOM = ("random", "priority")
#: What is said instead of a rate where a row is launched once.
_ONCE = {
    Launch: "one order of execution", CrossRank: "one order of execution", CooperativeLaunch: "interpreted once",
    IndexWorkspace: "executed once", HostLaunch: "computed", DrainBatches: "computed",
}  # fmt: skip


def with_launches(row: Row, launches: int) -> Row:
    """The row with so many orders of execution, where its order is drawn; never fewer than the row itself has."""
    what = row.what
    if not isinstance(what, Launch | SamplerLaunch) or what.schedule not in _RANDOM:
        return row
    return dataclasses.replace(row, what=dataclasses.replace(what, schedules=max(what.schedules, launches)))


def judged_row(document: Mapping[str, Any], row: Row, needed: int) -> dict[str, Any]:
    """A row's document with ``bad`` (launches that did not end well), its bounds and its word: SHOWN, NOT SHOWN or OTHER for a
    defect, CLEAN, BROKEN or OPEN for a repair. ``needed``: launches that a repair whose order is drawn must pass.
    """
    found, expected = document["found"], document["expected"]
    launches = int(document["launches"])
    passed_over = row.also if row.fixed else ()  # another defect of a release with the repair, which the row names
    bad = sum(
        count["launches"]
        for count in document["counts"]
        if count["class"] != "not-hung" and (count["class"], count["cause"]) not in passed_over
    )
    drawn = isinstance(row.what, Launch | SamplerLaunch) and row.what.schedule in _RANDOM
    fixed_order = document.get("device") is None and not drawn
    if not row.fixed:
        word = "SHOWN" if document["as_expected"] else "NOT SHOWN" if found["class"] == "not-hung" else "OTHER"
    elif bad:
        word = "BROKEN" if found["class"] != "unknown" else "OPEN"
    else:
        word = "CLEAN" if fixed_order or launches >= needed else "OPEN"
    other = sum(count["launches"] for count in document["counts"] if (count["class"], count["cause"]) in passed_over)
    bounds = [] if fixed_order else [bound.model_dump() | {"of": "launch"} for bound in bounds_of(bad, launches, CONFIDENCE)]
    counted = bound_words(bad, launches).replace("windows", "launches")
    rate = _ONCE[type(row.what)] if fixed_order else counted
    if other:
        rate += f"; {other} ended as another defect of it does"
    kernel = "-" if isinstance(row.what, HostLaunch | DrainBatches) else document["kernel"]
    return {**document, "kernel": kernel, "bad": bad, "word": word, "rate": rate, "bounds": bounds, "expected": expected}


def _of(row: Mapping[str, Any]) -> str:
    """``12 of 24 launches not well: rate``; without a rate only how it was found out."""
    if not row["bounds"]:
        return str(row["rate"])
    return f"{row['bad']} of {row['launches']} launches not well: {row['rate']}"


def rows_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table fit for a pull request."""
    lines = [
        "| row | role | kernel | launches | not well | rate (99 %) | found | verdict |",
        "|---|---|---|--:|--:|---|---|---|",
    ]
    for row in rows:
        found = f"{row['found']['class']}/{row['found']['cause'] or '-'}"
        role = "fix" if row["fixed"] else "defect"
        kernel = "-" if row["kernel"] == "-" else f"`{row['kernel']}`"
        cells = (row["row"], role, kernel, row["launches"], row["bad"], row["rate"], found, row["word"])
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return lines


def said_of(rows: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> list[str]:
    """What the rows say together. Nothing is claimed of a fix where no defect showed."""
    defects = [row for row in rows if not row["fixed"]]
    shown = [row for row in defects if row["word"] == "SHOWN"]
    lines = [f"{row['row']}: shown ({_of(row)})." for row in shown]
    lines += [f"{row['row']}: NOT SHOWN ({_of(row)})." for row in defects if row["word"] == "NOT SHOWN"]
    lines += [f"{row['row']}: another outcome: {row['sentence']}" for row in defects if row["word"] == "OTHER"]
    repairs = [row for row in rows if row["fixed"]]
    broken = [row for row in repairs if row["word"] == "BROKEN"]
    for row in broken:
        lines.append(f"{row['row']}: the repair does NOT hold ({_of(row)}): {row['sentence']}")
    if not shown:
        lines.append("Nothing can be said about the fixes: no row with the defect showed it here.")
    for row in repairs if shown else ():
        if row["word"] == "CLEAN":
            lines.append(f"{row['row']}: holds ({_of(row)}).")
        elif row["word"] == "OPEN":
            lines.append(f"{row['row']}: open ({_of(row)}).")
    lines += [f"{item['row']}: not run: {item['why']}" for item in document["not_run"]]
    lines += [f"not reproduced: {item['what']}; it would take {item['takes']}" for item in document["not_reproduced"]]
    return lines


def outcome_of_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """clean: every defect that ran showed and every repair holds; hang or other: a repair fails so; else inconclusive."""
    broken = [row for row in rows if row["fixed"] and row["word"] == "BROKEN"]
    if broken:
        return "hang" if any(row["found"]["class"].startswith("gpu-") for row in broken) else "other"
    defects, repairs = [row for row in rows if not row["fixed"]], [row for row in rows if row["fixed"]]
    settled = all(row["word"] == "SHOWN" for row in defects) and all(row["word"] == "CLEAN" for row in repairs)
    return "clean" if settled and rows and (defects or repairs) else "inconclusive"


def _rows_of(entry: Scenario, kernels: Sequence[str]) -> tuple[Row, ...]:
    """The scenario's rows, and for each kernel of the user's the first defect's launch with that code (expected: what it shows)."""
    rows = entry.variants()
    defect = next((row for row in rows if not row.fixed and not isinstance(row.what, HostLaunch | DrainBatches)), None)
    if kernels and defect is None:
        raise UsageError(f"verify {entry.name}: none of its rows launches a kernel: --kernel does not apply")
    more = [
        dataclasses.replace(defect, name=f"kernel {spec[-48:]}", kernel=spec, class_="not-hung", cause=None, fixed=True)
        for spec in kernels if defect is not None
    ]  # fmt: skip
    return (*rows, *more)


def run_verify_rows(
    entry: Scenario, common: Common, flags: VerifyFlags, ground: str, rates: Rates, *, clock: Clock = SYSTEM
) -> int:
    """The verb for a scenario with rows. 0: every defect that ran shows and every repair holds; 3 or 4: a repair fails; 5: open."""
    screen = Screen(as_json=common.as_json, clock=clock)
    if flags.ablate:
        raise UsageError(
            f"verify {entry.name} --ablate: only the drain has conditions to turn off", help_text="verify drain --ablate"
        )
    if not entry.variants():
        takes = "; ".join(f"{what}: it would take {need}" for what, need in entry.not_reproduced)
        raise UsageError(f"{entry.name} has no rows to verify ({takes})", help_text=f"dsv4-repro show {entry.name}")
    needed = rates.windows_when_clean
    launches = min(max(flags.least, needed), flags.trials)
    rows = _rows_of(entry, flags.kernels)
    sm = parse_arch(flags.arch) if flags.arch else DEFAULT_ARCH
    if ground == "gpu":
        sm = device_of(Cell(name="", ground=ground, device=flags.device))[0].sm
    for spec in flags.kernels:
        require_kernel(spec, sm)
    if common.out is not None:
        make_folder(common.out)
    screen.tell([f"verify {entry.name} on {ground}: {len(rows)} rows; a repair is CLEAN after {needed} launches that end well"])
    began = clock.monotonic()
    if ground == "cpu":
        chosen = tuple(with_launches(row, launches) if row.fixed else row for row in rows)
        tried, skipped = run_rows(
            entry, chosen, sm=sm, seed=common.seed or 0, count_all=True, timeout_s=common.timeout, screen=screen, clock=clock
        )
        document = matrix_document(entry, tried, skipped)
    else:
        from ..gpu_rows import gpu_options

        options = gpu_options(flags.device, trials=launches, seed=common.seed or 0, share=flags.share)
        out = common.out / "rows" if common.out is not None else None
        made, skipped = run_gpu_rows(entry, rows, options, out=out, timeout_s=common.timeout, screen=screen, clock=clock)
        document = matrix_document(entry, made, skipped, ground="gpu")
    seconds = clock.monotonic() - began
    screen.end_progress()
    by_name = {row.name: row for row in rows}
    judged = [judged_row(item, by_name[item["row"]], needed) for item in document["rows"]]
    outcome, table, said = outcome_of_rows(judged), rows_table(judged), said_of(judged, document)
    origin = "interpreted on a CPU, not measured on a GPU" if ground == "cpu" else "measured"
    said.append(f"{origin}; {seconds:.1f} s.")
    document |= {
        "schema": ROWS_SCHEMA, "outcome": outcome, "rows": judged, "said": said, "markdown": "\n".join(table),
        "seconds": round(seconds, 3), "exit_status": _STATUS[outcome],
        "rates": {field.name: getattr(rates, field.name) for field in dataclasses.fields(rates)},
    }  # fmt: skip
    if common.out is not None:
        _write(common.out, document, table, said)
    screen.say(*table)
    screen.say("")
    screen.tell(said)
    screen.document(document)
    return _STATUS[outcome]


def _write(out: Path, document: Mapping[str, Any], table: Sequence[str], said: Sequence[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    markdown = "\n".join([*table, "", *(f"- {line}" for line in said)]) + "\n"
    write_atomic(out / "verify.md", markdown.encode(), mode=0o644)
    write_atomic(out / "verify.json", (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode(), mode=0o644)
