"""Cubins of the kernels written here, made by NVRTC on any machine: no CUDA toolkit, driver or GPU.

NVRTC comes with the wheel ``nvidia-cuda-nvrtc``; its headers are not needed (``sources/*.cu`` include none). A cubin is kept in the
user's cache under a hash of source, options and compiler version.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import CubinError, KernelNotFoundError, OurFaultError, ToolMissingError
from .abi import TOP_K_VALUES, VECTOR_WIDTHS
from .cache import Cache, content_key
from .image import KernelImage

__all__ = [
    "SETTINGS",
    "VARIANTS",
    "BuildError",
    "Compiled",
    "Variant",
    "builtin_image",
    "compile_kernel",
    "compile_text",
    "compiler_version",
    "parse_builtin",
    "source_path",
    "supported_architectures",
]

SOURCES = Path(__file__).with_name("sources")
_TOPK = "persistent_topk.cu"
_INSTALL = "pip install nvidia-cuda-nvrtc"
#: Part of the cache key: raised when the layout of a cache entry changes.
_FORMAT = "cubin-1"


class BuildError(OurFaultError):
    """The compiler refused a source of ours; ``log`` is all that it said."""

    def __init__(self, message: str, log: str) -> None:
        first = next((line.strip() for line in log.splitlines() if "error" in line.lower()), "")
        super().__init__(f"{message}: {first[:300]}" if first else message)
        self.log = log


@dataclass(frozen=True, slots=True)
class Variant:
    """One build of the top-k kernel. ``guarded``: True where no length can make leader and peers disagree and none is misread;
    None for the guards with a mistake, which an audit has to judge; False where a negative length wedges the kernel.
    """

    name: str
    defines: tuple[str, ...]
    guarded: bool | None
    about: str


_ALL = (
    Variant("unguarded", ("UNGUARDED_LENGTH",), False, "the defect of vLLM #51593: the length is read into a uint32"),
    Variant("guard", (), True, "the repair: signed until known non-negative, then bounded by min(stride, max_seq_len)"),
    Variant("bounded-spin", ("UNGUARDED_LENGTH", "BOUNDED_SPIN"), False, "the defect, with a wait that gives up and names itself"),
    Variant("guard-after-cast", ("GUARD_AFTER_CAST",), False, "clamps at zero after the conversion to uint32: too late"),
    Variant("guard-min-only", ("GUARD_MIN_ONLY",), None, "bounds the uint32 but never asks for its sign: -1 becomes a full row"),
    Variant("guard-stride-only", ("GUARD_STRIDE_ONLY",), None, "bounds by the stride alone"),
    Variant("guard-max-seq-only", ("GUARD_MAX_SEQ_ONLY",), None, "bounds by max_seq_len alone"),
    Variant("guard-one-path", ("GUARD_ONE_PATH",), False, "guards the single-CTA paths, not the way into the multi-CTA path"),
    Variant("init-race", ("INIT_RACE",), True, "row state zeroed inside the kernel by one CTA (vLLM #41444)"),
    Variant("reset-race", ("RESET_RACE",), True, "counter zeroed by the leader at the end (FlashInfer #3610)"),
    Variant("missing-fence", ("MISSING_FENCE",), True, "nothing orders data before the arrival (aiter #4841)"),
    Variant("early-arrival", ("EARLY_ARRIVAL",), True, "arrival published before the CTA has converged (FlashInfer #4131)"),
    Variant("early-exit", ("EARLY_EXIT",), True, "healthy control of the two before: rounds end when a bin is taken whole"),
    Variant("ring-misaligned", ("RING_MISALIGNED",), True, "histogram ring counts all rows, not the long ones (vLLM #49139)"),
)
#: The builds of the top-k kernel by the name after ``--kernel builtin:``.
VARIANTS: Mapping[str, Variant] = MappingProxyType({variant.name: variant for variant in _ALL})
#: Numbers that a build may be given after its name (``builtin:bounded-spin,spin_limit=64``), with their ranges.
SETTINGS: Mapping[str, tuple[int, int]] = MappingProxyType({"spin_limit": (1, 1 << 31), "widen_us": (1, 1_000_000)})


@dataclass(frozen=True, slots=True)
class Compiled:
    """One cubin. ``functions``: the mangled name of each name expression asked for, in order (or the names as given)."""

    cubin: bytes
    functions: tuple[str, ...]
    sm: int
    log: str


def source_path(name: str) -> Path:
    """A source file of this package, e.g. ``persistent_topk.cu`` or ``patients.cu``."""
    return SOURCES / name


def parse_builtin(text: str) -> tuple[str, dict[str, int]] | None:
    """``builtin``, ``builtin:guard``, ``builtin:bounded-spin,spin_limit=64`` as (variant, settings).

    None if it is not of this form. Raises KernelNotFoundError for an unknown variant or setting, or a value outside its range.
    """
    head, _, tail = text.partition(":")
    if head != "builtin":
        return None
    name, *rest = (tail or "unguarded").split(",")
    if name not in VARIANTS:
        raise KernelNotFoundError(f"no build {name!r} of the builtin kernel", help_text=f"There are: {', '.join(VARIANTS)}")
    settings: dict[str, int] = {}
    for part in rest:
        key, _, value = part.partition("=")
        low, high = SETTINGS.get(key, (1, 0))
        if not (value.isascii() and value.isdecimal()) or not low <= int(value) <= high:
            known = ", ".join(f"{item}={least}..{most}" for item, (least, most) in SETTINGS.items())
            raise KernelNotFoundError(f"{part!r} is no setting of the builtin kernel", help_text=f"There are: {known}")
        settings[key] = int(value)
    return name, settings


# ---------------------------------------------------------------------------------------------------------------------------------
# NVRTC


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        status, _, _ = nvrtc.nvrtcVersion()
    except Exception as error:  # the loader raises its own types, which differ by version of cuda-bindings
        raise ToolMissingError(f"NVRTC is not usable here: {str(error).splitlines()[0][:200]}", help_text=_INSTALL) from None
    if int(status) != 0:
        raise ToolMissingError(f"NVRTC does not start: {status}", help_text=_INSTALL)
    return nvrtc


@lru_cache(maxsize=1)
def compiler_version() -> str:
    """NVRTC's version as its wheel names it (``13.5.37``), else as the library says (``13.5``). Raises ToolMissingError."""
    try:
        return importlib.metadata.version("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        _, major, minor = _nvrtc().nvrtcVersion()
        return f"{major}.{minor}"


@lru_cache(maxsize=1)
def supported_architectures() -> tuple[int, ...]:
    """What this NVRTC compiles for, e.g. (75, 80, …, 120, 121). Raises ToolMissingError."""
    status, architectures = _nvrtc().nvrtcGetSupportedArchs()
    if int(status) != 0:
        raise ToolMissingError(f"NVRTC does not say what it compiles for: {status}", help_text=_INSTALL)
    return tuple(sorted(int(item) for item in architectures))


def _check_architecture(sm: int) -> None:
    offered = supported_architectures()
    if sm not in offered:
        listed = ", ".join(f"sm_{item}" for item in offered)
        raise KernelNotFoundError(f"NVRTC {compiler_version()} does not compile for sm_{sm}", help_text=f"It compiles for {listed}")


def _out_buffer(size: int) -> bytes:
    """Zeroed bytes for NVRTC to write into, at least two: Python shares its objects of no and of one byte, and the log of a
    compilation without a word is one byte long. Written into, that is the end of ``b" "`` or ``b"\\0"`` in the whole process
    (seen on a GPU machine: templates that no longer compiled).
    """
    return bytes(max(size, 2))


def compile_text(
    source: bytes, name: str, sm: int, *, expressions: Sequence[str], options: Sequence[str], headers: Mapping[str, bytes]
) -> Compiled:
    """Compile a source that is not this package's. ``headers``: by the name in ``#include``. Raises as ``compile_kernel``."""
    _check_architecture(sm)
    return _compile(source, name, sm, expressions, [f"--gpu-architecture=sm_{sm}", "--std=c++17", *options], headers)


def _compile(
    source: bytes, name: str, sm: int, expressions: Sequence[str], options: Sequence[str],
    headers: Mapping[str, bytes] = MappingProxyType({}),
) -> Compiled:  # fmt: skip
    nvrtc = _nvrtc()

    def must(result: tuple[Any, ...], what: str) -> Any:
        if int(result[0]) != 0:
            raise BuildError(f"NVRTC: {what} failed for {name}, sm_{sm} ({result[0]})", "")
        return result[1] if len(result) > 1 else None

    program = must(
        nvrtc.nvrtcCreateProgram(source, name.encode(), len(headers), list(headers.values()), [item.encode() for item in headers]),
        "creating the program",
    )
    try:
        for expression in expressions:
            must(nvrtc.nvrtcAddNameExpression(program, expression.encode()), f"naming {expression}")
        arguments = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        log = _out_buffer(must(nvrtc.nvrtcGetProgramLogSize(program), "reading the log's size"))
        must(nvrtc.nvrtcGetProgramLog(program, log), "reading the log")
        said = log.rstrip(b"\0 \n").decode("utf-8", "replace")
        if int(status) != 0:
            raise BuildError(f"{name} does not compile for sm_{sm} ({status})", said)
        lowered = tuple(must(nvrtc.nvrtcGetLoweredName(program, item.encode()), "a lowered name").decode() for item in expressions)
        size = must(nvrtc.nvrtcGetCUBINSize(program), "reading the cubin's size")
        cubin = _out_buffer(size)
        must(nvrtc.nvrtcGetCUBIN(program, cubin), "reading the cubin")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, lowered, sm, said)


