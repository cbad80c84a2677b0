"""cuda-gdb that releases a known wait again and again in one attach: ``scripts/release.py`` is started, judged, permitted, watched.

Facts used (measured on an H200, cuda-gdb 13.0): one write frees one launch; with ``continue &`` and a timer that interrupts, a
release takes 0.45 s; ended by force in the middle of an attach a debugger can take its target along. So the script ends by itself,
also when its starter dies (its standard input is held open by its own end of a pipe), and is never killed here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...clock import SYSTEM, Clock, Deadline
from . import write_artefact
from .cuda_gdb import ATTACH_FAILURES, SCRIPTS, CudaGdb, debugger_environment

__all__ = ["ReleaseOutcome", "Releaser", "Verdict", "release_command", "release_events"]

#: Also behind a prompt, which an interactive debugger prints without a line's end.
_LINE = re.compile(r"dsv4-repro: release (\{.*\})$", re.MULTILINE)
_MOST_TEXT = 32 << 20
#: The attach itself, beyond what the script is given: seconds.
_ATTACH_S = 30.0
#: What may be asked of a process that is frozen while it is judged, seconds.
_GO_S = 20.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the starter makes of the first reading. ``addresses``: words that may be written; empty: nothing is, and ``why``.

    ``group_size``: blocks of a group; at each stop all of a group but its leader must have left."""

    kernel: str = ""
    addresses: tuple[int, ...] = ()
    expected: int = 1
    why: str = ""
    group_size: int = 2


@dataclass(frozen=True, slots=True)
class ReleaseOutcome:
    """``state``: released (at least one write, and detached), nothing (attached, nothing written, detached), refused (the first
    reading is not the known wait), failed (no attach, or the debugger ended without detaching), left (still at work: it was left
    alone, ``pid`` is its number). ``writes``: how many; ``seconds``: from start to end, ``frozen`` included.
    """

    state: str
    why: str
    writes: int = 0
    stops: int = 0
    seconds: float = 0.0
    pid: int | None = None
    transcript: Path | None = None
    events: tuple[Mapping[str, Any], ...] = field(default=())


def release_command(tool: CudaGdb, pid: int) -> list[str]:
    """The command line: interactive, because only the event loop lets a process go on and stop again."""
    command = [str(tool.path), "-q", "-iex", "set auto-solib-add off", "-iex", "set pagination off", "-iex", "set confirm off"]
    command += ["-iex", "set mi-async on", "-iex", "set auto-load python-scripts off"]
    return [*command, "-iex", "echo dsv4-repro: stage attaching 0\\n", "-p", str(pid), "-x", str(SCRIPTS / "release.py")]


def release_events(text: str) -> list[dict[str, Any]]:
    """The script's decisions, in order; lines that are no JSON object are passed over."""
    found = []
    for match in _LINE.finditer(text):
        try:
            document = json.loads(match[1])
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            found.append(document)
    return found


