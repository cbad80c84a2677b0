"""Sourced by dsv4-repro before cuda-gdb attaches (``-iex``): keeps the time for ``hang.py`` and interrupts it when it is over.

Runs inside cuda-gdb's Python (3.8 or later). Never interrupts the attach itself: a debugger that leaves in the middle of it
can take the target with it. Without Python in cuda-gdb this file does nothing.
"""

import importlib
import json
import os
import signal
import threading
import time
from typing import Any

#: cuda-gdb's own module; there is none outside of it.
gdb: Any = importlib.import_module("gdb")

_settings = json.loads(os.environ.get("DSV4_REPRO_GDB", "{}"))
gdb.dsv4_started = time.monotonic()
gdb.dsv4_stage = "attaching"


def _watch() -> None:
    end = gdb.dsv4_started + float(_settings.get("deadline_s", 20.0))
    while gdb.dsv4_stage != "done":
        time.sleep(0.1)
        if time.monotonic() >= end and gdb.dsv4_stage == "reading":
            # Ends the command that is running, as Ctrl-C does; hang.py then detaches.
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(2.0)


threading.Thread(target=_watch, daemon=True).start()
print("dsv4-repro: stage attaching 0.000", flush=True)
