"""The server's cards as ``DeviceSample``: NVML, GPM where the card has it, Xid events, and the card's own busy power level.

That level is learnt while the server was seen to work. Touches no process.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ...clock import SYSTEM, Clock
from ...errors import NoDeviceError, UnavailableError
from ...forensics.collect.gpm import Gpm, GpmSample
from ...forensics.collect.nvml import Nvml, NvmlDevice
from ...forensics.device_state import Unread
from .records import DeviceSample, Rank

__all__ = ["BusyLevel", "CardReader"]

_GPM_S = 1.0
_HOLDERS_S = 5.0
_MOST_XIDS = 16
#: So long an Xid stands in the samples.
_XIDS_S = 120.0


class BusyLevel:
    """What a card draws when this server computes: the ninth tenth of the last ten minutes of work, in W; None until learnt."""

    LEAST = 3

    def __init__(self) -> None:
        self._powers: deque[float] = deque(maxlen=600)

    def learn(self, power_w: float) -> None:
        self._powers.append(power_w)

    @property
    def watts(self) -> float | None:
        if len(self._powers) < self.LEAST:
            return None
        return sorted(self._powers)[int(0.9 * (len(self._powers) - 1))]


class _Card:
    def __init__(self, device: NvmlDevice, index: int, uuid: str | None, clock: Clock) -> None:
        self.device, self.index, self.uuid = device, index, uuid
        self.busy = BusyLevel()
        self.learnt_at = -1e9
        self.gpm: Gpm | None = None
        self.gpm_why: Unread | None = None
        self.gpm_last: GpmSample | None = None
        self.gpm_at = -1e9
        self.holders_at = -1e9
        self.others: int | None = None
        self.xids: deque[tuple[float, int]] = deque(maxlen=_MOST_XIDS)
        self.last: DeviceSample | None = None
        try:
            self.gpm = Gpm(device, clock)
        except UnavailableError as error:
            self.gpm_why = Unread("GPM", str(error))


def _named(ranks: Sequence[Rank]) -> frozenset[tuple[str | None, int | None]]:
    """(UUID, index) of the cards that ranks name."""
    return frozenset((rank.gpu_uuid, rank.gpu_index) for rank in ranks if rank.gpu_uuid or rank.gpu_index is not None)


class CardReader:
    """Of the cards that ``ranks`` name; where they name none, of all that are visible here (``guessed``: ``own`` of each is
    False).

    ``retarget`` names them anew, from any thread; what was learnt of a card that stays is kept. ``own``: gives the server's pids.
    Raises NoDriverError, NoDeviceError. ``look`` may wait inside a driver in trouble: it belongs into a thread of its own.
    """

    def __init__(
        self, ranks: Sequence[Rank], own: Callable[[], Collection[int]], *, nvml: Nvml | None = None, clock: Clock = SYSTEM
    ) -> None:
        self._clock = clock
        self._own = own
        self._nvml = nvml or Nvml()
        self._n: Any = self._nvml.module
        self.guessed = False
        self._cards: list[_Card] = []
        self._events: Any = None
        self._events_why: Unread | None = None
        self._wanted = self._named = _named(ranks)
        self._choose(self._wanted)

    def retarget(self, ranks: Sequence[Rank]) -> None:
        """The server's ranks as they are known now: their cards are looked at from the next look on."""
        self._wanted = _named(ranks)

    def _choose(self, named: frozenset[tuple[str | None, int | None]]) -> None:
        """Take these cards, or all that are visible. NoDeviceError; then those before stay."""
        if named:
            # By its UUID where it has one: two ranks of one card, of which one is known by its index alone, are one card.
            devices = [self._nvml.by_uuid(uuid) if uuid else self._nvml.by_index(index or 0) for uuid, index in named]
        else:
            devices = [self._nvml.by_index(index) for index in range(min(self._nvml.count(), 64))]
        if not devices:
            raise NoDeviceError("NVML shows no GPU")
        known = {(card.index, card.uuid): card for card in self._cards}
        cards: dict[tuple[int, str | None], _Card] = {}
        for device in devices:
            identity = device.identity()
            key = (identity.index, identity.uuid)
            if key not in cards:
                cards[key] = known.get(key) or _Card(device, identity.index, identity.uuid, self._clock)
        fresh = [card for key, card in cards.items() if key not in known]
        self._cards, self.guessed, self._named = list(cards.values()), not named, named
        if fresh:
            self.close()
            self._register()

    def _register(self) -> None:
        n = self._n
        try:
            self._events = n.nvmlEventSetCreate()
            for card in self._cards:
                n.nvmlDeviceRegisterEvents(card.device.handle, n.nvmlEventTypeXidCriticalError, self._events)
        except (n.NVMLError, AttributeError) as error:
            self._events = None
            self._events_why = Unread("NVML Xid events", str(error), "They are in the kernel's log, too: dmesg")

    def look(self) -> tuple[DeviceSample, ...]:
        """One sample of each card, in the order of their indices."""
        # First: other cards need another set of events, and what lies in this one would go with it.
        self._xids()
        wanted = self._wanted
        if wanted != self._named:
            self._choose(wanted)
        return tuple(sorted((self._one(card) for card in self._cards), key=lambda sample: sample.index))

    def learn(self, moving: bool) -> None:
        """The server is seen to work, as of now: what its cards draw is their busy level. At most once a second."""
        now = self._clock.monotonic()
        for card in self._cards:
            last = card.last
            if (
                moving
                and last is not None
                and last.power_w is not None
                and (last.utilisation or 0) >= 20
                and now - card.learnt_at >= 1.0
            ):
                card.learnt_at = now
                card.busy.learn(last.power_w)

    def _xids(self) -> None:
        for _ in range(32):
            if self._events is None:
                return
            try:
                event = self._n.nvmlEventSetWait_v2(self._events, 0)
            except self._n.NVMLError as error:
                if getattr(error, "value", None) != self._n.NVML_ERROR_TIMEOUT:
                    self._events_why = Unread("NVML Xid events", str(error), "They are in the kernel's log, too: dmesg")
                    self._events = None
                return
            self._note(event)

    def _note(self, event: Any) -> None:
        if not int(event.eventType) & int(self._n.nvmlEventTypeXidCriticalError):
            return
        try:
            uuid = NvmlDevice(self._n, event.device).identity().uuid
        except (self._n.NVMLError, AttributeError):
            uuid = None
        for card in self._cards:
            if uuid in (None, card.uuid):
                card.xids.append((self._clock.monotonic(), int(event.eventData)))

    def _one(self, card: _Card) -> DeviceSample:
        seen = card.device.sample(clock=self._clock)
        unread = [*seen.unread, *([self._events_why] if self._events_why else [])]
        if card.gpm is not None and seen.at - card.gpm_at >= _GPM_S:
            card.gpm_at = seen.at
            card.gpm_last = card.gpm.look() or card.gpm_last
        if card.gpm_why is not None:
            unread.append(card.gpm_why)
        gpm = card.gpm_last
        if gpm is not None:
            unread += gpm.unread
            if seen.at - gpm.end > 3 * _GPM_S:
                gpm = None
        if seen.at - card.holders_at >= _HOLDERS_S:
            card.holders_at = seen.at
            card.others = self._others(card)
        sample = DeviceSample(
            at=seen.at,
            index=card.index,
            uuid=card.uuid,
            utilisation=seen.utilisation,
            memory_utilisation=seen.memory_utilisation,
            power_w=seen.power_w,
            busy_power_w=card.busy.watts,
            sm_clock_mhz=seen.sm_clock_mhz,
            memory_used=seen.memory_used,
            sm_occupancy=gpm.sm_occupancy if gpm is not None else None,
            xids=tuple(xid for at, xid in card.xids if seen.at - at <= _XIDS_S),
            unread=tuple(unread),
            sm_util=gpm.sm_util if gpm is not None else None,
            dram_util=gpm.dram_bw_util if gpm is not None else None,
            others=card.others,
            own=not self.guessed,
        )
        card.last = sample
        return sample

    def _others(self, card: _Card) -> int | None:
        """Compute processes that are not the server's; None where NVML speaks of pids of another namespace."""
        holders, _ = card.device.processes()
        own = set(self._own())
        if holders is None or not own:
            return None
        pids = {holder.pid for holder in holders}
        return len(pids - own) if pids & own else None

    def close(self) -> None:
        """Give the event set back."""
        if self._events is not None:
            with contextlib.suppress(self._n.NVMLError, AttributeError):
                self._n.nvmlEventSetFree(self._events)
            self._events = None
