"""The verb ``run drain``: say what will happen; run the job (``drain_job``); write the directory; say what happened."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..clock import SYSTEM, Clock, utc_stamp
from ..errors import RunStoreError
from ..reports.document import ReportSource
from ..scenarios.drain_steps import DecodeStep
from .console import Screen
from .drain_job import DrainJob, job_of
from .exits import exit_status
from .interpreted_device import machine_words
from .leftovers import mark_run
from .narrate import first_lines, last_lines, progress_line, with_article
from .report_files import fixes_of, reports_of, write_reports
from .run import run_workload
from .run_end import breaks_noted, flat_environment, write_end
from .run_findings import RunResult
from .run_records import KernelRecord, RunRecord
from .runstore import RunStore, require_room
from .step_summary_file import append_step_summary

if TYPE_CHECKING:
    from .options import Common, PlanFlags, RunFlags, ServerFlags

__all__ = ["Executed", "execute", "run_drain"]


@dataclass(frozen=True, slots=True)
class Executed:
    """A run that ended: its result, its directory, and the status the process should exit with.

    ``unwritten``: why the directory is not complete although the run ended (a full disk); "" if it is. What was found still counts.
    """

    result: RunResult
    folder: Path
    status: int
    unwritten: str = ""


class _OnScreen:
    """The run loop's watcher: one progress line."""

    def __init__(self, screen: Screen, trials: int, last: int) -> None:
        self._screen = screen
        self._trials = trials
        self._last = last
        self._now = ""

    def step(self, trial: int, step: DecodeStep) -> None:
        self._now = progress_line(trial, self._trials, step, self._last)
        self._screen.progress(self._now)

    def waiting(self, what: str) -> None:
        self._screen.progress(f"{self._now} · {what}" if self._now else what)


def _target(job: DrainJob) -> str:
    device = job.prepared.device
    if job.ground == "cpu":
        where = f"as on {with_article(device.name)} ({machine_words(job.prepared)})"
        return f"machine code of {device.arch}, instruction by instruction, {where}"
    return f"{device.name} ({device.arch}, {device.num_sms} SMs), GPU {job.prepared.request.device}"


def _first_lines(job: DrainJob) -> list[str]:
    prepared = job.prepared
    notes = [*([prepared.chosen.note] if prepared.chosen.note else []), *job.notes]
    if prepared.device.sm // 10 != 12 or job.ground == "cpu":
        notes.append("this program was never run on an SM120 card; what is seen here is of " + _hardware(job))
    return first_lines(
        ground=job.ground,
        why=job.why,
        target=_target(job),
        kernel=prepared.chosen.image,
        guarded=prepared.chosen.guarded,
        plan=job.plan,
        steps=prepared.request.steps,
        window=sorted(prepared.window),
        launches=prepared.request.launches,
        producer=job.producer,
        layers=prepared.layers,
        trials=job.trials,
        notes=notes,
        why_no_window=prepared.why_no_window,
    )


def _hardware(job: DrainJob) -> str:
    if job.ground == "cpu":
        return f"{job.prepared.device.arch} code on a CPU"
    return f"{job.prepared.device.name} ({job.prepared.device.arch})"


def _record(job: DrainJob, started: str) -> RunRecord:
    from .machine import run_versions

    prepared = job.prepared
    image, device = prepared.chosen.image, prepared.device
    return RunRecord(
        scenario=job.scenario.name,
        ground=job.ground,
        command=job.command,
        started=started,
        seed=job.plan.seed,
        versions=run_versions(),
        environment={"device": device.name, "sm": device.sm, "sm_count": device.num_sms, "described_by": device.source},
        plan=job.plan.document(),
        kernel=KernelRecord(
            origin=image.origin, function=image.function, sha256=image.cubin_sha256, sm=image.sm, guarded=prepared.chosen.guarded,
            label=image.label,
        ),
        launches={str(rows): {"lines": launch.lines(), "grid": launch.grid} for rows, launch in prepared.request.launches.items()},
    )  # fmt: skip


def execute(job: DrainJob, screen: Screen, *, out: Path | None = None, clock: Clock = SYSTEM) -> Executed:
    """Run a job and write its directory. Whatever is raised on the way, ``run.json`` says how it ended."""
    with RunStore.create(job.scenario.name, out=out, clock=clock) as store:
        mark_run(store.path)
        began = clock.monotonic()
        record = (job.record or (lambda started: _record(job, started)))(utc_stamp(clock))
        make = job.make if job.make_in is None else partial(job.make_in, store.path)
        store.write_run(record)
        last = max((step.index for step in job.prepared.request.steps), default=0)
        try:
            with breaks_noted(store, record, clock):
                result = run_workload(
                    job.prepared.request,
                    make,
                    store,
                    job.settings,
                    diagnose=job.diagnose,
                    watch=_OnScreen(screen, job.trials, last),
                    clock=clock,
                )
        except BaseException:
            screen.note(f"what was seen until then is in {store.path}")
            raise
        status = exit_status(result.outcome, job.expect)
        finished = record.model_copy(
            update={
                "environment": {**record.environment, **flat_environment(result.ready.environment if result.ready else {})},
                "trials": result.counts,
                "outcome": result.outcome,
                "exit_status": status,
            }
        )
        unwritten = ""
        unwritten_status = status if result.outcome in ("hang", "other") else exit_status("inconclusive")
        try:
            seconds = round(clock.monotonic() - began, 3)
            finished = finished.model_copy(update={"state": "finished", "ended": utc_stamp(clock), "seconds": seconds})
            write_end(store, finished, result.diagnosis, unwritten_status=unwritten_status)
            source = ReportSource(
                diagnosis=result.diagnosis,
                run=finished.document(),
                title=job.scenario.title,
                fixes=fixes_of(job.scenario) if result.outcome == "hang" else (),
                version=__version__,
            )
            write_reports(reports_of(source, store.path), store.path)
            append_step_summary(source)
        except RunStoreError as error:  # the answer is known, and is worth more than its file
            unwritten = str(error)
            status = unwritten_status
    return Executed(result, store.path, status, unwritten)


def run_drain(
    common: Common,
    plan_flags: PlanFlags,
    flags: RunFlags,
    server: ServerFlags | None = None,
    *,
    asked: frozenset[str] = frozenset(),
) -> int:
    """The verb. Exit status: see ``exits``."""
    screen = Screen(as_json=common.as_json)
    require_room(common.out)
    job = job_of(common, plan_flags, flags, screen, server, asked=asked)
    screen.end_progress()
    screen.tell(job.lines or _first_lines(job))
    done = execute(job, screen, out=common.out)
    screen.end_progress()
    style = {"hang": "bad", "other": "bad", "clean": "good"}.get(done.result.outcome, "note")
    lines = last_lines(done.result, done.folder)
    screen.tell(lines[:1], style=style)
    for line in lines[1:]:
        (screen.say if line.startswith("next: ") else lambda text: screen.tell([text]))(line)
    if done.unwritten:
        screen.note(f"the run directory is not complete: {done.unwritten}")
    more = {"unwritten": done.unwritten} if done.unwritten else {}
    screen.document({**done.result.diagnosis.document(), "run": str(done.folder), "exit_status": done.status, **more})
    return done.status
