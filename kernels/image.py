"""One kernel function ready to be launched, interpreted or read: the record that every origin is turned into."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

__all__ = ["KernelImage", "sha256_hex"]


def sha256_hex(data: bytes) -> str:
    """The hex digest that names a content everywhere here (caches, evidence, identities)."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class KernelImage:
    """A cubin and the one function in it that was chosen.

    ``origin``: ``builtin``, ``builtin:guard``, ``vllm==0.27.1``, ``installed`` or a path, as the user would write it after
    ``--kernel``.
    ``function``: the mangled name in the cubin's symbol table. ``params_base``: byte offset of the parameters in constant bank 0;
    ``params_size``: their size in bytes; ``static_smem``: bytes of static shared memory; all read from the cubin's own metadata.
    ``guarded``: whether the row length is known to be bounded before use; None if not known (shipped code: the audit decides).
    """

    origin: str
    cubin: bytes
    cubin_sha256: str
    sm: int
    function: str
    top_k: int
    vec: int
    params_base: int
    params_size: int
    static_smem: int
    registers: int
    max_threads: int
    guarded: bool | None = None
    label: str = ""
