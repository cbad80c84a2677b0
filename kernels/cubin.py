"""Metadata of a cubin: architecture, kernels, and for each the parameters, registers, shared memory and launch bounds it declares.

Nothing is assumed that the cubin says itself. Attributes are those of ``.nv.info`` and ``.nv.info.<kernel>`` (names as ``cuobjdump
-elf`` prints them); each is one byte of format, one of number, and two bytes of value or of length. Checked against cubins of
NVRTC 12.4 and 13.5 (ELF ABI versions 7 and 8) and of vLLM 0.20.2 to 0.33.0.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from ..errors import CubinError
from .elf import EM_CUDA, Buffer, ElfImage, Section, Symbol, function_symbols, read_elf
from .image import KernelImage, sha256_hex

__all__ = ["CubinFunction", "CubinInfo", "Subroutine", "find_topk_functions", "kernel_images", "read_cubin"]

_FORMAT_SIZES = {1: 0, 2: 1, 3: 2}
_FORMAT_LONG = 4
_EIATTR_MAX_THREADS = 0x05
_EIATTR_PARAM_CBANK = 0x0A
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_MIN_STACK_SIZE = 0x12
_EIATTR_KPARAM_INFO = 0x17
_EIATTR_CBANK_PARAM_SIZE = 0x19
_EIATTR_MAXREG_COUNT = 0x1B
_EIATTR_REGCOUNT = 0x2F
_EIATTR_NUM_BARRIERS = 0x4C
_EICOMPAT_ACCELERATOR_TARGET = 0x09

#: From sm_90 the section of static shared memory begins with what the system reserves, bytes.
RESERVED_SHARED = 1024

#: The largest cubin that is read, bytes (shipped ones have up to 65 MB; those with this kernel up to 7).
MAX_CUBIN_BYTES = 256 << 20

_TOPK = re.compile(r"persistent_topk_kernelILi(\d{1,6})EL[ijlm](\d{1,3})E")


@dataclass(frozen=True, slots=True)
class Subroutine:
    """A function in the same section as a kernel. ``offset``: bytes from the kernel's first instruction."""

    name: str
    offset: int
    size: int
    symbol_index: int


@dataclass(frozen=True, slots=True)
class CubinFunction:
    """A kernel of a cubin. None: the cubin does not say.

    ``params_base``, ``params_size``: bytes in constant bank 0. ``parameters``: (offset, size) of each, in bytes. ``registers``: per
    thread. ``shared_section``: bytes of static shared memory as the ELF has them (from sm_90 with 1 KiB that the system reserves);
    ``static_smem``: without that. ``frame_size``, ``min_stack``: bytes of local memory. ``max_threads``: the product of the
    launch bounds. ``symbol_index``: what ``nvdisasm -fun`` takes.
    """

    name: str
    symbol_index: int
    section_index: int
    value: int
    size: int
    params_base: int | None
    params_size: int | None
    parameters: tuple[tuple[int, int], ...]
    registers: int | None
    max_registers: int | None
    max_threads: int | None
    barriers: int | None
    frame_size: int | None
    min_stack: int | None
    shared_section: int
    static_smem: int
    subroutines: tuple[Subroutine, ...]


@dataclass(frozen=True, slots=True)
class CubinInfo:
    """A cubin. ``sm``: e.g. 120. ``arch_specific``: built for that compute capability alone (``sm_90a``); a family target
    (``sm_100f``) leaves no mark in the cubin and follows the rule of plain ones within its major version.
    """

    sha256: str
    sm: int
    arch_specific: bool
    abi_version: int
    functions: tuple[CubinFunction, ...]

    @property
    def label(self) -> str:
        """``sm_90`` or ``sm_90a``."""
        return f"sm_{self.sm}" + ("a" if self.arch_specific else "")

    def function(self, name: str) -> CubinFunction | None:
        """The kernel of that mangled name."""
        return next((function for function in self.functions if function.name == name), None)


