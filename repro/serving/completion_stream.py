"""One streamed completion over HTTP, from send to end, with every way it can go wrong told apart and none of them raised.

``CompletionStream`` is the only code here that speaks to a completions server: the drain load, canary and fillers use it.
A server is not trusted: no redirects, no decompression, no proxies from the environment, bounded headers, lines, bytes and tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import urlsplit

from ...clock import SYSTEM, Clock
from .sse import CompletionChunk, EventReader, StreamFormatError, error_text, parse_chunk, parse_document

if TYPE_CHECKING:
    import aiohttp

__all__ = [
    "FAULTS",
    "CompletionOutcome",
    "CompletionRequest",
    "CompletionStream",
    "FaultKind",
    "StreamEvent",
    "open_session",
    "scrub",
    "shown_url",
]

#: refused: nobody listens. unreachable: no such host, no route, no such URL. reset: the connection ended before the answer did.
#: too-many-requests: 429. unavailable: 503. http-status: any other status. slow: past the deadline. malformed: no such stream.
#: overrun: longer than any answer may be. server-error: status 500 or an error inside the stream (a dead engine answers so).
FaultKind = Literal[
    "refused",
    "unreachable",
    "reset",
    "too-many-requests",
    "unavailable",
    "http-status",
    "slow",
    "malformed",
    "overrun",
    "server-error",
]
FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)
#: How long a connection may take to open, seconds.
CONNECT_S = 10.0
#: Bytes of an error's body that are read.
MAX_ERROR_BODY = 4096


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What is asked. ``prompt``: token ids or text. ``request_id``: sent as X-Request-Id, so that the server's log names it.

    Token ids of the output are asked for (``return_token_ids``); a server that does not know the field ignores it.
    """

    prompt: tuple[int, ...] | str
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = True
    temperature: float = 0.0
    request_id: str = ""

    def body(self, model: str) -> dict[str, Any]:
        """The JSON body: streaming, usage in every chunk."""
        return {
            "model": model,
            "prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt),
            "max_tokens": self.max_tokens,
            "min_tokens": min(self.min_tokens, self.max_tokens),
            "ignore_eos": self.ignore_eos,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        }

    @property
    def prompt_sha256(self) -> str:
        """Of the prompt: only answers to the same prompt are compared."""
        given = self.prompt if isinstance(self.prompt, str) else " ".join(map(str, self.prompt))
        return hashlib.sha256(f"{type(self.prompt).__name__} {given}".encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class CompletionOutcome:
    """How a completion ended. ``kind``: "completed", "cancelled" (by us) or a FaultKind. Times are seconds of ``Clock.monotonic``.

    ``accepted_at``: the server answered with status 200 (a wedged vLLM does that too, and the request waits in its queue).
    ``tokens``: received. ``counted``: "usage" as the server counts, "ids" or "chunks" where it does not say. ``token_ids``: of the
    output, None if the server sent none. ``text_sha256``: of the whole text received.
    """

    kind: Literal["completed", "cancelled"] | FaultKind
    sent_at: float
    ended_at: float
    accepted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    tokens: int = 0
    counted: Literal["usage", "ids", "chunks"] = "usage"
    finish_reason: str | None = None
    status: int | None = None
    detail: str = ""
    token_ids: tuple[int, ...] | None = None
    text_sha256: str = ""

    @property
    def completed(self) -> bool:
        """The whole answer came."""
        return self.kind == "completed"

    @property
    def fault(self) -> bool:
        """A fault of client, network or server: says nothing about a hang."""
        return self.kind in FAULTS

    @property
    def took_s(self) -> float:
        """Seconds from send to end."""
        return self.ended_at - self.sent_at


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One arrival: ``tokens`` received in all by ``at``, the ids and the text that came with it."""

    at: float
    tokens: int
    token_ids: tuple[int, ...] | None
    text: str


@dataclass
class CompletionStream:
    """A completion under way. ``run`` it in a loop; read the fields from anywhere (each is replaced whole); ``outcome`` ends it.

    ``on_event`` is called in the loop for every arrival of tokens and must not block.
    """

    url: str
    model: str
    request: CompletionRequest
    timeout_s: float
    clock: Clock = SYSTEM
    headers: Mapping[str, str] = field(default_factory=dict)
    on_event: Callable[[StreamEvent], None] | None = None
    sent_at: float | None = None
    accepted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    tokens: int = 0
    status: int | None = None
    finish_reason: str | None = None
    outcome: CompletionOutcome | None = None
    _counted: Literal["usage", "ids", "chunks"] = "usage"
    _ids: list[int] | None = field(default_factory=list)
    _text: Any = field(default_factory=hashlib.sha256)

    async def run(self, session: aiohttp.ClientSession) -> CompletionOutcome:
        """Send, read to the end, and say how it ended. Raises nothing but CancelledError, and ``outcome`` is set then too."""
        self.sent_at = self.clock.monotonic()
        kind: Literal["completed", "cancelled"] | FaultKind = "cancelled"
        detail = ""
        try:
            async with asyncio.timeout(self.timeout_s):
                kind, detail = await self._exchange(session)
        except asyncio.CancelledError:
            kind, detail = "cancelled", "cancelled by the client"
            raise
        except Exception as error:  # every library error becomes a kind; a client that raises would look like a hang
            kind, detail = _fault_of(error, self.timeout_s)
        finally:
            self.outcome = CompletionOutcome(
                kind=kind,
                sent_at=self.sent_at,
                ended_at=self.clock.monotonic(),
                accepted_at=self.accepted_at,
                first_token_at=self.first_token_at,
                last_token_at=self.last_token_at,
                tokens=self.tokens,
                counted=self._counted,
                finish_reason=self.finish_reason,
                status=self.status,
                detail=scrub(detail, self.headers),
                token_ids=tuple(self._ids) if self._ids else None,
                text_sha256=self._text.hexdigest(),
            )
        return self.outcome

    @property
    def text_so_far(self) -> str:
        """A short hash of the whole text received so far."""
        return str(self._text.hexdigest())[:16]

    def forget(self) -> None:
        """Let go of prompt and output of a stream that has ended; counts and times stay."""
        self.request = CompletionRequest(prompt=(), max_tokens=self.request.max_tokens)
        self._ids = None
        if self.outcome is not None:
            self.outcome = replace(self.outcome, token_ids=None)

    async def _exchange(self, session: aiohttp.ClientSession) -> tuple[Literal["completed"] | FaultKind, str]:
        if not shown_url(self.url):
            return "unreachable", "not an http or https URL with a host"
        headers = {**self.headers}
        if self.request.request_id:
            headers["X-Request-Id"] = self.request.request_id
        response = await session.post(
            f"{self.url}/v1/completions", json=self.request.body(self.model), headers=headers, allow_redirects=False
        )
        try:
            self.status = response.status
            if response.status != 200:
                return _kind_of_status(response.status), await _error_body(response)
            if response.headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
                return "malformed", "a compressed answer, which was not asked for"
            self.accepted_at = self.clock.monotonic()
            return await self._read(response)
        finally:
            response.close()  # not released: an unread rest must end the connection, so that the server sees the client gone

    async def _read(self, response: aiohttp.ClientResponse) -> tuple[Literal["completed"] | FaultKind, str]:
        reader = EventReader()
        async for data in response.content.iter_any():
            for payload in reader.feed(data):
                chunk = parse_chunk(payload, max_tokens=self.request.max_tokens)
                if chunk.error:
                    return "server-error", chunk.error
                self._take(chunk)
            if reader.done:
                break
        if self.finish_reason is None:
            return "reset", "the stream ended before the answer did"
        if self.finish_reason in ("abort", "error"):
            return "server-error", f"the server ended the request: {self.finish_reason}"
        return "completed", ""

    def _take(self, chunk: CompletionChunk) -> None:
        if chunk.final_usage:
            return
        total = self._total(chunk)
        if total > self.request.max_tokens:
            raise StreamFormatError(f"more than the {self.request.max_tokens} tokens asked for")
        if total < self.tokens:
            raise StreamFormatError(f"{total} tokens after {self.tokens}: the count goes back")
        if chunk.token_ids is None:
            if chunk.text:
                self._ids = None  # a gap in the ids is worse than none
        elif self._ids is not None:
            self._ids.extend(chunk.token_ids)
            if len(self._ids) > self.request.max_tokens:
                raise StreamFormatError(f"more than the {self.request.max_tokens} token ids asked for")
        self._text.update(chunk.text.encode("utf-8", "surrogatepass"))
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
        if total > self.tokens:
            now = self.clock.monotonic()
            self.tokens = total
            self.first_token_at = now if self.first_token_at is None else self.first_token_at
            self.last_token_at = now
            if self.on_event is not None:
                self.on_event(StreamEvent(now, total, chunk.token_ids, chunk.text))

    def _total(self, chunk: CompletionChunk) -> int:
        if chunk.completion_tokens is not None:
            self._counted = "usage"
            return chunk.completion_tokens
        if chunk.token_ids is not None:
            self._counted = "ids"
            return self.tokens + len(chunk.token_ids)
        self._counted = "chunks"  # at least one token a chunk: with MTP it may be more
        return self.tokens + (1 if chunk.text else 0)


def open_session(*, connect_s: float = CONNECT_S) -> aiohttp.ClientSession:
    """A session for servers that are not trusted. Call it inside a running loop; close it there.

    A connection a request: closing it is how a server learns that its client is gone.
    """
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        headers={"Accept": "text/event-stream", "Accept-Encoding": "identity"},
    )


def shown_url(url: str) -> str:
    """The URL without user name, password, query and fragment, for records and messages; empty if it is no http(s) URL."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        host = parts.hostname
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or not host:
        return ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}{parts.path.rstrip('/')}"


