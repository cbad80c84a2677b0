"""A shipped Python function and its Triton kernel, executed without torch and Triton: the release's own statements over NumPy.

``python -m dsv4_repro.kernels.shipped_python`` is the child: JSON on stdin (``source``: a release's cache_utils.py, and the call),
JSON on stdout. It executes code of the release, so it runs in a process of its own, under the parent's deadline. What stands in:
tensors are NumPy arrays, a kernel's program is called once for each program id, loads and stores are masked array accesses. What
the statements say is the release's; how fast, and in which order programs run, is not.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CubinError

__all__ = ["call_combine", "combine_namespace", "main"]

_FUNCTION = "combine_topk_swa_indices"
_CLASS = "CombineTopkSwaIndicesKernel"
_KERNEL = "_COMBINE_TOPK_SWA_INDICES_KERNEL"
_OLD_KERNEL = "_combine_topk_swa_indices_kernel"


class Tensor:
    """An int32 array as the function sees a tensor."""

    def __init__(self, data: npt.NDArray[np.int32]) -> None:
        self.data = data
        self.shape = data.shape
        self.device = "cpu"
        self.dtype = "int32"

    def stride(self, axis: int) -> int:
        """In elements."""
        return self.data.strides[axis] // self.data.itemsize

    def fill_(self, value: int) -> Tensor:
        """As torch's."""
        self.data[...] = value
        return self


class Pointer:
    """An address in a tensor: ``+`` moves it by elements, one or an array of them."""

    def __init__(self, base: npt.NDArray[np.int32], at: Any = 0) -> None:
        self.base = base
        self.at = at

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.base, self.at + step)


class _Language:
    """The part of ``triton.language`` that the kernel uses. ``program``: the ids of the program that is called."""

    constexpr = int

    def __init__(self) -> None:
        self.program, self.grid = (0, 0), (1, 1)

    def program_id(self, axis: int) -> int:
        return self.program[axis]

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    def arange(self, low: int, high: int) -> npt.NDArray[np.int64]:
        return np.arange(low, high)

    def minimum(self, a: Any, b: Any) -> Any:
        return np.minimum(a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return np.maximum(a, b)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return np.where(condition, a, b)

    def load(self, pointer: Pointer, mask: Any = None, other: int = 0) -> Any:
        if np.ndim(pointer.at) == 0:
            return int(pointer.base.reshape(-1)[pointer.at]) if mask is None or mask else other
        chosen = np.ones(np.shape(pointer.at), bool) if mask is None else np.broadcast_to(mask, np.shape(pointer.at))
        result = np.full(np.shape(pointer.at), other, np.int64)
        result[chosen] = pointer.base.reshape(-1)[np.asarray(pointer.at)[chosen]]
        return result

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        flat = pointer.base.reshape(-1)
        if np.ndim(pointer.at) == 0:
            if mask is None or mask:
                flat[pointer.at] = int(value)
            return
        chosen = np.ones(np.shape(pointer.at), bool) if mask is None else np.broadcast_to(mask, np.shape(pointer.at))
        flat[np.asarray(pointer.at)[chosen]] = np.broadcast_to(value, np.shape(pointer.at))[chosen]


class _Launch:
    """A kernel: ``kernel[grid](…)`` calls its function for each program."""

    def __init__(self, function: Any, language: _Language) -> None:
        self.function, self.language = function, language

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def run(*arguments: Any, **named: Any) -> None:
            def seen(value: Any) -> Any:
                return Pointer(value.data) if isinstance(value, Tensor) else value

            self.language.grid = grid
            for x in range(grid[0]):
                for y in range(grid[1]):
                    self.language.program = (x, y)
                    self.function(*map(seen, arguments), **{name: seen(value) for name, value in named.items()})

        return run


class _Torch:
    """The part of torch that the function uses."""

    int32 = "int32"

    def full(self, shape: tuple[int, ...], fill_value: int, **_more: Any) -> Tensor:
        return Tensor(np.full(shape, fill_value, np.int32))

    def empty(self, shape: Any, **_more: Any) -> Tensor:
        return Tensor(np.full(shape, 0x7F7F7F7F, np.int32))


def combine_namespace(source: str) -> dict[str, Any]:
    """The function, its kernel and the constants they use, defined. CubinError where the source has no such function.

    Only those statements are executed; nothing is imported.
    """
    tree = ast.parse(source)
    language = _Language()
    names: dict[str, Any] = {"torch": _Torch(), "tl": language, "Any": Any, "next_power_of_2": lambda n: 1 << (n - 1).bit_length()}
    names["triton"] = type("triton", (), {"next_power_of_2": staticmethod(names["next_power_of_2"])})
    wanted: list[ast.stmt] = []
    launched: ast.FunctionDef | None = None
    call: ast.FunctionDef | None = None
    constants: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp):
            wanted.append(node)
        elif isinstance(node, ast.FunctionDef) and node.name == _FUNCTION:
            wanted.append(_bare(node))
        elif isinstance(node, ast.FunctionDef) and node.name == _OLD_KERNEL:
            launched = _bare(node)
        elif isinstance(node, ast.ClassDef) and node.name == _CLASS:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "kernel":
                    launched = _bare(item)
                elif isinstance(item, ast.FunctionDef) and item.name == "__call__":
                    call = _bare(item)
                elif isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant):
                    constants.append(item)
    if launched is None or not any(isinstance(node, ast.FunctionDef) for node in wanted):
        raise CubinError(f"the source has no {_FUNCTION} with its kernel", path="cache_utils.py")
    _define([*wanted, launched], names)
    kernel = _Launch(names[launched.name], language)
    if call is None:
        names[_OLD_KERNEL] = kernel
    else:
        body: dict[str, Any] = {}
        _define(constants, body)
        _define([call], names)
        made = type(_CLASS, (), {**body, "kernel": kernel})()
        names[_KERNEL] = _called(made, names["__call__"], kernel)
    return names


