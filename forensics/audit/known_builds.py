"""Which published release a build is: its cubins and the Python files that decide, compared with what was read from the releases'
wheels.

A build that matches none is unknown, whatever its metadata claims; a local suffix (``0.27.1+cu129``) or a fork with its base's
number does not make
it known. Several releases share their device code (0.24.0 to 0.27.1 do), so that a shared object alone names a set of releases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from packaging.version import Version

from .known_builds_data import CUBINS, PYTHON

__all__ = ["PYTHON_FILES", "python_fingerprint", "releases_with_cubins", "releases_with_python"]

#: The files of a wheel whose contents tell releases apart: what the audit runs, and the version that the build was given.
PYTHON_FILES = (
    "vllm/v1/attention/backends/mla/indexer.py", "vllm/model_executor/layers/sparse_attn_indexer.py",
    "vllm/model_executor/layers/indexer_topk.py",
    "vllm/_version.py",
)  # fmt: skip


def python_fingerprint(members: Mapping[str, bytes]) -> str:
    """24 hex digits over those of ``PYTHON_FILES`` that there are; "" if none is there."""
    found = [(name, hashlib.sha256(members[name]).hexdigest()) for name in PYTHON_FILES if name in members]
    if not found:
        return ""
    return hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in found).encode()).hexdigest()[:24]


def releases_with_cubins(digests: Iterable[str]) -> tuple[str, ...]:
    """Releases that hold every one of these cubins (sha256 hex digests), oldest first; empty if there is none, or no cubin."""
    common: set[str] | None = None
    for digest in set(digests):
        holders = {version for versions, kept in CUBINS.items() if digest[:24] in kept for version in versions}
        common = holders if common is None else common & holders
    return tuple(sorted(common or (), key=Version))


def releases_with_python(members: Mapping[str, bytes]) -> tuple[str, ...]:
    """Releases whose deciding Python files are these, byte for byte."""
    mine = python_fingerprint(members)
    return tuple(version for version, codes in PYTHON.items() if mine and mine in codes)
