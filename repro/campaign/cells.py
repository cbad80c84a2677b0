"""A cell of a campaign: everything that decides what a trial does, as data; and what one trial gave, as data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ...errors import PlanError
from ...scenarios.drain import DrainPlan

__all__ = ["Cell", "TrialKind", "TrialResult"]

TrialKind = Literal["hang", "clean", "no window", "wrong", "other"]


@dataclass(frozen=True, slots=True)
class Cell:
    """``plan``: fields of ``DrainPlan`` that differ from the default. ``kernel``: as after ``--kernel``. ``arch``: sm number to
    interpret on the CPU (None: 120), ``device``: GPU ordinal, or on the CPU the card to stand for. ``sms``, ``slots_per_sm``:
    residency of the interpreted device (pressure: fewer than the grid needs).
    ``server``: of the server ground: model, python, tp, guard, rescue, flags (engine flags, words).
    """

    name: str
    ground: str = "cpu"
    kernel: str = "builtin"
    producer: str = "raw"
    plan: Mapping[str, Any] = field(default_factory=dict)
    arch: int | None = None
    device: str | None = None
    schedule: str = "smallest-pc"
    sms: int | None = None
    slots_per_sm: int | None = None
    share: bool = False
    factors: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)

    def drain(self, seed: int | None = None) -> DrainPlan:
        """The plan, with its seed where one is given. PlanError."""
        fields = dict(self.plan)
        fields.setdefault("layers", 1 if self.ground == "cpu" else None)
        return DrainPlan(**fields) if seed is None else DrainPlan(**{**fields, "seed": seed})

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "plan": dict(self.plan), "factors": dict(self.factors), "server": dict(self.server)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Cell:
        """Back from JSON. PlanError for unknown fields."""
        try:
            return cls(**document)
        except TypeError as error:
            raise PlanError(f"not a cell: {error}") from None

    @property
    def key(self) -> str:
        """Twelve hex digits over everything but the name."""
        left_out = ("name", "factors") if self.server else ("name", "factors", "server")
        document = {name: value for name, value in self.document().items() if name not in left_out}
        return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def command(self, seed: int, *, ground: str | None = None) -> tuple[str, ...]:
        """The ``run drain`` that shows this cell's workload."""
        words = ["dsv4-repro", "run", "drain", "--on", ground or self.ground]
        if self.ground != "server":
            words += ["--kernel", self.kernel]
        words += ["--seed", str(seed)]
        words += ["--producer", self.producer] if self.producer != "raw" else []
        for name in ("model", "python", "tp"):
            words += [f"--{name}", str(self.server[name])] if self.server.get(name) else []
        words += [f"--{name}" for name in ("guard", "rescue") if self.server.get(name)]
        words += ["--arch", f"sm_{self.arch}"] if self.arch is not None and self.ground == "cpu" else []
        words += ["--schedule", self.schedule] if self.schedule != "smallest-pc" else []
        for name in ("sms", "slots_per_sm"):
            value = getattr(self, name)
            words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
        default = DrainPlan().model_dump(mode="json")
        for name, value in self.plan.items():
            if name in ("seed", "top_k") or value is None or value == default[name]:
                continue
            sep = "," if name == "capture_sizes" else ":"
            text = sep.join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
        engine = [str(word) for word in self.server.get("flags", ())]
        return tuple([*words, "--", *engine] if engine else words)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How one trial ended. ``window``: the danger window was reached (a trial that hung reached it). ``identity``: of the hang;
    ``identified``: "diagnosed" from the machine's state, or "matched" to a hang of this session with the same kernel, layer, step
    shape and counters. ``hung_step``: index in the plan. ``reused``: the workload was released, was right afterwards, and is used
    on. ``windows``: keys of the danger windows that were run. ``why``: for all that is not clean.
    """

    kind: TrialKind
    seed: int
    window: bool = False
    identity: str | None = None
    class_: str = ""
    cause: str | None = None
    signature: str | None = None
    identified: str = ""
    hung_step: int | None = None
    seconds: float = 0.0
    to_hang_s: float | None = None
    reused: bool | None = None
    device_idle: bool | None = None
    windows: tuple[str, ...] = ()
    why: str = ""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TrialResult:
        """Back from JSON."""
        return cls(**{**document, "windows": tuple(document.get("windows", ()))})
