"""Run something after a module was imported, without importing it.

vLLM's API server loads plugins too, and importing a model runner there would cost seconds and memory; so modules that are not there
yet are waited for with a finder that leaves everything to the usual ones.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, after: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._after = after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # The usual loader is put back first: inspect, pickle and reload then see an ordinary module.
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._after(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        after = self._waiting.get(fullname)
        if after is None:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, after)
                return spec
        return None


def when_imported(wanted: dict[str, Callable[[ModuleType], None]]) -> None:
    """Call ``wanted[name](module)`` after the module's import: at once if it is there. The callables must not raise."""
    waiting = dict(wanted)
    for name in list(waiting):
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            waiting.pop(name)(module)
    if waiting:
        sys.meta_path.insert(0, _Finder(waiting))