class Releaser:
    """One process, one attach. ``judge(transcript)``: from the first reading to what may be written.

    ``most``: writes at most; ``total_s``: after so long the script detaches by itself; ``pause_s``: how long the process runs
    between two stops; ``patience_s``: for how long nothing to release is no reason to end. Needs a cuda-gdb with Python.
    """

    def __init__(
        self,
        pid: int,
        folder: Path,
        tool: CudaGdb,
        judge: Callable[[str], Verdict],
        *,
        value: int,
        most: int,
        total_s: float = 60.0,
        pause_s: float = 0.2,
        patience_s: float = 0.0,
        clock: Clock = SYSTEM,
    ) -> None:
        self._pid, self._folder, self._tool, self._judge = pid, folder.absolute(), tool, judge
        self._value, self._most, self._total_s, self._clock = value, most, total_s, clock
        self._pause_s, self._patience_s = pause_s, patience_s
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def transcript(self) -> Path:
        return self._folder / "cuda_gdb_release.txt"

    def stop(self) -> None:
        """Ask the script to detach at its next stop (Ctrl-C of the starter); it is not waited for here."""
        write_artefact(self._folder / "stop", "stop\n")

    def run(self) -> ReleaseOutcome:
        """Attach, judge, release, detach. Waits for the script's own end; never raises for what happens to the target."""
        if self._tool.python is None:
            return ReleaseOutcome("failed", f"{self._tool.path} has no Python inside: it cannot release again and again")
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in ("go", "stop"):
            (self._folder / name).unlink(missing_ok=True)
        settings = {
            "library": True, "folder": str(self._folder), "scripts": str(SCRIPTS), "total_s": self._total_s, "go_s": _GO_S,
            "deadline_s": _GO_S, "blocks": 8,
        }  # fmt: skip
        command = release_command(self._tool, self._pid)
        write_artefact(self._folder / "cuda_gdb_release_command.json", json.dumps(command))
        began = self._clock.monotonic()
        own_end, other_end = os.pipe()
        try:
            with self.transcript.open("wb") as sink:
                # The debugger inherits both ends: it never sees the end of its input, whatever becomes of this process.
                self.process = subprocess.Popen(
                    command,
                    stdin=own_end,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env=debugger_environment(self._folder, settings),
                    pass_fds=(other_end,),
                    start_new_session=True,
                )
        except OSError as error:
            return ReleaseOutcome("failed", f"{self._tool.path} cannot be started: {error.strerror or error}")
        finally:
            os.close(own_end)
            os.close(other_end)
        judged = self._watch(self.process)
        return self._outcome(judged, self._clock.monotonic() - began)

    def _watch(self, process: subprocess.Popen[bytes]) -> Verdict | None:
        judged: Verdict | None = None
        deadline = Deadline(_ATTACH_S + self._total_s + _GO_S, self._clock)
        while process.poll() is None and not deadline.expired:
            if judged is None and '"event": "read"' in self._text():
                judged = self._judge(self._text())
                if judged.addresses:
                    answer = {
                        "kernel": judged.kernel, "addresses": list(judged.addresses), "expected": judged.expected,
                        "value": self._value, "most": self._most, "pause_s": self._pause_s,
                        "patience_s": self._patience_s, "group_size": judged.group_size,
                    }  # fmt: skip
                    write_artefact(self._folder / "go", json.dumps(answer))
                else:
                    self.stop()
            self._clock.sleep(0.02)
        return judged

    def _text(self) -> str:
        try:
            with self.transcript.open("rb") as stream:
                return stream.read(_MOST_TEXT).decode("utf-8", "replace")
        except OSError:
            return ""

    def _outcome(self, judged: Verdict | None, seconds: float) -> ReleaseOutcome:
        text = self._text()
        events = release_events(text)
        writes = sum(1 for one in events if one.get("event") == "wrote")
        end = next((one for one in reversed(events) if one.get("event") == "end"), None)
        stops = end.get("stops") if end is not None else None
        status = self.process.poll() if self.process is not None else None
        running = self.process is not None and status is None

        def outcome(state: str, why: str) -> ReleaseOutcome:
            pid = self.process.pid if running and self.process is not None else None
            number = stops if isinstance(stops, int) else 0
            return ReleaseOutcome(state, why, writes, number, seconds, pid, self.transcript, tuple(events))

        if running:
            lost = next((str(one.get("why")) for one in events if one.get("event") == "lost"), "it did not end in its time")
            return outcome("left", f"the debugger was left alone, because ending it can kill the process: {lost}")
        lowered = text.lower()
        for mark, meaning, remedy in ATTACH_FAILURES:
            if mark in lowered:
                return outcome("failed", f"{meaning}. {remedy}")
        if judged is None:
            return outcome("failed", f"the debugger ended (status {status}) before it had read anything: {_last(text)}")
        if end is None:
            return outcome("failed", f"the debugger ended (status {status}) without detaching: {_last(text)}")
        if not judged.addresses:
            return outcome("refused", judged.why)
        return outcome("released" if writes else "nothing", str(end.get("why", "")))


def _last(text: str) -> str:
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip() and not line.startswith("dsv4-repro: stage")]
    return lines[-1][:300] if lines else "it said nothing"
