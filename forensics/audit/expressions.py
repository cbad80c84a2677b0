"""Expressions of the release-code interpreter: operators, comparisons, names, calls, attributes. Unknown operands spread."""

from __future__ import annotations

import ast
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .module_source import ModuleSource
from .tensors import Tensor, binary
from .values import (
    Bound,
    CannotDecideError,
    ClassValue,
    Function,
    Instance,
    InterpretedError,
    ModuleValue,
    Namespace,
    Native,
    Scope,
    StepBudgetError,
    Unknown,
)

__all__ = ["MAX_ITEMS", "MISSING", "Expressions"]

MAX_STEPS = 500_000
MAX_ITEMS = 200_000
#: The module or class does not define that name.
MISSING = object()

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Div: operator.truediv, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.Pow: operator.pow,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


class Expressions(ABC):
    """Evaluates expressions. What a call, a class or a module means is the interpreter's."""

    def __init__(self, standins: Mapping[str, Any]) -> None:
        self.standins = dict(standins)
        self.builtins: dict[str, Any] = {}
        self.steps = 0
        #: file and line of the statement being run
        self.where = ""

    @abstractmethod
    def global_value(self, source: ModuleSource, name: str) -> Any: ...

    @abstractmethod
    def name_of_module(self, base: str, name: str) -> Any: ...

    @abstractmethod
    def bases(self, cls: ClassValue) -> list[Any]: ...

    @abstractmethod
    def member(self, cls: ClassValue, name: str) -> Any: ...

    @abstractmethod
    def call(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any: ...

    @abstractmethod
    def call_function(self, function: Function, args: list[Any], kwargs: dict[str, Any]) -> Any: ...

    @abstractmethod
    def launched(self, kernel: Function, grid: Any) -> Any: ...

    @abstractmethod
    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None: ...

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise StepBudgetError(f"more than {MAX_STEPS} steps", self.where)

    # -- expressions -------------------------------------------------------------------------------------------------------------
    def truth(self, value: Any) -> bool:
        """Whether a branch is taken; CannotDecideError on a value that is not known."""
        if isinstance(value, Tensor):
            value = value.item()
        if isinstance(value, Unknown):
            raise CannotDecideError(f"a branch depends on {value.why}", self.where)
        if isinstance(value, Instance | ClassValue | Function | Native | Namespace | Bound | ModuleValue):
            return True
        return bool(value)

    def iterate(self, value: Any) -> list[Any]:
        if isinstance(value, Unknown):
            raise CannotDecideError(f"a loop over {value.why}", self.where)
        if isinstance(value, Tensor):
            return [value.get(position) for position in range(value.shape[0])]
        if isinstance(value, dict):
            return list(value)
        if isinstance(value, list | tuple | set | range | str):
            if len(value) > MAX_ITEMS:
                raise StepBudgetError(f"a loop over {len(value)} items", self.where)
            return list(value)
        raise CannotDecideError(f"a loop over {value!r}", self.where)

    def operate(self, kind: type[ast.operator], left: Any, right: Any) -> Any:
        from .triton_standin import Pointer

        if isinstance(left, Pointer) or isinstance(right, Pointer):
            return Pointer.combined(kind, left, right)
        function = _BINARY.get(kind)
        if function is None:
            raise CannotDecideError(f"the operator {kind.__name__}", self.where)
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            return binary(function, left, right)
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return Unknown(left.why if isinstance(left, Unknown) else right.why)
        if kind in (ast.LShift, ast.Pow) and (not isinstance(right, int) or not 0 <= right <= 64):
            raise CannotDecideError("a power or shift that large", self.where)
        if kind is ast.Mult and isinstance(left, list | tuple | str | int) and isinstance(right, list | tuple | str | int):
            size = [len(item) for item in (left, right) if isinstance(item, list | tuple | str)]
            times = [item for item in (left, right) if isinstance(item, int)]
            if size and times and size[0] * times[0] > MAX_ITEMS:
                raise StepBudgetError("a sequence that long", self.where)
        if isinstance(left, int | float | str | list | tuple | set) and isinstance(right, int | float | str | list | tuple | set):
            try:
                return function(left, right)
            except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
                raise InterpretedError(type(error).__name__, str(error), self.where) from error
        return Unknown(f"{kind.__name__} of {type(left).__name__} and {type(right).__name__}")

    def compare(self, kind: type[ast.cmpop], left: Any, right: Any) -> Any:
        if kind in (ast.Is, ast.IsNot):
            if isinstance(left, Unknown) or isinstance(right, Unknown):
                return Unknown(left.why if isinstance(left, Unknown) else right.why)
            return (left is right) == (kind is ast.Is)
        if kind in (ast.In, ast.NotIn):
            if isinstance(left, Unknown) or isinstance(right, Unknown):
                return Unknown(left.why if isinstance(left, Unknown) else right.why)
            items = self.iterate(right)
            if any(isinstance(item, Unknown) for item in items) and not any(item is left or item == left for item in items):
                return Unknown("membership in a list of unknown values")
            return (left in right if isinstance(right, str | dict) else any(item is left or item == left for item in items)) == (
                kind is ast.In
            )
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            return binary(_COMPARE[kind], left, right)
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return Unknown(left.why if isinstance(left, Unknown) else right.why)
        try:
            return _COMPARE[kind](left, right)
        except TypeError as error:
            raise InterpretedError("TypeError", str(error), self.where) from error

    def evaluate(self, node: ast.expr, scope: Scope) -> Any:
        self._step()
        method = getattr(self, f"_ev_{type(node).__name__.lower()}", None)
        if method is None:
            raise CannotDecideError(f"a {type(node).__name__} expression", self.where)
        return method(node, scope)

    def _ev_constant(self, node: ast.Constant, scope: Scope) -> Any:
        return node.value

    def _ev_name(self, node: ast.Name, scope: Scope) -> Any:
        at: Scope | None = scope
        while at is not None:
            if node.id in at.names:
                return at.names[node.id]
            at = at.parent
        value = self.global_value(scope.module, node.id)
        if value is not MISSING:
            return value
        if node.id in self.builtins:
            return self.builtins[node.id]
        return Unknown(f"the name {node.id} in {scope.module.path}")

    def _ev_tuple(self, node: ast.Tuple, scope: Scope) -> Any:
        return tuple(self._elements(node.elts, scope))

    def _ev_list(self, node: ast.List, scope: Scope) -> Any:
        return self._elements(node.elts, scope)

    def _ev_set(self, node: ast.Set, scope: Scope) -> Any:
        return tuple(self._elements(node.elts, scope))

    def _elements(self, nodes: list[ast.expr], scope: Scope) -> list[Any]:
        out: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                out.extend(self.iterate(self.evaluate(node.value, scope)))
            else:
                out.append(self.evaluate(node, scope))
        return out

    def _ev_dict(self, node: ast.Dict, scope: Scope) -> Any:
        out: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                inner = self.evaluate(value, scope)
                if isinstance(inner, dict):
                    out.update(inner)
            else:
                name = self.evaluate(key, scope)
                if not isinstance(name, Unknown | Tensor | list | dict):
                    out[name] = self.evaluate(value, scope)
        return out

    def _ev_joinedstr(self, node: ast.JoinedStr, scope: Scope) -> Any:
        return "…"  # texts decide nothing in metadata code

    def _ev_lambda(self, node: ast.Lambda, scope: Scope) -> Any:
        return Function(node, scope, scope.owner)

    def _ev_ifexp(self, node: ast.IfExp, scope: Scope) -> Any:
        test = self.evaluate(node.test, scope)
        if isinstance(test, Unknown):
            return Unknown(test.why)
        return self.evaluate(node.body if self.truth(test) else node.orelse, scope)

    def _ev_namedexpr(self, node: ast.NamedExpr, scope: Scope) -> Any:
        value = self.evaluate(node.value, scope)
        self.assign(node.target, value, scope)
        return value

    def _ev_boolop(self, node: ast.BoolOp, scope: Scope) -> Any:
        """Short-circuit; an unknown operand is passed over as long as a later one can still decide."""
        stop = isinstance(node.op, ast.Or)
        hidden: Unknown | None = None
        value: Any = not stop
        for part in node.values:
            value = self.evaluate(part, scope)
            if isinstance(value, Tensor):
                value = value.item()
            if isinstance(value, Unknown):
                hidden = value
            elif self.truth(value) == stop:
                return value
        return value if hidden is None else hidden

    def _ev_unaryop(self, node: ast.UnaryOp, scope: Scope) -> Any:
        value = self.evaluate(node.operand, scope)
        if isinstance(node.op, ast.Not):
            return Unknown(value.why) if isinstance(value, Unknown) else not self.truth(value)
        if isinstance(value, Unknown):
            return value
        if isinstance(value, Tensor):
            return value.elementwise(
                np.negative if isinstance(node.op, ast.USub) else np.invert if isinstance(node.op, ast.Invert) else np.positive
            )
        return -value if isinstance(node.op, ast.USub) else ~value if isinstance(node.op, ast.Invert) else value

    def _ev_binop(self, node: ast.BinOp, scope: Scope) -> Any:
        return self.operate(type(node.op), self.evaluate(node.left, scope), self.evaluate(node.right, scope))

    def _ev_compare(self, node: ast.Compare, scope: Scope) -> Any:
        left = self.evaluate(node.left, scope)
        result: Any = True
        for kind, part in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(part, scope)
            result = self.compare(type(kind), left, right)
            if len(node.ops) > 1 and (isinstance(result, Unknown) or not self.truth(result)):
                return result
            left = right
        return result

    def _ev_slice(self, node: ast.Slice, scope: Scope) -> Any:
        return slice(*(None if part is None else self.evaluate(part, scope) for part in (node.lower, node.upper, node.step)))

    def _ev_listcomp(self, node: ast.ListComp | ast.GeneratorExp, scope: Scope) -> Any:
        out: list[Any] = []
        inner = Scope(scope.module, {}, scope, scope.owner, scope.self_value)

        def run(position: int) -> None:
            if position == len(node.generators):
                out.append(self.evaluate(node.elt, inner))
                return
            generator = node.generators[position]
            for item in self.iterate(self.evaluate(generator.iter, inner)):
                self.assign(generator.target, item, inner)
                if all(self.truth(self.evaluate(test, inner)) for test in generator.ifs):
                    run(position + 1)

        run(0)
        return out

    _ev_generatorexp = _ev_listcomp

    def _ev_subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        owner = self.evaluate(node.value, scope)
        if isinstance(owner, ClassValue):
            return owner  # generic alias
        index = self.evaluate(node.slice, scope)
        if isinstance(owner, Function) and owner.kind == "triton":
            return self.launched(owner, index)
        if isinstance(owner, Tensor):
            return owner.get(index)
        if isinstance(owner, Namespace) and owner.subscript is not None:
            return owner.subscript(index)
        if isinstance(owner, Unknown) or isinstance(index, Unknown):
            return Unknown(owner.why if isinstance(owner, Unknown) else index.why)
        if isinstance(index, Tensor):
            index = index.item()
        try:
            return owner[index] if isinstance(owner, list | tuple | dict | str) else Unknown(f"an item of {owner!r}")
        except (IndexError, KeyError, TypeError) as error:
            raise InterpretedError(type(error).__name__, str(error), self.where) from error

    def _ev_attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        return self.attribute(self.evaluate(node.value, scope), node.attr)

    def attribute(self, owner: Any, name: str) -> Any:
        """``owner.name``: from the release's own definitions, from a stand-in's table, never from a live object."""
        from .torch_standin import python_method, tensor_attribute

        if isinstance(owner, Instance):
            if name in owner.attrs:
                return owner.attrs[name]
            value = self.member(owner.cls, name)
            if value is MISSING:
                return Unknown(f"{owner.cls.name}.{name}")
            if isinstance(value, Function):
                if value.kind == "property":
                    return self.call_function(value, [owner], {})
                return value if value.kind in ("static", "triton") else Bound(value, owner.cls if value.kind == "class" else owner)
            return value
        if isinstance(owner, Namespace):
            if name in owner.attrs:
                return owner.attrs[name]
            return Unknown(f"{owner.name}.{name}") if owner.missing is None else owner.missing(name)
        if isinstance(owner, ClassValue):
            value = self.member(owner, name)
            if value is MISSING:
                return Unknown(f"{owner.name}.{name}")
            return Bound(value, owner) if isinstance(value, Function) and value.kind == "class" else value
        if isinstance(owner, ModuleValue):
            return self.name_of_module(owner.source.name, name)
        if isinstance(owner, Unknown):
            return Unknown(f"{owner.why}.{name}")
        if isinstance(owner, Tensor):
            return tensor_attribute(self, owner, name)
        return python_method(self, owner, name)

    def _ev_call(self, node: ast.Call, scope: Scope) -> Any:
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            inner = node.func.value
            if isinstance(inner.func, ast.Name) and inner.func.id == "super":
                return self._super_call(node.func.attr, node, scope)
        target = self.evaluate(node.func, scope)
        args = self._elements(node.args, scope)
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, scope)
            if keyword.arg is None:
                if isinstance(value, dict):
                    kwargs.update(value)
            else:
                kwargs[keyword.arg] = value
        place = self.where
        result = self.call(target, args, kwargs)
        self.where = place
        return result

    def _super_call(self, name: str, node: ast.Call, scope: Scope) -> Any:
        args = self._elements(node.args, scope)
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, scope)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            elif isinstance(value, dict):
                kwargs.update(value)
        at: Scope | None = scope
        while at is not None and at.owner is None:
            at = at.parent
        if at is None or at.owner is None:
            raise CannotDecideError("super() outside a class", self.where)
        for base in self.bases(at.owner):
            if isinstance(base, ClassValue):
                method = self.member(base, name)
                if isinstance(method, Function):
                    return self.call_function(method, [at.self_value, *args], kwargs)
        return None
