"""The server watchdog by scripted servers: every healthy-but-slow situation and every class of hang, sample by sample.

A ``World`` is a server reduced to what the sources would say of it; figures of cards are those of the H200 in the facts (idle 88 W,
one spinning CTA 123 W) with a busy level of a real model.
"""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.repro.serving.records import (
    Assessment,
    Blind,
    DeviceSample,
    EngineCounters,
    EngineSample,
    LoadSample,
    LogSample,
    ProcessSample,
    RankProgress,
    Snapshot,
)
from dsv4_repro.repro.serving.server_watchdog import ServerWatchdog
from dsv4_repro.repro.serving.watch_limits import WatchLimits

TICK = 0.25


@dataclasses.dataclass
class World:
    """A server that steps ``rate`` times a second while ``moving``. ``host``: ranks whose host launches nothing."""

    at: float = 1000.0
    ranks: int = 1
    moving: bool = True
    rate: float = 50.0
    health: int | None = 200
    running: int | None = 3
    waiting: int | None = 0
    tokens: float = 1000.0
    prompt: float = 3000.0
    iterations: float = 500.0
    preemptions: float = 0.0
    kv: float = 0.2
    metrics: bool = True
    metrics_error: str = ""
    rings: bool = True
    heard: float | None = 0.01
    mode: str = "full"
    healthy_s: float | None = 0.02
    host: tuple[int, ...] = ()
    cards: bool = True
    util: int | None = 95
    mem: int | None = 40
    power: float | None = 560.0
    busy: float | None = 600.0
    sm: float | None = None
    dram: float | None = None
    idle_cards: tuple[int, ...] = ()
    xids: tuple[int, ...] = ()
    others: int | None = 0
    log: LogSample | None = dataclasses.field(default_factory=lambda: LogSample(0.0, 1.0, 3.0, 3, phase="serving"))
    processes: dict[int, tuple[str, str | None]] = dataclasses.field(default_factory=dict)
    cpu: dict[int, float] = dataclasses.field(default_factory=dict)
    status: int | None = None
    load: LoadSample | None = None
    canary_waiting: float | None = None
    engines: dict[str, EngineCounters] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.processes:
            self.processes = {10: ("api", "S"), 11: ("engine", "S"), **{20 + rank: ("worker", "S") for rank in range(self.ranks)}}
        self.begun = 500.0
        self.ended_at = self.at
        self.launched_at = self.at
        self._engine: EngineSample | None = None
        self._cards: tuple[DeviceSample, ...] = ()
        self._cards_at = -1.0

    def wedge(self, util: int = 100, mem: int | None = 0, power: float = 123.0, **more: Any) -> None:
        """The device stops in the middle of a step: one CTA spins."""
        self.moving = False
        self.util, self.mem, self.power = util, mem, power
        self.launched_at = self.at
        for key, value in more.items():
            setattr(self, key, value)

    def idle(self) -> None:
        """The cards have nothing to do."""
        self.util, self.mem, self.power = 0, 0, 88.0

    def step(self, dt: float = TICK) -> Snapshot:
        self.at += dt
        if self.moving and self.running:
            steps = self.rate * dt
            self.begun += steps
            self.iterations += steps
            self.tokens += steps * self.running
            if int(self.begun) != int(self.begun - steps):
                self.ended_at, self.launched_at = self.at - 0.005, self.at - 0.004
        if self.metrics and (self._engine is None or self.at - self._engine.at >= 0.999):
            error = self.metrics_error
            self._engine = EngineSample(
                self.at, 0.01, self.health, None if error else self.running, None if error else self.waiting,
                None if error else self.tokens, None if error else self.prompt, None if error else self.iterations,
                None if error else self.preemptions, kv_usage=None if error else self.kv, error=error, by_engine=self.engines,
            )  # fmt: skip
        if self.cards and self.at - self._cards_at >= 0.499:
            self._cards_at = self.at
            self._cards = tuple(
                DeviceSample(self.at, rank, f"GPU-{rank}", 0, None if self.mem is None else 0, 88.0, self.busy, others=self.others)
                if rank in self.idle_cards
                else DeviceSample(
                    self.at, rank, f"GPU-{rank}", self.util, self.mem, self.power, self.busy, xids=self.xids, sm_util=self.sm,
                    dram_util=self.dram, others=self.others,
                )
                for rank in range(self.ranks)
            )  # fmt: skip
        return Snapshot(
            at=self.at,
            engine=self._engine if self.metrics else None,
            log=dataclasses.replace(self.log, at=self.at) if self.log is not None else None,
            progress=tuple(self._ring(rank) for rank in range(self.ranks)) if self.rings else (),
            devices=self._cards if self.cards else (),
            processes=tuple(
                ProcessSample(self.at, pid, role, state, self.cpu.get(pid, 1.0), self.status if state is None else None)
                for pid, (role, state) in self.processes.items()
            ),
            load=dataclasses.replace(self.load, at=self.at) if self.load is not None else None,
            canary_waiting_s=self.canary_waiting,
        )

    def _ring(self, rank: int) -> RankProgress:
        begun = int(self.begun)
        late = rank in self.host
        open_step = (begun,) if self.running and not late and (not self.moving or self.at - self.launched_at > 0.002) else ()
        return RankProgress(
            pid=20 + rank, at=self.at, rank=rank, begun=begun, last_end_age_s=self.at - self.ended_at, unfinished=open_step,
            unfinished_age_s=self.at - self.launched_at if open_step else None, requests=self.running, padded_requests=4,
            graph_mode=self.mode, healthy_s=self.healthy_s, heard_age_s=self.heard, device=rank,
            launching_age_s=self.at - self.launched_at if late else None,
        )  # fmt: skip


