"""Host stacks: py-spy (text, ``--json``, ``--native``, ``--locals``), pystack, gdb, faulthandler.

A dump says what each thread stood at, at one moment. Dumps of the same process are numbered in reading order, so that "two
samples" can be compared; a heading that claims "taken twice, identical" is kept as a claim.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from .casefile import CaseFile
from .facts import Frame, ThreadSample
from .refs import Ref, Section
from .stack_meaning import meaning_of

__all__ = ["read_stacks", "role_of"]

_PROCESS = re.compile(r"^\s*Process (\d+): (.*)$")
_SPY_THREAD = re.compile(
    r"^\s*Thread (0x[0-9A-Fa-f]+|\d+)(?: \((idle|active|active\+gil|gil|idle\+gil)\))?(?:: \"([^\"\n]*)\")?\s*$"
)
_SPY_FRAME = re.compile(r"^\s{2,}(\S.*?) \(([^()\n]+?)(?::(\d+))?\)\s*$")
_SPY_LOCAL = re.compile(r"^\s{8,}(?:Arguments:|Locals:|\w+: .*)$")
_PYSTACK_THREAD = re.compile(r"^Traceback for thread (\d+)(?: \(([^)]*)\))?(?: \[([^\]]*)\])? \(most recent call last\):")
_PYSTACK_FRAME = re.compile(r"^\s+\((Python|C)\) File \"([^\"]*)\", line (\d+|\?\?), in (.*?)(?: \(([^)]*)\))?\s*$")
_GDB_THREAD = re.compile(r"^Thread (\d+) \((?:Thread 0x[0-9a-f]+ )?\(?LWP (\d+)\)?(?: \"([^\"]*)\")?\)?")
_GDB_FRAME = re.compile(r"^#(\d+)\s+(?:0x[0-9a-f]+ in )?(.+?) ?\((.*?)\)(?: from (\S+)| at (\S+?)(?::(\d+))?)?\s*$")
_FAULT_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[([^\]]*)\])? \(most recent call first\):")
_FAULT_FRAME = re.compile(r"^\s+File \"([^\"]*)\", line (\d+) in (\S+)")
_ROLE_ENGINE = re.compile(r"EngineCore|engine_core", re.IGNORECASE)
_ROLE_WORKER = re.compile(r"Worker", re.IGNORECASE)
_ROLE_API = re.compile(r"APIServer|api_server|vllm serve|entrypoints", re.IGNORECASE)
_NAME_RANK = re.compile(r"(?:TP|Worker[-_]|rank[ =_]?)(\d+)", re.IGNORECASE)
_MAX_FRAMES = 400

_Role = Literal["engine", "worker", "api"] | None


def _bare_name(name: str, native: bool) -> str:
    """``execute_model`` of ``GPUModelRunner.execute_model`` and of ``Hooks._step.<locals>.execute_model``: from Python 3.11 on
    py-spy writes qualified names, and everything that looks at frames knows functions by their own names."""
    if native or "." not in name:
        return name
    return name.rpartition(".")[2] or name


def role_of(name: str, frames: tuple[Frame, ...]) -> _Role:
    """The process's role from its title, else from the frames of a main loop."""
    if _ROLE_ENGINE.search(name):
        return "engine"
    if _ROLE_WORKER.search(name):
        return "worker"
    if _ROLE_API.search(name):
        return "api"
    functions = {frame.function for frame in frames}
    files = " ".join(frame.file for frame in frames[-12:])
    if functions & {"worker_busy_loop", "worker_main", "async_output_busy_loop"}:
        return "worker"
    if functions & {"run_busy_loop", "step_with_batch_queue", "run_engine_core"} or "v1/engine/core.py" in files:
        return "engine"
    if "api_server" in files:
        return "api"
    return None


class _Builder:
    """Collects the threads of one section; ``samples`` counts dumps of the same process over the case."""

    def __init__(self, section: Section, case: CaseFile) -> None:
        self.section = section
        self.case = case
        self.pid: int | None = section.hints.pid
        self.title = ""
        self.tool = ""
        self.threads: list[ThreadSample] = []

    def add(
        self, tool: str, ref: Ref, index: int, frames: list[Frame], *,
        tid: str = "", thread: str = "", active: bool | None = None, gil: bool | None = None,
    ) -> None:  # fmt: skip
        if not frames:
            return
        kept = tuple(frames[:_MAX_FRAMES])
        word, inside = meaning_of(kept)
        hints = self.section.hints
        rank = None
        match = _NAME_RANK.search(self.title)
        if match:
            rank = int(match.group(1))
        elif hints.rank is not None:
            rank = hints.rank
        role = role_of(self.title, kept) or hints.role
        pid = self.pid
        key = (pid, rank if pid is None else None, role if pid is None else None, thread or tid, tid if thread else "")
        seen = self.case.stack_counts
        seen[key] += 1
        self.case.threads.append(
            ThreadSample(
                tool, ref, kept, thread, tid, pid, self.title, role, rank, active, gil, word, inside,
                seen[key] - 1, hints.repeat, hints.samples, (self.section.order, index),
            )
        )  # fmt: skip


def read_stacks(section: Section, case: CaseFile) -> None:
    text = section.text
    if "Thread " in text and ("(idle" in text or "(active" in text or "(gil" in text or _SPY_THREAD.search(text)):
        _read_spy(section, case)
    if "most recent call last):" in text and "Traceback for thread" in text:
        _read_pystack(section, case)
    if "(LWP" in text or "#0 " in text:
        _read_gdb(section, case)
    if "most recent call first):" in text:
        _read_faulthandler(section, case)
    if '"frames"' in text and '"thread_id"' in text:
        _read_json(section, case)


