"""SASS: decoded machine code, and the engines that give it meaning.

``decode`` turns nvdisasm's JSON into typed instructions; ``semantics`` says what each computes, once, over an algebra;
``machine`` runs a kernel on the CPU; ``symbolic`` reasons about one. The names here are loaded when first used: importing the
package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decode import Guard, Instruction, Operand, SassFunction
    from .machine import DEFAULT_BUDGET, Machine
    from .memory import Memory
    from .program import Program
    from .shipped import shipped_image
    from .topk import TopKRun, run_case, run_topk
    from .verdict import CtaSnapshot, Fault, Residency, RunResult, StuckThreads

_HOME = {
    "decode": ("Guard", "Instruction", "Operand", "SassFunction"),
    "machine": ("DEFAULT_BUDGET", "Machine"),
    "memory": ("Memory",),
    "program": ("Program",),
    "shipped": ("shipped_image",),
    "topk": ("TopKRun", "run_case", "run_topk"),
    "verdict": ("CtaSnapshot", "Fault", "Residency", "RunResult", "StuckThreads"),
}
__all__ = [
    "DEFAULT_BUDGET", "CtaSnapshot", "Fault", "Guard", "Instruction", "Machine", "Memory", "Operand", "Program", "Residency",
    "RunResult", "SassFunction", "StuckThreads", "TopKRun", "run_case", "run_topk", "shipped_image",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
