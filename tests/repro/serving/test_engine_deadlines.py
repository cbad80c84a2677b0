"""The engine's own deadline: which one, since when, and how that is known."""

from __future__ import annotations

import pytest

from dsv4_repro.repro.serving.engine_deadlines import (
    EngineLimits,
    Start,
    deadline_lines,
    engine_deadline,
    executor_of,
    limits_of,
)

LIMITS = limits_of({"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "90"}, "mp")


def test_the_environment_of_the_engine_decides() -> None:
    assert (LIMITS.step_s, LIMITS.step_known) == (90.0, "measured")
    assert (LIMITS.warning_s, LIMITS.warning_known) == (60.0, "inferred")
    unset = limits_of({}, "mp")
    assert (unset.step_s, unset.step_known) == (300.0, "inferred")
    unread = limits_of(None, "mp", why_not="Permission denied")
    assert (unread.step_s, unread.step_known) == (300.0, "assumed")
    assert "Permission denied" in unread.step_from


@pytest.mark.parametrize("value", ["", "never", "-3", "0", "1e99", "nan", "9" * 400])
def test_a_value_that_makes_no_sense_is_the_default(value: str) -> None:
    assert limits_of({"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": value}, "mp").step_s == 300.0


def test_an_executor_in_the_engine_waits_for_ever() -> None:
    limits = limits_of({"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "90"}, "uni")
    found = engine_deadline(limits, [Start(1000.0, "measured", "recorder")], waits=True)
    assert (found.state, found.remaining_s) == ("none", None)


def test_ray_has_a_deadline_of_its_own() -> None:
    assert limits_of({"RAY_CGRAPH_get_timeout": "120", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "9"}, "ray").step_s == 120.0


def test_the_executor_is_that_of_the_flags_and_else_of_the_processes() -> None:
    assert executor_of(["serve", "--distributed-executor-backend", "mp"], {1: "engine"}) == "mp"
    assert executor_of(["serve", "--distributed-executor-backend=uni"], {1: "engine", 2: "worker"}) == "uni"
    assert executor_of(["serve", "--distributed-executor-backend"], {1: "engine", 2: "worker"}) == "mp"
    assert executor_of([], {1: "api", 2: "engine"}) == "uni"
    assert executor_of([], {1: "api"}) == "unknown"


def test_a_measured_start_beats_one_from_the_log() -> None:
    found = engine_deadline(
        LIMITS, [Start(70.0, "inferred", "first waiting line", 5.0), Start(40.0, "measured", "recorder")], waits=True
    )
    assert (found.state, found.remaining_s, found.known) == ("counting", 50.0, "measured")
    assert "sent 40 s ago (recorder: measured)" in found.text


def test_of_two_inferences_the_surer_is_taken_and_its_error_said() -> None:
    found = engine_deadline(LIMITS, [Start(50.0, "inferred", "stats", 10.0), Start(45.0, "inferred", "line", 1.0)], waits=True)
    assert (found.remaining_s, found.error_s, found.known) == (45.0, 1.0, "inferred")
    assert "at most 1 s off" in found.text


def test_the_whole_is_known_no_better_than_its_weakest_part() -> None:
    found = engine_deadline(limits_of(None, "mp"), [Start(40.0, "measured", "recorder")], waits=True)
    assert (found.remaining_s, found.known) == (260.0, "assumed")


def test_without_a_start_nothing_is_counted_down() -> None:
    found = engine_deadline(LIMITS, [], waits=True)
    assert (found.state, found.remaining_s, found.known) == ("unknown", None, "not observed")
    assert "not observed" in found.text


def test_nothing_waits() -> None:
    found = engine_deadline(LIMITS, [Start(1.0, "measured", "recorder")], waits=False)
    assert (found.state, found.remaining_s) == ("not counting", None)


def test_a_deadline_that_passed_is_told_with_the_reason() -> None:
    late = [Start(120.0, "measured", "recorder")]
    running = engine_deadline(LIMITS, late, waits=True)
    assert running.state == "overdue"
    assert "not as assumed" in running.text
    stopped = engine_deadline(LIMITS, late, waits=True, stopped=True)
    assert "acts on it when it goes on" in stopped.text
    # Within the error of the start it may still be running.
    assert engine_deadline(LIMITS, [Start(92.0, "inferred", "line", 5.0)], waits=True).state == "counting"


def test_an_engine_that_has_ended_itself_counts_nothing() -> None:
    found = engine_deadline(LIMITS, [Start(120.0, "measured", "recorder")], waits=True, ended="RPC call to sample_tokens timed out")
    assert (found.state, found.remaining_s) == ("ended", None)
    assert deadline_lines(found) == ["deadline (measured): the engine has ended itself: RPC call to sample_tokens timed out"]


def test_the_records_are_values() -> None:
    assert limits_of({}, "mp") == limits_of({}, "mp")
    assert isinstance(LIMITS, EngineLimits)
