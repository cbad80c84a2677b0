"""Every process that ``/proc`` shows, who listens on which TCP port, and where a process's output goes. Reads files only.

Sends no signal, traces nothing. ``environ`` and ``fd`` of a process are readable to its own user and to root (and in a container
only for processes of that container's pid namespace); what may not be read is an Unread, never an empty answer.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...clock import Deadline
from ..device_state import Unread

__all__ = [
    "ProcessEntry", "ProcessTable", "boot_id", "inner_pid", "listening", "output_file", "read_environment", "read_process_table",
    "same_namespace", "socket_holders", "start_ticks",
]  # fmt: skip

_MOST_CMDLINE = 16 << 10
_MOST_ENVIRON = 1 << 20
_MOST_FDS = 65536
_MOST_SOCKET_LINES = 200_000
#: State "listen" in /proc/net/tcp.
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """A process. ``start_ticks``: clock ticks since boot at its start; with the pid it names the process. ``argv`` may be empty
    (a kernel thread, a zombie); ``comm`` is cut at 15 characters by the kernel."""

    pid: int
    parent: int
    comm: str
    state: str
    start_ticks: int
    argv: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The whole command line as one string, or what is left of the name."""
        return " ".join(self.argv) or self.comm


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """What was read. ``unread`` says if the time was over before the end, or if processes are hidden (hidepid)."""

    entries: Mapping[int, ProcessEntry] = field(default_factory=dict)
    unread: tuple[Unread, ...] = ()

    def children(self) -> dict[int, list[int]]:
        """Parent to children, by pid."""
        table: dict[int, list[int]] = {}
        for entry in self.entries.values():
            table.setdefault(entry.parent, []).append(entry.pid)
        return table

    def below(self, pid: int) -> list[int]:
        """A process and all its descendants, itself first. A loop (a table read while pids were reused) ends."""
        children, found, seen = self.children(), [pid], {pid}
        for current in found:
            for child in sorted(children.get(current, ())):
                if child not in seen:
                    seen.add(child)
                    found.append(child)
        return found

    def ancestors(self, pid: int) -> list[int]:
        """Parent, its parent, and so on."""
        found: list[int] = []
        entry = self.entries.get(pid)
        while entry is not None and entry.parent in self.entries and entry.parent not in (pid, *found):
            found.append(entry.parent)
            entry = self.entries[entry.parent]
        return found


