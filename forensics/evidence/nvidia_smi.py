"""Readings of GPUs: nvidia-smi as CSV (with or without header, units, index), as the table, ``-q``, ``dmon``, and "GPU is lost".

Utilisation "[N/A]" (GB10 has no memory utilisation) is None, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .casefile import CaseFile
from .facts import GpuSample
from .refs import Section
from .stamps import find_stamp, parse_iso

__all__ = ["read_nvidia_smi"]

_ROW = re.compile(r"^\s*(\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(?:\.\d+)?)\s*,(.*)$")
_HEADER_WORDS = ("utilization.gpu", "power.draw", "memory.used", "clocks.", "temperature.gpu", "pstate")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_COLUMNS: tuple[tuple[str, str], ...] = (
    ("utilization.gpu", "util"), ("utilization.memory", "memory_util"), ("power.draw", "power"), ("enforced.power.limit",
    "power_limit"),
    ("power.limit", "power_limit"), ("clocks.sm", "sm_clock"), ("clocks.current.sm", "sm_clock"), ("clocks.gr", "sm_clock"),
    ("temperature.gpu", "temperature"), ("memory.used", "memory_used"),
)  # fmt: skip
_LOST = re.compile(
    r"GPU is lost|Unable to determine the device handle for GPU[^\n]*|No devices were found|\bERR!|GPU requires reset"
    r"|NVIDIA-SMI has failed because it couldn't communicate[^\n]*|Unable to determine the device handle[^\n]*"
)
_LOST_WORDS = ("is lost", "device handle", "No devices were found", "ERR!", "requires reset", "couldn't communicate")
_TABLE_FIRST = re.compile(r"^\|\s+(\d+)\s+.*\|\s+[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]")
_TABLE_SECOND = re.compile(
    r"^\|\s*\S+\s+(\d+|N/A)C?\s+(P\d+)\s+([\d.]+|N/A)W?\s*/\s*([\d.]+|N/A)W?\s*\|\s*(\d+|Not Supported|"
    r"N/A)\s*(?:MiB)?\s*(?:/\s*\d+\s*MiB)?\s*\|\s*(\d+|N/A)%?"
)
_Q_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f:.]+)\s*$")
_Q_FIELD = re.compile(r"^\s+([A-Z][\w .]+?)\s*:\s*(.+?)\s*$")
_DMON_HEADER = re.compile(r"^#\s*gpu\s+(.*)$")


def _value(text: str) -> float | None:
    if "N/A" in text or "Not Supported" in text or "Unknown" in text:
        return None
    match = _NUMBER.search(text)
    return float(match.group()) if match else None


def _from_header(header: list[str], cells: list[str]) -> tuple[dict[str, float | None], int | None, str, str]:
    values: dict[str, float | None] = {}
    index: int | None = None
    pstate, stamp = "", ""
    for title, cell in zip(header, cells, strict=False):
        if title.startswith("index"):
            found = _value(cell)
            index = int(found) if found is not None else None
        elif title.startswith("pstate"):
            pstate = cell
        elif title.startswith("timestamp"):
            stamp = cell
        else:
            for prefix, name in _COLUMNS:
                if title.startswith(prefix):
                    values[name] = _value(cell)
                    break
    return values, index, pstate, stamp


def _from_units(cells: list[str]) -> tuple[dict[str, float | None], int | None, str] | None:
    """A row without header: columns told by their units. First %: GPU, second %: memory; first MHz: SM clock."""
    values: dict[str, float | None] = {}
    index: int | None = None
    pstate = ""
    percents = 0
    for position, cell in enumerate(cells):
        if cell.endswith("%"):
            name = ("util", "memory_util")[percents] if percents < 2 else ""
            percents += 1
            if name:
                values[name] = _value(cell)
        elif cell.endswith("MHz"):
            values.setdefault("sm_clock", _value(cell))
        elif cell.endswith(" W"):
            values["power_limit" if "power" in values else "power"] = _value(cell)
        elif cell.endswith("MiB"):
            values.setdefault("memory_used", _value(cell))
        elif re.fullmatch(r"P\d+", cell):
            pstate = cell
        elif position == 0 and re.fullmatch(r"\d{1,3}", cell):
            index = int(cell)
        elif re.fullmatch(r"\d{1,3}", cell) and position == len(cells) - 1:
            values["temperature"] = float(cell)
    return (values, index, pstate) if percents or "power" in values else None


def read_nvidia_smi(section: Section, case: CaseFile) -> None:
    text = section.text
    if "%," in text or "utilization." in text or " W," in text or " W\n" in text or text.endswith(" W"):
        _read_csv(section, case)
    if "Volatile" in text or "GPU-Util" in text or "MiB |" in text:
        _read_table(section, case)
    if "NVSMI LOG" in text or ("Utilization" in text and "Attached GPUs" in text):
        _read_query(section, case)
    if "# gpu" in text:
        _read_dmon(section, case)
    if not any(word in text for word in _LOST_WORDS):
        return
    for match in _LOST.finditer(text):
        index, ref = section.cite_match(match)
        if match.group(0) == "ERR!" and "|" not in section.lines[index]:
            continue
        case.gpus.append(GpuSample(ref, (section.order, index), find_stamp(section.lines[index]), lost=True))


def _keep(
    section: Section, case: CaseFile, position: int, values: Mapping[str, float | None], index: int | None, pstate: str, stamp: str
) -> None:
    section.claim(position)
    at = parse_iso(stamp) if stamp else section.stamps.get(position)
    case.note_time(section.source, at)
    case.gpus.append(GpuSample(section.ref(position), (section.order, position), at, index, pstate=pstate, **values))  # type: ignore[arg-type]


def _read_csv(section: Section, case: CaseFile) -> None:
    header: list[str] = []
    for position, line in enumerate(section.lines):
        if "," not in line:
            continue
        lowered = line.strip().lower()
        if sum(word in lowered for word in _HEADER_WORDS) >= 1 and not _ROW.match(line) and not lowered.startswith("-"):
            cells = [cell.strip() for cell in lowered.split(",")]
            if len(cells) > 1 and not any(_NUMBER.fullmatch(cell) for cell in cells):
                header = cells
                section.claim(position)
                continue
        row = _ROW.match(line)
        if row is None:
            if header and not header[0].startswith("timestamp"):
                cells = [cell.strip() for cell in line.split(",")]
                if len(cells) == len(header):
                    values, index, pstate, stamp = _from_header(header, cells)
                    if values:
                        _keep(section, case, position, values, index, pstate, stamp)
            continue
        cells = [row.group(1), *(cell.strip() for cell in row.group(2).split(","))]
        if header and len(header) == len(cells):
            values, index, pstate, stamp = _from_header(header, cells)
            if values:
                _keep(section, case, position, values, index, pstate, stamp or row.group(1))
                continue
        told = _from_units(cells[1:])
        if told is not None:
            _keep(section, case, position, told[0], told[1], told[2], row.group(1))


def _read_table(section: Section, case: CaseFile) -> None:
    index: int | None = None
    for position, line in enumerate(section.lines):
        first = _TABLE_FIRST.match(line)
        if first:
            index = int(first.group(1))
            section.claim(position)
            continue
        second = _TABLE_SECOND.match(line)
        if second and index is not None:
            values = {
                "temperature": _value(second.group(1)), "power": _value(second.group(3)), "power_limit": _value(second.group(4)),
                "memory_used": _value(second.group(5)), "util": _value(second.group(6)),
            }  # fmt: skip
            _keep(section, case, position, values, index, second.group(2), "")
            index = None
        elif line.startswith(("|", "+")):
            section.claim(position)


def _read_query(section: Section, case: CaseFile) -> None:
    values: dict[str, float | None] = {}
    pstate, block, start, number = "", "", 0, -1

    def flush(last: int) -> None:
        if number >= 0 and values:
            section.claim(start, last)
            case.gpus.append(
                GpuSample(section.ref(start, last), (section.order, start), stamp, number, pstate=pstate, **values)  # type: ignore[arg-type]
            )

    stamp = None
    for position, line in enumerate(section.lines):
        if line.startswith("Timestamp"):
            stamp = find_stamp(line.partition(":")[2])
            case.note_time(section.source, stamp)
        if _Q_GPU.match(line):
            flush(position - 1)
            values, pstate, block, start, number = {}, "", "", position, number + 1
            continue
        if number < 0:
            continue
        found = _Q_FIELD.match(line)
        if found is None:
            if line.strip() and ":" not in line:
                block = line.strip()
            continue
        name, value = found.group(1), found.group(2)
        if block == "Utilization" and name == "GPU":
            values["util"] = _value(value)
        elif block == "Utilization" and name == "Memory":
            values["memory_util"] = _value(value)
        elif name in ("Power Draw", "Average Power Draw", "Instantaneous Power Draw"):
            values["power"] = _value(value) if values.get("power") is None else values["power"]
        elif name in ("Current Power Limit", "Power Limit"):
            values.setdefault("power_limit", _value(value))
        elif name == "Performance State":
            pstate = value
        elif block == "FB Memory Usage" and name == "Used":
            values["memory_used"] = _value(value)
        elif block == "Clocks" and name == "SM":
            values["sm_clock"] = _value(value)
        elif name == "GPU Current Temp":
            values["temperature"] = _value(value)
    flush(len(section.lines) - 1)


def _read_dmon(section: Section, case: CaseFile) -> None:
    names: list[str] = []
    columns = {"pwr": "power", "gtemp": "temperature", "sm": "util", "mem": "memory_util", "pclk": "sm_clock", "fb": "memory_used"}
    for position, line in enumerate(section.lines):
        header = _DMON_HEADER.match(line)
        if header:
            names = header.group(1).split()
            section.claim(position)
        elif names and line.strip().startswith("#"):
            section.claim(position)
        elif names:
            cells = line.split()
            if len(cells) == len(names) + 1 and cells[0].isdigit():
                values = {columns[name]: _value(cell) for name, cell in zip(names, cells[1:], strict=True) if name in columns}
                _keep(section, case, position, values, int(cells[0]), "", "")
