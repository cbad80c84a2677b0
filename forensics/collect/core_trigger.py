"""The user-triggered GPU core dump: one byte into a pipe that the driver made. It ends the target's CUDA context.

The environment must be set before the process starts CUDA (``DumpSettings.environment``). Facts used: variables and the
1023-character limit of the pipe's name from the CUDA-GDB manual ("GPU core dump support"); light flags, one byte being enough,
42 ms of writing, and that the context is lost afterwards were measured on an H200 (driver 580.159.04).
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...clock import SYSTEM, Clock, Deadline
from ..device_state import Unread
from . import Collected, CollectedFile, Disturbance

__all__ = ["LIGHT_FLAGS", "CoreDumpCollector", "DumpSettings", "announced_size", "find_pipe"]

#: Nothing that a barrier autopsy needs is left out: tables, registers, parameters and the relocated code stay.
LIGHT_FLAGS = "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,skip_constbank_memory"
#: The driver's limit for a pipe's name (CUDA-GDB manual).
_LONGEST_NAME = 1023
_DONE = "All done"


@dataclass(frozen=True, slots=True)
class DumpSettings:
    """Where pipe and dump of a process will be. ``folder`` was made here and is the run's, or a short one if that would not do."""

    folder: Path
    short: bool

    @classmethod
    def in_folder(cls, folder: Path) -> DumpSettings:
        """Settings with pipe and file in ``folder``; in a new folder under the system's temporary one where that path is too long,
        holds a ``%`` (the driver expands it), or lies on a file system without pipes.
        """
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".pipe-{os.getpid()}"
        usable = "%" not in str(folder) and len(str(folder).encode()) + 64 <= _LONGEST_NAME
        if usable:
            try:
                os.mkfifo(probe, 0o600)
                probe.unlink()
            except OSError:
                usable = False
        return cls(folder, False) if usable else cls(Path(tempfile.mkdtemp(prefix="dsv4-dump-")), True)

    @property
    def pipe_template(self) -> str:
        return str(self.folder / "pipe_%p")

    @property
    def file_template(self) -> str:
        return str(self.folder / "core_%p.nvcudmp")

    def environment(self, flags: str = LIGHT_FLAGS) -> dict[str, str]:
        """Variables for the process that may be dumped."""
        return {
            "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
            "CUDA_COREDUMP_PIPE": self.pipe_template,
            "CUDA_COREDUMP_FILE": self.file_template,
            "CUDA_COREDUMP_GENERATION_FLAGS": flags,
            "CUDA_COREDUMP_SHOW_PROGRESS": "1",
        }

    def pipe_of(self, pid: int) -> Path:
        return Path(self.pipe_template.replace("%p", str(pid)))

    def file_of(self, pid: int) -> Path:
        return Path(self.file_template.replace("%p", str(pid)))


def find_pipe(pid: int, settings: DumpSettings | None, root: Path = Path("/proc")) -> Path | None:
    """The pipe that the driver of process ``pid`` reads; None if there is none.

    By the template of ``settings``; else among the open files of the process, those whose name fits the process's own
    CUDA_COREDUMP_PIPE or the driver's default name. Never another pipe: a byte in it would be read by somebody. A pipe found
    through
    ``/proc`` is opened through ``/proc``, which also works across mount namespaces.
    """
    if settings is not None:
        candidate = settings.pipe_of(pid)
        try:
            return candidate if stat.S_ISFIFO(candidate.stat().st_mode) else None
        except OSError:
            return None
    try:
        links = sorted((root / str(pid) / "fd").iterdir())
    except OSError:
        return None
    fits = _pipe_names(pid, root)
    for link in links:
        try:
            target = os.readlink(link)
            if fits.fullmatch(target.removesuffix(" (deleted)")) and stat.S_ISFIFO(link.stat().st_mode):
                return link
        except OSError:
            continue
    return None


def _pipe_names(pid: int, root: Path) -> re.Pattern[str]:
    """What the pipe of a process may be called: its own template with %p, %h and %t expanded, or the driver's default."""
    default = rf"(?:.*/)?corepipe\.cuda\.[^/]*\.{pid}"
    try:
        environment = (root / str(pid) / "environ").read_bytes()[: 1 << 20]
    except OSError:
        return re.compile(default)
    for item in environment.split(b"\0"):
        name, _, value = item.decode("utf-8", "replace").partition("=")
        if name == "CUDA_COREDUMP_PIPE" and value:
            pattern = re.escape(value).replace("%p", str(pid)).replace("%h", "[^/]*").replace("%t", "[0-9]*")
            return re.compile(rf"(?:.*/)?{pattern}|{default}")
    return re.compile(default)


