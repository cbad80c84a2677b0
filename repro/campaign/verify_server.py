"""``verify drain --on server``: rows that are launches of one build: as the recipe has it, with the guard, without MTP, with other
engine flags. A server a row, a drain a trial.

A build has one kernel and one producer, so that the consumer's fix is another build: the same command with its interpreter
(``--python``). What the guard does is the producer's clamp at run time.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...clock import SYSTEM, Clock
from ...errors import UsageError
from ..console import Screen
from ..exits import STATUS
from .cells import Cell
from .matrix import FixCell
from .sequential import Rates, bound_words
from .server_session import ServerSession, described
from .verify import CellOutcome, MatrixResult, run_matrix
from .verify_run import FALSE_VERDICTS, VERIFY_SCHEMA, VerifyFlags, plan_changes, write_verify

if TYPE_CHECKING:
    from ..options import Common, PlanFlags

__all__ = ["run_verify_server", "server_cells", "server_lines", "server_table"]

#: A row in which no trial reached a window is given up after so many: each takes a minute.
PATIENCE = 3
#: Where no FULL graph is captured no batch is padded: what the reported work-around does.
WITHOUT_GRAPHS = "--enforce-eager"


def server_cells(base: Cell, flag_rows: Sequence[str] = ()) -> list[FixCell]:
    """``flag_rows``: engine flags of a further row each, as one string. UsageError where they do not parse."""
    rows = [FixCell(replace(base, name="neither"), frozenset(), "as the recipe has it")]

    def add(name: str, change: str, **server: Any) -> None:
        rows.append(FixCell(replace(base, name=name, server={**base.server, **server}), frozenset({name}), change))

    add("producer only", "--guard: lengths clamped at 0 by the agent, at run time", guard=True)
    rows.append(FixCell(replace(base, name="no MTP", plan={**base.plan, "mtp": 0}), frozenset({"no MTP"}), "--mtp 0: next_n 1"))
    for text in flag_rows or (WITHOUT_GRAPHS,):
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--flag-row {text[:80]!r}: {error}") from None
        if not words or not words[0].startswith("--"):
            raise UsageError(f"--flag-row {text[:80]!r}: flags of vllm serve, such as --enforce-eager")
        add(" ".join(words), "engine flags", flags=(*base.server.get("flags", ()), *words))
    return rows


def run_verify_server(
    common: Common, plan_flags: PlanFlags, flags: VerifyFlags, *, clock: Clock = SYSTEM, session: Any = ServerSession
) -> int:
    """The verb on the server ground. 0: it hangs as it is and not with the guard; 3: it hangs with the guard; 5: open."""
    given = [word for word, on in (
        ("--ablate", flags.ablate), ("--kernel", flags.kernels), ("--arch", flags.arch), ("--device", flags.device),
        ("--unfixed", flags.unfixed != "builtin"), ("--fixed", flags.fixed != "builtin:guard"),
        ("--schedule", flags.schedule != "smallest-pc"),
    ) if on]  # fmt: skip
    if given:
        raise UsageError(
            f"{', '.join(given)}: a server runs its own kernel on the cards it sees",
            help_text="Another build is --python INTERPRETER, another card CUDA_VISIBLE_DEVICES, other engine flags --flag-row",
        )
    if flags.least > flags.trials:
        raise UsageError(f"--min-trials {flags.least} is more than --trials {flags.trials}")
    rates = Rates(flags.alpha, flags.beta, flags.hazard, FALSE_VERDICTS["server"])
    screen = Screen(as_json=common.as_json, clock=clock)
    server: dict[str, Any] = {"model": flags.model, "python": flags.python, "tp": flags.tp, "flags": flags.engine}
    base = Cell(
        name="", ground="server", kernel="the server's", producer="the server's", plan=plan_changes(plan_flags, common.seed),
        server={name: value for name, value in server.items() if value},
    )  # fmt: skip
    rows = _chosen(server_cells(base, flags.flag_rows), flags.rows)
    folder = common.out
    sessions = {row.cell.name: session(row.cell, folder=_place(folder, row.cell), screen=screen, clock=clock) for row in rows}
    lines = _announced(rows, common.seed or 0, sessions)
    screen.tell([f"verify drain on server: {len(rows)} rows, a server each; {rates.line()}", *lines])

    def watch(outcome: CellOutcome) -> None:
        test = outcome.test
        screen.progress(f"{outcome.row.cell.name}: {outcome.trials} trials, {test.windows} windows, {test.hangs} hangs")

    began = clock.monotonic()
    result = run_matrix(
        rows, rates, most_trials=flags.trials, least_trials=min(flags.least, flags.trials), patience=PATIENCE,
        seed=common.seed or 0, timeout_s=common.timeout, watch=watch, clock=clock,
        session=lambda cell, **_more: sessions[cell.name],
    )  # fmt: skip
    seconds = clock.monotonic() - began
    screen.end_progress()
    table, said, outcome = server_table(result), server_lines(result), _outcome(result)
    notes = [
        f"measured on a server; {seconds:.0f} s; {rates.line()}.",
        *(f"{row.row.cell.name}: {row.stopped} after {row.trials} trials ({row.other} failed: {row.others[0][:200]})"
          for row in result.rows if row.others),
    ]  # fmt: skip
    document = {
        "schema": VERIFY_SCHEMA, "outcome": outcome, "scenario": "drain", "ground": "server", "seconds": round(seconds, 3),
        "rates": {field.name: getattr(rates, field.name) for field in fields(rates)},
        "rows": [row.document() for row in result.rows], "said": said, "markdown": "\n".join(table),
        "ablate": False, "exit_status": STATUS[outcome],
    }  # fmt: skip
    if folder is not None:
        write_verify(folder, document, table, said, notes)
    screen.say(*table)
    screen.say("")
    screen.tell([*said, *notes])
    screen.document(document)
    return STATUS[outcome]


def _chosen(rows: Sequence[FixCell], wanted: Sequence[str]) -> list[FixCell]:
    """``neither`` and the wanted rows; all without any. UsageError for a row that there is not."""
    names = [row.cell.name for row in rows]
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise UsageError(f"--row {unknown[0][:60]!r}: there are {', '.join(names)}")
    return [row for row in rows if not wanted or row.cell.name in (rows[0].cell.name, *wanted)]


def _place(folder: Path | None, cell: Cell) -> Path | None:
    return folder / cell.name.replace("/", "_").replace(" ", "-") if folder is not None else None


def _announced(rows: Sequence[FixCell], seed: int, sessions: Mapping[str, Any]) -> list[str]:
    """Every row's choices made before the first server starts, so that what cannot be is said now; where it can wedge."""
    lines: list[str] = []
    for row in rows:
        job = sessions[row.cell.name].prepare(seed)
        if not lines:
            lines.append(job.lines[0].partition("): ")[2] or job.lines[0])
        live = sorted({step.live_requests for step in job.prepared.request.steps if step.index in job.settings.window})
        where = f"window at {', '.join(map(str, live))} live requests" if live else f"no window: {job.settings.why_no_window}"
        lines.append(f"{row.cell.name}: {row.change}; {where}")
    return lines


