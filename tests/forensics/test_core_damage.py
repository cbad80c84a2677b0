"""Damage to a dump never turns a resident block into one that left, nor a hang into a fault: the list is then not complete."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.forensics import diagnose
from dsv4_repro.forensics.corefile import open_core
from dsv4_repro.forensics.coretables import CTA, DEVICE, LANE, SHT_LOUSER, SM, Kind, Row
from dsv4_repro.forensics.corewriter import write_core
from dsv4_repro.forensics.diagnose import diagnose_dump
from dsv4_repro.forensics.records import Diagnosis
from dsv4_repro.reports.core_strip import strip_core

SHDR = struct.Struct("<IIQQQQIIQQ")
TYPE, OFFSET, SIZE, LINK, INFO, ENTSIZE = 1, 4, 5, 6, 7, 9


class Dump:
    """A dump in memory whose headers and rows can be changed."""

    def __init__(self, raw: bytes) -> None:
        self.raw = bytearray(raw)
        (self.table,) = struct.unpack_from("<Q", raw, 0x28)
        self.headers = [list(SHDR.unpack_from(raw, at)) for at in range(self.table, len(raw) - 63, 64)]

    def of(self, kind: Kind) -> list[int]:
        return [number for number, header in enumerate(self.headers) if header[TYPE] == SHT_LOUSER + kind]

    def header(self, number: int, field: int, value: int) -> None:
        self.headers[number][field] = value
        self.raw[self.table + 64 * number : self.table + 64 * (number + 1)] = SHDR.pack(*self.headers[number])

    def word(self, number: int, row: Row, field: str, value: int, index: int = 0) -> None:
        header = self.headers[number]
        dtype = row.dtype(header[ENTSIZE])
        assert dtype.fields is not None
        kind, at = dtype.fields[field][:2]
        start = header[OFFSET] + header[ENTSIZE] * index + at
        self.raw[start : start + kind.itemsize] = value.to_bytes(kind.itemsize, "little")


@pytest.fixture
def judge(scene: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Any) -> Callable[..., Diagnosis]:
    """Blocks 12 and 13 of a group are resident: 12 waits, 13 is at work. Damage the dump, then judge it."""
    lines = kernels[0](90)[1].lines
    monkeypatch.setattr(diagnose, "_lines", lambda grid, unread: lines)
    whole = write_core(tmp_path / "whole.nvcudmp", scene(running=[13], warps=2, lanes=3).state()).read_bytes()

    def run(damage: Callable[[Dump], None], *, strip: bool = False) -> Diagnosis:
        dump = Dump(whole)
        damage(dump)
        path = tmp_path / "damaged.nvcudmp"
        path.write_bytes(dump.raw)
        if strip:
            small = tmp_path / "small.nvcudmp"
            with open_core(path), small.open("wb") as out:
                strip_core(path, out)
            path = small
        return diagnose_dump(path)

    return run


def peer(dump: Dump) -> int:
    """The section with the row of block 13: each block lies on an SM of its own."""
    return dump.of(Kind.CTAS)[1]


DAMAGE: dict[str, Callable[[Dump], None]] = {
    "its table lies past the end": lambda d: d.header(peer(d), OFFSET, 1 << 40),
    "its table is longer than the file": lambda d: d.header(peer(d), SIZE, 1 << 40),
    "its rows are too short": lambda d: d.header(peer(d), ENTSIZE, 4),
    "its rows are too long": lambda d: d.header(peer(d), ENTSIZE, 1 << 30),
    "its table is cut": lambda d: d.header(peer(d), SIZE, 20),
    "its table has another type": lambda d: d.header(peer(d), TYPE, 0),
    "its table hangs on nothing": lambda d: d.header(peer(d), LINK, 0xFFFFFFFF),
    "its table belongs to an SM that is not there": lambda d: d.header(peer(d), INFO, 4000),
    "its table belongs to the other's SM": lambda d: d.header(peer(d), INFO, 0),
    "its table is the other's": lambda d: d.header(peer(d), OFFSET, d.headers[d.of(Kind.CTAS)[0]][OFFSET]),
    "it overlaps something else": lambda d: d.header(peer(d), OFFSET, d.headers[d.of(Kind.CTAS)[0]][OFFSET] + 8),
    "its number is outside the grid": lambda d: d.word(peer(d), CTA, "x", 16),
    "its y is not 0": lambda d: d.word(peer(d), CTA, "y", 1 << 31),
    "it has the other's number": lambda d: d.word(peer(d), CTA, "x", 12),
    "its grid is not known": lambda d: d.word(peer(d), CTA, "grid", 0xFFFF),
    "the SM table is one row": lambda d: d.header(d.of(Kind.SMS)[0], SIZE, d.headers[d.of(Kind.SMS)[0]][ENTSIZE]),
    "the section table is cut before it": lambda d: d.raw.__delitem__(slice(d.table + 64 * peer(d), None)),
}  # fmt: skip


def test_undamaged_the_peer_may_still_arrive(judge: Callable[..., Diagnosis]) -> None:
    found = judge(lambda dump: None)
    assert (found.verdict.class_, found.unread) == ("unknown", ())


@pytest.mark.parametrize("strip", [False, True], ids=["whole", "stripped"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_block_whose_row_is_lost_did_not_leave(judge: Callable[..., Diagnosis], damage: str, strip: bool) -> None:
    found = judge(DAMAGE[damage], strip=strip)
    assert found.verdict.class_ == "unknown", found.verdict
    assert found.verdict.cause is None
    assert all(13 not in group.exited for group in found.ledger)
    assert found.unread, "what was lost is said"


@pytest.mark.parametrize("sms", [8, 131, 4000, 0xFFFFFFFF])
def test_sms_that_no_row_describes_are_no_room(judge: Callable[..., Diagnosis], sms: int) -> None:
    found = judge(lambda dump: dump.word(dump.of(Kind.DEVICES)[0], DEVICE, "sms", sms))
    assert any("SM table has 132 rows" in item.why for item in found.unread)


@pytest.mark.parametrize("code", [64, 8192, 1 << 20, 0xFFFFFFFF])
def test_a_number_that_is_no_exception_is_no_fault(judge: Callable[..., Diagnosis], code: int) -> None:
    for damage in (
        lambda dump: dump.word(dump.of(Kind.LANES)[0], LANE, "exception", code),
        lambda dump: dump.word(dump.of(Kind.SMS)[0], SM, "exception", code, 7),
    ):
        found = judge(damage)
        assert found.verdict.class_ == "unknown"
        assert any("no exception's number" in item.why for item in found.unread)


def test_an_exception_in_a_row_that_is_no_lane_of_its_block_is_no_fault(judge: Callable[..., Diagnosis]) -> None:
    def damage(dump: Dump) -> None:
        dump.word(dump.of(Kind.LANES)[0], LANE, "exception", 6)
        dump.word(dump.of(Kind.LANES)[0], LANE, "x", 5000)

    found = judge(damage)
    assert found.verdict.class_ == "unknown"
    assert any("does not lie inside its block" in item.why for item in found.unread)


def test_a_real_exception_is_a_fault(judge: Callable[..., Diagnosis]) -> None:
    found = judge(lambda dump: dump.word(dump.of(Kind.LANES)[0], LANE, "exception", 6))
    assert (found.verdict.class_, found.verdict.cause) == ("gpu-fault", "misaligned")
