"""Value numbering over a straight run of instructions: which registers hold which values, without knowing them.

``Values`` is a table of interned expressions (a node is a small int). ``Trace`` walks instructions and maps each register to a
node; what it has no semantics for writes a new opaque node, so a wrong equality cannot arise. ``evaluate`` turns a node into a
number once some nodes are known, for example from a lane's registers at one point of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..kernels.sasstext import SassLine
from .operands import Constant, Immediate, Memory, Operand, Register, destinations, operand

__all__ = ["INVERSE", "SWAPPED", "Trace", "Values"]

_M32 = 0xFFFFFFFF
_M64 = (1 << 64) - 1

INVERSE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
SWAPPED = {"==": "==", "!=": "!=", "<": ">", ">": "<", ">=": "<=", "<=": ">="}
_RELATIONS = {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}

Node = tuple[str | int | bool, ...]


class Values:
    """Interned expressions. A node is ``(operator, arguments…)``; arguments that are nodes are their numbers.

    Words: opaque, int, const (bank, offset), load (number), add, mul, lop3, shl, shr, sar. Predicates: true, opaque,
    cmp (relation, signed, left, right), cmp64 (relation, signed, low left, low right, high left, high right), not, and, or, xor.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._numbers: dict[Node, int] = {}
        self._fresh = 0
        self.true = self.node("true")

    def node(self, *parts: str | int | bool) -> int:
        number = self._numbers.get(parts)
        if number is None:
            number = self._numbers[parts] = len(self.nodes)
            self.nodes.append(parts)
        return number

    def opaque(self) -> int:
        self._fresh += 1
        return self.node("opaque", self._fresh)

    def integer(self, value: int) -> int:
        return self.node("int", value & _M32)

    def add(self, *terms: int) -> int:
        """The 32-bit sum; zeros vanish and one term is itself, so that a move keeps its node."""
        total, rest = 0, []
        for term in terms:
            node = self.nodes[term]
            if node[0] == "int":
                total += int(node[1])
            else:
                rest.append(term)
        if total & _M32 or not rest:
            rest.append(self.integer(total))
        return rest[0] if len(rest) == 1 else self.node("add", *sorted(rest))

    def mul(self, left: int, right: int) -> int:
        for one, other in ((left, right), (right, left)):
            node = self.nodes[one]
            if node[0] == "int" and node[1] in (0, 1):
                return self.integer(0) if node[1] == 0 else other
        return self.node("mul", *sorted((left, right)))

    def negation(self, word: int) -> int:
        return self.mul(word, self.integer(-1))

    def invert(self, predicate: int) -> int:
        """The opposite of a predicate, pushed down to the comparisons."""
        node = self.nodes[predicate]
        if node[0] == "cmp" or node[0] == "cmp64":
            return self.node(node[0], INVERSE[str(node[1])], *node[2:])
        if node[0] == "not":
            return int(node[1])
        if node[0] in ("and", "or"):
            return self.both("or" if node[0] == "and" else "and", self.invert(int(node[1])), self.invert(int(node[2])))
        return self.node("not", predicate)

    def both(self, word: str, left: int, right: int) -> int:
        """``left and/or/xor right``, with the true predicate folded."""
        for one, other in ((left, right), (right, left)):
            if one == self.true:
                if word == "and":
                    return other
                return self.true if word == "or" else self.invert(other)
        return self.node(word, left, right)

    def depends(self, number: int, wanted: Callable[[Node], bool]) -> bool:
        """Whether a node for which ``wanted`` holds stands anywhere in an expression."""
        stack, seen = [number], set()
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            node = self.nodes[current]
            if wanted(node):
                return True
            stack += self.arguments(node)
        return False

    @staticmethod
    def arguments(node: Node) -> list[int]:
        """The nodes that a node is made of."""
        word = node[0]
        if word in ("opaque", "int", "const", "load", "true"):
            return []
        if word in ("cmp", "cmp64"):
            return [int(part) for part in node[3:]]
        if word == "lop3":
            return [int(part) for part in node[2:]]
        return [int(part) for part in node[1:]]

    def evaluate(
        self, number: int, known: Mapping[int, int], constant: Callable[[int, int], int | None], memo: dict[int, int | None]
    ) -> int | None:
        """The u32 that a word node stands for (a predicate node: 0 or 1), None if anything in it is not known."""
        if number in known:
            return known[number]
        if number in memo:
            return memo[number]
        memo[number] = None
        memo[number] = value = self._value(self.nodes[number], known, constant, memo)
        return value

    def _value(
        self, node: Node, known: Mapping[int, int], constant: Callable[[int, int], int | None], memo: dict[int, int | None]
    ) -> int | None:
        word = node[0]
        if word == "int":
            return int(node[1])
        if word == "true":
            return 1
        if word == "const":
            return constant(int(node[1]), int(node[2]))
        if word in ("opaque", "load"):
            return None
        arguments = [self.evaluate(part, known, constant, memo) for part in self.arguments(node)]
        if any(part is None for part in arguments):
            return None
        return _apply(node, [part for part in arguments if part is not None])


