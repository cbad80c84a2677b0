"""Which cell a trial is: a function of its number, so that a killed campaign goes on where it was, on one machine or many.

Trials come in blocks of one cell (``batch``; on a GPU a new cell costs a new process). Guided search draws a few cells for each
block and takes the one whose danger windows were tried least; a cell that can reach none comes last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ReproError
from .cells import Cell
from .plan import HuntPlan
from .session import TrialSession, window_keys

__all__ = ["Block", "Sampler", "windows_of_cell"]

_CANDIDATES = 24
_KNOWN_CELLS = 4096


@dataclass(frozen=True, slots=True)
class Block:
    """Trials of one cell: ``numbers`` and the seed of each."""

    number: int
    cell_number: int
    cell: Cell
    numbers: tuple[int, ...]
    seeds: tuple[int, ...]

    def without(self, done: Sequence[int]) -> Block:
        """The same block without trials that ended."""
        kept = [(number, seed) for number, seed in zip(self.numbers, self.seeds, strict=True) if number not in set(done)]
        return Block(self.number, self.cell_number, self.cell, tuple(n for n, _ in kept), tuple(s for _, s in kept))


def windows_of_cell(cell: Cell, chosen: dict[str, Any]) -> tuple[str, ...]:
    """The danger windows that a cell's plan can reach, computed, nothing run. ``chosen``: sessions by kernel, to load each once."""
    if cell.ground == "server":
        return _server_windows(cell)
    plan = cell.plan
    key = repr((cell.kernel, cell.arch, cell.device, plan.get("top_k"), plan.get("max_model_len"), plan.get("compress")))
    session = TrialSession(cell)
    if key in chosen:
        session._device, session._chosen = chosen[key]
    try:
        prepared = session.prepare(0)
    except ReproError:
        return ()
    chosen[key] = (session._device, session._chosen)
    return tuple(dict.fromkeys(window_keys(cell, prepared, prepared.window).values()))


def _server_windows(cell: Cell) -> tuple[str, ...]:
    """By plan and flags alone: neither interpreter nor card is asked."""
    from ..serving.drain_windows import drain_windows
    from ..serving.recipe import DUMMY, DUMMY_PLAN, resolve

    try:
        plan = cell.drain(0)
        model = str(cell.server.get("model", ""))
        own = {name: value for name, value in DUMMY_PLAN.items() if name not in cell.plan} if model == DUMMY else {}
        words = tuple(str(word) for word in cell.server.get("flags", ()))
        _, facts, plan = resolve(plan.replace(**own), model, tp=int(cell.server.get("tp") or 1), words=words)
        windows = drain_windows(plan, facts)
    except ReproError:
        return ()
    first = {step.live_requests: step for step in windows.steps if step.live_requests in windows.counts}
    return tuple(f"live {live} rows {step.graph_rows} next_n {step.next_n}" for live, step in first.items())


class Sampler:
    """``counts``: danger window -> trials so far, asked at each guided block."""

    def __init__(self, plan: HuntPlan, *, batch: int, counts: Callable[[], Mapping[str, int]] = dict) -> None:
        self.plan = plan
        self.batch = max(batch, 1)
        self._counts = counts
        self._chosen: dict[str, Any] = {}
        self._windows: dict[int, tuple[str, ...]] = {}

    @property
    def blocks(self) -> int | None:
        """How many blocks there are; None: no end."""
        return self.plan.cells * self._rounds if self.plan.search.mode == "exhaustive" else None

    @property
    def _rounds(self) -> int:
        return -(-self.plan.search.repeat // self.batch)

    def seed_of(self, number: int) -> int:
        """Seed of the drain plan of a trial."""
        return random.Random(self.plan.search.seed * 1_000_003 + number).getrandbits(31)

    def block(self, number: int, only: Sequence[int] | None = None) -> Block:
        """Block ``number``; ``only``: those of its trials that are missing."""
        cell_number = self._cell_of(number)
        first = number * self.batch
        size = self.batch
        if self.plan.search.mode == "exhaustive":
            size = min(self.batch, self.plan.search.repeat - number // self.plan.cells * self.batch)
        numbers = [trial for trial in range(first, first + size) if only is None or trial in only]
        return Block(number, cell_number, self.plan.cell(cell_number), tuple(numbers), tuple(self.seed_of(n) for n in numbers))

    def _cell_of(self, number: int) -> int:
        if self.plan.search.mode == "exhaustive":
            return number % self.plan.cells
        dice = random.Random((self.plan.search.seed << 64) + number)
        if self.plan.search.mode == "random":
            return dice.randrange(self.plan.cells)
        counts = self._counts()
        if self.plan.cells <= _CANDIDATES:
            candidates = dice.sample(range(self.plan.cells), self.plan.cells)
        else:
            candidates = [dice.randrange(self.plan.cells) for _ in range(_CANDIDATES)]
        return min(candidates, key=lambda cell: self._tried(cell, counts))

    def _tried(self, cell: int, counts: Mapping[str, int]) -> float:
        if cell not in self._windows:
            if len(self._windows) >= _KNOWN_CELLS:
                self._windows.clear()
            self._windows[cell] = windows_of_cell(self.plan.cell(cell), self._chosen)
        return min((counts.get(key, 0) for key in self._windows[cell]), default=float("inf"))
