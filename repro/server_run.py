"""``run drain --on server``: from the command line to a job; what will run where and what is changed, said before it starts."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanError, UsageError
from ..forensics.device_state import Unread
from ..forensics.evidence.opening import at_once
from ..kernels.plan import DeviceDescription, device_for_sm
from ..kernels.release_profiles import release_profile
from ..scenarios.drain import DrainPlan
from .drain_flags import build_plan, plan_words
from .ground import GroundRequest
from .grounds import MODEL_VARIABLE
from .kernel_choice import ChosenKernel
from .prepare import PreparedRun
from .run import RunSettings
from .run_records import KernelRecord, RunRecord
from .server_choice import ServerChoice, card_of, kernel_of, no_image, own_server, running_server
from .server_ground import ServerGround
from .server_lines import first_lines_of_server
from .server_opening import ServerSetup
from .serving.drain_windows import DrainWindows, drain_windows
from .serving.engine_flags import parse_flags
from .serving.load_plan import LOAD_SCHEMA, LoadPlan, read_load_plan
from .serving.recipe import DUMMY, DUMMY_PLAN
from .serving.server_diagnosis import ServerFacts
from .serving.shown_words import shown_words

if TYPE_CHECKING:
    from .console import Screen
    from .drain_job import DrainJob
    from .exits import Expectation
    from .options import Common, PlanFlags, RunFlags, ServerFlags

__all__ = ["WAVES", "server_job"]

#: Draining waves of a run; a campaign's trial is one wave.
WAVES = 4

#: Enough of a file to see whose plan it is.
_HEAD = 32 << 20
#: Tokens of a prefill step: of the dummy's recipe, and of the published case.
_BATCHED = {True: 2048, False: 8192}


def _refuse(flags: RunFlags, server: ServerFlags) -> None:
    given = [f"--{name.replace('_', '-')}" for name in ("kernel", "arch", "device", "sms", "slots_per_sm") if getattr(flags, name)]
    given += [word for word, on in (("--via op", flags.via != "driver"), ("--checks", flags.checks)) if on]
    if given:
        raise UsageError(
            f"{', '.join(given)}: a server runs its own kernel on the cards it sees",
            help_text="Choose the card with CUDA_VISIBLE_DEVICES, the kernel by the server's vLLM: --python INTERPRETER",
        )
    if flags.producer != "raw":
        raise UsageError("--producer clamped: a server has its own producer", help_text="Its clamp at run time is --guard")
    if server.url is not None:
        own = [f"--{name}" for name in ("python", "port", "bare", "guard", "rescue") if getattr(server, name)]
        own += [f"{shlex.join(server.engine or ())} (flags of an engine, after --)"] * bool(server.engine)
        if own:
            raise UsageError(f"{', '.join(own)}: the server of --url is running already and is left as it is")


def _is_load_plan(path: Path | None) -> bool:
    if path is None or path.suffix.lower() == ".toml":
        return False
    try:
        with open(path, "rb", opener=at_once) as stream:
            return LOAD_SCHEMA.encode() in (stream.read(_HEAD) or b"")
    except OSError:
        return False  # the reader of plans says what is wrong


def _plan_of_load(load: LoadPlan, flags: PlanFlags, seed: int | None) -> DrainPlan:
    """The drain plan that a load plan stands for: what the batch depends on. Flags that would contradict it are refused."""
    given = [entry.name for entry in dataclasses.fields(flags) if entry.name != "plan" and getattr(flags, entry.name) is not None]
    fixed = [f"--{name.replace('_', '-')}" for name in given if name not in ("compress", "layers")]
    if fixed or seed is not None:
        raise PlanError(
            f"{', '.join([*fixed, *(['--seed'] if seed is not None else [])])}: the load plan of --plan has them already"
        )
    wave = max(load.waves, key=lambda one: len(one.requests))
    sent = [request for request in wave.requests if request.hold_back is None]
    aimed = [aim.live for wave in load.waves for aim in wave.aims if aim.required]
    prompts = [request.prompt_size for request in sent]
    return DrainPlan(
        requests=len(sent),
        min_live=min([*aimed, len(sent), load.max_num_seqs]),
        prompt=(min(prompts), max(prompts)),
        output=(1, max(2, min(64, load.max_model_len - max(prompts) - 16))),
        mtp=load.mtp,
        max_num_seqs=load.max_num_seqs,
        max_model_len=load.max_model_len,
        capture_sizes=load.graph_sizes or None,
        seed=load.seed,
        compress=flags.compress if flags.compress is not None else DrainPlan().compress,
        layers=flags.layers,
    )


def _defaults(plan: DrainPlan, flags: PlanFlags, *, dummy: bool, load: bool) -> DrainPlan:
    """For the dummy model, what was not said is that model's own: its row width, ratio and k."""
    if not dummy:
        return plan
    changes: dict[str, Any] = {"top_k": DUMMY_PLAN["top_k"]}
    for name in ("max_model_len", "compress"):
        if getattr(flags, name) is None and (flags.plan is None or (load and name == "compress")):
            changes[name] = DUMMY_PLAN[name]
    return plan.replace(**changes)


