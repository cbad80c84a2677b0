"""The watchdog's rules, by samples and a clock that is a number."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_repro.forensics.collect.gpm import GpmSample
from dsv4_repro.forensics.collect.nvml import GpuSample
from dsv4_repro.repro.watchdog import Limits, Sample, Watchdog


def busy(at: float, utilisation: int = 100, memory: int = 0) -> GpuSample:
    return GpuSample(at, utilisation, memory, 123.0, 1980)


def started(limits: Limits | None = None, healthy: tuple[float, ...] = (1.0, 1.1, 1.2)) -> Watchdog:
    watchdog = Watchdog(limits, sm_count=132)
    for milliseconds in healthy:
        watchdog.healthy_step(milliseconds)
    watchdog.begin(38, 21, 100.0)
    return watchdog


def heard(at: float, layers: int = 0, **more: object) -> Sample:
    return Sample(at, at - 0.01, layers, "S", **more)  # type: ignore[arg-type]


def test_a_step_that_does_not_move_past_its_deadline_is_hung_with_its_reasons() -> None:
    watchdog = started()
    assert watchdog.observe(heard(100.05)).level == "healthy"
    assert watchdog.observe(heard(100.2)).level == "healthy"
    verdict = watchdog.observe(heard(100.3, gpu=busy(100.29), gpm=GpmSample(100.1, 100.29, 100.0, 0.758, 0.38, 0.0)))
    assert verdict.level == "hung"
    assert verdict.layer == 0
    assert verdict.reasons == (
        "step 38: the event behind it has not completed 300 ms after the launch "
        "(deadline 250 ms; median of 3 healthy steps 1.10 ms)",
        "0 of 21 layers finished by the device's own count, unchanged for 290 ms",
        "the host thread still answers: last word 10 ms ago, state S",
        "NVML: GPU 100 %, memory 0 %, 123 W, 1980 MHz: a kernel is resident and moves no memory",
        "GPM: SM_UTIL 0.76 % (about 1.0 of 132 SMs), SM_OCCUPANCY 0.38 %, DRAM 0.00 %, graphics 100 %",
    )


def test_layers_that_go_on_finishing_are_slow_and_not_hung() -> None:
    watchdog = started()
    for number in range(200):
        assert watchdog.observe(heard(100.1 + 0.1 * number, layers=number // 2)).level == "healthy", number
    assert watchdog.observe(heard(120.4, layers=99)).level == "hung"


@pytest.mark.parametrize(
    ("healthy", "limits", "deadline"),
    [
        ((), Limits(), 0.75),
        ((1.0,), Limits(), 0.25),
        ((20.0, 30.0, 40.0), Limits(), 1.5),
        ((9000.0,), Limits(), 10.0),
        ((), Limits(ceiling_s=0.3), 0.3),
    ],
)
def test_the_deadline_follows_the_healthy_steps_between_floor_and_ceiling(
    healthy: tuple[float, ...], limits: Limits, deadline: float
) -> None:
    watchdog = started(limits, healthy)
    assert watchdog.deadline_s == pytest.approx(deadline)
    assert watchdog.observe(heard(100.0 + deadline)).level == "healthy"
    assert watchdog.observe(heard(100.0 + deadline + 0.02)).level == "hung"


def test_a_silent_child_is_suspect_and_never_hung_whatever_the_card_shows() -> None:
    watchdog = started()
    for at in (100.6, 105.0, 400.0):
        verdict = watchdog.observe(
            Sample(at, None, None, "D", busy(at - 0.01), GpmSample(at - 0.2, at - 0.1, 100.0, 0.76, 0.4, 0.0))
        )
        assert verdict.level == "suspect"
        assert "process state D" in verdict.reasons[0]
    assert started().observe(Sample(101.0, 100.3, 0, "S")).level == "suspect", "it spoke once, and then no more"


def test_an_idle_card_contradicts_a_hang() -> None:
    watchdog = started()
    assert watchdog.observe(heard(100.3, gpu=busy(100.29, 0))).level == "hung", "one reading of 0 may be from before the launch"
    watchdog = started()
    for tenth in range(1, 40):
        at = 100.0 + 0.1 * tenth
        verdict = watchdog.observe(heard(at, gpu=busy(at - 0.01, 0)))
    assert verdict.level == "suspect"
    assert verdict.reasons[0].startswith("contradiction: NVML has shown 0 %")


def test_gpm_that_sees_no_work_contradicts_unless_nvml_shows_a_busy_card() -> None:
    nothing = GpmSample(100.1, 100.28, 0.0, 0.0, 0.0, 0.0)
    verdict = started().observe(heard(100.3, gpm=nothing))
    assert verdict.level == "suspect"
    assert verdict.reasons[0].startswith("contradiction: GPM saw no work")
    assert started().observe(heard(100.3, gpm=nothing, gpu=busy(100.29))).level == "hung", (
        "GPM that reads 0 beside a busy card is mute"
    )
    old = GpmSample(99.0, 99.5, 0.0, 0.0, 0.0, 0.0)
    assert started().observe(heard(100.3, gpm=old)).level == "hung", "what GPM saw before the launch says nothing"


def test_what_the_card_did_before_the_launch_is_no_evidence() -> None:
    verdict = started().observe(heard(100.3, gpu=busy(99.9)))
    assert verdict.level == "hung"
    assert not any(reason.startswith("NVML") for reason in verdict.reasons)


def test_a_count_that_was_never_read_keeps_it_suspect() -> None:
    verdict = started().observe(Sample(100.4, 100.39, None, "S", busy(100.3)))
    assert verdict.level == "suspect"
    assert "never read" in verdict.reasons[0]


def test_a_new_step_starts_from_nothing() -> None:
    watchdog = started()
    assert watchdog.observe(heard(100.5)).level == "hung"
    watchdog.begin(39, 21, 200.0)
    assert watchdog.observe(heard(200.1)).level == "healthy"


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 0.3),
            st.one_of(st.none(), st.integers(0, 21)),
            st.booleans(),
            st.one_of(st.none(), st.integers(0, 100)),
        ),
        max_size=40,
    )
)
def test_hung_always_rests_on_a_heard_child_and_a_count_that_stood_still(
    looks: list[tuple[float, int | None, bool, int | None]],
) -> None:
    watchdog = started()
    at, last_heard, last_count, changes = 100.0, None, None, [100.0]
    for gap, count, hears, utilisation in looks:
        at += gap
        if hears and count is not None:
            if last_count is not None and count != last_count:
                changes.append(at)
            last_heard, last_count = at, count
        verdict = watchdog.observe(Sample(at, last_heard, last_count, "R", None if utilisation is None else busy(at, utilisation)))
        if verdict.level == "hung":
            assert last_heard is not None
            assert last_count is not None
            assert at - last_heard <= watchdog.limits.heartbeat_s
            assert last_heard - changes[-1] >= watchdog.deadline_s - 1e-9
            assert verdict.reasons


def test_verdicts_do_not_depend_on_how_often_it_is_asked() -> None:
    def first_hung(step: float) -> float:
        watchdog = started()
        for number in itertools.count(1):
            at = 100.0 + number * step
            if watchdog.observe(Sample(at, at, 3, "S")).level == "hung":
                return at
        raise AssertionError

    assert first_hung(0.001) == pytest.approx(100.25, abs=0.002)
    assert first_hung(0.02) == pytest.approx(100.25, abs=0.021)
