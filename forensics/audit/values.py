"""Values of the release-code interpreter: what a piece of a release's Python can hold while it is being run here.

Nothing here is a live object of the release: its classes, functions and instances are records over syntax trees. ``Unknown`` is a
value
that is not known on this machine; it spreads through every operation, and deciding a branch on it is ``CannotDecideError``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .module_source import ModuleSource

__all__ = [
    "Bound",
    "CannotDecideError",
    "ClassValue",
    "Function",
    "Instance",
    "InterpretedError",
    "ModuleValue",
    "Namespace",
    "Native",
    "Scope",
    "StepBudgetError",
    "Unknown",
]


class CannotDecideError(Exception):
    """The code reached something that is not known here: what, and where in the release (``file:line``)."""

    def __init__(self, why: str, place: str = "") -> None:
        super().__init__(f"{why} ({place})" if place else why)
        self.why = why
        self.place = place


class StepBudgetError(CannotDecideError):
    """More steps, elements or nesting than a metadata builder can need."""


class InterpretedError(Exception):
    """The release's code raised: the exception class's name and its text, as far as known."""

    def __init__(self, kind: str, text: str, place: str = "") -> None:
        super().__init__(f"{kind}: {text} ({place})" if place else f"{kind}: {text}")
        self.kind = kind


@dataclass(frozen=True, eq=False)
class Unknown:
    """A value that is not known here; ``why`` names the expression or the missing module it came from."""

    why: str

    def __repr__(self) -> str:
        return f"<unknown: {self.why}>"


@dataclass(eq=False)
class Native:
    """A stand-in implemented here; ``pure``: it does not write to the tensors that it is given."""

    name: str
    call: Callable[..., Any]
    pure: bool = True


@dataclass(eq=False)
class Namespace:
    """An object with fixed attributes. ``kinds``: the class names that ``isinstance`` finds it to be. ``missing(name)`` answers
    for others."""

    name: str
    attrs: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    missing: Callable[[str], Any] | None = None
    call: Callable[..., Any] | None = None
    subscript: Callable[[Any], Any] | None = None


@dataclass(eq=False)
class Scope:
    """Names of one function activation over its enclosing scope and, last, its module."""

    module: ModuleSource
    names: dict[str, Any] = field(default_factory=dict)
    parent: Scope | None = None
    owner: ClassValue | None = None
    self_value: Any = None


@dataclass(eq=False)
class Function:
    """A function of the release: its tree, the scope it closes over, the class it belongs to, and what its decorators make of
    it."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    owner: ClassValue | None = None
    kind: str = "plain"  # plain | static | class | property | triton | launcher

    @property
    def name(self) -> str:
        return "<lambda>" if isinstance(self.node, ast.Lambda) else self.node.name

    @property
    def parameters(self) -> list[str]:
        args = self.node.args
        return [item.arg for item in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


@dataclass(eq=False)
class Bound:
    """A function with its first argument."""

    function: Function
    self_value: Any


@dataclass(eq=False)
class ClassValue:
    """A class of the release; members are evaluated when asked for."""

    node: ast.ClassDef
    scope: Scope
    members: dict[str, Any] = field(default_factory=dict)
    bases: list[Any] | None = None
    dataclass: bool = False

    @property
    def name(self) -> str:
        return self.node.name


@dataclass(eq=False)
class Instance:
    """An object of a class of the release."""

    cls: ClassValue
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class ModuleValue:
    """A module of the release, whose names are evaluated when asked for."""

    source: ModuleSource
