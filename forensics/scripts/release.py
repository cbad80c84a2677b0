"""Started inside cuda-gdb that has attached to a wedged process: reads, asks its starter, releases again and again, detaches.

    cuda-gdb -q -iex "set auto-solib-add off" -iex "set mi-async on" -p PID -x release.py      (standard input held open, no -batch)

1. What ``hang.py`` reads is printed, and nothing is written before the starter has judged it and answers with a file ``go`` (JSON:
   ``kernel`` base name, ``addresses`` that may be written, ``expected``, ``value``, ``group_size``, ``most``, ``pause_s``).
2. At each stop: for each resident block of that kernel, the polled word's address is found again from its registers; it must be one
   of ``addresses``, no other block of its group may be resident (a launch that is at work passes the same state: one arrival, the
   peer on its way), and the word, read again, must still hold ``expected``. Then, and only then, it is written.
3. The process goes on for ``pause_s`` and is stopped again: the next launch with the same batch has come to its own wait. (A
   blocking ``continue`` ended by a signal never comes back with cuda-gdb 13.0; ``continue &`` with the event loop does.)
4. Nothing that fits was found for ``patience_s`` (0: at one stop; more where other ranks are released beside this one), ``most``
   is reached, the time is over, or the starter writes a file ``stop``: detach, quit.

Every decision is a line ``dsv4-repro: release {json}``. The starter's death changes nothing: this ends by itself.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

#: hang.py's functions, in a namespace of their own (cuda-gdb gives no package to import from).
HANG: dict[str, Any] = {"__name__": "dsv4_repro_hang"}
_settings = json.loads(os.environ.get("DSV4_REPRO_GDB", "{}"))
_place = Path(_settings.get("scripts") or Path(__file__).resolve().parent) / "hang.py"
exec(compile(_place.read_text(encoding="utf-8"), str(_place), "exec"), HANG)

gdb: Any = HANG["gdb"]
SETTINGS: dict[str, Any] = HANG["SETTINGS"]
FOLDER = Path(SETTINGS["folder"])
END = time.monotonic() + float(SETTINGS.get("total_s", 60.0))
GO_S = float(SETTINGS.get("go_s", 20.0))
#: After an interrupt was asked for, a stop comes within so long, or never.
STOP_S = float(SETTINGS.get("stop_s", 10.0))

state: dict[str, Any] = {"phase": "reading", "writes": 0, "stops": 0, "asked_at": 0.0, "why": ""}


def tell(event: str, **more: Any) -> None:
    """One line for the starter."""
    seconds = round(time.monotonic() - HANG["STARTED"], 3)
    HANG["say"]("dsv4-repro: release " + json.dumps({"event": event, "s": seconds, **more}))


def quietly(command: str) -> str | None:
    """A command's output, not printed; None if it failed."""
    try:
        return str(gdb.execute(command, to_string=True))
    except gdb.error as error:
        tell("failed", command=command[:80], why=str(error)[:200])
        return None


def base_name(line: str) -> str:
    """The kernel's own name in a line of ``info cuda kernels``: what comes before template and parameters, without namespaces."""
    text = re.sub(r"^\*?\s*\d+\s+\S+\s+\d+\s+\d+\s+\w+\s+\S+\s+\([\d,]+\)\s+\([\d,]+\)\s*", "", line)
    head = re.split(r"[<(]", text, maxsplit=1)[0].strip()
    return head.split("::")[-1].split(" ")[-1]


def kernels_named(name: str) -> list[int]:
    """Numbers of the resident kernels of this name."""
    found = []
    for line in (quietly("info cuda kernels") or "").splitlines():
        number = re.match(r"^\*?\s*(\d+)\s+\S+\s+\d+\s+\d+\s+\w+", line)
        if number and base_name(line) == name:
            found.append(int(number.group(1)))
    return found


