"""Which published release a build's device code is of: a fingerprint over its cubins, compared with releases that were read from
PyPI.

The table is made by ``benchmarks/audit_releases.py --fingerprints`` from the wheels themselves. A build that is not in it is
unknown, whatever its
metadata claims; a local suffix (``0.27.1+cu129``) or a fork with its base's number does not make it known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

__all__ = ["FINGERPRINTS", "fingerprint", "releases_with"]

#: sha256 over the sorted sha256 of the cubins that hold the kernel (first 32 hex digits) → releases with exactly these cubins.
FINGERPRINTS: dict[str, tuple[str, ...]] = {}


def fingerprint(cubin_digests: Iterable[str]) -> str:
    """The fingerprint of a set of cubins, given their sha256 hex digests."""
    return hashlib.sha256("\n".join(sorted(set(cubin_digests))).encode()).hexdigest()[:32]


def releases_with(cubin_digests: Iterable[str]) -> tuple[str, ...]:
    """Versions of the published releases whose device code this is; empty if none is known."""
    return FINGERPRINTS.get(fingerprint(cubin_digests), ())
