"""Running another program with a deadline: its output to a file, its end as a value."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...clock import SYSTEM, Clock, Deadline

__all__ = ["Finished", "run_tool"]

_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended. ``status`` None: it did not end in time and was ended (``expired``)."""

    status: int | None
    output: str
    expired: bool


def run_tool(
    argv: Sequence[str],
    deadline_s: float,
    *,
    output: Path,
    environment: Mapping[str, str] | None = None,
    clock: Clock = SYSTEM,
    most_bytes: int = 16 << 20,
) -> Finished:
    """Run a program whose death harms nobody; past the deadline it gets SIGTERM, then SIGKILL, with its whole process group.

    ``output`` receives stdout and stderr together while they come. OSError if the program cannot be started.
    """
    with output.open("wb") as sink:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(environment) if environment is not None else None,
            start_new_session=True,
        )
        deadline = Deadline(deadline_s, clock)
        expired = False
        while process.poll() is None:
            if deadline.expired:
                expired = True
                for number in (signal.SIGTERM, signal.SIGKILL):
                    try:
                        os.killpg(process.pid, number)
                    except ProcessLookupError:
                        break
                    grace = Deadline(_GRACE_S, clock)
                    while process.poll() is None and not grace.expired:
                        clock.sleep(0.01)
                    if process.poll() is not None:
                        break
                break
            clock.sleep(0.005)
    with output.open("rb") as source:
        text = source.read(most_bytes).decode("utf-8", "replace")
    return Finished(process.poll() if not expired else None, text, expired)