def _attributes(content: bytes, path: str, place: str) -> list[tuple[int, bytes]]:
    """(number, value bytes) of each attribute."""
    found: list[tuple[int, bytes]] = []
    offset = 0
    while offset + 4 <= len(content):
        form, number, word = struct.unpack_from("<BBH", content, offset)
        offset += 4
        if form == _FORMAT_LONG:
            if offset + word > len(content):
                raise CubinError(f"attribute {number:#x} of {word} bytes runs past the section", path=path, place=place)
            found.append((number, content[offset : offset + word]))
            offset += word
        elif form in _FORMAT_SIZES:
            found.append((number, word.to_bytes(2, "little")[: _FORMAT_SIZES[form]]))
        else:
            raise CubinError(f"attribute {number:#x} has format {form}", path=path, place=place)
    return found


def _architecture(image: ElfImage) -> tuple[int, bool]:
    """Compute capability and whether the target is architecture-specific, from e_flags (by ABI version) and ``.nv.compat``."""
    if image.abi_version >= 8:
        sm = image.flags >> 8 & 0xFF
        compat = image.section(".nv.compat")
        specific = False
        if compat is not None:
            specific = any(
                number == _EICOMPAT_ACCELERATOR_TARGET and value[:1] == b"\x01"
                for number, value in _attributes(image.content(compat), image.path, ".nv.compat")
            )
        return sm, specific
    return image.flags & 0xFF, bool(image.flags & 0x800)


def read_cubin(data: Buffer, path: str = "cubin") -> CubinInfo:
    """Everything above from the bytes of a cubin. CubinError names the place of what cannot be read."""
    if len(data) > MAX_CUBIN_BYTES:
        raise CubinError(f"{len(data)} bytes, more than {MAX_CUBIN_BYTES >> 20} MiB", path=path)
    raw = bytes(data)
    image = read_elf(raw, path)
    if image.machine != EM_CUDA:
        raise CubinError(f"ELF machine {image.machine} is not the NVIDIA GPU ({EM_CUDA})", path=path, place="ELF header")
    sm, specific = _architecture(image)
    if not 50 <= sm <= 250:
        raise CubinError(f"e_flags {image.flags:#x} give no known architecture (sm_{sm})", path=path, place="ELF header")

    by_name: dict[str, Section] = {}
    for section in image.sections:
        by_name.setdefault(section.name, section)
    per_symbol = _global_attributes(image)
    symbols = list(function_symbols(image))
    by_section: dict[int, list[Symbol]] = {}
    for symbol in symbols:
        by_section.setdefault(symbol.section, []).append(symbol)

    functions: list[CubinFunction] = []
    seen: set[str] = set()
    for symbol in symbols:
        if symbol.section >= len(image.sections) or symbol.name in seen:
            continue
        if image.sections[symbol.section].name != f".text.{symbol.name}":
            continue
        seen.add(symbol.name)
        functions.append(_function(image, symbol, sm, by_name, by_section[symbol.section], per_symbol))
    return CubinInfo(sha256_hex(raw), sm, specific, image.abi_version, tuple(functions))


def _global_attributes(image: ElfImage) -> dict[tuple[int, int], int]:
    """(attribute number, symbol index) to value, from ``.nv.info``."""
    section = image.section(".nv.info")
    if section is None:
        return {}
    wanted = (_EIATTR_REGCOUNT, _EIATTR_FRAME_SIZE, _EIATTR_MIN_STACK_SIZE)
    found: dict[tuple[int, int], int] = {}
    for number, value in _attributes(image.content(section), image.path, ".nv.info"):
        if number in wanted and len(value) >= 8:
            index, count = struct.unpack_from("<II", value)
            found[number, index] = count
    return found


