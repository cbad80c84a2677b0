"""Which server a drain runs on, one to be started or one that runs, and what is known of its vLLM, kernel and card beforehand."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..errors import NoDeviceError, NoDriverError, ReproError, UnavailableError, UsageError
from ..forensics.device_state import Unread
from ..kernels.image import KernelImage
from ..kernels.plan import DeviceDescription, vector_width
from ..scenarios.drain import DrainPlan
from .device_probe import describe_gpu
from .kernel_choice import ChosenKernel
from .server_names import http_address
from .serving.completion_stream import shown_url
from .serving.engine_flags import EngineFacts, facts_of, parse_flags, plan_with
from .serving.installed_engine import EngineInstall, engine_install, engine_kernel
from .serving.recipe import DUMMY, ServeOptions, resolve

if TYPE_CHECKING:
    from .console import Screen
    from .options import RunFlags, ServerFlags

__all__ = ["ServerChoice", "card_of", "kernel_of", "no_image", "own_server", "running_server"]

_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1", "::")


@dataclass(frozen=True)
class ServerChoice:
    """What is known of the server before it runs. ``plan``: as it will run it."""

    plan: DrainPlan
    facts: EngineFacts
    install: EngineInstall | None
    where: str
    options: ServeOptions | None = None
    url: str | None = None
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def own_server(plan: DrainPlan, model: str, flags: RunFlags, server: ServerFlags) -> ServerChoice:
    """One that will be started. UnavailableError: there is no vLLM to start."""
    words = tuple(server.engine or ())
    merged, facts, plan = resolve(plan, model, tp=flags.tp, words=words, bare=server.bare)
    python = server.python or sys.executable
    install = engine_install(python, os.environ)
    if install.folder is None:
        why = "; ".join(item.why for item in install.unread)
        raise UnavailableError(
            f"--on server: there is no vLLM to start: {why}",
            help_text="Name the interpreter that has it: --python /path/to/venv/bin/python, or a server that runs: --url "
            "http://HOST:PORT. Without vLLM: dsv4-repro run drain --on cpu",
        )
    options = ServeOptions(
        folder=Path(), plan=plan, model=model, tp=flags.tp, port=server.port, python=server.python, bare=server.bare,
        guard=server.guard, rescue=server.rescue, flags=words,
    )  # fmt: skip
    where = f"vllm serve {'a tiny model with random weights' if model == DUMMY else model}, {install.words} of {python}"
    where += f", tensor parallel {facts.tp}"
    return ServerChoice(plan, facts, install, where, options=options, model=None, shown=merged.shown())


def running_server(plan: DrainPlan, server: ServerFlags) -> ServerChoice:
    """A server that runs: what its command line and interpreter say, where they can be seen."""
    from .serving.live_build import read_arguments
    from .serving.ranks import find_server

    url = http_address(server.url or "", "--url").rstrip("/")
    key = os.environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    target = find_server(url)
    notes = [f"not readable: {item.what}: {item.why}" + (f" → {item.remedy}" if item.remedy else "") for item in target.unread]
    facts, install = EngineFacts(mtp=plan.mtp), None
    if target.api_pid is not None:
        try:
            words = read_arguments(target.api_pid)
            place = words.index("serve") + 1 if "serve" in words else 0
            rest = words[place:]
            facts = facts_of(parse_flags(rest[1:] if rest and not rest[0].startswith("-") else rest))
            plan = plan_with(plan, facts)
            install = _install_of(target.api_pid, words)
        except (OSError, UsageError) as error:
            notes.append(f"the server's command line could not be read as flags: {error}")
    if install is None:
        notes.append(f"the server's flags are not known: MTP {plan.mtp}, the capture list and max_model_len are the plan's")
    return ServerChoice(
        plan, facts, install, f"the server at {shown_url(url)}", url=url, model=server.model, headers=headers, notes=tuple(notes)
    )


def _install_of(pid: int, words: tuple[str, ...]) -> EngineInstall | None:
    from ..forensics.collect.process_table import read_environment

    environment = read_environment(pid)
    if isinstance(environment, Unread) or not words or "python" not in Path(words[0]).name or not Path(words[0]).is_absolute():
        return None
    return engine_install(words[0], environment)


def card_of(server: ServerChoice) -> tuple[DeviceDescription | None, str]:
    """(the first card that CUDA shows here, why it is not known)."""
    if server.url is not None and (urlsplit(server.url).hostname or "") not in _LOCAL:
        return None, "the server is on another machine"
    try:
        return describe_gpu(0), ""
    except (NoDriverError, NoDeviceError) as error:
        return None, str(error)
    except ReproError as error:
        return None, f"the driver did not describe it: {error}"


def kernel_of(
    install: EngineInstall | None, device: DeviceDescription | None, plan: DrainPlan, screen: Screen
) -> ChosenKernel | Unread:
    """The kernel in the server's own vLLM for this card, or why it is not known."""
    if install is None or device is None:
        what = "its release and folder are not known" if install is None else "the card is not known"
        return Unread("the server's kernel", what)

    def fetching(what: str, done: int, total: int | None) -> None:
        screen.progress(f"reading {what}: {done / 1e6:.1f}" + (f" of {total / 1e6:.1f} MB" if total else " MB"))

    screen.progress("reading the server's kernel")
    return engine_kernel(install, device.sm, plan.top_k, vector_width(plan.width), progress=fetching)


def no_image(plan: DrainPlan) -> KernelImage:
    """Stands in a request where the server's kernel could not be had; a server ground launches nothing itself."""
    return KernelImage("not known", b"", "", 0, "", plan.top_k, vector_width(plan.width), 0, 0, 0, 0, 0)
