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
_WORK = re.compile(r"last enqueued(?: NCCL)? work: (-?\d{1,18}), last completed(?: NCCL)? work: (-?\d{1,18})")
_GROUP = re.compile(r"\[PG (?:ID )?(\S{1,40})[^\]\n]{0,80}?Rank (\d{1,6})\]")
_SEQUENCE = re.compile(r"sequence id: (\d{1,18})")
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
        found = _WORK.search(line)
        if found is None:
            continue
        section.claim(index)
        group, sequence = _GROUP.search(line), _SEQUENCE.search(line)
        rank = group.group(2) if group else _line_rank(line)
        case.watchdog.append(
            WatchdogTimeout(
                section.ref(index), (section.order, index), line_stamp(section, index), int(rank) if rank is not None else None,
                int(sequence.group(1)) if sequence else None, "", None, int(found.group(1)), int(found.group(2)),
                group.group(1) if group else "",
            )
        )  # fmt: skip
    for match in _HEARTBEAT.finditer(text):
        section.cite_match(match)


def _line_rank(line: str) -> str | None:
    found = _LINE_RANK.search(line)
    return next((group for group in found.groups() if group is not None), None) if found else None
