"""How far a starting server has come, read from its log: the phase, what it waits for, and why it failed. Pure.

Phases follow vLLM's own lines (``forensics.evidence.engine_log.EVENTS``, read in the sources of 0.19 to 0.33), checked against the
log of a 0.23.0 on a card. A start goes forward: the engine's processes, the weights, then compiling, warm-up and capture; a late
rank's line of an earlier stage does not take it back. Within the last stage a server may compile again after it had begun to
capture, but it does not warm up again; what is said after "startup complete" is of serving. Lines that print a whole configuration
hold the words of every phase and are read as what they are. Readiness is never read from here: a server is ready when it has
completed a request.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Literal

from ...forensics.evidence.engine_log import EVENTS

__all__ = ["Phase", "Startup", "failure_lines"]

Phase = Literal["starting", "download", "load", "compile", "jit", "warm-up", "capture", "serving", "failed"]

_WAITS: dict[Phase, str] = {
    "starting": "the engine's processes to come up",
    "download": "the weights to be downloaded",
    "load": "the weights to be loaded",
    "compile": "torch.compile",
    "jit": "kernels to be compiled (nvcc, Triton, DeepGEMM)",
    "warm-up": "the engine's profiling and warm-up runs",
    "capture": "CUDA graphs to be captured",
    "serving": "a first completion to answer",
    "failed": "",
}
#: Kind of event -> phase. Looked at in this order; the first that fits a line is its phase.
_PHASES: tuple[tuple[re.Pattern[str], Phase], ...] = (
    (EVENTS["serving"], "serving"),
    # These print every setting, "cudagraph_num_of_warmups" among them: seen to mislead for 20 s.
    (re.compile(r"non-default args: |Initializing a V1 LLM engine|vLLM API server version|\bwith config: "), "starting"),
    (re.compile(r"CUDA graph memory|Profiling CUDA graph"), "warm-up"),
    (re.compile(r"Capturing .{0,60}graphs?|CUDA graph pool|Graph capturing finished"), "capture"),
    (re.compile(r"[Ww]arm(?:ing)?[ -]?up|[Aa]utotun|init engine \(profile|GPU KV cache size|Available KV cache memory"), "warm-up"),
    (EVENTS["jit-start"], "jit"),
    (re.compile(r"\bDeepGEMM\b.{0,60}(?:compil|JIT)|\bnvcc\b|\bninja\b|JIT compilation"), "jit"),
    (EVENTS["compile-start"], "compile"),
    (EVENTS["compile-step"], "compile"),
    (EVENTS["compile-done"], "compile"),
    (re.compile(r"[Dd]ownloading (?:weights|\S+\.safetensors|shards|model)|\.safetensors:\s+\d+%"), "download"),
    (EVENTS["load-start"], "load"),
    (EVENTS["load-progress"], "load"),
    (EVENTS["load-done"], "load"),
    (re.compile(r"world_size=\d"), "starting"),
)
#: Announces what will be logged later, with the words of it.
_ANNOUNCES = re.compile(r"JIT monitor activated")
_STAGE: dict[Phase, int] = {
    "starting": 0, "download": 1, "load": 1, "compile": 2, "jit": 2, "warm-up": 2, "capture": 2, "serving": 3, "failed": 4,
}  # fmt: skip
#: Lines that say that the start has failed: such a server does not come up any more. (Others end by themselves, and that is seen.)
_FAILED = EVENTS["engine-failed-start"]
_PERCENT = re.compile(r"(?P<percent>\d{1,3})%[^|]{0,40}\|(?:[^|]{0,200}\|)?\s*(?P<done>\d+)/(?P<total>\d+)")
#: The exception at the end of a traceback: what went wrong, in the words of the one who noticed.
_EXCEPTION = re.compile(r"(?:^|[\s\])])(?P<error>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (?P<text>.+)")
#: These only repeat that somebody else failed.
_SECONDHAND = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|See (?:root cause|stack trace)|EngineDeadError"
)
#: vLLM's own level words, and Python's warnings: what is only warned of did not end the server.
_MILD = re.compile(r"(?:^|[\s)])(?:WARNING|INFO|DEBUG) \d\d-\d\d |Warning: ")
_USAGE = re.compile(r"\berror: .+|No module named .+|[Aa]ddress already in use")
_KEEP = 400
_LONGEST_LINE = 4096


class Startup:
    """Fed with lines, oldest first. Bounded: the last lines are kept, a longer line is cut."""

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.detail = ""
        self.lines = 0
        self._captured = False
        self.tail: deque[str] = deque(maxlen=_KEEP)

    def feed(self, lines: Iterable[str]) -> bool:
        """Read further lines; whether the phase or its detail changed."""
        before = (self.phase, self.detail)
        for raw in lines:
            # A progress bar overwrites itself: the newest state stands after the last carriage return.
            line = raw.rstrip("\r\n")[-_LONGEST_LINE:].rpartition("\r")[2]
            if not line.strip():
                continue
            self.lines += 1
            self.tail.append(line)
            self._read(line)
        return before != (self.phase, self.detail)

    def _read(self, line: str) -> None:
        if self.phase == "failed":
            return
        if _FAILED.search(line):
            self.phase, self.detail = "failed", ""
            return
        if self.phase == "serving" or _ANNOUNCES.search(line):
            return
        for pattern, phase in _PHASES:
            if pattern.search(line):
                if _STAGE[phase] < _STAGE[self.phase] or (phase == "warm-up" and self._captured):
                    return
                self._captured = self._captured or phase == "capture"
                found = _PERCENT.search(line)
                self.phase = phase
                self.detail = f"{found['percent']} %, {found['done']} of {found['total']}" if found else ""
                return

    @property
    def waits_for(self) -> str:
        """In words, for a progress line."""
        what = _WAITS[self.phase]
        return f"{what} ({self.detail})" if self.detail else what

    @property
    def reason(self) -> str:
        """The line that says best why it failed; "" if none does."""
        return next(iter(failure_lines(self.tail, 1)), "")


def failure_lines(tail: Iterable[str], most: int = 6) -> list[str]:
    """The lines of a failed start that a person needs, the best first.

    Where an engine process says that it failed, its first exception after that is the cause, and those that only pass it on ("See
    root cause above") come last. Else the last exception ended the process. A warning is neither.
    """
    lines = list(tail)
    failed = next((number for number, line in enumerate(lines) if _FAILED.search(line)), None)
    raised: list[str] = []
    passed_on: list[str] = []
    refused: list[str] = []
    for line in lines[failed if failed is not None else 0 :]:
        if _MILD.search(line):
            continue
        found = _EXCEPTION.search(line)
        if found:
            words = f"{found['error']}: {found['text']}".strip()
            (passed_on if _SECONDHAND.search(words) else raised).append(words)
        elif usage := _USAGE.search(line):
            refused.append(usage.group(0).strip())
    if failed is None:
        raised.reverse()
        refused.reverse()
    chosen = list(dict.fromkeys([*raised, *refused, *passed_on]))
    if failed is not None and not chosen:
        chosen = [lines[failed].strip()]
    chosen = chosen or [line.strip() for line in lines[-most:]]
    return [line[:300] for line in chosen[:most]]
