"""Is the host of a server at work, or held, so that its GPUs wait for it? From its processes and the newest line of its log.

Pure: records in, a sentence out.
"""

from __future__ import annotations

from .records import LogSample, ProcessSample, Snapshot
from .watch_limits import HOST_WORK

__all__ = ["HostWork", "log_works"]

#: A compiler that has not used the CPU for so long waits itself, seconds.
_BUSY_S = 5.0
#: A process is busy that used this share of the time between two looks.
_BUSY_SHARE = 0.2
_LOG_WORK_S = 60.0


class HostWork:
    """Told of processes in time order. ``now``: seconds of watched time."""

    def __init__(self) -> None:
        self._cpu: dict[int, tuple[float, float]] = {}
        self._cpu_moved: dict[int, float] = {}

    def forget(self) -> None:
        """Another server."""
        self._cpu.clear()
        self._cpu_moved.clear()

    def look(self, now: float, processes: tuple[ProcessSample, ...]) -> None:
        """Note which processes used the CPU."""
        for one in processes:
            if one.cpu_s is None:
                continue
            last = self._cpu.get(one.pid)
            if last is not None and one.cpu_s - last[1] > _BUSY_SHARE * max(now - last[0], 0.05):
                self._cpu_moved[one.pid] = now
            if last is None or now > last[0]:
                self._cpu[one.pid] = (now, one.cpu_s)
        alive = {one.pid for one in processes}
        for table in (self._cpu, self._cpu_moved):
            for pid in [pid for pid in table if pid not in alive]:
                table.pop(pid)

    def says(self, now: float, snapshot: Snapshot) -> str:
        """Facts of now that show the host at work, or held; "" for none."""
        stopped = [one for one in snapshot.processes if one.role in ("engine", "worker") and one.state in ("T", "t")]
        if stopped:
            return f"process {stopped[0].pid} ({stopped[0].role}) is stopped: a debugger or a freeze holds it"
        compilers = [one for one in snapshot.processes if one.role == "compiler" and one.state not in (None, "Z")]
        busy = [one for one in compilers if one.state == "R" or now - self._cpu_moved.get(one.pid, -1e9) <= _BUSY_S]
        return f"{len(busy)} compiler processes burn CPU below it (pid {busy[0].pid})" if busy else ""


def log_works(log: LogSample | None) -> str:
    """The log's newest line of host work, as long as it explains a silence; "" for none."""
    if log is None or not log.work or log.work_age_s is None:
        return ""
    if log.work_age_s > HOST_WORK.get(log.work, _LOG_WORK_S):
        return ""
    return f"the log's newest line of host work is {log.work}, {log.work_age_s:.0f} s ago"
