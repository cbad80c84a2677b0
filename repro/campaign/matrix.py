"""The fix matrix of a scenario: neither, producer only, consumer only, both; and further kernels of the user's, one change a
row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import PlanError, UsageError
from ...scenarios.drain import DEFAULT_LAYERS
from ...scenarios.registry import scenario
from .cells import Cell

__all__ = ["FixCell", "ablation_cells", "fix_cells"]


@dataclass(frozen=True, slots=True)
class FixCell:
    """A row of the matrix. ``fixed``: which layers are repaired in it. ``change``: what was changed, in the words people use."""

    cell: Cell
    fixed: frozenset[str]
    change: str


def fix_cells(
    name: str, base: Cell, *, unfixed: str = "builtin", fixed: str = "builtin:guard", more: Sequence[str] = ()
) -> list[FixCell]:
    """Four rows, and two (producer raw, producer clamped) for each kernel of ``more``. UsageError for a scenario without layers."""
    entry = scenario(name)
    layers = {fix.layer for fix in entry.fixes}
    if not {"producer", "consumer"} <= layers:
        known = "drain"
        raise UsageError(
            f"verify {name}: this scenario has no producer and consumer fix to combine "
            f"(its fixes: {', '.join(sorted(layers)) or 'none'})",
            help_text=f"dsv4-repro verify {known}; its own fix: dsv4-repro run {name} --help",
        )
    rows = [
        FixCell(replace(base, name="neither", kernel=unfixed, producer="raw"), frozenset(), "nothing repaired"),
        FixCell(
            replace(base, name="producer only", kernel=unfixed, producer="clamped"), frozenset({"producer"}), "lengths clamped at 0"
        ),
        FixCell(
            replace(base, name="consumer only", kernel=fixed, producer="raw"),
            frozenset({"consumer"}),
            "length kept signed and bounded",
        ),
        FixCell(replace(base, name="both", kernel=fixed, producer="clamped"), frozenset({"producer", "consumer"}), "both repaired"),
    ]
    for spec in more:
        label = spec if len(spec) <= 48 else "…" + spec[-47:]
        rows += [
            FixCell(
                replace(base, name=f"{label}, producer raw", kernel=spec, producer="raw"),
                frozenset({f"kernel {spec}"}),
                "this kernel",
            ),
            FixCell(
                replace(base, name=f"{label}, producer clamped", kernel=spec, producer="clamped"),
                frozenset({f"kernel {spec}", "producer"}),
                "this kernel, lengths clamped at 0",
            ),
        ]
    return rows


def _changed(base: Cell, name: str, plan: Mapping[str, Any] | None = None, **changes: Any) -> Cell:
    return replace(base, name=name, plan={**base.plan, **(plan or {})}, **changes)


def ablation_cells(base: Cell, *, fixed: str = "builtin:guard") -> list[FixCell]:
    """Every condition of the hang, turned off one at a time, and one row where all hold. PlanError if the base plan makes no sense.

    "layers" stands for itself: with one indexer layer per step the hang must still be there, so it is no condition. ``residency``
    gives every CTA a slot (the defect does not need a crowded device).
    """
    if "layers" not in base.plan:
        base = replace(base, plan={**base.plan, "layers": DEFAULT_LAYERS[base.ground]})
    plan = base.drain()
    sizes = sorted({*plan.graph_sizes, plan.min_live * plan.next_n})
    rows = [FixCell(replace(base, name="all conditions"), frozenset(), "as the recipe has it")]

    def add(name: str, words: str, plan_changes: Mapping[str, Any] | None = None, **changes: Any) -> None:
        try:
            cell = _changed(base, name, plan_changes, **changes)
            cell.drain()
        except PlanError as error:
            raise PlanError(f"condition {name!r} cannot be turned off in this plan: {error}") from None
        rows.append(FixCell(cell, frozenset({name}), words))

    add("MTP", "speculative decoding off: next_n 1", {"mtp": 0})
    add("graphs", "no FULL decode graph is large enough: every step runs eagerly", {"capture_sizes": [plan.next_n]})
    add("padding", f"size {plan.min_live * plan.next_n} is captured too: no padded slot at the end", {"capture_sizes": sizes})
    add("C4", "indexer not compressed: rows are as long as the context", {"compress": 1})
    add("layers", "one indexer layer per step instead of all", {"layers": 1})
    if base.ground == "cpu":
        add("residency", "every CTA of the grid has a slot of its own", None, sms=1024, slots_per_sm=2)
    add("width", "max_model_len such that one CTA holds a whole row", {"max_model_len": min(8192, plan.max_model_len)})
    add("raw producer", "lengths clamped at 0 by the producer", None, producer="clamped")
    add("unguarded kernel", "the kernel's length check on", None, kernel=fixed)
    return rows
