"""After a trial the device is shown idle: a utilisation that stays after the process is gone is cleared and logged.

On some cards the utilisation stays at 100 % after a hung process was killed ("ghost utilisation"); opening and closing a context
clears it. That is done in a process of its own, under a deadline: ``python -m dsv4_repro.repro.campaign.hygiene ORDINAL``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...clock import SYSTEM, Clock, Deadline
from ...errors import ReproError

__all__ = ["IDLE_PERCENT", "main", "show_idle", "touch_context", "utilisation"]

_DEADLINE_S = 60.0
#: NVML averages over up to a second.
_LOOK_S = 3.0
IDLE_PERCENT = 10


def touch_context(ordinal: int) -> tuple[bool, dict[str, Any]]:
    """Open and close a context on a GPU in a child. (whether it went well, what it said: ``uuid``, ``before`` in %, or
    ``error``).
    """
    package = sys.modules[__name__.partition(".")[0]]
    folder = str(Path(package.__path__[0]).absolute().parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}
    argv = [sys.executable, "-m", __name__, str(ordinal)]
    try:
        done = subprocess.run(
            argv, capture_output=True, timeout=_DEADLINE_S, check=False, stdin=subprocess.DEVNULL, env=environment
        )
    except subprocess.TimeoutExpired:
        return False, {"error": f"no context could be opened within {_DEADLINE_S:g} s: the driver may be wedged"}
    try:
        answer = json.loads(done.stdout.decode("utf-8", "replace").strip().splitlines()[-1])
    except (ValueError, IndexError):
        return False, {"error": done.stderr.decode("utf-8", "replace").strip()[-400:]}
    return done.returncode == 0, answer if isinstance(answer, dict) else {}


def utilisation(uuid: str) -> int | None:
    """NVML's utilisation, %; None if it cannot be read."""
    from ...forensics.collect.nvml import Nvml

    try:
        return Nvml().by_uuid(uuid).sample().utilisation
    except ReproError:
        return None


def show_idle(
    ordinal: int,
    emit: Callable[..., None],
    *,
    touch: Callable[[int], tuple[bool, dict[str, Any]]] = touch_context,
    look: Callable[[str], int | None] = utilisation,
    clock: Clock = SYSTEM,
) -> bool | None:
    """Clear a ghost utilisation and look again: True idle, False not, None if it cannot be read. Logged either way."""
    went_well, said = touch(ordinal)
    uuid = said.get("uuid")
    after: int | None = None
    deadline = Deadline(_LOOK_S, clock)
    while isinstance(uuid, str):
        after = look(uuid)
        if after is None or after <= IDLE_PERCENT or deadline.expired:
            break
        clock.sleep(0.1)
    idle = None if after is None else after <= IDLE_PERCENT
    emit("ghost utilisation", device=ordinal, context=went_well, said=said, after=after, idle=idle)
    return idle


def main(argv: list[str]) -> int:
    """Open a context on GPU ``argv[1]``; the process's end closes it. Prints one JSON object."""
    from ...kernels.driver import Driver

    try:
        driver = Driver()
        driver.init()
        info = driver.describe(int(argv[1]))
        before = utilisation(info.uuid)
        driver.open(int(argv[1]))
    except ReproError as error:
        sys.stdout.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        return error.exit_status
    sys.stdout.write(json.dumps({"uuid": info.uuid, "name": info.name, "before": before}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