def compile_kernel(
    file: str,
    sm: int,
    *,
    expressions: Sequence[str] = (),
    defines: Sequence[str] = (),
    cache: Cache | None = None,
) -> Compiled:
    """Compile a source of this package (``persistent_topk.cu``, ``patients.cu``) for one architecture, or take it from the cache.

    ``expressions``: C++ names of the template instances wanted, e.g. ``dsv4_repro::persistent::persistent_topk_kernel<512, 4u>``;
    ``defines``: ``NAME`` or ``NAME=VALUE``. Raises KernelNotFoundError (no such architecture or file), ToolMissingError,
    BuildError with the compiler's log.
    """
    try:
        source = source_path(file).read_bytes()
    except OSError as error:
        raise KernelNotFoundError(f"no source {file} in this package: {error.strerror}") from None
    store = cache if cache is not None else Cache("cubin")
    options = [f"--gpu-architecture=sm_{sm}", "--std=c++17", *(f"-D{item}" for item in defines)]
    key = content_key(_FORMAT, compiler_version(), source, *options, "--", *expressions)
    kept = store.load(key)
    if kept is not None:
        found = _unpack(kept)
        if found is not None:
            return found
    _check_architecture(sm)
    made = _compile(source, file, sm, expressions, options)
    head = json.dumps({"functions": made.functions, "sm": sm, "log": made.log}).encode()
    store.store(key, head + b"\n" + made.cubin)
    return made


