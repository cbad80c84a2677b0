"""The GPU process of a cross-rank row: two devices, peer memory between them, an all-reduce of ours behind rank 0's launch.

``python -m dsv4_repro.kernels.crossrank_child SETUP.json PARENT_PID``. It says one JSON line when the devices are open, waits for a
line on its standard input, launches, says how it went within ``watch_s``, and stands until its parent ends it. ``held``: rank 0's
launch (cubin, function, launch parameters, file of float32 logits), null where rank 0 launches nothing. An error is a line too.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..clock import SYSTEM, Deadline
from ..errors import DeadlineError, PlanError, ReproError
from .abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE, THREADS_PER_CTA, TopKParams
from .device_child import be_a_good_child
from .driver import Driver

__all__ = ["main"]

ALL_REDUCE = "cross_rank_all_reduce"
#: A child that nobody ends ends by itself after so long, seconds.
LIFE_S = 240.0
_SETTLE_S = 20.0
_WARP = 32


def _say(document: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _settled(driver: Driver, stream: Any) -> None:
    """Wait until the stream is empty; nothing that hangs is on it yet."""
    event = driver.event()
    driver.record(event, stream)
    limit = Deadline(_SETTLE_S, SYSTEM)
    while not driver.finished(event):
        if limit.expired:
            raise DeadlineError(f"the device did not finish a memory operation within {_SETTLE_S:g} s")
        SYSTEM.sleep(0.001)


def _hold(driver: Driver, stream: Any, held: Mapping[str, Any]) -> list[int]:
    """Rank 0's launch. The addresses of its arrival counters."""
    function = driver.load(Path(held["cubin"]).read_bytes(), str(held["function"]))
    driver.allow_dynamic_smem(function, int(held["dynamic_smem"]))
    logits, lengths = Path(held["logits"]).read_bytes(), struct.pack(f"<{len(held['lengths'])}i", *held["lengths"])
    rows, groups = len(held["lengths"]), int(held["groups"])
    host = driver.pinned(len(logits) + 4096)
    host.write(logits)
    host.write(lengths, len(logits))
    at = {"input": driver.alloc(len(logits)), "lengths": driver.alloc(4096), "output": driver.alloc(4 * rows * int(held["top_k"]))}
    states = driver.alloc(1 << 20)
    driver.fill(states, 0, groups * ROW_STATE_SIZE // 4, stream)
    driver.copy_in(at["input"], host.address, len(logits), stream)
    driver.copy_in(at["lengths"], host.address + len(logits), len(lengths), stream)
    _settled(driver, stream)
    params = TopKParams(
        **at, row_states=states, num_rows=rows, stride=int(held["stride"]), top_k=int(held["top_k"]),
        chunk_size=int(held["chunk_size"]), ctas_per_group=int(held["ctas_per_group"]), max_seq_len=int(held["max_seq_len"]),
    )  # fmt: skip
    grid = groups * int(held["ctas_per_group"])
    driver.launch(function, grid, THREADS_PER_CTA, int(held["dynamic_smem"]), params.pack(), stream)
    return [states + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET for group in range(groups)]


def run(setup: Mapping[str, Any], go: Callable[[], object]) -> None:
    """All of it. ReproError for what the driver refuses; does not return before the parent is gone or the life is over."""
    drivers = [Driver(), Driver()]
    streams, words, functions, devices = [], [], [], []
    for driver, ordinal in zip(drivers, setup["devices"], strict=True):
        driver.init()
        devices.append(driver.open(int(ordinal)).document())
        streams.append(driver.stream())
        words.append(driver.alloc(256))
        driver.fill(words[-1], 0, 64, streams[-1])
        # Everything is loaded before anything hangs: loading may wait for what runs on the device.
        functions.append(driver.load(Path(setup["all_reduce"][str(devices[-1]["sm"])]).read_bytes(), ALL_REDUCE))
        _settled(driver, streams[-1])
    if not (drivers[0].reaches(drivers[1]) and drivers[1].reaches(drivers[0])):
        raise PlanError("the two devices cannot read each other's memory", help_text="nvidia-smi topo -p2p r; --device A,B")
    drivers[0].open_peer(drivers[1])
    drivers[1].open_peer(drivers[0])
    _say({"devices": devices})
    go()
    counters: list[int] = []
    events: list[Any] = [None, None]
    for rank in (0, 1):
        drivers[rank].use()
        if rank == 0:
            if setup["held"] is None:
                continue
            counters = _hold(drivers[0], streams[0], setup["held"])
        params = [struct.pack("<Q", words[rank]), struct.pack("<Q", words[1 - rank]), struct.pack("<I", 1)]
        events[rank] = drivers[rank].event()
        drivers[rank].launch(functions[rank], 1, _WARP, 0, params, streams[rank])
        drivers[rank].record(events[rank], streams[rank])
    finished = [False, False]
    watch = Deadline(float(setup["watch_s"]), SYSTEM)
    while not all(finished) and not watch.expired:
        for rank in (0, 1):
            if events[rank] is not None and not finished[rank]:
                drivers[rank].use()
                finished[rank] = drivers[rank].finished(events[rank])
        SYSTEM.sleep(0.005)
    _say({"finished": finished, "launched": [event is not None for event in events], "words": words, "counters": counters})
    parent, life = os.getppid(), Deadline(LIFE_S, SYSTEM)
    while not life.expired and os.getppid() == parent:
        SYSTEM.sleep(0.05)


def main(argv: list[str]) -> int:
    """The process: 0 when its life is over, 1 after an error."""
    be_a_good_child(int(argv[2]))
    try:
        run(json.loads(Path(argv[1]).read_text(encoding="utf-8")), sys.stdin.readline)
    except ReproError as error:
        _say({"kind": type(error).__name__, "message": str(error), "help": error.help_text or ""})
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv)
    sys.stdout.flush()
    os._exit(status)
