"""What a file is, from its first bytes; names and extensions are never believed."""

from __future__ import annotations

from typing import Literal

from .ring_file import MAGIC as RING_MAGIC

__all__ = ["HEAD_BYTES", "Kind", "sniff"]

Kind = Literal["gzip", "zstd", "xz", "bz2", "zip", "tar", "gpu-core", "elf", "pickle", "utf16", "text", "binary", "empty", "ring"]

HEAD_BYTES = 1 << 16
_EM_CUDA = 190
_MAGIC: tuple[tuple[bytes, Kind], ...] = (
    (b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\x00", "xz"), (b"BZh", "bz2"),
    (b"PK\x03\x04", "zip"), (b"PK\x05\x06", "zip"), (b"\xff\xfe", "utf16"), (b"\xfe\xff", "utf16"),
)  # fmt: skip
#: Binary formats that nobody should mistake for a broken log.
_OTHER_BINARY = (b"\x89PNG", b"\xff\xd8\xff", b"%PDF", b"GIF8", b"SQLite format 3", b"LPKSHHRH")


def sniff(head: bytes) -> Kind:
    """The kind of a file that starts with ``head`` (up to ``HEAD_BYTES``)."""
    if not head:
        return "empty"
    if head[:4] == b"\x7fELF":
        little = head[5:6] != b"\x02"
        machine = int.from_bytes(head[18:20], "little" if little else "big")
        kind = int.from_bytes(head[16:18], "little" if little else "big")
        return "gpu-core" if machine == _EM_CUDA and kind == 4 else "elf"
    for magic, found in _MAGIC:
        if head.startswith(magic):
            return found
    if len(head) >= 262 and head[257:262] == b"ustar":
        return "tar"
    if head[:1] == b"\x80" and len(head) > 2 and head[1] in (2, 3, 4, 5):
        return "pickle"
    if head.startswith(_OTHER_BINARY):
        return "binary"
    if head.startswith(RING_MAGIC):
        return "ring"
    sample = head[:8192]
    odd = sum(1 for byte in sample if byte < 9 or 13 < byte < 27 or 27 < byte < 32)
    # Logs may carry NULs and stray bytes (a torn write, a pre-allocated file); more than a third of them is no text.
    if odd * 3 > len(sample) and len(sample.replace(b"\x00", b"")) * 3 < len(sample) * 2:
        stripped = head.replace(b"\x00", b"")
        if stripped and sum(1 for byte in stripped[:4096] if 9 <= byte < 127) * 10 >= len(stripped[:4096]) * 9:
            return "text"
        return "binary"
    return "text" if odd * 3 <= len(sample) else "binary"
