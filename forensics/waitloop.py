"""The wait loop, found by its shape: a strong or acquire load that feeds, through moves, a comparison that decides a way out.

No register, offset, architecture or kernel name is assumed. ``CodeView`` holds one function's control flow; ``find`` gives the
smallest loop around a PC whose exit depends on a polled load and that stores nothing to global memory; ``resolve`` reads address,
value and target for one lane, from its registers at that PC alone: the loop's instructions are walked once round with value
numbers, so a base register that the load overwrote is found again in the register it was copied from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from ..kernels.sasstext import SassLine
from .controlflow import HOLE, ControlFlow, written
from .operands import branch_target, operand
from .values import SWAPPED, Node, Trace, Values, compare

__all__ = ["CodeView", "Resolved", "Site", "WaitLoop", "no_constants"]

Status = Literal["measured", "computed", "unknown"]
Constants = Callable[[int, int], int | None]

_STORES = frozenset(("ST", "STG", "RED", "REDG", "ATOM", "ATOMG", "UBLKCP", "UTMASTG", "UTMAREDG", "CALL"))


def no_constants(_bank: int, _offset: int) -> int | None:
    """For ``resolve`` where the constant bank was not read."""
    return None


@dataclass(frozen=True, slots=True)
class WaitLoop:
    """A loop that ends when ``value comparison target``. Offsets in bytes from the function's start.

    ``scope``: gpu, sys, cta … as the load says; ``bits``: width of the compared value; ``signed``: how it is compared.
    ``expression``: how the compared value comes from the loaded one, "value" for the loaded one itself. ``address``: the load's
    address operand. ``partial``: the way out has a further condition that must hold too. ``bounded``: there is another way out
    (a spin limit). ``holes``: some of the loop's instructions are not in the listing. ``signed`` is False for == and !=.
    """

    load: int
    compare: int
    branch: int
    opcode: str
    scope: str
    address: str
    comparison: str
    signed: bool
    bits: int
    expression: str = "value"
    partial: bool = False
    bounded: bool = False
    holes: bool = False
    body: frozenset[int] = frozenset()
    instructions: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a lane waits for. ``value``: the last polled value; ``target``: what it is compared with, both as u32 or u64 patterns.

    A status of "measured": the word stood in a register of that lane; "computed": from such words by the loop's own moves and
    sums. ``satisfied``: whether the comparison already holds for that value; None if not known.
    """

    address: int | None = None
    value: int | None = None
    target: int | None = None
    address_status: Status = "unknown"
    value_status: Status = "unknown"
    target_status: Status = "unknown"
    satisfied: bool | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """A wait loop as seen from one PC: the loop, and the value numbers of that walk."""

    loop: WaitLoop
    pc: int
    _values: Values
    _registers: Mapping[str, int]
    _address: tuple[tuple[tuple[int, int | None], ...], int] | None
    _loaded: tuple[int, ...]
    _left: tuple[int, ...]
    _right: tuple[int, ...]
    _after_load: bool = True

    def resolve(
        self,
        registers: Sequence[int] | None,
        uniform: Sequence[int] | None,
        constants: Constants = no_constants,
        named: Mapping[str, int] | None = None,
    ) -> Resolved:
        """Address, value and target for a lane with these registers at this PC (None: not read; ``named``: read singly)."""
        known: dict[int, int] = {}
        for name, node in self._registers.items():
            if name[0] == "P" or name[:2] == "UP":
                continue
            bank = registers if name[0] == "R" else uniform
            number = int(name.lstrip("UR"))
            if bank is not None and number < len(bank):
                known[node] = bank[number]
            elif named and name in named:
                known[node] = named[name]
        memo: dict[int, int | None] = {}

        def word(node: int) -> int | None:
            return self._values.evaluate(node, known, constants, memo)

        def words(nodes: tuple[int, ...]) -> int | None:
            parts = [word(node) for node in nodes]
            return None if any(part is None for part in parts) else sum((part or 0) << 32 * at for at, part in enumerate(parts))

        address = self._sum(word)
        direct = self._address is not None and all(
            low in known and (high is None or high in known) for low, high in self._address[0]
        )
        value = words(self._loaded[: self.loop.bits // 32])
        target = words(self._right)
        left = words(self._left)
        satisfied = None
        if left is not None and target is not None:
            satisfied = compare(self.loop.comparison, left, target, self.loop.bits if self.loop.signed else 0)
        return Resolved(
            address, value, target,
            "unknown" if address is None else "measured" if direct else "computed",
            "unknown" if value is None else "measured" if self._after_load else "computed",
            "unknown" if target is None else "measured" if all(node in known for node in self._right) else "computed",
            satisfied,
        )  # fmt: skip

    def _sum(self, word: Callable[[int], int | None]) -> int | None:
        if self._address is None:
            return None
        total = self._address[1]
        for low, high in self._address[0]:
            low_word, high_word = word(low), 0 if high is None else word(high)
            if low_word is None or high_word is None:
                return None
            total += low_word | high_word << 32
        return total & (1 << 64) - 1


class CodeView(ControlFlow):
    """Wait loops of one function. ``lines``: its instructions; a listing with gaps is allowed."""

    def __init__(self, lines: Iterable[SassLine]) -> None:
        super().__init__(lines)
        self._sites: dict[int, Site | None] = {}

    # --- the pattern ---------------------------------------------------------------------------------------------------------

    def find(self, pc: int) -> Site | None:
        """The smallest wait loop around the instruction at ``pc``; None if it is in none."""
        if pc not in self._sites:
            self._sites[pc] = self._find(pc)
        return self._sites[pc]

    def phase_wait(self, pc: int) -> int | None:
        """Offset of the mbarrier phase check whose loop holds ``pc``; None if it is in no such loop."""
        for body in self.natural_loops():
            if pc in body and len(body) <= 64:
                checks = [
                    place
                    for place in sorted(body)
                    if self.lines[place].base == "SYNCS" and "PHASECHK" in self.lines[place].modifiers
                ]
                if checks:
                    return checks[0]
        return None

    def wait_loops(self) -> list[WaitLoop]:
        """Every wait loop of the function, by offset of its load."""
        found: dict[int, WaitLoop] = {}
        for body in self.natural_loops():
            for load in sorted(offset for offset in body if is_poll(self.lines[offset])):
                site = self._site(body, load, load)
                if site is not None and load not in found:
                    found[load] = site.loop
        return [found[load] for load in sorted(found)]

    def _find(self, pc: int) -> Site | None:
        if pc not in self.lines or self.lines[pc].opcode == HOLE:
            return None
        for body in self.natural_loops():
            if pc in body:
                for load in sorted(offset for offset in body if is_poll(self.lines[offset])):
                    site = self._site(body, load, pc)
                    if site is not None:
                        return site
        return None

    def _exits(self, body: frozenset[int]) -> list[tuple[int, bool]]:
        """Instructions that can leave the loop, and whether they leave when their condition holds."""
        found = []
        for offset in sorted(body):
            line = self.lines[offset]
            outside = [place for place in self.successors[offset] if place not in body]
            if line.base in ("EXIT", "RET", "KILL"):
                found.append((offset, True))
            elif outside and len(self.successors[offset]) > 1:
                found.append((offset, branch_target(line) in outside))
        return found

    def _site(self, body: frozenset[int], load: int, pc: int) -> Site | None:
        stores = [place for place in body if place != load and self.lines[place].base in _STORES]
        if stores:
            return None  # a loop that writes is at work, whatever it waits for
        exits = self._exits(body)
        for branch, when_taken in exits:
            walk = self._walk(body, load, branch, pc)
            if walk is not None:
                found = self._equation(body, load, pc, walk, branch, when_taken)
                if found is not None:
                    others = [place for place, _ in exits if place != branch]
                    return self._finish(found, body, bool(others))
        return None

    def _walk(self, body: frozenset[int], load: int, branch: int, pc: int) -> list[int] | None:
        """One round through the loop that starts at ``pc`` and passes the load and the branch; the shorter order of the two."""
        rounds = []
        for stops in ((pc, load, branch, pc), (pc, branch, load, pc)):
            parts = []
            for start, goal in pairwise(stops):
                part = [] if start == goal and start != stops[0] else self.path(start, goal, body) if start != goal else []
                if part is None:
                    break
                parts.append(part)
            else:
                run = [place for part in parts for place in part]
                if load in run and branch in run:
                    rounds.append(run)
        if pc == load == branch:
            return None
        return min(rounds, key=len) if rounds else None

    def _equation(self, body: frozenset[int], load: int, pc: int, walk: list[int], branch: int, when_taken: bool) -> Site | None:
        values = Values()
        trace = Trace(values, load)
        unstable = {name for place in body - set(walk) for name in written(self.lines[place])}
        state: Mapping[str, int] = {}
        address = None
        loaded: tuple[int, ...] = ()
        exits: list[tuple[int, int]] = []
        for turn in range(2):
            for place in walk:
                line = self.lines[place]
                if place == branch:
                    exits.append((trace.loads, _condition(trace, line, when_taken)))
                if line.opcode == HOLE:
                    trace.forget()
                else:
                    trace.step(line)
            if turn == 0:
                address, loaded = trace.address, trace.result
                state = {name: node for name, node in trace.env.items() if name not in unstable}
        wanted = trace.loads - 1 if exits and len(loaded) else 0
        condition = next((node for number, node in exits if number == wanted), None)
        if condition is None or not loaded:
            return None
        leaf = _leaf(values, condition, lambda node: node[0] == "load" and node[1] == wanted)
        if leaf is None:
            return None
        relation, signed, left, right, bits, needs_more, other_way = leaf
        expression = "value" if left == loaded[: len(left)] else _describe(values, left[0])
        backward = [index for index, place in enumerate(walk) if walk[(index + 1) % len(walk)] <= place]
        after_load = walk.index(load) > max(backward, default=-1)
        loop = WaitLoop(
            load, self._comparison(walk, branch), branch, self.lines[load].opcode, _scope(self.lines[load]),
            next((text for text in self.lines[load].operands if "[" in text), ""), relation, signed and relation[0] in "<>",
            bits, expression, needs_more, other_way,
        )  # fmt: skip
        frozen = None if address is None else (tuple(address[0]), address[1])
        return Site(loop, pc, values, state, frozen, loaded, left, right, after_load)

    def _comparison(self, walk: list[int], branch: int) -> int:
        """The last comparison before the branch in the walk, the branch itself if there is none."""
        order = walk[walk.index(branch) :: -1] + walk[: walk.index(branch) : -1]
        return next((place for place in order if self.lines[place].base in ("ISETP", "UISETP")), branch)

    def _finish(self, site: Site, body: frozenset[int], others: bool) -> Site:
        shown = tuple((place, self.lines[place].text) for place in sorted(body) if self.lines[place].opcode != HOLE)
        holes = any(self.lines[place].opcode == HOLE for place in body)
        loop = replace(site.loop, bounded=others or site.loop.bounded, holes=holes, body=body, instructions=shown[:64])
        return replace(site, loop=loop)


def is_poll(line: SassLine) -> bool:
    """A load whose value another thread may change while one waits: strong, acquire or volatile, or an atomic that adds nothing."""
    modifiers = set(line.modifiers)
    if line.base in ("LD", "LDG"):
        return bool(modifiers & {"STRONG", "ACQUIRE", "MMIO", "VOLATILE"})
    if line.base in ("ATOM", "ATOMG"):
        if modifiers & {"CAS", "CAST", "EXCH"}:
            return True
        last = operand(line.operands[-1]) if line.operands else None
        return bool(modifiers & {"ADD", "OR", "MAX", "XOR"}) and last == operand("RZ")
    return False


def _scope(line: SassLine) -> str:
    return next((word.lower() for word in line.modifiers if word in ("CTA", "SM", "GPU", "SYS", "VC", "CLUSTER")), "")


def _condition(trace: Trace, line: SassLine, when_taken: bool) -> int:
    """The predicate under which a branch leaves the loop."""
    values = trace.values
    node = trace.predicate(line.predicate) if line.predicate else values.true
    for text in line.operands[:-1] if line.base not in ("EXIT", "RET") else line.operands[:1]:
        node = values.both("and", node, trace.predicate(text))
    return node if when_taken else values.invert(node)


def _leaf(
    values: Values, condition: int, wanted: Callable[[Node], bool]
) -> tuple[str, bool, tuple[int, ...], tuple[int, ...], int, bool, bool] | None:
    """The comparison in a condition that has the load on one side.

    Relation, signed, the load's side, the other side, width in bits, whether more must hold ("and"), whether another part
    alone suffices ("or").
    """
    queue = deque([(condition, False, False)])
    for _ in range(64):
        if not queue:
            return None
        number, needs_more, other_way = queue.popleft()
        node = values.nodes[number]
        if node[0] in ("and", "or"):
            queue += [(part, needs_more or node[0] == "and", other_way or node[0] == "or") for part in values.arguments(node)]
        if node[0] not in ("cmp", "cmp64"):
            continue
        relation, parts = str(node[1]), values.arguments(node)
        left, right = (tuple(parts[0::2]), tuple(parts[1::2]))
        sides = [any(values.depends(part, wanted) for part in side) for side in (left, right)]
        if sides[0] != sides[1]:
            bits = 64 if node[0] == "cmp64" else 32
            if sides[1]:
                left, right, relation = right, left, SWAPPED[relation]
            if any(values.depends(part, lambda item: item[0] == "load") for part in right):
                return None
            return relation, bool(node[2]), left, right, bits, needs_more, other_way
    return None


def _describe(values: Values, number: int, depth: int = 0) -> str:
    """An expression over the loaded value, for people."""
    node = values.nodes[number]
    if node[0] == "load":
        return "value"
    if node[0] == "int":
        return hex(int(node[1]))
    if depth > 4 or node[0] in ("opaque", "const"):
        return "w"
    parts = [_describe(values, part, depth + 1) for part in values.arguments(node)]
    if node[0] == "lop3":
        names = {0xC0: " & ", 0x3C: " ^ ", 0xFC: " | "}
        known = names.get(int(node[1]))
        return f"({known.join(parts[:2])})" if known else f"lop3({node[1]:#x}: {', '.join(parts)})"
    word = {"add": " + ", "mul": " * ", "shl": " << ", "shr": " >> ", "sar": " >> "}.get(str(node[0]))
    return f"({word.join(parts)})" if word else f"{node[0]}({', '.join(parts)})"
