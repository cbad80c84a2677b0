"""A server to measure: started, loaded with drains whose every token is timed, ended. Standard library only, so that it runs
wherever the server runs. Used by ``server_experiments.py``.

Nothing here can take the whole run down: each stream has a deadline of its own, the server's processes are ended by their ids, and
what failed is a value.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Drain", "Server", "Stream", "compare", "gaps_of", "percentile", "run_drain", "start_drain"]


@dataclass
class Stream:
    """One request. ``arrivals``: (seconds of the monotonic clock, tokens so far) at each chunk that brought tokens."""

    index: int
    prompt: list[int]
    max_tokens: int
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    status: int | None = None
    error: str = ""
    began: float = 0.0
    ended: float | None = None
    stopped: bool = False
    sock: socket.socket | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        return self.arrivals[-1][1] if self.arrivals else 0

    @property
    def complete(self) -> bool:
        return not self.error and self.ended is not None and self.tokens >= self.max_tokens

    @property
    def output(self) -> list[Any]:
        """Token ids, or, from a server that sends none, the words of the text."""
        return list(self.token_ids) or self.text.split()

    def stop(self) -> None:
        """Hang up: the server drops the request. The thread that reads it ends."""
        self.stopped = True
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def document(self) -> dict[str, Any]:
        return {
            "index": self.index, "prompt_tokens": len(self.prompt), "max_tokens": self.max_tokens, "tokens": self.tokens,
            "status": self.status, "error": self.error[:300], "seconds": None if self.ended is None else self.ended - self.began,
        }  # fmt: skip


@dataclass
class Drain:
    """Several streams sent at once. ``threads`` end by themselves at the deadline."""

    streams: list[Stream]
    threads: list[threading.Thread] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def live(self) -> int:
        return sum(1 for stream in self.streams if stream.ended is None)

    @property
    def complete(self) -> bool:
        return all(stream.complete for stream in self.streams)

    @property
    def last_token_at(self) -> float | None:
        return max((stream.arrivals[-1][0] for stream in self.streams if stream.arrivals), default=None)

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self.streams)

    def wait(self, seconds: float) -> bool:
        """Wait for all to end. Returns whether they did."""
        end = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self.threads)

    def stop(self, seconds: float = 10.0) -> bool:
        """Hang up on every stream. Returns whether all their threads ended."""
        for stream in self.streams:
            stream.stop()
        return self.wait(seconds)

    def stalled_for(self) -> float:
        """Seconds without a token of any stream, once there was one and while some are open; else 0."""
        last = self.last_token_at
        return time.monotonic() - last if last is not None and self.live else 0.0

    def document(self) -> dict[str, Any]:
        gaps = gaps_of(self.streams)
        return {
            "complete": self.complete, "tokens": self.tokens, "streams": [stream.document() for stream in self.streams],
            "seconds": (self.last_token_at - self.began) if self.last_token_at else None,
            "longest_gap_s": max(gaps, default=None), "gap_p50_ms": percentile(gaps, 50), "gap_p99_ms": percentile(gaps, 99),
        }  # fmt: skip


def gaps_of(streams: Sequence[Stream]) -> list[float]:
    """Seconds between the chunks of each stream."""
    return [later[0] - earlier[0] for one in streams for earlier, later in zip(one.arrivals, one.arrivals[1:], strict=False)]


def percentile(gaps: Sequence[float], share: int) -> float | None:
    """In milliseconds; None: too few."""
    if len(gaps) < 2:
        return None
    return 1000.0 * statistics.quantiles(gaps, n=100, method="inclusive")[share - 1]


def compare(one: Drain, other: Drain) -> dict[str, Any]:
    """Outputs, request by request: how many tokens are equal before the first difference; None: no difference."""
    rows = []
    ids = all(stream.token_ids for drain in (one, other) for stream in drain.streams)
    by = "token ids" if ids else "words of the text"
    for left, right in zip(one.streams, other.streams, strict=False):
        a, b = left.output, right.output
        first = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if first is None and len(a) != len(b):
            first = min(len(a), len(b))
        rows.append({"index": left.index, "tokens": [len(a), len(b)], "first_difference": first})
    return {"equal": all(row["first_difference"] is None for row in rows), "by": by, "requests": rows}


def _events(response: http.client.HTTPResponse, stream: Stream, end: float) -> None:
    while time.monotonic() < end:
        if stream.stopped:
            stream.error = "hung up"
            return
        line = response.readline(1 << 20)
        if not line:
            return
        if not line.startswith(b"data:"):
            continue
        body = line[5:].strip()
        if body == b"[DONE]":
            return
        document = json.loads(body)
        if "error" in document:
            stream.error = str(document["error"])
            return
        choices = document.get("choices") or [{}]
        ids = choices[0].get("token_ids") or []
        text = choices[0].get("text") or ""
        stream.token_ids += [int(one) for one in ids]
        stream.text += text
        usage = (document.get("usage") or {}).get("completion_tokens")
        count = int(usage) if usage is not None else stream.tokens + (len(ids) or (1 if text else 0))
        if count > stream.tokens:
            stream.arrivals.append((time.monotonic(), count))
    stream.error = stream.error or "deadline"


def _send(base_url: str, model: str, stream: Stream, seconds: float) -> None:
    place = urllib.parse.urlsplit(base_url)
    stream.began = time.monotonic()
    end = stream.began + seconds
    connection = http.client.HTTPConnection(place.hostname or "127.0.0.1", place.port or 80, timeout=seconds)
    try:
        body = {
            "model": model, "prompt": stream.prompt, "max_tokens": stream.max_tokens, "min_tokens": stream.max_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        # Kept here too: the connection forgets it where the answer is the last one.
        stream.sock = connection.sock
        response = connection.getresponse()
        stream.status = response.status
        if response.status != 200:
            stream.error = f"HTTP {response.status}: {response.read(400).decode(errors='replace')}"
            return
        _events(response, stream, end)
        if not stream.error and stream.tokens < stream.max_tokens:
            stream.error = f"the stream ended after {stream.tokens} of {stream.max_tokens} tokens"
    except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError, AttributeError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    finally:
        stream.ended = time.monotonic()
        with contextlib.suppress(OSError):
            connection.close()


def start_drain(
    base_url: str,
    model: str,
    shape: Sequence[tuple[int, int]],
    *,
    seed: int,
    timeout_s: float,
    prompts: Sequence[Sequence[int]] | None = None,
) -> Drain:
    """Send ``shape`` (prompt tokens, output tokens) at once and return; prompts are made from ``seed``, or given."""
    streams = []
    for index, (size, output) in enumerate(shape):
        chance = random.Random(seed * 1000 + index)
        prompt = list(prompts[index]) if prompts is not None else [chance.randrange(4, 4000) for _ in range(size)]
        streams.append(Stream(index, prompt, output))
    drain = Drain(streams)
    for stream in streams:
        thread = threading.Thread(target=_send, args=(base_url, model, stream, timeout_s), daemon=True)
        drain.threads.append(thread)
        thread.start()
    return drain


def run_drain(
    base_url: str,
    model: str,
    shape: Sequence[tuple[int, int]],
    *,
    seed: int,
    timeout_s: float,
    prompts: Sequence[Sequence[int]] | None = None,
) -> Drain:
    """As ``start_drain``, and wait for its end or the time."""
    drain = start_drain(base_url, model, shape, seed=seed, timeout_s=timeout_s, prompts=prompts)
    drain.wait(timeout_s + 2.0)
    return drain


def descendants(pid: int) -> list[int]:
    """The process and all below it, by /proc."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{entry}/stat").read_text(errors="replace")
                parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        one = queue.pop()
        found.append(one)
        queue += parents.get(one, [])
    return found


