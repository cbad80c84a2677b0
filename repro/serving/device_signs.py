"""What the cards and the recorders say about a stand-still: signs for a hang, and what contradicts or explains one. Pure.

Two kinds of sign. *Recorder*: a step was launched, the event behind it has not completed for longer than healthy steps take, and
neither steps begun nor steps ended move, said by an agent whose own thread still runs. *NVML*: every card of the server shows a
resident kernel (utilisation) that moves no memory, at a power well below the same card's busy level (or at few SMs by GPM, or,
weaker, at flat power), all the while that the engine's counters stand. Cards of which it is not known whether they are the server's
(``DeviceSample.own``) speak for it only where every one that is visible shows it, for longer, and it is said so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .movement import Movement
from .records import Blind, DeviceSample, RankProgress
from .watch_limits import FATAL_XIDS, PROCESS_XIDS, WatchLimits

__all__ = ["DeviceTrack", "Signs", "deadline_of", "device_words", "own_tracks", "recorder_signs", "resident", "spin_signs"]


@dataclass(slots=True)
class Signs:
    """``signals`` make a hang; ``against`` are facts that hold them back, ``blind`` what could not speak."""

    signals: list[str] = field(default_factory=list)
    against: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    blind: list[Blind] = field(default_factory=list)


class DeviceTrack:
    """The recent samples of one card, by watched time. ``spin_since``: since when every sample showed a resident kernel without
    memory traffic; ``idle_since``, ``working_since`` likewise."""

    def __init__(self, limits: WatchLimits) -> None:
        self._limits = limits
        self._last_at: float | None = None
        self.samples: deque[tuple[float, DeviceSample]] = deque(maxlen=48)
        self.spin_since: float | None = None
        self.idle_since: float | None = None
        self.xids: tuple[int, ...] = ()
        self.xid_since: float | None = None

    def look(self, now: float, sample: DeviceSample) -> None:
        if self._last_at is not None and sample.at <= self._last_at:
            return
        if self._last_at is not None and sample.at - self._last_at > self._limits.longest_gap_s:
            self.spin_since = self.idle_since = None
            self.samples.clear()
        self._last_at = sample.at
        self.samples.append((now, sample))
        spin, idle = self._spins(sample), sample.utilisation is not None and sample.utilisation <= self._limits.idle_percent
        self.spin_since = (now if self.spin_since is None else self.spin_since) if spin else None
        self.idle_since = (now if self.idle_since is None else self.idle_since) if idle else None
        if set(sample.xids) - set(self.xids):
            self.xid_since = now
        self.xids = sample.xids

    def _spins(self, sample: DeviceSample) -> bool:
        limits = self._limits
        if sample.utilisation is None or sample.utilisation < limits.spin_percent:
            return False
        traffic = sample.memory_utilisation
        if traffic is not None and traffic > limits.quiet_memory_percent:
            return False
        return sample.dram_util is None or sample.dram_util <= limits.quiet_dram_percent

    @property
    def newest(self) -> DeviceSample | None:
        return self.samples[-1][1] if self.samples else None

    def since(self, moment: float) -> float:
        """Watched time from ``moment`` to the newest sample."""
        return self.samples[-1][0] - moment if self.samples else 0.0

    def spin_s(self) -> float:
        """How long it was seen spinning, as far as NVML's utilisation and memory figures go."""
        return self.samples[-1][0] - self.spin_since if self.spin_since is not None and self.samples else 0.0

    def idle_s(self) -> float:
        return self.samples[-1][0] - self.idle_since if self.idle_since is not None and self.samples else 0.0

    @property
    def works(self) -> bool:
        """Memory traffic, or, where the card does not tell it, power near the busy level."""
        sample, limits = self.newest, self._limits
        if sample is None:
            return False
        if (sample.dram_util or 0.0) >= limits.working_dram_percent:
            return True
        if sample.memory_utilisation is not None:
            return sample.memory_utilisation >= limits.working_memory_percent
        level = self._level(sample)
        return level is not None and level >= limits.working_power

    def _level(self, sample: DeviceSample) -> float | None:
        if sample.power_w is None or not sample.busy_power_w:
            return None
        return sample.power_w / sample.busy_power_w

    def grade(self) -> tuple[str, str]:
        """("strong" | "flat" | "", in words) of the spin as it stands. Power is averaged over a second: the first is not used."""
        limits = self._limits
        if self.spin_since is None or not self.samples:
            return "", ""
        end = self.samples[-1][0]
        window = [sample for at, sample in self.samples if at >= max(self.spin_since + 1.0, end - limits.spin_s)]
        if not window:
            return "", ""
        sms = [sample.sm_util for sample in window if sample.sm_util is not None]
        if sms and max(sms) <= limits.few_sms_percent and min(sms) > 0:
            return "strong", f"GPM: {max(sms):.2f} % of the SMs have work"
        powers = [sample.power_w for sample in window if sample.power_w is not None]
        busy = window[-1].busy_power_w
        if powers and busy and max(powers) <= limits.low_power * busy:
            return "strong", f"{powers[-1]:.0f} W, busy level {busy:.0f} W"
        if window[-1].memory_utilisation is None and not any(sample.dram_util is not None for sample in window):
            return "", ""
        if len(powers) >= 3 and max(powers) - min(powers) <= max(3.0, limits.flat_power * max(powers)):
            known = f"busy level {busy:.0f} W, not far above" if busy else "no busy level known"
            return "flat", f"power flat at {powers[-1]:.0f} W ({known})"
        return "", ""

    @property
    def dull(self) -> tuple[Blind, ...]:
        """What this card does not tell."""
        sample = self.newest
        if sample is None:
            return ()
        name = f"GPU {sample.index}"
        why = {entry.what: entry.why for entry in sample.unread}
        told = "; ".join(sorted({text for key, text in why.items() if "util" in key or "power" in key}))[:120]
        found = []
        if sample.utilisation is None:
            found.append(Blind(f"{name} utilisation", told or "NVML gives none"))
        if sample.memory_utilisation is None:
            found.append(Blind(f"{name} memory utilisation", told or "NVML gives none on this card"))
        if sample.power_w is None:
            found.append(Blind(f"{name} power", told or "NVML gives none"))
        elif sample.busy_power_w is None:
            found.append(Blind(f"{name} busy power level", "the server was not seen computing yet"))
        if sample.others:
            found.append(
                Blind(f"{name} NVML", f"{sample.others} processes of others compute on it: its figures are not the server's")
            )
        return tuple(found)


