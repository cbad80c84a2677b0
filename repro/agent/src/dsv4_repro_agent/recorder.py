"""The flight recorder: what the model runner does, step by step, into the ring. Never waits for the device.

A step's end on the device is seen by an event of our own, recorded behind the step's launches and asked for (never waited for): by
the model's own thread when it begins a later step, and ten times a second by the agent's thread, for the steps that none follows.
A thread that wakes more often takes the interpreter from the model's: two hundred times a second cost an H200's server some 4 % of
its steps. Where vLLM returns its outputs asynchronously, the end of ``get_output`` is kept too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .ring import EVENT_DROPPED, GUARDED, Ring, Step
from .said import Said

__all__ = ["GRAPH_MODES", "Recorder"]

GRAPH_MODES = {"NONE": 0, "PIECEWISE": 1, "FULL": 2}
MAX_OPEN = 64
#: CUDA_SUCCESS and CUDA_ERROR_NOT_READY.
DONE, NOT_READY = 0, 600


class Recorder:
    """``make_ring(runner)`` gives the ring at the first step of a model runner, or raises OSError.

    ``on_first()`` is called at the first step in this process: only a process that runs a model has a ring and threads.
    ``armed``: steps are recorded. The hooks call ``begin``, ``batch``, ``decode``, ``launched``, ``waiting`` and ``returned``; a
    failure in one of them is said once and switches the recorder off.
    """

    def __init__(self, said: Said, make_ring: Callable[[Any], Ring], on_first: Callable[[], None]) -> None:
        self._said = said
        self._make_ring = make_ring
        self._on_first = on_first
        self._local = threading.local()
        self._open: deque[tuple[Step, Any]] = deque()
        self._spare: list[Any] = []
        self._events = True
        self._torch: Any = None
        self._lock = threading.Lock()
        self.ring: Ring | None = None
        self.armed = True
        self.broken = False
        self.capturing = False
        self.serving = False
        self.device = -1
        self._inside_ns = 0
        #: Steps whose clamped batch had a padding slot on the native path: a length of -1. Those of few rows would have wedged;
        #: with more, one CTA has a row and waits for nobody (seen on an H200 with vLLM 0.23.0: 10 rows and more go by).
        self.averted = 0

    def arm(self, armed: bool) -> None:
        """Switch recording on or off; steps under way are finished."""
        if armed != self.armed:
            self.armed = armed
            if self.ring is not None:
                self.ring.arm(armed)
            self._said.event("recorder on" if armed else "recorder off")

    def after_fork(self) -> None:
        """This is a new process: its ring, its steps and its locks are its own (vLLM forks its engine and workers by default)."""
        self._local, self._lock = threading.local(), threading.Lock()
        self._open.clear()
        self._spare.clear()
        self.ring, self.serving, self.capturing, self._inside_ns = None, False, False, 0

    def step_aside(self, where: str, error: BaseException) -> None:
        """Something was not as expected: no more recording, said once."""
        self.broken = True
        self._said.feature("recorder", False, f"off: {where}: {type(error).__name__}: {error}")

    def begin(self, runner: Any, kind: int) -> Step | None:
        """A real step begins in this thread; None if it is not recorded."""
        self._local.step = None
        if not self.serving:
            index = getattr(getattr(runner, "device", None), "index", None)
            self.device = index if isinstance(index, int) else 0
            self.serving = True
            self._on_first()
        if self._open and self._torch is not None:
            self.poll(_asked_by_torch)
        if not self.armed or self.broken:
            return None
        if self.ring is None:
            self.ring = self._make_ring(runner)
            self._said.feature("recorder", True, f"records into {self.ring.path}")
        step = self.ring.begin(kind)
        self._local.step = step
        self._inside_ns = step.begin_ns
        return step

    @property
    def current(self) -> Step | None:
        """The step that this thread is in."""
        step: Step | None = getattr(self._local, "step", None)
        return step

    def batch(self, *, requests: Any, tokens: Any, mode: Any, padded_requests: Any, padded_tokens: Any) -> None:
        """The batch descriptor; ``mode`` is the graph mode's enumeration member."""
        step = self.current
        # After its launches another batch is none of its own: a dummy step of data parallelism, or the draft model's.
        if step is None or step.launch_ns:
            return
        step.requests, step.tokens = _whole(requests), _whole(tokens)
        step.padded_requests = step.requests if padded_requests is None else _whole(padded_requests)
        step.padded_tokens = _whole(padded_tokens)
        step.graph_mode = GRAPH_MODES.get(str(getattr(mode, "name", "")), 255)

    def decode(self, lengths: Any, *, next_n: Any, native: Any, guarded: bool) -> None:
        """Decode lengths of the request slots, from the host's copy (a CPU tensor: reading it waits for nothing)."""
        step = self.current
        # The draft model's metadata are built after the target's launches: they are another batch, without the padding slots.
        if step is None or step.launch_ns:
            return
        if getattr(getattr(lengths, "device", None), "type", "cpu") == "cpu":
            values = lengths.tolist()
            step.decode_slots, step.decode_zero = len(values), sum(1 for value in values if value == 0)
            step.decode_min, step.decode_max = (min(values), max(values)) if values else (-1, -1)
        step.next_n, step.native = _whole(next_n), int(bool(native))
        if guarded:
            step.flags |= GUARDED
            if step.decode_zero > 0 and step.native == 1 and step.next_n > 1:
                self.averted += 1

    def launched(self, step: Step) -> None:
        """The step's launches are queued: put an event behind them."""
        step.launch_ns = time.monotonic_ns()
        self._inside_ns = 0
        event = self._record_event(step) if self._events else None
        assert self.ring is not None
        self.ring.write(step)
        with self._lock:
            self._open.append((step, event))
            while len(self._open) > MAX_OPEN:
                self._open.popleft()

    def _record_event(self, step: Step) -> Any:
        if self._torch is None and not self._with_cuda():
            return None
        torch = self._torch
        if torch.cuda.is_current_stream_capturing():
            return None
        if len(self._open) >= MAX_OPEN:
            step.flags |= EVENT_DROPPED
            return None
        event = self._spare.pop() if self._spare else torch.cuda.Event()
        event.record()
        step.record_ns = time.monotonic_ns()
        return event

    def _with_cuda(self) -> bool:
        """Once in a process: torch, if it has CUDA here; else no events, and it is said."""
        import torch

        if torch.cuda.is_available():
            self._torch = torch
            return True
        self._events = False
        self._said.feature("events", False, "no CUDA in this process: completion is seen from the outputs alone")
        return False

    def waiting(self, step: Step) -> None:
        """A thread begins to wait for the step's output."""
        step.wait_ns = time.monotonic_ns()
        if step.ring is not None:
            step.ring.write(step)

    def returned(self, step: Step) -> None:
        """The step's output is there."""
        step.output_ns = time.monotonic_ns()
        if step.ring is not None:
            step.ring.write(step)

    def poll(self, query: Callable[[Any], int] | None) -> None:
        """Ask the oldest events whether they are done. Any thread; two at once do no harm.

        ``query``: from an event to the driver's answer; None: no driver.
        """
        while True:
            with self._lock:
                if not self._open:
                    return
                step, event = self._open[0]
            if event is None or query is None:
                done = step.output_ns != 0 or (event is None and step.wait_ns == 0 and len(self._open) > 1)
            else:
                answer = query(event)
                if answer not in (DONE, NOT_READY):
                    self._events = False
                    self._said.feature("events", False, f"the driver answers {answer} to an event query")
                    with self._lock:
                        self._open.clear()
                    return
                done = answer == DONE
            if not done:
                return
            now = time.monotonic_ns()
            with self._lock:
                # Another thread may have had the same answer: an event that is spare twice would be recorded for two steps.
                if not self._open or self._open[0][0] is not step:
                    continue
                self._open.popleft()
                if event is not None:
                    if query is not None:
                        step.complete_ns = now
                    if len(self._spare) < MAX_OPEN:
                        self._spare.append(event)
            if step.ring is not None:
                step.ring.write(step)

    def stalled_for(self) -> float:
        """Seconds since the launch of the oldest step that has not ended; 0 if there is none."""
        with self._lock:
            if not self._open:
                return 0.0
            return max(time.monotonic_ns() - self._open[0][0].launch_ns, 0) / 1e9

    def overdue_for(self) -> float:
        """As ``stalled_for``, or since a step began that has not launched everything yet: the launch queue may be full."""
        inside = self._inside_ns
        return max(self.stalled_for(), (time.monotonic_ns() - inside) / 1e9 if inside else 0.0)


def _asked_by_torch(event: Any) -> int:
    """For the model's own thread, whose context torch has made current."""
    return DONE if event.query() else NOT_READY


def _whole(value: Any) -> int:
    try:
        return min(max(int(value), -1), 2**31 - 1)
    except (TypeError, ValueError):
        return -1
