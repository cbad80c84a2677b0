"""Which processes a server is made of: its API server, engines, and the worker of each rank with its GPU. By ``/proc`` and NVML.

No signal, no ptrace, no request; at most two seconds, also on a machine with ten thousand processes. What may not be read is in
``ServerTarget.unread`` with the command that would read it, and a rank whose number is not known keeps None.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from ...clock import SYSTEM, Clock, Deadline
from ...errors import SeveralServersError, UnavailableError, UsageError
from ...forensics.collect.nvml import Nvml
from ...forensics.collect.process_table import (
    output_file,
    read_environment,
    read_process_table,
    same_namespace,
    start_ticks,
)
from ...forensics.device_state import Unread
from .gpu_holders import has_cuda, start_asking
from .rank_numbers import Look, agent_names, numbered
from .records import Rank, ServerTarget
from .roles import is_ray_worker, option, roles_of, server_roots
from .server_address import base_url_of, holder_of_port, served_name
from .shown_words import shown_title

__all__ = ["agent_names", "find_named", "find_server", "find_servers", "is_same", "output_rank", "refresh", "with_log"]

_PROC = Path("/proc")
_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1", "::", "")
#: Of the two seconds in all, so much goes to the process table, to sockets, and (beside the table) to NVML.
_TABLE_S, _SOCKETS_S, _NVML_S = 1.4, 0.3, 0.6
_AS_IT_IS = ": its tree was taken as it is"
_STAGE = re.compile(r"stage PP(\d{1,5})")
_TRUE = ("1", "true", "yes", "on")


def find_servers(*, root: Path = _PROC, clock: Clock = SYSTEM, nvml: Callable[[], Nvml] = Nvml) -> list[ServerTarget]:
    """Every server of vLLM that this machine's ``/proc`` shows, by the pid of its API server."""
    look = _look(root, clock, nvml)
    return [_target(look, pid, None) for pid in server_roots(look.table)]


def find_server(
    which: int | str | None = None, *, clock: Clock = SYSTEM, root: Path = _PROC, nvml: Callable[[], Nvml] = Nvml
) -> ServerTarget:
    """The server of a pid (any of its processes), of a URL, or the only one there is.

    Raises UsageError (neither a pid nor a URL), UnavailableError (no such process, no server here, or several and none named). A
    URL on another machine gives a target without processes, and says so.
    """
    look = _look(root, clock, nvml)
    if which is None:
        return _the_only_one(look)
    text = str(which)
    if text.isascii() and text.isdigit():
        return _by_pid(look, int(text[:18]))
    return _by_url(look, text)


def find_named(
    which: int | str | None = None, *, clock: Clock = SYSTEM, root: Path = _PROC, nvml: Callable[[], Nvml] = Nvml
) -> ServerTarget:
    """``find_server`` for what a person typed: UnavailableError also where the pid's process is no server for all that is seen of
    it (not recognised, no worker, no GPU, no port, no recorder), or has ended and only its entry is left."""
    target = find_server(which, clock=clock, root=root, nvml=nvml)
    doubt = next((item for item in target.unread if item.what == "the server"), None)
    if doubt is None or target.api_pid is None:
        return target
    here = "Which servers are here: dsv4-repro why"
    if start_ticks(target.api_pid, root) is None:
        raise UnavailableError(
            f"process {target.api_pid} has ended: a zombie is left of it, until its parent asks how it ended",
            help_text=f"What its log says: dsv4-repro autopsy LOG. {here}",
        )
    if not (target.ranks or target.engine_pids or target.base_url or target.agent_folder):
        named = doubt.why.removesuffix(_AS_IT_IS)
        raise UnavailableError(
            f"{named}, and nothing of one is seen below it: no worker, no GPU, no port, no recorder", help_text=here
        )
    return target


def _look(root: Path, clock: Clock, nvml: Callable[[], Nvml]) -> Look:
    asked = start_asking(nvml)  # beside the process table: a driver in trouble takes its time
    deadline = Deadline(_NVML_S, clock)
    table = read_process_table(root, deadline=Deadline(_TABLE_S, clock))
    return Look(table, asked(max(deadline.remaining(), 0.05)), root, Deadline(_SOCKETS_S, clock))


