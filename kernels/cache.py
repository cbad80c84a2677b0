"""The user's cache: content-addressed entries that prove themselves, written atomically.

Root: ``$DSV4_REPRO_CACHE`` if set, else platformdirs' user cache. Layout: ``<root>/<kind>/<first two of key>/<key>``. An entry is
one header line with the payload's sha256, then the payload; an entry that does not match its own header (a torn write, a full
disk, a flipped bit) is removed and reported as absent, so the caller makes it again. A cache that cannot be written costs time,
never an answer: ``store`` says whether it did, and nothing here raises for a read-only home.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from .image import sha256_hex

__all__ = ["CACHE_ENV", "Cache", "cache_root", "content_key"]

CACHE_ENV = "DSV4_REPRO_CACHE"
_MAGIC = b"dsv4-repro-cache 1 "
#: Larger entries are not read back (no artefact kept here comes near; a hostile or mistaken file must not fill the memory).
MAX_ENTRY_BYTES = 256 << 20
_SAFE = re.compile(r"[A-Za-z0-9._-]{1,120}")


def cache_root() -> Path:
    """Where this user's cache is; it need not exist yet."""
    chosen = os.environ.get(CACHE_ENV)
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return Path(user_cache_path("dsv4-repro"))


def content_key(*parts: bytes | str) -> str:
    """sha256 over the parts, each preceded by its length, so that no two lists of parts share a key."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


@dataclass(frozen=True)
class Cache:
    """One kind of artefact (``cubin``, ``sass``) under one root."""

    kind: str
    root: Path = field(default_factory=cache_root)

    def path(self, key: str) -> Path:
        """Where ``key`` (letters, digits, dot, dash, underscore) is or would be kept; ValueError for any other key."""
        if not _SAFE.fullmatch(key) or not _SAFE.fullmatch(self.kind) or key.startswith(".") or self.kind.startswith("."):
            raise ValueError(f"not a cache key: {key!r}")
        return self.root / self.kind / key[:2] / key

    def load(self, key: str) -> bytes | None:
        """The payload, or None: absent, unreadable, or not what was stored (then the entry is removed)."""
        path = self.path(key)
        try:
            with path.open("rb") as stream:
                raw = stream.read(MAX_ENTRY_BYTES + 1)
        except OSError:
            return None
        head, separator, payload = raw.partition(b"\n")
        if separator and len(raw) <= MAX_ENTRY_BYTES and head == _MAGIC + sha256_hex(payload).encode():
            return payload
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def store(self, key: str, payload: bytes) -> bool:
        """Keep ``payload`` under ``key``; False if this user's cache cannot be written."""
        path = self.path(key)
        name = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
            with os.fdopen(handle, "wb") as stream:
                stream.write(_MAGIC + sha256_hex(payload).encode() + b"\n" + payload)
            os.replace(name, path)
        except OSError:
            if name:
                with contextlib.suppress(OSError):
                    os.unlink(name)
            return False
        return True
