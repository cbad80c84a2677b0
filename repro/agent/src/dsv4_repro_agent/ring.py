"""The ring file: the last steps of one worker, in a file that outlives the process.

Little endian. Header (512 bytes), then ``slots`` slots of 256 bytes; step ``n`` (from 1) is in slot ``n % slots``. A slot is always
written whole with its own CRC-32, so that a reader that meets a half-written one (or one cut off by the process's end) sees that
it is torn. Nothing is flushed: the page cache outlives the process (not a crash of the machine). Times are CLOCK_MONOTONIC, ns; 0:
not seen. Version 1; a reader refuses others.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import zlib
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path

__all__ = [
    "EVENT_DROPPED",
    "GUARDED",
    "HEADER",
    "HEADER_SIZE",
    "MAGIC",
    "SLOT",
    "SLOT_SIZE",
    "VERSION",
    "Ring",
    "Step",
    "process_start",
]

MAGIC = b"DSV4RING"
VERSION = 1
HEADER_SIZE = 512
SLOT_SIZE = 256
#: magic, version, header size, slot size, slots, pid, rank, device, start ticks of the process, wall ns, monotonic ns, vLLM's
#: version, the agent's version, CRC-32 of all before it. What follows at LIVE may change.
HEADER = struct.Struct("<8sIIIIIiiQQQ48s16sI")
#: Steps begun, armed (0/1), releases so far.
LIVE = struct.Struct("<QII")
LIVE_OFFSET = 256
#: When the agent's watching thread last ran (monotonic ns; 0: it never did): a step that it does not see ending then did not end.
BEAT = struct.Struct("<Q")
BEAT_OFFSET = LIVE_OFFSET + LIVE.size
#: Step, flags, runner (1 or 2), graph mode (0 none, 1 piecewise, 2 full, 255 unknown), native (0, 1, 255), unused; requests,
#: tokens, padded requests, padded tokens, least and greatest decode length, decode slots, decode slots of length 0, next_n (-1
#: unknown); begin, launch, record, complete, wait, output; CRC-32.
SLOT = struct.Struct("<QIBBBB9i6QI")

GUARDED = 1 << 0
EVENT_DROPPED = 1 << 1
UNKNOWN = 255


@dataclass
class Step:
    """One step of the model runner."""

    number: int
    flags: int = 0
    runner: int = 0
    graph_mode: int = UNKNOWN
    native: int = UNKNOWN
    requests: int = -1
    tokens: int = -1
    padded_requests: int = -1
    padded_tokens: int = -1
    decode_min: int = -1
    decode_max: int = -1
    decode_slots: int = -1
    decode_zero: int = -1
    next_n: int = -1
    begin_ns: int = 0
    launch_ns: int = 0
    record_ns: int = 0
    complete_ns: int = 0
    wait_ns: int = 0
    output_ns: int = 0
    ring: Ring | None = field(default=None, repr=False, compare=False)

    def pack(self) -> bytes:
        values = _VALUES(self)
        body = SLOT.pack(*values[:5], 0, *values[5:], 0)[:-4]
        return body + _CRC.pack(zlib.crc32(body))


#: All values of a step in the order of a slot: one call instead of nineteen, five times a step.
_VALUES = attrgetter(*(item.name for item in fields(Step) if item.name != "ring"))
_CRC = struct.Struct("<I")


def process_start(pid: int | None = None) -> int:
    """Start time of a process in clock ticks since boot (``/proc/PID/stat``): pid and start name a process. 0: unknown."""
    try:
        text = Path(f"/proc/{pid or os.getpid()}/stat").read_text(encoding="ascii", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


class Ring:
    """The writer. One for each worker process; its methods may be called from any thread.

    Raises OSError if the file cannot be made. The name is ``ring-PID-START.bin``; it is made anew, never through a link.
    """

    def __init__(self, folder: Path, *, slots: int, rank: int, device: int, vllm: str, agent: str) -> None:
        start = process_start()
        self.path = folder / f"ring-{os.getpid()}-{start}.bin"
        self._slots = slots
        self._lock = threading.Lock()
        self._count = 0
        self._releases = 0
        size = HEADER_SIZE + slots * SLOT_SIZE
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Blocks are taken now: a full disk is an error here and not a bus error in the middle of a step.
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        static = HEADER.pack(
            MAGIC, VERSION, HEADER_SIZE, SLOT_SIZE, slots, os.getpid(), rank, device, start, time.time_ns(), time.monotonic_ns(),
            vllm.encode()[:48], agent.encode()[:16], 0,
        )[:-4]  # fmt: skip
        self._map[: HEADER.size] = static + struct.pack("<I", zlib.crc32(static))
        self._live(armed=True)

    def _live(self, *, armed: bool) -> None:
        self._armed = armed
        self._map[LIVE_OFFSET : LIVE_OFFSET + LIVE.size] = LIVE.pack(self._count, int(armed), self._releases)

    def arm(self, armed: bool) -> None:
        """Say in the header whether steps are recorded."""
        with self._lock:
            self._live(armed=armed)

    def beat(self) -> None:
        """The watching thread runs."""
        with self._lock:
            self._map[BEAT_OFFSET : BEAT_OFFSET + BEAT.size] = BEAT.pack(time.monotonic_ns())

    def released(self) -> None:
        """Count a release by the rescue."""
        with self._lock:
            self._releases += 1
            self._live(armed=self._armed)

    def begin(self, runner: int) -> Step:
        """A new step, with its begin time."""
        with self._lock:
            self._count += 1
            step = Step(self._count, runner=runner, begin_ns=time.monotonic_ns(), ring=self)
            self._put(step)
            self._live(armed=self._armed)
        return step

    def write(self, step: Step) -> None:
        """Write the step as it is now, unless its slot belongs to a later one."""
        with self._lock:
            if step.number + self._slots > self._count:
                self._put(step)

    def _put(self, step: Step) -> None:
        raw = step.pack()
        offset = HEADER_SIZE + (step.number % self._slots) * SLOT_SIZE
        self._map[offset : offset + len(raw)] = raw
