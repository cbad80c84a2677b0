"""Reader of the agent's flight recorder: a ring file of the last steps of one worker, alive or dead.

The layout is the agent's (``agent/src/dsv4_repro_agent/ring.py``, version 1; it is a distribution of its own and imports nothing
of ours, so the layout is written down twice and a test holds both together). Every byte of the file is doubted: sizes are bounded,
each slot has its CRC-32, and one that does not fit is counted as torn, never shown as a step.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import EvidenceError
from .opening import at_once

__all__ = [
    "BEAT", "BEAT_OFFSET", "EVENT_DROPPED", "GUARDED", "HEADER", "HEADER_SIZE", "LIVE", "LIVE_OFFSET", "MAGIC", "MAX_SLOTS",
    "SLOT", "SLOT_SIZE", "VERSION", "GraphMode", "RecordedStep", "RingContents", "RingHeader",
    "parse_ring", "read_newest", "read_ring", "step_of",
]  # fmt: skip

MAGIC = b"DSV4RING"
VERSION = 1
HEADER_SIZE = 512
SLOT_SIZE = 256
MAX_SLOTS = 65536
HEADER = struct.Struct("<8sIIIIIiiQQQ48s16sI")
LIVE = struct.Struct("<QII")
LIVE_OFFSET = 256
BEAT = struct.Struct("<Q")
BEAT_OFFSET = LIVE_OFFSET + LIVE.size
SLOT = struct.Struct("<QIBBBB9i6QI")
GUARDED, EVENT_DROPPED = 1, 2
READS = 3

GraphMode = Literal["none", "piecewise", "full", "unknown"]
_MODES: dict[int, GraphMode] = {0: "none", 1: "piecewise", 2: "full"}


@dataclass(frozen=True, slots=True)
class RingHeader:
    """Whose ring it is.

    ``start_ticks``: the process's start in clock ticks since boot; with ``pid`` it names a process (0: not known). ``rank`` and
    ``device``: -1 if not known. ``wall_ns`` and ``monotonic_ns``: one moment on both clocks. ``begun``: steps begun so far.
    ``releases``: waits that the rescue released. ``heard_ns``: when the agent's watching thread last ran (CLOCK_MONOTONIC; 0: this
    agent does not say).
    """

    pid: int
    start_ticks: int
    rank: int
    device: int
    slots: int
    wall_ns: int
    monotonic_ns: int
    vllm: str
    agent: str
    begun: int
    armed: bool
    releases: int
    heard_ns: int = 0

    def wall(self, monotonic_ns: int) -> int:
        """A recorded time as ns since the epoch."""
        return self.wall_ns + monotonic_ns - self.monotonic_ns


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of the model runner. Counts are None where they were not seen, and so are times (ns, CLOCK_MONOTONIC).

    ``decode_zero``: request slots of decode length 0, i.e. padding. ``launch_ns``: the launches were queued; ``record_ns``: the
    event behind them was; ``complete_ns``: it was first seen done; ``wait_ns``, ``output_ns``: vLLM's thread began to wait for the
    output, and had it. ``guarded``: the guard's clamp was queued for this step.
    """

    number: int
    runner: Literal["v1", "v2", "unknown"]
    graph_mode: GraphMode
    native: bool | None
    requests: int | None
    tokens: int | None
    padded_requests: int | None
    padded_tokens: int | None
    decode_min: int | None
    decode_max: int | None
    decode_slots: int | None
    decode_zero: int | None
    next_n: int | None
    begin_ns: int | None
    launch_ns: int | None
    record_ns: int | None
    complete_ns: int | None
    wait_ns: int | None
    output_ns: int | None
    guarded: bool
    event_dropped: bool

    @property
    def watched(self) -> bool:
        """Its end would be seen: an event stands behind it, or somebody waits for its output."""
        return self.record_ns is not None or self.wait_ns is not None

    @property
    def finished(self) -> bool:
        """The step was seen to have ended on the device."""
        return self.complete_ns is not None or self.output_ns is not None


_RUNNERS: dict[str, Literal["v1", "v2"]] = {"v1": "v1", "v2": "v2"}
_MODE_NAMES: dict[str, GraphMode] = {mode: mode for mode in _MODES.values()}


