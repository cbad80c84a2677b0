"""Reading and writing device memory beside a kernel that spins: a stream of its own, everything made beforehand."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

from .driver import Driver, DriverError

__all__ = ["ARRIVAL_OFFSET", "ROW_STATE_SIZE", "Launch", "SideStream", "SideStreamBusyError", "SideStreamError", "counters"]

#: RadixRowState: 3088 bytes, arrival_counter (int32) at 3080 (public header persistent_topk.cuh, 0.20.1 to 0.33.0).
ROW_STATE_SIZE = 3088
ARRIVAL_OFFSET = 3080
BUFFER = 1 << 20
MAX_GROUPS = 64
MAX_ROWS = 4096


class SideStreamError(Exception):
    """A copy that was refused, or an error of the device."""


class SideStreamBusyError(SideStreamError):
    """A copy did not come back in time; it may do so later, and the side stream can be used again then."""


@dataclass(frozen=True)
class Launch:
    """What one call of the op was given: device addresses, sizes. ``workspace_size`` in bytes; ``width``: candidates a row."""

    workspace: int
    workspace_size: int
    lengths: int
    rows: int
    width: int
    top_k: int
    max_seq_len: int
    captured: bool

    @property
    def groups(self) -> int:
        """Groups that can be in use: no more than rows, than fit, than 64."""
        return max(min(self.rows, self.workspace_size // ROW_STATE_SIZE, MAX_GROUPS), 0)


class SideStream:
    """Belongs to the thread that made it. ``clock`` and ``sleep`` are for tests. Raises DriverError where it cannot be had."""

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        driver.enter(device)
        self._stream = driver.new_stream()
        self._event = driver.new_event()
        self._buffer = driver.pinned(BUFFER)
        self._stuck = False
        self.longest_s = 0.0

    def _finish(self, timeout: float) -> None:
        self.driver.call("cuEventRecord", self._event, self._stream)
        begin = time.monotonic()
        while True:
            code = self.driver.event_query(self._event)
            spent = time.monotonic() - begin
            if code == 0:
                self.longest_s = max(self.longest_s, spent)
                return
            if code != 600:
                raise SideStreamError(f"the driver answers {code}")
            if spent > timeout:
                # The copy still owns the buffer: it is not used again before the copy has ended.
                self._stuck = True
                raise SideStreamBusyError(f"a copy on the side stream did not end within {timeout:.1f} s")
            time.sleep(0.0002)

    def _check(self, size: int) -> None:
        if self._stuck:
            if self.driver.event_query(self._event) != 0:
                raise SideStreamBusyError("an earlier copy on the side stream has not ended")
            self._stuck = False
        if not 0 < size <= BUFFER:
            raise SideStreamError(f"{size} bytes asked for, 1 to {BUFFER} possible")

    def read(self, address: int, size: int, timeout: float = 0.5) -> bytes:
        """``size`` bytes of device memory. Raises SideStreamError."""
        self._check(size)
        try:
            self.driver.call("cuMemcpyDtoHAsync", self._buffer, address, size, self._stream)
        except DriverError as error:
            raise SideStreamError(str(error)) from None
        self._finish(timeout)
        return ctypes.string_at(self._buffer, size)

    def write_word(self, address: int, value: int, timeout: float = 0.5) -> None:
        """Write an int32 to device memory. Raises SideStreamError."""
        self._check(4)
        ctypes.memmove(self._buffer, value.to_bytes(4, "little", signed=True), 4)
        try:
            self.driver.call("cuMemcpyHtoDAsync", address, self._buffer, 4, self._stream)
        except DriverError as error:
            raise SideStreamError(str(error)) from None
        self._finish(timeout)

    def counters(self, launch: Launch) -> tuple[int, ...]:
        """The arrival counter of each group."""
        return counters(self.read(launch.workspace, launch.groups * ROW_STATE_SIZE)) if launch.groups else ()

    def lengths(self, launch: Launch) -> tuple[int, ...]:
        """The length of each row, int32."""
        rows = min(launch.rows, MAX_ROWS)
        raw = self.read(launch.lengths, rows * 4) if rows > 0 else b""
        return tuple(int.from_bytes(raw[at : at + 4], "little", signed=True) for at in range(0, len(raw), 4))


def counters(raw: bytes) -> tuple[int, ...]:
    """Arrival counters out of whole row states."""
    starts = range(ARRIVAL_OFFSET, len(raw), ROW_STATE_SIZE)
    return tuple(int.from_bytes(raw[at : at + 4], "little", signed=True) for at in starts)
