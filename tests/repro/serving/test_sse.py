"""Server-sent events from bytes that are not trusted."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_repro.repro.serving.sse import EventReader, StreamFormatError, parse_chunk


def _payloads(raw: bytes, cuts: list[int]) -> list[bytes]:
    reader = EventReader()
    edges = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    return [one for start, end in itertools.pairwise(edges) for one in reader.feed(raw[start:end])]


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    raw = b': hello\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{}\n\ndata: \xc3\xa4\n\ndata: [DONE]\n\ndata: after\n\n'
    assert _payloads(raw, cuts) == [b'{"a": 1}', b"{}", b"\xc3\xa4"]


def test_nothing_is_read_after_done() -> None:
    reader = EventReader()
    assert reader.feed(b"data: 1\n\ndata: [DONE]\n\ndata: 2\n\n") == [b"1"]
    assert reader.done
    assert reader.feed(b"data: 3\n\n") == []


def test_a_line_without_an_end_is_cut_off() -> None:
    reader = EventReader(max_line=1000)
    for _ in range(10):
        assert reader.feed(b"a" * 100) == []
    with pytest.raises(StreamFormatError, match="line of more than 1000") as caught:
        reader.feed(b"a" * 100)
    assert caught.value.overrun
    assert reader.seen <= 1100


def test_a_response_without_an_end_is_cut_off() -> None:
    reader = EventReader(max_response=10_000)
    for _ in range(10_000 // 13):
        assert reader.feed(b": keep-alive\n") == []
    with pytest.raises(StreamFormatError, match="10000 bytes") as caught:
        reader.feed(b": keep-alive\n")
    assert caught.value.overrun


def test_lines_that_are_no_events_are_borne_for_a_while() -> None:
    reader = EventReader()
    assert reader.feed(b"noise\n" * 100 + b"data: 1\n") == [b"1"]
    with pytest.raises(StreamFormatError, match="no server-sent event"):
        reader.feed(b"noise\n")


def _chunk(**choice: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": "a", **choice}], "usage": {"completion_tokens": 3}}).encode()


def test_a_chunk_of_vllm() -> None:
    chunk = parse_chunk(_chunk(token_ids=[1, 2], finish_reason="length"), max_tokens=8)
    assert (chunk.text, chunk.token_ids, chunk.completion_tokens, chunk.finish_reason) == ("a", (1, 2), 3, "length")
    last = parse_chunk(b'{"choices": [], "usage": {"completion_tokens": 5}}', max_tokens=8)
    assert last.final_usage
    assert last.completion_tokens == 5


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"choices": 1}',
        b'{"choices": [1]}',
        b'{"choices": [{}, {}]}',
        b'{"choices": [{"text": 1}]}',
        b'{"choices": [{"finish_reason": []}]}',
        _chunk(token_ids="x"),
        _chunk(token_ids=[True]),
        _chunk(token_ids=[-1]),
        _chunk(token_ids=[1 << 40]),
        b'{"choices": [], "usage": {"completion_tokens": -1}}',
        b'{"choices": [], "usage": {"completion_tokens": 1e3}}',
        b'{"choices": [], "usage": {"completion_tokens": 9}}',
        b'{"choices": [], "usage": {"completion_tokens": ' + b"9" * 5000 + b"}}",
    ],
)
def test_what_is_no_chunk_is_said(payload: bytes) -> None:
    with pytest.raises(StreamFormatError):
        parse_chunk(payload, max_tokens=8)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    ["choices", "usage", "text", "token_ids", "completion_tokens", "finish_reason", "error", "message"]
                ),
                inner,
            )
        ),
    )
)
def test_any_json_is_a_chunk_or_a_format_error(document: object) -> None:
    try:
        chunk = parse_chunk(json.dumps(document).encode(), max_tokens=8)
    except StreamFormatError:
        return
    assert chunk.completion_tokens is None or 0 <= chunk.completion_tokens <= 8


@given(st.lists(st.binary(max_size=200) | st.sampled_from([b"data: ", b"\n", b"{}", b'{"choices": []}', b"[DONE]"]), max_size=30))
def test_any_bytes_are_events_or_a_format_error(pieces: list[bytes]) -> None:
    reader = EventReader(max_line=300, max_response=3000)
    with contextlib.suppress(StreamFormatError):
        for piece in pieces:
            for payload in reader.feed(piece):
                assert parse_chunk(payload, max_tokens=8) is not None
    assert reader.seen <= 3000 + 200


@pytest.mark.parametrize("error", ['{"message": "dead"}', '"dead"', '{"message": ""}'])
def test_an_error_of_the_server_is_no_format_error(error: str) -> None:
    assert parse_chunk(f'{{"error": {error}}}'.encode(), max_tokens=8).error
