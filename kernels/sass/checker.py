"""The memory checker: every access of every thread, before it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...errors import MachineFaultError
from .memory import BASE_ADDRESS, FORBIDDEN, WRITTEN
from .verdict import Fault

if TYPE_CHECKING:
    from .program import Program
    from .state import ThreadVector

__all__ = ["AccessChecker", "IllegalAccessError"]


class IllegalAccessError(MachineFaultError):
    """Raised out of a block; ``fault`` says who, where and what."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class AccessChecker:
    """Bounds, alignment and reads of words that nobody wrote, for global, shared and local memory.

    Local memory holds spilled registers, and a compiler may reload a slot that was never written where the value is not used
    afterwards (the release cubins of vLLM do): such a load is a note, one for each instruction, and not a fault.
    """

    def __init__(self, vector: ThreadVector, program: Program) -> None:
        self.vector = vector
        self.program = program
        self._first_shared = program.layout.shared_base // 4
        self.shared_written = np.zeros(len(vector.H), np.bool_)
        self._local_written: dict[int, npt.NDArray[np.bool_]] = {}
        self._noted: dict[int, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found and did not end the run."""
        return tuple(self._noted.values())

    def reshaped(self, kept: npt.NDArray[np.intp], fresh: int) -> None:
        """The vector dropped all rows but ``kept`` and got ``fresh`` new ones."""
        words, stride = self.vector.shared_words, self.vector.stride
        old = self.shared_written.reshape(-1, words)[kept].reshape(-1)
        self.shared_written = np.concatenate((old, np.zeros(fresh * words, np.bool_)))
        self._local_written = {
            word: np.concatenate((row.reshape(-1, stride)[kept].reshape(-1), np.zeros(fresh * stride, np.bool_)))
            for word, row in self._local_written.items()
        }

    def check(self, space: str, low: Any, high: Any, size: int, where: Any, offset: int, how: str, guard: Any) -> None:
        """``low``, ``high``: address words, one for all threads or an array; ``where``: the threads, as block code has them."""
        vector = self.vector
        if where is None:
            positions = vector.iota
        elif where.__class__ is int:
            positions = vector.iota[where : where + 1]
        else:
            positions = vector.iota[where]
        n = len(positions)
        lows = np.broadcast_to(np.asarray(low, np.uint32), (n,)).astype(np.int64)
        highs = np.broadcast_to(np.asarray(high, np.uint32), (n,)).astype(np.int64)
        if guard is not None:
            acts = np.flatnonzero(np.broadcast_to(np.asarray(guard), (n,)))
            positions, lows, highs = positions[acts], lows[acts], highs[acts]
        if not len(positions):
            return
        if space == "generic":
            shared = highs == vector.shared_window
            self._checked("shared", lows[shared], positions[shared], size, offset, how)
            self._checked("global", (highs << 32 | lows)[~shared], positions[~shared], size, offset, how)
        else:
            self._checked(space, highs << 32 | lows if space == "global" else lows, positions, size, offset, how)

    def _checked(self, space: str, addresses: Any, positions: Any, size: int, offset: int, how: str) -> None:
        if not len(positions):
            return
        self._refuse(addresses % size != 0, "misaligned", space, addresses, positions, size, offset, how)
        if space == "global":
            self._global(addresses, positions, size, offset, how)
        elif space == "shared":
            self._shared(addresses, positions, size, offset, how)
        else:
            self._local(addresses, positions, size, offset, how)

    def _global(self, addresses: Any, positions: Any, size: int, offset: int, how: str) -> None:
        states = self.vector.memory.states
        word = (addresses - BASE_ADDRESS) >> 2
        outside = (word < 0) | (word >= len(states))
        self._refuse(outside, "out-of-bounds", "global", addresses, positions, size, offset, how)
        for k in range(max(size // 4, 1)):
            state = states[word + k]
            self._refuse(state == FORBIDDEN, "out-of-bounds", "global", addresses, positions, size, offset, how)
            if how == "store":
                states[word + k] = WRITTEN
            else:
                self._refuse(state != WRITTEN, "uninitialised", "global", addresses, positions, size, offset, how)

    def _shared(self, addresses: Any, positions: Any, size: int, offset: int, how: str) -> None:
        vector = self.vector
        word = addresses >> 2
        outside = (word < self._first_shared) | (word + max(size // 4, 1) > vector.shared_words)
        self._refuse(outside, "out-of-bounds", "shared", addresses, positions, size, offset, how)
        place = vector.shared_base[positions] + word
        for k in range(max(size // 4, 1)):
            if how == "store":
                self.shared_written[place + k] = True
            else:
                self._refuse(~self.shared_written[place + k], "uninitialised", "shared", addresses, positions, size, offset, how)

    def _local(self, addresses: Any, positions: Any, size: int, offset: int, how: str) -> None:
        vector = self.vector
        word = addresses >> 2
        outside = (word < 0) | (word + max(size // 4, 1) > vector.local_words)
        self._refuse(outside, "out-of-bounds", "local", addresses, positions, size, offset, how)
        for k in range(max(size // 4, 1)):
            for value in np.unique(word + k):
                row = self._local_written.setdefault(int(value), np.zeros(vector.size, np.bool_))
                chosen = word + k == value
                if how == "store":
                    row[positions[chosen]] = True
                else:
                    unwritten = np.zeros(len(word), np.bool_)
                    unwritten[chosen] = ~row[positions[chosen]]
                    if offset not in self._noted and unwritten.any():
                        self._noted[offset] = self._fault(
                            unwritten, "uninitialised", "local", addresses, positions, size, offset, how
                        ).message

    def _refuse(self, bad: Any, kind: str, space: str, addresses: Any, positions: Any, size: int, offset: int, how: str) -> None:
        if bad.any():
            raise IllegalAccessError(self._fault(bad, kind, space, addresses, positions, size, offset, how))

    def _fault(self, bad: Any, kind: str, space: str, addresses: Any, positions: Any, size: int, offset: int, how: str) -> Fault:
        first = int(np.flatnonzero(bad)[0])
        vector = self.vector
        position, address = int(positions[first]), int(addresses[first])
        block, thread = vector.ctas[position // vector.stride], position % vector.stride
        place = f" ({vector.memory.describe(address)})" if space == "global" else ""
        i = self.program.function.at(offset)
        message = (
            f"{kind} {space} {how} of {size} bytes at {address:#x}{place} by thread {thread} of CTA {block}"
            f"{f' and {int(bad.sum()) - 1} more' if int(bad.sum()) > 1 else ''}: {i.where(self.program.name)}"
        )
        return Fault(kind, space, address, size, block, thread, offset, i.text, message)
