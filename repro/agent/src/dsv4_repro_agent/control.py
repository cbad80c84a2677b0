"""The agent's three threads: one reads and writes files and never calls the driver (so that it can still say that the others are
blocked), one asks events, one owns the side stream (rescue, row states).

Files in the agent's folder, all written whole:

* ``control.json`` ``{"recorder": bool, "guard": bool}``: switches, for all workers; what it does not name stays.
* ``status-PID-START.json``: features found and missing, switches, events; rewritten when it changes.
* ``ask-PID-START.json`` ``{"id": str}``: a request for the row states; answered in ``answer-PID-START.json`` with the same id. With
  ``"kind": "release"`` the known wait is released as the rescue would, under the same conditions, at most ``RELEASE_S`` a request;
  with ``"guard": true`` beside it the guard is armed first.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .driver import Driver, DriverError
from .guard import Guard
from .hooks import Hooks
from .recorder import Recorder
from .releasing import Releasing, ask_of
from .rescue import zeroed_before_launch
from .ring import process_start
from .said import Said, write_json
from .settings import Settings
from .sidestream import SideStream, SideStreamBusyError, SideStreamError

__all__ = ["Agent"]

MAX_FILE = 64 << 10
#: After so long a request that nobody could answer is told so: at a look of the files, and before the asker (2 s) gives up.
ANSWER_S = 1.3
#: How often the threads of files and of events look. Each look takes the interpreter from the model's thread for a moment.
FILES_S, EVENTS_S = 0.2, 0.1
#: How often the side stream's thread looks where nothing wakes it, and while it has something to do that it cannot do yet.
IDLE_S, SOON_S = 1.0, 0.02
#: A rescue works for so long before it looks at requests again.
BURST_S = 2.0
BLOCKED_S = 2.0


def _mark(found: os.stat_result) -> tuple[int, int, int]:
    """What a file that was read is known by. Times go in steps of some ms: an editor's empty file may have that of the full one."""
    return found.st_mtime_ns, found.st_ino, found.st_size


