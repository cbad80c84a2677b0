"""``cooperative_topk`` of the releases that have it: its cubin out of a wheel, and how its host launches it.

From 0.24.0 GPUs of sm_90 and sm_100 take it for at most 32 rows (vLLM #43008, #47164). One cluster of CTAs a row: grid (rows,
CTAs), cluster (1, CTAs, 1), 1024 threads, 8 CTAs for up to 8 rows. One parameter of 40 bytes: pointers to logits (float32), output,
lengths and a tie workspace, then rows and stride (csrc/libtorch_stable/cooperative_topk.cu and .cuh). Rows of at most k candidates
are done by the cluster's first CTA alone, before anything of the cluster is used: so a negative length, which the unfixed releases
compare as an int and fill as a uint32, needs no cluster to be seen.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from ..errors import CubinError, KernelNotFoundError
from .cache import Cache, content_key
from .cubin import read_cubin
from .fatbin import find_cubins, open_image
from .image import KernelImage, sha256_hex
from .ranged import Progress
from .release_cache import ReleaseCache
from .releases import fetching, host_machine, parse_release

__all__ = ["CLUSTER", "CooperativeParams", "cooperative_image"]

#: CTAs of a cluster for up to 8 rows.
CLUSTER = 8
_NEEDLE = b"cooperative_topk_cs8"
_LIKELY = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_C.abi3.so")
#: The instance of float32 logits and this k; the type became a template argument later.
_INSTANCE = "cooperative_topk_cs8I(?:f)?L[ij]{k}E"


@dataclass(frozen=True, slots=True)
class CooperativeParams:
    """The kernel's parameter. Addresses are device addresses; ``stride`` in floats, a multiple of 4."""

    input: int
    output: int
    lengths: int
    ties: int
    num_rows: int
    stride: int

    def pack(self) -> bytes:
        """40 bytes."""
        return struct.pack("<QQQQII", self.input, self.output, self.lengths, self.ties, self.num_rows, self.stride)


def cooperative_image(
    spec: str,
    sm: int,
    top_k: int,
    *,
    progress: Progress | None = None,
    cache: Cache | None = None,
    releases: ReleaseCache | None = None,
) -> KernelImage:
    """The kernel of a release (``vllm==0.26.0``), from the cache or its wheel. KernelNotFoundError where it has none for ``sm``;
    DownloadError, CubinError, ToolMissingError.
    """
    version = parse_release(spec)
    origin = f"vllm=={version}"
    store = cache if cache is not None else Cache("cooperative")
    key = content_key("cooperative-1", origin, str(sm))
    raw = store.load(key)
    if raw is None:
        raw = _fetched(spec, sm, progress, releases or ReleaseCache())
        store.store(key, raw)
    if not raw:
        raise KernelNotFoundError(
            f"{origin} has no cooperative_topk for sm_{sm}", help_text="vLLM 0.24.0 and later, sm_90 and sm_100"
        )
    wanted = re.compile(_INSTANCE.format(k=top_k))
    found = [item for item in read_cubin(raw, origin).functions if wanted.search(item.name)]
    if len(found) != 1:
        raise KernelNotFoundError(f"{origin}: {len(found)} instances of cooperative_topk for float32 and k {top_k}")
    (function,) = found
    if function.params_size != len(CooperativeParams(0, 0, 0, 0, 0, 0).pack()) or function.params_base is None:
        raise CubinError(f"cooperative_topk takes {function.params_size} bytes of parameters, 40 are known", path=origin)
    return KernelImage(
        origin, raw, sha256_hex(raw), sm, function.name, top_k, 4, function.params_base, function.params_size,
        function.static_smem or 0, function.registers or 255, function.max_threads or 1024,
    )  # fmt: skip


def _fetched(spec: str, sm: int, progress: Progress | None, releases: ReleaseCache) -> bytes:
    """The cubin with the kernel; empty where the release has none for this architecture."""
    version = parse_release(spec)
    machines = list(dict.fromkeys((host_machine(), "x86_64")))
    with fetching(f"vllm=={version}", version, releases, progress, machines) as (opened, folder):
        for name in opened.wheel.matching(_LIKELY):
            path = folder / "library.so"
            with path.open("wb") as stream:
                opened.wheel.extract(name, stream, what=f"{opened.source}: {name}")
            with open_image(path) as data:
                cubins = find_cubins(data, _NEEDLE, path=name, folder=folder, arch=lambda entry: entry.sm == sm)
            path.unlink()
            if cubins:
                return cubins[0][1]
    return b""
