"""``PLAN.toml``: a campaign's matrix, search and budget. Unknown keys and impossible values are named; cells are never listed.

A plan with 10^12 cells is as cheap as one with ten: a cell is computed from its number (mixed radix), nothing is enumerated.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ...errors import PlanError, UsageError
from ...forensics.evidence.opening import read_what_comes
from ...scenarios.drain import DrainPlan, invalid_fields
from ..drain_flags import parse_arch
from ..serving.engine_flags import parse_flags
from .cells import Cell

__all__ = ["HUNT_PLAN_SCHEMA", "MOST_CELLS", "Budget", "HuntPlan", "Search", "load_hunt_plan"]

HUNT_PLAN_SCHEMA = "dsv4-repro/hunt-plan/1"
MAX_PLAN_BYTES = 1 << 20
_KEYS = "See docs/campaigns.md for the keys of a plan."
#: Cell numbers are stored as 64-bit integers.
MOST_CELLS = 1 << 62
#: Factors that are fields of the cell; all others are fields of the drain plan.
CELL_FACTORS = ("kernel", "producer", "arch", "schedule", "sms", "slots_per_sm", "device")
#: Factors of the server ground, in place of those: what is started, and how. ``flags``: engine flags, text or a list of words.
SERVER_FACTORS = ("model", "python", "tp", "guard", "rescue", "flags")
#: A length distribution: a table of ``prompt`` and ``output``, so that both change together.
LENGTHS = "lengths"
_OTHERS = (*CELL_FACTORS, *SERVER_FACTORS, LENGTHS)


def engine_words(value: Any) -> tuple[str, ...]:
    """A value of ``flags`` as words. UsageError for what are no flags of ``vllm serve``."""
    try:
        words = shlex.split(value) if isinstance(value, str) else [str(word) for word in value]
    except (ValueError, TypeError) as error:
        raise UsageError(f"not flags: {error}") from None
    parse_flags(tuple(words))
    return tuple(words)


def plan_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the drain plan, a length distribution taken apart."""
    found = {name: value for name, value in values.items() if name not in _OTHERS}
    lengths = values.get(LENGTHS)
    return found | (dict(lengths) if isinstance(lengths, Mapping) else {})


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Budget(_Part):
    """When to stop; whichever comes first. ``gpu_hours``: hours of workers that hold a GPU, all together."""

    minutes: float | None = Field(default=None, gt=0, le=60 * 24 * 365)
    trials: int | None = Field(default=None, ge=1, le=10**12)
    gpu_hours: float | None = Field(default=None, gt=0)
    hangs: int | None = Field(default=None, ge=1, description="Stop when so many different hangs were found.")


class Search(_Part):
    """How cells are chosen. ``repeat``: trials of a cell in an exhaustive search, with different seeds."""

    mode: Literal["random", "exhaustive", "guided"] = "guided"
    seed: int = Field(default=0, ge=0, le=(1 << 63) - 1)
    repeat: int = Field(default=1, ge=1, le=10**9)


