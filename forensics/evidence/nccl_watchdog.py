"""ProcessGroupNCCL's watchdog lines: which collective did not complete, on which rank, and what was enqueued and completed last.

Both spellings (``last enqueued work: N`` and ``last enqueued NCCL work: N``). The watchdog names the rank that waits: a victim.
"""

from __future__ import annotations

import re

from .casefile import CaseFile
from .engine_log import line_stamp
from .facts import WatchdogTimeout
from .refs import Section

__all__ = ["read_watchdog"]

_TIMEOUT = re.compile(
    r"(?:\[Rank (?P<rank>\d+)\] )?Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)"
    r"[^)\n]*?Timeout\(ms\)=(?P<limit>\d+)\) ran for (?P<ran>\d+) milliseconds"
)
_STATUS = re.compile(
    r"(?:\[PG (?:ID )?(?P<pg>\S+)[^\]\n]*?Rank (?P<rank>\d+)\])?[^\n]*?(?:sequence id: (?P<seq>\d+) )?[^\n]*?"
    r"last enqueued(?: NCCL)? work: (?P<enqueued>-?\d+), last completed(?: NCCL)? work: (?P<completed>-?\d+)"
)
_LINE_RANK = re.compile(r"\[rank(\d+)\]:|\[Rank (\d+)\]|[ ,]Rank (\d+)\]")
_HEARTBEAT = re.compile(r"Heartbeat monitor timed out|Received a (?:timeout|dump) signal|collective timeout from another rank")


def read_watchdog(section: Section, case: CaseFile) -> None:
    text = section.text
    if "Watchdog caught" not in text and "last enqueued" not in text:
        return
    for match in _TIMEOUT.finditer(text):
        index, ref = section.cite_match(match)
        rank = match.group("rank") or _line_rank(section.lines[index])
        stamp = line_stamp(section, index)
        case.note_time(section.source, stamp)
        case.watchdog.append(
            WatchdogTimeout(
                ref, (section.order, index), stamp, int(rank) if rank is not None else None, int(match.group("seq")),
                    match.group("op"),
                int(match.group("ran")),
            )
        )  # fmt: skip
    for index, line in enumerate(section.lines):
        if "last enqueued" not in line:
            continue
        found = _STATUS.search(line)
        if found is None:
            continue
        section.claim(index)
        rank = found.group("rank") or _line_rank(line)
        case.watchdog.append(
            WatchdogTimeout(
                section.ref(index), (section.order, index), line_stamp(section, index), int(rank) if rank is not None else None,
                int(found.group("seq")) if found.group("seq") else None, "", None, int(found.group("enqueued")),
                int(found.group("completed")), found.group("pg") or "",
            )
        )  # fmt: skip
    for match in _HEARTBEAT.finditer(text):
        section.cite_match(match)


def _line_rank(line: str) -> str | None:
    found = _LINE_RANK.search(line)
    return next((group for group in found.groups() if group is not None), None) if found else None
