"""GPM: how many SMs are busy, between two looks, without touching the process. NVML, Hopper and later "where supported".

SM_UTIL is the share of SMs with work (0.76 % was measured on an H200 with one spinning CTA: 1 of 132), so it tells one spinning CTA
from a whole spinning device, which utilisation cannot. Metric numbers: ``nvmlGpmMetricId_t`` in nvml.h.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

from ...clock import SYSTEM, Clock
from ...errors import UnavailableError
from ..device_state import Unread
from .nvml import NvmlDevice

__all__ = ["METRICS", "Gpm", "GpmSample"]

#: Name to NVML's metric number: percentages.
METRICS = {"graphics_util": 1, "sm_util": 2, "sm_occupancy": 3, "dram_bw_util": 10}
#: NVML averages over what lies between two looks; shorter than this they may hold no counter update, seconds.
SHORTEST_INTERVAL_S = 0.1


_ONE_CALL = threading.Lock()
#: A call takes milliseconds; for one of another thread that takes longer is waited so long, seconds.
_OPEN_WAIT_S, _LOOK_WAIT_S = 1.0, 0.05


@dataclass(frozen=True, slots=True)
class GpmSample:
    """Averages from ``begin`` to ``end`` (seconds on the clock), in percent; a metric that is None stands in ``unread``."""

    begin: float
    end: float
    graphics_util: float | None
    sm_util: float | None
    sm_occupancy: float | None
    dram_bw_util: float | None
    unread: tuple[Unread, ...] = ()

    def line(self, sm_count: int | None = None) -> str:
        """``SM_UTIL 0.76 % (about 1.0 of 132 SMs), SM_OCCUPANCY 0.38 %, DRAM 0.00 %, graphics 100 %``."""
        parts = []
        if self.sm_util is not None:
            share = f" (about {self.sm_util * sm_count / 100:.1f} of {sm_count} SMs)" if sm_count else ""
            parts.append(f"SM_UTIL {self.sm_util:.2f} %{share}")
        if self.sm_occupancy is not None:
            parts.append(f"SM_OCCUPANCY {self.sm_occupancy:.2f} %")
        if self.dram_bw_util is not None:
            parts.append(f"DRAM {self.dram_bw_util:.2f} %")
        if self.graphics_util is not None:
            parts.append(f"graphics {self.graphics_util:.0f} %")
        return ", ".join(parts) or "nothing readable"


class Gpm:
    """GPM of one card, for any thread. UnavailableError where the card or the binding has none.

    Two calls at once can end the process with SIGSEGV (seen with driver 580.159.04 while a second workload on the same card was
    opened, which has samples of its own): one call at a time in the process, whichever object and thread make it.
    """

    def __init__(self, device: NvmlDevice, clock: Clock = SYSTEM) -> None:
        self._n: Any = device.module
        self._handle = device.handle
        self._clock = clock
        if not _ONE_CALL.acquire(timeout=_OPEN_WAIT_S):
            raise UnavailableError(
                "GPM: a call of another thread has not come back", help_text="NVML's utilisation and power still are read."
            )
        try:
            support = self._n.nvmlGpmQueryDeviceSupport(self._handle)
            if not support.isSupportedDevice:
                raise UnavailableError(
                    "GPM: this card does not support it", help_text="NVML's utilisation and power still are read."
                )
            self._before = self._n.nvmlGpmSampleAlloc()
            self._after = self._n.nvmlGpmSampleAlloc()
            self._n.nvmlGpmSampleGet(self._handle, self._before)
        except self._n.NVMLError as error:
            raise UnavailableError(f"GPM: {error}", help_text="NVML's utilisation and power still are read.") from error
        except AttributeError as error:
            raise UnavailableError(f"GPM: the binding lacks it: {error}", help_text="pip install -U nvidia-ml-py") from error
        finally:
            _ONE_CALL.release()
        self._since = clock.monotonic()

    def look(self) -> GpmSample | None:
        """Averages since the last look, which this one then replaces; None when that was less than 0.1 s ago, or while another
        thread stays in a call (a driver in trouble can keep it there)."""
        if not _ONE_CALL.acquire(timeout=_LOOK_WAIT_S):
            return None
        try:
            return self._look()
        finally:
            _ONE_CALL.release()

    def _look(self) -> GpmSample | None:
        now = self._clock.monotonic()
        if now - self._since < SHORTEST_INTERVAL_S:
            return None
        unread: list[Unread] = []
        values: dict[str, float | None] = dict.fromkeys(METRICS)
        try:
            self._n.nvmlGpmSampleGet(self._handle, self._after)
            question = self._n.c_nvmlGpmMetricsGet_t()
            question.version = self._n.NVML_GPM_METRICS_GET_VERSION
            question.numMetrics = len(METRICS)
            question.sample1 = self._before
            question.sample2 = self._after
            for slot, number in enumerate(METRICS.values()):
                question.metrics[slot].metricId = number
            answer = self._n.nvmlGpmMetricsGet(question)
        except self._n.NVMLError as error:
            unread.append(Unread("GPM", str(error), "NVML's utilisation and power still are read."))
        else:
            for slot, name in enumerate(METRICS):
                metric = answer.metrics[slot]
                if metric.nvmlReturn != 0:
                    unread.append(Unread(f"GPM {name}", f"NVML status {metric.nvmlReturn}"))
                elif not math.isfinite(metric.value):
                    unread.append(Unread(f"GPM {name}", f"not a number: {metric.value}"))
                else:
                    values[name] = float(metric.value)
        begin, self._since = self._since, now
        self._before, self._after = self._after, self._before
        return GpmSample(begin=begin, end=now, unread=tuple(unread), **values)
