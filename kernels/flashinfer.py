"""FlashInfer's own multi-CTA top-k mask (the sampler's kernel): its source out of a release's wheel, compiled here by NVRTC.

The wheel ``flashinfer-python`` holds the headers (``flashinfer/data/include``, Apache-2.0). ``topk.cuh``, ``topk_common.cuh`` and
``vec_dtypes.cuh`` are compiled as they are; CUDA's headers and CUB are those that NVRTC 13 brings along and unpacks on request into
the cache. What the host-only headers would bring (``utils.cuh``, the standard library's) stands in below, declarations only.

The kernel's parameters, read from the compiled code: three pointers (logits, masked, per-row k), three uint32 (k, vocabulary,
rows), the row states' pointer at 40, then chunk and CTAs a group: 56 bytes. Its row state is that of ``kernels.abi`` with
sums behind it. The last release before flashinfer #3615 is 0.6.13, the first with it 0.6.14; before #5251 (every CTA converges
before its arrival is published) 0.7.0.post1, with it 0.7.1 (read in the wheels).
"""

from __future__ import annotations

import math
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from ..errors import CubinError, DownloadError, KernelNotFoundError, ToolMissingError, UsageError
from .build import BuildError, compile_text, compiler_version
from .cache import Cache, cache_root, content_key
from .cubin import read_cubin
from .image import KernelImage, sha256_hex
from .package_index import list_wheels, pip_settings
from .ranged import Progress
from .releases import open_wheel

__all__ = ["ROW_STATE_ROOM", "SamplerParams", "flashinfer_image", "release_files", "sampler_shape"]

PACKAGE = "flashinfer-python"
#: Room for one RadixRowState, bytes: the fields of ``kernels.abi.ROW_STATE``, then sums (3092 bytes, 3104 from 0.7.1).
ROW_STATE_ROOM = 3104
#: Shared memory before the chunk: two histograms of 256 words and five scalars, rounded up to 16 bytes.
FIXED_SMEM = 2080
_FOLDER = "flashinfer/data/include/flashinfer/"
_FILES = ("topk.cuh", "topk_common.cuh", "vec_dtypes.cuh")
_KERNEL = "flashinfer::sampling::RadixTopKMaskLogitsKernel_MultiCTA<1024u, 4u, false, float, int>"
_REMEDY = "pip install -U 'cuda-bindings>=13.5' 'nvidia-cuda-nvrtc>=13.5'"
_TYPES = "int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t"

