"""What an agent left of a vLLM 0.23.0 server that wedged on an H200 (tensor parallel 1, MTP 1, 3 requests padded to 4), as values.

The ring's last steps and the row states are as recorded; addresses are the card's.
"""

from __future__ import annotations

import zlib
from typing import Any

from dsv4_repro.forensics.evidence import ring_file

PID, START = 2585, 7283
LAUNCH_NS, HEARD_NS = 105_054_313_389, 107_628_556_571
COUNTERS = [0, 0, 0, 0, 0, 0, 1, 0, -1414157389, 716221516, 731425817, 752659172, -1411437544, 741321910, 750103661, -1428542930]
LENGTHS = [1129, 1130, 882, 883, 1324, 1325, -1, 0, 1319, 1320, -1, 0, -1, 0, -1, 0]
STUCK: dict[str, Any] = {
    "number": 78, "mode": 2, "counts": (3, 6, 4, 8, 2, 2, 3, 0, 2),
    "times": (105_052_118_896, LAUNCH_NS, 105_054_346_795, 0, 105_059_549_719, 0),
}  # fmt: skip
BEFORE: dict[str, Any] = {
    "number": 77, "mode": 2, "counts": (4, 8, 4, 8, 2, 2, 4, 0, 2),
    "times": (105_044_818_896, 105_047_313_389, 105_047_346_795, 105_091_299_471, 105_050_549_719, 105_091_199_471),
}  # fmt: skip
BEGUN: dict[str, Any] = {"number": 79, "mode": 3, "counts": (-1,) * 9, "times": (105_059_310_482, 0, 0, 0, 0, 0)}


def ring(
    *steps: dict[str, Any], pid: int = PID, rank: int = 0, heard: int = HEARD_NS, slots: int = 128, vllm: bytes = b"0.23.0"
) -> bytes:
    """A ring file with these steps, as the agent writes it."""
    steps = steps or (BEFORE, STUCK, BEGUN)
    head = ring_file.HEADER.pack(
        ring_file.MAGIC, ring_file.VERSION, ring_file.HEADER_SIZE, ring_file.SLOT_SIZE, slots, pid, rank, rank, START,
        1_795_988_077_806_270_726, 103_050_980_657, vllm, b"0.1.0", 0,
    )  # fmt: skip
    raw = bytearray(ring_file.HEADER_SIZE + slots * ring_file.SLOT_SIZE)
    raw[: len(head)] = head[:-4] + zlib.crc32(head[:-4]).to_bytes(4, "little")
    ring_file.LIVE.pack_into(raw, ring_file.LIVE_OFFSET, max(step["number"] for step in steps), 1, 0)
    ring_file.BEAT.pack_into(raw, ring_file.BEAT_OFFSET, heard)
    for step in steps:
        body = ring_file.SLOT.pack(step["number"], 0, 1, step["mode"], 1, 0, *step["counts"], *step["times"], 0)
        at = ring_file.HEADER_SIZE + step["number"] % slots * ring_file.SLOT_SIZE
        raw[at : at + len(body)] = body[:-4] + zlib.crc32(body[:-4]).to_bytes(4, "little")
    return bytes(raw)


def launch(**changes: Any) -> dict[str, Any]:
    return {
        "workspace": "0x7fbe14000000", "lengths_address": "0x7fbe5bfcd000", "rows": 16, "width": 16384, "top_k": 2048,
        "max_seq_len": 16384, "arrival_counters": COUNTERS, "lengths": LENGTHS, "read_ns": 148192, **changes,
    }  # fmt: skip


def row_states(**changes: Any) -> dict[str, Any]:
    """As a server's capture stores them (two reads that agree)."""
    return {"stalled_s": 2.760561785, "unchanged": True, "launches": [launch()], **changes}


def answer(**changes: Any) -> dict[str, Any]:
    """The agent's own answer file (one read)."""
    return {
        "schema": "dsv4-repro/agent-answer/1", "id": "1cc318cfc1810f22", "monotonic_ns": 107_814_881_499, "launches": [launch()],
        "stalled_s": 2.760561785, **changes,
    }  # fmt: skip
