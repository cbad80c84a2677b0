"""What NVML says of a GPU: who holds it, how busy it is, what it draws. Touches no process.

Facts used: utilisation is the share of the last sample period (1/6 s to 1 s) in which at least one kernel was resident, so one
spinning CTA shows as 100 %, and the memory share near 0 is what tells it from work (NVML API reference; measured on an H200).
Every value that a card or a container does not give is None with an ``Unread`` naming it; none is ever reported as 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...clock import SYSTEM, Clock
from ...errors import NoDeviceError, NoDriverError
from ..device_state import Unread

__all__ = ["GpuIdentity", "GpuProcess", "GpuSample", "Nvml", "NvmlDevice", "SampleThread"]


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a compute context. ``memory``: bytes, None if NVML does not say. Its pid is that of NVML's pid namespace."""

    pid: int
    memory: int | None


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """A card as NVML names it."""

    index: int
    name: str | None
    uuid: str | None
    pci_bus_id: str | None
    driver: str | None
    nvml: str | None
    sm: int | None
    memory_total: int | None
    mig: bool | None
    unread: tuple[Unread, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One look. ``at``: seconds on the sampler's clock. Utilisations in percent, power in W, clocks in MHz, memory in bytes.

    ``processes`` None: not asked, or not readable (then ``unread`` says why).
    """

    at: float
    utilisation: int | None = None
    memory_utilisation: int | None = None
    power_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_used: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    unread: tuple[Unread, ...] = ()

    def line(self) -> str:
        """``GPU 100 %, memory 0 %, 123 W, 1980 MHz``; what was not read is left out."""
        parts = []
        if self.utilisation is not None:
            parts.append(f"GPU {self.utilisation} %")
        if self.memory_utilisation is not None:
            parts.append(f"memory {self.memory_utilisation} %")
        if self.power_w is not None:
            parts.append(f"{self.power_w:.0f} W")
        if self.sm_clock_mhz is not None:
            parts.append(f"{self.sm_clock_mhz} MHz")
        return ", ".join(parts) or "nothing readable"


class Nvml:
    """The library, started. NoDriverError if it is not there. ``module``: the binding, for tests."""

    def __init__(self, module: Any = None) -> None:
        if module is None:
            try:
                import pynvml
            except ImportError as error:
                raise NoDriverError(f"NVML's binding cannot be imported: {error}", help_text="pip install nvidia-ml-py") from error
            module = pynvml
        self.module: Any = module
        try:
            module.nvmlInit()
        except module.NVMLError as error:
            raise NoDriverError(f"NVML does not start: {error}") from error

    def count(self) -> int:
        """How many GPUs NVML shows. NoDeviceError if it cannot say."""
        try:
            return int(self.module.nvmlDeviceGetCount())
        except self.module.NVMLError as error:
            raise NoDeviceError(f"NVML cannot count the GPUs: {error}") from error

    def by_index(self, index: int) -> NvmlDevice:
        """NVML's own numbering (PCI order), which is not CUDA's where CUDA_VISIBLE_DEVICES is set. NoDeviceError."""
        return self._device(lambda: self.module.nvmlDeviceGetHandleByIndex(index), f"index {index}")

    def by_uuid(self, uuid: str) -> NvmlDevice:
        """The card that the CUDA driver calls ``uuid`` (``GPU-…``). NoDeviceError."""
        return self._device(lambda: self.module.nvmlDeviceGetHandleByUUID(uuid), uuid)

    def _device(self, get: Callable[[], Any], name: str) -> NvmlDevice:
        try:
            return NvmlDevice(self.module, get())
        except self.module.NVMLError as error:
            raise NoDeviceError(f"NVML shows no GPU {name}: {error}", help_text="See: nvidia-smi -L") from error


class NvmlDevice:
    """One GPU."""

    def __init__(self, module: Any, handle: Any) -> None:
        self.module = module
        self.handle = handle

    def _ask(self, what: str, get: Callable[[], Any], unread: list[Unread]) -> Any:
        """The value, or None and an Unread. A binding older than a call counts as not readable, too."""
        try:
            return get()
        except self.module.NVMLError as error:
            unread.append(Unread(f"NVML {what}", str(error), _remedy(error)))
        except AttributeError as error:
            unread.append(Unread(f"NVML {what}", f"the installed binding lacks it: {error}", "pip install -U nvidia-ml-py"))
        return None

    def identity(self) -> GpuIdentity:
        """Name, UUID, driver …"""
        n, h, unread = self.module, self.handle, list[Unread]()
        index = self._ask("index", lambda: int(n.nvmlDeviceGetIndex(h)), unread)
        capability = self._ask("compute capability", lambda: n.nvmlDeviceGetCudaComputeCapability(h), unread)
        mig: list[Unread] = []
        mode = self._ask("MIG mode", lambda: n.nvmlDeviceGetMigMode(h), mig)
        return GpuIdentity(
            index=-1 if index is None else index,
            name=_text(self._ask("name", lambda: n.nvmlDeviceGetName(h), unread)),
            uuid=_text(self._ask("UUID", lambda: n.nvmlDeviceGetUUID(h), unread)),
            pci_bus_id=_text(self._ask("PCI address", lambda: n.nvmlDeviceGetPciInfo(h).busId, unread)),
            driver=_text(self._ask("driver version", lambda: n.nvmlSystemGetDriverVersion(), unread)),
            nvml=_text(self._ask("NVML version", lambda: n.nvmlSystemGetNVMLVersion(), unread)),
            sm=10 * int(capability[0]) + int(capability[1]) if capability is not None else None,
            memory_total=self._ask("memory", lambda: int(n.nvmlDeviceGetMemoryInfo(h).total), unread),
            # Cards without MIG answer "not supported": that is the answer "no", not a failure.
            mig=bool(mode[0]) if mode is not None else (False if mig and "upport" in mig[0].why else None),
            unread=tuple(unread),
        )

    def processes(self) -> tuple[tuple[GpuProcess, ...] | None, tuple[Unread, ...]]:
        """Processes with a compute context on the card, or None and why they cannot be read."""
        unread: list[Unread] = []
        found = self._ask("compute processes", lambda: list(self.module.nvmlDeviceGetComputeRunningProcesses(self.handle)), unread)
        if found is None:
            return None, tuple(unread)
        return tuple(
            GpuProcess(int(process.pid), None if process.usedGpuMemory is None else int(process.usedGpuMemory)) for process in found
        ), ()

    def sample(self, *, processes: bool = False, clock: Clock = SYSTEM) -> GpuSample:
        """One look at the card. ``processes``: ask who holds it, too."""
        n, h, unread = self.module, self.handle, list[Unread]()
        rates = self._ask("utilisation", lambda: n.nvmlDeviceGetUtilizationRates(h), unread)
        power = self._ask("power", lambda: n.nvmlDeviceGetPowerUsage(h), unread)
        holders: tuple[GpuProcess, ...] | None = None
        if processes:
            holders, why = self.processes()
            unread.extend(why)
        return GpuSample(
            at=clock.monotonic(),
            utilisation=None if rates is None else int(rates.gpu),
            memory_utilisation=None if rates is None else int(rates.memory),
            power_w=None if power is None else power / 1000.0,
            sm_clock_mhz=self._ask("SM clock", lambda: int(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)), unread),
            memory_clock_mhz=self._ask("memory clock", lambda: int(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM)), unread),
            memory_used=self._ask("memory", lambda: int(n.nvmlDeviceGetMemoryInfo(h).used), unread),
            processes=holders,
            unread=tuple(unread),
        )


def _text(raw: Any) -> str | None:
    if raw is None:
        return None
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def _remedy(error: Exception) -> str:
    text = str(error).lower()
    if "permission" in text:
        return "Ask as root, or on the host."
    if "not supported" in text:
        return "This card or driver does not offer it."
    return "See: nvidia-smi -q"


class SampleThread:
    """Looks at a card at a steady pace from a thread of its own: a driver in trouble can make an NVML call wait.

    ``latest`` is the newest sample, or None. ``look``: makes one sample; an exception of it ends the thread and is kept as
    ``failure``.
    """

    def __init__(self, look: Callable[[], Any], *, period_s: float = 0.1, clock: Clock = SYSTEM) -> None:
        self._look = look
        self._period_s = period_s
        self._clock = clock
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._latest: Any = None
        self.failure: str = ""
        self._thread = threading.Thread(target=self._run, name="dsv4-repro-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                seen = self._look()
            except (NoDriverError, NoDeviceError, OSError, RuntimeError, ValueError) as error:
                self.failure = f"{type(error).__name__}: {error}"
                return
            with self._lock:
                self._latest = seen
            self._stop.wait(self._period_s)

    @property
    def latest(self) -> Any:
        with self._lock:
            return self._latest

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Ask the thread to end; False if it is still inside a call after ``timeout_s`` (it is a daemon: it does not keep the
        process).
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()
