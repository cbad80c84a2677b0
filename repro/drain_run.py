"""The verb ``run drain``: choose ground, kernel and device; say what will happen; run; write the directory; say what happened."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .. import __version__
from ..clock import SYSTEM, Clock, utc_stamp
from ..errors import ReproError, RunStoreError, UnavailableError, UsageError
from ..kernels.plan import DeviceDescription, device_for_sm, device_named, vector_width
from ..reports.document import FixText, ReportSource
from ..scenarios.drain import DecodeStep, DrainPlan, Producer
from ..scenarios.registry import Scenario, scenario
from .console import Screen
from .device_probe import describe_gpu
from .drain_flags import build_plan, command_of, kernel_spec, parse_arch, parse_expectation
from .exits import Expectation, exit_status
from .grounds import choose_ground, grounds_here, make_ground, require_ground
from .interpreted_device import SCHEDULES, machine_words, residency_notes
from .kernel_choice import choose_kernel
from .leftovers import mark_run
from .narrate import first_lines, last_lines, progress_line, with_article
from .prepare import PreparedRun, prepare_drain
from .report_files import reports_of, write_reports
from .run import Diagnose, RunResult, RunSettings, run_workload
from .run_records import KernelRecord, RunRecord
from .runstore import RunStore
from .step_summary_file import append_step_summary

if TYPE_CHECKING:
    from .ground import Ground
    from .options import Common, PlanFlags, RunFlags, ServerFlags

__all__ = ["DrainJob", "Executed", "execute", "fixes_of", "flat_environment", "job_of", "run_drain"]

#: The architecture that the CPU ground interprets where none is named: that of the published case.
DEFAULT_ARCH = 120


@dataclass(frozen=True)
class DrainJob:
    """One drain run, all choices made. ``command`` reproduces it. ``make``: a new ground each time it is called."""

    plan: DrainPlan
    ground: str
    why: str
    prepared: PreparedRun
    producer: str
    trials: int
    settings: RunSettings
    command: tuple[str, ...]
    make: Callable[[], Ground]
    diagnose: Diagnose
    expect: Expectation | None = None
    notes: tuple[str, ...] = ()
    #: Of a job that is not one kernel on one device (a server): its own first lines, record, and grounds for a run's directory.
    lines: tuple[str, ...] = ()
    record: Callable[[str], RunRecord] | None = None
    make_in: Callable[[Path], Ground] | None = None
    scenario: Scenario = field(default_factory=lambda: scenario("drain"))


@dataclass(frozen=True, slots=True)
class Executed:
    """A run that ended: its result, its directory, and the status the process should exit with.

    ``unwritten``: why the directory is not complete although the run ended (a full disk); "" if it is. What was found still counts.
    """

    result: RunResult
    folder: Path
    status: int
    unwritten: str = ""


def _device(ground: str, flags: RunFlags) -> tuple[DeviceDescription, int]:
    """(description, CUDA ordinal). On the CPU a GPU of the table stands for the architecture."""
    if ground == "cpu":
        if flags.device is not None:
            device = device_named(flags.device)
            if flags.arch is not None and parse_arch(flags.arch) != device.sm:
                raise UsageError(f"--device {device.name} is {device.arch}, --arch says sm_{parse_arch(flags.arch)}")
            return device, 0
        return device_for_sm(parse_arch(flags.arch) if flags.arch is not None else DEFAULT_ARCH), 0
    number = flags.device or "0"
    if not number.isdecimal():
        raise UsageError(f"--device {number[:40]}: a GPU number is expected with --on {ground}", help_text="nvidia-smi -L")
    device = describe_gpu(int(number))
    if flags.arch is not None and parse_arch(flags.arch) != device.sm:
        raise UsageError(
            f"GPU {number} is {device.arch}; --arch sm_{parse_arch(flags.arch)} cannot run on it",
            help_text=f"Interpret it instead: dsv4-repro run drain --on cpu --arch sm_{parse_arch(flags.arch)}",
        )
    return device, int(number)


def _refuse_cpu_flags(flags: RunFlags, ground: str) -> None:
    """Flags of the interpreted device mean nothing elsewhere; ignoring one would be a wrong answer to what was asked."""
    given = [name for name in ("sms", "slots_per_sm") if getattr(flags, name) is not None]
    given += [name for name, default in (("schedule", SCHEDULES[0]), ("checks", False)) if getattr(flags, name) != default]
    if given:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{words}: only the interpreted device of --on cpu has that", help_text=f"It would run --on {ground}")


def refuse_server_flags(server: ServerFlags | None, ground: str) -> None:
    """Flags of a server mean nothing elsewhere. A model alone does not count: DSV4_REPRO_MODEL may stand in the environment too."""
    if server is None:
        return
    given = [name for name in ("url", "python", "port", "bare", "guard", "rescue") if getattr(server, name) not in (None, False)]
    given += ["attach" if server.attach else "no-attach"] * (server.attach is not None)
    words = [f"--{name}" for name in given] + ["words after --"] * bool(server.engine)
    if words:
        raise UsageError(f"{', '.join(words)}: only --on server has that", help_text=f"It would run --on {ground}")


def bound_diagnose(ground: str, plan: DrainPlan, prepared: PreparedRun) -> Diagnose:
    """``forensics.diagnose.diagnose_state`` with the ground and each step's facts."""

    def diagnose(state: Any, *, step: DecodeStep, evidence: Any, unwedge: Any) -> Any:
        from ..forensics.diagnose import diagnose_state
        from .step_facts import step_facts

        return diagnose_state(
            state, ground=cast("Any", ground), step=step_facts(step, plan, prepared), evidence=evidence, unwedge=unwedge
        )

    return cast("Diagnose", diagnose)


