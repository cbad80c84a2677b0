"""What the load learns of the engine while it runs: readings of its counters and new steps of a ring, from a thread of their own.

A source that hangs or fails must not hold up the load, and what the ring held before the load is not the load's doing.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from ...clock import Clock
from ..recorder import RecordedStep
from .records import EngineSample

__all__ = ["COUNTERS_S", "RING_S", "EngineLearner"]

#: Seconds between readings of the counters, and of the ring.
COUNTERS_S, RING_S = 0.25, 1.0


class EngineLearner:
    """Reads the engine's counters and a worker's ring in a thread of its own, and keeps what is new until it is taken."""

    def __init__(
        self,
        counters: Callable[[], EngineSample | None] | None,
        ring_steps: Callable[[], Sequence[RecordedStep]] | None,
        clock: Clock,
    ) -> None:
        self._counters = counters
        self._ring_steps = ring_steps
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: deque[EngineSample] = deque(maxlen=64)
        self._steps: deque[RecordedStep] = deque(maxlen=65536)
        self._newest: int | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._rounds = 0
        self._thread = threading.Thread(target=self._run, name="dsv4-repro-load-counters", daemon=True)
        self.error = ""

    def start(self) -> None:
        """Begin; what the ring holds now is left out."""
        if self._counters is None and self._ring_steps is None:
            return
        if self._ring_steps is not None:  # what the ring holds now was before the load
            self._look_at_ring()
            with self._lock:
                self._steps.clear()
                self._newest = self._newest or 0
        self._thread.start()

    def stop(self) -> None:
        """End soon; safe to call again."""
        self._stop.set()
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread at most so long; a source that does not come back is left to its own deadline."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def tell(self, engine: EngineSample | None, steps: Sequence[RecordedStep]) -> None:
        """Add a reading and steps, from any thread."""
        with self._lock:
            if engine is not None:
                self._samples.append(engine)
            launched = max((step.number for step in steps if step.launch_ns is not None), default=0)
            for step in sorted(steps, key=lambda one: one.number):  # what is being begun has no sizes yet: next time
                if step.number <= launched and (self._newest is None or step.number > self._newest):
                    self._newest = step.number
                    self._steps.append(step)

    def take(self) -> tuple[list[EngineSample], list[RecordedStep]]:
        """What is new since the last call."""
        with self._lock:
            samples, steps = list(self._samples), list(self._steps)
            self._samples.clear()
            self._steps.clear()
        return samples, steps

    async def look_again(self, timeout_s: float) -> None:
        """Wait for one more reading of everything, at most so long."""
        if not self._thread.is_alive():
            return
        wanted = self._rounds + 1
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._rounds < wanted and self._thread.is_alive():
                    await asyncio.sleep(0.02)

    def _run(self) -> None:
        ring_at = self._clock.monotonic()
        while not self._stop.is_set():
            asked = self._wake.is_set()
            self._wake.clear()
            if self._counters is not None:
                self._guarded("the engine's counters", lambda: self.tell(self._counters() if self._counters else None, ()))
            now = self._clock.monotonic()
            if self._ring_steps is not None and (asked or now - ring_at >= RING_S):
                ring_at = now
                self._look_at_ring()
            if asked:
                self._rounds += 1
            self._wake.wait(COUNTERS_S)

    def _look_at_ring(self) -> None:
        self._guarded("the flight recorder", lambda: self.tell(None, self._ring_steps() if self._ring_steps else ()))

    def _guarded(self, what: str, read: Callable[[], None]) -> None:
        """A source that fails is said once and asked again: the load goes on."""
        try:
            read()
        except Exception as error:  # whatever a source does, the windows are then not seen, and the load goes on
            self.error = self.error or f"{what}: {str(error)[:200] or type(error).__name__}"
