"""A stopped engine goes on, whatever becomes of the one who stopped it. On real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from dsv4_repro.errors import RefusedError
from dsv4_repro.forensics.collect.proc import process_state
from dsv4_repro.repro.child import package_path
from dsv4_repro.repro.serving.engine_deadlines import EngineDeadline
from dsv4_repro.repro.serving.freeze import freeze_warning, frozen


@pytest.fixture
def victim() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"], start_new_session=True)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _becomes(pid: int, states: str, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (process_state(pid) or "gone") in states:
            return True
        time.sleep(0.01)
    return False


def test_it_is_stopped_inside_and_goes_on_after(victim: int) -> None:
    with frozen(victim) as held:
        assert process_state(victim) == "T"
        time.sleep(0.1)
    assert process_state(victim) in ("S", "R")
    assert held.thawed
    assert held.seconds >= 0.1


def test_it_goes_on_after_an_error_and_after_ctrl_c(victim: int) -> None:
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), frozen(victim):
            raise error
        assert process_state(victim) in ("S", "R")


def _freezer(victim: int, most: float = 300.0) -> subprocess.Popen[bytes]:
    code = (
        "import sys, time\n"
        "from dsv4_repro.repro.serving.freeze import frozen\n"
        "with frozen(int(sys.argv[1]), most_s=float(sys.argv[2])):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(100)\n"
    )
    environment = {**os.environ, "PYTHONPATH": package_path()}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(victim), str(most)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    assert process_state(victim) == "T"
    return process


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_it_goes_on_when_the_one_who_stopped_it_is_ended(victim: int, number: int, group: bool) -> None:
    process = _freezer(victim)
    try:
        (os.killpg if group else os.kill)(process.pid, number)
        assert _becomes(victim, "SR")
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_it_goes_on_after_the_longest_time_also_if_we_hang(victim: int) -> None:
    process = _freezer(victim, most=0.5)
    try:
        assert _becomes(victim, "SR")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_one_that_somebody_else_stopped_is_left_alone(victim: int) -> None:
    os.kill(victim, signal.SIGSTOP)
    assert _becomes(victim, "T")
    with pytest.raises(RefusedError, match="stopped already"), frozen(victim):
        pass
    assert process_state(victim) == "T"


def test_nobody_stops_himself_or_nobody() -> None:
    for pid in (os.getpid(), 1, 1 << 29):
        with pytest.raises(RefusedError), frozen(pid):
            pass


def test_a_victim_that_dies_meanwhile_is_no_error(victim: int) -> None:
    with frozen(victim) as held:
        os.kill(victim, signal.SIGKILL)
    assert held.thawed


def test_what_it_means_is_said_with_the_time_left() -> None:
    short = freeze_warning(EngineDeadline("counting", 90, 12, 0, "measured", ""), 30)
    assert "about 12 s are left, and the read takes up to 30" in short[-1]
    assert "last look" in short[-1]
    assert "about 200 s are left" in freeze_warning(EngineDeadline("counting", 300, 200, 0, "measured", ""), 30)[-1]
    assert (
        freeze_warning(EngineDeadline("unknown", 300, None, 0, "not observed", "not observed"), 30)[-1] == "deadline: not observed"
    )
    assert "if the wait is gone by then it lives" in short[1]
