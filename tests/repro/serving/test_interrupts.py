"""Signals of a run that owns a server: none is lost, and none comes in the middle of an import."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4_repro.repro.serving.interrupts import Interrupts, interrupts_held

#: A function that looks like one of the import system: it is interrupted, and goes on to its end.
IMPORTING = compile(
    "def step(kill, done):\n    kill()\n    for _ in range(2000): pass\n    done.append(1)\n",
    "<frozen importlib._bootstrap>",
    "exec",
)


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    made = Interrupts()
    made.install()
    yield made
    made.restore()
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_interrupts(interrupts: Interrupts, number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    interrupts.raised()
    interrupts.check()


def test_an_import_is_finished_first(interrupts: Interrupts) -> None:
    names: dict[str, Any] = {}
    exec(IMPORTING, names)
    done: list[int] = []
    names["step"](lambda: os.kill(os.getpid(), signal.SIGINT), done)
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5.0)
    assert done == [1]


def test_one_that_was_lost_in_a_callback_is_raised_again(interrupts: Interrupts) -> None:
    with contextlib.suppress(KeyboardInterrupt):  # as Python does in a weak reference's callback
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
    interrupts.check()


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    made = Interrupts()
    try:
        made.install()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        made.restore()
        signal.signal(signal.SIGHUP, before)


def test_held_signals_come_when_the_block_is_over(interrupts: Interrupts) -> None:
    reached = []

    def held() -> None:
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append(1)
        reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        held()
    assert reached == [1]
