"""JUnit is well-formed whatever comes in, and nothing open or hung counts as passed."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.forensics.records import Diagnosis, UnreadItem, Verdict, Window
from dsv4_repro.reports.document import ReportSource
from dsv4_repro.reports.junit import junit_xml


def suite(source: ReportSource) -> ET.Element:
    root = ET.fromstring(junit_xml(source))
    assert root.tag == "testsuites"
    (found,) = root
    counted = {tag: len(found.findall(f"testcase/{tag}")) for tag in ("failure", "error", "skipped")}
    assert found.get("tests") == str(len(found.findall("testcase")))
    assert {"failure": found.get("failures"), "error": found.get("errors"), "skipped": found.get("skipped")} == {
        tag: str(number) for tag, number in counted.items()
    }
    return found


def case(found: ET.Element, name: str) -> ET.Element:
    return next(item for item in found.findall("testcase") if item.get("name") == name)


def plain(outcome: Any, class_: str, **more: Any) -> Diagnosis:
    return Diagnosis(outcome=outcome, ground="gpu", verdict=Verdict.model_validate({"class": class_}), **more)


def test_a_hang_fails_with_equation_and_chain(made: Any) -> None:
    found = suite(made.source())
    failure = case(found, "verdict").find("failure")
    assert failure is not None
    assert failure.get("type") == "gpu-spin-barrier/peer-left"
    assert "arrival_counter = 1, waits until it is >= 2" in (failure.text or "")
    assert "not read: kernel log: not permitted" in (failure.text or "")
    assert case(found, "danger window reached").find("skipped") is None
    assert case(found, "trials that hung").find("failure") is not None
    assert case(found, "trials not finished").find("failure") is None


@pytest.mark.parametrize(
    ("diagnosis", "tag"),
    [
        (plain("hang", "gpu-kernel-stuck"), "failure"),
        (plain("other", "worker-dead"), "failure"),
        (plain("inconclusive", "unknown"), "error"),
        (plain("clean", "not-hung"), None),
    ],
)
def test_each_outcome(diagnosis: Diagnosis, tag: str | None) -> None:
    verdict = case(suite(ReportSource(diagnosis=diagnosis)), "verdict")
    assert [child.tag for child in verdict] == ([tag] if tag else [])


@pytest.mark.parametrize("words", [("--expect", "hang"), ("--expect=hang",)])
def test_an_expected_hang_passes_and_an_expected_clean_does_not(words: tuple[str, ...]) -> None:
    run = {"command": ["dsv4-repro", "run", "drain", *words]}
    assert case(suite(ReportSource(diagnosis=plain("hang", "gpu-kernel-stuck"), run=run)), "verdict").find("failure") is None
    missed = case(suite(ReportSource(diagnosis=plain("clean", "not-hung"), run=run)), "verdict").find("failure")
    assert missed is not None
    assert "expected hang, got clean" in str(missed.get("message"))
    assert case(suite(ReportSource(diagnosis=plain("inconclusive", "unknown"), run=run)), "verdict").find("error") is not None


def test_a_window_that_was_not_reached_is_skipped() -> None:
    diagnosis = plain("inconclusive", "unknown", window=Window(reached=False))
    skipped = case(suite(ReportSource(diagnosis=diagnosis)), "danger window reached").find("skipped")
    assert skipped is not None
    assert "says nothing" in str(skipped.get("message"))


@given(st.text(alphabet=st.characters(), max_size=80))
@settings(max_examples=150, deadline=None)
def test_any_text_gives_well_formed_xml(text: str) -> None:
    verdict = Verdict.model_validate({"class": "gpu-kernel-stuck", "sentence": text, "identity": text, "signature": text})
    diagnosis = Diagnosis(outcome="hang", ground="gpu", verdict=verdict, unread=(UnreadItem(what=text, why=text),), next=text)
    source = ReportSource(diagnosis=diagnosis, run={"scenario": text, "started": text, "command": [text, "--expect"]})
    assert suite(source) is not None
    junit_xml(source).encode("utf-8")
