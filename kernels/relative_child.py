"""The GPU process of a relative's row: ``python -m dsv4_repro.kernels.relative_child FD``. One launch with given logits and
counters, and what stands beside it: a kernel queued behind it, or one that holds the device's slots.

The conversation is that of ``device_child``; ``prepare`` carries ``extra``: ``logits`` (a file of float32 [rows, stride]),
``counter`` (every arrival counter's value before the launch), ``answers`` (where a wrong launch's indices are written, int32
[rows, k]), ``beside`` (a cubin of ``companions.cu``), ``queued`` (bool), ``leave`` (slots that the holder leaves free; 0: none),
``cooperative`` (bool: the function is a cooperative_topk), ``slots`` (CTAs of this launch that the parent reckons the device
holds; a driver that says otherwise is an error).
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..clock import Deadline
from ..errors import DeadlineError, PlanError
from .abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE, THREADS_PER_CTA
from .captured_size import ROTATION, CapturedSize
from .cooperative import CLUSTER, CooperativeParams
from .device import DeviceWorkload
from .device_child import main as child_main
from .device_records import Setup
from .driver import Driver

if TYPE_CHECKING:
    import numpy as np

    from .plan import LaunchPlan

__all__ = ["RelativeWorkload"]

_VICTIM_GRID, _VICTIM_THREADS = 64, 128
#: A holder's CTA is one warp: the shared memory takes the slot, and a dump stays small.
_HOLDER_THREADS = 32
_ARRIVAL_S = 5.0


class RelativeWorkload(DeviceWorkload):
    """One launch of a row, replayed. ``observations`` says whether the queued kernel ran and how many slots are held."""

    def _load(self) -> dict[str, int]:
        driver, extra = self._driver, self._setup.extra
        attributes = super()._load()
        self._observed: dict[str, Any] = {}
        self._ran = 0
        self._words = driver.pinned(4096)
        plan = next(iter(self._setup.launches.values()))
        per_sm = driver.occupancy(self._function, THREADS_PER_CTA, plan.dynamic_smem)
        self._slots = per_sm * (driver.info.sm_count if driver.info is not None else 0)
        expected = int(extra.get("slots", 0))
        if expected and expected != self._slots:
            raise PlanError(
                f"the device holds {self._slots} CTAs of this launch by the driver's reckoning, {expected} by ours",
                help_text="Please report this card: dsv4-repro doctor --json",
            )
        self._beside = Path(str(extra["beside"])).read_bytes() if extra.get("beside") else b""
        if extra.get("queued"):
            self._victim = driver.load(self._beside, "sparse_mla_decode_kernel")
            self._ran = driver.alloc(4 * _VICTIM_GRID)
        return attributes

    def _host_pool(self, plan: LaunchPlan) -> list[np.ndarray[Any, Any]]:
        import numpy as np

        raw = Path(str(self._setup.extra["logits"])).read_bytes()
        if len(raw) != 4 * plan.rows * plan.stride:
            raise PlanError(f"{len(raw)} bytes of logits for {plan.rows} rows of {plan.stride} floats")
        return [np.frombuffer(raw, dtype=np.float32).reshape(plan.rows, plan.stride)] * ROTATION

    def _launch_layer(self, size: CapturedSize, layer: int) -> None:
        driver, stream = self._driver, self._stream
        counter = int(self._setup.extra.get("counter", 0))
        if self._setup.extra.get("cooperative"):
            self._launch_cooperative(size, layer)
            return
        if self._ran:
            driver.fill(self._ran, 0, _VICTIM_GRID, stream)
        if counter:
            plan = size.plan
            driver.fill(self._workspace, 0, plan.state_bytes // 4, stream)
            for group in range(plan.groups):
                driver.fill(self._workspace + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET, counter, 1, stream)
            params = self._params(size, layer).pack()
            driver.launch(self._function, plan.grid, THREADS_PER_CTA, plan.dynamic_smem, params, stream)
        else:
            super()._launch_layer(size, layer)
        if self._ran:
            driver.launch(self._victim, _VICTIM_GRID, _VICTIM_THREADS, 0, [struct.pack("<Q", self._ran)], stream)

    def _launch_cooperative(self, size: CapturedSize, layer: int) -> None:
        """``cooperative_topk``: its code says how large a cluster is."""
        plan = size.plan
        at = self._params(size, layer)
        params = CooperativeParams(at.input, at.output, at.lengths, self._workspace, plan.rows, plan.stride)
        grid = (plan.rows, CLUSTER, 1)
        self._driver.launch(self._function, grid, THREADS_PER_CTA, plan.dynamic_smem, params.pack(), self._stream)

    def _describe(self, size: CapturedSize) -> dict[str, Any]:
        if not self._setup.extra.get("cooperative"):
            return super()._describe(size)
        # Its parameter is shorter than the persistent kernel's, and its grid has two dimensions: nothing of it is compared.
        plan = size.plan
        return {
            "rows": plan.rows, "kernel_nodes": self._setup.layers, "launched": [], "differences": [], "row_states": self._workspace,
            "state_bytes": plan.state_bytes, "groups": plan.groups,
        }  # fmt: skip

    def prepare(self) -> dict[str, Any]:
        facts = super().prepare()
        leave = int(self._setup.extra.get("leave", 0))
        facts["slots"] = self._slots
        if leave:
            self._hold(self._slots - leave)
            facts["held_slots"] = self._slots - leave
        return facts

    def _hold(self, count: int) -> None:
        """``count`` CTAs of another kernel resident on another stream, each as large as one of the launch's."""
        if count < 1:
            raise PlanError(f"the device has {self._slots} slots: nothing is left to hold")
        driver = self._driver
        plan = next(iter(self._setup.launches.values()))
        holder = driver.load(self._beside, "slot_holder")
        driver.allow_dynamic_smem(holder, plan.dynamic_smem)
        other = driver.stream()
        words = driver.alloc(512)
        driver.fill(words, 0, 128, other)
        driver.launch(
            holder, count, _HOLDER_THREADS, plan.dynamic_smem, [struct.pack("<Q", words), struct.pack("<Q", words + 256)], other
        )
        deadline = Deadline(_ARRIVAL_S, self._clock)
        arrived = 0
        while not deadline.expired:
            driver.copy_out(self._words.address, words + 256, 4, self._side)
            driver.record(self._side_event, self._side)
            if not self._wait(self._side_event, 2.0):
                break
            arrived = self._words.i32(0)
            if arrived == count:
                self._observed["held_slots"] = count
                self._note(f"another kernel holds {count} of {self._slots} slots")
                return
            self._clock.sleep(0.001)
        raise DeadlineError(f"{arrived} of {count} CTAs that are to hold the slots became resident in {_ARRIVAL_S:g} s")

    def observations(self) -> dict[str, Any]:
        """``queued_ran``: CTAs of the queued kernel that have run in the pending replay; ``held_slots``."""
        found = dict(self._observed)
        if self._ran:
            self._driver.copy_out(self._words.address + 1024, self._ran, 4 * _VICTIM_GRID, self._side)
            self._driver.record(self._side_event, self._side)
            if self._wait(self._side_event, 2.0):
                found["queued_ran"] = sum(self._words.i32(256 + index) == 1 for index in range(_VICTIM_GRID))
                found["queued_grid"] = _VICTIM_GRID
        return found

    def _check(self, pending: Any) -> tuple[list[dict[str, Any]], int]:
        found = super()._check(pending)
        path = self._setup.extra.get("answers")
        if found[0] and path and pending.index >= 0:
            plan = pending.size.plan
            target = Path(str(path))
            partial = target.with_name(target.name + ".part")
            partial.write_bytes(bytes(self._results.view[: 4 * plan.rows * plan.top_k]))
            partial.replace(target)
        return found


def _workload(driver: Driver, setup: Setup, note: Callable[[str], None]) -> DeviceWorkload:
    return RelativeWorkload(driver, setup, note=note)


if __name__ == "__main__":
    status = child_main(sys.argv[1:], _workload)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
