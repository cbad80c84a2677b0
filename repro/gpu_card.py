"""The card of a GPU run: who held it before, what it shows while the workload runs, whether it is left as it was found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..clock import SYSTEM, Clock, Deadline
from ..errors import NoDeviceError, NoDriverError, RefusedError, UnavailableError
from ..forensics.collect.gpm import Gpm, GpmSample
from ..forensics.collect.nvml import GpuSample, Nvml, NvmlDevice, SampleThread
from ..forensics.device_state import Unread

__all__ = ["GpuCard"]

#: After the child's end the card is given so long to show idle, seconds (NVML averages over up to 1 s).
_IDLE_WAIT_S = 3.0
_IDLE_PERCENT = 10


class GpuCard:
    """``device``: None until ``look``, and if NVML cannot be read. ``unread``: what could not be read of it, or be done on it."""

    def __init__(self, nvml: Callable[[], Nvml] = Nvml, clock: Clock = SYSTEM) -> None:
        self._make_nvml = nvml
        self._clock = clock
        self._samples: SampleThread | None = None
        self.device: NvmlDevice | None = None
        self.before: GpuSample | None = None
        self.latest_gpm: GpmSample | None = None
        self.unread: list[Unread] = []

    def look(self, uuid: str, ours: int, *, share: bool) -> dict[str, Any] | None:
        """Its identity, and who holds it before any context is made on it. ``ours``: the pid of our own child.

        Not readable is said, and does not refuse. RefusedError if somebody else holds it and ``share`` is not set.
        """
        try:
            device = self.device = self._make_nvml().by_uuid(uuid)
        except (NoDriverError, NoDeviceError) as error:
            self.unread.append(Unread("NVML", str(error), error.help_text))
            return None
        identity = device.identity()
        self.before = device.sample(processes=True, clock=self._clock)
        self.unread.extend(identity.unread + self.before.unread)
        others = [process for process in self.before.processes or () if process.pid != ours]
        if others and not share:
            named = ", ".join(
                f"{process.pid}" + (f" ({process.memory >> 20} MiB)" if process.memory is not None else "")
                for process in others[:5]
            )
            raise RefusedError(
                f"{identity.name or 'the GPU'} (index {identity.index}) already holds {len(others)} compute process(es): {named}. "
                "A hang here would stall them.",
                help_text="Choose a free card with --device, or say --share.",
            )
        return {field: value for field, value in dataclasses.asdict(identity).items() if field != "unread"}

    def start_sampling(self) -> None:
        """Look at it ten times a second from now on, its counters too where there are any.

        An earlier thread ends first, where a workload is opened again. A second child, for a core dump, has a card object and a
        thread of its own beside the first one's.
        """
        if left := self.stop_sampling():
            self.unread.append(Unread("NVML", left))
        device = self.device
        if device is None:
            return
        gpm: Gpm | None = None
        try:
            gpm = Gpm(device, self._clock)
        except UnavailableError as error:
            self.unread.append(Unread("GPM", str(error), error.help_text))

        def look() -> GpuSample:
            if gpm is not None:
                self.latest_gpm = gpm.look() or self.latest_gpm
            return device.sample(clock=self._clock)

        self._samples = SampleThread(look, period_s=0.1, clock=self._clock)
        self._samples.start()

    @property
    def latest(self) -> GpuSample | None:
        """The newest look; None without one."""
        return self._samples.latest if self._samples is not None else None

    def stop_sampling(self) -> str:
        """End the looks; may be called twice. In words what is left of them: "", or a thread in a call that has not come back."""
        samples, self._samples = self._samples, None
        if samples is None or samples.stop():
            return ""
        return "an NVML call has not come back: the thread that looks at the card is left to it"

    def left_as_found(self, pid: int) -> tuple[bool | None, str]:
        """(whether it is idle again after the end of our child ``pid``, None if that cannot be told; in words)."""
        if self.device is None:
            return None, "NVML could not be read: whether the card is idle is not known"
        before = {process.pid for process in self.before.processes or ()} if self.before else set()
        deadline = Deadline(_IDLE_WAIT_S, self._clock)
        while True:
            sample = self.device.sample(processes=True, clock=self._clock)
            if sample.processes is None or sample.utilisation is None:
                return None, f"after the end: {sample.line()}; processes not readable"
            ours = {process.pid for process in sample.processes} - before
            if before and pid not in ours:
                return None, f"left as found: {len(sample.processes)} compute processes, {sample.line()}"
            if not ours and sample.utilisation <= _IDLE_PERCENT:
                return True, f"idle: no compute process, {sample.line()}"
            if deadline.expired:
                return False, f"not idle {_IDLE_WAIT_S:g} s after the end: processes {sorted(ours)}, {sample.line()}"
            self._clock.sleep(0.05)