def step_of(document: object) -> RecordedStep | None:
    """A step as a document keeps it (``dataclasses.asdict`` of one, also by way of JSON); None if it is none.

    A field that is missing or of another type counts as not seen.
    """
    if not isinstance(document, Mapping):
        return None
    kept: Mapping[str, Any] = document

    def number(name: str, least: int) -> int | None:
        value = kept.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None

    def word(name: str) -> str:
        value = kept.get(name)
        return value if isinstance(value, str) else ""

    own = number("number", 1)
    if own is None:
        return None
    native = kept.get("native")
    return RecordedStep(
        own,
        _RUNNERS.get(word("runner"), "unknown"),
        _MODE_NAMES.get(word("graph_mode"), "unknown"),
        native if isinstance(native, bool) else None,
        number("requests", 0), number("tokens", 0), number("padded_requests", 0), number("padded_tokens", 0),
        number("decode_min", 0), number("decode_max", 0), number("decode_slots", 0), number("decode_zero", 0), number("next_n", 0),
        number("begin_ns", 1), number("launch_ns", 1), number("record_ns", 1), number("complete_ns", 1), number("wait_ns", 1),
        number("output_ns", 1),
        kept.get("guarded") is True,
        kept.get("event_dropped") is True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RingContents:
    """``steps`` by number. ``torn``: slots that were half-written or damaged.

    ``missing``: numbers of the last ``slots`` steps that no slot holds (torn ones among them).
    """

    path: str
    header: RingHeader
    steps: tuple[RecordedStep, ...]
    torn: int
    missing: tuple[int, ...]

    @property
    def unfinished(self) -> tuple[RecordedStep, ...]:
        """Launched and not seen to end although its end would be seen, by number.

        A step is not unfinished because a later one is: work on a stream ends in order, so those before the last finished one count
        as finished. Nor is one without an event whose output nobody waits for: it may have ended long ago.
        """
        last = max((step.number for step in self.steps if step.finished), default=0)
        return tuple(step for step in self.steps if step.launch_ns is not None and step.watched and step.number > last)

    @property
    def heard_ns(self) -> int:
        """The newest time (CLOCK_MONOTONIC, ns) that is anywhere in the file: so long did the process live, at least. 0: none."""
        times = (
            time
            for step in self.steps
            for time in (step.begin_ns, step.launch_ns, step.record_ns, step.complete_ns, step.wait_ns, step.output_ns)
        )
        return max(self.header.heard_ns, max((time for time in times if time is not None), default=0))

    @property
    def last_progress_ns(self) -> int | None:
        """The last time (CLOCK_MONOTONIC, ns) at which a step was seen to end; None: never seen."""
        return max((time for step in self.steps for time in (step.complete_ns, step.output_ns) if time is not None), default=None)


def _raw(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=at_once) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise EvidenceError("is not a regular file", path=str(path))
            return stream.read(HEADER_SIZE + MAX_SLOTS * SLOT_SIZE + 1)
    except OSError as error:
        raise EvidenceError(f"cannot be read: {error.strerror or error}", path=str(path)) from None


def _text(raw: bytes) -> str:
    return "".join(one for one in raw.rstrip(b"\0").decode("utf-8", "replace") if one.isprintable())


def _header(raw: bytes, path: str) -> RingHeader:
    if len(raw) < HEADER_SIZE:
        raise EvidenceError(f"{len(raw)} bytes, a ring file has at least {HEADER_SIZE}", path=path)
    magic, version, header_size, slot_size, slots, pid, rank, device, start, wall, monotonic, vllm, agent, crc = HEADER.unpack_from(
        raw
    )
    if magic != MAGIC:
        raise EvidenceError("is not a ring file of the flight recorder", path=path, place="offset 0")
    if zlib.crc32(raw[: HEADER.size - 4]) != crc:
        raise EvidenceError("the header's checksum does not fit", path=path, place=f"offset {HEADER.size - 4}")
    if version != VERSION:
        raise EvidenceError(
            f"version {version}, version {VERSION} is read here",
            path=path,
            place="offset 8",
            help_text="Use the agent's own release.",
        )
    if header_size != HEADER_SIZE or slot_size != SLOT_SIZE or not 0 < slots <= MAX_SLOTS:
        raise EvidenceError(f"sizes {header_size}, {slot_size}, {slots} slots make no sense", path=path, place="offset 12")
    begun, armed, releases = LIVE.unpack_from(raw, LIVE_OFFSET)
    (heard,) = BEAT.unpack_from(raw, BEAT_OFFSET)
    return RingHeader(
        pid, start, rank, device, slots, wall, monotonic, _text(vllm), _text(agent), begun, armed == 1, releases, heard
    )


def _slot(raw: bytes, index: int, slots: int) -> RecordedStep | None:
    """The step in a slot; None if it is torn."""
    body = raw[: SLOT.size]
    if len(body) < SLOT.size or zlib.crc32(body[:-4]) != int.from_bytes(body[-4:], "little"):
        return None
    number, flags, runner, mode, native, _, *rest, _ = SLOT.unpack(body)
    if number == 0 or number % slots != index:
        return None
    counts: list[int | None] = [value if value >= 0 else None for value in rest[:9]]
    times: list[int | None] = [value or None for value in rest[9:]]
    return RecordedStep(
        number,
        "v1" if runner == 1 else "v2" if runner == 2 else "unknown",
        _MODES.get(mode, "unknown"),
        bool(native) if native in (0, 1) else None,
        counts[0], counts[1], counts[2], counts[3], counts[4], counts[5], counts[6], counts[7], counts[8],
        times[0], times[1], times[2], times[3], times[4], times[5],
        bool(flags & GUARDED),
        bool(flags & EVENT_DROPPED),
    )  # fmt: skip


def read_ring(path: Path) -> RingContents:
    """Read a ring file, also while it is written (up to three times, as long as a slot is torn) and after its process has died.

    Raises EvidenceError: no ring file, another version, a damaged header. A file cut short keeps the steps it still has.
    """
    best: RingContents | None = None
    for _ in range(READS):
        contents = parse_ring(_raw(path), str(path))
        if best is None or contents.torn <= best.torn:
            best = contents
        if not contents.torn:
            break
    assert best is not None
    return best


def read_newest(path: Path, steps: int = 32) -> RingContents:
    """The header and the newest ``steps`` steps alone: what a look several times a second can afford (a whole ring is 256 KB).

    ``missing`` and ``torn`` are of that part. Raises EvidenceError like ``read_ring``.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise EvidenceError("is not a regular file", path=str(path))
            header = _header(os.pread(fd, HEADER_SIZE, 0), str(path))
            numbers = range(max(header.begun - min(steps, header.slots) + 1, 1), header.begun + 1)
            found: dict[int, RecordedStep] = {}
            torn = 0
            for number in numbers:
                index = number % header.slots
                for _ in range(READS):
                    step = _slot(os.pread(fd, SLOT_SIZE, HEADER_SIZE + index * SLOT_SIZE), index, header.slots)
                    if step is not None:
                        break
                if step is None:
                    torn += 1
                elif step.number in numbers:
                    found[step.number] = step
        finally:
            os.close(fd)
    except OSError as error:
        raise EvidenceError(f"cannot be read: {error.strerror or error}", path=str(path)) from None
    missing = tuple(number for number in numbers if number not in found)
    return RingContents(str(path), header, tuple(found[number] for number in sorted(found)), torn, missing)


def parse_ring(raw: bytes, path: str) -> RingContents:
    """A ring file's bytes. ``path``: for errors. Raises EvidenceError like ``read_ring``."""
    header = _header(raw, path)
    steps: dict[int, RecordedStep] = {}
    torn = 0
    for index in range(header.slots):
        offset = HEADER_SIZE + index * SLOT_SIZE
        piece = raw[offset : offset + SLOT_SIZE]
        if piece and not any(piece):
            continue
        step = _slot(piece, index, header.slots)
        if step is None:
            torn += 1
        else:
            steps[step.number] = step
    newest = max([*steps, min(header.begun, max(steps, default=0) + header.slots)], default=0)
    expected = range(max(newest - header.slots + 1, 1), newest + 1)
    return RingContents(
        path=path,
        header=header,
        steps=tuple(steps[number] for number in sorted(steps) if number in expected),
        torn=torn,
        missing=tuple(number for number in expected if number not in steps),
    )
