"""A server on one of several cards: a neighbour's card delays, makes and blurs no verdict, whenever the server's workers appear."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dsv4_repro.errors import UnavailableError
from dsv4_repro.repro.serving.card_signals import CardReader
from dsv4_repro.repro.serving.observer import Observer
from dsv4_repro.repro.serving.ranks import find_server, refresh
from dsv4_repro.repro.serving.records import CARDS_GUESSED, Assessment, DeviceSample, Rank, ServerTarget, Snapshot
from dsv4_repro.repro.serving.server_watchdog import ServerWatchdog
from dsv4_repro.repro.serving.watch_limits import WatchLimits
from dsv4_repro.repro.serving.watch_loop import Hang, WatchLoop

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.cards import PlayedMachine
    from dsv4_repro.tests.standin.played import CARDS, Scene, play
    from dsv4_repro.tests.standin.run import StandIn
else:
    from standin.cards import PlayedMachine
    from standin.played import CARDS, Scene, play

Start = Callable[..., AbstractContextManager["StandIn"]]
SERVING = Scene("serving", 30, running=3)
WEDGE = Scene("wedge", 90, running=3, moves=False, device="spin", hang=True)
HOST = Scene("livelock", 90, running=3, moves=False, launched=False, device="idle")
NEIGHBOURS = ("idle", "busy", "spin")
DIFFER_S = WatchLimits().differ_s


def _neighbour(at: float, word: str, *, own: bool, xids: tuple[int, ...] = ()) -> DeviceSample:
    utilisation, memory, power = CARDS[word]
    return DeviceSample(
        at, 5, "GPU-N", utilisation, memory, power, 500.0, 1980, 60 << 30, xids=xids, sm_util=0.7 if word == "spin" else None,
        own=own,
    )  # fmt: skip


def _seen(
    last: Scene,
    word: str,
    *,
    recorder: bool = False,
    xids: tuple[int, ...] = (),
    more: Callable[[Snapshot], Snapshot] = lambda s: s,
) -> Iterator[tuple[float, Assessment]]:
    """(seconds since it last moved, how it stands) of a life in which no card is known to be the server's."""
    watchdog = ServerWatchdog()
    for look in play((SERVING, last), every=0.5, recorder=recorder):
        shot = look.snapshot
        own = tuple(replace(device, own=False) for device in shot.devices)
        other = _neighbour(shot.at, word, own=False, xids=xids if look.scene is last else ())
        yield shot.at - look.moved, watchdog.observe(more(replace(shot, devices=(*own, other))))


@pytest.mark.parametrize("word", NEIGHBOURS)
def test_where_the_cards_are_not_known_a_neighbour_makes_no_hang(word: str) -> None:
    # The server's host stands, its card is idle; a neighbour hangs, works or does nothing.
    states = [seen for _, seen in _seen(HOST, word)]
    assert {seen.state for seen in states} <= {"starting", "healthy", "suspect"}
    assert states[-1].state == "suspect"
    assert not any(seen.device_signals for seen in states)


@pytest.mark.parametrize("word", NEIGHBOURS)
def test_where_the_cards_are_not_known_all_must_show_it_for_longer_and_that_is_said(word: str) -> None:
    hung = [(age, seen) for age, seen in _seen(WEDGE, word) if seen.state == "hung"]
    if word != "spin":
        assert hung == []
        return
    age, seen = hung[0]
    assert DIFFER_S <= age <= DIFFER_S + 5.0
    assert all("which of them are the server's is not known" in text for text in seen.device_signals)


def test_cards_beside_a_server_elsewhere_are_no_sign_of_it() -> None:
    seen = [one for _, one in _seen(WEDGE, "spin", more=lambda shot: replace(shot, processes=()))]
    assert "hung" not in {one.state for one in seen}


def test_an_xid_of_a_card_that_may_be_a_neighbour_s_is_told_and_no_sign() -> None:
    seen = [one for _, one in _seen(HOST, "idle", xids=(79,))]
    assert "hung" not in {one.state for one in seen}
    assert any("Xid 79" in text and "not known" in text for text in seen[-1].reasons)


