"""Weak memory order, one mode of the machine: additions to global memory of a CTA may be seen later than what it does afterwards.

What PTX allows and sequential interpretation never shows: a relaxed reduction is not ordered before a later access to another
address unless a fence stands between them. Here additions that many threads issue together and whose old value nobody asks for may
be kept back, per CTA, until one of its threads executes MEMBAR, reads global memory with more than one thread (it must see its own
additions), leaves the kernel, or the launch stands still. Everything else stays in order, so whatever is found is an execution that
the memory model allows; not every such execution is found.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .state import ThreadVector

if TYPE_CHECKING:
    from .blocks import Block

__all__ = ["WeakVector"]

_FENCES = frozenset({"MEMBAR", "FENCE"})
_READS = frozenset({"LDG", "LD", "ATOMG"})


class WeakVector(ThreadVector):
    """A vector whose CTAs have a buffer of additions each. ``chance``: whether a batch is kept back is drawn, one in two."""

    def set_chance(self, chance: random.Random | None) -> None:
        """Start with empty buffers."""
        self._chance = chance
        self._rows_acting: npt.NDArray[np.intp] = np.zeros(0, np.intp)
        self._kept: dict[int, list[tuple[npt.NDArray[np.intp], Any]]] = {}
        self._fenced: dict[int, tuple[bool, bool]] = {}

    def before(self, block: Block, where: Any, n: int) -> None:
        """Threads are about to execute a block: let go what it orders, and note whose additions these will be."""
        found = self._fenced.get(block.start)
        if found is None:
            opcodes = {instruction.opcode for instruction in block.instructions}
            found = bool(opcodes & _FENCES) or block.kind == "EXIT", bool(opcodes & _READS)
            self._fenced[block.start] = found
        positions = self.iota if where is None else self.iota[where]
        self._rows_acting = positions // self.stride
        fences, reads = found
        if self._kept and (fences or (reads and n > 1)):
            for row in np.unique(self._rows_acting).tolist():
                self.let_go(self.ctas[row])

    def atomic(
        self, arena: Any, place: Any, operation: str, value: Any, other: Any = 0, *, guard: Any, n: int, wanted: bool
    ) -> Any:  # fmt: skip
        """As always, but an addition to global memory of which nobody asks the old value may be kept back."""
        late = operation == "ADD" and not wanted and arena is self.G and place.__class__ is np.ndarray
        if not late or (self._chance is not None and self._chance.random() < 0.5):
            return super().atomic(arena, place, operation, value, other, guard=guard, n=n, wanted=wanted)
        chosen = np.arange(n) if guard is None or guard is True else np.zeros(0, np.intp) if guard is False else guard.nonzero()[0]
        rows = self._rows_acting[chosen]
        for row in np.unique(rows).tolist():
            mine = chosen[rows == row]
            amount = value[mine] if value.__class__ is np.ndarray else np.uint32(value)
            self._kept.setdefault(self.ctas[row], []).append((place[mine], amount))
        return None

    def let_go(self, block: int) -> None:
        """What a CTA kept back becomes visible."""
        for place, amount in self._kept.pop(block, ()):
            np.add.at(self.G, place, amount)
            self.writes += 1

    def let_all_go(self) -> bool:
        """The same for every CTA; False if nothing was kept back."""
        kept = list(self._kept)
        for block in kept:
            self.let_go(block)
        return bool(kept)
