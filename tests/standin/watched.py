"""The observer over a stand-in, with cards that are played from what the stand-in knows of itself (no NVML): a test double."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dsv4_repro.repro.serving.observer import Observer
from dsv4_repro.repro.serving.ranks import find_server
from dsv4_repro.repro.serving.records import Assessment, DeviceSample, ServerTarget, Snapshot

if TYPE_CHECKING:
    from .run import StandIn

__all__ = ["PlayedCards", "Watched"]

#: device word of the stand-in -> utilisation, memory utilisation, power in W.
CARDS = {"idle": (0, 0, 90.0), "busy": (96, 30, 480.0), "wedged": (100, 0, 130.0)}


class PlayedCards(Observer):
    """``Observer`` whose NVML is the stand-in's own word."""

    def _make_cards(self, target: ServerTarget, processes: Any) -> Callable[[], Any]:
        begun = time.monotonic()

        def look() -> tuple[DeviceSample, ...]:
            with urllib.request.urlopen(f"{target.base_url}/standin/state", timeout=1.0) as answer:
                state = json.loads(answer.read())
            word = state["device"]
            # A step of milliseconds is over when one looks: with requests in hand the card was busy.
            if word == "idle" and state["live"] and state["device_s"] < 0.5 and not state["wedged"]:
                word = "busy"
            utilisation, memory, power = CARDS[word]
            busy = 480.0 if time.monotonic() - begun > 2.0 else None
            return tuple(
                DeviceSample(
                    time.monotonic(), rank, f"GPU-{rank}", utilisation, memory, power, busy, 1980, 60 << 30,
                    sm_util=0.7 if word == "wedged" else None, others=0,
                )
                for rank in range(max(len(state["workers"]), 1))
            )  # fmt: skip

        return look


class Watched:
    """An observer at work on a stand-in: every change of state with its time, and the states seen."""

    def __init__(self, server: StandIn, *, cards: bool = True, **more: Any) -> None:
        self.server = server
        self.changes: list[tuple[float, Assessment]] = []
        self.lines = 0
        self._lock = threading.Lock()
        target = find_server(server.pid)
        kind = PlayedCards if cards else Observer
        self.observer = kind(target, emit=self._emit, on_change=self._changed, cards=cards, **more)

    def _emit(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self.lines += 1

    def _changed(self, snapshot: Snapshot, assessment: Assessment) -> None:
        with self._lock:
            self.changes.append((time.monotonic(), assessment))

    def __enter__(self) -> Watched:
        self.observer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.observer.stop()

    @property
    def states(self) -> list[str]:
        """In the order in which they came."""
        with self._lock:
            return [assessment.state for _, assessment in self.changes]

    def wait(self, state: str, seconds: float) -> Assessment:
        """Until it has that state. Raises AssertionError with what was seen."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            latest = self.observer.latest()
            if latest is not None and latest[1].state == state:
                return latest[1]
            time.sleep(0.02)
        latest = self.observer.latest()
        raise AssertionError(f"not {state} within {seconds} s: {self.states}, {latest[1] if latest else None}")
