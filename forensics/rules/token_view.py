"""Do tokens flow? From the engine's stats lines and from counters in two scrapes.

A single line with zero says little; a run of lines, a silence between lines, or two scrapes say more. A gauge of 0 running requests
is not proof of idleness: an engine that is stuck on the CPU stops publishing (vllm-project/vllm#49210).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from ..evidence.facts import MetricSample, StatsLine
from ..evidence.refs import Ref

if TYPE_CHECKING:
    from .view import View

__all__ = ["StatsRun", "TokenFlow", "line_state", "token_flow"]

_COUNTERS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_sum",
    "vllm:iteration_tokens_total_count",
             "vllm:request_success_total", "sglang:generation_tokens_total", "vllm:generation_tokens",
             "vllm:prompt_tokens")  # fmt: skip
_SILENCE = 45.0


@dataclass(frozen=True, slots=True)
class StatsRun:
    """The last stretch of stats lines of one engine with the same state: flowing, frozen, admission, idle; silent: it flowed, then
    only waiting lines came.
    """

    engine: str
    state: str
    lines: int
    seconds: float | None
    first: StatsLine
    last: StatsLine


@dataclass(frozen=True, slots=True)
class TokenFlow:
    """``stats``: the last stretch of each engine. ``counters``: moving, frozen, unplaced (they moved, and the log ends in a
    stand-still: when they moved is not known) or None. ``running``, ``waiting``, ``kv``: newest.

    ``stalls``: silences or frozen stretches after which tokens flowed again (first line, last line, seconds).
    ``idle_counters``: two scrapes equal with nothing running and nothing waiting.
    """

    stats: tuple[StatsRun, ...]
    counters: str | None
    counter_refs: tuple[Ref, ...]
    running: float | None
    waiting: float | None
    capacity: float | None
    deferred: float | None
    kv: float | None
    preemptions: tuple[float, float] | None
    gauge_refs: tuple[Ref, ...]
    stalls: tuple[tuple[StatsLine, StatsLine, float], ...]
    scrapes: int

    @property
    def frozen(self) -> bool:
        """Requests run and no token comes."""
        if self.counters == "frozen" and (self.running or 0) > 0:
            return True
        return any(run.state in ("frozen", "silent") for run in self.stats) and self.counters != "moving"

    @property
    def moving(self) -> bool:
        if self.counters in ("moving", "frozen"):
            return self.counters == "moving"
        return bool(self.stats) and all(run.state == "flowing" for run in self.stats)

    @property
    def refs(self) -> tuple[Ref, ...]:
        own = [ref for run in self.stats for ref in (run.first.ref, run.last.ref)]
        return tuple(dict.fromkeys([*self.counter_refs, *own]))


def line_state(line: StatsLine) -> str:
    if line.generation_rate > 0 or line.prompt_rate > 0:
        return "flowing"
    if line.running > 0:
        return "frozen"
    return "admission" if line.waiting > 0 else "idle"


def _runs(view: View) -> tuple[tuple[StatsRun, ...], list[tuple[StatsLine, StatsLine, float]]]:
    engines: dict[str, list[StatsLine]] = {}
    for line in view.case.stats:
        engines.setdefault(line.engine, []).append(line)
    runs: list[StatsRun] = []
    stalls: list[tuple[StatsLine, StatsLine, float]] = []
    for engine, lines in engines.items():
        times = [view.time(line) for line in lines]
        if all(t is not None for t in times) and len({line.ref.source for line in lines}) > 1:
            order = sorted(range(len(lines)), key=lambda i: times[i] or 0.0)
            lines, times = [lines[i] for i in order], [times[i] for i in order]
        state = line_state(lines[-1])
        start = len(lines) - 1
        while start > 0 and line_state(lines[start - 1]) == state:
            start -= 1
        begin, end = times[start], times[-1]
        runs.append(
            StatsRun(
                engine,
                state,
                len(lines) - start,
                end - begin if begin is not None and end is not None else None,
                lines[start],
                lines[-1],
            )
        )
        gaps = [b - a for a, b in pairwise(times) if a is not None and b is not None and b > a]
        usual = median(gaps) if len(gaps) > 3 else 10.0
        at = 0
        while at < len(lines) - 1:
            here, after = lines[at], lines[at + 1]
            a, b = times[at], times[at + 1]
            gap = b - a if a is not None and b is not None else 0.0
            if gap > max(_SILENCE, 3.5 * usual) and (here.running or here.waiting) and line_state(after) == "flowing":
                stalls.append((here, after, gap))
            if line_state(here) == "frozen":
                until = at
                while until < len(lines) and line_state(lines[until]) == "frozen":
                    until += 1
                if until < len(lines) and line_state(lines[until]) == "flowing":
                    c = times[until]
                    stalls.append((here, lines[until], c - a if a is not None and c is not None else 0.0))
                at = max(until - 1, at)
            at += 1
    return tuple(runs), stalls


def _newest(view: View, name: str, **labels: str) -> tuple[float | None, list[Ref]]:
    total, refs = None, []
    for samples in view.metric(name, **labels):
        total = (total or 0.0) + samples[-1].value
        refs.append(samples[-1].ref)
    return total, refs


def _engine(samples: list[MetricSample]) -> str:
    return dict(samples[0].labels).get("engine", "")


def _counters(view: View) -> tuple[str | None, list[Ref]]:
    """Token counters between the last two scrapes. One engine of several that runs requests and counts nothing is frozen; a counter
    that fell belongs to a restarted server and says nothing."""
    moved: dict[str, bool] = {}
    refs: list[Ref] = []
    for name in _COUNTERS:
        for samples in view.metric(name):
            if len(samples) < 2 and view.case.metrics_repeat is None:
                continue
            engine = _engine(samples)
            refs.extend((samples[0].ref, samples[-1].ref))
            if len(samples) < 2:
                moved[engine] = moved.get(engine, False) or view.case.metrics_repeat == "moved"
            elif samples[-1].value >= samples[0].value:
                # The last two decide: an old movement does not help.
                moved[engine] = moved.get(engine, False) or samples[-1].value > samples[-2].value
    if not moved:
        return None, refs
    running: dict[str, float] = {}
    for samples in view.metric("vllm:num_requests_running"):
        running[_engine(samples)] = running.get(_engine(samples), 0.0) + samples[-1].value
    if any(not has_moved and running.get(engine, 0.0) > 0 for engine, has_moved in moved.items()):
        return "frozen", refs
    return ("moving" if any(moved.values()) else "frozen"), refs


def _silenced(view: View, run: StatsRun) -> StatsRun:
    """Requests were running when the engine printed its last line, and later lines say that it waits: it fell silent."""
    if run.state != "flowing" or run.last.running == 0:
        return run
    later = [e for e in view.symptoms if e.kind in ("shm-wait", "rpc-timeout", "fatal") and view.before(run.last, e)]
    return replace(run, state="silent") if later else run


def token_flow(view: View) -> TokenFlow:
    found_runs, stalls = _runs(view)
    runs = tuple(_silenced(view, run) for run in found_runs)
    counters, refs = _counters(view)
    if counters == "moving" and any(run.state in ("frozen", "silent") for run in runs):
        # A scrape carries no time: one from before the stand-still and one from within it differ too. The log's last word stands.
        counters = "unplaced"
    repeats = 2 if view.case.metrics_repeat is not None else 1
    running, running_refs = _newest(view, "vllm:num_requests_running")
    waiting, waiting_refs = _newest(view, "vllm:num_requests_waiting")
    capacity, capacity_refs = _newest(view, "vllm:num_requests_waiting_by_reason", reason="capacity")
    deferred, deferred_refs = _newest(view, "vllm:num_requests_waiting_by_reason", reason="deferred")
    kv, kv_refs = _newest(view, "vllm:kv_cache_usage_perc")
    if kv is not None:
        kv *= 100
    preemptions: tuple[float, float] | None = None
    for samples in view.metric("vllm:num_preemptions_total"):
        if len(samples) > 1:
            preemptions = (samples[0].value, samples[-1].value)
            refs.extend((samples[0].ref, samples[-1].ref))
    newest = [run.last for run in runs]
    if running is None and newest:
        running = float(sum(line.running for line in newest))
        waiting = float(sum(line.waiting for line in newest))
        found = [line.kv for line in newest if line.kv is not None]
        kv = max(found) if found and kv is None else kv
        listed = [line.deferred for line in newest if line.deferred is not None]
        deferred = float(sum(listed)) if listed and deferred is None else deferred
        running_refs = [line.ref for line in newest]
    gauges = tuple(dict.fromkeys([*running_refs, *waiting_refs, *capacity_refs, *deferred_refs, *kv_refs]))
    return TokenFlow(
        runs, counters, tuple(dict.fromkeys(refs)), running, waiting, capacity, deferred, kv, preemptions, gauges, tuple(stalls),
        max(view.case.scrapes * repeats, view.case.scrapes),
    )  # fmt: skip
