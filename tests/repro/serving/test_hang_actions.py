"""The operator's command and the message: bounded, once, and nothing left behind."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.errors import UsageError
from dsv4_repro.repro.serving.hang_actions import OUTPUT_BYTES, HangCommand, checked_webhook, redacted, send_webhook


def _gone(pid: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_the_command_gets_the_environment_and_its_output_is_kept(tmp_path: Path) -> None:
    command = HangCommand("echo run $DSV4_REPRO_RUN; echo err >&2; exit 7", {"DSV4_REPRO_RUN": "R"}, tmp_path / "o", timeout_s=20)
    assert command.wait(10) == "exit status 7"
    assert (tmp_path / "o").read_text() == "run R\nerr\n"
    assert oct((tmp_path / "o").stat().st_mode & 0o777) == "0o600"


def test_one_that_does_not_end_is_ended_with_all_it_started(tmp_path: Path) -> None:
    command = HangCommand(f"trap '' TERM; sleep 100 & echo $! > {tmp_path}/pid; wait", {}, tmp_path / "o", timeout_s=0.5)
    assert "ended after 0.5 s" in command.wait(15)
    assert _gone(int((tmp_path / "pid").read_text()))


def test_stop_ends_it_at_once(tmp_path: Path) -> None:
    command = HangCommand(f"echo $$ > {tmp_path}/pid; sleep 100", {}, tmp_path / "o", timeout_s=100)
    until = time.monotonic() + 5
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert command.running
    command.stop()
    assert not command.running
    assert _gone(int((tmp_path / "pid").read_text()))


def test_much_output_is_cut_and_does_not_hold_it_up(tmp_path: Path) -> None:
    command = HangCommand(f"head -c {OUTPUT_BYTES + 100000} /dev/zero", {}, tmp_path / "o", timeout_s=30)
    assert command.wait(20) == "exit status 0"
    text = (tmp_path / "o").read_bytes()
    assert text.startswith(b"\0" * OUTPUT_BYTES)
    assert text.endswith(b"\n[100000 more bytes were dropped]\n")


def test_what_it_leaves_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    command = HangCommand(f"sleep 30 & echo $! > {tmp_path}/pid", {}, tmp_path / "o", timeout_s=20)
    began = time.monotonic()
    assert command.wait(10) == "exit status 0"
    assert time.monotonic() - began < 5
    os.kill(int((tmp_path / "pid").read_text()), 9)


class _Receiver(http.server.BaseHTTPRequestHandler):
    answers: ClassVar[list[int]] = []
    bodies: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append(json.loads(body))
        self.send_response(self.answers.pop(0) if self.answers else 200)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def receiver() -> Iterator[str]:
    _Receiver.answers, _Receiver.bodies = [], []
    server = http.server.HTTPServer(("127.0.0.1", 0), _Receiver)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook"
    finally:
        server.shutdown()
        server.server_close()


def test_a_message_is_delivered_after_errors_of_the_other_side(receiver: str) -> None:
    _Receiver.answers = [500, 429, 200]
    clock = FakeClock()
    assert send_webhook(receiver, {"a": 1}, clock=clock) == "delivered, HTTP 200, attempt 3"
    assert _Receiver.bodies == [{"a": 1}] * 3
    assert clock.monotonic() == 6.0


def test_it_is_given_up_after_four_attempts_and_at_once_where_it_is_refused(receiver: str) -> None:
    _Receiver.answers = [500] * 9
    assert send_webhook(receiver, {}, clock=FakeClock()) == "not delivered after 4 attempts: HTTP 500"
    assert len(_Receiver.bodies) == 4
    _Receiver.answers = [403]
    assert send_webhook(receiver, {}, clock=FakeClock()) == "not delivered: HTTP 403"


def test_a_redirection_is_not_followed(receiver: str) -> None:
    _Receiver.answers = [307]
    assert send_webhook(receiver, {}, clock=FakeClock()) == "not delivered: HTTP 307"
    assert len(_Receiver.bodies) == 1


def test_nobody_there() -> None:
    found = send_webhook("http://127.0.0.1:9/secret-path", {}, clock=FakeClock())
    assert found.startswith("not delivered after 4 attempts")
    assert "secret-path" not in found


def test_only_http_urls() -> None:
    for text in ("file:///etc/passwd", "ftp://x/y", "x", "http://", "http://h:99999/", ""):
        with pytest.raises(UsageError):
            checked_webhook(text)
    assert checked_webhook("https://hooks.example.org/T0/B0") == "https://hooks.example.org/T0/B0"


def test_the_message_is_redacted() -> None:
    found = redacted({"sentence": "log: /home/jdoe/run/engine.log on gpu-17.prod.corp.example 10.4.5.6", "class": "unknown"})
    text = json.dumps(found)
    assert "jdoe" not in text
    assert "10.4.5.6" not in text
    assert found["class"] == "unknown"
