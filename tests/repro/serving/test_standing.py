"""How a server stands, from a few looks: HUNG only with a sign of the device, unknown never fine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from dsv4_repro.repro.serving.log_history import LogHistory
from dsv4_repro.repro.serving.records import Assessment, DeviceSample, EngineSample, ProcessSample, RankProgress, Snapshot
from dsv4_repro.repro.serving.standing import Standing, standing

SPIN: dict[str, Any] = {"utilisation": 100, "memory_utilisation": 0, "power_w": 120.0}
STOOD = LogHistory(stats_age_s=90, stats_running=3, stats_generation=0.0, wait_lines=1, wait_first_age_s=30, wait_interval_s=60)


def _engine(at: float, **values: Any) -> EngineSample:
    return dataclasses.replace(
        EngineSample(at, health=200, running=3, waiting=0, generation_tokens=60.0, iterations=30.0), **values
    )


def _shots(
    *, engine: dict[str, Any] | None = None, moving: bool = False, devices: Sequence[dict[str, Any]] = (), ring: float | None = None
) -> list[Snapshot]:
    shots = []
    for n in range(3):
        at = 100.0 + n
        values = {**(engine or {}), **({"generation_tokens": 60.0 + n} if moving else {})}
        progress = (RankProgress(9, at, 0, begun=70, unfinished=(70,), unfinished_age_s=ring + n),) if ring is not None else ()
        shots.append(
            Snapshot(
                at,
                engine=_engine(at, **values),
                progress=progress,
                devices=tuple(DeviceSample(at, index, **device) for index, device in enumerate(devices)),
            )
        )
    return shots


def _state(found: Standing) -> str:
    return found.state


def test_what_moves_is_healthy_whatever_the_card_shows() -> None:
    assert standing(_shots(moving=True, devices=[SPIN]), None, STOOD).state == "healthy"


def test_a_stand_still_with_a_sign_of_the_device_is_a_hang_and_without_one_is_not() -> None:
    assert standing(_shots(devices=[SPIN]), None, STOOD).state == "hung"
    assert standing(_shots(), None, STOOD).state == "suspect"
    assert standing(_shots(ring=20.0)).state == "hung"


def test_a_long_step_is_a_hang_by_the_watchdogs_word_alone() -> None:
    """A prefill of 20 s, or a step whose peer compiles, and no card that can be read: the watchdog waits for both."""
    waits = Assessment("suspect", 102.0, 80.0, ("rank 1 has begun a step and launched nothing for 20.0 s",))
    found = standing(_shots(ring=20.0), waits)
    assert (found.state, found.device_signals) == ("suspect", ())
    assert "rank 1 has begun a step and launched nothing for 20.0 s" in found.reasons


@pytest.mark.parametrize(("role", "state"), [("worker", "T"), ("engine", "t"), ("compiler", "R")])
def test_a_host_that_is_held_or_compiles_explains_a_resident_kernel(role: str, state: str) -> None:
    shots = _shots(devices=[SPIN])
    assert standing(shots, None, STOOD).state == "hung"
    shots[-1] = dataclasses.replace(shots[-1], processes=(ProcessSample(102.0, 7, role, state),))
    found = standing(shots, None, STOOD)
    assert found.state == "suspect"
    assert "7" in found.against[0]


def test_two_seconds_are_no_hang() -> None:
    found = standing(_shots(devices=[SPIN]))
    assert (found.state, found.still_s) == ("suspect", None)
    assert standing(_shots(ring=5.0)).state == "suspect"


@pytest.mark.parametrize(
    "device",
    [
        {**SPIN, "memory_utilisation": 30}, {**SPIN, "utilisation": 0}, {**SPIN, "utilisation": 50},
        {"utilisation": 100}, {"memory_utilisation": 0}, {}, {**SPIN, "power_w": 500.0, "busy_power_w": 600.0},
    ],
)  # fmt: skip
def test_a_card_that_works_idles_or_is_not_read_shows_no_hang(device: dict[str, Any]) -> None:
    assert standing(_shots(devices=[device]), None, STOOD).state == "suspect"


def test_low_power_against_the_busy_level_is_told() -> None:
    found = standing(_shots(devices=[{**SPIN, "busy_power_w": 600.0}]), None, STOOD)
    assert found.state == "hung"
    assert "120 W of 600 W while it computed" in found.device_signals[0]


def test_the_watchdogs_hang_is_one_only_with_a_sign() -> None:
    with_sign = Assessment("hung", 102.0, 95.0, ("stands",), ("rank 0: its event has not completed",))
    assert standing(_shots(), with_sign).state == "hung"
    assert standing(_shots(), Assessment("hung", 102.0, 95.0, ("stands",))).state == "suspect"


def test_how_long_it_stands_is_at_best_measured() -> None:
    found = standing(_shots(ring=40.0), None, STOOD)
    assert (found.still_s, found.still_known) == (42.0, "measured")
    found = standing(_shots(), None, STOOD)
    assert (found.still_s, found.still_known) == (90.0, "inferred")
    assert standing(_shots()).still_known == "not observed"


def test_a_stats_line_with_tokens_says_nothing_of_the_seconds_after_it() -> None:
    fresh = LogHistory(stats_age_s=8, stats_running=3, stats_generation=40.0, flowing_age_s=8)
    assert standing(_shots(devices=[SPIN]), None, fresh).still_s is None
    missing = LogHistory(stats_age_s=60, stats_running=3, stats_generation=40.0, flowing_age_s=60)
    found = standing(_shots(devices=[SPIN]), None, missing)
    assert (found.still_s, found.still_known, found.state) == (40.0, "inferred", "hung")
    zero = LogHistory(stats_age_s=5, stats_running=3, stats_generation=0.0, flowing_age_s=25)
    assert standing(_shots(devices=[SPIN]), None, zero).still_s == 5.0


def test_idle_and_an_engine_that_stopped_publishing() -> None:
    assert standing(_shots(engine={"running": 0})).state == "idle"
    assert standing(_shots(engine={"running": 0, "waiting": 4}), None, STOOD).state == "suspect"
    assert standing(_shots(engine={"running": 0}, devices=[SPIN])).state == "suspect"
    assert standing(_shots(engine={"running": 0}, ring=40.0)).state == "hung"


def test_words_of_an_end_count_only_where_health_agrees() -> None:
    dead = LogHistory(ended="EngineDeadError (log:5)")
    assert standing(_shots(engine={"health": 503, "error": "503"}), None, dead).state == "ended"
    # A line of an earlier end, of a server that was started again in the same log.
    assert standing(_shots(moving=True), None, dead).state == "healthy"
    assert standing([], Assessment("crashed", 1.0, 0.0, ("worker died",))).state == "ended"


def test_nothing_that_answers_is_not_known() -> None:
    assert standing([]).state == "unknown"
    found = standing(_shots(engine={"error": "refused", "health": None}))
    assert (found.state, found.reasons) == ("unknown", ("refused",))
