"""What the machine code says about a kernel before any input is chosen: control flow of thread 0, waits, arrivals, length loads,
liveness.

Thread 0 of a CTA is the one that arrives and polls. Branches that depend only on the thread's number are decided by constant
propagation
from the kernel's entry, through calls and returns, so the graph holds the paths that thread 0 can take. In the graph a call leads
into the
subroutine and behind the call. A branch to a computed address is not followed and is listed in ``unfollowed``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import BudgetError
from ..abi import ARRIVAL_COUNTER_OFFSET
from .decode import INSTRUCTION_BYTES, Instruction, Operand, SassFunction
from .slice_liveness import liveness, reversed_graph
from .symbolic import Environment, ThreadState, guard_of, step, truth_operand, word_operand
from .symbolic_algebra import TermAlgebra
from .symbolic_terms import TOP, Bit, Constants, Word

__all__ = ["STACK_TOP", "Flow", "analyse_flow", "branch_condition", "thread_constants"]

#: Where the stack begins here: any value does, the kernel only subtracts its frame.
STACK_TOP = 0x8000
_STACK_WORDS = (0x28, 0x37C)
_MAX_VISITS = 60


class _LengthsPointer:
    """The low word of an address into the array of row lengths."""

    inputs: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return "&lengths"


_LENGTHS = _LengthsPointer()


class _Propagation(Constants):
    """Constants, plus one mark: the lengths pointer, which survives the addition of anything."""

    def node(self, op: str, *args: object) -> object:
        if _LENGTHS in args:
            return _LENGTHS if op == "add" else args[1] if op == "ite" and args[1] is args[2] else TOP
        return super().node(op, *args)


def thread_constants(*, cta: Word | None = None) -> dict[str, Word]:
    """Special registers of thread 0; ``cta``: blockIdx.x where known."""
    special: dict[str, Word] = {
        "SR_TID.X": 0, "SR_TID.Y": 0, "SR_TID.Z": 0, "SR_LANEID": 0, "SR_LTMASK": 0, "SR_LEMASK": 1, "SR_EQMASK": 1,
        "SR_CgaCtaId": 0,
        "SR_SWINHI": 0x7E00, "SR_CTAID.Y": 0, "SR_CTAID.Z": 0, "SR_WARPID": 0,
    }  # fmt: skip
    if cta is not None:
        special["SR_CTAID.X"] = cta
    return special


@dataclass
class Flow:
    """Offsets are bytes from the function's start.

    ``next``: block start to the starts of the blocks that may follow. ``polls``: loads of the arrival counter inside a cycle.
    ``arrivals``: atomic adds to it; ``counter_stores``: plain stores. ``lengths``: loads of a row length. ``exits``: blocks in
    which the thread may leave.
    ``live``: block start to the registers read later (bit mask; see ``live_registers``). ``unfollowed``: what was not followed.
    """

    function: SassFunction
    next: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    polls: tuple[int, ...] = ()
    arrivals: tuple[int, ...] = ()
    counter_stores: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    exits: frozenset[int] = frozenset()
    live: dict[int, int] = field(default_factory=dict)
    unfollowed: tuple[int, ...] = ()
    local_writes: dict[int, int | None] = field(default_factory=dict)
    alone: frozenset[int] = frozenset()
    barrier: frozenset[int] = frozenset()

    def block_of(self, offset: int) -> int:
        """Start of the block that holds an instruction."""
        return max(start for start in self.next if start <= offset)

    def loop_of(self, offset: int) -> frozenset[int]:
        """Blocks on a cycle through the block of ``offset``, called subroutines included; none if it is on no cycle."""
        start = self.block_of(offset)
        if not _on_cycle(self, offset):
            return frozenset()
        forward = _reach({start}, self.next)
        return forward & _reach({start}, reversed_graph(self.next)) | {b for b in forward if b >= self.main_end}

    @property
    def main_end(self) -> int:
        """Where the kernel's own code ends and its subroutines begin."""
        starts = [offset for offset in self.function.symbols.values() if offset > 0]
        return min(starts, default=len(self.function.instructions) * INSTRUCTION_BYTES)


def _reach(starts: set[int], graph: Mapping[int, tuple[int, ...]], stop: frozenset[int] = frozenset()) -> frozenset[int]:
    """Nodes reachable from ``starts`` (included); ``stop`` nodes are reached but not passed."""
    seen, queue = set(starts), list(starts)
    while queue:
        node = queue.pop()
        if node in stop and node not in starts:
            continue
        for target in graph.get(node, ()):
            if target not in seen:
                seen.add(target)
                queue.append(target)
    return frozenset(seen)


