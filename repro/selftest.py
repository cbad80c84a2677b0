"""The verb ``selftest``: about one minute on any card, and one small file to paste back.

Environment; the hang and its controls with the builtin kernel and every shipped kernel that is already cached; capture, autopsy and
the unwedge experiment on the first hang. Nothing is downloaded. The file names card, driver and architecture, and no host or path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .. import __version__
from ..clock import SYSTEM, Clock, Deadline, utc_stamp
from ..errors import NoDeviceError, NoDriverError, ReproError, UsageError
from ..forensics.records import Diagnosis, Outcome
from ..kernels.devices import device_named
from ..kernels.shipped import cached_kernels
from ..reports.document import equation
from .atomic import write_atomic
from .console import Screen, wrap
from .doctor import Check, checks
from .drain_job import DrainJob, job_of
from .drain_run import Executed, execute
from .machine import Machine, probe_machine
from .narrate import with_article
from .options import Common, PlanFlags, RunFlags
from .runstore import RunStore, dump_json

__all__ = ["SELFTEST_SCHEMA", "Cell", "CellPlan", "SelftestReport", "cells_to_run", "run_selftest", "selftest_lines", "verdict_of"]

SELFTEST_SCHEMA = "dsv4-repro/selftest/1"
#: A drain short enough for many cells: four requests, one leaves, and the danger step is the first with three live.
_PLAN = PlanFlags(requests=4, min_live=3, output="4:4", steps=8)
_DEFAULT_BUDGET_S = 60.0


class CellPlan(BaseModel):
    """One run of the self-test. ``expected`` None: the guard of this kernel is not known."""

    model_config = ConfigDict(frozen=True)

    kernel: str
    producer: Literal["raw", "clamped"] = "raw"
    expected: Literal["hang", "clean"] | None = None


class Cell(CellPlan):
    """How it went. ``state``: as expected, not as expected, open (inconclusive, or not known what to expect), failed, left out."""

    state: Literal["as expected", "not as expected", "open", "failed", "left out"]
    outcome: Outcome | None = None
    verdict: str = ""
    proof: str = ""
    released: bool | None = None
    unwedge_ms: float | None = None
    seconds: float = 0.0
    why: str = ""
    instructions: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


class SelftestReport(BaseModel):
    """``selftest.json``: the file to paste back, with card, driver and architecture."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    schema_: str = Field(default=SELFTEST_SCHEMA, alias="schema", serialization_alias="schema")
    outcome: Outcome
    version: str
    when: str
    ground: str
    device: str
    sm: int | None
    driver: str | None
    cuda_driver: str | None
    environment: dict[str, Any]
    missing: tuple[Check, ...]
    cells: tuple[Cell, ...]
    seconds: float

    def document(self) -> dict[str, Any]:
        """The JSON document with its published key names."""
        return self.model_dump(mode="json", by_alias=True)


def cells_to_run(cached: Sequence[str], guarded: Callable[[str], bool | None]) -> list[CellPlan]:
    """The hang, its two controls (guarded consumer, clamped producer), and every cached release, newest last."""
    cells = [
        CellPlan(kernel="builtin", expected="hang"),
        CellPlan(kernel="builtin:guard", expected="clean"),
        CellPlan(kernel="builtin", producer="clamped", expected="clean"),
    ]
    for spec in cached:
        state = guarded(spec)
        cells.append(CellPlan(kernel=spec, expected=None if state is None else "clean" if state else "hang"))
    return cells


def verdict_of(cells: Sequence[Cell]) -> Outcome:
    """clean: every cell as expected; other: one is not, or failed; inconclusive: none is wrong, and some are open or left out."""
    states = {cell.state for cell in cells}
    if states & {"not as expected", "failed"}:
        return "other"
    return "inconclusive" if states - {"as expected"} or not cells else "clean"


def _guard(spec: str) -> bool | None:
    from .kernel_choice import guard_of_release

    return guard_of_release(spec.removeprefix("vllm=="))[1]


