"""The pool of a hunt on the server ground: one server at a time, in the hunt's own process.

A server takes the cards it sees, so there is nothing to run beside it, and a worker process that is killed would leave its server
behind. Trials are made while the hunt polls; Ctrl-C ends the server on the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...clock import SYSTEM, Clock, Deadline
from ...errors import ReproError
from .cells import Cell, TrialResult
from .pools import Message
from .sampler import Block
from .server_session import ServerSession

__all__ = ["ServerPool"]


class ServerPool:
    """``folder``: what every server wrote, by cell. ``deadline``: of the whole hunt."""

    name = "server"

    def __init__(
        self,
        folder: Path,
        *,
        deadline: Deadline | None = None,
        session: Callable[..., Any] = ServerSession,
        clock: Clock = SYSTEM,
    ) -> None:
        self._folder, self._clock = folder, clock
        self._deadline = deadline or Deadline(float("inf"), clock)
        self._make = session
        self._block: Block | None = None
        self._place = 0
        self._open: tuple[str, Any] | None = None
        self._visits: dict[str, int] = {}
        self._notes: list[str] = []

    def free(self) -> int:
        """One block at a time."""
        return int(self._block is None)

    def submit(self, block: Block) -> None:
        """Taken; its trials are made by ``poll``."""
        self._block, self._place = block, 0

    def poll(self, timeout_s: float) -> list[Message]:
        """Make the next trial of the block and tell it; waits ``timeout_s`` where there is none."""
        block = self._block
        if block is None:
            self._clock.sleep(timeout_s)
            return []
        found = []
        if self._place < len(block.numbers):
            number, seed = block.numbers[self._place], block.seeds[self._place]
            self._place += 1
            result = self._trial(block.cell, seed)
            if not (result.kind == "other" and self._deadline.expired):  # cut off by the budget: that is no failure of anything
                found.append(Message("result", self.name, block, number, result))
            else:
                self._place = len(block.numbers)
        found += [Message("event", self.name, why=text) for text in self._notes]
        self._notes = []
        if self._place >= len(block.numbers):
            found.append(Message("done", self.name, block))
            self._block = None
        return found

    def _trial(self, cell: Cell, seed: int) -> TrialResult:
        if self._open is None or self._open[0] != cell.key:
            self.close()
            # A cell that comes again gets a place of its own: nothing that was written is written over.
            visit = self._visits[cell.key] = self._visits.get(cell.key, 0) + 1
            while (place := self._folder / f"{cell.key}-{visit}").exists():
                visit = self._visits[cell.key] = visit + 1
            made = self._make(cell, folder=place, emit=self._note, clock=self._clock)
            made.bound(self._deadline)
            self._open = (cell.key, made)
        try:
            result: TrialResult = self._open[1].trial(seed)
        except ReproError as error:  # an impossible cell of the matrix: this trial's answer, not the hunt's end
            self.close()
            return TrialResult("other", seed, why=f"{type(error).__name__}: {error}"[:1000])
        return result

    def _note(self, kind: str, **fields: Any) -> None:
        """Of what a ground tells, that a server did not end as it should is kept."""
        if kind == "close" and fields.get("how") not in ("clean", "terminated"):
            self._notes.append(f"close: {fields.get('how')}: {fields.get('detail')}"[:500])

    def doing(self) -> list[str]:
        """One line."""
        return [f"{self.name}: {self._block.cell.name if self._block is not None else 'idle'}"]

    def close(self) -> None:
        """End the server."""
        held, self._open = self._open, None
        if held is not None:
            held[1].close()
