"""One source of figures, looked at steadily by a thread of its own: a look that is stuck blocks no other source."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ...clock import Clock
from ...errors import ReproError
from .records import Blind

__all__ = ["FAILURES", "Source"]

#: Errors of a source that make it blind for now; it is asked again.
FAILURES = (ReproError, OSError, ValueError, RuntimeError, ArithmeticError, LookupError, AttributeError, TypeError)


class Source:
    """One source in a thread of its own. ``make``: sets it up and gives its look function; a failure of it or of a look is kept as
    ``why`` and tried again. ``stale_s``: an answer older than this counts no more.
    """

    def __init__(
        self, name: str, make: Callable[[], Callable[[], Any]], *, period_s: float, stale_s: float, retry_s: float, clock: Clock
    ) -> None:
        self.name = name
        self._make, self._period_s, self._stale_s, self._retry_s, self._clock = make, period_s, stale_s, retry_s, clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._value: Any = None
        self._at: float | None = None
        self._why = ""
        self._began = clock.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"dsv4-repro-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def every(self, period_s: float) -> None:
        """Look so often from the next look on."""
        self._period_s = period_s

    def stop(self) -> None:
        """Ask it to end; it is not waited for."""
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended within that time; a look that is stuck has not."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def latest(self) -> tuple[Any, Blind | None]:
        """The newest answer, or None and why there is none."""
        now = self._clock.monotonic()
        with self._lock:
            value, at, why = self._value, self._at, self._why
        if at is not None and now - at <= self._stale_s:
            return value, None
        if why:
            return None, Blind(self.name, why)
        silent = now - (at if at is not None else self._began)
        if at is None and silent <= self._stale_s:
            return None, None
        return None, Blind(self.name, f"has not answered for {silent:.0f} s: its reader is stuck, the others go on")

    def _run(self) -> None:
        look: Callable[[], Any] | None = None
        while not self._stop.is_set():
            wait = self._period_s
            try:
                if look is None:
                    look = self._make()
                value = look()
            except FAILURES as error:
                with self._lock:
                    self._why = (str(error) or type(error).__name__)[:300]
                    self._value = self._at = None
                wait = self._retry_s if look is None else max(self._period_s, 1.0)
            else:
                with self._lock:
                    self._value, self._at, self._why = value, self._clock.monotonic(), ""
            self._stop.wait(wait)
