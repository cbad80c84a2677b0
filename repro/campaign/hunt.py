"""The loop of a campaign: blocks out, results in, every trial stored as it ends, until the budget is used up or nothing is left."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ...clock import SYSTEM, Clock
from .cells import TrialResult
from .plan import HuntPlan
from .pools import Message, Pool
from .sampler import Block, Sampler
from .store import CampaignStore

__all__ = ["Hunt", "Progress"]

#: So often a trial is given to another worker after its own was lost; then it counts as "other".
MOST_LOSSES = 2
_POLL_S = 0.25
_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Progress:
    """For the screen: ``rate`` trials a minute over the last minute, ``left_s`` until the first budget ends (None: not known)."""

    trials: int
    rate: float
    hangs: dict[str, int]
    doing: list[str]
    left_s: float | None
    elapsed_s: float
    lost: int


@dataclass(slots=True)
class Hunt:
    """One invocation on one store. ``before_s``: seconds that earlier invocations used of the budget."""

    plan: HuntPlan
    store: CampaignStore
    pool: Pool
    sampler: Sampler
    watch: Callable[[Progress], None] = lambda _progress: None
    clock: Clock = SYSTEM
    workers: int = 1
    before_s: float = 0.0
    _lost: Counter[int] = field(default_factory=Counter)
    _retry: deque[Block] = field(default_factory=deque)
    _recent: deque[float] = field(default_factory=deque)
    _hangs: Counter[str] = field(default_factory=Counter)
    _flying: int = 0
    _out: int = 0
    _began: float = 0.0
    _trials: int = 0
    _losses: int = 0

    def run(self) -> str:
        """Hunt; why it ended: "trials", "minutes", "gpu_hours", "hangs" or "nothing left"."""
        self._began = self.clock.monotonic()
        summary = self.store.summary()
        self._trials = summary.trials
        self._hangs = Counter({hang.identity: hang.hangs for hang in summary.hangs})
        high, missing = self.store.done_numbers()
        batch = self.sampler.batch
        # Gaps below the highest stored number, and the rest of its block, were in flight when the hunt was killed.
        gaps: dict[int, list[int]] = {}
        for number in [*missing, *range(high, -(-high // batch) * batch)]:
            gaps.setdefault(number // batch, []).append(number)
        for block, numbers in sorted(gaps.items()):
            found = self.sampler.block(block, numbers)
            if found.numbers:
                self._retry.append(found)
        following = -(-high // batch)
        why = ""
        while True:
            why = why or self._over()
            while not why and self.pool.free() > 0 and self._room() > 0:
                given = self._next(following)
                if given is None:
                    break
                following = max(following, given.number + 1)
                given = given.without(given.numbers[self._room() :])
                self._flying += 1
                self._out += len(given.numbers)
                self.pool.submit(given)
            if self._flying == 0:
                return why or "nothing left"
            for message in self.pool.poll(_POLL_S):
                self._take(message)
            self.watch(self.progress())

    def _next(self, following: int) -> Block | None:
        if self._retry:
            return self._retry.popleft()
        blocks = self.sampler.blocks
        if blocks is not None and following >= blocks:
            return None
        return self.sampler.block(following)

    def _room(self) -> int:
        """Trials that may still be given out: the last block is cut, so that not more are made than were asked for."""
        most = self.plan.budget.trials
        return _UNLIMITED if most is None else most - self._trials - self._out

    # -- what workers say ----------------------------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        block = message.block
        if message.kind == "event":
            self.store.event("worker", worker=message.worker, said=message.why)
        elif message.kind == "result" and block is not None and message.number is not None and message.result is not None:
            self._out -= 1
            self._store(block, message.number, message.result, message.worker)
        elif message.kind == "done":
            self._flying -= 1
        elif message.kind == "lost":
            self._losses += 1
            numbers = block.numbers if block is not None else ()
            self.store.event("worker lost", worker=message.worker, why=message.why, trials=list(numbers[:100]))
            if block is None:
                return
            self._flying -= 1
            self._out -= len(block.numbers)
            self._give_again(block, message)

    def _give_again(self, block: Block, message: Message) -> None:
        """The trial in flight (the first that was not reported) may be what killed the worker; the others are innocent."""
        if not block.numbers:
            return
        first = block.numbers[0]
        self._lost[first] += 1
        if self._lost[first] > MOST_LOSSES:
            why = f"its worker was lost {self._lost[first]} times, last: {message.why}"
            self._store(block, first, TrialResult("other", block.seeds[0], why=why), message.worker)
            block = block.without([first])
        if block.numbers:
            self._retry.append(block)

    def _store(self, block: Block, number: int, result: TrialResult, worker: str) -> None:
        if not self.store.add(number, block.cell_number, block.cell.factors, result, worker):
            return
        self._trials += 1
        self._recent.append(self.clock.monotonic())
        if result.kind == "hang":
            self._hangs[result.identity or "not identified"] += 1

    # -- budget --------------------------------------------------------------------------------------------------------------

    @property
    def elapsed_s(self) -> float:
        """Seconds that this and earlier invocations took; monotonic, so that a clock that is set does not matter."""
        return self.before_s + self.clock.monotonic() - self._began

    def _over(self) -> Literal["", "trials", "minutes", "gpu_hours", "hangs"]:
        budget = self.plan.budget
        if budget.trials is not None and self._trials >= budget.trials:
            return "trials"
        if budget.minutes is not None and self.elapsed_s >= 60 * budget.minutes:
            return "minutes"
        if budget.gpu_hours is not None and self.plan.on == "gpu" and self.elapsed_s * self.workers >= 3600 * budget.gpu_hours:
            return "gpu_hours"
        if budget.hangs is not None and len(self._hangs) >= budget.hangs:
            return "hangs"
        return ""

    def progress(self) -> Progress:
        """For the screen."""
        now = self.clock.monotonic()
        while self._recent and now - self._recent[0] > 60.0:
            self._recent.popleft()
        span = min(max(now - self._began, 1e-6), 60.0)
        rate = 60.0 * len(self._recent) / span
        budget, ends = self.plan.budget, []
        if budget.minutes is not None:
            ends.append(60 * budget.minutes - self.elapsed_s)
        if budget.gpu_hours is not None and self.plan.on == "gpu":
            ends.append(3600 * budget.gpu_hours / self.workers - self.elapsed_s)
        total = budget.trials
        if self.sampler.blocks is not None:
            whole = self.plan.cells * self.plan.search.repeat
            total = whole if total is None else min(total, whole)
        if total is not None and rate > 0:
            ends.append(60 * (total - self._trials) / rate)
        left = max(min(ends), 0.0) if ends else None
        return Progress(self._trials, rate, dict(self._hangs), self.pool.doing(), left, self.elapsed_s, self._losses)