def _read_spy(section: Section, case: CaseFile) -> None:
    builder = _Builder(section, case)
    lines = section.lines
    index = 0
    while index < len(lines):
        line = lines[index]
        process = _PROCESS.match(line)
        if process:
            builder.pid, builder.title = int(process.group(1)), process.group(2).strip()[:200]
            section.claim(index)
        elif line.startswith(("Python v", "Parent Process ")):
            section.claim(index)
        else:
            thread = _SPY_THREAD.match(line)
            if thread:
                start = index
                frames: list[Frame] = []
                while index + 1 < len(lines):
                    following = lines[index + 1]
                    frame = _SPY_FRAME.match(following)
                    if frame and not _SPY_THREAD.match(following):
                        file = frame.group(2)
                        native = not file.endswith((".py", ".pyx")) and not file.startswith("<")
                        frames.append(
                            Frame(
                                _bare_name(frame.group(1)[:300], native),
                                file[:300],
                                int(frame.group(3)) if frame.group(3) else None,
                                native,
                            )
                        )
                    elif not (frames and _SPY_LOCAL.match(following)):
                        break
                    index += 1
                section.claim(start, index)
                state = thread.group(2) or ""
                builder.add(
                    "py-spy", section.ref(start, index), start, frames,
                    tid=thread.group(1), thread=thread.group(3) or "",
                    active=("active" in state) if state else None, gil=("gil" in state) if state else None,
                )  # fmt: skip
        index += 1


def _read_pystack(section: Section, case: CaseFile) -> None:
    builder = _Builder(section, case)
    lines = section.lines
    for index, line in enumerate(lines):
        head = _PYSTACK_THREAD.match(line)
        if not head:
            continue
        frames: list[Frame] = []
        last = index
        for position in range(index + 1, len(lines)):
            frame = _PYSTACK_FRAME.match(lines[position])
            if frame:
                number = frame.group(3)
                frames.append(
                    Frame(
                        frame.group(4)[:300], frame.group(2)[:300], int(number) if number.isdigit() else None, frame.group(1) == "C"
                    )
                )
                last = position
            elif lines[position].startswith(" ") or not lines[position].strip():
                if lines[position].strip():
                    last = position
            else:
                break
        section.claim(index, last)
        name = head.group(2) or ""
        if name.startswith("VLLM"):
            builder.title = name
        notes = head.group(3) or ""
        builder.add(
            "pystack", section.ref(index, last), index, frames[::-1], tid=head.group(1), thread=name, gil="Has the GIL" in notes
        )


def _read_gdb(section: Section, case: CaseFile) -> None:
    builder = _Builder(section, case)
    lines = section.lines
    tid, name, start, last = "", "", 0, 0
    frames: list[Frame] = []

    def flush() -> None:
        if frames:
            section.claim(start, last)
            builder.add("gdb", section.ref(start, last), start, list(frames), tid=tid, thread=name)
            frames.clear()

    for index, line in enumerate(lines):
        head = _GDB_THREAD.match(line)
        if head:
            flush()
            tid, name, start = head.group(2), head.group(3) or "", index
            continue
        frame = _GDB_FRAME.match(line) if line.startswith("#") and len(line) < 2_000 and "<<<" not in line else None
        if frame is None:
            if not line.strip():
                flush()
            continue
        if frame.group(1) == "0" and (frames or not tid):
            flush()
            start = index
        file = frame.group(4) or frame.group(5) or ""
        frames.append(
            Frame(frame.group(2)[:300], file[:300], int(frame.group(6)) if frame.group(6) else None, not file.endswith(".py"))
        )
        last = index
    flush()


def _read_faulthandler(section: Section, case: CaseFile) -> None:
    builder = _Builder(section, case)
    lines = section.lines
    for index, line in enumerate(lines):
        head = _FAULT_THREAD.match(line)
        if not head:
            continue
        frames: list[Frame] = []
        last = index
        for position in range(index + 1, len(lines)):
            frame = _FAULT_FRAME.match(lines[position])
            if frame is None:
                break
            frames.append(Frame(frame.group(3)[:300], frame.group(1)[:300], int(frame.group(2))))
            last = position
        section.claim(index, last)
        builder.add("faulthandler", section.ref(index, last), index, frames, tid=head.group(1), thread=head.group(2) or "")


def _read_json(section: Section, case: CaseFile) -> None:
    try:
        document = json.loads(section.text)
    except (ValueError, RecursionError):
        return
    if not isinstance(document, list):
        return
    builder = _Builder(section, case)
    for item in document:
        if not isinstance(item, dict) or not isinstance(item.get("frames"), list):
            continue
        if isinstance(item.get("pid"), int):
            builder.pid = item["pid"]
        info = item.get("process_info")
        if isinstance(info, dict) and isinstance(info.get("command_line"), str):
            builder.title = info["command_line"][:200]
        frames = [
            Frame(
                _bare_name(str(f.get("name", ""))[:300], not str(f.get("filename", "")).endswith((".py", ".pyx"))),
                str(f.get("short_filename") or f.get("filename") or f.get("module") or "")[:300],
                f.get("line") if isinstance(f.get("line"), int) and f.get("line") else None,
                not str(f.get("filename", "")).endswith((".py", ".pyx")),
            )
            for f in item["frames"]
            if isinstance(f, dict)
        ]
        builder.add(
            "py-spy", section.whole(), 0, frames,
            tid=str(item.get("os_thread_id") or item.get("thread_id") or ""), thread=str(item.get("thread_name") or ""),
            active=item.get("active") if isinstance(item.get("active"), bool) else None,
            gil=item.get("owns_gil") if isinstance(item.get("owns_gil"), bool) else None,
        )  # fmt: skip
    section.claim(0, len(section.lines) - 1)