def _called(made: Any, call: Any, kernel: _Launch) -> Any:
    """The class's call. From 0.30.0 it returns (grid, parameters) and vLLM's base class launches: done here by the names of the
    kernel's parameters, a tensor's being its own with ``_ptr``.
    """

    def run(*arguments: Any, **named: Any) -> None:
        made_launch = call(made, *arguments, **named)
        if made_launch is None:
            return
        grid, given = made_launch
        bound = inspect.signature(call).bind(made, *arguments, **named).arguments
        wanted = inspect.signature(kernel.function).parameters
        kernel[grid](**{name: given[name] if name in given else bound[name.removesuffix("_ptr")] for name in wanted})

    return run


def _bare(node: ast.FunctionDef) -> ast.FunctionDef:
    """Without decorators and annotations: those name what is not here."""
    node.decorator_list, node.returns = [], None
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    return node


def _define(statements: list[Any], names: dict[str, Any]) -> None:
    module = ast.fix_missing_locations(ast.Module(body=statements, type_ignores=[]))
    for name in {item.id for item in ast.walk(module) if isinstance(item, ast.Name)} & {"open", "exec", "eval", "__import__"}:
        raise CubinError(f"the function names {name}: not run", path="cache_utils.py")
    exec(compile(module, "cache_utils.py", "exec"), names)


def call_combine(source: str, call: dict[str, Any]) -> dict[str, Any]:
    """One call. ``topk_indices``: rows; ``query_start_loc``, ``seq_lens``, ``gather_lens``, ``window_size``, ``compress_ratio``,
    ``topk``, ``M``, ``N``; ``old``: what the caller's workspace holds before (None: the function makes its own).

    ``indices`` rows of the result, ``lens`` the valid prefix of each.
    """
    names = combine_namespace(source)
    topk_indices = np.array(call["topk_indices"], np.int32)
    rows = topk_indices.shape[0]
    width = -(-(call["topk"] + call["window_size"]) // 128) * 128
    more: dict[str, Any] = {}
    if call.get("old") is not None:
        more["out"] = (Tensor(np.full((rows, width), call["old"], np.int32)), Tensor(np.full(rows, call["old"], np.int32)))
    arrays = [Tensor(np.array(call[name], np.int32)) for name in ("query_start_loc", "seq_lens", "gather_lens")]
    numbers = [call[name] for name in ("window_size", "compress_ratio", "topk", "M", "N")]
    indices, lens = names[_FUNCTION](Tensor(topk_indices), *arrays, *numbers, **more)
    return {"indices": indices.data.tolist(), "lens": lens.data.tolist()}


def main() -> int:
    """The child."""
    asked = json.load(sys.stdin)
    try:
        answer = call_combine(asked["source"], asked["call"])
    except (CubinError, SyntaxError, TypeError, KeyError, ValueError, IndexError, NameError, AttributeError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
