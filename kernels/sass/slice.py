"""The prologue of the persistent top-k as terms: when does thread 0 of a CTA enter the barrier path of a row, and when does its
peer not?

Symbolic execution from the kernel's entry. Free inputs: the row length ``len``, ``stride`` and ``max_seq_len`` (any 32-bit words)
and the chunk
size. Concrete: the addresses, the grid, the group shape, the row count and k, so that the launcher's divisions fold; group shapes
are
enumerated by the caller. A path ends where the flow analysis knows what happens to the row: ``barrier`` (it cannot end without a
poll of the
arrival counter), ``alone`` (it ends without one), or the thread leaves (``exit``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...errors import BudgetError
from .decode import INSTRUCTION_BYTES, Instruction, SassFunction, decode_row
from .layout import ConstantLayout
from .slice_flow import STACK_TOP, Flow, branch_condition, thread_constants
from .slice_liveness import live_registers, read_registers, written_registers
from .symbolic import EFFECT_FREE, Environment, ThreadState, step
from .symbolic_algebra import TermAlgebra
from .symbolic_terms import MASK, Term, Terms, Word, postorder

__all__ = ["FREE_INPUTS", "GroupShape", "Path", "Prologue", "SliceFacts", "condition_of", "slice_facts", "substitute"]

FREE_INPUTS = ("len", "stride", "max_seq_len", "chunk")
#: Addresses of the four arrays: their upper halves differ, so that an address tells which array it is in.
_ARRAYS = {"input": 0x7_1000_0000, "output": 0x7_4000_0000, "lengths": 0x7_7000_0000, "row_states": 0x7_A000_0000}
MAX_PATHS = 400
MAX_STEPS = 60_000


@dataclass(frozen=True)
class SliceFacts:
    """What the exploration needs of a kernel: its instructions by offset and, from the flow analysis, what each block means for a
    row.

    ``rows``: offset to (opcode, operands, predicate) as printed. ``barrier`` / ``alone``: starts of such blocks; ``heads``: loads
    of a row
    length. ``loop_writes``: for each head, the registers that its row loop writes and the local addresses (None: any). ``live``:
    registers
    that may be read from a block on, as a bit mask. ``instructions``: how many the function has. ``unfollowed``: branches not
    followed.
    """

    name: str
    sm: int
    rows: Mapping[int, tuple[str, str, str]]
    symbols: Mapping[str, int]
    heads: frozenset[int]
    barrier: frozenset[int]
    alone: frozenset[int]
    polls: tuple[int, ...]
    arrivals: tuple[int, ...]
    counter_stores: tuple[int, ...]
    live: Mapping[int, int]
    loop_writes: Mapping[int, tuple[tuple[tuple[str, int], ...], tuple[int, ...] | None]]
    loop_blocks: frozenset[int]
    instructions: int
    unfollowed: tuple[int, ...] = ()

    def trimmed(self, touched: frozenset[int]) -> SliceFacts:
        """Only what an exploration that executed ``touched`` used, for the cache."""
        keep = touched | self.heads | set(self.polls) | set(self.arrivals) | set(self.counter_stores)
        rows = {offset: row for offset, row in self.rows.items() if offset in keep}
        live = {block: mask for block, mask in self.live.items() if block in touched}
        return SliceFacts(
            self.name, self.sm, rows, self.symbols, self.heads, self.barrier & touched, self.alone & touched, self.polls,
            self.arrivals,
            self.counter_stores, live,
            self.loop_writes, self.loop_blocks & touched, self.instructions, self.unfollowed,
        )  # fmt: skip


def slice_facts(function: SassFunction, flow: Flow) -> SliceFacts:
    """The facts of a whole function."""
    loops: dict[int, tuple[tuple[tuple[str, int], ...], tuple[int, ...] | None]] = {}
    for head in flow.lengths:
        written: set[tuple[str, int]] = set()
        local: set[int] | None = set()
        for block in flow.loop_of(head):
            for offset in range(block, flow.ends[block], INSTRUCTION_BYTES):
                instruction = function.instructions[offset // INSTRUCTION_BYTES]
                written.update(written_registers(instruction))
                if instruction.opcode == "STL" and local is not None:
                    address = flow.local_writes.get(offset)
                    local = None if address is None else local | set(range(address, address + 16, 4))
        loops[head] = (tuple(sorted(written)), None if local is None else tuple(sorted(local)))
    rows = {position * INSTRUCTION_BYTES: row for position, row in enumerate(function.rows)}
    return SliceFacts(
        function.name, function.sm, rows, function.symbols, frozenset(flow.lengths), flow.barrier, flow.alone, flow.polls,
        flow.arrivals,
        flow.counter_stores, flow.live,
        loops, frozenset().union(*(flow.loop_of(head) for head in flow.lengths)), len(function.instructions), flow.unfollowed,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupShape:
    """``groups`` of ``ctas`` CTAs over ``rows`` rows; ``group`` and ``member`` say which CTA is meant."""

    ctas: int
    groups: int
    rows: int
    group: int
    member: int

    @property
    def cta(self) -> int:
        return self.group * self.ctas + self.member

    @property
    def grid(self) -> int:
        return self.groups * self.ctas


@dataclass(frozen=True, slots=True)
class Path:
    """One path of one CTA's thread 0. ``conditions``: truth values that all hold on it. ``trace``: branches taken, as instruction
    offsets.

    ``outcome``: see the module; ``loop``: stopped where the row loop begins. ``state``: registers where it ended.
    """

    conditions: tuple[Any, ...]
    outcome: Literal["barrier", "alone", "exit", "loop"]
    end: int
    trace: tuple[int, ...]
    state: ThreadState
    row_loaded: bool
    executed: tuple[int, ...] = ()


@dataclass
class _Run:
    """A path being explored."""

    pc: int
    state: ThreadState
    conditions: list[Any]
    trace: list[int]
    loaded: bool = False
    left: bool = False
    executed: list[int] = field(default_factory=list)


def condition_of(paths: Sequence[Path], terms: Terms, outcomes: Sequence[str]) -> Any:
    """The truth value "the CTA takes one of the paths with these outcomes"."""
    whole: Any = False
    for path in paths:
        if path.outcome in outcomes:
            part: Any = True
            for item in path.conditions:
                part = terms.both(part, item)
            whole = terms.either(whole, part)
    return whole


def substitute(root: Any, terms: Terms, replacement: Mapping[str, Any]) -> Any:
    """The term with variables replaced."""
    done: dict[int, Any] = {}
    for term in postorder((root,)):
        if term.op in ("var", "bitvar"):
            done[id(term)] = replacement.get(term.args[0], term)
        elif not term.inputs & replacement.keys():
            done[id(term)] = term
        else:
            done[id(term)] = terms.node(term.op, *(done[id(a)] if isinstance(a, Term) else a for a in term.args))
    return done[id(root)] if isinstance(root, Term) else root


@dataclass
class Prologue:
    """Explores one kernel. ``layout`` says where the kernel finds its parameters. ``touched``: offsets that were executed or
    ended a path. ``tracing``: remember what ``relevant`` needs."""

    facts: SliceFacts
    layout: ConstantLayout
    top_k: int
    terms: Terms = field(default_factory=Terms)
    steps: int = 0
    touched: set[int] = field(default_factory=set)
    tracing: bool = False
    _symbolic: set[int] = field(default_factory=set)
    _decoded: dict[int, Instruction] = field(default_factory=dict)

    def instruction(self, offset: int) -> Instruction:
        """The instruction at an offset; KeyError if the facts were trimmed and do not hold it."""
        found = self._decoded.get(offset)
        if found is None:
            found = self._decoded[offset] = decode_row(offset, self.facts.rows[offset], self.facts.symbols)
        return found

    def _environment(self, shape: GroupShape) -> Environment:
        terms = self.terms
        base = self.layout.params
        words: dict[int, Word] = {self.layout.stack: STACK_TOP, self.layout.grid_dim: shape.grid, self.layout.grid_dim + 4: 1}
        if self.layout.descriptor is not None:
            words[self.layout.descriptor] = words[self.layout.descriptor + 4] = 0
        for position, name in enumerate(("input", "output", "lengths", "row_states")):
            words[base + 8 * position] = _ARRAYS[name] & MASK
            words[base + 8 * position + 4] = _ARRAYS[name] >> 32
        fields = (shape.rows, terms.var("stride"), self.top_k, terms.var("chunk"), shape.ctas, terms.var("max_seq_len"))
        words.update({base + 32 + 4 * position: value for position, value in enumerate(fields)})

        def load(instruction: Instruction, low: Word, high: Word, size: int) -> list[Word] | None:
            if size == 4 and instruction.offset in self.facts.heads:
                return [terms.var("len")]
            return None

        return Environment(terms, TermAlgebra(terms), words.get, thread_constants(cta=shape.cta), load)

    def first_row(self, shape: GroupShape, *, stop_at_loop: bool = False) -> list[Path]:
        """From the kernel's entry to what happens to the CTA's first row."""
        return self._explore(self._environment(shape), _Run(0, ThreadState(), [], []), stop_at_loop=stop_at_loop)

    def later_row(self, shape: GroupShape, start: Path) -> list[Path]:
        """A later turn of the row loop: whatever the loop writes is unknown at its start, what it leaves alone is as on ``start``.

        ``start``: a path that ended at ``loop``. An over-approximation of every later iteration at once.
        """
        state = start.state.copy()
        files = {"reg": state.regs, "ureg": state.uregs, "pred": state.preds, "upred": state.upreds}
        for written, local in self.facts.loop_writes.values():
            for kind, index in written:
                files[kind].pop(index, None)
            if local is None:
                state.local.clear()
            else:
                for address in local:
                    state.local.pop(address, None)
        return self._explore(
            self._environment(shape), _Run(start.end, state, list(start.conditions), list(start.trace)), stop_at_loop=False
        )

    def _explore(self, env: Environment, first: _Run, *, stop_at_loop: bool) -> list[Path]:
        done: list[Path] = []
        queue = [first]
        while queue:
            if len(done) + len(queue) > MAX_PATHS:
                raise BudgetError(f"more than {MAX_PATHS} paths through the prologue of {self.facts.name}")
            run = queue.pop()
            outcome = self._follow(env, run, queue, stop_at_loop)
            if outcome is not None:
                done.append(
                    Path(tuple(run.conditions), outcome, run.pc, tuple(run.trace), run.state, run.loaded, tuple(run.executed))
                )
        return done

    def _follow(
        self, env: Environment, run: _Run, queue: list[_Run], stop_at_loop: bool
    ) -> Literal["barrier", "alone", "exit", "loop"] | None:
        """Runs one path to its end; other sides of its branches go into ``queue``. None: the path contradicts itself."""
        facts, heads = self.facts, self.facts.heads
        while True:
            if run.left:
                return "exit"
            self.touched.add(run.pc)
            if run.loaded:
                if run.pc in facts.barrier:
                    return "barrier"
                if run.pc in facts.alone:
                    return "alone"
            if stop_at_loop and run.pc in facts.loop_blocks:
                return "loop"
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise BudgetError(f"more than {MAX_STEPS} instructions in the prologue of {self.facts.name}")
            instruction = self.instruction(run.pc)
            run.executed.append(run.pc)
            opcode = instruction.opcode
            after = run.pc + INSTRUCTION_BYTES
            if opcode == "EXIT":
                taken = branch_condition(env, run.state, instruction)
                if taken is True:
                    return "exit"
                if taken is not False and not self._split(run, taken, run.pc, queue, left=True):
                    return None
                run.pc = after
            elif opcode == "BRA" and not instruction.has("DIV"):
                taken = branch_condition(env, run.state, instruction)
                if instruction.target is None or taken is False:
                    run.pc = after
                elif taken is True:
                    run.pc = instruction.target
                elif self._split(run, taken, instruction.target, queue):
                    run.pc = after
                else:
                    return None
            elif opcode in ("CALL", "RET", "BRX", "JMP", "JMX"):
                raise BudgetError(
                    f"the prologue calls a subroutine before the row is decided: {instruction.where(self.facts.name)}"
                )
            else:
                if opcode not in EFFECT_FREE or instruction.problem:
                    step(env, run.state, instruction, self.facts.name)
                    if self.tracing:
                        self._note(run, instruction)
                run.loaded = run.loaded or run.pc in heads
                run.pc = after

    def _split(self, run: _Run, taken: Any, elsewhere: int, queue: list[_Run], *, left: bool = False) -> bool:
        """The side where ``taken`` holds goes into ``queue`` at ``elsewhere``, the run goes on with the other one.

        ``left``: the thread of the first side has left the kernel. False if the run contradicts itself from here.
        """
        other = _Run(
            elsewhere, run.state.copy(), [*run.conditions, taken], [*run.trace, run.pc], run.loaded, left, list(run.executed)
        )  # fmt: skip
        if _consistent(other.conditions, self.terms):
            queue.append(other)
        run.conditions.append(self.terms.negated(taken))
        run.trace.append(run.pc)
        return _consistent(run.conditions, self.terms)

    def _note(self, run: _Run, instruction: Instruction) -> None:
        """Remembers instructions whose result depends on a free input."""
        files = {"reg": run.state.regs, "ureg": run.state.uregs, "pred": run.state.preds, "upred": run.state.upreds}
        for kind, index in written_registers(instruction):
            value = files[kind].get(index)
            if isinstance(value, Term) and not value.inputs.isdisjoint(FREE_INPUTS):
                self._symbolic.add(instruction.offset)

    def relevant(self, path: Path) -> tuple[tuple[int, str], ...]:
        """The instructions that decided the path: its branches and, backwards, what computed their conditions from the free
        inputs."""
        needed: set[tuple[str, int]] = set()
        kept: list[int] = []
        branches = set(path.trace)
        for offset in reversed(path.executed):
            instruction = self.instruction(offset)
            written = set(written_registers(instruction))
            if offset in branches:
                kept.append(offset)
            elif offset in self._symbolic and written & needed:
                kept.append(offset)
                if instruction.guard is None:
                    needed -= written
            else:
                continue
            if instruction.opcode not in ("LDG", "LD"):
                needed.update(live_registers(read_registers(instruction)))
        return tuple((offset, self.instruction(offset).text) for offset in sorted(set(kept)))

    def interesting(self, state: ThreadState, block: int) -> list[tuple[str, Any]]:
        """Values that depend on the length and may be read from ``block`` on, by register name; local memory always counts."""
        files = {"reg": state.regs, "ureg": state.uregs, "pred": state.preds, "upred": state.upreds}
        names = {"reg": "R", "ureg": "UR", "pred": "P", "upred": "UP"}
        out: list[tuple[str, Any]] = []
        for kind, index in live_registers(self.facts.live.get(block, 0)):
            value = files[kind].get(index)
            if isinstance(value, Term) and "len" in value.inputs:
                out.append((f"{names[kind]}{index}", value))
        out.extend((f"local+{STACK_TOP - a:#x}", v) for a, v in state.local.items() if isinstance(v, Term) and "len" in v.inputs)
        return out


def _consistent(conditions: list[Any], terms: Terms) -> bool:
    """False if the conditions contradict each other syntactically."""
    newest = conditions[-1]
    if newest is False:
        return False
    opposite = terms.negated(newest)
    return not any(item is opposite for item in conditions)
