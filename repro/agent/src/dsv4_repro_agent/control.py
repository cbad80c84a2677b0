"""The agent's two threads: one watches the control file, asks events and answers; one owns the side stream (rescue, row states).

Files in the agent's folder, all written whole:

* ``control.json`` ``{"recorder": bool, "guard": bool}``: switches, for all workers; what it does not name stays.
* ``status-PID-START.json``: features found and missing, switches, events; rewritten when it changes.
* ``ask-PID-START.json`` ``{"id": str}``: a request for the row states; answered in ``answer-PID-START.json`` with the same id.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .driver import Driver, DriverError
from .guard import Guard
from .hooks import Hooks
from .recorder import Recorder
from .rescue import READS, RELEASE_COUNT, find_wait, zeroed_before_launch
from .ring import process_start
from .said import Said, write_json
from .settings import Settings
from .sidestream import Launch, SideStream, SideStreamError

__all__ = ["Agent"]

MAX_FILE = 64 << 10
ANSWER_S = 0.8
MAX_RELEASES_PER_STALL = 2000


class Agent:
    """``vllm``: the version, for the one rule that needs it. ``library``: the driver's name (tests give their own)."""

    def __init__(self, settings: Settings, said: Said, recorder: Recorder, guard: Guard, hooks: Hooks, *, vllm: str) -> None:
        self.settings, self.said, self.recorder, self.guard, self.hooks = settings, said, recorder, guard, hooks
        self.vllm = vllm
        self.name = f"{os.getpid()}-{process_start()}"
        self.library = "libcuda.so.1"
        self._driver: Driver | None = None
        self._stop = threading.Event()
        self._ask: str | None = None
        self._answered: str | None = None
        self._asked_at = 0.0
        self._control: tuple[int, int] | None = None
        self._ask_seen: tuple[int, int] | None = None
        self._threads: list[threading.Thread] = []
        self.releases = 0

    def start(self) -> None:
        """Start both threads (daemons: they never keep the process), at the first step that this process runs."""
        # The guard alone needs no side stream.
        side = (self._side,) if self.settings.agent or self.settings.rescue else ()
        for target in (self._watch, *side):
            thread = threading.Thread(target=target, name=f"dsv4-repro-agent{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def after_fork(self) -> None:
        """A new process: no threads yet, its own name and files."""
        self.name = f"{os.getpid()}-{process_start()}"
        self._threads, self._driver, self._stop = [], None, threading.Event()
        self._ask = self._answered = self._control = self._ask_seen = None
        self.releases = 0
        self.said.after_fork()
        self.recorder.after_fork()

    def stop(self) -> None:
        """End the threads (tests)."""
        self._stop.set()
        for thread in self._threads:
            thread.join(5)

    # -- the watching thread -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        looked = 0.0
        entered = False
        while not self._stop.is_set():
            try:
                if self.recorder.serving and self.recorder.armed and not entered and self.recorder.device >= 0:
                    entered = True
                    self._enter()
                self.recorder.poll(self._driver.event_query if self._driver is not None else None)
                now = time.monotonic()
                if now - looked > 0.1:
                    looked = now
                    self._files(now)
            except Exception as error:  # the folder is full or gone: said once; the server is none of its business
                self.said.feature("control", False, f"{type(error).__name__}: {error}")
            self._stop.wait(0.005 if self.recorder.stalled_for() else 0.05)

    def _enter(self) -> None:
        try:
            driver = Driver(self.library)
            driver.enter(self.recorder.device)
            self._driver = driver
            self.said.feature("events", True, "asked through the driver")
        except DriverError as error:
            self.said.feature("events", False, str(error))

    def _files(self, now: float) -> None:
        control = self._read_changed(self.settings.folder / "control.json", "_control")
        if isinstance(control, dict):
            if isinstance(control.get("recorder"), bool):
                # The rescue needs to know which steps are overdue.
                self.recorder.arm(control["recorder"] or self.settings.rescue)
            if isinstance(control.get("guard"), bool):
                self.guard.arm(control["guard"], "control file")
        ask = self._read_changed(self.settings.folder / f"ask-{self.name}.json", "_ask_seen")
        if isinstance(ask, dict) and isinstance(ask.get("id"), str) and len(ask["id"]) <= 64:
            self._ask, self._asked_at = ask["id"], now
        if self._ask is not None and now - self._asked_at > ANSWER_S:
            self._answer(self._ask, {"error": f"the side stream gave no answer within {ANSWER_S} s (not set up, or blocked)"})
        if self.said.changed:
            self.status()

    def _read_changed(self, path: Path, memory: str) -> Any:
        """The document if the file is new, else None. Links, strangers' files and large ones are not read."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as stream:
            found = os.fstat(fd)
            mark = (found.st_mtime_ns, found.st_ino)
            if mark == getattr(self, memory) or found.st_uid not in (os.getuid(), 0):
                return None
            setattr(self, memory, mark)
            raw = stream.read(MAX_FILE + 1)
        try:
            return json.loads(raw) if len(raw) <= MAX_FILE else None
        except (ValueError, RecursionError):
            self.said.feature("control", False, f"{path.name} is not JSON")
            return None

    def status(self) -> None:
        """Write the status file."""
        write_json(
            self.settings.folder / f"status-{self.name}.json",
            {
                "schema": "dsv4-repro/agent-status/1",
                "pid": os.getpid(),
                "vllm": self.vllm,
                "ring": str(self.recorder.ring.path) if self.recorder.ring is not None else None,
                "armed": {
                    "recorder": self.recorder.armed and not self.recorder.broken,
                    "guard": self.guard.active,
                    "rescue": self.settings.rescue,
                },
                "releases": self.releases,
                **self.said.document(),
            },
        )

    def _answer(self, ask: str, document: dict[str, Any]) -> None:
        if self._answered != ask:
            self._answered = ask
            body = {"schema": "dsv4-repro/agent-answer/1", "id": ask, "monotonic_ns": time.monotonic_ns(), **document}
            write_json(self.settings.folder / f"answer-{self.name}.json", body)
        if self._ask == ask:
            self._ask = None

    # -- the side stream's thread --------------------------------------------------------------------------------------------

    def _side(self) -> None:
        stream: SideStream | None = None
        refused = ""
        while not self._stop.is_set():
            self._stop.wait(0.005)
            if not self.recorder.serving or self.recorder.capturing or self.recorder.device < 0 or refused:
                continue
            if stream is None:
                # Made before it is needed: in a wedge, making it might wait for the device.
                try:
                    stream = SideStream(Driver(self.library), self.recorder.device)
                    self.said.feature("side stream", True, "ready")
                except DriverError as error:
                    refused = str(error)
                    self.said.feature("side stream", False, f"unavailable: {error}")
                    continue
                if self.settings.rescue:
                    able, why = zeroed_before_launch(self.vllm)
                    self.said.feature("rescue", able, why)
            try:
                ask = self._ask
                if ask is not None:
                    self._answer(ask, self.row_states(stream))
                if (
                    self.settings.rescue
                    and self.recorder.stalled_for() > self.settings.stall_s
                    and zeroed_before_launch(self.vllm)[0]
                ):
                    # A long prefill is overdue too: it is looked at twenty times a second, not two hundred.
                    self._stop.wait(0.0 if self.rescue(stream) else 0.05)
            except SideStreamError as error:
                refused = str(error)
                self.said.feature("side stream", False, f"unavailable: {error}")
            except Exception as error:  # not as expected: steps aside, once
                refused = f"{type(error).__name__}: {error}"
                self.said.feature("side stream", False, f"off: {refused}")

    def _captured(self) -> list[Launch]:
        """Launches in graphs: their memory stays as long as the graph. One for each workspace and lengths, the one with most rows
        that a group can be told for."""
        best: dict[tuple[int, int], Launch] = {}
        for launch in list(self.hooks.launches.values()):
            key = (launch.workspace, launch.lengths)
            if launch.captured and launch.rows == launch.groups and launch.rows > (best[key].rows if key in best else 0):
                best[key] = launch
        return list(best.values())

    def row_states(self, stream: SideStream) -> dict[str, Any]:
        """Counters and lengths of every captured launch: what a request is answered with."""
        shown = []
        for launch in self._captured():
            begun = time.monotonic_ns()
            shown.append(
                {
                    "workspace": hex(launch.workspace), "lengths_address": hex(launch.lengths), "rows": launch.rows,
                    "width": launch.width, "top_k": launch.top_k, "max_seq_len": launch.max_seq_len,
                    "arrival_counters": stream.counters(launch), "lengths": stream.lengths(launch),
                    "read_ns": time.monotonic_ns() - begun,
                }
            )  # fmt: skip
        return {"launches": shown, "stalled_s": self.recorder.stalled_for()}

    def rescue(self, stream: SideStream) -> bool:
        """Look for the known wait in each captured launch, and release the first. Returns whether one was released."""
        why: set[str] = set()
        for launch in self._captured():
            reads: list[Sequence[int]] = []
            for _ in range(READS):
                reads.append(stream.counters(launch))
                if 1 not in reads[-1]:
                    break
                self._stop.wait(0.002)
            if len(reads) < READS:
                why.add("no group has one arrival")
                continue
            wait, reason = find_wait(reads, launch, stream.lengths(launch))
            if wait is None:
                why.add(reason)
                continue
            self.guard.arm(True, "first rescue")
            if self.releases >= MAX_RELEASES_PER_STALL and not self.guard.active:
                self.said.feature("rescue", False, f"stopped after {self.releases} releases without a guard to end them")
                return False
            stream.write_word(wait.address, RELEASE_COUNT)
            self.releases += 1
            if self.recorder.ring is not None:
                self.recorder.ring.released()
            self.said.event("released", address=hex(wait.address), group=wait.group, length=wait.length, rows=launch.rows)
            return True
        if self.recorder.stalled_for() > 2.0:
            self.said.feature("stall", True, "not released: " + ("; ".join(sorted(why)) or "no captured launch of the op is known"))
        return False
