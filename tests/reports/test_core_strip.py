"""A stripped dump says what the whole one says, without memory and without anybody else's code."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.errors import CoreFileError
from dsv4_repro.forensics.corefile import open_core
from dsv4_repro.forensics.coresections import CoreSections
from dsv4_repro.forensics.coretables import Kind
from dsv4_repro.forensics.corewriter import CoreOptions
from dsv4_repro.forensics.diagnose import diagnose_dump
from dsv4_repro.reports.bundle_device import reduce_core
from dsv4_repro.reports.core_strip import kernel_code, strip_core

MEMORY = {0x7FD6_7BE0_0000: bytes(range(256)) * 40, 0x1000: b"a prompt in device memory " * 4000}


def verdict(path: Path) -> tuple[Any, ...]:
    found = diagnose_dump(path, hung=True)
    return found.verdict, tuple(wait.model_dump() for wait in found.waits), found.ledger, {item.what for item in found.unread}


def test_the_verdict_the_waits_and_the_ledger_are_the_same(core: Callable[..., Path], tmp_path: Path) -> None:
    whole = core(options=CoreOptions(memory=MEMORY))
    reduced = reduce_core(whole, tmp_path / "small.nvcudmp")
    assert reduced.note == ""
    assert verdict(reduced.dump) == verdict(whole)
    assert verdict(whole)[0].cause == "peer-left"
    assert reduced.dump.stat().st_size < whole.stat().st_size


def test_no_memory_and_no_other_code_is_left(core: Callable[..., Path], tmp_path: Path) -> None:
    whole = core(options=CoreOptions(memory=MEMORY))
    assert b"a prompt in device memory" in whole.read_bytes()
    reduced = reduce_core(whole, tmp_path / "small.nvcudmp")
    data = reduced.dump.read_bytes()
    assert b"a prompt" not in data
    assert reduced.stripped.dropped >= 2
    with CoreSections(reduced.dump) as sections:
        assert len(sections.of_kind(Kind.RELOCATED_IMAGE)) == 1
        kept = sum(int(sections.size[number]) for number in sections.of_kind(Kind.GLOBAL_MEMORY))
    assert kept <= 4 * reduced.stripped.words < 4096
    assert b"a prompt" not in reduced.tables


def test_registers_parameters_and_tables_are_byte_for_byte_those_of_the_dump(core: Callable[..., Path], tmp_path: Path) -> None:
    whole, small = core(), tmp_path / "small"
    with open_core(whole) as dump:
        before = dump.state
    with small.open("wb") as out:
        strip_core(whole, out, code=kernel_code(before))
    with open_core(small) as dump:
        after = dump.state
    assert after.grids[0].ctas == before.grids[0].ctas
    assert after.grids[0].params == before.grids[0].params
    assert after.devices == before.devices
    assert (after.grids[0].code is None) == (before.grids[0].code is None)
    assert after.grids[0].code.cubin == before.grids[0].code.cubin  # type: ignore[union-attr]


def test_words_that_the_verdict_reads_stay(core: Callable[..., Path], tmp_path: Path) -> None:
    whole, small = core(options=CoreOptions(memory=MEMORY)), tmp_path / "small"
    with small.open("wb") as out:
        strip_core(whole, out, words={0x1000: 7, 0x1004: 8, 0x9000: 9})
    with open_core(small) as dump:
        assert [dump.word(address) for address in (0x1000, 0x1004, 0x1008, 0x9000)] == [7, 8, None, 9]


def test_a_dump_without_code_stays_without_code(core: Callable[..., Path], tmp_path: Path) -> None:
    whole = core(options=CoreOptions(omit={Kind.RELOCATED_IMAGE, Kind.MODULES}))
    reduced = reduce_core(whole, tmp_path / "small")
    assert reduced.code == ()
    assert reduced.note == ""
    assert verdict(reduced.dump) == verdict(whole)


def test_stripping_is_deterministic_and_can_be_repeated(core: Callable[..., Path], tmp_path: Path) -> None:
    whole = core(options=CoreOptions(memory=MEMORY))
    first = reduce_core(whole, tmp_path / "a")
    assert reduce_core(whole, tmp_path / "b").dump.read_bytes() == first.dump.read_bytes()
    again = reduce_core(first.dump, tmp_path / "c")
    assert again.note == ""
    assert verdict(again.dump) == verdict(whole)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_a_torn_dump_is_a_typed_error_or_gives_the_answer_of_what_is_left(
    core: Callable[..., Path], tmp_path: Path, share: float
) -> None:
    data = core().read_bytes()
    torn = tmp_path / "torn"
    torn.write_bytes(data[: int(len(data) * share)])
    try:
        reduced = reduce_core(torn, tmp_path / "small")
    except CoreFileError:
        assert share < 0.99
    else:
        assert reduced.note == ""
        assert diagnose_dump(reduced.dump).verdict == diagnose_dump(torn).verdict


def test_a_host_core_or_a_text_is_refused(tmp_path: Path) -> None:
    for name, data in (("text", b"hello"), ("elf", b"\x7fELF\x02\x01\x01" + bytes(200))):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(CoreFileError):
            strip_core(path, io.BytesIO())