def run(world: World, seconds: float, watchdog: ServerWatchdog, change: Callable[[World], None] | None = None) -> list[Assessment]:
    found = []
    for _ in range(int(seconds / TICK)):
        if change is not None:
            change(world)
        found.append(watchdog.observe(world.step()))
    return found


def served(**more: Any) -> tuple[World, ServerWatchdog]:
    """A server that has served for ten seconds."""
    world, watchdog = World(**more), ServerWatchdog()
    states = {one.state for one in run(world, 10, watchdog)}
    assert states == {"healthy"}, states
    return world, watchdog


def states(found: list[Assessment]) -> list[str]:
    seen: list[str] = []
    for one in found:
        if not seen or seen[-1] != one.state:
            seen.append(one.state)
    return seen


def first(found: list[Assessment], state: str) -> Assessment:
    return next(one for one in found if one.state == state)


def blind_of(one: Assessment) -> set[str]:
    return {blind.signal for blind in one.blind}


# -- hung --------------------------------------------------------------------------------------------------------------------


def test_a_wedge_is_hung_within_five_seconds_with_the_recorder() -> None:
    world, watchdog = served()
    world.wedge()
    began = world.at
    hung = first(run(world, 10, watchdog), "hung")
    assert 1.0 <= hung.at - began <= 3.0
    assert hung.at - hung.since <= 5.0
    assert hung.live_requests == 3
    assert "rank 0: step" in hung.device_signals[0]
    assert "3 requests padded to 4" in hung.device_signals[0]


def test_a_wedge_is_hung_within_five_seconds_by_nvml_and_metrics_alone() -> None:
    world, watchdog = served(rings=False)
    world.wedge()
    began = world.at
    hung = first(run(world, 10, watchdog), "hung")
    assert hung.at - began <= 5.0
    assert hung.at - hung.since <= 5.0
    assert any("123 W, busy level 600 W" in text for text in hung.device_signals)
    assert "flight recorder" in blind_of(hung)
    assert any("engine counters have stood" in reason for reason in hung.reasons)


def test_few_sms_by_gpm_do_for_power() -> None:
    world, watchdog = served(rings=False, busy=None, power=140.0, mem=0, sm=6.0)
    world.wedge(sm=0.758, dram=0.0)
    began = world.at
    hung = first(run(world, 10, watchdog), "hung")
    assert hung.at - began <= 5.0
    assert "0.76 % of the SMs" in hung.device_signals[0]
    assert "GPU 0 busy power level" in blind_of(hung)


def test_flat_power_alone_takes_longer_and_says_so() -> None:
    world, watchdog = served(rings=False, busy=None)
    world.wedge()
    began = world.at
    found = run(world, 15, watchdog)
    hung = first(found, "hung")
    assert 8.0 <= hung.at - began <= 12.0
    between = [one for one in found if one.state == "suspect"][-1]
    assert any("takes longer" in reason for reason in between.reasons)


def test_gb10_without_memory_figures_needs_power_and_names_the_blind_one() -> None:
    world, watchdog = served(rings=False, mem=None, power=95.0, busy=100.0)
    world.wedge(util=96, mem=None, power=17.0)
    hung = first(run(world, 10, watchdog), "hung")
    assert "GPU 0 memory utilisation" in blind_of(hung)
    unknown, watchdog = served(rings=False, mem=None, power=95.0, busy=None)
    unknown.wedge(util=96, mem=None, power=17.0)
    last = run(unknown, 60, watchdog)[-1]
    assert last.state == "suspect"
    assert {"GPU 0 memory utilisation", "GPU 0 busy power level"} <= blind_of(last)


