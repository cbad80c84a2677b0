"""Exit statuses, the same for all verbs.

=== ===========================================================================================
0   fine: a run was clean **and reached the danger window**; nothing to report
1   ``--expect`` was given and the outcome is another one
2   usage: the command line or a plan asks for something that cannot be
3   found what the verb looks for: a hang
4   another failure class: a wrong result, a fault, a dead worker
5   inconclusive: window not reached, evidence unreadable, something needed is missing
70  our own fault
130 Ctrl-C
=== ===========================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # pydantic takes a tenth of a second; this module is imported by --help
    from ..forensics.records import Outcome

__all__ = ["AS_EXPECTED", "INTERRUPTED", "NOT_AS_EXPECTED", "OUR_FAULT", "STATUS", "USAGE", "Expectation", "exit_status"]

AS_EXPECTED = 0
NOT_AS_EXPECTED = 1
USAGE = 2
OUR_FAULT = 70
INTERRUPTED = 130

#: Outcome of a verb that judges -> exit status.
STATUS: dict[str, int] = {"clean": 0, "hang": 3, "other": 4, "inconclusive": 5}

Expectation = Literal["hang", "clean"]


def exit_status(outcome: Outcome, expect: Expectation | None = None) -> int:
    """The status for an outcome; with ``expect``: 0 as expected, 1 not as expected, and inconclusive stays 5."""
    if expect is None or outcome == "inconclusive":
        return STATUS[outcome]
    return AS_EXPECTED if outcome == expect else NOT_AS_EXPECTED
