"""The algebra that writes Python: semantics become NumPy source, with what is uniform over the threads kept as plain integers.

A value is *uniform* ("u": one Python int or bool for all threads of the group) or a *vector* ("v": one array element a
thread). Which registers are uniform is part of the key under which a block is compiled, so the kind of every value is known
here and uniform work costs nanoseconds. Pure values are written only when something needs them, equal ones once.
"""

from __future__ import annotations

from .algebra import MASK32, MASK64, IntegerAlgebra
from .emit_values import ARRAY_TYPES, COMMUTATIVE, UNIFORM, VECTOR, Value, constant_name

__all__ = ["EmitAlgebra"]

_INTEGER = IntegerAlgebra()


class EmitAlgebra:
    """Collects source lines, all at one indentation; ``ref`` gives the text that names a value, writing the value first if need
    be.
    """

    def __init__(self, width: str) -> None:
        """``width``: source text of the number of threads in the group."""
        self.lines: list[str] = []
        self.width = width
        self._seen: dict[tuple[object, ...], Value] = {}
        self._made = 0
        self._count = 0

    # ---- values ----------------------------------------------------------------------------------------------------------

    def _new(self, kind: str, sort: str, op: str, args: tuple[Value, ...] = (), const: int | None = None) -> Value:
        value = Value(kind, sort, op, args, const)
        self._made += 1
        value.serial = self._made
        return value

    def fresh(self) -> str:
        self._count += 1
        return f"x{self._count}"

    def named(self, name: str, kind: str, sort: str, *, alias: bool = False) -> Value:
        """A value that already has a name in the generated code."""
        value = self._new(kind, sort, "named")
        value.name = name
        value.alias = alias
        return value

    def unnamed(self, text: str, kind: str, sort: str) -> Value:
        """A value that ``text`` gives at any point of the block (a register, a constant): written when first needed."""
        return self._new(kind, sort, "text:" + text)

    def stated(self, text: str, kind: str, sort: str, *, alias: bool = False) -> Value:
        """A value computed here and now by ``text`` (a load, a vote): written in order, once."""
        name = self.fresh()
        self.lines.append(f"{name} = {text}")
        return self.named(name, kind, sort, alias=alias)

    def literal(self, value: int, sort: str) -> Value:
        key = ("literal", sort, value)
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = self._new("u", sort, "literal", (), value)
        return found

    def ref(self, value: Value, *, vector: bool = False) -> str:
        """Source text of a value. ``vector``: it stands beside an array, so a literal is given as a 0-d array of the right type."""
        if value.const is not None:
            if value.sort == "t":
                return "True" if value.const else "False"
            if vector:
                return constant_name(value.const, value.sort)
            return str(value.const)
        if value.name is None:
            text = self._text(value)
            value.name = self.fresh()
            self.lines.append(f"{value.name} = {text}")
        return value.name

    def whole(self, value: Value) -> str:
        """Source text of a value as an array over the group, whatever its kind."""
        if value.kind == "v":
            return self.ref(value)
        return f"full({self.width}, {self.ref(value)}, {ARRAY_TYPES[value.sort]})"

    def _text(self, value: Value) -> str:
        op, args = value.op, value.args
        if op.startswith("text:"):
            return op[5:]
        if value.kind == "u":
            if op == "choose":
                return f"{self.ref(args[1])} if {self.ref(args[0])} else {self.ref(args[2])}"
            if op.startswith("f:"):
                return f"FLOAT({op[2:]!r}, {', '.join(self.ref(a) for a in args)})"
            if op in ("shl", "shr") and args[1].const is not None:
                mark = "<<" if op == "shl" else ">>"
                text = f"{self.ref(args[0])} {mark} {args[1].const}"
                return f"({text}) & 4294967295" if op == "shl" else text
            return UNIFORM[op].format(*(self.ref(a) for a in args))
        if op == "choose":
            return self._choice(*args)
        if op.startswith("f:"):
            return f"VECTOR[{op[2:]!r}]({', '.join(self.whole(a) for a in args)})"
        if op in ("shl", "shr", "shlq", "shrq") and args[1].const is not None:
            mark = "<<" if op.startswith("shl") else ">>"
            sort = "q" if op.endswith("q") else "w"
            return f"{self.ref(args[0], vector=True)} {mark} {constant_name(args[1].const, sort)}"
        if op == "sar" and args[1].const is not None:
            return f"({self.ref(args[0])}.view(i4) >> {constant_name(min(args[1].const, 31), 's')}).view(u4)"
        if op in ("shl", "shr", "sar", "shlq", "shrq", "sarq", "ltsq"):
            return VECTOR[op].format(*(self.whole(a) for a in args))
        if op == "pair":
            low, high = args
            if high.kind == "u":
                above = self.ref(self.make("shlq", "q", self.make("zext", "q", high), self.literal(32, "w")), vector=True)
                return f"{self.ref(self.make('zext', 'q', low), vector=True)} | {above}"
            return f"({self.ref(self.make('zext', 'q', high))} << q32) | {self.ref(self.make('zext', 'q', low), vector=True)}"
        return VECTOR[op].format(*(self.ref(a, vector=True) for a in args))

    def _choice(self, p: Value, a: Value, b: Value) -> str:
        if p.kind == "u":
            # Only the chosen side is made into an array.
            return f"{self.whole(a)} if {self.ref(p)} else {self.whole(b)}"
        if a.sort == "w" and b.const == 0 and (a.kind == "v" or a.const is not None):
            return f"{self.ref(p)}.astype(u4)" if a.const == 1 else f"{self.ref(a, vector=True)} * {self.ref(p)}"
        sides = [self._side(x) for x in (a, b)]
        return f"where({self.ref(p)}, {sides[0]}, {sides[1]})"

    def _side(self, value: Value) -> str:
        """One side of a choice by a vector: an array or a 0-d array, so that the result keeps its type on every NumPy."""
        if value.kind == "v" or value.const is not None:
            return self.ref(value, vector=True)
        return f"array({self.ref(value)}, {'u4' if value.sort == 'w' else 'bool_'})"

    def make(self, op: str, sort: str, *args: Value) -> Value:
        """A value by operation: folded if literal, shared if made before."""
        if (
            all(a.const is not None for a in args)
            and not op.startswith("f:")
            and op not in ("signed", "index", "index1", "index0", "offset")
        ):
            return self.literal(int(getattr(_INTEGER, op)(*(a.const for a in args))), sort)
        if op in COMMUTATIVE and args[0].serial > args[1].serial and args[0].const is None and args[1].const is None:
            args = (args[1], args[0])
        key = (op, *(a.serial for a in args))
        found = self._seen.get(key)
        if found is None:
            kind = "v" if any(a.kind == "v" for a in args) else "u"
            found = self._seen[key] = self._new(kind, sort, op, args)
            if op == "choose":
                found.alias = args[0].kind == "u" and kind == "v"
        return found

    # ---- the algebra ---------------------------------------------------------------------------------------------------

    def word(self, value: int) -> Value:
        return self.literal(value & MASK32, "w")

    def quad(self, value: int) -> Value:
        return self.literal(value & MASK64, "q")

    def truth(self, value: bool) -> Value:
        return self.literal(int(bool(value)), "t")

    def add(self, a: Value, b: Value) -> Value:
        if a.const == 0:
            return b
        if b.const == 0:
            return a
        if b.const is not None and a.op == "add" and a.args[1].const is not None:
            return self.add(a.args[0], self.word(a.args[1].const + b.const))
        return self.make("add", "w", b, a) if a.const is not None else self.make("add", "w", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        if b.const is not None:
            return self.add(a, self.word(-b.const))
        return self.make("sub", "w", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        for x, y in ((a, b), (b, a)):
            if x.const == 0:
                return x
            if x.const == 1:
                return y
        return self.make("mul", "w", a, b)

    def and_(self, a: Value, b: Value) -> Value:
        for x, y in ((a, b), (b, a)):
            if x.const == 0:
                return x
            if x.const == MASK32:
                return y
        return self.make("and_", "w", a, b)

    def or_(self, a: Value, b: Value) -> Value:
        for x, y in ((a, b), (b, a)):
            if x.const == 0:
                return y
            if x.const == MASK32:
                return x
        return a if a is b else self.make("or_", "w", a, b)

    def xor(self, a: Value, b: Value) -> Value:
        for x, y in ((a, b), (b, a)):
            if x.const == 0:
                return y
            if x.const == MASK32:
                return self.not_(y)
        return self.make("xor", "w", a, b)

    def not_(self, a: Value) -> Value:
        return a.args[0] if a.op == "not_" else self.make("not_", "w", a)

    def _shift(self, op: str, a: Value, n: Value, limit: int) -> Value:
        sort = "q" if op.endswith("q") else "w"
        if n.const == 0 or a.const == 0:
            return a
        if n.const is not None and n.const >= limit:
            return self.literal(0, sort)
        return self.make(op, sort, a, n)

    def shl(self, a: Value, n: Value) -> Value:
        return self._shift("shl", a, n, 32)

    def shr(self, a: Value, n: Value) -> Value:
        return self._shift("shr", a, n, 32)

    def sar(self, a: Value, n: Value) -> Value:
        return a if n.const == 0 else self.make("sar", "w", a, n)

    def popc(self, a: Value) -> Value:
        return self.make("popc", "w", a)

    def flo(self, a: Value) -> Value:
        return self.make("flo", "w", a)

    def brev(self, a: Value) -> Value:
        return self.make("brev", "w", a)

    def eq(self, a: Value, b: Value) -> Value:
        return self.make("eq", "t", b, a) if a.const is not None else self.make("eq", "t", a, b)

    def ne(self, a: Value, b: Value) -> Value:
        return self.make("ne", "t", b, a) if a.const is not None else self.make("ne", "t", a, b)

    def ltu(self, a: Value, b: Value) -> Value:
        return self.truth(False) if b.const == 0 else self.make("ltu", "t", a, b)

    def leu(self, a: Value, b: Value) -> Value:
        return self.truth(True) if a.const == 0 else self.make("leu", "t", a, b)

    def signed(self, a: Value) -> Value:
        if a.const is not None:
            return self.literal(a.const - (a.const >> 31 << 32), "s")
        return self.make("signed", "s", a)

    def lts(self, a: Value, b: Value) -> Value:
        x, y = self.signed(a), self.signed(b)
        return self.truth(x.const < y.const) if x.const is not None and y.const is not None else self.make_signed("lts", x, y)

    def les(self, a: Value, b: Value) -> Value:
        x, y = self.signed(a), self.signed(b)
        return self.truth(x.const <= y.const) if x.const is not None and y.const is not None else self.make_signed("les", x, y)

    def make_signed(self, op: str, a: Value, b: Value) -> Value:
        return self.make(op, "t", a, b)

    def zext(self, a: Value) -> Value:
        return self.literal(a.const, "q") if a.const is not None else self.make("zext", "q", a)

    def sext(self, a: Value) -> Value:
        return self.make("sext", "q", a)

    def pair(self, low: Value, high: Value) -> Value:
        if low.op == "low" and high.op == "high" and low.args[0] is high.args[0]:
            return low.args[0]
        return self.zext(low) if high.const == 0 else self.make("pair", "q", low, high)

    def low(self, q: Value) -> Value:
        if q.op in ("pair", "zext", "sext"):
            return q.args[0]
        return self.make("low", "w", q)

    def high(self, q: Value) -> Value:
        if q.op == "pair":
            return q.args[1]
        return self.word(0) if q.op == "zext" else self.make("high", "w", q)

    def addq(self, a: Value, b: Value) -> Value:
        if a.const == 0:
            return b
        if b.const == 0:
            return a
        return self.make("addq", "q", b, a) if a.const is not None else self.make("addq", "q", a, b)

    def subq(self, a: Value, b: Value) -> Value:
        return a if b.const == 0 else self.make("subq", "q", a, b)

    def mulq(self, a: Value, b: Value) -> Value:
        return self.make("mulq", "q", a, b)

    def shlq(self, q: Value, n: Value) -> Value:
        return self._shift("shlq", q, n, 64)

    def shrq(self, q: Value, n: Value) -> Value:
        if n.const == 32:
            return self.zext(self.high(q))
        return self._shift("shrq", q, n, 64)

    def sarq(self, q: Value, n: Value) -> Value:
        return q if n.const == 0 else self.make("sarq", "q", q, n)

    def eqq(self, a: Value, b: Value) -> Value:
        return self.make("eqq", "t", b, a) if a.const is not None else self.make("eqq", "t", a, b)

    def ltuq(self, a: Value, b: Value) -> Value:
        return self.make("ltuq", "t", a, b)

    def ltsq(self, a: Value, b: Value) -> Value:
        return self.make("ltsq", "t", a, b)

    def both(self, a: Value, b: Value) -> Value:
        for x, y in ((a, b), (b, a)):
            if x.const is not None:
                return y if x.const else self.truth(False)
        return a if a is b else self.make("both", "t", a, b)

    def either(self, a: Value, b: Value) -> Value:
        for x, y in ((a, b), (b, a)):
            if x.const is not None:
                return self.truth(True) if x.const else y
        if (a.op == "negation" and a.args[0] is b) or (b.op == "negation" and b.args[0] is a):
            return self.truth(True)
        return a if a is b else self.make("either", "t", a, b)

    def differ(self, a: Value, b: Value) -> Value:
        for x, y in ((a, b), (b, a)):
            if x.const is not None:
                return self.negation(y) if x.const else y
        return self.make("differ", "t", a, b)

    def negation(self, a: Value) -> Value:
        if a.const is not None:
            return self.truth(not a.const)
        return a.args[0] if a.op == "negation" else self.make("negation", "t", a)

    def choose(self, p: Value, a: Value, b: Value) -> Value:
        if p.const is not None:
            return a if p.const else b
        if a is b:
            return a
        if a.sort == "t" and a.const is not None and b.const is not None:
            return p if a.const else self.negation(p)
        if p.op == "negation":
            return self.choose(p.args[0], b, a)
        return self.make("choose", a.sort, p, a, b)

    def floating(self, name: str, *args: Value) -> Value:
        return self.make("f:" + name, "t" if name.endswith("?") else "w", *args)
