"""Servers that answer anything: every reader of HTTP gives its typed answer within its time, and none raises anything else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import ServerError, UsageError
from dsv4_repro.forensics.collect import engine_metrics
from dsv4_repro.forensics.collect.engine_metrics import EngineReading, read_page, scrape
from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.repro.serving import hang_actions
from dsv4_repro.repro.serving.hang_actions import send_webhook
from dsv4_repro.repro.serving.served_model import served_model

Answer = bytes | Callable[[socket.socket], None]
_OK = b"HTTP/1.1 200 OK\r\n"
GARBAGE: dict[str, bytes] = {
    "a length of 26 digits": _OK + b"Content-Length: 99999999999999999999999999\r\n\r\nx",
    "a negative length": _OK + b"Content-Length: -5\r\n\r\nx",
    "a chunk of 24 digits": _OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffffffff\r\nx\r\n0\r\n\r\n",
    "a negative chunk": _OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nx\r\n0\r\n\r\n",
    "a chunk that is no number": _OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc",
    "a status of five digits": b"HTTP/1.1 99999 x\r\n\r\n",
    "no HTTP": b"\x00\x01\x1b[2Jgarbage\r\n\r\n",
    "nothing": b"",
    "a header of 70000 bytes": _OK + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    "200 headers": _OK + b"X: a\r\n" * 200 + b"\r\n",
    "100 for ever": b"HTTP/1.1 100 Continue\r\n\r\n" * 5000,
    "JSON of 100000 brackets": _OK + b"\r\n" + b"[" * 100_000,
    "not a number": _OK + b'\r\n{"data": [{"id": NaN}]}',
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
}


@pytest.fixture
def listener() -> Iterator[Callable[[Answer], str]]:
    """Give it an answer, get a URL that answers so."""
    sockets: list[socket.socket] = []

    def listen(answer: Answer) -> str:
        made = socket.create_server(("127.0.0.1", 0))
        sockets.append(made)

        def one(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.settimeout(5)
                connection.recv(65536)
                if callable(answer):
                    answer(connection)
                else:
                    connection.sendall(answer)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=one, args=(made.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{made.getsockname()[1]}"

    yield listen
    for made in sockets:
        made.close()


def _drip(connection: socket.socket) -> None:
    connection.sendall(_OK)
    for _ in range(60):
        connection.sendall(b"X: a\r\n")
        time.sleep(0.1)


@pytest.mark.parametrize("name", GARBAGE)
def test_no_answer_raises_anything_that_is_not_typed(name: str, listener: Callable[[Answer], str]) -> None:
    url = listener(GARBAGE[name])
    reading = scrape(url, timeout_s=2.0)
    assert isinstance(reading, EngineReading)
    assert not reading.values
    assert any(item.what == "/metrics" for item in reading.unread)
    page = read_page(url, "/metrics")
    assert isinstance(page, Unread | tuple)
    with pytest.raises(ServerError):
        served_model(url, timeout_s=3.0)
    assert isinstance(send_webhook(url, {}, clock=FakeClock()), str)


def test_one_time_holds_for_a_server_that_drips(listener: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = listener(_drip)
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"no whole answer within 0\.5 s"):
        served_model(url, timeout_s=0.5)
    assert time.monotonic() - began < 2.0
    monkeypatch.setattr(hang_actions, "WEBHOOK_S", 0.3)
    monkeypatch.setattr(hang_actions, "RETRIES", ())
    began = time.monotonic()
    assert send_webhook(url, {}, clock=FakeClock()) == "not delivered after 1 attempts: TimeoutError"
    assert time.monotonic() - began < 3.0


def test_the_handshake_of_tls_is_within_the_time_too(listener: Callable[[Answer], str]) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(b"\x16\x03\x03\x3f\xff")
        for _ in range(60):
            connection.sendall(b"\x00")
            time.sleep(0.1)

    began = time.monotonic()
    page = read_page(listener(drip).replace("http:", "https:"), "/metrics", timeout_s=0.5)
    assert isinstance(page, Unread)
    assert time.monotonic() - began < 2.0


def test_a_key_with_a_line_in_it_is_not_sent(listener: Callable[[Answer], str]) -> None:
    asked: list[bytes] = []

    def hear(connection: socket.socket) -> None:
        asked.append(b"asked")
        connection.sendall(_OK + b"\r\n{}")

    with pytest.raises(ServerError, match="control character"):
        served_model(listener(hear), {"Authorization": "Bearer k\r\nHost: other"})


def test_names_and_passwords_of_a_url_are_in_no_message(listener: Callable[[Answer], str]) -> None:
    for url in ("ftp://user:hunter2@host/x", "http://user:hunter2@127.0.0.1:9"):
        page = read_page(url, "/metrics", timeout_s=1.0)
        assert isinstance(page, Unread)
        assert "hunter2" not in page.why + page.remedy
        with pytest.raises((ServerError, UsageError)) as caught:
            served_model(url, timeout_s=1.0)
        assert "hunter2" not in str(caught.value)
    heard: list[bytes] = []

    def hear(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
        heard.append(b"")

    url = listener(hear).replace("http://", "http://user:hunter2@")
    assert send_webhook(url, {}, clock=FakeClock()) == "delivered, HTTP 204, attempt 1"
    assert heard
    assert "hunter2" not in send_webhook("http://user:hunter2@127.0.0.1:9/", {}, clock=FakeClock())


def test_counters_whose_sum_is_no_number_are_no_counters() -> None:
    body = b"".join(b'vllm:generation_tokens_total{engine="%d"} 1.7e308\n' % number for number in range(3))
    values, engines, bad, why = engine_metrics.parse_metrics(body + b"vllm:num_requests_running 1e17\n")
    assert (values, engines) == ({}, {})
    assert bad == 4
    assert why is not None


@pytest.mark.parametrize("value", ["9" * 400, "9" * 5000, "-1", "-" + "9" * 400, "NaN", "+Inf", "-Inf", "1e999", "1_0", "0x10", ""])
def test_a_counter_that_is_no_count_costs_its_own_line(value: str) -> None:
    body = f"vllm:generation_tokens_total {value}\nvllm:num_requests_running 2\n".encode()
    values, _, bad, why = engine_metrics.parse_metrics(body)
    assert values == {engine_metrics.SAMPLES["vllm:num_requests_running"][0]: 2.0}
    assert (bad, why) == (1, None)
