"""Which counter the row states alone point at: exactly one that stands in the middle of a barrier, or none."""

import pytest

from dsv4_repro.kernels.abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE
from dsv4_repro.repro.captured import counter_of_row_states, only_counter
from dsv4_repro.repro.ground import CaptureOutcome


def seen(arrivals: list[int], **facts: object) -> CaptureOutcome:
    return CaptureOutcome("row_states", "none", 0.0, facts={"address": 0x7000, "arrivals": arrivals, **facts})


def test_the_one_counter_in_the_middle_of_a_barrier() -> None:
    assert counter_of_row_states([seen([0, 12, 24, 1])], 2) == 0x7000 + 3 * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET


def test_a_launch_of_one_group_waits_at_its_counter_whatever_it_holds() -> None:
    assert counter_of_row_states([seen([0])], 2) == 0x7000 + ARRIVAL_COUNTER_OFFSET
    assert only_counter({"address": 0x7000, "groups": [{"arrival": 0}]}) == 0x7000 + ARRIVAL_COUNTER_OFFSET
    assert only_counter({"address": 0x7000, "groups": [{"arrival": 0}], "unchanged": False}) is None
    assert only_counter({"address": 0x7000, "groups": [{}, {}]}) is None
    assert only_counter({}) is None


@pytest.mark.parametrize(
    "captures",
    [
        [],
        [CaptureOutcome("row_states", "none", 0.0)],
        [seen([0, 12, 0])],
        [seen([1, 0, 3])],
        [seen([1, 0], unchanged=False)],
    ],
)
def test_nothing_is_guessed(captures: list[CaptureOutcome]) -> None:
    assert counter_of_row_states(captures, 2) is None