def test_a_running_gauge_of_zero_is_named_and_does_not_hide_the_hang() -> None:
    world, watchdog = served()
    requests = world.running
    world.wedge()
    assert requests == 3

    class Blinded(World):
        pass

    found = []
    for _ in range(40):
        snapshot = world.step()
        engine = dataclasses.replace(snapshot.engine, running=0) if snapshot.engine is not None else None
        found.append(watchdog.observe(dataclasses.replace(snapshot, engine=engine)))
    hung = first(found, "hung")
    assert "vllm:num_requests_running" in blind_of(hung)
    assert hung.live_requests == 3


def test_health_200_is_named_as_blind() -> None:
    world, watchdog = served()
    world.wedge()
    hung = first(run(world, 10, watchdog), "hung")
    assert any(blind.signal == "/health" and "200" in blind.why for blind in hung.blind)


@pytest.mark.parametrize("xid", [79, 119, 31])
def test_an_xid_is_a_sign_from_the_device(xid: int) -> None:
    world, watchdog = served(rings=False)
    world.moving = False
    world.idle()
    world.xids = (xid,)
    hung = first(run(world, 10, watchdog), "hung")
    assert hung.device_signals == (f"NVML reported Xid {xid}",)


def test_an_xid_of_a_server_that_goes_on_is_no_hang() -> None:
    world, watchdog = served(rings=False)
    world.xids = (31, 45)
    assert states(run(world, 30, watchdog)) == ["healthy"]
    # Half a minute later its host stands for another reason.
    world.moving = False
    world.idle()
    assert "hung" not in states(run(world, 30, watchdog))


@pytest.mark.parametrize(("xid", "state"), [(31, "suspect"), (13, "suspect"), (79, "hung")])
def test_an_xid_on_a_shared_card_may_be_another_process(xid: int, state: str) -> None:
    world, watchdog = served(rings=False, others=1)
    world.moving = False
    world.idle()
    world.xids = (xid,)
    assert states(run(world, 20, watchdog))[-1] == state


def test_all_ranks_in_the_same_kernel() -> None:
    world, watchdog = served(ranks=4)
    world.wedge()
    hung = first(run(world, 10, watchdog), "hung")
    assert [text[:7] for text in hung.device_signals[:4]] == ["rank 0:", "rank 1:", "rank 2:", "rank 3:"]


def test_a_rank_that_never_launches_is_hung_only_after_a_while_and_is_named() -> None:
    """Ranks that took different ways (collective-desync): the peers' kernels wait, one card is idle, nothing compiles."""
    world, watchdog = served(ranks=4)
    world.wedge(idle_cards=(3,), host=(3,))
    began = world.at
    found = run(world, 60, watchdog)
    hung = first(found, "hung")
    assert 29.0 <= hung.at - began <= 40.0
    early = [one for one in found if one.at - began < 20 and one.state == "suspect"]
    assert any("rank 3 has begun a step and launched nothing" in reason for one in early for reason in one.reasons)


def test_one_engine_of_two_stands_while_the_other_serves() -> None:
    world, watchdog = served(rings=False, ranks=2)

    def serve(world: World) -> None:
        world.engines = {"0": EngineCounters(3, 500.0, 100.0, 0.1), "1": EngineCounters(3, world.tokens, world.iterations, 0.2)}

    run(world, 5, watchdog, serve)
    found = []
    for _ in range(int(60 / TICK)):
        serve(world)
        snapshot = world.step()
        devices = tuple(
            dataclasses.replace(one, utilisation=100, memory_utilisation=0, power_w=123.0) if one.index == 0 else one
            for one in snapshot.devices
        )
        found.append(watchdog.observe(dataclasses.replace(snapshot, devices=devices)))
    assert states(found)[-1] == "hung"
    assert "1 of 2 cards spin" not in first(found, "hung").device_signals


def test_a_start_that_hangs_on_every_card_is_hung_after_minutes() -> None:
    world, watchdog = World(health=None, rings=False, metrics_error="refused", running=None, waiting=None), ServerWatchdog()
    world.wedge(power=47.0)
    world.log = LogSample(0.0, 0.0, None, phase="warming up")
    began = world.at

    def silent(world: World) -> None:
        world.log = LogSample(0.0, world.at - began, None, phase="warming up")

    found = run(world, 250, watchdog, silent)
    hung = first(found, "hung")
    assert hung.at - began >= 180
    assert states(found) == ["starting", "hung"]


def test_a_start_that_waits_for_ranks_on_other_machines_is_not_hung_while_they_may_load() -> None:
    """All local ranks stand in their first barrier while another machine loads its weights for half an hour."""
    world, watchdog = World(health=None, rings=False, metrics_error="refused", running=None, waiting=None), ServerWatchdog()
    world.wedge(power=47.0)
    began = world.at
    found = []
    for _ in range(int(2000 / TICK)):
        world.log = LogSample(0.0, world.at - began, None, phase="weights are loaded")
        found.append(watchdog.observe(dataclasses.replace(world.step(), remote_ranks=8)))
    assert states(found) == ["starting"]
    assert "remote ranks" in blind_of(found[-1])


