"""Collectors that need the workload's own child or the card's handle: the row states, and a snapshot of the card."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from ..clock import SYSTEM, Clock
from ..forensics.collect import Collected, CollectedFile, Disturbance, write_artefact
from ..forensics.collect.gpm import GpmSample
from ..forensics.collect.nvml import NvmlDevice
from ..forensics.device_state import DeviceState
from ..kernels.abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE
from .child import Child

__all__ = ["GpuSnapshotCollector", "RowStateCollector"]


class RowStateCollector:
    """Writes ``row_states.bin`` (raw) and ``row_states.json``: read by the child on its side stream while the kernel spins."""

    name = "row_states"
    disturbance: Disturbance = "none"
    deadline_s = 8.0

    def __init__(self, child: Child, folder: Path) -> None:
        self._child = child
        self._folder = folder

    def collect(self) -> Collected:
        path = (self._folder / "row_states.bin").absolute()
        answer = self._child.ask({"cmd": "row_states", "path": str(path), "timeout_s": 2.0}, "row_states", self.deadline_s)
        listed = write_artefact(self._folder / "row_states.json", json.dumps(answer, indent=1))
        base = int(answer["address"])
        groups = answer["groups"]
        memory = {
            base + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET: int(state["arrival"]) & 0xFFFFFFFF
            for group, state in enumerate(groups)
        }
        return Collected(
            self.name,
            self.disturbance,
            0.0,
            files=(CollectedFile("row-states", path), CollectedFile("row-states-list", listed)),
            state=DeviceState(source="row states, side stream", origin="measured", grids=(), memory=memory),
            facts={
                "address": base,
                "arrivals": [int(state["arrival"]) for state in groups],
                "unchanged": answer["unchanged"],
                "read_ms": answer["read_ms"],
                "layers_done": answer["layers_done"],
                "pending": answer["pending"],
                "params": answer["params"],
            },
        )


class GpuSnapshotCollector:
    """Writes ``gpu.json``: the card as NVML and GPM show it now, with the processes on it."""

    name = "nvml"
    disturbance: Disturbance = "none"
    deadline_s = 5.0

    def __init__(
        self, card: NvmlDevice, folder: Path, *, gpm: Callable[[], GpmSample | None] = lambda: None, clock: Clock = SYSTEM
    ) -> None:
        self._card = card
        self._folder = folder
        self._gpm = gpm
        self._clock = clock

    def collect(self) -> Collected:
        sample = self._card.sample(processes=True, clock=self._clock)
        gpm = self._gpm()
        document = {"nvml": dataclasses.asdict(sample), "gpm": dataclasses.asdict(gpm) if gpm is not None else None}
        path = write_artefact(self._folder / "gpu.json", json.dumps(document, indent=1))
        return Collected(
            self.name,
            self.disturbance,
            0.0,
            files=(CollectedFile("gpu-sample", path),),
            facts={"line": sample.line(), "gpm": gpm.line() if gpm is not None else None},
            unread=sample.unread + (gpm.unread if gpm is not None else ()),
        )