@pytest.mark.parametrize("word", NEIGHBOURS)
def test_the_recorder_is_heeded_whatever_a_card_that_may_be_a_neighbour_s_shows(word: str) -> None:
    def elsewhere(shot: Snapshot) -> Snapshot:
        # Only the neighbour's card is visible here, and which device the rank has is not told.
        progress = tuple(replace(one, device=None) for one in shot.progress)
        return replace(shot, devices=shot.devices[-1:], progress=progress)

    hung = [age for age, seen in _seen(WEDGE, word, recorder=True, more=elsewhere) if seen.state == "hung"]
    assert hung
    assert hung[0] <= 5.0


@pytest.mark.parametrize("word", NEIGHBOURS)
def test_once_the_own_card_is_known_the_neighbour_s_is_forgotten(word: str) -> None:
    # All cards while the server starts, as before its workers exist; its own from then on.
    watchdog, hung = ServerWatchdog(), None
    for look in play((SERVING, WEDGE), every=0.5, recorder=False):
        shot = look.snapshot
        if shot.at < 1010.0:
            own = tuple(replace(device, own=False) for device in shot.devices)
            shot = replace(shot, devices=(*own, _neighbour(shot.at, word, own=False)))
        seen = watchdog.observe(shot)
        if hung is None and seen.state == "hung":
            hung = (shot.at - look.moved, seen)
    assert hung is not None
    assert hung[0] <= 5.0
    assert all("GPU 5" not in text for text in hung[1].device_signals)


def test_the_reader_takes_other_cards_and_keeps_what_it_learnt() -> None:
    machine = PlayedMachine("http://127.0.0.1:9", neighbour="busy", card=1)
    reader = CardReader((), lambda: {7}, nvml=machine.nvml())
    assert [(one.index, one.own) for one in reader.look()] == [(0, False), (1, False)]
    for card in reader._cards:
        for _ in range(5):
            card.busy.learn(300.0 + card.index)
    reader.retarget((Rank(9, 0, 90, "GPU-1", 1),))
    (one,) = reader.look()
    assert (one.index, one.own, one.busy_power_w) == (1, True, 301.0)
    assert not reader.guessed
    # It was started anew, on the other card; NVML names none any more, as while it loads.
    reader.retarget((Rank(19, 0, 190, "GPU-0", 0),))
    assert [(one.index, one.own, one.busy_power_w) for one in reader.look()] == [(0, True, None)]
    reader.retarget(())
    assert [one.own for one in reader.look()] == [False, False]
    reader.close()


# -- the observer, over a stand-in on a played machine ------------------------------------------------------------------------


def _renew(machine: PlayedMachine) -> Callable[[ServerTarget], ServerTarget]:
    return lambda known: refresh(known, nvml=machine.nvml)


class _Watch:
    """An observer that began with the server, and every change of state that it told."""

    def __init__(self, server: StandIn, machine: PlayedMachine) -> None:
        self.changes: list[tuple[Snapshot, Assessment]] = []
        target = find_server(server.pid, nvml=machine.nvml)
        self.first = len(target.ranks)
        self.observer = Observer(
            replace(target, base_url=server.base_url), nvml=machine.nvml, renew=_renew(machine),
            on_change=lambda snapshot, assessment: self.changes.append((snapshot, assessment)),
        )  # fmt: skip

    def __enter__(self) -> _Watch:
        self.observer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.observer.stop()

    def wait(self, wanted: Callable[[Snapshot, Assessment], bool], seconds: float) -> tuple[Snapshot, Assessment]:
        until = time.monotonic() + seconds
        while (latest := self.observer.latest()) is None or not wanted(*latest):
            assert time.monotonic() < until, (latest, [seen.state for _, seen in self.changes])
            time.sleep(0.02)
        return latest


def _clients(server: StandIn) -> list[Any]:
    return list(server.drain())


def _end(clients: list[Any]) -> None:
    for client in clients:
        client.kill()
        client.wait()


