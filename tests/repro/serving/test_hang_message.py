"""The process that sends the message: redacted, ended with the watch, and nothing of it is lost quietly."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.repro.serving.hang_message import send_in_process


@contextmanager
def _receiver() -> Iterator[tuple[str, list[Any]]]:
    bodies: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/secret-path", bodies
    finally:
        server.shutdown()
        server.server_close()


def test_it_is_sent_redacted() -> None:
    with _receiver() as (url, bodies):
        found = send_in_process(url, {"sentence": "log /home/jdoe/x of 10.4.5.6", "class": "unknown"}, stop=threading.Event())
    assert found == "delivered, HTTP 204, attempt 1"
    (body,) = bodies
    assert body["class"] == "unknown"
    assert "jdoe" not in json.dumps(body)
    assert "10.4.5.6" not in json.dumps(body)


def test_an_end_of_the_watch_ends_it(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    script = f"import os, time; open({str(tmp_path / 'own')!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    began = time.monotonic()
    found = send_in_process("http://127.0.0.1:9/secret-path", {}, stop=stop, argv=[sys.executable, "-c", script])
    assert (found, time.monotonic() - began < 5) == ("given up at the end of the watch", True)
    if (tmp_path / "own").exists():
        assert not Path(f"/proc/{int((tmp_path / 'own').read_text())}").exists()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9"),
        ("", "ended with status 0"),
        ("import time; time.sleep(300)", "did not end in time"),
        ("print('x' * 100000)", "x" * 1000),
    ],
)
def test_its_end_is_told(script: str, words: str) -> None:
    argv = [sys.executable, "-c", script]
    found = send_in_process("http://h/secret-path", {}, stop=threading.Event(), argv=argv, seconds=1.0)
    assert words in found
    assert "secret-path" not in found
    assert len(found) <= 1000


def test_one_that_cannot_be_started_is_told() -> None:
    found = send_in_process("http://h/secret-path", {}, stop=threading.Event(), argv=["/nonexistent/python"])
    assert found.startswith("not delivered")
    assert "secret-path" not in found
