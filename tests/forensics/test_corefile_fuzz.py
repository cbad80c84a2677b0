"""The reader under mutation: only typed errors or partial states, whatever the bytes; a diagnosis of what is left never fails."""

from __future__ import annotations

import struct
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import CoreFileError
from dsv4_repro.forensics import diagnose
from dsv4_repro.forensics.corefile import open_core
from dsv4_repro.forensics.coretables import SHT_LOUSER, Kind
from dsv4_repro.forensics.corewriter import write_core
from dsv4_repro.forensics.diagnose import diagnose_state
from dsv4_repro.forensics.records import Diagnosis

SHDR = struct.Struct("<IIQQQQIIQQ")
FAST = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Any) -> Any:
    """Read bytes as a dump and judge what comes of it, without a disassembler; the seconds it took must be few."""
    lines = kernels[0](90)[1].lines
    monkeypatch.setattr(diagnose, "_lines", lambda grid, unread: lines)
    path = tmp_path / "fuzz.nvcudmp"

    def run(raw: bytes) -> Diagnosis | None:
        path.write_bytes(raw)
        started = time.process_time()
        found, refusal = None, None
        try:
            with open_core(path) as dump:
                found = diagnose_state(dump.state, ground="file", memory=dump.word, faults=dump.faults)
        except CoreFileError as error:
            refusal = str(error)
        assert refusal is None or str(path) in refusal
        assert time.process_time() - started < 5
        return found

    return run


@pytest.fixture
def base(scene: Any, tmp_path: Path) -> bytes:
    return _base(scene, tmp_path)


@lru_cache(maxsize=1)
def _base(scene: Any, folder: Path) -> bytes:
    state = scene(warps=2, lanes=3, sms=2, memory={0x7FD67BE89668: 1}).state()
    return write_core(folder / "base.nvcudmp", state).read_bytes()


def places(raw: bytes) -> list[tuple[int, int]]:
    """Offset and length of everything but the code image: header, tables, registers, section headers."""
    (shoff,) = struct.unpack_from("<Q", raw, 0x28)
    rows = [SHDR.unpack_from(raw, shoff + SHDR.size * n) for n in range((len(raw) - shoff) // SHDR.size)]
    kept = [(row[4], row[5]) for row in rows if row[5] and row[1] != SHT_LOUSER + Kind.RELOCATED_IMAGE]
    return [(0, 64), (shoff, len(raw) - shoff), *kept]


def test_the_unchanged_dump_is_a_hang(read: Any, base: bytes) -> None:
    found = read(base)
    assert found is not None
    assert (found.verdict.class_, found.verdict.cause) == ("gpu-spin-barrier", "peer-left")


@FAST
@given(data=st.data())
def test_flipped_bytes(read: Any, base: bytes, data: st.DataObject) -> None:
    raw = bytearray(base)
    for _ in range(data.draw(st.integers(1, 12))):
        start, length = data.draw(st.sampled_from(places(base)))
        raw[start + data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    read(bytes(raw))


EXTREMES = st.sampled_from(
    [0, 1, 2, 7, 63, 64, 0xFFFF, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
)


@FAST
@given(data=st.data())
def test_section_headers_with_extremes(read: Any, base: bytes, data: st.DataObject) -> None:
    """Types, links, offsets, sizes and entry sizes at their limits."""
    raw = bytearray(base)
    (shoff,) = struct.unpack_from("<Q", raw, 0x28)
    count = (len(raw) - shoff) // SHDR.size
    for _ in range(data.draw(st.integers(1, 6))):
        at = shoff + SHDR.size * data.draw(st.integers(0, count - 1))
        place, width = data.draw(st.sampled_from([(4, 4), (16, 8), (24, 8), (32, 8), (40, 4), (44, 4), (56, 8)]))
        value = data.draw(st.one_of(EXTREMES, st.integers(0, count), st.integers(SHT_LOUSER, SHT_LOUSER + 24)))
        raw[at + place : at + place + width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
    read(bytes(raw))


@FAST
@given(data=st.data())
def test_rows_with_extremes(read: Any, base: bytes, data: st.DataObject) -> None:
    """Words of the tables themselves: dimensions, masks, indices, addresses."""
    raw = bytearray(base)
    (shoff,) = struct.unpack_from("<Q", raw, 0x28)
    rows = [SHDR.unpack_from(raw, shoff + SHDR.size * n) for n in range((len(raw) - shoff) // SHDR.size)]
    tables = [row for row in rows if row[1] > SHT_LOUSER and row[5] >= 8 and row[1] != SHT_LOUSER + Kind.RELOCATED_IMAGE]
    for _ in range(data.draw(st.integers(1, 8))):
        row = data.draw(st.sampled_from(tables))
        at = row[4] + 4 * data.draw(st.integers(0, row[5] // 4 - 1))
        raw[at : at + 4] = (data.draw(EXTREMES) & 0xFFFFFFFF).to_bytes(4, "little")
    read(bytes(raw))


@FAST
@given(data=st.data())
def test_cut_and_grown(read: Any, base: bytes, data: st.DataObject) -> None:
    raw = base[: data.draw(st.integers(0, len(base)))] + data.draw(st.binary(max_size=200))
    read(raw)


@FAST
@given(tail=st.binary(max_size=4096), shnum=st.integers(0, 64), shoff=st.integers(0, 4096))
def test_random_bytes_behind_a_good_header(read: Any, tail: bytes, shnum: int, shoff: int) -> None:
    ident = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(7)
    read(ident + struct.pack("<HHIQQQIHHHHHH", 4, 190, 1, 0, 0, shoff, 0, 64, 0, 0, 64, shnum, shnum - 1 if shnum else 0) + tail)


@FAST
@given(raw=st.binary(max_size=512))
def test_random_bytes(read: Any, raw: bytes) -> None:
    assert read(raw) is None
