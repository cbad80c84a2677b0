"""The few CUDA driver calls that a workload needs, each failure typed; importable without a driver.

Everything here is asynchronous or a query: nothing waits for the device, because the device may never finish. All handles are
opaque objects of ``cuda.bindings``; addresses and sizes are plain ints in bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import KernelNotFoundError, NoDeviceError, NoDriverError, UnavailableError

__all__ = ["CudaCallError", "DeviceInfo", "Driver", "KernelNode", "PinnedBuffer"]

Handle = Any

#: CUresult names after which the context is of no use any more: every later call gives the same error.
_STICKY = frozenset(
    {
        "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_LAUNCH_TIMEOUT", "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE", "CUDA_ERROR_INVALID_PC", "CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED", "CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    }
)  # fmt: skip


class CudaCallError(UnavailableError):
    """A driver call failed. ``call`` is the function, ``code`` the CUresult's name; ``sticky``: the context is lost with it."""

    help_text = "See what this machine can do: dsv4-repro doctor"

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call}: {code}")
        self.call = call
        self.code = code

    @property
    def sticky(self) -> bool:
        return self.code in _STICKY


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One GPU as the driver describes it. ``driver_version``: CUDA version of the driver, e.g. 13000. Memory sizes in bytes.

    ``uuid`` is NVML's spelling (``GPU-…``), which joins the two libraries' views of one card.
    """

    ordinal: int
    name: str
    uuid: str
    pci_bus_id: str
    sm: int
    sm_count: int
    smem_optin: int
    smem_per_sm: int
    threads_per_sm: int
    total_memory: int
    driver_version: int
    attributes: Mapping[str, int] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {
            "ordinal": self.ordinal, "name": self.name, "uuid": self.uuid, "pci_bus_id": self.pci_bus_id, "sm": self.sm,
            "sm_count": self.sm_count, "smem_optin": self.smem_optin, "smem_per_sm": self.smem_per_sm,
            "threads_per_sm": self.threads_per_sm, "total_memory": self.total_memory, "driver_version": self.driver_version,
            "attributes": dict(self.attributes),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelNode:
    """A kernel launch inside a captured graph, as the driver kept it. ``params``: the first parameter's bytes (``size`` asked
    for).
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_smem: int
    params: bytes
    function: str = ""


