"""NCCL's RAS service asked for its status, twice. Touches no GPU: one of the job's RAS threads answers over TCP.

Facts used: port 28028 on localhost unless NCCL_RAS_ADDR says otherwise, NCCL_RAS_ENABLE=0 switches it off, commands are lines
(``client protocol N``, ``timeout S``, ``verbose status``), the connection is closed after the answer (NCCL user guide, "RAS", from
2.24; src/ras/client_support.cc). Counts that differ in one answer are normal traffic; only those that still differ in a second one
say something, so two answers are kept as they came and ``evidence.nccl_ras`` compares them.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...clock import SYSTEM, Clock, Deadline
from ..device_state import Unread
from . import Collected, CollectedFile, Disturbance, write_artefact

__all__ = ["RAS_PORT", "RasAddress", "RasAnswer", "RasCollector", "ask_ras", "ras_address"]

RAS_PORT = 28028
#: An answer is cut here, bytes; a verbose status of thousands of ranks is smaller.
MOST_BYTES = 8 << 20
#: A line of the handshake is never longer.
_LONGEST_LINE = 4096
_REMEDY = "Ask by hand, on the server's node: ncclras -v (or: echo 'verbose status' | nc localhost 28028)"


@dataclass(frozen=True, slots=True)
class RasAddress:
    """Where the service listens. ``given``: by NCCL_RAS_ADDR, else the default."""

    host: str
    port: int
    given: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RasAnswer:
    """One answer. ``text``: as it came, without the handshake; ``complete``: the service closed the connection behind it.

    ``trouble``: what went wrong, empty if nothing did; ``refused``: nobody listens there.
    """

    text: bytes
    complete: bool
    seconds: float
    trouble: str = ""
    refused: bool = False


def ras_address(environment: Mapping[str, str]) -> RasAddress | Unread:
    """The address that a process with this environment has its service at, or why there is none that may be asked.

    A host name other than localhost is not looked up: that can take minutes, and the service listens on the node itself.
    """
    if environment.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        return Unread("NCCL RAS", "switched off in the server's environment (NCCL_RAS_ENABLE=0)", "Start it without that variable.")
    given = environment.get("NCCL_RAS_ADDR", "").strip()
    if not given:
        return RasAddress("localhost", RAS_PORT)
    host, _, port = given.rpartition(":")
    host = host.strip("[]")
    if not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536:
        return Unread("NCCL RAS", f"NCCL_RAS_ADDR={given[:100]!r} is no HOST:PORT", _REMEDY)
    if host not in ("localhost", ""):
        try:
            ipaddress.ip_address(host)
        except ValueError:
            remedy = f"ncclras -v -h {host[:100]} -p {port}"
            return Unread("NCCL RAS", f"NCCL_RAS_ADDR names a host, {host[:100]!r}, which is not looked up here", remedy)
    return RasAddress(host or "localhost", int(port), given=True)


class _Lines:
    """A socket read with a deadline: whole lines first, then everything to the end."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection = connection
        self._deadline = deadline
        self._rest = b""

    def _more(self) -> bytes | None:
        """Some bytes, b"" at the end, None when the time is over."""
        if self._deadline.expired:
            return None
        self._connection.settimeout(max(min(self._deadline.remaining(), 1.0), 0.01))
        try:
            return self._connection.recv(65536)
        except TimeoutError:
            return None if self._deadline.expired else self._more()

    def line(self) -> bytes | None:
        """The next line without its end; None: none came in time, or something that is no line."""
        while b"\n" not in self._rest:
            more = self._more()
            if not more or len(self._rest) > _LONGEST_LINE:
                return None
            self._rest += more
        found, _, self._rest = self._rest.partition(b"\n")
        return found

    def everything(self) -> tuple[bytes, str]:
        """All that comes, and what cut it short."""
        pieces, size = [self._rest], len(self._rest)
        while size <= MOST_BYTES:
            more = self._more()
            if more is None:
                return b"".join(pieces), f"the answer was not over after {self._deadline.seconds:g} s"
            if not more:
                return b"".join(pieces), ""
            pieces.append(more)
            size += len(more)
        return b"".join(pieces)[:MOST_BYTES], f"the answer was cut at {MOST_BYTES} bytes"


