"""The message about a hang, redacted and sent by a process of its own (``python -m … < DOCUMENT``).

The HTTP client and the redaction's tables would stay in a process that watches for weeks. The URL may be a secret: it goes through
standard input, never into a command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...clock import SYSTEM, Clock, Deadline
from .hang_process import start_child

__all__ = ["MESSAGE_S", "main", "send_in_process"]

#: Four attempts of 10 s, 21 s between them, and imports on a busy machine.
MESSAGE_S = 120.0
_MODULE = "dsv4_repro.repro.serving.hang_message"
_MOST_LINE = 1 << 20
_TURN_S = 0.2


def send_in_process(
    url: str,
    document: Mapping[str, Any],
    *,
    stop: threading.Event,
    seconds: float = MESSAGE_S,
    argv: Sequence[str] | None = None,
    clock: Clock = SYSTEM,
) -> str:
    """Redact and POST ``document``; what became of it, in words without the URL. Any thread. Ended when ``stop`` is set."""
    try:
        process = start_child(_MODULE, argv, stderr=subprocess.DEVNULL)
    except (OSError, ValueError) as error:
        return f"not delivered: its process could not be started: {error}"
    with process:
        try:
            return _outcome(process, json.dumps({"url": url, "document": document}).encode(), stop.is_set, Deadline(seconds, clock))
        finally:
            process.kill()


def _outcome(process: subprocess.Popen[bytes], line: bytes, stopped: Callable[[], bool], deadline: Deadline) -> str:
    left: bytes | None = line
    while True:
        with suppress(subprocess.TimeoutExpired):
            # Asked again, it goes on with the line that it was given first.
            given, left = left, None
            answer, _ = process.communicate(given, _TURN_S)
            text = answer[:1000].decode("utf-8", "replace").strip()
            return text if process.returncode == 0 and text else f"not known: its process ended with status {process.returncode}"
        if stopped():
            return "given up at the end of the watch"
        if deadline.expired:
            return "given up: its process did not end in time"


def main() -> int:
    """Standard input: the URL and the document. Standard output: what became of it."""
    from .hang_actions import redacted, send_webhook

    try:
        asked = json.loads(sys.stdin.buffer.read(_MOST_LINE))
        url, document = str(asked["url"]), dict(asked["document"])
    except (ValueError, LookupError, TypeError):
        print("standard input holds no message", file=sys.stderr)
        return 2
    print(send_webhook(url, redacted(document)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
