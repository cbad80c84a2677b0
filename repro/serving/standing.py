"""How a server stands, from a few looks and its log's past. Pure.

Two looks a second apart show only whether anything moves now. How long it has not moved comes from the recorder (measured) or from
the log (inferred). HUNG needs a stand-still of some length *and* a signal from the device; without one it is suspect, because from
outside a stuck engine and one that has nothing to do for the moment look alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .log_history import LogHistory
from .records import CARDS_GUESSED, Assessment, DeviceSample, EngineSample, Snapshot
from .start_state import StartState

__all__ = ["CARDS_GUESSED", "SPINS", "Standing", "StandingState", "standing"]

StandingState = Literal["healthy", "idle", "starting", "suspect", "hung", "ended", "unknown"]

#: A stand-still of so long, with a signal from the device, is a hang, seconds. Longer than the first round of a JIT compilation as
#: users saw it (31 s at the 95th percentile, vllm-project/vllm#51758) only together with a busy device: a compiler leaves it idle.
STILL_S = 15.0
#: vLLM writes its stats line so often (VLLM_LOG_STATS_INTERVAL), seconds.
STATS_S = 10.0
BUSY_PERCENT = 90
QUIET_MEMORY_PERCENT = 2
#: A card that draws at least this share of what it drew while it computed is computing.
WORKING_SHARE = 0.7
#: How the watchdog's sign of NVML begins (``device_signs``).
SPINS = "NVML: a kernel has been resident"
#: The watchdog's own measure of the same stand-still; the age of it is told once.
_STOOD = " have stood for "
_COUNTERS = ("generation_tokens", "prompt_tokens", "iterations", "finished")


@dataclass(frozen=True, slots=True)
class Standing:
    """``still_s``: for how long nothing has moved, at least (None: not known), ``still_known`` how that is known.

    ``device_signals``: what shows it on the device. ``against``: what speaks against a hang. ``live_requests``: None if not known.
    """

    state: StandingState
    reasons: tuple[str, ...] = ()
    still_s: float | None = None
    still_known: Literal["measured", "inferred", "not observed"] = "not observed"
    device_signals: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    live_requests: int | None = None


def _moved(first: EngineSample, last: EngineSample) -> list[str]:
    found = []
    for name in _COUNTERS:
        before, after = getattr(first, name), getattr(last, name)
        if before is not None and after is not None and after != before:
            found.append(f"{name.replace('_', ' ')} {before:g} -> {after:g}")
    return found


def _steps_moved(snapshots: Sequence[Snapshot]) -> list[str]:
    first = {item.pid: item.begun for item in snapshots[0].progress if not item.error}
    return [
        f"rank {item.rank if item.rank is not None else item.pid}: steps {first[item.pid]} -> {item.begun}"
        for item in snapshots[-1].progress
        if item.pid in first and not item.error and item.begun != first[item.pid]
    ]


def _device_signals(snapshots: Sequence[Snapshot]) -> tuple[list[str], list[str]]:
    """(for, against) a kernel that does not end, by device; only what every look at a device said.

    Where no card is known to be the server's, an idle one says nothing, and a busy one only if all that are visible look so.
    """
    looks: dict[int, list[DeviceSample]] = {}
    for snapshot in snapshots:
        for device in snapshot.devices:
            looks.setdefault(device.index, []).append(device)
    signals, against = [], []
    for index, seen in sorted(looks.items()):
        used = [item.utilisation for item in seen if item.utilisation is not None]
        memory = [item.memory_utilisation for item in seen if item.memory_utilisation is not None]
        last = seen[-1]
        power = f", {last.power_w:.0f} W" if last.power_w is not None else ""
        if last.power_w is not None and last.busy_power_w is not None:
            power += f" of {last.busy_power_w:.0f} W while it computed"
            if last.power_w >= WORKING_SHARE * last.busy_power_w:
                against.append(f"GPU {index} draws {last.power_w:.0f} W, as while it computed ({last.busy_power_w:.0f} W)")
                continue
        if used and max(used) <= 5:
            against.append(f"GPU {index} is idle ({max(used)} %): no kernel is resident")
        elif memory and max(memory) > QUIET_MEMORY_PERCENT:
            against.append(f"GPU {index} moves memory ({max(memory)} %)")
        elif used and memory and min(used) >= BUSY_PERCENT:
            signals.append(f"GPU {index}: a kernel is resident ({min(used)} %) and no memory moves ({max(memory)} %){power}")
    if any(blind.signal == CARDS_GUESSED for blind in snapshots[-1].blind):
        told = [f"{text} (whether the server computes on it is not known)" for text in signals]
        return (told if len(told) == len(looks) else []), []
    return signals, against


def _host_at_work(last: Snapshot) -> list[str]:
    """What explains a stand-still by itself: the device's kernels may wait for it."""
    found = [
        f"process {one.pid} ({one.role}) is stopped: a debugger or a freeze holds it"
        for one in last.processes
        if one.role in ("engine", "worker") and one.state in ("T", "t")
    ]
    compilers = [one.pid for one in last.processes if one.role == "compiler" and one.state == "R"]
    return found + ([f"{len(compilers)} compiler processes run below it (pid {compilers[0]})"] if compilers else [])