def server_table(result: MatrixResult) -> list[str]:
    """A table fit for a pull request. Windows are what recorder or counters showed, a trial counts once."""
    lines = [
        "| row | server | trials | windows reached | hangs | hazard per window (99 %) | verdict | identity |",
        "|---|---|--:|--:|--:|---|---|---|",
    ]
    for row in result.rows:
        interval = row.test.interval()
        hazard = "-" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"
        identity = ", ".join(f"`{name}`" for name in row.identities) or "-"
        server = described(row.row.cell.server) + (" --mtp 0" if row.row.cell.plan.get("mtp") == 0 else "")
        lines.append(
            f"| {_cell(row.row.cell.name)} | `{_cell(server)}` | {row.trials} | {row.test.windows} | {row.test.hangs} | {hazard} | "
            f"{row.word} | {identity} |"
        )
    return lines


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def server_lines(result: MatrixResult) -> list[str]:
    """What the rows say together. Nothing is claimed of a row where the server as it is does not hang."""
    neither, *others = result.rows
    if neither.word != "HANGS":
        why = f"the server as it is does not hang here ({neither.word}: {_open(neither)})"
        return [f"Nothing can be said about the others: {why}."]
    seen = f"{neither.test.hangs} of {neither.test.windows} drains that reached the window"
    lines = [f"As it is it hangs: {seen} ({_bound(neither)})."]
    for row in others:
        name = row.row.cell.name
        if row.word == "HANGS":
            lines.append(f"{name}: it hangs all the same, {row.test.hangs} of {row.test.windows} ({_bound(row)}).")
        elif row.word == "CLEAN":
            lines.append(f"{name}: no hang in {row.test.windows} drains that reached the window ({_bound(row)}).")
        elif row.no_window and row.no_window == row.trials:
            lines.append(f"{name}: {row.trials} drains, none hung, and none can: {row.why_no_window}")
        else:
            lines.append(f"{name}: open: {_open(row)}.")
    lines += [f"{row.row.cell.name}: windows: {_windows(row)}." for row in result.rows if row.reached]
    lines.append("The consumer's fix is another build: the same command with its interpreter, --python.")
    return lines


def _bound(row: CellOutcome) -> str:
    return bound_words(row.test.hangs, row.test.windows)


def _windows(row: CellOutcome) -> str:
    return ", ".join(f"{name} in {count} trials" for name, count in list(row.reached.items())[:6])


def _open(row: CellOutcome) -> str:
    if row.test.windows == 0:
        return f"no danger window was reached ({row.why_no_window or '; '.join(row.others) or row.stopped or 'no trial'})"
    return f"{row.test.hangs} hangs in {row.test.windows} windows, {row.other} trials failed; stopped: {row.stopped}"


def _outcome(result: MatrixResult) -> str:
    neither, guard = result.rows[0], result.row("producer only")
    if guard is not None and guard.word == "HANGS":
        return "hang"
    return "clean" if neither.word == "HANGS" and guard is not None and guard.word == "CLEAN" else "inconclusive"
