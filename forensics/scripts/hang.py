"""Source this in cuda-gdb (``source hang.py``): prints what a barrier autopsy needs from the live process or core dump in focus.

For each kernel: its blocks and their number; for up to 16 blocks: warps, the code around the PC of thread 0 (the thread that
polls), registers, uniform registers and predicates; the polled word, where its address can be told from the registers, and every
word in ``addresses``. Of the other blocks, for a few seconds: where thread 0 stands, and the registers of the loop that the first
ones poll in. Output is cuda-gdb's own text under its prompt, so that any reader of transcripts reads it. Each command may fail
without the others. Runs on Python 3.8 or later; changes nothing in the target.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import threading
import time
from typing import Any

#: cuda-gdb's own module; there is none outside of it.
gdb: Any = importlib.import_module("gdb")

SETTINGS: dict[str, Any] = json.loads(os.environ.get("DSV4_REPRO_GDB", "{}"))
STARTED = time.monotonic()
DEADLINE = STARTED + float(SETTINGS["deadline_s"]) if "deadline_s" in SETTINGS else None
#: Parameters in constant bank 0 by architecture (read from release cubins).
PARAM_BASES = {"sm_7": 0x160, "sm_8": 0x160, "sm_9": 0x210, "sm_10": 0x380, "sm_11": 0x380, "sm_12": 0x380}
MOST_KERNELS = 8
BEFORE, AFTER = 24, 24
#: Blocks that are read in brief after those read in full, and the seconds that all kernels together may take for it.
MOST_BRIEF, BRIEF_S = 4096, 4.0
MOST_NAMES = 24
INSTRUCTION = re.compile(r"^(?:=>)?\s*(0x[0-9a-f]+)\s+(?:<[^>]*>)?:\s*(.*)$")
LOAD = re.compile(
    r"\bLDG?\.[A-Z0-9.]*STRONG[A-Z0-9.]*\s+R(\d+),\s*(?:desc\[UR\d+\])?\[R(\d+)(?:\.64)?(?:\.U32)?(?:\+UR(\d+))?(?:\+(-?0x[0-9a-f]+))?\]"
)
BRANCH = re.compile(r"\bBRA(?:\.[A-Z.]+)?\s+(?:U?P\d+,\s*)?(0x[0-9a-f]+)")
MOVE = re.compile(r"^(?:@!?U?P\d+\s+)?(?:MOV|IMAD\.MOV(?:\.U32)?|IMAD\.U32)\s+R(\d+),\s*(?:RZ,\s*RZ,\s*)?(U?R(?:\d+|Z))\b")


class OutOfTimeError(Exception):
    """The deadline is over; what was printed stays."""


def say(text: str) -> None:
    print(text, flush=True)


_stages: list[str] = []


def stage(name: str) -> None:
    _stages.append(name)
    say(f"dsv4-repro: stage {name} {time.monotonic() - STARTED:.3f}")


def keep_time() -> None:
    """Start the thread that interrupts, as Ctrl-C does, the command that is running when the deadline comes.

    Only now, and with every signal blocked in it: a thread of the debugger's Python that takes the debugger's own signals (SIGCHLD)
    breaks an attach (seen with cuda-gdb 13.0: attach and detach never returned, and the target stayed stopped).
    """
    if DEADLINE is None:
        return
    end: float = DEADLINE

    def watch() -> None:
        while _stages[-1:] != ["done"]:
            time.sleep(0.1)
            if time.monotonic() >= end and _stages[-1:] == ["reading"]:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(2.0)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        threading.Thread(target=watch, daemon=True).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(command: str, show: bool = True) -> str | None:
    """Run one command and print it with its output; its text, or None if it failed."""
    if DEADLINE is not None and time.monotonic() >= DEADLINE:
        raise OutOfTimeError(command)
    try:
        text = str(gdb.execute(command, to_string=True))
    except gdb.error as error:
        say(f"(cuda-gdb) {command}\ndsv4-repro: failed: {error}")
        return None
    if show:
        say(f"(cuda-gdb) {command}\n{text.rstrip()}")
    return text


def kernels() -> list[int]:
    """Kernel numbers that cuda-gdb lists."""
    text = run("info cuda kernels") or ""
    found = [int(match.group(1)) for match in re.finditer(r"^\*?\s*(\d+)\s+\S+\s+\d+\s+\d+\s+\w+", text, re.MULTILINE)]
    if not found:
        say("dsv4-repro: no kernels")
    return found


def blocks(kernel: int) -> list[tuple[int, ...]]:
    """Resident blocks of a kernel, as cuda-gdb lists them."""
    text = run(f"info cuda blocks kernel {kernel}") or run("info cuda blocks") or ""
    found = []
    for line in text.splitlines():
        match = re.match(r"^\*?\s*\((\d+),(\d+),(\d+)\)", line)
        if match:
            found.append(tuple(int(part) for part in match.groups()))
    return found


def register(name: str) -> int | None:
    """A register of the thread in focus, None if it cannot be read."""
    if name in ("RZ", "URZ"):
        return 0
    try:
        return int(gdb.parse_and_eval(f"${name}")) & 0xFFFFFFFF
    except (gdb.error, ValueError):
        return None


def instructions(code: str) -> list[tuple[int, str]]:
    """Address and text of each instruction of a listing."""
    matches = (INSTRUCTION.match(line) for line in code.splitlines())
    return [(int(match.group(1), 16), match.group(2)) for match in matches if match]


def loop_registers(code: str) -> list[str]:
    """Names of the registers in the loops around strong loads of the window: what a wait there is told from."""
    lines = instructions(code)
    found: list[str] = []
    for at, text in lines:
        if not LOAD.search(text):
            continue
        ends = [
            (int(match.group(1), 16), where) for where, word in lines for match in [BRANCH.search(word)] if match and where >= at
        ]
        first, last = next(((to, where) for to, where in ends if to <= at), (at, at + 8 * 16))
        for where, word in lines:
            if first <= where <= last:
                found += [name for name in re.findall(r"\bU?R\d+\b", word) if name not in found]
        wide = [f"{name.rstrip('0123456789')}{int(name.lstrip('UR')) + 1}" for name in found]
        found += [name for name in wide if name not in found]  # the upper half of a pair is not written out
    return found[:MOST_NAMES]


def polled_address(code: str) -> tuple[int | None, str]:
    """The address of the polled word: a strong load's base register pair, followed back through plain moves in the window.

    Returns (address, how) or (None, why). Only moves are followed; anything else that writes the base makes the answer "not known".
    """
    lines = instructions(code)
    loads = [(at, match) for at, text in lines for match in [LOAD.search(text)] if match]
    if not loads:
        return None, "no strong load in the window"
    try:
        pc = int(gdb.parse_and_eval("$pc"))
    except (gdb.error, ValueError):
        pc = loads[-1][0]
    at, match = min(loads, key=lambda load: abs(load[0] - pc))
    target, base = int(match.group(1)), int(match.group(2))
    offset = int(match.group(4) or "0", 16)
    words = []
    for wanted in (base, base + 1):
        source = f"R{wanted}"
        for where, text in reversed(lines):
            # Only a base that the load itself overwrites is followed back: any other still holds what the load used, while
            # what it was copied from before the loop may have changed since.
            if where >= at or wanted != target:
                continue
            move = MOVE.match(text.strip())
            if move and int(move.group(1)) == wanted:
                source = move.group(2)
                break
            if re.match(rf"^(?:@!?U?P\d+\s+)?[A-Z0-9.]+\s+R{wanted}\b", text.strip()):
                break
        if source == f"R{target}":
            return None, f"the load at {at:#x} overwrites its own base"
        value = register(source)
        if value is None:
            return None, f"{source} cannot be read"
        words.append((source, value))
    address = (words[0][1] | words[1][1] << 32) + offset
    if match.group(3):
        low, high = register(f"UR{match.group(3)}"), register(f"UR{int(match.group(3)) + 1}")
        if low is None or high is None:
            return None, f"UR{match.group(3)} cannot be read"
        address += low | high << 32
    return address & (1 << 64) - 1, f"{words[1][0]}:{words[0][0]} + {offset:#x}, load at {at:#x}"


def focus(kernel: int, block: tuple[int, ...]) -> bool:
    """Thread 0 of a block: the one that polls. False if cuda-gdb refuses."""
    x, y, z = block
    return run(f"cuda kernel {kernel} block ({x},{y},{z}) thread (0,0,0)") is not None


def read_block(kernel: int, block: tuple[int, ...], seen: set[int]) -> list[str]:
    """Warps, code, registers and the polled word of one block; the registers that its wait is told from."""
    if not focus(kernel, block):
        return []
    run("info cuda warps")
    code = None
    for before in (BEFORE, 4, 0):
        code = run(f"x/{before + AFTER}i $pc-{16 * before}")
        if code is not None:
            break
    shown = run("info registers")
    address, how = polled_address(code or "")
    if address is None:
        say(f"dsv4-repro: polled word not known: {how}")
    elif address not in seen:
        seen.add(address)
        say(f"dsv4-repro: polled word at {address:#x} ({how})")
        word(address)
    # A name that the target does not have would fail the whole of a later command.
    return [name for name in loop_registers(code or "") if shown is not None and re.search(rf"^{name}\s", shown, re.MULTILINE)]


def read_brief(kernel: int, blocks_left: list[tuple[int, ...]], names: list[str], until: float) -> None:
    """Where thread 0 of each block stands (the line of the focus says so) and the named registers."""
    wanted = " ".join(f"${name}" for name in names)
    for number, block in enumerate(blocks_left[:MOST_BRIEF]):
        if time.monotonic() >= until:
            say(f"dsv4-repro: the time for brief reading is over: {len(blocks_left) - number} blocks of kernel {kernel} not read")
            return
        if focus(kernel, block) and wanted:
            run(f"info registers {wanted}")


def word(address: int) -> None:
    """One word of global memory: as an int, and as an examine line with its address."""
    run(f"print *(@global int*){address:#x}")


def parameters() -> None:
    """The kernel's parameters from constant bank 0, where the architecture's base is known."""
    base = SETTINGS.get("params_base")
    if base is None:
        text = run("info cuda devices", show=False) or ""
        match = re.search(r"\b(sm_\d+)\d\b", text)
        base = PARAM_BASES.get(match.group(1)) if match else None
    if base is not None:
        run(f"x/14xw $_cuda_const_bank(0,{base:#x})")


def read_all() -> None:
    for quiet in ("set pagination off", "set width 0", "set height 0", "set confirm off", "set cuda coalescing off"):
        try:
            gdb.execute(quiet, to_string=True)
        except gdb.error as error:
            say(f"dsv4-repro: failed: {quiet}: {error}")
    run("info cuda devices")
    seen: set[int] = set()
    most = int(SETTINGS.get("blocks", 16))
    waiting: list[tuple[int, list[tuple[int, ...]], list[str]]] = []
    for kernel in kernels()[:MOST_KERNELS]:
        resident = blocks(kernel)
        if resident:
            say(f"dsv4-repro: kernel {kernel}: {len(resident)} blocks resident, {min(most, len(resident))} of them read in full")
        names: list[str] = []
        for number, block in enumerate(resident[:most]):
            names += [name for name in read_block(kernel, block, seen) if name not in names]
            if number == 0:
                parameters()
        waiting.append((kernel, resident[most:], names[:MOST_NAMES]))
    for address in SETTINGS.get("addresses", ()):
        if int(address) not in seen:
            say(f"dsv4-repro: word at {int(address):#x}")
            word(int(address))
    until = time.monotonic() + float(SETTINGS.get("brief_s", BRIEF_S))
    if DEADLINE is not None:
        until = min(until, DEADLINE - 2.0)
    for kernel, rest, names in waiting:
        # Only where the first ones poll is there a wait that the others may share.
        if rest and names:
            read_brief(kernel, rest, names, until)
    for address, value in SETTINGS.get("write", ()):
        # Only on request: releases a wait by satisfying it. Results of that row are worthless.
        run(f"set var *(@global int*){int(address):#x} = {int(value)}")
        word(int(address))


def main() -> None:
    stage("reading")
    keep_time()
    try:
        read_all()
    except (OutOfTimeError, KeyboardInterrupt) as error:
        say(f"dsv4-repro: out of time: {error!r}")
    stage("detaching")
    if SETTINGS.get("detach"):
        try:
            gdb.execute("detach")
        except gdb.error as error:
            say(f"dsv4-repro: failed: detach: {error}")
    stage("done")


if not SETTINGS.get("library"):  # release.py takes the functions alone
    main()
