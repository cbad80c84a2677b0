"""What cuda-gdb printed, as a ``DeviceState``: tables, focus lines, disassembly, registers, memory words. Text in, records out.

Understands 12.x and 13.x headers, coalesced and single rows, ``-batch`` output and MI console records. Tables that are not in the
text are not read, which is not the same as empty; a refusal ("ptrace: Operation not permitted", "No CUDA kernels") is an item of
``unread`` with its remedy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ..errors import TranscriptError
from . import limits
from .cuda_gdb_patterns import (
    ANSI,
    BLOCK,
    COALESCED,
    CODE,
    COMMAND,
    COUNTED,
    DETACHED,
    DEVICE,
    DIM,
    EXCEPTION,
    FOCUS,
    FRAME,
    HERE,
    KERNEL,
    KERNEL_HEAD,
    LANE,
    PC,
    PRINTED,
    READS,
    READS_PARAMETERS,
    REFUSALS,
    REGISTER,
    SM_HEAD,
    VALUE,
    WARP,
    WORDS,
)
from .cuda_gdb_state import Collected, KernelRow, LaneRow, Place, WarpRow
from .device_state import DeviceState, Dim3, Unread

__all__ = ["Transcript", "looks_like_transcript", "parse_transcript", "read_transcript"]


@dataclass(frozen=True, slots=True)
class Transcript:
    """``state``: what the debugger saw; in its ``printed``, a name that occurs with several values is left out.

    ``exceptions``: CUDA exceptions it reported. ``processes``: pids it detached from.
    """

    state: DeviceState
    exceptions: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()


def looks_like_transcript(text: str) -> bool:
    """Whether there is anything in the text that only cuda-gdb prints."""
    return any(
        mark in text for mark in ("Switching focus to CUDA kernel", "Active Lanes Mask", "Parent Dev Grid Status", "(cuda-gdb)")
    ) or any(FOCUS.search(line) or KERNEL.match(line) for line in text[: 1 << 20].splitlines())


def parse_transcript(text: str, *, source: str = "", origin: Literal["measured", "reported"] = "measured") -> DeviceState:
    """The device state in a cuda-gdb transcript: see ``read_transcript``."""
    return read_transcript(text, source=source, origin=origin).state


def read_transcript(text: str, *, source: str = "", origin: Literal["measured", "reported"] = "measured") -> Transcript:
    """Read a cuda-gdb transcript. ``origin``: measured if our own collector has just taken it, reported if somebody hands it in.

    Raises TranscriptError only if the text has nothing of cuda-gdb in it.
    """
    parser = _Parser()
    size = len(text)
    if size > limits.MAX_TRANSCRIPT_BYTES:
        text = text[: limits.MAX_TRANSCRIPT_BYTES]
        parser.found.unread.append(Unread("the end of the transcript", f"longer than {limits.MAX_TRANSCRIPT_BYTES} characters"))
    for line in text.splitlines():
        parser.line(_plain(line[: limits.MAX_TRANSCRIPT_LINE]))
    result = parser.finish(source, origin)
    if not parser.seen:
        raise TranscriptError("nothing that cuda-gdb prints is in this text", path=source)
    return result


def _plain(line: str) -> str:
    line = ANSI.sub("", line).rstrip("\r\n")
    if line.startswith('~"') and line.endswith('"'):  # MI console record
        line = line[2:-1].replace("\\n", "").replace("\\t", "\t").replace('\\"', '"').replace("\\\\", "\\")
    return line


class _Parser:
    def __init__(self) -> None:
        self.seen = False
        self.found = Collected()
        self.exceptions: list[str] = []
        self.processes: list[int] = []
        self.focus: tuple[int, Place, int] | None = None
        self.table = ""
        self.kernel = 0
        self.place: tuple[int, int, int | None] = (0, 0, None)
        self.block_column = 0
        self.command = ""

    # --- one line ------------------------------------------------------------------------------------------------------------

    def line(self, line: str) -> None:
        command = COMMAND.match(line)
        if command:
            self.command = line = command[1]
        if not line.strip():
            return
        counted = COUNTED.match(line)
        if counted and len(self.found.blocks.get(int(counted[1]), {})) < int(counted[2]):
            self.found.cut.add(int(counted[1]))
        self._refusal(line)
        focus = FOCUS.search(line)
        if focus:
            self._focus(focus)
        elif self._header(line) or self._row(line) or self._inspection(line):
            self.seen = True

    def _refusal(self, line: str) -> None:
        for mark, what, why, remedy in REFUSALS:
            if mark in line:
                self.seen = True
                said = f"{why}: {line.strip()[:200]}" if mark == "CUDBG_ERROR_" else why
                item = Unread(what, said, remedy)
                if item not in self.found.unread:
                    self.found.unread.append(item)
        found = EXCEPTION.search(line)
        if found and len(self.exceptions) < limits.MAX_UNREAD:
            self.seen = True
            self.exceptions.append((found[1] or found[2]).strip())
        detached = DETACHED.search(line)
        if detached:
            self.processes.append(int(detached[1] or detached[2]))

    def _focus(self, found: re.Match[str]) -> None:
        self.seen = True
        numbers = [int(part) if part is not None else 0 for part in found.groups()]
        kernel, grid = numbers[0], numbers[1]
        block, thread = _dim(numbers[5:8]), _dim(numbers[8:11])
        device, sm, warp, lane = numbers[11:15]
        place = (device, sm, warp)
        self.focus = (kernel, place, lane)
        self.found.kernels.setdefault(kernel, KernelRow(device, grid, "", (0, 0, 0), (0, 0, 0)))
        self.found.blocks.setdefault(kernel, {})[block] = sm
        if place not in self.found.warps:
            self.found.warps[place] = WarpRow(0, 0, None, block, kernel)
        self.found.lanes.setdefault(place, {}).setdefault(lane, LaneRow(thread))
        self.table = ""

    def _header(self, line: str) -> bool:
        words = line.split()
        if "Wp" in words and "Mask" in words:
            self.table = "warps"
            after = line.split("Kernel", 1)[-1].split()
            self.block_column = after.index("BlockIdx") if "BlockIdx" in after else 0
            return True
        if "BlockIdx" in words and ("State" in words or "Count" in words):
            self.table = "blocks"
            return True
        if "Ln" in words and "ThreadIdx" in words:
            self.table = "lanes"
            return True
        if "Parent" in words and "GridDim" in words:
            self.table = "kernels"
            return True
        if "Dev" in words and "SMs" in words and "Type" in words:
            self.table = "devices"
            return True
        head = KERNEL_HEAD.match(line)
        if head and self.table == "blocks":
            self.kernel = int(head[1])
            self.found.counted.add(self.kernel)
            return True
        place = SM_HEAD.match(line)
        if place:
            self.place = (int(place[1]), int(place[2]), int(place[3]) if place[3] else None)
            if self.table == "warps":
                self.found.tables.add(self.place[:2])
            return True
        return False

    def _row(self, line: str) -> bool:
        device = DEVICE.match(line)
        if device:
            text = re.sub(r"^[0-9a-fA-F]{2,4}:[0-9a-fA-F]{2}\.\d\s+", "", device[2])
            self.found.devices[int(device[1])] = (re.split(r"\s{2,}", text)[0].strip(), int(device[3]), int(device[4]))
            return True
        kernel = KERNEL.match(line)
        if kernel:
            n = kernel.groups()
            cluster = _dim(n[10:13]) if n[10] is not None else (1, 1, 1)
            self.found.kernels[int(n[0])] = KernelRow(int(n[1]), int(n[2]), n[13].strip(), _dim(n[4:7]), _dim(n[7:10]), cluster)
            return True
        if self.table == "blocks":
            return self._block(line)
        if self.table == "warps":
            return self._warp(line)
        if self.table == "lanes":
            return self._lane(line)
        return False

    def _block(self, line: str) -> bool:
        own = self.found.blocks.setdefault(self.kernel, {})
        many = COALESCED.match(line)
        if many:
            first, last, count = _dim(many.groups()[:3]), _dim(many.groups()[3:6]), int(many[7])
            self.found.counted.add(self.kernel)
            for block in self._between(first, last, count):
                own.setdefault(block, None)
            return True
        one = BLOCK.match(line)
        if one:
            self.found.counted.add(self.kernel)
            own[_dim(one.groups()[:3])] = int(one[6])
            return True
        return False

    def _between(self, first: Dim3, last: Dim3, count: int) -> list[Dim3]:
        """The blocks of a coalesced row, x fastest. Where only x runs, no grid size is needed."""
        if count > limits.MAX_TRANSCRIPT_BLOCKS:
            self.found.unread.append(Unread(f"{count} blocks of kernel {self.kernel}", "more than are listed one by one"))
            self.found.cut.add(self.kernel)
            return []
        if first[1:] == last[1:]:
            return [(x, first[1], first[2]) for x in range(first[0], min(last[0] + 1, first[0] + count))]
        dim = self.found.kernels[self.kernel].grid_dim if self.kernel in self.found.kernels else (0, 0, 0)
        if not all(dim):
            self.found.unread.append(
                Unread(f"{count} blocks of kernel {self.kernel}", "a coalesced row over several y or z without a grid size")
            )
            return [first, last]
        start = first[0] + dim[0] * (first[1] + dim[1] * first[2])
        return [_block_at(index, dim) for index in range(start, start + count)]

    def _warp(self, line: str) -> bool:
        found = WARP.match(line)
        if not found:
            return False
        dims = re.findall(DIM, found[6])
        if not dims:
            return False
        block = _dim(dims[min(self.block_column, len(dims) - 1)])
        place = (self.place[0], self.place[1], int(found[1]))
        kernel = int(found[5])
        self.found.warps[place] = WarpRow(int(found[2], 16), int(found[3], 16), int(found[4], 16), block, kernel)
        self.found.blocks.setdefault(kernel, {})[block] = self.place[1]
        return True

    def _lane(self, line: str) -> bool:
        found = LANE.match(line)
        if not found or self.place[2] is None:
            return False
        own = self.found.lanes.setdefault((self.place[0], self.place[1], self.place[2]), {})
        lane = own.setdefault(int(found[1]), LaneRow(_dim(found.groups()[3:6])))
        lane.pc = int(found[3], 16)
        return True

    # --- inspection of one place -----------------------------------------------------------------------------------------------

    def _inspection(self, line: str) -> bool:
        frame = FRAME.match(line) or HERE.match(line)
        if frame and self.focus is not None:
            n = frame.groups()
            self.found.frames[self.focus[0]] = (n[1].strip(), _dim(n[2:5]), _dim(n[5:8]))
            if n[0] is not None:
                self._set_pc(int(n[0], 16))
            return True
        words = WORDS.match(line)
        if words:
            bank = READS_PARAMETERS.match(self.command)
            kept = self.found.params.setdefault(self.focus[0], {}) if bank and self.focus else self.found.memory
            for at, word in enumerate(words[2].split()[:4096]):
                kept[int(words[1], 16) + 4 * at] = int(word, 16)
            return True
        code = CODE.match(line)
        if code:
            name = code[1] or ""
            if sum(map(len, self.found.code.values())) < 200_000:
                self.found.code.setdefault(name, []).append(line)
            if self.focus is not None:
                self.found.code_kernel.setdefault(name, self.focus[0])
            return True
        register = REGISTER.match(line)
        if register and self.focus is not None:
            _, place, lane = self.focus
            self.found.lanes[place][lane].registers[register[1] + register[2]] = int(register[3], 16)
            return True
        pc = PC.match(line)
        if pc and self.focus is not None:
            self._set_pc(int(pc[1], 16))
            return True
        if VALUE.match(line):
            reads, single = READS.match(self.command), re.match(r"^\$\d+ = (-?\d{1,20}|0x[0-9a-fA-F]{1,16})\s*$", line)
            if reads and single:
                self.found.memory[int(reads[1], 16)] = _number(single[1]) & 0xFFFFFFFF
            for name, value in PRINTED.findall(line):
                number = _number(value)
                self.found.printed[name] = number if self.found.printed.get(name, number) == number else None
            return True
        return False

    def _set_pc(self, pc: int) -> None:
        assert self.focus is not None
        _, place, lane = self.focus
        self.found.lanes[place][lane].pc = pc

    # --- the whole -----------------------------------------------------------------------------------------------------------

    def finish(self, source: str, origin: str) -> Transcript:
        return Transcript(self.found.state(source, origin), tuple(self.exceptions), tuple(self.processes))


def _number(text: str) -> int:
    return int(text, 16 if text.startswith("0x") else 10)  # base 0 refuses 007


def _dim(parts: list[int] | tuple[str, ...] | list[str] | tuple[str | None, ...]) -> Dim3:
    x, y, z = (int(part or 0) for part in parts)
    return x, y, z


def _block_at(index: int, dim: Dim3) -> Dim3:
    return index % dim[0], index // dim[0] % dim[1], index // (dim[0] * dim[1])
