"""What ``watch`` tells a Prometheus and a kubelet: ``/metrics`` and ``/livez`` on one small HTTP server, loopback by default.

Each connection has ``CLIENT_S`` seconds in all and there are ``MOST_CLIENTS`` at most, the oldest is dropped for a new one: nobody
who connects can make it grow, or keep a probe waiting. ``/livez`` is 503 only while the server is hung: a liveness probe restarts
what it gets 503 from, and a server that is merely suspect must not be restarted.
"""

from __future__ import annotations

import http.server
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...clock import SYSTEM, Clock
from ...errors import UnavailableError, UsageError

__all__ = ["DEFAULT_LISTEN", "Exporter", "WatchState", "parse_listen"]

DEFAULT_LISTEN = "127.0.0.1:9477"
CLIENT_S = 2.0
MOST_CLIENTS = 32
STATES = ("no server", "starting", "healthy", "suspect", "hung", "exited", "crashed")


@dataclass(frozen=True, slots=True)
class WatchState:
    """The last look. ``still_s``: since the server last moved, None if not known; counts since ``watch`` began."""

    state: str = "no server"
    still_s: float | None = None
    live_requests: int | None = None
    looks: int = 0
    hangs: int = 0
    restarts: int = 0
    releases: int | None = None
    rescues: int | None = None
    averted: int | None = None
    last_hang: float | None = None
    run: str = ""
    reason: str = ""


def parse_listen(text: str | None) -> tuple[str, int] | None:
    """``HOST:PORT``, ``:PORT`` (loopback), ``PORT`` (loopback), ``[::1]:PORT``; ``off`` is None, none the default. UsageError."""
    given = (text if text is not None else DEFAULT_LISTEN).strip()
    if given == "off":
        return None
    host, separator, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if separator else ""
    if not port.isascii() or not port.isdigit() or not 0 <= int(port[:6]) <= 65535 or len(port) > 5:
        raise UsageError(
            f"--listen {given[:80]!r} is no HOST:PORT", help_text=f"For example: --listen {DEFAULT_LISTEN}, or --listen off"
        )
    return host or "127.0.0.1", int(port)


class _Families:
    """The state as metric families (a collector of prometheus-client)."""

    def __init__(self, read: Callable[[], WatchState]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        seen = self._read()
        state = GaugeMetricFamily("dsv4_repro_watch_state", "1 for the state that the server is in.", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(seen.state == name))
        yield state
        for name, text, value in (
            ("still_seconds", "Seconds since the server last moved.", seen.still_s),
            ("live_requests", "Requests that run.", seen.live_requests),
            ("agent_releases", "Waits that the agents of the workers that run have released.", seen.releases),
            ("agent_rescues", "Stalls that the agents' rescue ended.", seen.rescues),
            ("agent_averted_lengths", "Steps in which the agents' guard made a length of -1 a 0.", seen.averted),
            ("last_hang_timestamp_seconds", "When the last hang was found.", seen.last_hang),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"dsv4_repro_watch_{name}", text, value=float(value))
        for name, text, count in (
            ("looks", "Looks taken at the server.", seen.looks),
            ("hangs", "Hangs found.", seen.hangs),
            ("restarts", "Times that the server was seen to come back.", seen.restarts),
        ):
            yield CounterMetricFamily(f"dsv4_repro_watch_{name}", text, value=float(count))


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = CLIENT_S
    server: _Server
    server_version = "dsv4-repro"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(200, self.server.exposition(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/livez":
            seen = self.server.read()
            hung = seen.state == "hung"
            text = f"{seen.state}{': ' + seen.reason if hung and seen.reason else ''}\n"
            self._send(503 if hung else 200, text.encode("utf-8", "replace"), "text/plain; charset=utf-8")
        else:
            self._send(404, b"/metrics or /livez\n", "text/plain; charset=utf-8")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a probe every few seconds for weeks is no log."""


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    allow_reuse_address = True
    request_queue_size = 64
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], read: Callable[[], WatchState], clock: Clock) -> None:
        from prometheus_client import CollectorRegistry

        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.read = read
        self._clock = clock
        #: Open connections, oldest first, and until when each may stay.
        self._clients: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(_Families(read))
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the base class's look-up of our own name, which asks a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for it; the oldest client makes room."""
        with self._lock:
            if len(self._clients) >= MOST_CLIENTS:
                self._drop(next(iter(self._clients)))
            self._clients[request] = self._clock.monotonic() + CLIENT_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Five times a second: end those whose time is over, whatever they send or do not read."""
        now = self._clock.monotonic()
        with self._lock:
            for client in [one for one, until in self._clients.items() if now > until]:
                self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        """Its thread sees the end of the connection, and ends it."""
        self._clients.pop(client, None)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def exposition(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away in the middle is nobody's fault."""


class Exporter:
    """Serves until ``stop``. ``read``: the newest state, called from the server's thread."""

    def __init__(self, address: tuple[str, int], read: Callable[[], WatchState], *, clock: Clock = SYSTEM) -> None:
        try:
            self._server = _Server(address, read, clock)
        except (OSError, UnicodeError, TypeError, OverflowError) as error:  # the last three: a host that is no name
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise UnavailableError(
                f"cannot listen on {address[0]}:{address[1]}: {why}",
                help_text="Another port: --listen 127.0.0.1:PORT; none: --listen off",
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="dsv4-repro-exporter", daemon=True)

    @property
    def open_to_others(self) -> bool:
        """Whether other machines may reach it: it listens on more than this machine's loopback."""
        host = self._server.server_name
        return not (host.startswith("127.") or host == "::1")

    @property
    def address(self) -> tuple[str, int]:
        """Where it really listens (port 0 takes any)."""
        return self._server.server_name, self._server.server_port

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it; also one that was never started, for which the base class would wait for ever."""
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join(CLIENT_S + 1.0)
        self._server.server_close()
