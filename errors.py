"""The one error tree. ``repro.__main__.main`` catches it in one place and exits with the class's status.

::

    ReproError
    ├── UsageError            2   the command line or a plan asks for something that cannot be
    │   ├── PlanError             a drain plan or a campaign plan that makes no sense
    │   ├── KernelNotFoundError   no such release, file, kernel, instantiation or architecture
    │   └── RefusedError          it could be done, but not without a flag that says so (``--share``, ``--attach``)
    ├── EvidenceError         5   the evidence cannot be read: what, where in it, and why
    │   ├── CoreFileError         a GPU core dump
    │   ├── CubinError            a cubin, .so or wheel
    │   ├── TranscriptError       a debugger transcript, a log, a metrics scrape
    │   └── RunStoreError         a run directory or a bundle
    ├── UnavailableError      5   this machine, container or user lacks what is needed
    │   ├── NoDriverError         no NVIDIA driver (an expected state)
    │   ├── NoDeviceError         a driver, but no usable GPU
    │   ├── ToolMissingError      cuda-gdb, py-spy, nvdisasm … not found
    │   ├── PtraceDeniedError     the kernel refuses ptrace
    │   ├── DownloadError         an index or a URL cannot be reached, or gave something else
    │   ├── ServerError           a server that cannot be started or reached
    │   └── SeveralServersError   several servers fit, and none was named
    ├── InconclusiveError     5   the work ended without an answer
    │   ├── DeadlineError         a step ran past its own deadline
    │   ├── UnknownInstructionError   machine code without semantics here: never guessed
    │   ├── MachineFaultError     the interpreted kernel made an illegal access
    │   └── BudgetError           an instruction, memory or solver budget is used up
    └── OurFaultError        70   an invariant of ours does not hold: please report it

Every leaf says what was not possible (``str(error)``) and, in ``help_text``, what to do next: the exact command.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BudgetError",
    "CoreFileError",
    "CubinError",
    "DeadlineError",
    "DownloadError",
    "EvidenceError",
    "InconclusiveError",
    "KernelNotFoundError",
    "MachineFaultError",
    "NoDeviceError",
    "NoDriverError",
    "OurFaultError",
    "PlanError",
    "PtraceDeniedError",
    "RefusedError",
    "ReproError",
    "RunStoreError",
    "ServerError",
    "SeveralServersError",
    "ToolMissingError",
    "TranscriptError",
    "UnavailableError",
    "UnknownInstructionError",
    "UsageError",
]


class ReproError(Exception):
    """Base of everything raised on purpose. ``exit_status`` is the process's exit status."""

    exit_status = 70
    #: What to do next, as text with the exact command; a leaf may be given its own at the raise site.
    help_text = ""

    def __init__(self, message: str, *, help_text: str | None = None) -> None:
        super().__init__(message)
        if help_text is not None:
            self.help_text = help_text


class UsageError(ReproError):
    """The command line or a plan asks for something that cannot be."""

    exit_status = 2
    help_text = "See: dsv4-repro --help"


class PlanError(UsageError):
    """A drain plan or a campaign plan that makes no sense; the message names field and value."""

    help_text = "See the fields and their ranges: dsv4-repro show drain"


class KernelNotFoundError(UsageError):
    """No such release, file, kernel, instantiation or architecture; the message says what was found instead."""

    help_text = "The kernel written here always works: --kernel builtin"


class RefusedError(UsageError):
    """It could be done, but not without a flag that says so."""


class EvidenceError(ReproError):
    """Evidence cannot be read. ``path`` is the file and ``place`` where in it (offset, section, line)."""

    exit_status = 5

    def __init__(self, message: str, *, path: str = "", place: str = "", help_text: str | None = None) -> None:
        where = ": ".join(part for part in (path, place) if part)
        super().__init__(f"{where}: {message}" if where else message, help_text=help_text)
        self.path = path
        self.place = place


class CoreFileError(EvidenceError):
    """A GPU core dump that cannot be read."""

    help_text = 'A dump is whole when the writer said "All done"; take another one, or use the debugger\'s transcript.'


class CubinError(EvidenceError):
    """A cubin, shared object or wheel that cannot be read."""


class TranscriptError(EvidenceError):
    """A debugger transcript, log or metrics scrape that cannot be read."""


class RunStoreError(EvidenceError):
    """A run directory or a bundle that cannot be read or written."""


class UnavailableError(ReproError):
    """This machine, container or user lacks what is needed."""

    exit_status = 5
    help_text = "See what this machine can do: dsv4-repro doctor"


class NoDriverError(UnavailableError):
    """No NVIDIA driver on this machine: an expected state."""

    help_text = "Without a GPU: the same with --on cpu, for example dsv4-repro run drain --on cpu --arch sm_120"


class NoDeviceError(UnavailableError):
    """A driver, but no usable GPU."""

    help_text = "Without a GPU: the same with --on cpu, for example dsv4-repro run drain --on cpu --arch sm_120"


class ToolMissingError(UnavailableError):
    """An external tool is not installed."""


class PtraceDeniedError(UnavailableError):
    """The kernel refuses ptrace on the target."""

    help_text = (
        "Run as root, or: sysctl kernel.yama.ptrace_scope=0; in Docker add --cap-add=SYS_PTRACE; "
        "in Kubernetes add SYS_PTRACE to securityContext.capabilities."
    )


class DownloadError(UnavailableError):
    """An index or URL cannot be reached, or gave something else than asked for."""

    help_text = "Offline, a wheel file does: --kernel FILE.whl"


class ServerError(UnavailableError):
    """A server that cannot be started or reached."""


class SeveralServersError(UnavailableError):
    """Several servers fit, and none was named. ``pids``: one of each."""

    help_text = "Name one by its pid."

    def __init__(self, message: str, pids: Sequence[int] = (), *, help_text: str | None = None) -> None:
        listed = f"Name one by its pid: {', '.join(map(str, pids[:8]))}" if pids else None
        super().__init__(message, help_text=help_text or listed)
        self.pids = tuple(pids)


class InconclusiveError(ReproError):
    """The work ended without an answer."""

    exit_status = 5


class DeadlineError(InconclusiveError):
    """A step ran past its own deadline."""


class UnknownInstructionError(InconclusiveError):
    """Machine code without semantics here; the message names instruction, offset and kernel."""


class MachineFaultError(InconclusiveError):
    """The interpreted kernel made an illegal access; the message names thread, instruction and address."""


class BudgetError(InconclusiveError):
    """An instruction, memory, time or solver budget is used up before an answer."""


class OurFaultError(ReproError):
    """An invariant of this program does not hold."""

    exit_status = 70
    help_text = "This is a defect of dsv4-repro. Please report it with the command and the lines above."
