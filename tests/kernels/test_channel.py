"""Messages between parent and child: framing, halves, limits, the peer's end."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_repro.errors import OurFaultError
from dsv4_repro.kernels.channel import CLOSED, LARGEST_MESSAGE, Channel


@contextmanager
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    try:
        yield channel, theirs
    finally:
        channel.close()
        theirs.close()


def test_what_is_sent_is_received_in_order() -> None:
    messages: list[dict[str, Any]] = [{"cmd": "step", "lengths": [-1, 0, 16384]}, {}, {"text": "ä" * 5000}]
    with pair() as (one, peer):
        other = Channel(peer)
        for message in messages:
            assert one.send(message)
        assert [other.receive(1.0) for _ in messages] == messages
        assert other.receive(0.0) is None


@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), max_size=5), st.data())
def test_any_cut_of_the_bytes_gives_the_same_messages(messages: list[dict[str, int]], data: st.DataObject) -> None:
    bodies = [json.dumps(message).encode() for message in messages]
    raw = b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    seen = []
    with pair() as (channel, peer):
        for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            peer.sendall(raw[start:end])
            while (message := channel.receive(0.0)) is not None:
                seen.append(message)
    assert seen == messages


def test_the_peers_end_is_a_value_and_comes_after_what_it_said() -> None:
    with pair() as (channel, peer):
        Channel(peer).send({"last": 1})
        peer.close()
        assert channel.receive(1.0) == {"last": 1}
        assert channel.receive(1.0) is CLOSED
        assert channel.receive(0.0) is CLOSED
        assert not channel.send({"cmd": "exit"})


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack(">I", LARGEST_MESSAGE + 1),
        struct.pack(">I", 3) + b"{x}",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 1) + b"\xff",
    ],
)
def test_garbage_is_our_own_fault_and_waits_for_nothing(raw: bytes) -> None:
    with pair() as (channel, peer):
        peer.sendall(raw)
        with pytest.raises(OurFaultError):
            channel.receive(1.0)


def test_a_peer_that_does_not_read_is_taken_for_gone_after_the_timeout() -> None:
    with pair() as (channel, _peer):
        assert not channel.send({"text": "x" * (8 << 20)}, timeout_s=0.05)
        assert channel.receive(0.0) is CLOSED


def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pair() as (channel, _peer), pytest.raises(OurFaultError, match="at most"):
        channel.send({"text": "x" * LARGEST_MESSAGE})
