"""torch as far as vLLM's indexer metadata and top-k dispatch use it: functions, tensor methods, and the recorder of
device-operator calls.

Methods that end in ``_`` and assignments write in place, as torch's do, and every view sees them. A method that is not here is
unknown code:
its result is unknown and so are, from then on, the tensors that it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .tensors import DTYPES, DType, Tensor, binary, from_numpy, full, unknown_like
from .values import CannotDecideError, Namespace, Native, Unknown

if TYPE_CHECKING:
    from .expressions import Expressions

__all__ = ["OperatorCall", "Recorder", "python_method", "tensor_attribute", "torch_module"]


@dataclass(frozen=True)
class OperatorCall:
    """A call of a compiled operator (``torch.ops._C.persistent_topk``): library, name, positional and keyword arguments, where."""

    library: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: str


@dataclass
class Recorder:
    """Compiled operators that the release's code called, in order. They write to their tensors: those become unknown."""

    calls: list[OperatorCall] = field(default_factory=list)
    place: Callable[[], str] = lambda: ""

    def library(self, library: str) -> Namespace:
        def operator(name: str) -> Native:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.calls.append(OperatorCall(library, name, args, kwargs, self.place()))
                return Unknown(f"the result of torch.ops.{library}.{name}")

            return Native(f"{library}.{name}", call)

        return Namespace(f"torch.ops.{library}", missing=operator)


def _shape(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple) else args


def _dtype(value: Any, otherwise: str) -> DType:
    return value if isinstance(value, DType) else DTYPES[otherwise]


def _into(out: Any, value: Tensor) -> Tensor:
    if isinstance(out, Tensor):
        out.set(Ellipsis, value)
        return out
    return value


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.array.size == 1 else value


def _arange(*args: Any, dtype: Any = None, **_: Any) -> Any:
    clean = [_number(item) for item in args]
    for item in clean:
        if isinstance(item, Unknown):
            raise CannotDecideError(f"arange of {item.why}")
    return from_numpy(np.arange(*clean).astype(_dtype(dtype, "int64").numpy))


def _diff(value: Any, *, out: Any = None, **_: Any) -> Any:
    if isinstance(value, Unknown):
        return value
    return _into(out, from_numpy(np.diff(value.array), value.mask[1:] | value.mask[:-1]))


def _repeat_interleave(value: Any, repeats: Any, dim: Any = None, *, output_size: Any = None, **_: Any) -> Any:
    if isinstance(value, Unknown) or isinstance(repeats, Unknown):
        return Unknown("repeat_interleave of an unknown")
    times = repeats.array if isinstance(repeats, Tensor) else repeats
    if isinstance(repeats, Tensor) and bool(repeats.mask.any()):
        raise CannotDecideError("repeat_interleave by unknown counts")
    if int(np.sum(times)) < 0 or np.any(np.asarray(times) < 0) or int(np.sum(times)) > 1 << 22:
        raise CannotDecideError("repeat_interleave by impossible counts")
    axis = dim if dim is not None else (0 if value.array.ndim == 1 else None)
    return from_numpy(np.repeat(value.array, times, axis=axis), np.repeat(value.mask, times, axis=axis))


def _cat(items: Any, dim: int = 0, **_: Any) -> Any:
    if any(isinstance(item, Unknown) for item in items):
        return Unknown("cat of an unknown")
    return from_numpy(
        np.concatenate([item.array for item in items], axis=dim), np.concatenate([item.mask for item in items], axis=dim)
    )


def _cumsum(value: Any, dim: int = 0, *, out: Any = None, dtype: Any = None, **_: Any) -> Any:
    if isinstance(value, Unknown):
        return value
    result = np.cumsum(value.array, axis=dim).astype(_dtype(dtype, "int64").numpy)
    return _into(out, from_numpy(result, np.logical_or.accumulate(value.mask, axis=dim)))


