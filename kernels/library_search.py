"""The persistent top-k in one shared object: its cubins by architecture, and what of the object could not be read.

Entries of an object fail one by one: what cannot be unpacked costs only itself and is said. Where nothing was found and something
could not be unpacked, that is an error and not an absence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CubinError
from .cubin import find_topk_functions, read_cubin
from .elf import EM_CUDA, read_elf
from .fatbin import FatbinEntry, find_cubins, list_entries, open_image

__all__ = ["KERNEL", "FoundCode", "binary_compatible", "carries_code", "search_file", "search_library"]

KERNEL = b"persistent_topk_kernel"
_MOST_NOTES = 8


def binary_compatible(cubin_sm: int, arch_specific: bool, sm: int) -> bool:
    """CUDA's rule (CUDA C++ Programming Guide, binary compatibility): same major, minor not newer; ``sm_90a`` only on 9.0."""
    if arch_specific:
        return cubin_sm == sm
    return cubin_sm // 10 == sm // 10 and cubin_sm <= sm


@dataclass(frozen=True, slots=True)
class FoundCode:
    """``cubins``: with the kernel, by architecture label. ``labels``: theirs, and of what beside them was not wanted.
    ``notes``: what could not be unpacked. ``carries``: the object holds GPU code at all.
    """

    cubins: dict[str, list[bytes]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    carries: bool = True


def search_library(path: Path, name: str, folder: Path, *, strict: bool, arch: int | None = None) -> FoundCode:
    """Cubins with the kernel in a shared object; ``arch``: only those that run there, nothing else is unpacked.

    Not ``strict``: an object that does not contain the kernel's name in the clear is passed over (the host side registers every
    kernel by name, so one that could be launched from there has it). CubinError: the object cannot be read, or none was found and
    something could not be unpacked.
    """
    found: dict[str, list[bytes]] = {}
    failed: list[str] = []
    containers: set[int] = set()
    with open_image(path) as data:
        if not strict and data.find(KERNEL) < 0:  # type: ignore[union-attr]
            return FoundCode()
        for entry, raw in find_cubins(data, KERNEL, path=name, folder=folder, arch=_runs_on(arch), failed=failed):
            try:
                if find_topk_functions(read_cubin(raw, f"{name} {entry.label}")):
                    found.setdefault(_label(entry, raw), []).append(raw)
                    containers.add(entry.container)
            except CubinError as error:
                failed.append(str(error)[:300])
        entries = list_entries(data, name) if arch is not None else ()
        beside = {_plain_label(e) for e in entries if e.kind == "cubin" and e.container in containers}
    if not found and failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise CubinError(f"no kernel was found, and this could not be unpacked: {failed[0]}{more}", path=name)
    return FoundCode(found, tuple(sorted(beside | set(found), key=_by_number)), _notes(name, failed))


def _runs_on(arch: int | None) -> Callable[[FatbinEntry], bool] | None:
    if arch is None:
        return None
    return lambda entry: binary_compatible(entry.sm, entry.suffix == "a", arch)


def _notes(name: str, failed: list[str]) -> tuple[str, ...]:
    more = [f"{name}: {len(failed) - _MOST_NOTES} more could not be unpacked"] if len(failed) > _MOST_NOTES else []
    return tuple([f"{name}: could not be unpacked: {text}" for text in failed[:_MOST_NOTES]] + more)


def _by_number(label: str) -> tuple[int, str]:
    return int("".join(filter(str.isdigit, label)) or "0"), label


def _plain_label(entry: FatbinEntry) -> str:
    return f"sm_{entry.sm}a" if entry.suffix == "a" else f"sm_{entry.sm}"


def _label(entry: FatbinEntry, raw: bytes) -> str:
    # A family-specific cubin (sm_100f) runs wherever a plain one of its number does.
    return f"sm_{entry.sm}a" if entry.suffix == "a" else read_cubin(raw).label


def search_file(path: Path, folder: Path, arch: int | None) -> FoundCode:
    """The same of a shared object, a fat binary or a bare cubin that is on this machine."""
    with open_image(path) as data:
        cubin = bytes(data[:4]) == b"\x7fELF" and read_elf(data, str(path)).machine == EM_CUDA
        carries = cubin or bool(list_entries(data, str(path)))
        raw = bytes(data) if cubin else b""
    if cubin:
        info = read_cubin(raw, str(path))
        return FoundCode({info.label: [raw]} if find_topk_functions(info) else {}, (info.label,))
    return search_library(path, path.name, folder, strict=True, arch=arch) if carries else FoundCode(carries=False)


def carries_code(path: Path, name: str) -> bool:
    """Whether a library holds any GPU code at all; one that cannot be read does not show that the kernel is absent."""
    try:
        with open_image(path) as data:
            return bool(list_entries(data, name))
    except CubinError:
        return False