def job_of(
    common: Common,
    plan_flags: PlanFlags,
    flags: RunFlags,
    screen: Screen,
    server: ServerFlags | None = None,
    *,
    asked: frozenset[str] = frozenset(),
) -> DrainJob:
    """Make every choice of a run; nothing is started, a kernel may be compiled or fetched. ``asked``: flags given by hand."""
    from .machine import probe_machine

    expect = parse_expectation(flags.expect)
    if flags.schedule not in SCHEDULES:
        raise UsageError(f"--schedule {flags.schedule[:40]}: it is {' or '.join(SCHEDULES)}")
    if flags.producer not in ("raw", "clamped"):
        raise UsageError(f"--producer {flags.producer[:40]}: it is raw or clamped")
    screen.progress("looking for a place to run")
    here = grounds_here(probe_machine(version=lambda _argv: None))
    if server is not None and server.python is not None and here["server"] != "not in this release":
        here = {**here, "server": "yes"}  # whether that interpreter has vLLM is asked of it
    ground, why = choose_ground(
        flags.on, here, model=server.model if server is not None else None, url=server.url if server is not None else None
    )
    require_ground(ground)
    if ground == "server":
        from .server_run import server_job

        return server_job(common, plan_flags, flags, server, screen, why=why, expect=expect, asked=asked)
    refuse_server_flags(server, ground)
    spec, library = kernel_spec(flags)
    plan = build_plan(plan_flags, common.seed)
    if flags.via == "op" and ground == "cpu":
        what = "--via op needs a GPU: the op of vLLM launches through torch"
        if flags.on is None:
            raise UnavailableError(f"{what}; here {why}")
        raise UsageError(f"{what}, and --on cpu interprets the kernel", help_text="Leave out --via, or give --on gpu")
    device, ordinal = _device(ground, flags)
    screen.progress(f"getting the kernel {spec}")
    chosen = choose_kernel(
        spec, device.sm, plan.top_k, vector_width(plan.width), progress=_fetching(screen), interpreted=ground == "cpu"
    )
    options = {"via": flags.via, "share": flags.share, "dump": flags.dump, "library": library, "trials": flags.trials}
    if ground == "cpu":
        options |= {"device_name": f"{device.name}, interpreted", "schedule": flags.schedule, "checks": flags.checks}
        options |= {name: value for name in ("sms", "slots_per_sm") if (value := getattr(flags, name)) is not None}
    prepared = prepare_drain(
        plan, ground, chosen, device, producer=cast("Producer", flags.producer), ordinal=ordinal, options=options
    )
    if ground != "cpu":
        _refuse_cpu_flags(flags, ground)
    notes = [*prepared.notes, *(residency_notes(prepared) if ground == "cpu" else ())]
    if flags.tp > 1:
        notes.append(f"--tp {flags.tp}: every rank launches the same top-k on the same lengths; on one GPU one rank is run")
    settings = RunSettings(
        trials=flags.trials,
        allow_dump=flags.dump,
        unwedge=flags.unwedge,
        timeout_s=common.timeout,
        window=prepared.window,
        why_no_window=prepared.why_no_window,
        dump_ends_context=ground != "cpu",
    )
    return DrainJob(
        plan=plan,
        ground=ground,
        why=why,
        prepared=prepared,
        producer=flags.producer,
        trials=flags.trials,
        settings=settings,
        command=command_of(plan, flags, ground, spec),
        make=lambda: make_ground(ground),
        diagnose=bound_diagnose(ground, plan, prepared),
        expect=expect,
        notes=tuple(notes),
    )


