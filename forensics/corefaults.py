"""Exceptions that the hardware recorded in a GPU core dump, by NVIDIA's numbers."""

from __future__ import annotations

from dataclasses import dataclass

from .device_state import Dim3

__all__ = ["Fault", "exception_name"]

#: CUDBGException_t (NVIDIA's ``cudadebugger.h``): what a lane or an SM died of.
_EXCEPTIONS = {
    1: "lane illegal address", 2: "lane user stack overflow", 3: "device hardware stack overflow", 4: "warp illegal instruction",
    5: "warp out of range address", 6: "warp misaligned address", 7: "warp invalid address space", 8: "warp invalid PC",
    9: "warp hardware stack overflow", 10: "device illegal address", 11: "lane misaligned address", 12: "warp assert",
    13: "lane syscall error", 14: "warp illegal address", 15: "lane non-migratable atomic", 16: "lane invalid system atomic",
    17: "warp stack canary", 18: "cluster target block not present", 19: "cluster out of range address",
}  # fmt: skip
#: Newer drivers may know more; a number far past the list is no exception but a damaged field.
_HIGHEST = 63


@dataclass(frozen=True, slots=True)
class Fault:
    """An exception that the hardware recorded. ``code``: CUDBGException_t; ``what``: its name. ``block`` None: of an SM only."""

    device: int
    sm: int
    code: int
    what: str
    block: Dim3 | None = None
    warp: int | None = None
    lane: int | None = None


def exception_name(code: int) -> str | None:
    """The exception's name, ``exception N`` for one that is newer than the list; None where the number cannot be one."""
    if not 0 < code <= _HIGHEST:
        return None
    return _EXCEPTIONS.get(code, f"exception {code}")
