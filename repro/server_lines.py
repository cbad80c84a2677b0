"""What is said before a server is started or drained: what will run where, what is changed, what a hang will be read with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..forensics.device_state import Unread
from ..kernels.plan import DeviceDescription
from ..kernels.release_profiles import release_profile
from ..scenarios.drain_steps import schedule_line
from .kernel_choice import ChosenKernel
from .narrate import expectation, kernel_line
from .run import RunSettings
from .serving.drain_windows import DrainWindows
from .serving.load_plan import LoadPlan
from .serving.recipe import DUMMY
from .serving.server_diagnosis import ServerFacts

if TYPE_CHECKING:
    pass

from .server_choice import ServerChoice

__all__ = ["first_lines_of_server"]


def _reach(release: str | None, device: DeviceDescription | None, model: str | None) -> list[str]:
    """What is known of this combination: which was seen to wedge, which never can, which nobody tried."""
    if release is None:
        return []
    profile = release_profile(release)
    if profile.guarded or profile.clamped:
        return [f"vLLM {release} has the fixes of #51538 (from 0.28.0): no hang is expected, whatever the plan"]
    if model == DUMMY and device is not None and device.sm == 90 and "0.20.2" <= release <= "0.23.0":
        seen = "seen to wedge on an H200" if release == "0.23.0" else "the same code as 0.23.0, which was seen to wedge on an H200"
        return [f"the dummy model on sm_90 with vLLM {release}: {seen}"]
    if model == DUMMY:
        return ["the dummy model was seen to wedge with vLLM 0.23.0 on sm_90; this combination was not tried"]
    return []


def first_lines_of_server(
    server: ServerChoice, why: str, device: DeviceDescription | None, no_device: str, kernel: ChosenKernel | Unread,
    windows: DrainWindows, load: LoadPlan, facts: ServerFacts, settings: RunSettings, *, attach: bool,
) -> list[str]:  # fmt: skip
    """The lines before anything starts."""
    card = f"{device.name} ({device.arch}, {device.num_sms} SMs)" if device is not None else f"card not known: {no_device}"
    lines = [f"run drain --on server ({why}): {server.where}; {card}"]
    if isinstance(kernel, Unread):
        lines.append(f"kernel not known: {kernel.why}")
    else:
        lines.append(kernel_line(kernel.image, kernel.guarded))
    plan = server.plan
    lines += [*plan.lines(), *load.lines(), f"live requests on the way: {schedule_line(windows.steps)}"]
    if windows.counts:
        lines.append(
            f"an unfixed server can wedge at {', '.join(map(str, windows.counts))} live requests; {_expected(windows, facts)}"
        )
    else:
        lines += expectation(windows.steps, (), guarded=facts.guarded, clamped=False, why_no_window=windows.why_not)
    lines += _reach(facts.release, device, server.options.model if server.options is not None else None)
    options = server.options
    if options is None:
        lines.append("the server is not ours: nothing of it is changed, and it is left as found")
    elif options.bare:
        lines.append("--bare: nothing is changed for evidence; no GPU core dump, no recorder, and no debugger under yama scope 1")
    else:
        lines.append(
            "prepared for evidence (each change is in run.json; --bare changes nothing): agent with flight recorder, dump "
            "variables, faulthandler, ptrace permission, engine deadlines"
        )
    if options is not None and options.guard:
        lines.append("--guard: the producer's clamp at run time")
    if options is not None and options.rescue:
        lines.append("--rescue: the agent releases the known wait from inside")
    if attach:
        disturb = (
            "cuda-gdb is attached to each worker, after which the driver makes no GPU core dump (--no-attach --dump takes one)"
        )
    elif settings.allow_dump:
        disturb = "a GPU core dump is taken, which ends the worker; no debugger is attached"
    else:
        disturb = "only what disturbs nothing is read (--attach allows a debugger)"
    lines.append(f"on a hang: {disturb}")
    if options is not None and not options.bare and not settings.allow_dump and not attach:
        lines.append("a GPU core dump ends the worker and is not taken without consent: --dump or --yes")
    return [*lines, *windows.notes, *server.notes]


def _expected(windows: DrainWindows, facts: ServerFacts) -> str:
    if facts.plan is not None and facts.plan.mtp == 0:
        return "without MTP no length is negative: clean is expected"
    if facts.guard or facts.clamped or facts.guarded:
        return "clean is expected"
    if facts.release is None:
        return "whether this one is unfixed is not known"
    step = windows.step_of(windows.counts[0])
    return f"a hang is expected ({step.rows} rows padded to {step.graph_rows})" if step is not None else "a hang is expected"
