"""The run store: a run is a directory, all data, private (0700), written so that a killed run loses nothing it had seen.

Documents are replaced atomically; ``timeline.jsonl`` only grows, a whole line in one write; an artefact enters the index when it
is complete on disk. Reading back, with bounds, is ``runread``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ..clock import SYSTEM, Clock, utc_stamp
from ..errors import RunStoreError
from ..forensics.evidence.opening import at_once
from ..reports import paths
from .atomic import disk_error, sync_folder, write_atomic
from .run_records import EvidenceEntry, EvidenceIndex, RunRecord

__all__ = ["RunStore", "dump_json", "file_sha256", "require_room"]

#: Timeline kinds that are flushed to the disk at once: after these the machine itself may be lost. Others survive a killed process.
_DURABLE = frozenset({"start", "hung", "capture", "artefact", "verdict", "unwedge", "died", "fault", "end"})
#: A line of the timeline is never longer (bytes); longer values are cut and say so.
_MAX_LINE = 256 << 10


def _finite(value: Any) -> Any:
    """``value`` with NaN and infinities as null: JSON has no word for them, and readers in other languages refuse them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def dump_json(document: Mapping[str, Any]) -> bytes:
    """A document as the store writes it: UTF-8, two spaces, a final newline, no NaN."""
    text = json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    return (text + "\n").encode("utf-8", errors="backslashreplace")


def file_sha256(path: Path) -> tuple[str, int]:
    """Hex digest and size in bytes of a regular file, read in pieces; RunStoreError if it is not one or cannot be read."""
    digest = hashlib.sha256()
    size = 0
    try:
        with open(path, "rb", opener=at_once) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise RunStoreError("not a regular file", path=str(path))
            while piece := stream.read(1 << 20):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        raise RunStoreError(f"cannot read: {error.strerror or error}", path=str(path)) from error
    return digest.hexdigest(), size


def require_room(out: Path | None) -> None:
    """Refuse a directory that ``RunStore.create`` would refuse, before the work whose result it is for; nothing is made. ``out``
    None: whether a run finds room below ./runs.

    Raises RunStoreError: it exists and is not an empty directory, or it cannot be made where it is to be.
    """
    target = Path(os.path.abspath(out if out is not None else "runs"))
    try:
        if out is not None and os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
            raise RunStoreError("exists and is not an empty directory", path=str(target), help_text="Give another one: --out DIR")
        above = next(folder for folder in (target, *target.parents) if os.path.lexists(folder))
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise disk_error(error, target, "create the run directory") from error


