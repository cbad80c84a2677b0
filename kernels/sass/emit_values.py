"""A value of generated code, and the Python that each operation becomes: NumPy for vectors, plain integers for what is uniform."""

from __future__ import annotations

__all__ = ["ARRAY_TYPES", "COMMUTATIVE", "UNIFORM", "VECTOR", "Value", "constant_name"]


class Value:
    """One value of generated code. ``sort``: w word, q quad, t truth, s signed view of a word, i word index. ``alias``: may be
    the very array of a register, of local memory or of a table, so it must be copied before it is stored anywhere.
    """

    __slots__ = ("alias", "args", "const", "kind", "name", "op", "serial", "sort")

    def __init__(self, kind: str, sort: str, op: str, args: tuple[Value, ...] = (), const: int | None = None) -> None:
        self.kind = kind
        self.sort = sort
        self.op = op
        self.args = args
        self.const = const
        self.name: str | None = None
        self.alias = False
        self.serial = 0


def constant_name(value: int, sort: str) -> str:
    """Name of the 0-d array that stands for a literal in vector code: the fastest operand NumPy takes beside an array."""
    return f"{sort}m{-value}" if value < 0 else f"{sort}{value}"


#: NumPy type of an array of values, by sort.
ARRAY_TYPES = {"w": "u4", "q": "u8", "t": "bool_", "s": "i4", "i": "ip"}
#: Vector code by operation; {0} {1} {2} are operands.
VECTOR = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "and_": "{0} & {1}", "or_": "{0} | {1}", "xor": "{0} ^ {1}",
    "not_": "~{0}", "popc": "popc({0})", "flo": "flo({0})", "brev": "brev({0})",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "ltu": "{0} < {1}", "leu": "{0} <= {1}", "lts": "{0} < {1}", "les": "{0} <= {1}",
    "zext": "{0}.astype(u8)", "sext": "{0}.view(i4).astype(i8).view(u8)",
    "low": "{0}.astype(u4)", "high": "({0} >> q32).astype(u4)",
    "addq": "{0} + {1}", "subq": "{0} - {1}", "mulq": "{0} * {1}", "eqq": "{0} == {1}", "ltuq": "{0} < {1}",
    "ltsq": "lessq({0}, {1})", "both": "{0} & {1}", "either": "{0} | {1}", "differ": "{0} ^ {1}", "negation": "~{0}",
    "signed": "{0}.view(i4)", "shl": "shl({0}, {1})", "shr": "shr({0}, {1})", "sar": "sar({0}, {1})",
    "shlq": "shlq({0}, {1})", "shrq": "shrq({0}, {1})", "sarq": "sarq({0}, {1})",
    "offset": "{0} + {1}", "index": "({0} >> w2).astype(ip)", "index1": "({0} >> w1).astype(ip)", "index0": "{0}.astype(ip)",
}  # fmt: skip
#: Code for uniform values, on Python ints and bools.
UNIFORM = {
    "add": "({0} + {1}) & 4294967295", "sub": "({0} - {1}) & 4294967295", "mul": "({0} * {1}) & 4294967295", "and_": "{0} & {1}",
    "or_": "{0} | {1}", "xor": "{0} ^ {1}", "not_": "{0} ^ 4294967295", "popc": "{0}.bit_count()", "brev": "INT.brev({0})",
    "flo": "({0}.bit_length() - 1) & 4294967295", "eq": "{0} == {1}", "ne": "{0} != {1}", "ltu": "{0} < {1}", "leu": "{0} <= {1}",
    "lts": "{0} < {1}", "les": "{0} <= {1}", "zext": "{0}", "sext": "(({0} ^ 2147483648) - 2147483648) & 18446744073709551615",
    "low": "{0} & 4294967295", "high": "{0} >> 32", "addq": "({0} + {1}) & 18446744073709551615", "pair": "{1} << 32 | {0}",
    "subq": "({0} - {1}) & 18446744073709551615", "mulq": "({0} * {1}) & 18446744073709551615", "eqq": "{0} == {1}",
    "ltuq": "{0} < {1}", "ltsq": "INT.ltsq({0}, {1})", "both": "{0} and {1}", "either": "{0} or {1}", "differ": "{0} is not {1}",
    "negation": "not {0}", "signed": "({0} ^ 2147483648) - 2147483648", "shl": "INT.shl({0}, {1})", "shr": "INT.shr({0}, {1})",
    "sar": "INT.sar({0}, {1})", "shlq": "INT.shlq({0}, {1})", "shrq": "INT.shrq({0}, {1})", "sarq": "INT.sarq({0}, {1})",
    "offset": "{0} + {1}", "index": "{0} >> 2", "index1": "{0} >> 1", "index0": "{0}",
}  # fmt: skip
#: Operations whose operands may be swapped, so that equal values are written once.
COMMUTATIVE = frozenset({"add", "mul", "and_", "or_", "xor", "addq", "mulq", "both", "either", "differ", "eq", "ne", "eqq"})
