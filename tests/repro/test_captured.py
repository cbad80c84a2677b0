"""Several views of one hang become one state, and nothing is lost on the way."""

from __future__ import annotations

import dataclasses
from typing import Any

from dsv4_repro.forensics.device_state import CodeImage, DeviceState, Unread
from dsv4_repro.repro.captured import all_unread, merge_states, richness
from dsv4_repro.repro.ground import CaptureOutcome


def _capture(name: str, state: DeviceState | None = None, *unread: Unread) -> CaptureOutcome:
    return CaptureOutcome(collector=name, disturbance="none", seconds=0.0, state=state, unread=unread)


def test_nobody_saw_anything() -> None:
    assert merge_states([]) is None
    assert merge_states([_capture("a")]) is None


def test_the_richest_view_wins_and_gets_the_memory_of_all(fakes: Any) -> None:
    counters = DeviceState("row states", "measured", (), memory={16: 1, 20: 0}, unread=(Unread("code", "not asked"),))
    debugger = dataclasses.replace(fakes.state(), memory={16: 2})
    merged = merge_states([_capture("rows", counters), _capture("gdb", debugger)])
    assert merged is not None
    assert merged.grids == debugger.grids
    assert merged.memory == {16: 2, 20: 0}, "a word that the chosen view read itself is not replaced"
    assert merged.unread == (Unread("code", "not asked"),)
    assert merged.devices == {0: ("Fake GPU", 90, 132)}


def test_of_equally_rich_views_the_earlier_look_is_kept(fakes: Any) -> None:
    first, second = fakes.state(), dataclasses.replace(fakes.state(), source="later")
    merged = merge_states([_capture("a", first), _capture("b", second)])
    assert merged is not None
    assert merged.source == "fake"


def test_code_and_registers_count(fakes: Any) -> None:
    plain, without = fakes.state(), fakes.state(registers=None)
    coded = dataclasses.replace(plain, grids=(dataclasses.replace(plain.grids[0], code=CodeImage(b"", "k")),))
    unread = dataclasses.replace(plain, grids=(dataclasses.replace(plain.grids[0], ctas=None),))
    assert richness(coded) > richness(plain) > richness(without) > richness(unread)


def test_unread_items_are_listed_once() -> None:
    item, other = Unread("cuda-gdb", "not found"), Unread("dmesg", "denied")
    assert all_unread([_capture("a", None, item), _capture("b", None, item, other)]) == (item, other)
