"""What was asked for, from the environment.

Every name is also read with ``VLLM_`` in front: Ray's executor of vLLM copies only some prefixes to its workers, and that is one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings", "from_environment", "lookup"]

_TRUE = {"1", "true", "yes", "on"}
MAX_SLOTS = 65536


def lookup(name: str, environ: Mapping[str, str]) -> str | None:
    """``name`` or ``VLLM_name``; the first wins."""
    value = environ.get(name)
    return value if value is not None else environ.get(f"VLLM_{name}")


@dataclass(frozen=True)
class Settings:
    """``recorder`` may be switched at run time by the control file, and so may ``guard``; ``rescue`` is decided at the start.

    ``ptrace``: let any process of the same user attach a debugger; arms nothing by itself.
    """

    agent: bool
    guard: bool
    rescue: bool
    row_states: bool
    folder: Path
    slots: int = 1024
    stall_s: float = 0.05
    ptrace: bool = False

    @property
    def asked(self) -> bool:
        return self.agent or self.guard or self.rescue


def _flag(name: str, environ: Mapping[str, str], default: bool = False) -> bool:
    value = lookup(name, environ)
    return default if value is None else value.strip().lower() in _TRUE


def _number(name: str, environ: Mapping[str, str], default: float, low: float, high: float) -> float:
    try:
        value = float(lookup(name, environ) or default)
    except ValueError:
        return default
    return min(max(value, low), high) if value == value else default


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Read ``DSV4_REPRO_AGENT``, ``_GUARD``, ``_RESCUE``, ``_ROWSTATES``, ``_AGENT_DIR``, ``_AGENT_SLOTS``, ``_STALL_MS``
    and ``_PTRACE``; what cannot be read has its default."""
    source = os.environ if environ is None else environ
    folder = lookup("DSV4_REPRO_AGENT_DIR", source) or f"{tempfile.gettempdir()}/dsv4-repro-agent-{os.getuid()}"
    return Settings(
        agent=_flag("DSV4_REPRO_AGENT", source),
        guard=_flag("DSV4_REPRO_GUARD", source),
        rescue=_flag("DSV4_REPRO_RESCUE", source),
        row_states=_flag("DSV4_REPRO_ROWSTATES", source, True),
        folder=Path(folder),
        slots=int(_number("DSV4_REPRO_AGENT_SLOTS", source, 1024, 16, MAX_SLOTS)),
        stall_s=_number("DSV4_REPRO_STALL_MS", source, 50.0, 5.0, 60_000.0) / 1000.0,
        ptrace=_flag("DSV4_REPRO_PTRACE", source),
    )
