"""Vector helpers that generated block code calls: arithmetic that NumPy lacks, float operations on bit patterns, guarded access."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .algebra import IntegerAlgebra, float_operation

__all__ = ["VECTOR", "block_globals"]

Words = npt.NDArray[np.uint32]
Quads = npt.NDArray[np.uint64]
Truths = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]

_W31 = np.array(31, np.uint32)
_W32 = np.array(32, np.uint32)
_Q63 = np.array(63, np.uint64)


def shl(a: Words, n: Words) -> Words:
    """a << n, 0 for amounts of 32 and more (NumPy leaves those undefined)."""
    return np.where(n < _W32, a << (n & _W31), np.uint32(0))


def shr(a: Words, n: Words) -> Words:
    return np.where(n < _W32, a >> (n & _W31), np.uint32(0))


def sar(a: Words, n: Words) -> Words:
    return (a.view(np.int32) >> np.minimum(n, _W31).view(np.int32)).view(np.uint32)


def _amount(n: Any) -> tuple[Quads, Truths]:
    wide = np.asarray(n).astype(np.uint64)
    return wide & _Q63, wide < 64


def shlq(q: Quads, n: Words) -> Quads:
    amount, inside = _amount(n)
    return np.where(inside, q << amount, np.uint64(0))


def shrq(q: Quads, n: Words) -> Quads:
    amount, inside = _amount(n)
    return np.where(inside, q >> amount, np.uint64(0))


def sarq(q: Quads, n: Words) -> Quads:
    amount = np.minimum(np.asarray(n).astype(np.int64), 63)
    return (q.view(np.int64) >> amount).view(np.uint64)


def lessq(a: Quads, b: Quads) -> Truths:
    return a.view(np.int64) < b.view(np.int64)


def _popc_table(a: Words) -> Words:
    pairs, fours, nibbles = np.uint32(0x55555555), np.uint32(0x33333333), np.uint32(0x0F0F0F0F)
    a = a - ((a >> np.uint32(1)) & pairs)
    a = (a & fours) + ((a >> np.uint32(2)) & fours)
    a = (a + (a >> np.uint32(4))) & nibbles
    return (a * np.uint32(0x01010101)) >> np.uint32(24)


_bitwise_count: Callable[[Words], npt.NDArray[np.uint8]] | None = getattr(np, "bitwise_count", None)


def popc(a: Words) -> Words:
    """Bits set in each word (``numpy.bitwise_count`` exists from NumPy 2)."""
    return _popc_table(a) if _bitwise_count is None else _bitwise_count(a).astype(np.uint32)


def flo(a: Words) -> Words:
    """Index of the highest set bit; 0xffffffff for 0. A float64 holds every word exactly, so its exponent is the answer."""
    return (np.frexp(a.astype(np.float64))[1] - 1).astype(np.int32).view(np.uint32)


def brev(a: Words) -> Words:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F)):
        places, chosen = np.uint32(shift), np.uint32(mask)
        a = ((a >> places) & chosen) | ((a & chosen) << places)
    return a.byteswap()


# ---- float operations on bit patterns -----------------------------------------------------------------------------------------


def _floats(a: Words) -> npt.NDArray[np.float32]:
    return a.view(np.float32)


def _canonical(value: npt.NDArray[np.float32]) -> Words:
    bits = value.view(np.uint32)
    return np.where(np.isnan(value), np.uint32(0x7FFFFFFF), bits)


def _u2f(a: Words) -> Words:
    return a.astype(np.float32).view(np.uint32)


def _s2f(a: Words) -> Words:
    return a.view(np.int32).astype(np.float32).view(np.uint32)


def _u2f_up(a: Words) -> Words:
    near = a.astype(np.float32)
    return near.view(np.uint32) + (near.astype(np.float64) < a)


def _f2u(a: Words) -> Words:
    value = _floats(a).astype(np.float64)
    value = np.where(np.isnan(value), 0.0, np.clip(value, 0.0, 4294967295.0))
    return value.astype(np.uint32)


def _f2h(a: Words) -> Words:
    value = _floats(a)
    half = value.astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(value), np.uint32(0x7FFF), half)


def _rcp(a: Words) -> Words:
    return _canonical((1.0 / _floats(a).astype(np.float64)).astype(np.float32))


def _fadd(a: Words, b: Words) -> Words:
    return _canonical(_floats(a) + _floats(b))


def _fmul(a: Words, b: Words) -> Words:
    return _canonical(_floats(a) * _floats(b))


#: Float operations over arrays, the same names as ``algebra.float_operation``.
VECTOR: Mapping[str, Callable[..., Any]] = {
    "u2f": _u2f, "s2f": _s2f, "u2f_up": _u2f_up, "f2u": _f2u, "f2h": _f2h, "rcp": _rcp, "fadd": _fadd, "fmul": _fmul,
    "flt?": lambda a, b: _floats(a) < _floats(b), "fle?": lambda a, b: _floats(a) <= _floats(b),
    "feq?": lambda a, b: _floats(a) == _floats(b), "fun?": lambda a, b: np.isnan(_floats(a)) | np.isnan(_floats(b)),
}  # fmt: skip


# ---- guarded memory access ---------------------------------------------------------------------------------------------------


def load_where(memory: Any, index: Any, guard: Truths, old: Any, kind: Any) -> Any:
    """``memory[index]`` where ``guard``, ``old`` elsewhere; index and old may be one value for all. Never touches unguarded
    addresses.
    """
    chosen = guard.nonzero()[0]
    n = len(guard)
    result = old.copy() if old.__class__ is np.ndarray else np.full(n, old, np.uint32)
    if len(chosen):
        result[chosen] = memory[index[chosen] if index.__class__ is np.ndarray else index].astype(kind, copy=False)
    return result


def store_where(memory: Any, index: Any, guard: Truths, value: Any) -> int:
    """``memory[index] = value`` where ``guard``; the highest thread wins at one address. The number of threads that stored."""
    chosen = guard.nonzero()[0]
    if len(chosen):
        part = value[chosen] if value.__class__ is np.ndarray else value
        if index.__class__ is np.ndarray:
            memory[index[chosen]] = part
        else:
            memory[index] = part[-1] if part.__class__ is np.ndarray else part
    return len(chosen)


def expand(size: int, old: Any, where: Any, value: Any, kind: Any) -> Any:
    """A register that was one value for all threads becomes an array, with ``value`` at ``where``."""
    array = np.full(size, old, kind)
    array[where] = value
    return array


def block_globals() -> dict[str, Any]:
    """The names that generated code may use."""
    names: dict[str, Any] = {
        "u4": np.uint32, "u8": np.uint64, "i4": np.int32, "i8": np.int64, "ip": np.intp, "bool_": np.bool_, "where": np.where,
        "full": np.full, "array": np.array, "INT": IntegerAlgebra(), "FLOAT": float_operation, "VECTOR": VECTOR, "popc": popc,
        "flo": flo, "brev": brev, "shl": shl, "shr": shr, "sar": sar, "shlq": shlq, "shrq": shrq, "sarq": sarq, "lessq": lessq,
        "load_where": load_where, "store_where": store_where, "expand": expand,
    }  # fmt: skip
    return names
