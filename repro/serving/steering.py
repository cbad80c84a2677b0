"""Steers one wave of the load into the windows it aims at, and says how each was reached. Pure: observations in, decisions out.

A window is reached as
- *measured*: a flight recorder's ring holds a step with exactly that many requests, padded to exactly that graph, with as many
  decode slots of length zero as there are padded requests;
- *computed*: the engine's own counters show iterations while exactly so many requests ran (``running`` equal in two readings,
  nothing waiting, nothing finished in between, tokens drafted if and only if the plan says MTP), and exactly so many of our streams
  were open; the graph is computed;
- *inferred*: as many run and are open, and nothing has moved since: whether a step of that size was launched is not known. Or,
  where nothing is known of the engine: tokens came on exactly so many open streams; who else ran is not known. **Not** reached;
- *not reached* otherwise.

With MTP a request takes 1 to next_n tokens a step, so who leaves when is not known beforehand. Corrections: where those to
stay would outlast the others by too little, the others are cancelled; a held-back request replaces one that left too early; a
planned cancellation waits for the window. While tokens have stopped nothing is touched: the engine may be wedged, and that is the
evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..recorder import RecordedStep
from .aims import Aim
from .load_plan import Wave
from .records import EngineSample

__all__ = ["Decision", "Observation", "Reached", "StreamView", "WaveSteering", "WindowCount", "count_windows", "step_in_window"]

Reached = Literal["measured", "computed", "inferred", "not reached"]
_ORDER: tuple[Reached, ...] = ("not reached", "inferred", "computed", "measured")
#: Without a token for so long nothing is cancelled or released, seconds.
STALL_S = 1.0
#: A cancellation reaches the engine within this, seconds; until then requests go on producing tokens.
REACTION_S = 0.5
#: Standing still for so long, with the aimed number running, is said as inferred, seconds.
STANDS_S = 2.0


@dataclass(frozen=True, slots=True)
class StreamView:
    """One request as the client sees it. ``fault``: it ended by a client fault."""

    id: str
    state: Literal["held", "due", "sent", "streaming", "ended"]
    tokens: int
    max_tokens: int
    cancel_after: int | None = None
    fault: bool = False

    @property
    def left(self) -> int:
        """Tokens still to come."""
        return self.max_tokens - self.tokens

    @property
    def open(self) -> bool:
        """Sent and not ended."""
        return self.state in ("sent", "streaming")


@dataclass(frozen=True, slots=True)
class Observation:
    """One look. ``engine``: a new reading of the counters, None if there is none; ``steps``: ring steps not shown before."""

    at: float
    streams: tuple[StreamView, ...]
    last_token_at: float | None = None
    engine: EngineSample | None = None
    steps: Sequence[RecordedStep] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do: ids to cancel, to send now, and whose planned cancellation waits; and why."""

    cancel: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    extend: tuple[str, ...] = ()
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WindowCount:
    """How often and how surely a window was reached. ``steps``: ring steps, else iterations by the counters. ``text``: in words."""

    aim: Aim
    how: Reached
    waves: int
    steps: int
    text: str

    @property
    def reached(self) -> bool:
        """Measured or computed."""
        return self.how in ("measured", "computed")


@dataclass
class _Window:
    aim: Aim
    ring_steps: int = 0
    iterations: int = 0
    stood_s: float = 0.0
    client_steps: int = 0
    without_iterations: bool = False

    @property
    def how(self) -> Reached:
        if self.ring_steps:
            return "measured"
        if self.iterations:
            return "computed"
        return "inferred" if self.stood_s >= STANDS_S or self.client_steps else "not reached"

    @property
    def satisfied(self) -> bool:
        return max(self.ring_steps, self.iterations, self.client_steps) >= self.aim.steps


def step_in_window(step: RecordedStep, aim: Aim) -> bool:
    """A recorded step shows this window: the requests, and the padding measured on both sides (sizes, and slots of length
    zero; without MTP no length is expanded and the sizes alone do)."""
    if step.requests != aim.live:
        return False
    if step.tokens is not None and step.tokens != aim.rows:
        return False
    if step.next_n is not None and step.next_n != aim.mtp + 1:
        return False
    if aim.graph_rows is None:
        return step.graph_mode in ("none", "piecewise")
    if step.graph_mode != "full" or step.padded_requests != aim.live + aim.padded_requests:
        return False
    if step.padded_tokens is not None and step.padded_tokens != aim.graph_rows:
        return False
    return step.decode_zero == aim.padded_requests or (step.decode_zero is None and (aim.mtp == 0 or aim.padded_requests == 0))


