"""GPUs as the launcher sees them: number of SMs, shared memory, threads and registers per SM.

Per-architecture limits are those of the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (shared
memory per SM and per block, resident threads, 64 K registers, 1 KiB reserved per block from 8.0). SM counts are from NVIDIA's data
sheets (CUDA cores / cores per SM); the H200 entry was measured. A description of the card at hand is built from its driver's
attributes by the GPU process; this table is for machines without one and for ``--arch``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import KernelNotFoundError

__all__ = ["ArchLimits", "DeviceDescription", "arch_limits", "device_for_sm", "device_named", "named_devices"]

_KIB = 1024


@dataclass(frozen=True, slots=True)
class ArchLimits:
    """Limits of one compute capability. Bytes, except the counts of threads and 32-bit registers, which are per SM."""

    smem_per_sm: int
    smem_optin: int
    max_threads_per_sm: int
    reserved_smem_per_cta: int
    registers_per_sm: int = 65536


#: CUDA C++ Programming Guide, table of technical specifications per compute capability.
_LIMITS: dict[int, ArchLimits] = {
    75: ArchLimits(64 * _KIB, 64 * _KIB, 1024, 0),
    80: ArchLimits(164 * _KIB, 163 * _KIB, 2048, 1024),
    86: ArchLimits(100 * _KIB, 99 * _KIB, 1536, 1024),
    87: ArchLimits(164 * _KIB, 163 * _KIB, 1536, 1024),
    89: ArchLimits(100 * _KIB, 99 * _KIB, 1536, 1024),
    90: ArchLimits(228 * _KIB, 227 * _KIB, 2048, 1024),
    100: ArchLimits(228 * _KIB, 227 * _KIB, 2048, 1024),
    103: ArchLimits(228 * _KIB, 227 * _KIB, 2048, 1024),
    120: ArchLimits(100 * _KIB, 99 * _KIB, 1536, 1024),
    121: ArchLimits(100 * _KIB, 99 * _KIB, 1536, 1024),
}


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """One GPU. ``sm``: compute capability as 10 * major + minor, e.g. 120. ``smem_optin``: the most dynamic shared memory that a
    block may ask for, bytes. ``source``: where the figures are from.
    """

    name: str
    sm: int
    num_sms: int
    smem_per_sm: int
    smem_optin: int
    max_threads_per_sm: int
    reserved_smem_per_cta: int = 1024
    registers_per_sm: int = 65536
    source: str = ""

    @property
    def arch(self) -> str:
        """``sm_120`` for 120."""
        return f"sm_{self.sm}"


def _device(name: str, sm: int, num_sms: int, source: str) -> DeviceDescription:
    limits = _LIMITS[sm]
    return DeviceDescription(
        name=name,
        sm=sm,
        num_sms=num_sms,
        smem_per_sm=limits.smem_per_sm,
        smem_optin=limits.smem_optin,
        max_threads_per_sm=limits.max_threads_per_sm,
        reserved_smem_per_cta=limits.reserved_smem_per_cta,
        registers_per_sm=limits.registers_per_sm,
        source=source,
    )


_SHEET = "NVIDIA data sheet: CUDA cores / cores per SM; limits from the CUDA C++ Programming Guide"

#: The first entry of an architecture stands for it where only ``--arch`` is given.
_DEVICES: tuple[DeviceDescription, ...] = (
    _device("RTX PRO 6000 Blackwell", 120, 188, _SHEET + " (24064 / 128)"),
    _device("RTX PRO 5000 Blackwell", 120, 110, _SHEET + " (14080 / 128)"),
    _device("RTX 5090", 120, 170, _SHEET + " (21760 / 128)"),
    _device("RTX 5080", 120, 84, _SHEET + " (10752 / 128)"),
    _device("GB10", 121, 48, _SHEET + " (6144 / 128); vLLM #41834 reports 48 SMs and about 99 KiB"),
    _device("H200", 90, 132, "measured on an H200 (driver 580.159.04)"),
    _device("H100", 90, 132, _SHEET + " (SXM5: 16896 / 128)"),
    _device("H100 PCIe", 90, 114, _SHEET + " (14592 / 128)"),
    _device(
        "B200",
        100,
        148,
        "148 SMs as drivers are said to report, not checked on a card; limits from the CUDA C++ Programming Guide",
    ),
    _device(
        "B300",
        103,
        148,
        "148 SMs as drivers are said to report, not checked on a card; limits from the CUDA C++ Programming Guide",
    ),
    _device("L20", 89, 92, _SHEET + " (11776 / 128); 92 SMs and 101376 bytes in yhfgyyf/vllm-deepseek-v4-sm89 #110"),
    _device("L40S", 89, 142, _SHEET + " (18176 / 128)"),
    _device("L4", 89, 58, _SHEET + " (7424 / 128)"),
    _device("RTX 4090", 89, 128, _SHEET + " (16384 / 128)"),
    _device("A40", 86, 84, _SHEET + " (10752 / 128)"),
    _device("RTX 3090", 86, 82, _SHEET + " (10496 / 128)"),
    _device("A100", 80, 108, _SHEET + " (6912 / 64)"),
    _device("T4", 75, 40, _SHEET + " (2560 / 64)"),
)


def named_devices() -> tuple[DeviceDescription, ...]:
    """Every GPU that this table knows."""
    return _DEVICES


def _key(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "gpu", "tesla"))


def device_named(name: str) -> DeviceDescription:
    """The GPU of that name, without regard to case, spaces and the words NVIDIA and GeForce.

    KernelNotFoundError, listing the known names, if there is none.
    """
    wanted = _key(name[:200])
    for device in _DEVICES:
        if _key(device.name) == wanted:
            return device
    known = ", ".join(device.name for device in _DEVICES)
    raise KernelNotFoundError(
        f"no GPU named {name[:200]!r} is described here; known: {known}", help_text="Use one of these names, or --arch sm_120."
    )


def arch_limits(sm: int) -> ArchLimits:
    """Limits of a compute capability such as 120; KernelNotFoundError, listing what is known, for another."""
    limits = _LIMITS.get(sm)
    if limits is None:
        known = ", ".join(f"sm_{number}" for number in sorted(_LIMITS))
        raise KernelNotFoundError(f"no limits of sm_{sm} are known here; known: {known}", help_text="Use --arch with one of these.")
    return limits


def device_for_sm(sm: int) -> DeviceDescription:
    """The GPU that stands for an architecture where none is at hand, e.g. RTX PRO 6000 for 120. KernelNotFoundError if none."""
    for device in _DEVICES:
        if device.sm == sm:
            return device
    known = ", ".join(sorted({device.arch for device in _DEVICES}, key=lambda arch: int(arch[3:])))
    raise KernelNotFoundError(f"no GPU of sm_{sm} is described here; known: {known}", help_text="Use --arch with one of these.")
