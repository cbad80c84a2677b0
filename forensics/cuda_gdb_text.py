"""What cuda-gdb printed, as a ``DeviceState``: tables, focus lines, disassembly, registers, memory words. Text in, records out.

Understands 12.x and 13.x headers, coalesced and single rows, ``-batch`` output and MI console records. Tables that are not in the
text are not read, which is not the same as empty; a refusal ("ptrace: Operation not permitted", "No CUDA kernels") is an item of
``unread`` with its remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import TranscriptError
from ..kernels.sasstext import parse_listing
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
from .device_state import CtaState, DeviceState, Dim3, GridState, LaneState, Unread, WarpState

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
        parser.unread.append(Unread("the end of the transcript", f"longer than {limits.MAX_TRANSCRIPT_BYTES} characters"))
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


@dataclass
class _Warp:
    active: int
    divergent: int
    pc: int | None
    block: Dim3
    kernel: int


@dataclass
class _Lane:
    thread: Dim3
    pc: int | None = None
    registers: dict[str, int] = field(default_factory=dict)


@dataclass
class _Kernel:
    device: int
    grid: int
    name: str
    grid_dim: Dim3
    block_dim: Dim3
    cluster: Dim3 = (1, 1, 1)


_Place = tuple[int, int, int]  # device, SM, warp


class _Parser:
    def __init__(self) -> None:
        self.seen = False
        self.unread: list[Unread] = []
        self.devices: dict[int, tuple[str, int | None, int | None]] = {}
        self.kernels: dict[int, _Kernel] = {}
        self.frames: dict[int, tuple[str, Dim3, Dim3]] = {}
        self.blocks: dict[int, dict[Dim3, int | None]] = {}
        self.counted: set[int] = set()
        self.cut: set[int] = set()
        self.tables: set[tuple[int, int]] = set()
        self.warps: dict[_Place, _Warp] = {}
        self.lanes: dict[_Place, dict[int, _Lane]] = {}
        self.code: dict[str, list[str]] = {}
        self.code_kernel: dict[str, int] = {}
        self.memory: dict[int, int] = {}
        self.printed: dict[str, int | None] = {}
        self.exceptions: list[str] = []
        self.processes: list[int] = []
        self.focus: tuple[int, _Place, int] | None = None
        self.table = ""
        self.kernel = 0
        self.place: tuple[int, int, int | None] = (0, 0, None)
        self.block_column = 0
        self.params: dict[int, dict[int, int]] = {}
        self.command = ""

    # --- one line ------------------------------------------------------------------------------------------------------------

    def line(self, line: str) -> None:
        command = COMMAND.match(line)
        if command:
            self.command = line = command[1]
        if not line.strip():
            return
        counted = COUNTED.match(line)
        if counted and len(self.blocks.get(int(counted[1]), {})) < int(counted[2]):
            self.cut.add(int(counted[1]))
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
                if item not in self.unread:
                    self.unread.append(item)
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
        self.kernels.setdefault(kernel, _Kernel(device, grid, "", (0, 0, 0), (0, 0, 0)))
        self.blocks.setdefault(kernel, {})[block] = sm
        if place not in self.warps:
            self.warps[place] = _Warp(0, 0, None, block, kernel)
        self.lanes.setdefault(place, {}).setdefault(lane, _Lane(thread))
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
            self.counted.add(self.kernel)
            return True
        place = SM_HEAD.match(line)
        if place:
            self.place = (int(place[1]), int(place[2]), int(place[3]) if place[3] else None)
            if self.table == "warps":
                self.tables.add(self.place[:2])
            return True
        return False

    def _row(self, line: str) -> bool:
        device = DEVICE.match(line)
        if device:
            text = re.sub(r"^[0-9a-fA-F]{2,4}:[0-9a-fA-F]{2}\.\d\s+", "", device[2])
            self.devices[int(device[1])] = (re.split(r"\s{2,}", text)[0].strip(), int(device[3]), int(device[4]))
            return True
        kernel = KERNEL.match(line)
        if kernel:
            n = kernel.groups()
            cluster = _dim(n[10:13]) if n[10] is not None else (1, 1, 1)
            self.kernels[int(n[0])] = _Kernel(int(n[1]), int(n[2]), n[13].strip(), _dim(n[4:7]), _dim(n[7:10]), cluster)
            return True
        if self.table == "blocks":
            return self._block(line)
        if self.table == "warps":
            return self._warp(line)
        if self.table == "lanes":
            return self._lane(line)
        return False

    def _block(self, line: str) -> bool:
        own = self.blocks.setdefault(self.kernel, {})
        many = COALESCED.match(line)
        if many:
            first, last, count = _dim(many.groups()[:3]), _dim(many.groups()[3:6]), int(many[7])
            self.counted.add(self.kernel)
            for block in self._between(first, last, count):
                own.setdefault(block, None)
            return True
        one = BLOCK.match(line)
        if one:
            self.counted.add(self.kernel)
            own[_dim(one.groups()[:3])] = int(one[6])
            return True
        return False

    def _between(self, first: Dim3, last: Dim3, count: int) -> list[Dim3]:
        """The blocks of a coalesced row, x fastest. Where only x runs, no grid size is needed."""
        if count > limits.MAX_TRANSCRIPT_BLOCKS:
            self.unread.append(Unread(f"{count} blocks of kernel {self.kernel}", "more than are listed one by one"))
            self.cut.add(self.kernel)
            return []
        if first[1:] == last[1:]:
            return [(x, first[1], first[2]) for x in range(first[0], min(last[0] + 1, first[0] + count))]
        dim = self.kernels[self.kernel].grid_dim if self.kernel in self.kernels else (0, 0, 0)
        if not all(dim):
            self.unread.append(
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
        self.warps[place] = _Warp(int(found[2], 16), int(found[3], 16), int(found[4], 16), block, kernel)
        self.blocks.setdefault(kernel, {})[block] = self.place[1]
        return True

    def _lane(self, line: str) -> bool:
        found = LANE.match(line)
        if not found or self.place[2] is None:
            return False
        own = self.lanes.setdefault((self.place[0], self.place[1], self.place[2]), {})
        lane = own.setdefault(int(found[1]), _Lane(_dim(found.groups()[3:6])))
        lane.pc = int(found[3], 16)
        return True

    # --- inspection of one place -----------------------------------------------------------------------------------------------

    def _inspection(self, line: str) -> bool:
        frame = FRAME.match(line) or HERE.match(line)
        if frame and self.focus is not None:
            n = frame.groups()
            self.frames[self.focus[0]] = (n[1].strip(), _dim(n[2:5]), _dim(n[5:8]))
            if n[0] is not None:
                self._set_pc(int(n[0], 16))
            return True
        words = WORDS.match(line)
        if words:
            bank = READS_PARAMETERS.match(self.command)
            kept = self.params.setdefault(self.focus[0], {}) if bank and self.focus else self.memory
            for at, word in enumerate(words[2].split()[:4096]):
                kept[int(words[1], 16) + 4 * at] = int(word, 16)
            return True
        code = CODE.match(line)
        if code:
            name = code[1] or ""
            if sum(map(len, self.code.values())) < 200_000:
                self.code.setdefault(name, []).append(line)
            if self.focus is not None:
                self.code_kernel.setdefault(name, self.focus[0])
            return True
        register = REGISTER.match(line)
        if register and self.focus is not None:
            _, place, lane = self.focus
            self.lanes[place][lane].registers[register[1] + register[2]] = int(register[3], 16)
            return True
        pc = PC.match(line)
        if pc and self.focus is not None:
            self._set_pc(int(pc[1], 16))
            return True
        if VALUE.match(line):
            reads, single = READS.match(self.command), re.match(r"^\$\d+ = (-?\d+|0x[0-9a-fA-F]+)\s*$", line)
            if reads and single:
                self.memory[int(reads[1], 16)] = int(single[1], 0) & 0xFFFFFFFF
            for name, value in PRINTED.findall(line):
                number = int(value, 0)
                self.printed[name] = number if self.printed.get(name, number) == number else None
            return True
        return False

    def _set_pc(self, pc: int) -> None:
        assert self.focus is not None
        _, place, lane = self.focus
        self.lanes[place][lane].pc = pc

    # --- the whole -----------------------------------------------------------------------------------------------------------

    def finish(self, source: str, origin: str) -> Transcript:
        grids = tuple(self._grid(number, kernel) for number, kernel in sorted(self.kernels.items()))
        printed = {name: value for name, value in self.printed.items() if value is not None}
        state = DeviceState(source, origin, grids, self.devices, self.memory, tuple(self.unread), printed)
        return Transcript(state, tuple(self.exceptions), tuple(self.processes))

    def _grid(self, number: int, kernel: _Kernel) -> GridState:
        frame = self.frames.get(number)
        if frame is not None and not all(kernel.grid_dim):
            kernel = _Kernel(kernel.device, kernel.grid, kernel.name or frame[0], frame[1], frame[2], kernel.cluster)
        function, sass, entry = self._listing(number)
        name = function if function.startswith("_Z") or not kernel.name else kernel.name
        known = self.blocks.get(number)
        complete = number in self.counted and number not in self.cut
        what = f"resident blocks of kernel {number}" + (f" ({name})" if name else "")
        if number in self.cut:
            self.unread.append(Unread(what, "the list in the transcript is not whole", "cuda-gdb: info cuda blocks"))
        elif not complete:
            self.unread.append(Unread(what, "no `info cuda blocks` in the transcript", "cuda-gdb: info cuda blocks"))
        bare = brief = 0
        ctas = []
        for block, sm in sorted((known or {}).items(), key=lambda item: (item[0][2], item[0][1], item[0][0])):
            warps = self._warps_of(number, kernel.device, block, entry)
            bare += not warps
            partial = bool(warps) and (kernel.device, sm) not in self.tables and 32 * len(warps) < _threads(kernel.block_dim)
            brief += partial
            ctas.append(CtaState(block, sm, warps, partial=partial))
        if brief:
            what = f"the other warps of {brief} resident blocks of kernel {number}"
            why = "only the thread that was in focus was read"
            self.unread.append(Unread(what, why, "cuda-gdb: info cuda warps on each SM"))
        if bare:
            self.unread.append(
                Unread(
                    f"warps of {bare} resident blocks of kernel {number}",
                    "not in the transcript",
                    "cuda-gdb: info cuda warps on each SM",
                )
            )
        return GridState(
            kernel.device, kernel.grid, name, kernel.grid_dim, kernel.block_dim, tuple(ctas) if known is not None else None,
            kernel.cluster, self._params(number), None, sass, complete,
        )  # fmt: skip

    def _listing(self, number: int) -> tuple[str, dict[int, str], int | None]:
        """The kernel's code as far as it was printed: function, text by offset (by address if the start is not known), start."""
        for name, lines in self.code.items():
            if self.code_kernel.get(name, number) == number:
                listing = parse_listing("\n".join(lines))
                return listing.function, {line.offset: line.text for line in listing.lines}, listing.entry
        return "", {}, None

    def _params(self, number: int) -> bytes | None:
        """Kernel parameters read from the constant bank: the words from the lowest address on, as far as they are contiguous."""
        words = self.params.get(number)
        if not words:
            return None
        first = min(words)
        values: list[int] = []
        while first + 4 * len(values) in words:
            values.append(words[first + 4 * len(values)])
        return b"".join(value.to_bytes(4, "little") for value in values)

    def _warps_of(self, number: int, device: int, block: Dim3, entry: int | None) -> tuple[WarpState, ...]:
        found = []
        for place, warp in sorted(self.warps.items()):
            if warp.kernel == number and warp.block == block and place[0] == device:
                found.append(self._warp_state(place, warp, entry))
        return tuple(found)

    def _warp_state(self, place: _Place, warp: _Warp, entry: int | None) -> WarpState:
        lanes, uniform = [], None
        for number, lane in sorted(self.lanes.get(place, {}).items()):
            pc = lane.pc if lane.pc is not None else warp.pc
            registers = _bank(lane.registers, "R", 256)
            uniform = _bank(lane.registers, "UR", 64) or uniform
            flags = [bit for bit in range(7) if f"P{bit}" in lane.registers]
            predicates = sum(1 << bit for bit in flags if lane.registers[f"P{bit}"]) if flags else None
            banked = {f"R{index}" for index in range(len(registers or ()))} | {f"UR{index}" for index in range(len(uniform or ()))}
            named = {name: value for name, value in lane.registers.items() if name[0] in "RU" and name not in banked}
            lanes.append(LaneState(number, lane.thread, _offset(pc, entry), registers, predicates, pc, named))
        if warp.active == 0 and lanes:  # only a focus line told of this warp
            mask = sum(1 << lane.lane for lane in lanes)
            pc = lanes[0].virtual_pc
            return WarpState(place[2], mask, mask, _offset(pc, entry), tuple(lanes), uniform, pc)
        valid = warp.active | warp.divergent
        return WarpState(place[2], valid, warp.active, _offset(warp.pc, entry), tuple(lanes), uniform, warp.pc)


def _bank(registers: Mapping[str, int], kind: str, limit: int) -> tuple[int, ...] | None:
    """Registers 0, 1, 2 … as printed; up to the first one that is missing, so that no value is invented."""
    values: list[int] = []
    while len(values) < limit and f"{kind}{len(values)}" in registers:
        values.append(registers[f"{kind}{len(values)}"])
    return tuple(values) or None


def _offset(pc: int | None, entry: int | None) -> int | None:
    if pc is None or entry is None or not entry <= pc < entry + limits.MAX_FUNCTION_BYTES:
        return None
    return pc - entry


def _threads(dim: Dim3) -> int:
    return dim[0] * dim[1] * dim[2]


def _dim(parts: list[int] | tuple[str, ...] | list[str] | tuple[str | None, ...]) -> Dim3:
    x, y, z = (int(part or 0) for part in parts)
    return x, y, z


def _block_at(index: int, dim: Dim3) -> Dim3:
    return index % dim[0], index // dim[0] % dim[1], index // (dim[0] * dim[1])
