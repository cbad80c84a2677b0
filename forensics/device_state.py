"""What was seen on a device at one moment, whoever saw it: a core dump, a debugger, the interpreter.

One shape for all sources, so that ``barrier`` judges a file, an attach and an interpreted hang by the same code. "Not read" is
None, never an empty tuple: an empty ``ctas`` says that a table was read and held no resident CTA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CodeImage", "CtaState", "DeviceState", "GridState", "LaneState", "Unread", "WarpState"]

Dim3 = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Unread:
    """Something that could not be read: what, why, and the exact remedy (a command or setting), if one is known."""

    what: str
    why: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class LaneState:
    """One thread. ``registers``: r-th u32 is Rr; ``predicates``: bit i is Pi. None: not read. PC offsets are bytes from the
    kernel function's start. ``named``: registers that were read singly, by name (``{"R5": 2}``), where the file is not known.
    """

    lane: int
    thread_idx: Dim3
    pc_offset: int | None
    registers: tuple[int, ...] | None = None
    predicates: int | None = None
    virtual_pc: int | None = None
    named: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WarpState:
    """One warp. Masks are 32-bit lane masks; ``lanes`` holds the lanes that were read (a valid lane may be missing)."""

    warp: int
    valid_mask: int
    active_mask: int
    pc_offset: int | None
    lanes: tuple[LaneState, ...] = ()
    uniform_registers: tuple[int, ...] | None = None
    virtual_pc: int | None = None


@dataclass(frozen=True, slots=True)
class CtaState:
    """One resident CTA (thread block). ``partial``: ``warps`` are those that were looked at, the block may have others."""

    block_idx: Dim3
    sm: int | None
    warps: tuple[WarpState, ...]
    cluster_idx: Dim3 | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class CodeImage:
    """Machine code of one kernel: a cubin (ELF) that holds it, relocated or not, with the mangled function name.

    ``entry`` is the virtual address of the function's first instruction, None if not known.
    """

    cubin: bytes
    function: str
    entry: int | None = None
    sm: int | None = None


@dataclass(frozen=True, slots=True)
class GridState:
    """One launch. ``params`` are the raw parameter bytes as the kernel reads them. ``kernel`` is the mangled name if known.

    ``code`` None: the machine code is not in the evidence. ``sass``: instead of code, disassembled text lines by byte offset
    (a debugger transcript has only those; where the function's start is not known, by address). ``complete``: whether ``ctas``
    lists every resident CTA of the launch. ``shared_bytes``: shared memory that one CTA holds, with what the system reserves;
    ``registers``: per thread; None: not read.
    """

    device: int
    grid_id: int
    kernel: str
    grid_dim: Dim3
    block_dim: Dim3
    ctas: tuple[CtaState, ...] | None
    cluster_dim: Dim3 = (1, 1, 1)
    params: bytes | None = None
    code: CodeImage | None = None
    sass: Mapping[int, str] = field(default_factory=dict)
    complete: bool = True
    shared_bytes: int | None = None
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceState:
    """All that one source saw. ``origin``: measured (a device), interpreted (the CPU ground), reported (somebody's transcript).

    ``memory``: device words read beside registers, by byte address (u32); a counter that was read live is found here.
    ``printed``: numbers that a debugger printed by name only (``{arrival_counter = 1}``), their address not known.
    ``devices``: device ordinal to name and SM architecture, e.g. {0: ("NVIDIA H200", 90, 132)} (name, sm, number of SMs).
    """

    source: str
    origin: str
    grids: tuple[GridState, ...]
    devices: Mapping[int, tuple[str, int | None, int | None]] = field(default_factory=dict)
    memory: Mapping[int, int] = field(default_factory=dict)
    unread: tuple[Unread, ...] = ()
    printed: Mapping[str, int] = field(default_factory=dict)