def _apply(node: Node, a: list[int]) -> int:
    word = node[0]
    if word == "add":
        return sum(a) & _M32
    if word == "mul":
        return a[0] * a[1] & _M32
    if word == "lop3":
        return _lop3(int(node[1]), *a)
    if word == "shl":
        return a[0] << a[1] & _M32 if a[1] < 32 else 0
    if word in ("shr", "sar"):
        value = a[0] - (1 << 32) if word == "sar" and a[0] >> 31 else a[0]
        return value >> min(a[1], 63) & _M32
    if word == "not":
        return 1 - a[0]
    if word in ("and", "or", "xor"):
        return a[0] & a[1] if word == "and" else a[0] | a[1] if word == "or" else a[0] ^ a[1]
    bits = 64 if word == "cmp64" else 32
    left, right = (a[0] | a[2] << 32, a[1] | a[3] << 32) if bits == 64 else (a[0], a[1])
    return int(compare(str(node[1]), left, right, bits if node[2] else 0))


def compare(relation: str, left: int, right: int, signed_bits: int = 0) -> bool:
    """``left relation right`` over unsigned patterns; ``signed_bits`` 32 or 64: read as two's complement of that width."""
    if signed_bits:
        sign = 1 << signed_bits - 1
        left, right = (left ^ sign) - sign, (right ^ sign) - sign
    return {
        "==": left == right, "!=": left != right, "<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right,
    }[relation]  # fmt: skip


def _lop3(table: int, a: int, b: int, c: int) -> int:
    out = 0
    for index in range(8):
        if table >> index & 1:
            out |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return out & _M32


