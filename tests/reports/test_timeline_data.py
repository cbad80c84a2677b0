"""What of a run's lines and of the classifier's events gets a place in time, and what is said of the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.forensics.device_state import Unread
from dsv4_repro.forensics.records import Diagnosis, Verdict
from dsv4_repro.reports.svg_timeline import timeline_svg
from dsv4_repro.reports.timeline_data import Timeline, build_timeline


def bare(**more: Any) -> Diagnosis:
    return Diagnosis.model_validate({"outcome": "hang", "ground": "file", "verdict": {"class": "gpu-kernel-stuck"}, **more})


def placed(lines: list[Any], **more: Any) -> Timeline:
    timeline = build_timeline(lines, bare(**more))
    assert timeline is not None
    return timeline


def test_steps_become_a_count_and_the_hung_one_a_bar(made: Any) -> None:
    timeline = placed(made.lines())
    steps = next(curve for curve in timeline.curves if curve.panel == "steps")
    assert steps.points[-1][1] == 38
    hung = next(mark for mark in timeline.marks if "no layer finished" in mark.text)
    assert hung.until is not None
    assert hung.until - hung.t == pytest.approx(1.4)
    assert hung.level == "bad"


def test_a_collector_is_a_bar_from_its_begin_with_its_disturbance() -> None:
    lines = [
        {"t": 1.0, "kind": "collecting", "collector": "stacks", "disturbance": "pauses"},
        {"t": 1.5, "kind": "capture", "collector": "stacks", "disturbance": "pauses", "seconds": 0.4, "unread": [{"what": "x"}]},
    ]
    (mark,) = placed(lines).marks
    until: Any = pytest.approx(1.4)
    assert (mark.t, mark.until, mark.lane, mark.disturbance, mark.level) == (1.0, until, "collect", "pauses", "bad")
    assert "1 thing not read" in mark.text


def test_a_collector_that_never_ended_is_said_to_have_begun() -> None:
    (mark,) = placed([{"t": 1.0, "kind": "collecting", "collector": "cuda_gdb", "disturbance": "pauses"}]).marks
    assert mark.text == "cuda_gdb: begun, no end was written"
    assert mark.level == "bad"


def test_the_cards_own_line_gives_a_point_of_three_curves() -> None:
    timeline = placed([{"t": 0.5, "kind": "ready", "environment": {"before": "GPU 2 %, memory 0 %, 88 W, 345 MHz"}}])
    assert {(curve.panel, curve.name): curve.points for curve in timeline.curves} == {
        ("utilisation", "GPU"): ((0.5, 2.0),),
        ("utilisation", "memory"): ((0.5, 0.0),),
        ("power", "power"): ((0.5, 88.0),),
    }


def test_the_classifiers_events_and_series_are_placed_from_their_first(made: Any) -> None:
    told = {
        "axis": ["year 2026 taken from the sources that write one"],
        "events": [
            {
                "seconds": 1.78e9 + 60,
                "when": "2026-05-01T00:01:00",
                "kind": "rpc-timeout",
                "text": "RPC timed out",
                "source": "e.log",
                "first": 7,
            }
        ],
        "series": {
            "GPU 0 busy %": [[1.78e9, 100.0], [1.78e9 + 10, 100.0]],
            "running requests": [[1.78e9, 3.0]],
            "of nobody": [[1.78e9, 1]],
        },
    }
    timeline = placed([], timeline=told)
    (mark,) = timeline.marks
    assert (mark.t, mark.level, mark.text) == (60.0, "bad", "RPC timed out [e.log:7]")
    assert {(curve.panel, curve.name) for curve in timeline.curves} == {("utilisation", "GPU (GPU 0)"), ("requests", "running")}
    assert timeline.origin == "seconds since the first reading"
    assert "year 2026 taken from the sources that write one" in timeline.notes


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("2026-05-01T00:01:00Z", "seconds since the first reading, 2026-05-01T00:01:00Z"),
        ("2026-05-01T00:01:00", "seconds since the first reading, 2026-05-01T00:01:00 in the sources' own clock"),
        ("????-05-01T00:01:00", "seconds since the first reading"),
    ],
)
def test_no_date_and_no_zone_is_claimed_that_no_source_gives(when: str, words: str) -> None:
    events = [{"seconds": 1.78e9, "when": when, "kind": "fatal", "text": "x"}]
    timeline = placed([], timeline={"events": events})
    assert timeline.origin == words
    assert timeline.end - timeline.start == 1.0


def test_a_log_in_a_local_clock_is_not_laid_over_the_runs_own_time() -> None:
    told = {
        "events": [{"seconds": 1.8e9, "when": "2027-01-15T08:00:00.000", "kind": "fatal", "text": "x"}],
        "series": {"GPU W": [[1.8e9, 5]]},
    }
    lines = [{"t": 0.0, "at": "2027-01-15T08:00:00Z", "kind": "start"}]
    timeline = placed(lines, timeline=told)
    assert [mark.lane for mark in timeline.marks] == ["run"]
    assert timeline.curves == ()
    assert any("local clock" in note for note in timeline.notes)


def test_a_log_in_utc_shares_the_axis() -> None:
    told = {"events": [{"seconds": 1_800_000_010.0, "when": "2027-01-15T08:00:10.000Z", "kind": "fatal", "text": "x"}]}
    lines = [{"t": 0.0, "at": "2027-01-15T08:00:00Z", "kind": "start"}]
    assert [mark.t for mark in placed(lines, timeline=told).marks] == [0.0, pytest.approx(10.0)]


def test_unreadable_lines_and_loose_events_are_counted() -> None:
    timeline = placed(
        [Unread("timeline.jsonl line 2", "not JSON"), {"kind": "x"}, {"t": 1, "kind": "y"}], timeline=[{"text": "when?"}, 7]
    )
    assert "1 lines of timeline.jsonl could not be read" in timeline.notes
    assert "3 events carry no time that could be placed" in timeline.notes


def test_nothing_to_place_is_no_timeline() -> None:
    assert build_timeline([], bare()) is None
    assert build_timeline([{"kind": "start"}], bare()) is None


def test_a_curve_of_very_many_points_keeps_its_spikes() -> None:
    lines = [{"t": n * 0.001, "kind": "sample", "power_w": 100.0 + (500 if n == 77_777 else 0)} for n in range(100_000)]
    (curve,) = placed(lines).curves
    assert len(curve.points) <= 1600
    assert max(value for _, value in curve.points) == 600.0


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "t",
                    "at",
                    "kind",
                    "nvml",
                    "gpus",
                    "running",
                    "power_w",
                    "device",
                    "seconds",
                    "when",
                    "text",
                    "events",
                    "series",
                    "axis",
                ]
            )
            | st.text(max_size=6),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)
lines_of_anything = st.dictionaries(
    st.sampled_from(["t", "at", "kind", "collector", "seconds", "ms", "live", "state", "unread", "reasons"]), anything
)


@given(st.lists(lines_of_anything, max_size=8), anything)
@settings(max_examples=80, deadline=None)
def test_values_of_any_shape_are_taken(lines: list[Any], told: Any) -> None:
    diagnosis = Diagnosis.model_construct(
        outcome="hang", ground="file", verdict=Verdict.model_validate({"class": "unknown"}), _fields_set=set()
    )
    object.__setattr__(diagnosis, "__pydantic_extra__", {"timeline": told})
    timeline = build_timeline(lines, diagnosis)
    if timeline is not None:
        assert timeline.end > timeline.start
        assert all(math.isfinite(t) and math.isfinite(value) for curve in timeline.curves for t, value in curve.points)
        assert "nan" not in timeline_svg(timeline, 372, "p")
