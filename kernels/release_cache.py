"""What is kept of shipped releases: the cubins that hold the kernel, by content, and one index of what was found where.

``<cache>/shipped/…`` holds contents by sha256 (zlib, proven on reading); ``<cache>/shipped-index.json`` says which release, file or
installation they are from. The index is rewritten atomically under a lock, and one download per release runs at a time, whoever
asks. An index that cannot be read is as good as none: everything can be fetched again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from .cache import Cache, cache_root
from .image import sha256_hex

__all__ = ["Entry", "ReleaseCache"]

INDEX_SCHEMA = "dsv4-repro/shipped-index/1"
MAX_INDEX_BYTES = 32 << 20
MAX_CONTENT_BYTES = 256 << 20
STALE_SECONDS = 24 * 3600


class Entry(BaseModel):
    """What one release, file or installation held.

    ``source``: file name of the wheel or object. ``verified``: how its bytes were checked, in words. ``library``: the member with
    the kernel, ``cubins``: architecture label (``sm_90a``) to sha256 of the cubins; empty if no library has the kernel.
    ``searched``: the libraries that were looked at. ``names``: sha256 of the list of all members; ``members``: name to sha256 of
    those kept. ``labels``: of all code beside the kernel's, where only one architecture's was taken out. ``notes``: what could not
    be read though the kernel was found.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    release: str | None = None
    machine: str | None = None
    source: str = ""
    source_sha256: str | None = None
    verified: str = ""
    library: str | None = None
    library_sha256: str | None = None
    cubins: dict[str, tuple[str, ...]] = {}
    searched: tuple[str, ...] = ()
    names: str | None = None
    members: dict[str, str] = {}
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReleaseCache:
    """The cache under one root. Nothing here raises for a cache that cannot be written: what was fetched is then fetched again.

    ``fresh``: what this object was given to keep, so that a full disk or a cache that is emptied meanwhile loses nothing of it.
    """

    root: Path = field(default_factory=cache_root)
    fresh: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    @property
    def _contents(self) -> Cache:
        return Cache("shipped", self.root)

    @property
    def _index(self) -> Path:
        return self.root / "shipped-index.json"

    def keep(self, content: bytes) -> str:
        """Keep ``content``; its sha256."""
        digest = sha256_hex(content)
        self.fresh[digest] = content
        if self._contents.load(digest) is None:
            self._contents.store(digest, zlib.compress(content, 1))
        return digest

    def content(self, digest: str) -> bytes | None:
        """What has this sha256, proven; None if it is not kept."""
        if digest in self.fresh:
            return self.fresh[digest]
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            return None
        packed = self._contents.load(digest)
        if packed is None:
            return None
        try:
            raw = zlib.decompressobj().decompress(packed, MAX_CONTENT_BYTES)
        except zlib.error:
            return None
        return raw if sha256_hex(raw) == digest else None

    def entries(self) -> dict[str, Entry]:
        """The index: key (``vllm==0.27.1@x86_64``, ``file:<sha256>``) to entry."""
        try:
            with self._index.open("rb") as stream:
                document: Any = json.loads(stream.read(MAX_INDEX_BYTES))
            if not isinstance(document, dict) or document.get("schema") != INDEX_SCHEMA:
                return {}
            items: Mapping[str, Any] = document["entries"]
            found: dict[str, Entry] = {}
            for key, value in items.items():
                with contextlib.suppress(ValidationError):
                    found[str(key)] = Entry.model_validate(value)
            return found
        except (OSError, ValueError, RecursionError, KeyError, AttributeError):
            return {}

    def put(self, key: str, entry: Entry) -> None:
        """Add or replace one entry; what other processes add meanwhile stays."""
        with self.lock("index"):
            entries = self.entries()
            entries[key] = entry
            document = {
                "schema": INDEX_SCHEMA,
                "entries": {name: entries[name].model_dump(mode="json") for name in sorted(entries)},
            }
            name = ""
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(prefix=".tmp-", dir=self.root)
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    json.dump(document, stream, indent=1)
                os.replace(name, self._index)
            except OSError:
                if name:
                    with contextlib.suppress(OSError):
                        os.unlink(name)

    @contextlib.contextmanager
    def lock(self, what: str) -> Iterator[None]:
        """One process at a time for ``what``; no lock where the cache cannot be written or the file system has none."""
        path = self.root / "locks" / sha256_hex(what.encode())[:32]
        stream = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = path.open("ab")
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            if stream is not None:
                stream.close()
            stream = None
        try:
            yield
        finally:
            if stream is not None:
                stream.close()

    def work_folder(self) -> tempfile.TemporaryDirectory[str]:
        """A folder for downloads in progress: in the cache, or where the system keeps temporary files if that cannot be written."""
        folder = self.root / "work"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob("fetch-*"):
                # What a killed process left behind, not what another one is still filling.
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
            return tempfile.TemporaryDirectory(prefix="fetch-", dir=folder)
        except OSError:
            return tempfile.TemporaryDirectory(prefix="dsv4-repro-")
