"""Messages between a workload's child process and its parent: length-prefixed JSON objects over a socket pair.

Four bytes of length (big-endian), then one JSON object. Receiving never blocks for longer than asked, a half message stays in the
buffer until the rest comes, and the peer's end is a value (``CLOSED``), not an exception: a child that dies is a finding.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final

from ..errors import OurFaultError

__all__ = ["CLOSED", "LARGEST_MESSAGE", "Channel"]

#: Larger messages are refused on both sides, bytes: a length word of garbage must not make a reader wait for gigabytes.
LARGEST_MESSAGE = 16 << 20
_LENGTH = struct.Struct(">I")


class _Closed:
    """The peer is gone."""

    def __repr__(self) -> str:
        return "CLOSED"


CLOSED: Final = _Closed()


class Channel:
    """One end of the pair. Not for several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._buffer = bytearray()
        self._closed = False

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Channel:
        """The child's end, by the file descriptor it inherited."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any], timeout_s: float = 5.0) -> bool:
        """Send one message; False when the peer is gone or did not take it within ``timeout_s`` (it is then taken for gone)."""
        body = json.dumps(message, separators=(",", ":"), default=str).encode()
        if len(body) > LARGEST_MESSAGE:
            raise OurFaultError(f"a message of {len(body)} bytes between parent and child, at most {LARGEST_MESSAGE}")
        data = memoryview(_LENGTH.pack(len(body)) + body)
        while data and not self._closed:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                _r, writable, _x = select.select([], [self._socket], [], timeout_s)
                if not writable:
                    self._closed = True
            except OSError:
                self._closed = True
        return not self._closed

    def receive(self, timeout_s: float) -> dict[str, Any] | _Closed | None:
        """The next message; None when none came within ``timeout_s`` seconds; CLOSED when the peer is gone and all was read.

        A message that is no JSON object, or is too long, raises OurFaultError: the two ends are of one package.
        """
        message = self._take()
        if message is not None:
            return message
        if self._closed:
            return CLOSED
        readable, _w, _x = select.select([self._socket], [], [], max(timeout_s, 0.0))
        if not readable:
            return None
        try:
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._closed = True
            return CLOSED
        self._buffer += data
        return self._take()

    def _take(self) -> dict[str, Any] | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > LARGEST_MESSAGE:
            raise OurFaultError(f"a message of {length} bytes announced between parent and child, at most {LARGEST_MESSAGE}")
        if len(self._buffer) < _LENGTH.size + length:
            return None
        body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        try:
            message = json.loads(body)
        except ValueError as error:
            raise OurFaultError(f"a message between parent and child is no JSON: {error}") from error
        if not isinstance(message, dict):
            raise OurFaultError(f"a message between parent and child is a {type(message).__name__}, not an object")
        return message

    def close(self) -> None:
        self._closed = True
        self._socket.close()
