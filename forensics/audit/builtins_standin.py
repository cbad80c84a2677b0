"""Python's builtins and the few standard-library names that vLLM's metadata code uses, as stand-ins for the release-code
interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .tensors import Tensor
from .values import CannotDecideError, ClassValue, InterpretedError, Namespace, Native, Unknown

if TYPE_CHECKING:
    from .interpreter import Interpreter

__all__ = ["builtin_names", "standard_modules"]

_TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "tuple": tuple,
    "list": list,
    "dict": dict,
    "set": set,
}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.array.size == 1 else value


def _known(function: Callable[..., Any]) -> Callable[..., Any]:
    """Unknown arguments give an unknown result; errors of Python's own become the release's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        clean = [_plain(item) for item in args]
        for item in clean:
            if isinstance(item, Unknown):
                return Unknown(item.why)
        try:
            return function(*clean, **kwargs)
        except (TypeError, ValueError, OverflowError) as error:
            raise InterpretedError(type(error).__name__, str(error)) from error

    return call


def builtin_names(interpreter: Interpreter) -> dict[str, Any]:
    """Name → stand-in. ``getattr``, ``isinstance`` and the like go through the interpreter, never to a live object."""

    def length(value: Any) -> Any:
        if isinstance(value, Unknown):
            return value
        return value.shape[0] if isinstance(value, Tensor) else len(interpreter.iterate(value))

    def extreme(pick: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            items = interpreter.iterate(args[0]) if len(args) == 1 else list(args)
            clean = [_plain(item) for item in items]
            for item in clean:
                if isinstance(item, Unknown):
                    return Unknown(item.why)
            if not clean:
                return kwargs["default"] if "default" in kwargs else Unknown("the extreme of nothing")
            return pick(clean)

        return call

    def is_instance(value: Any, kinds: Any) -> Any:
        if isinstance(value, Unknown):
            return Unknown(value.why)
        names = interpreter.kinds(value)
        found = False
        for kind in kinds if isinstance(kinds, tuple) else (kinds,):
            if isinstance(kind, ClassValue | Native):
                found = found or kind.name in names
            elif isinstance(kind, Namespace):
                found = found or kind.name.rsplit(".", 1)[-1] in names
            elif isinstance(kind, Unknown):
                tail = kind.why.rsplit(".", 1)[-1]
                found = found or tail in names
        return found

    def get_attribute(value: Any, name: Any, *default: Any) -> Any:
        if value is None:
            return default[0] if default else Unknown(f"None.{name}")
        found = interpreter.attribute(value, str(name))
        return default[0] if isinstance(found, Unknown) and default and not isinstance(value, Unknown) else found

    def has_attribute(value: Any, name: Any) -> Any:
        if isinstance(value, Unknown):
            return value
        return not isinstance(interpreter.attribute(value, str(name)), Unknown)

    def count(*args: Any) -> Any:
        clean = [_plain(item) for item in args]
        for item in clean:
            if isinstance(item, Unknown):
                raise CannotDecideError(f"a loop whose length depends on {item.why}")
        return range(*clean)

    def total(items: Any, start: Any = 0) -> Any:
        value = start
        for item in interpreter.iterate(items):
            plain = _plain(item)
            if isinstance(plain, Unknown):
                return plain
            value += plain
        return value

    def every(items: Any) -> Any:
        return all(interpreter.truth(item) for item in interpreter.iterate(items))

    def some(items: Any) -> Any:
        return any(interpreter.truth(item) for item in interpreter.iterate(items))

    table: dict[str, Callable[..., Any]] = {
        "len": length, "max": extreme(max), "min": extreme(min), "isinstance": is_instance, "getattr": get_attribute,
        "hasattr": has_attribute, "range": count, "sum": total, "all": every, "any": some,
        "abs": _known(abs), "int": _known(int), "float": _known(float), "bool": lambda value=False: value if isinstance(value,
        Unknown) else interpreter.truth(value),
        "str": lambda *args: "…", "repr": lambda *args: "…", "print": lambda *args, **kwargs: None,
        "tuple": lambda items=(): tuple(interpreter.iterate(items)), "list": lambda items=(): interpreter.iterate(items),
        "set": lambda items=(): tuple(interpreter.iterate(items)), "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "enumerate": lambda items, start=0: [(position + start, item) for position, item in enumerate(interpreter.iterate(items))],
        "zip": lambda *many, strict=False: list(zip(*(interpreter.iterate(item) for item in many), strict=False)),
        "reversed": lambda items: list(reversed(interpreter.iterate(items))),
        "sorted": lambda items, **kwargs: sorted(interpreter.iterate(items)),
        "slice": lambda *args: slice(*args), "round": _known(round), "callable": lambda value: not isinstance(value,
        int | float | str | None),
        "super": lambda *args: Unknown("super()"), "type": lambda value: Unknown("type()"),
    }  # fmt: skip
    return {name: Native(name, call) for name, call in table.items()}


def standard_modules() -> dict[str, Namespace]:
    """Stand-ins for the standard library."""
    whole = Namespace(
        "math", {name: Native(name, _known(getattr(math, name))) for name in ("ceil", "floor", "log2", "sqrt", "prod", "gcd")}
    )
    whole.attrs["inf"] = math.inf
    identity = Native("decorator", lambda *args, **kwargs: args[0] if args else Native("decorator", lambda value: value))
    functools = Namespace("functools", {"cache": identity, "lru_cache": identity, "wraps": identity})
    counter = iter(range(1, 1 << 20))
    enum = Namespace("enum", {"auto": Native("auto", lambda: next(counter))})
    return {"math": whole, "functools": functools, "enum": enum}
