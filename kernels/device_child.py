"""The GPU process: ``python -m dsv4_repro.kernels.device_child FD``. Executes the parent's commands and never waits for the device.

Conversation over ``channel`` (one JSON object a message):

* child: ``hello`` (device description; the driver is started, no context yet) or ``error``
* parent: ``prepare``; child: ``note`` lines, then ``ready`` or ``error``
* parent: ``step``; child: ``progress`` every 20 ms while the step is pending, then ``step``
* parent, at any time: ``row_states``, ``release``, ``status``, ``ping``, ``exit``; child: a message with the same ``re``

It dies with its parent, lets any process of this user attach to it (``PR_SET_PTRACER``), and leaves by ``os._exit``:
destructors of a wedged context would wait for ever.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..clock import SYSTEM, Clock
from ..errors import ReproError
from .channel import CLOSED, Channel
from .device import DeviceWorkload
from .device_records import Setup, counters_of, launch_of
from .driver import CudaCallError, Driver

__all__ = ["HEARTBEAT_S", "be_a_good_child", "main", "serve", "setup_of"]

#: While a step is pending, how often the child says so, seconds.
HEARTBEAT_S = 0.004
#: For how long after a launch the child polls without pause, seconds: a healthy step is over by then.
_SPIN_S = 0.003
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61

WorkloadFactory = Callable[[Driver, Setup, Callable[[str], None]], DeviceWorkload]


def be_a_good_child(parent: int) -> None:
    """Die with the parent, allow attaching, write a traceback on a fatal signal. ``parent``: the pid that must still be there."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # Any process of this user may attach (yama level 1 allows ancestors alone, and cuda-gdb is a sibling of this process).
    # Without yama the call fails with EINVAL, and nothing is lost.
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1).value, 0, 0, 0)
    if parent and os.getppid() != parent:
        os._exit(3)
    # Ctrl-C is the parent's: it decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()


def setup_of(message: Mapping[str, Any]) -> Setup:
    """The set-up that a ``prepare`` message describes."""
    cubin = message.get("cubin")
    return Setup(
        function=str(message["function"]),
        top_k=int(message["top_k"]),
        layers=int(message["layers"]),
        seed=int(message["seed"]),
        ordinal=int(message["ordinal"]),
        launches={int(rows): launch_of(document) for rows, document in message["launches"].items()},
        cubin=Path(cubin).read_bytes() if cubin else b"",
        params_size=int(message.get("params_size", 56)),
        warmup_timeout_s=float(message.get("warmup_timeout_s", 20.0)),
        library=str(message.get("library", "")),
        extra=dict(message.get("extra", {})),
    )


def _error(error: BaseException, re: str) -> dict[str, Any]:
    kind = next((cls.__name__ for cls in type(error).__mro__ if cls.__module__.endswith(".errors")), type(error).__name__)
    return {
        "type": "error", "re": re, "kind": kind, "message": str(error), "help": getattr(error, "help_text", ""),
        "code": getattr(error, "code", ""), "call": getattr(error, "call", ""),
    }  # fmt: skip


