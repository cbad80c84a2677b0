"""Answers of NCCL's RAS service (``ncclras``, ``echo verbose status | nc localhost 28028``), text and JSON (from NCCL 2.28.7).

Counts are host-side launches per operation. A mismatch that changes between two queries is normal traffic; one that stays is not.
Texts as in NCCL's src/ras/client_support.cc and its user guide.
"""

from __future__ import annotations

import json
import re
from typing import Any

from .casefile import CaseFile
from .facts import RasComm, RasQuery
from .refs import Section

__all__ = ["read_nccl_ras"]

_START = re.compile(r"^\s*(?:Communicators\.\.\.|Job summary\s*$|NCCL version \d|CUDA runtime version)")
_SUMMARY = re.compile(r"^\s+\d+\s+\d+\s+[\d-]+\s+[\d-]+\s+[\d-]+\s+\d+\s+([A-Z,]+)\s+([A-Z,]+)\s*$")
_BLOCK = re.compile(r"^\s*#(\d+-\d+) \(([0-9a-fA-F]{4,16})\) ([A-Z]+)\s*$")
_DIFFERENT = re.compile(
    r"^\s+Communicator ranks have different (\w+) (operation counts|status)|^\s+Communicator ranks have different (status)"
)
_GROUP = re.compile(r"^\s+(\d+) ranks? ha(?:ve|s) launched up to operation (\d+)")
_NONE = re.compile(r"^\s+(\d+) ranks? ha(?:ve|s) not launched any operations")
_RANK = re.compile(
    r"^\s+Rank (\d+)(?: has (?:launched up to operation (\d+)|(not) launched any operations|status (\w+))| reported (\w[\w ]*?))?"
    r" -- (?:GPU (\S+) managed by process (\d+) on node (\S+)|\[process information not found\])"
)
_MISSING = re.compile(r"^\s+The missing ranks?: ([\d, ]+)")
_DEAD = re.compile(r"considered dead")
_PROCESS = re.compile(r"^\s+Process(?:es)? (\d+)(?: on node (\S+))? managing GPU")
_TIMEOUTS = re.compile(r"Encountered (\d+) communication timeouts?")
_PEER_DEAD = re.compile(r"PEER_DEAD: Process (\d+)")


