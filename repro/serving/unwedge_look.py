"""What ``unwedge`` must know before it plans: how the server stands, which build runs, what each rank's agent answers. Reads only
(asking an agent writes one file into its folder)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...clock import SYSTEM, Clock
from ...errors import ReproError, UsageError
from ...forensics.collect.process_table import boot_id, start_ticks
from ...forensics.device_state import Unread
from ...forensics.evidence.opening import at_once
from ..agent_ask import RowStates, ask_row_states
from ..agent_show import AgentRank, read_agents
from ..runread import read_timeline
from .engine_flags import facts_of, parse_flags
from .live_build import live_build, server_arguments
from .records import Rank, ServerTarget
from .standing import Standing
from .unwedge_plan import RankFacts, RowStateLaunch, UnwedgePlan, plan_unwedge, startup_seconds
from .why_look import Look, look

__all__ = ["UnwedgeLook", "api_pid_of_run", "look_and_plan"]

_HEAD = 1 << 20
_MAX_CONFIG = 1 << 20
#: Indexer layers by the configuration's own words: sparse attention in every layer, unless it says which.
_INDEXER_KEY = "index_topk"


@dataclass(frozen=True, slots=True)
class UnwedgeLook:
    """``target``, what was seen of it, its ranks' facts, the plan, and what could not be read. ``agents``: pid -> agent's name."""

    target: ServerTarget
    seen: Look
    facts: tuple[RankFacts, ...]
    plan: UnwedgePlan
    agents: dict[int, str]
    tokens: float | None
    unread: tuple[Unread, ...]


def api_pid_of_run(folder: Path, *, proc: Path = Path("/proc")) -> int:
    """The pid of the server that a run started or found, from its timeline (``server`` lines).

    UsageError: none is named there, or its process has ended. A pid alone names nothing: it is given to others later, and in a run
    of another machine it is another machine's. So the line's start time and boot must be those of the process that lives here.
    """
    found: dict[str, Any] | None = None
    try:
        for line in read_timeline(folder):
            if isinstance(line, dict) and line.get("kind") == "server":
                pid = line.get("pid")
                if isinstance(pid, int) and not isinstance(pid, bool) and 0 < pid < 1 << 31:
                    found = line
    except (OSError, ReproError) as error:
        raise UsageError(f"{folder}: no run directory whose timeline can be read: {error}") from None
    if found is None:
        raise UsageError(f"{folder} names no server process", help_text="Name the server itself: dsv4-repro unwedge PID")
    pid = int(found["pid"])
    ticks = start_ticks(pid, proc)
    named = (found.get("start_ticks"), found.get("boot"))
    if ticks is None or None in named or named != (ticks, boot_id(proc)):
        if ticks is None:
            why = "no such process is here any more"
        elif None in named:
            why = "the run does not say when it started, so a process of that number may be another one"
        else:
            why = "the process of that number here is another one"
        raise UsageError(
            f"{folder} names the server process {pid}: {why}", help_text="Name the server itself: dsv4-repro unwedge PID"
        )
    return pid


def _max_num_seqs(words: Sequence[str]) -> int | None:
    start = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    try:
        return facts_of(parse_flags(words[start:])).max_num_seqs
    except ReproError:
        return None


def _layers(target: ServerTarget, words: Sequence[str], proc: Path) -> int | None:
    """Indexer layers by the model's ``config.json``, where the model is a folder that can be read."""
    for word in words:
        for root in (proc / str(target.api_pid) / "root", Path("/")):
            path = root / word.lstrip("/") / "config.json" if word.startswith("/") else None
            if path is None or not os.path.isfile(path):
                continue
            try:
                with open(path, "rb", opener=at_once) as stream:
                    config = json.loads(stream.read(_MAX_CONFIG) or b"")
            except (OSError, ValueError, RecursionError):
                continue
            layers = config.get("num_hidden_layers") if isinstance(config, dict) else None
            if isinstance(layers, int) and 0 < layers < 1000 and isinstance(config.get(_INDEXER_KEY), int):
                return layers
    return None