def _still(
    snapshots: Sequence[Snapshot], history: LogHistory | None
) -> tuple[float | None, Literal["measured", "inferred", "not observed"], list[str]]:
    ages = [item.unfinished_age_s for item in snapshots[-1].progress if item.unfinished_age_s is not None and not item.error]
    if ages:
        age = max(ages)
        return age, "measured", [f"recorder: a launched step has not ended on the device for {age:.0f} s"]
    if history is not None:
        if history.wait_first_age_s is not None and history.wait_interval_s is not None:
            age = history.wait_first_age_s + history.wait_interval_s
            return (
                age,
                "inferred",
                [f"log: the first waiting line is {history.wait_first_age_s:.0f} s old, after {history.wait_interval_s:g} s"],
            )
        # A line with 0 tokens covers the time before it; one with tokens says nothing of the time after it, until lines miss.
        age = -1.0
        if history.stats_generation == 0 and history.stats_age_s is not None:
            age = history.stats_age_s
        elif history.flowing_age_s is not None:
            age = history.flowing_age_s - 2 * STATS_S
        if age > 0:
            age = max(age, snapshots[-1].at - snapshots[0].at)
            return age, "inferred", [f"log: no tokens in the stats for at least {age:.0f} s"]
    return None, "not observed", []


def standing(
    snapshots: Sequence[Snapshot],
    assessment: Assessment | None = None,
    history: LogHistory | None = None,
    start: StartState | None = None,
) -> Standing:
    """``snapshots``: in order of time; ``assessment``: the watchdog's over the same; ``start``: of a server whose process lives and
    that may not be up yet. Never HUNG without a signal of the device."""
    engines = [item.engine for item in snapshots if item.engine is not None and not item.engine.error]
    last = engines[-1] if engines else None
    health = next((item.engine.health for item in reversed(snapshots) if item.engine is not None), None)
    running = last.running if last is not None else None
    waiting = last.waiting if last is not None else None
    live = running if running is not None else history.stats_running if history is not None else None
    if history is not None and history.ended and health != 200:
        return Standing("ended", (f"log: {history.ended}", _health_text(health)), live_requests=live)
    if assessment is not None and assessment.state in ("crashed", "exited"):
        return Standing("ended", assessment.reasons, live_requests=live)
    moved = (_moved(engines[0], engines[-1]) if len(engines) > 1 else []) + (_steps_moved(snapshots) if len(snapshots) > 1 else [])
    if moved:
        return Standing("healthy", tuple(moved[:6]), 0.0, "measured", live_requests=live)
    if start is not None and not engines and health != 200:
        if start.failed:
            return Standing("ended", start.lines(), live_requests=live)
        if start.is_starting:
            return Standing("starting", start.lines(), live_requests=live)
    phase = next((item.log.phase for item in reversed(snapshots) if item.log is not None), "")
    seen = any(item.processes for item in snapshots)
    told = phase not in ("", "serving") or (seen and health not in (None, 200))
    if assessment is not None and assessment.state == "starting" and told:
        # Nothing answers and no line says that it loads: that is not known, and not fine. Nor is what answers 404 or 502 on another
        # machine: a gateway, or no server of vLLM at all.
        return Standing("starting", assessment.reasons, live_requests=live)
    signals, against = _device_signals(snapshots) if snapshots else ([], [])
    still, known, why = _still(snapshots, history) if snapshots else (None, "not observed", [])
    unfinished = [item for item in snapshots[-1].progress if item.unfinished and not item.error] if snapshots else []
    if last is None and not unfinished:
        reasons = tuple(dict.fromkeys(item.engine.error for item in snapshots if item.engine is not None and item.engine.error))
        if health not in (None, 200):
            reasons = (f"{_health_text(health)}: is it a server of vLLM, and not something before it?", *reasons)
        return Standing(
            "unknown",
            reasons or ("neither the metrics nor a recorder could be read",),
            still,
            known,
            tuple(signals),
            tuple(against),
            live,
        )
    if running == 0 and not waiting and not unfinished:
        if signals:
            text = "the metrics show no request, and yet a kernel does not end: an engine that is stuck stops publishing"
            return Standing("suspect", (text, *why), still, known, tuple(signals), tuple(against), live)
        return Standing("idle", ("no request runs or waits",), live_requests=0)
    stands = [f"no counter moved in the {engines[-1].at - engines[0].at:.1f} s of this look"] if len(engines) > 1 else []
    if running is not None:
        stands.append(f"{running} requests run, {waiting if waiting is not None else '?'} wait; {_health_text(health)}")
    reasons = (*stands, *why)
    against += _host_at_work(snapshots[-1]) if snapshots else []
    # Beside the watchdog a step under way is no sign of its own: a long prefill, or one behind a rank that is late, is one too, and
    # only the watchdog knows what such steps take.
    if unfinished and not against and (assessment is None or (assessment.state == "hung" and not assessment.device_signals)):
        pids = ", ".join(str(item.pid) for item in unfinished[:8])
        signals.append(f"recorder: the event behind the last step has not completed (pid {pids})")
    confirmed = assessment is not None and assessment.state == "hung" and bool(assessment.device_signals or signals)
    if confirmed and assessment is not None:
        if still is None and len(engines) > 1:
            still, known = engines[-1].at - engines[0].at, "measured"
        if any(text.startswith(SPINS) for text in assessment.device_signals):
            signals = []  # the same in the watchdog's words, with for how long
        signals = list(dict.fromkeys([*signals, *assessment.device_signals]))
        found = [text for text in assessment.reasons if _STOOD not in text]
        reasons = tuple(text for text in dict.fromkeys([*reasons, *found]) if text not in signals)
    elif assessment is not None and assessment.state == "suspect":
        # Why the watchdog does not call it hung.
        reasons = tuple(dict.fromkeys([*reasons, *(text for text in assessment.reasons if _STOOD not in text)]))
    hung = confirmed or (still is not None and still >= STILL_S and bool(signals) and not against)
    return Standing("hung" if hung else "suspect", reasons, still, known, tuple(signals), tuple(against), live)


def _health_text(health: int | None) -> str:
    return f"/health {health}" if health is not None else "/health did not answer"