def device_words(sample: DeviceSample) -> str:
    parts = []
    if sample.utilisation is not None:
        parts.append(f"{sample.utilisation} %")
    if sample.memory_utilisation is not None:
        parts.append(f"memory {sample.memory_utilisation} %")
    if sample.power_w is not None:
        parts.append(f"{sample.power_w:.0f} W" + (f" of {sample.busy_power_w:.0f} W when busy" if sample.busy_power_w else ""))
    return f"GPU {sample.index}: " + (", ".join(parts) or "nothing readable")


def own_tracks(tracks: dict[str, DeviceTrack]) -> dict[str, DeviceTrack]:
    """Those of cards that are known to be the server's, as far as they were read."""
    return {name: track for name, track in tracks.items() if track.newest is not None and track.newest.own}


def resident(tracks: dict[str, DeviceTrack], *grades: str) -> tuple[float, str]:
    """(seconds that a kernel has been resident on every card of the server and moved no memory, the cards in words); 0 where not on
    every card, not by these grades, where others compute on one, or where no card is known to be the server's."""
    seen = [(track, track.newest) for track in own_tracks(tracks).values() if track.newest is not None]
    if not seen or not all(track.grade()[0] in grades and not newest.others for track, newest in seen):
        return 0.0, ""
    return min(track.spin_s() for track, _ in seen), "; ".join(device_words(newest) for _, newest in seen)


def deadline_of(progress: RankProgress, limits: WatchLimits) -> float:
    """How long the oldest unfinished step may go on."""
    full = progress.graph_mode == "full"
    if progress.healthy_s is None:
        return limits.step_unknown_s if full else limits.eager_unknown_s
    floor = limits.step_floor_s if full else limits.eager_floor_s
    factor = limits.step_factor if full else limits.eager_factor
    return min(max(floor, factor * progress.healthy_s), limits.step_ceiling_s)


