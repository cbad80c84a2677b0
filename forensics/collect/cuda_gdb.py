"""cuda-gdb on a live process: attach, read by script, detach. Freezes the process meanwhile; it goes on afterwards.

Facts used: the deadline belongs inside the debugger, because ending it in the middle of the attach can take the target along
(vLLM and TensorRT-LLM debugging notes; CUDA-GDB manual, "Attaching"); ``set auto-solib-add off`` before attaching saves the
loading of host symbols (0.7 s instead of 12 s, measured on an H200 with cuda-gdb 13.0). The transcript is kept as it came;
``forensics.cuda_gdb_text`` reads it.
"""

from __future__ import annotations

import glob
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...clock import SYSTEM, Clock, Deadline
from ...errors import ReproError, ToolMissingError
from ..device_state import DeviceState, Unread
from . import Collected, CollectedFile, Disturbance, write_artefact
from .tools import run_tool

__all__ = [
    "ATTACH_FAILURES", "SCRIPTS", "CudaGdb", "CudaGdbCollector", "debugger_command", "debugger_environment", "find_cuda_gdb",
    "probe_cuda_gdb", "stages_of",
]  # fmt: skip

#: The scripts, also for a person's own session.
SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
#: After the script's own deadline the debugger is waited for so long (attaching, detaching), seconds; then it is left alone.
_PATIENCE_S = 20.0
_STAGE = re.compile(r"^dsv4-repro: stage (\w+) ([0-9.]+)$", re.MULTILINE)
_PYTHON = re.compile(r"^dsv4-python (\d+)\.(\d+)", re.MULTILINE)