@pytest.mark.parametrize("error", ["its recorder is switched off", None])
def test_a_rank_whose_recorder_says_nothing_may_be_late(error: str | None) -> None:
    """Its peers' kernels wait for it while it compiles, and no card is there to tell."""
    world, watchdog = served(ranks=4, cards=False)
    world.wedge()
    began = world.at

    def look() -> Assessment:
        snapshot = world.step()
        last = snapshot.progress[3]
        silent = () if error is None else (RankProgress(last.pid, last.at, error=error),)
        return watchdog.observe(dataclasses.replace(snapshot, progress=(*snapshot.progress[:3], *silent)))

    found = [look() for _ in range(int(60 / TICK))]
    hung = first(found, "hung")
    assert 29.0 <= hung.at - began <= 40.0
    assert any("1 of 4 workers say nothing" in reason for one in found if one.state == "suspect" for reason in one.reasons)
    # While something below it compiles there is no limit.
    world, watchdog = served(ranks=4, cards=False)
    world.wedge()
    world.processes[40] = ("compiler", "R")
    assert "hung" not in states([look() for _ in range(int(120 / TICK))])


@pytest.mark.parametrize("rings", [True, False])
def test_ranks_on_other_machines_may_be_late(rings: bool) -> None:
    world, watchdog = served(rings=rings)
    world.wedge()
    began = world.at
    found = [watchdog.observe(dataclasses.replace(world.step(), remote_ranks=8)) for _ in range(int(150 / TICK))]
    hung = first(found, "hung")
    assert 120 <= hung.at - began <= 130
    assert "remote ranks" in blind_of(hung)
    assert any("may be late" in reason for one in found if one.state == "suspect" for reason in one.reasons)


# -- hung, and back ----------------------------------------------------------------------------------------------------------


def test_a_release_that_lasts_leads_back_and_one_that_does_not_stays_hung() -> None:
    world, watchdog = served()
    world.wedge()
    run(world, 8, watchdog)
    world.begun += 1  # one release frees one launch
    world.ended_at = world.launched_at = world.at
    assert states(run(world, 10, watchdog)) == ["hung"]
    world.moving, world.util, world.mem, world.power = True, 95, 40, 560.0
    found = run(world, 10, watchdog)
    assert states(found) == ["hung", "healthy"]
    back = first(found, "healthy")
    assert any("recovered" in reason for reason in back.reasons)
    assert world.at - 10 + 1.0 <= back.at <= world.at - 10 + 4.0


def test_a_server_that_is_started_anew_is_starting_and_not_hung() -> None:
    world, watchdog = served()
    world.wedge()
    run(world, 8, watchdog)
    new = World(at=world.at + 1, health=None, metrics_error="refused", rings=False)
    new.processes = {110: ("api", "S"), 111: ("engine", "S")}
    new.idle()
    found = run(new, 20, watchdog)
    assert states(found) == ["starting"]
    assert any("started anew" in reason for reason in found[0].reasons)
    new.health, new.metrics_error, new.moving = 200, "", True
    assert states(run(new, 10, watchdog)) == ["healthy"]


def test_counters_that_fall_back_are_a_restart() -> None:
    world, watchdog = served(processes={10: ("other", "S")}, rings=False)
    world.tokens, world.prompt, world.iterations, world.health = 0.0, 0.0, 0.0, None
    found = run(world, 2, watchdog)
    assert "starting" in states(found)
    assert "hung" not in states(found)


# -- ended -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "state"), [(0, "exited"), (1, "crashed"), (-9, "crashed"), (None, "crashed")])
def test_the_api_process_ends(status: int | None, state: str) -> None:
    world, watchdog = served()
    world.processes = {pid: (role, None) for pid, (role, _) in world.processes.items()}
    world.status = status
    found = run(world, 5, watchdog)
    assert states(found) == [state]
    assert "process 10 (api) is gone" in found[0].reasons[0]
    # Afterwards nothing is known of it, and it stays ended.
    world.processes, world.metrics_error, world.health, world.rings = {99: ("other", "S")}, "refused", None, False
    assert states(run(world, 5, watchdog)) == [state]


def test_a_shutdown_in_the_log_is_an_exit_though_the_status_is_not_known() -> None:
    world, watchdog = served()
    world.processes = {pid: (role, None) for pid, (role, _) in world.processes.items()}
    world.log = LogSample(0.0, 0.1, 3.0, 0, events={"shutdown": 1, "serving": 1})
    assert states(run(world, 2, watchdog)) == ["exited"]


def test_a_worker_that_is_gone_is_a_crash() -> None:
    world, watchdog = served(ranks=2)
    world.processes[21] = ("worker", "Z")
    world.wedge()
    found = run(world, 10, watchdog)
    assert states(found) == ["crashed"]
    assert "process 21 (worker)" in found[0].reasons[0]


