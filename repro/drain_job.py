"""A drain run, all choices made and nothing started: the ground, the kernel, the device, the plan, and the command that says so."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import UnavailableError, UsageError
from ..kernels.plan import DeviceDescription, device_for_sm, device_named, vector_width
from ..kernels.producer import Producer
from ..scenarios.drain import DrainPlan
from ..scenarios.drain_steps import DecodeStep
from ..scenarios.registry import Scenario, scenario
from .console import Screen
from .device_probe import describe_gpu
from .drain_flags import DEFAULT_ARCH, build_plan, command_of, kernel_spec, parse_arch, parse_expectation
from .exits import Expectation
from .grounds import choose_ground, grounds_here, make_ground, require_ground
from .interpreted_device import SCHEDULES, residency_notes
from .kernel_choice import choose_kernel
from .prepare import PreparedRun, prepare_drain
from .run import Diagnose, RunSettings
from .run_records import RunRecord

if TYPE_CHECKING:
    from .ground import Ground
    from .options import Common, PlanFlags, RunFlags, ServerFlags

__all__ = ["DrainJob", "bound_diagnose", "job_of"]


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


def _refuse_server_flags(server: ServerFlags | None, ground: str) -> None:
    """Flags of a server mean nothing elsewhere. A model alone does not count: DSV4_REPRO_MODEL may stand in the environment too."""
    if server is None:
        return
    given = [name for name in ("url", "python", "port", "bare", "guard", "rescue") if getattr(server, name) not in (None, False)]
    given += ["attach" if server.attach else "no-attach"] * (server.attach is not None)
    words = [f"--{name}" for name in given] + [f"{shlex.join(server.engine or ())} (flags of an engine, after --)"] * bool(
        server.engine
    )
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
    _refuse_server_flags(server, ground)
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