@dataclass
class WaveSteering:
    """The steering of one wave: feed it observations in order."""

    wave: Wave
    mtp: int
    _windows: list[_Window] = field(default_factory=list)
    _before: EngineSample | None = None
    _engine_seen: bool = False
    _open: frozenset[str] = frozenset({""})
    _open_since: float = 0.0
    _open_tokens: dict[str, int] = field(default_factory=dict)
    _rate_from: tuple[float, int] | None = None
    _rate: float = 0.0
    _faults: int = 0
    _token_at_fault: float | None = None

    def __post_init__(self) -> None:
        self._windows = [_Window(aim) for aim in sorted(self.wave.aims, key=lambda aim: -aim.live)]

    def observe(self, seen: Observation) -> Decision:
        """Take one look into account and say what to do."""
        tokens = {stream.id: stream.tokens for stream in seen.streams if stream.open}
        if tokens.keys() != self._open:
            self._open, self._open_since, self._open_tokens = frozenset(tokens), seen.at, tokens
        for step in seen.steps:
            for one in self._windows:
                one.ring_steps += step_in_window(step, one.aim)
        self._engine_seen |= bool(seen.steps) or (seen.engine is not None and seen.engine.running is not None)
        if seen.engine is not None:
            self._read(seen.engine, len(tokens), seen.last_token_at)
        self._read_client(tokens)
        self._measure_rate(seen)
        return self._decide(seen)

    def windows(self) -> tuple[WindowCount, ...]:
        """Every aim of the wave with how it was reached, largest first."""
        return tuple(_counted(one, self._engine_seen) for one in self._windows)

    @property
    def satisfied(self) -> bool:
        """Every window that the wave must reach has been."""
        return all(one.satisfied for one in self._windows if one.aim.required)

    def _read(self, now: EngineSample, live: int, last_token_at: float | None) -> None:
        """Compare two readings of the counters; each window gets what happened between them, if it held in both."""
        before, self._before = self._before, now
        if before is None or now.at <= before.at:
            return
        for one in self._windows:
            if now.running != one.aim.live or live != one.aim.live:
                one.stood_s = 0.0
                continue
            steady = before.running == now.running and before.waiting == now.waiting == 0  # None: not exported, not none
            moved = _grown(before.generation_tokens, now.generation_tokens)
            same = before.finished == now.finished and before.preemptions == now.preemptions
            if now.drafted is not None and moved and (_grown(before.drafted, now.drafted) > 0) != (one.aim.mtp > 0):
                continue
            if not steady or not same or self._open_since > before.at - before.took_s:
                continue
            iterations = _grown(before.iterations, now.iterations)
            if now.iterations is None and moved:
                iterations, one.without_iterations = 1, True
            if iterations and moved:
                one.iterations += iterations
                one.stood_s = 0.0
            elif not iterations and not moved and (last_token_at is None or last_token_at < before.at):
                one.stood_s += now.at - before.at

    def _read_client(self, tokens: dict[str, int]) -> None:
        """Without a word from the engine: steps that the tokens of exactly these streams need, less two that were under way."""
        for one in self._windows:
            if self._engine_seen:
                one.client_steps = 0
            elif len(tokens) == one.aim.live:
                least = min(tokens[name] - self._open_tokens[name] for name in tokens)
                one.client_steps = max(one.client_steps, least // (self.mtp + 1) - 2)

    def _measure_rate(self, seen: Observation) -> None:
        """Tokens a second of one stream: the fastest open one, over at least 0.2 s."""
        most = max((stream.tokens for stream in seen.streams if stream.open), default=0)
        if self._rate_from is None or most < self._rate_from[1]:
            self._rate_from = (seen.at, most)
        elif seen.at - self._rate_from[0] >= 0.2:
            self._rate = (most - self._rate_from[1]) / (seen.at - self._rate_from[0])
            self._rate_from = (seen.at, most)

    def _decide(self, seen: Observation) -> Decision:
        if seen.last_token_at is None:
            return Decision()  # prefill: nothing to correct yet
        aim = next((one.aim for one in self._windows if one.aim.required and not one.satisfied), None)
        open_ = [stream for stream in seen.streams if stream.open]
        stalled = bool(open_) and seen.at - seen.last_token_at > STALL_S
        if stalled:
            return Decision(why=(f"no token for {STALL_S:g} s: nothing is changed while the engine may be wedged",))
        live = len(open_)
        cancel: dict[str, None] = {}
        extend: dict[str, None] = {}
        why: list[str] = []
        for stream in sorted(open_, key=lambda one: one.left):
            if stream.cancel_after is not None and stream.tokens >= stream.cancel_after:
                if aim is not None and live - len(cancel) <= aim.live:
                    extend[stream.id] = None
                else:
                    cancel[stream.id] = None
        if extend and aim is not None:
            why.append(f"cancellation waits until {aim.live} live requests have been seen")
        release: tuple[str, ...] = ()
        if aim is not None:
            staying = [stream for stream in open_ if stream.id not in cancel]
            if len(staying) > aim.live:
                leaving = self._outlasted(staying, aim)
                cancel.update(dict.fromkeys(leaving))
                if leaving:
                    why.append(f"{len(leaving)} cancelled: the last {aim.live} would not outlast them by {aim.steps} steps")
            elif len(staying) < aim.live:
                release = self._replacements(seen, aim, aim.live - len(staying))
                if release:
                    why.append(f"{len(release)} sent: {len(staying)} live, {aim.live} aimed at")
        return Decision(tuple(cancel), release, tuple(extend), tuple(why))

    def _outlasted(self, staying: Sequence[StreamView], aim: Aim) -> list[str]:
        """Ids to cancel now, because the ``aim.live`` longest have only just enough left for the window"""
        order = sorted(staying, key=lambda stream: (-stream.left, stream.id))
        needed = 2 * (self.mtp + 1) * (aim.steps + 1) + self._rate * REACTION_S
        return [stream.id for stream in order[aim.live :]] if order[aim.live - 1].left <= needed else []

    def _replacements(self, seen: Observation, aim: Aim, missing: int) -> tuple[str, ...]:
        """Held-back ids to send now; none where they would not do, where some are still to come, or where the server refuses."""
        faults = sum(stream.fault for stream in seen.streams)
        if faults > self._faults:
            self._faults, self._token_at_fault = faults, seen.last_token_at
        if self._token_at_fault is not None and seen.last_token_at == self._token_at_fault:
            return ()  # no token since the last fault: more requests would only be more faults
        if any(stream.state == "due" for stream in seen.streams):
            return ()
        held = [stream.id for stream in seen.streams if stream.state == "held"]
        return tuple(held[:missing]) if len(held) >= missing else ()


def _grown(before: float | None, now: float | None) -> int:
    if before is None or now is None or not math.isfinite(now - before):
        return 0
    return max(int(now - before), 0)


def _counted(one: _Window, engine_seen: bool) -> WindowCount:
    aim, how = one.aim, one.how
    steps = one.ring_steps if how == "measured" else one.iterations if how == "computed" else 0
    if how == "inferred":
        said = f"{aim.live} requests run and nothing has moved for {one.stood_s:.1f} s: a step of this size was not seen"
        if one.stood_s < STANDS_S:
            said = f"tokens came on exactly {aim.live} open streams: who else ran in the engine is not known"
    elif how == "computed" and one.without_iterations:
        said = f"tokens came while exactly {aim.live} requests ran; the engine exports no iteration counter"
    elif how == "not reached" and not engine_seen:
        said = "not looked at: neither the engine's counters nor a flight recorder were read"
    else:
        said = _said(how, steps, aim)
    return WindowCount(aim, how, int(how in ("measured", "computed")), steps, f"{aim.text}: {how}: {said}")


def _said(how: Reached, steps: int, aim: Aim) -> str:
    if how == "measured":
        return f"{steps} recorded step{'s' * (steps != 1)} with exactly these sizes"
    if how == "computed":
        return f"{steps} iteration{'s' * (steps != 1)} by the engine's counters while exactly {aim.live} requests ran"
    return "no step of this size was seen"


def count_windows(waves: Sequence[Sequence[WindowCount]]) -> tuple[WindowCount, ...]:
    """The windows of several waves added up: an aim that several waves have is one entry, as sure as its surest wave."""
    merged: dict[tuple[int, int, int | None], list[WindowCount]] = {}
    for wave in waves:
        for one in wave:
            merged.setdefault((one.aim.live, one.aim.mtp, one.aim.graph_rows), []).append(one)
    found = []
    for counts in merged.values():
        best = max(counts, key=lambda one: (_ORDER.index(one.how), one.steps))
        steps = sum(one.steps for one in counts if one.how == best.how)
        waves_reached = sum(one.waves for one in counts)
        text = best.text
        if len(counts) > 1:
            again = steps != best.steps and f"{best.aim.text}: {best.how}: {_said(best.how, steps, best.aim)}"
            text = f"{again or text}; reached in {waves_reached} of {len(counts)} waves"
        aim = best.aim.model_copy(update={"required": any(one.aim.required for one in counts)})
        found.append(replace(best, aim=aim, waves=waves_reached, steps=steps, text=text))
    return tuple(sorted(found, key=lambda one: (-one.aim.live, one.aim.mtp)))
