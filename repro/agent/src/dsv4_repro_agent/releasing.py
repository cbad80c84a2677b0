"""What is done on the side stream: the row states, and the release of the known wait, one launch behind the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from .driver import Driver
from .guard import Guard
from .hooks import Hooks
from .recorder import Recorder
from .rescue import READS, RELEASE_COUNT, KnownWait, find_wait, zeroed_before_launch
from .said import Said
from .sidestream import Launch, SideStream, SideStreamBusyError

__all__ = ["Releasing", "ask_of"]

#: A request to release works for so long at most; the asker asks again.
RELEASE_S = 0.6
MAX_RELEASES_PER_STALL = 2000
#: Between two reads of the counters: at the first wait of a stall, and at those behind it (a leader whose row is negative can only
#: stay: what the reads exclude is a wait that the device is about to end).
FIRST_GAP_S, NEXT_GAP_S = 0.002, 0.0003
#: After a release the next launch has come to its own wait within so long, or there is none.
SETTLE_S = 0.03


def ask_of(driver: Driver | None) -> Callable[[Any], int] | None:
    """How a thread of ours asks for a torch event."""
    return (lambda event: driver.event_query(int(event.cuda_event))) if driver is not None else None


class Releasing:
    """``stall_s``: a step is overdue after so many seconds. ``entered()`` is called before each call of the driver; ``stopped()``
    ends it. ``vllm``: the version, for the one rule that needs it."""

    def __init__(
        self,
        said: Said,
        recorder: Recorder,
        guard: Guard,
        hooks: Hooks,
        *,
        vllm: str,
        stall_s: float,
        entered: Callable[[], None],
        stopped: Callable[[], bool],
    ) -> None:
        self.said, self.recorder, self.guard, self.hooks, self.vllm = said, recorder, guard, hooks, vllm
        self._stall_s, self.entered, self._stopped = stall_s, entered, stopped
        self.releases = 0
        #: Stalls that ended after at least one release.
        self.rescues = 0

    def overdue(self, stream: SideStream) -> bool:
        """Whether a step is overdue, by an event that is asked now: its end may not have been seen yet."""
        if self.recorder.overdue_for() <= self._stall_s:
            return False
        self.recorder.poll(ask_of(stream.driver))
        return self.recorder.overdue_for() > self._stall_s

    def _captured(self) -> list[Launch]:
        """Launches in graphs: their memory stays as long as the graph. One for each workspace and lengths, the one with most rows
        that a group can be told for."""
        best: dict[tuple[int, int], Launch] = {}
        for launch in list(self.hooks.launches.values()):
            key = (launch.workspace, launch.lengths)
            if launch.captured and launch.rows == launch.groups and launch.rows > (best[key].rows if key in best else 0):
                best[key] = launch
        return list(best.values())

    def row_states(self, stream: SideStream) -> dict[str, Any]:
        """Counters and lengths of every captured launch: what a request is answered with."""
        shown = []
        for launch in self._captured():
            begun = time.monotonic_ns()
            shown.append(
                {
                    "workspace": hex(launch.workspace), "lengths_address": hex(launch.lengths), "rows": launch.rows,
                    "width": launch.width, "top_k": launch.top_k, "max_seq_len": launch.max_seq_len,
                    "arrival_counters": stream.counters(launch), "lengths": stream.lengths(launch),
                    "read_ns": time.monotonic_ns() - begun,
                }
            )  # fmt: skip
        self.recorder.poll(ask_of(stream.driver))  # the end of a step may not have been seen yet
        return {"launches": shown, "stalled_s": self.recorder.stalled_for()}

    def release(self, stream: SideStream) -> dict[str, Any]:
        """What a request to release is answered with: how many launches were released, why no more, and how the guard stands."""
        able, why = zeroed_before_launch(self.vllm)
        released = 0
        if able and not self.overdue(stream):
            able, why = False, "no step is overdue"
        if able:
            released, why = self.rescue(stream, RELEASE_S, "asked for")
        return {
            "released": released, "why_no_more": why, "guard": self.guard.active, "guard_needed": self.guard.needed,
            "stalled_s": self.recorder.stalled_for(), "launches": [],
        }  # fmt: skip

    def rescue(self, stream: SideStream, seconds: float, cause: str) -> tuple[int, str]:
        """Release one known wait after the other until none is left, for ``seconds`` at most.

        Returns how many were released, and why no more. Events: the first wait in full, and a sum at the end.
        """
        begin = settled = time.monotonic()
        released, why = 0, ""
        while not self._stopped() and not self.recorder.capturing and time.monotonic() - begin < seconds:
            self.entered()
            wait, why = self._look(stream, NEXT_GAP_S if released else FIRST_GAP_S)
            if wait is None:
                if released == 0 or time.monotonic() - settled > SETTLE_S:
                    break
                time.sleep(0.0005)
                continue
            if not released:
                self.guard.arm(True, f"first release ({cause})")
            if self.releases >= MAX_RELEASES_PER_STALL and not self.guard.active:
                why = f"stopped after {self.releases} releases without a guard to end them"
                self.said.feature("rescue", False, why)
                break
            try:
                stream.write_word(wait.address, RELEASE_COUNT)
            except SideStreamBusyError:
                # It is queued and cannot be taken back; whether and when it is done, nobody has seen.
                self.said.event(
                    "write not confirmed", address=hex(wait.address), group=wait.group, releases=self.releases, cause=cause
                )
                raise
            self.releases += 1
            released += 1
            settled = time.monotonic()
            if self.recorder.ring is not None:
                self.recorder.ring.released()
            if released == 1:
                self.said.event(
                    "released", address=hex(wait.address), group=wait.group, length=wait.length, rows=wait.launch.rows, cause=cause
                )
        if released:
            self.rescues += 1
            self.said.event("rescued", launches=released, seconds=round(settled - begin, 4), guard=self.guard.active, cause=cause)
        return released, why

    def _look(self, stream: SideStream, gap: float) -> tuple[KnownWait | None, str]:
        """The first known wait among the captured launches, or why there is none."""
        why: set[str] = set()
        for launch in self._captured():
            reads: list[Sequence[int]] = []
            for number in range(READS):
                if number:
                    time.sleep(gap)
                reads.append(stream.counters(launch))
                if 1 not in reads[-1]:
                    break
            if len(reads) < READS:
                why.add("no group has one arrival")
                continue
            wait, reason = find_wait(reads, launch, stream.lengths(launch))
            if wait is not None:
                return wait, reason
            why.add(reason)
        return None, "; ".join(sorted(why)) or "no captured launch of the op is known"
