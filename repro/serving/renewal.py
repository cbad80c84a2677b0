"""A server that is watched is looked up again: its workers start late, and a card is theirs only once they hold it. Pure but for
what it is given.

An answer is never taken over an end: while a process that the server needs is gone, what was known stays, so that the watchdog sees
it. How often costs little: often while something is missing, at once when the state changes, else once a minute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from ...clock import SYSTEM, Clock
from .records import Rank, ServerTarget

__all__ = ["Renewal", "complete", "renewed", "workers_text"]

#: While workers or cards are missing: first after ``SOON_S``, then half as long again each time, up to ``LATE_S``, seconds.
SOON_S = 5.0
LATE_S = 60.0
#: Never sooner after the look before, and never for more than a hundredth of the time, seconds.
LEAST_S = 2.0
_SHARE = 100.0
_CORE = ("api", "engine", "worker")
#: What is known of a server in these states is what its evidence is of.
_EVIDENCE = ("hung", "exited", "crashed")


def complete(target: ServerTarget) -> bool:
    """Whether its workers, the card of each, and its URL are known."""
    return bool(target.ranks) and target.base_url is not None and all(_has_card(rank) for rank in target.ranks)


def _has_card(rank: Rank) -> bool:
    return rank.gpu_uuid is not None or rank.gpu_index is not None


def _core(target: ServerTarget) -> set[int]:
    own = {*target.engine_pids, *(rank.pid for rank in target.ranks), *((target.api_pid,) if target.api_pid is not None else ())}
    return own | {pid for pid, role in target.tree.items() if role in _CORE}


def renewed(known: ServerTarget, found: ServerTarget) -> ServerTarget:
    """What is known of the server after it was looked up again.

    ``known`` stays where one of its processes is not found (it ended, or was not shown: the watchdog sees an end by itself), and
    where all was known and what is new holds no card (a helper that looks like a worker). A card or number that was known and was
    not told this time (NVML was silent) stays too.

    Once its workers are known, a new process that comes without another worker is a helper, whatever it looks like: what a server
    forks to run a program has the server's own command line for a moment, and its end would be taken for a crash.
    """
    before = {rank.pid: rank for rank in known.ranks}
    if not _core(known) <= _core(found):
        return known
    if any(rank.pid in before and rank.start_ticks != before[rank.pid].start_ticks for rank in found.ranks):
        return known
    new = [rank for rank in found.ranks if rank.pid not in before]
    if complete(known) and (new or len(found.ranks) < len(before)) and not (new and all(_has_card(rank) for rank in new)):
        return known
    if before and not new:
        found = _without(found, _core(found) - _core(known))
    ranks = tuple(_kept(before[rank.pid], rank) if rank.pid in before else rank for rank in found.ranks)
    return replace(
        found,
        ranks=ranks,
        base_url=known.base_url or found.base_url,
        model=known.model or found.model,
        log_path=known.log_path or found.log_path,
        agent_folder=known.agent_folder or found.agent_folder,
        owned=known.owned,
        changes=known.changes,
    )


def _without(found: ServerTarget, helpers: set[int]) -> ServerTarget:
    """The same, with these processes as what they are."""
    tree = {pid: "other" if pid in helpers else role for pid, role in found.tree.items()}
    return replace(found, tree=tree, engine_pids=tuple(pid for pid in found.engine_pids if pid not in helpers))


def _kept(before: Rank, now: Rank) -> Rank:
    card = now if _has_card(now) else before
    number = now.rank if now.rank is not None else before.rank
    return replace(now, rank=number, gpu_uuid=card.gpu_uuid, gpu_index=card.gpu_index)


def workers_text(target: ServerTarget) -> str:
    """How many workers and on which cards: "2 worker(s) on GPU 0, 1"."""
    cards = sorted({rank.gpu_index for rank in target.ranks if rank.gpu_index is not None})
    count = f"{len(target.ranks)} worker(s)"
    if not target.ranks:
        return f"{count}; they are looked for as it starts" if target.api_pid is not None else count
    return f"{count} on GPU {', '.join(map(str, cards))}" if cards else f"{count}, on which GPU is not known"


class Renewal:
    """Looks ``target`` up with ``find`` when that is due. ``look`` belongs to one thread; ``told`` may be called from any."""

    def __init__(self, target: ServerTarget, find: Callable[[ServerTarget], ServerTarget], *, clock: Clock = SYSTEM) -> None:
        self._find, self._clock = find, clock
        self._lock = threading.Lock()
        self._target = target
        self._state = ""
        self._wait = SOON_S
        self._due = clock.monotonic() + (LATE_S if complete(target) else SOON_S)
        self._least = clock.monotonic() + LEAST_S

    def told(self, state: str) -> None:
        """How the server stands. At a change it is looked up at once: it became ready, or a verdict will rest on its cards. Not
        where it hangs or has ended: what is known then is what the evidence is of."""
        with self._lock:
            if state != self._state and state in ("healthy", "suspect"):
                self._wait, self._due = SOON_S, min(self._due, self._clock.monotonic())
            self._state = state

    def look(self) -> ServerTarget:
        """The server as it is known now."""
        now = self._clock.monotonic()
        with self._lock:
            if self._state in _EVIDENCE or now < max(self._due, self._least):
                return self._target
            # Before the question: a change that is told meanwhile is not lost.
            self._due = float("inf")
        try:
            found = self._find(self._target)
            with self._lock:
                # It may have been called hung while it was looked up.
                if self._state not in _EVIDENCE:
                    self._target = renewed(self._target, found)
        finally:
            done = self._clock.monotonic()
            with self._lock:
                self._due = min(self._due, done + (LATE_S if complete(self._target) else self._wait))
                self._wait = min(1.5 * self._wait, LATE_S)
                self._least = done + max(LEAST_S, _SHARE * (done - now))
        return self._target