def _where(test: Any, yes: Any, no: Any) -> Any:
    if isinstance(test, Unknown):
        return Unknown(test.why)
    a, b = (item.array if isinstance(item, Tensor) else item for item in (yes, no))
    if isinstance(yes, Unknown) or isinstance(no, Unknown):
        known = yes if isinstance(yes, Tensor) else no
        return unknown_like(test.shape, known.dtype if isinstance(known, Tensor) else DTYPES["int64"])
    choice = test.array if isinstance(test, Tensor) else np.asarray(test)
    result = np.where(choice, a, b)
    weak = [item for item in (yes, no) if isinstance(item, Tensor)]
    if weak:
        result = result.astype(weak[0].dtype.numpy)
    mask = np.zeros(result.shape, bool)
    for item, side in ((yes, choice), (no, ~np.asarray(choice, bool))):
        if isinstance(item, Tensor):
            mask |= np.broadcast_to(item.mask, result.shape) & side
    if isinstance(test, Tensor):
        mask |= np.broadcast_to(test.mask, result.shape)
    return from_numpy(result, mask)


def _clamp(value: Any, min: Any = None, max: Any = None) -> Any:  # torch's own argument names
    if isinstance(value, Unknown):
        return value
    low, high = _number(min), _number(max)
    if isinstance(low, Unknown) or isinstance(high, Unknown):
        return unknown_like(value.shape, value.dtype)
    return value.elementwise(lambda array: np.clip(array, low, high).astype(array.dtype))


def _div(left: Any, right: Any, *, rounding_mode: Any = None, out: Any = None) -> Any:
    result = binary(np.floor_divide if rounding_mode == "floor" else np.true_divide, left, right)
    return _into(out, result)


def _reduction(value: Any, name: str, dim: Any) -> Any:
    if isinstance(value, Unknown):
        return value
    functions: dict[str, Callable[..., Any]] = {"any": np.any, "all": np.all, "sum": np.sum, "max": np.max, "min": np.min}
    result = value.reduced(functions[name], dim)
    return (
        result.cast(DTYPES["int64"])
        if name == "sum" and value.dtype.name in ("int32", "bool", "int16", "int8", "uint8")
        else result
    )


def _tensor(value: Any, dtype: Any = None, **_: Any) -> Any:
    if isinstance(value, Unknown):
        return value
    if isinstance(value, Tensor):
        return value.cast(value.dtype if not isinstance(dtype, DType) else dtype)
    return from_numpy(np.asarray(value).astype(_dtype(dtype, "int64").numpy))


def torch_module(recorder: Recorder) -> Namespace:
    """The ``torch`` stand-in, its operators recorded in ``recorder``."""

    def like(value: Any, fill: Any, known: bool = True) -> Any:
        return value if isinstance(value, Unknown) else full(value.shape, fill, value.dtype, known=known)

    table: dict[str, Callable[..., Any]] = {
        "arange": _arange, "diff": _diff, "repeat_interleave": _repeat_interleave, "cat": _cat, "cumsum": _cumsum, "where": _where,
        "clamp": _clamp, "div": _div, "tensor": _tensor, "as_tensor": _tensor,
        "zeros": lambda *shape, dtype=None, **_: full(_shape(shape), 0, _dtype(dtype, "float32")),
        "ones": lambda *shape, dtype=None, **_: full(_shape(shape), 1, _dtype(dtype, "float32")),
        "empty": lambda *shape, dtype=None, **_: full(_shape(shape), 0, _dtype(dtype, "float32"), known=False),
        "full": lambda shape, fill, dtype=None, **_: full(_shape((shape,)), fill, _dtype(dtype, "int64")),
        "zeros_like": lambda value, **_: like(value, 0), "ones_like": lambda value, **_: like(value, 1),
        "empty_like": lambda value, **_: like(value, 0, known=False),
        "maximum": lambda a, b, out=None: _into(out, binary(np.maximum, a, b)), "minimum": lambda a, b, out=None: _into(out,
        binary(np.minimum, a, b)),
        "floor_divide": lambda a, b: binary(np.floor_divide, a, b),
        "any": lambda value, dim=None: _reduction(value, "any", dim), "all": lambda value, dim=None: _reduction(value, "all", dim),
        "sum": lambda value, dim=None: _reduction(value, "sum", dim),
        "from_numpy": lambda value: value, "device": lambda *args: Namespace("device", {"index": 0, "type": "cuda"}),
        "no_grad": lambda *args: None, "inference_mode": lambda *args: None,
    }  # fmt: skip
    attrs: dict[str, Any] = {name: Native(f"torch.{name}", call) for name, call in table.items()}
    attrs.update(DTYPES)
    attrs["dtype"], attrs["Tensor"] = Namespace("torch.dtype"), Namespace("torch.Tensor")
    attrs["ops"] = Namespace("torch.ops", missing=recorder.library)
    attrs["cuda"] = Namespace("torch.cuda", {"is_current_stream_capturing": Native("is_current_stream_capturing", lambda: True)})
    module = Namespace("torch.nn.Module")
    attrs["nn"] = Namespace("torch.nn", {"Module": module})
    return Namespace("torch", attrs)


