"""A campaign so far, as its store counts it: what pages, comparisons, JUnit files and exit statuses are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["HangKind", "Summary"]


@dataclass(frozen=True, slots=True)
class HangKind:
    """One identity. ``minimised``, ``bundle``: what was written about it, relative to the campaign's folder."""

    identity: str
    class_: str
    cause: str | None
    signature: str | None
    first_trial: int
    hangs: int
    minimised: str | None
    bundle: str | None

    @property
    def line(self) -> str:
        """One kind of hang in a line."""
        what = self.class_ + (f" / {self.cause}" if self.cause else "")
        return f"{self.identity}: {self.hangs} hangs, {what or 'not diagnosed'}, {self.signature or 'no published case'}"


@dataclass(frozen=True, slots=True)
class Summary:
    """A campaign so far. ``kinds``: how trials ended -> how many. ``factors``: factor -> value -> kind -> trials."""

    name: str
    trials: int
    kinds: Mapping[str, int]
    seconds: float
    hangs: tuple[HangKind, ...]
    windows: tuple[tuple[str, int, int], ...]
    factors: Mapping[str, Mapping[str, Mapping[str, int]]]

    @property
    def reached(self) -> int:
        """Trials that reached a danger window: those that hung or were clean in it."""
        return self.kinds.get("hang", 0) + self.kinds.get("clean", 0)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        fields = ("identity", "cause", "signature", "first_trial", "hangs", "minimised", "bundle")
        hangs = [{"class": hang.class_, **{name: getattr(hang, name) for name in fields}} for hang in self.hangs]
        return {
            "name": self.name,
            "trials": self.trials,
            "kinds": dict(self.kinds),
            "windows_reached": self.reached,
            "trial_seconds": round(self.seconds, 3),
            "hangs": hangs,
            "danger_windows": [{"window": key, "trials": trials, "hangs": hung} for key, trials, hung in self.windows[:200]],
            "factors": {name: {value: dict(kinds) for value, kinds in values.items()} for name, values in self.factors.items()},
        }
