"""Files that are either the old one or the new one, whole: written beside, flushed to the disk, renamed over."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import RunStoreError

__all__ = ["disk_error", "keep_document", "make_folder", "sync_folder", "write_atomic"]


def disk_error(error: OSError, path: Path, doing: str) -> RunStoreError:
    """The typed error for a failed write: says which file, and for a full disk what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunStoreError(
            f"cannot {doing}: the disk or the quota is full; what was written before stays readable",
            path=str(path),
            help_text="Free some space, or write elsewhere: --out DIR",
        )
    return RunStoreError(f"cannot {doing}: {error.strerror or error}", path=str(path), help_text="Write elsewhere: --out DIR")


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Create a folder and those above it; one that is there is fine. RunStoreError (a file of that name, no permission, full)."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, path, "create the folder") from error


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename survives a crash of the machine; silent where a folder cannot be synced."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write ``data`` to ``path``: a temporary file in the same folder, fsync, rename, fsync of the folder.

    Raises RunStoreError (full disk, no permission); then the old file, if there was one, is untouched and no temporary stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        try:
            temporary.unlink(missing_ok=True)
        except OSError as second:
            raise disk_error(error, path, "write") from second
        raise disk_error(error, path, "write") from error


def keep_document(out: Path | None, name: str, document: Mapping[str, Any]) -> None:
    """Write the document of a verb that has no folder of its own to ``--out``: ``FILE.json``, else ``DIR/NAME.json``.

    ``out`` None: nothing is written. Raises RunStoreError as ``make_folder`` and ``write_atomic``.
    """
    if out is None:
        return
    path = out if out.suffix == ".json" and not out.is_dir() else out / f"{name}.json"
    make_folder(path.parent)
    write_atomic(path, (json.dumps(document, indent=2, ensure_ascii=False, default=str) + "\n").encode("utf-8", "backslashreplace"))
