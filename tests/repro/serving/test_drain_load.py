"""The load against a completions server: exact windows, replay, and a server that may do anything."""

from __future__ import annotations

import json
import resource
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.clock import SYSTEM
from dsv4_repro.repro.recorder import RecordedStep
from dsv4_repro.repro.serving.aims import window
from dsv4_repro.repro.serving.drain_load import DrainLoad
from dsv4_repro.repro.serving.load_plan import LoadPlan, RequestSpec, Wave, read_load_plan
from dsv4_repro.repro.serving.records import EngineSample
from dsv4_repro.repro.serving.request_records import compare_outputs, read_requests
from dsv4_repro.scenarios.drain import DrainPlan

from .completions_server import CompletionsServer, serving

SIZES = (2, 4, 8, 16, 24, 32)
SHORT = [(30, 20), (31, 300), (32, 300), (33, 300)]


def run(load: DrainLoad, seconds: float = 30.0) -> DrainLoad:
    """To its end."""
    load.start()
    end = SYSTEM.monotonic() + seconds
    while not load.done() and SYSTEM.monotonic() < end:
        SYSTEM.sleep(0.02)
    done = load.done()
    assert load.stop()
    assert done, "the load did not end"
    return load


def until(what: Any, seconds: float = 10.0) -> None:
    end = SYSTEM.monotonic() + seconds
    while not what() and SYSTEM.monotonic() < end:
        SYSTEM.sleep(0.01)
    assert what()


def events(load: DrainLoad, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, load.records.read_text().splitlines()) if line["event"] == kind]


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_sixteen_drain_to_three_and_every_step_is_counted(tmp_path: Path, acceptance: float) -> None:
    plan = LoadPlan.from_drain(DrainPlan(), waves=1, window_steps=150)
    with serving(CompletionsServer(acceptance=acceptance)) as server:
        load = run(DrainLoad(server.url, "m", plan, folder=tmp_path, counters=server.counters, ring_steps=server.ring_steps))
        truth = Counter(server.truth)
        assert load.error == ""
    for count in load.windows():
        assert count.steps == truth[count.aim.live], count.text
        assert count.reached == (truth[count.aim.live] > 0)
    (aimed,) = [count for count in load.windows() if count.aim.required]
    assert aimed.reached
    assert aimed.how == "measured"
    assert aimed.steps >= 20
    sample = load.sample()
    assert (sample.open, sample.faults) == (0, {})
    assert sample.tokens == server._generated


def test_counters_alone_show_the_window(tmp_path: Path) -> None:
    plan = LoadPlan.from_lengths(SHORT, live=3)
    with serving(CompletionsServer()) as server:
        load = run(DrainLoad(server.url, "m", plan, folder=tmp_path, counters=server.counters))
        truth = Counter(server.truth)
    (count,) = load.windows()
    assert count.how == "computed"
    assert 2 <= count.steps <= truth[3]


def test_somebody_elses_requests_are_no_window(tmp_path: Path) -> None:
    plan = LoadPlan.from_lengths(SHORT, live=3)
    with serving(CompletionsServer(others=1)) as server:
        load = run(DrainLoad(server.url, "m", plan, folder=tmp_path, counters=server.counters))
    (count,) = load.windows()
    assert (count.how, count.reached) == ("not reached", False)


def test_without_counters_nothing_is_reached(tmp_path: Path) -> None:
    plan = LoadPlan.from_lengths(SHORT, live=3)
    with serving(CompletionsServer()) as server:
        load = run(DrainLoad(server.url, "m", plan, folder=tmp_path))
    (count,) = load.windows()
    assert (count.how, count.reached) == ("inferred", False)


def test_steps_of_before_the_load_do_not_count(tmp_path: Path) -> None:
    plan = LoadPlan.from_lengths([(30, 20), (31, 20)], live=2)
    with serving(CompletionsServer()) as server:
        server.truth.extend([3] * 50)
        load = run(DrainLoad(server.url, "m", plan, folder=tmp_path, ring_steps=server.ring_steps))
        truth = Counter(server.truth)
    (count,) = load.windows()
    assert count.steps == truth[2] > 0


