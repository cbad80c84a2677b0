"""Ctrl-C, SIGTERM and SIGHUP of a run that owns a server: each ends it, none is lost, and none breaks an import.

Python raises KeyboardInterrupt between any two instructions. Inside the import system that can leave a lock held (seen: the
clean-up of a module lock, interrupted between acquiring and its ``try``; the observer's threads then never import anything again),
and inside a callback it is printed and lost. So an interrupt waits while an import is under way, and one that was lost is raised
again by ``check``, which the loops call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["Interrupts", "interrupts_held"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S = 0.05
_DEEPEST = 2000


def _importing(frame: FrameType | None) -> bool:
    """Whether the import system is somewhere on the stack."""
    for _ in range(_DEEPEST):
        if frame is None:
            return False
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class Interrupts:
    """Installed in the main thread only; elsewhere nothing happens."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._came = False

    def install(self) -> None:
        """Take the signals over. One that is ignored (nohup's SIGHUP) or has somebody's handler stays as it is."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = before
                signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give them back."""
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before)

    def check(self) -> None:
        """Raise an interrupt that came and got lost."""
        if self._came:
            self._came = False
            raise KeyboardInterrupt

    def raised(self) -> None:
        """The interrupt has arrived where it is handled: it is not raised again."""
        self._came = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if _importing(frame):
            timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()
            return
        self._came = True
        raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Signals wait until the block is over: between the fork and the return of Popen nobody would know the new process. Handlers
    are held, no signal mask: the child would inherit that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[signal.Signals, Callable[..., Any]] = {}
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            before[number] = handler
            signal.signal(number, lambda which, _frame: came.append(which))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt
