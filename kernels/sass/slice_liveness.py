"""Which registers an instruction reads and writes, and which may still be read from a block on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .decode import INSTRUCTION_BYTES, PT, RZ, Instruction, Operand, SassFunction

__all__ = ["live_registers", "liveness", "read_registers", "reversed_graph", "written_registers"]


def reversed_graph(graph: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    back: dict[int, list[int]] = {node: [] for node in graph}
    for node, targets in graph.items():
        for target in targets:
            back.setdefault(target, []).append(node)
    return {node: tuple(sources) for node, sources in back.items()}


def written_registers(instruction: Instruction) -> list[tuple[str, int]]:
    """Registers and predicates that an instruction may write."""
    out: list[tuple[str, int]] = []
    for item in instruction.dests:
        if item.kind in ("reg", "ureg") and item.index is not None and item.index != RZ:
            out.extend((item.kind, item.index + n) for n in range(_words(instruction, item, written=True)))
        elif item.kind in ("pred", "upred") and item.index is not None and item.index != PT:
            out.append((item.kind, item.index))
        elif item.kind == "preds":
            out.extend(("pred", n) for n in range(PT))
    return out


def _pair_address(instruction: Instruction, operand: Operand) -> bool:
    """Whether the address register is a pair; sm_75 prints 64-bit global addresses without ``.64``."""
    return operand.mode == "64" or (operand.mode == "" and operand.ubase is None and instruction.has("E"))


def _words(instruction: Instruction, operand: Operand, *, written: bool = False) -> int:
    """How many registers an operand names: 1, a pair, or four."""
    if operand.kind == "mem":
        return 2 if _pair_address(instruction, operand) else 1
    op = instruction.opcode
    memory = op.startswith(("LD", "ST", "ATOM", "RED", "ULDC"))
    if memory:
        return 4 if instruction.has("128") else 2 if instruction.has("64") else 1
    if op == "CS2R":
        return 1 if instruction.has("32") else 2
    if instruction.has("64") or instruction.has("S64") or instruction.has("U64"):
        return 2
    if op in ("IMAD", "UIMAD") and (instruction.has("WIDE") or instruction.has("HI")):
        if written:
            return 2 if instruction.has("WIDE") else 1
        words = [s for s in instruction.sources if s.kind not in ("pred", "upred")]
        return 2 if len(words) > 2 and operand is words[2] else 1
    return 1


_BASE = {"reg": 0, "ureg": 256, "pred": 512, "upred": 520}


def _bit_of(kind: str, index: int) -> int:
    return 1 << (_BASE[kind] + index)


def read_registers(instruction: Instruction) -> int:
    """What an instruction reads, as a bit mask (``live_registers`` names the bits)."""
    mask = 0
    if instruction.guard is not None and instruction.guard.index != PT:
        mask |= _bit_of("upred" if instruction.guard.uniform else "pred", instruction.guard.index)
    for item in instruction.sources:
        if item.kind in ("reg", "ureg") and item.index is not None and item.index != RZ:
            for n in range(_words(instruction, item)):
                mask |= _bit_of(item.kind, min(item.index + n, 254))
        elif item.kind in ("pred", "upred") and item.index is not None and item.index != PT:
            mask |= _bit_of(item.kind, item.index)
        elif item.kind == "preds":
            for n in range(PT):
                mask |= _bit_of("pred", n)
        elif item.kind == "mem":
            if item.index is not None and item.index != RZ:
                for n in range(2 if _pair_address(instruction, item) else 1):
                    mask |= _bit_of("reg", min(item.index + n, 254))
            if item.ubase is not None and item.ubase != RZ:
                mask |= _bit_of("ureg", item.ubase) | _bit_of("ureg", item.ubase + 1)
        elif item.kind == "unknown":
            return (1 << 528) - 1
    return mask


_Guard = tuple[bool, int, bool]


def _and_with(instruction: Instruction) -> tuple[_Guard, list[_Guard]] | None:
    """``ISETP.….AND P0, PT, a, b, P3``: the result is false where P3 is, so a and b matter only under P3, and P0 implies P3.

    The guard (P3) and the guards that then imply it (P0); None for any other instruction.
    """
    if instruction.opcode not in ("ISETP", "UISETP", "FSETP") or not instruction.has("AND") or instruction.has("EX"):
        return None
    if instruction.guard is not None or len(instruction.sources) < 3:
        return None
    last = instruction.sources[2]
    if last.kind not in ("pred", "upred") or last.index is None or last.index == PT or len(instruction.dests) < 1:
        return None
    first = instruction.dests[0]
    implied = [(first.kind == "upred", first.index, False)] if first.index is not None and first.index != PT else []
    return (last.kind == "upred", last.index, last.invert), implied


def _exposed(instructions: Iterable[Instruction]) -> tuple[int, int]:
    """Masks of a straight run of code: what it reads before it is written there, and what it certainly overwrites.

    A read under the guard under which the value was written is not exposed, as long as that predicate has not changed in between;
    writes under a guard and under its opposite overwrite together.
    """
    read = kill = 0
    under: dict[_Guard, int] = {}
    implies: dict[_Guard, _Guard] = {}
    for instruction in instructions:
        guard = instruction.guard
        mine: _Guard | None = (guard.uniform, guard.index, guard.negated) if guard is not None and guard.index != PT else None
        hidden = kill
        at = mine
        for _ in range(8):
            if at is None:
                break
            hidden |= under.get(at, 0)
            at = implies.get(at)
        wanted = read_registers(instruction)
        joined = _and_with(instruction)
        if joined is not None:
            predicates = wanted >> _BASE["pred"] << _BASE["pred"]
            wanted = predicates | wanted & ~(predicates | under.get(joined[0], 0))
        read |= wanted & ~hidden
        written = 0
        for kind, index in written_registers(instruction):
            written |= _bit_of(kind, min(index, 254) if kind in ("reg", "ureg") else index)
        for key in [key for key in {*under, *implies} if written & _guard_bit(key)]:
            under.pop(key, None)
            implies.pop(key, None)
        for key in [key for key, other in implies.items() if written & _guard_bit(other)]:
            del implies[key]
        if mine is None:
            kill |= written
        else:
            under[mine] = under.get(mine, 0) | written
            kill |= written & under.get((mine[0], mine[1], not mine[2]), 0)
        if joined is not None and not written & _guard_bit(joined[0]):
            implies.update(dict.fromkeys(joined[1], joined[0]))
    return read, kill


def _guard_bit(guard: _Guard) -> int:
    return _bit_of("upred" if guard[0] else "pred", guard[1])


def _runs(following: Mapping[int, tuple[int, ...]], ends: Mapping[int, int]) -> dict[int, list[int]]:
    """Straight runs: first block to the blocks that follow one another with nothing else leading in or out."""
    back = reversed_graph(following)
    inside = {
        targets[0]
        for start, targets in following.items()
        if len(targets) == 1 and targets[0] == ends[start] and back.get(targets[0]) == (start,) and targets[0] in following
    }
    runs: dict[int, list[int]] = {}
    for start in sorted(following):
        if start not in inside:
            run = [start]
            while len(following[run[-1]]) == 1 and following[run[-1]][0] in inside and following[run[-1]][0] == ends[run[-1]]:
                run.append(following[run[-1]][0])
            runs[start] = run
    return runs


def liveness(function: SassFunction, following: Mapping[int, tuple[int, ...]], ends: Mapping[int, int]) -> dict[int, int]:
    """Registers whose value may still be read, at the start of each block. Exact about guards within a straight run of blocks."""

    def code(first: int, end: int) -> tuple[Instruction, ...]:
        return function.instructions[first // INSTRUCTION_BYTES : end // INSTRUCTION_BYTES]

    runs = _runs(following, ends)
    masks = {start: _exposed(code(start, ends[run[-1]])) for start, run in runs.items()}
    live = {start: read for start, (read, _) in masks.items()}
    owner = {block: start for start, run in runs.items() for block in run}
    back: dict[int, set[int]] = {start: set() for start in runs}
    for start, run in runs.items():
        for target in following[run[-1]]:
            back[owner[target]].add(start)
    queue = sorted(runs)
    while queue:
        start = queue.pop()
        out = 0
        for target in following[runs[start][-1]]:
            out |= live.get(target, 0)
        read, kill = masks[start]
        value = read | out & ~kill
        if value != live[start]:
            live[start] = value
            queue.extend(back[start])
    for run in runs.values():
        for block in run[1:]:
            out = 0
            for target in following[run[-1]]:
                out |= live.get(target, 0)
            read, kill = _exposed(code(block, ends[run[-1]]))
            live[block] = read | out & ~kill
    return live


def live_registers(mask: int) -> list[tuple[str, int]]:
    """The registers in a liveness mask, as (kind, index)."""
    out: list[tuple[str, int]] = []
    for kind, base, count in (("reg", 0, 255), ("ureg", 256, 255), ("pred", 512, 7), ("upred", 520, 7)):
        part = mask >> base & ((1 << count) - 1)
        while part:
            low = part & -part
            out.append((kind, low.bit_length() - 1))
            part ^= low
    return out
