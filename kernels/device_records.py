"""What goes between a GPU workload and its parent: the set-up, a step's result, the release experiment's result; and row states."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .abi import ARRIVAL_COUNTER_OFFSET, PARAMS_SIZE, ROW_STATE_SIZE
from .plan import LaunchPlan

__all__ = ["ReleaseResult", "Setup", "StepResult", "counters_of", "launch_document", "launch_of"]


def launch_document(plan: LaunchPlan) -> dict[str, Any]:
    """A launch as JSON, for the child."""
    return asdict(plan)


def launch_of(document: Mapping[str, Any]) -> LaunchPlan:
    """The launch that ``launch_document`` wrote."""
    return LaunchPlan(**{**document, "notes": tuple(document.get("notes", ()))})


@dataclass(frozen=True, slots=True)
class Setup:
    """What the child is to set up. ``launches`` by graph rows. ``cubin`` is empty where torch's op launches (``library``: its
    file). ``extra``: what a workload of another kind needs beside it (``relative_child``).
    """

    function: str
    top_k: int
    layers: int
    seed: int
    ordinal: int
    launches: Mapping[int, LaunchPlan]
    cubin: bytes = b""
    params_size: int = PARAMS_SIZE
    warmup_timeout_s: float = 20.0
    library: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that ended. ``wrong``: rows of live requests whose chosen set is not the reference's, with layer, row, length and why;
    ``padding_wrong``: the same of padding rows, whose results nobody reads.
    """

    index: int
    state: str
    milliseconds: float
    wrong: tuple[Mapping[str, Any], ...] = ()
    padding_wrong: tuple[Mapping[str, Any], ...] = ()
    rows_checked: int = 0
    error: str = ""

    def document(self) -> dict[str, Any]:
        return {
            "index": self.index, "state": self.state, "ms": self.milliseconds, "wrong": list(self.wrong),
            "padding_wrong": list(self.padding_wrong), "rows_checked": self.rows_checked, "error": self.error,
        }  # fmt: skip


@dataclass(slots=True)
class ReleaseResult:
    """The experiment. ``first_ms``: from the first write to the retirement of the launch that hung; ``layers_ms`` the same for each
    layer that hung in turn; ``total_ms`` until the whole graph retired. ``write_ms``: how long the first 4-byte copy took.
    """

    retired: bool = False
    first_ms: float | None = None
    total_ms: float | None = None
    write_ms: float | None = None
    writes: int = 0
    layers_ms: list[float] = field(default_factory=list)
    also_groups: list[int] = field(default_factory=list)
    result: StepResult | None = None
    why_not: str = ""

    def document(self) -> dict[str, Any]:
        return {
            "retired": self.retired, "first_ms": self.first_ms, "total_ms": self.total_ms, "write_ms": self.write_ms,
            "writes": self.writes, "layers_ms": self.layers_ms, "also_groups": self.also_groups, "why_not": self.why_not,
            "result": self.result.document() if self.result else None,
        }  # fmt: skip


def counters_of(raw: bytes) -> list[dict[str, int]]:
    """Per group of raw row states: ``arrival``, ``output``, ``remaining_k``, ``prefix``."""
    groups = []
    for start in range(0, len(raw) - ROW_STATE_SIZE + 1, ROW_STATE_SIZE):
        remaining_k, prefix, arrival, output = struct.unpack_from("<IIii", raw, start + ARRIVAL_COUNTER_OFFSET - 8)
        groups.append({"arrival": arrival, "output": output, "remaining_k": remaining_k, "prefix": prefix})
    return groups
