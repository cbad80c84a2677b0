"""A recipe from what the user has: ``key=value`` pairs, a JSON or TOML file, or the ``vllm serve`` command line itself."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ...errors import PlanError
from ..evidence.opening import read_what_comes
from .recipe import GRAPH_MODES, Recipe

__all__ = ["recipe_from_arguments", "recipe_from_text"]

MAX_BYTES = 1 << 20
_NUMBERS = frozenset({"max_model_len", "mtp", "max_num_seqs", "compress", "dp", "top_k", "max_num_batched_tokens"})
_NAMES = frozenset(field.name for field in fields(Recipe))
_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 1_000_000, "M": 1 << 20}


def recipe_from_text(text: str) -> tuple[Recipe, list[str]]:
    """The recipe and notes on what was taken as a default. PlanError for anything that makes no sense."""
    try:
        return _from_text(text)
    except PlanError as error:
        if error.help_text != PlanError.help_text:
            raise
        raise PlanError(str(error), help_text=f"Names: {', '.join(sorted(_NAMES))} (docs/audit.md)") from None  # no drain plan


def _from_text(text: str) -> tuple[Recipe, list[str]]:
    stripped = text.strip()
    if stripped.startswith(("vllm ", "--")) or " --" in stripped:
        try:
            words = shlex.split(stripped[:MAX_BYTES])
        except ValueError as error:
            raise PlanError(f"recipe: {error}") from None
        return recipe_from_arguments(words)
    path = Path(stripped) if "=" not in stripped and len(stripped) < 4096 else None
    if path is not None:
        return _checked(_from_file(path)), []
    values: dict[str, Any] = {}
    for part in stripped.split(","):
        name, separator, value = part.partition("=")
        if not separator:
            raise PlanError(f"recipe: {part[:80]!r} is not NAME=VALUE", help_text=f"Names: {', '.join(sorted(_NAMES))}")
        values[name.strip()] = value.strip()
    return _checked(values), []


def _from_file(path: Path) -> dict[str, Any]:
    try:
        raw = read_what_comes(path, MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise PlanError(f"recipe {str(path)[:200]!r}: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_BYTES:
        raise PlanError(f"recipe {path}: more than {MAX_BYTES >> 20} MiB")
    try:
        document = tomllib.loads(raw.decode()) if path.suffix == ".toml" else json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"recipe {path}: {error}") from None
    if not isinstance(document, dict):
        raise PlanError(f"recipe {path}: not a table of fields")
    return document


def _checked(values: dict[str, Any]) -> Recipe:
    known: dict[str, Any] = {}
    for name, value in values.items():
        if name not in _NAMES:
            raise PlanError(f"recipe: no field {str(name)[:80]!r}", help_text=f"Fields: {', '.join(sorted(_NAMES))}")
        known[name] = _sizes(value) if name == "capture_sizes" else _number(name, value) if name in _NUMBERS else str(value)
    if known.get("mtp") == 0:
        known.setdefault("method", "none")
    return Recipe(**known)


def _number(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise PlanError(f"recipe: {name} must be a number, got {value!r}")
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"(\d{1,12})([kKmM]?)", str(value).strip())
    if match is None:
        raise PlanError(f"recipe: {name} must be a number, got {str(value)[:80]!r}")
    return int(match[1]) * _UNITS[match[2]]


def _sizes(value: Any) -> tuple[int, ...] | None:
    if value is None or value in ("default", "null", ""):
        return None
    parts = re.split(r"[:+\s]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise PlanError(f"recipe: capture_sizes must be numbers such as 2:4:8, got {value!r}")
    return tuple(sorted({_number("capture_sizes", item) for item in parts}))


def recipe_from_arguments(arguments: Sequence[str]) -> tuple[Recipe, list[str]]:
    """From the words of a ``vllm serve`` command line. What the flags do not say is a default, and that is noted.

    The model's own properties (compression ratio, top-k, and max_model_len where it is not given) are not on a command line.
    """
    found: dict[str, str] = {}
    sizes: list[str] = []
    words = list(arguments)[:10_000]
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-") or word == "-":
            continue
        name, separator, value = word.partition("=")
        name = name.lstrip("-").replace("_", "-")
        if not separator and position < len(words) and not words[position].startswith("--"):
            value = words[position]
            position += 1
            if name in ("cudagraph-capture-sizes", "cuda-graph-sizes"):
                sizes.append(value)
                while position < len(words) and words[position].isdigit():
                    sizes.append(words[position])
                    position += 1
        found[name] = value
    recipe = Recipe()
    notes = ["the model's compression ratio and top-k are not on the command line: 4 and 512 (DeepSeek-V4-Flash) are assumed"]
    changed: dict[str, Any] = {}
    for flag, field in (
        ("max-model-len", "max_model_len"),
        ("max-num-seqs", "max_num_seqs"),
        ("max-num-batched-tokens", "max_num_batched_tokens"),
    ):
        if flag in found:
            changed[field] = _number(field, found[flag])
        elif field != "max_num_batched_tokens":
            notes.append(f"--{flag} is not given: {getattr(recipe, field)} is assumed")
    for flag in ("data-parallel-size", "dp"):
        if flag in found:
            changed["dp"] = _number("dp", found[flag])
    changed.update(_speculation(found.get("speculative-config") or found.get("sc")))
    changed.update(_graphs(found, sizes))
    return replace(recipe, **changed), notes


def _json(text: str, what: str) -> dict[str, Any]:
    try:
        document = json.loads(text[:MAX_BYTES])
    except (ValueError, RecursionError) as error:
        raise PlanError(f"recipe: {what} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise PlanError(f"recipe: {what} is not a JSON object")
    return document


def _speculation(text: str | None) -> dict[str, Any]:
    if not text:
        return {"method": "none", "mtp": 0}
    document = _json(text, "--speculative-config")
    method = str(document.get("method") or "draft model")
    depth = document.get("num_speculative_tokens", 1)
    return {"method": "mtp" if method.endswith("mtp") else method, "mtp": _number("mtp", depth)}


def _graphs(found: dict[str, str], sizes: list[str]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if "enforce-eager" in found:
        changed["graph_mode"] = "NONE"
    text = found.get("compilation-config") or found.get("cc") or found.get("O") or ""
    if text.startswith("{"):
        document = _json(text, "--compilation-config")
        mode = str(document.get("cudagraph_mode") or "").upper()
        if mode:
            if mode not in GRAPH_MODES:
                raise PlanError(f"recipe: cudagraph_mode {mode[:40]!r} is not one of {', '.join(GRAPH_MODES)}")
            changed["graph_mode"] = mode
        if document.get("cudagraph_capture_sizes"):
            changed["capture_sizes"] = _sizes(document["cudagraph_capture_sizes"])
    if sizes:
        changed["capture_sizes"] = _sizes(sizes)
    return changed