_VIEWS: dict[str, Callable[..., Any]] = {
    "contiguous": lambda t: t, "detach": lambda t: t, "cpu": lambda t: t, "cuda": lambda t, *a, **k: t, "numpy": lambda t: t,
    "pin_memory": lambda t: t,
    "unsqueeze": lambda t, dim: t.unsqueezed(dim), "dim": lambda t: t.array.ndim, "numel": lambda t: int(t.array.size),
    "size": lambda t, dim=None: t.shape if dim is None else t.shape[dim], "stride": lambda t, dim=None: t.stride(dim),
    "element_size": lambda t: t.dtype.itemsize, "item": lambda t: t.item(), "tolist": lambda t: t.tolist(),
    "flatten": lambda t: t.reshaped((-1,)), "is_contiguous": lambda t: True, "data_ptr": lambda t: Unknown("an address"),
    "squeeze": lambda t, dim=-1: t.reshaped([n for i, n in enumerate(t.shape) if not (n == 1 and i == dim % t.array.ndim)]),
    "reshape": lambda t, *shape: t.reshaped(_shape(shape)), "expand": lambda t, *shape: _expand(t, _shape(shape)),
}  # fmt: skip
_VALUES: dict[str, Callable[..., Any]] = {
    "clone": lambda t: from_numpy(t.array, t.mask), "int": lambda t: t.cast(DTYPES["int32"]),
    "long": lambda t: t.cast(DTYPES["int64"]),
    "float": lambda t: t.cast(DTYPES["float32"]), "bool": lambda t: t.cast(DTYPES["bool"]), "clamp": _clamp,
    "clamp_min": lambda t, low: _clamp(t, low),
    "any": lambda t, dim=None: _reduction(t, "any", dim), "all": lambda t, dim=None: _reduction(t, "all", dim),
    "sum": lambda t, dim=None, **_: _reduction(t, "sum", dim),
    "argmax": lambda t, dim=None: t.reduced(np.argmax, dim), "argmin": lambda t, dim=None: t.reduced(np.argmin, dim),
    "cumsum": _cumsum, "floor_divide": lambda t, by: binary(np.floor_divide, t, by), "add": lambda t, by: binary(np.add, t, by),
    "sub": lambda t, by: binary(np.subtract, t, by), "mul": lambda t, by: binary(np.multiply, t, by),
    "repeat_interleave": _repeat_interleave,
    "diff": _diff, "ne": lambda t, by: binary(np.not_equal, t, by), "eq": lambda t, by: binary(np.equal, t, by),
    "gt": lambda t, by: binary(np.greater, t, by), "lt": lambda t, by: binary(np.less, t, by),
    "logical_not": lambda t: t.elementwise(np.logical_not),
    "new_empty": lambda t, *shape, dtype=None, **_: full(_shape(shape), 0, dtype or t.dtype, known=False),
    "new_zeros": lambda t, *shape, dtype=None, **_: full(_shape(shape), 0, dtype or t.dtype),
    "new_full": lambda t, shape, fill, dtype=None, **_: full(_shape((shape,)), fill, dtype or t.dtype),
    "max": lambda t, dim=None: _extreme(t, "max", dim), "min": lambda t, dim=None: _extreme(t, "min", dim),
}  # fmt: skip
_IN_PLACE: dict[str, Callable[..., Any]] = {
    "clamp_": _clamp, "clamp_min_": lambda t, low: _clamp(t, low), "add_": lambda t, by: binary(np.add, t, by), "sub_": lambda t,
    by: binary(np.subtract, t, by),
    "mul_": lambda t, by: binary(np.multiply, t, by), "floor_divide_": lambda t, by: binary(np.floor_divide, t, by),
    "copy_": lambda t, other, *_, **__: other, "fill_": lambda t, value: value, "zero_": lambda t: 0,
}  # fmt: skip


