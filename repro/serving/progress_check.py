"""Whether a server has moved since it was first looked at: asked again immediately before anything that could end a healthy one.

Attaching a debugger to a worker that had recovered ended it (measured on an H200, vLLM 0.23.0). So a debugger is attached only
where something was read that stood still, and never where something moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...clock import SYSTEM, Clock
from ...errors import EvidenceError
from ...forensics.collect.engine_metrics import scrape
from ..recorder import read_ring
from .rank_numbers import agent_names
from .records import ServerTarget

__all__ = ["Progress", "Standing"]

#: Counters of the engine that only grow while it works. The queue lengths are not among them: a client that gives up changes them.
_COUNTERS = ("generation_tokens", "iterations", "prompt_tokens")


@dataclass(frozen=True, slots=True)
class Standing:
    """``moved``: what did, as sentences; ``still``: what was read and stood still; ``blind``: what could not be read."""

    moved: tuple[str, ...] = ()
    still: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()

    @property
    def certain(self) -> bool:
        """Something was read, and nothing moved."""
        return bool(self.still) and not self.moved


@dataclass
class Progress:
    """``before``: where the server stood, as ``first_sample`` returns it. ``other``: a further signal, e.g. the observer's, which
    answers with what moved or an empty string."""

    target: ServerTarget
    before: Mapping[str, Mapping[str, Any]]
    other: Callable[[], str] | None = None
    timeout_s: float = 0.7
    clock: Clock = SYSTEM
    root: Path = Path("/proc")
    last: Standing = field(default_factory=Standing)

    def check(self) -> Standing:
        """Read the recorders and the engine's counters again."""
        moved: list[str] = []
        still: list[str] = []
        blind: list[str] = []
        self._rings(moved, still, blind)
        self._counters(moved, still, blind)
        if self.other is not None and (said := self.other()):
            moved.append(said)
        self.last = Standing(tuple(moved), tuple(still), tuple(blind))
        return self.last

    def _rings(self, moved: list[str], still: list[str], blind: list[str]) -> None:
        known = self.before.get("recorder_rings", {}).get("rings", {})
        folder = self.target.agent_folder
        if folder is None or not known:
            blind.append("the flight recorder: none")
            return
        names = agent_names(folder, self.target.ranks, self.root)
        for rank in self.target.ranks:
            old, name = known.get(str(rank.pid)), names.get(rank.pid)
            if old is None or name is None:
                blind.append(f"the flight recorder of process {rank.pid}")
                continue
            try:
                contents = read_ring(folder / f"ring-{name}.bin")
            except EvidenceError as error:
                blind.append(f"the flight recorder of process {rank.pid}: {error}")
                continue
            ended = set(old["unfinished"]) - {step.number for step in contents.unfinished}
            if ended:
                moved.append(f"process {rank.pid}: step {min(ended)} has ended")
            elif contents.header.releases != old["releases"]:
                moved.append(f"process {rank.pid}: the rescue released a wait")
            elif old["unfinished"]:
                # Steps may still be queued behind the one that hangs; that is no progress of the device.
                still.append(f"process {rank.pid}: step {old['unfinished'][0]} is still under way")
            elif contents.header.begun != old["begun"]:
                moved.append(f"process {rank.pid}: {contents.header.begun - old['begun']} steps were begun")
            else:
                blind.append(f"the flight recorder of process {rank.pid}: no step is under way")

    def _counters(self, moved: list[str], still: list[str], blind: list[str]) -> None:
        old = self.before.get("metrics", {}).get("values", {})
        if self.target.base_url is None or not any(name in old for name in _COUNTERS):
            blind.append("the engine's counters: not read at first")
            return
        reading = scrape(self.target.base_url, timeout_s=self.timeout_s, clock=self.clock, health=False)
        common = [name for name in _COUNTERS if name in old and name in reading.values]
        if not common:
            why = "; ".join(item.why for item in reading.unread) or "not exported any more"
            blind.append(f"the engine's counters: {why}")
            return
        changed = [name for name in common if reading.values[name] != old[name]]
        if changed:
            moved.append("; ".join(f"{name} {old[name]:g} -> {reading.values[name]:g}" for name in changed))
        else:
            still.append("the engine's counters stand still")