class Agent:
    """``vllm``: the version, for the one rule that needs it. ``library``: the driver's name (tests give their own)."""

    def __init__(self, settings: Settings, said: Said, recorder: Recorder, guard: Guard, hooks: Hooks, *, vllm: str) -> None:
        self.settings, self.said, self.recorder, self.guard, self.hooks = settings, said, recorder, guard, hooks
        self.vllm = vllm
        self.name = f"{os.getpid()}-{process_start()}"
        self.library = "libcuda.so.1"
        self._driver: Driver | None = None
        self._stop = threading.Event()
        #: Set where the side stream's thread has something to do.
        self._wake = threading.Event()
        #: The id that waits and whether it asks for a release: one value, because two threads read and write it.
        self._ask: tuple[str, bool] | None = None
        self._side_since = 0.0
        self._said_blocked = False
        self._counted: tuple[int, ...] = ()
        self._status_at = 0.0
        self._answered: str | None = None
        self._asked_at = 0.0
        self._control: tuple[int, int, int] | None = None
        self._ask_seen: tuple[int, int, int] | None = None
        self._threads: list[threading.Thread] = []
        self.releasing = Releasing(
            said, recorder, guard, hooks, vllm=vllm, stall_s=settings.stall_s, entered=self._entered, stopped=self._stopped
        )

    @property
    def releases(self) -> int:
        """Launches released so far."""
        return self.releasing.releases

    @property
    def rescues(self) -> int:
        """Stalls that ended after at least one release."""
        return self.releasing.rescues

    def _entered(self) -> None:
        self._side_since = time.monotonic()

    def _stopped(self) -> bool:
        return self._stop.is_set()

    def start(self) -> None:
        """Start the threads (daemons: they never keep the process), at the first step that this process runs."""
        # The guard alone needs neither events nor side stream.
        more = (self._events, self._side) if self.settings.agent or self.settings.rescue else ()
        for target in (self._watch, *more):
            self._thread(target)

    def _thread(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"dsv4-repro-agent{target.__name__}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def after_fork(self) -> None:
        """A new process: no threads yet, its own name and files."""
        self.name = f"{os.getpid()}-{process_start()}"
        self._threads, self._driver, self._stop, self._wake = [], None, threading.Event(), threading.Event()
        self._ask = self._answered = self._control = self._ask_seen = None
        self._side_since, self._said_blocked = 0.0, False
        self.releasing.releases = self.releasing.rescues = 0
        self.said.after_fork()
        self.recorder.after_fork()

    def stop(self) -> None:
        """End the threads (tests)."""
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(5)

    # -- the threads of files and of events ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self._blocked()
                self._files(time.monotonic())
            except Exception as error:  # the folder is full or gone: said once; the server is none of its business
                self.said.feature("control", False, f"{type(error).__name__}: {error}")
            self._stop.wait(FILES_S)

    def _blocked(self) -> None:
        """Say once that the side stream's thread is held inside the driver, and that it is free again."""
        since = self._side_since
        blocked = since != 0.0 and time.monotonic() - since > BLOCKED_S
        if blocked and not self._said_blocked:
            self.said.feature("side stream", False, f"unavailable: a call of the driver has not returned for {BLOCKED_S:g} s")
        elif self._said_blocked and not blocked:
            self.said.feature("side stream", True, "ready again")
        self._said_blocked = blocked

    def _events(self) -> None:
        entered = False
        while not self._stop.is_set():
            try:
                if self.recorder.serving and self.recorder.armed and not entered and self.recorder.device >= 0:
                    entered = True
                    self._enter()
                self.recorder.poll(ask_of(self._driver))
                if self.recorder.ring is not None:
                    self.recorder.ring.beat()
            except Exception as error:  # not as expected: said once
                self.said.feature("events", False, f"{type(error).__name__}: {error}")
            self._stop.wait(EVENTS_S)

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
                if self.recorder.armed and not any(one.name.endswith("_events") for one in self._threads):
                    self._thread(self._events)
            if isinstance(control.get("guard"), bool):
                self.guard.arm(control["guard"], "control file")
        ask = self._read_changed(self.settings.folder / f"ask-{self.name}.json", "_ask_seen")
        if isinstance(ask, dict) and isinstance(ask.get("id"), str) and len(ask["id"]) <= 64:
            release = ask.get("kind") == "release"
            if release and ask.get("guard") is True:
                self.guard.arm(True, "asked for with a release")
            self._ask, self._asked_at = (ask["id"], release), now
            self._wake.set()
        waiting = self._ask
        if waiting is not None and now - self._asked_at > ANSWER_S:
            self._answer(waiting, {"error": f"the side stream gave no answer within {ANSWER_S} s (not set up, or blocked)"})
        counted = (self.releases, self.rescues, self.guard.clamped, self.recorder.averted)
        if self.said.changed or (counted != self._counted and now - self._status_at > 1.0):
            self._counted, self._status_at = counted, now
            self.status()

    def _read_changed(self, path: Path, memory: str) -> Any:
        """The document if the file is new, else None. Links, strangers' files and large ones are not read."""
        try:
            # Most looks end here: nothing is opened for a file that is not there or is known.
            seen = os.stat(path, follow_symlinks=False)
            if _mark(seen) == getattr(self, memory):
                return None
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            # A link, or a file of root's alone: the other files are read and written all the same.
            self.said.feature("control", False, f"{path.name} cannot be read: {error.strerror or error}")
            return None
        try:
            # Five times a second inside a server: whatever lies there, a directory too, the descriptor is given back.
            found = os.fstat(fd)
            mark = _mark(found)
            if not stat.S_ISREG(found.st_mode) or mark == getattr(self, memory) or found.st_uid not in (os.getuid(), 0):
                return None
            setattr(self, memory, mark)
            raw = os.pread(fd, MAX_FILE + 1, 0)
        finally:
            os.close(fd)
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
                    # Without steps it does not know which of them is overdue.
                    "rescue": self.settings.rescue and self.recorder.armed and not self.recorder.broken,
                },
                "releases": self.releases,
                "counters": {
                    "releases": self.releases,
                    "rescues": self.rescues,
                    "guarded_builds": self.guard.clamped,
                    "averted_lengths": self.recorder.averted,
                },
                **self.said.document(),
            },
        )

    def _answer(self, ask: tuple[str, bool], document: dict[str, Any]) -> None:
        if self._answered != ask[0]:
            self._answered = ask[0]
            body = {"schema": "dsv4-repro/agent-answer/1", "id": ask[0], "monotonic_ns": time.monotonic_ns(), **document}
            try:
                write_json(self.settings.folder / f"answer-{self.name}.json", body)
            except OSError as error:
                # A full disk costs this answer; side stream and rescue go on.
                self.said.feature("answers", False, f"could not be written: {error.strerror or error}")
            else:
                if "answers" in self.said.features:
                    self.said.feature("answers", True, "are written again")
        if self._ask == ask:
            self._ask = None

    # -- the side stream's thread --------------------------------------------------------------------------------------------

    def _side(self) -> None:
        stream: SideStream | None = None
        while not self._stop.is_set():
            self._side_since = 0.0
            self._wake.wait(self._pause(ready=stream is not None))
            self._wake.clear()
            # Nothing is made or copied while graphs are captured; the first step of a request comes after the first capture.
            if not self.recorder.serving or self.recorder.capturing or self.recorder.device < 0:
                continue
            self._entered()
            try:
                if stream is None:
                    # Made before it is needed: in a wedge, making it might wait for the device.
                    stream = self._side_stream()
                self._work(stream)
            except DriverError as error:
                self._refuse(f"unavailable: {error}")
                return
            except SideStreamBusyError as error:
                # Said once; it is tried again, because a copy behind a long prefill comes back.
                self.said.feature("side stream", False, f"busy: {error}")
                self._stop.wait(0.1)
            except SideStreamError as error:
                self._refuse(f"unavailable: {error}")
                return
            except Exception as error:  # not as expected: steps aside, once
                self._refuse(f"off: {type(error).__name__}: {error}")
                return

    def _pause(self, *, ready: bool) -> float:
        """Seconds until the side stream's thread looks again, unless it is woken: when the oldest step would be overdue."""
        # A request wakes it once: one that could not be answered then (a capture, a copy that is behind a kernel) still waits.
        if not ready or self._ask is not None or self.recorder.capturing:
            return SOON_S
        if not self._may_rescue():
            return IDLE_S
        return min(max(self.settings.stall_s - self.recorder.overdue_for(), 0.005), max(self.settings.stall_s, 0.005))

    def _may_rescue(self) -> bool:
        return self.settings.rescue and zeroed_before_launch(self.vllm)[0]

    def _refuse(self, why: str) -> None:
        self._side_since = 0.0
        self.said.feature("side stream", False, why)

    def _side_stream(self) -> SideStream:
        stream = SideStream(Driver(self.library), self.recorder.device)
        self.said.feature("side stream", True, "ready")
        if self.settings.rescue:
            able, why = zeroed_before_launch(self.vllm)
            self.said.feature("rescue", able, why)
        return stream

    def _work(self, stream: SideStream) -> None:
        """One look: the request that waits, if one does, and the rescue, if a step is overdue."""
        ask = self._ask
        if ask is not None:
            self._answer(ask, self.releasing.release(stream) if ask[1] else self.releasing.row_states(stream))
        if self._may_rescue() and self.releasing.overdue(stream):
            released, why = self.releasing.rescue(stream, BURST_S, "rescue")
            if not released:
                if self.recorder.stalled_for() > 2.0:
                    self.said.feature("stall", True, f"not released: {why}")
                # A long prefill is overdue too: it is looked at twenty times a second, not two hundred.
                self._side_since = 0.0
                self._stop.wait(0.05)