def test_the_same_plan_gives_the_same_requests_and_outputs(tmp_path: Path) -> None:
    plan = LoadPlan.from_lengths(SHORT, live=3, waves=2)
    with serving(CompletionsServer()) as server:
        first = run(DrainLoad(server.url, "m", plan, folder=tmp_path / "a"))
        again = run(DrainLoad(server.url, "m", read_load_plan(tmp_path / "a" / "plan.json"), folder=tmp_path / "b"))
    assert (tmp_path / "a" / "plan.json").read_bytes() == (tmp_path / "b" / "plan.json").read_bytes()
    found = compare_outputs(read_requests(first.records), read_requests(again.records))
    assert found.same is True
    assert len(found.equal) == 9
    assert not found.agree
    assert not found.unknown


def test_outputs_without_token_ids_are_compared_by_text(tmp_path: Path) -> None:
    plan = LoadPlan.from_lengths(SHORT, live=3)
    with serving(CompletionsServer(token_ids=False, acceptance=0.0)) as server:
        first = run(DrainLoad(server.url, "m", plan, folder=tmp_path / "a"))
        again = run(DrainLoad(server.url, "m", plan, folder=tmp_path / "b"))
    records = read_requests(first.records)
    assert all(record.token_ids is None and record.texts for record in records.values())
    assert len(compare_outputs(records, read_requests(again.records)).equal) == 5


def test_the_records_say_when_everything_came(tmp_path: Path) -> None:
    plan = LoadPlan.from_lengths(SHORT, live=3)
    with serving(CompletionsServer()) as server:
        load = run(DrainLoad(server.url, "m", plan, folder=tmp_path, headers={"Authorization": "Bearer sk-secret"}))
        assert server.seen_headers[0]["authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in load.records.read_text()
    (head,) = events(load, "load")
    assert head["headers"] == ["Authorization"]
    assert head["plan_sha256"] == plan.sha256
    records = read_requests(load.records)
    assert [(name, record.tokens) for name, record in records.items()] == [
        ("warm-up", 8), ("w0-r0", 20), ("w0-r1", 300), ("w0-r2", 300), ("w0-r3", 300),
    ]  # fmt: skip
    for record in records.values():
        times = [at for at, _ in record.arrivals]
        assert times == sorted(times)
        assert record.kind == "completed"
        assert record.token_ids is not None
        assert len(record.token_ids) == record.max_tokens
        assert record.accepted_at is not None
        assert record.ended_at is not None
        assert record.sent_at <= record.accepted_at <= times[0] <= times[-1] <= record.ended_at + 1e-6
        assert len(times) > record.max_tokens / 4


def test_a_wedged_engine_is_left_alone_and_stop_returns(tmp_path: Path) -> None:
    """The step that hangs is in the ring, so the window is measured; nothing is cancelled or sent into the wedge."""
    plan = LoadPlan.from_drain(DrainPlan(), waves=3, window_steps=150)
    before = threading.active_count()
    with serving(CompletionsServer(wedge_at=3, wedge_after=16)) as server:
        load = DrainLoad(server.url, "m", plan, folder=tmp_path, counters=server.counters, ring_steps=server.ring_steps)
        load.start()
        until(lambda: server.wedged)
        SYSTEM.sleep(3.5)
        sample = load.sample()
        assert (load.live(), sample.open, sample.faults) == (3, 3, {})
        assert sample.last_token_age_s is not None
        assert sample.last_token_age_s > 3.0
        assert not load.done()
        (aimed,) = [count for count in load.windows() if count.aim.required]
        assert (aimed.how, aimed.steps) == ("measured", 1)
        assert len(load.stream_tokens()) == 16
        began = SYSTEM.monotonic()
        assert load.stop(5.0)
        assert SYSTEM.monotonic() - began < 2.0
        assert load.stop(5.0)
        assert load.done()
        until(lambda: server.disconnects == 3)
        assert events(load, "steer") == []
    until(lambda: threading.active_count() <= before)
    ends = [line for line in events(load, "end") if line["kind"] == "cancelled"]
    assert [line["detail"] for line in ends] == ["the load was stopped"] * 3
    assert load.sample().tokens == sum(record.tokens for record in read_requests(load.records).values())


def test_a_wedge_by_counters_alone_is_inferred(tmp_path: Path) -> None:
    plan = LoadPlan.from_lengths(SHORT, live=3)
    with serving(CompletionsServer(wedge_at=3, wedge_after=4)) as server:
        load = DrainLoad(server.url, "m", plan, folder=tmp_path, counters=server.counters)
        load.start()
        until(lambda: server.wedged)
        until(lambda: load.windows()[0].how == "inferred")
        assert not load.windows()[0].reached
        assert load.stop()


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        ("429", "too-many-requests"),
        ("503", "unavailable"),
        ("500", "server-error"),
        ("reset", "reset"),
        ("cut", "reset"),
        ("stall", "slow"),
        ("slow-headers", "slow"),
        ("garbage", "malformed"),
        ("endless-line", "overrun"),
        ("error-event", "server-error"),
        ("gzip", "malformed"),
    ],
)
def test_every_trouble_ends_as_a_client_fault(tmp_path: Path, trouble: str, kind: str) -> None:
    plan = LoadPlan.from_lengths(SHORT, live=3, warm_up=False).model_copy(update={"request_timeout_s": 1.0})
    with serving(CompletionsServer(trouble=trouble)) as server:
        load = run(DrainLoad(server.url, "m", plan, folder=tmp_path, counters=server.counters), 15)
    assert load.sample().faults == {kind: 4}
    assert set(load.fault_details()) == {kind}
    assert load.fault_details()[kind]
    assert not load.windows()[0].reached
    assert {record.kind for record in read_requests(load.records).values()} == {kind}