class HuntPlan(_Part):
    """The plan. ``matrix``: factor -> values; factors are kernel, producer, arch, schedule, sms, slots_per_sm, device (on a server
    model, python, tp, guard, rescue, flags), lengths (a table of prompt and output), and every field of the drain plan.
    ``fixed``: the same with one value each. ``minimise``: shrink the first hang of each kind at the end (not on a server).
    """

    schema_: Literal["dsv4-repro/hunt-plan/1"] = Field(default="dsv4-repro/hunt-plan/1", alias="schema")
    name: str = Field(default="campaign", min_length=1, max_length=100)
    on: Literal["cpu", "gpu", "server"] = "cpu"
    budget: Budget = Budget()
    search: Search = Search()
    matrix: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    fixed: dict[str, Any] = Field(default_factory=dict)
    minimise: bool = True
    share: bool = False

    @field_validator("matrix", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError("a table of lists is expected")
        for name, values in value.items():
            if not isinstance(values, list | tuple) or not values:
                raise ValueError(f"{name}: a list of at least one value is expected")
            if len(values) > 100_000:
                raise ValueError(f"{name}: more than 100000 values")
            if len({json.dumps(one, sort_keys=True, default=str) for one in values}) != len(values):
                raise ValueError(f"{name}: a value is listed twice")
        return value

    @model_validator(mode="after")
    def _sane(self) -> HuntPlan:
        own = SERVER_FACTORS if self.on == "server" else CELL_FACTORS
        known = {*own, LENGTHS, *DrainPlan.model_fields} - {"seed"}
        for name in (*self.matrix, *self.fixed):
            if name not in known and name in _OTHERS:
                raise ValueError(f"{name} is no factor of on = {self.on!r}; there are {', '.join(sorted(known))}")
            if name not in known:
                raise ValueError(f"{name[:60]!r} is no factor; there are {', '.join(sorted(known))}")
        if self.on == "server" and "model" not in {*self.matrix, *self.fixed}:
            raise ValueError("on = 'server' needs a model: [fixed] model = 'dummy', or its path")
        self._known_words()
        self._known_servers()
        self._known_lengths()
        twice = set(self.matrix) & set(self.fixed)
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))}: in matrix and in fixed")
        if self.cells > MOST_CELLS:
            raise ValueError(f"{self.cells:.3g} cells are more than {MOST_CELLS} (2^62)")
        if self.search.mode == "exhaustive" and self.budget == Budget() and self.cells * self.search.repeat > 10**7:
            raise ValueError(f"an exhaustive search of {self.cells:.3g} cells without a budget never ends; give [budget]")
        if self.search.mode != "exhaustive" and self.budget == Budget():
            raise ValueError(f"a {self.search.mode} search never ends by itself; give [budget] minutes, trials, hangs or gpu_hours")
        self._some_cell_is_possible()
        return self

    def _known_words(self) -> None:
        """Values of the cell's own factors that no cell can have."""
        words = {"producer": ("raw", "clamped"), "schedule": ("smallest-pc", "random", "priority")}
        for name in CELL_FACTORS:
            values = self.matrix.get(name, (self.fixed[name],) if name in self.fixed else ())
            for value in values:
                number = isinstance(value, int) and not isinstance(value, bool)
                if name in words and value not in words[name]:
                    raise ValueError(f"{name} = {value!r}: one of {', '.join(words[name])}")
                if name in ("sms", "slots_per_sm") and not (number and 1 <= value <= 4096):
                    raise ValueError(f"{name} = {value!r}: a number from 1 to 4096")
                if name == "kernel" and not (isinstance(value, str) and value):
                    raise ValueError(f"kernel = {value!r}: what is written after --kernel")
                if name == "arch" and not number:
                    try:
                        parse_arch(str(value))
                    except UsageError as error:
                        raise ValueError(f"arch = {value!r}: {error}") from None

    def _values(self, name: str) -> tuple[Any, ...]:
        return self.matrix.get(name, (self.fixed[name],) if name in self.fixed else ())

    def _known_servers(self) -> None:
        kinds: dict[str, type] = {"model": str, "python": str, "guard": bool, "rescue": bool}
        for name, kind in kinds.items():
            for value in self._values(name):
                if not isinstance(value, kind) or value == "":
                    raise ValueError(f"{name} = {value!r}: {'true or false' if kind is bool else 'a text'} is expected")
        for value in self._values("tp"):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 4096:
                raise ValueError(f"tp = {value!r}: a number from 1 to 4096")
        for value in self._values("flags"):
            try:
                engine_words(value)
            except UsageError as error:
                raise ValueError(f"flags = {value!r}: {error}") from None

    def _known_lengths(self) -> None:
        for value in self._values(LENGTHS):
            if not isinstance(value, Mapping) or not value or set(value) - {"prompt", "output"}:
                raise ValueError(f"{LENGTHS} = {value!r}: a table of prompt and output, each LOW:HIGH or [low, high]")
        both = {"prompt", "output"} & {*self.matrix, *self.fixed} if self._values(LENGTHS) else set()
        if both:
            raise ValueError(f"{', '.join(sorted(both))}: {LENGTHS} says it already")

    def _some_cell_is_possible(self) -> None:
        """A value that is impossible with the first value of every other factor, and with the last, is a mistake in the plan."""
        for name, values in self.matrix.items():
            if name in (*CELL_FACTORS, *SERVER_FACTORS):
                continue
            for value in values:
                reasons = []
                for end in (0, -1):
                    fields = {other: those[end] for other, those in self.matrix.items()} | dict(self.fixed)
                    try:
                        DrainPlan(**plan_fields({**fields, name: value}))
                    except PlanError as error:
                        reasons.append(str(error))
                if len(reasons) == 2:
                    raise ValueError(f"{name} = {value!r} is impossible: {reasons[0]}")

    @property
    def cells(self) -> int:
        """How many cells the matrix has."""
        count = 1
        for values in self.matrix.values():
            count *= len(values)
        return count

    @property
    def factors(self) -> tuple[str, ...]:
        """Names of the factors, the first changes fastest."""
        return tuple(self.matrix)

    def values_of(self, number: int) -> dict[str, Any]:
        """Factor -> value of cell ``number`` (0 to cells - 1)."""
        found = {}
        for name, values in self.matrix.items():
            number, digit = divmod(number, len(values))
            found[name] = values[digit]
        return found

    def cell(self, number: int) -> Cell:
        """Cell ``number``; its plan may still be impossible (``Cell.drain`` says so)."""
        varied = self.values_of(number)
        everything = {**self.fixed, **varied}
        fields: dict[str, Any] = {name: value for name, value in everything.items() if name in CELL_FACTORS}
        server = {name: value for name, value in everything.items() if name in SERVER_FACTORS}
        if server:
            server["flags"] = engine_words(server.get("flags", ()))
            fields |= {"server": server, "kernel": "the server's", "producer": "the server's"}
        if isinstance(fields.get("arch"), str):
            fields["arch"] = parse_arch(fields["arch"])
        if "device" in fields:
            fields["device"] = str(fields["device"])
        plan = plan_fields(everything)
        return Cell(name=f"cell {number}", ground=self.on, share=self.share, plan=plan, factors=varied, **fields)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return self.model_dump(mode="json", by_alias=True)

    @property
    def key(self) -> str:
        """A hash over what decides which trial is which: everything but the budget."""
        document = {name: value for name, value in self.document().items() if name not in ("budget", "minimise")}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str = "plan") -> HuntPlan:
        """From parsed TOML or JSON. PlanError names key and value."""
        try:
            return cls.model_validate(dict(document))
        except ValidationError as error:
            said = f"{where}: {invalid_fields(error)}"
            raise PlanError(said, help_text=_KEYS) from None


def load_hunt_plan(path: Path) -> HuntPlan:
    """A plan from a TOML or JSON file of at most 1 MiB. PlanError names the file and the key."""
    try:
        raw = read_what_comes(path, MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}", help_text=_KEYS) from None
    if len(raw) > MAX_PLAN_BYTES:
        raise PlanError(f"{path}: larger than {MAX_PLAN_BYTES >> 20} MiB", help_text=_KEYS)
    try:
        text = raw.decode("utf-8")
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: not a plan: {str(error)[:200]}", help_text=_KEYS) from None
    if not isinstance(document, dict):
        raise PlanError(f"{path}: a plan is a table of keys", help_text=_KEYS)
    return HuntPlan.from_document(document, str(path))
