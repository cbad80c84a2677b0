"""A tensor stand-in over NumPy with the semantics that vLLM's metadata code needs, and element-wise knowledge of what is not known.

A tensor is a view (shape, strides) of a flat storage and of a mask of the same shape: mask true means that this element's value
is not known
here (uninitialised memory, or something that code outside the release's Python may have written). int32 wraps as on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .values import CannotDecideError, StepBudgetError, Unknown

__all__ = ["DTYPES", "MAX_ELEMENTS", "DType", "Tensor", "binary", "from_numpy", "full", "shape_only", "unknown_like"]

#: More elements than any metadata buffer has; zero-filled memory is not touched until it is written.
MAX_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class DType:
    """A torch dtype: its name and the NumPy type that stands for it."""

    name: str
    numpy: Any

    @property
    def itemsize(self) -> int:
        return int(np.dtype(self.numpy).itemsize)


DTYPES = {
    name: DType(name, kind)
    for name, kind in {
        "int32": np.int32, "int64": np.int64, "long": np.int64, "int": np.int32, "int16": np.int16, "int8": np.int8,
        "uint8": np.uint8,
        "bool": np.bool_, "float32": np.float32, "float": np.float32, "float64": np.float64, "float16": np.float16,
        "bfloat16": np.float16, "float8_e4m3fn": np.uint8, "float8_e4m3fnuz": np.uint8, "uint32": np.uint32,
    }.items()
}  # fmt: skip
_BY_NUMPY = {
    np.dtype(DTYPES[name].numpy): DTYPES[name]
    for name in ("int32", "int64", "int16", "int8", "uint8", "bool", "float32", "float64", "float16", "uint32")
}


def _checked(shape: Sequence[Any]) -> tuple[int, ...]:
    total = 1
    for item in shape:
        if isinstance(item, Unknown):
            raise CannotDecideError(f"a tensor's shape depends on {item.why}")
        if not isinstance(item, int | np.integer) or item < 0:
            raise CannotDecideError(f"a tensor's shape is {item!r}")
        total *= int(item)
    if total > MAX_ELEMENTS:
        raise StepBudgetError(f"a tensor of {total} elements")
    return tuple(int(item) for item in shape)


class Tensor:
    """A view ``array`` with its ``mask`` (same shape). ``strides``: in elements, where they are not those of ``array``."""

    __slots__ = ("array", "base", "base_mask", "dtype", "mask", "strides")

    def __init__(
        self, array: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], dtype: DType,
        base: np.ndarray[Any, Any] | None = None, base_mask: np.ndarray[Any, Any] | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self.array = array
        self.mask = mask
        self.dtype = dtype
        self.base = array.reshape(-1) if base is None else base
        self.base_mask = mask.reshape(-1) if base_mask is None else base_mask
        self.strides = strides

    def __repr__(self) -> str:
        return f"<tensor {self.dtype.name}{list(self.array.shape)}>"

    # -- shape ----------------------------------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def stride(self, dim: int | None = None) -> Any:
        """Strides in elements, all of them or of one dimension."""
        strides = self.strides or tuple(int(item) // self.array.itemsize for item in self.array.strides)
        return strides if dim is None else strides[dim]

    @property
    def flat_offset(self) -> int:
        """Index of the first element in the flat storage."""
        return int(self.array.__array_interface__["data"][0] - self.base.__array_interface__["data"][0]) // self.array.itemsize

    def _view(self, array: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> Tensor:
        if np.shares_memory(array, self.base) or array.size == 0:
            return Tensor(array, mask, self.dtype, self.base, self.base_mask)
        return Tensor(array, mask, self.dtype)

    def reshaped(self, shape: Sequence[Any]) -> Tensor:
        wanted = list(shape)
        if wanted.count(-1) == 1:
            rest = 1
            for item in wanted:
                rest *= 1 if item == -1 else item
            wanted[wanted.index(-1)] = self.array.size // rest if rest else 0
        clean = _checked(wanted)
        if int(np.prod(clean, dtype=np.int64)) != self.array.size:
            raise CannotDecideError(f"a view of {self.array.size} elements as {list(clean)}")
        return self._view(self.array.reshape(clean), self.mask.reshape(clean))

    def unsqueezed(self, dim: int) -> Tensor:
        return self._view(np.expand_dims(self.array, dim), np.expand_dims(self.mask, dim))

    # -- reading ---------------------------------------------------------------------------------------------------------------
    def item(self) -> Any:
        """The one element as a Python number, or Unknown."""
        if self.array.size != 1:
            raise CannotDecideError(f"item() of {self.array.size} elements")
        return (
            Unknown("an element that is not initialised or was written by code outside")
            if bool(self.mask.reshape(-1)[0])
            else self.array.reshape(-1)[0].item()
        )

    def tolist(self) -> Any:
        """Nested lists; an unknown element is None."""

        def build(array: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> Any:
            if array.ndim == 0:
                return None if bool(mask) else array.item()
            return [build(a, m) for a, m in zip(array, mask, strict=True)]

        return build(self.array, self.mask)

    def get(self, index: Any) -> Tensor:
        key, key_mask = _index(index)
        if key_mask:
            raise CannotDecideError("an index that is not known")
        array = self.array[key]
        return self._view(np.asarray(array), np.asarray(self.mask[key]))

    # -- writing ---------------------------------------------------------------------------------------------------------------
    def set(self, index: Any, value: Any) -> None:
        key, key_mask = _index(index)
        if not self.array.flags.writeable:
            return  # shape-only tensors: contents never matter
        if key_mask:
            self.mask[...] = True
        elif isinstance(value, Unknown):
            self.mask[key] = True
        elif isinstance(value, Tensor):
            with np.errstate(all="ignore"):
                self.array[key] = value.array.astype(self.array.dtype, copy=True)
            self.mask[key] = value.mask.copy()
        else:
            self.array[key] = np.array(value).astype(self.array.dtype)
            self.mask[key] = False

    def spoil(self) -> None:
        """Code outside may have written here: nothing is known of these elements from now on."""
        if self.mask.flags.writeable:
            self.mask[...] = True

    def elementwise(self, function: Callable[[np.ndarray[Any, Any]], Any], dtype: DType | None = None) -> Tensor:
        with np.errstate(all="ignore"):
            array = np.asarray(function(self.array))
        return from_numpy(array if dtype is None else array.astype(dtype.numpy), self.mask.copy())

    def reduced(self, function: Callable[..., Any], dim: Any = None) -> Tensor:
        """A reduction: unknown where any reduced element is."""
        if isinstance(dim, Unknown):
            raise CannotDecideError(f"a reduction over {dim.why}")
        return from_numpy(np.asarray(function(self.array, axis=dim)), np.asarray(self.mask.any(axis=dim)))

    def cast(self, dtype: DType) -> Tensor:
        return Tensor(self.array.astype(dtype.numpy), self.mask.copy(), dtype)


def _index(index: Any) -> tuple[Any, bool]:
    parts = index if isinstance(index, tuple) else (index,)
    out: list[Any] = []
    hidden = False
    for part in parts:
        if isinstance(part, Unknown):
            hidden = True
        elif isinstance(part, slice):
            pieces = [part.start, part.stop, part.step]
            for position, piece in enumerate(pieces):
                value = piece.item() if isinstance(piece, Tensor) else piece
                hidden = hidden or isinstance(value, Unknown)
                pieces[position] = value
            out.append(slice(None) if hidden else slice(*pieces))
        elif isinstance(part, Tensor):
            hidden = hidden or bool(part.mask.any())
            out.append(part.array)
        elif part is None or part is Ellipsis or isinstance(part, int | np.integer | bool):
            out.append(part)
        elif isinstance(part, list):
            out.append(np.array(part))
        else:
            raise CannotDecideError(f"a tensor is indexed with {type(part).__name__}")
    return tuple(out), hidden


def from_numpy(array: Any, mask: Any = None) -> Tensor:
    """A tensor that owns ``array``; everything known unless ``mask`` says otherwise."""
    data = np.array(array)
    dtype = _BY_NUMPY.get(data.dtype)
    if dtype is None:
        raise CannotDecideError(f"a tensor of {data.dtype}")
    hidden = np.zeros(data.shape, bool) if mask is None else np.array(mask, bool)
    return Tensor(data, hidden, dtype)


def full(shape: Sequence[Any], value: Any, dtype: DType, *, known: bool = True) -> Tensor:
    """A new tensor. ``known=False``: its memory is not initialised."""
    clean = _checked(shape)
    if isinstance(value, Unknown):
        known, value = False, 0
    array = np.zeros(clean, dtype.numpy) if not value else np.full(clean, value, dtype.numpy)
    mask = np.zeros(clean, bool) if known else np.ones(clean, bool)
    return Tensor(array, mask, dtype)


def shape_only(shape: Sequence[int], dtype: DType, row_stride: int | None = None) -> Tensor:
    """A tensor whose contents are never looked at (logits, queries): no memory is used. ``row_stride``: elements between rows."""
    clean = tuple(int(item) for item in shape)
    zero = np.zeros(1, dtype.numpy)
    strides = [1] * len(clean)
    for position in range(len(clean) - 2, -1, -1):
        strides[position] = strides[position + 1] * clean[position + 1]
    if row_stride is not None:
        strides[0] = row_stride
    return Tensor(
        np.broadcast_to(zero, clean),
        np.broadcast_to(np.ones(1, bool), clean),
        dtype,
        base=zero,
        base_mask=np.ones(1, bool),
        strides=tuple(strides),
    )


def unknown_like(shape: Sequence[Any], dtype: DType) -> Tensor:
    """A tensor of which only the shape is known."""
    return full(shape, 0, dtype, known=False)


def binary(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """An element-wise operation of two values of which at least one is a tensor; masks join."""
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        known = left if isinstance(left, Tensor) else right
        return unknown_like(known.shape, known.dtype)
    a, b = (item.array if isinstance(item, Tensor) else item for item in (left, right))
    try:
        with np.errstate(all="ignore"):
            array = np.asarray(function(a, b))
    except (OverflowError, ValueError, TypeError) as error:
        raise CannotDecideError(f"a tensor operation that NumPy refuses: {error}") from error
    masks = [item.mask for item in (left, right) if isinstance(item, Tensor)]
    mask = masks[0] if len(masks) == 1 else masks[0] | masks[1]
    return from_numpy(array, np.broadcast_to(mask, array.shape))