class Server:
    """A server process and its children. ``env`` is added to ours; ``log``: its output goes there."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path, base_url: str) -> None:
        self.argv, self.env, self.log, self.base_url = list(argv), dict(env), log, base_url
        self.process: subprocess.Popen[bytes] | None = None
        self.ready_s: float | None = None

    def start(self) -> None:
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **self.env},
                start_new_session=True,
            )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def get(self, path: str, timeout: float = 3.0) -> tuple[int | None, str]:
        """Status and body; None: no answer."""
        place = urllib.parse.urlsplit(self.base_url)
        connection = http.client.HTTPConnection(place.hostname or "127.0.0.1", place.port or 80, timeout=timeout)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read(4 << 20).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return None, f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def post(self, path: str, timeout: float = 10.0) -> int | None:
        """Status of an empty POST; None: no answer."""
        place = urllib.parse.urlsplit(self.base_url)
        connection = http.client.HTTPConnection(place.hostname or "127.0.0.1", place.port or 80, timeout=timeout)
        try:
            connection.request("POST", path)
            response = connection.getresponse()
            response.read(1 << 16)
            return response.status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def wait_ready(self, seconds: float) -> str:
        """ "" when /health says 200, else why not."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if not self.alive:
                return f"the server ended: status {self.process.returncode if self.process else None}"
            if self.get("/health")[0] == 200:
                self.ready_s = time.monotonic() - began
                return ""
            time.sleep(0.25)
        return f"not ready within {seconds:g} s"

    def model(self) -> str | None:
        """The first model that it serves."""
        status, body = self.get("/v1/models", 10.0)
        try:
            return str(json.loads(body)["data"][0]["id"]) if status == 200 else None
        except (ValueError, KeyError, IndexError, TypeError):
            return None

    def pids(self) -> list[int]:
        return descendants(self.process.pid) if self.process is not None else []

    def tail(self, size: int = 4000) -> str:
        try:
            with self.log.open("rb") as stream:
                stream.seek(max(self.log.stat().st_size - size, 0))
                return stream.read().decode(errors="replace")
        except OSError as error:
            return str(error)

    def end(self, seconds: float = 10.0) -> None:
        """End every process of it: SIGTERM, then SIGKILL to each by its id."""
        if self.process is None:
            return
        pids = self.pids()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(min(seconds, 3.0))
        # A worker whose GPU is wedged does not end by itself.
        for pid in sorted(set(pids + self.pids()), reverse=True):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process = None
