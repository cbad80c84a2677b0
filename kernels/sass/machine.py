"""The interpreted GPU: CTAs over SMs with a residency limit, run block by block until they end or provably never will."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from ...clock import Deadline
from ...errors import MachineFaultError, UsageError
from .blocks import ALL, ONE, SOME, Block
from .checker import AccessChecker, IllegalAccessError
from .deadlock import Fixpoint, Recurrence
from .memory import Memory
from .program import Program
from .schedule import Schedule
from .state import ThreadVector
from .tables import TableKey, Tables
from .verdict import CtaSnapshot, Fault, Residency, RunResult, StuckThreads
from .weak import WeakVector

__all__ = ["DEFAULT_BUDGET", "Machine"]

#: Warp-instructions of one launch: some minutes of interpretation, 400 times what the largest case of this kernel family takes.
DEFAULT_BUDGET = 400_000_000
#: Local memory of a thread, bytes; the stack starts at its end.
LOCAL_BYTES = 1024
MAX_THREADS = 1 << 22
MAX_CTAS = 1 << 20

Dim3 = tuple[int, int, int]


def _dim3(value: int | tuple[int, ...]) -> Dim3:
    parts = (value,) if isinstance(value, int) else tuple(value)
    padded = (*parts, 1, 1, 1)[:3]
    if len(parts) > 3 or min(padded) < 1:
        raise UsageError(f"dimensions {value!r}: one to three positive numbers")
    return padded[0], padded[1], padded[2]


class Machine:
    """A GPU with ``sms`` SMs of ``slots_per_sm`` CTA slots that runs one program.

    ``schedule``: ``smallest-pc`` (converged, fast, the same every time) or ``random`` (random legal schedules, by ``seed``)
    or ``priority`` (the same with one CTA far ahead of another: what races need).
    ``checks``: every access is looked at: bounds, alignment, reads of memory that nobody wrote. Without them an access outside
    the arena is still caught, one inside it (into a neighbour) is not. ``weak``: weak memory order (``sass.weak``). One machine
    serves any number of launches.
    """

    def __init__(
        self, program: Program, *, sms: int = 1, slots_per_sm: int = 1, seed: int = 0, checks: bool = False,
        schedule: str = "smallest-pc", memory: Memory | None = None, weak: bool = False,
    ) -> None:  # fmt: skip
        if sms < 1 or slots_per_sm < 1:
            raise UsageError(f"{sms} SMs of {slots_per_sm} slots: both must be positive")
        if schedule not in ("smallest-pc", "random", "priority"):
            raise UsageError(f"schedule {schedule!r}: smallest-pc, random or priority")
        self.program = program
        self.memory = memory if memory is not None else Memory()
        self.sms = sms
        self.slots_per_sm = slots_per_sm
        self.checks = checks
        self._chance = random.Random(seed) if schedule != "smallest-pc" else None
        self._priorities = schedule == "priority"
        self._weak = weak
        self._blocks = program.blocks(checks)
        self._running = False
        self._tables: dict[TableKey, Tables] = {}

    # ---- launching ------------------------------------------------------------------------------------------------------------

    def launch(
        self, grid: int | tuple[int, ...], block: int | tuple[int, ...], params: bytes, dynamic_smem: int = 0, *,
        budget: int = DEFAULT_BUDGET, deadline: Deadline | None = None,
    ) -> RunResult:  # fmt: skip
        """Run a launch to its end or to a verdict. ``params``: the kernel's parameter bytes; ``dynamic_smem`` in bytes.

        ``budget``: warp-instructions. UsageError for a launch that no device would take; UnknownInstructionError when a thread
        reaches an instruction without semantics. An illegal access ends the run with ``kind`` fault.
        """
        grid_dim, block_dim = _dim3(grid), _dim3(block)
        threads = block_dim[0] * block_dim[1] * block_dim[2]
        layout = self.program.layout
        if threads > min(1024, self.program.max_threads):
            raise UsageError(f"{threads} threads a CTA; the kernel allows {min(1024, self.program.max_threads)}")
        if len(params) != layout.params_size:
            raise UsageError(f"{len(params)} bytes of parameters; the kernel takes {layout.params_size}")
        if not 0 <= dynamic_smem <= 227 * 1024:
            raise UsageError(f"{dynamic_smem} bytes of dynamic shared memory: at most {227 * 1024}")
        count = grid_dim[0] * grid_dim[1] * grid_dim[2]
        if count > MAX_CTAS:
            raise UsageError(f"a grid of {count} CTAs: at most {MAX_CTAS} are interpreted")
        stride = -(-threads // 32) * 32
        self._threads = threads
        self._grid = count
        shared = layout.shared_base + self.program.static_smem + dynamic_smem
        kind = WeakVector if self._weak else ThreadVector
        vector = kind(self.memory, stride, shared, LOCAL_BYTES, layout.shared_window, self._tables)
        if isinstance(vector, WeakVector):
            vector.set_chance(self._chance)
        vector.block_dim, vector.grid_dim = block_dim, grid_dim
        vector.K = layout.values(params, grid_dim, block_dim, LOCAL_BYTES)
        first = min(count, self.sms * self.slots_per_sm)
        if first * stride > MAX_THREADS:
            raise UsageError(f"{first} resident CTAs of {threads} threads: more than {MAX_THREADS} threads at once")
        vector.start(list(range(first)))
        if self.checks:
            vector.checker = AccessChecker(vector, self.program)
        self._vector = vector
        self._schedule = Schedule(vector, self.program.function, self.program.waits, self._chance, priorities=self._priorities)
        self._next_block = first
        self._where: dict[int, tuple[int, int]] = {k: (k % self.sms, k // self.sms) for k in range(first)}
        self._exited: list[int] = []
        self._warps = self._thread_count = self._executed = self._rounds = 0
        self._schedule.start_rows(first, threads)
        self._running = True
        return self._run(budget, deadline)

    def resume(self, *, budget: int = DEFAULT_BUDGET, deadline: Deadline | None = None) -> RunResult:
        """Go on from the state at the end of the last run (after ``poke``, or with a new budget)."""
        if not self._running:
            raise UsageError("nothing to resume: no launch, or it has completed")
        self._vector.bind_memory()
        self._schedule.epoch += 1
        return self._run(budget, deadline)

    def poke(self, address: int, value: int) -> None:
        """Write one 32-bit word of device memory from the host side, as a debugger or a side stream would."""
        self.memory.write(address, (value & 0xFFFFFFFF).to_bytes(4, "little"))

    # ---- the loop
    # -----------------------------------------------------------------------------------------------------------------

    def _run(self, budget: int, deadline: Deadline | None) -> RunResult:
        limit = self._warps + budget
        self._look = self._executed + 256
        fixpoint, recurrence = Fixpoint(), Recurrence(budget, self._executed)
        schedule = self._schedule
        with np.errstate(all="ignore"):
            while True:
                if schedule.retired:
                    self._replace_retired()
                step = schedule.next()
                if step is None:
                    if schedule.release():
                        continue
                    if isinstance(self._vector, WeakVector) and self._vector.let_all_go():
                        schedule.unpark()
                        continue
                    if not schedule.live:
                        self._running = False
                        self._vector.clear()
                        return self._result("completed", "every CTA ran to its end")
                    proof = fixpoint.settled(schedule, self._vector)
                    if proof:
                        return self._result("deadlock", proof, spin=bool(schedule.parked))
                    self._rounds += 1
                    schedule.unpark()
                    continue
                try:
                    self._step(*step)
                except IllegalAccessError as error:
                    return self._faulted(error.fault, step)
                except IndexError as error:
                    return self._faulted(self._outside(step, error), step)
                if self._warps >= limit:
                    return self._result("budget", f"{budget} warp-instructions executed without an end")
                if self._executed >= self._look:
                    self._look = self._executed + 256
                    if deadline is not None and deadline.expired:
                        return self._result("budget", f"{deadline.seconds:g} s ran out")
                if schedule.round_complete:
                    schedule.round_complete = False
                    proof = recurrence.seen(schedule, self._vector, self._executed)
                    if proof:
                        return self._result("livelock", proof)

    def _step(self, pc: int, where: Any, n: int) -> None:
        vector, schedule, blocks = self._vector, self._schedule, self._blocks
        while True:
            block = blocks.at(pc)
            if where is None:
                mode, key, ix = ALL, vector.uniform & block.reads, None
                warps = n >> 5
            elif n == 1:
                mode, key = ONE, 0
                ix = where.start if where.__class__ is slice else int(where[0])
                warps = 1
            else:
                mode, key, ix = SOME, vector.uniform & (block.reads | block.writes), where
                if where.__class__ is slice:
                    warps = (where.stop - 1 >> 5) - (where.start >> 5) + 1
                else:
                    in_warp = where >> 5
                    warps = 1 + int(np.count_nonzero(in_warp[1:] != in_warp[:-1]))
            function = block.functions.get((mode, key, vector.single))
            if function is None:
                function = blocks.compiled(block, mode, key, vector.single)
            if isinstance(vector, WeakVector):
                vector.before(block, where, n)
            outcome = function(vector, vector.regs, ix, n)
            self._executed += 1
            self._warps += warps * block.size
            self._thread_count += n * block.size
            if block.kind != "next":
                self._go(block, outcome, where, n)
                return
            if schedule.ready or block.end in schedule.syncs or schedule.chance is not None:
                schedule.push(block.end, where, n)
                return
            pc = block.end

    def _go(self, block: Block, outcome: Any, where: Any, n: int) -> None:
        """Move a group on from the end of a block that decides where."""
        kind = block.kind
        if kind == "RET":
            self._return(block, outcome, where, n)
            return
        if outcome is True:
            self._take(block, where, n)
            return
        if outcome is False:
            self._schedule.push(block.end, where, n)
            return
        count = int(np.count_nonzero(outcome))
        if count == n:
            self._take(block, where, n)
        elif count == 0:
            self._schedule.push(block.end, where, n)
        else:
            positions = self._vector.iota if where is None else self._vector.iota[where] if where.__class__ is slice else where
            self._schedule.push(block.end, positions[(~outcome).nonzero()[0]], n - count)
            self._take(block, positions[outcome.nonzero()[0]], count)

    def _take(self, block: Block, where: Any, n: int) -> None:
        if block.kind == "EXIT":
            self._schedule.exit(where, n)
        elif block.poll:
            self._schedule.park(block.target, where, n)
        else:
            self._schedule.push(block.target, where, n)

    def _return(self, block: Block, outcome: Any, where: Any, n: int) -> None:
        acts, target = outcome
        positions = self._vector.iota if where is None else self._vector.iota[where]
        if acts.__class__ is bool:
            acts = np.full(n, acts)
        staying = positions[~acts]
        if len(staying):
            self._schedule.push(block.end, staying, len(staying))
        going = positions[acts]
        if not len(going):
            return
        if target.__class__ is not np.ndarray:
            self._schedule.push(self._checked_target(block, target), where if not len(staying) else going, len(going))
            return
        target = target[acts]
        for value in np.unique(target):
            chosen = going[target == value]
            self._schedule.push(self._checked_target(block, int(value)), where if len(chosen) == n else chosen, len(chosen))

    def _checked_target(self, block: Block, target: int) -> int:
        if target % 16 or not 0 <= target < 16 * len(self.program.function.instructions):
            assert block.terminator is not None
            raise MachineFaultError(f"return to {target:#x}: {block.terminator.where(self.program.name)}")
        return target

    def _replace_retired(self) -> None:
        """Drop CTAs that have ended and start those that waited for a slot."""
        schedule, vector = self._schedule, self._vector
        schedule.retired = False
        schedule.epoch += 1
        gone = np.flatnonzero(schedule.row_live == 0)
        ended = [vector.ctas[row] for row in gone]
        self._exited += ended
        free = [self._where.pop(block) for block in ended]
        if not schedule.live and self._next_block >= self._grid:
            return
        kept = np.flatnonzero(schedule.row_live)
        vector.keep(kept)
        schedule.keep_rows(kept)
        fresh: list[int] = []
        while free and self._next_block < self._grid:
            self._where[self._next_block] = free.pop(0)
            fresh.append(self._next_block)
            self._next_block += 1
        if fresh:
            vector.append(fresh)
            schedule.start_rows(len(fresh), self._threads)
        if self.checks and vector.checker is not None:
            vector.checker.reshaped(kept, len(fresh))

    # ---- ends --------------------------------------------------------------------------------------------------------------------

    def _outside(self, step: tuple[int, Any, int], error: IndexError) -> Fault:
        """An access outside the arena that was met without checks: only the block is known."""
        pc, where, _ = step
        vector = self._vector
        position = 0 if where is None else where.start if where.__class__ is slice else int(where[0])
        block = vector.ctas[position // vector.stride]
        text = self.program.function.at(pc).text
        place = f"in the block at +{pc:#x} of {self.program.name}"
        message = f"an address outside device memory {place} ({error}); run with checks for the thread"
        return Fault("access", "unknown", 0, 0, block, position % vector.stride, pc, text, message)

    def _faulted(self, fault: Fault, step: tuple[int, Any, int]) -> RunResult:
        self._schedule.push(*step)
        self._tables.clear()  # their scratch arrays may have been left in use
        self._running = False
        return self._result("fault", fault.message, fault=fault)

    def _result(self, kind: Any, proof: str, *, spin: bool = False, fault: Fault | None = None) -> RunResult:
        self.program.save_code()
        checker = self._vector.checker
        order = "weak memory order: additions of a CTA may be seen late" if self._weak else "sequentially consistent"
        notes = (f"{order}, in-order interpretation; no timing", *(checker.notes if checker is not None else ()))
        return RunResult(
            kind, proof, self._grid, self._threads, tuple(sorted(self._exited)), self.residents(),
            tuple(range(self._next_block, self._grid)), self._stuck() if kind != "completed" else (),
            self._warps, self._thread_count, self._executed, self._rounds, fault, spin, notes,
        )  # fmt: skip

    def residents(self) -> tuple[Residency, ...]:
        """The CTAs that hold a slot now."""
        return tuple(Residency(block, *self._where[block]) for block in sorted(self._where))

    def _stuck(self) -> tuple[StuckThreads, ...]:
        words = {"ready": "ready", "waiting": "waiting", "parked": "polling"}
        found = []
        stride = self._vector.stride
        for pc, kind, positions in self._schedule.groups():
            rows = positions // stride
            text = self.program.function.at(pc).text
            for row in np.unique(rows):
                threads = tuple(int(t) for t in positions[rows == row] % stride)
                found.append(StuckThreads(self._vector.ctas[int(row)], pc, words[kind], text, threads))
        return tuple(sorted(found, key=lambda s: (s.block, s.pc)))

    def snapshot(self, block: int) -> CtaSnapshot:
        """Architectural state of one resident CTA; UsageError if it is not resident."""
        vector = self._vector
        if block not in vector.ctas:
            raise UsageError(f"CTA {block} is not resident")
        row = vector.ctas.index(block)
        begin, n = row * vector.stride, self._threads
        span = slice(begin, begin + n)

        def column(number: int) -> Any:
            value = vector.regs[number]
            return value[span] if value.__class__ is np.ndarray else value

        count = min(255, max(self.program.registers, 1))
        registers = np.zeros((n, count), np.uint32)
        for number in range(count):
            registers[:, number] = column(number)
        uniform = np.zeros((n, 64), np.uint32)
        for number in range(63):
            uniform[:, number] = column(256 + number)
        predicates, uniform_predicates = np.zeros(n, np.uint8), np.zeros(n, np.uint8)
        for number in range(7):
            predicates |= np.asarray(column(512 + number), np.uint8) << np.uint8(number)
            uniform_predicates |= np.asarray(column(520 + number), np.uint8) << np.uint8(number)
        pc = np.full(vector.size, -1, np.int64)
        for place, _, positions in self._schedule.groups():
            pc[positions] = place
        shared = vector.H[row * vector.shared_words : (row + 1) * vector.shared_words].copy()
        where = Residency(block, *self._where[block])
        return CtaSnapshot(where, pc[span].copy(), registers, predicates, uniform, uniform_predicates, shared)
