"""The agent's flight recorder, for what runs beside a server. Layout and reading: ``forensics.evidence.ring_file``."""

from __future__ import annotations

from ..forensics.evidence.ring_file import (
    BEAT,
    BEAT_OFFSET,
    EVENT_DROPPED,
    GUARDED,
    HEADER,
    HEADER_SIZE,
    LIVE,
    LIVE_OFFSET,
    MAGIC,
    MAX_SLOTS,
    SLOT,
    SLOT_SIZE,
    VERSION,
    GraphMode,
    RecordedStep,
    RingContents,
    RingHeader,
    read_newest,
    read_ring,
)

__all__ = [
    "BEAT", "BEAT_OFFSET", "EVENT_DROPPED", "GUARDED", "HEADER", "HEADER_SIZE", "LIVE", "LIVE_OFFSET", "MAGIC", "MAX_SLOTS",
    "SLOT", "SLOT_SIZE", "VERSION", "GraphMode", "RecordedStep", "RingContents", "RingHeader", "read_newest", "read_ring",
]  # fmt: skip
