"""The drain load as one document: which requests are sent when, and at which windows the drain aims. Replayable, byte for byte.

A ``LoadPlan`` is what the client does on the server ground; a ``DrainPlan`` (scenarios) is what the batch does on all grounds.
``LoadPlan.from_drain`` makes the one from the other, and ``LoadPlan.from_lengths`` a short drain from explicit lengths.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from ...errors import PlanError
from ...forensics.evidence.opening import at_once
from ...kernels.graphs import decode_graph_sizes
from ...scenarios.drain import DrainPlan
from ...scenarios.drain_steps import plan_requests
from ..atomic import write_atomic
from .aims import MAX_LIVE, MAX_MTP, PLAN_HELP, Aim, PlanPart, plan_errors, window
from .completions import TOKEN_IDS, CompletionRequest, token_prompt

__all__ = ["LOAD_SCHEMA", "LoadPlan", "RequestSpec", "Wave", "read_load_plan", "schema"]

LOAD_SCHEMA = "dsv4-repro/load-plan/1"
#: Plan files larger than this are not read, bytes.
MAX_PLAN_BYTES = 32 << 20
MAX_REQUESTS = 20_000
#: Prompt and output tokens over all requests.
MAX_TOTAL_TOKENS = 200_000_000
_NAME = re.compile(r"[A-Za-z0-9._-]{1,60}")


class RequestSpec(PlanPart):
    """One request. Its prompt is ``prompt_tokens`` ids drawn from ``prompt_seed``, or ``text``."""

    id: str = Field(description="Unique in the plan; part of the request's X-Request-Id.")
    prompt_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    prompt_seed: int = Field(default=0, ge=0, le=(1 << 63) - 1)
    text: str | None = Field(default=None, min_length=1, max_length=1 << 20)
    max_tokens: int = Field(ge=1, le=1 << 24)
    min_tokens: int = Field(default=0, ge=0, le=1 << 24)
    ignore_eos: bool = True
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    start_s: float = Field(default=0.0, ge=0.0, le=3600.0, description="Sent so long after its wave began, seconds.")
    cancel_after: int | None = Field(default=None, ge=1, le=1 << 24, description="Cancelled when so many tokens have come.")
    hold_back: str | None = Field(default=None, max_length=60, description="Group that is sent only when the steering needs it.")

    @field_validator("id")
    @classmethod
    def _id(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("1 to 60 letters, digits, '.', '_' or '-'")
        return value

    @model_validator(mode="after")
    def _one_prompt(self) -> RequestSpec:
        if (self.prompt_tokens is None) == (self.text is None):
            raise ValueError("either prompt_tokens or text, and not both")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} > max_tokens {self.max_tokens}")
        return self

    @property
    def prompt_size(self) -> int:
        """Tokens of the prompt; of a text at most its characters."""
        return self.prompt_tokens if self.prompt_tokens is not None else len(self.text or "")

    def completion(self, token_ids: tuple[int, int] = TOKEN_IDS, *, request_id: str = "") -> CompletionRequest:
        """The request as it is sent."""
        return CompletionRequest(
            prompt=self.text if self.text is not None else token_prompt(self.prompt_tokens or 1, self.prompt_seed, token_ids),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            request_id=request_id,
        )


class Wave(PlanPart):
    """Requests that are sent together and drain together; the next wave begins when all have ended."""

    name: str = Field(max_length=60)
    requests: tuple[RequestSpec, ...] = Field(min_length=1, max_length=MAX_REQUESTS)
    aims: tuple[Aim, ...] = Field(default=(), max_length=MAX_LIVE)
    limit_s: float = Field(default=600.0, gt=0.0, le=86_400.0, description="What is still open then is cancelled, seconds.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("1 to 60 letters, digits, '.', '_' or '-'")
        return value

    @model_validator(mode="after")
    def _reachable(self) -> Wave:
        for aim in self.aims:
            if aim.required and aim.live > len(self.requests):
                raise ValueError(f"wave {self.name} aims at {aim.live} live requests and has {len(self.requests)}")
        return self


class LoadPlan(PlanPart):
    """The whole load. ``token_ids``: ids that prompts are drawn from, low and one past the high."""

    seed: int = Field(default=0, ge=0, le=(1 << 63) - 1)
    mtp: int = Field(default=1, ge=0, le=MAX_MTP)
    max_num_seqs: int = Field(default=16, ge=1, le=MAX_LIVE)
    max_model_len: int = Field(default=65536, ge=2, le=(1 << 31) - 1)
    graph_sizes: tuple[int, ...] = Field(default=(), max_length=4096, description="Rows of the FULL decode graphs; empty: eager.")
    token_ids: tuple[int, int] = TOKEN_IDS
    request_timeout_s: float = Field(default=900.0, gt=0.0, le=86_400.0, description="A request not answered by then is slow.")
    waves: tuple[Wave, ...] = Field(min_length=1, max_length=10_000)

    @field_validator("token_ids")
    @classmethod
    def _ids(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= value[0] < value[1] <= 1 << 31:
            raise ValueError("a low id and one past the high one")
        return value

    @model_validator(mode="after")
    def _bounded(self) -> LoadPlan:
        requests = [request for wave in self.waves for request in wave.requests]
        if len(requests) > MAX_REQUESTS:
            raise ValueError(f"{len(requests)} requests, more than {MAX_REQUESTS}")
        if (total := sum(request.prompt_size + request.max_tokens for request in requests)) > MAX_TOTAL_TOKENS:
            raise ValueError(f"{total} tokens in all, more than {MAX_TOTAL_TOKENS}")
        seen: set[str] = set()
        for request in requests:
            if request.id in seen:
                raise ValueError(f"two requests have the id {request.id}")
            seen.add(request.id)
            tokens = (request.prompt_tokens or 0) + request.max_tokens
            if tokens > self.max_model_len:
                raise ValueError(f"request {request.id} needs {tokens} tokens, max_model_len is {self.max_model_len}")
        names = [wave.name for wave in self.waves]
        if len(set(names)) != len(names):
            raise ValueError("two waves have the same name")
        return self

    def document(self) -> dict[str, Any]:
        """The JSON document of this plan."""
        return {"schema": LOAD_SCHEMA, **self.model_dump(mode="json", exclude_defaults=False)}

    def to_bytes(self) -> bytes:
        """The plan file: the same plan gives the same bytes."""
        return (json.dumps(self.document(), sort_keys=True, ensure_ascii=True, separators=(",", ":")) + "\n").encode()

    @property
    def sha256(self) -> str:
        """Of the plan file."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def write(self, path: Path) -> None:
        """Write the plan file atomically. RunStoreError."""
        write_atomic(path, self.to_bytes())

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> LoadPlan:
        """From a JSON document. PlanError."""
        fields = dict(document)
        if (named := fields.pop("schema", None)) != LOAD_SCHEMA:
            raise PlanError(f"schema {str(named)[:80]!r} is not {LOAD_SCHEMA!r}", help_text=PLAN_HELP)
        with plan_errors():
            return cls(**{str(name): value for name, value in fields.items()})

    @classmethod
    @plan_errors()
    def from_drain(
        cls,
        plan: DrainPlan,
        *,
        waves: int = 4,
        window_steps: int = 200,
        spares: int | None = None,
        batched_tokens: int = 8192,
        eager: bool = False,
        warm_up: bool = True,
        token_ids: tuple[int, int] = TOKEN_IDS,
    ) -> LoadPlan:
        """``waves`` waves of the drain; the first draws the lengths that every other ground draws from the same plan.

        Those that outlast the drain get so long an output that they are still live when the longest of the others has left, however
        drafts are accepted (1 to next_n tokens a step) and however late a prompt was prefilled (``batched_tokens`` a step), and for
        ``window_steps`` steps more; max_model_len bounds that. ``spares`` (min_live if None) are held back for a window missed.
        Every padded live count on the way is counted, min_live is aimed at. PlanError (dp > 1: one engine is steered).
        """
        if plan.dp > 1:
            raise PlanError(f"dp = {plan.dp}: the drain load steers one engine; give dp 1, one load an engine")
        sizes = () if eager else plan.graph_sizes
        made = [_warm_up()] if warm_up else []
        for number in range(waves):
            drawn = plan_requests(plan if number == 0 else plan.replace(seed=_mixed(plan.seed, number)))
            prompts = sum(request.prompt for request in drawn)
            leaving = max((request.output for request in drawn if not request.outlasts), default=0)
            longest = plan.next_n * (leaving + -(-prompts // batched_tokens) + window_steps) + 2
            specs = [
                _spec(
                    f"w{number}-r{request.id}",
                    request.prompt,
                    _mixed(plan.seed, number * 1_000_003 + request.id),
                    min(longest, plan.max_model_len - request.prompt - plan.next_n) if request.outlasts else request.output,
                )
                for request in drawn
            ]
            kept = [request for request in drawn if request.outlasts]
            for spare in range(plan.min_live if spares is None else spares):
                prompt = kept[spare % len(kept)].prompt
                output = min(plan.next_n * window_steps + 2, plan.max_model_len - prompt - plan.next_n)
                seed = _mixed(plan.seed, number * 1_000_003 + plan.requests + spare)
                specs.append(_spec(f"w{number}-s{spare}", prompt, seed, output, hold_back="spare"))
            aims = [
                window(live, plan.mtp, sizes, required=live == plan.min_live)
                for live in range(min(plan.requests, plan.max_num_seqs), plan.min_live - 1, -1)
            ]
            made.append(
                Wave(
                    name=f"w{number}",
                    requests=tuple(specs),
                    aims=tuple(aim for aim in aims if aim.required or aim.padded_requests),
                )
            )
        return cls(
            seed=plan.seed,
            mtp=plan.mtp,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=plan.max_model_len,
            graph_sizes=sizes,
            token_ids=token_ids,
            waves=tuple(made),
        )

    @classmethod
    @plan_errors()
    def from_lengths(
        cls,
        requests: Sequence[tuple[int, int]],
        *,
        live: int,
        mtp: int = 1,
        max_num_seqs: int = 16,
        capture_sizes: Sequence[int] | None = None,
        max_model_len: int = 65536,
        waves: int = 1,
        seed: int = 0,
        eager: bool = False,
        warm_up: bool = True,
        token_ids: tuple[int, int] = TOKEN_IDS,
    ) -> LoadPlan:
        """Waves of (prompt, output) lengths that aim at ``live`` requests, e.g. [(3000, 60), (3001, 400), (3002, 400), (3003, 400)]
        and 3: the shortest load known to wedge a real server. PlanError."""
        sizes = () if eager else decode_graph_sizes(max_num_seqs, mtp + 1, capture_sizes)
        aim = window(live, mtp, sizes)
        made = [_warm_up()] if warm_up else []
        for number in range(waves):
            specs = [
                _spec(f"w{number}-r{index}", prompt, _mixed(seed, number * 1_000_003 + index), output)
                for index, (prompt, output) in enumerate(requests)
            ]
            made.append(Wave(name=f"w{number}", requests=tuple(specs), aims=(aim,)))
        return cls(
            seed=seed, mtp=mtp, max_num_seqs=max_num_seqs, max_model_len=max_model_len, graph_sizes=sizes, token_ids=token_ids,
            waves=tuple(made),
        )  # fmt: skip

    def lines(self) -> list[str]:
        """What will be sent, for the first lines of a run."""
        requests = [request for wave in self.waves for request in wave.requests]
        held = sum(request.hold_back is not None for request in requests)
        aims = {aim.text: None for wave in self.waves for aim in wave.aims if aim.required}
        return [
            f"load: {len(self.waves)} waves, {len(requests) - held} requests and {held} held back, MTP {self.mtp}, "
            f"seed {self.seed}, plan {self.sha256[:12]}",
            *(f"aims at: {text}" for text in aims),
        ]


def schema() -> dict[str, Any]:
    """JSON Schema of a plan document."""
    document = LoadPlan.model_json_schema()
    document["$id"] = LOAD_SCHEMA
    document["properties"]["schema"] = {"const": LOAD_SCHEMA}
    document["required"] = [*document["required"], "schema"]
    return document


def read_load_plan(path: Path) -> LoadPlan:
    """A plan file of at most 32 MiB. PlanError names the file and what is wrong in it."""
    try:
        with open(path, "rb", opener=at_once) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise PlanError(f"{path}: not a regular file", help_text=PLAN_HELP)
            raw = stream.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}", help_text=PLAN_HELP) from None
    if len(raw) > MAX_PLAN_BYTES:
        raise PlanError(f"{path}: larger than {MAX_PLAN_BYTES} bytes", help_text=PLAN_HELP)
    try:
        document = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: not a plan: {str(error)[:200] or type(error).__name__}", help_text=PLAN_HELP) from None
    if not isinstance(document, dict):
        raise PlanError(f"{path}: a plan is an object, not {type(document).__name__}", help_text=PLAN_HELP)
    try:
        return LoadPlan.from_document(document)
    except PlanError as error:
        raise PlanError(f"{path}: {error}", help_text=PLAN_HELP) from None


def _mixed(seed: int, number: int) -> int:
    """A seed for each wave and request."""
    return (seed * 6_364_136_223_846_793_005 + number * 1_442_695_040_888_963_407 + 1) % (1 << 62)


def _spec(name: str, prompt: int, seed: int, output: int, *, hold_back: str | None = None) -> RequestSpec:
    return RequestSpec(
        id=name, prompt_tokens=prompt, prompt_seed=seed, max_tokens=output, min_tokens=output, hold_back=hold_back
    )  # fmt: skip


def _warm_up() -> Wave:
    """One short request: the first answer of a server pays for compilations that are no part of the drain."""
    return Wave(name="warm-up", requests=(_spec("warm-up", 64, 0, 8),), limit_s=1800.0)
