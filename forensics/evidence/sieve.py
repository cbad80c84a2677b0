"""The lines of a large text that could matter, in one pass at a gigabyte in a few seconds and bounded memory.

A log of a gigabyte is scanned with NumPy: every four bytes are hashed into a table of 65536 entries in which one four-byte piece
of each needle is marked; what survives is compared with the needle itself. Needles that start a block (a stack, a debugger table)
keep the lines that follow. Everything is capped per file, keeping the first and the last, and the caps that struck are said.

Small files do not come here: their every line is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .archive import Readable

__all__ = ["CHUNK", "MAX_LINE", "SMALL", "Kept", "keep_lines"]

#: Files up to this size are read whole.
SMALL = 384 << 10
CHUNK = 1 << 20
#: A longer line is cut here and the rest of it is skipped.
MAX_LINE = 1 << 20
_HEAD_LINES = 40_000
_TAIL_LINES = 40_000
_HEAD_BYTES = 24 << 20
_TAIL_BYTES = 24 << 20
_BLOCK_LINES = 160
#: After so many hits in one file a needle is thinned: the first and last few of each chunk.
_PLENTY = 3_000
_PER_CHUNK = 12
#: Needles of lines that a healthy server prints all the time: how many to take before thinning.
_PLENTY_OF = {
    "generation throughput": 8_000,
    "#running-req": 8_000,
    " %, ": 8_000,
    "/completions HTTP": 60,
    '" 500': 200,
    " PID ": 400,
}

_LINE_NEEDLES = (
    "block found in", "RPC call to", "atchdog timeout", "fatal error", "EngineDead", "died unexpectedly", "Worker exit type",
    "ActorDied",
    "The actor ",
    "Main process exited", "OOMKilled", "OOM killer", "Exit Code:", "[shutdown]", "SIGTERM", "SIGINT", "startup complete",
    "load model",
    "Filesystem type", "Loading weights", "shards:", "loading took", "Dynamo", "torch.compile", "a graph for", "Capturing",
    "Graph capturing",
    "init engine", "during inference", " JIT ", "JIT-", "ninja", "nvcc", "FAILED: ", "cicc", "ptxas", ".lock", "Aborted",
    "Aborting", "aborted",
    "lient disconnected", "lient closed", "lient has", '" 499', "CUDA error", "CUDA driver error", "CUDA_ERROR_", "cudaError",
    "CUDBG_EXCEPTION",
    "total_ctas", "oversubscribe", "ooperative launch", "too many resources", "NCCL WARN", "ncclRemoteError", "ncclSystemError",
    "ncclInternalError", "rid sync", "DeepEP", "REMOTE_KV", "KV load failure", "NIXL transfer", "expired KV", "remote KV",
    "timed out", "unreachable",
    "reempt", "mismatch", "disagree", "beyond its", "last enqueued", "Watchdog caught", "Dumping ", "Exception: ", "Error: ",
    "V1 LLM engine",
    "API server version", "nccl==", "NCCL version", "flashinfer==", "flashinfer-python", "parallel_size", "Parent process exited",
    "Xid (",
    "ut of memory", "oom-kill:", "fallen off the bus", "blocked for more than", "segfault at", "traps: ", "ink down", "ink Down",
    "RmInitAdapter",
    "GSP RPC", "uvm_spin", "GPU is lost", "device handle", "rchar: ", "read_bytes: ", "State:\t", "wchan",
    "Operation not permitted", "UNW_EBADREG",
    "already traced", "No CUDA ", "cudbg", "ptrace: ", "No such process", "vllm:num_requests", "vllm:generation_tokens",
    "vllm:prompt_tokens_total",
    "vllm:kv_cache_usage", "vllm:num_preemptions", "vllm:request_success", "vllm:iteration_tokens", "DCGM_FI_DEV_", "=== ", "==> ",
    "503 Service", '" 500',
)  # fmt: skip
_FREQUENT_NEEDLES = ("generation throughput", "#running-req", " %, ", "/completions HTTP")
_BLOCK_NEEDLES = (
    "(idle)", "(active)", "(active+gil)", "(gil)", "Traceback for thread", "(LWP ", "most recent call first", "SMs Mask",
    "BlockIdx", "Active Lanes",
    "Switching focus to CUDA", "arrival_counter", ">>> (", "Communicators...", "operation counts", "Job summary", "CUDA Exception",
    "PID PPID",
    " PID ", "NVSMI LOG", "| NVIDIA-SMI", "# gpu ",
)  # fmt: skip
#: Four-byte pieces with rare letters make fewer false candidates.
_COMMON = set(b' etaoinsrhldcumfpg.0123456789:-"/=,_')
_MULTIPLIER = 2654435761


@dataclass(slots=True)
class Kept:
    """``lines``: (line number, bytes without the newline), in order. ``total``: lines in the file. ``complete``: all were kept."""

    lines: list[tuple[int, bytes]] = field(default_factory=list)
    total: int = 0
    complete: bool = True
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Needle:
    text: bytes
    offset: int
    number: int
    block: bool


def _hash(piece: bytes) -> int:
    return ((int.from_bytes(piece, "little") * _MULTIPLIER) & 0xFFFFFFFF) >> 16


def _build() -> tuple[NDArray[np.uint8], dict[bytes, list[_Needle]], dict[int, int]]:
    table = np.zeros(65536, np.uint8)
    pieces: dict[bytes, list[_Needle]] = {}
    numbers: dict[bytes, int] = {}
    plenty: dict[int, int] = {}
    for block, texts in ((False, _LINE_NEEDLES), (False, _FREQUENT_NEEDLES), (True, _BLOCK_NEEDLES)):
        for name in texts:
            text = name.encode()
            offset = min(range(len(text) - 3), key=lambda o: sum(byte in _COMMON for byte in text[o : o + 4]))
            piece = text[offset : offset + 4]
            number = numbers.setdefault(piece, min(len(numbers) + 1, 255))
            table[_hash(piece)] = number
            pieces.setdefault(piece, []).append(_Needle(text, offset, number, block))
            plenty[number] = max(plenty.get(number, 0), _PLENTY_OF.get(name, _PLENTY))
    return table, pieces, plenty


_TABLE, _PIECES, _LIMITS = _build()


def _chunks(stream: Readable) -> Iterator[tuple[bytes, bool]]:
    """(text that ends with a newline or is the end, was the last line cut). A line longer than ``MAX_LINE`` is cut."""
    carry = b""
    skipping = False
    while True:
        data = stream.read(CHUNK)
        if not data:
            if carry and not skipping:
                yield carry, False
            return
        if skipping:
            newline = data.find(b"\n")
            if newline < 0:
                continue
            data = data[newline + 1 :]
            skipping = False
        data = carry + data
        newline = data.rfind(b"\n")
        if newline < 0:
            if len(data) > MAX_LINE:
                yield data[:MAX_LINE] + b"\n", True
                carry, skipping = b"", True
            else:
                carry = data
            continue
        carry = data[newline + 1 :]
        yield data[: newline + 1], False
        if len(carry) > MAX_LINE:
            yield carry[:MAX_LINE] + b"\n", True
            carry, skipping = b"", True


class _Store:
    """First and last kept lines under caps of count and bytes."""

    def __init__(self) -> None:
        self.head: list[tuple[int, bytes]] = []
        self.tail: deque[tuple[int, bytes]] = deque()
        self.head_bytes = self.tail_bytes = 0
        self.dropped = 0

    def add(self, number: int, line: bytes) -> None:
        if len(self.head) < _HEAD_LINES and self.head_bytes < _HEAD_BYTES:
            self.head.append((number, line))
            self.head_bytes += len(line)
            return
        self.tail.append((number, line))
        self.tail_bytes += len(line)
        while len(self.tail) > _TAIL_LINES or self.tail_bytes > _TAIL_BYTES:
            self.tail_bytes -= len(self.tail.popleft()[1])
            self.dropped += 1


def keep_lines(stream: Readable, *, everything: bool = False) -> Kept:
    """Read a text to its end. ``everything``: keep all lines (up to the caps), for files that are one format throughout."""
    kept = Kept()
    store = _Store()
    first = stream.read(SMALL + 1)
    while len(first) <= SMALL:
        more = stream.read(SMALL + 1 - len(first))
        if not more:
            break
        first += more
    if len(first) <= SMALL:
        lines = first.split(b"\n")
        if lines and not lines[-1]:
            lines.pop()
        kept.lines = [(number, line[:MAX_LINE]) for number, line in enumerate(lines, 1)]
        kept.total = len(lines)
        return kept
    joined = _Joined(first, stream)
    seen: dict[int, int] = {}
    base, remaining_block, cut_lines = 0, 0, 0
    thinned = False
    for chunk, cut in _chunks(joined):
        cut_lines += cut
        array = np.frombuffer(chunk, np.uint8)
        newlines = np.flatnonzero(array == 10)
        count = len(newlines) + (0 if chunk.endswith(b"\n") else 1)
        if everything:
            wanted = np.arange(count)
        else:
            wanted, remaining_block, struck = _wanted(chunk, array, newlines, count, seen, remaining_block)
            thinned |= struck
        for at in wanted.tolist():
            start = int(newlines[at - 1]) + 1 if at else 0
            end = int(newlines[at]) if at < len(newlines) else len(chunk)
            store.add(base + at + 1, chunk[start:end])
        base += count
    kept.total = base
    kept.lines = [*store.head, *store.tail]
    kept.complete = everything and not store.dropped
    if cut_lines:
        kept.notes.append(f"{cut_lines} line(s) longer than {MAX_LINE >> 20} MiB were cut")
    if thinned:
        kept.notes.append("lines that occur very often were thinned")
    if store.dropped:
        kept.notes.append(f"{store.dropped} lines in the middle were left out")
    return kept


class _Joined:
    """What was read already, then the rest."""

    def __init__(self, first: bytes, stream: Readable) -> None:
        self._first = first
        self._at = 0
        self._stream = stream

    def read(self, size: int = -1, /) -> bytes:
        if self._at < len(self._first):
            part = self._first[self._at : self._at + size]
            self._at += len(part)
            return part
        self._first = b""
        return self._stream.read(size)


def _wanted(
    chunk: bytes, array: NDArray[np.uint8], newlines: NDArray[np.intp], count: int, seen: dict[int, int], remaining: int
) -> tuple[NDArray[np.intp], int, bool]:
    """Indices of the lines to keep, how many lines of a block go on into the next chunk, and whether a needle was thinned."""
    positions: list[NDArray[np.intp]] = []
    numbers: list[NDArray[np.uint8]] = []
    for shift in range(4):
        words = (len(array) - shift) // 4
        if words <= 0:
            continue
        keys = array[shift : shift + 4 * words].view(np.uint32)
        marks = _TABLE[(keys * np.uint32(_MULTIPLIER)) >> np.uint32(16)]
        hits = np.flatnonzero(marks)
        if len(hits):
            positions.append(hits * 4 + shift)
            numbers.append(marks[hits])
    ranges: list[tuple[int, int]] = []
    if remaining:
        ranges.append((0, min(remaining, count) - 1))
    struck = False
    if positions:
        where = np.concatenate(positions)
        which = np.concatenate(numbers)
        order = np.argsort(where, kind="stable")
        where, which = where[order], which[order]
        where, which, struck = _thin(where, which, seen)
        lines = np.searchsorted(newlines, where, side="left")
        last = -1
        for position, line in zip(where.tolist(), lines.tolist(), strict=True):
            candidates = _PIECES.get(chunk[position : position + 4])
            if candidates is None:
                continue
            for needle in candidates:
                if not chunk.startswith(needle.text, position - needle.offset) if position >= needle.offset else True:
                    continue
                seen[needle.number] = seen.get(needle.number, 0) + 1
                if needle.block:
                    ranges.append((line, line + _BLOCK_LINES))
                elif line != last:
                    ranges.append((line, line))
                    last = line
                break
    if not ranges:
        return np.empty(0, np.intp), max(remaining - count, 0), struck
    mask = np.zeros(count + 1, np.int64)
    spill = max(remaining - count, 0)
    for begin, end in ranges:
        if end >= count:
            spill = max(spill, end - count + 1)
            end = count - 1
        if begin <= end:
            mask[begin] += 1
            mask[end + 1] -= 1
    return np.flatnonzero(np.cumsum(mask[:-1]) > 0), spill, struck


def _thin(
    where: NDArray[np.intp], which: NDArray[np.uint8], seen: dict[int, int]
) -> tuple[NDArray[np.intp], NDArray[np.uint8], bool]:
    """Needles that were met very often keep their first and last hits of a chunk only."""
    plenty = [number for number, count in seen.items() if count > _LIMITS[number]]
    if not plenty:
        return where, which, False
    keep = np.ones(len(where), bool)
    struck = False
    for number in plenty:
        own = np.flatnonzero(which == number)
        if len(own) > 2 * _PER_CHUNK:
            keep[own[_PER_CHUNK:-_PER_CHUNK]] = False
            struck = True
    return where[keep], which[keep], struck
