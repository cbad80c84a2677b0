"""The API process of the stand-in: HTTP as vLLM answers it, its log lines, and the engine child below it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from .exposition import Counts, exposition, huge, malformed
from .process import Log, SimClock
from .settings import LIVE, Settings, from_arguments

__all__ = ["main"]

VERSION = "0.23.0"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Stream:
    """A request under way in this process."""

    prompt: int
    queue: asyncio.Queue[tuple[int, str]] = field(default_factory=asyncio.Queue)
    begun: float = 0.0
    last: float = 0.0


def _word(model: str, prompt: str, place: int) -> str:
    """The token at a place: the same for the same prompt, whatever else was in the batch."""
    return " " + hashlib.blake2s(f"{model}\0{prompt}\0{place}".encode(), digest_size=3).hexdigest()


class Server:
    """All of the API process."""

    def __init__(self, settings: Settings, arguments: argparse.Namespace) -> None:
        self.settings = settings
        self.host, self.port = arguments.host or "0.0.0.0", arguments.port
        self.path = arguments.model
        self.model = (arguments.served_model_name or [arguments.model])[0]
        self.clock = SimClock(settings.speed)
        self.log = Log("APIServer", settings.log)
        self.log.silent = settings.log_silent
        self.counts = Counts()
        self.streams: dict[str, Stream] = {}
        self.started = time.time()
        self.engine: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.dead = ""
        self.status = 0
        self.state: dict[str, Any] = {
            "standin": True, "phase": "starting", "device": "idle", "wedged": False, "live": 0, "step": 0, "workers": {},
            "since": 0.0,
        }  # fmt: skip

    # -- engine --------------------------------------------------------------------------------------------------------------

    async def start_engine(self) -> None:
        """The engine child, and a task that reads what it tells."""
        self.engine = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).resolve().parent), "--engine", json.dumps(self.settings.document()), self.path,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 22,
        )  # fmt: skip
        self.state["engine"] = self.engine.pid
        self.reader = asyncio.create_task(self._read())

    def order(self, **message: Any) -> None:
        """To the engine."""
        if self.engine is not None and self.engine.stdin is not None and not self.dead:
            self.engine.stdin.write((json.dumps(message) + "\n").encode())

    async def _read(self) -> None:
        assert self.engine is not None
        assert self.engine.stdout is not None
        async for line in self.engine.stdout:
            message = json.loads(line)
            getattr(self, f"_on_{message.pop('kind')}")(message)
        code = await self.engine.wait()
        if not self.ready.is_set():
            if not self.ended.is_set():
                self.log.error(
                    "utils.py:1250", "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
                    f"{{'EngineCore': {code}}}",
                )  # fmt: skip
                self.status = 1
        elif not self.ended.is_set() and not self.dead:
            self.log.error("core_client.py:650", "Engine core proc EngineCore died unexpectedly, shutting down client.")
            self._on_dead({"why": "engine gone"})
        if not self.ready.is_set():
            self.ended.set()

    def _on_phase(self, message: dict[str, Any]) -> None:
        self.state["phase"] = message["name"]
        self.state["device"] = "busy" if message["name"] in ("profile", "capture") else "idle"

    def _on_worker(self, message: dict[str, Any]) -> None:
        self.state["workers"][str(message["rank"])] = message["pid"]

    def _on_ready(self, message: dict[str, Any]) -> None:
        self.state.update(phase="serving", device="idle")
        self.ready.set()

    def _on_step(self, message: dict[str, Any]) -> None:
        self.state.update(
            device=message["device"], wedged=message["wedged"], live=message["live"], step=message["number"], since=time.monotonic()
        )

    def _on_stats(self, message: dict[str, Any]) -> None:
        self.state.update(device="idle", wedged=False, live=message["running"])
        self._gauges(message)

    def _gauges(self, message: dict[str, Any]) -> None:
        counts = self.counts
        counts.running, counts.waiting, counts.kv = message["running"], message["waiting"], message["kv"]
        counts.preemptions = message["preemptions"]

    def _on_out(self, message: dict[str, Any]) -> None:
        counts, now = self.counts, self.clock.now()
        self.state.update(device="idle", wedged=False)
        self._gauges(message)
        counts.iteration.observe(message["rows"])
        counts.prompt += message["prompt"]
        counts.generated += message["generated"]
        for name in ("drafts", "drafted", "accepted"):
            setattr(counts, name, getattr(counts, name) + message[name])
        for name, number, reason in message["out"]:
            stream = self.streams.get(name)
            if reason:
                counts.finished[reason] += 1
            if stream is None:
                continue
            (counts.between if stream.last else counts.first).observe(now - (stream.last or stream.begun))
            stream.last = now
            stream.queue.put_nowait((number, reason))

    def _on_dead(self, message: dict[str, Any]) -> None:
        self.dead = message["why"]
        self.state.update(phase="dead", wedged=False, device="idle")
        self.log.error(
            "async_llm.py:745", f"AsyncLLM output_handler failed.\nTraceback (most recent call last):\nEngineDeadError: {DEAD}"
        )
        for stream in self.streams.values():
            stream.queue.put_nowait((0, "dead"))
        asyncio.get_running_loop().call_later(self.clock.real(self.settings.linger_s), self.ended.set)

    async def stats_lines(self) -> None:
        """The stats line each interval; none when nothing moved in this interval and the one before."""
        before, idle_before, then = (0, 0), True, self.clock.now()
        while True:
            await asyncio.sleep(self.clock.real(self.settings.stats_s))
            counts = self.counts
            now = self.clock.now()
            prompt, generated = (
                (new - old) / (now - then) for new, old in zip((counts.prompt, counts.generated), before, strict=True)
            )
            before, then = (counts.prompt, counts.generated), now
            idle = not (prompt or generated)
            if not (idle and idle_before):
                self.log.info(
                    "loggers.py:259",
                    f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, "
                    f"Avg generation throughput: {generated:.1f} tokens/s, "
                    f"Running: {counts.running} reqs, Waiting: {counts.waiting} reqs, GPU KV cache usage: {100 * counts.kv:.1f}%, "
                    f"Prefix cache hit rate: 0.0%",
                )
            idle_before = idle

    # -- HTTP ----------------------------------------------------------------------------------------------------------------

    @web.middleware
    async def access(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """uvicorn's access line, at the answer's start as uvicorn does; a completion that streams says its own."""
        if request.path.startswith("/standin/"):
            return await handler(request)
        try:
            response = await handler(request)
        except web.HTTPException as refused:
            self._accessed(request, refused.status)
            raise
        if not response.prepared:
            self._accessed(request, response.status)
        return response

    def _accessed(self, request: web.Request, status: int) -> None:
        if self.settings.access_log:
            peer = request.transport.get_extra_info("peername") if request.transport else None
            where = f"{peer[0]}:{peer[1]}" if peer else "-"
            words = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests", 503: "Service Unavailable"}
            word = words.get(status, "Internal Server Error")
            self.log.plain(f'INFO:     {where} - "{request.method} {request.path} HTTP/1.1" {status} {word}')

    async def _spoilt(self, how: str, request: web.Request) -> None:
        kind, _, value = how.partition(":")
        if kind == "slow":
            await asyncio.sleep(self.clock.real(float(value)))
        elif kind == "hang":
            await asyncio.sleep(86400)
        elif kind == "gone":
            if request.transport is not None:
                request.transport.abort()
            await asyncio.sleep(1)
        elif kind == "missing":
            raise web.HTTPNotFound

    async def health(self, request: web.Request) -> web.StreamResponse:
        await self._spoilt(self.settings.health, request)
        return web.Response(status=503 if self.dead else 200)

    async def version(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": VERSION})

    async def models(self, request: web.Request) -> web.StreamResponse:
        card = {
            "id": self.model, "object": "model", "created": int(self.started), "owned_by": "vllm", "root": self.path,
            "parent": None, "max_model_len": self.settings.max_model_len, "permission": [],
        }  # fmt: skip
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        how = self.settings.metrics
        await self._spoilt(how, request)
        text = exposition(
            self.counts,
            self.model,
            started=self.started,
            speculative=self.settings.mtp > 0,
            running_zero=self.settings.running_zero,
        )
        if how == "malformed":
            text = malformed(text)
        elif how == "huge":
            text = huge(text)
        response = web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
        if how == "partial":
            response = web.Response(body=text.encode()[: len(text) // 3])
        return response

    async def state_of(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({**self.state, "device_s": time.monotonic() - self.state["since"], "open": len(self.streams)})

    async def change(self, request: web.Request) -> web.StreamResponse:
        values = await request.json()
        if unknown := set(values) - LIVE:
            return web.json_response({"error": f"cannot change {sorted(unknown)}"}, status=400)
        self.settings = self.settings.changed(values)
        self.log.silent = self.settings.log_silent
        if self.settings.api_dies:
            os._exit(1)
        self.order(kind="set", values=values)
        return web.json_response({})

    async def act(self, request: web.Request) -> web.StreamResponse:
        message = await request.json()
        self.order(**message)
        return web.json_response({})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        settings = self.settings
        if settings.refuse:
            return _error(settings.refuse, "the stand-in refuses", "Refused")
        if self.dead:
            return _error(500, DEAD, "InternalServerError")
        try:
            body = await request.json()
            prompt = body["prompt"]
            most = int(body.get("max_tokens") or 16)
        except (ValueError, KeyError, TypeError) as error:
            return _error(400, f"no completion request: {error}", "BadRequestError")
        if body.get("model") not in (None, self.model):
            return _error(404, f"The model `{body.get('model')}` does not exist.", "NotFoundError")
        length = len(prompt) if isinstance(prompt, list) else max(len(str(prompt)) // 4, 1)
        if length + most > settings.max_model_len:
            return _error(400, f"maximum context length is {settings.max_model_len} tokens", "BadRequestError")
        name = f"cmpl-{secrets.token_hex(16)}"
        stream = self.streams[name] = Stream(length, begun=self.clock.now())
        self.order(
            kind="add", id=name, prompt=length, max=most, min=int(body.get("min_tokens") or 0), ignore_eos=body.get("ignore_eos")
        )
        try:
            if body.get("stream"):
                return await self._streamed(request, name, stream, body, str(prompt))
            return await self._whole(name, stream, str(prompt))
        except (asyncio.CancelledError, ConnectionError):
            self.order(kind="abort", id=name)
            self.counts.finished["abort"] += 1
            raise
        finally:
            self.streams.pop(name, None)

    async def _streamed(
        self, request: web.Request, name: str, stream: Stream, body: dict[str, Any], prompt: str
    ) -> web.StreamResponse:
        options = body.get("stream_options") or {}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        self._accessed(request, 200)
        await response.prepare(request)
        created, place, reason = int(time.time()), 0, ""
        base = {"id": name, "object": "text_completion", "created": created, "model": self.model}

        def usage() -> dict[str, int]:
            return {"prompt_tokens": stream.prompt, "total_tokens": stream.prompt + place, "completion_tokens": place}

        while not reason:
            count, reason = await stream.queue.get()
            if reason == "dead":
                await _event(response, {"error": {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}})
                break
            text = "".join(_word(self.model, prompt, place + step) for step in range(count))
            place += count
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason or None, "stop_reason": None}
            if body.get("return_token_ids"):
                choice["token_ids"] = [int(word, 16) % 129280 for word in text.split()]
            chunk: dict[str, Any] = {**base, "choices": [choice]}
            if options.get("include_usage"):
                chunk["usage"] = usage() if options.get("continuous_usage_stats") else None
            await _event(response, chunk)
            if self.settings.reset and request.transport is not None:
                request.transport.abort()
                break
        if options.get("include_usage") and reason != "dead":
            await _event(response, {**base, "choices": [], "usage": usage()})
        with contextlib.suppress(ConnectionError):
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response

    async def _whole(self, name: str, stream: Stream, prompt: str) -> web.StreamResponse:
        place, reason = 0, ""
        while not reason:
            count, reason = await stream.queue.get()
            place += count
        if reason == "dead":
            return _error(500, DEAD, "InternalServerError")
        text = "".join(_word(self.model, prompt, step) for step in range(place))
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        usage = {"prompt_tokens": stream.prompt, "total_tokens": stream.prompt + place, "completion_tokens": place}
        return web.json_response(
            {
                "id": name, "object": "text_completion", "created": int(time.time()), "model": self.model, "choices": [choice],
                "usage": usage,
            }
        )  # fmt: skip

    # -- life ----------------------------------------------------------------------------------------------------------------

    async def serve(self) -> int:
        """From the banner to the end. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_to_end)
        app = web.Application(middlewares=[self.access], client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/health", self.health), web.get("/ping", self.health), web.post("/ping", self.health),
                web.get("/version", self.version), web.get("/v1/models", self.models), web.get("/metrics", self.metrics),
                web.post("/v1/completions", self.completions), web.get("/standin/state", self.state_of),
                web.post("/standin/set", self.change), web.post("/standin/act", self.act),
            ]
        )  # fmt: skip
        self.log.info("api_utils.py:326", f"vLLM server version {VERSION}, serving model {self.model}")
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        # vLLM binds before it loads, and listens after.
        import socket

        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
        except OSError as error:
            listener.close()
            self.log.plain(
                f"Traceback (most recent call last):\n  stand-in\nOSError: [Errno {error.errno}] {os.strerror(error.errno or 0)}"
            )
            await runner.cleanup()
            return 1
        self.port = listener.getsockname()[1]
        ending = asyncio.create_task(self.ended.wait())
        stats: asyncio.Task[None] | None = None
        try:
            await self.start_engine()
            ready = asyncio.create_task(self.ready.wait())
            await asyncio.wait([ready, ending], return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            if self.ready.is_set() and not self.ended.is_set():
                await self._announce(web.SockSite(runner, listener))
                stats = asyncio.create_task(self.stats_lines())
                await ending
        finally:
            if stats is not None:
                stats.cancel()
            await self._end_engine()
            await runner.cleanup()
            listener.close()
            if self.ready.is_set():
                self.log.plain("INFO:     Application shutdown complete.")
                self.log.plain(f"INFO:     Finished server process [{os.getpid()}]")
        return self.status

    async def _announce(self, site: web.SockSite) -> None:
        where = f"http://{self.host}:{self.port}"
        self.log.info("api_server.py:583", f"Starting vLLM server on {where}")
        self.log.info("launcher.py:37", "Available routes are:")
        for route in ("/health", "/metrics", "/v1/models", "/v1/completions", "/ping", "/version"):
            self.log.info("launcher.py:46", f"Route: {route}, Methods: {'POST' if 'completions' in route else 'GET'}")
        self.log.plain(f"INFO:     Started server process [{os.getpid()}]")
        self.log.plain("INFO:     Waiting for application startup.")
        await site.start()
        self.log.plain("INFO:     Application startup complete.")

    def _asked_to_end(self) -> None:
        if not self.ended.is_set():
            self.log.info("launcher.py:88", "[shutdown] API server: shutdown triggered")
            if self.ready.is_set():
                self.log.plain("INFO:     Shutting down")
            else:
                self.status = 130
            self.ended.set()

    async def _end_engine(self) -> None:
        if self.engine is None:
            return
        if self.engine.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.engine.terminate()
            try:
                await asyncio.wait_for(self.engine.wait(), 2.0)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self.engine.kill()
                await self.engine.wait()
        await self.reader


def _error(status: int, text: str, kind: str) -> web.Response:
    return web.json_response({"error": {"message": text, "type": kind, "param": None, "code": status}}, status=status)


async def _event(response: web.StreamResponse, document: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(document)}\n\n".encode())


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("stand-in for vllm serve (a test double)")
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model", nargs="?", default="standin-model")
    parser.add_argument("--model", dest="model_flag")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", nargs="+")
    for flag in ("--tensor-parallel-size", "--max-num-seqs", "--max-num-batched-tokens", "--max-model-len"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--speculative-config")
    parser.add_argument("--compilation-config")
    parser.add_argument("--enforce-eager", action="store_true", default=None)
    parser.add_argument("--standin", nargs="*", action="extend", default=[])
    found, _ignored = parser.parse_known_args(argv)
    found.model = found.model_flag or found.model
    return found


def main(argv: list[str]) -> int:
    """``serve MODEL …``; the children come here too."""
    if argv and argv[0] == "--engine":
        from .engine import main as engine

        return engine(argv[1:])
    if argv and argv[0] == "--worker":
        from .worker import main as worker

        return worker(argv[1:])
    arguments = _arguments(argv)
    try:
        settings = from_arguments(vars(arguments), arguments.standin)
    except ValueError as error:
        print(f"stand-in: {error}", file=sys.stderr)
        return 2
    return asyncio.run(_serve(settings, arguments))


async def _serve(settings: Settings, arguments: argparse.Namespace) -> int:
    return await Server(settings, arguments).serve()
