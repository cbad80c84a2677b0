"""The verb ``verify``: what is asked, the matrix run, the table and the sentences told, files for a pull request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...clock import SYSTEM, Clock
from ...errors import UsageError
from ...kernels.plan import vector_width
from ...scenarios.registry import scenario
from ..atomic import make_folder, write_atomic
from ..console import Screen
from ..drain_flags import build_plan, parse_arch
from ..exits import STATUS
from ..grounds import choose_ground, grounds_here, require_card, require_ground
from ..kernel_choice import require_kernel
from .cells import Cell
from .matrix import ablation_cells, fix_cells
from .sequential import Rates
from .session import device_of
from .verify import CellOutcome, MatrixResult, ablation_lines, load_bearing_lines, markdown_table, run_matrix

if TYPE_CHECKING:
    from ..options import Common, PlanFlags

__all__ = ["FALSE_VERDICTS", "VERIFY_SCHEMA", "VerifyFlags", "chosen_ground", "plan_changes", "run_verify", "write_verify"]

VERIFY_SCHEMA = "dsv4-repro/verify/1"
#: False hang verdicts per window that the test reckons with. On the CPU a hang is proved; elsewhere a watchdog's verdict may be
#: wrong.
_SERVER = "dsv4-repro verify drain --on server --model dummy"
FALSE_VERDICTS = {"cpu": 0.0, "gpu": 1e-4, "server": 1e-3}


@dataclass(frozen=True, slots=True)
class VerifyFlags:
    """What the command line says. ``kernels``: further kernels, two rows each."""

    on: str | None = None
    unfixed: str = "builtin"
    fixed: str = "builtin:guard"
    kernels: tuple[str, ...] = ()
    arch: str | None = None
    device: str | None = None
    schedule: str = "smallest-pc"
    alpha: float = 0.01
    beta: float = 0.01
    hazard: float = 0.1
    trials: int = 400
    least: int = 20
    ablate: bool = False
    share: bool = False
    #: Of the server ground.
    model: str | None = None
    python: str | None = None
    tp: int | None = None
    engine: tuple[str, ...] = ()
    flag_rows: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


def plan_changes(flags: PlanFlags, seed: int | None) -> dict[str, Any]:
    """The fields of the plan that differ from the default, without the seed. PlanError for a plan that makes no sense."""
    from ...scenarios.drain import DrainPlan

    plan = build_plan(flags, seed)
    default = DrainPlan()
    dumped = plan.model_dump(mode="json")
    return {name: value for name, value in dumped.items() if name != "seed" and value != default.model_dump(mode="json")[name]}


def chosen_ground(on: str | None) -> tuple[str, str]:
    """(ground, why). A server is taken only where it is asked for: its trials take minutes. UsageError, UnavailableError."""
    from ..machine import probe_machine

    if on == "server":
        return "server", "asked for"
    machine = probe_machine(version=lambda _argv: None)
    ground, why = choose_ground(on, {**grounds_here(machine), "server": "no trials of a campaign"})
    require_ground(ground)
    if ground == "gpu":
        require_card(machine.gpus)
    return ground, why


def run_verify(name: str, common: Common, plan_flags: PlanFlags, flags: VerifyFlags, *, clock: Clock = SYSTEM) -> int:
    """The verb. 0: without a fix it hangs and with both it does not; 3: a repaired row hangs; 5: open."""
    screen = Screen(as_json=common.as_json, clock=clock)
    entry = scenario(name)
    ground, why = chosen_ground(flags.on)
    if ground == "server":
        if entry.name != "drain":
            raise UsageError(f"verify {entry.name[:40]} --on server: on a server only the drain is verified", help_text=_SERVER)
        from .verify_server import run_verify_server

        return run_verify_server(common, plan_flags, flags, clock=clock)
    if flags.model or flags.python or flags.tp or flags.engine or flags.flag_rows or flags.rows:
        raise UsageError("--model, --python, --tp, --row, --flag-row and engine flags are of --on server", help_text=_SERVER)
    rates = Rates(flags.alpha, flags.beta, flags.hazard, FALSE_VERDICTS[ground])
    if flags.least > flags.trials:
        raise UsageError(f"--min-trials {flags.least} is more than --trials {flags.trials}")
    if entry.name != "drain":
        from .verify_rows import run_verify_rows

        return run_verify_rows(entry, common, flags, ground, rates, clock=clock)
    if flags.schedule not in ("smallest-pc", "random", "priority"):
        raise UsageError(f"--schedule {flags.schedule[:40]}: it is smallest-pc, random or priority")
    base = Cell(
        name="", ground=ground, plan=plan_changes(plan_flags, common.seed), device=flags.device, share=flags.share,
        arch=parse_arch(flags.arch) if flags.arch else None, schedule=flags.schedule,
    )  # fmt: skip
    rows = fix_cells(name, base, unfixed=flags.unfixed, fixed=flags.fixed, more=flags.kernels)
    if flags.ablate:
        rows = ablation_cells(Cell(**{**_shallow(base), "kernel": flags.unfixed}), fixed=flags.fixed)
    plan = base.drain(common.seed or 0)
    for spec, cell in {row.cell.kernel: row.cell for row in rows}.items():  # a name that is none would show after rows of work
        require_kernel(spec, device_of(cell)[0].sm, shape=(plan.top_k, vector_width(plan.width)))
    if common.out is not None:
        make_folder(common.out)
    screen.tell([f"verify {name} on {ground} ({why}): {len(rows)} rows; {rates.line()}"])
    if flags.trials < rates.windows_when_clean:
        screen.note(
            f"--trials {flags.trials} is too few to call a row CLEAN: that takes {rates.windows_when_clean} windows without "
            "a hang, and a trial reaches one at most. Such a row will be INCONCLUSIVE; give "
            f"--trials {rates.windows_when_clean} or more"
        )

    def watch(outcome: CellOutcome) -> None:
        test = outcome.test
        screen.progress(f"{outcome.row.cell.name}: {outcome.trials} trials, {test.windows} windows, {test.hangs} hangs")

    began = clock.monotonic()
    result = run_matrix(
        rows, rates, most_trials=flags.trials, least_trials=flags.least, seed=common.seed or 0, timeout_s=common.timeout,
        watch=watch, clock=clock,
    )  # fmt: skip
    seconds = clock.monotonic() - began
    screen.end_progress()
    table = markdown_table(result, first="condition turned off" if flags.ablate else "fix")
    said = ablation_lines(result) if flags.ablate else load_bearing_lines(result)
    outcome = _ablated(result) if flags.ablate else _outcome(result)
    origin = "interpreted on a CPU, not measured on a GPU" if ground == "cpu" else "measured"
    notes = [
        f"{origin}; {seconds:.1f} s; {rates.line()}.",
        *(f"{row.row.cell.name}: {row.stopped} after {row.trials} trials ({row.other} failed: {row.others[0][:200]})"
          for row in result.rows if row.others),
    ]  # fmt: skip
    document = {
        "schema": VERIFY_SCHEMA, "outcome": outcome, "scenario": name, "ground": ground, "seconds": round(seconds, 3),
        "rates": {field.name: getattr(rates, field.name) for field in fields(rates)},
        "rows": [row.document() for row in result.rows], "said": said, "markdown": "\n".join(table),
        "ablate": flags.ablate, "exit_status": STATUS[outcome],
    }  # fmt: skip
    if common.out is not None:
        write_verify(common.out, document, table, said, notes)
    screen.say(*table)
    screen.say("")
    screen.tell([*said, *notes])
    screen.document(document)
    return STATUS[outcome]


def _shallow(cell: Cell) -> dict[str, Any]:
    return {field.name: getattr(cell, field.name) for field in fields(cell)}


def _outcome(result: MatrixResult) -> str:
    neither, both = result.row("neither"), result.row("both")
    repaired: Sequence[CellOutcome] = [row for row in (both, *result.rows[4:]) if row is not None]
    if any(row.word == "HANGS" for row in repaired):
        return "hang"
    if neither is None or neither.word != "HANGS" or any(row.word != "CLEAN" for row in repaired):
        return "inconclusive"
    return "clean"


def _ablated(result: MatrixResult) -> str:
    """An ablation answers its question when the full set of conditions hangs."""
    return "clean" if result.rows[0].word == "HANGS" else "inconclusive"


def write_verify(out: Path, document: dict[str, Any], table: Sequence[str], said: Sequence[str], notes: Sequence[str]) -> None:
    """``verify.md`` for a pull request and ``verify.json``."""
    out.mkdir(parents=True, exist_ok=True)
    markdown = "\n".join([*table, "", *(f"- {line}" for line in said), "", *(f"<sub>{line}</sub>" for line in notes)]) + "\n"
    write_atomic(out / "verify.md", markdown.encode(), mode=0o644)
    write_atomic(out / "verify.json", (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode(), mode=0o644)