def _cell(plan: CellPlan, done: Executed, seconds: float) -> Cell:
    result, diagnosis = done.result, done.result.diagnosis
    wait = next(iter(diagnosis.waits), None)
    open_ = result.outcome == "inconclusive" or plan.expected is None
    state: Any = "open" if open_ else "as expected" if result.outcome == plan.expected else "not as expected"
    cause = f"/{diagnosis.verdict.cause}" if diagnosis.verdict.cause else ""
    return Cell(
        **plan.model_dump(),
        state=state,
        outcome=result.outcome,
        verdict=f"{diagnosis.verdict.class_}{cause} ({diagnosis.verdict.confidence})",
        proof=f"{equation(wait)}, block {wait.block[0]} of {wait.grid[0]}" if wait else "",
        released=result.unwedge.retired if result.unwedge is not None and result.unwedge.attempted else None,
        unwedge_ms=result.unwedge.milliseconds if result.unwedge is not None and result.unwedge.retired else None,
        seconds=round(seconds, 2),
        why=diagnosis.verdict.sentence[:300],
        instructions=tuple(f"+{offset:#06x} {text}" for offset, text in wait.instructions[:12]) if wait else (),
        unread=_unread(diagnosis),
    )


def _unread(diagnosis: Diagnosis) -> tuple[str, ...]:
    return tuple(f"{item.what}: {item.why}"[:200] for item in diagnosis.unread[:8])


def _released(cell: Cell) -> str:
    if cell.released is None:
        return ""
    if not cell.released:
        return "not released by writing the counter"
    return "released by writing the counter" + (f", {cell.unwedge_ms:.2f} ms later" if cell.unwedge_ms is not None else "")


def selftest_lines(report: SelftestReport) -> list[str]:
    """The text to paste: at most 80 columns but for instructions."""
    card = f"{report.device}, sm_{report.sm if report.sm is not None else '?'}"
    lines = [
        f"dsv4-repro {report.version} selftest, {report.when}",
        f"{card}, driver {report.driver or 'none'}, CUDA {report.cuda_driver or 'none'} (--on {report.ground})",
        ", ".join(f"{key} {value}" for key, value in report.environment.items()),
        "",
    ]
    lines = [part for line in lines for part in wrap(line)]
    for cell in report.cells:
        expected = f"{cell.expected} expected" if cell.expected else "guard not known"
        name = cell.kernel + (", producer clamped" if cell.producer == "clamped" else "")
        lines += wrap(f"{cell.state.upper():<16}{name}: {cell.outcome or '-'} ({expected}), {cell.seconds:.1f} s", indent=" " * 16)
        detail = [cell.verdict, cell.proof, _released(cell)]
        detail = [text for text in detail if text] if cell.outcome == "hang" else [cell.why]
        lines += [part for text in detail if text for part in wrap(f"{'':16}{text}", indent=" " * 16)]
        lines += [f"{'':16}{text}" for text in cell.instructions]
        lines += [part for text in cell.unread for part in wrap(f"{'':16}not read: {text}", indent=" " * 16)]
    lines.append("")
    for check in report.missing:
        lines += wrap(f"{check.state:<8}{check.what}: {check.found}", indent=" " * 8)
    lines += [
        "",
        f"{report.outcome}: {sum(cell.state == 'as expected' for cell in report.cells)} of {len(report.cells)} as expected",
    ]
    return lines


def _choose(on: str | None, machine: Machine) -> str:
    if on is not None and on not in ("gpu", "cpu"):
        raise UsageError(f"selftest --on {on[:40]}: it is gpu or cpu")
    if on == "cpu":
        return on
    offer = "Test without a GPU: dsv4-repro selftest --on cpu"
    if machine.gpus is None:
        raise NoDriverError("there is no NVIDIA driver here", help_text=offer)
    if not machine.gpus:
        raise NoDeviceError("there is a driver, but no GPU", help_text=offer)
    return "gpu"


