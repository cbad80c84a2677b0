"""The two decisions of a kernel, evaluated on the rows of one launch: which rows make a leader wait for a member that does not
come?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import BudgetError
from ...kernels.image import KernelImage
from ...kernels.plan import LaunchPlan
from ...kernels.sass.layout import layout_for
from ...kernels.sass.slice import GroupShape, Prologue, condition_of
from ...kernels.sass.symbolic_terms import evaluate
from .slices import SliceStore

__all__ = ["LaunchConditions"]


@dataclass
class LaunchConditions:
    """Explores each image once per launch shape. Raises what the exploration raises (a ReproError)."""

    store: SliceStore
    _prologues: dict[tuple[str, str], Prologue] = field(default_factory=dict)
    _known: dict[tuple[str, str, int, int, int], tuple[Any, Any]] = field(default_factory=dict)

    def _prologue(self, image: KernelImage, *, whole: bool = False) -> Prologue:
        key = (image.cubin_sha256, image.function)
        if whole or key not in self._prologues:
            facts = None if whole else self.store.cached(image)
            layout = layout_for(image.sm, image.params_base, image.params_size)
            self._prologues[key] = Prologue(facts if facts is not None else self.store.whole(image), layout, image.top_k)
        return self._prologues[key]

    def _conditions(self, image: KernelImage, plan: LaunchPlan) -> tuple[Any, Any]:
        """(the leader waits, its first member does not come) for the last group of a launch."""
        key = (image.cubin_sha256, image.function, plan.ctas_per_group, plan.groups, plan.rows)
        if key not in self._known:
            for whole in (False, True):
                prologue = self._prologue(image, whole=whole)
                try:
                    sides = []
                    for member in (0, 1):
                        shape = GroupShape(plan.ctas_per_group, plan.groups, plan.rows, plan.groups - 1, member)
                        sides.append(prologue.first_row(shape))
                    waits = condition_of(sides[0], prologue.terms, ("barrier",))
                    self._known[key] = waits, condition_of(sides[1], prologue.terms, ("exit", "alone"))
                    break
                except KeyError:
                    continue  # trimmed facts that another shape needs more of
            else:
                raise BudgetError(f"the prologue of {image.function} could not be followed")
        return self._known[key]

    def waiting_rows(self, image: KernelImage, plan: LaunchPlan, lengths: Sequence[int]) -> list[int]:
        """Rows of the launch whose group waits for ever, by the machine code's own conditions. BudgetError if they cannot be
        evaluated."""
        if plan.ctas_per_group < 2:
            return []
        waits, gone = self._conditions(image, plan)
        found: list[int] = []
        seen: dict[int, bool] = {}
        for row, length in enumerate(lengths):
            if length not in seen:
                inputs = {
                    "len": length & 0xFFFFFFFF,
                    "max_seq_len": plan.max_seq_len,
                    "stride": plan.stride,
                    "chunk": plan.chunk_size,
                }
                try:
                    seen[length] = bool(evaluate(waits, inputs)) and bool(evaluate(gone, inputs))
                except KeyError as error:
                    raise BudgetError(f"the decision depends on {error}, which is not an input") from error
            if seen[length]:
                found.append(row)
        return found