def test_nobody_listens(tmp_path: Path) -> None:
    plan = LoadPlan.from_drain(DrainPlan(), waves=1)
    load = run(DrainLoad("http://127.0.0.1:1", "m", plan, folder=tmp_path), 15)
    assert load.sample().faults == {"refused": 17}, "the held-back ones are not sent into a server that refuses"


def test_a_server_that_dies_in_the_middle(tmp_path: Path) -> None:
    plan = LoadPlan.from_drain(DrainPlan(), waves=1)
    with serving(CompletionsServer(step_s=0.02)) as server:
        load = DrainLoad(server.url, "m", plan, folder=tmp_path, counters=server.counters)
        load.start()
        until(lambda: load.live() == 16 and load.sample().tokens > 40)
    until(load.done, 15)
    assert load.stop()
    faults = load.sample().faults
    assert sum(faults.values()) == 16
    assert set(faults) <= {"reset", "refused"}


def test_one_that_leaves_too_early_is_replaced(tmp_path: Path) -> None:
    """Two requests are too few for a window of three: the held-back one makes it three."""
    specs = [RequestSpec(id=f"r{number}", prompt_tokens=9, max_tokens=400) for number in range(2)]
    spare = RequestSpec(id="s", prompt_tokens=9, max_tokens=50, hold_back="spare")
    plan = LoadPlan(graph_sizes=SIZES, waves=(Wave(name="w", requests=(*specs, spare), aims=(window(3, 1, SIZES),)),))
    with serving(CompletionsServer()) as server:
        load = run(DrainLoad(server.url, "m", plan, folder=tmp_path, counters=server.counters, ring_steps=server.ring_steps))
        assert load.windows()[0].steps == Counter(server.truth)[3] > 0
    assert [line["release"] for line in events(load, "steer")] == [["s"]]


