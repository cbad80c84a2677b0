"""The canary: a tiny completion of our own every so often, so that a stand-still shows in a server that nobody asks anything.

The only thing in a watch that a server has to work for, and off unless asked for. What waits is a sign that the server stands;
what was answered shows that it moves; what went wrong on the way (no key, no such model, refused, reset, 429) says nothing of the
engine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ...clock import SYSTEM, Clock
from ...errors import ReproError

__all__ = ["CANARY_PROMPT", "CANARY_TOKENS", "Canary", "CanaryAnswer", "CanarySays", "completion_canary"]

#: Tokens of a canary: its prompt, and what is asked for. One token is one prefill: it is in the batch for a single step.
CANARY_PROMPT, CANARY_TOKENS = 8, 1
#: The name of the model is asked for once, in so many seconds.
_MODEL_S = 5.0


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """What came of one: answered; silent (no answer within its deadline); failed (not a matter of the engine), with ``why``."""

    kind: Literal["answered", "silent", "failed"]
    why: str = ""


@dataclass(frozen=True, slots=True)
class CanarySays:
    """How the canary stands: seconds since the last answer, seconds that the open one has waited (a silent one goes on to count),
    and why the newest one failed."""

    age_s: float | None = None
    waiting_s: float | None = None
    error: str = ""


class Canary:
    """Sends one every ``period_s`` seconds from a thread of its own, the next after the one before has ended: never two at once.

    ``ask(timeout_s)`` sends one and says what came of it; it may wait as long as it likes.
    """

    def __init__(
        self, ask: Callable[[float], CanaryAnswer], *, period_s: float = 30.0, timeout_s: float = 600.0, clock: Clock = SYSTEM
    ) -> None:
        self._ask, self._period_s, self._timeout_s, self._clock = ask, period_s, timeout_s, clock
        self._lock = threading.Lock()
        self._answered: float | None = None
        self._sent: float | None = None
        self._error = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsv4-repro-canary", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No more of them; the open one is not waited for."""
        self._stop.set()

    def says(self) -> CanarySays:
        """How it stands now."""
        now = self._clock.monotonic()
        with self._lock:
            return CanarySays(
                None if self._answered is None else now - self._answered,
                None if self._sent is None else now - self._sent,
                self._error,
            )

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                # After a silent one the wait goes on: that the deadline was ours changes nothing at the server.
                self._sent = self._clock.monotonic() if self._sent is None else self._sent
            try:
                answer = self._ask(self._timeout_s)
            except Exception as error:  # whatever a client raises: nothing is known of the engine
                answer = CanaryAnswer("failed", f"{type(error).__name__}: {error}"[:300])
            with self._lock:
                self._error = answer.why if answer.kind == "failed" else ""
                if answer.kind != "silent":
                    self._sent = None
                if answer.kind == "answered":
                    self._answered = self._clock.monotonic()
            self._stop.wait(self._period_s)


def completion_canary(
    base_url: str, *, clock: Clock = SYSTEM, environ: Mapping[str, str] = os.environ
) -> Callable[[float], CanaryAnswer]:
    """The ``ask`` of a server at this URL: its first model, its key from VLLM_API_KEY as everywhere here."""
    key = environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    model = ""

    def ask(timeout_s: float) -> CanaryAnswer:
        nonlocal model
        # The HTTP client takes memory for good: only a watch that sends pays it.
        from .completions import complete_once
        from .served_model import served_model

        try:
            model = model or served_model(base_url, headers, timeout_s=_MODEL_S)
        except ReproError as error:
            return CanaryAnswer("failed", str(error)[:300])
        outcome = complete_once(
            base_url, model, prompt_tokens=CANARY_PROMPT, max_tokens=CANARY_TOKENS, timeout_s=timeout_s, clock=clock,
            headers=headers,
        )  # fmt: skip
        if outcome.kind == "completed":
            return CanaryAnswer("answered")
        if outcome.kind == "slow":
            return CanaryAnswer("silent")
        model = ""  # it may be another one now
        return CanaryAnswer("failed", f"{outcome.kind}{': ' + outcome.detail if outcome.detail else ''}"[:300])

    return ask
