"""How an interpreted launch ended, and what the machine looked like: the records that reports and dump writers take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["CtaSnapshot", "Fault", "Residency", "RunResult", "StuckThreads"]

Kind = Literal["completed", "deadlock", "livelock", "budget", "fault"]


@dataclass(frozen=True, slots=True)
class Residency:
    """Where a CTA ran or runs: SM number and slot on it."""

    block: int
    sm: int
    slot: int


@dataclass(frozen=True, slots=True)
class Fault:
    """An illegal access. ``thread``: flat thread index in the CTA; ``kind``: out-of-bounds, misaligned, uninitialised, access."""

    kind: str
    space: str
    address: int
    size: int
    block: int
    thread: int
    offset: int
    text: str
    message: str


@dataclass(frozen=True, slots=True)
class StuckThreads:
    """Threads of one CTA that stand at one PC. ``state``: polling, waiting (at a barrier) or ready. ``threads``: flat indices
    in the CTA.
    """

    block: int
    pc: int
    state: str
    instruction: str
    threads: tuple[int, ...]


@dataclass(frozen=True)
class CtaSnapshot:
    """Architectural state of one resident CTA; n threads.

    ``pc`` int64 [n], -1 for a thread that has left; ``registers`` uint32 [n, registers] (R0 first); ``predicates`` uint8 [n],
    bit i is Pi; ``uniform_registers`` uint32 [n, 64]; ``uniform_predicates`` uint8 [n]; ``shared`` the CTA's shared memory with
    what the system reserves in front of it. Uniform registers are kept per thread here.
    """

    residency: Residency
    pc: npt.NDArray[np.int64]
    registers: npt.NDArray[np.uint32]
    predicates: npt.NDArray[np.uint8]
    uniform_registers: npt.NDArray[np.uint32]
    uniform_predicates: npt.NDArray[np.uint8]
    shared: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class RunResult:
    """The end of a launch.

    ``deadlock`` is proven: in one round every resident thread that can act polled and came back to exactly the state it had,
    nobody wrote anything, nobody left, and nobody can enter, so nothing can ever change under any scheduler. ``spin``: whether
    anybody polls (else all wait at barriers). ``livelock``: the complete state of the machine recurred while it was running
    (``proof`` says over how many blocks). ``budget``: the instruction budget or the deadline ended it first; nothing is known.
    ``fault``: an illegal access. ``never_started``: CTAs that no slot was free for. ``exited``: CTAs that ran to their end.
    """

    kind: Kind
    proof: str
    grid: int
    threads: int
    exited: tuple[int, ...]
    resident: tuple[Residency, ...]
    never_started: tuple[int, ...]
    stuck: tuple[StuckThreads, ...]
    warp_instructions: int
    thread_instructions: int
    block_executions: int
    rounds: int
    fault: Fault | None = None
    spin: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def completed(self) -> bool:
        return self.kind == "completed"
