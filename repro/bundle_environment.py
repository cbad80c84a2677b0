"""``environment.json`` of a bundle: packages, GPUs, driver, topology, container limits, and every deadline in force.

What the run wrote down comes first and is marked so. What is read now, when the bundle is made, may be of another machine or of a
machine that changed since, and is marked so. A deadline whose value nobody recorded is given with its default and the word
"default": which of them kills first is what a reader wants to know.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..clock import SYSTEM, Clock
from ..errors import ReproError
from .machine import Machine, probe_machine

__all__ = ["DEADLINES", "ENVIRONMENT_SCHEMA", "Deadline", "deadlines", "environment_document"]

ENVIRONMENT_SCHEMA = "dsv4-repro/environment/1"
_TOPOLOGY_S = 10.0
_MOST_TEXT = 20_000


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time-out that can end or hide a hang. ``variable``: the environment variable or argument; ``default``: as of the releases
    named in ``source``; ``effect``: what happens when it passes."""

    variable: str
    default: str
    effect: str
    source: str


#: Read in the sources named; the order is roughly that in which they pass.
DEADLINES: tuple[Deadline, ...] = (
    Deadline("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "5 s", "workers are killed at shutdown", "vLLM 0.27.1 envs.py"),
    Deadline("VLLM_RPC_TIMEOUT", "10000 ms", "client calls fail (not in every release)", "vLLM 0.20.0 envs.py; gone by 0.25.0"),
    Deadline("VLLM_LOG_STATS_INTERVAL", "10 s", "the throughput line is printed", "vLLM 0.27.1 envs.py"),
    Deadline(
        "VLLM_RINGBUFFER_WARNING_INTERVAL", "60 s", "the broadcast-block line is printed; nothing ends", "vLLM 0.27.1 envs.py"
    ),
    Deadline("VLLM_ENGINE_ITERATION_TIMEOUT_S", "60 s", "nothing: no code of V1 reads it", "vLLM 0.27.1; gone in 0.33.0"),
    Deadline("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300 s", "the engine gives the step up and ends", "vLLM 0.20.0 to 0.33.0"),
    Deadline("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "480 s", "the NCCL monitor thread ends the process", "torch ProcessGroupNCCL"),
    Deadline("VLLM_ENGINE_READY_TIMEOUT_S", "600 s", "start-up is given up", "vLLM 0.27.1 envs.py"),
    Deadline("timeout of init_process_group", "600 s", "the NCCL watchdog ends the process", "torch distributed, NCCL back end"),
)


def _recorded_variables(texts: Iterable[str]) -> dict[str, str]:
    """Values of the variables above in texts of the run (an environment that was captured, a command)."""
    wanted = [item.variable for item in DEADLINES if " " not in item.variable]
    pattern = re.compile(r"(?<![A-Za-z0-9_])(" + "|".join(wanted) + r")[=:\"' ]{1,4}(\d[\d.]{0,12})")
    found: dict[str, str] = {}
    for text in texts:
        for match in pattern.finditer(text):
            found.setdefault(match.group(1), match.group(2))
    return found


def deadlines(run: Mapping[str, Any], texts: Iterable[str] = ()) -> list[dict[str, str]]:
    """All deadlines with their value and how it is known: read in the run's evidence, or the default."""
    read = _recorded_variables(texts)
    rows = [
        {
            "deadline": item.variable,
            "value": read.get(item.variable, item.default),
            "known": "read in the evidence" if item.variable in read else "default, not read",
            "effect": item.effect,
            "source": item.source,
        }
        for item in DEADLINES
    ]
    command = [str(word) for word in run.get("command") or ()]
    for flag, effect in (("--timeout", "this program's run ends"), ("--step-timeout", "this program calls a step overdue")):
        if flag in command and command.index(flag) + 1 < len(command):
            rows.append(
                {
                    "deadline": flag,
                    "value": command[command.index(flag) + 1] + " s",
                    "known": "the run's command",
                    "effect": effect,
                    "source": "dsv4-repro",
                }
            )
    return rows


def _limits() -> dict[str, str]:
    """The limits of this process that hangs and dumps run into."""
    found = {}
    for name in ("RLIMIT_CORE", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_NPROC"):
        soft, hard = resource.getrlimit(getattr(resource, name))
        words = ["unlimited" if value == resource.RLIM_INFINITY else str(value) for value in (soft, hard)]
        found[name] = "/".join(words)
    return found


def _container(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = {
        "container": machine.container or "none seen",
        "cpus": machine.cpus,
        "memory_bytes": machine.memory_bytes,
        "pids_limit": machine.pids_limit,
        "capabilities": sorted(machine.capabilities) if machine.capabilities is not None else None,
        "seccomp": machine.seccomp,
        "ptrace_scope": machine.ptrace_scope,
        "limits_soft_hard": _limits(),
    }
    for name, path in (("memory.max", "/sys/fs/cgroup/memory.max"), ("cpu.max", "/sys/fs/cgroup/cpu.max")):
        try:
            found[name] = Path(path).read_text("utf-8", "replace").strip()[:200]
        except OSError as error:
            found[name] = f"not readable: {error.strerror}"
    try:
        found["shm_bytes"] = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        found["shm_bytes"] = f"not readable: {error.strerror}"
    return found


def _topology(clock: Clock) -> str:
    """``nvidia-smi topo -m``, or why not."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "not read: nvidia-smi is not on PATH"
    from ..forensics.collect.tools import run_tool

    try:
        with tempfile.TemporaryDirectory(prefix="dsv4-repro-") as folder:
            done = run_tool([tool, "topo", "-m"], _TOPOLOGY_S, output=Path(folder, "topology"), clock=clock)
    except (ReproError, OSError) as error:
        return f"not read: {error}"
    if done.expired or done.status != 0:
        return f"not read: nvidia-smi topo -m ended with status {done.status}"
    return done.output[:_MOST_TEXT]


def environment_document(
    run: Mapping[str, Any],
    *,
    created: str,
    texts: Iterable[str] = (),
    clock: Clock = SYSTEM,
    machine: Callable[[], Machine] = lambda: probe_machine(version=lambda _argv: None),
) -> dict[str, Any]:
    """The document. ``texts``: of the run's evidence, to look for deadlines that were set. Touches no process and no network."""
    here = machine()
    return {
        "schema": ENVIRONMENT_SCHEMA,
        "recorded_with_the_run": {
            "environment": run.get("environment") or {},
            "versions": run.get("versions") or {},
            "kernel": run.get("kernel"),
            "plan": run.get("plan") or {},
            "started": run.get("started"),
            "ground": run.get("ground"),
        },
        "deadlines": deadlines(run, texts),
        "where_the_bundle_was_made": {
            "note": f"read on {created}, when the bundle was made: it need not be the machine, or the state, of the run",
            "system": here.system,
            "kernel": here.kernel,
            "python": here.python,
            "driver": here.driver,
            "cuda_driver": here.cuda_driver,
            "gpus": None
            if here.gpus is None
            else [{"index": gpu.index, "name": gpu.name, "sm": gpu.sm, "memory_bytes": gpu.memory_bytes} for gpu in here.gpus],
            "packages": {name: version for name, version in here.packages.items() if version},
            "topology": _topology(clock),
            "limits": _container(here),
            "variables": {
                name: os.environ[name]
                for name in sorted(os.environ)
                if re.match(r"(?:VLLM|NCCL|TORCH_NCCL|TORCH_FR|CUDA|FLASHINFER|DSV4)_", name)
                and not re.search(r"KEY|TOKEN|SECRET|PASS", name)
            },
            "unread": [{"what": item.what, "why": item.why} for item in here.unread],
        },
    }