def test_health_503_is_a_dead_engine() -> None:
    world, watchdog = served()
    world.wedge()
    world.health = 503
    world.log = LogSample(0.0, 0.1, 3.0, 0, events={"engine-dead": 2})
    assert states(run(world, 5, watchdog))[-1] == "crashed"


def test_a_helper_process_that_ends_is_nothing() -> None:
    world, watchdog = served()
    world.processes[30] = ("other", None)
    assert states(run(world, 5, watchdog)) == ["healthy"]


# -- not hung ----------------------------------------------------------------------------------------------------------------


def slow_prefill(world: World, watchdog: ServerWatchdog) -> Iterator[Assessment]:
    """Chunks of a long prompt: no counter moves, the recorder does."""
    world.mode, world.rate, world.healthy_s = "none", 0.7, 1.4
    tokens, iterations = world.tokens, world.iterations
    for _ in range(int(120 / TICK)):
        snapshot = world.step()
        world.tokens, world.iterations = tokens, iterations
        engine = dataclasses.replace(snapshot.engine, generation_tokens=tokens, iterations=iterations) if snapshot.engine else None
        yield watchdog.observe(dataclasses.replace(snapshot, engine=engine))


def test_a_long_prefill_is_healthy_with_the_recorder() -> None:
    world, watchdog = served()
    assert states(list(slow_prefill(world, watchdog))) == ["healthy"]


def test_a_long_prefill_is_not_hung_without_it() -> None:
    world, watchdog = served(rings=False)
    assert "hung" not in states(list(slow_prefill(world, watchdog)))


def test_a_single_long_step_of_working_cards_is_not_hung() -> None:
    """One prefill chunk of 40 s, never seen before, on a card with memory traffic at full power."""
    world, watchdog = served()
    world.wedge(mem=30, power=570.0, mode="none", healthy_s=0.5)
    found = run(world, 40, watchdog)
    assert "hung" not in states(found)


@pytest.mark.parametrize("rings", [True, False])
@pytest.mark.parametrize("work", ["load-progress", "compile-step", "capture-progress", "jit", "jit-start", "profiler", "lock-wait"])
def test_host_work_in_the_log_explains_idle_cards(work: str, rings: bool) -> None:
    world, watchdog = served(rings=rings)
    world.moving = False
    world.host = (0,)
    world.launched_at = world.at
    world.idle()
    began = world.at

    def say(world: World) -> None:
        world.log = LogSample(0.0, 1.0, 30.0, 3, phase="serving", work=work, work_age_s=world.at - began)

    found = run(world, 60, watchdog, say)
    assert set(states(found)) <= {"healthy", "suspect"}
    assert found[-1].state == "healthy"


def test_one_rank_compiles_and_its_peers_spin() -> None:
    """nccl kernels of three ranks wait for the fourth, whose host runs a compiler: not hung, however long."""
    world, watchdog = served(ranks=4)
    world.wedge(idle_cards=(3,), host=(3,))
    world.processes[40] = ("compiler", "R")
    found = run(world, 300, watchdog)
    assert "hung" not in states(found)


def test_one_rank_compiles_without_recorders() -> None:
    world, watchdog = served(ranks=4, rings=False)
    world.wedge(idle_cards=(3,))
    world.processes[40] = ("compiler", "S")

    def burn(world: World) -> None:
        world.cpu[40] = world.cpu.get(40, 0.0) + TICK

    found = run(world, 300, watchdog, burn)
    assert "hung" not in states(found)


def test_a_start_with_every_phase_is_starting() -> None:
    world, watchdog = World(health=None, rings=False, metrics_error="refused", running=None), ServerWatchdog()
    world.idle()
    for phase, work, util, power, seconds in (
        ("loading weights", "load-progress", 0, 90.0, 1200), ("compiling", "compile-start", 0, 90.0, 1800),
        ("capturing CUDA graphs", "capture-progress", 60, 200.0, 60), ("warming up", "jit-start", 100, 130.0, 120),
    ):  # fmt: skip
        world.util, world.power, world.mem = util, power, 3 if util else 0

        def say(world: World, phase: str = phase, work: str = work) -> None:
            world.log = LogSample(0.0, 5.0, None, phase=phase, work=work, work_age_s=5.0)

        assert states(run(world, seconds / 10, watchdog, say)) == ["starting"], phase
    world.health, world.metrics_error, world.running = 200, "", 0
    assert states(run(world, 5, watchdog))[-1] == "healthy"


