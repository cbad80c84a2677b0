"""Exit statuses: the documented table, and --expect."""

from __future__ import annotations

import pytest

from dsv4_repro import errors
from dsv4_repro.forensics.records import CLASSES, Outcome
from dsv4_repro.repro.exits import STATUS, exit_status


@pytest.mark.parametrize(("outcome", "status"), [("clean", 0), ("hang", 3), ("other", 4), ("inconclusive", 5)])
def test_an_outcome_is_a_status(outcome: Outcome, status: int) -> None:
    assert exit_status(outcome) == status


def test_every_outcome_of_every_class_has_a_status() -> None:
    assert {entry[1] for entry in CLASSES.values()} == set(STATUS)


@pytest.mark.parametrize(("outcome", "hang", "clean"), [("hang", 0, 1), ("clean", 1, 0), ("other", 1, 1), ("inconclusive", 5, 5)])
def test_expectation(outcome: Outcome, hang: int, clean: int) -> None:
    assert exit_status(outcome, "hang") == hang
    assert exit_status(outcome, "clean") == clean


def test_every_error_has_a_status_of_the_table_and_inherits_its_branch() -> None:
    leaves = [getattr(errors, name) for name in errors.__all__]
    assert {leaf.exit_status for leaf in leaves} == {2, 5, 70}
    for leaf in leaves:
        for branch, status in (
            (errors.UsageError, 2),
            (errors.EvidenceError, 5),
            (errors.UnavailableError, 5),
            (errors.InconclusiveError, 5),
        ):
            if issubclass(leaf, branch):
                assert leaf.exit_status == status