def _extreme(value: Tensor, name: str, dim: Any) -> Any:
    if dim is None:
        return _reduction(value, name, None)
    return Namespace(
        "extreme",
        {"values": _reduction(value, name, dim), "indices": value.reduced(np.argmax if name == "max" else np.argmin, dim)},
    )


def _expand(value: Tensor, shape: tuple[Any, ...]) -> Tensor:
    wanted = [
        old if new == -1 else new for old, new in zip((*[1] * (len(shape) - value.array.ndim), *value.shape), shape, strict=True)
    ]
    return from_numpy(np.broadcast_to(value.array, wanted), np.broadcast_to(value.mask, wanted))


def _to(value: Tensor, *args: Any, **kwargs: Any) -> Any:
    for item in (*args, kwargs.get("dtype")):
        if isinstance(item, DType):
            return value if item.name == value.dtype.name else value.cast(item)
    return value


def _view(value: Tensor, *args: Any) -> Any:
    if len(args) == 1 and isinstance(args[0], DType):
        if args[0].itemsize == value.dtype.itemsize:
            return Tensor(value.array, value.mask, args[0], value.base, value.base_mask, value.strides)
        last = value.shape[-1] * value.dtype.itemsize // args[0].itemsize
        return unknown_like((*value.shape[:-1], last), args[0])
    return value.reshaped(_shape(args))


def tensor_attribute(interpreter: Expressions, owner: Tensor, name: str) -> Any:
    """``tensor.name`` as a value or a bound stand-in."""
    if name == "shape":
        return owner.shape
    if name == "dtype":
        return owner.dtype
    if name == "device":
        return Namespace("device", {"index": 0, "type": "cuda"})
    if name == "ndim":
        return owner.array.ndim
    if name in ("is_cuda", "data", "T"):
        return True if name == "is_cuda" else owner
    if name in ("to", "view"):
        method = _to if name == "to" else _view
        return Native(name, lambda *args, **kwargs: method(owner, *args, **kwargs))
    if name in _VIEWS or name in _VALUES:
        function = _VIEWS.get(name) or _VALUES[name]
        return Native(name, lambda *args, **kwargs: function(owner, *args, **kwargs))
    if name in _IN_PLACE:
        function = _IN_PLACE[name]

        def write(*args: Any, **kwargs: Any) -> Tensor:
            owner.set(Ellipsis, function(owner, *args, **kwargs))
            return owner

        return Native(name, write)

    def outside(*args: Any, **kwargs: Any) -> Any:
        owner.spoil()
        return Unknown(f"tensor.{name}()")

    return Native(f"tensor.{name}", outside, pure=False)


def python_method(interpreter: Expressions, owner: Any, name: str) -> Any:
    """Methods of Python's own values that metadata code uses."""
    if isinstance(owner, dict):
        if name == "get":
            return Native("get", lambda key, default=None: owner.get(key, default))
        if name in ("items", "keys", "values"):
            return Native(name, lambda: [*{"items": owner.items(), "keys": owner.keys(), "values": owner.values()}[name]])
        if name == "pop":
            return Native("pop", lambda key, default=None: owner.pop(key, default))
        if name == "update":
            return Native("update", lambda other: owner.update(other) if isinstance(other, dict) else None)
    if isinstance(owner, list) and name in ("append", "extend"):
        return Native(name, owner.append if name == "append" else lambda items: owner.extend(interpreter.iterate(items)))
    if isinstance(owner, slice) and name in ("start", "stop", "step"):
        return {"start": owner.start, "stop": owner.stop, "step": owner.step}[name]
    if isinstance(owner, DType):
        return {"itemsize": owner.itemsize}.get(name, Unknown(f"dtype.{name}"))
    if isinstance(owner, int | float) and name == "to":
        return Native("to", lambda *args: owner)
    if isinstance(owner, int) and name == "bit_length":
        return Native(name, owner.bit_length)
    if isinstance(owner, int | float) and name == "item":
        return Native("item", lambda: owner)
    if isinstance(owner, int | float) and name == "shape":
        return ()
    return Unknown(f"{type(owner).__name__}.{name}")
