"""The served model's name, from servers that answer anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dsv4_repro.errors import ServerError, UsageError
from dsv4_repro.repro.serving.served_model import served_model


@pytest.fixture
def server() -> Iterator[Any]:
    """``server.answer = (status, bytes, headers)``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, headers = made.answer  # type: ignore[attr-defined]
            made.asked = dict(self.headers)  # type: ignore[attr-defined]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            return

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def _url(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_the_first_model_is_named_and_the_key_is_sent(server: Any) -> None:
    server.answer = (200, json.dumps({"data": [{"id": "tiny"}, {"id": "other"}]}).encode(), {})
    assert served_model(_url(server) + "/", {"Authorization": "Bearer k"}) == "tiny"
    assert server.asked["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (200, b"", {}),
        (200, b"{}", {}),
        (200, b'{"data": []}', {}),
        (200, b'{"data": [{"id": 7}]}', {}),
        (200, b"[" * 100_000, {}),
        (200, b"\xff\xfe", {}),
        (401, b"no", {}),
        (302, b"", {"Location": "http://127.0.0.1:1/"}),
        (500, b"x" * 10_000, {}),
    ],
)
def test_answers_that_name_nothing_are_typed(server: Any, status: int, body: bytes, headers: dict[str, str]) -> None:
    server.answer = (status, body, headers)
    with pytest.raises(ServerError) as error:
        served_model(_url(server))
    assert error.value.help_text
    if status == 401:
        assert "VLLM_API_KEY" in error.value.help_text


def test_nobody_and_no_address() -> None:
    with pytest.raises(ServerError, match="does not answer"):
        served_model("http://127.0.0.1:1", timeout_s=2.0)
    with pytest.raises(UsageError):
        served_model("file:///etc/passwd")