def recorder_signs(
    progress: tuple[RankProgress, ...],
    movement: Movement,
    tracks: dict[str, DeviceTrack],
    limits: WatchLimits,
    *,
    host_works: str,
    workers: frozenset[int] = frozenset(),
) -> Signs:
    """``host_works``: why a host that launches nothing is believed to be at work, or nothing. ``workers``: the pids of all."""
    signs = Signs()
    readable = [one for one in progress if not one.error]
    signs.blind += [Blind(f"recorder of {_rank(one)}", one.error) for one in progress if one.error]
    if not progress:
        signs.blind.append(Blind("flight recorder", "no ring of a worker was read: the agent is not loaded (DSV4_REPRO_AGENT=1)"))
        return signs
    hosts = [one for one in readable if not one.unfinished and one.launching_age_s is not None]
    for one in readable:
        _one_ring(one, movement, tracks, limits, signs)
    if signs.signals and hosts:
        late = max(hosts, key=lambda one: one.launching_age_s or 0.0)
        age = late.launching_age_s or 0.0
        words = f"{_rank(late)} has begun a step and launched nothing for {age:.1f} s: its peers' kernels wait for it"
        _late(signs, words, age >= limits.host_rank_s, host_works)
    unseen = workers - {one.pid for one in readable}
    if signs.signals and unseen and len(workers) > 1:
        # A worker that is late holds up the kernels of its peers, and this one's recorder does not say that it is not.
        age = max(one.unfinished_age_s or 0.0 for one in readable)
        words = f"the recorders of {len(unseen)} of {len(workers)} workers say nothing, and one that is late looks the same"
        _late(signs, words, age >= limits.differ_s, host_works)
    return signs


def _late(signs: Signs, words: str, long_enough: bool, host_works: str) -> None:
    """A worker that may only be late holds the signals back until it has been so for long and no host is believed to be at work."""
    if long_enough and not host_works:
        signs.facts.append(words)
        return
    signs.against.append(words + (f" ({host_works})" if host_works else ""))
    signs.facts += signs.signals
    signs.signals = []


def _rank(one: RankProgress) -> str:
    return f"rank {one.rank}" if one.rank is not None and one.rank >= 0 else f"pid {one.pid}"


def _one_ring(one: RankProgress, movement: Movement, tracks: dict[str, DeviceTrack], limits: WatchLimits, signs: Signs) -> None:
    standing = movement.rings.get(one.pid)
    if not one.unfinished or one.unfinished_age_s is None or standing is None:
        return
    deadline = deadline_of(one, limits)
    own = own_tracks(tracks)
    if one.graph_mode != "full" and not own:
        # A long prefill and a wedge look the same to the recorder; no card tells them apart.
        deadline = max(deadline, limits.eager_blind_s)
    if one.unfinished_age_s < deadline or standing.still_s < limits.ring_still_s or standing.looks < limits.least_looks:
        return
    shape = "" if one.requests is None else f", {one.requests} requests"
    if one.padded_requests is not None and one.padded_requests != one.requests:
        shape += f" padded to {one.padded_requests}"
    basis = (
        f"healthy steps of this mode took at most {one.healthy_s:.2f} s" if one.healthy_s is not None else "none seen to end before"
    )
    words = (
        f"{_rank(one)}: step {one.unfinished[0]} (graph mode {one.graph_mode}{shape}) was launched and its event has not completed "
        f"for {one.unfinished_age_s:.1f} s (deadline {deadline:.1f} s: {basis}); {one.begun} steps begun, none begun or ended for "
        f"{standing.still_s:.1f} s"
    )
    if one.heard_age_s is not None and one.heard_age_s > limits.heard_s:
        signs.blind.append(Blind(f"recorder of {_rank(one)}", f"the agent's thread has not run for {one.heard_age_s:.1f} s"))
        signs.facts.append(words)
        return
    mine = [track for track in own.values() if one.device is None or (track.newest and track.newest.index == one.device)]
    if mine and all(track.idle_s() >= limits.idle_s for track in mine):
        signs.against.append(f"contradiction: NVML has shown its card idle for {min(track.idle_s() for track in mine):.1f} s")
        signs.facts.append(words)
        return
    if mine and all(track.works for track in mine):
        seen = "; ".join(device_words(track.newest) for track in mine if track.newest)
        if one.unfinished_age_s < max(limits.contradicted_s, deadline):
            signs.against.append(f"contradiction: the card moves memory ({seen})")
            signs.facts.append(words)
            return
        signs.facts.append(f"in spite of memory traffic ({seen})")
    seen_busy = any((track.newest and (track.newest.utilisation or 0) >= limits.spin_percent) for track in mine)
    if one.heard_age_s is None and not seen_busy and one.unfinished_age_s < limits.unheard_factor * deadline:
        signs.against.append("the agent does not say that its thread runs, and NVML shows no busy card: waiting longer")
        signs.facts.append(words)
        return
    signs.signals.append(words)


