"""Which registers an instruction reads and writes, and which may still be read from a block on."""

from __future__ import annotations

from collections.abc import Mapping

from .decode import INSTRUCTION_BYTES, PT, RZ, Instruction, Operand, SassFunction

__all__ = ["live_registers", "liveness", "reversed_graph", "written_registers"]


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


def _words(instruction: Instruction, operand: Operand, *, written: bool = False) -> int:
    """How many registers an operand names: 1, a pair, or four."""
    if operand.kind == "mem":
        return 2 if operand.mode == "64" else 1
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


def _read_mask(instruction: Instruction) -> int:
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
                for n in range(2 if item.mode == "64" else 1):
                    mask |= _bit_of("reg", min(item.index + n, 254))
            if item.ubase is not None and item.ubase != RZ:
                mask |= _bit_of("ureg", item.ubase) | _bit_of("ureg", item.ubase + 1)
        elif item.kind == "unknown":
            return (1 << 528) - 1
    return mask


def liveness(function: SassFunction, following: Mapping[int, tuple[int, ...]], ends: Mapping[int, int]) -> dict[int, int]:
    """Registers whose value may still be read, at the start of each block."""
    reads: dict[int, int] = {}
    kills: dict[int, int] = {}
    for start, end in ends.items():
        read = kill = 0
        for offset in range(start, end, INSTRUCTION_BYTES):
            instruction = function.instructions[offset // INSTRUCTION_BYTES]
            read |= _read_mask(instruction) & ~kill
            if instruction.guard is None:
                for kind, index in written_registers(instruction):
                    kill |= _bit_of(kind, min(index, 254) if kind in ("reg", "ureg") else index)
        reads[start], kills[start] = read, kill
    live = dict(reads)
    back = reversed_graph(following)
    queue = sorted(following)
    while queue:
        start = queue.pop()
        out = 0
        for target in following[start]:
            out |= live.get(target, 0)
        value = reads[start] | out & ~kills[start]
        if value != live[start]:
            live[start] = value
            queue.extend(source for source in back.get(start, ()) if source in following)
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
