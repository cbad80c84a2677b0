"""JSON documents without private values: by their keys first, then by the text of every string. Numbers and shapes stay.

What was replaced is counted under the file and the path of keys that leads to it (``run.json#environment.hostname``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .redact import Redactor, looks_numeric
from .redact_rules import TOKEN_KEY, is_secret_key
from .redact_text import harmless

__all__ = ["redact_json"]

_MOST_DEPTH = 60
_PROMPT_KEYS = frozenset({"prompt", "prompts", "prompt_text", "completion", "generated_text", "output_text"})
#: Below these keys, ``content`` and ``text`` are somebody's words.
_BODIES = frozenset({"messages", "choices", "prompts"})
_ARGUMENTS = frozenset({"command", "argv", "cmdline", "args"})
#: Below these keys, four numbers are a version and no address.
_VERSIONS = frozenset({"versions", "packages"})
_VERSION_KEY = re.compile(r"(?i)version|driver|cuda|nccl|cudnn|torch|nvml|vbios|firmware")
_VERSION = re.compile(r"v?\d+(?:\.\d+)+(?:[+._-]?[\w.]+)?")
_NAME_KEYS = {
    "hosts": frozenset({"hostname", "host_name", "nodename", "node_name", "host"}),
    "users": frozenset({"user", "username", "user_name", "login", "owner"}),
}


def redact_json(redactor: Redactor, value: Any, file: str) -> Any:
    """The value without private values; ``file`` is its name for the redaction report."""
    return _Walk(redactor, file).value(value, (), body=False, versions=False)


class _Walk:
    def __init__(self, redactor: Redactor, file: str) -> None:
        self.redactor = redactor
        self.file = file

    def place(self, path: tuple[str, ...]) -> str:
        return f"{self.file}#{'.'.join(path)[:120]}" if path else self.file

    def value(self, value: Any, path: tuple[str, ...], *, body: bool, versions: bool) -> Any:
        if len(path) > _MOST_DEPTH:
            return None
        key = path[-1] if path else ""
        if isinstance(value, str):
            return self.string(value, path, "prompt" if body and key in ("content", "text", "delta") else key, versions)
        if isinstance(value, Mapping):
            return {
                self.key(str(name), path): self.value(
                    item, (*path, str(name)), body=body or str(name) in _BODIES, versions=versions or str(name) in _VERSIONS
                )
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            if not self.redactor.keeps("prompts") and TOKEN_KEY.match(f"{key}=["):
                return self.ids(value, path)
            if key in _ARGUMENTS:
                return self.arguments(value, path)
            return [self.value(item, path, body=body, versions=versions) for item in value]
        return value

    def key(self, name: str, path: tuple[str, ...]) -> str:
        return self.redactor.text(name, self.place(path), 0) if re.search(r"[./@: -]", name) else name

    def string(self, value: str, path: tuple[str, ...], key: str, versions: bool) -> str:
        redactor, place = self.redactor, self.place(path)
        if not value:
            return value
        if is_secret_key(key) and not harmless(value):
            return redactor.replace("secrets", "key of a document", value, place, 0)
        if key in _PROMPT_KEYS and not redactor.keeps("prompts"):
            return f"[{redactor.replace('prompts', 'prompt or completion', value, place, 0)}, {len(value)} characters]"
        for kind, keys in _NAME_KEYS.items():
            if key.lower() in keys and not redactor.keeps(kind) and self.named(value):
                return redactor.replace(kind, "key of a document", value, place, 0)
        if (versions or _VERSION_KEY.search(key)) and _VERSION.fullmatch(value):
            return value
        return redactor.text(value, place, 0)

    def named(self, value: str) -> bool:
        return re.fullmatch(r"[\w.+-]+", value) is not None and self.redactor.is_name(value.lower()) and not looks_numeric(value)

    def ids(self, value: Sequence[Any], path: tuple[str, ...]) -> list[Any]:
        """Token ids become 0; how many there are, and negative ones, stay."""
        made: list[Any] = []
        for item in value:
            if isinstance(item, list | tuple):
                made.append(self.ids(item, path))
            elif isinstance(item, int) and not isinstance(item, bool) and item > 0:
                self.redactor.tally.add("prompts", "token ids", self.place(path), 0, "")
                made.append(0)
            else:
                made.append(item)
        return made

    def arguments(self, words: Sequence[Any], path: tuple[str, ...]) -> list[Any]:
        """An argument vector: the value of a secret flag is the next word."""
        joined = "\x00".join(word if isinstance(word, str) else json.dumps(word) for word in words)
        return list(self.redactor.text(joined, self.place(path), 0).split("\x00"))