def _unpack(raw: bytes) -> Compiled | None:
    head, _, cubin = raw.partition(b"\n")
    try:
        facts = json.loads(head)
        return Compiled(cubin, tuple(facts["functions"]), int(facts["sm"]), str(facts["log"]))
    except (ValueError, KeyError, TypeError):
        return None


# ---------------------------------------------------------------------------------------------------------------------------------
# The top-k kernel


def builtin_image(
    variant: str = "unguarded",
    sm: int = 90,
    top_k: int = 512,
    vec: int = 4,
    *,
    settings: Mapping[str, int] | None = None,
    cache: Cache | None = None,
) -> KernelImage:
    """The top-k kernel written here, built for one architecture, k and vector width (values a load).

    ``variant``: a key of VARIANTS; ``settings``: see SETTINGS. Raises KernelNotFoundError for what does not exist,
    ToolMissingError, BuildError, CubinError.
    """
    chosen = VARIANTS.get(variant)
    if chosen is None:
        raise KernelNotFoundError(f"no build {variant!r} of the builtin kernel", help_text=f"There are: {', '.join(VARIANTS)}")
    if top_k not in TOP_K_VALUES or vec not in VECTOR_WIDTHS:
        raise KernelNotFoundError(
            f"no instance of the builtin kernel for k {top_k}, vector width {vec}",
            help_text=f"k is one of {TOP_K_VALUES}, the width one of {VECTOR_WIDTHS}",
        )
    extra = dict(sorted((settings or {}).items()))
    for name, value in extra.items():
        low, high = SETTINGS.get(name, (1, 0))
        if not low <= value <= high:
            raise KernelNotFoundError(f"{name}={value} is no setting of the builtin kernel")
    defines = [f"DSV4_{item}" for item in chosen.defines] + [f"DSV4_{name.upper()}={value}" for name, value in extra.items()]
    made = compile_kernel(
        _TOPK,
        sm,
        expressions=(f"dsv4_repro::persistent::persistent_topk_kernel<{top_k}, {vec}u>",),
        defines=defines,
        cache=cache,
    )
    origin = "builtin" if variant == "unguarded" and not extra else f"builtin:{variant}"
    origin += "".join(f",{name}={value}" for name, value in extra.items())
    return _image(made, origin, chosen, top_k, vec)


def _image(made: Compiled, origin: str, variant: Variant, top_k: int, vec: int) -> KernelImage:
    from .cubin import kernel_images

    images = [item for item in kernel_images(made.cubin, origin, path=origin) if item.function == made.functions[0]]
    if len(images) != 1 or (images[0].top_k, images[0].vec, images[0].sm) != (top_k, vec, made.sm):
        raise CubinError(f"NVRTC made no {made.functions[0]} for sm_{made.sm}", path=origin)
    return dataclasses.replace(images[0], guarded=variant.guarded)
