"""Questions that may not come back."""

from __future__ import annotations

import threading
import time

from dsv4_repro.errors import UsageError
from dsv4_repro.repro.serving.questions import Question


def test_an_answer() -> None:
    assert Question("x", lambda: 3, 5.0).answer() == (3, None)


def test_no_answer_in_time_is_said_and_does_not_hold_up() -> None:
    gate = threading.Event()
    began = time.monotonic()
    answer, why = Question("NVML", lambda: gate.wait(30), 0.2).answer()
    gate.set()
    assert time.monotonic() - began < 2
    assert answer is None
    assert why is not None
    assert why.why == "no answer within 0.2 s"


def test_errors_are_kept_with_their_words() -> None:
    def fail() -> int:
        raise UsageError("no such thing", help_text="do that")

    question = Question("x", fail, 5.0)
    answer, why = question.answer()
    assert (answer, isinstance(question.error, UsageError)) == (None, True)
    assert why is not None
    assert (why.why, why.remedy) == ("no such thing", "do that")

    def broken() -> int:
        return 1 // 0

    _, why = Question("x", broken, 5.0).answer()
    assert why is not None
    assert "ZeroDivisionError" in why.why
