"""The bytes of a bundle's archive: hashes and packed sizes of its entries, and a zip that is the same for the same entries.

An entry is bytes, or the path of a file that is read in blocks.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

__all__ = ["digest_of", "packed_size", "write_zip"]

#: What an entry costs besides its content: local header and directory entry, without the name.
_ENTRY = 30 + 46
_BLOCK = 1 << 20


def digest_of(content: Path | bytes) -> tuple[str, int]:
    """(sha256 in hexadecimal, size in bytes)."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest(), len(content)
    with content.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return digest, stream.tell()


def packed_size(content: Path | bytes, name: str) -> int:
    """Bytes that an entry of this name takes in the archive, compressed and with its two directory entries."""
    overhead = _ENTRY + 2 * len(name.encode())
    if isinstance(content, bytes):
        return len(zlib.compress(content, 9)) + overhead
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    total = 0
    with content.open("rb") as stream:
        while block := stream.read(_BLOCK):
            total += len(packer.compress(block))
    return total + len(packer.flush()) + overhead


def write_zip(out: BinaryIO, folder: str, entries: Mapping[str, Path | bytes]) -> None:
    """Write the archive: entries below ``folder``, sorted by name, dated 1980, mode 0600.

    Nothing in it depends on the machine or the hour, so equal entries give equal bytes.
    """
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(entries):
            info = zipfile.ZipInfo(f"{folder}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = 0o100600 << 16
            content = entries[name]
            if isinstance(content, bytes):
                archive.writestr(info, content, compresslevel=9)
            else:
                info.file_size = content.stat().st_size
                with content.open("rb") as stream, archive.open(info, "w") as entry:
                    while block := stream.read(_BLOCK):
                        entry.write(block)
