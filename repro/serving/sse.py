"""Server-sent events of a completion stream, read from bytes that are not trusted: bounded lines, bounded total, one exception.

Pure: bytes in, events out. The shape (``data: {json}`` lines, an empty line between, ``data: [DONE]`` at the end, an ``error``
object when the engine died) is that of ``entrypoints/openai/completion/serving.py`` of vLLM 0.23.0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = [
    "MAX_GARBAGE_LINES",
    "MAX_LINE",
    "MAX_RESPONSE",
    "CompletionChunk",
    "EventReader",
    "StreamFormatError",
    "error_text",
    "parse_chunk",
    "parse_document",
]

#: Bytes of one line. The first chunk may carry the prompt's token ids: 7 bytes each, a prompt of 128k tokens below 1 MiB.
MAX_LINE = 1 << 20
#: Bytes of one response. 100k tokens at 400 bytes a chunk are 40 MB.
MAX_RESPONSE = 64 << 20
#: Lines of one response that are neither data nor a comment nor empty.
MAX_GARBAGE_LINES = 100
_MAX_TOKEN_ID = (1 << 31) - 1


class StreamFormatError(ValueError):
    """The stream is not what a completions server sends; the message says where. ``overrun``: it was too long, not wrong."""

    def __init__(self, message: str, *, overrun: bool = False) -> None:
        super().__init__(message)
        self.overrun = overrun


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """One event. ``completion_tokens``: of ``usage``, all tokens so far (None: no usage). ``token_ids``: those of this chunk, None
    where the server sends none. ``error``: the server's own error text, empty if none. ``final_usage``: a chunk without choices."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: str = ""
    final_usage: bool = False


class EventReader:
    """Cuts bytes into the payloads of ``data:`` lines. Holds at most one line."""

    def __init__(self, *, max_line: int = MAX_LINE, max_response: int = MAX_RESPONSE) -> None:
        self._max_line = max_line
        self._max_response = max_response
        self._rest = bytearray()
        self._garbage = 0
        self.seen = 0
        self.done = False

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that ``data`` completes; ``[DONE]`` sets ``done`` and nothing after it is read. StreamFormatError."""
        if self.done:
            return []
        self.seen += len(data)
        if self.seen > self._max_response:
            raise StreamFormatError(f"more than {self._max_response} bytes in one response", overrun=True)
        lines = data.split(b"\n")
        payloads: list[bytes] = []
        for number, piece in enumerate(lines):
            self._rest += piece
            if len(self._rest) > self._max_line:
                raise StreamFormatError(f"a line of more than {self._max_line} bytes", overrun=True)
            if number == len(lines) - 1:
                break
            line = bytes(self._rest).strip(b"\r")
            self._rest.clear()
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    self.done = True
                    return payloads
                payloads.append(payload)
            elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                self._garbage += 1
                if self._garbage > MAX_GARBAGE_LINES:
                    raise StreamFormatError(f"more than {MAX_GARBAGE_LINES} lines that are no server-sent event")
        return payloads


def _count(value: Any, name: str, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise StreamFormatError(f"{name} is no number from 0 to {most}")
    return value


def _token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise StreamFormatError("token_ids is no list")
    return tuple(_count(one, "a token id", _MAX_TOKEN_ID) for one in value)


def error_text(document: Any) -> str:
    """The message of an OpenAI-style error document, empty if it is none."""
    if not isinstance(document, dict) or not document.get("error"):
        return ""
    error = document["error"]
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:500] or "an error without a message"


def parse_document(payload: bytes) -> dict[str, Any]:
    """A JSON object from untrusted bytes. StreamFormatError."""
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise StreamFormatError(f"not JSON: {str(error)[:100] or type(error).__name__}") from None
    if not isinstance(document, dict):
        raise StreamFormatError(f"a JSON {type(document).__name__}, not an object")
    return document


def parse_chunk(payload: bytes, *, max_tokens: int) -> CompletionChunk:
    """One event of a stream that may bring at most ``max_tokens`` tokens. StreamFormatError."""
    document = parse_document(payload)
    if error := error_text(document):
        return CompletionChunk(error=error)
    usage = document.get("usage")
    total = None
    if isinstance(usage, dict) and usage.get("completion_tokens") is not None:
        total = _count(usage["completion_tokens"], "usage.completion_tokens", max_tokens)
    choices = document.get("choices")
    if not isinstance(choices, list):
        raise StreamFormatError("no list of choices")
    if not choices:
        return CompletionChunk(completion_tokens=total, final_usage=True)
    choice = choices[0]
    if len(choices) != 1 or not isinstance(choice, dict):
        raise StreamFormatError("not one choice, though one was asked for")
    text, reason = choice.get("text", ""), choice.get("finish_reason")
    if not isinstance(text, str) or not (reason is None or isinstance(reason, str)):
        raise StreamFormatError("text or finish_reason is no text")
    return CompletionChunk(
        text=text,
        token_ids=_token_ids(choice.get("token_ids")),
        completion_tokens=total,
        finish_reason=reason[:40] if reason else None,
    )
