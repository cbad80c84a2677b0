"""Reads what the agent left: ``ring-PID-START.bin``, its status, its answers, and the row states that a server's capture stores.

A damaged ring is unread with its reason; a document that is none of these is left to the other readers.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ...errors import EvidenceError
from ..records import UnreadItem
from .agent_facts import AgentReading, AgentRing, agent_launches
from .archive import Leaf, read_up_to
from .casefile import CaseFile, InputPart
from .facts import VersionFact
from .refs import Ref, Section
from .ring_file import HEADER_SIZE, MAX_SLOTS, SLOT_SIZE, parse_ring

__all__ = ["read_agent_documents", "read_ring_leaf"]

_ANSWER = "dsv4-repro/agent-answer/"
_STATUS = "dsv4-repro/agent-status/"
_NAMED = re.compile(r"(?:^|[/!])(?:answer|agent|status|ring)-(\d{1,9})-\d{1,20}\.json$|-pid-(\d{1,9})\.json$")
_RANK = re.compile(r"(?:^|[/!])row_states-rank(\d{1,5})-")


def read_ring_leaf(leaf: Leaf, case: CaseFile) -> None:
    """A ring file, from the disk or out of an archive."""
    assert leaf.stream is not None
    data = read_up_to(leaf.stream, HEADER_SIZE + MAX_SLOTS * SLOT_SIZE + 1)
    try:
        contents = parse_ring(data, leaf.path)
    except EvidenceError as error:
        case.parts.append(InputPart(leaf.path, "", "unread", note=str(error)))
        case.unread.append(UnreadItem(what=leaf.path, why=str(error), remedy="dsv4-repro agent show"))
        return
    header = contents.header
    stuck = next(iter(contents.unfinished), None)
    said = f"flight recorder of process {header.pid}: {header.begun} steps begun"
    if stuck is not None:
        said += f"; step {stuck.number} launched and not seen to end"
    case.rings.append(AgentRing(Ref(leaf.path, 0, max(len(data) - 1, 0), "byte", said), contents))
    if header.vllm:
        case.versions.append(VersionFact("vllm", header.vllm[:80], Ref(leaf.path, 0, HEADER_SIZE - 1, "byte", header.vllm[:80])))
    note = f"{contents.torn} slots are torn" if contents.torn else ""
    case.parts.append(InputPart(leaf.path, "", "read", ("agent ring",), note=note))


def read_agent_documents(section: Section, case: CaseFile) -> None:
    """The agent's answer (``answer-PID-START.json``), its status, and the capture's ``row_states-TAG.json``."""
    text = section.text
    if not text.lstrip().startswith("{") or ('"launches"' not in text and _STATUS not in text):
        return
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(document, dict):
        return
    schema = str(document.get("schema", ""))
    if schema.startswith(_STATUS):
        section.claim(0, len(section.lines) - 1)
        if isinstance(document.get("vllm"), str) and document["vllm"]:
            case.versions.append(VersionFact("vllm", document["vllm"][:80], section.whole()))
        return
    answer = schema.startswith(_ANSWER)
    states = not schema and isinstance(document.get("launches"), list) and "stalled_s" in document and "unchanged" in document
    if not answer and not states:
        return
    section.claim(0, len(section.lines) - 1)
    launches = agent_launches(document)
    if not launches:
        return
    name, unchanged = _NAMED.search(section.source), document.get("unchanged")
    rank = _RANK.search(section.source)
    whole = section.whole()
    counted = "; ".join(f"{len(one.counters)} counters, {len(one.negative_rows)} rows of negative length" for one in launches[:3])
    case.readings.append(
        AgentReading(
            Ref(whole.source, whole.first, whole.last, whole.unit, f"read by the agent from device memory: {counted}"), launches,
            pid=int(next(part for part in name.groups() if part)) if name else None,
            rank=int(rank[1]) if rank else None,
            stalled_s=_number(document.get("stalled_s")),
            unchanged=unchanged if isinstance(unchanged, bool) else None,
            monotonic_ns=_count(document.get("monotonic_ns")),
        )
    )  # fmt: skip


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63 else None