def _the_only_one(look: Look) -> ServerTarget:
    roots = server_roots(look.table)
    if len(roots) == 1:
        return _target(look, roots[0], None)
    if not roots:
        why = "; ".join(item.why for item in look.table.unread)
        raise UnavailableError(
            "no vLLM server is running here" + (f", as far as could be read: {why}" if why else ""),
            help_text="Name it: dsv4-repro why PID, or: dsv4-repro why http://HOST:PORT (in a container, run this inside it)",
        )
    listed = ", ".join(f"{pid} ({shown_title(look.table.entries[pid], 60)})" for pid in roots[:8])
    raise SeveralServersError(f"{len(roots)} servers are running: {listed}", roots)


def _by_pid(look: Look, pid: int) -> ServerTarget:
    if pid not in look.table.entries:
        raise UnavailableError(
            f"no process {pid} is shown by {look.root}",
            help_text="Is it a pid of another pid namespace? On the host a container's processes have other numbers: ps -ef",
        )
    roots = server_roots(look.table)
    chain = [pid, *look.table.ancestors(pid)]
    found = next((one for one in chain if one in roots), None)
    if found is None:
        # A program that only starts the server may be named too.
        below = [one for one in look.table.below(pid) if one in roots]
        if len(below) > 1:
            listed = ", ".join(map(str, below[:8]))
            raise SeveralServersError(f"{len(below)} servers run below process {pid}: {listed}", below)
        found = below[0] if below else None
    if found is not None:
        return _target(look, found, None)
    target = _target(look, pid, None)
    title = shown_title(look.table.entries[pid], 80)
    why = f"process {pid} ({title}) is not recognised as a vLLM server{_AS_IT_IS}"
    return replace(target, unread=(Unread("the server", why, "Name the pid of 'vllm serve' or its URL."), *target.unread))


