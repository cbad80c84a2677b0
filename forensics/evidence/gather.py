"""The way in: files, folders and archives → ``CaseFile``. Every reader looks at every part; what nobody understood is listed.

Nothing is executed, no link is followed out of a folder that was given, no name from an archive reaches the file system. A reader
that fails costs its own facts only and is named. A file that changes while it is read is said to have changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import EvidenceError, UsageError
from ..records import UnreadItem
from .agent_files import read_agent_documents, read_ring_leaf
from .archive import Budget, ExpansionStoppedError, Leaf, Readable, expand, read_up_to
from .casefile import CaseFile, InputPart
from .device_files import read_core_leaf, read_device_part
from .documents import read_documents, retelling
from .engine_log import read_engine_log
from .flight_recorder import flight_rank, load_pickle, rank_of_name, read_flight_recorder
from .kernel_log import read_kernel_log
from .metrics import read_metrics
from .nccl_ras import read_nccl_ras
from .nccl_watchdog import read_watchdog
from .nvidia_smi import read_nvidia_smi
from .opening import open_patiently
from .proc_files import read_proc_files
from .read_failures import read_failures
from .recognised import is_python_source, name_unrecognised
from .refs import Ref, Section
from .scheduler_dump import read_scheduler_dump
from .sections import split_sections
from .sieve import keep_lines
from .stacks import read_stacks
from .timeaxis import build_axis

__all__ = ["DOCUMENT_READERS", "READERS", "read_paths", "read_text"]

Reader = Callable[[Section, CaseFile], None]

#: Name (as listed among the inputs) and reader. ``engine log`` goes last: it claims ordinary log lines.
READERS: tuple[tuple[str, Reader], ...] = (
    ("host stacks", read_stacks),
    ("device state", read_device_part),
    ("GPU readings", read_nvidia_smi),
    ("kernel log", read_kernel_log),
    ("metrics", read_metrics),
    ("NCCL RAS", read_nccl_ras),
    ("NCCL watchdog", read_watchdog),
    ("flight recorder", read_flight_recorder),
    ("scheduler dump", read_scheduler_dump),
    ("processes", read_proc_files),
    ("diagnosis", read_documents),
    ("agent", read_agent_documents),
    ("could not look", read_failures),
    ("engine log", read_engine_log),
)
#: Those that read whole JSON documents; patterns for log lines have no business in them.
DOCUMENT_READERS = tuple(
    entry for entry in READERS if entry[0] in ("host stacks", "NCCL RAS", "flight recorder", "diagnosis", "agent")
)
_MAX_PICKLE = 256 << 20
_JSON_WHOLE = 64 << 20


class _Orders:
    """Section numbers over the whole case."""

    def __init__(self) -> None:
        self.next = 0


def read_paths(paths: Sequence[Path], budget: Budget | None = None) -> CaseFile:
    """Read everything. UsageError for a path that is not there; anything else that cannot be read is listed in the result."""
    case = CaseFile()
    budget = budget or Budget()
    orders = _Orders()
    done: set[tuple[int, int]] = set()
    for given in paths:
        if not given.exists():
            raise UsageError(f"no such file or folder: {given}")
        first_part, first_unread, folder = len(case.parts), len(case.unread), given.is_dir()
        for path, shown, note in _walk(given, case, budget):
            if note:
                case.parts.append(InputPart(shown, "", "unread", note=note))
                continue
            try:
                _read_file(path, shown, case, budget, orders, done, in_folder=folder)
            except ExpansionStoppedError as stop:
                _unread(case, shown, str(stop), "unpack it where it may grow, and give the files")
            except OSError as error:
                _unread(case, shown, f"{error.strerror or error}", "check permissions, or copy the file first")
        name_unrecognised(
            case, _shown(str(given)), case.parts[first_part:], folder=folder, reported=len(case.unread) > first_unread
        )
    _finish(case)
    return case


def read_text(name: str, text: str | bytes) -> CaseFile:
    """One text that is already in memory (for tests, and for collectors that hold their output)."""
    case = CaseFile()
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1)]
    _read_lines(name, lines, case, _Orders(), complete=True, notes=())
    _finish(case)
    return case


def _finish(case: CaseFile) -> None:
    case.axis = build_axis(case.stamped, case.clock_pairs)


def _unread(case: CaseFile, what: str, why: str, remedy: str = "") -> None:
    case.parts.append(InputPart(what, "", "unread", note=why))
    case.unread.append(UnreadItem(what=what, why=why, remedy=remedy))


def _walk(given: Path, case: CaseFile, budget: Budget) -> Iterator[tuple[Path, str, str]]:
    """(path, shown name, note). A note means: listed, not read."""
    if not given.is_dir():
        yield given, _shown(given.name), ""
        return

    def refused(error: OSError) -> None:
        name = _shown(str(error.filename or given))
        _unread(case, name, f"the folder could not be listed: {error.strerror or error}", "check permissions")

    def over() -> bool:
        why = budget.ended()
        if why:
            case.unread.append(UnreadItem(what=_shown(str(given)), why=why, remedy="give the files that matter by their names"))
        return bool(why)

    for folder, names, files in os.walk(given, followlinks=False, onerror=refused):
        if over():
            return
        names.sort()
        for name in list(names):
            if os.path.islink(os.path.join(folder, name)):
                names.remove(name)
                yield (
                    Path(folder, name),
                    _shown(os.path.relpath(os.path.join(folder, name), given)),
                    "a link to a folder: not followed",
                )
        for name in sorted(files):
            path = Path(folder, name)
            shown = _shown(os.path.relpath(path, given))
            if over():
                return
            budget.files_read += 1
            if path.is_symlink():
                yield path, shown, "a link: not followed (give the file it points to)"
                continue
            yield path, shown, ""


def _shown(name: str) -> str:
    """A file's name as it may be printed anywhere: undecodable bytes and control characters replaced."""
    text = os.fsencode(name).decode("utf-8", "replace")
    return "".join(ch if ch.isprintable() else "?" for ch in text)