def run_selftest(
    common: Common,
    *,
    on: str | None,
    device: str | None,
    share: bool,
    clock: Clock = SYSTEM,
    make_job: Callable[[CellPlan, RunFlags], DrainJob] | None = None,
) -> int:
    """The verb: 0 all as expected, 4 something is not, 5 something is open. NoDriverError, NoDeviceError (5) without a GPU."""
    screen = Screen(as_json=common.as_json)
    machine = probe_machine()
    ground = _choose(on, machine)
    if ground == "cpu" and device is not None:
        device_named(device)  # before the work: a name that nobody knows is no failure of every row
    file = _file_of(common.out)
    deadline = Deadline(common.timeout or _DEFAULT_BUDGET_S, clock)
    began = clock.monotonic()
    with RunStore.create("selftest", out=None if file else common.out, clock=clock) as store:
        folder = store.path
        cells: list[Cell] = []
        job: DrainJob | None = None
        for number, plan in enumerate(cells_to_run(cached_kernels(), _guard)):
            if deadline.expired:
                cells.append(Cell(**plan.model_dump(), state="left out", why=f"{deadline.seconds:g} s were over"))
                continue
            flags = RunFlags(
                on=ground, kernel=plan.kernel, producer=plan.producer, device=device, share=share, dump=number == 0, unwedge=True
            )
            screen.say(f"{plan.kernel}, producer {plan.producer}: {plan.expected or 'guard not known'} expected")
            started = clock.monotonic()
            try:
                job = (
                    make_job(plan, flags)
                    if make_job
                    else job_of(Common(seed=0, timeout=deadline.remaining()), _PLAN, flags, screen)
                )
                done = execute(job, screen, out=folder / f"{number}", clock=clock)
                cells.append(_cell(plan, done, clock.monotonic() - started))
            except ReproError as error:
                cells.append(
                    Cell(**plan.model_dump(), state="failed", why=str(error)[:300], seconds=round(clock.monotonic() - started, 2))
                )
            store.emit("cell", **cells[-1].model_dump(mode="json"))
        report = _report(machine, ground, job, cells, clock.monotonic() - began, clock)
        _write(folder, report)
        if file is not None:
            write_atomic(file, _files(report)[f"selftest{file.suffix}"])
    lines = selftest_lines(report)
    screen.say(*lines)
    screen.tell([f"Paste this back: {file or folder / 'selftest.txt'}"])
    screen.document(report.document())
    return {"clean": 0, "other": 4}.get(report.outcome, 5)


def _report(
    machine: Machine, ground: str, job: DrainJob | None, cells: Sequence[Cell], seconds: float, clock: Clock
) -> SelftestReport:
    described = job.prepared.device if job is not None else None
    name = described.name if described else "no device"
    return SelftestReport(
        outcome=verdict_of(cells),
        version=__version__,
        when=utc_stamp(clock),
        ground=ground,
        device=f"interpreted, as on {with_article(name)}" if ground == "cpu" and described else name,
        sm=described.sm if described else None,
        driver=machine.driver,
        cuda_driver=machine.cuda_driver,
        environment={
            "python": machine.python,
            "kernel": machine.kernel,
            "container": machine.container or "no",
            **{key: text for key, text in machine.packages.items() if text and key != "dsv4-repro"},
        },
        missing=tuple(
            _without_paths(check) for check in checks(machine) if check.state != "yes" and not check.id.startswith("disk-")
        ),
        cells=tuple(cells),
        seconds=round(seconds, 1),
    )


def _without_paths(check: Check) -> Check:
    """The check as it may be pasted: paths name users and hosts."""
    return check.model_copy(update={"found": re.sub(r"(?<!\w)/[^\s:,;)]+", "(path)", check.found)})


def _files(report: SelftestReport) -> dict[str, bytes]:
    text = "\n".join(selftest_lines(report)) + "\n"
    return {"selftest.json": dump_json(report.document()), "selftest.txt": text.encode("utf-8", errors="backslashreplace")}


def _write(folder: Path, report: SelftestReport) -> None:
    for name, data in _files(report).items():
        write_atomic(folder / name, data)


def _file_of(out: Path | None) -> Path | None:
    """The file that ``--out`` names: one that ends in .json or .txt; None for a directory. UsageError before a minute is spent."""
    if out is None or out.suffix not in (".json", ".txt") or out.is_dir():
        return None
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no directory {out.parent}")
    return out
