"""Terms: folding, evaluation, vector code and the solver say the same, on random terms and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.kernels.sass.algebra import IntegerAlgebra
from dsv4_repro.kernels.sass.symbolic_algebra import TermAlgebra
from dsv4_repro.kernels.sass.symbolic_solver import Solver
from dsv4_repro.kernels.sass.symbolic_terms import TOP, Constants, Terms, compile_numpy, evaluate, postorder, signed

WORDS = st.integers(0, 0xFFFFFFFF)
EDGES = st.sampled_from([0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x8000, 0x8001, 0xFFFFFFFE, 0xFFFFFFFF])
VALUES = st.one_of(WORDS, EDGES)
BINARY = ["add", "mul", "mulhu", "mulhs", "and", "or", "xor", "shl", "lshr", "ashr"]
COMPARE = ["ult", "ule", "slt", "sle", "eq"]


@st.composite
def terms_of(draw: Any, depth: int = 3) -> Any:
    """(build, plain) of the same random expression over x and y: as a term, and as nested lists for a reference evaluation."""

    def word(level: int) -> Any:
        if level == 0:
            return draw(st.one_of(st.just("x"), st.just("y"), VALUES))
        kind = draw(st.sampled_from([*BINARY, "neg", "not", "ite"]))
        if kind in ("neg", "not"):
            return [kind, word(level - 1)]
        if kind == "ite":
            return ["ite", bit(level - 1), word(level - 1), word(level - 1)]
        return [kind, word(level - 1), word(level - 1)]

    def bit(level: int) -> Any:
        if level == 0:
            return [draw(st.sampled_from(COMPARE)), word(0), word(0)]
        kind = draw(st.sampled_from([*COMPARE, "bnot", "band", "bor", "bxor", "carry"]))
        if kind == "bnot":
            return [kind, bit(level - 1)]
        if kind in ("band", "bor", "bxor"):
            return [kind, bit(level - 1), bit(level - 1)]
        if kind == "carry":
            return [kind, word(level - 1), word(level - 1), bit(level - 1)]
        return [kind, word(level - 1), word(level - 1)]

    return draw(st.sampled_from([word, bit]))(depth)


def build(terms: Terms, tree: Any) -> Any:
    if isinstance(tree, str):
        return terms.var(tree)
    if isinstance(tree, list):
        return terms.node(tree[0], *(build(terms, item) for item in tree[1:]))
    return tree


def reference(tree: Any, inputs: dict[str, int]) -> Any:
    """The expression by plain integer arithmetic, without the code under test."""
    if isinstance(tree, str):
        return inputs[tree]
    if not isinstance(tree, list):
        return tree
    op = tree[0]
    args = [reference(item, inputs) for item in tree[1:]]
    algebra = IntegerAlgebra()
    words: dict[str, Callable[..., Any]] = {
        "add": algebra.add, "mul": algebra.mul, "and": algebra.and_, "or": algebra.or_, "xor": algebra.xor, "shl": algebra.shl,
        "lshr": algebra.shr, "ashr": algebra.sar, "not": algebra.not_, "ult": algebra.ltu, "ule": algebra.leu, "slt": algebra.lts,
        "sle": algebra.les, "eq": algebra.eq, "bnot": algebra.negation, "band": algebra.both, "bor": algebra.either,
        "bxor": algebra.differ, "ite": algebra.choose, "bite": algebra.choose,
    }  # fmt: skip
    if op in words:
        return words[op](*args)
    if op == "neg":
        return -args[0] & 0xFFFFFFFF
    if op == "mulhu":
        return (args[0] * args[1]) >> 32
    if op == "mulhs":
        return ((signed(args[0]) * signed(args[1])) >> 32) & 0xFFFFFFFF
    assert op == "carry"
    return args[0] + args[1] + int(args[2]) > 0xFFFFFFFF


@given(terms_of(), VALUES, VALUES)
@settings(max_examples=200, deadline=None)
def test_evaluation_is_integer_arithmetic(tree: Any, x: int, y: int) -> None:
    terms = Terms()
    assert evaluate(build(terms, tree), {"x": x, "y": y}) == reference(tree, {"x": x, "y": y})


@given(terms_of(), st.lists(VALUES, min_size=1, max_size=8), VALUES)
@settings(max_examples=150, deadline=None)
def test_vector_code_is_evaluation(tree: Any, values: list[int], y: int) -> None:
    terms = Terms()
    term = build(terms, tree)
    function = compile_numpy(term, "x", {"y": y})
    got = np.broadcast_to(function(np.array(values, np.uint32)), len(values))
    assert [item.item() for item in got] == [evaluate(term, {"x": x, "y": y}) for x in values]


@given(terms_of(), VALUES, VALUES)
@settings(max_examples=60, deadline=None)
def test_constant_propagation_knows_what_it_says(tree: Any, x: int, y: int) -> None:
    """With x known and y not: a value is the right one for every y, or unknown."""
    found = build(_With(x), tree)
    if found is not TOP:
        assert found == reference(tree, {"x": x, "y": y})


class _With(Constants):
    def __init__(self, x: int) -> None:
        super().__init__()
        self._x = x

    def var(self, name: str) -> Any:
        return self._x if name == "x" else TOP


@given(terms_of(depth=2), VALUES, VALUES)
@settings(max_examples=60, deadline=None)
def test_the_solver_agrees(tree: Any, x: int, y: int) -> None:
    """Pinning the inputs leaves exactly the value that evaluation gives."""
    terms = Terms()
    term = build(terms, tree)
    value = evaluate(term, {"x": x, "y": y})
    pinned = [terms.node("eq", terms.var("x"), x), terms.node("eq", terms.var("y"), y)]
    is_bit = type(value) is bool
    same = (term if value else terms.negated(term)) if is_bit else terms.node("eq", term, value)
    solver = Solver()
    assert solver.ask([*pinned, same]).verdict == "sat"
    assert solver.ask([*pinned, terms.negated(same)]).verdict == "unsat"


def test_a_witness_is_checked_and_an_impossible_condition_is_not() -> None:
    terms = Terms()
    x = terms.var("x")
    answer = Solver().ask([terms.node("slt", x, 0), terms.node("ult", 0x8000, x)])
    assert answer.verdict == "sat"
    assert signed(answer.inputs["x"]) < 0
    assert Solver().ask([terms.node("ult", x, 4), terms.node("ult", 4, x)]).verdict == "unsat"


def test_the_solver_gives_up_in_time() -> None:
    """A product of unknowns that is prime: far beyond a few milliseconds. Unknown, never a wrong answer."""
    terms = Terms()
    x, y = terms.var("x"), terms.var("y")
    for _ in range(6):
        x, y = terms.node("mul", x, y), terms.node("mulhu", y, terms.node("xor", x, 0x5BD1E995))
    answer = Solver(timeout_ms=20).ask([terms.node("eq", terms.add(x, y), 0x12345677), terms.node("ult", 1, terms.var("x"))])
    assert answer.verdict in ("unknown", "sat", "unsat")
    assert answer.milliseconds < 5000


def test_equal_terms_are_one_object_and_the_pool_is_bounded() -> None:
    terms = Terms(limit=4)
    assert terms.add(terms.var("x"), 3) is terms.add(terms.var("x"), 3)
    assert terms.add(terms.add(terms.var("x"), 3), 4) is terms.add(terms.var("x"), 7)
    with pytest.raises(MemoryError):
        [terms.add(terms.var("x"), value) for value in range(100, 200)]


def test_true_is_not_one() -> None:
    """A truth value and the number 1 are different constants although Python calls them equal."""
    terms = Terms()
    bit = terms.bitvar("p")
    assert terms.node("bxor", bit, True) is not terms.node("bxor", bit, False)
    assert evaluate(terms.ite(bit, 1, 0), {"p": True}) == 1


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 70))
@settings(max_examples=200, deadline=None)
def test_quads_are_64_bit_integers(a: int, b: int, n: int) -> None:
    plain, pairs = IntegerAlgebra(), TermAlgebra(Terms())

    def pair(value: int) -> tuple[int, int]:
        return value & 0xFFFFFFFF, value >> 32

    for name in ("addq", "subq", "mulq"):
        assert getattr(pairs, name)(pair(a), pair(b)) == pair(getattr(plain, name)(a, b)), name
    for name in ("eqq", "ltuq", "ltsq"):
        assert getattr(pairs, name)(pair(a), pair(b)) == getattr(plain, name)(a, b), name
    for name in ("shlq", "shrq", "sarq"):
        assert getattr(pairs, name)(pair(a), n) == pair(getattr(plain, name)(a, n)), name


def test_postorder_lists_arguments_first() -> None:
    terms = Terms()
    inner = terms.add(terms.var("x"), 5)
    outer = terms.node("mul", inner, inner)
    order = postorder((outer,))
    assert order.index(inner) < order.index(outer)
    assert len(order) == 3