def scrub(text: str, headers: Mapping[str, str]) -> str:
    """One printable line of at most 500 characters, without the values of our own headers: a server may echo an API key."""
    for value in headers.values():
        for secret in {value, value.rpartition(" ")[2]}:
            if len(secret) >= 4:
                text = text.replace(secret, "[redacted]")
    return "".join(one if one.isprintable() else " " for one in text[:500]).strip()


def _kind_of_status(status: int) -> FaultKind:
    if status == 429:
        return "too-many-requests"
    if status == 503:
        return "unavailable"
    return "server-error" if status == 500 else "http-status"


async def _error_body(response: aiohttp.ClientResponse) -> str:
    """What an error's body says, in few bytes and little time."""
    said = b""
    with contextlib.suppress(Exception):  # the status is known; a body that breaks off adds nothing
        async with asyncio.timeout(2.0):
            while len(said) < MAX_ERROR_BODY and (piece := await response.content.read(MAX_ERROR_BODY - len(said))):
                said += piece
    try:
        message = error_text(parse_document(said))
    except StreamFormatError:
        message = said[:200].decode("utf-8", "replace")
    return f"HTTP {response.status}: {message}" if message else f"HTTP {response.status}"


def _fault_of(error: Exception, timeout_s: float) -> tuple[FaultKind, str]:
    """A library's exception as a kind and a sentence."""
    import aiohttp

    said = f"{type(error).__name__}: {str(error)[:200]}".rstrip(": ")
    if isinstance(error, StreamFormatError):
        return ("overrun" if error.overrun else "malformed"), str(error)
    if isinstance(error, TimeoutError):
        what = "no connection" if isinstance(error, aiohttp.ServerTimeoutError) else "no complete answer"
        return "slow", f"{what} within {CONNECT_S if what == 'no connection' else timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorError | ConnectionRefusedError):
        number = getattr(error, "errno", None) or getattr(getattr(error, "os_error", None), "errno", None)
        return ("refused" if number == errno.ECONNREFUSED else "unreachable"), said
    if isinstance(error, aiohttp.InvalidURL):
        return "unreachable", "not a usable URL"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionError):
        return "reset", said
    if isinstance(error, aiohttp.ClientOSError | ssl.SSLError):
        return ("reset" if isinstance(error.__cause__, ConnectionError) else "unreachable"), said
    if isinstance(error, aiohttp.ClientError | ValueError):
        return "malformed", said
    if isinstance(error, OSError):
        return "unreachable", said
    return "malformed", said
