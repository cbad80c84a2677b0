"""Rank number and GPU of each worker, from whatever tells them: title, the agent's ring, log prefixes, environment, NVML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...clock import Deadline
from ...errors import EvidenceError
from ...forensics.collect.process_table import ProcessTable, inner_pid, read_environment
from ...forensics.device_state import Unread
from ...forensics.evidence.opening import at_once
from ..recorder import read_ring
from .gpu_holders import GpuHolders
from .records import Rank
from .roles import Place, place_of_title, places_in_log, world_rank

__all__ = ["Look", "agent_names", "numbered"]

_PROC = Path("/proc")
#: Of a log so many bytes of its beginning are searched for ``(Worker_TP1 pid=816)``.
_LOG_HEAD = 1 << 20


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the machine, shared by everything that is read from it. ``sockets``: until when open files are gone through."""

    table: ProcessTable
    holders: GpuHolders
    root: Path
    sockets: Deadline


def agent_names(folder: Path | None, ranks: Sequence[Rank], root: Path = _PROC) -> dict[int, str]:
    """pid of each rank to the name of its agent (``PID-START``, the pid as the worker itself sees it), where it left a file."""
    if folder is None:
        return {}
    try:
        keys = {name.split("-", 1)[1].rsplit(".", 1)[0] for name in os.listdir(folder) if name.startswith(("ring-", "status-"))}
    except OSError:
        return {}
    found: dict[int, str] = {}
    for rank in ranks:
        for pid in (rank.pid, inner_pid(rank.pid, root)):
            if f"{pid}-{rank.start_ticks}" in keys:
                found[rank.pid] = f"{pid}-{rank.start_ticks}"
    return found


def numbered(
    look: Look, workers: Mapping[int, str], log: Path | None, folder: Path | None, unread: list[Unread]
) -> tuple[Rank, ...]:
    """Every worker with its rank: by title, else by the agent's ring, the log's prefixes, the environment; one alone is rank 0."""
    table = look.table
    places: dict[int, tuple[Place, str]] = {}
    for pid in workers:
        place = place_of_title(table.entries[pid].title)
        if place is not None and (place.tp is not None or place.pp is not None):
            places[pid] = (place, "title")
    if len(places) < len(workers) and log is not None and len(workers) > 1:
        logged = places_in_log(_head(log))
        places |= {
            pid: (logged[inner_pid(pid, look.root)], "log")
            for pid in workers
            if pid not in places and inner_pid(pid, look.root) in logged
        }
    tp_size = 1 + max((place.tp or 0 for place, _ in places.values()), default=0)
    ranks = []
    for pid, how in workers.items():
        entry = table.entries[pid]
        bare = Rank(pid, None, entry.start_ticks, how=how)
        number, by = _rank_number(look, bare, places, folder, tp_size, alone=len(workers) == 1)
        stage = places[pid][0].pp if pid in places else None
        by = f"{by}, stage PP{stage}" if by and stage is not None else by
        ranks.append(replace(bare, rank=number, how=f"{how}, rank by {by}" if by else how))
    if any(rank.rank is None for rank in ranks):
        remedy = "pip install setproctitle in the server's environment, or start it with the agent: docs/agent.md"
        unread.append(Unread("rank numbers", "neither title, log, agent nor environment tells every worker's rank", remedy))
    numbers = [rank.rank for rank in ranks if rank.rank is not None]
    if len(set(numbers)) < len(numbers):
        unread.append(
            Unread("rank numbers", "several workers have the same rank (data parallel, or several engines): told apart by pid")
        )
    ordered = sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0, rank.pid))
    return tuple(_with_gpu(look, rank, ordered, unread) for rank in ordered)


def _rank_number(
    look: Look, rank: Rank, places: Mapping[int, tuple[Place, str]], folder: Path | None, tp_size: int, *, alone: bool
) -> tuple[int | None, str]:
    if rank.pid in places:
        place, by = places[rank.pid]
        return world_rank(place, tp_size), by
    name = agent_names(folder, [rank], look.root).get(rank.pid)
    if name is not None and folder is not None:
        try:
            number = read_ring(folder / f"ring-{name}.bin").header.rank
        except EvidenceError:
            number = -1
        if number >= 0:
            return number, "agent"
    environment = read_environment(rank.pid, look.root)
    given = environment.get("RANK", "") if isinstance(environment, dict) else ""
    if given.isascii() and given.isdigit() and len(given) < 7 and "ray" in rank.how.lower():
        return int(given), "environment"
    return (0, "being the only one") if alone else (None, "")


def _head(log: Path) -> str:
    try:
        with open(log, "rb", opener=at_once) as stream:
            return stream.read(_LOG_HEAD).decode("utf-8", "replace")
    except OSError:
        return ""


def _with_gpu(look: Look, rank: Rank, ranks: Sequence[Rank], unread: list[Unread]) -> Rank:
    held = look.holders.held.get(rank.pid)
    if held:
        own = next((gpu for gpu in held if len(held) > 1 and gpu.index == rank.rank and gpu.memory == held[0].memory), held[0])
        return replace(rank, gpu_uuid=own.uuid, gpu_index=own.index)
    if look.holders.unread:
        return rank
    if rank.rank is not None and look.holders.count == len(ranks):
        return replace(rank, gpu_index=rank.rank, how=f"{rank.how}, GPU by rank number (inferred)")
    why = "NVML lists no compute process of this pid: another pid namespace, or nothing on a GPU yet"
    unread.append(
        Unread(f"GPU of process {rank.pid}", why, "On the host: nvidia-smi --query-compute-apps=pid,gpu_uuid --format=csv")
    )
    return rank
