"""The interpreted device in words, before it runs: its SMs and slots, schedule, memory checks, and what does not fit. Pure."""

from __future__ import annotations

from ..kernels.plan import LaunchPlan
from .prepare import PreparedRun

__all__ = ["SCHEDULES", "machine_words", "residency_notes"]

#: ``--schedule``: the first is the default.
SCHEDULES = ("smallest-pc", "random", "priority")


def _persistent(prepared: PreparedRun) -> list[LaunchPlan]:
    return [launch for _, launch in sorted(prepared.request.launches.items()) if launch.path == "persistent"]


def _slots(prepared: PreparedRun, launch: LaunchPlan) -> int:
    return int(prepared.request.options.get("slots_per_sm") or max(launch.occupancy, 1))


def machine_words(prepared: PreparedRun) -> str:
    """SMs, CTA slots an SM, schedule with its seed, and whether every access is checked."""
    options = prepared.request.options
    planned = prepared.device.num_sms
    sms = int(options.get("sms") or planned)
    slots = sorted({_slots(prepared, launch) for launch in _persistent(prepared)}) or [1]
    words = f"{sms} SM{'s' if sms != 1 else ''} x {' or '.join(map(str, slots))} CTA slot{'s' if slots != [1] else ''}"
    if sms != planned:
        words += f", launches planned for {planned} SMs"
    schedule = str(options.get("schedule", SCHEDULES[0]))
    words += f"; schedule {schedule}" + (f" of seed {prepared.request.seed}" if schedule != SCHEDULES[0] else "")
    return words + ("; memory checks on" if options.get("checks") else "; memory checks off")


def residency_notes(prepared: PreparedRun) -> list[str]:
    """A line for each launch whose groups do not all fit on the device at once: a hang that is not the drain's can come of it."""
    sms = int(prepared.request.options.get("sms") or prepared.device.num_sms)
    notes = []
    for launch in _persistent(prepared):
        room = sms * _slots(prepared, launch)
        if launch.ctas_per_group > 1 and launch.grid > room:
            notes.append(
                f"{launch.rows} rows: a grid of {launch.grid} CTAs in groups of {launch.ctas_per_group}, room for {room} at once: "
                "members of a group may never start, which hangs a long row whatever the kernel's guard"
            )
    return notes