def test_idle_for_hours_is_healthy_and_so_is_the_request_after_it() -> None:
    world, watchdog = served()
    world.running, world.moving = 0, False
    world.idle()
    found = run(world, 3600, watchdog)
    assert states(found) == ["healthy"]
    assert found[-1].reasons == ("idle: no request in hand",)
    world.running, world.moving = 1, True
    world.util, world.mem, world.power = 90, 20, 400.0
    assert states(run(world, 10, watchdog)) == ["healthy"]


def test_clients_that_are_gone_leave_an_idle_server() -> None:
    world, watchdog = served(load=LoadSample(0.0, open=4, tokens=100))
    world.load = LoadSample(0.0, open=0, tokens=100, last_token_age_s=30.0, faults={"reset": 4})
    world.running, world.moving = 0, False
    world.idle()
    assert states(run(world, 60, watchdog)) == ["healthy"]


def test_preemptions_that_advance_are_not_hung_and_become_suspect() -> None:
    world, watchdog = served()
    tokens = world.tokens

    def thrash(world: World) -> None:
        world.preemptions += 1
        world.kv = 0.9 + 0.05 * (world.preemptions % 2)
        world.tokens = tokens

    def step(world: World) -> Assessment:
        thrash(world)
        snapshot = world.step()
        engine = dataclasses.replace(snapshot.engine, generation_tokens=tokens) if snapshot.engine else None
        return watchdog.observe(dataclasses.replace(snapshot, engine=engine))

    found = [step(world) for _ in range(int(120 / TICK))]
    assert states(found) == ["healthy", "suspect"]
    assert "it preempts" in found[-1].reasons[0]


def test_a_slow_server_is_healthy() -> None:
    world, watchdog = served(rate=0.4, healthy_s=2.4)
    assert states(run(world, 200, watchdog)) == ["healthy"]


def test_a_silence_at_full_power_that_ends_by_itself_is_not_hung() -> None:
    """Silences of tens of seconds at 100 % and 267 W of 280 W, 156 in a day: they end by themselves."""
    world, watchdog = served(rings=False, power=267.0, busy=280.0)
    for _ in range(6):
        world.moving, world.util, world.mem = False, 100, 25
        assert "hung" not in states(run(world, 25, watchdog))
        world.moving = True
        assert states(run(world, 10, watchdog))[-1] == "healthy"


def test_a_stopped_process_is_not_hung() -> None:
    """SIGSTOP or an attached debugger: the agent's thread is stopped, too, so that it sees no event complete."""
    world, watchdog = served()
    world.wedge()
    world.idle()
    world.processes[20] = ("worker", "T")
    assert "hung" not in states(run(world, 60, watchdog))


def test_an_agent_whose_thread_does_not_run_is_blind_and_not_a_sign() -> None:
    """A host thread keeps Python for itself: the event completed, nobody looked."""
    world, watchdog = served(cards=False)
    world.wedge()
    began = world.at

    def silent(world: World) -> None:
        world.heard = world.at - began

    last = run(world, 60, watchdog, silent)[-1]
    assert last.state == "suspect"
    assert any(blind.signal == "recorder of rank 0" and "thread has not run" in blind.why for blind in last.blind)


def test_a_recorder_that_says_stuck_and_an_idle_card_contradict() -> None:
    world, watchdog = served()
    world.wedge()
    world.idle()
    last = run(world, 60, watchdog)[-1]
    assert last.state == "suspect"
    assert any("contradiction" in reason and "idle" in reason for reason in last.reasons)


def test_the_ring_of_another_server_in_the_same_folder_is_no_hang_of_this_one() -> None:
    """Its step does not end, and our counters go on."""
    world, watchdog = served()
    other = World(at=world.at)
    other.wedge()
    found = []
    for _ in range(240):
        snapshot = world.step()
        found.append(watchdog.observe(dataclasses.replace(snapshot, progress=other.step().progress)))
    assert "hung" not in states(found)
    assert any("token counters move on" in reason for reason in found[-1].reasons)
    # A scrape that comes late does not hide a real one.
    world.wedge()
    assert "hung" in states(run(world, 10, watchdog))


# -- no sign from the device: suspect, with the reason -----------------------------------------------------------------------


@pytest.mark.parametrize("engine_state", ["S", "R"])
def test_both_ends_of_a_queue_wait_or_the_engine_burns_cpu(engine_state: str) -> None:
    """host-ipc-stall and host-cpu-livelock: the cards are idle."""
    world, watchdog = served()
    world.running, world.moving = 3, False
    world.processes[11] = ("engine", engine_state)
    world.idle()
    found = []
    for _ in range(400):
        snapshot = world.step()
        ring = dataclasses.replace(snapshot.progress[0], unfinished=(), unfinished_age_s=None)
        found.append(watchdog.observe(dataclasses.replace(snapshot, progress=(ring,))))
    assert states(found) == ["healthy", "suspect"]
    assert any("cards are idle" in reason for reason in found[-1].reasons)