def _command(server: ServerChoice, flags: RunFlags, asked: ServerFlags, plan_file: Path | None) -> tuple[str, ...]:
    words = ["dsv4-repro", "run", "drain", "--on", "server"]
    for name in ("model", "url", "python", "port"):
        value = getattr(asked, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    words += [f"--{name}" for name in ("bare", "guard", "rescue") if getattr(asked, name)]
    if asked.attach is not None:
        words.append("--attach" if asked.attach else "--no-attach")
    if flags.tp != 1:
        words += ["--tp", str(flags.tp)]
    if flags.trials != 1:
        words += ["--trials", str(flags.trials)]
    words += ["--plan", str(plan_file)] if plan_file is not None else plan_words(server.plan)
    engine = parse_flags(asked.engine or ()).shown()
    return shown_words([*words, "--", *engine] if engine else words)


def server_job(
    common: Common,
    plan_flags: PlanFlags,
    flags: RunFlags,
    server: ServerFlags | None,
    screen: Screen,
    *,
    why: str,
    expect: Expectation | None,
    asked: frozenset[str],
    waves: int = WAVES,
) -> DrainJob:
    """Make every choice of a server run; nothing is started. ``waves``: draining waves of the load. Raises UsageError, PlanError,
    UnavailableError."""
    from .drain_job import DrainJob
    from .options import ServerFlags as _Flags

    given = server if server is not None else _Flags()
    _refuse(flags, given)
    model = given.model or os.environ.get(MODEL_VARIABLE)
    if given.url is None and not model:
        raise UsageError(
            "--on server: which model? --model PATH, --model dummy (tiny, random weights, one card), or --url of a server "
            "that runs",
            help_text="Start one: dsv4-repro run drain --on server --model dummy. Without vLLM or a GPU: dsv4-repro run drain",
        )
    dummy = given.url is None and model == DUMMY

    def drain_of(plan: DrainPlan) -> LoadPlan:
        return LoadPlan.from_drain(plan, waves=waves, eager=not chosen.facts.full_graphs, batched_tokens=_BATCHED[dummy])

    def reseed(seed: int) -> tuple[DrainPlan, DrainWindows, LoadPlan]:
        other = chosen.plan.replace(seed=seed)
        return other, drain_windows(other, chosen.facts, device=device, release=release), drain_of(other)

    is_load = _is_load_plan(plan_flags.plan)
    load = read_load_plan(plan_flags.plan) if is_load and plan_flags.plan is not None else None
    plan = _plan_of_load(load, plan_flags, common.seed) if load is not None else build_plan(plan_flags, common.seed)
    plan = _defaults(plan, plan_flags, dummy=dummy, load=load is not None)
    screen.progress("looking at the server's vLLM")
    chosen = running_server(plan, given) if given.url is not None else own_server(plan, model or "", flags, given)
    device, no_device = card_of(chosen)
    release = chosen.install.release if chosen.install is not None else None
    windows = drain_windows(chosen.plan, chosen.facts, device=device, release=release)
    if load is None:
        load = drain_of(chosen.plan)
    kernel = kernel_of(chosen.install, device, chosen.plan, screen)
    profile = release_profile(release) if release is not None else None
    facts = ServerFacts(
        release=release,
        guarded=kernel.guarded if isinstance(kernel, ChosenKernel) else profile.guarded if profile is not None else None,
        clamped=profile.clamped if profile is not None else None,
        guard=given.guard,
        rescue=given.rescue,
        plan=chosen.plan,
    )
    settings = RunSettings(
        trials=flags.trials,
        allow_dump=("dump" in asked and flags.dump) or (common.yes and flags.dump and given.url is None),
        unwedge=False,
        timeout_s=common.timeout,
        window=frozenset(step.index for step in windows.steps if step.live_requests in windows.counts),
        why_no_window=windows.why_not,
    )
    if "unwedge" in asked and flags.unwedge:
        raise UsageError(
            "--unwedge: a server is released by its own verb, because a release frees one launch", help_text="dsv4-repro unwedge"
        )
    attach = given.attach if given.attach is not None else given.url is None or common.yes
    command = _command(chosen, flags, given, plan_flags.plan)
    setup = ServerSetup(
        windows=windows,
        load_plan=load,
        options=dataclasses.replace(chosen.options, dump=flags.dump) if chosen.options is not None else None,
        url=chosen.url,
        headers=chosen.headers,
        model=chosen.model,
        facts=facts,
        timeout_s=common.timeout,
        attach=attach,
        again=shlex.join(
            [*command[:3], "--no-attach", "--dump", *(word for word in command[3:] if word not in ("--attach", "--no-attach"))]
        ),
        retry=shlex.join([*command[:3], "--trials", "3", *command[3:]]),
        progress=screen.progress,
        reseed=None if is_load else reseed,
    )
    image = kernel.image if isinstance(kernel, ChosenKernel) else no_image(chosen.plan)
    request = GroundRequest(
        plan=chosen.plan,
        steps=windows.steps,
        kernel=image,
        launches=windows.launches,
        seed=chosen.plan.seed,
        options={"ground": "server"},
    )
    stand_in = device if device is not None else device_for_sm(90)
    prepared = PreparedRun(
        request,
        kernel if isinstance(kernel, ChosenKernel) else ChosenKernel(image, release or "", None, "not known"),
        stand_in,
        settings.window,
        windows.why_not,
        chosen.plan.layers_on("server"),
    )
    return DrainJob(
        plan=chosen.plan,
        ground="server",
        why=why,
        prepared=prepared,
        producer="the server's",
        trials=flags.trials,
        settings=settings,
        command=command,
        make=ServerGround,
        diagnose=_not_called,
        expect=expect,
        lines=tuple(first_lines_of_server(chosen, why, device, no_device, kernel, windows, load, facts, settings, attach=attach)),
        record=_recorder(chosen, command, device, kernel, load, windows),
        make_in=lambda folder: ServerGround(setup, folder.absolute()),
    )


def _not_called(*_arguments: Any, **_more: Any) -> Any:
    raise AssertionError("a server ground judges itself")


def _recorder(
    server: ServerChoice, command: tuple[str, ...], device: DeviceDescription | None, kernel: ChosenKernel | Unread, load: LoadPlan,
    windows: DrainWindows,
) -> Callable[[str], RunRecord]:  # fmt: skip
    """Makes the run's record from its start time."""
    from .machine import run_versions

    environment: dict[str, Any] = {"load_plan_sha256": load.sha256}
    if device is not None:
        environment |= {"device": device.name, "sm": device.sm, "sm_count": device.num_sms, "described_by": device.source}
    install = server.install
    if install is not None:
        environment |= {"server_python": install.python, "server_vllm": install.version or "not known"}
        environment |= {"server_torch": install.torch} if install.torch else {}
    if server.shown:
        environment["engine_flags"] = shlex.join(server.shown)

    def record(started: str) -> RunRecord:
        return RunRecord(
            scenario="drain",
            ground="server",
            command=command,
            started=started,
            seed=server.plan.seed,
            versions=run_versions(),
            environment=environment,
            plan=server.plan.document(),
            kernel=None
            if isinstance(kernel, Unread)
            else KernelRecord(
                origin=kernel.image.origin,
                function=kernel.image.function,
                sha256=kernel.image.cubin_sha256,
                sm=kernel.image.sm,
                guarded=kernel.guarded,
                label=kernel.image.label,
            ),
            launches={str(rows): {"lines": launch.lines(), "grid": launch.grid} for rows, launch in windows.launches.items()},
        )

    return record
