"""The drain plan: a wave of requests whose decode batch shrinks step by step, as one document for all grounds and verbs.

``DrainPlan`` says what the workload is, whichever ground it runs on; ``drain_steps`` turns it into requests and decode steps.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..errors import PlanError
from ..forensics.evidence.opening import at_once
from ..kernels.abi import TOP_K_VALUES
from ..kernels.graphs import decode_graph_sizes

__all__ = [
    "DEFAULT_LAYERS",
    "PLAN_SCHEMA",
    "DrainPlan",
    "invalid_fields",
    "load_plan",
    "schema",
]

PLAN_SCHEMA = "dsv4-repro/drain-plan/1"

#: Indexer layers of one step where the plan does not say: all 21 C4 layers of DeepSeek-V4-Flash on a GPU, 2 on the interpreter.
DEFAULT_LAYERS = {"cpu": 2, "gpu": 21, "server": 21}

#: Plan files larger than this are not read, bytes.
MAX_PLAN_BYTES = 1 << 20
#: Rows over all steps of a plan: bounds memory and time of everything that replays it.
MAX_TOTAL_ROWS = 4_000_000

_INT32_MAX = (1 << 31) - 1


class DrainPlan(BaseModel):
    """The workload. Every field has a flag of the same name; all are validated, and a PlanError names field and value."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, validate_default=True)

    requests: int = Field(default=16, ge=1, le=4096, description="Requests of the wave.")
    min_live: int = Field(default=3, ge=1, le=4096, description="Live requests at which the drain stops.")
    prompt: tuple[int, int] = Field(default=(128, 1536), description="Prompt length, tokens: shortest and longest.")
    output: tuple[int, int] = Field(
        default=(8, 64),
        description="Output length of the requests that leave, tokens: shortest and longest. The last min_live outlast the plan.",
    )
    mtp: int = Field(default=1, ge=0, le=15, description="Speculative tokens per request and step; next_n is one more.")
    acceptance: float = Field(
        default=0.7, ge=0.0, le=1.0, description="Probability that a draft token is accepted, given that those before were."
    )
    max_num_seqs: int = Field(default=16, ge=1, le=4096, description="Most requests that decode at once on a rank.")
    capture_sizes: tuple[int, ...] | None = Field(
        default=None, description="Captured graph sizes in tokens; null is vLLM's default list."
    )
    max_model_len: int = Field(default=65536, ge=2, le=_INT32_MAX, description="The server's maximum context length, tokens.")
    compress: int = Field(default=4, ge=1, le=65536, description="Compression ratio of the indexer's KV cache.")
    dp: int = Field(default=1, ge=1, le=1024, description="Data-parallel ranks.")
    layers: int | None = Field(default=None, ge=1, le=1024, description="Indexer layers per step; null is 2 on cpu and 21 on gpu.")
    steps: int = Field(default=60, ge=1, le=10_000, description="Most decode steps.")
    seed: int = Field(default=0, ge=0, le=(1 << 63) - 1, description="Seed of lengths and acceptance.")
    top_k: int = Field(default=512, description="Candidates that the indexer selects: 512, 1024 or 2048.")

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise PlanError(invalid_fields(error)) from None

    @field_validator("prompt", "output", mode="before")
    @classmethod
    def _range(cls, value: Any) -> Any:
        """A range is ``[low, high]``, one number for both, or text as on the command line: ``256:1024`` or ``512``."""
        if isinstance(value, str):
            parts = value[:64].split(":")
            try:
                value = [int(part) for part in parts]
            except ValueError:
                raise ValueError("not a number or LOW:HIGH") from None
            if len(value) == 1:
                value = value * 2
        if isinstance(value, int) and not isinstance(value, bool):
            return (value, value)
        return value

    @field_validator("capture_sizes", mode="before")
    @classmethod
    def _sizes(cls, value: Any) -> Any:
        """A list of sizes, or text as on the command line: ``2,4,8``."""
        if isinstance(value, str):
            try:
                return tuple(int(part) for part in value[:65536].split(","))
            except ValueError:
                raise ValueError("not a list of numbers such as 2,4,8") from None
        return value

    @field_validator("prompt", "output")
    @classmethod
    def _ordered(cls, value: tuple[int, int]) -> tuple[int, int]:
        low, high = value
        if low < 1:
            raise ValueError("lengths start at 1")
        if high < low:
            raise ValueError("the shortest is longer than the longest")
        if high > _INT32_MAX:
            raise ValueError("beyond int32")
        return value

    @field_validator("capture_sizes")
    @classmethod
    def _capture_sizes(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not value:
            raise ValueError("an empty list captures nothing; leave it out for vLLM's default list")
        if len(value) > 4096:
            raise ValueError("more than 4096 sizes")
        for size in value:
            if not 1 <= size <= 1 << 20:
                raise ValueError(f"size {size} is not 1 to {1 << 20}")
        return tuple(sorted(set(value)))

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value not in TOP_K_VALUES:
            raise ValueError(f"the kernel exists for {', '.join(map(str, TOP_K_VALUES))}")
        return value

    @model_validator(mode="after")
    def _together(self) -> DrainPlan:
        if self.min_live > self.requests:
            raise ValueError(f"min_live {self.min_live} > requests {self.requests}: there are not so many to be left")
        if self.min_live > self.max_num_seqs * self.dp:
            raise ValueError(f"min_live {self.min_live} > max_num_seqs {self.max_num_seqs} x dp {self.dp}: never so many live")
        if self.width < 1:
            raise ValueError(f"max_model_len {self.max_model_len} / compress {self.compress} leaves rows of no width")
        longest = self.prompt[1] + max(self.output[1], self.survivor_output) + self.next_n
        if longest > self.max_model_len:
            raise ValueError(
                f"max_model_len {self.max_model_len} < {longest}: prompt up to {self.prompt[1]}, output up to "
                f"{max(self.output[1], self.survivor_output)} (the last {self.min_live} outlast {self.steps} steps) and "
                f"{self.next_n} query tokens"
            )
        most = self.steps * min(self.requests, self.max_num_seqs) * self.next_n
        if most > MAX_TOTAL_ROWS:
            raise ValueError(f"steps {self.steps} x live requests x next_n are {most} rows, more than {MAX_TOTAL_ROWS}")
        return self

    @property
    def next_n(self) -> int:
        """Query tokens per request and step: one sampled and ``mtp`` drafted."""
        return self.mtp + 1

    @property
    def width(self) -> int:
        """Candidates in a row of logits, and the default row stride: max_model_len // compress."""
        return self.max_model_len // self.compress

    @property
    def survivor_output(self) -> int:
        """Output length of the requests that outlast the plan: more than ``steps`` steps can produce."""
        return self.steps * self.next_n + 2

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Rows of the FULL decode graphs, ascending; empty: everything runs eagerly."""
        return decode_graph_sizes(self.max_num_seqs, self.next_n, self.capture_sizes)

    def layers_on(self, ground: str) -> int:
        """Indexer layers per step on ``cpu``, ``gpu`` or ``server``."""
        return self.layers if self.layers is not None else DEFAULT_LAYERS[ground]

    def replace(self, **changes: Any) -> DrainPlan:
        """The plan with some fields changed, validated again. PlanError."""
        return DrainPlan(**{**self.model_dump(), **changes})

    def document(self) -> dict[str, Any]:
        """The JSON document of this plan; ``load_plan`` reads it back."""
        return {"schema": PLAN_SCHEMA, **self.model_dump(mode="json")}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> DrainPlan:
        """From a JSON or TOML document. ``schema`` may be left out. PlanError."""
        fields = dict(document)
        named = fields.pop("schema", PLAN_SCHEMA)
        if named != PLAN_SCHEMA:
            raise PlanError(f"schema {named!r} is not {PLAN_SCHEMA!r}")
        return cls(**{str(name): value for name, value in fields.items()})

    def lines(self) -> list[str]:
        """The first lines of a run: what will be done."""
        sizes = ", ".join(map(str, self.graph_sizes)) or "none (eager)"
        return [
            f"drain: {self.requests} requests to {self.min_live} live, prompts {self.prompt[0]} to {self.prompt[1]} tokens, "
            f"MTP {self.mtp} (next_n {self.next_n}), acceptance {self.acceptance:g}, at most {self.steps} steps, seed {self.seed}",
            f"max_model_len {self.max_model_len}, compress {self.compress}: rows of {self.width} candidates, k {self.top_k}; "
            f"FULL decode graphs of {sizes} rows" + (f"; dp {self.dp}" if self.dp > 1 else ""),
        ]


def invalid_fields(error: ValidationError) -> str:
    """Place, value and rule of the first five faults of a plan of any kind, each cut: a plan file may hold anything."""
    parts = []
    for item in error.errors(include_url=False, include_context=False)[:5]:
        place = _cut(".".join(str(part) for part in item["loc"]), 120)
        said = _cut(item["msg"].removeprefix("Value error, "), 300)
        parts.append(f"{place} = {_cut(repr(item.get('input')), 80)}: {said}" if place else said)
    return "; ".join(parts)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def schema() -> dict[str, Any]:
    """JSON Schema of a plan document."""
    document = DrainPlan.model_json_schema()
    document["$id"] = PLAN_SCHEMA
    document["properties"]["schema"] = {"const": PLAN_SCHEMA}
    return document


def load_plan(path: Path) -> DrainPlan:
    """A plan from a ``.toml`` file or a JSON file of at most 1 MiB. PlanError names the file, the field and the value."""
    try:
        with open(path, "rb", opener=at_once) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise PlanError(f"{path}: not a regular file")
            raw = stream.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from None
    if len(raw) > MAX_PLAN_BYTES:
        raise PlanError(f"{path}: larger than {MAX_PLAN_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
        document = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: not a plan: {str(error)[:200] or type(error).__name__}") from None
    if not isinstance(document, dict):
        raise PlanError(f"{path}: a plan is an object of fields, not {type(document).__name__}")
    try:
        return DrainPlan.from_document(document)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
