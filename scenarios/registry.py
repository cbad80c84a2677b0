"""The scenarios: one module ``*_scenario.py`` each, with a module constant ``SCENARIO``; found by name, looked up by word.

Exactly one entry must match: none is a UsageError that lists what there is, two of one name is our own fault.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import OurFaultError, UsageError

if TYPE_CHECKING:
    from .launches import Row

__all__ = ["Fix", "Scenario", "all_scenarios", "scenario", "scenario_for_signature"]

GroundName = Literal["server", "gpu", "cpu"]


@dataclass(frozen=True, slots=True)
class Fix:
    """One way to end the defect. ``layer``: producer, consumer, launch …; ``flags``: what turns it on in this program."""

    layer: str
    text: str
    flags: tuple[str, ...] = ()
    upstream: str = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is provoked. ``class_`` and ``cause`` are words of the diagnosis document; ``signature`` names the published case.

    ``grounds``: where it can run at all, and what is expected there, in words. ``upstream``: issue and pull-request numbers.
    ``story``: what happens, link by link, one paragraph each. ``rows``: the matrix of defect and fixes, what each must come to; the
    defining case has none, its matrix is made from its plan. ``distinguishes``: what tells it from its neighbours.
    ``not_reproduced``: (what, what it would take), said wherever the scenario is shown.
    """

    name: str
    title: str
    class_: str
    cause: str | None
    signature: str | None
    grounds: Mapping[GroundName, str]
    story: tuple[str, ...]
    fixes: tuple[Fix, ...] = ()
    upstream: tuple[str, ...] = ()
    example: str = ""
    notes: tuple[str, ...] = field(default=())
    rows: tuple[Row, ...] = ()
    distinguishes: tuple[str, ...] = ()
    not_reproduced: tuple[tuple[str, str], ...] = ()

    def variants(self) -> tuple[Row, ...]:
        """The rows of the scenario's matrix: the defect and its fixes, each with what a run of it must be diagnosed as."""
        return self.rows


def _modules() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*_scenario.py"))


def all_scenarios() -> tuple[Scenario, ...]:
    """Every scenario, the defining case first, then by name."""
    found: dict[str, Scenario] = {}
    for module in _modules():
        entry = importlib.import_module(f"{__package__}.{module}").SCENARIO
        if entry.name in found:
            raise OurFaultError(f"two scenarios are named {entry.name}")
        found[entry.name] = entry
    return tuple(sorted(found.values(), key=lambda item: (item.name != "drain", item.name)))


def scenario(name: str) -> Scenario:
    """The scenario of that name; UsageError with the names that exist."""
    entries = all_scenarios()
    for entry in entries:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in entries)
    raise UsageError(f"no scenario {name[:80]!r}; there are: {known}", help_text="dsv4-repro list")


def scenario_for_signature(signature: str | None) -> Scenario | None:
    """The scenario of a published case, None if there is none (or none was matched)."""
    if signature is None:
        return None
    return next((entry for entry in all_scenarios() if entry.signature == signature), None)
