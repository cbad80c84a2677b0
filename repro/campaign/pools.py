"""Workers on this machine: a spawned process each, one GPU each on the GPU ground. A worker that dies or hangs is replaced.

``Pool`` is what a hunt needs of workers, wherever they are; ``LocalPool`` has them here, ``ray_runner.RayPool`` anywhere.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, Protocol

from ...clock import SYSTEM, Clock
from ...errors import ReproError
from .cells import Cell, TrialResult
from .sampler import Block
from .session import TrialSession

__all__ = ["LocalPool", "Message", "Pool", "run_block", "worker_main"]

#: A trial that takes longer is given up with its worker, seconds.
TRIAL_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Message:
    """What a pool reports. ``result``: a trial ended. ``done``: a block ended. ``lost``: its worker died or hung (``why``), with
    the numbers that were not reported; ``event``: something to note.
    """

    kind: Literal["result", "done", "lost", "event"]
    worker: str
    block: Block | None = None
    number: int | None = None
    result: TrialResult | None = None
    why: str = ""


class Pool(Protocol):
    """Workers. ``free``: how many blocks it takes now."""

    def free(self) -> int: ...

    def submit(self, block: Block) -> None: ...

    def poll(self, timeout_s: float) -> list[Message]: ...

    def doing(self) -> list[str]: ...

    def close(self) -> None: ...


def run_block(cell: Cell, seeds: Sequence[int], kept: dict[str, TrialSession], identities: dict[str, Any], note: Any) -> Any:
    """Yield the result of each trial of a block. ``kept``: this process's open session by cell; another cell's is closed first."""
    if cell.key not in kept:
        for session in kept.values():
            session.close()
        kept.clear()
        kept[cell.key] = TrialSession(cell, identities=identities, emit=note)
    session = kept[cell.key]
    for seed in seeds:
        try:
            yield session.trial(seed)
        except ReproError as error:  # an impossible cell of the matrix: this trial's answer, not the hunt's end
            yield TrialResult("other", seed, why=f"{type(error).__name__}: {error}"[:1000])


def worker_main(connection: Connection, name: str, device: str | None) -> None:
    """The life of a worker: a block in, a result out for each trial, until the hunt hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the hunt's; it hangs up
    kept: dict[str, TrialSession] = {}
    identities: dict[str, Any] = {}

    def note(kind: str, **fields: Any) -> None:
        if kind in ("ghost utilisation", "not reused"):
            connection.send(("event", kind, {name: str(value)[:500] for name, value in fields.items()}))

    try:
        while True:
            document, numbers, seeds = connection.recv()
            cell = Cell.from_document(document)
            if device is not None:
                cell = replace(cell, device=device)
            for number, result in zip(numbers, run_block(cell, seeds, kept, identities, note), strict=True):
                connection.send(("result", number, result.document()))
            connection.send(("done",))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the hunt is over, or gone
    finally:
        for session in kept.values():
            session.close()


@dataclass(slots=True)
class _Worker:
    name: str
    device: str | None
    process: Any
    connection: Connection
    block: Block | None = None
    reported: int = 0
    since: float = 0.0


class LocalPool:
    """``devices``: a GPU ordinal a worker, or None for each CPU worker."""

    def __init__(self, devices: Sequence[str | None], *, trial_limit_s: float = TRIAL_LIMIT_S, clock: Clock = SYSTEM) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._clock = clock
        self._limit = trial_limit_s
        self._started = 0
        self._workers = [self._start(device) for device in devices]
        self._waiting: list[Message] = []

    def _start(self, device: str | None) -> _Worker:
        ours, theirs = self._context.Pipe()
        name = f"worker-{self._started}" + (f"/gpu{device}" if device is not None else "")
        self._started += 1
        process = self._context.Process(target=worker_main, args=(theirs, name, device), name=name, daemon=True)
        process.start()
        theirs.close()
        return _Worker(name, device, process, ours)

    @property
    def processes(self) -> list[int]:
        """Process ids, for tests and for the screen."""
        return [worker.process.pid for worker in self._workers]

    def free(self) -> int:
        """Idle workers."""
        return sum(worker.block is None for worker in self._workers)

    def submit(self, block: Block) -> None:
        """Give a block to an idle worker; one that turns out to be dead reports the block lost."""
        worker = next(worker for worker in self._workers if worker.block is None)
        worker.block, worker.reported, worker.since = block, 0, self._clock.monotonic()
        try:
            worker.connection.send((block.cell.document(), block.numbers, block.seeds))
        except (BrokenPipeError, ConnectionResetError, OSError) as error:
            self._waiting.append(self._lost(worker, f"its pipe is closed: {error}"))

    def poll(self, timeout_s: float) -> list[Message]:
        """What workers said; waits until one says something or the time is over."""
        found, self._waiting = self._waiting, []
        ready = wait([worker.connection for worker in self._workers], 0 if found else timeout_s)
        for worker in list(self._workers):
            if worker.connection in ready:
                found += self._heard(worker)
        now = self._clock.monotonic()
        for worker in list(self._workers):
            if worker.block is not None and now - worker.since > self._limit:
                found.append(self._lost(worker, f"a trial took longer than {self._limit:g} s"))
        return found

    def _heard(self, worker: _Worker) -> list[Message]:
        found: list[Message] = []
        try:
            while worker.connection.poll():
                kind, *rest = worker.connection.recv()
                worker.since = self._clock.monotonic()
                if kind == "event":
                    found.append(Message("event", worker.name, why=f"{rest[0]}: {rest[1]}"))
                elif kind == "result":
                    worker.reported += 1
                    result = TrialResult.from_document(rest[1])
                    found.append(Message("result", worker.name, worker.block, rest[0], result))
                else:
                    found.append(Message("done", worker.name, worker.block))
                    worker.block = None
        except (EOFError, OSError):
            worker.process.join(5.0)
            found.append(self._lost(worker, f"the worker's process ended (status {worker.process.exitcode})"))
        return found

    def _lost(self, worker: _Worker, why: str) -> Message:
        """End the worker for good and start another in its place."""
        block = worker.block
        if block is not None:
            block = block.without(block.numbers[: worker.reported])
        self._end(worker)
        self._workers[self._workers.index(worker)] = self._start(worker.device)
        return Message("lost", worker.name, block, why=why)

    @staticmethod
    def _end(worker: _Worker) -> None:
        with contextlib.suppress(OSError):
            worker.connection.close()
        worker.process.join(0.2)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join(10.0)

    def doing(self) -> list[str]:
        """A line a worker."""
        now = self._clock.monotonic()
        return [
            f"{worker.name}: " + (f"{worker.block.cell.name}, {now - worker.since:.1f} s" if worker.block is not None else "idle")
            for worker in self._workers
        ]

    def close(self) -> None:
        """Hang up; whoever is still at work after a moment is killed."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.close()
        for worker in self._workers:
            worker.process.join(2.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(10.0)
