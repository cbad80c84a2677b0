"""Device memory of the interpreted GPU: named allocations in one arena, with guard words between them, and its checker.

The arena starts at a device address whose low word is 0 (0x7_0000_0000), so the low word of an address is its place in the arena.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import BudgetError, MachineFaultError

__all__ = ["BASE_ADDRESS", "Allocation", "Memory"]

BASE_ADDRESS = 0x7_0000_0000
#: Bytes between allocations that nothing may touch, and what they hold.
GUARD_BYTES = 256
GUARD_WORD = 0xDEADBEEF
#: What fresh memory holds: a value that no kernel expects.
POISON_WORD = 0xABABABAB
#: State of a word for the checker.
FORBIDDEN, FRESH, WRITTEN = 0, 1, 2
MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Allocation:
    """A named range: device address and size in bytes."""

    name: str
    address: int
    size: int


class Memory:
    """Global memory. ``words`` is the arena as uint32; ``state`` says of each word whether it may be touched and was written."""

    def __init__(self) -> None:
        self._bytes: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._used = GUARD_BYTES
        self._allocations: list[Allocation] = []
        self._starts: list[int] = []
        self._states: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._grow(1 << 16)

    def _grow(self, size: int) -> None:
        if size > MAX_BYTES:
            raise BudgetError(f"{size} bytes of device memory asked for, {MAX_BYTES} are allowed")
        if size <= len(self._bytes):
            return
        grown = np.empty(max(size, 2 * len(self._bytes)), np.uint8)
        grown.view(np.uint32)[:] = GUARD_WORD
        grown[: len(self._bytes)] = self._bytes
        states = np.zeros(len(grown) // 4, np.uint8)
        states[: len(self._states)] = self._states
        self._bytes, self._states = grown, states

    @property
    def words(self) -> npt.NDArray[np.uint32]:
        return self._bytes.view(np.uint32)

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        return self._bytes

    @property
    def states(self) -> npt.NDArray[np.uint8]:
        return self._states

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        return tuple(self._allocations)

    def allocate(self, name: str, content: int | bytes | npt.NDArray[np.generic]) -> int:
        """A fresh range of ``content`` bytes (unwritten), or one that holds ``content``; its device address, 256-byte aligned."""
        if isinstance(content, int):
            data, size = None, content
        else:
            data = (
                np.frombuffer(content, np.uint8)
                if isinstance(content, bytes)
                else np.ascontiguousarray(content).reshape(-1).view(np.uint8)
            )
            size = len(data)
        if size < 0:
            raise ValueError(f"{size} bytes for {name}")
        start = self._used
        padded = -(-max(size, 4) // 4) * 4
        end = -(-(start + padded + GUARD_BYTES) // 256) * 256
        self._grow(end + GUARD_BYTES)
        self._used = end
        self._states[start // 4 : (start + padded) // 4] = FRESH
        self.words[start // 4 : (start + padded) // 4] = POISON_WORD
        allocation = Allocation(name, BASE_ADDRESS + start, size)
        self._allocations.append(allocation)
        self._starts.append(allocation.address)
        if data is not None and size:
            self.write(allocation.address, data)
        return allocation.address

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds a byte address, None if there is none."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        found = self._allocations[place]
        return found if address < found.address + found.size else None

    def describe(self, address: int) -> str:
        """Where an address is, for messages."""
        found = self.find(address)
        if found is not None:
            return f"{found.name}+{address - found.address:#x}"
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return "before all allocations"
        last = self._allocations[place]
        return f"{address - last.address - last.size:#x} bytes past the end of {last.name} ({last.size:#x} bytes)"

    def _range(self, address: int, size: int) -> tuple[int, int]:
        found = self.find(address)
        if found is None or address + size > found.address + found.size:
            raise MachineFaultError(f"host access of {size} bytes at {address:#x}: {self.describe(address)}")
        start = address - BASE_ADDRESS
        return start, start + size

    def write(self, address: int, data: bytes | npt.NDArray[np.generic]) -> None:
        """Host copy to the device. MachineFaultError outside an allocation."""
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        start, end = self._range(address, len(raw))
        self._bytes[start:end] = raw
        self._states[start // 4 : -(-end // 4)] = WRITTEN

    def fill(self, address: int, size: int, byte: int) -> None:
        """Host memset."""
        start, end = self._range(address, size)
        self._bytes[start:end] = byte
        self._states[start // 4 : -(-end // 4)] = WRITTEN

    def read(self, address: int, size: int) -> bytes:
        """Host copy from the device."""
        start, end = self._range(address, size)
        return self._bytes[start:end].tobytes()

    def array(self, address: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """A copy of ``count`` elements from the device."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.read(address, count * kind.itemsize), kind).copy()

    def intact(self) -> bool:
        """Whether every guard word still holds what it must: nothing wrote outside the allocations."""
        return bool((self.words[self._states == FORBIDDEN] == GUARD_WORD).all())