def test_nothing_is_admitted() -> None:
    """scheduler-stall: running 0, waiting 5."""
    world, watchdog = served()
    world.running, world.waiting, world.moving = 0, 5, False
    world.idle()
    found = run(world, 60, watchdog)
    assert states(found) == ["healthy", "suspect"]


def test_without_any_device_signal_it_stays_suspect_and_names_what_is_blind() -> None:
    world, watchdog = served(rings=False, cards=False)
    world.wedge()
    last = run(world, 600, watchdog)[-1]
    assert last.state == "suspect"
    assert {"flight recorder", "NVML", "/health"} <= blind_of(last)
    assert any("no sign from the device" in reason and "NVML" in reason for reason in last.reasons)


def test_another_process_on_the_card_makes_nvml_blind() -> None:
    world, watchdog = served(rings=False, others=1)
    world.wedge()
    last = run(world, 60, watchdog)[-1]
    assert last.state == "suspect"
    assert "GPU 0 NVML" in blind_of(last)


@pytest.mark.parametrize(
    ("more", "signal"),
    [
        ({"metrics": False}, "/metrics"), ({"metrics_error": "no whole answer"}, "/metrics"), ({"health": None}, "/health"),
        ({"log": None}, "log"), ({"log": LogSample(0.0, error="gone")}, "log"), ({"log": LogSample(0.0)}, "stats line"),
        ({"rings": False}, "flight recorder"), ({"cards": False}, "NVML"), ({"util": None}, "GPU 0 utilisation"),
        ({"mem": None}, "GPU 0 memory utilisation"), ({"power": None}, "GPU 0 power"), ({"busy": None}, "GPU 0 busy power level"),
        ({"others": 2}, "GPU 0 NVML"), ({"running": None}, "vllm:num_requests_running"),
    ],
)  # fmt: skip
def test_every_blind_signal_is_named(more: dict[str, Any], signal: str) -> None:
    world, watchdog = World(**more), ServerWatchdog()
    if "health" in more:
        watchdog.observe(World().step())
    last = run(world, 6, watchdog)[-1]
    assert signal in blind_of(last)


def test_what_the_observer_says_is_blind_comes_through() -> None:
    snapshot = dataclasses.replace(World().step(), blind=(Blind("metrics", "has not answered for 9 s"),))
    assert "metrics" in blind_of(ServerWatchdog().observe(snapshot))


# -- time --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [10.0, 600.0, 86400.0])
def test_a_gap_in_time_is_not_a_hang(gap: float) -> None:
    """Suspended, or the watcher was stopped: the server goes on a moment later."""
    world, watchdog = served()
    world.at += gap
    found = [watchdog.observe(world.step())]
    assert found[0].state != "hung"
    assert states(run(world, 10, watchdog)) == ["healthy"]


def test_a_wedge_is_found_after_a_gap_too() -> None:
    world, watchdog = served()
    world.wedge()
    world.at += 100.0
    began = world.at
    found = run(world, 10, watchdog)
    assert first(found, "hung").at - began <= 5.0


def test_time_that_stands_or_runs_back_is_harmless() -> None:
    world, watchdog = served()
    for dt in (0.0, -5.0, 0.0, 0.25, -0.25):
        assert watchdog.observe(world.step(dt)).state == "healthy"


def test_a_part_of_an_exposition_is_no_stand_still_and_no_restart() -> None:
    """The rest of the text is missing: counters absent, or those of one engine."""
    parts: tuple[dict[str, Any], ...] = (
        {"generation_tokens": None, "iterations": None},
        {"by_engine": {"0": EngineCounters(3, 1.0, 1.0)}, "generation_tokens": 1.0},
    )
    for part in parts:
        world, watchdog = served(rings=False, engines={"0": EngineCounters(3, 1.0, 1.0), "1": EngineCounters(3, 5.0, 1.0)})
        world.wedge()
        found = []
        for _ in range(32):
            snapshot = world.step()
            assert snapshot.engine is not None
            engine = dataclasses.replace(snapshot.engine, **part)
            found.append(watchdog.observe(dataclasses.replace(snapshot, engine=engine)))
        assert set(states(found)) <= {"healthy", "suspect"}
        assert any(blind.signal == "/metrics" and "part" in blind.why for blind in found[-1].blind)


def test_memory_is_flat_over_restarts_hangs_and_days() -> None:
    watchdog = ServerWatchdog()

    def life(number: int) -> None:
        world = World(at=1000.0 + 1e4 * number, ranks=2)
        base = 1000 * number
        world.processes = {
            base + 1: ("api", "S"),
            base + 2: ("engine", "S"),
            base + 3: ("worker", "S"),
            base + 4: ("compiler", "R"),
        }
        run(world, 60, watchdog)
        world.wedge()
        run(world, 30, watchdog)

    for number in range(5):
        life(number)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(5, 25):
            life(number)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 300_000


