"""The watchdog's eyes: one thread for each source, so that a source that is stuck blocks no other, and one that judges four times a
second.

A source's answer counts for as long as it is fresh; after that the source is blind and named, with for how long it has not answered
(a slow ``/metrics``, an NVML call inside a driver in trouble, a log on a dead network file system). All threads are daemons and
memory is bounded: a source keeps its newest answer and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...clock import SYSTEM, Clock
from ...errors import ReproError
from ...forensics.collect.nvml import Nvml
from .canary import Canary, CanaryAnswer, CanarySays
from .card_signals import CardReader
from .process_stat import world_size
from .rank_signals import RingReader
from .records import CARDS_GUESSED, Assessment, Blind, LoadSample, ServerTarget, Snapshot
from .renewal import Renewal
from .server_watchdog import ServerWatchdog
from .signals import LogReader, MetricsReader, ProcessReader
from .timed_source import FAILURES, Source
from .watch_limits import WatchLimits

if TYPE_CHECKING:  # what the other grounds need would stay in a watch of weeks
    from ..ground import Emit

__all__ = ["Load", "Observer", "Periods"]


class Load(Protocol):
    """Our own load, as the watchdog sees it (``drain_load.DrainLoad``)."""

    def sample(self) -> LoadSample: ...


@dataclass(frozen=True, slots=True)
class Periods:
    """How often each source is looked at, seconds. A scrape costs the server's API process about as much as it costs us."""

    judge: float = 0.25
    metrics: float = 1.0
    #: While nothing moves, so that a stand-still is not found a second late.
    metrics_still: float = 0.5
    log: float = 0.5
    rings: float = 0.25
    cards: float = 0.5
    #: While nothing moves: NVML's own figures change once a second, and a look more costs a millisecond.
    cards_still: float = 0.25
    processes: float = 0.5
    #: Whether it is due to look the server up again; that itself is ``renewal``'s to say.
    target: float = 0.5
    sample: float = 1.0
    #: A source that failed to be set up (no driver, no folder yet) is tried again so often.
    retry: float = 5.0
    #: NVML can start late, and trying costs a library load.
    retry_cards: float = 60.0


