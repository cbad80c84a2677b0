"""Who is who in a vLLM server's process tree: API server, engine cores, workers and their rank numbers. Pure.

Facts used (vLLM 0.20 to 0.33, ``utils/system_utils.py``, ``v1/engine/core.py``, ``v1/executor/multiproc_executor.py``): with
setproctitle installed a process is named ``VLLM::APIServer_0``, ``VLLM::EngineCore``, ``VLLM::Worker_PP0_TP1_EP1`` …, the prefix
being a setting; without it a spawned child has multiprocessing's command line and a forked one its parent's. Log lines carry
``(Worker_TP1 pid=816)``. Workers of Ray are ``ray::RayWorkerWrapper…`` and no descendants. Only the first worker of the last
pipeline stage replies to the engine (``_get_output_rank``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ...forensics.collect.process_table import ProcessEntry, ProcessTable

__all__ = [
    "Place",
    "Role",
    "is_ray_worker",
    "is_server",
    "option",
    "place_of_title",
    "places_in_log",
    "roles_of",
    "server_roots",
    "world_rank",
]

Role = Literal["api", "engine", "worker", "other"]

_TITLE = re.compile(r"^[\w.-]{1,32}::(APIServer|EngineCore?|Worker|DPCoordinator|VllmWorker)((?:[_-]\w+)*)")
_PART = re.compile(r"(DP|PP|PCP|TP|DCP|EP)(\d{1,5})")
_RAY = re.compile(r"^ray::(?:IDLE_)?Ray(?:WorkerWrapper|WorkerProc|Worker)\b")
_SPAWNED = re.compile(r"multiprocessing\.spawn import spawn_main|--multiprocessing-fork")
_LOG_WORKER = re.compile(r"\((?:Vllm)?Worker((?:_(?:DP|PP|PCP|TP|DCP|EP)\d{1,5})*) pid=(\d{1,9})\)")
_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place in the parallel groups; None where the title does not say (a group of one is not named)."""

    dp: int | None = None
    pp: int | None = None
    tp: int | None = None


def _place(text: str) -> Place:
    parts = {name: int(number) for name, number in _PART.findall(text)}
    return Place(parts.get("DP"), parts.get("PP"), parts.get("TP"))


def place_of_title(title: str) -> Place | None:
    """The place that a worker's title states; None if it is no worker's title."""
    match = _TITLE.match(title)
    if match is None or match[1] not in ("Worker", "VllmWorker"):
        return None
    return _place(match[2])


def places_in_log(text: str) -> dict[int, Place]:
    """pid (as the worker sees it) to place, from the prefixes of log lines; a later line wins (pids are reused over restarts)."""
    return {int(match[2]): _place(match[1]) for match in _LOG_WORKER.finditer(text)}


def world_rank(place: Place, tp_size: int) -> int | None:
    """The rank among all workers of one engine: pipeline stage by stage."""
    if place.tp is None and place.pp is None:
        return None
    return (place.pp or 0) * max(tp_size, 1) + (place.tp or 0)


def is_server(entry: ProcessEntry) -> bool:
    """A command line that serves: ``vllm serve``, or one of vLLM's server modules; or the title of an API server."""
    match = _TITLE.match(entry.title)
    if match is not None:
        return match[1] == "APIServer"
    for index, word in enumerate(entry.argv):
        if word in _MODULES:
            return word.endswith("api_server") or "serve" in entry.argv[index + 1 : index + 3]
        if word.rpartition("/")[2] == "vllm" and "serve" in entry.argv[index + 1 : index + 2]:
            return True
    return False


def is_ray_worker(entry: ProcessEntry) -> bool:
    """An actor of Ray's executor; not a descendant of the server."""
    return _RAY.match(entry.title) is not None


def _wraps(entry: ProcessEntry) -> bool:
    """A program that only starts the server (numactl, uv run, timeout …) and stays its parent."""
    name = (entry.argv[0] if entry.argv else entry.comm).rpartition("/")[2]
    return not name.startswith(("python", "pypy", "vllm")) and _TITLE.match(entry.title) is None


def server_roots(table: ProcessTable) -> list[int]:
    """The outermost process of each server, by pid; programs that only started it are stepped over."""
    serving = {pid for pid, entry in table.entries.items() if is_server(entry) and not _spawned(entry)}
    inner = {pid for pid in serving if not _wraps(table.entries[pid])} or serving
    return sorted(pid for pid in inner if not any(other in inner for other in table.ancestors(pid)))


def _spawned(entry: ProcessEntry) -> bool:
    return _SPAWNED.search(entry.title) is not None


def roles_of(table: ProcessTable, root: int) -> dict[int, tuple[Role, str]]:
    """Role of every process below ``root``, and how it was recognised. Titles win; else generations count from the root: the
    children that multiprocessing made are engines, theirs are workers."""
    found: dict[int, tuple[Role, str]] = {}
    for pid in table.below(root):
        entry = table.entries.get(pid)
        if entry is None:
            continue
        titled = _titled(entry)
        if titled is not None and titled in ("engine", "worker") and found.get(entry.parent, ("other", ""))[0] == titled:
            # A fork keeps the title: what an engine or worker started for itself (to compile) is none of its own.
            found[pid] = ("other", f"child of the {titled} with its title")
        elif titled is not None:
            found[pid] = (titled, "process title")
        elif pid == root:
            found[pid] = ("api", "command line" if is_server(entry) else "named")
        else:
            found[pid] = _by_generation(table, entry, found)
    return found


def _titled(entry: ProcessEntry) -> Role | None:
    match = _TITLE.match(entry.title) or _TITLE.match(entry.comm)
    if match is None:
        return "worker" if is_ray_worker(entry) else None
    word = match[1]
    return "api" if word == "APIServer" else "engine" if word.startswith("EngineCor") else "worker" if "Worker" in word else "other"


def _by_generation(table: ProcessTable, entry: ProcessEntry, found: Mapping[int, tuple[Role, str]]) -> tuple[Role, str]:
    parent = table.entries.get(entry.parent)
    forked = parent is not None and entry.argv == parent.argv and bool(entry.argv)
    if "resource_tracker" in entry.title or "forkserver" in entry.title or not (_spawned(entry) or forked):
        return "other", "neither titled nor a child of multiprocessing"
    above = found.get(entry.parent, ("other", ""))[0]
    how = "child of multiprocessing, by generation" if _spawned(entry) else "forked child, by generation"
    if above == "api":
        return "engine", how
    return ("worker", how) if above == "engine" else ("other", how)


def option(argv: Iterable[str], *names: str) -> str | None:
    """The value of a command-line option, ``--name value`` or ``--name=value``; the last one wins, as in argparse."""
    words, found = list(argv), None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else words[index + 1] if index + 1 < len(words) else found
    return found