class _Query:
    """One answer under construction."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.last = first
        self.errors: list[str] = []
        self.blocks: dict[str, dict[str, Any]] = {}
        self.dead: list[int] = []
        self.timeouts = 0

    def block(self, name: str) -> dict[str, Any]:
        return self.blocks.setdefault(
            name, {"groups": {}, "counts": {}, "missing": [], "members": {}, "dead": [], "async": [], "first": self.last}
        )

    @property
    def empty(self) -> bool:
        return not (self.errors or self.blocks or self.dead or self.timeouts)


def read_nccl_ras(section: Section, case: CaseFile) -> None:
    text = section.text
    if '"collective_counts"' in text or '"missing_ranks"' in text:
        _read_json(section, case)
    if not (
        "operation counts" in text
        or "Communicators..." in text
        or "launched up to" in text
        or "considered dead" in text
        or "PEER_DEAD" in text
        or "Missing communicator data" in text
    ):
        return
    query = _Query(0)
    name, operation, count, state = "", "", None, ""
    for index, line in enumerate(section.lines):
        found = _START.match(line)
        if found:
            if (not query.empty and "Communicators" not in line) or (
                not query.empty and any(section.lines[i].startswith("Communicators") for i in range(query.first, index))
            ):
                _finish(section, case, query)
                query = _Query(index)
            section.claim(index)
            query.last = index
            continue
        summary = _SUMMARY.match(line)
        if summary:
            query.errors.extend(word for word in summary.group(2).split(","))
            section.claim(index)
            query.last = index
            continue
        block = _BLOCK.match(line)
        if block:
            title = f"#{block.group(1)} ({block.group(2)})"
            if title in query.blocks and block.group(3) in query.blocks[title].get("kinds", ()):
                _finish(section, case, query)
                query = _Query(index)
            name, state = title, block.group(3)
            query.last = index
            query.block(name).setdefault("kinds", []).append(state)
            query.errors.append(state)
            section.claim(index)
            operation, count = "", None
            continue
        consumed = True
        different, group, none = _DIFFERENT.match(line), _GROUP.match(line), _NONE.match(line)
        rank, missing, process = _RANK.match(line), _MISSING.match(line), _PROCESS.match(line)
        timeouts = _TIMEOUTS.search(line)
        peer = _PEER_DEAD.search(line)
        if different and name:
            operation, count = different.group(1) or "status", None
        elif group and name:
            count = int(group.group(2))
            query.block(name)["groups"].setdefault(operation, []).append((int(group.group(1)), count))
        elif none and name:
            count = 0
            query.block(name)["groups"].setdefault(operation, []).append((int(none.group(1)), 0))
        elif rank and name:
            number = int(rank.group(1))
            entry = query.block(name)
            if rank.group(7):
                entry["members"][number] = (rank.group(8), int(rank.group(7)), rank.group(6))
            own = int(rank.group(2)) if rank.group(2) else 0 if rank.group(3) else count
            if rank.group(2) or rank.group(3):
                entry["groups"].setdefault(operation, []).append((1, own))
            if state == "INCOMPLETE":
                entry["missing"].append(number)
            elif state == "ERROR":
                entry["async"].append(number)
            elif own is not None and operation and operation != "status":
                entry["counts"].setdefault(operation, {})[number] = own
        elif missing and name:
            query.block(name)["missing"].extend(int(t) for t in re.findall(r"\d+", missing.group(1)))
        elif _DEAD.search(line):
            state = "DEAD"
        elif process and (state == "DEAD" or not name):
            query.dead.append(int(process.group(1))) if state == "DEAD" else None
        elif timeouts:
            query.timeouts += int(timeouts.group(1))
        elif peer:
            query.dead.append(int(peer.group(1)))
        else:
            consumed = False
            if (
                line.strip() in ("DEAD", "INCOMPLETE", "TIMEOUT", "Errors", "Warnings")
                or re.match(r"^[=]+$", line.strip() or "x")
                or "Ranks" in line
            ):
                section.claim(index)
                if line.strip() in ("DEAD", "INCOMPLETE"):
                    state, name = line.strip(), ""
                    query.errors.append(state)
        if consumed:
            section.claim(index)
            query.last = index
    if not query.empty:
        _finish(section, case, query)


def _finish(section: Section, case: CaseFile, query: _Query) -> None:
    comms = []
    for name, entry in query.blocks.items():
        first = min(entry["first"], query.last)
        comms.append(
            RasComm(
                name, section.ref(first, query.last), None, {op: dict(c) for op, c in entry["counts"].items()},
                {op: tuple(g) for op, g in entry["groups"].items()}, tuple(sorted(set(entry["missing"]))), (),
                dict(entry["members"]), ",".join(entry.get("kinds", [])), tuple(entry["async"]),
            )
        )  # fmt: skip
    case.ras.append(
        RasQuery(
            len(case.ras), section.ref(query.first, query.last), tuple(comms), tuple(query.errors), tuple(query.dead),
                query.timeouts,
            section.hints.repeat,
        )
    )  # fmt: skip


def _documents(text: str) -> list[Any]:
    decoder = json.JSONDecoder()
    found: list[Any] = []
    position = 0
    while len(found) < 64:
        start = text.find("{", position)
        if start < 0:
            return found
        try:
            document, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            position = start + 1
            if position > 4_000_000:
                return found
            continue
        found.append(document)
        position = end
    return found


def _read_json(section: Section, case: CaseFile) -> None:
    for document in _documents(section.text):
        if not isinstance(document, dict) or not isinstance(document.get("communicators"), list):
            continue
        comms = []
        errors: list[str] = []
        dead_processes: list[int] = []
        for number, item in enumerate(document["communicators"]):
            if not isinstance(item, dict):
                continue
            counts: dict[str, dict[int, int]] = {}
            members: dict[int, tuple[str, int | None, str]] = {}
            faulty: list[int] = []
            for rank in item.get("ranks") or []:
                if not isinstance(rank, dict) or not isinstance(rank.get("rank"), int):
                    continue
                pid = rank.get("pid")
                members[rank["rank"]] = (
                    str(rank.get("host", "")),
                    pid if isinstance(pid, int) else None,
                    str(rank.get("cuda_dev", "")),
                )
                for operation, count in (rank.get("collective_counts") or {}).items():
                    if isinstance(count, int):
                        counts.setdefault(str(operation), {})[rank["rank"]] = count
                status = rank.get("status")
                if isinstance(status, dict) and status.get("async_error") not in (0, 7, None):
                    faulty.append(rank["rank"])
            missing, dead = [], []
            for rank in item.get("missing_ranks") or []:
                if not isinstance(rank, dict) or not isinstance(rank.get("rank"), int):
                    continue
                missing.append(rank["rank"])
                given = rank.get("status")
                status = given if isinstance(given, dict) else rank
                if status.get("considered_dead"):
                    dead.append(rank["rank"])
                    if isinstance(rank.get("pid"), int):
                        dead_processes.append(rank["pid"])
                pid = rank.get("pid")
                members[rank["rank"]] = (
                    str(rank.get("host", "")),
                    pid if isinstance(pid, int) else None,
                    str(rank.get("cuda_dev", "")),
                )
            groups = {
                operation: tuple(
                    sorted(((list(by_rank.values()).count(value), value) for value in set(by_rank.values())), reverse=True)
                )
                for operation, by_rank in counts.items()
            }
            mismatch = any(len(set(by_rank.values())) > 1 for by_rank in counts.values())
            errors.append("MISMATCH" if mismatch else "INCOMPLETE" if missing else "OK")
            size = item.get("size")
            comms.append(
                RasComm(
                    str(item.get("hash", f"#{number}")), section.whole(), size if isinstance(size, int) else None, counts, groups,
                    tuple(missing), tuple(dead), members, errors[-1], tuple(faulty),
                )
            )  # fmt: skip
        case.ras.append(
            RasQuery(len(case.ras), section.whole(), tuple(comms), tuple(errors), tuple(dead_processes), 0, section.hints.repeat)
        )
        section.claim(0, len(section.lines) - 1)