def ask_ras(address: RasAddress, *, deadline_s: float = 4.0, clock: Clock = SYSTEM) -> RasAnswer:
    """One verbose status. Never raises: a listener that is something else, or slow, is told in ``trouble``."""
    began = clock.monotonic()
    deadline = Deadline(deadline_s, clock)

    def ended(text: bytes = b"", trouble: str = "", *, refused: bool = False) -> RasAnswer:
        return RasAnswer(text, not trouble, clock.monotonic() - began, trouble, refused)

    try:
        with socket.create_connection((address.host, address.port), timeout=min(1.0, deadline_s)) as connection:
            lines = _Lines(connection, deadline)
            connection.sendall(b"client protocol 2\n")
            hello = lines.line()
            if hello is None or not hello.upper().startswith(b"SERVER PROTOCOL"):
                what = "nothing in time" if hello is None else repr(hello[:60])
                return ended(trouble=f"what listens at {address} is not NCCL's RAS: it answered the handshake with {what}")
            # How long the process that answers waits for the others: less than we wait for it.
            connection.sendall(f"timeout {max(int(deadline.remaining()) - 1, 1)}\n".encode())
            agreed = lines.line()
            if agreed is None:
                return ended(trouble="RAS did not answer the time limit")
            connection.sendall(b"verbose status\n")
            text, trouble = lines.everything()
    except ConnectionRefusedError:
        return ended(trouble=f"nobody listens at {address}", refused=True)
    except OSError as error:
        return ended(trouble=f"{address}: {error.strerror or error}")
    if not text and not trouble:
        trouble = "RAS closed the connection without an answer"
    return ended(text, trouble)


class RasCollector:
    """Writes ``nccl_ras-1.txt`` and ``nccl_ras-2.txt``: two answers, ``apart_s`` seconds apart.

    ``world``: how many ranks the server has, None if not known; with one there is no communicator to ask about. ``elsewhere``: why
    the service cannot be reached from here (another network namespace), with the command that reaches it as ``remedy``.
    """

    name = "nccl_ras"
    disturbance: Disturbance = "none"

    def __init__(
        self,
        folder: Path,
        *,
        world: int | None,
        address: RasAddress | Unread,
        elsewhere: Unread | None = None,
        apart_s: float = 3.0,
        deadline_s: float = 12.0,
        clock: Clock = SYSTEM,
    ) -> None:
        self._folder = folder
        self._world = world
        self._address = address
        self._elsewhere = elsewhere
        self._apart_s = apart_s
        self._clock = clock
        self.deadline_s = deadline_s

    def _unread(self, item: Unread, **facts: object) -> Collected:
        return Collected(self.name, self.disturbance, 0.0, facts=facts, unread=(item,))

    def collect(self) -> Collected:
        if self._world == 1:
            return self._unread(Unread("NCCL RAS", "not applicable: one rank, so no communicator between GPUs"), applicable=False)
        if self._elsewhere is not None:
            return self._unread(self._elsewhere)
        if isinstance(self._address, Unread):
            return self._unread(self._address)
        deadline = Deadline(self.deadline_s, self._clock)
        files: list[CollectedFile] = []
        unread: list[Unread] = []
        each = max((self.deadline_s - self._apart_s) / 2 - 0.1, 0.2)
        seconds: list[float] = []
        for number in (1, 2):
            answer = ask_ras(self._address, deadline_s=min(each, deadline.remaining()), clock=self._clock)
            seconds.append(round(answer.seconds, 3))
            if answer.text:
                path = write_artefact(self._folder / f"nccl_ras-{number}.txt", answer.text)
                files.append(CollectedFile("nccl-ras", path))
            if answer.trouble:
                remedy = "RAS is part of NCCL from 2.24; is another NCCL loaded? " + _REMEDY if answer.refused else _REMEDY
                unread.append(Unread("NCCL RAS" if number == 1 else "NCCL RAS, second answer", answer.trouble, remedy))
                if not answer.text:
                    break
            if number == 1:
                if deadline.remaining() <= self._apart_s:
                    unread.append(Unread("NCCL RAS, second answer", "the time was over", _REMEDY))
                    break
                self._clock.sleep(self._apart_s)
        facts = {"address": str(self._address), "answers": len(files), "apart_s": self._apart_s, "seconds": seconds}
        return Collected(self.name, self.disturbance, 0.0, files=tuple(files), facts=facts, unread=tuple(unread))