def announced_size(path: Path) -> int | None:
    """How long the ELF file says that it is (the end of its section header table), bytes; None while the header is not there.

    The driver writes the table last, so a file of that size is whole.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(64)
    except OSError:
        return None
    if len(head) < 64 or head[:4] != b"\x7fELF" or head[4] != 2:
        return None
    (table,) = struct.unpack_from("<Q", head, 40)
    entry, count = struct.unpack_from("<HH", head, 58)
    if not table or not entry:
        return None
    if count == 0:
        # More than 65279 sections: the real count is the size field of section header 0.
        try:
            with path.open("rb") as stream:
                stream.seek(table + 32)
                raw = stream.read(8)
        except OSError:
            return None
        if len(raw) < 8:
            return None
        (count,) = struct.unpack("<Q", raw)
    return int(table + entry * count)


class CoreDumpCollector:
    """Triggers the dump of a process and waits for the file. Ends the process's CUDA context."""

    name = "core_dump"
    disturbance: Disturbance = "may end the process"

    def __init__(
        self,
        pid: int,
        settings: DumpSettings,
        folder: Path,
        *,
        stderr: Path | None = None,
        deadline_s: float = 30.0,
        file_name: str = "gpu.nvcudmp",
        clock: Clock = SYSTEM,
    ) -> None:
        self._pid = pid
        self._settings = settings
        self._folder = folder
        self._stderr = stderr
        self._file_name = file_name
        self._clock = clock
        self.deadline_s = deadline_s

    def _progress(self, since: int) -> str:
        """What the driver wrote to the process's stderr since the trigger."""
        if self._stderr is None:
            return ""
        try:
            with self._stderr.open("rb") as stream:
                stream.seek(since)
                return stream.read(1 << 20).decode("utf-8", "replace")
        except OSError:
            return ""

    def _unread(self, why: str, remedy: str, **facts: object) -> Collected:
        return Collected(self.name, self.disturbance, 0.0, facts=facts, unread=(Unread("GPU core dump", why, remedy),))

    def collect(self) -> Collected:
        began = self._clock.monotonic()
        pipe = find_pipe(self._pid, self._settings)
        if pipe is None:
            return self._unread(
                f"process {self._pid} has no dump pipe",
                "Start the process with CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1 (before CUDA starts; not on WSL).",
            )
        since = self._stderr.stat().st_size if self._stderr is not None and self._stderr.exists() else 0
        target = self._settings.file_of(self._pid)
        try:
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"1")
            finally:
                os.close(descriptor)
        except OSError as error:
            meaning = {
                errno.ENXIO: "nobody reads the pipe: CUDA has not started in that process, or the dump was made already",
                errno.EAGAIN: "the pipe is full: an earlier trigger was not taken",
                errno.EPIPE: "the reader left",
            }.get(error.errno or 0, error.strerror or str(error))
            return self._unread(meaning, "A process can be dumped once; start it again.")
        triggered = self._clock.monotonic()
        deadline = Deadline(self.deadline_s, self._clock)
        size, still_since, first_bytes = -1, triggered, None
        while True:
            now = self._clock.monotonic()
            try:
                current = target.stat().st_size
            except OSError:
                current = -1
            if current > 0 and first_bytes is None:
                first_bytes = now
            if current != size:
                size, still_since = current, now
            told = _DONE in self._progress(since)
            announced = announced_size(target) if size > 0 else None
            whole = announced is not None and size >= announced
            if size > 0 and ((told and now - still_since >= 0.02) or (whole and now - still_since >= 0.3)):
                break
            if deadline.expired:
                log = self._progress(since)
                if size > 0:
                    kept = self._take(target, f"partial-{self._file_name}")
                    return Collected(
                        self.name, self.disturbance, 0.0, files=(CollectedFile("gpu-core-partial", kept),),
                        facts={"bytes": size, "announced": announced, "log": log[-2000:]},
                        unread=(Unread("GPU core dump", f"not whole {self.deadline_s:g} s after the trigger: {size} bytes", ""),),
                    )  # fmt: skip
                return self._unread(
                    f"no file {self.deadline_s:g} s after the trigger",
                    "The driver's thread may be blocked; attach cuda-gdb instead.",
                    log=log[-2000:],
                )  # fmt: skip
            self._clock.sleep(0.005)
        kept = self._take(target, self._file_name)
        return Collected(
            self.name,
            self.disturbance,
            0.0,
            files=(CollectedFile("gpu-core", kept),),
            facts={
                "bytes": size,
                "find_pipe_s": triggered - began,
                "first_bytes_s": None if first_bytes is None else first_bytes - triggered,
                "whole_s": still_since - triggered,
                "told": told,
                "announced": announced,
                "log": self._progress(since)[-2000:],
            },
        )

    def _take(self, source: Path, name: str) -> Path:
        """The dump under its name in the evidence folder: renamed, or copied from another file system."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target = (self._folder / name).absolute()
        try:
            source.rename(target)
        except OSError:
            import shutil

            shutil.move(str(source), str(target))
        return target
