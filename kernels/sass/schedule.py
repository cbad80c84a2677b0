"""Which threads run next: groups by program counter, waits, polls, retirement.

The rule is "smallest PC first": threads that are behind run until they meet those ahead, equal PCs merge, and so a machine of
many CTAs stays converged. Any order is a legal schedule of independent threads; ``random`` mode picks groups and subsets of their
warps at random (never splitting a warp: the compiler relies on convergence after BSYNC). ``priority`` mode gives each CTA a random
priority, runs the highest one that is ready, now and then moves it to the bottom, and now and then holds some of its warps back
until all others have stopped. So one CTA, or one warp, gets far ahead of another, which races need and an evenly random choice
almost never does (after Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs", 2010).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import UnknownInstructionError
from .blocks import UNIFORM_BASE
from .decode import INSTRUCTION_BYTES, Instruction, SassFunction
from .operands import RZ
from .state import ThreadVector

__all__ = ["Group", "Schedule"]

Index = npt.NDArray[np.intp]
#: Threads of a group: None (all), a slice, or sorted positions; and how many.
Group = tuple[Any, int]
#: Every so many turns it is not the smallest PC's turn but the next one's in rotation: a loop that never ends starves nobody.
_FAIRNESS = 1024
#: How rarely, as a power of two of turns, the CTA that runs goes to the bottom of the priorities: drawn for each launch.
_RARELY = (4, 12)
#: The same for holding warps back.
_HOLDING = (3, 8)
#: Rounds of loops without a side effect that several threads may do before they count as waiting.
_LOOPS = 1 << 14


def _successor(i: Instruction) -> int:
    """Where threads go after a wait: on, or for BRA.CONV over the slow path."""
    return i.target if i.target is not None and i.has("CONV") else i.offset + INSTRUCTION_BYTES


class Schedule:
    """Ready, waiting and parked threads of one machine, by program counter (byte offset)."""

    def __init__(
        self,
        vector: ThreadVector,
        function: SassFunction,
        waits: Mapping[int, Instruction],
        chance: random.Random | None,
        *,
        priorities: bool = False,
    ) -> None:
        """``waits``: the function's instructions at which threads wait for others, by offset. ``priorities``: of CTAs, drawn."""
        self.vector = vector
        self.function = function
        self.chance = chance
        self.syncs = waits
        self._after = {pc: _successor(i) for pc, i in self.syncs.items()}
        self.ready: dict[int, list[Group]] = {}
        self.waiting: dict[int, list[Group]] = {}
        self.parked: dict[int, list[Group]] = {}
        self.alive: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.row_live: Index = np.zeros(0, np.intp)
        self.live = 0
        self.retired = False
        self.epoch = 0
        #: Whose wait ended since somebody last looked.
        self.freed: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        #: The rotation has come round: turn and rotation counters are what they were at the last time this was set.
        self.round_complete = False
        self._turns = self._rotation = 0
        #: Priority of each CTA by block number; None where CTAs have none.
        self._priority: dict[int, float] | None = {} if priorities else None
        self._demotion = self._early_poll = self._hold = 0.0
        self._loops = 0
        self._visits: dict[int, int] = {}
        #: Warps that stand still until nobody else is ready, by PC.
        self.held: dict[int, list[Group]] = {}
        if priorities and chance is not None:
            self._demotion, self._early_poll = 2.0 ** -chance.uniform(*_RARELY), 2.0 ** -chance.uniform(*_RARELY)
            self._hold = 2.0 ** -chance.uniform(*_HOLDING)

    # ---- coming and going ---------------------------------------------------------------------------------------------------

    def start_rows(self, rows: int, threads: int) -> None:
        """``rows`` fresh CTAs of ``threads`` threads at the end of the vector, all at PC 0."""
        v = self.vector
        first = v.size - rows * v.stride
        alive = np.tile(np.arange(v.stride) < threads, rows)
        self.alive = np.concatenate((self.alive, alive))
        self.row_live = np.concatenate((self.row_live, np.full(rows, threads, np.intp)))
        self.freed = np.zeros(v.size, np.bool_)
        self.live += rows * threads
        self.epoch += 1
        if threads == v.stride:
            self.push(0, slice(first, v.size), rows * threads)
        else:
            self.push(0, first + np.flatnonzero(alive), rows * threads)

    def keep_rows(self, rows: Index) -> None:
        """Renumber every group after the vector dropped all rows but these."""
        stride = self.vector.stride
        moved = np.full(len(self.row_live), -1, np.intp)
        moved[rows] = np.arange(len(rows))
        for groups in (self.ready, self.waiting, self.parked, self.held):
            for pc, pieces in groups.items():
                groups[pc] = [self._moved(piece, moved, stride) for piece in pieces]
        self.alive = self.alive.reshape(-1, stride)[rows].reshape(-1)
        self.row_live = self.row_live[rows]
        self.freed = np.zeros(self.vector.size, np.bool_)

    def _moved(self, piece: Group, moved: Index, stride: int) -> Group:
        where, _ = piece
        positions = (
            np.arange(len(moved) * stride)
            if where is None
            else np.arange(where.start, where.stop)
            if where.__class__ is slice
            else where
        )
        row = moved[positions // stride]
        if (row < 0).any():
            positions, row = positions[row >= 0], row[row >= 0]
        return row * stride + positions % stride, len(positions)

    def exit(self, where: Any, n: int) -> None:
        """Threads leave the kernel."""
        v = self.vector
        if where is None:
            self.alive[:] = False
            self.row_live[:] = 0
        else:
            self.alive[where] = False
            self.row_live -= np.bincount(v.iota[where] // v.stride, minlength=v.rows)
        self.live -= n
        self.retired = self.retired or not self.row_live.all()

    def push(self, pc: int, where: Any, n: int) -> None:
        """Threads arrive at ``pc``."""
        if pc not in self.syncs:
            self.ready.setdefault(pc, []).append((where, n))
            return
        pieces = self.waiting.setdefault(pc, [])
        pieces.append((where, n))
        if sum(count for _, count in pieces) == self.live and len(self._known(pc).sources) < 2:
            # Everybody is here: no wait of any kind can be left unsatisfied (but a named barrier may count otherwise).
            del self.waiting[pc]
            everybody, _ = self.merge(pieces)
            self.freed[:] = True
            self.push(self._after[pc], everybody, self.live)

    # ---- choosing -----------------------------------------------------------------------------------------------------------

    def merge(self, pieces: list[Group]) -> Group:
        """One sorted group; a run of neighbours becomes a slice, everybody None."""
        v = self.vector
        if len(pieces) == 1:
            where, n = pieces[0]
        else:
            n = sum(count for _, count in pieces)
            where = None
            if n < v.size:
                where = np.concatenate([v.iota[piece] if piece.__class__ is slice else piece for piece, _ in pieces])
                where.sort()
        if n == v.size:
            return None, n
        if where.__class__ is np.ndarray and where[-1] - where[0] == n - 1:
            first = int(where[0])
            where = slice(first, first + n)
        return where, n

    def next(self) -> tuple[int, Any, int] | None:
        """(pc, threads, count) to run, None if nobody is ready."""
        ready = self.ready
        if not ready:
            if not self.held:
                return None
            if self.waiting and self.release():
                return self.next()
            self.ready, self.held = self.held, {}
            ready = self.ready
        if self.chance is not None:
            return self._random() if self._priority is None else self._foremost(self._priority)
        self._turns += 1
        if self._turns % _FAIRNESS:
            pc = min(ready)
        else:
            places = sorted(ready)
            pc = places[self._rotation % len(places)]
            self._rotation += 1
            self.round_complete = self._rotation % len(places) == 0
        where, n = self.merge(ready.pop(pc))
        return pc, where, n

    def _random(self) -> tuple[int, Any, int]:
        chance = self.chance
        assert chance is not None
        pc = chance.choice(sorted(self.ready))
        where, n = self.merge(self.ready.pop(pc))
        positions = self._positions(where)
        warps = np.unique(positions >> 5)
        if len(warps) > 1 and chance.random() < 0.5:
            chosen = np.array([chance.random() < 0.5 for _ in warps])
            if chosen.any() and not chosen.all():
                mine = np.isin(positions >> 5, warps[chosen])
                self.push(pc, positions[~mine], int((~mine).sum()))
                where, n = self.merge([(positions[mine], int(mine.sum()))])
        return pc, where, n

    def _foremost(self, priority: dict[int, float]) -> tuple[int, Any, int]:
        """Threads of the ready CTA of highest priority; a random half of its warps at times, so that warps race as well."""
        chance, v = self.chance, self.vector
        assert chance is not None
        while self.waiting and self.release():
            pass  # nobody's barrier waits for the other CTAs to stand still
        if self.parked and chance.random() < self._early_poll:
            self.unpark()
        for block in v.ctas:
            if block not in priority:
                priority[block] = chance.random()
        groups = {pc: self.merge(pieces) for pc, pieces in self.ready.items()}
        rows = {pc: self._positions(where) // v.stride for pc, (where, _) in groups.items()}
        here = np.unique(np.concatenate(list(rows.values())))
        best = max(here.tolist(), key=lambda row: priority[v.ctas[row]])
        if chance.random() < self._demotion:
            priority[v.ctas[best]] = min(priority.values()) - 1.0
        places = sorted(pc for pc in groups if (rows[pc] == best).any())
        pc = places[0] if chance.random() < 0.75 else chance.choice(places)
        where, n = groups[pc]
        self.ready = {place: [group] for place, group in groups.items() if place != pc}
        positions = self._positions(where)
        chosen = rows[pc] == best
        mine = positions[chosen]
        warps = np.unique(mine >> 5)
        # Loops are met again and again; what orders data and arrival is straight code, met rarely: held back there, not in loops.
        self._visits[pc] = self._visits.get(pc, 0) + 1
        hold = chance.random() < min(16 * self._hold / self._visits[pc], 0.5)
        if len(warps) > 1 and (hold or chance.random() < 0.25):
            some = warps[np.array([chance.random() < 0.5 for _ in warps])]
            if len(some):
                left = chosen & ~np.isin(positions >> 5, some)
                chosen &= ~left
                mine = positions[chosen]
                if hold and left.any():
                    self.held.setdefault(pc, []).append((positions[left], int(left.sum())))
                    positions, chosen, n = positions[~left], chosen[~left], n - int(left.sum())
        if len(mine) < n:
            self.push(pc, positions[~chosen], n - len(mine))
        where, n = self.merge([(mine, len(mine))])
        return pc, where, n

    # ---- waits ---------------------------------------------------------------------------------------------------------------

    def _known(self, pc: int) -> Instruction:
        i = self.syncs[pc]
        problem = i.problem
        if i.guard is not None:
            problem = "guarded wait"
        elif i.opcode == "BAR" and not (1 <= len(i.sources) <= 2 and i.sources[0].kind == "imm" and i.sources[0].value < 16):
            problem = "barrier number"
        elif i.opcode == "WARPSYNC" and i.has("COLLECTIVE"):
            problem = "collective slow path"
        if problem:
            raise UnknownInstructionError(f"{problem}: {i.where(self.function.name)}")
        return i

    def release(self) -> bool:
        """Let go those whose wait is over, at the smallest such PC; False if every wait goes on."""
        places = sorted(self.waiting)
        if self.chance is not None:
            self.chance.shuffle(places)
        for pc in places:
            i = self._known(pc)
            if i.opcode == "BAR":
                if self._release_barrier(i):
                    return True
                continue
            where, n = self.merge(self.waiting[pc])
            if self._let_go(pc, where, n, self._free(i, where, n)):
                return True
        return False

    def _let_go(self, pc: int, where: Any, n: int, free: npt.NDArray[np.bool_]) -> bool:
        count = int(np.count_nonzero(free))
        if count == 0:
            self.waiting[pc] = [(where, n)]
            return False
        positions = self._positions(where)
        self.freed[positions[free]] = True
        if count == n:
            del self.waiting[pc]
            self.push(self._after[pc], where, n)
        else:
            self.waiting[pc] = [(positions[~free], n - count)]
            self.push(self._after[pc], positions[free], count)
        return True

    def _release_barrier(self, i: Instruction) -> bool:
        """A CTA barrier counts who has arrived under its number, at whichever instruction."""
        v = self.vector
        number = i.sources[0].value
        here: dict[int, tuple[Any, int, Index]] = {}
        arrived = np.zeros(v.rows, np.intp)
        needed = self.row_live
        for pc in sorted(self.waiting):
            other = self.syncs[pc]
            if other.opcode == "BAR" and self._known(pc).sources[0].value == number:
                where, n = self.merge(self.waiting[pc])
                rows = self._positions(where) // v.stride
                arrived += np.bincount(rows, minlength=v.rows)
                here[pc] = where, n, rows
                if len(other.sources) == 2:
                    needed = np.full(v.rows, self._count(other, where))
        full = (arrived >= needed) & (arrived > 0)
        if not full.any():
            return False
        for pc, (where, n, rows) in here.items():
            self._let_go(pc, where, n, full.take(rows))
        return True

    def _count(self, i: Instruction, where: Any) -> int:
        """How many threads a named barrier waits for."""
        operand = i.sources[1]
        if operand.kind == "imm":
            return operand.value
        if operand.kind in ("reg", "ureg") and operand.index is not None and operand.index != RZ:
            register = self.vector.regs[operand.index + (UNIFORM_BASE if operand.kind == "ureg" else 0)]
            values = np.unique(register[self._positions(where)]) if register.__class__ is np.ndarray else [register]
            if len(values) == 1:
                return int(values[0])
        raise UnknownInstructionError(f"thread count of a barrier: {i.where(self.function.name)}")

    def _positions(self, where: Any) -> Index:
        return self.vector.iota if where is None else self.vector.iota[where]

    def _free(self, i: Instruction, where: Any, n: int) -> npt.NDArray[np.bool_]:
        """For each thread that waits for lanes of its warp whether it may go on."""
        v = self.vector
        positions = self._positions(where)
        alive = np.packbits(self.alive, bitorder="little").view(np.uint32)[v.warp_of[positions]]
        arrived = v.ballot(None, positions, n)
        masks = self._mask(i, positions)
        free: npt.NDArray[np.bool_] = (masks & alive & ~arrived) == 0
        return free

    def _mask(self, i: Instruction, positions: Index) -> Any:
        """The lanes of its warp that each thread waits for."""
        v = self.vector
        if i.opcode == "BSYNC":
            masks = v.bars.get(i.sources[0].index or 0, 0)
            return masks[positions] if masks.__class__ is np.ndarray else np.uint32(masks)
        if not i.sources:
            return np.uint32(0xFFFFFFFF)
        operand = i.sources[0]
        if operand.kind == "imm":
            return np.uint32(operand.value)
        if operand.kind not in ("reg", "ureg") or operand.index is None:
            raise UnknownInstructionError(f"mask {operand.text}: {i.where(self.function.name)}")
        if operand.index == RZ:
            value: Any = np.uint32(0)
        else:
            register = v.regs[operand.index + (UNIFORM_BASE if operand.kind == "ureg" else 0)]
            value = register[positions] if register.__class__ is np.ndarray else np.uint32(register)
        return ~value if operand.invert else value

    # ---- polls ---------------------------------------------------------------------------------------------------------------

    def park(self, pc: int, where: Any, n: int) -> None:
        """Threads that polled in vain: they get one try a round.

        With priorities, a loop of several threads is taken for one that searches, not for one that waits (a barrier of this family
        is polled by one thread), and goes on at once, up to a bound: else each of its rounds would be everybody's.
        """
        if self._priority is not None and n > 1 and self._loops < _LOOPS:
            self._loops += 1
            self.push(pc, where, n)
            return
        self.parked.setdefault(pc, []).append((where, n))

    def unpark(self) -> None:
        for pc, pieces in self.parked.items():
            for where, n in pieces:
                self.push(pc, where, n)
        self.parked = {}

    def groups(self) -> list[tuple[int, str, Index]]:
        """(pc, "ready" | "waiting" | "parked", positions) of every live thread, by PC."""
        found = []
        for kind, groups in (("ready", self.ready), ("ready", self.held), ("waiting", self.waiting), ("parked", self.parked)):
            for pc, pieces in groups.items():
                where, _ = self.merge(pieces)
                found.append((pc, kind, self._positions(where)))
        return sorted(found, key=lambda item: item[0])
