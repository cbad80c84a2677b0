"""The process that sends the message: redacted, ended with the watch, and nothing of it is lost quietly."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from dsv4_repro.repro.serving.hang_message import send_in_process

from ..webhook_receiver import receiver


def test_it_is_sent_redacted() -> None:
    with receiver("secret-path") as (url, bodies):
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