#: By the name in ``#include``. Host code of the headers is parsed as device code and never used.
_STAND_INS = {
    "cuda.h": "",
    "cstdint": "#pragma once\n#include <cuda/std/cstdint>\n" + "".join(f"using cuda::std::{name};\n" for name in _TYPES.split()),
    "cstdlib": (
        "#pragma once\nnamespace std { __device__ const char* getenv(const char*);\n"
        "__device__ int strcmp(const char*, const char*); }\n"
    ),
    "numeric": "#pragma once\n#include <cuda/std/numeric>\nnamespace std { using cuda::std::gcd; }\n",
    "type_traits": (
        "#pragma once\n#include <cuda/std/type_traits>\n#include <cuda/std/utility>\n#include <cuda/std/algorithm>\n"
        "namespace std { using namespace cuda::std; }\n"
    ),
    "cub/cub.cuh": (
        "#pragma once\n#include <cub/block/block_scan.cuh>\n#include <cub/block/block_reduce.cuh>\n"
        "#include <cub/block/block_radix_sort.cuh>\n"
    ),
    "cuda_runtime.h": (
        "#pragma once\n__device__ cudaError_t cudaGetDevice(int*);\n"
        "__device__ cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int);\n"
    ),
    "utils.cuh": (
        "#pragma once\n#include <cuda_runtime.h>\nnamespace flashinfer {\n"
        "template <class A, class B> __host__ __device__ constexpr auto ceil_div(A a, B b) { return (a + b - 1) / b; }\n"
        "template <class A, class B> __host__ __device__ constexpr auto round_up(A a, B b) { return ceil_div(a, b) * b; }\n"
        "template <class A, class B> __host__ __device__ constexpr auto round_down(A a, B b) { return a / b * b; }\n}\n"
        "#define FLASHINFER_CUDA_CALL(...)\n#define FLASHINFER_INLINE __forceinline__ __device__\n"
        "#define DISPATCH_ALIGNED_VEC_SIZE(...)\n"
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplerParams:
    """The kernel's parameters. Addresses are device addresses; ``logits`` and ``masked`` float32 [rows, vocabulary]."""

    logits: int
    masked: int
    row_states: int
    top_k: int
    vocabulary: int
    rows: int
    chunk_size: int
    ctas_per_group: int

    def pack(self) -> bytes:
        """56 bytes; one k for all rows."""
        return struct.pack(
            "<QQQIIIIQII", self.logits, self.masked, 0, self.top_k, self.vocabulary, self.rows, 0, self.row_states,
            self.chunk_size, self.ctas_per_group,
        )  # fmt: skip


def sampler_shape(vocabulary: int, smem_optin: int) -> tuple[int, int, int]:
    """(CTAs a group, floats a chunk, dynamic shared memory in bytes) as its host makes them for a card of ``smem_optin`` bytes.

    ``vocabulary``: a multiple of 4, as the vector width of 4 needs.
    """
    most = max((smem_optin - FIXED_SMEM) // 4 // 4 * 4, 4096)
    ctas = -(-vocabulary // most)
    chunk = min(math.ceil(math.ceil(vocabulary / ctas) / 4) * 4, most)
    return ctas, chunk, FIXED_SMEM + 4 * chunk


def flashinfer_image(spec: str, sm: int, *, progress: Progress | None = None, cache: Cache | None = None) -> KernelImage:
    """The kernel of a release (``flashinfer==0.6.13``) for float32 and a vector of 4, from the cache or its wheel's source.

    KernelNotFoundError (no such release, no such kernel), DownloadError, ToolMissingError (an NVRTC without headers), BuildError.
    """
    version = _version(spec)
    origin = f"flashinfer=={version}"
    store = cache if cache is not None else Cache("flashinfer")
    key = content_key("flashinfer-1", origin, compiler_version(), str(sm), _KERNEL, *_STAND_INS, *_STAND_INS.values())
    raw = store.load(key)
    if raw is None:
        raw = _compiled(origin, _sources(version, origin, store, progress), sm)
        store.store(key, raw)
    functions = [item for item in read_cubin(raw, origin).functions if "RadixTopKMaskLogitsKernel_MultiCTA" in item.name]
    if len(functions) != 1 or functions[0].params_size != 56 or functions[0].params_base is None:
        raise CubinError("no kernel with the 56 bytes of parameters that are known", path=origin)
    (function,) = functions
    return KernelImage(
        origin, raw, sha256_hex(raw), sm, function.name, 0, 4, function.params_base or 0, 56, function.static_smem or 0,
        function.registers or 255, function.max_threads or 1024,
    )  # fmt: skip


def _version(spec: str) -> Version:
    name, _, text = spec.partition("==")
    try:
        if name.strip().lower() in ("flashinfer", PACKAGE):
            return Version(text.strip()[:64])
    except InvalidVersion:
        pass
    raise UsageError(f"{spec[:80]!r} is no release of FlashInfer", help_text="--kernel flashinfer==0.6.13")


def _sources(version: Version, origin: str, store: Cache, progress: Progress | None) -> dict[str, bytes]:
    """The headers by file name."""
    found = _members(version, [_FOLDER + name for name in _FILES], store, progress)
    missing = [name for name in _FILES if _FOLDER + name not in found]
    if missing:
        raise KernelNotFoundError(f"{origin} holds no {', '.join(missing)} where it is looked for")
    return {name: found[_FOLDER + name] for name in _FILES}


def release_files(spec: str, names: Sequence[str], *, cache: Cache | None = None) -> dict[str, bytes]:
    """Members of a release's wheel (``flashinfer==0.6.17``) by name; those it does not have are left out. Kept in the cache.

    UsageError, KernelNotFoundError (no such release), DownloadError.
    """
    return _members(_version(spec), names, cache if cache is not None else Cache("flashinfer"), None)


def _members(version: Version, names: Sequence[str], store: Cache, progress: Progress | None) -> dict[str, bytes]:
    origin = f"flashinfer=={version}"
    keys = {name: content_key("flashinfer-source-2", origin, name) for name in names}
    kept = {name: store.load(key) for name, key in keys.items()}
    if all(content is not None for content in kept.values()):
        return {name: content for name, content in kept.items() if content}
    candidates = [item for item in list_wheels(PACKAGE, pip_settings()) if item.version == version]
    if not candidates:
        raise KernelNotFoundError(
            f"the configured index has no wheel of {PACKAGE} {version}", help_text=f"pip index versions {PACKAGE}"
        )
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            open_wheel(candidates[0], "any", Path(folder), progress=progress) as opened,
        ):
            listed = set(opened.wheel.names)
            found = {name: opened.wheel.read(name) if name in listed else b"" for name in names}
    except OSError as error:
        raise DownloadError(f"{origin}: {error.strerror or error}") from None
    for name, content in found.items():
        store.store(keys[name], content)
    return {name: content for name, content in found.items() if content}


def _compiled(origin: str, sources: dict[str, bytes], sm: int) -> bytes:
    headers = _headers()
    named = {**{name: text.encode() for name, text in _STAND_INS.items()}, **sources}
    options = ("-default-device", f"-I{headers}", f"-I{headers / 'cccl'}")
    try:
        return compile_text(b'#include "topk.cuh"\n', origin, sm, expressions=(_KERNEL,), options=options, headers=named).cubin
    except BuildError as error:
        known = "0.6.12 to 0.7.1 do by 13.5"
        raise KernelNotFoundError(
            f"{origin}: its headers do not compile by NVRTC {compiler_version()} ({error}); {known}"
        ) from None


def _headers() -> Path:
    """The headers that NVRTC brings, unpacked into the cache (26 MB, once for each version). ToolMissingError if it brings none."""
    try:
        from cuda.bindings import nvrtc

        install: Any = nvrtc.nvrtcInstallBundledHeaders
    except (ImportError, AttributeError):
        raise ToolMissingError("this NVRTC brings no CUDA headers", help_text=_REMEDY) from None
    folder = cache_root() / f"nvrtc-headers-{compiler_version()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        skip = int(getattr(nvrtc, "NVRTC_INSTALL_HEADERS_SKIP_IF_EXISTS", 1))
        status, said = install(str(folder).encode(), skip)
    except (OSError, RuntimeError) as error:
        raise ToolMissingError(f"NVRTC's headers could not be unpacked: {error}", help_text=_REMEDY) from None
    if int(status) != 0:
        text = said.decode("utf-8", "replace")[:200] if isinstance(said, bytes) else status
        raise ToolMissingError(f"NVRTC's headers could not be unpacked into {folder}: {text}", help_text=_REMEDY)
    return folder
