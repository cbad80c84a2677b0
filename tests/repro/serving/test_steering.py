"""The steering: which windows were reached and how surely, and what it does to reach them. Pure, no server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_repro.repro.recorder import RecordedStep
from dsv4_repro.repro.serving.aims import Aim, window
from dsv4_repro.repro.serving.load_plan import RequestSpec, Wave
from dsv4_repro.repro.serving.records import EngineSample
from dsv4_repro.repro.serving.steering import Observation, StreamView, WaveSteering, count_windows, step_in_window

SIZES = (2, 4, 8, 16, 24, 32)
THREE = window(3, 1, SIZES)


def ring_step(**changes: Any) -> RecordedStep:
    """A step of three requests padded to four."""
    step = RecordedStep(
        number=1, runner="v1", graph_mode="full", native=True, requests=3, tokens=6, padded_requests=4, padded_tokens=8,
        decode_min=0, decode_max=2, decode_slots=4, decode_zero=1, next_n=2, begin_ns=1, launch_ns=2, record_ns=3, complete_ns=None,
        wait_ns=None, output_ns=None, guarded=False, event_dropped=False,
    )  # fmt: skip
    return replace(step, **changes)


def wave(*aims: Aim, requests: int = 8) -> Wave:
    specs = tuple(RequestSpec(id=f"r{number}", prompt_tokens=4, max_tokens=400) for number in range(requests))
    return Wave(name="w", requests=specs, aims=aims or (THREE,))


def streams(*tokens: int, most: int = 400, held: int = 0) -> tuple[StreamView, ...]:
    return tuple(StreamView(f"r{number}", "streaming", count, most) for number, count in enumerate(tokens)) + tuple(
        StreamView(f"h{number}", "held", 0, most) for number in range(held)
    )


def look(at: float, *tokens: int, **more: Any) -> Observation:
    views = more.pop("streams", None) or streams(*tokens)
    return Observation(at, views, more.pop("last_token_at", at), **more)


def counters(at: float, running: int, iterations: float | None, **more: Any) -> EngineSample:
    fields: dict[str, Any] = {
        "waiting": 0,
        "generation_tokens": 3 * (iterations or at),
        "finished": 5.0,
        "preemptions": 0.0,
        **more,
    }
    return EngineSample(at=at, running=running, iterations=iterations, **fields)


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({}, True),
        ({"complete_ns": 5}, True),
        ({"requests": 4, "tokens": 8, "decode_zero": 0}, False),
        ({"requests": None}, False),
        ({"padded_requests": 3, "padded_tokens": 6, "decode_zero": 0}, False),
        ({"padded_requests": 8, "padded_tokens": 16, "decode_zero": 5}, False),
        ({"decode_zero": 0}, False),
        ({"decode_zero": None}, False),
        ({"graph_mode": "piecewise"}, False),
        ({"graph_mode": "none"}, False),
        ({"graph_mode": "unknown"}, False),
        ({"tokens": 500}, False),
        ({"next_n": 3}, False),
        ({"next_n": None}, True),
        ({"padded_tokens": None}, True),
    ],
)
def test_a_recorded_step_is_in_the_window_or_not(change: dict[str, Any], counts: bool) -> None:
    assert step_in_window(ring_step(**change), THREE) is counts


def test_windows_of_the_controls() -> None:
    no_mtp = window(3, 0, (1, 2, 4, 8, 16))
    plain = ring_step(tokens=3, padded_tokens=4, next_n=1)
    assert step_in_window(replace(plain, decode_zero=None), no_mtp)
    assert step_in_window(plain, no_mtp)
    assert not step_in_window(replace(plain, padded_requests=3, padded_tokens=3), no_mtp)
    eager = window(3, 1, ())
    assert step_in_window(ring_step(graph_mode="none", padded_requests=3, padded_tokens=6, decode_zero=0), eager)
    assert not step_in_window(ring_step(), eager)
    exact = window(4, 1, SIZES)
    assert step_in_window(ring_step(requests=4, tokens=8, decode_zero=0), exact)
    assert step_in_window(ring_step(requests=4, tokens=8, decode_zero=None), exact)


def test_the_ring_measures_also_a_step_that_never_ended() -> None:
    steering = WaveSteering(wave(), 1)
    steering.observe(look(1.0, 9, 9, 9, steps=[ring_step()]))
    (count,) = steering.windows()
    assert (count.how, count.reached, count.steps) == ("measured", True, 1)
    assert "1 recorded step with exactly these sizes" in count.text
    assert not steering.satisfied, "two steps were asked for"
    steering.observe(look(1.1, 9, 9, 9, steps=[ring_step(number=2)]))
    assert steering.satisfied


def _two(first: EngineSample, second: EngineSample, *, live: int = 3, moved: bool = True) -> WaveSteering:
    steering = WaveSteering(wave(), 1)
    tokens = [50] * live
    steering.observe(look(0.0, *tokens))
    steering.observe(look(first.at, *tokens, engine=first, last_token_at=0.5))
    steering.observe(look(second.at, *tokens, engine=second, last_token_at=second.at if moved else 0.5))
    return steering


def test_counters_compute_a_window() -> None:
    (count,) = _two(counters(1.0, 3, 100.0), counters(1.5, 3, 140.0)).windows()
    assert (count.how, count.steps) == ("computed", 40)
    assert "40 iterations by the engine's counters while exactly 3 requests ran" in count.text


@pytest.mark.parametrize(
    "second",
    [
        counters(1.5, 4, 140.0),
        counters(1.5, 2, 140.0),
        counters(1.5, 3, 140.0, waiting=1),
        counters(1.5, 3, 140.0, waiting=None),
        counters(1.5, 3, 140.0, finished=6.0),
        counters(1.5, 3, 140.0, preemptions=1.0),
        counters(1.5, 3, 100.0),
        counters(1.5, 3, 90.0),
        counters(1.5, 3, 140.0, generation_tokens=300.0),
        EngineSample(at=1.5, error="timed out"),
        counters(0.9, 3, 140.0),
    ],
)
def test_counters_that_do_not_show_it_compute_nothing(second: EngineSample) -> None:
    (count,) = _two(counters(1.0, 3, 100.0), second).windows()
    assert (count.how, count.reached) == ("not reached", False)


@pytest.mark.parametrize(("mtp", "drafted", "how"), [(1, 140.0, "computed"), (1, 100.0, "not reached"), (0, 100.0, "computed")])
def test_a_server_without_mtp_is_another_window(mtp: int, drafted: float, how: str) -> None:
    steering = WaveSteering(wave(window(3, mtp, SIZES)), mtp)
    steering.observe(look(0.0, 50, 50, 50))
    steering.observe(look(1.0, 50, 50, 50, engine=counters(1.0, 3, 100.0, drafted=100.0)))
    steering.observe(look(1.5, 60, 60, 60, engine=counters(1.5, 3, 140.0, drafted=drafted)))
    assert steering.windows()[0].how == how


def test_a_reading_with_something_missing_counts_by_what_it_has() -> None:
    (count,) = _two(counters(1.0, 3, 100.0), counters(1.5, 3, 140.0, error="spec_decode: not exported")).windows()
    assert (count.how, count.steps) == ("computed", 40)


def test_requests_of_others_are_no_window_of_ours() -> None:
    (count,) = _two(counters(1.0, 3, 100.0), counters(1.5, 3, 140.0), live=2).windows()
    assert count.how == "not reached"
    (count,) = _two(counters(1.0, 5, 100.0), counters(1.5, 5, 140.0), live=3).windows()
    assert count.how == "not reached"


def test_a_stream_that_ended_between_two_readings_spoils_them() -> None:
    steering = WaveSteering(wave(), 1)
    steering.observe(look(1.0, 50, 50, 50, 50, engine=counters(1.0, 3, 100.0)))
    steering.observe(look(1.5, 50, 50, 50, engine=counters(1.5, 3, 140.0)))
    assert steering.windows()[0].how == "not reached"
    steering.observe(look(2.0, 60, 60, 60, engine=counters(2.0, 3, 180.0)))
    assert steering.windows()[0].steps == 40


def test_without_an_iteration_counter_tokens_do_and_it_is_said() -> None:
    (count,) = _two(counters(1.0, 3, None), counters(1.5, 3, None)).windows()
    assert count.how == "computed"
    assert "exports no iteration counter" in count.text


def test_standing_still_is_inferred_and_not_reached() -> None:
    steering = WaveSteering(wave(), 1)
    steering.observe(look(0.0, 50, 50, 50))
    for at in (1.0, 2.0, 3.0, 4.0):
        decision = steering.observe(look(at, 50, 50, 50, engine=counters(at, 3, 100.0, generation_tokens=300.0), last_token_at=0.5))
        assert (decision.cancel, decision.release) == ((), ())
    (count,) = steering.windows()
    assert (count.how, count.reached) == ("inferred", False)
    assert "a step of this size was not seen" in count.text


def test_without_a_word_from_the_engine_it_is_inferred_from_the_streams() -> None:
    steering = WaveSteering(wave(), 1)
    steering.observe(look(0.0, 50, 50, 50))
    assert steering.windows()[0].how == "not reached"
    assert "neither the engine's counters nor a flight recorder" in steering.windows()[0].text
    steering.observe(look(0.5, 70, 70, 70))
    (count,) = steering.windows()
    assert (count.how, count.reached) == ("inferred", False)
    assert "who else ran" in count.text
    assert steering.satisfied


def test_while_tokens_stand_nothing_is_touched() -> None:
    steering = WaveSteering(wave(), 1)
    decision = steering.observe(look(5.0, 395, 395, 395, 10, 10, last_token_at=3.5))
    assert (decision.cancel, decision.release, decision.extend) == ((), (), ())
    assert "nothing is changed" in decision.why[0]
    assert steering.observe(look(5.1, streams=streams(10, held=3), last_token_at=3.5)).release == ()


def test_those_that_would_outlast_too_little_make_the_others_leave() -> None:
    steering = WaveSteering(wave(), 1)
    late = (*streams(392, 392, 392), StreamView("slow", "streaming", 5, 60), StreamView("slower", "streaming", 5, 61))
    with_time = (*streams(10, 10, 10), StreamView("slow", "streaming", 5, 60))
    assert steering.observe(look(1.0, streams=with_time)).cancel == ()
    tight = tuple(replace(one, max_tokens=60) for one in (*streams(50, 50, 50), StreamView("slow", "streaming", 5, 16)))
    assert len(steering.observe(look(1.1, streams=tight)).cancel) == 1
    decision = WaveSteering(wave(), 1).observe(look(1.0, streams=late))
    assert len(decision.cancel) == 2
    assert "would not outlast" in decision.why[0]


def test_one_that_left_too_early_is_replaced() -> None:
    steering = WaveSteering(wave(), 1)
    decision = steering.observe(look(1.0, streams=streams(50, 50, held=3)))
    assert decision.release == ("h0",)
    assert steering.observe(look(1.1, streams=streams(50, 50))).release == ()
    assert steering.observe(look(1.2, streams=streams(50, held=1))).release == (), "two are missing and one is there: of no use"


def test_what_is_still_to_come_is_waited_for() -> None:
    views = (*streams(50, 50, held=3), StreamView("later", "due", 0, 400))
    assert WaveSteering(wave(), 1).observe(look(1.0, streams=views)).release == ()


def test_a_server_that_refuses_gets_no_more_until_tokens_come() -> None:
    steering = WaveSteering(wave(), 1)
    failed = (*streams(50, 50, held=3), StreamView("f", "ended", 0, 400, fault=True))
    assert steering.observe(look(1.0, streams=failed, last_token_at=0.9)).release == ()
    assert steering.observe(look(1.1, streams=failed, last_token_at=0.9)).release == ()
    assert steering.observe(look(1.2, streams=failed, last_token_at=1.15)).release == ("h0",)


def test_a_planned_cancellation_waits_for_the_window() -> None:
    steering = WaveSteering(wave(), 1)
    views = (*streams(50, 50), StreamView("c", "streaming", 20, 400, cancel_after=10))
    decision = steering.observe(look(1.0, streams=views))
    assert (decision.cancel, decision.extend) == ((), ("c",))
    steps = [ring_step(), ring_step(number=2)]
    decision = steering.observe(look(1.1, streams=views, steps=steps))
    assert (decision.cancel, decision.extend) == (("c",), ())


def test_a_planned_cancellation_above_the_window_is_done() -> None:
    views = (*streams(50, 50, 50), StreamView("c", "streaming", 20, 400, cancel_after=10), StreamView("d", "streaming", 9, 400, 10))
    decision = WaveSteering(wave(), 1).observe(look(1.0, streams=views))
    assert decision.cancel == ("c",)


def test_windows_are_aimed_at_from_the_largest_down() -> None:
    seven = window(7, 1, SIZES)
    steering = WaveSteering(wave(THREE, seven), 1)
    views = streams(50, 50, 50, 50, 50, held=2)
    assert steering.observe(look(1.0, streams=views)).release == ("h0", "h1"), "7 comes first"
    steps = [
        ring_step(requests=7, tokens=14, padded_requests=8, padded_tokens=16),
        ring_step(requests=7, tokens=14, padded_requests=8, padded_tokens=16),
    ]
    assert steering.observe(look(1.1, streams=views, steps=steps)).release == ()
    assert [(count.aim.live, count.how) for count in steering.windows()] == [(7, "measured"), (3, "not reached")]


def test_waves_are_added_up() -> None:
    first, second, third = (WaveSteering(wave(), 1) for _ in range(3))
    first.observe(look(1.0, 9, 9, 9, steps=[ring_step()]))
    second.observe(look(1.0, 9, 9, 9, steps=[ring_step(), ring_step()]))
    (count,) = count_windows([one.windows() for one in (first, second, third)])
    assert (count.how, count.waves, count.steps) == ("measured", 2, 3)
    assert count.text.endswith("measured: 3 recorded steps with exactly these sizes; reached in 2 of 3 waves")


views = st.builds(
    StreamView,
    id=st.sampled_from("abcdefgh"),
    state=st.sampled_from(["held", "due", "sent", "streaming", "ended"]),
    tokens=st.integers(0, 400),
    max_tokens=st.integers(1, 400),
    cancel_after=st.none() | st.integers(1, 400),
    fault=st.booleans(),
)
samples = st.builds(
    EngineSample,
    at=st.floats(0, 100),
    running=st.none() | st.integers(-1, 5),
    waiting=st.none() | st.integers(0, 2),
    iterations=st.none() | st.floats(0, 100) | st.just(float("nan")),
    generation_tokens=st.none() | st.floats(0, 100) | st.just(float("inf")),
    finished=st.none() | st.floats(0, 3),
)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 100),
            st.lists(views, max_size=8, unique_by=lambda view: view.id),
            st.none() | st.floats(0, 100),
            st.none() | samples,
        ),
        max_size=8,
    )
)
def test_whatever_is_seen_decisions_are_possible(
    looks: list[tuple[float, list[StreamView], float | None, EngineSample | None]],
) -> None:
    """Only what is open is cancelled, only what is held is sent, and never is the aim undercut by a cancellation."""
    steering = WaveSteering(wave(window(5, 1, SIZES), THREE), 1)
    for at, seen, token_at, sample in looks:
        decision = steering.observe(Observation(at, tuple(seen), token_at, sample))
        states = {view.id: view.state for view in seen}
        assert all(states[name] in ("sent", "streaming") for name in (*decision.cancel, *decision.extend))
        assert all(states[name] == "held" for name in decision.release)
        assert not set(decision.cancel) & set(decision.extend)
        live = sum(state in ("sent", "streaming") for state in states.values())
        if decision.cancel and not steering.satisfied:
            assert live - len(decision.cancel) >= 3
