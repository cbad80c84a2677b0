"""Benchmarks are no part of the installed package: their modules are taken from the source tree."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["benchmark"]


def benchmark(name: str) -> ModuleType:
    """The module ``benchmarks/NAME.py``."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / f"{name}.py"
    key = f"benchmark_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        spec.loader.exec_module(module)
    return sys.modules[key]
