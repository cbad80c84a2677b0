"""NVIDIA's lines in the kernel log: Xid errors and resource-manager messages. A pure spin makes none; that there is none is a
finding.

Reads ``/dev/kmsg`` without waiting. Where ``kernel.dmesg_restrict`` is 1 this needs root; a container often has no access at all.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..device_state import Unread
from . import Collected, CollectedFile, Disturbance, write_artefact

__all__ = ["KernelLogCollector", "nvidia_lines", "read_kernel_log"]

_NVIDIA = re.compile(r"NVRM|nvidia|Xid", re.IGNORECASE)
_XID = re.compile(r"Xid \(([^)]*)\): (\d+)")
#: Records read at most; the ring buffer holds fewer on every usual configuration.
_MOST_RECORDS = 200_000


def read_kernel_log(path: Path = Path("/dev/kmsg")) -> list[tuple[float, str]]:
    """Every record that is there: seconds since boot and text. OSError where it may not be read."""
    records: list[tuple[float, str]] = []
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while len(records) < _MOST_RECORDS:
            try:
                raw = os.read(descriptor, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:
                # The record was overwritten while we read; the next read goes on with the oldest one that is left.
                continue
            if not raw:
                break
            for line in raw.decode("utf-8", "replace").splitlines():
                head, separator, text = line.partition(";")
                fields = head.split(",")
                if separator and len(fields) >= 3 and fields[2].isdigit():
                    records.append((int(fields[2]) / 1e6, text))
    finally:
        os.close(descriptor)
    return records


def nvidia_lines(records: list[tuple[float, str]], since: float = 0.0) -> tuple[list[str], list[tuple[str, int]]]:
    """NVIDIA's lines from ``since`` (seconds since boot), and the Xids in them as (device, number)."""
    lines = [f"[{at:.6f}] {text}" for at, text in records if at >= since and _NVIDIA.search(text)]
    xids = [(match[1], int(match[2])) for line in lines if (match := _XID.search(line))]
    return lines, xids


class KernelLogCollector:
    """Writes ``kernel_log.txt`` with NVIDIA's lines since ``since`` (seconds since boot)."""

    name = "kernel_log"
    disturbance: Disturbance = "none"
    deadline_s = 5.0

    def __init__(self, folder: Path, *, since: float = 0.0, path: Path = Path("/dev/kmsg")) -> None:
        self._folder = folder
        self._since = since
        self._path = path

    def collect(self) -> Collected:
        try:
            records = read_kernel_log(self._path)
        except OSError as error:
            remedy = "Run as root, or: sysctl kernel.dmesg_restrict=0; in a container look at the host: dmesg | grep -i xid"
            return Collected(self.name, self.disturbance, 0.0, unread=(Unread("kernel log", error.strerror or str(error), remedy),))
        lines, xids = nvidia_lines(records, self._since)
        path = write_artefact(self._folder / "kernel_log.txt", "\n".join(lines) + "\n" if lines else "")
        return Collected(
            self.name,
            self.disturbance,
            0.0,
            files=(CollectedFile("kernel-log", path),),
            facts={
                "records": len(records),
                "nvidia_lines": len(lines),
                "xids": [{"device": device, "xid": xid} for device, xid in xids],
            },
        )
