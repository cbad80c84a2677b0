"""z3 over terms, bounded in time: is there an input that makes a condition true?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...clock import SYSTEM, Clock
from .symbolic_terms import Term, evaluate, postorder

__all__ = ["Answer", "Solver", "z3_version"]


@dataclass(frozen=True, slots=True)
class Answer:
    """``sat`` with an input that was checked by evaluating the terms themselves, ``unsat``, or ``unknown`` with the reason."""

    verdict: Literal["sat", "unsat", "unknown"]
    inputs: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    milliseconds: float = 0.0


def z3_version() -> str:
    """The solver's version, for the report."""
    import z3

    return str(z3.get_version_string())


class Solver:
    """Asks z3; each question has ``timeout_ms`` and ``max_memory_mb``."""

    def __init__(self, timeout_ms: int = 5000, max_memory_mb: int = 512, clock: Clock = SYSTEM) -> None:
        import z3

        self._z3: Any = z3
        self._clock = clock
        self._timeout = timeout_ms
        self._memory = max_memory_mb
        self.questions = 0
        self._cache: dict[int, Any] = {}
        self._kept: list[Any] = []

    def _translated(self, root: Any) -> Any:
        z3 = self._z3
        if type(root) is bool:
            return z3.BoolVal(root)
        for term in postorder((root,)):
            if id(term) not in self._cache:
                self._cache[id(term)] = self._node(term)
                self._kept.append(term)  # ids stay valid while the cache lives
        return self._cache[id(root)]

    def _arg(self, item: Any) -> Any:
        z3 = self._z3
        if isinstance(item, Term):
            return self._cache[id(item)]
        return z3.BoolVal(item) if type(item) is bool else z3.BitVecVal(item, 32)

    def _node(self, term: Term) -> Any:
        z3 = self._z3
        op = term.op
        if op == "var":
            return z3.BitVec(term.args[0], 32)
        if op == "bitvar":
            return z3.Bool(term.args[0])
        a = [self._arg(item) for item in term.args]
        if op == "add":
            return a[0] + a[1]
        if op == "mul":
            return a[0] * a[1]
        if op in ("mulhu", "mulhs"):
            widen = z3.ZeroExt if op == "mulhu" else z3.SignExt
            return z3.Extract(63, 32, widen(32, a[0]) * widen(32, a[1]))
        if op == "neg":
            return -a[0]
        if op == "not":
            return ~a[0]
        if op in ("and", "or", "xor"):
            return a[0] & a[1] if op == "and" else a[0] | a[1] if op == "or" else a[0] ^ a[1]
        if op == "shl":
            return a[0] << a[1]  # SMT-LIB shifts give 0 (or the sign) beyond the width, as the device does
        if op == "lshr":
            return z3.LShR(a[0], a[1])
        if op == "ashr":
            return a[0] >> a[1]
        if op in ("ite", "bite"):
            return z3.If(a[0], a[1], a[2])
        if op == "ult":
            return z3.ULT(a[0], a[1])
        if op == "ule":
            return z3.ULE(a[0], a[1])
        if op == "slt":
            return a[0] < a[1]
        if op == "sle":
            return a[0] <= a[1]
        if op in ("eq", "bxor"):
            return a[0] == a[1] if op == "eq" else z3.Xor(a[0], a[1])
        if op == "bnot":
            return z3.Not(a[0])
        if op == "band":
            return z3.And(a[0], a[1])
        if op == "bor":
            return z3.Or(a[0], a[1])
        if op == "carry":
            total = z3.ZeroExt(1, a[0]) + z3.ZeroExt(1, a[1]) + z3.If(a[2], z3.BitVecVal(1, 33), z3.BitVecVal(0, 33))
            return z3.Extract(32, 32, total) == z3.BitVecVal(1, 1)
        return z3.Bool(f"opaque {op} {id(term)}") if term.is_bit else z3.BitVec(f"opaque {op} {id(term)}", 32)

    def ask(self, conditions: Iterable[Any]) -> Answer:
        """Are all ``conditions`` true for some input? Inputs that do not matter are 0."""
        z3 = self._z3
        wanted = [item for item in conditions if item is not True]
        self.questions += 1
        if any(item is False for item in wanted):
            return Answer("unsat", reason="false by folding")
        if not wanted:
            return Answer("sat", {}, "true by folding")
        solver = z3.SolverFor("QF_BV")
        solver.set("timeout", self._timeout)
        z3.set_param("memory_max_size", self._memory)
        solver.add(*(self._translated(item) for item in wanted))
        start = self._clock.monotonic()
        try:
            verdict = solver.check()
        except z3.Z3Exception as error:
            return Answer("unknown", reason=str(error)[:200])
        spent = (self._clock.monotonic() - start) * 1000
        if verdict == z3.unsat:
            return Answer("unsat", milliseconds=spent)
        if verdict != z3.sat:
            return Answer("unknown", reason=str(solver.reason_unknown())[:200], milliseconds=spent)
        model = solver.model()
        inputs: dict[str, int] = {}
        for term in postorder(wanted):
            if term.op in ("var", "bitvar"):
                value = model.eval(self._cache[id(term)], model_completion=True)
                inputs[term.args[0]] = bool(z3.is_true(value)) if term.op == "bitvar" else int(value.as_long())
        opaque = any(term.op in ("popc", "flo", "brev") for term in postorder(wanted))
        if not opaque and not all(evaluate(item, inputs) for item in wanted):
            return Answer("unknown", reason="the solver's model does not hold when evaluated", milliseconds=spent)
        return Answer("sat", inputs, "" if not opaque else "operations without a solver form are free", spent)
