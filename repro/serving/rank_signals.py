"""The workers' flight recorders as ``RankProgress``: the newest slots of each ring, several times a second. Reads files only."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ...clock import SYSTEM, Clock
from ...errors import EvidenceError
from ..recorder import RecordedStep, RingContents, read_newest
from .process_stat import start_ticks
from .records import Rank, RankProgress

__all__ = ["RingReader"]

_MOST_FILES = 4096
_MOST_RINGS = 1024
#: Slots of a ring that a look reads; all that can be open where none of the first has ended.
_NEWEST, _MORE = 8, 80
_LIST_S = 2.0


class _Durations:
    """How long steps of one graph mode took from launch to end; the ninth tenth, so that one released hang teaches nothing."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=256)

    def add(self, seconds: float) -> None:
        self._times.append(seconds)

    @property
    def longest(self) -> float | None:
        if not self._times:
            return None
        ordered = sorted(self._times)
        # Of few, a single long one may be a hang that was released: it does not count for more than a slow step.
        value = ordered[int(0.9 * (len(ordered) - 1))]
        return value if len(ordered) >= 5 else min(value, 5.0)


class RingReader:
    """Of the rings in ``folder`` whose process is alive here: those of the server's ``ranks``; while none is known, those of its
    processes ``pids``; all, where no process of it is known either. Servers of one user share a folder.

    A ring of a dead process is left out: its last step never ended, and that means nothing.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Sequence[Rank] = (),
        *,
        pids: Collection[int] = (),
        clock: Clock = SYSTEM,
        proc: Path = Path("/proc"),
    ) -> None:
        self._folder = folder
        self._ranks: Mapping[int, Rank] = {}
        self._own: frozenset[int] = frozenset()
        self._clock = clock
        self._proc = proc
        self._listed = -1e9
        self._listed_for: frozenset[int] | None = None
        self._paths: dict[int, tuple[Path, int]] = {}
        self._strangers = 0
        self._seen: dict[int, int] = {}
        self._healthy: dict[tuple[int, str], _Durations] = {}
        self.retarget(ranks, pids)

    def retarget(self, ranks: Sequence[Rank], pids: Collection[int] = ()) -> None:
        """The server's processes as they are known now, from any thread; what was learnt of a ring that stays is kept."""
        self._ranks = {rank.pid: rank for rank in ranks}
        self._own = frozenset(self._ranks or pids)

    def look(self) -> tuple[RankProgress, ...]:
        """One progress for each ring, by pid. Raises EvidenceError: no such folder, or no ring of a process that is alive here."""
        now = self._clock.monotonic()
        own = self._own  # another thread may replace them while the folder is listed
        if own != self._listed_for or now - self._listed >= _LIST_S:
            self._list(own)
            self._listed, self._listed_for = now, own
        found = [self._one(pid, path) for pid, (path, _) in sorted(self._paths.items())]
        if not found:
            why = "holds rings, none of a process that is alive here" if self._strangers else "holds no ring yet"
            raise EvidenceError(why, path=str(self._folder), help_text="Is the server started with DSV4_REPRO_AGENT=1?")
        return tuple(found)

    def _list(self, own: frozenset[int]) -> None:
        try:
            names = [path.name for path in self._folder.iterdir()][:_MOST_FILES]
        except OSError as error:
            raise EvidenceError(f"cannot be read: {error.strerror or error}", path=str(self._folder)) from None
        paths: dict[int, tuple[Path, int]] = {}
        self._strangers = 0
        for name in names:
            if not (name.startswith("ring-") and name.endswith(".bin")):
                continue
            parts = name[5:-4].split("-")
            if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
                continue
            pid, start = int(parts[0]), int(parts[1])
            alive = start_ticks(pid, self._proc)
            if alive is None or (start and alive != start) or (own and pid not in own):
                self._strangers += 1
                continue
            if len(paths) < _MOST_RINGS:
                paths[pid] = (self._folder / name, start)
        self._paths = paths
        for pid in [pid for pid in self._seen if pid not in paths]:
            del self._seen[pid]
        for key in [key for key in self._healthy if key[0] not in paths]:
            del self._healthy[key]

    def _one(self, pid: int, path: Path) -> RankProgress:
        try:
            contents = read_newest(path, _NEWEST)
            if contents.header.begun > _NEWEST and not any(step.finished for step in contents.steps):
                contents = read_newest(path, _MORE)
        except EvidenceError as error:
            return RankProgress(pid=pid, at=self._clock.monotonic(), error=str(error))
        now = self._clock.monotonic()
        if not contents.header.armed:
            return RankProgress(pid=pid, at=now, rank=contents.header.rank, error="its recorder is switched off")
        self._learn(pid, contents)
        return self._progress(pid, contents, now)

    def _learn(self, pid: int, contents: RingContents) -> None:
        last = self._seen.get(pid, 0)
        if contents.header.begun < last:
            last = 0
        before = 0
        for step in contents.steps:
            # The event is asked for at the next step's begin or within a tenth of a second: the output may have come before.
            ends = [time for time in (step.complete_ns, step.output_ns) if time is not None]
            if not ends or step.launch_ns is None:
                continue
            end = min(ends)
            if step.number > last:
                # What was launched behind a slow step waited for it: its own time begins when the one before ended.
                begin = max(step.launch_ns, before)
                self._healthy.setdefault((pid, step.graph_mode), _Durations()).add(max(end - begin, 0) / 1e9)
                last = step.number
            before = end
        self._seen[pid] = last

    def _progress(self, pid: int, contents: RingContents, now: float) -> RankProgress:
        header = contents.header
        oldest = contents.unfinished[0] if contents.unfinished else None
        newest = contents.steps[-1] if contents.steps else None
        launching = newest is not None and newest.number == header.begun and newest.launch_ns is None
        healthy = self._healthy.get((pid, oldest.graph_mode)) if oldest is not None else None
        known = self._ranks.get(pid)
        return RankProgress(
            pid=pid,
            at=now,
            rank=known.rank if known is not None and known.rank is not None else (header.rank if header.rank >= 0 else None),
            begun=header.begun,
            last_end_age_s=_age(now, contents.last_progress_ns),
            unfinished=tuple(step.number for step in contents.unfinished),
            unfinished_age_s=_age(now, _began(oldest, contents)) if oldest is not None else None,
            requests=oldest.requests if oldest is not None else None,
            padded_requests=oldest.padded_requests if oldest is not None else None,
            graph_mode=oldest.graph_mode if oldest is not None else "unknown",
            decode_min=oldest.decode_min if oldest is not None else None,
            releases=header.releases,
            tokens=oldest.tokens if oldest is not None else None,
            launching_age_s=_age(now, newest.begin_ns) if launching and newest is not None else None,
            healthy_s=healthy.longest if healthy is not None else None,
            heard_age_s=_age(now, header.heard_ns or None),
            device=known.gpu_index if known is not None else None,
        )


def _began(step: RecordedStep, contents: RingContents) -> int | None:
    """When the device could begin with the step: at its launch, or at the end of the one before."""
    if step.launch_ns is None:
        return None
    return max(step.launch_ns, contents.last_progress_ns or 0)


def _age(now: float, ns: int | None) -> float | None:
    return None if ns is None else max(now - ns / 1e9, 0.0)
