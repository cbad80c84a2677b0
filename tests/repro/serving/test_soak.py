"""No false alarm on what is no hang, and each hang within its limit: the watchdog over played hours, the observer over stand-ins.

The stand-ins and played hours are test doubles; what they show is how the watchdog judges, not how a GPU behaves. The week is in
benchmarks/watch_soak.py.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from dsv4_repro.repro.serving.server_watchdog import ServerWatchdog

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.run import StandIn

Start = Callable[..., AbstractContextManager["StandIn"]]


@pytest.fixture
def played(standin: ModuleType) -> ModuleType:
    return importlib.import_module("standin.played")


@pytest.fixture
def watch(standin: ModuleType) -> Callable[..., Any]:
    found: Callable[..., Any] = importlib.import_module("standin.watched").Watched
    return found


@pytest.fixture
def load(standin: ModuleType) -> Callable[..., AbstractContextManager[None]]:
    run = importlib.import_module("standin.run")

    @contextlib.contextmanager
    def begin(server: StandIn, **more: Any) -> Iterator[None]:
        clients = server.drain(**more)
        try:
            yield
        finally:
            run.stop_clients(clients)

    return begin


# -- played ------------------------------------------------------------------------------------------------------------------------

SOURCES: dict[str, dict[str, Any]] = {
    "everything": {"recorder": True, "nvml": True},
    "no recorder": {"recorder": False, "nvml": True},
    "two ranks": {"recorder": True, "nvml": True, "ranks": 2},
    "two ranks, no recorder": {"recorder": False, "nvml": True, "ranks": 2},
    "recorder, no cards": {"recorder": True, "nvml": False},
    "nothing but HTTP and log": {"recorder": False, "nvml": False},
}


@pytest.mark.parametrize("name", list(SOURCES))
@pytest.mark.parametrize("seed", [1, 2])
def test_hours_without_a_hang_gives_no_alarm(played: ModuleType, name: str, seed: int) -> None:
    watchdog, looks, alarms = ServerWatchdog(), 0, Counter[str]()
    for look in played.play(played.week(6 * 3600, seed), **SOURCES[name]):
        state = watchdog.observe(look.snapshot).state
        looks += 1
        if state == "hung" or (state in ("crashed", "exited") and look.scene.alive):
            alarms[f"{state} in {look.scene.name}"] += 1
    assert looks > 15_000
    assert alarms == {}


@pytest.mark.parametrize("name", ["everything", "no recorder", "two ranks"])
@pytest.mark.parametrize("hang", ["wedge", "wedge, log gone"])
def test_a_played_wedge_is_hung_within_five_seconds(played: ModuleType, name: str, hang: str) -> None:
    scene, limit = played.HANGS[hang]
    for seed in range(5):
        watchdog = ServerWatchdog()
        found = None
        for look in played.play([played.Scene("serving", 60 + seed * 0.07), scene], every=0.25, seed=seed, **SOURCES[name]):
            assessment = watchdog.observe(look.snapshot)
            if assessment.state == "hung":
                found = look.snapshot.at - look.moved
                assert look.scene.hang
                assert assessment.device_signals
                assert assessment.live_requests == 3
                break
        assert found is not None
        assert found <= limit


@pytest.mark.parametrize("hang", ["admission stall", "queue stall", "livelock of the engine"])
def test_a_stall_of_the_host_alone_is_suspect_and_never_hung(played: ModuleType, hang: str) -> None:
    scene, _ = played.HANGS[hang]
    for name in ("everything", "no recorder", "nothing but HTTP and log"):
        watchdog = ServerWatchdog()
        last = None
        for look in played.play([played.Scene("serving", 60), scene], every=0.5, **SOURCES[name]):
            last = watchdog.observe(look.snapshot)
            assert last.state != "hung"
        assert last is not None
        assert last.state == "suspect", name
        assert last.reasons


@pytest.mark.parametrize("hang", ["wedge, gauge says 0", "wedge, metrics gone"])
def test_a_wedge_that_cards_alone_show_is_never_called_healthy(played: ModuleType, hang: str) -> None:
    """Without a recorder, and with counters that are gone or say idle: not shown to be a hang, and not healthy either."""
    scene, _ = played.HANGS[hang]
    last = None
    watchdog = ServerWatchdog()
    for look in played.play([played.Scene("serving", 60), scene], every=0.5, recorder=False):
        last = watchdog.observe(look.snapshot)
        assert last.state != "hung"
    assert last is not None
    assert last.state == "suspect"
    assert "a kernel has been resident for 60 s" in " ".join(last.reasons)


# -- stand-ins ----------------------------------------------------------------------------------------------------

#: No hang, each for some seconds at once: switches, switches put on while it is watched, output lengths.
QUIET: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "healthy": ({"step_ms": 30}, {}, (2000, 2100, 2200)),
    "slow steps": ({"step_ms": 30}, {"slow_ms": 1600}, (2000, 2100)),
    "one silent compile": ({"step_ms": 30}, {"jit_s": 6, "jit_log": False}, (2000, 2100)),
    "profiler": ({"step_ms": 30}, {"pause_s": 6}, (2000, 2100)),
    "metrics gone": ({"step_ms": 30}, {"metrics": "gone"}, (2000, 2100)),
    "metrics malformed, health slow": ({"step_ms": 30}, {"metrics": "malformed", "health": "slow:3"}, (2000, 2100)),
}


@pytest.mark.server_faults
def test_stand_ins_that_are_not_hung_are_not_called_so(stand_in: Start, watch: Callable[..., Any], load: Start) -> None:
    """All side by side for 10 s; their logs are rotated and truncated meanwhile."""
    with contextlib.ExitStack() as stack:
        watched = {}
        for name, (switches, live, lengths) in QUIET.items():
            server = stack.enter_context(stand_in(agent=True, **switches))
            stack.enter_context(load(server, lengths=lengths))
            watched[name] = stack.enter_context(watch(server))
            if live:
                time.sleep(0.3)
                server.set(**live)
        time.sleep(6)
        for one in watched.values():
            one.server.rotate()
        time.sleep(2.0)
        for one in watched.values():
            one.server.truncate()
        time.sleep(2.0)
        seen = {name: one.states for name, one in watched.items()}
        assert not [name for name, states in seen.items() if {"hung", "crashed", "exited"} & set(states)], seen
        assert seen["healthy"][-1] == "healthy"


def test_a_long_start_is_starting_until_it_serves(stand_in: Start, watch: Callable[..., Any]) -> None:
    with stand_in(wait=False, load_s=2, compile_s=1, capture_s=0.5, shm_s=1) as server:
        server.wait_for("Starting to load model")
        with watch(server) as watched:
            watched.wait("healthy", 20)
            assert watched.states == ["starting", "healthy"]


#: How the wedged ones are started, and what is put on them with the wedge.
WEDGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recorder and cards": ({"agent": True}, {}),
    "cards alone": ({}, {}),
    "running gauge 0": ({"agent": True}, {"running_zero": True}),
    "metrics hang": ({"agent": True}, {"metrics": "hang"}),
}


@pytest.mark.server_faults
def test_wedged_stand_ins_are_hung_within_five_seconds(stand_in: Start, watch: Callable[..., Any], load: Start) -> None:
    with contextlib.ExitStack() as stack:
        watched = {}
        for name, (switches, _) in WEDGED.items():
            server = stack.enter_context(stand_in(step_ms=30, **switches))
            watched[name] = stack.enter_context(watch(server))
            stack.enter_context(load(server, lengths=(3000, 3000, 3000, 3000)))
        for one in watched.values():
            one.server.wait_state(live=4)
        time.sleep(3.0)  # the busy level of their cards is learnt
        for name, one in watched.items():
            one.server.set(wedge_step=one.server.state()["step"] + 5, **WEDGED[name][1])
        for name, one in watched.items():
            wedged = one.server.wait_state(wedged=True)["since"]
            assessment = one.wait("hung", 8.0)
            (at,) = [at for at, change in one.changes if change.state == "hung"]
            assert at - wedged <= 5.0, name
            assert assessment.device_signals, name
            assert "healthy" in one.states, name


@pytest.mark.server_faults
def test_a_recovered_wedge_is_healthy_again_and_a_restart_is_seen(stand_in: Start, watch: Callable[..., Any], load: Start) -> None:
    with stand_in(step_ms=20, agent=True) as server, watch(server) as watched:
        with load(server, lengths=(400, 400)):
            server.wait_state(live=2)
            time.sleep(1)
            server.set(wedge_step=server.state()["step"] + 5)
            watched.wait("hung", 8.0)
            server.release()
            watched.wait("healthy", 8.0)
        server.kill_worker(0)
        watched.wait("crashed", 5.0)
        assert watched.states[-1] == "crashed"
        assert watched.observer.failures == 0


@pytest.mark.server_faults
def test_stand_ins_whose_host_stalls_are_suspect(stand_in: Start, watch: Callable[..., Any], load: Start) -> None:
    with contextlib.ExitStack() as stack:
        watched = {}
        for trouble in ("ipc", "admission", "livelock"):
            server = stack.enter_context(stand_in(step_ms=20, agent=True))
            watched[trouble] = stack.enter_context(watch(server))
        for trouble, one in watched.items():
            # Those that run come to their end; those that come later are not admitted.
            stack.enter_context(load(one.server, lengths=(200, 200)))
            one.server.wait_state(live=2)
            one.server.set(**{trouble: True})
            stack.enter_context(load(one.server, lengths=(100,)))
        for trouble, one in watched.items():
            assert one.wait("suspect", 15.0).reasons, trouble
        time.sleep(2.0)
        assert not [trouble for trouble, one in watched.items() if "hung" in one.states]