class PinnedBuffer:
    """Page-locked host memory, reachable by copies at any time without a new allocation. ``view`` is its bytes, writable."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")

    def i32(self, index: int) -> int:
        """Word ``index`` as a signed 32-bit integer, read once from memory (the device may write it meanwhile)."""
        return ctypes.c_int32.from_address(self.address + 4 * index).value

    def write(self, data: bytes, offset: int = 0) -> None:
        self.view[offset : offset + len(data)] = data


class Driver:
    """The calls, bound to one device's primary context after ``open``. Not for several threads.

    Raises NoDriverError (no libcuda, or a driver that does not answer), NoDeviceError (no such GPU), KernelNotFoundError (no
    code for this GPU, no such function) and CudaCallError (everything else).
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver as bindings
        except ImportError as error:
            raise NoDriverError(
                f"the CUDA driver bindings cannot be imported: {error}", help_text="pip install cuda-bindings"
            ) from error
        self._cu: Any = bindings
        self._context_device: Handle | None = None
        self._context: Handle | None = None
        self.info: DeviceInfo | None = None
        # Buffers that a captured launch points to; kept until the process ends, as the graphs are.
        self._keep: list[Any] = []

    def _call(self, name: str, *args: Any) -> Any:
        """The call's results without the status: None, the one value, or a tuple."""
        try:
            status, *values = getattr(self._cu, name)(*args)
        except (RuntimeError, OSError) as error:
            # cuda.bindings raises these when libcuda or the symbol is missing.
            # Its own words speak of a "system search", which helps nobody.
            absent = type(error).__name__ == "DynamicLibNotFoundError"
            raise NoDriverError(f"{name}: {'no NVIDIA driver: libcuda was not found' if absent else error}") from error
        code = getattr(status, "name", str(status))
        if code != "CUDA_SUCCESS":
            raise _typed(name, code)
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)

    # -- device and context ------------------------------------------------------------------------------------------------

    def init(self) -> int:
        """Start the driver (no context yet, so nothing shows on the device); returns the number of devices."""
        self._call("cuInit", 0)
        return int(self._call("cuDeviceGetCount"))

    def describe(self, ordinal: int) -> DeviceInfo:
        """What the driver says of device ``ordinal`` (CUDA's numbering in this process). Makes no context."""
        count = int(self._call("cuDeviceGetCount"))
        if not 0 <= ordinal < count:
            raise NoDeviceError(
                f"no device {ordinal}: the driver shows {count}", help_text="See: nvidia-smi -L, CUDA_VISIBLE_DEVICES"
            )
        device = self._call("cuDeviceGet", ordinal)
        wanted = {
            "major": "COMPUTE_CAPABILITY_MAJOR", "minor": "COMPUTE_CAPABILITY_MINOR", "sm_count": "MULTIPROCESSOR_COUNT",
            "smem_optin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "smem_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
            "threads_per_sm": "MAX_THREADS_PER_MULTIPROCESSOR", "reserved_smem": "RESERVED_SHARED_MEMORY_PER_BLOCK",
            "registers_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR", "blocks_per_sm": "MAX_BLOCKS_PER_MULTIPROCESSOR",
            "kernel_timeout": "KERNEL_EXEC_TIMEOUT", "compute_mode": "COMPUTE_MODE", "preemption": "COMPUTE_PREEMPTION_SUPPORTED",
            "clock_khz": "CLOCK_RATE", "l2_bytes": "L2_CACHE_SIZE",
        }  # fmt: skip
        attributes: dict[str, int] = {}
        kinds = self._cu.CUdevice_attribute
        for key, name in wanted.items():
            kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}", None)
            if kind is None:
                continue
            try:
                attributes[key] = int(self._call("cuDeviceGetAttribute", kind, device))
            except CudaCallError:
                # An attribute that this driver does not know stays absent; it is never reported as 0.
                continue
        return DeviceInfo(
            ordinal=ordinal,
            name=_text(self._call("cuDeviceGetName", 256, device)),
            uuid=_uuid(bytes(self._call("cuDeviceGetUuid", device).bytes)),
            pci_bus_id=_text(self._call("cuDeviceGetPCIBusId", 32, device)),
            sm=10 * attributes.get("major", 0) + attributes.get("minor", 0),
            sm_count=attributes.get("sm_count", 0),
            smem_optin=attributes.get("smem_optin", 0),
            smem_per_sm=attributes.get("smem_per_sm", 0),
            threads_per_sm=attributes.get("threads_per_sm", 0),
            total_memory=int(self._call("cuDeviceTotalMem", device)),
            driver_version=int(self._call("cuDriverGetVersion")),
            attributes=attributes,
        )

    def open(self, ordinal: int) -> DeviceInfo:
        """Make the device's primary context current in this thread (the one that torch would use too)."""
        info = self.describe(ordinal)
        device = self._call("cuDeviceGet", ordinal)
        context = self._call("cuDevicePrimaryCtxRetain", device)
        self._call("cuCtxSetCurrent", context)
        self._context_device = device
        self._context = context
        self.info = info
        return info

    def use(self) -> None:
        """Make this driver's context current again in this thread, after another device's was (one process, several GPUs)."""
        self._call("cuCtxSetCurrent", self._context)

    def reaches(self, other: Driver) -> bool:
        """Whether this device can read and write the other's memory."""
        return bool(self._call("cuDeviceCanAccessPeer", self._context_device, other._context_device))

    def open_peer(self, other: Driver) -> None:
        """From now on this device's kernels may use addresses of the other's memory. CudaCallError where it cannot."""
        self.use()
        self._call("cuCtxEnablePeerAccess", other._context, 0)

    # -- code --------------------------------------------------------------------------------------------------------------

    def load(self, cubin: bytes, function: str) -> Handle:
        """Load a cubin and take one function; KernelNotFoundError where it does not fit the device or lacks the function."""
        self._keep.append(cubin)
        module = self._call("cuModuleLoadData", cubin)
        self._keep.append(module)
        return self._call("cuModuleGetFunction", module, function.encode())

    def allow_dynamic_smem(self, function: Handle, size: int) -> None:
        """Raise the function's dynamic shared memory limit to ``size`` bytes."""
        kind = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function, kind, size)

    def function_attributes(self, function: Handle) -> dict[str, int]:
        """``registers``, ``static_smem`` (bytes), ``max_threads`` and ``binary_version`` (e.g. 90) as the driver loaded it."""
        kinds = self._cu.CUfunction_attribute
        wanted = {
            "registers": kinds.CU_FUNC_ATTRIBUTE_NUM_REGS, "static_smem": kinds.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            "max_threads": kinds.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, "binary_version": kinds.CU_FUNC_ATTRIBUTE_BINARY_VERSION,
        }  # fmt: skip
        return {key: int(self._call("cuFuncGetAttribute", kind, function)) for key, kind in wanted.items()}

    def occupancy(self, function: Handle, threads: int, dynamic_smem: int) -> int:
        """CTAs of this shape that fit on one SM, by the driver's own reckoning."""
        return int(self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, dynamic_smem))

    # -- memory ------------------------------------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        """Free and total device memory, bytes."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def alloc(self, size: int) -> int:
        """Device memory, ``size`` bytes; lives as long as the process."""
        return int(self._call("cuMemAlloc", max(size, 16)))

    def pinned(self, size: int) -> PinnedBuffer:
        """Page-locked host memory, ``size`` bytes, zeroed and touched."""
        address = int(self._call("cuMemHostAlloc", size, 0))
        ctypes.memset(address, 0, size)
        return PinnedBuffer(address, size)

    def copy_in(self, target: int, source: int, size: int, stream: Handle) -> None:
        """Host ``source`` (a pinned address) to device ``target``, in stream order."""
        self._call("cuMemcpyHtoDAsync", target, source, size, stream)

    def copy_out(self, target: int, source: int, size: int, stream: Handle) -> None:
        """Device ``source`` to host ``target`` (a pinned address), in stream order."""
        self._call("cuMemcpyDtoHAsync", target, source, size, stream)

    def copy_within(self, target: int, source: int, size: int, stream: Handle) -> None:
        """Device to device, in stream order."""
        self._call("cuMemcpyDtoDAsync", target, source, size, stream)

    def fill(self, target: int, value: int, words: int, stream: Handle) -> None:
        """``words`` 32-bit words of device memory set to ``value``, in stream order."""
        self._call("cuMemsetD32Async", target, value & 0xFFFFFFFF, words, stream)

    # -- streams, events ---------------------------------------------------------------------------------------------------

    def stream(self, *, highest_priority: bool = False) -> Handle:
        """A stream that does not wait for the null stream."""
        flags = int(self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        _least, greatest = self._call("cuCtxGetStreamPriorityRange")
        return self._call("cuStreamCreateWithPriority", flags, int(greatest) if highest_priority else 0)

    def event(self) -> Handle:
        """An event with timing."""
        return self._call("cuEventCreate", 0)

    def record(self, event: Handle, stream: Handle) -> None:
        self._call("cuEventRecord", event, stream)

    def finished(self, event: Handle) -> bool:
        """Whether all work before the event's record is done; never waits. Raises CudaCallError when the context faulted."""
        try:
            self._call("cuEventQuery", event)
        except CudaCallError as error:
            if error.code == "CUDA_ERROR_NOT_READY":
                return False
            raise
        return True

    def milliseconds(self, start: Handle, end: Handle) -> float:
        """Device time between two finished events."""
        return float(self._call("cuEventElapsedTime", start, end))

    # -- launches and graphs -----------------------------------------------------------------------------------------------

    def launch(
        self, function: Handle, grid: int | tuple[int, int, int], threads: int, dynamic_smem: int,
        params: bytes | Sequence[bytes], stream: Handle,
    ) -> None:  # fmt: skip
        """One launch. ``params``: the single by-value struct's bytes, or one bytes object a parameter; kept for ever, as
        graphs are.
        """
        each = [params] if isinstance(params, bytes) else list(params)
        buffers = [ctypes.create_string_buffer(raw, len(raw)) for raw in each]
        pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers))
        self._keep.append((buffers, pointers))
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        self._call("cuLaunchKernel", function, x, y, z, threads, 1, 1, dynamic_smem, stream, ctypes.addressof(pointers), 0)

    def begin_capture(self, stream: Handle) -> None:
        """From here on, what is put on ``stream`` becomes graph nodes instead of running."""
        self._call("cuStreamBeginCapture", stream, self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def end_capture(self, stream: Handle) -> Handle:
        """The captured graph."""
        return self._call("cuStreamEndCapture", stream)

    def instantiate(self, graph: Handle) -> Handle:
        """An executable of the graph; its launch parameters are frozen."""
        executable = self._call("cuGraphInstantiate", graph, 0)
        self._keep.append((graph, executable))
        return executable

    def upload(self, executable: Handle, stream: Handle) -> None:
        """Send the executable's resources to the device now, so that the first replay allocates nothing."""
        self._call("cuGraphUpload", executable, stream)

    def replay(self, executable: Handle, stream: Handle) -> None:
        self._call("cuGraphLaunch", executable, stream)

    def kernel_nodes(self, graph: Handle, params_size: int) -> list[KernelNode]:
        """The kernel launches in a captured graph, in the order the driver lists them; ``params_size``: bytes to read of each."""
        _none, count = self._call("cuGraphGetNodes", graph, 0)
        nodes, _count = self._call("cuGraphGetNodes", graph, int(count))
        kernel = self._cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        found: list[KernelNode] = []
        for node in nodes:
            if self._call("cuGraphNodeGetType", node) != kernel:
                continue
            at = self._call("cuGraphKernelNodeGetParams", node)
            pointers = int(at.kernelParams or 0)
            raw = b""
            if pointers:
                first = ctypes.c_void_p.from_address(pointers).value
                raw = ctypes.string_at(first, params_size) if first else b""
            found.append(
                KernelNode(
                    grid=(int(at.gridDimX), int(at.gridDimY), int(at.gridDimZ)),
                    block=(int(at.blockDimX), int(at.blockDimY), int(at.blockDimZ)),
                    dynamic_smem=int(at.sharedMemBytes),
                    params=raw,
                    function=self._function_name(at.func),
                )
            )
        return found

    def _function_name(self, function: Handle) -> str:
        try:
            return _text(self._call("cuFuncGetName", function))
        except (CudaCallError, NoDriverError, AttributeError):
            # cuFuncGetName is younger than graphs (CUDA 12.3); the name is only for the reader.
            return ""


def _typed(call: str, code: str) -> Exception:
    """The error that a status of a call is."""
    if code in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE", "CUDA_ERROR_DEVICE_UNAVAILABLE"):
        return NoDeviceError(f"{call}: {code}")
    if code in ("CUDA_ERROR_STUB_LIBRARY", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "CUDA_ERROR_SYSTEM_NOT_READY"):
        return NoDriverError(f"{call}: {code}")
    if code in ("CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NOT_FOUND") and "Module" in call:
        return KernelNotFoundError(f"{call}: {code}: the cubin does not fit this GPU or lacks the function")
    return CudaCallError(call, code)


def _text(raw: Any) -> str:
    if isinstance(raw, bytes):
        return raw.split(b"\0", 1)[0].decode("utf-8", "replace")
    return str(raw)


def _uuid(raw: bytes) -> str:
    text = raw[:16].hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