class Observer:
    """Watches ``target``. ``emit``: one line ``sample`` a second and one line ``state`` for each change, with reasons.

    ``exit_status``: the API process's, once it has ended, where it is our child. ``ask``: sends a canary completion (off without
    it). ``on_change``: called from the judging thread with each new state. ``renew``: looks the server up again (``renewal``);
    without it the processes and cards stay those of ``target``. A server that takes the place of one that ended is another
    observer's (``watch_loop``).
    """

    def __init__(
        self,
        target: ServerTarget,
        *,
        load: Load | None = None,
        emit: Emit | None = None,
        clock: Clock = SYSTEM,
        limits: WatchLimits | None = None,
        periods: Periods | None = None,
        exit_status: Callable[[], int | None] | None = None,
        ask: Callable[[float], CanaryAnswer] | None = None,
        canary_s: float = 30.0,
        on_change: Callable[[Snapshot, Assessment], None] | None = None,
        cards: bool = True,
        nvml: Callable[[], Nvml] = Nvml,
        renew: Callable[[ServerTarget], ServerTarget] | None = None,
        proc: Path = Path("/proc"),
    ) -> None:
        self._clock, self._emit = clock, emit
        #: Our own load; may be set and taken away while it runs.
        self.load = load
        self._periods = periods or Periods()
        self._watchdog = ServerWatchdog(limits)
        self._exit_status, self._on_change = exit_status, on_change
        self._use_cards, self._nvml, self._proc = cards, nvml, proc
        self._canary = Canary(ask, period_s=canary_s, clock=clock) if ask is not None else None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._latest: tuple[Snapshot, Assessment] | None = None
        self._moving = False
        self._remote = 0
        self._still = False
        self._cards_reader: CardReader | None = None
        self._log_reader: LogReader | None = None
        self._ring_reader: RingReader | None = None
        self._process_reader: ProcessReader | None = None
        self._renewal = Renewal(target, renew, clock=clock) if renew is not None else None
        self._next_sample = -1e9
        self.failures = 0
        self.target = target
        self._sources: dict[str, Source] = {}
        self._thread = threading.Thread(target=self._run, name="dsv4-repro-observer", daemon=True)

    # -- life ----------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin. May be called once."""
        self._begin_sources()
        if self._canary is not None:
            self._canary.start()
        self._thread.start()

    def latest(self) -> tuple[Snapshot, Assessment] | None:
        """The newest look and how the server stood; None before the first."""
        with self._lock:
            return self._latest

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End it. False if a reader is still inside a call (a daemon thread: it does not keep the process)."""
        self._stop.set()
        if self._canary is not None:
            self._canary.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return self._end_sources(timeout_s) and not self._thread.is_alive()

    def _begin_sources(self) -> None:
        self._cards_reader = self._log_reader = self._ring_reader = self._process_reader = None
        self._add_sources(self.target)
        renewal = self._renewal
        if renewal is not None:
            # It answers at once but for when it is due; a look at all of /proc and NVML may take two seconds.
            self._add("target", lambda: renewal.look, self._periods.target, 30.0)

    def _add(
        self, name: str, make: Callable[[], Callable[[], Any]], period: float, stale: float, retry: float | None = None
    ) -> None:
        source = Source(
            name, make, period_s=period, stale_s=stale, retry_s=retry or self._periods.retry, clock=self._clock
        )  # fmt: skip
        self._sources[name] = source
        source.start()

    def _add_sources(self, target: ServerTarget) -> None:
        """Begin with what can be read of it and is not read yet; readers that are at work go on with its newer processes."""
        periods, clock = self._periods, self._clock
        asked = world_size(target.api_pid, self._proc) if target.api_pid is not None and target.ranks else 0
        self._remote = max(asked - len(target.ranks), 0)
        if self._process_reader is None:
            self._process_reader = ProcessReader(target, clock=clock, proc=self._proc, exit_status=self._exit_status)
        else:
            self._process_reader.retarget(target)
        processes, known = self._process_reader, self._sources
        pids = processes.pids
        if target.base_url and "metrics" not in known:
            metrics = MetricsReader(target.base_url, timeout_s=2.0, clock=clock)
            self._add("metrics", lambda: metrics.look, periods.metrics, 3.0 * periods.metrics + 2.0)
        if target.log_path is not None and "log" not in known:
            log = self._log_reader = LogReader(target.log_path, clock=clock)
            self._add("log", lambda: log.look, periods.log, 6.0 * periods.log + 2.0)
        if self._ring_reader is not None:
            self._ring_reader.retarget(target.ranks, pids)
        elif target.agent_folder is not None:
            rings = self._ring_reader = RingReader(target.agent_folder, target.ranks, pids=pids, clock=clock, proc=self._proc)
            self._add("rings", lambda: rings.look, periods.rings, 2.0)
        seen = target.tree or target.ranks or target.api_pid is not None or target.engine_pids
        if seen and "processes" not in known:
            self._add("processes", lambda: lambda: processes.look(compilers=self._still), periods.processes, 3.0)
        if self._cards_reader is not None:
            self._cards_reader.retarget(target.ranks)
        elif self._use_cards and "NVML" not in known:
            # Its reader is made in its own thread, by then with what is known of the server.
            self._add("NVML", lambda: self._make_cards(self.target, processes), periods.cards, 2.5, periods.retry_cards)

    def _renew(self) -> None:
        """Go on with the server's processes and cards as they are now, where they were looked up again."""
        source = self._sources.get("target")
        found, _ = source.latest() if source is not None else (None, None)
        if found is None or found == self.target:
            return
        before, self.target = self.target, found
        self._add_sources(found)
        if found.ranks != before.ranks or found.engine_pids != before.engine_pids:
            ranks = [{"pid": rank.pid, "rank": rank.rank, "gpu": rank.gpu_index} for rank in found.ranks[:64]]
            self._say("workers", ranks=ranks, engines=list(found.engine_pids[:64]))

    def _end_sources(self, timeout_s: float) -> bool:
        sources, self._sources = list(self._sources.values()), {}
        for source in sources:
            source.stop()
        ended = [source.join(timeout_s / max(len(sources), 1)) for source in sources]
        names = {source.name: done for source, done in zip(sources, ended, strict=True)}
        if self._log_reader is not None and names.get("log"):
            self._log_reader.close()
        if self._cards_reader is not None and names.get("NVML"):
            self._cards_reader.close()
        return all(ended)

    def _make_cards(self, target: ServerTarget, processes: ProcessReader) -> Callable[[], Any]:
        reader = CardReader(target.ranks, lambda: processes.pids, nvml=self._nvml(), clock=self._clock)
        self._cards_reader = reader
        if self.target is not target:
            reader.retarget(self.target.ranks)  # renewed while the library was started

        def look() -> Any:
            reader.learn(self._moving)
            return reader.look()

        return look

    # -- looks ---------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        due = self._clock.monotonic()
        while not self._stop.is_set():
            try:
                self._once()
            except FAILURES as error:
                # Ours: counted and said, and the next look is made all the same.
                self.failures += 1
                if self.failures in (1, 10, 100, 1000):
                    self._say("observer failure", error=f"{type(error).__name__}: {error}"[:300], count=self.failures)
            due = max(due + self._periods.judge, self._clock.monotonic())
            self._stop.wait(max(due - self._clock.monotonic(), 0.01))

    def snapshot(self) -> Snapshot:
        """What all sources say now."""
        blind: list[Blind] = []
        values: dict[str, Any] = {}
        for name, source in list(self._sources.items()):
            values[name], why = source.latest()
            if why is not None:
                blind.append(why)
        if self._cards_reader is not None and self._cards_reader.guessed:
            blind.append(
                Blind(CARDS_GUESSED, "which cards the server computes on is not known: all that are visible are looked at")
            )
        canary = self._canary.says() if self._canary is not None else CanarySays()
        load: LoadSample | None = None
        ours = self.load
        if ours is not None:
            try:
                load = ours.sample()
            except FAILURES as error:
                blind.append(Blind("load", f"{type(error).__name__}: {error}"[:200]))
        return Snapshot(
            at=self._clock.monotonic(),
            engine=values.get("metrics"),
            log=values.get("log"),
            progress=values.get("rings") or (),
            devices=values.get("NVML") or (),
            processes=values.get("processes") or (),
            load=load,
            canary_age_s=canary.age_s,
            blind=tuple(blind),
            canary_waiting_s=canary.waiting_s,
            canary_error=canary.error,
            remote_ranks=self._remote,
        )

    def _once(self) -> None:
        self._renew()
        snapshot = self.snapshot()
        before = self._latest[1].state if self._latest is not None else None
        assessment = self._watchdog.observe(snapshot)
        movement = self._watchdog.movement
        self._moving = assessment.state == "healthy" and movement.moved_at is not None and snapshot.at - movement.moved_at < 1.2
        still, _ = movement.still()
        self._still = still >= 1.0 or assessment.state in ("starting", "suspect")
        stands = 1.0 <= still < 60.0
        if (metrics := self._sources.get("metrics")) is not None:
            metrics.every(self._periods.metrics_still if stands else self._periods.metrics)
        if (cards := self._sources.get("NVML")) is not None:
            cards.every(self._periods.cards_still if stands else self._periods.cards)
        if movement.moved and self._log_reader is not None and movement.moved_at is not None:
            self._log_reader.moved(movement.moved_at)
        with self._lock:
            self._latest = (snapshot, assessment)
        if self._renewal is not None:
            self._renewal.told(assessment.state)
        if assessment.state != before:
            self._say(
                "state",
                state=assessment.state,
                before=before,
                since_s=round(snapshot.at - assessment.since, 3),
                reasons=list(assessment.reasons)[:12],
                device_signals=list(assessment.device_signals)[:8],
                blind=[f"{entry.signal}: {entry.why}" for entry in assessment.blind][:24],
                level="bad" if assessment.state in ("hung", "crashed") else "info",
            )
            if self._on_change is not None:
                self._on_change(snapshot, assessment)
        if snapshot.at >= self._next_sample:
            self._next_sample = snapshot.at + self._periods.sample
            self._sample(snapshot, assessment)

    def _sample(self, snapshot: Snapshot, assessment: Assessment) -> None:
        fields: dict[str, Any] = {"state": assessment.state}
        engine = snapshot.engine
        if engine is not None and not engine.error:
            fields.update(generation_tokens=engine.generation_tokens, running=engine.running, waiting=engine.waiting)
        elif snapshot.load is not None:
            fields.update(tokens=snapshot.load.tokens, live=snapshot.load.open)
        fields["gpus"] = [
            {
                "gpu": sample.index,
                "utilisation": sample.utilisation,
                "memory_utilisation": sample.memory_utilisation,
                "power_w": sample.power_w,
            }
            for sample in snapshot.devices[:64]
        ]
        if snapshot.progress:
            fields["begun"] = [progress.begun for progress in snapshot.progress[:64]]
        self._say("sample", **{key: value for key, value in fields.items() if value is not None})

    def _say(self, kind: str, **fields: Any) -> None:
        if self._emit is None:
            return
        try:
            self._emit(kind, **fields)
        except (ReproError, OSError):
            # A full disk must not blind the watchdog; whoever owns the timeline says so.
            self.failures += 1
