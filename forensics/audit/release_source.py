"""Finds, in a release's own Python, the code that decides: the indexer's metadata builder, its top-k dispatch, its row width.

Found by what the code does (the buffers it fills, the arguments it takes), never by version or by a fixed line; a name may move
between files
from release to release. Syntax trees only: nothing of the release is imported.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["MEMBER_PATTERNS", "Located", "ReleaseSource"]

#: What the audit reads of a wheel, as patterns for ``kernels.shipped.release_members``.
MEMBER_PATTERNS = (
    "vllm/v1/attention/*.py", "vllm/v1/attention/backends/*.py", "vllm/v1/attention/backends/mla/*.py",
    "vllm/v1/attention/ops/*.py",
    "vllm/model_executor/layers/*.py", "vllm/config/*.py", "vllm/utils/*.py", "vllm/_custom_ops.py",
    "vllm/v1/kv_cache_interface.py",
    "vllm/model_executor/warmup/*.py", "vllm/models/deepseek_v4/*.py", "vllm/model_executor/models/deepseek_v2.py",
    "vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/*.py", "vllm/v1/worker/cp_utils.py", "vllm-*.dist-info/METADATA",
    "vllm/_version.py",
)  # fmt: skip
_NOT_CUDA = ("rocm", "/amd/", "xpu", "/cpu/", "tpu")
_MAX_FILE = 4 << 20


_T = TypeVar("_T")


def _once(method: Callable[[ReleaseSource], _T]) -> Callable[[ReleaseSource], _T]:
    """The search runs once per release."""

    @functools.wraps(method)
    def found(self: ReleaseSource) -> _T:
        if method.__name__ not in self._found:
            self._found[method.__name__] = method(self)
        value: _T = self._found[method.__name__]
        return value

    return found


@dataclass(frozen=True, slots=True)
class Located:
    """A function or class of the release: module, name, ``file:line``."""

    module: str
    name: str
    place: str


class ReleaseSource:
    """``members``: file name in the wheel to bytes (what ``MEMBER_PATTERNS`` selects, or more)."""

    def __init__(self, members: Mapping[str, bytes]) -> None:
        self.members = members
        self.trees: dict[str, ast.Module | None] = {}
        self._found: dict[str, Any] = {}

    def tree(self, path: str) -> ast.Module | None:
        """The file's syntax tree, None if it is not Python that can be read here."""
        if path not in self.trees:
            raw = self.members[path]
            try:
                self.trees[path] = ast.parse(raw) if len(raw) <= _MAX_FILE else None
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self.trees[path] = None
        return self.trees[path]

    def _files(self, *words: bytes) -> Iterator[tuple[str, ast.Module]]:
        for path in sorted(self.members):
            if not path.endswith(".py") or any(mark in path for mark in _NOT_CUDA):
                continue
            raw = self.members[path]
            if all(word in raw for word in words):
                tree = self.tree(path)
                if tree is not None:
                    yield path, tree

    def unreadable(self, *words: bytes) -> str:
        """Why nothing can be said about code with these words in this Python; "" if all of it that matters could be read.

        Either no file of it is Python that can be read here, or one that holds all the words is not.
        """
        paths = [path for path in sorted(self.members) if path.endswith(".py")]
        if not paths:
            return "no Python of the build could be read"
        ours = [path for path in paths if not any(mark in path for mark in _NOT_CUDA)]
        broken = next((path for path in ours if all(w in self.members[path] for w in words) and self.tree(path) is None), None)
        if broken is not None:
            return f"{broken} is not Python that can be read here"
        if not any(self.members[path].strip() and self.tree(path) is not None for path in paths):
            return f"no Python of the build could be read: {len(paths)} file(s), {paths[0]} is the first"
        return ""

    @_once
    def builder(self) -> Located | None:
        """The metadata builder: a class with ``build`` that fills a decode-length buffer from per-token offsets."""
        found: list[tuple[int, Located]] = []
        for path, tree in self._files(b"decode_lens_buffer", b"offsets_buffer"):
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    names = {item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute)}
                    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                    if {"decode_lens_buffer", "offsets_buffer"} <= names and {"build", "__init__"} <= methods:
                        score = len(names & {"arange_buffer", "expanded_block_table_buffer", "scheduler_metadata_buffer"})
                        found.append((score, Located(_module(path), node.name, f"{path}:{node.lineno}")))
        return max(found, key=lambda item: item[0])[1] if found else None

    @_once
    def dispatch(self) -> Located | None:
        """The decode top-k dispatch: a function over the top-k index buffer that computes paged MQA logits."""
        found: list[tuple[int, Located]] = []
        for path, tree in self._files(b"paged_mqa_logits", b"topk_indices_buffer"):
            for node in tree.body:
                if isinstance(node, ast.FunctionDef):
                    names = {item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
                    called = {ast.unparse(item.func).rsplit(".", 1)[-1] for item in ast.walk(node) if isinstance(item, ast.Call)}
                    logits = any("paged_mqa_logits" in name for name in called)
                    if {"topk_indices_buffer", "topk_tokens", "max_model_len"} <= names and logits:
                        found.append((-len(node.name), Located(_module(path), node.name, f"{path}:{node.lineno}")))
        return max(found, key=lambda item: item[0])[1] if found else None

    def class_defaults(self, path: str) -> dict[str, Any]:
        """Literal defaults of the fields of every class in a file (a configuration of the release), by field name."""
        key = f"defaults:{path}"
        if key not in self._found:
            tree = self.tree(path) if path in self.members else None
            self._found[key] = _defaults(tree) if tree is not None else {}
        defaults: dict[str, Any] = self._found[key]
        return defaults

    @_once
    def compressed_width(self) -> str:
        """``file:line`` where an indexer layer divides max_model_len by its compression ratio; "" if that was not found."""
        for path, tree in self._files(b"compress_ratio", b"max_model_len"):
            for node in ast.walk(tree):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
                    left, right = ast.unparse(node.left), ast.unparse(node.right)
                    if left.endswith("max_model_len") and right.endswith("compress_ratio"):
                        return f"{path}:{node.lineno}"
        return ""

    @_once
    def padded_lengths(self) -> tuple[str, ...]:
        """``file:line`` where the model runners write 0 as the length of the slots that hold no request."""
        found: list[str] = []
        for path, tree in self._files(b"seq_lens"):
            if "/worker/gpu" not in path:
                continue
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call):
                    continue
                target, arguments = ast.unparse(node.func), [ast.unparse(item) for item in node.args]
                zeroed = target == "self.seq_lens[num_reqs:].fill_" and arguments == ["0"]
                stored = target == "tl.store" and arguments[:2] == ["seq_lens_ptr + block", "0"]
                if zeroed or stored:
                    found.append(f"{path}:{node.lineno}")
        return tuple(found)


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _defaults(tree: ast.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cls in ast.walk(tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        for item in cls.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None:
                value: ast.expr | None = item.value
                if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("Field"):
                    value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
                if isinstance(value, ast.Constant):
                    found.setdefault(item.target.id, value.value)
    return found