class _Hashing:
    """Reads a file, hashing what goes by. ``budget``: that of the folder it lies in."""

    def __init__(self, handle: Readable, budget: Budget | None) -> None:
        self._handle, self._budget = handle, budget
        self.digest = hashlib.sha256()
        self.count = 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._handle.read(size)
        self.digest.update(data)
        self.count += len(data)
        if self._budget is not None:
            self._budget.take(len(data))
        return data


def _read_file(
    path: Path, shown: str, case: CaseFile, budget: Budget, orders: _Orders, done: set[tuple[int, int]], *, in_folder: bool
) -> None:
    before = path.stat()
    if not stat.S_ISREG(before.st_mode):
        case.parts.append(InputPart(shown, "", "unread", note="a pipe, socket or device: not opened"))
        return
    identity = (before.st_dev, before.st_ino)
    if identity in done:
        case.parts.append(InputPart(shown, "", "read", note="the same file as one given before"))
        return
    done.add(identity)
    first_part = len(case.parts)
    with open_patiently(path, budget.clock) as (handle, descriptor):
        hashing = _Hashing(handle, budget if in_folder else None)
        for leaf in expand(shown, hashing, budget, size=before.st_size):
            _read_leaf(leaf, path, case, orders)
            for note in (leaf.note, leaf.trouble()):
                if note and (not case.parts[first_part:] or case.parts[-1].note != note):
                    case.parts.append(InputPart(leaf.path, "", "partly", note=note))
        whole = hashing.count == before.st_size
        after = os.fstat(descriptor)
    if handle.trouble:
        case.parts.append(InputPart(shown, "", "partly", note=handle.trouble))
        case.unread.append(UnreadItem(what=shown, why=handle.trouble, remedy="copy what matters of it into a file, and give that"))
    made_by_kernel = after.st_size == before.st_size == 0
    if not made_by_kernel and (
        (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns) or (not whole and hashing.count > before.st_size)
    ):
        case.parts.append(
            InputPart(shown, "", "partly", note="it changed while it was read: what is here is a snapshot of several moments")
        )
    digest = hashing.digest.hexdigest() if whole else None
    for index in range(first_part, len(case.parts)):
        part = case.parts[index]
        case.parts[index] = InputPart(
            part.path, part.heading, part.status, part.kinds, part.lines, part.unrecognised, part.first_unrecognised, part.note,
            before.st_size, digest,
        )  # fmt: skip


