"""What of a server is closed to this user, and the same command as one to whom it is open. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ...forensics.device_state import Unread

__all__ = ["as_root", "closed"]

_DENIED = ("permission denied", "operation not permitted", "another user's process")


def closed(unread: Iterable[Unread]) -> tuple[str, ...]:
    """Names of what was not read because it is another user's; empty where nothing was kept from us for that."""
    return tuple(item.what for item in unread if any(word in item.why.lower() for word in _DENIED))


def as_root(command: str) -> str:
    """The command for a shell, as root, whose path may lack where we are installed."""
    name, _, rest = command.partition(" ")
    return f'sudo "$(command -v {name})" {rest}'