def spin_signs(
    tracks: dict[str, DeviceTrack],
    still_s: float,
    engine_still_s: float,
    limits: WatchLimits,
    *,
    host_works: str,
    log_works: str,
    here: bool = True,
) -> Signs:
    """NVML's word. ``still_s``: all of the server was seen standing; ``engine_still_s``: at least one engine with work in hand.
    ``here``: a process of the server is seen on this machine; cards that are only visible are else no sign of it."""
    signs = Signs()
    told = own_tracks(tracks)
    live = told or {name: track for name, track in tracks.items() if track.newest is not None}
    for track in live.values():
        signs.blind += track.dull
    if not live:
        signs.blind.append(Blind("NVML", "no card of the server was read"))
        return signs
    standing = max(still_s, engine_still_s)
    # An Xid that the server has moved on after is none of this stand-still's.
    near = [track for track in live.values() if track.xid_since is not None and track.since(track.xid_since) <= standing + 5.0]
    faults = sorted(
        {
            xid for track in near for xid in track.xids
            if xid in FATAL_XIDS and not (xid in PROCESS_XIDS and track.newest and track.newest.others)
        }
    )  # fmt: skip
    if faults and standing >= limits.still_s:
        said = f"NVML reported Xid {', '.join(map(str, faults))}"
        signs.signals += [said] if told else []
        signs.facts += [] if told else [f"{said}, and whether a card of the server had it is not known"]
    own = {name: track for name, track in live.items() if not (track.newest and track.newest.others)}
    spinning = {name: track for name, track in own.items() if track.spin_since is not None}
    if not spinning:
        return signs
    grades = {name: track.grade() for name, track in spinning.items()}
    words = "; ".join(
        f"{device_words(track.newest)}, {grades[name][1]}" if grades[name][1] else device_words(track.newest)
        for name, track in spinning.items()
        if track.newest is not None
    )
    every = len(spinning) == len(live)
    if not told:
        _guessed_spin(signs, spinning, all(grade == "strong" for grade, _ in grades.values()) and every and here, still_s, words,
                      limits, works=host_works or log_works)  # fmt: skip
        return signs
    if every and all(grade == "strong" for grade, _ in grades.values()):
        need, why = limits.spin_s, ""
    elif all(grade for grade, _ in grades.values()):
        need, why = limits.flat_s, "without a power well below the busy level this takes longer"
    else:
        signs.facts.append(f"spinning by utilisation alone: {words}")
        return signs
    if not every:
        need, why = limits.differ_s, f"{len(spinning)} of {len(live)} cards spin, a rank that is late looks the same"
    if log_works and need < limits.work_spin_s:
        need, why = limits.work_spin_s, log_works
    still = still_s if every else max(still_s, engine_still_s)
    have = min(min(track.spin_s() for track in spinning.values()), still if need > limits.still_s else limits.spin_s)
    if host_works:
        signs.against.append(f"a kernel is resident and moves no memory, but the host is at work: {host_works}")
    elif still < limits.still_s or have < need:
        signs.facts.append(
            f"a kernel is resident and moves no memory, {have:.1f} of {need:g} s ({words})" + (f"; {why}" if why else "")
        )
    else:
        long = min(track.spin_s() for track in spinning.values())
        signs.signals.append(f"NVML: a kernel has been resident for {long:.1f} s and moves no memory ({words})")
    return signs


def _guessed_spin(
    signs: Signs, spinning: dict[str, DeviceTrack], all_spin: bool, still_s: float, words: str, limits: WatchLimits, *, works: str
) -> None:
    """Which of the visible cards are the server's is not known: where all of them spin, its own do too; else one that spins may be
    a neighbour's. An idle card of its own cannot be told from a neighbour's, so what a late rank is given is waited for."""
    long = min(track.spin_s() for track in spinning.values())
    if all_spin and not works and min(long, still_s) >= limits.differ_s:
        signs.signals.append(
            "NVML: on every card that is visible here, and which of them are the server's is not known, a kernel has been resident "
            f"for {long:.1f} s and moves no memory ({words})"
        )
        return
    signs.facts.append(
        f"a kernel is resident for {long:.1f} s and moves no memory ({words}); which cards are the server's is not known, so this "
        f"is a sign of it only if every visible one shows it for {limits.differ_s:g} s"
    )
