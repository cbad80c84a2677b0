"""The dump of the step that did not come back, and the padding that it predicts."""

from __future__ import annotations

import pytest

from dsv4_repro.forensics.evidence.facts import SchedulerDump
from dsv4_repro.forensics.evidence.gather import read_text
from dsv4_repro.forensics.evidence.refs import Ref
from dsv4_repro.forensics.evidence.scheduler_dump import default_capture_sizes, forecast_padding

LINE = (
    "(EngineCore pid=4) ERROR 11-28 09:17:51 [dump_input.py:79] Dumping scheduler output for model execution: SchedulerOutput("
    "scheduled_new_reqs=[{new}], scheduled_cached_reqs=CachedRequestData(req_ids=['a', 'b', 'c'], num_computed_tokens=[1, 2, 3]), "
    "num_scheduled_tokens={{{tokens}}}, total_num_scheduled_tokens={total}, scheduled_spec_decode_tokens={{'a': [-1], 'b': [-1], "
    "'c': [-1]}}, "
    "finished_req_ids=['d', 'e'], preempted_req_ids=[])"
)


def read(tokens: str, total: int, new: str = "") -> SchedulerDump:
    return read_text("log", LINE.format(tokens=tokens, total=total, new=new)).dumps[0]


def test_three_times_two_in_a_graph_of_eight() -> None:
    dump = read("'a': 2, 'b': 2, 'c': 2", 6)
    assert dump.tokens == {"a": 2, "b": 2, "c": 2}
    assert (dump.total, dump.spec_tokens, dump.new, dump.finished) == (6, 1, 0, 2)
    found = forecast_padding(dump)
    assert found is not None
    assert (found.live_requests, found.rows, found.graph_rows, found.padded_requests, found.assumed) == (3, 6, 8, 1, True)


def test_prefills_mixed_and_plain_steps_predict_nothing() -> None:
    assert forecast_padding(read("'a': 2, 'b': 2, 'c': 512", 516)) is None
    assert forecast_padding(read("'a': 1, 'b': 1, 'c': 1", 3)) is None
    assert forecast_padding(read("'a': 2, 'b': 2, 'c': 2", 6, new="NewRequestData(req_id=f)")) is None


@pytest.mark.parametrize(
    ("live", "padded"), [(1, 0), (2, 0), (3, 1), (4, 0), (5, 3), (6, 2), (7, 1), (8, 0), (9, 3), (12, 0), (15, 1)]
)
def test_default_sizes(live: int, padded: int) -> None:
    dump = SchedulerDump(Ref("x", 1, 1), (0, 0), tokens={f"r{i}": 2 for i in range(live)})
    found = forecast_padding(dump)
    assert found is not None
    assert found.padded_requests == padded


def test_sizes_from_the_log_win() -> None:
    dump = read("'a': 2, 'b': 2, 'c': 2", 6)
    found = forecast_padding(dump, [1, 2, 4, 6, 8])
    assert found is not None
    assert (found.graph_rows, found.padded_requests, found.assumed) == (6, 0, False)
    assert forecast_padding(dump, [1, 2]) is None
    assert default_capture_sizes(16) == (1, 2, 4, 8, 16)


def test_stats_dump() -> None:
    dump = read_text(
        "log", "x Dumping scheduler stats: SchedulerStats(num_running_reqs=3, num_waiting_reqs=0, kv_cache_usage=0.0412)"
    ).dumps[0]
    assert (dump.running, dump.waiting) == (3, 0)
    assert dump.kv == pytest.approx(4.12)
