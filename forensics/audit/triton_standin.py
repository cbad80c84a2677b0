"""Triton kernels of a release, program by program, over the tensor stand-in: ``kernel[grid](…)`` runs the kernel's own syntax tree.

A tensor argument becomes a pointer into its flat storage, so that strided views and neighbouring buffers behave as on the device;
an access
outside the storage is refused. Programs run one after the other: kernels whose programs depend on each other are not for this.
"""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .tensors import DTYPES, DType, Tensor, binary, from_numpy, full
from .torch_standin import _reduction, _where
from .values import CannotDecideError, Function, Instance, InterpretedError, Namespace, Native, StepBudgetError, Unknown

if TYPE_CHECKING:
    from .interpreter import Interpreter

__all__ = ["Pointer", "launch_specification", "launcher", "triton_modules"]

MAX_PROGRAMS = 16384


@dataclass(frozen=True, eq=False)
class Pointer:
    """An address: a flat storage with its mask and the element offset (an int or an array of offsets)."""

    base: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any]
    offset: Any

    @staticmethod
    def to(tensor: Tensor) -> Pointer:
        return Pointer(tensor.base, tensor.base_mask, tensor.flat_offset)

    @staticmethod
    def combined(kind: type[ast.operator], left: Any, right: Any) -> Any:
        """``pointer + offset``; anything else with pointers is not metadata arithmetic."""
        pointer, other = (left, right) if isinstance(left, Pointer) else (right, left)
        if kind not in (ast.Add, ast.Sub) or not isinstance(pointer, Pointer) or isinstance(other, Pointer):
            raise CannotDecideError("pointer arithmetic")
        if isinstance(other, Unknown):
            raise CannotDecideError(f"an address depends on {other.why}")
        step = other.array.astype(np.int64) if isinstance(other, Tensor) else other
        if isinstance(other, Tensor) and bool(other.mask.any()):
            raise CannotDecideError("an address depends on an unknown element")
        return Pointer(pointer.base, pointer.mask, pointer.offset + (step if kind is ast.Add else -step))

    def places(self, mask: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Element indices and which of them are accessed; refused when an accessed one lies outside."""
        index = np.asarray(self.offset)
        if isinstance(mask, Unknown) or (isinstance(mask, Tensor) and bool(mask.mask.any())):
            raise CannotDecideError("an access under an unknown mask")
        wanted = np.broadcast_to(
            np.asarray(True if mask is None else mask.array if isinstance(mask, Tensor) else mask, bool), index.shape
        )
        if np.any(wanted & ((index < 0) | (index >= self.base.size))):
            raise InterpretedError("IllegalAccess", "a Triton access outside its buffer")
        return index, wanted


def _load(pointer: Any, mask: Any = None, other: Any = None, **_: Any) -> Any:
    if not isinstance(pointer, Pointer):
        return Unknown("a load from an unknown address")
    index, wanted = pointer.places(mask)
    safe = np.where(wanted, index, 0)
    values, hidden = pointer.base[safe], pointer.mask[safe]
    if other is None:
        hidden = hidden | ~wanted
    elif not isinstance(other, Unknown | Tensor):
        values, hidden = np.where(wanted, values, np.asarray(other).astype(values.dtype)), hidden & wanted
    result = from_numpy(values, hidden)
    return result if index.ndim else result.item()


def _store(pointer: Any, value: Any, mask: Any = None, **_: Any) -> None:
    if not isinstance(pointer, Pointer):
        raise CannotDecideError("a store to an unknown address")
    index, wanted = pointer.places(mask)
    places = index[wanted]
    if isinstance(value, Unknown):
        pointer.mask[places] = True
        return
    data = value.array if isinstance(value, Tensor) else np.asarray(value)
    hidden = value.mask if isinstance(value, Tensor) else np.zeros(data.shape, bool)
    with np.errstate(all="ignore"):
        pointer.base[places] = np.broadcast_to(data, index.shape)[wanted].astype(pointer.base.dtype)
    pointer.mask[places] = np.broadcast_to(hidden, index.shape)[wanted]


def _pairwise(function: Any, plain: Any) -> Any:
    def call(left: Any, right: Any, **_: Any) -> Any:
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            return binary(function, left, right)
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return Unknown(left.why if isinstance(left, Unknown) else right.why)
        return plain(left, right)

    return call


def _cdiv(left: Any, right: Any) -> Any:
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return Unknown("a quotient of unknowns")
    return -(-left // right)


def _sum(value: Any, axis: Any = None, **_: Any) -> Any:
    result = _reduction(value, "sum", axis)
    return result.item() if isinstance(result, Tensor) and result.array.ndim == 0 else result


def triton_modules() -> dict[str, Namespace]:
    """``vllm.triton_utils`` and ``triton``; ``tl.program_id`` is set by the launcher."""
    language = Namespace(
        "triton.language",
        {
            "load": Native("tl.load", _load), "store": Native("tl.store", _store),
            "arange": Native("tl.arange", lambda start, stop: from_numpy(np.arange(start, stop, dtype=np.int32))),
            "range": Native("tl.range", lambda *args, **_: range(*args)), "static_range": Native("tl.static_range",
            lambda *args, **_: range(*args)),
            "maximum": Native("tl.maximum", _pairwise(np.maximum, max)), "minimum": Native("tl.minimum", _pairwise(np.minimum,
            min)),
            "where": Native("tl.where", lambda test, yes, no: _where(test, yes, no) if isinstance(test,
            Tensor) else (test if isinstance(test, Unknown) else (yes if test else no))),
            "full": Native("tl.full", lambda shape, value, dtype: full(shape, value, dtype if isinstance(dtype,
            DType) else DTYPES["int32"])),
            "zeros": Native("tl.zeros", lambda shape, dtype: full(shape, 0, dtype if isinstance(dtype,
            DType) else DTYPES["int32"])),
            "sum": Native("tl.sum", _sum), "cdiv": Native("tl.cdiv", _cdiv), "program_id": Native("tl.program_id",
            lambda axis: Unknown("program_id outside a launch")),
            "constexpr": Namespace("tl.constexpr"), **{name: DTYPES[name] for name in ("int32", "int64", "int8", "uint8",
            "float32", "int16")},
        },
    )  # fmt: skip
    triton = Namespace(
        "triton",
        {
            "cdiv": Native("triton.cdiv", _cdiv), "language": language, "jit": Native("triton.jit",
            lambda *args, **kwargs: args[0] if args else Native("jit", lambda f: f)),
            "next_power_of_2": Native("triton.next_power_of_2", lambda n: n if isinstance(n,
            Unknown) else 1 << max(int(n) - 1, 0).bit_length()),
        },
    )  # fmt: skip
    return {
        "triton": triton,
        "triton.language": language,
        "vllm.triton_utils": Namespace("vllm.triton_utils", {"tl": language, "triton": triton, "HAS_TRITON": True}),
    }


def launcher(interpreter: Interpreter, kernel: Function, grid: Any) -> Native:
    """``kernel[grid]``."""

    def launch(*args: Any, **kwargs: Any) -> None:
        dims = grid if isinstance(grid, tuple | list) else (grid,)
        counts = []
        for item in dims:
            value = item.item() if isinstance(item, Tensor) else item
            if not isinstance(value, int):
                raise CannotDecideError(f"the grid of {kernel.name} is not known", interpreter.where)
            counts.append(value)
        total = int(np.prod(counts, dtype=np.int64)) if counts else 0
        if total > MAX_PROGRAMS:
            raise StepBudgetError(f"{total} Triton programs", interpreter.where)
        names = set(kernel.parameters)
        clean = [Pointer.to(item) if isinstance(item, Tensor) else item for item in args]
        named = {name: Pointer.to(item) if isinstance(item, Tensor) else item for name, item in kwargs.items() if name in names}
        language = interpreter.standins["triton.language"]
        previous = language.attrs["program_id"]
        try:
            for program in itertools.product(*(range(count) for count in counts)):
                language.attrs["program_id"] = Native("tl.program_id", lambda axis, at=program: at[axis] if axis < len(at) else 0)
                interpreter.run_function(kernel, list(clean), dict(named))
        finally:
            language.attrs["program_id"] = previous

    return Native(f"{kernel.name}[…]", launch)


def launch_specification(interpreter: Interpreter, function: Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A declarative launcher (``@kernel_launcher``): its method returns grid and extra arguments, the rest is bound by name.

    The kernel's parameter ``x`` or ``x_ptr`` takes the method's argument ``x``.
    """
    spec = interpreter.run_function(function, args, kwargs)
    owner = args[0] if args else None
    if not isinstance(spec, tuple) or len(spec) < 2 or not isinstance(owner, Instance) or not isinstance(spec[1], dict):
        interpreter.spoil(args, kwargs)
        return Unknown(f"the launch of {function.name}")
    inputs: dict[str, Any] = dict(zip(function.parameters[1:], args[1:], strict=False))
    inputs.update(kwargs)
    kernel = interpreter.attribute(owner, "kernel")
    if not isinstance(kernel, Function):
        interpreter.spoil(args, kwargs)
        return Unknown(f"the kernel of {owner.cls.name}")
    values = dict(spec[1])
    for name in kernel.parameters:
        stem = name.removesuffix("_ptr")
        for candidate in (name, stem):
            if name not in values and candidate in inputs:
                values[name] = inputs[candidate]
    if spec[0] is not None:
        launcher(interpreter, kernel, spec[0]).call(**values)
    return spec[2] if len(spec) > 2 else None
