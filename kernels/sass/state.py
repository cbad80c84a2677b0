"""The threads of the interpreted GPU as vectors: registers, predicates, shared and local memory of all resident CTAs.

Position p of every vector is thread ``p % stride`` of the CTA in row ``p // stride``. A register that is the same in all threads
is kept as one Python int (bool for a predicate) and its bit in ``uniform`` is set. No two registers share an array, so results
can be written in place. Generated block code calls the methods here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .atomics import Atomics
from .blocks import PREDICATE_BASE, REGISTERS
from .memory import POISON_WORD, Memory
from .tables import MAX_KEPT_TABLES, TableKey, Tables

if TYPE_CHECKING:
    from .checker import AccessChecker

__all__ = ["ThreadVector"]

Index = npt.NDArray[np.intp]
Words = npt.NDArray[np.uint32]
#: What a shuffle gives a thread whose source lane is not active.
UNDEFINED_SHUFFLE = 0x0DEAD5F1
ALL_UNIFORM = (1 << REGISTERS) - 1
_MASK = 0xFFFFFFFF


class ThreadVector(Atomics):
    """Architectural state of ``rows`` CTAs of ``stride`` threads (a multiple of 32)."""

    def __init__(
        self,
        memory: Memory,
        stride: int,
        shared_bytes: int,
        local_bytes: int,
        shared_window: int,
        kept_tables: dict[TableKey, Tables] | None = None,
    ) -> None:
        """``kept_tables``: what launches of one machine share, by geometry."""
        self._kept_tables: dict[TableKey, Tables] = {} if kept_tables is None else kept_tables
        self.memory = memory
        self.stride = stride
        self.shared_words = -(-shared_bytes // 4)
        self.local_words = local_bytes // 4
        self.shared_window = shared_window
        self.K: dict[int, int] = {}
        self.regs: list[Any] = []
        self.uniform = ALL_UNIFORM
        self.writes = 0
        self.rows = 0
        self.size = 0
        self.bars: dict[int, Any] = {}
        self.local: dict[int, Words] = {}
        self._shuffles: dict[tuple[str, int, int], tuple[Index, npt.NDArray[np.bool_]]] = {}
        self.checker: AccessChecker | None = None
        self.block_dim = (stride, 1, 1)
        self.grid_dim = (1, 1, 1)

    # ---- making and reshaping ------------------------------------------------------------------------------------------

    def start(self, ctas: list[int]) -> None:
        """Fresh state for these CTAs (flat block indices), one row each."""
        self.regs = [0] * PREDICATE_BASE + [False] * (REGISTERS - PREDICATE_BASE)
        self.uniform = ALL_UNIFORM
        self.writes = 0
        self.bars = {}
        self.local = {}
        self.ctas = list(ctas)
        self.H: Words = np.full(self.shared_words * len(ctas), POISON_WORD, np.uint32)
        self._tables()
        self.bind_memory()

    def clear(self) -> None:
        """Let go of everything: nobody is resident any more."""
        self.ctas, self.regs, self.bars, self.local = [], [], {}, {}
        self.H = np.zeros(0, np.uint32)
        self._bind_shared()

    def bind_memory(self) -> None:
        """Take the arena's current array (an allocation may have moved it)."""
        self.G = self.memory.words
        self.G1, self.G2, self.G3 = self.G[1:], self.G[2:], self.G[3:]
        self.Gb = self.memory.raw
        self.Gh = self.Gb.view(np.uint16)

    def _bind_shared(self) -> None:
        self.H1, self.H2, self.H3 = self.H[1:], self.H[2:], self.H[3:]
        self.Hb = self.H.view(np.uint8)
        self.Hh = self.H.view(np.uint16)

    def _tables(self) -> None:
        rows = len(self.ctas)
        self.rows, self.size = rows, rows * self.stride
        self.single = rows == 1
        key = (tuple(self.ctas), self.stride, self.shared_words, self.block_dim, self.grid_dim)
        found = self._kept_tables.get(key)
        if found is None:
            found = Tables(self.ctas, self.stride, self.shared_words, self.block_dim, self.grid_dim)
            if len(self._kept_tables) >= MAX_KEPT_TABLES:
                self._kept_tables.clear()
            self._kept_tables[key] = found
        self.iota, self.warp_of, self.special = found.iota, found.warp_of, found.special
        self.shared_base, self.shared_base2, self.shared_base1 = found.shared_base, found.shared_base2, found.shared_base1
        self._bits, self._place, self._sums = found.bits, found.place, found.sums
        names = ("SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z")
        self.block_index = {name: int(self.special[name][0]) for name in names} if self.single else {}
        self._bind_shared()

    def keep(self, rows: Index) -> None:
        """Drop all CTAs but those of these rows (sorted)."""

        def pick(array: Any) -> Any:
            return array.reshape(self.rows, self.stride)[rows].reshape(-1)

        self.regs = [pick(value) if value.__class__ is np.ndarray else value for value in self.regs]
        self.bars = {number: pick(value) if value.__class__ is np.ndarray else value for number, value in self.bars.items()}
        self.local = {word: pick(row) for word, row in self.local.items()}
        self.H = self.H.reshape(self.rows, self.shared_words)[rows].reshape(-1)
        self.ctas = [self.ctas[row] for row in rows]
        self._tables()

    def append(self, ctas: list[int]) -> None:
        """Further CTAs in fresh rows at the end. Their registers start as 0 where the others' are arrays."""

        def extend(array: Any, value: Any) -> Any:
            return np.concatenate((array, np.full(len(ctas) * self.stride, value, array.dtype)))

        for number, value in enumerate(self.regs):
            if value.__class__ is np.ndarray:
                self.regs[number] = extend(value, 0)
        self.bars = {number: extend(value, 0) if value.__class__ is np.ndarray else value for number, value in self.bars.items()}
        self.local = {word: extend(row, 0) for word, row in self.local.items()}
        self.H = np.concatenate((self.H, np.full(self.shared_words * len(ctas), POISON_WORD, np.uint32)))
        self.ctas = self.ctas + list(ctas)
        self._tables()

    def check(self, space: str, low: Any, high: Any, size: int, where: Any, offset: int, how: str, guard: Any) -> None:
        """Called before every access of code that was generated with checks."""
        if self.checker is not None:
            self.checker.check(space, low, high, size, where, offset, how, guard)

    # ---- registers --------------------------------------------------------------------------------------------------------

    def put(self, number: int, where: Any, value: Any, kind: Any) -> None:
        """Write a register of some threads; it stays uniform if that changes nothing."""
        old = self.regs[number]
        if old.__class__ is np.ndarray:
            old[where] = value
        elif old != value or value.__class__ is np.ndarray:
            array = np.full(self.size, old, kind)
            array[where] = value
            self.regs[number] = array
            self.uniform &= ~(1 << number)

    def register(self, number: int, position: int) -> int:
        """A register or predicate of one thread as an int."""
        value = self.regs[number]
        return int(value[position]) if value.__class__ is np.ndarray else int(value)

    # ---- warps --------------------------------------------------------------------------------------------------------------

    def ballot(self, truth: Any, where: Any, n: int) -> Words:
        """For each thread of the group the lanes of its warp that are in the group and for which ``truth`` (None: always) holds."""
        if where is None:
            return np.packbits(truth, bitorder="little").view(np.uint32).repeat(32)
        bits = self._bits
        bits[where] = True if truth is None else truth
        packed: Words = np.packbits(bits, bitorder="little").view(np.uint32)
        bits[where] = False
        found: Words = packed.take(self.warp_of[where])
        return found

    def warp_sum(self, value: Words, where: Any, n: int) -> Words:
        if where is None:
            return np.asarray(value.reshape(-1, 32).sum(axis=1, dtype=np.uint32).repeat(32), np.uint32)
        sums = self._sums
        sums[where] = value
        total = sums.reshape(-1, 32).sum(axis=1, dtype=np.uint32)
        sums[where] = 0
        return np.asarray(total.take(self.warp_of[where]), np.uint32)

    def note_convergence(self, barrier: int, where: Any) -> None:
        """BSSY: every thread of the group remembers which lanes of its warp came with it."""
        if where is None:
            self.bars[barrier] = _MASK
            return
        masks = self.bars.get(barrier, 0)
        if masks.__class__ is not np.ndarray:
            masks = self.bars[barrier] = np.full(self.size, masks, np.uint32)
        masks[where] = 1 << (where & 31) if where.__class__ is int else self.ballot(None, where, 0)

    def leave_convergence(self, barrier: int, where: Any, guard: Any) -> None:
        """BREAK: nobody of its warp waits any longer at this barrier for a thread of the group for which ``guard`` holds."""
        bits = self._bits
        place = slice(None) if where is None else where
        bits[place] = True if guard is None else guard
        left = np.packbits(bits, bitorder="little").view(np.uint32).repeat(32)
        bits[place] = False
        self.bars[barrier] = self.bars.get(barrier, 0) & ~left

    def _pattern(self, kind: str, lane: int, control: int) -> tuple[Index, npt.NDArray[np.bool_]]:
        """For a shuffle whose operands are uniform: source lane and in-range flag of each of the 32 lanes, and whether any is
        out.
        """
        key = (kind, lane, control)
        found = self._shuffles.get(key)
        if found is None:
            lanes = np.arange(32, dtype=np.int64)
            source, inside = _shuffle_source(kind, lanes, np.int64(lane & 31), np.int64(control))
            found = self._shuffles[key] = (source.astype(np.intp), inside)
        return found

    def _whole_warps(self, where: Any, n: int) -> bool:
        if n & 31:
            return False
        if where is None:
            return True
        if where.__class__ is slice:
            return not where.start & 31
        first = where[::32]
        return not (first & 31).any() and bool((where[31::32] - first == 31).all())

    def shuffle(self, kind: str, value: Words, lane: Any, control: Any, where: Any, n: int, guard: Any) -> tuple[Words, Any]:
        """(value of the source lane or own value, whether the source is in range). An inactive source gives an undefined value."""
        if guard is None and lane.__class__ is int and control.__class__ is int and self._whole_warps(where, n):
            source, inside = self._pattern(kind, lane, control)
            table = value.reshape(-1, 32)
            return table[:, source].reshape(-1), np.tile(inside, n >> 5)
        threads = self.iota if where is None else self.iota[where]
        lanes = threads & 31
        amount = np.asarray(lane).astype(np.int64) & 31
        source, inside = _shuffle_source(kind, lanes, amount, np.asarray(control).astype(np.int64))
        wanted = (threads & ~31) | source
        place = self._place
        place[threads] = np.arange(n, dtype=np.intp)
        found = place[wanted]
        found[found >= n] = 0
        active = threads[found] == wanted
        if guard is not None:
            active &= guard[found]
        return np.where(active, value[found], np.uint32(UNDEFINED_SHUFFLE)), inside

    def shuffle_one(self, kind: str, value: int, lane: int, control: int, position: int) -> tuple[int, bool]:
        source, inside = _shuffle_source(kind, np.int64(position & 31), np.int64(lane & 31), np.int64(control))
        return (value if int(source) == position & 31 else UNDEFINED_SHUFFLE), bool(inside)

    # ---- local memory ----------------------------------------------------------------------------------------------------------

    def row(self, word: int) -> Words:
        """One word of local memory over all threads."""
        row = self.local.get(word)
        if row is None:
            if not 0 <= word < self.local_words:
                raise IndexError(f"local address {word * 4:#x}")
            row = self.local[word] = np.full(self.size, POISON_WORD, np.uint32)
        return row

    def store_row(self, word: int, where: Any, value: Any) -> None:
        self.writes += 1
        self.row(word)[slice(None) if where is None else where] = value

    def _parts(self, address: Any, where: Any, guard: Any, n: int) -> tuple[Words, Index, Any]:
        """(addresses, thread positions, places in the group) of the threads that take part."""
        positions = self.iota if where is None else self.iota[where : where + 1] if where.__class__ is int else self.iota[where]
        places: Any = np.arange(n)
        if guard is not None:
            places = np.flatnonzero(np.broadcast_to(np.asarray(guard), (n,)))
        addresses = np.broadcast_to(np.asarray(address, np.uint32), (n,))
        return addresses[places], positions[places], places

    def load_local(self, address: Any, where: Any, guard: Any, n: int, sub: str) -> Any:
        n = 1 if where.__class__ is int else n
        addresses, positions, places = self._parts(address, where, guard, n)
        words = addresses >> np.uint32(2)
        result = np.zeros(n, np.uint32)
        for word in np.unique(words):
            chosen = np.flatnonzero(words == word)
            result[places[chosen]] = self.row(int(word))[positions[chosen]]
        if sub:
            shift = np.zeros(n, np.uint32)
            shift[places] = (addresses & np.uint32(3)) << np.uint32(3)
            result = (result >> shift) & np.uint32(0xFF if sub.endswith("8") else 0xFFFF)
        return int(result[0]) if where.__class__ is int else result

    def store_local(self, address: Any, where: Any, value: Any, guard: Any, n: int, sub: str) -> None:
        n = 1 if where.__class__ is int else n
        addresses, positions, places = self._parts(address, where, guard, n)
        self.writes += len(places)
        words = addresses >> np.uint32(2)
        values = np.broadcast_to(np.asarray(value, np.uint32), (n,))[places]
        for word in np.unique(words):
            chosen = np.flatnonzero(words == word)
            row, at = self.row(int(word)), positions[chosen]
            if sub:
                mask = np.uint32(0xFF if sub.endswith("8") else 0xFFFF)
                shift = (addresses[chosen] & np.uint32(3)) << np.uint32(3)
                row[at] = (row[at] & ~(mask << shift)) | ((values[chosen] & mask) << shift)
            else:
                row[at] = values[chosen]

    # ---- generic addresses -----------------------------------------------------------------------------------------------------

    def _split(self, low: Any, high: Any, where: Any, guard: Any, n: int) -> list[tuple[Any, Index, Any]]:
        """[(arena as bytes, byte places, places in the group)] for the shared and the global part."""
        addresses, positions, places = self._parts(low, where, guard, n)
        above = np.broadcast_to(np.asarray(high, np.uint32), (n,))[places]
        shared = above == np.uint32(self.shared_window)
        parts: list[tuple[Any, Index, Any]] = []
        if shared.any():
            chosen = np.flatnonzero(shared)
            parts.append((self.Hb, self.shared_base1[positions[chosen]] + addresses[chosen], places[chosen]))
        if not shared.all():
            chosen = np.flatnonzero(~shared)
            if (above[chosen] != np.uint32(7)).any():
                raise IndexError("generic address that is neither shared nor global")
            parts.append((self.Gb, addresses[chosen].astype(np.intp), places[chosen]))
        return parts

    def load_generic(self, low: Any, high: Any, where: Any, guard: Any, n: int, sub: str) -> Any:
        n = 1 if where.__class__ is int else n
        result = np.zeros(n, np.uint32)
        kind, shift = _SUB[sub]
        for arena, at, places in self._split(low, high, where, guard, n):
            result[places] = arena.view(kind)[at >> shift]
        return int(result[0]) if where.__class__ is int else result

    def store_generic(self, low: Any, high: Any, where: Any, value: Any, guard: Any, n: int, sub: str) -> None:
        n = 1 if where.__class__ is int else n
        kind, shift = _SUB[sub]
        values = np.broadcast_to(np.asarray(value, np.uint32), (n,))
        for arena, at, places in self._split(low, high, where, guard, n):
            arena.view(kind)[at >> shift] = values[places]
            self.writes += len(places)


_SUB: dict[str, tuple[Any, int]] = {
    "": (np.uint32, 2),
    "U8": (np.uint8, 0),
    "S8": (np.uint8, 0),
    "U16": (np.uint16, 1),
    "S16": (np.uint16, 1),
}


def _shuffle_source(kind: str, lanes: Any, amount: Any, control: Any) -> tuple[Any, Any]:
    """PTX's shfl: control bits 0-4 clamp, 8-12 segment mask; (source lane, in range)."""
    segment = (control >> 8) & 31
    clamp = control & 31
    least = lanes & segment
    most = least | (clamp & ~segment & 31)
    if kind == "UP":
        source = lanes - amount
        inside = source >= most
    elif kind == "DOWN":
        source = lanes + amount
        inside = source <= most
    elif kind == "BFLY":
        source = lanes ^ amount
        inside = source <= most
    else:
        source = least | (amount & ~segment & 31)
        inside = source <= most
    return np.where(inside, source, lanes), inside
