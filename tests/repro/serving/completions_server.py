"""A completions server for tests of the client: an engine that steps, and every trouble a client can meet. Never a result.

One step gives each running request one to ``mtp`` + 1 tokens; who runs in each step is kept in ``truth``, so that a test can
compare what the load says about its windows with what was so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from aiohttp import web

from dsv4_repro.clock import SYSTEM
from dsv4_repro.kernels.graphs import decode_graph_sizes, pad_to_graph
from dsv4_repro.repro.recorder import RecordedStep
from dsv4_repro.repro.serving.loop_thread import LoopThread
from dsv4_repro.repro.serving.records import EngineSample


@dataclass(eq=False)
class Running:
    """A request in the engine: its output is a function of its prompt."""

    rng: random.Random
    max_tokens: int
    tokens: int = 0
    queue: asyncio.Queue[list[int]] = field(default_factory=asyncio.Queue)


@dataclass
class CompletionsServer:
    """Its troubles, and ``wedge_at``: with so many running, once ``wedge_after`` did, it stops for ever.

    ``trouble``: "", "429", "503", "500", "404", "reset", "stall", "slow-headers", "garbage", "not-json", "endless-line",
    "endless", "error-event", "abort", "gzip", "too-many-tokens", "backwards", "cut".
    """

    trouble: str = ""
    mtp: int = 1
    acceptance: float = 0.7
    step_s: float = 0.004
    wedge_at: int | None = None
    wedge_after: int = 0
    token_ids: bool = True
    seed: int = 0
    others: int = 0
    truth: list[int] = field(default_factory=list)
    seen_headers: list[dict[str, str]] = field(default_factory=list)
    disconnects: int = 0
    url: str = ""
    wedged: bool = False
    _running: list[Running] = field(default_factory=list)
    _finished: int = 0
    _generated: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _ready: threading.Event = field(default_factory=threading.Event)

    # -- the engine ---------------------------------------------------------------------------------------------------------------

    async def _engine(self) -> None:
        accept = random.Random(self.seed)
        while True:
            await asyncio.sleep(self.step_s)
            batch = list(self._running)
            if not batch or self.wedged:
                continue
            self.truth.append(len(batch))
            if len(batch) == self.wedge_at and max(self.truth) >= self.wedge_after:
                self.wedged = True
                continue
            for one in batch:
                count = 1 + sum(accept.random() < self.acceptance for _ in range(self.mtp))
                count = min(count, one.max_tokens - one.tokens)
                one.queue.put_nowait([int(one.rng.random() * 4096) for _ in range(count)])
                one.tokens += count
                self._generated += count
                if one.tokens >= one.max_tokens:
                    self._running.remove(one)
                    self._finished += 1

    def counters(self) -> EngineSample:
        """What its metrics would say."""
        return EngineSample(
            at=SYSTEM.monotonic(),
            running=len(self._running) + self.others,
            waiting=0,
            generation_tokens=float(self._generated),
            iterations=float(len(self.truth) - self.wedged),
            finished=float(self._finished),
            preemptions=0.0,
        )

    def ring_steps(self) -> list[RecordedStep]:
        """What a flight recorder's ring would hold."""
        sizes = decode_graph_sizes(16, self.mtp + 1)
        found = []
        for number, live in enumerate(list(self.truth), start=1):
            rows = live * (self.mtp + 1)
            padded = pad_to_graph(rows, sizes) or rows
            slots = padded // (self.mtp + 1)
            found.append(
                RecordedStep(
                    number=number, runner="v1", graph_mode="full", native=True, requests=live, tokens=rows, padded_requests=slots,
                    padded_tokens=padded, decode_min=0, decode_max=2, decode_slots=slots, decode_zero=slots - live, next_n=2,
                    begin_ns=1, launch_ns=2, record_ns=3, complete_ns=None, wait_ns=None, output_ns=None, guarded=False,
                    event_dropped=False,
                )
            )  # fmt: skip
        return found

    # -- HTTP ---------------------------------------------------------------------------------------------------------------------

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.seen_headers.append({name.lower(): value for name, value in request.headers.items()})
        body = await request.json()
        if self.trouble in ("429", "503", "500", "404"):
            key = request.headers.get("Authorization", "")
            return web.json_response({"error": {"message": f"no, {key}"}}, status=int(self.trouble))
        if self.trouble == "slow-headers":
            await asyncio.sleep(30)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if self.trouble == "gzip":
            response.headers["Content-Encoding"] = "gzip"
        await response.prepare(request)
        if self.trouble in ("", "reset", "cut", "stall"):
            await self._stream(request, response, body)
        else:
            async for piece in _troubled(self.trouble):
                await response.write(piece)
        return response

    async def _stream(self, request: web.Request, response: web.StreamResponse, body: dict[str, object]) -> None:
        one = Running(random.Random(json.dumps(body["prompt"])), int(str(body["max_tokens"])))
        self._running.append(one)
        sent = 0
        try:
            while sent < one.max_tokens:
                ids = await one.queue.get()
                sent += len(ids)
                choice: dict[str, object] = {
                    "index": 0,
                    "text": "".join(chr(97 + each % 26) for each in ids),
                    "finish_reason": None,
                }
                if self.token_ids:
                    choice["token_ids"] = ids
                if sent >= one.max_tokens:
                    choice["finish_reason"] = "length"
                usage = {"prompt_tokens": len(str(body["prompt"])), "completion_tokens": sent}
                await response.write(f"data: {json.dumps({'choices': [choice], 'usage': usage})}\n\n".encode())
                if sent >= 4 and self.trouble == "reset" and request.transport is not None:
                    request.transport.abort()
                    return
                if sent >= 4 and self.trouble == "cut":
                    return
                if sent >= 4 and self.trouble == "stall":
                    await asyncio.sleep(3600)
            await response.write(b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n' % sent)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnects += 1
            raise
        finally:
            if one in self._running:
                self._running.remove(one)

    async def main(self) -> None:
        """Serve until stopped."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        self._ready.set()
        try:
            await self._engine()
        finally:
            await runner.cleanup()


async def _troubled(trouble: str) -> AsyncIterator[bytes]:
    chunk = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}], "usage": {"completion_tokens": %d}}\n\n'
    if trouble == "garbage":
        while True:
            yield b"<html>no</html>\n" * 64
            await asyncio.sleep(0)
    elif trouble == "not-json":
        yield b"data: " + b"[" * 100_000 + b"\n\n"
    elif trouble == "endless-line":
        while True:
            yield b"data: " + b"a" * 65536
            await asyncio.sleep(0)
    elif trouble == "endless":
        while True:
            yield b": keep-alive\n" * 5000
            await asyncio.sleep(0)
    elif trouble == "error-event":
        yield chunk % 1
        yield b'data: {"error": {"message": "EngineCore encountered an issue.", "code": 500}}\n\ndata: [DONE]\n\n'
    elif trouble == "abort":
        yield chunk.replace(b"null", b'"abort"') % 1 + b"data: [DONE]\n\n"
    elif trouble == "too-many-tokens":
        yield chunk % (1 << 40)
    elif trouble == "backwards":
        yield chunk % 2
        yield chunk % 1
    elif trouble == "gzip":
        yield b"\x1f\x8b" + b"\0" * 100


@contextlib.contextmanager
def serving(server: CompletionsServer) -> Iterator[CompletionsServer]:
    """The server in a thread of its own, ended on leaving."""
    thread = LoopThread("test completions server", server.main)
    thread.start()
    assert server._ready.wait(10)
    try:
        yield server
    finally:
        assert thread.stop(5.0)
        if thread.error is not None:
            raise thread.error
