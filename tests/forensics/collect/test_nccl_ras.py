"""NCCL's RAS asked over TCP: a scripted service, and everything else that may listen on its port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsv4_repro.forensics.collect import run_collector
from dsv4_repro.forensics.collect.nccl_ras import MOST_BYTES, RAS_PORT, RasAddress, RasCollector, ask_ras, ras_address
from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.forensics.evidence.gather import read_paths

ANSWER = """Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          2            1          2        2

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         2         2         2   RUNNING  {word}

Errors
======

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  1 ranks have launched up to operation {ahead}
  1 ranks have launched up to operation {behind}
  Rank 1 -- GPU 1 managed by process 817 on node 172.16.64.210
"""

Serve = Callable[[socket.socket, int], None]


@contextmanager
def service(serve: Serve) -> Iterator[RasAddress]:
    """A listener that handles each connection with ``serve(connection, number)``; ended with the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def accept() -> None:
        number = 0
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            number += 1
            with connection:
                connection.settimeout(5.0)
                try:
                    serve(connection, number)
                except OSError:
                    continue

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield RasAddress("127.0.0.1", listener.getsockname()[1])
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(6.0)


def lines_of(connection: socket.socket) -> Iterator[bytes]:
    with connection.makefile("rb") as stream:
        yield from stream


def speak(connection: socket.socket, answer: bytes, seen: list[bytes] | None = None) -> None:
    """The protocol as NCCL's client_support.cc has it."""
    for line in lines_of(connection):
        if seen is not None:
            seen.append(line.strip())
        lowered = line.lower()
        if lowered.startswith(b"client protocol"):
            connection.sendall(b"SERVER PROTOCOL 2\n")
        elif lowered.startswith(b"timeout"):
            connection.sendall(b"OK\n")
        elif lowered.strip() == b"verbose status":
            connection.sendall(answer)
            return


def text(ahead: int, behind: int, word: str = "MISMATCH") -> bytes:
    return ANSWER.format(ahead=ahead, behind=behind, word=word).encode()


def test_two_answers_are_kept_as_they_came_and_read_by_the_analyser(tmp_path: Path) -> None:
    seen: list[bytes] = []
    with service(lambda connection, _: speak(connection, text(41, 40), seen)) as address:
        outcome = run_collector(RasCollector(tmp_path, world=2, address=address, apart_s=0.1, deadline_s=6.0))
    assert [file.path.name for file in outcome.files] == ["nccl_ras-1.txt", "nccl_ras-2.txt"]
    assert all(file.path.read_bytes() == text(41, 40) for file in outcome.files)
    assert outcome.unread == ()
    assert outcome.facts["answers"] == 2
    assert seen.count(b"verbose status") == 2
    assert seen[0] == b"client protocol 2"
    case = read_paths([file.path for file in outcome.files])
    assert len(case.ras) == 2
    assert "MISMATCH" in case.ras[0].errors
    assert case.ras[0].comms[0].groups["AllReduce"] == ((1, 41), (1, 40))


def test_one_rank_has_no_communicator(tmp_path: Path) -> None:
    outcome = run_collector(RasCollector(tmp_path, world=1, address=RasAddress("127.0.0.1", 1)))
    (item,) = outcome.unread
    assert item.why.startswith("not applicable")
    assert outcome.facts == {"applicable": False}
    assert outcome.files == ()


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = RasAddress("127.0.0.1", unused.getsockname()[1])
    outcome = run_collector(RasCollector(tmp_path, world=2, address=address, apart_s=0.1))
    (item,) = outcome.unread
    assert item.why.startswith("nobody listens at 127.0.0.1:")
    assert "2.24" in item.remedy
    assert outcome.seconds < 2.0


def says(answer: bytes) -> Serve:
    """Reads one line and answers it with something."""

    def serve(connection: socket.socket, _: int) -> None:
        connection.recv(100)
        connection.sendall(answer)

    return serve


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (says(b"HTTP/1.0 400 Bad Request\r\n\r\n"), "is not NCCL's RAS"),
        (says(b"\x00" * 8192), "is not NCCL's RAS"),
        (says(b""), "is not NCCL's RAS"),
        (lambda connection, _: speak(connection, b""), "without an answer"),
    ],
)
def test_something_else_listens(serve: Serve, why: str) -> None:
    with service(serve) as address:
        answer = ask_ras(address, deadline_s=2.0)
    assert why in answer.trouble
    assert not answer.complete
    assert not answer.text


def test_a_listener_that_says_nothing_costs_the_deadline_and_no_more() -> None:
    with service(lambda connection, _: time.sleep(1.2)) as address:
        began = time.monotonic()
        answer = ask_ras(address, deadline_s=0.6)
    assert time.monotonic() - began < 3.0
    assert answer.seconds < 1.2
    assert answer.trouble


def test_an_answer_that_drips_is_cut_by_the_time_and_kept_so_far() -> None:
    def drip(connection: socket.socket, _: int) -> None:
        speak(connection, b"Job summary\n")
        for _ in range(40):
            connection.sendall(b"x\n")
            time.sleep(0.05)

    with service(drip) as address:
        answer = ask_ras(address, deadline_s=0.7)
    assert answer.text.startswith(b"Job summary\nx\n")
    assert "was not over after" in answer.trouble


def test_an_endless_answer_is_cut_by_its_size() -> None:
    def endless(connection: socket.socket, _: int) -> None:
        speak(connection, b"")
        block = b"y" * (1 << 20)
        for _ in range(64):
            connection.sendall(block)

    with service(endless) as address:
        answer = ask_ras(address, deadline_s=20.0)
    assert len(answer.text) == MOST_BYTES
    assert "cut at" in answer.trouble


def test_a_service_that_dies_after_the_first_question(tmp_path: Path) -> None:
    def once(connection: socket.socket, number: int) -> None:
        if number == 1:
            speak(connection, text(5, 5, "OK"))

    with service(once) as address:
        outcome = run_collector(RasCollector(tmp_path, world=2, address=address, apart_s=0.1, deadline_s=4.0))
    assert len(outcome.files) == 1
    assert [item.what for item in outcome.unread] == ["NCCL RAS, second answer"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, RasAddress("localhost", RAS_PORT)),
        ({"NCCL_RAS_ADDR": "127.0.0.2:9999"}, RasAddress("127.0.0.2", 9999, given=True)),
        ({"NCCL_RAS_ADDR": "[::1]:28029"}, RasAddress("::1", 28029, given=True)),
        ({"NCCL_RAS_ADDR": "localhost:28029"}, RasAddress("localhost", 28029, given=True)),
    ],
)
def test_the_address_is_the_server_s(environment: dict[str, str], expected: RasAddress) -> None:
    assert ras_address(environment) == expected


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"NCCL_RAS_ENABLE": "0"}, "switched off"),
        ({"NCCL_RAS_ADDR": "nonsense"}, "no HOST:PORT"),
        ({"NCCL_RAS_ADDR": "127.0.0.1:99999999999"}, "no HOST:PORT"),
        ({"NCCL_RAS_ADDR": "127.0.0.1:²"}, "no HOST:PORT"),
        ({"NCCL_RAS_ADDR": "somewhere.example:28028"}, "not looked up"),
    ],
)
def test_an_address_that_is_not_asked_says_why(tmp_path: Path, environment: dict[str, str], why: str) -> None:
    found = ras_address(environment)
    assert isinstance(found, Unread)
    assert why in found.why
    outcome = run_collector(RasCollector(tmp_path, world=4, address=found))
    assert outcome.unread == (found,)
