"""A module of a release as a syntax tree: parsed once, bounded in size, its top-level names found without running anything."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from .values import CannotDecideError, StepBudgetError

__all__ = ["ModuleSource", "parse_module"]


MAX_BYTES = 4 << 20


def parse_module(path: str, text: bytes) -> ast.Module:
    """The syntax tree of a file; CannotDecideError if it is none that can be read here, StepBudgetError if it is too large."""
    if len(text) > MAX_BYTES:
        raise StepBudgetError(f"{path}: {len(text)} bytes of Python")
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CannotDecideError(f"not Python that this interpreter reads: {error}", path) from error


class ModuleSource:
    """A module of the release: its path, its tree, and its top-level names with what they came to, for one interpreter."""

    def __init__(self, name: str, path: str, tree: ast.Module) -> None:
        self.name, self.path, self.tree = name, path, tree
        self.definitions: dict[str, ast.stmt] = {}
        self.values: dict[str, Any] = {}
        self._collect(self.tree.body)

    def _collect(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.definitions[statement.name] = statement
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            self.definitions[name.id] = statement
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
                self.definitions[statement.target.id] = statement
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                for alias in statement.names:
                    self.definitions[alias.asname or alias.name.split(".")[0]] = statement
            elif isinstance(statement, ast.If):
                self._collect(statement.orelse)
                self._collect(statement.body)
            elif isinstance(statement, ast.Try):
                for handler in statement.handlers:
                    self._collect(handler.body)
                self._collect(statement.body)
