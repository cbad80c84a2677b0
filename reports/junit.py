"""JUnit XML of one run, for systems that show test results: the verdict, the danger window, and each trial outcome as test cases.

A hang (or another failure) is a ``failure``, an inconclusive run an ``error``, so that nothing open counts as passed. Where a run
was told what to expect, the verdict case passes when that came true.
"""

from __future__ import annotations

import unicodedata
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

from .document import ReportSource, equation, verdict_words
from .markdown import visible

__all__ = ["junit_xml"]

_MOST_DETAIL = 60


def _text(value: object, limit: int = 4000) -> str:
    """Text that XML 1.0 can hold: controls come as escapes, what XML forbids besides is dropped."""
    shown = visible(str(value), limit=limit)
    return "".join(char for char in shown if unicodedata.category(char) != "Cs" and char not in "\ufffe\uffff")


def _seconds(run: Mapping[str, Any]) -> str:
    value = run.get("seconds")
    return f"{value:.3f}" if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9 else "0"


def _expectation(run: Mapping[str, Any]) -> str:
    """What ``--expect`` said when the run was started: hang, clean, or nothing."""
    command = [str(word) for word in run.get("command") or ()]
    for index, word in enumerate(command):
        if word == "--expect" and index + 1 < len(command):
            return command[index + 1]
        if word.startswith("--expect="):
            return word.partition("=")[2]
    return ""


def _details(source: ReportSource) -> str:
    diagnosis = source.diagnosis
    lines = [diagnosis.verdict.sentence, *(equation(wait) for wait in diagnosis.waits[:8])]
    lines += [f"{link.link} ({link.status}): {link.text}" for link in diagnosis.chain]
    lines += [f"not read: {item.what}: {item.why}" for item in diagnosis.unread]
    if diagnosis.next:
        lines.append(f"next: {diagnosis.next}")
    return "\n".join(_text(line) for line in lines[:_MOST_DETAIL] if line)


def _verdict_case(suite: ET.Element, source: ReportSource, name: str) -> tuple[int, int]:
    """The case of the verdict; (failures, errors)."""
    diagnosis = source.diagnosis
    case = ET.SubElement(suite, "testcase", classname=name, name="verdict", time=_seconds(source.run))
    expected = _expectation(source.run)
    message = _text(f"{diagnosis.outcome}: {verdict_words(diagnosis)}")
    if expected and diagnosis.outcome == expected:
        ET.SubElement(case, "system-out").text = f"as expected: {message}\n{_details(source)}"
        return 0, 0
    if diagnosis.outcome == "clean" and not expected:
        return 0, 0
    tag = "error" if diagnosis.outcome == "inconclusive" else "failure"
    kind = _text(diagnosis.verdict.class_ + (f"/{diagnosis.verdict.cause}" if diagnosis.verdict.cause else ""))
    wanted = f"expected {_text(expected)}, got " if expected else ""
    ET.SubElement(case, tag, type=kind, message=wanted + message).text = _details(source)
    return (0, 1) if tag == "error" else (1, 0)


def _window_case(suite: ET.Element, source: ReportSource, name: str) -> int:
    """Whether the danger window was reached; skipped where that is not known. The number of skipped cases."""
    window = source.diagnosis.window
    if window.reached is None and window.live_requests is None:
        return 0
    case = ET.SubElement(suite, "testcase", classname=name, name="danger window reached", time="0")
    if window.reached:
        return 0
    why = "not reached: the run says nothing about the defect" if window.reached is False else "not known"
    ET.SubElement(case, "skipped", message=why)
    return 1


def _trial_cases(suite: ET.Element, source: ReportSource, name: str) -> tuple[int, int]:
    """One case for each way a trial can end badly; (cases, failures)."""
    trials = (source.diagnosis.model_extra or {}).get("trials")
    if not isinstance(trials, Mapping) or not isinstance(trials.get("asked"), int) or trials["asked"] <= 1:
        return 0, 0
    failures = 0
    words = {"hang": "trials that hung", "other": "trials that failed otherwise", "unfinished": "trials not finished"}
    for key, title in words.items():
        count = trials.get(key, 0)
        case = ET.SubElement(suite, "testcase", classname=name, name=title, time="0")
        if isinstance(count, int) and count > 0 and not (key == "hang" and _expectation(source.run) == "hang"):
            failures += 1
            ET.SubElement(case, "failure", type=key, message=f"{count} of {trials['asked']}")
    return len(words), failures


def junit_xml(source: ReportSource) -> str:
    """The document, with its declaration and a final newline."""
    run = source.run
    name = _text(f"dsv4-repro.{run.get('scenario') or 'autopsy'}.{source.diagnosis.ground}", 200)
    suite = ET.Element("testsuite")
    failures, errors = _verdict_case(suite, source, name)
    skipped = _window_case(suite, source, name)
    _, more = _trial_cases(suite, source, name)
    properties = ET.Element("properties")
    for key in ("signature", "identity", "confidence"):
        value = getattr(source.diagnosis.verdict, key)
        if value:
            ET.SubElement(properties, "property", name=key, value=_text(value, 200))
    if len(properties):
        suite.insert(0, properties)
    suite.attrib.update(
        name=name, tests=str(len(suite.findall("testcase"))), failures=str(failures + more), errors=str(errors),
        skipped=str(skipped), time=_seconds(run),
    )  # fmt: skip
    if isinstance(run.get("started"), str) and run["started"]:
        suite.set("timestamp", _text(run["started"], 40).removesuffix("Z"))
    root = ET.Element("testsuites", name="dsv4-repro")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"
