"""Terms over 32-bit words and truth values: what a register or predicate of one thread holds as a function of named inputs.

A value is a Python int (0 to 2^32-1) or bool where it is known, else a ``Term``. Terms are interned in a ``Terms`` factory, so
structural
equality is identity. One term has three readings: evaluated on concrete inputs (``evaluate``), as NumPy code over whole vectors
of inputs
(``compile_numpy``) and as a z3 expression (``symbolic_solver``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["MASK", "TOP", "Bit", "Constants", "Term", "Terms", "Word", "compile_numpy", "evaluate", "postorder", "signed"]

MASK = 0xFFFFFFFF
#: A predicate's value, a word's value.
Bit = Any
Word = Any


class Term:
    """One node. ``op``: see ``Terms``; ``args``: terms, ints or bools; ``inputs``: names of the variables below it; ``is_bit``:
    truth value."""

    __slots__ = ("args", "inputs", "is_bit", "op")

    def __init__(self, op: str, args: tuple[Any, ...], is_bit: bool, inputs: frozenset[str]) -> None:
        self.op, self.args, self.is_bit, self.inputs = op, args, is_bit, inputs

    def __repr__(self) -> str:
        if self.op in ("var", "bitvar"):
            return str(self.args[0])
        return f"({self.op} {' '.join(hex(a) if type(a) is int and a > 9 else repr(a) for a in self.args)})"


class _Top:
    """A value that constant propagation does not know."""

    __slots__ = ()
    inputs: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return "?"


TOP: Any = _Top()


def signed(word: int) -> int:
    """A 32-bit pattern as a signed number."""
    return word - (1 << 32) if word & 0x80000000 else word


def _shl(a: int, n: int) -> int:
    return (a << n) & MASK if n < 32 else 0


def _lshr(a: int, n: int) -> int:
    return a >> n if n < 32 else 0


def _ashr(a: int, n: int) -> int:
    return (signed(a) >> min(n, 31)) & MASK


_FOLD: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: (a + b) & MASK, "mul": lambda a, b: (a * b) & MASK, "mulhu": lambda a, b: (a * b) >> 32,
    "mulhs": lambda a, b: ((signed(a) * signed(b)) >> 32) & MASK, "neg": lambda a: -a & MASK, "not": lambda a: ~a & MASK,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "shl": _shl, "lshr": _lshr, "ashr": _ashr,
    "ite": lambda c, a, b: a if c else b, "popc": lambda a: a.bit_count(), "flo": lambda a: a.bit_length() - 1 if a else MASK,
    "brev": lambda a: int(f"{a:032b}"[::-1], 2),
    "ult": lambda a, b: a < b, "ule": lambda a, b: a <= b, "slt": lambda a, b: signed(a) < signed(b), "sle": lambda a,
    b: signed(a) <= signed(b),
    "eq": lambda a, b: a == b, "carry": lambda a, b, c: (a + b + int(c)) > MASK,
    "bnot": lambda a: not a, "band": lambda a, b: a and b, "bor": lambda a, b: a or b, "bxor": lambda a, b: a != b,
    "bite": lambda c, a, b: a if c else b,
}  # fmt: skip
_BITS = frozenset({"ult", "ule", "slt", "sle", "eq", "carry", "bnot", "band", "bor", "bxor", "bite", "bitvar"})
_COMMUTE = frozenset({"add", "mul", "mulhu", "mulhs", "and", "or", "xor", "eq", "band", "bor", "bxor"})


class Terms:
    """Makes terms; folds what is known. At most ``limit`` nodes: MemoryError beyond (callers turn it into CANNOT TELL)."""

    def __init__(self, limit: int = 200_000) -> None:
        self._pool: dict[Any, Term] = {}
        self._limit = limit
        self._fresh = 0

    def var(self, name: str) -> Word:
        return self._intern("var", (name,), frozenset((name,)))

    def bitvar(self, name: str) -> Bit:
        return self._intern("bitvar", (name,), frozenset((name,)))

    def fresh(self, why: str) -> Word:
        """A word about which nothing is known."""
        self._fresh += 1
        return self.var(f"?{self._fresh}:{why}")

    def fresh_bit(self, why: str) -> Bit:
        self._fresh += 1
        return self.bitvar(f"?{self._fresh}:{why}")

    def _intern(self, op: str, args: tuple[Any, ...], inputs: frozenset[str]) -> Term:
        key = (op, *(("b", a) if type(a) is bool else a for a in args))
        found = self._pool.get(key)
        if found is None:
            if len(self._pool) >= self._limit:
                raise MemoryError("more terms than any prologue of this family has")
            found = self._pool[key] = Term(op, args, op in _BITS, inputs)
        return found

    def node(self, op: str, *args: Any) -> Any:
        """The value of ``op`` on ``args``; see ``_FOLD`` for the operations (shifts by 32 or more give 0, or the sign)."""
        if all(type(a) is int or type(a) is bool for a in args):
            return _FOLD[op](*args)
        simpler = _simplify(self, op, args)
        if simpler is not None:
            return simpler
        if op in _COMMUTE and (type(args[0]) in (int, bool)):
            args = (args[1], args[0])
        inputs: frozenset[str] = frozenset()
        for a in args:
            if isinstance(a, Term):
                inputs = inputs | a.inputs if inputs else a.inputs
        return self._intern(op, args, inputs)

    # what the semantics are written in
    def add(self, a: Word, b: Word) -> Word:
        return self.node("add", a, b)

    def sub(self, a: Word, b: Word) -> Word:
        return self.node("add", a, self.node("neg", b))

    def ite(self, c: Bit, a: Any, b: Any) -> Any:
        bits = type(a) is bool or (isinstance(a, Term) and a.is_bit)
        return self.node("bite" if bits else "ite", c, a, b)

    def both(self, a: Bit, b: Bit) -> Bit:
        return self.node("band", a, b)

    def either(self, a: Bit, b: Bit) -> Bit:
        return self.node("bor", a, b)

    def negated(self, a: Bit) -> Bit:
        return self.node("bnot", a)


def _simplify(terms: Terms, op: str, args: tuple[Any, ...]) -> Any:
    """Rewrites that keep terms small and let constants through; None if there is none."""
    a = args[0]
    b = args[1] if len(args) > 1 else None
    if op in _COMMUTE and type(a) in (int, bool):
        a, b = b, a
    if op == "add":
        if b == 0 and type(b) is int:
            return a
        if type(b) is int and isinstance(a, Term) and a.op == "add" and type(a.args[1]) is int:
            return terms.node("add", a.args[0], (a.args[1] + b) & MASK)
        if isinstance(b, Term) and b.op == "neg" and b.args[0] is a:
            return 0
    elif op == "mul" and type(b) is int:
        return 0 if b == 0 else a if b == 1 else None
    elif op in ("mulhu", "mulhs") and type(b) is int and b == 0:
        return 0
    elif op == "and" and type(b) is int:
        return 0 if b == 0 else a if b == MASK else None
    elif op in ("or", "xor") and type(b) is int and b == 0:
        return a
    elif op == "or" and type(b) is int and b == MASK:
        return MASK
    elif op in ("shl", "lshr", "ashr") and type(b) is int:
        return a if b == 0 else 0 if b >= 32 and op != "ashr" else None
    elif op in ("neg", "not", "bnot") and isinstance(a, Term) and a.op == op:
        return a.args[0]
    elif op in ("ite", "bite"):
        if type(a) is bool:
            return args[1] if a else args[2]
        if args[1] is args[2] or (type(args[1]) is type(args[2]) and type(args[1]) in (int, bool) and args[1] == args[2]):
            return args[1]
        if op == "bite" and args[1] is True and args[2] is False:
            return a
    elif op == "band" and type(b) is bool:
        return a if b else False
    elif op == "bor" and type(b) is bool:
        return True if b else a
    elif op == "bxor" and type(b) is bool:
        return terms.node("bnot", a) if b else a
    elif op in ("band", "bor") and a is b:
        return a
    elif op == "eq" and a is b:
        return True
    elif op == "ult" and ((type(args[1]) is int and args[1] == 0) or args[0] is args[1]):
        return False
    elif op == "ule" and ((type(args[0]) is int and args[0] == 0) or args[0] is args[1]):
        return True
    elif op == "carry":
        zeros = [x for x in args[:2] if type(x) is int and x == 0]
        if zeros and args[2] is False:
            return False
    return None


class Constants(Terms):
    """The same semantics for constant propagation: whatever is not known is ``TOP``."""

    def var(self, name: str) -> Word:
        return TOP

    def bitvar(self, name: str) -> Bit:
        return TOP

    def fresh(self, why: str) -> Word:
        return TOP

    def fresh_bit(self, why: str) -> Bit:
        return TOP

    def node(self, op: str, *args: Any) -> Any:
        if TOP not in args:
            return _FOLD[op](*args)
        if op in ("band", "and", "mul", "mulhu", "mulhs") and any(type(x) in (int, bool) and not x for x in args):
            return False if op == "band" else 0
        if op == "bor" and any(x is True for x in args):
            return True
        if op in ("ite", "bite") and type(args[0]) is bool:
            return args[1] if args[0] else args[2]
        if op in ("ite", "bite") and args[1] is not TOP and args[2] is not TOP and args[1] == args[2]:
            return args[1]
        return TOP


def postorder(roots: Iterable[Any]) -> list[Term]:
    """Every term below ``roots``, each after its arguments."""
    order: list[Term] = []
    seen: set[int] = set()
    stack: list[tuple[Any, bool]] = [(root, False) for root in roots]
    while stack:
        item, done = stack.pop()
        if not isinstance(item, Term):
            continue
        if done:
            order.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            stack.append((item, True))
            stack.extend((a, False) for a in item.args if isinstance(a, Term) and id(a) not in seen)
    return order


def evaluate(root: Any, inputs: Mapping[str, Any]) -> Any:
    """The value of a term on concrete inputs (words as ints, truth values as bools); KeyError for an input that is not given."""
    values: dict[int, Any] = {}

    def of(item: Any) -> Any:
        return values[id(item)] if isinstance(item, Term) else item

    for term in postorder((root,)):
        if term.op in ("var", "bitvar"):
            value = inputs[term.args[0]]
            values[id(term)] = value if term.op == "bitvar" else value & MASK
        else:
            values[id(term)] = _FOLD[term.op](*(of(a) for a in term.args))
    return of(root)


_NUMPY: dict[str, str] = {
    "add": "{0} + {1}", "mul": "{0} * {1}", "neg": "U(0) - {0}", "not": "~{0}", "and": "{0} & {1}", "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "mulhu": "(({0}).astype(L) * L({1}) >> L(32)).astype(U)", "mulhs": "(s64({0}) * s64({1}) >> I64(32)).astype(U)",
    "shl": "shl({0}, {1})", "lshr": "lshr({0}, {1})", "ashr": "ashr({0}, {1})", "ite": "where({0}, {1}, {2})",
    "bite": "where({0}, {1}, {2})",
    "ult": "{0} < {1}", "ule": "{0} <= {1}", "slt": "s32({0}) < s32({1})", "sle": "s32({0}) <= s32({1})", "eq": "{0} == {1}",
    "carry": "(({0}).astype(L) + L({1}) + L({2})) > L(0xffffffff)", "bnot": "~{0}", "band": "{0} & {1}", "bor": "{0} | {1}",
    "bxor": "{0} ^ {1}",
}  # fmt: skip


def _extremum(term: Term) -> str | None:
    """``a if a < b else b`` as one minimum or maximum; None if the term is no such thing."""
    if term.op != "ite" or not isinstance(term.args[0], Term) or term.args[0].op not in ("ult", "ule", "slt", "sle"):
        return None
    (low, high), (yes, no) = term.args[0].args, term.args[1:]
    same = (yes is low and no is high) or (not isinstance(low, Term) and yes == low and no is high) or (yes is low and no == high)
    other = (yes is high and no is low) or (not isinstance(low, Term) and no == low and yes is high) or (no is low and yes == high)
    if not same and not other:
        return None
    name = "minimum" if same else "maximum"
    return f"{name}({{1}}, {{2}})" if term.args[0].op[0] == "u" else f"{name}(s32({{1}}), s32({{2}})).view(U)"


def compile_numpy(root: Any, variable: str, fixed: Mapping[str, int]) -> Callable[[Any], Any]:
    """A function from a uint32 array of values of ``variable`` to the term's value on each, the other inputs being ``fixed``.

    ValueError for an operation that has no vector form here (popc, flo, brev) or an input that is neither. The code runs one NumPy
    operation a node, unsigned 32-bit, wrapping as the device does.
    """
    import numpy as np

    def s32(value: Any) -> Any:
        return np.asarray(value, np.uint32).view(np.int32)

    def s64(value: Any) -> Any:
        return s32(value).astype(np.int64)

    def shl(a: Any, n: Any) -> Any:
        return np.where(np.asarray(n) < 32, np.left_shift(a, np.minimum(n, 31)), np.uint32(0)).astype(np.uint32)

    def lshr(a: Any, n: Any) -> Any:
        return np.where(np.asarray(n) < 32, np.right_shift(a, np.minimum(n, 31)), np.uint32(0)).astype(np.uint32)

    def ashr(a: Any, n: Any) -> Any:
        return np.right_shift(s32(a), np.minimum(n, 31).astype(np.int32)).view(np.uint32)

    names: dict[int, str] = {}
    lines = ["def slice_of(x):"]

    def of(item: Any) -> str:
        if isinstance(item, Term):
            return names[id(item)]
        return f"B({item})" if type(item) is bool else f"U({item})"

    for position, term in enumerate(postorder((root,))):
        if term.op in ("var", "bitvar"):
            name = term.args[0]
            if name == variable:
                names[id(term)] = "x"
                continue
            if name not in fixed:
                raise ValueError(f"the input {name} has no value")
            names[id(term)] = f"B({bool(fixed[name])})" if term.op == "bitvar" else f"U({fixed[name] & MASK})"
            continue
        form = _extremum(term) or _NUMPY.get(term.op)
        if form is None:
            raise ValueError(f"no vector form of {term.op}")
        names[id(term)] = f"t{position}"
        lines.append(f"    t{position} = " + form.format(*(of(a) for a in term.args)))
    lines.append(f"    return {of(root)}")
    scope: dict[str, Any] = {
        "U": np.uint32, "L": np.uint64, "I64": np.int64, "B": np.bool_, "where": np.where, "minimum": np.minimum,
        "maximum": np.maximum, "s32": s32, "s64": s64, "shl": shl,
        "lshr": lshr, "ashr": ashr,
    }  # fmt: skip
    exec(compile("\n".join(lines), "<slice>", "exec"), scope)  # the text is generated above from operation names and numbers only
    function = scope["slice_of"]

    def run(values: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(values)

    return run