class Trace:
    """Registers and predicates as nodes, instruction by instruction. ``poll``: line offsets whose result is a numbered load."""

    def __init__(self, values: Values, poll: int | None = None) -> None:
        self.values = values
        self.env: dict[str, int] = {}
        self.poll = poll
        self.loads = 0
        #: of the last poll: node pairs of its address sum (low, high words), or None if its form is not understood
        self.address: tuple[list[tuple[int, int | None]], int] | None = None
        self.result: tuple[int, ...] = ()

    def forget(self) -> None:
        """Everything may have changed: a call, or instructions that are not known."""
        self.env = {name: self.values.opaque() for name in self.env}

    def read(self, name: str) -> int:
        if name not in self.env:
            self.env[name] = self.values.opaque()
        return self.env[name]

    def word(self, item: Operand) -> int:
        """A 32-bit source operand."""
        v = self.values
        if isinstance(item, Immediate):
            return v.integer(item.value)
        if isinstance(item, Constant):
            return v.node("const", item.bank, item.offset)
        if isinstance(item, Register) and item.plain and item.kind in ("R", "UR"):
            base = self.read(item.name) if item.name else v.integer(0)
            if item.negative:
                return v.negation(base)
            return v.add(v.negation(base), v.integer(-1)) if item.inverted else base
        return v.opaque()

    def high(self, item: Operand) -> int:
        """The upper word of a 64-bit source operand."""
        if isinstance(item, Register) and item.name and item.plain and not item.negative and not item.inverted:
            return self.read(f"{item.kind}{int(item.name.lstrip('UR')) + 1}")
        if isinstance(item, Register) and not item.name:
            return self.values.integer(0)
        if isinstance(item, Constant):
            return self.values.node("const", item.bank, item.offset + 4)
        return self.values.opaque()

    def predicate(self, text: str) -> int:
        """A predicate operand or guard such as ``@!P0``."""
        item = operand(text.lstrip("@"))
        if not isinstance(item, Register) or item.kind not in ("P", "UP"):
            return self.values.opaque()
        node = self.read(item.name) if item.name else self.values.true
        return self.values.invert(node) if item.negative else node

    def step(self, line: SassLine) -> None:
        """One instruction. A guarded one leaves either the old or the new value: not known which."""
        if line.base in ("CALL", "RET", "JMX", "BRX"):
            self.forget()
            return
        written = destinations(line)
        results: dict[str, int] = {}
        if not line.predicate or line.predicate in ("@PT", "@UPT"):
            results = self._poll(line) if line.offset == self.poll else self._result(line)
        for name in written:
            found = results.get(name)
            self.env[name] = self.values.opaque() if found is None else found

    def _poll(self, line: SassLine) -> dict[str, int]:
        memory = next((item for item in map(operand, line.operands) if isinstance(item, Memory)), None)
        self.address = self._address(memory, "E" in line.modifiers) if memory is not None and memory.exact else None
        self.loads += 1
        names = [name for name in destinations(line) if not name.lstrip("U").startswith("P")]
        results = {name: self.values.node("load", self.loads, index) for index, name in enumerate(names)}
        self.result = tuple(results.values())
        return results

    def _address(self, memory: Memory, extended: bool) -> tuple[list[tuple[int, int | None]], int]:
        terms: list[tuple[int, int | None]] = []
        for base in memory.bases:
            pair = extended and not base.narrow and (base.wide or base.kind == "UR" or len(memory.bases) == 1)
            terms.append((self.word(base), self.high(base) if pair else None))
        return terms, memory.offset

    # --- semantics -----------------------------------------------------------------------------------------------------------

    def _result(self, line: SassLine) -> dict[str, int]:
        items = [operand(text) for text in line.operands]
        if not items or not isinstance(items[0], Register):
            return {}
        base, modifiers, target = line.base.removeprefix("U"), set(line.modifiers), items[0]
        if base in ("ISETP", "SETP"):
            return self._compare(line, items, modifiers)
        if base == "PLOP3":
            return self._predicate_table(line, items)
        if base == "LOP3" and target.kind in ("P", "UP") and target.name and len(items) >= 6:
            word = self._lop3(items[2:])
            return {} if word is None else {target.name: self.values.node("cmp", "!=", False, word, self.values.integer(0))}
        if target.kind not in ("R", "UR") or not target.name:
            return {}
        found = self._move(base, modifiers, items)
        if found is not None:
            pair = {target.name: found[0]}
            if len(found) > 1:
                pair[f"{target.kind}{int(target.name.lstrip('UR')) + 1}"] = found[1]
            return pair
        return {}

    def _move(self, base: str, modifiers: set[str], items: list[Operand]) -> tuple[int, ...] | None:
        """The word (or pair) that a data instruction writes; None: no semantics here."""
        v, sources = self.values, [item for item in items[1:] if not (isinstance(item, Register) and item.kind in ("P", "UP"))]
        carries = "X" in modifiers or "HI" in modifiers
        if base in ("MOV", "LDC", "R2UR") and len(sources) >= 1 and not isinstance(sources[0], Memory):
            if "64" in modifiers:
                return self.word(sources[0]), self.high(sources[0])
            return (self.word(sources[0]),)
        if base in ("IADD3", "VIADD", "IADD") and not carries and "64" not in modifiers:
            return (v.add(*(self.word(item) for item in sources)),)
        if base == "IMAD" and not carries and len(sources) == 3:
            product = v.mul(self.word(sources[0]), self.word(sources[1]))
            if "WIDE" in modifiers:
                zero = v.nodes[product] == ("int", 0)
                return (self.word(sources[2]), self.high(sources[2])) if zero else None
            return (v.add(product, self.word(sources[2])),)
        if base == "LOP3" and len(sources) >= 4:
            word = self._lop3(sources)
            return None if word is None else (word,)
        if base == "SHF" and len(sources) == 3:
            return self._shift(modifiers, sources)
        return None

    def _lop3(self, sources: list[Operand]) -> int | None:
        """Nodes for ``a, b, c, table`` (then a predicate operand that the plain form does not use)."""
        v, table = self.values, sources[3]
        if not isinstance(table, Immediate):
            return None
        a, b, c = (self.word(item) for item in sources[:3])
        lut = table.value & 0xFF
        single = {0xF0: a, 0xCC: b, 0xAA: c}.get(lut)
        return single if single is not None else v.node("lop3", lut, a, b, c)

    def _shift(self, modifiers: set[str], sources: list[Operand]) -> tuple[int] | None:
        low, amount, top = sources
        zero_low = isinstance(low, Register) and not low.name
        zero_top = isinstance(top, Register) and not top.name
        if "L" in modifiers and zero_top:
            return (self.values.node("shl", self.word(low), self.word(amount)),)
        if "R" in modifiers and "HI" in modifiers and zero_low:
            return (self.values.node("sar" if "S32" in modifiers else "shr", self.word(top), self.word(amount)),)
        return None

    def _predicate_table(self, line: SassLine, items: list[Operand]) -> dict[str, int]:
        """PLOP3: ``first, second, a, b, c, table, table``, the table indexed by a, b, c from bit 2 to bit 0."""
        v, target = self.values, items[0]
        if len(items) < 6 or not isinstance(target, Register) or not target.name or not isinstance(items[5], Immediate):
            return {}
        nodes = [self.predicate(text) for text in line.operands[2:5]]
        free = [index for index, node in enumerate(nodes) if node != v.true]
        rows = {}
        for values in range(1 << len(free)):
            index = sum(4 >> bit for bit in range(3) if bit not in free or values >> free.index(bit) & 1)
            rows[values] = items[5].value >> index & 1
        if len(free) == 1 and rows[0] != rows[1]:
            return {target.name: nodes[free[0]] if rows[1] else v.invert(nodes[free[0]])}
        if len(free) == 2 and sum(rows.values()) in (1, 3):
            # one row true is an "and" of the inputs as they are in that row; one row false is the opposite of such an "and"
            odd = next(key for key, value in rows.items() if value == (sum(rows.values()) == 1))
            x, y = (nodes[place] if odd >> bit & 1 else v.invert(nodes[place]) for bit, place in enumerate(free))
            found = v.both("and", x, y)
            return {target.name: found if rows[odd] else v.invert(found)}
        return {}

    def _compare(self, line: SassLine, items: list[Operand], modifiers: set[str]) -> dict[str, int]:
        """ISETP: ``first, second, left, right, [combining], [low half's result]``. The second destination stays opaque."""
        v = self.values
        relation = next((_RELATIONS[word] for word in line.modifiers if word in _RELATIONS), None)
        target = items[0]
        if (
            relation is None
            or len(items) < 4
            or not isinstance(target, Register)
            or not target.name
            or "S64" in modifiers
            or "U64" in modifiers
        ):
            return {}
        signed = "U32" not in modifiers
        left, right = self.word(items[2]), self.word(items[3])
        node = v.node("cmp", relation, signed, left, right)
        rest = [text for text, item in zip(line.operands[4:], items[4:], strict=True) if isinstance(item, Register)]
        if "EX" in modifiers:
            low = v.nodes[self.predicate(rest[1])] if len(rest) > 1 else ("opaque",)
            if low[0] != "cmp":
                return {}
            node = v.node("cmp64", relation, signed, low[3], low[4], left, right)
        combining = self.predicate(rest[0]) if rest else v.true
        word = "or" if "OR" in modifiers else "xor" if "XOR" in modifiers else "and"
        return {target.name: v.both(word, node, combining)}
