"""How a server that does not answer yet stands in its start: from its log's end and its process's age. Pure, but for the age.

Only a log that was written since the process began is read as this start's: one file often holds several starts, the last of which
begins at the last line in which vLLM names its settings.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...forensics.collect.process_table import start_ticks
from .log_history import LogTail
from .startup import Phase, Startup

__all__ = ["StartState", "process_age_s", "start_state"]

_TICKS = os.sysconf("SC_CLK_TCK")
#: What an API process says first (0.19 to 0.33).
_BEGINS = re.compile(r"non-default args: |vLLM API server version")
#: The log may have been touched so long before the process began (redirection, a wrapper), seconds.
_SLACK_S = 5.0
#: A process so young is starting, whatever it has not said yet: Python's imports alone took 26 s on a busy machine.
YOUNG_S = 60.0
#: A start that has said nothing for so long is not called one: loads of an hour with lines a minute apart were reported.
QUIET_S = 900.0


@dataclass(frozen=True, slots=True)
class StartState:
    """``phase`` "" where no line of this start was seen. ``quiet_s``: since the log last changed, None without a log.
    ``failed``: the line that says why the start failed."""

    phase: Phase | str
    waits_for: str
    age_s: float | None = None
    quiet_s: float | None = None
    failed: str = ""

    @property
    def is_starting(self) -> bool:
        """Whether this may be called a start. The caller knows that nothing answers and that the process lives."""
        if self.failed or self.phase == "serving":
            return False
        if not self.phase:
            return self.age_s is not None and self.age_s < YOUNG_S
        return self.quiet_s is None or self.quiet_s < QUIET_S

    def lines(self) -> tuple[str, ...]:
        """What is seen, for a person."""
        said = []
        if self.failed:
            said.append(f"log: the start has failed: {self.failed}")
        elif self.phase:
            quiet = f", its last line is {self.quiet_s:.0f} s old" if self.quiet_s is not None else ""
            said.append(f"log: phase {self.phase}: it waits for {self.waits_for}{quiet}")
        if self.age_s is not None:
            said.append(f"its process has run for {self.age_s:.0f} s")
        return tuple(said)


def process_age_s(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Seconds since the process began; None where that cannot be read."""
    ticks = start_ticks(pid, proc)
    try:
        uptime = float((proc / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(uptime - ticks / _TICKS, 0.0) if ticks is not None else None


def start_state(tail: LogTail | None, *, age_s: float | None, now: float) -> StartState | None:
    """``now``: epoch seconds. None where neither a log of this start nor the process's age is known."""
    if tail is not None and age_s is not None and tail.changed < now - age_s - _SLACK_S:
        tail = None  # the log of another start: its words are not this one's
    if tail is None:
        return StartState("", "", age_s) if age_s is not None else None
    lines = tail.text.splitlines()
    first = next((number for number in range(len(lines) - 1, -1, -1) if _BEGINS.search(lines[number])), 0)
    startup = Startup()
    startup.feed(lines[first:])
    quiet = max(now - tail.changed, 0.0)
    if not startup.lines:
        return StartState("", "", age_s, quiet)
    if startup.phase == "failed":
        return StartState("failed", "", age_s, quiet, startup.reason or "see the log")
    return StartState(startup.phase, startup.waits_for, age_s, quiet)
