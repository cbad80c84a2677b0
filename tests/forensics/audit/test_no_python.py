"""A build whose Python could not be read: nothing is said about its producer, least of all that it is not there."""

from __future__ import annotations

import pytest

from dsv4_repro.forensics.audit.build_audit import AuditOptions, audit_build
from dsv4_repro.forensics.audit.producer import examine_producer
from dsv4_repro.forensics.audit.recipe import Recipe
from dsv4_repro.forensics.audit.relatives_source import sentinel_fill
from dsv4_repro.forensics.audit.release_source import ReleaseSource
from dsv4_repro.forensics.audit.table import report_lines
from dsv4_repro.forensics.audit.targets import OpenedTarget
from dsv4_repro.forensics.audit.verdicts import AuditReport, BuildIdentity

INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
BOTH = b"decode_lens_buffer offsets_buffer combined_indices"
UNREADABLE = {
    "nothing": {},
    "only metadata": {"vllm-9.9.9.dist-info/METADATA": b"Name: vllm\n"},
    "an empty file": {INDEXER: b""},
    "a pointer to the file": {INDEXER: b"version https://git-lfs.github.com/spec/v1\n"},
    "bytes": {INDEXER: b"\0\xff" * 100},
    "a newer grammar in the one that matters": {INDEXER: b"def (" + BOTH, "vllm/_version.py": b"version = 1\n"},
}


@pytest.mark.parametrize("members", UNREADABLE)
def test_nothing_is_said_about_it(members: str) -> None:
    source = ReleaseSource(UNREADABLE[members])
    found = examine_producer(source, Recipe(), 120, 188)
    assert [item.path for item in found] == ["native", "uniform", "variable"]
    assert {item.word for item in found} == {"CANNOT TELL"}
    assert all("can be read here" in item.why or "no Python of the build could be read" in item.why for item in found)
    assert sentinel_fill(source).word == "CANNOT TELL"


@pytest.mark.parametrize("members", UNREADABLE)
def test_the_report_has_the_rows_and_no_empty_brackets(members: str) -> None:
    opened = OpenedTarget("x.whl", BuildIdentity(name="x", known=False), None, UNREADABLE[members], [], "")
    build = audit_build(opened, AuditOptions(network=False, relatives=False))
    assert build.producer_word == "CANNOT TELL"
    report = AuditReport(outcome="inconclusive", recipe={}, builds=(build,), solver="", seconds=0.0)
    rows = [line for line in report_lines(report, (), details=True) if line.startswith("  producer, ")]
    assert len(rows) == 3
    for row in rows:
        assert "CANNOT TELL: " in row
        assert "(syntax, )" not in row
        assert " -> " not in row
        assert ": : " not in row


def test_python_that_was_read_and_has_no_builder_is_without_one() -> None:
    source = ReleaseSource({"vllm/_version.py": b"version = 1\n"})
    assert {item.word for item in examine_producer(source, Recipe(), 120, 188)} == {"NOT PRESENT"}
    assert sentinel_fill(source).word == "NOT PRESENT"
