"""Questions that may not come back, each asked from a thread of its own with its own deadline.

A driver in trouble keeps an NVML call, a dead mount a read; whoever looks at a wedged machine must say so and go on. The threads
are daemons: one that never returns does not keep the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ...clock import SYSTEM, Clock, Deadline
from ...errors import ReproError
from ...forensics.device_state import Unread

__all__ = ["Question"]

_Answer = TypeVar("_Answer")


class Question(Generic[_Answer]):
    """``ask()`` is called at once, in a thread. ``seconds``: from now, how long its answer is waited for."""

    def __init__(self, what: str, ask: Callable[[], _Answer], seconds: float, clock: Clock = SYSTEM) -> None:
        self.what = what
        self._ask = ask
        self._deadline = Deadline(seconds, clock)
        self._done = threading.Event()
        self._answer: _Answer | None = None
        self._unread: Unread | None = None
        #: The error of ours that was its answer, for a caller that wants to raise it.
        self.error: ReproError | None = None
        threading.Thread(target=self._run, name=f"dsv4-repro-ask-{what}"[:60], daemon=True).start()

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except ReproError as error:
            self.error = error
            self._unread = Unread(self.what, str(error), error.help_text)
        except Exception as error:
            self._unread = Unread(self.what, f"{type(error).__name__}: {error}"[:300], "Please report this.")
        finally:
            self._done.set()

    def answer(self, within_s: float | None = None) -> tuple[_Answer | None, Unread | None]:
        """The answer, or None and why there is none. Waits until its deadline at most, or for ``within_s`` from now."""
        left = self._deadline.remaining() if within_s is None else min(within_s, self._deadline.remaining())
        if not self._done.wait(left) and not self._done.is_set():
            seconds = self._deadline.seconds if within_s is None else within_s
            return None, Unread(self.what, f"no answer within {seconds:g} s", "Whatever answers it is stuck itself.")
        return self._answer, self._unread
