"""Log lines freed of what carried them: terminal colours, journald, Kubernetes, Docker, JSON lines, Ray and Compose prefixes.

``open_line`` returns the message and the carrier's own time. The message is what the engine wrote, so the readers need to know
one form only. Nothing is guessed: a line in no known envelope comes back as it was.
"""

from __future__ import annotations

import json
import re

from .stamps import Stamp, find_stamp, parse_iso

__all__ = ["clean", "open_line"]

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_DIGITS = re.compile(r"\d{41,}")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u2028\u2029]")
_CRI = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)) (?:stdout|stderr) [FP] (.*)$", re.DOTALL)
_ISO_FIRST = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)\s+(\S.*)$", re.DOTALL)
_SYSLOG = re.compile(r"^((?:\w{3} +\d{1,2} \d\d:\d\d:\d\d(?:\.\d+)?))\s+(\S+)\s+([\w./@-]+)(?:\[\d+\])?:\s(.*)$", re.DOTALL)
_JOURNAL_ISO = re.compile(
    r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d))\s+(\S+)\s+([\w./@-]+)(?:\[\d+\])?:\s(.*)$", re.DOTALL
)
_KUBECTL_PREFIX = re.compile(r"^\[pod/[^\]]+\]\s+(.*)$", re.DOTALL)
_COMPOSE = re.compile(r"^[\w.-]{1,64}\s*\| (.*)$", re.DOTALL)
_STERN = re.compile(
    r"^[a-z0-9][a-z0-9.-]{2,80} [a-z0-9][a-z0-9-]{0,62} (?=\([\w ]{1,40} pid=|INFO|WARNING|ERROR|DEBUG|\d{4}-\d\d-|\{\x22)(.*)$",
    re.DOTALL,
)
_RAY = re.compile(
    r"^\((?!APIServer|EngineCore|Worker|VllmWorker|RayWorker|DPCoordinator)[\w.]+ pid=\d+(?:, ip=[\d.a-f:]+)?\)\s+(.*)$", re.DOTALL
)
_MESSAGE_KEYS = ("message", "msg", "log", "MESSAGE", "event", "text", "body", "textPayload", "_msg", "line")
_TIME_KEYS = (
    "timestamp", "time", "ts", "@timestamp", "asctime", "datetime", "__REALTIME_TIMESTAMP", "_SOURCE_REALTIME_TIMESTAMP", "_time",
)  # fmt: skip
_LEVEL_KEYS = ("level", "levelname", "severity", "lvl")
_LAYERS = 4


def clean(line: str) -> str:
    """A line without escape sequences and control characters: what is left can be printed anywhere."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    if not line.isprintable():
        line = _CONTROL.sub("", line)
    # No counter has more digits; more would only be there to break a reader.
    return _DIGITS.sub(lambda match: match.group(0)[:40], line) if len(line) > 60 else line


def _json_stamp(value: object) -> Stamp | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        found = parse_iso(value) or find_stamp(value)
        if found is not None:
            return found
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, int | float):
        seconds = float(value)
        for scale in (1.0, 1e3, 1e6, 1e9):
            if 1e9 < seconds / scale < 4e9:
                return Stamp("utc", seconds / scale)
    return None


def _open_json(line: str) -> tuple[str, Stamp | None] | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    message = next((document[key] for key in _MESSAGE_KEYS if isinstance(document.get(key), str)), None)
    if message is None:
        record = document.get("record")
        if isinstance(record, dict) and isinstance(record.get("message"), str):
            message = record["message"]
        else:
            return None
    stamp = next((found for key in _TIME_KEYS if (found := _json_stamp(document.get(key))) is not None), None)
    pid = document.get("process_name") or document.get("logger_process")
    prefix = f"({pid} pid={document['pid']}) " if isinstance(pid, str) and isinstance(document.get("pid"), int) else ""
    level = next((document[key] for key in _LEVEL_KEYS if isinstance(document.get(key), str)), "")
    if level and not re.match(r"\(|[A-Z]+ \d", message) and level.upper() in ("ERROR", "WARNING", "CRITICAL"):
        prefix += f"{level.upper()} "
    return prefix + message.rstrip("\n"), stamp


def open_line(line: str) -> tuple[str, Stamp | None]:
    """The message inside and the carrier's time, None where the carrier had none. A JSON message of several lines keeps them."""
    stamp: Stamp | None = None
    for _ in range(_LAYERS):
        if not line:
            break
        first = line[0]
        inner: str | None = None
        if first == "{":
            opened = _open_json(line)
            if opened is not None:
                inner, found = opened
                stamp = stamp or found
        elif first.isdigit():
            match = _CRI.match(line) or _JOURNAL_ISO.match(line)
            if match:
                stamp = stamp or parse_iso(match.group(1))
                inner = match.group(match.lastindex or 1)
            else:
                match = _ISO_FIRST.match(line)
                if match:
                    stamp = stamp or parse_iso(match.group(1))
                    inner = match.group(2)
        elif first == "[":
            match = _KUBECTL_PREFIX.match(line)
            if match:
                inner = match.group(1)
        elif first == "(":
            match = _RAY.match(line)
            if match:
                inner = match.group(1)
        elif first.isalpha() or first in "_-.":
            match = _SYSLOG.match(line) if first.isupper() else None
            if match:
                stamp = stamp or find_stamp(match.group(1))
                inner = match.group(4)
            else:
                match = _COMPOSE.match(line) or (_STERN.match(line) if first.islower() else None)
                if match:
                    inner = match.group(1)
        if inner is None or inner == line:
            break
        line = inner
    return line, stamp