@pytest.mark.parametrize("neighbour", ["idle", "busy", "wedged"])
def test_a_watch_that_began_before_the_workers_judges_by_their_card(stand_in: Start, neighbour: str) -> None:
    with stand_in(wait=False, config_s=1.0, load_s=2.0) as server:
        machine = PlayedMachine(server.base_url, card=1, neighbour=neighbour)
        time.sleep(0.3)  # the process is there, and nothing else of it
        with _Watch(server, machine) as watch:
            assert watch.first == 0
            server.wait_serving()
            watch.wait(lambda shot, seen: seen.state == "healthy" and [one.index for one in shot.devices] == [1], 20.0)
            assert [rank.gpu_index for rank in watch.observer.target.ranks] == [1]
            assert [rank.pid for rank in watch.observer.target.ranks] == list(server.workers().values())
            # What its card draws when it works is learnt after three seconds of it.
            clients = list(server.drain(lengths=(8000, 8000)))
            watch.wait(lambda shot, _: shot.devices[0].busy_power_w is not None, 20.0)
            _end(clients)
            server.wait_state(live=0)
            server.set(wedge="3")
            clients = _clients(server)
            try:
                shot, hung = watch.wait(lambda _, seen: seen.state == "hung", 40.0)
            finally:
                _end(clients)
    assert hung.at - hung.since <= 5.0
    assert all("GPU 1" in text and "GPU 0" not in text for text in hung.device_signals)
    assert not any(blind.signal == CARDS_GUESSED for blind in hung.blind)
    assert {one.role for one in shot.processes} >= {"api", "engine", "worker"}


def test_cards_of_a_server_whose_pids_nvml_does_not_know_are_said_to_be_guessed(stand_in: Start) -> None:
    with stand_in() as server:
        machine = PlayedMachine(server.base_url, card=1, neighbour="wedged", blind=True)
        with _Watch(server, machine) as watch:
            shot, seen = watch.wait(lambda shot, seen: len(shot.devices) == 2 and seen.state == "healthy", 20.0)
            assert not any(one.own for one in shot.devices)
            assert any(blind.signal == CARDS_GUESSED for blind in seen.blind)


class _Loop:
    """The loop of ``watch`` at work in a thread of its own."""

    def __init__(self, server: StandIn, machine: PlayedMachine) -> None:
        self.said: list[str] = []
        self.hangs: list[Hang] = []
        self._stop = threading.Event()
        loop = WatchLoop(
            lambda: self._find(server, machine),
            lambda target, emit: Observer(target, emit=emit, nvml=machine.nvml, renew=_renew(machine)),
            self._hang,
            lambda *lines, style="": self.said.extend(lines),
        )
        self.loop = loop
        self._thread = threading.Thread(target=lambda: loop.run(until=self._stop.is_set), daemon=True)

    @staticmethod
    def _find(server: StandIn, machine: PlayedMachine) -> ServerTarget | None:
        try:
            return replace(find_server(server.pid, nvml=machine.nvml), base_url=server.base_url)
        except UnavailableError:
            return None

    def _hang(self, hang: Hang) -> str:
        self.hangs.append(hang)
        return ""

    def __enter__(self) -> _Loop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10.0)

    def wait(self, wanted: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not wanted():
            assert time.monotonic() < until, (self.said, self.loop.state)
            time.sleep(0.05)


def test_a_restart_onto_another_card_is_followed(stand_in: Start) -> None:
    with stand_in(wedge=3, config_s=1.0, load_s=2.0) as server:
        machine = PlayedMachine(server.base_url, card=1, neighbour="busy")
        with _Loop(server, machine) as watch:
            for number, card in enumerate((1, 0), 1):
                watch.wait(lambda: watch.loop.state.state == "healthy", 40.0)
                clients = _clients(server)
                try:
                    watch.wait(lambda number=number: len(watch.hangs) == number, 40.0)  # type: ignore[misc]
                finally:
                    _end(clients)
                hang = watch.hangs[-1]
                # What follows a hang (the capture) is of the worker of now, too.
                assert [(rank.pid, rank.gpu_index) for rank in hang.target.ranks] == [(server.workers()[0], card)]
                assert [one.index for one in hang.snapshot.devices] == [card]
                assert all(f"GPU {card}" in text and f"GPU {1 - card}" not in text for text in hang.assessment.device_signals)
                server.end()
                machine.card = 0
                if number == 1:
                    server.start()
    text = "\n".join(watch.said)
    assert "found again" in text
    assert "1 worker(s) on GPU 0" in text