def word(address: int) -> int | None:
    """An int32 of global memory, None if it cannot be read."""
    match = re.search(r"=\s*(-?\d+)\s*$", quietly(f"print *(@global int*){address:#x}") or "")
    return int(match.group(1)) if match else None


def not_alone(block: tuple[int, ...], resident: list[tuple[int, ...]], size: int) -> str:
    """Why a block is not the leader that its whole group has left, or nothing."""
    x, y, z = block
    if x % size:
        return f"block {x} is not the leader of its group"
    peers = [one[0] for one in resident if one[1:] == (y, z) and one[0] // size == x // size and one[0] != x]
    return f"block {peers[0]} of block {x}'s group is still there: it may arrive" if peers else ""


def waits(go: dict[str, Any]) -> tuple[list[int], str]:
    """Addresses that are waited on and may be written, or none and why."""
    numbers = kernels_named(str(go["kernel"]))
    if not numbers:
        return [], f"no {go['kernel']} is resident"
    found: list[int] = []
    why: list[str] = []
    for kernel in numbers[:4]:
        resident = HANG["blocks"](kernel)
        for block in resident[:16]:
            x, y, z = block
            if quietly(f"cuda kernel {kernel} block ({x},{y},{z}) thread (0,0,0)") is None:
                continue
            code = quietly("x/48i $pc-384") or quietly("x/24i $pc")
            address, how = HANG["polled_address"](code or "")
            if address is None:
                why.append(f"block {x}: {how}")
            elif address not in go["addresses"]:
                why.append(f"block {x} polls {address:#x}, which is none of the words that were judged")
            elif there := not_alone(block, resident, int(go["group_size"])):
                why.append(there)
            elif (value := word(address)) != go["expected"]:
                why.append(f"block {x}: the word at {address:#x} is {value}, not {go['expected']}")
            elif address not in found:
                found.append(address)
    return found, "; ".join(why[:4]) or "no block waits"


def release(go: dict[str, Any]) -> bool:
    """Write what waits; whether anything was written."""
    state["stops"] += 1
    addresses, why = waits(go)
    written = 0
    for address in addresses:
        if state["writes"] >= int(go["most"]):
            why = f"{go['most']} writes are done"
            break
        if word(address) != go["expected"]:
            why = f"the word at {address:#x} changed between reading and writing"
            continue
        if quietly(f"set var *(@global int*){address:#x} = {int(go['value'])}") is None:
            why = f"the word at {address:#x} could not be written"
            continue
        state["writes"] += 1
        written += 1
        tell("wrote", address=hex(address), now=word(address), writes=state["writes"])
    if not written:
        state["why"] = why
        tell("nothing", why=why)
    return written > 0


def stopped_by(name: str) -> bool:
    return (FOLDER / name).exists()


def finish(why: str) -> None:
    """Detach and quit; what is written stays."""
    if state["phase"] == "done":
        return
    state["phase"] = "done"
    tell("end", why=why, writes=state["writes"], stops=state["stops"])
    HANG["stage"]("detaching")
    try:
        gdb.execute("detach")
    except BaseException as error:
        # Whatever it is: the end of the debugger lets go of the process, too.
        tell("failed", command="detach", why=f"{type(error).__name__}: {error}"[:200])
    HANG["stage"]("done")
    gdb.post_event(lambda: gdb.execute("quit"))


def go_on() -> None:
    """Let the process run; the timer stops it again."""
    state["phase"] = "running"
    state["until"] = time.monotonic() + float(state["go"].get("pause_s", 0.2))
    try:
        gdb.execute("continue &")
    except gdb.error as error:
        state["phase"] = "stopped"
        finish(f"continue failed: {error}")


def on_stop(_event: Any) -> None:
    """The process has stopped, by the interrupt or by a signal of its own; the work is done outside of this handler."""
    if state["phase"] in ("running", "interrupting"):
        state["phase"] = "stopped"
        gdb.post_event(safely(at_stop))


def safely(work: Any) -> Any:
    """``work``, after whose failure, whatever it is, the process is let go: it must not stay frozen under a debugger that waits."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            tell("failed", command=work.__name__, why=f"{type(error).__name__}: {error}"[:200])
            finish(f"a fault of the release itself: {type(error).__name__}")

    return run


def at_stop() -> None:
    if time.monotonic() >= END:
        finish("out of time")
    elif stopped_by("stop"):
        finish("asked to stop")
    elif state["writes"] >= int(state["go"]["most"]):
        finish(f"{state['go']['most']} writes are done")
    else:
        next_or_end()


def next_or_end() -> None:
    """Release what waits and let the process go on, or end."""
    now = time.monotonic()
    if release(state["go"]):
        state["wrote_at"] = now
    elif now - float(state.get("wrote_at", -1e9)) >= float(state["go"].get("patience_s", 0.0)):
        finish(state["why"])
        return
    gdb.post_event(safely(go_on))


def interrupt() -> None:
    if state["phase"] != "interrupting":
        return
    try:
        gdb.execute("interrupt")
    except gdb.error as error:
        tell("failed", command="interrupt", why=str(error)[:200])


def keep_time() -> None:
    """The timer's thread, with every signal blocked: one that takes the debugger's own signals breaks it (cuda-gdb 13.0)."""

    def watch() -> None:
        while state["phase"] != "done":
            time.sleep(0.02)
            now = time.monotonic()
            if state["phase"] == "running" and now >= state["until"]:
                state["phase"], state["asked_at"] = "interrupting", now
                gdb.post_event(safely(interrupt))
            elif state["phase"] == "interrupting" and now - state["asked_at"] > STOP_S:
                state["phase"] = "lost"
                tell("lost", why=f"no stop within {STOP_S:g} s of the interrupt; the process runs under the debugger")
                return

    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        threading.Thread(target=watch, daemon=True).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def checked(document: dict[str, Any]) -> dict[str, Any]:
    """What the starter permits, whole and in range; ValueError, KeyError or TypeError otherwise: then nothing is permitted."""
    numbers = {name: document[name] for name in ("expected", "value", "most", "group_size")}
    addresses = document["addresses"]
    if any(type(one) is not int for one in (*numbers.values(), *addresses)):
        raise TypeError("a number of the permission is none")
    if not (isinstance(document["kernel"], str) and document["kernel"]) or numbers["group_size"] < 2 or not addresses:
        raise ValueError("the permission names no kernel, no address or no group")
    times = {name: float(document.get(name, default)) for name, default in (("pause_s", 0.2), ("patience_s", 0.0))}
    if not all(0.0 <= one <= 60.0 for one in times.values()):
        raise ValueError("a time of the permission is out of range")
    return {**document, **times, "addresses": set(addresses)}


def permission() -> dict[str, Any] | None:
    """What may be written, from the starter; None: it says no, or nothing in time. The process is frozen meanwhile."""
    end = min(time.monotonic() + GO_S, END)
    while time.monotonic() < end and not stopped_by("stop"):
        if stopped_by("go"):
            try:
                return checked(json.loads((FOLDER / "go").read_text(encoding="utf-8")))
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                tell("failed", command="go", why=str(error)[:200])
                return None
        time.sleep(0.01)
    return None


def begin() -> None:
    HANG["stage"]("reading")
    try:
        HANG["read_all"]()
    except (HANG["OutOfTimeError"], KeyboardInterrupt) as error:
        HANG["say"](f"dsv4-repro: out of time: {error!r}")
    tell("read")
    go = permission()
    if go is None:
        finish("not permitted")
        return
    state["go"] = go
    gdb.events.stop.connect(on_stop)
    state["phase"] = "stopped"
    # The deadline of the reading is over with it.
    HANG["DEADLINE"] = None
    keep_time()
    next_or_end()


safely(begin)()