def _read_leaf(leaf: Leaf, path: Path, case: CaseFile, orders: _Orders) -> None:
    if leaf.stream is None:
        case.parts.append(InputPart(leaf.path, "", "unread", note=leaf.note))
        if "link" not in leaf.note:
            case.unread.append(
                UnreadItem(what=leaf.path, why=leaf.note, remedy="unpack it and give the files" if leaf.kind == "zip" else "")
            )
        return
    if leaf.kind == "empty":
        case.parts.append(InputPart(leaf.path, "", "read", note="empty"))
    elif leaf.kind == "gpu-core":
        read_core_leaf(leaf, None if leaf.packed else path, case)
    elif leaf.kind == "pickle":
        _read_pickle(leaf, case)
    elif leaf.kind == "ring":
        read_ring_leaf(leaf, case)
    elif leaf.kind in ("elf", "binary"):
        case.parts.append(InputPart(leaf.path, "", "unread", note="a program or binary data: nothing here reads it"))
    elif leaf.kind == "utf16":
        data = read_up_to(leaf.stream, _JSON_WHOLE)
        text = data.decode("utf-16", "replace").encode("utf-8", "replace")
        lines = [(number, line) for number, line in enumerate(text.split(b"\n"), 1)]
        _read_lines(leaf.path, lines, case, orders, complete=len(data) < _JSON_WHOLE, notes=("UTF-16 text",))
    else:
        _read_text_leaf(leaf, case, orders)


def _read_text_leaf(leaf: Leaf, case: CaseFile, orders: _Orders) -> None:
    assert leaf.stream is not None
    head = getattr(leaf.stream, "head", b"")
    if _is_document(head):
        data = read_up_to(leaf.stream, _JSON_WHOLE + 1)
        if len(data) <= _JSON_WHOLE:
            lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1)]
            _read_lines(leaf.path, lines, case, orders, complete=True, notes=(), readers=DOCUMENT_READERS)
            return
        why = f"one JSON document of more than {_JSON_WHOLE >> 20} MiB: only its lines were looked at"
        case.unread.append(UnreadItem(what=leaf.path, why=why, remedy="cut it down to the last entries of each rank"))
        kept = keep_lines(_Rest(data, leaf.stream))
    else:
        table = (b"utilization.gpu" in head[:4096].lower() and b" %" not in head) or head.startswith(
            (b"# gpu", b"Process ", b"# HELP")
        )
        kept = keep_lines(leaf.stream, everything=table)
    _read_lines(leaf.path, kept.lines, case, orders, complete=kept.complete, notes=kept.notes, total=kept.total)


def _is_document(head: bytes) -> bool:
    """One JSON value, not a log of JSON lines: its first line is not a whole value, or there is only one."""
    text = head.lstrip()
    inner = text[1:].lstrip()[:1]
    # A log line may begin with a bracket, too: "[12.0] NVRM", "[rank0]:".
    if not ((text[:1] == b"{" and inner in (b'"', b"}", b"")) or (text[:1] == b"[" and inner in (b"{", b"[", b'"', b"]", b""))):
        return False
    first, newline, rest = text.partition(b"\n")
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return True
    return not newline or not rest.strip()


class _Rest:
    """Bytes that were read already, then the stream."""

    def __init__(self, data: bytes, stream: Readable) -> None:
        self._data = data
        self._stream = stream
        self._at = 0

    def read(self, size: int = -1, /) -> bytes:
        if self._at < len(self._data):
            part = self._data[self._at : self._at + size]
            self._at += len(part)
            return part
        return self._stream.read(size)


