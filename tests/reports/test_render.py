"""All reports together: from any diagnosis that can be read, also one whose further keys have another shape."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dsv4_repro.forensics.records import Diagnosis, Verdict
from dsv4_repro.reports.document import ReportSource
from dsv4_repro.reports.render import render_all, usable
from dsv4_repro.reports.step_summary import step_summary


def test_three_reports_by_name(made: Any) -> None:
    reports = render_all(made.source())
    assert sorted(reports) == ["junit.xml", "report.html", "report.md"]
    assert reports["report.html"].startswith(b"<!DOCTYPE html>")
    assert reports["report.md"].startswith(b"# [Bug]: ")
    ET.fromstring(reports["junit.xml"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("unwedge", "released"),
        ("unwedge", {"attempted": True}),
        ("unwedge", {"attempted": True, "retired": True, "milliseconds": "1", "address": 1, "why_not": ""}),
        ("timing", "quick"),
        ("timing", {"launch_to_hung_s": None, "hung_to_diagnosis_s": 1}),
        ("timing", [1, 2]),
        ("trials", {"asked": 3, "hang": "two"}),
        ("trials", {"asked": 3, "bounds": [{"of": "x"}]}),
        ("trials", {"asked": 3, "bounds": "x"}),
        ("trials", 7),
    ],
)
def test_a_key_of_another_shape_is_left_out_and_named(made: Any, key: str, value: Any) -> None:
    diagnosis, notes = usable(made.hang(**{key: value}))
    assert notes == [f"diagnosis.json: {key} is not of the expected shape and is not shown"]
    assert key not in (diagnosis.model_extra or {})
    assert f"{key} is not of the expected shape" in render_all(made.source(made.hang(**{key: value})))["report.html"].decode()


def test_a_good_diagnosis_is_left_alone(made: Any) -> None:
    diagnosis = made.hang()
    assert usable(diagnosis) == (diagnosis, [])


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["text", "lines", "class", "place", "asked", "bounds", "attempted"]) | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KEYS = (
    "unwedge",
    "timing",
    "trials",
    "timeline",
    "decisive",
    "contradicting",
    "alternatives",
    "signatures",
    "inputs",
    "rules",
    "explained",
)


@given(
    st.dictionaries(st.sampled_from(KEYS), anything, max_size=5),
    st.dictionaries(st.sampled_from(["environment", "versions", "kernel", "command", "seconds"]), anything),
)
@settings(max_examples=25, deadline=None)
def test_a_report_is_rendered_whatever_the_further_keys_hold(extra: dict[str, Any], run: dict[str, Any]) -> None:
    verdict = Verdict.model_validate({"class": "gpu-kernel-stuck"})
    diagnosis = Diagnosis.model_validate({"outcome": "hang", "ground": "gpu", "verdict": verdict, **extra})
    reports = render_all(ReportSource(diagnosis=diagnosis, run=run, version="0"))
    assert all(reports.values())
    ET.fromstring(reports["junit.xml"])


def test_the_step_summary_is_short_and_complete(made: Any) -> None:
    text = "\n".join(step_summary(made.source()))
    for words in (
        "### ❌ A draining batch",
        "**hang**: gpu-spin-barrier / peer-left",
        "arrival_counter = 1, waits until it is >= 2",
        "vllm-51593",
        "| barrier | measured |",
        "kernel log: not permitted",
        "dsv4-repro run drain --kernel vllm==0.33.0",
    ):
        assert words in text, words
    evil = Diagnosis(
        outcome="hang",
        ground="gpu",
        verdict=Verdict.model_validate({"class": "gpu-kernel-stuck", "sentence": made.evil * 50}),
        next=made.evil,
    )
    assert len("\n".join(step_summary(ReportSource(diagnosis=evil, title=made.evil)))) < 20_000
    tokens = (
        MarkdownIt("commonmark", {"html": True})
        .enable("table")
        .parse("\n".join(step_summary(ReportSource(diagnosis=evil, title=made.evil))))
    )
    kinds = {token.type for token in tokens} | {child.type for token in tokens for child in token.children or []}
    assert not {"html_inline", "html_block", "link_open", "image"} & kinds
