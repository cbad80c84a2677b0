"""One reading of a serving engine: ``/metrics`` (Prometheus text) and ``/health``. Two GET requests, nothing else.

Names as vLLM 0.19 to 0.33 exports them (``v1/metrics/loggers.py`` of the releases): counters end in ``_total``;
``iteration_tokens_total`` is a histogram whose ``_count`` counts the engine's iterations that gave output (an iteration that only
prefills a chunk counts nowhere). Figures of several engines (label ``engine``) are added, and kept by engine too.

The server is doubted: one deadline holds for the whole exchange, whatever it drips; what is read is bounded; a line that does not
parse costs itself and is counted. A figure that is not exported is None, never 0.
"""

from __future__ import annotations

import http.client
import io
import re
import select
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ...clock import SYSTEM, Clock, Deadline
from ..device_state import Unread

__all__ = ["MOST_BYTES", "SAMPLES", "EngineReading", "parse_metrics", "read_page", "scrape"]

#: Bytes of an answer that are read at most. vLLM's exposition is 50 to 300 KB.
MOST_BYTES = 4 << 20
#: Lines of our families that are parsed at most.
_MOST_LINES = 4096
#: Sample name -> field, and how several of it become one.
SAMPLES: dict[str, tuple[str, str]] = {
    "vllm:num_requests_running": ("running", "sum"),
    "vllm:num_requests_waiting": ("waiting", "sum"),
    "vllm:generation_tokens_total": ("generation_tokens", "sum"),
    "vllm:prompt_tokens_total": ("prompt_tokens", "sum"),
    "vllm:iteration_tokens_total_count": ("iterations", "sum"),
    "vllm:num_preemptions_total": ("preemptions", "sum"),
    "vllm:request_success_total": ("finished", "sum"),
    "vllm:spec_decode_num_draft_tokens_total": ("drafted", "sum"),
    "vllm:spec_decode_num_accepted_tokens_total": ("accepted", "sum"),
    "vllm:kv_cache_usage_perc": ("kv_usage", "max"),
    "vllm:gpu_cache_usage_perc": ("kv_usage", "max"),
}
_WANTED = re.compile(
    rb"^(?:"
    + b"|".join(re.escape(name.encode()) for name in sorted(SAMPLES, key=len, reverse=True))
    + rb")(?=[{ \t])[^\r\n]{0,2000}",
    re.MULTILINE,
)
_EXPOSITION = re.compile(rb"(?m)^(?:# (?:HELP|TYPE) |[A-Za-z_:][\w:]*(?:\{[^\n]*\})? +[-+\d.NI])")
#: OverflowError: a length that is larger than any number of bytes.
_CLIENT_ERRORS = (OSError, http.client.HTTPException, ValueError, OverflowError)
#: No counter of an engine is larger; beyond it floats do not count by ones, and sums of them become infinite.
_MOST_COUNT = 2.0**53


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What one look at the engine's HTTP side gave. ``at``: seconds on the clock when the exchange ended; ``took_s``: its length.

    ``health``: HTTP status of ``/health``, None if it gave none. ``values``: fields of ``SAMPLES`` that are exported; ``engines``:
    the same by the label ``engine``. ``bad_lines``: lines of these families that did not parse. ``unread``: what and why not.
    """

    at: float
    took_s: float
    health: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    engines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    bad_lines: int = 0
    unread: tuple[Unread, ...] = ()


def scrape(base_url: str, *, timeout_s: float = 2.0, clock: Clock = SYSTEM, health: bool = True) -> EngineReading:
    """Read ``/health`` and ``/metrics`` of ``base_url`` (``http://HOST:PORT`` with or without a path), together in ``timeout_s``
    seconds. Never raises for what the server does; the time is real time, whatever ``clock`` is.
    """
    began = clock.monotonic()
    deadline = Deadline(timeout_s)
    unread: list[Unread] = []
    status: int | None = None
    if health:
        # A server whose event loop is blocked answers neither: /metrics keeps at least half of the time.
        outcome = _get(base_url, "/health", Deadline(timeout_s / 2), 64 << 10)
        if isinstance(outcome, Unread):
            unread.append(outcome)
        else:
            status = outcome[0]
    values: dict[str, float] = {}
    engines: dict[str, dict[str, float]] = {}
    bad = 0
    outcome = _get(base_url, "/metrics", deadline, MOST_BYTES)
    if isinstance(outcome, Unread):
        unread.append(outcome)
    elif outcome[0] != 200:
        unread.append(Unread("/metrics", f"HTTP status {outcome[0]}", _remedy(outcome[0])))
    else:
        values, engines, bad, why = parse_metrics(outcome[1])
        if why is not None:
            unread.append(why)
    now = clock.monotonic()
    return EngineReading(now, now - began, status, values, engines, bad, tuple(unread))


def read_page(
    base_url: str, path: str, *, timeout_s: float = 2.0, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes] | Unread:
    """HTTP status and body of one GET as it came (evidence is kept raw), at most ``MOST_BYTES``; or why there is none.

    No redirect is followed: ``headers`` (a key, perhaps) go where ``base_url`` says and nowhere else.
    """
    return _get(base_url, path, Deadline(timeout_s), MOST_BYTES, headers or {})


def parse_metrics(body: bytes) -> tuple[dict[str, float], dict[str, dict[str, float]], int, Unread | None]:
    """(values, values by engine, lines that did not parse, why there is nothing) of an exposition. Only the wanted lines are
    given to prometheus-client's parser: the whole of a large server's exposition would cost more than all the rest of a look.
    """
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    engines: dict[str, dict[str, float]] = {}
    bad = lines = 0
    for match in _WANTED.finditer(body):
        lines += 1
        if lines > _MOST_LINES:
            # Half a sum is a counter that goes back, or stands still while the rest moves.
            why = f"more than {_MOST_LINES} lines of vLLM's counters: not summed"
            return {}, {}, bad, Unread("/metrics", why, "Is it a proxy that joins many servers? Name one server's own port.")
        try:
            text = match.group().decode("utf-8")
            samples = [sample for family in text_string_to_metric_families(text + "\n") for sample in family.samples]
        except (ValueError, KeyError, IndexError, RecursionError):
            bad += 1
            continue
        for sample in samples:
            found = SAMPLES.get(sample.name)
            # Compared as it was read: the parser gives an int for whole numbers, and one of 400 digits has no float.
            if found is None or not 0 <= sample.value <= _MOST_COUNT:
                bad += 1
                continue
            number = float(sample.value)
            name, how = found
            engine = str(sample.labels.get("engine", ""))[:40]
            _add(values, name, number, how)
            if engine in engines or len(engines) < 1024:
                _add(engines.setdefault(engine, {}), name, number, how)
    if values:
        return values, engines, bad, None
    if lines > 0:
        return {}, {}, bad, Unread("/metrics", f"none of {lines} lines of vLLM's counters parses", "See: curl URL/metrics")
    if body.lstrip()[:1] in (b"<", b"{"):
        return {}, {}, 0, Unread("/metrics", "the answer is a document and no Prometheus text", "Is a proxy in between?")
    if not body.strip():
        return {}, {}, 0, Unread("/metrics", "the answer is empty", "Is the server started with --disable-log-stats?")
    if not _EXPOSITION.search(body[: 64 << 10]):
        return {}, {}, 0, Unread("/metrics", "the answer is no Prometheus text", "Is this the engine's own port?")
    return {}, {}, 0, Unread("/metrics", "no counters of vLLM among the metrics", "Is the server started with --disable-log-stats?")


def _add(into: dict[str, float], name: str, number: float, how: str) -> None:
    old = into.get(name)
    into[name] = number if old is None else max(old, number) if how == "max" else old + number


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "The server wants a key for /metrics."
    return "Is this the engine's own port?" if status == 404 else ""


def _address(host: str, port: int, deadline: Deadline) -> tuple[int, tuple[Any, ...]]:
    """Family and address of a host. A name server that does not answer cannot be interrupted: it is asked from a thread."""
    box: list[tuple[int, tuple[Any, ...]]] = []
    errors: list[OSError] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            # Loopback servers usually listen on IPv4 alone.
            found.sort(key=lambda item: item[0] != socket.AF_INET)
            box.extend((item[0], tuple(item[4])) for item in found[:1])
        except (OSError, UnicodeError) as error:
            errors.append(error if isinstance(error, OSError) else OSError(str(error)))

    if re.fullmatch(r"[0-9.]+", host) or host == "localhost" or ":" in host:
        ask()
    else:
        thread = threading.Thread(target=ask, name="dsv4-repro-resolve", daemon=True)
        thread.start()
        thread.join(deadline.remaining())
    if errors:
        raise errors[0]
    if not box:
        raise TimeoutError(f"the name {host} was not resolved in time")
    return box[0]


def _header_lines(headers: Mapping[str, str]) -> str:
    """Headers of ours, each a line. ValueError: one that would be two (a key with a line's end in it)."""
    for name, value in headers.items():
        if not (name + value).isprintable():
            raise ValueError(f"the header {name[:40]!r} holds a control character")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def _secured(plain: socket.socket, host: str, deadline: Deadline) -> ssl.SSLSocket:
    """TLS over a connected socket. The handshake is many reads: each waits for what is left of the time, not for all of it."""
    secured = ssl.create_default_context().wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
    secured.settimeout(0.0)
    try:
        while True:
            try:
                secured.do_handshake()
                return secured
            except ssl.SSLWantReadError:
                select.select([secured], [], [], _left(deadline))
            except ssl.SSLWantWriteError:
                select.select([], [secured], [], _left(deadline))
    except BaseException:
        secured.close()
        raise


def _get(
    base_url: str, path: str, deadline: Deadline, most: int, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes] | Unread:
    """(status, body) of one GET, or why not."""
    try:
        parts = urllib.parse.urlsplit(base_url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        if parts.scheme not in ("http", "https") or not host:
            return Unread(path, "not an http URL", "Give it as http://HOST:PORT")
        family, address = _address(host, port, deadline)
        with ExitStack() as closing:
            plain = closing.enter_context(socket.socket(family, socket.SOCK_STREAM))
            plain.settimeout(_left(deadline))
            plain.connect(address)
            connection: socket.socket = plain
            if parts.scheme == "https":
                connection = closing.enter_context(_secured(plain, host, deadline))
            # HTTP/1.0 and "close": no chunks, no second answer to wait for.
            target = urllib.parse.quote(parts.path.rstrip("/") + path)
            connection.settimeout(_left(deadline))
            name = f"[{host}]" if ":" in host else host
            request = f"GET {target} HTTP/1.0\r\nHost: {name}:{port}\r\nConnection: close\r\n{_header_lines(headers or {})}\r\n"
            connection.sendall(request.encode("utf-8", "replace"))
            raw = _receive(connection, deadline, most)
    except _CLIENT_ERRORS as error:
        return Unread(path, _words(error, deadline), "Is the server up? See: curl -m 5 URL" + path)
    return _answer(path, raw, most)


def _left(deadline: Deadline) -> float:
    left = deadline.remaining()
    if left <= 0:
        raise TimeoutError(f"no whole answer within {deadline.seconds:g} s")
    return left


def _words(error: Exception, deadline: Deadline) -> str:
    if isinstance(error, TimeoutError):
        return f"no whole answer within {deadline.seconds:g} s"
    return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"[:300]


def _receive(connection: socket.socket, deadline: Deadline, most: int) -> bytes:
    pieces: list[bytes] = []
    total = 0
    whole: int | None = None
    head = b""
    while total <= most:
        connection.settimeout(_left(deadline))
        piece = connection.recv(1 << 16)
        if not piece:
            break
        pieces.append(piece)
        total += len(piece)
        if whole is None and len(head) < 1 << 16:
            head += piece
            end = head.find(b"\r\n\r\n")
            if end >= 0:
                found = re.search(rb"(?i)\r\ncontent-length:[ \t]*(\d{1,12})[ \t]*\r\n", head[: end + 2])
                whole = end + 4 + int(found.group(1)) if found else most + 2
        # A server may keep the line open all the same; what it promised is then enough.
        if whole is not None and total >= whole:
            break
        if piece.endswith(b"\r\n0\r\n\r\n"):
            break
    return b"".join(pieces)


class _Bytes:
    """What ``http.client`` asks of a socket."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: object, **__: object) -> io.BytesIO:
        return io.BytesIO(self._raw)


def _answer(path: str, raw: bytes, most: int) -> tuple[int, bytes] | Unread:
    if len(raw) > most:
        return Unread(path, f"the answer is longer than {most >> 10} KiB", "Is this the engine's own port?")
    if not raw:
        return Unread(path, "the connection was closed without an answer", "See the server's log.")
    response = http.client.HTTPResponse(_Bytes(raw))  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read()
    except http.client.IncompleteRead as error:
        return Unread(path, f"the answer was cut short after {len(error.partial)} bytes", "See the server's log.")
    except _CLIENT_ERRORS as error:
        return Unread(path, f"not an HTTP answer: {type(error).__name__}: {error}"[:300], "Is this the engine's own port?")
    return response.status, body