def _small(path: str, most: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.read(fd, most)
    finally:
        os.close(fd)


def _stat_fields(raw: bytes) -> tuple[str, str, int, int]:
    """comm, state, parent, start ticks of a ``stat`` line; the name may hold anything, parentheses too."""
    head, _, tail = raw.decode("utf-8", "replace").rpartition(")")
    fields = tail.split()
    return head.partition("(")[2], fields[0], int(fields[1]), int(fields[19])


def start_ticks(pid: int, root: Path = Path("/proc")) -> int | None:
    """When a process started (clock ticks since boot), None if it is gone, a zombie, or cannot be read."""
    try:
        _, state, _, ticks = _stat_fields(_small(f"{root}/{pid}/stat", 4096))
    except (OSError, ValueError, IndexError):
        return None
    return None if state in ("Z", "X") else ticks


def boot_id(root: Path = Path("/proc")) -> str:
    """The kernel's name of this boot; with a pid and its start it names a process for good. Empty if it cannot be read."""
    try:
        return _small(f"{root}/sys/kernel/random/boot_id", 64).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _entry(root: str, pid: int) -> ProcessEntry | None:
    try:
        comm, state, parent, ticks = _stat_fields(_small(f"{root}/{pid}/stat", 4096))
    except (OSError, ValueError, IndexError):
        return None
    argv: tuple[str, ...] = ()
    if 2 in (pid, parent):  # kernel threads have none
        return ProcessEntry(pid, parent, comm, state, ticks)
    try:
        raw = _small(f"{root}/{pid}/cmdline", _MOST_CMDLINE)
        # A process that set its own title leaves one string and zero bytes behind it.
        argv = tuple(part.decode("utf-8", "replace") for part in raw.rstrip(b"\0").split(b"\0")) if raw.strip(b"\0") else ()
    except OSError:
        pass
    return ProcessEntry(pid, parent, comm, state, ticks, argv)


def read_process_table(root: Path = Path("/proc"), *, deadline: Deadline | None = None) -> ProcessTable:
    """All processes, or as many as the time allows (default 1.5 s), the newest first: a server is rarely the oldest process."""
    deadline = deadline or Deadline(1.5)
    try:
        pids = sorted((int(name) for name in os.listdir(root) if name.isdigit()), reverse=True)
    except OSError as error:
        why = Unread("the process table", error.strerror or str(error), "Is /proc mounted?")
        return ProcessTable({}, (why,))
    entries: dict[int, ProcessEntry] = {}
    base = str(root)
    for number, pid in enumerate(pids):
        if number % 64 == 0 and number and deadline.expired:
            cut = f"{number} of {len(pids)} processes were read in {deadline.seconds:g} s; the rest was not looked at"
            return ProcessTable(entries, (Unread("the process table", cut, "Name the server: its pid or its URL."),))
        entry = _entry(base, pid)
        if entry is not None:
            entries[pid] = entry
    if pids and 1 not in pids:
        hidden = Unread(
            "the process table", "other users' processes are hidden here (process 1 is not shown: hidepid)", "Run as root."
        )
        return ProcessTable(entries, (hidden,))
    return ProcessTable(entries)


def read_environment(pid: int, root: Path = Path("/proc")) -> dict[str, str] | Unread:
    """The environment that a process was started with."""
    try:
        raw = _small(f"{root}/{pid}/environ", _MOST_ENVIRON)
    except OSError as error:
        remedy = f"Run as the process's user or as root: sudo cat /proc/{pid}/environ | tr '\\0' '\\n'"
        return Unread(f"environment of process {pid}", error.strerror or str(error), remedy)
    pairs = (item.decode("utf-8", "replace").partition("=") for item in raw.split(b"\0") if b"=" in item)
    return {name: value for name, _, value in pairs}


def inner_pid(pid: int, root: Path = Path("/proc")) -> int:
    """The pid that a process has in its own (innermost) pid namespace; the same number if it lives in ours, or if unreadable."""
    try:
        raw = _small(f"{root}/{pid}/status", 16384).decode("utf-8", "replace")
    except OSError:
        return pid
    for line in raw.splitlines():
        if line.startswith("NSpid:"):
            numbers = [int(part) for part in line.split()[1:] if part.isdigit()]
            return numbers[-1] if numbers else pid
    return pid


def same_namespace(pid: int, kind: str, root: Path = Path("/proc")) -> bool | None:
    """Whether a process shares our namespace of a kind (``mnt``, ``net``, ``pid``); None: may not be read."""
    try:
        return os.readlink(f"{root}/{pid}/ns/{kind}") == os.readlink(f"{root}/self/ns/{kind}")
    except OSError:
        return None


def _sockets(path: str) -> Iterator[tuple[int, str]]:
    """(port, inode) of every listening socket in a ``/proc/…/net/tcp`` file."""
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            for number, line in enumerate(stream):
                if number > _MOST_SOCKET_LINES:
                    return
                fields = line.split()
                if len(fields) > 9 and fields[3] == _LISTEN:
                    yield int(fields[1].rpartition(":")[2], 16), fields[9]
    except (OSError, ValueError):
        return


def listening(pid: int | None = None, root: Path = Path("/proc")) -> dict[str, int]:
    """Inode to port of the listening TCP sockets of a process's network namespace (None: ours). Empty if it may not be read."""
    base = f"{root}/{pid}/net" if pid is not None else f"{root}/net"
    return {inode: port for name in ("tcp", "tcp6") for port, inode in _sockets(f"{base}/{name}")}


def socket_holders(
    inodes: Iterable[str], pids: Iterable[int], root: Path = Path("/proc"), *, deadline: Deadline | None = None
) -> tuple[dict[int, list[str]], list[int]]:
    """Which of ``pids`` hold which of these sockets, and the pids whose open files may not be read (or not in time)."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    held: dict[int, list[str]] = {}
    unread: list[int] = []
    for pid in pids:
        if deadline is not None and deadline.expired:
            unread.append(pid)
            continue
        try:
            with os.scandir(f"{root}/{pid}/fd") as found:
                for number, item in enumerate(found):
                    if number > _MOST_FDS:
                        break
                    try:
                        target = os.readlink(item.path)
                    except OSError:
                        continue
                    if target in wanted:
                        held.setdefault(pid, []).append(wanted[target])
        except OSError:
            unread.append(pid)
    return held, unread


def output_file(pid: int, root: Path = Path("/proc")) -> Path | Unread:
    """The regular file that a process's stdout or stderr goes to; an Unread that says what it is instead.

    A path of another mount namespace is given through ``/proc/PID/root``, a file that was deleted through ``/proc/PID/fd``.
    """
    what = f"log of process {pid}"
    instead = ""
    for number in (1, 2):
        link = root / str(pid) / "fd" / str(number)
        try:
            target = os.readlink(link)
            found = link.stat() if target.startswith("/") else None
        except OSError as error:
            return Unread(what, error.strerror or str(error), "Run as the process's user or as root, or name the file: --log FILE")
        if found is None or not stat.S_ISREG(found.st_mode):
            instead = instead or target
            continue
        for candidate in (Path(target), root / str(pid) / "root" / target.lstrip("/")):
            try:
                here = candidate.stat()
            except OSError:
                continue
            if (here.st_dev, here.st_ino) == (found.st_dev, found.st_ino):
                return candidate
        return link
    kind = "a pipe" if instead.startswith("pipe:") else "a socket" if instead.startswith("socket:") else instead or "nothing"
    remedy = (
        "Give a file that the log is copied to: --log FILE (docker logs -f NAME > FILE, kubectl logs -f POD > FILE, journalctl -f)"
    )
    return Unread(what, f"its output goes to {kind}, not to a file", remedy)
