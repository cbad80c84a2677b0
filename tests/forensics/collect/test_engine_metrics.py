"""The reader of ``/metrics`` and ``/health``: vLLM's own names, and every way in which a server can answer badly."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4_repro.forensics.collect import engine_metrics
from dsv4_repro.forensics.collect.engine_metrics import parse_metrics, scrape

TEXT = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="1",model_name="m"} 1e+03
vllm:prompt_tokens_total{engine="0",model_name="m \\" } x"} 7.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 4.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 55.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 99.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 4.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 11.0
vllm:num_preemptions_total{engine="0",model_name="m"} 0.0
process_cpu_seconds_total 12.0
"""


def test_figures_are_added_over_engines_and_kept_by_engine() -> None:
    values, engines, bad, why = parse_metrics(TEXT)
    assert values == {
        "running": 5.0, "waiting": 0.0, "kv_usage": 0.5, "generation_tokens": 1100.0, "prompt_tokens": 7.0, "iterations": 55.0,
        "finished": 5.0, "drafted": 20.0, "accepted": 11.0, "preemptions": 0.0,
    }  # fmt: skip
    assert (engines["0"]["running"], engines["1"]["running"], engines["1"]["generation_tokens"]) == (3.0, 2.0, 1000.0)
    assert (bad, why) == (0, None)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "is empty"), (b"   \n", "is empty"), (b"<html>hello</html>", "is a document"), (b'{"error": 1}', "is a document"),
        (b"\x00\xff\xfe garbage", "no Prometheus text"), (b"process_cpu_seconds_total 12.0\n", "no counters of vLLM"),
        (b"vllm:num_requests_running{engine=\n", "none of 1 lines"), (b"vllm:num_requests_running NaN\n", "none of 1 lines"),
        (b"vllm:num_requests_running -1\n", "none of 1 lines"),
    ],
)  # fmt: skip
def test_what_is_no_exposition_is_unread_with_why(body: bytes, why: str) -> None:
    values, engines, _, unread = parse_metrics(body)
    assert (values, engines) == ({}, {})
    assert unread is not None
    assert why in unread.why


def test_a_torn_line_costs_itself_alone() -> None:
    values, _, bad, why = parse_metrics(
        TEXT.replace(b'num_requests_running{engine="0",model_name="m"} 3.0', b"num_requests_running{eng")
    )
    assert (values["running"], values["generation_tokens"], bad, why) == (2.0, 1100.0, 1, None)


def test_a_figure_that_is_not_exported_is_not_there() -> None:
    values, _, _, _ = parse_metrics(b"vllm:num_requests_running 1\n")
    assert values == {"running": 1.0}


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=400), st.integers(0, len(TEXT)), st.integers(0, 60))
@example(b"\r", 100, 3)
def test_any_bytes_in_an_exposition_give_figures_or_a_reason(junk: bytes, at: int, cut: int) -> None:
    values, engines, bad, why = parse_metrics(TEXT[:at] + junk + TEXT[at + cut :])
    assert bool(values) is (why is None)
    assert all(value >= 0 and value == value and value != float("inf") for value in values.values())
    assert bad >= 0
    assert len(engines) <= 1024


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([*engine_metrics.SAMPLES, "vllm:other"]), st.text(max_size=12), st.text(max_size=12)), max_size=20
    )
)
def test_any_lines_of_these_families_give_figures_or_a_reason(lines: list[tuple[str, str, str]]) -> None:
    body = "\n".join(f"{name}{{engine={label}}} {value}" for name, label, value in lines).encode("utf-8", "replace")
    values, _, _, why = parse_metrics(body)
    assert bool(values) is (why is None)


def test_a_million_lines_are_bounded_in_time() -> None:
    body = b'vllm:num_requests_running{engine="0"} 1\n' * 100_000
    began = time.process_time()
    values, engines, _, why = parse_metrics(body)
    # Half a sum would be a counter that goes back: none is given.
    assert (values, engines) == ({}, {})
    assert why is not None
    assert f"more than {engine_metrics._MOST_LINES} lines" in why.why
    assert time.process_time() - began < 5.0


