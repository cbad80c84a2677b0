"""Jobs of a capture side by side: none is begun once nobody waits for it."""

from __future__ import annotations

import threading
import time

from dsv4_repro.repro.serving.capture_log import together


def test_a_job_that_waited_for_its_turn_is_not_begun_after_the_end() -> None:
    begun: list[str] = []
    free, ended = threading.Event(), threading.Event()

    def slow() -> str:
        begun.append("slow")
        free.wait(20)
        ended.set()
        return "late"

    def next_one() -> str:
        begun.append("next")
        return "done"

    assert together([slow, next_one], seconds=0.2, width=1) == [None, None]
    free.set()
    assert ended.wait(5)
    time.sleep(0.2)
    assert begun == ["slow"]


def test_what_answers_in_time_is_given_in_order() -> None:
    assert together([lambda: 1, lambda: 2, lambda: 3], seconds=5.0, width=2) == [1, 2, 3]