def branch_condition(env: Environment, state: ThreadState, instruction: Instruction) -> Bit:
    """When a BRA, EXIT or CALL is taken: its guard and its predicate operands."""
    condition = guard_of(env, state, instruction.guard)
    for source in instruction.sources:
        if source.kind in ("pred", "upred"):
            condition = env.terms.both(condition, truth_operand(env, state, source))
    return condition


def _leaders(function: SassFunction) -> list[int]:
    starts = {0, *function.symbols.values()}
    for instruction in function.instructions:
        after = instruction.offset + INSTRUCTION_BYTES
        if instruction.opcode in ("BRA", "EXIT", "RET", "CALL", "BRX", "JMP", "JMX", "WARPSYNC"):
            starts.add(after)
            if instruction.target is not None and instruction.opcode != "BSSY":
                starts.add(instruction.target)
        elif _is_counter_load(instruction) or instruction.opcode in ("LDG", "LD"):
            starts.add(instruction.offset)
            starts.add(after)
    limit = len(function.instructions) * INSTRUCTION_BYTES
    return sorted(start for start in starts if 0 <= start < limit)


def _global_word(instruction: Instruction) -> Operand | None:
    return next((s for s in instruction.sources if s.kind == "mem"), None)


def _is_counter_load(instruction: Instruction) -> bool:
    memory = _global_word(instruction)
    return (
        instruction.opcode in ("LDG", "LD")
        and memory is not None
        and memory.value == ARRIVAL_COUNTER_OFFSET
        and instruction.has("STRONG")
    )


def _is_arrival(instruction: Instruction) -> bool:
    memory = _global_word(instruction)
    return instruction.opcode in ("RED", "REDG", "ATOM", "ATOMG") and memory is not None and memory.value == ARRIVAL_COUNTER_OFFSET


def _stores_counter(instruction: Instruction) -> bool:
    memory = _global_word(instruction)
    return instruction.opcode in ("ST", "STG") and memory is not None and memory.value == ARRIVAL_COUNTER_OFFSET


