"""What Prometheus and a kubelet see."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsv4_repro.errors import UnavailableError, UsageError
from dsv4_repro.repro.serving.exporter import MOST_CLIENTS, Exporter, WatchState, parse_listen


class Box:
    state = WatchState()


@pytest.fixture
def served() -> Iterator[tuple[Box, tuple[str, int]]]:
    box = Box()
    exporter = Exporter(("127.0.0.1", 0), lambda: box.state)
    exporter.start()
    try:
        yield box, exporter.address
    finally:
        exporter.stop()


def _get(address: tuple[str, int], path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(*address, timeout=5)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("state", ["no server", "starting", "healthy", "suspect", "crashed", "exited"])
def test_only_a_hang_is_503(served: tuple[Box, tuple[str, int]], state: str) -> None:
    box, address = served
    box.state = WatchState(state=state)
    assert _get(address, "/livez") == (200, f"{state}\n")
    box.state = WatchState(state="hung", reason="a launched step has not ended")
    assert _get(address, "/livez?x=1") == (503, "hung: a launched step has not ended\n")


def test_the_exposition_is_prometheus_text(served: tuple[Box, tuple[str, int]]) -> None:
    box, address = served
    box.state = WatchState(state="hung", still_s=12.5, live_requests=3, looks=100, hangs=1, restarts=2, last_hang=1.8e9)
    status, text = _get(address, "/metrics")
    assert status == 200
    values = {
        (sample.name, sample.labels.get("state", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["dsv4_repro_watch_state", "hung"] == 1
    assert values["dsv4_repro_watch_state", "healthy"] == 0
    assert values["dsv4_repro_watch_still_seconds", ""] == 12.5
    assert values["dsv4_repro_watch_live_requests", ""] == 3
    assert values["dsv4_repro_watch_hangs_total", ""] == 1
    assert values["dsv4_repro_watch_restarts_total", ""] == 2


def test_what_is_not_known_is_not_exported_as_0(served: tuple[Box, tuple[str, int]]) -> None:
    _, address = served
    text = _get(address, "/metrics")[1]
    assert "still_seconds" not in text
    assert "live_requests" not in text


def test_other_paths_and_methods(served: tuple[Box, tuple[str, int]]) -> None:
    _, address = served
    assert _get(address, "/")[0] == 404
    assert _get(address, "/../../etc/passwd")[0] == 404
    assert _get(address, "/livez", "POST")[0] == 501


def test_a_silent_client_does_not_keep_the_others_out(served: tuple[Box, tuple[str, int]]) -> None:
    _, address = served
    with socket.create_connection(address) as silent:
        silent.sendall(b"GET /live")
        assert _get(address, "/livez")[0] == 200


def test_where_to_listen() -> None:
    assert parse_listen(None) == ("127.0.0.1", 9477)
    assert parse_listen("off") is None
    assert parse_listen(":9000") == ("127.0.0.1", 9000)
    assert parse_listen("9000") == ("127.0.0.1", 9000)
    assert parse_listen("0.0.0.0:9000") == ("0.0.0.0", 9000)
    assert parse_listen("[::1]:9000") == ("::1", 9000)
    for text in ("", "host", "host:", "host:x", "host:99999", "h:-1", "h:1234567", "h:٣"):
        with pytest.raises(UsageError):
            parse_listen(text)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UnavailableError, match="cannot listen"):
            Exporter(("127.0.0.1", taken.getsockname()[1]), WatchState)


def _closed_within(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_a_client_that_drips_keeps_nobody_waiting_and_has_its_time(served: tuple[Box, tuple[str, int]]) -> None:
    _, address = served
    ended: list[float] = []

    def drip() -> None:
        began = time.monotonic()
        with socket.create_connection(address) as connection, suppress(OSError):
            while time.monotonic() - began < 15:
                connection.sendall(b"G")
                time.sleep(0.1)
        ended.append(time.monotonic() - began)

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    time.sleep(0.2)
    began = time.monotonic()
    assert _get(address, "/livez")[0] == 200
    assert time.monotonic() - began < 1.0
    thread.join(10)
    assert ended
    assert ended[0] < 5.0


def test_clients_are_bounded_and_the_newest_is_served(served: tuple[Box, tuple[str, int]]) -> None:
    _, address = served
    idle = [socket.create_connection(address) for _ in range(MOST_CLIENTS)]
    time.sleep(0.5)
    assert _get(address, "/livez")[0] == 200
    assert _closed_within(idle[0], 1.0)
    assert all(_closed_within(connection, 5.0) for connection in idle)
    for connection in idle:
        connection.close()


def test_it_ends_at_once_whoever_is_connected() -> None:
    exporter = Exporter(("127.0.0.1", 0), WatchState)
    exporter.start()
    with socket.create_connection(exporter.address):
        time.sleep(0.2)
        began = time.monotonic()
        exporter.stop()
        assert time.monotonic() - began < 1.5


@pytest.mark.parametrize("host", ["\xe4" * 70, "a" * 70, "\x1b[2J", "no-such-host.invalid"])
def test_a_host_that_cannot_be_is_typed(host: str) -> None:
    with pytest.raises(UnavailableError, match="cannot listen"):
        Exporter((host, 0), WatchState)


def test_it_knows_whether_others_may_read_it() -> None:
    for host, expected in (("127.0.0.1", False), ("0.0.0.0", True)):
        exporter = Exporter((host, 0), WatchState)
        assert exporter.open_to_others is expected
        exporter._server.server_close()


def test_one_that_was_never_started_is_stopped_at_once() -> None:
    """Ctrl-C between making and starting it."""
    made = Exporter(("127.0.0.1", 0), WatchState)
    thread = threading.Thread(target=made.stop, daemon=True)
    thread.start()
    thread.join(5.0)
    assert not thread.is_alive()
