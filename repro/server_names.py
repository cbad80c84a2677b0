"""What a person may call a server on the command line: one rule for every verb, and the hint that names the verb that was asked."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from ..errors import SeveralServersError, UsageError

__all__ = ["asked_by", "http_address", "server_name"]

_EXAMPLE = "http://127.0.0.1:8000"
#: A host (IPv6 in brackets) and a port, with or without a path. Without a port it is a word, and any typing error would be one.
_HOST_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s/:@?#\[\]]+):\d{1,5}(?:/\S*)?")


def http_address(text: str, flag: str = "") -> str:
    """``http(s)://HOST...`` as it is, ``HOST:PORT`` with its scheme; UsageError for every other word. ``flag``: what it was given
    with. User name and password are not repeated in the message."""
    if (address := _address(text)) is not None:
        return address
    said = f"{flag} {_shown(text)}".lstrip()
    raise UsageError(f"{said}: not an HTTP address", help_text=f"For example {f'{flag} {_EXAMPLE}'.lstrip()}")


def server_name(text: str) -> str:
    """A PID (decimal digits) as it is, else the address; UsageError for a file or folder, and for every other word."""
    if text.isascii() and text.isdigit():
        return text
    if os.path.exists(text):
        raise UsageError(
            f"{text[:200]}: a file or a folder, not a server: a PID or a URL", help_text=f"dsv4-repro autopsy {shlex.quote(text)}"
        )
    if (address := _address(text)) is not None:
        return address
    raise UsageError(f"{_shown(text)}: not an HTTP address, and not a PID", help_text=f"For example {_EXAMPLE}")


def _address(text: str) -> str | None:
    full = f"http://{text}" if _HOST_PORT.fullmatch(text) else text
    try:
        parts = urlsplit(full)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    # A blank or a line break would be dropped on the way: another address than the one that was read.
    return full if good and not any(one.isspace() or not one.isprintable() for one in full) else None


def _shown(text: str) -> str:
    return text.rpartition("@")[2][:120] or "an empty text"


@contextmanager
def asked_by(verb: str, more: str = "") -> Iterator[None]:
    """Where several servers fit, the help names one of them in words that can be pasted: ``dsv4-repro VERB PID``, then ``more``."""
    try:
        yield
    except SeveralServersError as error:
        if error.pids:
            error.help_text = f"Name one, for example: dsv4-repro {verb} {error.pids[0]}{more}"
        raise