def analyse_flow(function: SassFunction, param_base: int) -> Flow:
    """The flow of thread 0. ``param_base``: byte offset of the parameters in constant bank 0 (the lengths pointer is at +16)."""
    terms = _Propagation()
    flow = Flow(function)
    leaders = _leaders(function)
    following = {
        start: leaders[position + 1] if position + 1 < len(leaders) else len(function.instructions) * INSTRUCTION_BYTES
        for position, start in enumerate(leaders)
    }
    known = set(leaders)
    lengths: set[int] = set()

    def constant(offset: int) -> Word | None:
        if offset in _STACK_WORDS:
            return STACK_TOP
        return _LENGTHS if offset == param_base + 16 else None

    def load(instruction: Instruction, low: Word, high: Word, size: int) -> list[Word] | None:
        if low is _LENGTHS and size == 4:
            lengths.add(instruction.offset)
        return None

    env = Environment(terms, TermAlgebra(terms), constant, thread_constants(), load)
    sites: dict[int, set[int]] = {}
    returned: dict[int, list[ThreadState]] = {}
    states: dict[int, ThreadState] = {0: ThreadState()}
    successors: dict[int, set[int]] = {}
    visits: dict[int, int] = {}
    exits: set[int] = set()
    unfollowed: set[int] = set()
    summaries: dict[int, set[int]] = {}
    queue = [0]
    while queue:
        start = min(queue)
        queue.remove(start)
        visits[start] = visits.get(start, 0) + 1
        if visits[start] > _MAX_VISITS:
            raise BudgetError(f"constant propagation does not settle in {function.name}")
        state = states[start].copy()
        end = following[start]
        edges: list[tuple[int, ThreadState]] = []
        fall = True
        for offset in range(start, end, INSTRUCTION_BYTES):
            instruction = function.instructions[offset // INSTRUCTION_BYTES]
            opcode = instruction.opcode
            if opcode == "BRA" and not instruction.has("DIV"):
                taken = branch_condition(env, state, instruction)
                if instruction.target is not None and taken is not False:
                    edges.append((instruction.target, state))
                fall = taken is not True
            elif opcode == "EXIT":
                taken = branch_condition(env, state, instruction)
                if taken is not False:
                    exits.add(start)
                fall = taken is not True
            elif opcode == "RET":
                _return(function, env, state, instruction, sites, edges)
                returned.setdefault(_subroutine_at(function, offset), []).append(state.copy())
                fall = guard_of(env, state, instruction.guard) is not True
            elif opcode in ("BRX", "JMX", "JMP"):
                unfollowed.add(offset)
                fall = guard_of(env, state, instruction.guard) is not True
            elif opcode == "CALL":
                fall = False
                summaries.setdefault(start, set()).add(offset + INSTRUCTION_BYTES)
                if instruction.target is None:
                    unfollowed.add(offset)
                else:
                    edges.append((instruction.target, state))
                    callee = _subroutine_at(function, instruction.target)
                    new = offset + INSTRUCTION_BYTES not in sites.setdefault(callee, set())
                    sites[callee].add(offset + INSTRUCTION_BYTES)
                    if new:  # states that returned before this call was seen
                        edges.extend((offset + INSTRUCTION_BYTES, gone) for gone in returned.get(callee, ()))
            elif opcode == "STL":
                _note_local_write(flow, env, state, instruction)
                step(env, state, instruction, function.name)
            else:
                step(env, state, instruction, function.name)
        if fall and end in known:
            edges.append((end, state))
        last = function.instructions[end // INSTRUCTION_BYTES - 1].opcode
        followers = {target for target, _ in edges} if last != "RET" else ({end} if fall else set())
        successors[start] = followers | successors.get(start, set())
        for target, arriving in edges:
            if _merge(states, target, arriving) and target not in queue:
                queue.append(target)
    flow.next = {start: tuple(sorted(successors[start] | {t for t in summaries.get(start, ()) if t in states})) for start in states}
    flow.ends = {start: following[start] for start in states}
    flow.exits, flow.unfollowed = frozenset(exits), tuple(sorted(unfollowed))
    reached = [
        function.instructions[offset // INSTRUCTION_BYTES]
        for start in sorted(states)
        for offset in range(start, following[start], INSTRUCTION_BYTES)
    ]
    flow.arrivals = tuple(i.offset for i in reached if _is_arrival(i))
    flow.counter_stores = tuple(i.offset for i in reached if _stores_counter(i))
    flow.polls = tuple(i.offset for i in reached if _is_counter_load(i) and _on_cycle(flow, i.offset))
    flow.lengths = tuple(sorted(lengths))
    _classify(flow)
    flow.live = liveness(function, flow.next, flow.ends)
    return flow


def _subroutine_at(function: SassFunction, offset: int) -> int:
    """Start of the subroutine that holds an offset (0: the kernel itself)."""
    return max((start for start in function.symbols.values() if 0 <= start <= offset), default=0)


def _return(
    function: SassFunction,
    env: Environment,
    state: ThreadState,
    instruction: Instruction,
    sites: dict[int, set[int]],
    edges: list[tuple[int, ThreadState]],
) -> None:
    """Where a RET goes: to the address in its register, or behind every call of this subroutine if that is not known."""
    source = instruction.sources[0] if instruction.sources else None
    address = word_operand(env, state, source) if source is not None and source.kind in ("reg", "ureg") else TOP
    known = sites.get(_subroutine_at(function, instruction.offset), set())
    edges.extend((target, state) for target in ([address] if address in known else sorted(known)))


def _note_local_write(flow: Flow, env: Environment, state: ThreadState, instruction: Instruction) -> None:
    memory = _global_word(instruction)
    base = state.regs.get(memory.index) if memory is not None and memory.index is not None else None
    flow.local_writes[instruction.offset] = (
        base + memory.value if type(base) is int and memory is not None and memory.ubase is None else None
    )


def _merge(states: dict[int, ThreadState], target: int, arriving: ThreadState) -> bool:
    """Joins a state into a block's; True if the block must be run (again)."""
    old = states.get(target)
    if old is None:
        fresh = arriving.copy()
        for file in (fresh.regs, fresh.uregs, fresh.preds, fresh.upreds, fresh.local):
            for index in [index for index, value in file.items() if value is TOP]:
                del file[index]
        states[target] = fresh
        return True
    changed = False
    for mine, other in (
        (old.regs, arriving.regs), (old.uregs, arriving.uregs), (old.preds, arriving.preds), (old.upreds, arriving.upreds),
        (old.local, arriving.local)
    ):  # fmt: skip
        for index in [index for index, value in mine.items() if other.get(index, TOP) != value]:
            del mine[index]
            changed = True
    return changed


def _on_cycle(flow: Flow, offset: int) -> bool:
    start = flow.block_of(offset)
    return start in _reach(set(flow.next[start]), flow.next)


def _classify(flow: Flow) -> None:
    """``barrier``: blocks from which the row cannot end without a poll. ``alone``: blocks from which it ends without any.

    A row ends at the next load of a length, or when the thread leaves.
    """
    polls = frozenset(flow.block_of(offset) for offset in flow.polls)
    heads = frozenset(flow.block_of(offset) for offset in flow.lengths)
    back = reversed_graph(flow.next)
    to_poll = _reach(set(polls), back, stop=heads) if polls else frozenset()
    without = {node: tuple(t for t in targets if t not in polls) for node, targets in flow.next.items() if node not in polls}
    back_without = reversed_graph(without)
    avoid = _reach({b for b in (heads | flow.exits) if b not in polls}, back_without) if heads or flow.exits else frozenset()
    flow.alone = frozenset(flow.next) - to_poll
    flow.barrier = to_poll - avoid
