"""The environment of a server that is about to be watched: what is set so that evidence can be taken, each change with its reason.

Nothing here changes what the engine computes. ``bare`` sets nothing but the mark by which our own processes are found again, and
says what cannot be read then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...forensics.collect.core_trigger import DumpSettings
from ...forensics.device_state import Unread
from ..agent_install import install_into_folder
from .records import Change

__all__ = ["AGENT_PLUGIN", "EXECUTE_TIMEOUT_S", "PreparedEnvironment", "prepare_environment"]

#: Name of the agent's entry point in ``vllm.general_plugins``.
AGENT_PLUGIN = "dsv4_repro_agent"
#: vLLM ends itself when a step takes longer (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, 300 by default).
EXECUTE_TIMEOUT_S = 1800
_RINGBUFFER_S = 10
#: Variables that would change what is observed: launches that wait, exceptions that freeze the device.
_UNWANTED = {
    "CUDA_LAUNCH_BLOCKING": "launches would wait for the device",
    "CUDA_DEVICE_WAITS_ON_EXCEPTION": "a fault would freeze the device",
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "a fault would be dumped by itself",
}


@dataclass(frozen=True)
class PreparedEnvironment:
    """``env``: all of the server's environment. ``agent_folder``: where the agent writes, None without it."""

    env: Mapping[str, str]
    changes: tuple[Change, ...]
    agent_folder: Path | None = None
    dumps: DumpSettings | None = None
    unread: tuple[Unread, ...] = ()


class _Environment:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.env = dict(environ)
        self.changes: list[Change] = []

    def set(self, name: str, value: str, why: str) -> None:
        if self.env.get(name) != value:
            self.env[name] = value
            self.changes.append(Change(name, value, why))

    def drop(self, name: str, why: str) -> None:
        if self.env.pop(name, None) is not None:
            self.changes.append(Change(name, "(removed)", why))

    def at_least(self, name: str, value: int, why: str) -> None:
        try:
            enough = int(self.env.get(name, "")) >= value
        except ValueError:
            enough = False
        if not enough:
            self.set(name, str(value), why)


def prepare_environment(
    environ: Mapping[str, str],
    folder: Path,
    *,
    bare: bool = False,
    guard: bool = False,
    rescue: bool = False,
    dump: bool = True,
    model_env: Mapping[str, str] | None = None,
    agent_name: str = "agent",
) -> PreparedEnvironment:
    """``folder``: the run's, where the agent (in ``agent_name``) and the dump pipes get theirs. ``model_env``: what the model
    needs to start.

    Errors of ``install_into_folder`` (UsageError, OurFaultError) where the agent cannot be written.
    """
    made = _Environment(environ)
    for name, value in (model_env or {}).items():
        if name not in environ:
            made.set(name, value, "the dummy model needs it")
    # setproctitle writes over a process's environment in /proc, and with it over the mark that doctor looks for.
    made.set("SPT_NOENV", "1", "process titles leave /proc/PID/environ alone: the processes of a killed run are found again")
    agent_site = folder / "agent-package"
    if guard or rescue or not bare:
        _agent(made, folder / agent_name, agent_site, recorder=not bare, guard=guard, rescue=rescue)
    if bare:
        return PreparedEnvironment(
            made.env,
            tuple(made.changes),
            folder / agent_name if guard or rescue else None,
            None,
            _unread_when_bare(agent=guard or rescue),
        )
    made.set("PYTHONFAULTHANDLER", "1", "a fatal signal leaves the Python stacks in the log")
    made.at_least("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", EXECUTE_TIMEOUT_S, "the engine does not end itself while evidence is taken")
    if "VLLM_RINGBUFFER_WARNING_INTERVAL" not in environ:
        made.set("VLLM_RINGBUFFER_WARNING_INTERVAL", str(_RINGBUFFER_S), "the engine says sooner that it waits (60 s otherwise)")
    for name, why in _UNWANTED.items():
        made.drop(name, why)
    if environ.get("NCCL_RAS_ENABLE") == "0":
        made.drop("NCCL_RAS_ENABLE", "NCCL's own status stays on")
    dumps = None
    if dump:
        dumps = DumpSettings.in_folder(folder / "dumps")
        for name, value in dumps.environment().items():
            made.set(name, value, "a GPU core dump can be asked for (only with consent; it ends the process)")
    return PreparedEnvironment(made.env, tuple(made.changes), folder / agent_name, dumps, ())


def _agent(made: _Environment, folder: Path, site: Path, *, recorder: bool, guard: bool, rescue: bool) -> None:
    install_into_folder(site)
    path = [str(site), *(part for part in (made.env.get("PYTHONPATH", ""),) if part)]
    made.set("PYTHONPATH", os.pathsep.join(path), "vLLM finds the agent (a plugin of vllm.general_plugins)")
    made.set("DSV4_REPRO_AGENT_DIR", str(folder), "where the agent writes")
    if recorder:
        made.set("DSV4_REPRO_AGENT", "1", "flight recorder, and row states on request")
        made.set("DSV4_REPRO_PTRACE", "1", "the engine's processes allow py-spy and cuda-gdb of the same user (yama scope 1)")
    if guard:
        made.set("DSV4_REPRO_GUARD", "1", "asked for: the producer's clamp at run time; the defect is not expected to show")
    if rescue:
        made.set("DSV4_REPRO_RESCUE", "1", "asked for: a wait that is recognised is released from inside")
    plugins = made.env.get("VLLM_PLUGINS")
    if plugins is not None and AGENT_PLUGIN not in plugins.split(","):
        made.set(
            "VLLM_PLUGINS", ",".join(part for part in (plugins, AGENT_PLUGIN) if part), "the agent is among the plugins allowed"
        )


def _unread_when_bare(*, agent: bool) -> tuple[Unread, ...]:
    why, remedy = "--bare: the server was started unprepared", "Run without --bare"
    items = [
        ("GPU core dump", "the dump's variables have to be set before CUDA starts"),
        ("stacks and debugger under yama scope 1", "the engine's processes did not allow it"),
        ("fatal Python stacks", "faulthandler is off"),
    ]
    if not agent:
        items.insert(0, ("flight recorder, row states from inside", "the agent is not loaded"))
    return tuple(Unread(what, f"{why}; {more}", remedy) for what, more in items)
