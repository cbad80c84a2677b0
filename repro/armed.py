"""Is the agent armed in each process of a server, and if not, why: ``doctor --pid``. Reads /proc and the agent's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..clock import SYSTEM, Clock
from ..errors import EvidenceError
from ..forensics.collect.process_table import read_environment
from .agent_show import AgentRank, read_agents
from .doctor import Check
from .server_names import asked_by
from .serving.records import ServerTarget

__all__ = ["WorkerSettings", "armed_checks", "armed_of", "judge_worker"]

SWITCHES = ("AGENT", "GUARD", "RESCUE")
_TRUE = {"1", "true", "yes", "on"}
_PLUGIN = "dsv4_repro_agent"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One process and its environment; ``why``: why it could not be read (then ``environment`` is None)."""

    pid: int
    role: str
    rank: int | None
    environment: Mapping[str, str] | None
    why: str = ""


def _asked(environment: Mapping[str, str]) -> list[str]:
    """Switches that are on, under either name."""
    return [
        name.lower()
        for name in SWITCHES
        if (environment.get(f"DSV4_REPRO_{name}", environment.get(f"VLLM_DSV4_REPRO_{name}", "")).strip().lower() in _TRUE)
    ]


def judge_worker(worker: WorkerSettings, agent: AgentRank | None, server: Mapping[str, str] | None) -> Check:
    """``server``: the environment of the API or engine process, None if not read."""
    name = f"rank {worker.rank}" if worker.rank is not None else worker.role
    what = f"agent in {name} (pid {worker.pid})"
    identity = f"agent-{worker.pid}"

    def check(state: Any, found: str, remedy: str = "") -> Check:
        return Check(id=identity, what=what, state=state, found=found, remedy=remedy)

    if agent is not None and isinstance(agent.status, dict):
        return check(*_of_status(agent.status, agent.releases))
    if worker.environment is None:
        return check(
            "unknown", f"no status of an agent, and its environment cannot be read: {worker.why}", "Run as its user or root."
        )
    here = _asked(worker.environment)
    there = _asked(server) if server is not None else []
    if not here and there:
        names = " ".join(f"VLLM_DSV4_REPRO_{one.upper()}=1" for one in there)
        return check(
            "no",
            f"the server was asked for {', '.join(there)}; this worker started without it (Ray copies only some prefixes)",
            f"Set the same names with VLLM_ in front: {names}, and VLLM_DSV4_REPRO_AGENT_DIR",
        )
    if not here:
        return check("no", "not asked for", "Start the server with DSV4_REPRO_AGENT=1 (and _GUARD or _RESCUE): docs/agent.md")
    plugins = worker.environment.get("VLLM_PLUGINS")
    if plugins is not None and _PLUGIN not in [one.strip() for one in plugins.split(",")]:
        return check("no", f"asked for, but VLLM_PLUGINS={plugins[:80]} leaves it out", f"Add {_PLUGIN} to VLLM_PLUGINS")
    return check(
        "no",
        f"asked for ({', '.join(here)}), and no status was written: not installed where the server runs, or it has not started yet",
        "dsv4-repro agent install --python PYTHON-OF-THE-SERVER",
    )


def _of_status(status: Mapping[str, Any], releases: int) -> tuple[str, str, str]:
    armed = status.get("armed")
    on = sorted(str(name) for name, value in armed.items() if value is True) if isinstance(armed, dict) else []
    features = status.get("features")
    missing = [
        f"{name}: {str(state.get('why'))[:160]}"
        for name, state in sorted(features.items() if isinstance(features, dict) else (), key=lambda item: str(item[0]))
        if isinstance(state, dict) and state.get("found") is not True
    ]
    counters = status.get("counters")
    averted = counters.get("averted_lengths") if isinstance(counters, dict) else None
    text = f"armed: {', '.join(on) or 'nothing'}"
    text += f"; released: {releases}" if releases else ""
    text += f"; steps with a length of -1 that the guard made 0: {averted}" if isinstance(averted, int) and averted else ""
    if missing:
        text += "; not found: " + "; ".join(missing[:6])
    remedy = "" if on and not missing else "See all of it: dsv4-repro agent show; switches: docs/agent.md"
    return ("limited" if missing else "yes") if on else "no", text, remedy


def _settings(target: ServerTarget, proc: Path) -> tuple[list[WorkerSettings], Mapping[str, str] | None]:
    def read(pid: int, role: str, rank: int | None) -> WorkerSettings:
        found = read_environment(pid, proc)
        return (
            WorkerSettings(pid, role, rank, found, "")
            if isinstance(found, dict)
            else WorkerSettings(pid, role, rank, None, found.why)
        )

    upper = [read(pid, "server", None) for pid in (target.api_pid, *target.engine_pids) if pid is not None]
    workers = [read(rank.pid, "worker", rank.rank) for rank in target.ranks] or upper[-1:]
    return workers, next((one.environment for one in upper if one.environment is not None), None)


def armed_checks(target: ServerTarget, *, proc: Path = Path("/proc")) -> list[Check]:
    """One check a worker process (or the engine, where it computes itself)."""
    agents: dict[int, AgentRank] = {}
    if target.agent_folder is not None:
        try:
            agents = {one.pid: one for one in read_agents(target.agent_folder).ranks if one.alive is not False}
        except EvidenceError:
            agents = {}
    workers, server = _settings(target, proc)
    if not workers:
        return [Check(id="agent", what="agent in the server", state="unknown", found="no process of it was found")]
    return [judge_worker(one, agents.get(one.pid), server) for one in workers]


def armed_of(pid: int, *, clock: Clock = SYSTEM) -> Sequence[Check]:
    """The checks of the server that the process belongs to. UnavailableError: no such process."""
    from .serving.ranks import find_named

    with asked_by("doctor --pid"):
        target = find_named(pid, clock=clock)
    return armed_checks(target)
