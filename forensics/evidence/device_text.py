"""A light reading of debugger text about a GPU: which grid is resident, which blocks, what they wait for, counter and target.

Understands cuda-gdb 12.x and 13.x tables (``Active PC`` or ``Active Physical PC``, coalesced or not, wrapped names), SASS lines,
register listings, printed structures, exceptions, and backtraces on the device. Excerpts are enough: each fact is taken where it
is found. The full reader of whole transcripts is ``forensics.cuda_gdb_text``; where that one can read a part, ``device_files``
prefers its judgement. Nothing resident is never concluded from "No CUDA kernels" (see ``read_failures``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .casefile import CaseFile
from .facts import DeviceFacts, DeviceKernel, Poll, ResidentBlock
from .refs import Section
from .sass_meaning import CodeLine, PollLoop, find_loop, meaning_at

__all__ = ["family_of", "read_device_text"]

_KERNEL = re.compile(
    r"^[* ]\s*(?P<id>\d+)\s+(?P<parent>-|\d+)\s+(?P<dev>\d+)\s+(?P<grid>\d+)\s+(?P<status>\w+)\s+(?P<mask>0x[0-9a-fA-F]+)\s+"
    r"\((?P<g>\d+,\d+,\d+)\)\s+\((?P<b>\d+,\d+,\d+)\)\s*(?P<name>.*)$"
)
_BLOCKS_COALESCED = re.compile(r"^[* ]\s*\((\d+),(\d+),(\d+)\)\s+\((\d+),(\d+),(\d+)\)\s+(\d+)\s+(\w+)")
_BLOCK_SINGLE = re.compile(r"^[* ]\s*\((\d+),(\d+),(\d+)\)\s+(running|suspended|\w+)\s+(\d+)\s+(\d+)")
_WARP = re.compile(
    r"^[* ]\s*(\d+)\s+(0x[0-9a-fA-F]{8})\s+(0x[0-9a-fA-F]{8})\s+(0x[0-9a-fA-F]+|n/a)\s+(?:(\d+)\s+)?\(?(\d+),\s*(\d+),\s*(\d+)\)"
)
_OF_KERNEL = re.compile(r"^Kernel (\d+)\s*$")
_SASS = re.compile(r"^(=>)?\s*0x([0-9a-fA-F]+)(?:\s+<(.+?)(?:\+(\d+))?>)?:\s+(?!0x)(@?!?[A-Z][\w.@!]*.*)$")
_REGISTER = re.compile(r"^\s*(U?R\d+|U?P\d|RZ|URZ)\s+0x([0-9a-fA-F]+)\b")
_PRINTED_REGISTER = re.compile(r"\$(U?R\d+)\s*=\s*(?:0x([0-9a-fA-F]+)|(\d+))\b|^\$(U?R\d+)\s+(\d+)", re.MULTILINE)
_COUNTER = re.compile(
    r"\b(arrival_counter|barrier_counter|arrive_count|\w{0,40}arriv\w{0,40}|sync_counter|pass_done)\s*(?:=|:)\s*(-?\d+|0x[0-9a-fA-F]+)"
)
_TARGET = re.compile(r"\b(?:target|expected|wait_value|wait_target|goal)\s*(?:=|:)\s*(\d+)")
_SMS = re.compile(r"\bnum_sms\b[^\d\n]{0,12}(\d+)|\b(\d{1,3}) SMs\b")
_OCCUPANCY = re.compile(r"\boccupancy\b[^\d\n]{0,30}(\d{1,2})\b")
_GROUP_SIZE = re.compile(r"ctas_per_group\b[^\d\n]{0,40}(\d+)")
_FOCUS = re.compile(
    r"\[Switching focus to CUDA kernel (\d+), grid (\d+), (?:cluster \([^)]*\), )?block \((\d+),(\d+),(\d+)\), thread \((\d+),"
    r"(\d+),(\d+)\), device (\d+), sm (\d+)"
)
_FRAME = re.compile(r"^#(\d+)\s+(?:0x([0-9a-fA-F]+) in )?(.*)$")
_LAUNCH = re.compile(
    r"(?:void )?([\w:~]{1,200}(?:<[^\n]{0,300}?>)?)(?:\([^<>\n]{0,200}\))? ?<<<"
    r"\((\d+),(\d+),(\d+)\),\((\d+),(\d+),(\d+)\)>>>"
)
_EXCEPTION = re.compile(
    r"CUDA Exception: ([^\n]+)|received signal (CUDA_EXCEPTION_\d+, [^\n.]+)|(CUDBG_EXCEPTION_\w+)|(CUDA_EXCEPTION_\d+[^\n]{0,60})"
)
_DEVICES = re.compile(r"^[* ]\s*\d+\s+\S+\s+.*\b(sm_\d+\w?)\s+(\d+)\s+\d+\s+\d+\s+\d+\s+0x[0-9a-fA-F]+")
_WAIT_FRAME = re.compile(
    r"\b(?:wait_ge|wait_until|spin\w*|grid_?(?:sync|barrier)|barrier_wait|inter_cta_\w+|multi_cta_barrier|global_barrier)\b",
    re.IGNORECASE,
)
_NCCL = re.compile(r"\bnccl(?:Dev)?Kernel|\bncclDevKernel_|\bncclSymk|\bnccl\w*_(?:Sum|RING|TREE)_")
_CROSSRANK = re.compile(
    r"cross_device_reduce|one_?shot|two_?shot|lamport|all_?reduce|multimem|symm_?mem|nvshmem|notify_dispatch|deep_?ep::|"
    r"low_latency::|"
    r"barrier_block|mnnvl|moe_?a2a|all_?gather_?(?:one|two)shot|quickreduce|all_?to_?all", re.IGNORECASE
)  # fmt: skip
_GATES = ("BlockIdx", "<<<", "SMs Mask", "Switching focus to CUDA", "arrival_counter", "CUDA Exception", "CUDA_EXCEPTION",
    "CUDBG_EXCEPTION", "ncclDevKernel",
          "Active Lanes Mask")  # fmt: skip


def family_of(name: str) -> str:
    """nccl, crossrank (polls a peer GPU) or compute."""
    if _NCCL.search(name):
        return "nccl"
    return "crossrank" if _CROSSRANK.search(name) else "compute"


@dataclass
class _Grid:
    name: str
    first: int
    last: int
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    device: int | None = None
    grid_id: str = ""
    sms: int | None = None
    blocks: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    block_table: bool = False
    frames: list[str] = field(default_factory=list)


def _dim(text: str) -> tuple[int, int, int]:
    a, b, c = (int(part) for part in text.split(","))
    return a, b, c


def read_device_text(section: Section, case: CaseFile) -> None:
    text = section.text
    if not any(word in text for word in _GATES):
        return
    grids: dict[str, _Grid] = {}
    code: dict[int, CodeLine] = {}
    registers: dict[str, int] = {}
    #: Registers belong to the block that the debugger stood on when it printed them.
    looks: dict[tuple[int, int, int] | None, dict[str, int]] = {None: registers}
    pcs: list[int] = []
    current = ""
    focus_block: tuple[int, int, int] | None = None
    exception, num_sms = "", None
    first = last = -1
    kernel_lines = False

    def mark(index: int) -> None:
        nonlocal first, last
        section.claim(index)
        first = index if first < 0 else first
        last = index

    for index, line in enumerate(section.lines):
        kernel = _KERNEL.match(line)
        if kernel:
            name = kernel.group("name").strip()
            following = index + 1
            while following < len(section.lines) and name.count("(") + name.count("<") > name.count(")") + name.count(">"):
                more = section.lines[following]
                if not more.startswith("      ") or not more.strip():
                    break
                name += " " + more.strip()
                mark(following)
                following += 1
            current = kernel.group("id")
            grids[current] = _Grid(
                name, index, index, _dim(kernel.group("g")), _dim(kernel.group("b")), int(kernel.group("dev")),
                    kernel.group("grid"),
                int(kernel.group("mask"), 16).bit_count() or None,
            )  # fmt: skip
            kernel_lines = True
            mark(index)
            continue
        of_kernel = _OF_KERNEL.match(line)
        if of_kernel:
            current = of_kernel.group(1)
            mark(index)
            continue
        focus = _FOCUS.search(line)
        if focus:
            current = focus.group(1)
            focus_block = (int(focus.group(3)), int(focus.group(4)), int(focus.group(5)))
            registers = looks.setdefault(focus_block, {})
            grids.setdefault(current, _Grid("", index, index, grid_id=focus.group(2), device=int(focus.group(9))))
            mark(index)
            continue
        if "BlockIdx" in line or "SMs Mask" in line or line.startswith("Device "):
            if "BlockIdx To" in line or re.match(r"^\s+BlockIdx\s+State", line):
                for grid in grids.values():
                    grid.block_table = True
            mark(index)
            continue
        coalesced = _BLOCKS_COALESCED.match(line)
        if coalesced:
            grid = grids.setdefault(current or "0", _Grid("", index, index))
            grid.block_table = True
            start = (int(coalesced.group(1)), int(coalesced.group(2)), int(coalesced.group(3)))
            _add_range(
                grid, start, (int(coalesced.group(4)), int(coalesced.group(5)), int(coalesced.group(6))), int(coalesced.group(7))
            )
            grid.last = index
            mark(index)
            continue
        single = _BLOCK_SINGLE.match(line)
        if single:
            grid = grids.setdefault(current or "0", _Grid("", index, index))
            grid.block_table = True
            grid.blocks.setdefault((int(single.group(1)), int(single.group(2)), int(single.group(3))), [])
            grid.last = index
            mark(index)
            continue
        warp = _WARP.match(line)
        if warp:
            grid = grids.setdefault(warp.group(5) or current or "0", _Grid("", index, index))
            block = (int(warp.group(6)), int(warp.group(7)), int(warp.group(8)))
            if warp.group(4) != "n/a":
                grid.blocks.setdefault(block, []).append(int(warp.group(4), 16))
            grid.last = index
            mark(index)
            continue
        sass = _SASS.match(line)
        if sass:
            address = int(sass.group(2), 16)
            code[address] = CodeLine(address, int(sass.group(4)) if sass.group(4) else None, sass.group(5).strip())
            if sass.group(1):
                pcs.append(address)
            mark(index)
            continue
        register = _REGISTER.match(line)
        if register and (code or grids):
            registers.setdefault(register.group(1), int(register.group(2), 16) & 0xFFFFFFFF)
            mark(index)
            continue
        device = _DEVICES.match(line)
        if device:
            num_sms = int(device.group(2))
            mark(index)
            continue
        frame = _FRAME.match(line)
        if frame:
            launch = _LAUNCH.search(line)
            if launch or (grids and ("inlined" in line or _WAIT_FRAME.search(line))):
                grid = grids.setdefault(current or "0", _Grid("", index, index))
                if launch:
                    grid.name = grid.name or launch.group(1)
                    grid.grid = grid.grid or (int(launch.group(2)), int(launch.group(3)), int(launch.group(4)))
                    grid.block = grid.block or (int(launch.group(5)), int(launch.group(6)), int(launch.group(7)))
                if frame.group(2) and frame.group(1) == "0":
                    pcs.append(int(frame.group(2), 16))
                grid.frames.append(frame.group(3)[:200])
                mark(index)
            continue
        found = _EXCEPTION.search(line)
        if found and not exception and "skip_" not in line:
            exception = next(group for group in found.groups() if group).strip()
            mark(index)
            continue
        if kernel_lines and ("<<<" in line or line.startswith("Kernel ") or _COUNTER.search(line)):
            mark(index)
            launch = _LAUNCH.search(line)
            if launch and current in grids and not grids[current].name:
                grids[current].name = launch.group(1)
    counter = _COUNTER.search(text)
    launch = _LAUNCH.search(text)
    if not grids and launch is not None:
        index, _ = section.cite_match(launch)
        grids["0"] = _Grid(
            launch.group(1), index, index, _dim(",".join(launch.group(2, 3, 4))), _dim(",".join(launch.group(5, 6, 7)))
        )
    if not grids and not exception and not (counter and code):
        return
    for printed in _PRINTED_REGISTER.finditer(text):
        name = printed.group(1) or printed.group(4)
        digits = printed.group(2)
        registers.setdefault(name, int(digits, 16) if digits else int(printed.group(3) or printed.group(5)))
    if counter:
        index, _ = section.cite_match(counter)
        mark(index)
    _emit(section, case, grids, code, looks, pcs, focus_block, exception, num_sms, max(first, 0), max(last, 0))


def _add_range(grid: _Grid, start: tuple[int, int, int], end: tuple[int, int, int], count: int) -> None:
    """A coalesced row: ``count`` consecutive blocks in x-fastest order from ``start`` to ``end``."""
    if start == end or count <= 1:
        grid.blocks.setdefault(start, [])
        return
    width, height = (grid.grid[0], grid.grid[1]) if grid.grid else (max(end[0] + 1, 1), max(end[1] + 1, 1))
    linear = start[0] + width * (start[1] + height * start[2])
    for step in range(min(count, 70_000)):
        at = linear + step
        grid.blocks.setdefault((at % width, at // width % height, at // (width * height)), [])


def _emit(
    section: Section, case: CaseFile, grids: dict[str, _Grid], code: dict[int, CodeLine],
    looks: dict[tuple[int, int, int] | None, dict[str, int]], pcs: list[int],
    focus_block: tuple[int, int, int] | None, exception: str, num_sms: int | None, first: int, last: int,
) -> None:  # fmt: skip
    text = section.text
    counter, target_text, group = _COUNTER.search(text), _TARGET.search(text), _GROUP_SIZE.search(text)
    kernels: list[DeviceKernel] = []
    focus_name = next(iter(grids)) if len(grids) == 1 else None
    for key, grid in grids.items():
        own_pcs = [pc for values in grid.blocks.values() for pc in values]
        focused = (
            focus_name == key or (focus_block is not None and focus_block in grid.blocks and len(grids) == 1) or len(grids) == 1
        )
        spots = [*pcs, *own_pcs] if focused else own_pcs
        loop = next((found for pc in spots if (found := find_loop(code, pc)) is not None), None)
        polls: list[Poll] = []
        if loop is not None and (focused or any(loop.holds(pc) for pc in own_pcs)):
            for block, registers in _looked_at(looks, focus_block, grid, loop):
                value, target = loop.values(registers)
                if value is None and counter:
                    value = int(counter.group(2), 0)
                if target is None and target_text:
                    target = int(target_text.group(1))
                polls.append(
                    Poll(
                        block, value, target, loop.comparison, None, loop.pc_offset, loop.instructions, loop.scope,
                        "registers" if value is not None else "code",
                    )
                )  # fmt: skip
        elif focused and counter:
            value = int(counter.group(2), 0)
            target = int(target_text.group(1)) if target_text else _lone_register(looks.get(focus_block) or looks[None], value)
            polls.append(Poll(focus_block or next(iter(grid.blocks), None), value, target, ">=", source="printed"))
        blocks = None
        if grid.block_table or grid.blocks:
            blocks = tuple(
                ResidentBlock(
                    index,
                    _block_meaning(code, values, loop is not None, grid.frames, pcs if focused else []),
                    tuple(sorted(set(values))[:16]),
                )
                for index, values in sorted(grid.blocks.items(), key=lambda item: item[0][::-1])
            )
        elif focus_block is not None and focused:
            blocks = None
        kernels.append(
            DeviceKernel(
                grid.name, section.ref(grid.first, max(grid.last, grid.first)), grid.grid, grid.block, grid.device, grid.grid_id,
                    blocks,
                tuple(polls), family_of(grid.name), int(group.group(1)) if group else None, tuple(grid.frames[:16]), grid.sms,
            )
        )  # fmt: skip
    case.devices.append(
        DeviceFacts(
            section.ref(first, last), "reported", section.hints.pid, section.hints.rank, tuple(kernels) if kernels else None,
                exception,
            num_sms, sum(1 for d in case.devices if d.pid == section.hints.pid and d.rank == section.hints.rank),
                section.hints.repeat, slots=_slots(text, num_sms),
        )
    )  # fmt: skip


def _looked_at(
    looks: dict[tuple[int, int, int] | None, dict[str, int]], focus_block: tuple[int, int, int] | None, grid: _Grid, loop: PollLoop
) -> list[tuple[tuple[int, int, int] | None, dict[str, int]]]:
    """Each block that stands in the loop and whose registers were printed; without any, the block in focus and what is there."""
    placed: list[tuple[tuple[int, int, int] | None, dict[str, int]]] = [
        (block, registers)
        for block, registers in looks.items()
        if block is not None and registers and (not (pcs := grid.blocks.get(block)) or any(loop.holds(pc) for pc in pcs))
    ]
    return placed or [(focus_block or next(iter(grid.blocks), None), looks[None])]


def _slots(text: str, num_sms: int | None) -> int | None:
    """SMs x occupancy, where a launcher's note in the text states both."""
    occupancy, sms = _OCCUPANCY.search(text), _SMS.search(text)
    count = num_sms or (int(next(group for group in sms.groups() if group)) if sms else None)
    return count * int(occupancy.group(1)) if count and occupancy and 0 < int(occupancy.group(1)) <= 32 else None


def _lone_register(registers: dict[str, int], value: int) -> int | None:
    """Where somebody printed one register beside the counter, it is the target; two or more are ambiguous."""
    plausible = [number for name, number in registers.items() if name.startswith("R") and value < number <= 1 << 20]
    return plausible[0] if len(registers) == 1 and len(plausible) == 1 else None


def _block_meaning(code: dict[int, CodeLine], pcs: list[int], loop_found: bool, frames: list[str], focus_pcs: list[int]) -> str:
    words = {meaning_at(code, pc) for pc in pcs or focus_pcs}
    for word in ("global-poll", "system-poll", "phase-wait", "cluster-wait"):
        if word in words:
            return word
    if loop_found and (not pcs or set(pcs) & set(focus_pcs)):
        return "global-poll"
    if any(_WAIT_FRAME.search(frame) for frame in frames):
        return "global-poll"
    if words == {"named-barrier"}:
        return "named-barrier"
    return "other" if words - {"unknown"} else "unknown"
