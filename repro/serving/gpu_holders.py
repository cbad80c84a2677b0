"""Which process computes on which GPU, by NVML, within a second: a driver in trouble can make an NVML call wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import NoDeviceError, NoDriverError
from ...forensics.collect.nvml import Nvml
from ...forensics.device_state import Unread

__all__ = ["GpuHolders", "HeldGpu", "gpu_holders", "has_cuda", "start_asking"]

#: Threads that still wait for an answer. A watch asks for weeks: over a driver that never answers they must not pile up.
_WAITING: list[threading.Thread] = []
_MOST_WAITING = 8


@dataclass(frozen=True, slots=True)
class HeldGpu:
    """A GPU that a process has a context on. ``memory``: bytes that it holds there, None if NVML does not say."""

    index: int
    uuid: str | None
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class GpuHolders:
    """``held``: by pid (of NVML's pid namespace), the GPU with most memory first. ``count``: GPUs in all, None if not known."""

    held: dict[int, tuple[HeldGpu, ...]] = field(default_factory=dict)
    count: int | None = None
    unread: tuple[Unread, ...] = ()


def _read(make: Callable[[], Nvml]) -> GpuHolders:
    try:
        nvml = make()
        count = nvml.count()
    except (NoDriverError, NoDeviceError) as error:
        return GpuHolders(unread=(Unread("NVML", str(error), "nvidia-smi -L"),))
    found: dict[int, list[HeldGpu]] = {}
    unread: list[Unread] = []
    for index in range(min(count, 256)):
        try:
            device = nvml.by_index(index)
        except NoDeviceError as error:
            unread.append(Unread(f"NVML, GPU {index}", str(error), error.help_text or ""))
            continue
        processes, why = device.processes()
        unread.extend(why)
        if not processes:
            continue
        uuid = device.identity().uuid
        for process in processes:
            found.setdefault(process.pid, []).append(HeldGpu(index, uuid, process.memory))
    ordered = {pid: tuple(sorted(gpus, key=lambda gpu: -(gpu.memory or 0))) for pid, gpus in found.items()}
    return GpuHolders(ordered, count, tuple(unread))


def start_asking(make: Callable[[], Nvml] = Nvml) -> Callable[[float], GpuHolders]:
    """Ask NVML from a thread of its own. The function that is returned waits so many seconds for the answer; then it is left alone
    and said to be silent."""
    answer: list[GpuHolders] = []
    _WAITING[:] = [thread for thread in _WAITING if thread.is_alive()]
    if len(_WAITING) >= _MOST_WAITING:
        why = f"{len(_WAITING)} questions to it are not answered yet: it is not asked again"
        return lambda _seconds: GpuHolders(unread=(Unread("NVML", why, "nvidia-smi"),))

    def ask() -> None:
        try:
            answer.append(_read(make))
        except (OSError, RuntimeError, ValueError, AttributeError) as error:
            answer.append(GpuHolders(unread=(Unread("NVML", f"{type(error).__name__}: {error}"),)))

    thread = threading.Thread(target=ask, name="dsv4-repro-nvml", daemon=True)
    thread.start()
    _WAITING.append(thread)

    def result(seconds: float) -> GpuHolders:
        thread.join(seconds)
        return answer[0] if answer else GpuHolders(unread=(Unread("NVML", "it gave no answer in time", "nvidia-smi"),))

    return result


def gpu_holders(make: Callable[[], Nvml] = Nvml, *, seconds: float = 1.0) -> GpuHolders:
    """Ask, and wait so many seconds for the answer."""
    return start_asking(make)(seconds)


def has_cuda(pids: Iterable[int], root: Path = Path("/proc")) -> dict[int, bool | None]:
    """Whether each process has CUDA's memory device open (``/dev/nvidia-uvm``, which NVML alone does not open); None: not readable.

    Works where NVML shows pids of another namespace.
    """
    found: dict[int, bool | None] = {}
    for pid in pids:
        try:
            with os.scandir(f"{root}/{pid}/fd") as items:
                found[pid] = any(_is_uvm(item.path) for _, item in zip(range(65536), items, strict=False))
        except OSError:
            found[pid] = None
    return found


def _is_uvm(path: str) -> bool:
    try:
        return os.readlink(path).startswith("/dev/nvidia-uvm")
    except OSError:
        return False
