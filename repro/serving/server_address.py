"""Where a server listens, by its sockets and its command line; and who listens on a port. Needs no request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...forensics.collect.process_table import listening, same_namespace, socket_holders
from ...forensics.device_state import Unread
from .rank_numbers import Look
from .roles import option

__all__ = ["base_url_of", "holder_of_port", "served_name"]


def holder_of_port(look: Look, port: int, roots: Sequence[int]) -> tuple[int | None, tuple[Unread, ...]]:
    """Who listens on a port: in our network namespace, else in that of a server (a container with a published port)."""
    inodes = [inode for inode, number in listening(root=look.root).items() if number == port]
    candidates = [pid for one in roots for pid in look.table.below(one)]
    rest = sorted(set(look.table.entries) - set(candidates), reverse=True)
    if inodes:
        held, unread = socket_holders(inodes, [*candidates, *rest], look.root, deadline=look.sockets)
        if held:
            return min(held), ()
        why = f"something listens on port {port}; the open files of {len(unread)} processes may not be read"
        return None, (Unread(f"who listens on port {port}", why, f"sudo ss -ltnp 'sport = :{port}'"),)
    for root in roots:
        if same_namespace(root, "net", look.root) is False and port in listening(root, look.root).values():
            return root, ()
    return None, ()


def served_name(argv: Sequence[str]) -> str | None:
    """The model of ``vllm serve MODEL``; None: not said by place."""
    if "serve" not in argv:
        return None
    word = next(iter(argv[argv.index("serve") + 1 :]), "-")
    return None if word.startswith("-") else word


def base_url_of(look: Look, root: int, roles: Mapping[int, tuple[str, str]], unread: list[Unread]) -> str | None:
    """From the sockets that the API server listens on, else from its command line (vLLM's default port is 8000)."""
    argv = look.table.entries[root].argv
    given = option(argv, "--port")
    wanted = int(given[:6]) if given and given.isascii() and given.isdigit() else 8000
    host = option(argv, "--host") or "127.0.0.1"
    host = (
        "127.0.0.1" if host in ("0.0.0.0", "localhost", "") else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    )
    sockets = listening(root, look.root)
    pids = [pid for pid, (role, _) in roles.items() if role == "api"]
    held, closed = socket_holders(sockets, pids, look.root, deadline=look.sockets)
    ports = sorted({sockets[inode] for inodes in held.values() for inode in inodes})
    if wanted in ports or (not ports and (closed or given)):
        return f"http://{host}:{wanted}"
    if len(ports) == 1:
        return f"http://{host}:{ports[0]}"
    unread.append(Unread("the server's URL", f"it listens on {ports or 'no TCP port yet'}", "Name it: --url http://HOST:PORT"))
    return None