def _fetching(screen: Screen) -> Callable[[str, int, int | None], None]:
    def progress(what: str, done: int, total: int | None) -> None:
        of = f" of {total / 1e6:.1f}" if total else ""
        screen.progress(f"fetching {what}: {done / 1e6:.1f}{of} MB")

    return progress


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
    from .machine import package_versions

    prepared = job.prepared
    image, device = prepared.chosen.image, prepared.device
    return RunRecord(
        scenario=job.scenario.name,
        ground=job.ground,
        command=job.command,
        started=started,
        seed=job.plan.seed,
        versions={
            "python": sys.version.split()[0],
            "dsv4-repro": __version__,
            **{name: text for name, text in package_versions().items() if text},
        },
        environment={"device": device.name, "sm": device.sm, "sm_count": device.num_sms, "described_by": device.source},
        plan=job.plan.document(),
        kernel=KernelRecord(
            origin=image.origin, function=image.function, sha256=image.cubin_sha256, sm=image.sm, guarded=prepared.chosen.guarded,
            label=image.label,
        ),
        launches={str(rows): {"lines": launch.lines(), "grid": launch.grid} for rows, launch in prepared.request.launches.items()},
    )  # fmt: skip


def fixes_of(entry: Scenario | None) -> tuple[FixText, ...]:
    """The scenario's fixes as the report names them."""
    if entry is None:
        return ()
    return tuple(FixText(fix.layer, fix.text, fix.upstream, shlex.join(fix.flags)) for fix in entry.fixes)


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
            result = run_workload(
                job.prepared.request,
                make,
                store,
                job.settings,
                diagnose=job.diagnose,
                watch=_OnScreen(screen, job.trials, last),
                clock=clock,
            )
        except BaseException as error:
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            _note_end(store, record, state, clock.monotonic() - began, clock, error=f"{type(error).__name__}: {error}"[:2000])
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
        try:
            store.write_diagnosis(result.diagnosis.document())
            finished = _note_end(store, finished, "finished", clock.monotonic() - began, clock)
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
            status = status if result.outcome in ("hang", "other") else exit_status("inconclusive")
    return Executed(result, store.path, status, unwritten)


def flat_environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The ground's environment: scalars as they are, everything of structure under ``details``, which reports do not print."""
    plain = {key: value for key, value in environment.items() if isinstance(value, str | int | float | bool)}
    nvml = environment.get("nvml")
    if isinstance(nvml, Mapping):
        plain |= {key: value for key in ("driver", "uuid") if isinstance(value := nvml.get(key), str)}
    rest = {key: value for key, value in environment.items() if key not in plain}
    return {**plain, "details": rest} if rest else plain


def _note_end(
    store: RunStore, record: RunRecord, state: str, seconds: float, clock: Clock, *, error: str | None = None
) -> RunRecord:
    ended = record.model_copy(update={"state": state, "ended": utc_stamp(clock), "seconds": round(seconds, 3), "error": error})
    try:
        store.write_run(ended)
    except ReproError:
        if error is None:
            raise  # with an error already on its way, that one is the answer
    return ended


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
