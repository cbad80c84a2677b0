"""Words of a ``vllm serve`` command line as flags by name: which one wins, and what those mean that the drain depends on. Pure.

vLLM takes ``--flag value``, ``--flag=value``, ``--flag`` and ``--no-flag``, underscores for dashes, and short names for some; the
last of a name wins (its ``FlexibleArgumentParser``, 0.20 to 0.33). Nothing here knows all flags: what is not known is passed on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from ...scenarios.drain import DrainPlan

__all__ = ["EngineFacts", "EngineFlags", "facts_of", "parse_flags", "plan_with"]

_SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "q": "quantization",
    "sc": "speculative-config",
    "cc": "compilation-config",
    "ac": "attention-config",
    "asc": "api-server-count",
    "n": "nnodes",
    "r": "node-rank",
}
_MOST_WORDS = 512
_LONGEST = 65536
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE]-?\d+)?")
#: The load and the observer speak plain HTTP to a port of this machine.
_REFUSED = ("uds", "ssl-keyfile", "ssl-certfile", "headless", "root-path")
#: cudagraph_mode values under which decode steps run as FULL graphs.
_FULL_MODES = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """``items``: (name, words) in order, each name once. A name has neither dashes in front nor ``no-``."""

    items: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def over(self, base: EngineFlags) -> EngineFlags:
        """``base`` with these flags in the place of those of the same name, new ones last."""
        own = dict(self.items)
        kept = [(name, own.pop(name, words)) for name, words in base.items]
        return EngineFlags((*kept, *own.items()))

    def words(self) -> tuple[str, ...]:
        """For the command line."""
        return tuple(word for _, words in self.items for word in words)

    def shown(self) -> tuple[str, ...]:
        """The words with keys and tokens left out, for anything that is written down."""
        from .shown_words import shown_words

        return shown_words(self.words())

    def value(self, name: str) -> str | None:
        """The last value of a flag; None: not given, or a switch."""
        values = self.values(name)
        return values[-1] if values else None

    def values(self, name: str) -> tuple[str, ...]:
        """All values of a flag, for one that takes several."""
        words = dict(self.items).get(name, ())
        if words and "=" in words[0]:
            return (words[0].partition("=")[2],)
        return words[1:]

    def switch(self, name: str) -> bool | None:
        """Whether a switch is on; None: not given."""
        words = dict(self.items).get(name)
        if words is None:
            return None
        if words[0].lstrip("-").startswith("no-"):
            return False
        value = self.value(name)
        return value is None or value.strip().lower() not in ("false", "0", "no")


def _name(word: str) -> str:
    text = word.partition("=")[0]
    if text.startswith("--"):
        return text[2:].replace("_", "-").removeprefix("no-")
    head, dot, rest = text[1:].partition(".")
    if head[:1] == "O":
        return "O" + dot + rest
    return _SHORT.get(head, head) + dot + rest


def parse_flags(words: Iterable[str]) -> EngineFlags:
    """The words after ``--``, the last of each name. UsageError for what is no flag, is too long, or cannot be served here."""
    flags: dict[str, tuple[str, ...]] = {}
    current = ""
    for number, word in enumerate(words):
        if number >= _MOST_WORDS or len(word) > _LONGEST or "\0" in word:
            raise UsageError(f"after --: more than {_MOST_WORDS} words, or a word that no command line can carry")
        if word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word):
            current = _name(word)
            flags.pop(current, None)
            flags[current] = (word,)
        elif current and "=" not in flags[current][0]:
            flags[current] = (*flags[current], word)
        else:
            raise UsageError(
                f"after --: {word[:60]!r} belongs to no flag",
                help_text="The model goes to --model; after -- come flags of vllm serve: -- --max-num-seqs 16",
            )
    for name in _REFUSED:
        if name in flags:
            raise UsageError(
                f"after --: {flags[name][0].partition('=')[0]} cannot be used with a server that is started here",
                help_text="Start the server yourself and give its address: dsv4-repro run drain --on server --url http://HOST:PORT",
            )
    return EngineFlags(tuple(flags.items()))


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the flags say about the batch. None: not said, so the engine's own default holds.

    ``mtp``: speculative tokens, 0 without speculation. ``full_graphs``: decode steps may run as FULL graphs.
    """

    tp: int = 1
    host: str = "127.0.0.1"
    port: int | None = None
    served_name: str | None = None
    api_key: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    mtp: int = 0
    method: str = ""
    capture_sizes: tuple[int, ...] | None = None
    full_graphs: bool = True
    why_not_full: str = ""