def _by_url(look: Look, url: str) -> ServerTarget:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise UsageError(f"{url[:200]!r} is neither a pid nor a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"{url[:200]!r} is neither a pid nor a URL", help_text="For example: http://127.0.0.1:8000")
    base = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/').removesuffix('/v1')}"
    roots = server_roots(look.table)
    holder, unread = holder_of_port(look, port, roots)
    if holder is not None:
        chain = [holder, *look.table.ancestors(holder)]
        return _target(look, next((one for one in chain if one in roots), holder), base)
    if len(roots) == 1 and host in _LOCAL and unread:
        # The port is served from here and its holder may not be read: with one server there is no doubt whose it is.
        target = _target(look, roots[0], base)
        return replace(target, unread=(*unread, *target.unread))
    if not unread:
        unread = (
            Unread(
                f"the processes behind {base}", f"no process shown here listens on port {port}",
                "Run this on the server's machine, inside its container (docker exec, kubectl exec), or name the pid.",
            ),
        )  # fmt: skip
    return ServerTarget(base_url=base, unread=(*look.table.unread, *unread))


# ---------------------------------------------------------------------------------------------------------------------------------
# One server


def _target(look: Look, root: int, base_url: str | None) -> ServerTarget:
    table = look.table
    roles = roles_of(table, root)
    unread = [*table.unread, *look.holders.unread]
    engines = tuple(pid for pid, (role, _) in roles.items() if role == "engine")
    workers = {pid: how for pid, (role, how) in roles.items() if role == "worker"}
    workers |= _ray_workers(look, root, roles, unread)
    if not workers:
        workers = _in_process(look, root, engines, roles, unread)
    environment = _environment(look, [*workers, *engines, root], unread)
    folder = _agent_folder(look, environment, root, workers)
    log = output_file(root, look.root)
    if isinstance(log, Unread):
        unread.append(log)
    ranks = numbered(look, workers, log if isinstance(log, Path) else None, folder, unread)
    tree: dict[int, str] = {pid: role for pid, (role, _) in roles.items()}
    tree |= dict.fromkeys(workers, "worker")
    unread += _namespaces(look, root)
    entry = table.entries[root]
    model = option(entry.argv, "--served-model-name") or option(entry.argv, "--model") or served_name(entry.argv)
    return ServerTarget(
        base_url=base_url or base_url_of(look, root, roles, unread),
        model=model,
        api_pid=root,
        engine_pids=engines,
        ranks=ranks,
        tree=tree,
        log_path=log if isinstance(log, Path) else None,
        agent_folder=folder,
        unread=tuple(dict.fromkeys(unread)),
    )


def _ray_workers(look: Look, root: int, roles: Mapping[int, object], unread: list[Unread]) -> dict[int, str]:
    """Ray's actors belong to the server if there is only one here; other nodes are never seen. They are no descendants and a title
    is what a process calls itself: only those of the server's own user count, so that nobody else can pose as one."""
    owner = _uid(look, root)
    titled = [pid for pid, entry in look.table.entries.items() if is_ray_worker(entry) and pid not in roles]
    found = [pid for pid in titled if owner is not None and _uid(look, pid) == owner]
    if len(found) < len(titled):
        why = f"{len(titled) - len(found)} processes of another user call themselves so: not taken for this server's"
        unread.append(Unread("Ray workers of another user", why, "Name the worker's pid: dsv4-repro autopsy PID --attach"))
    if not found:
        return {}
    if len(server_roots(look.table)) > 1:
        why = f"{len(found)} Ray workers run here and several servers: whose they are is not known"
        unread.append(Unread("Ray workers", why, "Name the worker's pid: dsv4-repro autopsy PID --attach"))
        return {}
    unread.append(
        Unread("Ray workers on other nodes", "only this machine's processes can be seen", "Run this on every node: ray list nodes")
    )
    return dict.fromkeys(sorted(found), "Ray actor")


def _uid(look: Look, pid: int) -> int | None:
    try:
        return (look.root / str(pid)).stat().st_uid
    except OSError:
        return None


def _in_process(
    look: Look, root: int, engines: Sequence[int], roles: Mapping[int, tuple[str, str]], unread: list[Unread]
) -> dict[int, str]:
    """No worker process: the executor runs inside an engine (usual for one GPU), or the workers have not started yet."""
    candidates = list(engines) or [root]
    # A helper of it may hold a card for a while, too: it computes in an engine.
    held = [pid for pid in candidates if pid in look.holders.held] or [pid for pid in roles if pid in look.holders.held]
    if held:
        return dict.fromkeys(held, "holds a GPU (NVML)")
    cuda = has_cuda(candidates, look.root)
    found = [pid for pid, answer in cuda.items() if answer]
    if found:
        return dict.fromkeys(found, "CUDA is open in it, no worker process")
    remedy = "Look again once it has loaded; in a container run this inside it."
    unread.append(Unread("worker processes", "none is shown, and no process of the server is seen to use a GPU", remedy))
    return {}


def _environment(look: Look, pids: Sequence[int], unread: list[Unread]) -> dict[str, str]:
    """The environment of the first process that lets itself be read (all inherit the server's)."""
    first: Unread | None = None
    for pid in pids:
        found = read_environment(pid, look.root)
        if isinstance(found, dict):
            return found
        first = first or found
    if first is not None:
        unread.append(first)
    return {}


def _agent_folder(look: Look, environment: Mapping[str, str], root: int, workers: Mapping[int, str]) -> Path | None:
    """Where the agent of this server writes, if it has one; of another mount namespace through ``/proc/PID/root``.

    Where the environment does not ask for it (or may not be read), only a folder that holds a file of one of the workers counts:
    the default folder is shared by all servers of a user.
    """

    def setting(name: str) -> str:
        return environment.get(name) or environment.get(f"VLLM_{name}", "")

    named = setting("DSV4_REPRO_AGENT_DIR")
    asked = any(setting(f"DSV4_REPRO_{name}").strip().lower() in _TRUE for name in ("AGENT", "GUARD", "RESCUE"))
    if not named:
        owner = _uid(look, root)
        uid = owner if owner is not None else os.getuid()
        named = f"{environment.get('TMPDIR') or tempfile.gettempdir()}/dsv4-repro-agent-{uid}"
    known = [Rank(pid, None, look.table.entries[pid].start_ticks) for pid in workers]
    for candidate in (Path(named), look.root / str(root) / "root" / named.lstrip("/")):
        # os.path: a Path raises where another user's root may not be entered, or a name is too long for a file.
        if os.path.isdir(candidate) and (asked or agent_names(candidate, known, look.root)):
            return candidate
    return Path(named) if asked else None


def _namespaces(look: Look, root: int) -> list[Unread]:
    """What a container around the server keeps from us, with the command that gets inside."""
    found = []
    enter = f"nsenter -t {root} -m -p -n -- dsv4-repro … (or docker exec, kubectl exec)"
    if same_namespace(root, "mnt", look.root) is False:
        why = "the server lives in another mount namespace (a container): a debugger started here cannot map its libraries"
        found.append(Unread("debugger and files from outside", why, enter))
    if same_namespace(root, "net", look.root) is False:
        why = "the server has a network namespace of its own: its loopback (metrics, NCCL RAS) is not ours"
        found.append(Unread("the server's loopback", why, f"nsenter -t {root} -n -- curl -s 127.0.0.1:PORT/metrics"))
    if same_namespace(root, "mnt", look.root) is None:
        why = "another user's process: namespaces, environment, open files, stacks and memory are closed to us"
        found.append(Unread(f"process {root} from inside", why, "Run as the server's user or as root."))
    return found


# ---------------------------------------------------------------------------------------------------------------------------------
# Later looks


def is_same(rank: Rank, root: Path = _PROC) -> bool:
    """Whether the process of a rank still lives: same pid and same start. A reused pid is another process."""
    return start_ticks(rank.pid, root) == rank.start_ticks


def refresh(target: ServerTarget, *, clock: Clock = SYSTEM, root: Path = _PROC, nvml: Callable[[], Nvml] = Nvml) -> ServerTarget:
    """A target with its processes as they are now (workers start late); what its owner knew better stays.

    One that was found by its URL alone is looked for by that again.
    """
    if target.api_pid is None:
        if target.base_url is None:
            return target
        found = _by_url(_look(root, clock, nvml), target.base_url)
        return with_log(replace(found, model=target.model or found.model), target.log_path)
    if start_ticks(target.api_pid, root) is None:
        return target
    look = _look(root, clock, nvml)
    if target.api_pid not in look.table.entries:
        return target
    found = _target(look, target.api_pid, target.base_url)
    known = target.log_path or found.log_path
    unread = tuple(item for item in found.unread if not (known and item.what.startswith("log of")))
    return replace(
        found,
        model=target.model or found.model,
        log_path=known,
        agent_folder=target.agent_folder or found.agent_folder,
        owned=target.owned,
        changes=target.changes,
        unread=unread,
    )


def output_rank(target: ServerTarget) -> tuple[int | None, str]:
    """The rank that replies to the engine, and why: the first worker of the last pipeline stage."""
    known = [
        (int(stage[1]) if (stage := _STAGE.search(rank.how)) else 0, rank.rank) for rank in target.ranks if rank.rank is not None
    ]
    if not known:
        return None, "no rank number is known"
    last = max(stage for stage, _ in known)
    number = min(rank for stage, rank in known if stage == last)
    if last == 0 and number != 0:
        return None, "the first worker was not found"
    where = f"the first worker of the last pipeline stage (PP{last})" if last else "the first worker"
    return number, f"the engine takes each step's output from rank {number} alone, {where}"


def with_log(target: ServerTarget, log: Path | None) -> ServerTarget:
    """The target with the log that the user named, which may be away for a moment (rotation)."""
    if log is None:
        return target
    return replace(target, log_path=log, unread=tuple(item for item in target.unread if not item.what.startswith("log of")))
