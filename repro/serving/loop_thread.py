"""A thread with an asyncio loop in it that always ends within a deadline, whatever its tasks wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["LoopThread"]

#: Seconds that cancelled tasks have to close their connections before the loop is stopped under them.
CANCEL_S = 1.0


class LoopThread:
    """Runs one coroutine, ``main``, in a thread of its own. ``stop`` cancels it and all its tasks.

    The default executor (name resolution) is not waited for: a resolver that hangs must not hold up the end.
    """

    def __init__(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._main = main
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = threading.Event()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def call(self, what: Callable[[], object]) -> bool:
        """Run ``what`` in the loop soon; False if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            return False
        return True

    @property
    def alive(self) -> bool:
        """The thread is still running."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for ``main`` to end by itself; whether it has."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Cancel everything and wait at most ``timeout_s`` seconds; whether the thread has ended. Safe to call again, and from
        anywhere but the thread itself; a thread that was never started is only closed."""
        self._stopping.set()
        if self._thread.ident is None:
            if not self._loop.is_closed():
                self._loop.close()
            return True
        self.call(self._cancel)
        return self.join(timeout_s)

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            if not self._stopping.is_set():
                self._loop.run_until_complete(self._main())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # kept for the owner: a thread has nobody to raise it to
            self.error = error
        finally:
            self._end()

    def _end(self) -> None:
        try:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_S))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        except Exception as error:
            self.error = self.error or error
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()
