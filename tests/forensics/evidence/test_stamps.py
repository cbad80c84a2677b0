"""Times as they are written, and one axis for them."""

from __future__ import annotations

import pytest

from dsv4_repro.forensics.evidence.stamps import Stamp, find_stamp, parse_iso
from dsv4_repro.forensics.evidence.timeaxis import build_axis


@pytest.mark.parametrize(
    ("line", "kind", "clock"),
    [
        ("INFO 11-28 09:12:41 [loggers.py:271] x", "yearless", "09:12:41"),
        ("2026/11/28 09:12:40.101, 0, P1", "local", "09:12:40"),
        ("2026-11-28 09:12:41,123 INFO x", "local", "09:12:41"),
        ("2026-11-28T09:12:41Z x", "utc", "09:12:41"),
        ("2026-11-28T09:12:41+01:00 x", "utc", "08:12:41"),
        ("2026-11-28T09:12:41-0530 x", "utc", "14:42:41"),
        ("[Sat Nov 28 18:10:08 2026] oom-kill", "local", "18:10:08"),
        ("Nov 28 18:10:08 host kernel: x", "yearless", "18:10:08"),
        ("[rank0]:[E1128 13:10:44.903881913 ProcessGroupNCCL.cpp:688] x", "yearless", "13:10:44"),
        ("[90211.113] NVRM: Xid", "uptime", None),
        ("<4>[  12.000001] NVRM: Xid", "uptime", None),
        ("Timestamp : Tue Jun  1 08:03:10 2027", "local", "08:03:10"),
        ("Sat 28 Nov 2026 09:12:41 AM UTC", "utc", "09:12:41"),
    ],
)
def test_forms(line: str, kind: str, clock: str | None) -> None:
    stamp = find_stamp(line)
    assert stamp is not None
    assert stamp.kind == kind
    if clock is not None:
        hours, minutes, seconds = (int(part) for part in clock.split(":"))
        assert int(stamp.seconds) % 86400 == hours * 3600 + minutes * 60 + seconds


@pytest.mark.parametrize("line", ["", "nothing", "99-99 99:99:99", "INFO 13-45 09:12:41 x", "2026-02-30 00:00:00", "1.2.3.4 - -"])
def test_no_time_is_none(line: str) -> None:
    assert find_stamp(line) is None


def test_leap_day_and_new_year() -> None:
    assert find_stamp("INFO 02-29 23:59:59 x") is not None
    axis = build_axis([("a", find_stamp("2028-02-29 10:00:00"))], [])  # type: ignore[list-item]
    placed = axis.place(find_stamp("INFO 02-29 23:59:59 x"), "b")
    assert placed is not None
    assert axis.iso(placed).startswith("2028-02-29")


def test_the_year_comes_from_a_neighbour_and_is_said() -> None:
    stamps = [("smi", parse_iso("2026/11/28 09:12:40")), ("log", find_stamp("INFO 11-28 09:12:41 x"))]
    axis = build_axis([(s, t) for s, t in stamps if t], [])
    first, second = (axis.place(t, s) for s, t in stamps)
    assert first is not None
    assert second is not None
    assert second - first == pytest.approx(1.0)
    assert any("2026" in note for note in axis.notes)
    assert axis.comparable(stamps[0][1], stamps[1][1])


def test_the_local_offset_is_measured_from_lines_with_both_clocks() -> None:
    outer = parse_iso("2026-11-28T08:12:41.200Z")
    inner = find_stamp("INFO 11-28 09:12:41 x")
    assert outer is not None
    assert inner is not None
    axis = build_axis([("pod", outer), ("pod", inner)], [("pod", outer, inner)] * 3)
    assert axis.place(inner, "pod") == pytest.approx(outer.seconds, abs=1)
    assert any("UTC+1" in note for note in axis.notes)
    # Another source without a zone is taken to write the same local time, and that is said.
    other = parse_iso("2026/11/28 09:12:41")
    axis = build_axis([("pod", outer), ("pod", inner), ("smi", other)], [("pod", outer, inner)] * 3)  # type: ignore[list-item]
    assert axis.place(other, "smi") == pytest.approx(outer.seconds, abs=1)
    assert any("assumed" in note for note in axis.notes)


def test_unlinked_clocks_are_not_compared() -> None:
    utc, local = parse_iso("2026-11-28T08:12:41Z"), parse_iso("2026-11-28 08:12:41")
    assert utc is not None
    assert local is not None
    axis = build_axis([("a", utc), ("b", local)], [])
    assert not axis.comparable(utc, local)
    assert any("no line links" in note for note in axis.notes)


def test_uptime_is_never_placed() -> None:
    up = Stamp("uptime", 12.0)
    axis = build_axis([("k", up)], [])
    assert axis.place(up, "k") is None
    assert any("boot" in note for note in axis.notes)
    assert not axis.comparable(up, Stamp("uptime", 13.0))


def test_without_any_year_the_text_says_so() -> None:
    stamp = find_stamp("INFO 11-28 09:12:41 x")
    assert stamp is not None
    axis = build_axis([("a", stamp)], [])
    placed = axis.place(stamp, "a")
    assert placed is not None
    assert axis.iso(placed).startswith("????-11-28T09:12:41")
