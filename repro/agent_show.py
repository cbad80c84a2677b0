"""``agent show``: what the agents in a folder recorded and say about themselves, each rank armed or not and why."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import EvidenceError
from .agent_document import read_document
from .recorder import RecordedStep, RingContents, read_ring

__all__ = ["AgentDocument", "AgentRank", "agent_lines", "default_folder", "read_agents", "read_document"]

MAX_FILES = 4096
#: Pid and start in a file's name.
_KEY = re.compile(r"[0-9]+-[0-9]+")


class AgentRank(BaseModel):
    """One process with the agent. ``alive``: the process of this pid and start time is there; None: not known.

    ``last``: the last recorded step; ``unfinished``: steps launched and not seen to end. ``status``: the agent's own, or None.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    pid: int
    alive: bool | None
    rank: int | None = None
    ring: str | None = None
    steps: int = 0
    torn: int = 0
    last: dict[str, Any] | None = None
    unfinished: tuple[int, ...] = ()
    releases: int = 0
    status: dict[str, Any] | None = None
    unread: tuple[str, ...] = ()


class AgentDocument(BaseModel):
    """``dsv4-repro agent … --json``."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)

    schema_: Literal["dsv4-repro/agent/1"] = Field(alias="schema", default="dsv4-repro/agent/1")
    outcome: Literal["clean", "inconclusive"] = "clean"
    folder: str | None = None
    ranks: tuple[AgentRank, ...] = ()
    installed: dict[str, Any] | None = None
    row_states: dict[str, Any] | None = None


def default_folder() -> Path:
    """Where the agent writes if it is not told otherwise."""
    import tempfile

    return Path(os.environ.get("DSV4_REPRO_AGENT_DIR") or f"{tempfile.gettempdir()}/dsv4-repro-agent-{os.getuid()}")


def _alive(pid: int, start: int) -> bool | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        found = int(text.rpartition(")")[2].split()[19])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, IndexError):
        return None
    return found == start if start else None


def _step(step: RecordedStep) -> dict[str, Any]:
    return {name: getattr(step, name) for name in RecordedStep.__dataclass_fields__}


def read_agents(folder: Path) -> AgentDocument:
    """Every process whose files lie in ``folder``, by pid. Files that cannot be read are said at their rank.

    Raises EvidenceError: no such folder, or nothing of an agent in it.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())[:MAX_FILES]
    except OSError as error:
        raise EvidenceError(
            f"cannot be read: {error.strerror or error}",
            path=str(folder),
            help_text="Name the server's DSV4_REPRO_AGENT_DIR, or a pid of it: dsv4-repro agent show FOLDER|PID. "
            "There is none where no server was started with DSV4_REPRO_AGENT=1 (docs/agent.md).",
        ) from None
    keys = {name.split("-", 1)[1].rsplit(".", 1)[0] for name in names if name.startswith(("ring-", "status-"))}
    ranks = [_rank(folder, key, names) for key in keys if _KEY.fullmatch(key)]
    if not ranks:
        raise EvidenceError(
            "holds no agent's files", path=str(folder), help_text="Start the server with DSV4_REPRO_AGENT=1: docs/agent.md"
        )
    unread = any(rank.unread for rank in ranks)
    return AgentDocument(
        outcome="inconclusive" if unread else "clean", folder=str(folder), ranks=tuple(sorted(ranks, key=lambda rank: rank.pid))
    )


def _rank(folder: Path, key: str, names: list[str]) -> AgentRank:
    pid, start = (min(int(part), 1 << 62) for part in key.split("-"))
    unread: list[str] = []
    contents: RingContents | None = None
    status: dict[str, Any] | None = None
    try:
        contents = read_ring(folder / f"ring-{key}.bin") if f"ring-{key}.bin" in names else None
    except EvidenceError as error:
        unread.append(str(error))
    try:
        status = read_document(folder / f"status-{key}.json") if f"status-{key}.json" in names else None
    except EvidenceError as error:
        unread.append(str(error))
    common: dict[str, Any] = {"name": key, "pid": pid, "alive": _alive(pid, start), "status": status, "unread": tuple(unread)}
    if contents is None:
        return AgentRank(**common)
    return AgentRank(
        **common,
        rank=contents.header.rank,
        ring=contents.path,
        steps=contents.header.begun,
        torn=contents.torn,
        last=_step(contents.steps[-1]) if contents.steps else None,
        unfinished=tuple(step.number for step in contents.unfinished),
        releases=contents.header.releases,
    )


def agent_lines(document: AgentDocument) -> list[str]:
    """The document for a person."""
    lines = []
    for rank in document.ranks:
        life = {True: "running", False: "ended", None: "not known whether running"}[rank.alive]
        lines.append(f"pid {rank.pid} ({life}), rank {'?' if rank.rank is None else rank.rank}: {rank.steps} steps begun")
        if rank.last is not None:
            last = rank.last
            lines.append(
                f"  last step {last['number']}: {last['requests']} requests padded to {last['padded_requests']}, "
                f"{last['tokens']} tokens to {last['padded_tokens']}, graph {last['graph_mode']}, "
                f"padding slots {last['decode_zero']}, next_n {last['next_n']}"
            )
        if rank.unfinished:
            lines.append(f"  launched and not seen to end: steps {', '.join(map(str, rank.unfinished[:8]))}")
        if rank.torn:
            lines.append(f"  {rank.torn} slots are torn (half-written or damaged)")
        lines += [f"  could not read: {text}" for text in rank.unread]
        lines += [f"  {text}" for text in _said(rank.status)]
        if rank.releases:
            lines.append(f"  released by the rescue: {rank.releases}")
        counters = rank.status.get("counters") if rank.status is not None else None
        if isinstance(counters, dict) and isinstance(counters.get("averted_lengths"), int) and counters["averted_lengths"]:
            lines.append(f"  steps in which the guard made a length of -1 a 0: {counters['averted_lengths']}")
    return lines


def _said(status: dict[str, Any] | None) -> list[str]:
    if status is None:
        return ["no status file: the agent has not said what it found"]
    armed, features = status.get("armed"), status.get("features")
    lines = (
        [f"armed: {', '.join(sorted(str(name) for name, on in armed.items() if on)) or 'nothing'}"]
        if isinstance(armed, dict)
        else []
    )
    if isinstance(features, dict):
        for name, state in sorted(features.items(), key=lambda item: str(item[0]))[:40]:
            if isinstance(state, dict):
                lines.append(f"{'+' if state.get('found') is True else '-'} {name}: {str(state.get('why'))[:300]}")
    return lines
