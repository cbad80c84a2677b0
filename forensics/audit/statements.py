"""Statements of the release-code interpreter: assignments, branches, loops, and the errors that the release raises itself."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from .expressions import Expressions
from .tensors import Tensor
from .values import CannotDecideError, Function, Instance, InterpretedError, Namespace, Scope, Unknown

__all__ = ["ReturnSignal", "Statements"]


class ReturnSignal(Exception):  # noqa: N818
    def __init__(self, value: Any) -> None:
        self.value = value


class _BreakSignal(Exception):  # noqa: N818
    pass


class _ContinueSignal(Exception):  # noqa: N818
    pass


class Statements(Expressions):
    """Executes statements in a scope."""

    def imported(self, name: str) -> Any:
        """What ``import name`` gives."""
        raise NotImplementedError

    def import_from(self, scope: Scope, node: ast.ImportFrom, name: str) -> Any:
        """What ``from … import name`` gives."""
        raise NotImplementedError

    def decorated(self, function: Function, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
        """What its decorators make of a function."""
        raise NotImplementedError

    def block(self, body: Iterable[ast.stmt], scope: Scope) -> None:
        for statement in body:
            self.execute(statement, scope)

    def execute(self, node: ast.stmt, scope: Scope) -> None:
        self._step()
        self.where = f"{scope.module.path}:{node.lineno}"
        method = getattr(self, f"_do_{type(node).__name__.lower()}", None)
        if method is None:
            raise CannotDecideError(f"a {type(node).__name__} statement", self.where)
        try:
            method(node, scope)
        except (ValueError, TypeError, IndexError, KeyError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
            raise CannotDecideError(f"{type(error).__name__}: {error}", self.where) from error

    def _do_expr(self, node: ast.Expr, scope: Scope) -> None:
        if not isinstance(node.value, ast.Constant):
            self.evaluate(node.value, scope)

    def _do_pass(self, node: ast.Pass, scope: Scope) -> None:
        return

    def _do_return(self, node: ast.Return, scope: Scope) -> None:
        raise ReturnSignal(None if node.value is None else self.evaluate(node.value, scope))

    def _do_break(self, node: ast.Break, scope: Scope) -> None:
        raise _BreakSignal

    def _do_continue(self, node: ast.Continue, scope: Scope) -> None:
        raise _ContinueSignal

    def _do_assert(self, node: ast.Assert, scope: Scope) -> None:
        try:
            holds = self.truth(self.evaluate(node.test, scope))
        except CannotDecideError:
            return  # an assertion about something unknown decides nothing
        if not holds:
            raise InterpretedError("AssertionError", ast.unparse(node.test), self.where)

    def _do_raise(self, node: ast.Raise, scope: Scope) -> None:
        text = ast.unparse(node.exc) if node.exc is not None else "re-raised"
        raise InterpretedError(text.split("(")[0], text[:200], self.where)

    def _do_import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            scope.names[alias.asname or alias.name.split(".")[0]] = self.imported(
                alias.name if alias.asname else alias.name.split(".")[0]
            )

    def _do_importfrom(self, node: ast.ImportFrom, scope: Scope) -> None:
        for alias in node.names:
            scope.names[alias.asname or alias.name] = self.import_from(scope, node, alias.asname or alias.name)

    def _do_functiondef(self, node: ast.FunctionDef, scope: Scope) -> None:
        scope.names[node.name] = self.decorated(Function(node, scope), node)

    def _do_assign(self, node: ast.Assign, scope: Scope) -> None:
        value = self.evaluate(node.value, scope)
        for target in node.targets:
            self.assign(target, value, scope)

    def _do_annassign(self, node: ast.AnnAssign, scope: Scope) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, scope), scope)

    def _do_augassign(self, node: ast.AugAssign, scope: Scope) -> None:
        place = ast.copy_location(_loading(node.target), node.target)
        current = self.evaluate(place, scope)
        value = self.operate(type(node.op), current, self.evaluate(node.value, scope))
        if isinstance(current, Tensor) and isinstance(value, Tensor):
            current.set(Ellipsis, value)  # in place, as torch does: every view sees it
        elif isinstance(current, Tensor):
            current.spoil()
        else:
            self.assign(node.target, value, scope)

    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, Unknown):
                items: list[Any] = [Unknown(f"part of {value.why}") for _ in target.elts]
            else:
                items = self.iterate(value)
            if len(items) != len(target.elts):
                raise CannotDecideError(f"{len(items)} values for {len(target.elts)} names", self.where)
            for element, item in zip(target.elts, items, strict=True):
                self.assign(element, item, scope)
        elif isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value, scope)
            if isinstance(owner, Instance | Namespace):
                owner.attrs[target.attr] = value
            elif not isinstance(owner, Unknown):
                raise CannotDecideError(f"setting {target.attr} of {owner!r}", self.where)
        elif isinstance(target, ast.Subscript):
            owner = self.evaluate(target.value, scope)
            index = self.evaluate(target.slice, scope)
            if isinstance(owner, Tensor):
                owner.set(index, value)
            elif isinstance(owner, dict | list) and not isinstance(index, Unknown):
                owner[index] = value
            elif not isinstance(owner, Unknown):
                raise CannotDecideError(f"writing into {owner!r}", self.where)
        else:
            raise CannotDecideError(f"assigning to {type(target).__name__}", self.where)

    def _do_if(self, node: ast.If, scope: Scope) -> None:
        self.block(node.body if self.truth(self.evaluate(node.test, scope)) else node.orelse, scope)

    def _turn(self, body: Iterable[ast.stmt], scope: Scope) -> bool:
        """One turn of a loop; False if it broke out of the loop."""
        try:
            self.block(body, scope)
        except _BreakSignal:
            return False
        except _ContinueSignal:
            pass
        return True

    def _do_while(self, node: ast.While, scope: Scope) -> None:
        while self.truth(self.evaluate(node.test, scope)):
            self._step()
            if not self._turn(node.body, scope):
                return
        self.block(node.orelse, scope)

    def _do_for(self, node: ast.For, scope: Scope) -> None:
        for item in self.iterate(self.evaluate(node.iter, scope)):
            self.assign(node.target, item, scope)
            if not self._turn(node.body, scope):
                return
        self.block(node.orelse, scope)

    def _do_with(self, node: ast.With, scope: Scope) -> None:
        for item in node.items:
            value = self.evaluate(item.context_expr, scope)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, scope)
        self.block(node.body, scope)

    def _do_try(self, node: ast.Try, scope: Scope) -> None:
        try:
            self.block(node.body, scope)
        except InterpretedError as error:
            for handler in node.handlers:
                names = ast.unparse(handler.type) if handler.type is not None else "Exception"
                if error.kind in names or "Exception" in names:
                    self.block(handler.body, scope)
                    break
            else:
                raise
        else:
            self.block(node.orelse, scope)
        self.block(node.finalbody, scope)

    def _do_delete(self, node: ast.Delete, scope: Scope) -> None:
        return

    def _do_global(self, node: ast.Global, scope: Scope) -> None:
        return


def _loading(target: ast.expr) -> ast.expr:
    """The same place, to be read."""
    copy = ast.parse(ast.unparse(target), mode="eval").body
    for part in ast.walk(copy):
        for attribute in ("lineno", "col_offset", "end_lineno", "end_col_offset"):
            if hasattr(target, attribute):
                setattr(part, attribute, getattr(target, attribute))
    return copy
