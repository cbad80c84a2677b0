"""What the load learns of the engine: only what is new, only what was launched, and no source can end it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from dsv4_repro.clock import SYSTEM
from dsv4_repro.repro.recorder import RecordedStep
from dsv4_repro.repro.serving.engine_learner import EngineLearner
from dsv4_repro.repro.serving.records import EngineSample

STEP = RecordedStep(
    number=1, runner="v1", graph_mode="full", native=True, requests=3, tokens=6, padded_requests=4, padded_tokens=8, decode_min=0,
    decode_max=2, decode_slots=4, decode_zero=1, next_n=2, begin_ns=1, launch_ns=2, record_ns=3, complete_ns=None, wait_ns=None,
    output_ns=None, guarded=False, event_dropped=False,
)  # fmt: skip


def step(number: int, **changes: int | None) -> RecordedStep:
    return replace(STEP, number=number, **changes)  # type: ignore[arg-type]


def numbers(learner: EngineLearner) -> list[int]:
    return [one.number for one in learner.take()[1]]


def test_steps_are_taken_once_and_only_when_they_were_launched() -> None:
    learner = EngineLearner(None, None, SYSTEM)
    learner.tell(None, [step(2), step(1), step(3, requests=None, tokens=None, launch_ns=None)])
    assert numbers(learner) == [1, 2]
    learner.tell(None, [step(2), step(3), step(4, launch_ns=None)])
    assert numbers(learner) == [3]
    learner.tell(None, [step(4, launch_ns=None)])
    assert numbers(learner) == []
    learner.tell(None, [])
    assert learner.take() == ([], [])


def test_what_the_ring_held_before_is_left_out() -> None:
    ring = [step(1), step(2)]
    learner = EngineLearner(None, lambda: list(ring), SYSTEM)
    learner.start()
    ring.append(step(3))
    asyncio.run(learner.look_again(2.0))
    learner.stop()
    learner.join(2.0)
    assert numbers(learner) == [3]


@pytest.mark.parametrize("error", [OSError("gone"), KeyError("x"), ZeroDivisionError(), RuntimeError("y")])
def test_a_source_that_fails_is_said_once_and_asked_again(error: Exception) -> None:
    calls = 0

    def counters() -> EngineSample | None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise error
        return EngineSample(at=float(calls), running=3)

    learner = EngineLearner(counters, None, SYSTEM)
    learner.start()
    asyncio.run(learner.look_again(2.0))
    asyncio.run(learner.look_again(2.0))
    learner.stop()
    learner.join(2.0)
    assert learner.error.startswith("the engine's counters: ")
    assert learner.take()[0]


def test_a_source_that_hangs_holds_up_nothing() -> None:
    release = threading.Event()

    def counters() -> EngineSample | None:
        release.wait(20)
        return None

    learner = EngineLearner(counters, None, SYSTEM)
    learner.start()
    began = SYSTEM.monotonic()
    asyncio.run(learner.look_again(0.3))
    learner.stop()
    learner.join(0.2)
    assert SYSTEM.monotonic() - began < 1.5
    release.set()
    learner.join(2.0)


def test_memory_is_bounded() -> None:
    learner = EngineLearner(None, None, SYSTEM)
    for number in range(200):
        learner.tell(EngineSample(at=float(number)), ())
    assert len(learner.take()[0]) == 64