# -- properties --------------------------------------------------------------------------------------------------------------

SITUATIONS = st.sampled_from(["decode", "slow", "prefill", "idle", "compile", "gap", "metrics lost", "rings lost", "few"])


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(SITUATIONS, st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.integers(1, 4),
)
def test_a_healthy_server_is_never_hung(script: list[tuple[str, int]], seed: int, rings: bool, ranks: int) -> None:
    world, watchdog, dice = World(rings=rings, ranks=ranks), ServerWatchdog(), random.Random(seed)
    for situation, seconds in script:
        world.moving, world.running, world.rate, world.metrics_error, world.mode = True, 3, 50.0, "", "full"
        world.util, world.mem, world.power, world.rings, world.host, world.idle_cards = 95, 40, 560.0, rings, (), ()
        world.processes.pop(40, None)
        world.launched_at = world.ended_at = world.at
        if situation == "slow":
            world.rate, world.healthy_s = 0.5, 2.0
        elif situation == "prefill":
            world.rate, world.mode, world.healthy_s = 0.5, "none", 2.0
        elif situation == "idle":
            world.running = 0
            world.idle()
        elif situation == "compile":
            world.moving, world.host, world.idle_cards = False, (0,), (0,)
            world.processes[40] = ("compiler", "R")
        elif situation == "gap":
            world.at += seconds
        elif situation == "metrics lost":
            world.metrics_error = "no whole answer within 2 s"
        elif situation == "rings lost":
            world.rings = False
        else:
            world.running, world.power, world.mem = 1, 130.0, 0
            world.rate = 200.0
        world.healthy_s = max(world.healthy_s or 0.0, 0.02)
        for _ in range(seconds * 4):
            world.power = (world.power or 0.0) * dice.uniform(0.99, 1.01)
            assert watchdog.observe(world.step(TICK * dice.uniform(0.5, 2.0))).state != "hung", situation


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_without_device_signals_nothing_is_hung(data: st.DataObject) -> None:
    """Whatever the engine, the log, the processes, the load and the canary say."""
    watchdog, at = ServerWatchdog(), 100.0
    small = st.one_of(st.none(), st.integers(0, 5))
    for _ in range(data.draw(st.integers(1, 60))):
        at += data.draw(st.sampled_from([0.25, 0.25, 1.0, 2.4, 400.0]))
        engine = EngineSample(
            at, 0.1, data.draw(st.sampled_from([None, 200, 200, 503])), data.draw(small), data.draw(small),
            data.draw(st.one_of(st.none(), st.just(10.0), st.floats(0, 1e6))), error=data.draw(st.sampled_from(["", "gone"])),
        )  # fmt: skip
        snapshot = Snapshot(
            at, engine if data.draw(st.booleans()) else None,
            LogSample(at, 1.0, data.draw(st.sampled_from([None, 1.0, 90.0])), data.draw(small)),
            processes=(ProcessSample(at, 1, "api", "S"), ProcessSample(at, 2, "worker", data.draw(st.sampled_from("RSD")))),
            load=data.draw(st.sampled_from([None, LoadSample(at, 3, 10, 60.0)])),
            canary_waiting_s=data.draw(st.sampled_from([None, 500.0])),
        )  # fmt: skip
        assert watchdog.observe(snapshot).state != "hung"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_snapshot_gives_an_assessment(data: st.DataObject) -> None:
    """No exception, the state's time bounds hold, and HUNG always comes with a sign or from one."""
    watchdog = ServerWatchdog(WatchLimits())
    world = World(ranks=data.draw(st.integers(1, 3)))
    signed = False
    for _ in range(data.draw(st.integers(1, 40))):
        name, value = data.draw(
            st.sampled_from(
                [
                    ("moving", True), ("moving", False), ("running", 0), ("running", 3), ("running", None), ("util", None),
                    ("util", 100), ("util", 0), ("mem", None), ("mem", 0), ("mem", 50), ("power", None), ("power", 120.0),
                    ("busy", None),
                    ("busy", 600.0), ("health", None), ("health", 200), ("health", 503), ("rings", False), ("rings", True),
                    ("heard", None), ("heard", 50.0), ("healthy_s", None), ("xids", (79,)), ("tokens", 0.0), ("host", (0,)),
                    ("metrics_error", "x"), ("metrics_error", ""), ("log", None), ("canary_waiting", 9.0), ("cards", False),
                ]
            )
        )  # fmt: skip
        setattr(world, name, value)
        one = watchdog.observe(world.step(data.draw(st.sampled_from([0.25, 1.0, 3.0, -1.0]))))
        assert one.since <= one.at
        signed = (signed or bool(one.device_signals)) if one.state == "hung" else False
        assert one.state != "hung" or signed