def _number(flags: EngineFlags, name: str) -> int | None:
    value = flags.value(name)
    if value is None:
        return None
    # vLLM reads 16k as 16000 and 16K as 16384 for lengths; the tables it takes them from are k m g t.
    match = re.fullmatch(r"(\d{1,18})([kKmMgG]?)", value.strip())
    if match is None:
        raise UsageError(f"after --: --{name} {value[:40]}: not a number")
    power = "kmg".find(match[2].lower()) + 1 if match[2] else 0
    unit: int = (1000 if match[2].islower() else 1024) ** power
    return int(match[1]) * unit


def _object(flags: EngineFlags, name: str) -> dict[str, Any]:
    """A flag whose value is a JSON object; ``{}`` if it is not given. UsageError if it is no JSON object."""
    value = flags.value(name)
    if value is None:
        return {}
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, int):  # --compilation-config 3
        return {"mode": found}
    if not isinstance(found, dict):
        raise UsageError(f"after --: --{name}: not a JSON object: {value[:60]}")
    return found


def _sizes(flags: EngineFlags, compilation: dict[str, Any]) -> tuple[int, ...] | None:
    found: Sequence[Any] | None = compilation.get("cudagraph_capture_sizes")
    if found is None:
        found = flags.values("cudagraph-capture-sizes") or None
    if found is None:
        return None
    try:
        return tuple(int(size) for size in found)[:4096]
    except (TypeError, ValueError):
        raise UsageError("after --: the capture sizes are not numbers") from None


def facts_of(flags: EngineFlags) -> EngineFacts:
    """Read what the drain depends on. UsageError for values that are none."""
    compilation, speculative = _object(flags, "compilation-config"), _object(flags, "speculative-config")
    mode = compilation.get("cudagraph_mode")
    why = ""
    if flags.switch("enforce-eager"):
        why = "--enforce-eager: every step runs eagerly, nothing is padded"
    elif isinstance(mode, str) and mode.upper() not in _FULL_MODES:
        why = f"cudagraph_mode {mode[:40]}: decode steps are no FULL graphs"
    tokens = speculative.get("num_speculative_tokens", 0)
    if not isinstance(tokens, int) or tokens < 0:
        raise UsageError("after --: --speculative-config: num_speculative_tokens is not a number")
    names = flags.values("served-model-name")
    return EngineFacts(
        tp=_number(flags, "tensor-parallel-size") or 1,
        host=flags.value("host") or "127.0.0.1",
        port=_number(flags, "port"),
        served_name=names[0] if names else None,
        api_key=flags.value("api-key"),
        max_num_seqs=_number(flags, "max-num-seqs"),
        max_model_len=_number(flags, "max-model-len"),
        mtp=tokens,
        method=str(speculative.get("method", ""))[:40],
        capture_sizes=_sizes(flags, compilation),
        full_graphs=not why,
        why_not_full=why,
    )


def plan_with(plan: DrainPlan, facts: EngineFacts) -> DrainPlan:
    """The plan as the server will really run it: what the engine's flags say wins. PlanError where both cannot be."""
    changes: dict[str, Any] = {"mtp": facts.mtp}
    for name in ("max_num_seqs", "max_model_len", "capture_sizes"):
        if getattr(facts, name) is not None:
            changes[name] = getattr(facts, name)
    return plan.replace(**changes)
