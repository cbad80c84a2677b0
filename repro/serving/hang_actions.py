"""What ``watch`` does for others when it finds a hang: one command of the operator, one message to a URL. Both bounded, both once.

The command is the operator's own (``sh -c``), leads a session of its own, has a deadline, and the first megabyte of its output is
kept. The message is JSON, redacted, and sent a few times at most; it is never sent anywhere but where it was told to.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from ...clock import SYSTEM, Clock
from ...errors import UsageError

__all__ = ["WEBHOOK_SCHEMA", "HangCommand", "checked_webhook", "redacted", "send_webhook", "webhook_schema"]

WEBHOOK_SCHEMA = "dsv4-repro/webhook/1"
OUTPUT_BYTES = 1 << 20
TERM_S = 5.0
WEBHOOK_S = 10.0
#: Seconds before the second, third and fourth attempt.
RETRIES = (1.0, 5.0, 15.0)


class HangCommand:
    """One run of the operator's command. ``wait`` gives what became of it; ``stop`` ends it and all of its session's group."""

    def __init__(
        self, command: str, environment: Mapping[str, str], output: Path, *, timeout_s: float, clock: Clock = SYSTEM
    ) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self.outcome = ""
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self.outcome = f"could not be started: {error}"
        self._reader = threading.Thread(target=self._keep, name="dsv4-repro-on-hang", daemon=True)
        self._waiter = threading.Thread(target=self._watch, name="dsv4-repro-on-hang-wait", daemon=True)
        if self._process is not None:
            self._reader.start()
            self._waiter.start()

    def _keep(self) -> None:
        """The first ``OUTPUT_BYTES`` go to the file; the rest is read and dropped, so that the command is not held up."""
        assert self._process is not None
        stream: IO[bytes] | None = self._process.stdout
        assert stream is not None
        kept = dropped = 0
        with ExitStack() as closing, suppress(ValueError):
            closing.enter_context(stream)
            into: IO[bytes] | None = None
            with suppress(OSError):
                fd = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                into = closing.enter_context(os.fdopen(fd, "wb", buffering=0))
            while piece := stream.read1(1 << 16):  # type: ignore[attr-defined]
                take = piece[: OUTPUT_BYTES - kept]
                kept += len(take)
                dropped += len(piece) - len(take)
                if into is not None and take:
                    try:
                        into.write(take)
                    except OSError:
                        # A full disk: the output is lost, and the command must not end of a broken pipe.
                        into = None
            if dropped and into is not None:
                with suppress(OSError):
                    into.write(f"\n[{dropped} more bytes were dropped]\n".encode())

    def _watch(self) -> None:
        assert self._process is not None
        try:
            status = self._process.wait(self._timeout_s)
            self.outcome = f"exit status {status}" if status >= 0 else f"ended by signal {-status}"
        except subprocess.TimeoutExpired:
            self._end()
            self.outcome = f"ended after {self._timeout_s:g} s (--on-hang-timeout)"
        # What it left behind in the background may keep the pipe open: it is not waited for.
        self._reader.join(1.0)

    def _end(self) -> None:
        assert self._process is not None
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TERM_S)
                if number == signal.SIGTERM:
                    continue
                return

    @property
    def running(self) -> bool:
        return self._process is not None and self._waiter.is_alive()

    def wait(self, seconds: float) -> str:
        """What became of it, "" if it still runs after ``seconds``."""
        if self._process is not None:
            self._waiter.join(seconds)
        return self.outcome

    def stop(self) -> None:
        """End it if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._end()
        if self._process is not None:
            self._waiter.join(TERM_S)


def checked_webhook(url: str) -> str:
    """The URL if a message can be posted to it; UsageError otherwise. Its path may be a secret and is not repeated."""
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or 0 < parts.port < 65536
    except ValueError:
        port_ok, parts = False, urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok:
        raise UsageError("--webhook is no http or https URL")
    return url


def webhook_schema() -> dict[str, Any]:
    """The JSON Schema of the message."""
    text: dict[str, Any] = {"type": "string"}
    maybe: dict[str, Any] = {"type": ["string", "null"]}
    properties: dict[str, Any] = {
        "schema": {"const": WEBHOOK_SCHEMA}, "event": {"const": "hang"}, "when": text,
        "outcome": {"enum": ["hang", "clean", "other", "inconclusive"]}, "class": text, "cause": maybe,
        "confidence": {"enum": ["high", "medium", "low"]}, "signature": maybe, "sentence": text,
        "live_requests": {"type": ["integer", "null"]}, "hang_number": {"type": "integer"}, "still_s": {"type": "number"},
    }  # fmt: skip
    return {"title": "WebhookMessage", "type": "object", "required": sorted(properties), "properties": properties}


def redacted(document: Mapping[str, Any], hosts: Sequence[str] = ()) -> dict[str, Any]:
    """The message without names of hosts, users, addresses, paths and secrets."""
    from ...reports.redact import Redactor
    from ...reports.redact_json import redact_json

    redactor = Redactor(secrets.token_bytes(16), hosts=hosts)
    found = redact_json(redactor, dict(document), "webhook")
    return found if isinstance(found, dict) else {}


def _post(url: str, body: bytes) -> int | str:
    """HTTP status of one POST, or the name of what went wrong, within ``WEBHOOK_S`` seconds whatever the receiver drips. Redirects
    are not followed, and the answer's body is not read: a message goes where it was told to, and nowhere else."""
    from .loop_thread import LoopThread

    found: list[int] = []

    async def main() -> None:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=WEBHOOK_S)
        headers = {"Content-Type": "application/json"}
        # The environment's proxies are the operator's, and so is the URL.
        async with (
            aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=True) as session,
            session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            found.append(answer.status)
            answer.close()

    thread = LoopThread("dsv4-repro-webhook-post", main)
    thread.start()
    ended = thread.join(WEBHOOK_S + 1.0) or thread.stop(1.0)
    if found:
        return found[0]
    return type(thread.error).__name__ if thread.error is not None else "TimeoutError" if not ended else "no answer"


def send_webhook(url: str, document: Mapping[str, Any], *, clock: Clock = SYSTEM, stop: threading.Event | None = None) -> str:
    """POST the message; tried again after an error of the network or a status of 429 or 5xx. What became of it, without the URL."""
    body = json.dumps(document).encode()
    last = ""
    for number, pause in enumerate((0.0, *RETRIES), 1):
        if stop is not None and stop.is_set():
            return f"given up at the end: {last}"
        clock.sleep(pause)
        found = _post(url, body)
        if isinstance(found, int) and 200 <= found < 300:
            return f"delivered, HTTP {found}, attempt {number}"
        last = f"HTTP {found}" if isinstance(found, int) else found
        if isinstance(found, int) and found != 429 and found < 500:
            return f"not delivered: {last}"
    return f"not delivered after {1 + len(RETRIES)} attempts: {last}"