def _read_pickle(leaf: Leaf, case: CaseFile) -> None:
    assert leaf.stream is not None
    data = read_up_to(leaf.stream, _MAX_PICKLE)
    try:
        document = load_pickle(data, leaf.path)
    except EvidenceError as error:
        _unread(case, leaf.path, str(error))
        return
    record = flight_rank(document, Ref(leaf.path, 0, max(len(data) - 1, 0), "byte"), rank_of_name(leaf.path))
    if record is None:
        _unread(case, leaf.path, "a pickle, but not a flight recorder's")
        return
    case.flights.append(record)
    case.parts.append(InputPart(leaf.path, "", "read", ("flight recorder",)))


def _counts(case: CaseFile) -> tuple[int, ...]:
    return (
        len(case.events), len(case.stats), len(case.threads), len(case.gpus), len(case.kernel), len(case.kernel_log_seen),
            len(case.metrics),
        len(case.ras), len(case.watchdog), len(case.flights), len(case.dumps), len(case.procs), len(case.devices),
            len(case.failures),
        len(case.versions), len(case.prior), len(case.rings), len(case.readings),
    )  # fmt: skip


def _read_lines(
    source: str,
    lines: Sequence[tuple[int, bytes]],
    case: CaseFile,
    orders: _Orders,
    *,
    complete: bool,
    notes: Sequence[str],
    total: int | None = None,
    readers: Sequence[tuple[str, Reader]] | None = None,
) -> None:
    if complete and is_python_source(b"\n".join(line for _, line in lines)):
        case.parts.append(
            InputPart(source, "", "read", (), len(lines), len(lines), note="a program's source: nothing was taken from it")
        )
        return
    note = "; ".join(notes)
    if not complete and total is not None:
        note = f"{len(lines)} of {total} lines looked at closely" + (f"; {note}" if note else "")
    sections = list(split_sections(source, lines, first_order=orders.next, complete=complete, whole=readers is DOCUMENT_READERS))
    orders.next += len(sections) + 1
    told_again = retelling(sections[0], lines[0][1]) if sections else None
    if told_again is not None:
        size = sum(len(section.lines) for section in sections)
        case.parts.append(InputPart(source, "", "read", (told_again,), size, note="not evidence: nothing was taken from it"))
        return
    for section in sections:
        kinds: list[str] = []
        for name, reader in readers or READERS:
            before = _counts(case)
            try:
                reader(section, case)
            except RecursionError as error:
                _reader_failed(case, section, name, error)
            except Exception as error:
                _reader_failed(case, section, name, error)
            if _counts(case) != before:
                kinds.append(name)
        blank = [index for index, line in enumerate(section.lines) if not line.strip()]
        for index in blank:
            section.claimed[index] = 1
        unknown = [index for index, mark in enumerate(section.claimed) if not mark] if complete else []
        case.parts.append(
            InputPart(
                source, section.heading, "read" if complete else "partly", tuple(kinds), len(section.lines), len(unknown),
                section.numbers[unknown[0]] if unknown else None, note,
            )
        )  # fmt: skip


def _reader_failed(case: CaseFile, section: Section, name: str, error: BaseException) -> None:
    case.unread.append(
        UnreadItem(
            what=f"{name} in {section.where()}", why=f"the reader failed: {type(error).__name__}: {error}"[:300],
            remedy="please report this with the part of the file",
        )
    )  # fmt: skip


def part_table(case: CaseFile) -> list[dict[str, Any]]:
    """The inputs as plain rows for the document."""
    return [
        {
            "path": part.path, "heading": part.heading, "status": part.status, "kinds": list(part.kinds), "lines": part.lines,
            "unrecognised": part.unrecognised, "first_unrecognised": part.first_unrecognised, "note": part.note, "size": part.size,
            "sha256": part.sha256,
        }
        for part in case.parts
    ]  # fmt: skip
