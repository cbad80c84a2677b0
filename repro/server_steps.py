"""How a step of the server ground ends, from what was last seen of the server and of the load. Pure.

A step is a live count of the drain. The device alone makes a hang: a client's fault and a silence without a sign do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .serving.records import Assessment, LoadSample, Snapshot

if TYPE_CHECKING:
    from .serving.load_plan import LoadPlan
    from .serving.steering import WindowCount

__all__ = ["Passing", "nothing_answered", "standing_end", "step_detail"]

#: No token and no other answer for so long, whatever the observer says, seconds. Prefill and JIT of a first batch fit in.
SILENT_S = 600.0


class Passing:
    """Which live counts the first draining wave of a load has passed: fallen below one, or further tokens for all at it."""

    def __init__(self, most: int, plan: LoadPlan) -> None:
        waves = [wave for wave in plan.waves if sum(request.hold_back is None for request in wave.requests) >= most]
        self._wave = waves[0].name if waves else ""
        names = [wave.name for wave in plan.waves]
        self._later = frozenset(names[names.index(self._wave) + 1 :]) if waves else frozenset(names)
        self._peak = 0
        self._at: tuple[int, Mapping[str, int]] = (-1, {})

    def passed(self, count: int, wave: str, live: int, tokens: Mapping[str, int]) -> bool:
        """Whether ``count`` is behind us. ``tokens``: received so far, by request."""
        if wave in self._later:
            return True
        if wave != self._wave:
            return False
        self._peak = max(self._peak, live)
        if live != self._at[0]:
            self._at = (live, dict(tokens))
        if self._peak < count or live > count:
            return False
        if live < count:
            return True
        before = self._at[1]
        return sum(now > before.get(name, 0) for name, now in tokens.items()) >= live


def standing_end(
    look: tuple[Snapshot, Assessment] | None, sample: LoadSample, *, now: float, began: float, suspect_s: float, out_of_time: bool
) -> tuple[Literal["hung", "unfinished"], tuple[str, ...]] | None:
    """(how a step ends whose server is there and whose load has not ended, why); None: it goes on.

    ``now``, ``began``: seconds, monotonic; ``suspect_s``: how long the server may stand without a sign from the device.
    """
    if look is not None and look[1].state == "hung":
        return "hung", look[1].reasons
    if look is not None and look[1].state == "suspect" and now - look[1].since > suspect_s:
        why = f"nothing moved for {now - look[1].since:.0f} s and no sign came from the device"
        return "unfinished", (why, *look[1].reasons)
    if out_of_time:
        return "unfinished", ("the run's own deadline came (--timeout)",)
    age = sample.last_token_age_s
    if now - began > SILENT_S and (age is None or age > SILENT_S):
        return "unfinished", (f"no token for {SILENT_S:.0f} s, and nothing that says why",)
    return None


def nothing_answered(sample: LoadSample, error: str) -> str:
    """Why a load ended without a token. ``error``: what of ours went wrong."""
    if error:
        return f"the load itself failed: {error}"
    faults = ", ".join(f"{count} x {kind}" for kind, count in sample.faults.items()) or "no request was sent"
    return f"no request was answered ({faults}): client faults are no hang"


def step_detail(
    wave: str,
    sample: LoadSample,
    windows: Sequence[WindowCount],
    look: tuple[Snapshot, Assessment] | None,
    now: float,
    state: str,
) -> dict[str, Any]:
    """What the timeline says of a step that ended as ``state``; of a hang also how long the server has stood still."""
    detail: dict[str, Any] = {
        "wave": wave,
        "open": sample.open,
        "tokens": sample.tokens,
        "faults": dict(sample.faults),
        "windows": [{"window": one.text, "waves": one.waves, "steps": one.steps} for one in windows if one.reached],
    }
    if look is not None:
        detail["state"] = look[1].state
        if state == "hung":
            detail["stood_still_s"] = round(now - look[1].since, 2)
            detail["device_signals"] = list(look[1].device_signals)
    return detail