#: What a failed attach says, what it means and what helps. First match wins.
ATTACH_FAILURES: tuple[tuple[str, str, str], ...] = (
    ("ptrace: operation not permitted", "ptrace is refused",
     "Run as root, or: sysctl kernel.yama.ptrace_scope=0; in Docker add --cap-add=SYS_PTRACE"),
    ("could not attach to process", "the process cannot be attached to",
     "Is another debugger attached? Does the process still live?"),
    ("no such process", "there is no such process", "Check the pid, and the pid namespace (containers)."),
    ("could not allocate operating system resources for attaching", "the driver has no resources for the attach",
     "Attach from inside the target's container, with its root file system writable."),
    ("internal error while attaching", "the CUDA attach failed inside the driver", "Try again once; then trigger a GPU core dump."),
    ("cudbgapiattach", "the CUDA attach failed", "Trigger a GPU core dump instead."),
    ("cudbgreportdriverinternalerror", "the driver reported an internal error", "Trigger a GPU core dump instead."),
    ("another cuda-gdb", "another cuda-gdb session is active", "End it, or set CUDA_VISIBLE_DEVICES apart."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CudaGdb:
    """A cuda-gdb on this machine. ``python``: version of the Python inside it, None if it has none."""

    path: Path
    version: str
    python: tuple[int, int] | None


def _candidates(environment: Mapping[str, str]) -> list[Path]:
    roots = [environment[name] for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX") if environment.get(name)]
    found = [Path(root) / "bin" / "cuda-gdb" for root in roots]
    on_path = shutil.which("cuda-gdb", path=environment.get("PATH"))
    if on_path:
        found.append(Path(on_path))
    found.append(Path("/usr/local/cuda/bin/cuda-gdb"))

    def version(path: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", path.partition("cuda-")[2].partition("/")[0]))

    found.extend(Path(path) for path in sorted(glob.glob("/usr/local/cuda-*/bin/cuda-gdb"), key=version, reverse=True))
    return found


def find_cuda_gdb(environment: Mapping[str, str] | None = None) -> Path:
    """The first cuda-gdb of CUDA_HOME, CUDA_PATH, the conda environment, PATH and /usr/local. ToolMissingError naming where it
    looked.

    ``DSV4_REPRO_CUDA_GDB`` names one and wins.
    """
    environment = os.environ if environment is None else environment
    named = environment.get("DSV4_REPRO_CUDA_GDB")
    tried = [Path(named)] if named else _candidates(environment)
    for path in tried:
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise ToolMissingError(
        "cuda-gdb is not installed; looked at " + ", ".join(dict.fromkeys(map(str, tried))),
        help_text="It comes with the CUDA toolkit, or: conda install -c conda-forge cuda-gdb; then set CUDA_HOME.",
    )


def probe_cuda_gdb(path: Path, folder: Path, *, deadline_s: float = 15.0, clock: Clock = SYSTEM) -> CudaGdb:
    """Version and Python of a cuda-gdb, by starting it once without a target. ToolMissingError if it does not run."""
    output = folder / "cuda_gdb_probe.txt"
    argv = [
        str(path),
        "-q",
        "-batch",
        "-ex",
        "show version",
        "-ex",
        "python import sys; print('dsv4-python', sys.version.split()[0])",
    ]
    try:
        done = run_tool(argv, deadline_s, output=output, environment=debugger_environment(folder), clock=clock)
    except OSError as error:
        raise ToolMissingError(f"{path} cannot be started: {error.strerror or error}") from error
    if done.expired or done.status not in (0, 1):
        raise ToolMissingError(f"{path} does not run: status {done.status}: {done.output.strip()[-300:]}")
    lines = [line.strip() for line in done.output.splitlines() if "cuda-gdb" in line.lower() or "GNU gdb" in line]
    python = _PYTHON.search(done.output)
    return CudaGdb(path, "; ".join(lines[:2])[:200], (int(python[1]), int(python[2])) if python else None)


def debugger_environment(folder: Path, settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The debugger's environment: no user settings of gdb, no symbol downloads, our script's settings."""
    environment = dict(os.environ)
    home = folder / "gdb-home"
    home.mkdir(parents=True, exist_ok=True)
    environment["HOME"] = str(home.absolute())
    environment["XDG_CONFIG_HOME"] = str(home.absolute())
    environment["DEBUGINFOD_URLS"] = ""
    # Meant for this Python, which need not be the one inside the debugger.
    environment.pop("PYTHONPATH", None)
    environment.pop("PYTHONHOME", None)
    for name in tuple(environment):
        if name.startswith(("CUDA_COREDUMP", "CUDA_ENABLE_")):
            del environment[name]
    environment["DSV4_REPRO_GDB"] = json.dumps(settings or {})
    return environment


def debugger_command(tool: CudaGdb, pid: int) -> list[str]:
    """The command line that attaches, reads and detaches. Without Python in cuda-gdb, the plain script line by line."""
    command = [str(tool.path), "-q", "-batch", "-iex", "set auto-solib-add off", "-iex", "set pagination off"]
    command += ["-iex", "set auto-load python-scripts off"]
    if tool.python is not None:
        return [*command, "-iex", "echo dsv4-repro: stage attaching 0\\n", "-p", str(pid), "-x", str(SCRIPTS / "hang.py")]
    command += ["-p", str(pid), "-ex", "echo dsv4-repro: stage reading 0\\n"]
    for line in (SCRIPTS / "hang.gdb").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            command += ["-ex", f"echo (cuda-gdb) {line}\\n", "-ex", line]
    return [*command, "-ex", "echo dsv4-repro: stage detaching 0\\n", "-ex", "detach", "-ex", "echo dsv4-repro: stage done 0\\n"]


def stages_of(transcript: str) -> dict[str, float]:
    """Seconds since the start of the script at which each stage was reached (attaching, reading, detaching, done)."""
    return {match[1]: float(match[2]) for match in _STAGE.finditer(transcript)}


class CudaGdbCollector:
    """Writes ``cuda_gdb.txt``, the transcript. ``addresses``: words of global memory to read beside what the script finds itself.

    ``left_running`` is the debugger's process when it had to be left alone; the caller ends the target first, then it.
    """

    name = "cuda_gdb"
    disturbance: Disturbance = "pauses"

    def __init__(
        self,
        pid: int,
        folder: Path,
        tool: CudaGdb,
        *,
        addresses: Sequence[int] = (),
        params_base: int | None = None,
        blocks: int = 16,
        deadline_s: float = 20.0,
        file_name: str = "cuda_gdb.txt",
        clock: Clock = SYSTEM,
    ) -> None:
        self._pid = pid
        self._folder = folder
        self._tool = tool
        self._clock = clock
        self._file_name = file_name
        self._settings: dict[str, Any] = {
            "addresses": list(addresses), "blocks": blocks, "deadline_s": deadline_s, "detach": True,
        }  # fmt: skip
        if params_base is not None:
            self._settings["params_base"] = params_base
        self._inner_s = deadline_s
        self.deadline_s = deadline_s + _PATIENCE_S
        self.left_running: subprocess.Popen[bytes] | None = None

    def collect(self) -> Collected:
        path = (self._folder / self._file_name).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        began = self._clock.monotonic()
        with path.open("wb") as sink:
            process = subprocess.Popen(
                debugger_command(self._tool, self._pid),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=debugger_environment(self._folder, self._settings),
                start_new_session=True,
            )
        deadline = Deadline(self.deadline_s, self._clock)
        interrupted = False
        # Until its end is seen: an interrupt of this process must not lose sight of it.
        self.left_running = process
        while process.poll() is None and not deadline.expired:
            if self._tool.python is None and not interrupted and self._clock.monotonic() - began > self._inner_s:
                # Without Python there is no timer inside; Ctrl-C ends the command that is running, and only after the attach.
                if "reading" in stages_of(_text(path)):
                    process.send_signal(signal.SIGINT)
                interrupted = True
            self._clock.sleep(0.01)
        seconds = self._clock.monotonic() - began
        unread: list[Unread] = []
        text = _text(path)
        stages = stages_of(text)
        if process.poll() is not None:
            self.left_running = None
        else:
            unread.append(
                Unread(
                    "cuda-gdb",
                    f"still at work {self.deadline_s:g} s after its start (stage {_latest(stages)}); left alone, "
                    "because ending it now can kill the target",
                    "The transcript so far is kept.",
                )
            )
        facts: dict[str, Any] = {
            "tool": str(self._tool.path), "version": self._tool.version, "python": self._tool.python, "stages": stages,
            "attach_to_detach_s": seconds, "status": process.poll(),
        }  # fmt: skip
        unread.extend(self._judge(text, stages, process.poll()))
        state = self._parse(text, unread)
        if "dsv4-repro: out of time" in text:
            unread.append(
                Unread("cuda-gdb", f"the script's deadline of {self._inner_s:g} s came before its end", "Raise the deadline.")
            )
        write_artefact(self._folder / "cuda_gdb_command.json", json.dumps(debugger_command(self._tool, self._pid)))
        return Collected(
            self.name,
            self.disturbance,
            seconds,
            files=(CollectedFile("cuda-gdb", path),),
            state=state,
            facts=facts,
            unread=tuple(unread),
        )

    def _judge(self, text: str, stages: Mapping[str, float], status: int | None) -> list[Unread]:
        lowered = text.lower()
        for mark, meaning, remedy in ATTACH_FAILURES:
            if mark in lowered:
                return [Unread("cuda-gdb attach", meaning, remedy)]
        if "reading" not in stages:
            return [
                Unread("cuda-gdb attach", f"the debugger ended (status {status}) before it read anything", "See the transcript.")
            ]
        if "dsv4-repro: no kernels" in text or re.search(r"No CUDA kernels", text):
            return [
                Unread("cuda-gdb kernels", "attached, and no kernel is shown", "Wrong process? Or the kernel retired meanwhile.")
            ]
        return []

    def _parse(self, text: str, unread: list[Unread]) -> DeviceState | None:
        try:
            parser = importlib.import_module("..cuda_gdb_text", __package__)
        except ImportError as error:
            unread.append(Unread("cuda-gdb transcript", f"it was kept but not read: {error}"))
            return None
        try:
            state = parser.parse_transcript(text)
        except (ReproError, ValueError, LookupError) as error:
            unread.append(Unread("cuda-gdb transcript", f"it was kept but could not be read: {error}", "See the file."))
            return None
        return state if isinstance(state, DeviceState) else None


def _text(path: Path) -> str:
    with path.open("rb") as stream:
        return stream.read(32 << 20).decode("utf-8", "replace")


def _latest(stages: Mapping[str, float]) -> str:
    return next(reversed(list(stages)), "not started")
