"""Runs a release's own Python on one input without importing it: an evaluator over syntax trees with few abilities.

No code of the wheel is loaded: there is no ``exec``, no attribute of a live object is reachable, modules are syntax trees looked up
in the wheel's own members, and everything outside them is either a stand-in (torch, triton, the platform, the configuration) or
``Unknown``. Steps, nesting and tensor sizes are bounded. What cannot be decided raises ``CannotDecideError`` with file and line.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from .expressions import MISSING
from .module_source import ModuleSource, parse_module
from .statements import ReturnSignal, Statements
from .tensors import Tensor
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

__all__ = ["Interpreter"]

MAX_DEPTH = 60


class Interpreter(Statements):
    """Evaluates functions of a release. ``members``: file name in the wheel → bytes. ``standins``: dotted module name → Namespace.

    ``overrides``: (module, name) → value that replaces a name of the release (kernel launches whose effect is modelled here).
    ``trees``: parsed files, shared by the interpreters of one release.
    """

    def __init__(
        self,
        members: Mapping[str, bytes],
        standins: Mapping[str, Any],
        overrides: Mapping[tuple[str, str], Any] | None = None,
        trees: dict[str, ast.Module | None] | None = None,
    ) -> None:
        super().__init__(standins)
        self.members = members
        self._trees = trees if trees is not None else {}
        self.overrides = dict(overrides or {})
        self.modules: dict[str, ModuleSource | None] = {}
        self.depth = 0
        #: file and line of every function of the release that was run
        self.visited: dict[str, int] = {}
        from .builtins_standin import builtin_names

        self.builtins = builtin_names(self)

    # -- modules --------------------------------------------------------------------------------------------------------------
    def module(self, name: str) -> ModuleSource | None:
        """The release's module, None if the wheel has no such Python file."""
        if name not in self.modules:
            stem = name.replace(".", "/")
            for path in (f"{stem}.py", f"{stem}/__init__.py"):
                if path in self.members:
                    tree = self._trees.get(path)
                    if tree is None:
                        tree = self._trees[path] = parse_module(path, self.members[path])
                    self.modules[name] = ModuleSource(name, path, tree)
                    break
            else:
                self.modules[name] = None
        return self.modules[name]

    def imported(self, name: str) -> Any:
        """What ``import name`` gives: a stand-in, a module of the release, or Unknown."""
        if name in self.standins:
            return self.standins[name]
        source = self.module(name)
        return Unknown(f"module {name}") if source is None else ModuleValue(source)

    def global_value(self, source: ModuleSource, name: str) -> Any:
        """A top-level name of a module, evaluated on demand; ``MISSING`` if the module does not define it."""
        key = (source.name, name)
        if key in self.overrides:
            return self.overrides[key]
        if name in source.values:
            return source.values[name]
        node = source.definitions.get(name)
        if node is None:
            return MISSING
        source.values[name] = Unknown(f"{source.name}.{name}, which depends on itself")
        scope = Scope(source)
        if isinstance(node, ast.ImportFrom):
            value = self.import_from(scope, node, name)
        elif isinstance(node, ast.Import):
            value = self._import(node, name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            value = self.decorated(Function(node, scope), node)
        elif isinstance(node, ast.ClassDef):
            value = self._class(node, scope)
        else:
            try:
                self.execute(node, scope)
                value = scope.names.get(name, Unknown(f"{source.name}.{name}"))
            except (CannotDecideError, InterpretedError) as error:
                value = Unknown(f"{source.name}.{name}: {error}")
        source.values[name] = value
        return value

    def _import(self, node: ast.Import, name: str) -> Any:
        for alias in node.names:
            if (alias.asname or alias.name.split(".")[0]) == name:
                return self.imported(alias.name if alias.asname else alias.name.split(".")[0])
        return Unknown(f"import {name}")

    def import_from(self, scope: Scope, node: ast.ImportFrom, name: str) -> Any:
        source = scope.module
        base = node.module or ""
        if node.level:
            parts = source.name.split(".")
            if source.path.endswith("__init__.py"):
                parts.append("")
            base = ".".join([*parts[: -node.level], *([base] if base else [])])
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return self.name_of_module(base, alias.name)
        return Unknown(f"from {base} import {name}")

    def name_of_module(self, base: str, name: str) -> Any:
        """``from base import name``."""
        if (base, name) in self.overrides:
            return self.overrides[base, name]
        if base in self.standins:
            return self.attribute(self.standins[base], name)
        source = self.module(base)
        if source is not None:
            value = self.global_value(source, name)
            if value is not MISSING:
                return value
        if f"{base}.{name}" in self.standins or self.module(f"{base}.{name}") is not None:
            return self.imported(f"{base}.{name}")
        return Unknown(f"{base}.{name}")

    def _class(self, node: ast.ClassDef, scope: Scope) -> ClassValue:
        value = ClassValue(node, scope)
        for decorator in node.decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            value.dataclass = value.dataclass or (isinstance(target, ast.Name) and target.id == "dataclass")
        return value

    def decorated(self, function: Function, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
        """What the decorators make of a function; one that is not known here is taken to leave the function as it is."""
        for decorator in node.decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = ast.unparse(target)
            function.kind = {
                "staticmethod": "static", "classmethod": "class", "property": "property", "cached_property": "property",
                "functools.cached_property": "property", "triton.jit": "triton", "kernel_launcher": "launcher",
            }.get(name, function.kind)  # fmt: skip
            if name == "staticmethod" and any(ast.unparse(item).startswith("triton.jit") for item in node.decorator_list):
                function.kind = "triton"
        return function

    # -- classes ---------------------------------------------------------------------------------------------------------------
    def bases(self, cls: ClassValue) -> list[Any]:
        if cls.bases is None:
            cls.bases = []
            for node in cls.node.bases:
                try:
                    cls.bases.append(self.evaluate(node.value if isinstance(node, ast.Subscript) else node, cls.scope))
                except CannotDecideError as error:
                    cls.bases.append(Unknown(error.why))
        return cls.bases

    def lineage(self, cls: ClassValue) -> list[ClassValue]:
        """The class and those of its ancestors that the release defines, nearest first."""
        found: list[ClassValue] = []
        queue = [cls]
        while queue and len(found) < 40:
            item = queue.pop(0)
            if item not in found:
                found.append(item)
                queue.extend(base for base in self.bases(item) if isinstance(base, ClassValue))
        return found

    def member(self, cls: ClassValue, name: str) -> Any:
        for item in self.lineage(cls):
            if name in item.members:
                return item.members[name]
            for statement in item.node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and statement.name == name:
                    if isinstance(statement, ast.ClassDef):
                        item.members[name] = self._class(statement, item.scope)
                    else:
                        item.members[name] = self.decorated(Function(statement, item.scope, item), statement)
                    return item.members[name]
                target = None
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
                    target = statement.target.id
                elif (
                    isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
                ):
                    target = statement.targets[0].id
                if target == name and isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                    item.members[name] = self.evaluate(statement.value, Scope(item.scope.module, dict(item.members), item.scope))
                    return item.members[name]
        return MISSING

    def construct(self, cls: ClassValue, args: list[Any], kwargs: dict[str, Any]) -> Any:
        instance = Instance(cls)
        init = self.member(cls, "__init__")
        if isinstance(init, Function):
            self.call_function(init, [instance, *args], kwargs)
        elif any(item.dataclass for item in self.lineage(cls)):
            names = []
            for item in reversed(self.lineage(cls)):
                for statement in item.node.body:
                    if (
                        isinstance(statement, ast.AnnAssign)
                        and isinstance(statement.target, ast.Name)
                        and statement.target.id not in names
                    ):
                        names.append(statement.target.id)
            for name, value in zip(names, args, strict=False):
                instance.attrs[name] = value
            instance.attrs.update(kwargs)
            for name in names:
                if name not in instance.attrs:
                    default = self.member(cls, name)
                    instance.attrs[name] = Unknown(f"{cls.name}.{name}") if default is MISSING else default
        else:
            instance.attrs.update(kwargs)
        return instance

    def kinds(self, value: Any) -> set[str]:
        """The class names that ``isinstance`` may find, for values of the release and stand-ins."""
        if isinstance(value, Instance):
            return {item.name for item in self.lineage(value.cls)}
        if isinstance(value, Namespace):
            return set(value.kinds)
        return {"Tensor"} if isinstance(value, Tensor) else {type(value).__name__}

    # -- calling ---------------------------------------------------------------------------------------------------------------
    def call(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call any value. Code that is not known here may have written to every tensor that it was given."""
        self._step()
        if isinstance(target, Bound):
            function = target.function
            return self.call_function(function, args if function.kind == "static" else [target.self_value, *args], kwargs)
        if isinstance(target, Function):
            return self.call_function(target, args, kwargs)
        if isinstance(target, ClassValue):
            return self.construct(target, args, kwargs)
        if isinstance(target, Native):
            if not target.pure:
                self.spoil(args, kwargs)
            return target.call(*args, **kwargs)
        if isinstance(target, Namespace) and target.call is not None:
            return target.call(*args, **kwargs)
        if isinstance(target, Instance):
            for name in ("__call__", "forward"):
                method = self.member(target.cls, name)
                if isinstance(method, Function):
                    return self.call_function(method, [target, *args], kwargs)
            target = Unknown(f"calling a {target.cls.name}")
        if isinstance(target, Unknown):
            self.spoil(args, kwargs)
            return Unknown(f"{target.why}(…)")
        raise CannotDecideError(f"calling {target!r}", self.where)

    def launched(self, kernel: Function, grid: Any) -> Any:
        """``kernel[grid]`` of a Triton kernel."""
        from .triton_standin import launcher

        return launcher(self, kernel, grid)

    def spoil(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, Tensor):
                    item.spoil()

    def call_function(self, function: Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if function.kind == "launcher":
            from .triton_standin import launch_specification

            return launch_specification(self, function, args, kwargs)
        return self.run_function(function, args, kwargs)

    def run_function(self, function: Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
        node = function.node
        scope = Scope(
            function.scope.module,
            {},
            function.scope if isinstance(node, ast.Lambda) or function.scope.names else None,
            function.owner,
        )
        scope.self_value = args[0] if args else None
        self._bind(function, scope, args, kwargs)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise StepBudgetError("calls nested too deep", self.where)
        self.visited.setdefault(f"{function.scope.module.path}:{node.lineno}", node.lineno)
        try:
            if isinstance(node, ast.Lambda):
                return self.evaluate(node.body, scope)
            for statement in node.body:
                self.execute(statement, scope)
        except ReturnSignal as outcome:
            return outcome.value
        finally:
            self.depth -= 1
        return None

    def _bind(self, function: Function, scope: Scope, args: list[Any], kwargs: dict[str, Any]) -> None:
        spec = function.node.args
        positional = [item.arg for item in (*spec.posonlyargs, *spec.args)]
        names, left = scope.names, dict(kwargs)
        for name, value in zip(positional, args, strict=False):
            names[name] = value
        if spec.vararg is not None:
            names[spec.vararg.arg] = tuple(args[len(positional) :])
        elif len(args) > len(positional):
            raise CannotDecideError(f"{function.name} takes {len(positional)} arguments, {len(args)} given", self.where)
        every = [*positional, *(item.arg for item in spec.kwonlyargs)]
        for name in every:
            if name in left:
                names[name] = left.pop(name)
        if spec.kwarg is not None:
            names[spec.kwarg.arg] = left
        defaults: dict[str, ast.expr] = dict(zip(positional[len(positional) - len(spec.defaults) :], spec.defaults, strict=True))
        defaults.update({item.arg: node for item, node in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if node is not None})
        for name in every:
            if name not in names:
                if name not in defaults:
                    raise CannotDecideError(f"{function.name} is called without {name}", self.where)
                names[name] = self.evaluate(defaults[name], function.scope)