def test_stragglers_are_cancelled_before_the_window_closes(tmp_path: Path) -> None:
    """All four would end together: three live requests are only had by cancelling one."""
    specs = [RequestSpec(id=f"r{number}", prompt_tokens=9, max_tokens=400) for number in range(4)]
    plan = LoadPlan(graph_sizes=SIZES, waves=(Wave(name="w", requests=tuple(specs), aims=(window(3, 1, SIZES),)),))
    with serving(CompletionsServer(acceptance=1.0)) as server:
        load = run(DrainLoad(server.url, "m", plan, folder=tmp_path, counters=server.counters, ring_steps=server.ring_steps))
        assert load.windows()[0].steps == Counter(server.truth)[3] >= 2
    (steer,) = events(load, "steer")
    assert len(steer["cancel"]) == 1
    ends = Counter(line["kind"] for line in events(load, "end"))
    assert ends == {"completed": 3, "cancelled": 1}


def test_starts_cancellations_and_the_time_of_a_wave(tmp_path: Path) -> None:
    specs = (
        RequestSpec(id="now", prompt_tokens=9, max_tokens=100_000 - 9),
        RequestSpec(id="later", text="hello", max_tokens=1000, start_s=0.3, cancel_after=10),
    )
    plan = LoadPlan(max_model_len=100_000, waves=(Wave(name="w", requests=specs, limit_s=1.5),))
    with serving(CompletionsServer()) as server:
        load = run(DrainLoad(server.url, "m", plan, folder=tmp_path))
    records = read_requests(load.records)
    assert 0.25 < records["later"].sent_at - records["now"].sent_at < 1.0
    assert (records["later"].kind, records["later"].detail) == ("cancelled", "planned")
    assert 10 <= records["later"].tokens < 100
    assert (records["now"].kind, records["now"].detail) == ("cancelled", "the wave's time is over")


def test_sources_that_fail_are_said_and_the_load_goes_on(tmp_path: Path) -> None:
    def broken() -> EngineSample:
        raise OSError("no such file")

    def torn() -> list[RecordedStep]:
        raise ValueError("torn")

    plan = LoadPlan.from_lengths(SHORT, live=3)
    with serving(CompletionsServer()) as server:
        load = run(DrainLoad(server.url, "m", plan, folder=tmp_path, counters=broken, ring_steps=torn))
    assert "the flight recorder: torn" in load.error
    assert load.sample().faults == {}


def test_what_others_learn_can_be_told(tmp_path: Path) -> None:
    plan = LoadPlan.from_lengths(SHORT, live=3)
    with serving(CompletionsServer()) as server:
        load = DrainLoad(server.url, "m", plan, folder=tmp_path)
        load.start()
        while not load.done():
            load.learn(server.counters())
            SYSTEM.sleep(0.1)
        assert load.stop()
    assert load.windows()[0].how == "computed"


def test_stop_before_start_and_in_the_first_moment(tmp_path: Path) -> None:
    plan = LoadPlan.from_drain(DrainPlan())
    load = DrainLoad("http://127.0.0.1:1", "m", plan, folder=tmp_path / "a")
    assert load.stop()
    assert load.sample().tokens == 0
    load = DrainLoad("http://127.0.0.1:1", "m", plan, folder=tmp_path / "b")
    load.start()
    assert load.stop()
    assert load.done()


def test_a_large_wave_is_bounded_in_memory_and_time(tmp_path: Path) -> None:
    """256 streams of 400 tokens: 100k arrivals."""
    specs = tuple(RequestSpec(id=f"r{number}", prompt_tokens=64, max_tokens=400) for number in range(256))
    plan = LoadPlan(max_num_seqs=256, waves=(Wave(name="w", requests=specs),))
    with serving(CompletionsServer(acceptance=1.0, step_s=0.01)) as server:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = SYSTEM.monotonic()
        load = run(DrainLoad(server.url, "m", plan, folder=tmp_path), 60)
        took = SYSTEM.monotonic() - began
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert load.sample().tokens == 256 * 400
    assert load.records.stat().st_size < 20 << 20
    assert grown < 100 << 10, f"{grown} KiB more"
    assert took < 60
