"""xz within a bound of memory: the same bytes as Python's reader gives, and a file that wants more is refused."""

from __future__ import annotations

import io
import lzma
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_repro.errors import EvidenceError
from dsv4_repro.forensics.evidence.xz_stream import XzStream
from dsv4_repro.repro.unpack import plain_file


def read(data: bytes, **options: int) -> bytes:
    return io.BufferedReader(XzStream(io.BytesIO(data), **options)).read()


@given(
    parts=st.lists(st.binary(max_size=3000), min_size=1, max_size=4),
    zeros=st.integers(0, 5),
    behind=st.sampled_from([b"", b"junk"]),
)
def test_the_same_as_pythons_reader(parts: list[bytes], zeros: int, behind: bytes) -> None:
    data = (b"\0" * 4 * zeros).join(lzma.compress(part) for part in parts) + behind
    assert read(data) == b"".join(parts)


def test_larger_than_a_piece_and_in_small_reads() -> None:
    plain = random.Random(1).randbytes(700_000)
    stream = io.BufferedReader(XzStream(io.BytesIO(lzma.compress(plain, preset=0))), 7)
    assert b"".join(iter(lambda: stream.read(12_345), b"")) == plain


@pytest.mark.parametrize("kept", [0, 1, 6, 11, 12, 30, -1, -12])
def test_what_ends_too_soon_is_said(kept: int) -> None:
    whole = lzma.compress(bytes(1000) + b"x" * 1000)
    with pytest.raises(EOFError):
        read(whole[:kept])


def test_damaged_data_are_said() -> None:
    whole = bytearray(lzma.compress(b"x" * 1000))
    whole[-20] ^= 0xFF
    with pytest.raises(lzma.LZMAError):
        read(bytes(whole))


def test_ten_thousand_streams_are_read_one_behind_the_other() -> None:
    assert read(lzma.compress(b"a") * 10_000) == b"a" * 10_000


def greedy(dictionary: int) -> bytes:
    return lzma.compress(b"x" * 5000, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": dictionary}])


def test_a_dictionary_above_the_bound_is_refused_and_the_file_named(tmp_path: Path) -> None:
    assert read(greedy(64 << 20)) == b"x" * 5000
    path = tmp_path / "core.nvcudmp.xz"
    path.write_bytes(greedy(300 << 20))
    with pytest.raises(EvidenceError, match="Memory usage limit") as caught, plain_file(path):
        pytest.fail("it was unpacked")
    assert str(path) in str(caught.value)
