"""Completions for those that are not the load: one to see whether a server answers, and fillers that change its batch.

``complete_once`` is the readiness check and the canary. ``FillerRequests`` are for a wedged server: it accepts them over HTTP, they
wait in its queue, and when the GPU is freed they join the batch and move it off the padded size (a release without a filler
frees one launch only). Neither raises for anything that a server or a network can do.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import Literal

from ...clock import SYSTEM, Clock
from .completion_stream import (
    FAULTS,
    CompletionOutcome,
    CompletionRequest,
    CompletionStream,
    FaultKind,
    open_session,
)
from .loop_thread import LoopThread

__all__ = [
    "FAULTS",
    "TOKEN_IDS",
    "CompletionOutcome",
    "CompletionRequest",
    "FaultKind",
    "FillerRequests",
    "complete_once",
    "token_prompt",
]

#: Token ids that prompts are drawn from, low and one past the high: ordinary tokens of every vocabulary from 4096 on.
TOKEN_IDS = (100, 4000)
#: Most requests of one FillerRequests.
MAX_FILLERS = 4096
_STOP_S = 5.0


def token_prompt(length: int, seed: int, token_ids: tuple[int, int] = TOKEN_IDS) -> tuple[int, ...]:
    """``length`` token ids, the same for the same seed on every Python version."""
    rng = random.Random(seed)
    low, high = token_ids
    return tuple(low + int(rng.random() * (high - low)) for _ in range(length))


def complete_once(
    base_url: str,
    model: str,
    *,
    prompt_tokens: int = 8,
    max_tokens: int = 4,
    timeout_s: float = 10.0,
    clock: Clock = SYSTEM,
    headers: Mapping[str, str] | None = None,
    seed: int = 0,
) -> CompletionOutcome:
    """One completion of ``max_tokens`` tokens after a prompt of ``prompt_tokens`` drawn ids; blocks at most ``timeout_s`` + 2 s.

    Raises nothing: refused, reset, 429, 503, slow and the rest are the outcome's ``kind``. Safe to call from any thread, also from
    one with a running loop.
    """
    request = CompletionRequest(
        prompt=token_prompt(prompt_tokens, seed),
        max_tokens=max_tokens,
        min_tokens=max_tokens,
        request_id=f"dsv4-repro-canary-{secrets.token_hex(4)}",
    )
    stream = CompletionStream(base_url.rstrip("/"), model, request, timeout_s, clock, headers or {})

    async def main() -> None:
        async with open_session(connect_s=timeout_s) as session:
            await stream.run(session)

    started = clock.monotonic()
    thread = LoopThread("dsv4-repro-completion", main)
    thread.start()
    ended = thread.join(timeout_s + 1.0) or thread.stop(1.0)
    if stream.outcome is not None:
        return stream.outcome
    why = f"{type(thread.error).__name__}: {thread.error}" if thread.error else "no answer, and its name could not be resolved"
    kind: FaultKind = "unreachable" if ended else "slow"
    return CompletionOutcome(kind=kind, sent_at=started, ended_at=clock.monotonic(), detail=why[:500])


class FillerRequests:
    """``count`` streamed completions in the background, from ``start`` (or ``with``) to ``stop``.

    Send them before releasing a wedged kernel; see that they wait (``accepted``; ``vllm:num_requests_waiting`` may stand still),
    release, and end them when the server has recovered: leaving the ``with`` cancels those still open, within 5 s.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        count: int,
        *,
        prompt_tokens: int = 16,
        max_tokens: int = 512,
        timeout_s: float = 600.0,
        clock: Clock = SYSTEM,
        headers: Mapping[str, str] | None = None,
        seed: int = 1,
    ) -> None:
        if not 0 <= count <= MAX_FILLERS:
            raise ValueError(f"{count} fillers: 0 to {MAX_FILLERS}")
        self._clock = clock
        nonce = secrets.token_hex(4)
        self._streams = tuple(
            CompletionStream(
                base_url.rstrip("/"),
                model,
                CompletionRequest(
                    prompt=token_prompt(prompt_tokens, seed * 1_000_003 + number),
                    max_tokens=max_tokens,
                    min_tokens=max_tokens,
                    request_id=f"dsv4-repro-filler-{nonce}-{number}",
                ),
                timeout_s,
                clock,
                headers or {},
            )
            for number in range(count)
        )
        self._thread = LoopThread("dsv4-repro-fillers", self._main)
        self._started = False

    async def _main(self) -> None:
        async with open_session() as session, asyncio.TaskGroup() as group:
            for stream in self._streams:
                group.create_task(stream.run(session))

    def start(self) -> FillerRequests:
        """Send them all."""
        if not self._started:
            self._started = True
            self._thread.start()
        return self

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._streams)

    @property
    def accepted(self) -> int:
        """Those that the server answered with 200: it has them, computing or waiting. A wedged vLLM accepts too."""
        return sum(stream.accepted_at is not None for stream in self._streams)

    @property
    def open(self) -> int:
        """Those accepted and not ended."""
        return sum(stream.accepted_at is not None and stream.outcome is None for stream in self._streams)

    @property
    def tokens(self) -> int:
        """Tokens received by all of them: more than 0 shows that the server computes again."""
        return sum(stream.tokens for stream in self._streams)

    @property
    def outcomes(self) -> tuple[CompletionOutcome, ...]:
        """Of those that have ended."""
        return tuple(stream.outcome for stream in self._streams if stream.outcome is not None)

    @property
    def faults(self) -> dict[FaultKind, int]:
        """Client faults by kind."""
        kinds = [outcome.kind for outcome in self.outcomes]
        return {kind: kinds.count(kind) for kind in FAULTS if kind in kinds}

    def wait_accepted(self, timeout_s: float, *, count: int | None = None) -> bool:
        """Wait until ``count`` (all by default) are accepted, or have ended, or the time is over; whether they are accepted."""
        wanted = self.count if count is None else count
        end = self._clock.monotonic() + timeout_s
        while self.accepted < wanted and len(self.outcomes) < self.count and self._clock.monotonic() < end:
            self._clock.sleep(0.02)
        return self.accepted >= wanted

    def stop(self, timeout_s: float = _STOP_S) -> bool:
        """Cancel those still open; whether the thread has ended within ``timeout_s``. Safe to call again."""
        return self._thread.stop(timeout_s)

    def __enter__(self) -> FillerRequests:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.stop()
        return False