class RunStore:
    """One run's directory while it is written. Use as a context manager: leaving it closes the timeline."""

    def __init__(self, path: Path, *, clock: Clock = SYSTEM) -> None:
        self.path = path
        self._clock = clock
        self._start = clock.monotonic()
        self._entries: list[EvidenceEntry] = []
        self._fd = -1

    @classmethod
    def create(
        cls, scenario: str, *, out: Path | None = None, root: Path | None = None, clock: Clock = SYSTEM, short_id: str | None = None
    ) -> RunStore:
        """Make the directory (0700): ``out`` itself, which must be new or empty, else ``root``/scenario/start-id under ./runs.

        Raises RunStoreError if it cannot be made or is in use.
        """
        if out is not None:
            target = out
        else:
            start = datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y%m%dT%H%M%SZ")
            target = (root or Path("runs")) / scenario / f"{start}-{short_id or secrets.token_hex(3)}"
        target = Path(os.path.abspath(target))
        require_room(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # seen to be empty
                target.mkdir(mode=0o700)
            os.chmod(target, 0o700)
            (target / paths.EVIDENCE).mkdir(mode=0o700)
            store = cls(target, clock=clock)
            store._fd = os.open(
                target / paths.TIMELINE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            sync_folder(target)
            sync_folder(target.parent)
        except OSError as error:
            raise disk_error(error, target, "create the run directory") from error
        return store

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def evidence_folder(self) -> Path:
        """Absolute path of the folder that collectors write into."""
        return self.path / paths.EVIDENCE

    def evidence_subfolder(self, name: str) -> Path:
        """A folder of its own inside the evidence (a second capture of the same run); made if it is not there."""
        if not name or "/" in name or name.startswith("."):
            raise RunStoreError(f"not a folder name: {name!r}", path=str(self.path))
        folder = self.evidence_folder / name
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise disk_error(error, folder, "create") from error
        return folder

    @property
    def evidence(self) -> tuple[EvidenceEntry, ...]:
        """What is in the index so far."""
        return tuple(self._entries)

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one line to the timeline: one write, whole or not at all; RunStoreError if the disk is full."""
        line = {"t": round(self._clock.monotonic() - self._start, 6), "at": utc_stamp(self._clock), "kind": kind, **fields}
        data = self._encode(line)
        if self._fd < 0:
            raise RunStoreError("the run is closed", path=str(self.path / paths.TIMELINE))
        try:
            before = os.fstat(self._fd).st_size
            written = os.write(self._fd, data)
            if written != len(data):
                os.ftruncate(self._fd, before)  # half a line would make the next one unreadable too
                raise OSError(28, "No space left on device")
            if kind in _DURABLE:
                os.fdatasync(self._fd)
        except OSError as error:
            raise disk_error(error, self.path / paths.TIMELINE, "append") from error

    @staticmethod
    def _encode(line: dict[str, Any]) -> bytes:
        def encoded(value: dict[str, Any]) -> bytes:
            text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str)
            return (text + "\n").encode("utf-8", errors="backslashreplace")

        data = encoded(line)
        if len(data) <= _MAX_LINE:
            return data
        cut = {key: line[key] for key in ("t", "at", "kind")}
        return encoded({**cut, "cut": sorted(set(line) - set(cut)), "bytes": len(data)})

    def write_run(self, record: RunRecord) -> None:
        """Replace ``run.json``."""
        write_atomic(self.path / paths.RUN, dump_json(record.document()))

    def write_diagnosis(self, document: Mapping[str, Any]) -> None:
        """Replace ``diagnosis.json``."""
        write_atomic(self.path / paths.DIAGNOSIS, dump_json(document))

    def add_evidence(
        self,
        kind: str,
        path: Path,
        origin: Literal["measured", "interpreted", "reported"] = "measured",
        *,
        collector: str = "",
    ) -> EvidenceEntry:
        """Enter a complete artefact of the evidence folder into the index: made private (0600), hashed, numbered (E1, E2 …)."""
        resolved = path.resolve()
        if not resolved.is_relative_to(self.evidence_folder.resolve()) or path.is_symlink():
            raise RunStoreError("an artefact lies outside the evidence folder", path=str(path))
        with contextlib.suppress(OSError):  # another owner's, or a file system without modes: the folder is closed (0700) anyway
            os.chmod(resolved, 0o600)
        digest, size = file_sha256(path)
        entry = EvidenceEntry(
            id=f"E{len(self._entries) + 1}",
            kind=kind,
            path=str(resolved.relative_to(self.path.resolve())),
            sha256=digest,
            size=size,
            origin=origin,
            when=utc_stamp(self._clock),
            collector=collector,
        )
        self._entries.append(entry)
        index = EvidenceIndex(entries=tuple(self._entries))
        write_atomic(self.evidence_folder / paths.EVIDENCE_INDEX, dump_json(index.document()))
        self.emit("artefact", id=entry.id, artefact=kind, path=entry.path, sha256=digest, size=size)
        return entry

    def add_rest(self, folder: Path) -> None:
        """Index what lies in an evidence folder beside the named artefacts: the output of tools, by file name."""
        known = {entry.path for entry in self._entries}
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.is_symlink() and str(path.relative_to(self.path)) not in known:
                self.add_evidence(path.name, path)

    def close(self) -> None:
        """Flush and close the timeline; may be called twice."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.fsync(fd)
        except OSError as error:
            raise disk_error(error, self.path / paths.TIMELINE, "flush") from error
        finally:
            os.close(fd)