def _function(
    image: ElfImage,
    symbol: Symbol,
    sm: int,
    by_name: dict[str, Section],
    companions: list[Symbol],
    per_symbol: dict[tuple[int, int], int],
) -> CubinFunction:
    params_base = params_size = max_registers = max_threads = barriers = None
    parameters: list[tuple[int, int]] = []
    info = by_name.get(f".nv.info.{symbol.name}")
    for number, value in _attributes(image.content(info), image.path, info.name) if info is not None else ():
        if number == _EIATTR_PARAM_CBANK and len(value) >= 8:
            word = struct.unpack_from("<I", value, 4)[0]
            params_base, params_size = word & 0xFFFF, word >> 16
        elif number == _EIATTR_CBANK_PARAM_SIZE and len(value) >= 2 and params_size is None:
            params_size = int.from_bytes(value[:2], "little")
        elif number == _EIATTR_KPARAM_INFO and len(value) >= 12:
            _, _, offset, word = struct.unpack_from("<IHHI", value)
            parameters.append((offset, word >> 18))
        elif number == _EIATTR_MAXREG_COUNT and len(value) >= 2:
            max_registers = int.from_bytes(value[:2], "little")
        elif number == _EIATTR_NUM_BARRIERS and value:
            barriers = value[0]
        elif number == _EIATTR_MAX_THREADS and len(value) >= 12:
            x, y, z = struct.unpack_from("<III", value)
            max_threads = x * y * z
    registers = per_symbol.get((_EIATTR_REGCOUNT, symbol.index))
    if registers is None and image.abi_version < 8:
        # Before ABI version 8 the text section's sh_info carries the count in its top byte.
        registers = image.sections[symbol.section].info >> 24 or None
    shared = by_name.get(f".nv.shared.{symbol.name}")
    shared_section = shared.size if shared is not None else 0
    reserved = RESERVED_SHARED if sm >= 90 and shared_section >= RESERVED_SHARED else 0
    return CubinFunction(
        name=symbol.name,
        symbol_index=symbol.index,
        section_index=symbol.section,
        value=symbol.value,
        size=symbol.size,
        params_base=params_base,
        params_size=params_size,
        parameters=tuple(sorted(parameters)),
        registers=registers,
        max_registers=max_registers,
        max_threads=max_threads,
        barriers=barriers,
        frame_size=per_symbol.get((_EIATTR_FRAME_SIZE, symbol.index)),
        min_stack=per_symbol.get((_EIATTR_MIN_STACK_SIZE, symbol.index)),
        shared_section=shared_section,
        static_smem=shared_section - reserved,
        subroutines=tuple(
            Subroutine(other.name, other.value - symbol.value, other.size, other.index)
            for other in companions
            if other.index != symbol.index
        ),
    )


def find_topk_functions(cubin: CubinInfo) -> list[tuple[CubinFunction, int, int]]:
    """The instantiations of the persistent top-k: (function, top_k, vector width), by their mangled template arguments."""
    found: list[tuple[CubinFunction, int, int]] = []
    for function in cubin.functions:
        match = _TOPK.search(function.name)
        if match is not None:
            found.append((function, int(match[1]), int(match[2])))
    return found


def kernel_images(data: bytes, origin: str, *, path: str = "cubin", label: str = "") -> tuple[KernelImage, ...]:
    """A KernelImage for every persistent top-k in a cubin; empty if there is none.

    CubinError if one of them does not say where its parameters lie, its registers or its launch bounds.
    """
    info = read_cubin(data, path)
    images: list[KernelImage] = []
    for function, top_k, vec in find_topk_functions(info):
        place = function.name
        if function.params_base is None or function.params_size is None:
            raise CubinError("the kernel does not say where its parameters lie (EIATTR_PARAM_CBANK)", path=path, place=place)
        if function.registers is None:
            raise CubinError("the kernel does not say how many registers it takes (EIATTR_REGCOUNT)", path=path, place=place)
        if function.max_threads is None:
            raise CubinError("the kernel declares no launch bounds (EIATTR_MAX_THREADS)", path=path, place=place)
        images.append(
            KernelImage(
                origin=origin,
                cubin=data,
                cubin_sha256=info.sha256,
                sm=info.sm,
                function=function.name,
                top_k=top_k,
                vec=vec,
                params_base=function.params_base,
                params_size=function.params_size,
                static_smem=function.static_smem,
                registers=function.registers,
                max_threads=function.max_threads,
                guarded=None,
                label=label or f"{origin} {info.label} <{top_k},{vec}>",
            )
        )
    return tuple(images)