class _Session:
    """One conversation."""

    def __init__(self, channel: Channel, factory: WorkloadFactory, clock: Clock) -> None:
        self._channel = channel
        self._factory = factory
        self._clock = clock
        self._driver: Driver | None = None
        self._workload: DeviceWorkload | None = None
        self._last_beat = 0.0
        self._launched = 0.0

    def hello(self, ordinal: int) -> None:
        self._driver = Driver()
        count = self._driver.init()
        info = self._driver.describe(ordinal)
        from importlib.metadata import PackageNotFoundError, version

        try:
            bindings = version("cuda-bindings")
        except PackageNotFoundError:
            bindings = "unknown"
        self._channel.send(
            {
                "type": "hello", "pid": os.getpid(), "devices": count, "device": info.document(),
                "python": sys.version.split()[0], "bindings": bindings,
            }
        )  # fmt: skip

    def loop(self) -> int:
        """Serve until ``exit`` or the parent is gone; the process's exit status."""
        while True:
            message = self._channel.receive(self._patience())
            if message is CLOSED:
                return 4
            if isinstance(message, dict):
                if message.get("cmd") == "exit":
                    self._channel.send({"type": "bye", "re": "exit", "pending": bool(self._workload and self._workload.pending)})
                    return 0
                self._answer(message)
            self._tend()

    def _patience(self) -> float:
        if self._workload is None or not self._workload.pending:
            return 0.5
        return 0.0 if self._clock.monotonic() - self._launched < _SPIN_S else 0.0005

    def _tend(self) -> None:
        """Look after the pending step: its end, or a heartbeat."""
        workload = self._workload
        if workload is None or not workload.pending:
            return
        layer = workload.progress()
        result = workload.poll()
        if result is not None:
            self._channel.send({"type": "step", "re": "step", **result.document(), "layers_done": workload.progress()})
            return
        now = self._clock.monotonic()
        if now - self._last_beat >= HEARTBEAT_S:
            self._last_beat = now
            self._channel.send({"type": "progress", "layers_done": layer, "pending_ms": workload.pending_ms()})

    def _answer(self, message: Mapping[str, Any]) -> None:
        command = str(message.get("cmd"))
        handler = getattr(self, f"_do_{command}", None)
        try:
            if handler is None:
                raise ValueError(f"no such command: {command}")
            handler(message)
        except (ReproError, ValueError, KeyError, TypeError, OSError, MemoryError) as error:
            self._channel.send(_error(error, command))

    def _do_ping(self, message: Mapping[str, Any]) -> None:
        self._channel.send({"type": "pong", "re": "ping"})

    def _do_prepare(self, message: Mapping[str, Any]) -> None:
        assert self._driver is not None
        setup = setup_of(message)
        workload = self._factory(self._driver, setup, lambda text: self._note(text))
        info = workload.open()
        facts = workload.prepare()
        self._workload = workload
        self._channel.send({"type": "ready", "re": "prepare", "device": info.document(), **facts})

    def _note(self, text: str) -> None:
        self._channel.send({"type": "note", "text": text})

    def _ready(self) -> DeviceWorkload:
        if self._workload is None:
            raise ValueError("not prepared")
        return self._workload

    def _do_step(self, message: Mapping[str, Any]) -> None:
        workload = self._ready()
        # The first heartbeat comes HEARTBEAT_S after the launch: healthy steps send none.
        self._launched = self._last_beat = self._clock.monotonic()
        try:
            rows = int(message["rows"])
            live = int(message.get("live_rows", rows))
            workload.launch(int(message["index"]), rows, message["lengths"], message.get("check", ()), live)
        except CudaCallError as error:
            self._channel.send(
                {"type": "step", "re": "step", "index": message["index"], "state": "fault", "ms": 0.0, "wrong": [],
                 "padding_wrong": [], "rows_checked": 0, "error": str(error), "layers_done": 0}
            )  # fmt: skip

    def _do_row_states(self, message: Mapping[str, Any]) -> None:
        """Read twice, so that "does not change" is seen and not assumed; the first reading is written out."""
        workload = self._ready()
        began = self._clock.monotonic()
        raw = workload.read_row_states(float(message.get("timeout_s", 2.0)))
        first_ms = (self._clock.monotonic() - began) * 1e3
        path = Path(str(message["path"])) if message.get("path") else None
        if path is not None:
            partial = path.with_name(path.name + ".part")
            partial.write_bytes(raw)
            partial.replace(path)
        self._clock.sleep(float(message.get("again_after_s", 0.02)))
        again = workload.read_row_states(float(message.get("timeout_s", 2.0)))
        self._channel.send(
            {
                "type": "row_states", "re": "row_states", "address": workload.row_states_address, "bytes": len(raw),
                "read_ms": first_ms, "unchanged": raw == again, "groups": counters_of(raw), "pending": workload.pending,
                "layers_done": workload.progress(), "path": str(path) if path else "", "params": workload.frozen_params().hex(),
                **workload.observations(),
            }
        )  # fmt: skip

    def _do_release(self, message: Mapping[str, Any]) -> None:
        outcome = self._ready().release(int(message["address"]), int(message["value"]), float(message.get("timeout_s", 10.0)))
        self._channel.send({"type": "release", "re": "release", **outcome.document()})

    def _do_status(self, message: Mapping[str, Any]) -> None:
        workload = self._ready()
        self._channel.send(
            {"type": "status", "re": "status", "pending": workload.pending, "layers_done": workload.progress(),
             "pending_ms": workload.pending_ms()}
        )  # fmt: skip


def serve(channel: Channel, ordinal: int, factory: WorkloadFactory, clock: Clock = SYSTEM) -> int:
    """Say hello and serve; an error before the loop is sent as such and ends with status 5."""
    session = _Session(channel, factory, clock)
    try:
        session.hello(ordinal)
    except ReproError as error:
        channel.send(_error(error, "hello"))
        return 5
    return session.loop()


def main(arguments: list[str], factory: WorkloadFactory | None = None) -> int:
    """``FD ORDINAL PARENT_PID``."""
    descriptor, ordinal, parent = (int(argument) for argument in arguments[:3])
    be_a_good_child(parent)
    chosen: WorkloadFactory = factory or (lambda driver, setup, note: DeviceWorkload(driver, setup, note=note))
    return serve(Channel.of_descriptor(descriptor), ordinal, chosen)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