def _restart(target: ServerTarget) -> tuple[float | None, str]:
    if target.log_path is None:
        return None, "its log is not known"
    try:
        with open(target.log_path, "rb", opener=at_once) as stream:
            taken = startup_seconds((stream.read(_HEAD) or b"").decode("utf-8", "replace"))
    except OSError as error:
        return None, f"its log cannot be read: {error.strerror or error}"
    return taken, "" if taken is not None else "the beginning of its log does not say when it started to serve"


def _launches(states: RowStates) -> tuple[RowStateLaunch, ...]:
    return tuple(
        RowStateLaunch(tuple(one.arrival_counters), tuple(one.lengths), one.rows, one.max_seq_len) for one in states.launches
    )


def _guard_needed(agent: AgentRank) -> bool | None:
    features = agent.status.get("features") if isinstance(agent.status, dict) else None
    guard = features.get("guard") if isinstance(features, dict) else None
    if not isinstance(guard, dict) or guard.get("found") is not True:
        return None
    return "does nothing" not in str(guard.get("why", ""))


def _of_agents(target: ServerTarget, unread: list[Unread]) -> dict[int, AgentRank]:
    if target.agent_folder is None:
        return {}
    try:
        return {one.pid: one for one in read_agents(target.agent_folder).ranks if one.alive is not False and one.ring}
    except ReproError as error:
        unread.append(Unread("the agents", str(error), error.help_text))
        return {}


def _facts(rank: Rank, folder: Path | None, agent: AgentRank | None, words: Sequence[str], proc: Path, clock: Clock) -> RankFacts:
    build = live_build(rank.pid, words, proc=proc)
    facts = RankFacts(rank, releases=build.releases)
    if agent is None or folder is None:
        why = "no agent's files were found" if folder is None else "this process has no agent in it"
        return replace(facts, agent_why=why, row_states_why=f"its row states were not read: {why}")
    version = agent.status.get("vllm") if isinstance(agent.status, dict) else None
    facts = replace(
        facts, agent=True, version=version if isinstance(version, str) and version else None, guard_needed=_guard_needed(agent)
    )
    try:
        return replace(facts, row_states=_launches(ask_row_states(folder, agent.name, timeout=3.0, clock=clock)))
    except ReproError as error:
        return replace(facts, row_states_why=f"its agent: {error}")


def _shown(stand: Standing) -> str:
    """What shows that it is hung, the length of the stand-still first: two seconds alone are none."""
    still = () if stand.still_s is None else (f"nothing has moved for at least {stand.still_s:.0f} s ({stand.still_known})",)
    return "; ".join((*still, *stand.reasons[:2], *stand.device_signals[:2]))


def look_and_plan(
    target: ServerTarget,
    *,
    via: str,
    layers: int | None = None,
    clock: Clock = SYSTEM,
    proc: Path = Path("/proc"),
    looks: Callable[..., Look] = look,
) -> UnwedgeLook:
    """Look for some five seconds, ask the agents, plan. Never raises for what cannot be read."""
    seen = looks(target, clock=clock)
    unread = list(seen.unread)
    words = server_arguments(target, proc)
    agents = _of_agents(target, unread)
    facts = tuple(_facts(rank, target.agent_folder, agents.get(rank.pid), words, proc, clock) for rank in target.ranks)
    stand = seen.standing
    hung = _shown(stand) if stand.state == "hung" else ""
    healthy = {
        "healthy": "; ".join(stand.reasons[:3]) or "its counters move", "idle": "no request runs or waits",
        "starting": "it is still starting", "ended": "it has ended",
    }.get(stand.state, "")  # fmt: skip
    padded = seen.build.live_counts if seen.build is not None else None
    restart_s, restart_why = _restart(target)
    plan = plan_unwedge(
        facts,
        hung=hung,
        healthy=healthy,
        live=stand.live_requests,
        padded=padded,
        max_num_seqs=_max_num_seqs(words),
        layers=layers if layers is not None else _layers(target, words, proc),
        via=via,
        restart_s=restart_s,
        restart_why=restart_why,
    )
    tokens = next(
        (
            snapshot.engine.generation_tokens
            for snapshot in reversed(seen.snapshots)
            if snapshot.engine is not None and snapshot.engine.generation_tokens is not None
        ),
        None,
    )
    names = {pid: agent.name for pid, agent in agents.items()}
    return UnwedgeLook(target, seen, facts, plan, names, tokens, tuple(unread))