@contextlib.contextmanager
def server(answer: Callable[[socket.socket, str], None]) -> Iterator[str]:
    """A server that accepts, reads the first line, and then does what ``answer(connection, path)`` does."""
    stop = threading.Event()
    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)

        def one(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                connection.settimeout(5)
                path = connection.recv(4096).split(b" ")[1].decode()
                answer(connection, path)

        def accept() -> None:
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listening.accept()
                    thread = threading.Thread(target=one, args=(connection,), daemon=True)
                    threads.append(thread)
                    thread.start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            stop.set()
            accepting.join(5)
            for thread in threads:
                thread.join(6)


def reply(status: str, body: bytes, extra: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n{extra}\r\n".encode() + body


def good(connection: socket.socket, path: str) -> None:
    connection.sendall(reply("200 OK", TEXT if path.endswith("/metrics") else b""))


def test_a_good_server() -> None:
    with server(good) as url:
        reading = scrape(url)
    assert (reading.health, reading.values["running"], reading.unread) == (200, 5.0, ())
    assert 0 <= reading.took_s < 2


def test_a_path_before_the_endpoints_is_kept() -> None:
    paths = []

    def answer(connection: socket.socket, path: str) -> None:
        paths.append(path)
        good(connection, path)

    with server(answer) as url:
        assert scrape(url + "/engine/").values["running"] == 5.0
    assert paths == ["/engine/health", "/engine/metrics"]


def test_chunks_and_a_line_that_stays_open() -> None:
    def answer(connection: socket.socket, path: str) -> None:
        if path == "/health":
            connection.sendall(reply("200 OK", b""))
        else:
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            connection.sendall(f"{len(TEXT):x}\r\n".encode() + TEXT + b"\r\n0\r\n\r\n")
        time.sleep(1.0)

    with server(answer) as url:
        reading = scrape(url, timeout_s=3.0)
    assert reading.values["running"] == 5.0
    assert reading.took_s < 0.9


def drip(connection: socket.socket, path: str) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")
    for _ in range(40):
        connection.sendall(b"# x\n")
        time.sleep(0.1)


def silent(connection: socket.socket, path: str) -> None:
    time.sleep(3)


@pytest.mark.parametrize("answer", [drip, silent])
def test_a_server_that_drips_or_is_silent_does_not_outlast_the_deadline(answer: Callable[[socket.socket, str], None]) -> None:
    with server(answer) as url:
        began = time.monotonic()
        reading = scrape(url, timeout_s=0.6)
        took = time.monotonic() - began
    assert took < 1.2
    assert reading.health is None
    assert [entry.what for entry in reading.unread] == ["/health", "/metrics"]
    assert all("no whole answer within" in entry.why for entry in reading.unread)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "without an answer"), (b"SSH-2.0-OpenSSH_9\r\n", "not an HTTP answer"),
        (reply("404 Not Found", b"no"), "HTTP status 404"),
        (reply("401 Unauthorized", b"no"), "HTTP status 401"), (reply("200 OK", b"<html>"), "is a document"),
        (reply("200 OK", TEXT[:100], length=9999), "cut short"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n", "not an HTTP"),
        (b"\x00" * 100, "not an HTTP answer"),
    ],
)  # fmt: skip
def test_a_bad_answer_is_unread_with_why(raw: bytes, why: str) -> None:
    with server(lambda connection, path: connection.sendall(raw)) as url:
        reading = scrape(url, timeout_s=1.0, health=False)
    assert reading.values == {}
    assert why in reading.unread[0].why


def test_an_endless_answer_is_bounded() -> None:
    def answer(connection: socket.socket, path: str) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(4000):
                connection.sendall(b"vllm:num_requests_running 1\n" * 200)

    with server(answer) as url:
        reading = scrape(url, timeout_s=20.0, health=False)
    assert "longer than 4096 KiB" in reading.unread[0].why


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1", "http://", "127.0.0.1:80", "http://127.0.0.1:notaport", "http://[::1", "http://\x00/"]
)
def test_a_url_that_is_none_is_unread(url: str) -> None:
    reading = scrape(url, timeout_s=0.5)
    assert reading.values == {}
    assert reading.unread


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    reading = scrape(f"http://127.0.0.1:{port}", timeout_s=0.5)
    assert (reading.health, reading.values) == (None, {})
    assert "refused" in reading.unread[0].why


def test_a_name_server_that_does_not_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def stuck(*_: object, **__: object) -> list[object]:
        done.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    began = time.monotonic()
    reading = scrape("http://a-server.example:8000", timeout_s=0.4)
    took = time.monotonic() - began
    done.set()
    assert took < 1.0
    assert "no whole answer within" in reading.unread[-1].why
