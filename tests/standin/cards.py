"""A machine of several cards around a stand-in: an NVML that is played, with the stand-in's worker on one card and a neighbour on
another. A test double, never a result."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dsv4_repro.forensics.collect.nvml import Nvml

__all__ = ["PlayedMachine"]

#: What a card shows: utilisation, memory utilisation, power in W.
SHOWN = {"idle": (0, 0, 90.0), "busy": (96, 30, 480.0), "wedged": (100, 0, 130.0)}


class _NvmlError(Exception):
    value = 10  # a time-out: no event


class PlayedMachine:
    """``card``: where the server's processes that hold one are, may be changed; ``neighbour``: what every other card shows ("idle",
    "busy", "wedged"), held by process 1. ``blind``: NVML lists no process (another pid namespace)."""

    def __init__(self, base_url: str, *, card: int = 1, count: int = 2, neighbour: str = "idle", blind: bool = False) -> None:
        self.base_url, self.card, self.count, self.neighbour, self.blind = base_url, card, count, neighbour, blind
        self.looked_at: set[int] = set()
        self._word = "idle"

    def _state(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{self.base_url}/standin/state", timeout=1.0) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except (OSError, ValueError):
            return {}

    def _shown(self, index: int) -> tuple[int, int, float]:
        if index != self.card:
            return SHOWN[self.neighbour]
        state = self._state()
        word = state.get("device", "idle")
        # A step of milliseconds is over when one looks: with requests in hand the card was busy.
        if word == "idle" and state.get("live") and not state.get("wedged"):
            word = "busy"
        return SHOWN[word]

    def _holders(self, index: int) -> list[Any]:
        if self.blind:
            return []
        pids = self._state().get("workers", {}).values() if index == self.card else (1,) if self.neighbour != "idle" else ()
        return [SimpleNamespace(pid=int(pid), usedGpuMemory=1 << 30) for pid in pids if os.path.isdir(f"/proc/{pid}")]

    def _rates(self, index: int) -> Any:
        self.looked_at.add(index)
        gpu, memory, _ = self._shown(index)
        return SimpleNamespace(gpu=gpu, memory=memory)

    def nvml(self) -> Nvml:
        """As ``Nvml`` is made."""

        def no_event(*_: Any) -> Any:
            raise _NvmlError("timeout")

        same: Callable[[Any], Any] = lambda handle: handle  # noqa: E731
        return Nvml(
            SimpleNamespace(
                NVMLError=_NvmlError, NVML_ERROR_TIMEOUT=10, nvmlEventTypeXidCriticalError=8,
                nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: self.count, nvmlDeviceGetHandleByIndex=same,
                nvmlDeviceGetHandleByUUID=lambda uuid: int(str(uuid).rpartition("-")[2]), nvmlDeviceGetIndex=same,
                nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}", nvmlDeviceGetName=lambda _: "played",
                nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=str(handle)),
                nvmlSystemGetDriverVersion=lambda: "1", nvmlSystemGetNVMLVersion=lambda: "1",
                nvmlDeviceGetCudaComputeCapability=lambda _: (9, 0), nvmlDeviceGetMigMode=lambda _: (0, 0),
                nvmlDeviceGetUtilizationRates=self._rates,
                nvmlDeviceGetPowerUsage=lambda handle: int(self._shown(handle)[2] * 1000),
                nvmlDeviceGetClockInfo=lambda *_: 1980,
                nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=1 << 30, total=1 << 37),
                nvmlDeviceGetComputeRunningProcesses=self._holders, nvmlEventSetCreate=lambda: "set",
                nvmlDeviceRegisterEvents=lambda *_: None, nvmlEventSetFree=lambda _: None, nvmlEventSetWait_v2=no_event,
                nvmlGpmQueryDeviceSupport=lambda _: SimpleNamespace(isSupportedDevice=0), NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2,
            )
        )  # fmt: skip
