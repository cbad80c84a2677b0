"""Processes as the operating system shows them: /proc files, ``ps``, ``top``, ``lslocks``, "No such process"."""

from __future__ import annotations

import re

from .casefile import CaseFile
from .facts import ProcSample
from .refs import Section

__all__ = ["read_proc_files"]

_HEADING_PID = re.compile(r"/proc/(\d+)(?:/task/\d+)?/")
_IO = re.compile(r"(?m)^(rchar|read_bytes): (\d+)[ \t]*$")
_STATE = re.compile(r"(?m)^State:\s+([RSDTtZXI])\b")
_WCHAN = re.compile(r"(?m)^wchan:?\s+(\S+)[ \t]*$")
_NAME = re.compile(r"(?m)^Name:\s+(\S+)")
_PID = re.compile(r"(?m)^Pid:\s+(\d+)")
_STAT = re.compile(r"(?m)^(\d+) \(([^)\n]{1,40})\) ([RSDTtZXI]) (?:-?\d+ ){10}(\d+) (\d+) ")
_KSTACK = re.compile(r"(?m)^\[<[0-9a-f]+>\] (\S+)")
_WCHAN_BARE = re.compile(r"^(?:[a-z_][a-z0-9_.]{3,60}|0)$")
_GONE = re.compile(
    r"(?m)(?:cannot (?:access|open)|can't open|kill:|Error:|ls:)[^\n]*?(?:/proc/(\d+)|\((\d+)\)|\b[Pp]rocess (\d+)|pid "
    r"(\d+))[^\n]*?(?:No such (?:file|process)|not found)"
    r"|[Pp]rocess (\d+) (?:is gone|does not exist|not found|no longer exists)|(?:pid|PID) (\d+)[^\n]{0,30}(?:No such process|is "
    r"not running|not running|is dead|does not exist)"
)
_PS_ONE = re.compile(r"^(?:\S+[$#] |[$#] )ps (?:-\w+ )*?-?p ?(\d+)(?: -o \S+)*[ \t]*$")
_GONE_WORDS = ("No such", "is gone", "not exist", "not found", "no longer exists", "not running", "is dead")
_EXPECTED_COLUMNS = {
    "PID",
    "PPID",
    "USER",
    "UID",
    "STAT",
    "S",
    "STATE",
    "WCHAN",
    "%CPU",
    "PCPU",
    "C",
    "%MEM",
    "TIME",
    "TIME+",
    "COMMAND",
    "CMD",
    "COMM",
    "ELAPSED",
    "RSS",
    "VSZ",
    "VIRT",
    "RES",
    "SHR",
    "PR",
    "NI",
    "TTY",
    "START",
    "STIME",
    "TT",
    "LWP",
    "NLWP",
    "TID",
    "PSR",
    "ETIME",
    "ETIMES",
    "F",
    "PRI",
    "ADDR",
    "SZ",
}


def read_proc_files(section: Section, case: CaseFile) -> None:
    text = section.text
    heading_pid = _HEADING_PID.search(section.heading) or _HEADING_PID.search(section.source)
    pid = int(heading_pid.group(1)) if heading_pid else section.hints.pid
    own = _PID.search(text) if "Pid:" in text else None
    if own and heading_pid is None:
        pid = int(own.group(1))
    name = _NAME.search(text) if "State:" in text else None
    title = name.group(1) if name else ""
    for match in _IO.finditer(text) if "rchar: " in text or "read_bytes: " in text else ():
        index, ref = section.cite_match(match)
        key = "rchar" if match.group(1) == "rchar" else "read_bytes"
        case.procs.append(ProcSample(ref, (section.order, index), pid, title, **{key: int(match.group(2))}))  # type: ignore[arg-type]
    for match in _STATE.finditer(text) if "State:" in text else ():
        index, ref = section.cite_match(match)
        case.procs.append(ProcSample(ref, (section.order, index), pid, title, state=match.group(1).upper()))
    for match in _WCHAN.finditer(text) if "wchan" in text else ():
        index, ref = section.cite_match(match)
        case.procs.append(ProcSample(ref, (section.order, index), pid, title, wchan=match.group(1)))
    if "wchan" in (section.heading + section.source).lower():
        for index, line in enumerate(section.lines):
            if not section.claimed[index] and _WCHAN_BARE.match(line.strip()):
                section.claim(index)
                case.procs.append(ProcSample(section.ref(index), (section.order, index), pid, title, wchan=line.strip()))
    for match in _STAT.finditer(text) if ") R " in text or ") S " in text or ") D " in text or ") Z " in text else ():
        index, ref = section.cite_match(match)
        ticks = int(match.group(4)) + int(match.group(5))
        case.procs.append(
            ProcSample(ref, (section.order, index), int(match.group(1)), match.group(2), match.group(3).upper(), ticks=ticks)
        )
    stack = list(_KSTACK.finditer(text)) if "[<" in text else []
    if stack:
        index, ref = section.cite_match(stack[0])
        section.claim(index, section.index_at(stack[-1].start()))
        names = tuple(match.group(1).split("+", 1)[0] for match in stack[:64])
        case.procs.append(ProcSample(ref, (section.order, index), pid, title, kernel_stack=names))
    for match in _GONE.finditer(text) if any(word in text for word in _GONE_WORDS) else ():
        index, ref = section.cite_match(match)
        gone = next((group for group in match.groups() if group is not None), None)
        if gone is not None:
            case.procs.append(ProcSample(ref, (section.order, index), int(gone), gone=True))
    if "PID" in text and any(word in text for word in ("COMMAND", "CMD", "COMM")):
        _read_table(section, case)
        _read_empty_table(section, case)


def _read_empty_table(section: Section, case: CaseFile) -> None:
    """``$ ps -p PID`` that prints its header and no row: there is no such process."""
    lines = section.lines
    for index, line in enumerate(lines[:-1]):
        asked = _PS_ONE.match(line)
        if asked is None or "PID" not in lines[index + 1].split():
            continue
        below = lines[index + 2].split() if index + 2 < len(lines) else []
        if asked.group(1) not in below:
            case.procs.append(ProcSample(section.ref(index, index + 1), (section.order, index), int(asked.group(1)), gone=True))


def _read_table(section: Section, case: CaseFile) -> None:
    columns: list[str] = []
    for index, line in enumerate(section.lines):
        words = line.split()
        if (
            "PID" in words
            and words
            and words[-1] in ("COMMAND", "CMD", "COMM")
            and all(w.upper() in _EXPECTED_COLUMNS for w in words)
        ):
            columns = [word.upper() for word in words]
            section.claim(index)
            continue
        if not columns:
            continue
        cells = line.split(None, len(columns) - 1)
        if len(cells) < len(columns):
            continue
        row = dict(zip(columns, cells, strict=False))
        pid = row.get("PID", "")
        if not pid.isdigit():
            columns = []
            continue
        section.claim(index)
        state = (row.get("STAT") or row.get("S") or row.get("STATE") or "")[:1]
        command = row.get("COMMAND") or row.get("CMD") or row.get("COMM") or ""
        cpu_text = row.get("%CPU") or row.get("PCPU") or ""
        try:
            cpu: float | None = float(cpu_text)
        except ValueError:
            cpu = None
        if "defunct" in command:
            state = "Z"
        wchan = row.get("WCHAN", "")
        case.procs.append(
            ProcSample(
                section.ref(index), (section.order, index), int(pid), command[:200], state.upper(), "" if wchan == "-" else wchan,
                cpu=cpu, table=True,
            )
        )  # fmt: skip
