"""What of a server moves, and how long each source has been *seen* standing. Pure: snapshots in, numbers out.

Time here is watched time: across a gap between two looks (the machine slept, we were stopped, the clock jumped) every source starts
anew, so nothing is ever found to stand still while nobody looked. A source counts as standing only by readings that are newer than
its last movement: an old reading repeated says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .records import EngineSample, RankProgress, Snapshot

__all__ = ["Movement", "Standing"]

_COUNTERS = ("generation_tokens", "prompt_tokens", "iterations", "preemptions", "drafted", "accepted")
#: Not work done, but published by the engine's loop: a change shows that it turns.
_PUBLISHED = ("running", "waiting", "kv_usage")
#: So many scrapes that lack what the one before had: then that is how it is.
_MOST_TORN = 10


@dataclass(slots=True)
class Standing:
    """One source: watched time of its last movement, of its newest reading, and how many readings since the movement."""

    moved: float
    seen: float
    looks: int = 0

    def look(self, now: float, *, moved: bool) -> None:
        if moved:
            self.moved, self.looks = now, 0
        else:
            self.looks += 1
        self.seen = now

    @property
    def still_s(self) -> float:
        """How long it was seen standing."""
        return self.seen - self.moved


class Movement:
    """Of one server. ``now``: watched time. ``moved_at``: the clock's time of the last movement of any source, None: never seen.

    ``restarted``: the last look saw counters fall back. ``torn``: the last scrape lacked figures of the one before. ``preempted``:
    preemptions since tokens last moved. ``gap_s``: how long nobody had looked before the last look, 0 if as usual.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self._gap = longest_gap_s
        self._at: float | None = None
        self.gap_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Another server: nothing is known."""
        self.now = 0.0
        self.moved_at: float | None = None
        self.moved = False
        self.restarted = False
        self.engine: Standing | None = None
        self.loop: Standing | None = None
        self.tokens: Standing | None = None
        self.load: Standing | None = None
        self.stats: Standing | None = None
        self.rings: dict[int, Standing] = {}
        self.engines: dict[str, Standing] = {}
        self.engines_running: dict[str, float] = {}
        self.wanted_since: float | None = None
        self.preempted = 0.0
        self._last_engine: EngineSample | None = None
        self.torn = False
        self._torn = 0
        self._torn_at = -1.0
        self._last_by: dict[str, tuple[float | None, ...]] = {}
        self._last_load = 0
        self._load_open = False
        self._last_stats: float | None = None
        self._marks: dict[int, tuple[int, float, tuple[int, ...]]] = {}

    def observe(self, snapshot: Snapshot) -> None:
        step = 0.0 if self._at is None else max(snapshot.at - self._at, 0.0)
        self._at = snapshot.at if self._at is None else max(self._at, snapshot.at)
        self.gap_s = step if step > self._gap else 0.0
        if self.gap_s:
            self._start_anew()
        else:
            self.now += step
        self.moved = self.restarted = False
        times: list[float] = []
        self._engine(snapshot.engine, times)
        for progress in snapshot.progress:
            self._ring(progress, times)
        alive = {progress.pid for progress in snapshot.progress}
        for pid in [pid for pid in self.rings if pid not in alive]:
            del self.rings[pid], self._marks[pid]
        load = snapshot.load
        if load is not None:
            moved = load.tokens > self._last_load
            if self.load is None:
                self.load = Standing(self.now, self.now)
            else:
                self.load.look(self.now, moved=moved)
            if moved:
                times.append(snapshot.at - (load.last_token_age_s or 0.0))
            self._last_load = load.tokens
        self._load_open = load is not None and load.open > 0
        self._log(snapshot, times)
        if times:
            self.moved = True
            self.moved_at = max(max(times), self.moved_at or max(times))

    def _start_anew(self) -> None:
        known = (self.engine, self.loop, self.tokens, self.load, self.stats, *self.rings.values(), *self.engines.values())
        for standing in known:
            if standing is not None:
                standing.look(self.now, moved=True)
        if self.wanted_since is not None:
            self.wanted_since = self.now

    def _engine(self, engine: EngineSample | None, times: list[float]) -> None:
        if engine is None or engine.error:
            return
        last = self._last_engine
        if last is not None and engine.at <= last.at:
            return
        if last is not None and not _comparable(last, engine) and self._torn < _MOST_TORN:
            if engine.at > self._torn_at:
                self._torn_at = engine.at
                self._torn += 1
            self.torn = True
            return
        if self._torn >= _MOST_TORN:
            # It stays so: the server really tells less, or has fewer engines.
            last = None
        self._torn, self.torn = 0, False
        self._last_engine = engine
        now = self.now
        if last is None or self.engine is None or self.loop is None or self.tokens is None:
            self.engine, self.loop, self.tokens = Standing(now, now), Standing(now, now), Standing(now, now)
            self._by_engine(engine)
            return
        changes = {name: _change(getattr(last, name), getattr(engine, name)) for name in (*_COUNTERS, *_PUBLISHED)}
        self.restarted = any(changes[name] < 0 for name in ("generation_tokens", "prompt_tokens", "iterations"))
        tokens = changes["generation_tokens"] > 0 or changes["prompt_tokens"] > 0
        counters = any(changes[name] > 0 for name in _COUNTERS)
        turned = counters or any(changes[name] != 0 for name in _PUBLISHED)
        self.tokens.look(now, moved=tokens)
        self.preempted = 0.0 if tokens else self.preempted + max(changes["preemptions"], 0.0)
        self.engine.look(now, moved=counters)
        self.loop.look(now, moved=turned)
        if turned:
            times.append(engine.at)
        self._by_engine(engine)

    def _by_engine(self, engine: EngineSample) -> None:
        self.engines_running = {}
        for name, own in list(engine.by_engine.items())[:256]:
            mark = (own.generation_tokens, own.iterations, own.kv_usage, own.running)
            if name not in self.engines:
                self.engines[name] = Standing(self.now, self.now)
            else:
                self.engines[name].look(self.now, moved=mark != self._last_by.get(name))
            self._last_by[name] = mark
            self.engines_running[name] = own.running or 0.0
        for name in [name for name in self.engines if name not in engine.by_engine]:
            del self.engines[name]
            self._last_by.pop(name, None)

    def _ring(self, progress: RankProgress, times: list[float]) -> None:
        if progress.error:
            return
        ended = progress.at - progress.last_end_age_s if progress.last_end_age_s is not None else -1.0
        mark = (progress.begun, ended, progress.unfinished)
        last = self._marks.get(progress.pid)
        self._marks[progress.pid] = mark
        if last is None or progress.pid not in self.rings:
            self.rings[progress.pid] = Standing(self.now, self.now)
            if ended >= 0 and self.moved_at is None:
                # Before we came: when it last moved is known all the same.
                self.moved_at = ended
            return
        moved = progress.begun != last[0] or ended > last[1] + 0.01 or progress.unfinished != last[2]
        self.rings[progress.pid].look(self.now, moved=moved)
        if moved:
            times.append(max(ended, progress.at - (progress.unfinished_age_s or 0.0)) if ended >= 0 else progress.at)

    def _log(self, snapshot: Snapshot, times: list[float]) -> None:
        log = snapshot.log
        if log is None or log.error or log.stats_age_s is None:
            return
        written = log.at - log.stats_age_s
        fresh = self._last_stats is None or written > self._last_stats + 0.5
        first = self._last_stats is None
        if self.stats is None:
            self.stats = Standing(self.now, self.now)
        self.stats.look(self.now, moved=fresh and not first and (log.stats_tokens_per_s or 0.0) > 0)
        if fresh:
            self._last_stats = written
        # A stats line covers the ten seconds before it: it counts as movement where nothing better is read.
        if fresh and not first and (log.stats_tokens_per_s or 0.0) > 0 and self.engine is None and not self.rings:
            times.append(written)

    def wanted(self, demand: bool) -> None:
        """Whether there is anything to do, as of the last look: standing counts from the moment that there is."""
        if not demand:
            self.wanted_since = None
        elif self.wanted_since is None:
            self.wanted_since = self.now

    def still(self, *, tokens_only: bool = False) -> tuple[float, str]:
        """How long, with work to do, nothing at all was seen to move (seconds of watched time), and by which sources. 0 if nothing
        that could be seen stands, or no source says anything.
        """
        sources: list[tuple[Standing, str]] = []
        if self.loop is not None and self.tokens is not None:
            sources.append((self.tokens, "token counters") if tokens_only else (self.loop, "engine counters"))
        if self.load is not None and self._load_open:
            sources.append((self.load, "tokens at our client"))
        if not sources and self.stats is not None:
            sources.append((self.stats, "stats lines of the log"))
        if not sources:
            return 0.0, ""
        begun = self.wanted_since if self.wanted_since is not None else self.now
        moved = max([begun, *(source.moved for source, _ in sources)])
        if not tokens_only:
            moved = max([moved, *(ring.moved for ring in self.rings.values())])
        # The newest of them decides how far the stand-still was seen.
        seen = max(source.seen for source, _ in sources)
        return max(seen - moved, 0.0), " and ".join(name for _, name in sources)

    def standing_engines(self) -> Mapping[str, float]:
        """Engines with running requests -> how long their own figures were seen standing."""
        begun = self.wanted_since if self.wanted_since is not None else self.now
        return {
            name: max(standing.seen - max(standing.moved, begun), 0.0)
            for name, standing in self.engines.items()
            if self.engines_running.get(name, 0.0) > 0
        }


def _comparable(last: EngineSample, new: EngineSample) -> bool:
    """Whether both tell the same figures of the same engines. A part of an exposition looks like counters that fell or stand."""
    if any(getattr(last, name) is not None and getattr(new, name) is None for name in ("generation_tokens", "iterations")):
        return False
    if set(last.by_engine) - set(new.by_engine):
        return False
    return not any(
        last.by_engine[name].generation_tokens is not None and new.by_engine[name].generation_tokens is None
        for name in last.by_engine
    )


def _change(before: float | None, after: float | None) -> float:
    return 0.0 if before is None or after is None else float(after) - float(before)
