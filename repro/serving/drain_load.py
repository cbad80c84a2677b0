"""The drain load: waves of streamed completions against a server, steered into the windows that the plan aims at.

Runs in a thread and an asyncio loop of its own, so that nothing the server does can hold up the watchdog or the capture. ``start``
and ``stop`` return at once and within a deadline; every way a request can fail is a client fault by kind in ``sample``, no hang.

What the engine does is learnt from ``counters`` (a reading of its metrics) and ``ring_steps`` (the steps that a worker's flight
recorder holds), both called from one more thread, or told by ``learn``. Without either no window is ever reached, only inferred.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...clock import SYSTEM, Clock, utc_stamp
from ..recorder import RecordedStep
from .completion_stream import FAULTS, CompletionStream, StreamEvent, open_session, shown_url
from .engine_learner import RING_S, EngineLearner
from .load_plan import LoadPlan, Wave
from .load_request import LoadRequest
from .loop_thread import LoopThread
from .records import EngineSample, LoadSample
from .request_records import REQUESTS_SCHEMA, RecordWriter
from .steering import STALL_S, Decision, Observation, WaveSteering, WindowCount, count_windows

if TYPE_CHECKING:
    import aiohttp

__all__ = ["PLAN_FILE", "REQUESTS_FILE", "DrainLoad"]

#: Names of the two files in the load's folder.
PLAN_FILE, REQUESTS_FILE = "plan.json", "requests.jsonl"
#: Seconds between looks of the steering (while tokens come, while none come) and between writes of arrivals.
TICK_S, QUIET_S, FLUSH_S = 0.02, 0.1, 0.25
#: Arrivals of one stream that are kept until they are written.
FLUSH_EVENTS = 64
#: After a wave in which every request failed, so long is waited before the next, seconds.
BACKOFF_S = 1.0


class DrainLoad:
    """One load against one server. ``folder`` gets plan.json and requests.jsonl; ``headers`` (an API key) are never written."""

    def __init__(
        self,
        base_url: str,
        model: str,
        plan: LoadPlan,
        *,
        clock: Clock = SYSTEM,
        folder: Path,
        headers: Mapping[str, str] | None = None,
        counters: Callable[[], EngineSample | None] | None = None,
        ring_steps: Callable[[], Sequence[RecordedStep]] | None = None,
    ) -> None:
        self._url = base_url.rstrip("/")
        self._model = model
        self.plan = plan
        self._clock = clock
        self._folder = folder
        self._headers = dict(headers or {})
        self._nonce = secrets.token_hex(4)
        self._writer: RecordWriter | None = None
        self._thread = LoopThread("dsv4-repro-load", self._main)
        self._learner = EngineLearner(counters, ring_steps, clock)
        self._requests: dict[str, LoadRequest] = {}
        self._steering: WaveSteering | None = None
        self._waves: list[tuple[WindowCount, ...]] = []
        self._wave = ""
        self._tokens_before = 0
        self._last_token_at: float | None = None
        self._faults: Counter[str] = Counter()
        self._details: dict[str, str] = {}
        self._done = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Write plan.json and begin. RunStoreError if the folder cannot be written; nothing that the server does is raised."""
        self._writer = RecordWriter(self._folder / REQUESTS_FILE)
        self.plan.write(self._folder / PLAN_FILE)
        self._write(
            "load",
            schema=REQUESTS_SCHEMA,
            at=self._clock.monotonic(),
            wall=utc_stamp(self._clock),
            url=shown_url(self._url),
            model=self._model,
            plan_sha256=self.plan.sha256,
            run=self._nonce,
            headers=sorted(self._headers),
        )
        self._learner.start()
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Cancel what is open and end the thread, in ``timeout_s`` seconds at most; whether it has ended. Safe to call again."""
        self._learner.stop()
        until = self._clock.monotonic() + timeout_s
        ended = self._thread.stop(timeout_s)
        self._learner.join(max(until - self._clock.monotonic(), 0.0))
        if self._writer is not None and ended:
            self._writer.close()
        self._done = self._done or ended
        return ended

    def learn(self, engine: EngineSample | None = None, steps: Sequence[RecordedStep] = ()) -> None:
        """Tell what the engine does, from any thread: a reading of its counters, a ring's steps (known ones are left out)."""
        self._learner.tell(engine, steps)

    def sample(self) -> LoadSample:
        """The client's side at this moment, from any thread."""
        now = self._clock.monotonic()
        with self._lock:
            before, requests = self._tokens_before, list(self._requests.values())
        last = self._last_token_at
        return LoadSample(
            at=now,
            open=sum(one.state == "sent" for one in requests),
            tokens=before + sum(one.stream.tokens for one in requests if one.stream is not None),
            last_token_age_s=None if last is None else max(now - last, 0.0),
            faults=dict(self._faults),
        )

    def live(self) -> int:
        """Requests sent and not ended."""
        return sum(one.state == "sent" for one in list(self._requests.values()))

    def stream_tokens(self) -> dict[str, int]:
        """Tokens received by each request of the current wave that was sent, by id."""
        return {one.spec.id: one.stream.tokens for one in list(self._requests.values()) if one.stream is not None}

    def done(self) -> bool:
        """Every wave has ended, or the load was stopped or failed (``error``)."""
        return self._done or (self._thread.error is not None and not self._thread.alive)

    def windows(self) -> tuple[WindowCount, ...]:
        """Every window aimed at, with how it was reached and in how many waves; the current wave counts so far."""
        with self._lock:
            waves, steering = list(self._waves), self._steering
        return count_windows([*waves, *([steering.windows()] if steering is not None else [])])

    def fault_details(self) -> dict[str, str]:
        """By kind of client fault, what the newest of them said (HTTP status and message, say)."""
        return dict(self._details)

    @property
    def wave(self) -> str:
        """Name of the current wave, empty before the first."""
        return self._wave

    @property
    def error(self) -> str:
        """What of ours went wrong: records that could not be written, a source that could not be read. Empty: nothing."""
        broken = self._thread.error
        parts = [
            f"the load ended: {type(broken).__name__}: {broken}"[:300] if broken is not None else "",
            self._writer.error if self._writer is not None else "",
            self._learner.error,
        ]
        return "; ".join(part for part in parts if part)

    @property
    def records(self) -> Path:
        """requests.jsonl; read it with ``request_records.read_requests``."""
        return self._folder / REQUESTS_FILE

    # -- in the loop ------------------------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        try:
            async with open_session() as session:
                for wave in self.plan.waves:
                    await self._run_wave(session, wave)
        finally:
            self._close_wave()
            if self._writer is not None:
                self._writer.close()
            self._learner.stop()
            self._done = True

    async def _run_wave(self, session: aiohttp.ClientSession, wave: Wave) -> None:
        self._close_wave()
        self._wave = wave.name
        self._steering = WaveSteering(wave, self.plan.mtp)
        self._requests = {
            spec.id: LoadRequest(spec, "due" if spec.hold_back is None else "held") for spec in wave.requests
        }  # fmt: skip
        self._last_token_at = None
        began = self._clock.monotonic()
        flushed = began
        while True:
            now = self._clock.monotonic()
            for one in self._requests.values():
                if one.state == "due" and now - began >= one.spec.start_s:
                    self._send(session, one)
            steps = self._observe(session, now)
            if now - flushed >= FLUSH_S:
                flushed = now
                self._flush_all()
            if now - began > wave.limit_s:
                self._cancel_all("the wave's time is over")
            if steps.release == () and not any(one.state in ("due", "sent") for one in self._requests.values()):
                break
            quiet = self._last_token_at is None or now - self._last_token_at > STALL_S
            await asyncio.sleep(QUIET_S if quiet else TICK_S)
        await self._learner.look_again(RING_S)
        self._observe(session, self._clock.monotonic(), act=False)
        sent = [one.stream.outcome for one in self._requests.values() if one.stream is not None]
        if sent and all(outcome is not None and outcome.fault for outcome in sent):
            await asyncio.sleep(BACKOFF_S)

    def _observe(self, session: aiohttp.ClientSession, now: float, *, act: bool = True) -> Decision:
        """Show the steering what is new, and do what it says."""
        assert self._steering is not None
        views = tuple(one.view for one in self._requests.values())
        samples, steps = self._learner.take()
        for sample in samples[:-1]:
            self._steering.observe(Observation(now, views, self._last_token_at, sample))
        decision = self._steering.observe(
            Observation(now, views, self._last_token_at, samples[-1] if samples else None, steps)
        )  # fmt: skip
        if not act:
            return decision
        new = [name for name in decision.extend if not self._requests[name].extended]
        for name in new:
            self._requests[name].extended = True
        for name in decision.cancel:
            self._cancel(self._requests[name], "; ".join(decision.why) or "planned")
        for name in decision.release:
            self._send(session, self._requests[name])
        if decision.cancel or decision.release or new:
            self._write(
                "steer",
                at=now,
                wave=self._wave,
                cancel=list(decision.cancel),
                release=list(decision.release),
                extend=new,
                why=list(decision.why),
            )
        return decision

    def _send(self, session: aiohttp.ClientSession, one: LoadRequest) -> None:
        spec = one.spec
        asked = spec.completion(self.plan.token_ids, request_id=f"{self._nonce}-{spec.id}")
        stream = CompletionStream(
            self._url,
            self._model,
            asked,
            self.plan.request_timeout_s,
            self._clock,
            self._headers,
            on_event=lambda event: self._arrived(one, event),
        )
        one.stream, one.state = stream, "sent"
        self._write(
            "sent",
            id=spec.id,
            wave=self._wave,
            at=self._clock.monotonic(),
            prompt_sha256=asked.prompt_sha256,
            max_tokens=spec.max_tokens,
        )
        one.task = asyncio.get_running_loop().create_task(self._follow(session, one, stream))

    async def _follow(self, session: aiohttp.ClientSession, one: LoadRequest, stream: CompletionStream) -> None:
        try:
            with suppress(asyncio.CancelledError):  # by us: the outcome says so
                await stream.run(session)
        finally:
            self._ended(one, stream)

    def _arrived(self, one: LoadRequest, event: StreamEvent) -> None:
        self._last_token_at = event.at
        first = one.heard(event)
        if first and one.stream is not None:
            self._write("accepted", id=one.spec.id, at=one.stream.accepted_at)
        if first or len(one.at) >= FLUSH_EVENTS:
            self._flush(one)

    def _ended(self, one: LoadRequest, stream: CompletionStream) -> None:
        if one.state == "ended":
            return
        one.state = "ended"
        self._flush(one)
        outcome = stream.outcome
        kind = outcome.kind if outcome is not None else "cancelled"
        if kind in FAULTS:
            self._faults[kind] += 1
            self._details[kind] = outcome.detail if outcome is not None else ""
        if outcome is not None and outcome.accepted_at is not None and not outcome.tokens:
            self._write("accepted", id=one.spec.id, at=outcome.accepted_at)
        self._write(
            "end",
            id=one.spec.id,
            at=outcome.ended_at if outcome is not None else self._clock.monotonic(),
            kind=kind,
            tokens=stream.tokens,
            counted=outcome.counted if outcome is not None else None,
            finish_reason=stream.finish_reason,
            status=stream.status,
            text_sha256=outcome.text_sha256 if outcome is not None else None,
            detail=(one.why or "the load was stopped") if kind == "cancelled" or outcome is None else outcome.detail,
        )
        stream.forget()

    def _cancel(self, one: LoadRequest, why: str) -> None:
        one.why = one.why or why
        if one.task is not None:
            one.task.cancel()

    def _cancel_all(self, why: str) -> None:
        for one in self._requests.values():
            if one.state == "due":
                one.state = "held"
            elif one.state == "sent" and not one.why:
                self._cancel(one, why)

    def _close_wave(self) -> None:
        """Write how the wave's windows were reached, and add it to the counts."""
        steering = self._steering
        if steering is None:
            return
        for one in self._requests.values():  # stopped in the middle: what has not ended yet ends here in the records
            if one.state == "sent" and one.stream is not None:
                one.why = one.why or "the load was stopped"
                if one.task is not None:
                    one.task.cancel()
                self._ended(one, one.stream)
        counts = steering.windows()
        with self._lock:
            self._tokens_before += sum(one.stream.tokens for one in self._requests.values() if one.stream is not None)
            self._requests = {}
        with self._lock:
            self._waves.append(counts)
            self._steering = None
        held = [{"text": one.text, "how": one.how, "steps": one.steps} for one in counts]
        self._write("window", wave=self._wave, at=self._clock.monotonic(), windows=held)

    def _flush_all(self) -> None:
        for one in self._requests.values():
            self._flush(one)

    def _flush(self, one: LoadRequest) -> None:
        if arrivals := one.take_arrivals():
            self._write("tokens", bounded=True, id=one.spec.id, **arrivals)

    def _write(self, event: str, /, *, bounded: bool = False, **fields: Any) -> None:
        if self._writer is not None:
            self._writer.write(event, bounded=bounded, **fields)
