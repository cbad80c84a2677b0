"""What the wrapper changed is told in a section of its own; structures of the run record are in no table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dsv4_repro.forensics.records import Diagnosis, Verdict
from dsv4_repro.reports.changes import MOST_CHANGES, change_rows
from dsv4_repro.reports.document import ReportSource, context, markdown_report
from dsv4_repro.reports.github_issue import issue_report
from dsv4_repro.reports.html import html_report

#: As a server run records them (shortened).
CHANGES = [
    {"what": "--distributed-executor-backend", "value": "mp", "why": "a worker process to look at; alone, the engine would be one"},
    {"what": "DSV4_REPRO_AGENT", "value": "1", "why": "flight recorder, and row states on request"},
    {"what": "PYTHONPATH", "value": "/a|b:/c", "why": "vLLM finds the agent (a plugin of vllm.general_plugins)"},
]
RUN: dict[str, Any] = {
    "environment": {
        "device": "NVIDIA H200", "sm": 90, "model": "tiny-dsv32",
        "details": {"processes": {"1158": "api"}, "ranks": [{"pid": 2585}], "changes": CHANGES, "argv": ["vllm", "serve"]},
    },
}  # fmt: skip


def _source(run: dict[str, Any]) -> ReportSource:
    verdict = Verdict.model_validate(
        {"class": "unknown", "cause": None, "confidence": "low", "signature": None, "identity": None, "sentence": "nothing"}
    )
    return ReportSource(diagnosis=Diagnosis(outcome="inconclusive", ground="server", verdict=verdict, next="x"), run=run)


def _texts(run: dict[str, Any]) -> dict[str, str]:
    source = _source(run)
    return {"md": "\n".join(markdown_report(source)), "issue": "\n".join(issue_report(source)), "html": html_report(source)}


def test_each_change_is_a_row_with_its_reason_and_the_section_is_folded() -> None:
    for kind, text in _texts(RUN).items():
        assert "What the harness changed" in text, kind
        assert "flight recorder, and row states on request" in text, kind
    for kind in ("md", "issue"):
        text = _texts(RUN)[kind]
        assert "<details><summary>What the harness changed</summary>" in text
        table = text.partition("<summary>What the harness changed</summary>")[2].partition("</details>")[0]
        html = MarkdownIt("commonmark").enable("table").render(table)
        assert html.count("<tr>") == 1 + len(CHANGES)
        assert html.count("<td>") == 3 * len(CHANGES)


def test_no_structure_is_printed_in_the_environment() -> None:
    for kind, text in _texts(RUN).items():
        assert "NVIDIA H200" in text, kind
        assert "tiny-dsv32" in text, kind
        for hidden in ("processes", "1158", "argv", "details</td>", "| details |"):
            assert hidden not in text, (kind, hidden)


def test_a_run_without_changes_has_no_such_section() -> None:
    plain = {"environment": {"device": "NVIDIA H200", "details": {"memory": {"free": 1}}}}
    for kind, text in _texts(plain).items():
        assert "What the harness changed" not in text, kind
        assert "free" not in text, kind


@pytest.mark.parametrize("changes", [7, "x", {"what": 1}, [1, None, {}, {"what": ""}], None])
def test_what_is_of_another_shape_is_left_out(changes: Any) -> None:
    assert change_rows({"environment": {"details": {"changes": changes}}}) == []


def test_the_list_is_bounded_and_nested_values_are_not_printed() -> None:
    rows = change_rows({"environment": {"details": {"changes": [{"what": "A", "value": {"b": 1}}] * 1000}}})
    assert len(rows) == MOST_CHANGES
    assert rows[0] == ("A", "…", "")


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_record_is_read(environment: Any) -> None:
    made = environment if isinstance(environment, dict) else {"details": {"changes": environment}}
    assert isinstance(context(_source({"environment": made}))["changes"], list)
