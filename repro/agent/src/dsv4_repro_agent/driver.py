"""The few calls of the CUDA driver that the side stream needs, by ctypes (which releases the GIL during a call).

No call here waits for the device, allocates on it or loads code.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["Driver", "DriverError"]

_API = 12000
#: CU_STREAM_CAPTURE_MODE_RELAXED: this thread's calls neither break nor are refused by another thread's graph capture.
_RELAXED = 2
_NON_BLOCKING = 1
_DISABLE_TIMING = 2


class DriverError(Exception):
    """The driver is not there, lacks a call, or refused one."""


class Driver:
    """The process's own driver library. Raises DriverError where it or one of its calls is missing."""

    NAMES = (
        "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode", "cuCtxGetStreamPriorityRange",
        "cuStreamCreateWithPriority", "cuMemHostAlloc", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventCreate", "cuEventRecord",
        "cuEventQuery",
    )  # fmt: skip

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(library)
            lookup = self._library.cuGetProcAddress_v2
        except (OSError, AttributeError) as error:
            raise DriverError(f"{library}: {error}") from None
        self._calls: dict[str, Any] = {}
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 6)
        for name in self.NAMES:
            address, status = ctypes.c_void_p(), ctypes.c_int()
            # Asking for a version gives the call with 64-bit arguments; the plain symbol would be the old one.
            code = lookup(name.encode(), ctypes.byref(address), _API, ctypes.c_ulonglong(0), ctypes.byref(status))
            if code != 0 or not address.value:
                raise DriverError(f"the driver has no {name}")
            self._calls[name] = kind(address.value)

    def call(self, name: str, *arguments: Any) -> None:
        """Call by name; pointers, integers and byrefs as they are. Raises DriverError with the driver's number."""
        code = self.code(name, *arguments)
        if code:
            raise DriverError(f"{name} answers {code}")

    def code(self, name: str, *arguments: Any) -> int:
        """As ``call``; returns the driver's number."""
        return int(self._calls[name](*arguments, *[0] * (6 - len(arguments))))

    def enter(self, device: int) -> None:
        """Make the device's primary context this thread's own, and this thread harmless to graph captures."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        mode = ctypes.c_int(_RELAXED)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def event_query(self, handle: int) -> int:
        """0 done, 600 not yet, else an error."""
        return self.code("cuEventQuery", handle)

    def new_stream(self) -> int:
        """A stream of the greatest priority that does not wait for the default stream."""
        least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self.call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        # Negative priorities go through an unsigned register; the driver takes its low 32 bits.
        self.call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, greatest.value & 0xFFFFFFFF)
        return int(stream.value or 0)

    def new_event(self) -> int:
        """An event without timing."""
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        return int(event.value or 0)

    def pinned(self, size: int) -> int:
        """Address of ``size`` bytes of page-locked memory, touched."""
        address = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(address), size, 0)
        ctypes.memset(address, 0, size)
        return int(address.value or 0)
