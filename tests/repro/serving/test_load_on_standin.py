"""The load against the stand-in server, through its own metrics and ring files: wedge, window, release, clean drain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dsv4_repro.clock import SYSTEM
from dsv4_repro.repro.serving.completions import FillerRequests, complete_once
from dsv4_repro.repro.serving.drain_load import DrainLoad
from dsv4_repro.repro.serving.load_plan import LoadPlan
from dsv4_repro.repro.serving.load_sources import engine_counters, ring_reader
from dsv4_repro.repro.serving.request_records import compare_outputs, read_requests

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.run import StandIn

    Start = Callable[..., AbstractContextManager[StandIn]]

#: The shortest load that is known to wedge a real server.
PLAN = LoadPlan.from_lengths([(3000, 60), (3001, 200), (3002, 200), (3003, 200)], live=3, max_model_len=16384)


def load_on(server: StandIn, folder: Path, *, ring: bool) -> DrainLoad:
    assert not ring or server.agent_folder is not None
    return DrainLoad(
        server.base_url, server.model, PLAN, folder=folder, counters=engine_counters(server.base_url),
        ring_steps=ring_reader(server.agent_folder) if ring and server.agent_folder is not None else None,
    )  # fmt: skip


def until(what: Callable[[], Any], seconds: float = 20.0) -> None:
    end = SYSTEM.monotonic() + seconds
    while not what() and SYSTEM.monotonic() < end:
        SYSTEM.sleep(0.02)
    assert what()


def test_the_window_of_a_wedge_is_measured_and_a_filler_makes_the_release_stick(stand_in: Start, tmp_path: Path) -> None:
    with stand_in(wedge=3, agent=True) as server:
        load = load_on(server, tmp_path, ring=True)
        load.start()
        until(lambda: server.state()["wedged"])
        until(lambda: load.windows()[0].how == "measured")
        until(lambda: (load.sample().last_token_age_s or 0.0) > 1.5)
        assert load.live() == 3
        stuck = load.sample().tokens
        assert not complete_once(server.base_url, server.model, timeout_s=0.5).completed
        with FillerRequests(server.base_url, server.model, 2, max_tokens=400) as fillers:
            assert fillers.wait_accepted(5)
            assert fillers.tokens == 0
            server.release()
            until(lambda: fillers.tokens > 0)
            until(lambda: load.sample().tokens > stuck)
        assert load.stop()
        assert load.sample().faults == {}


@pytest.mark.parametrize(("ring", "how"), [(True, "measured"), (False, "computed")])
def test_a_clean_drain_through_the_window(stand_in: Start, tmp_path: Path, ring: bool, how: str) -> None:
    # Without a recorder the window is told from what arrives here: on a busy machine that needs slower steps.
    with stand_in(step_ms=5 if ring else 20, **({"agent": True} if ring else {})) as server:
        loads = [load_on(server, tmp_path / name, ring=ring) for name in ("a", "b")]
        for load in loads:
            load.start()
            until(load.done)
            assert load.stop()
            (count,) = load.windows()
            assert (count.how, count.reached) == (how, True), count.text
            assert load.error == ""
    found = compare_outputs(*(read_requests(load.records) for load in loads))
    assert found.same is not False


def test_a_server_that_refuses_and_one_that_cuts_off(stand_in: Start, tmp_path: Path) -> None:
    with stand_in(refuse=503) as server:
        load = load_on(server, tmp_path / "a", ring=False)
        load.start()
        until(load.done)
        assert load.stop()
        assert load.sample().faults == {"unavailable": 5}
        server.set(refuse=0, reset=True)
        load = load_on(server, tmp_path / "b", ring=False)
        load.start()
        until(load.done)
        assert load.stop()
        assert set(load.sample().faults) == {"reset"}


def test_the_engine_dies(stand_in: Start, tmp_path: Path) -> None:
    with stand_in(wedge=3, deadline_s=3, linger_s=1) as server:
        load = load_on(server, tmp_path, ring=False)
        load.start()
        until(load.done)
        assert load.stop()
        faults = load.sample().faults
        assert sum(faults.values()) == 3, faults
        assert set(faults) <= {"server-error", "reset"}
        assert not load.windows()[0].reached
