"""The operating system's kernel log (dmesg, ``journalctl -k``): Xid and SXid records, the OOM killer, hung tasks, segfaults.

Xid meanings: NVIDIA's Xid catalogue. A record is the kernel's view: pids are those of the host's pid namespace.
"""

from __future__ import annotations

import re

from .casefile import CaseFile
from .engine_log import line_stamp
from .facts import KernelEvent
from .refs import Section

__all__ = ["XID_FAULT", "XID_LOST", "read_kernel_log"]

#: The program made an illegal access or raised a device exception.
XID_FAULT = {13: "graphics engine exception", 31: "MMU fault", 43: "channel stopped after a fault", 68: "NVDEC exception"}
#: The device, its firmware or its memory is no longer usable.
XID_LOST = {
    48: "double-bit ECC error", 61: "internal micro-controller halt", 62: "internal micro-controller halt",
        64: "row remapping failed",
    74: "NVLink error", 79: "fallen off the bus", 95: "uncontained ECC error", 110: "security fault", 119: "GSP RPC timeout",
    120: "GSP error", 123: "SPI PMU RPC failure", 140: "unrecovered ECC error", 143: "GPU initialisation failure",
        154: "recovery action needed",
}  # fmt: skip

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[^)]*)\): (?P<number>\d+),? ?(?P<rest>[^\n]*)")
_SXID = re.compile(r"(?:nvidia-nvswitch\d*|NVSwitch)[^\n]{0,80}SXid \((?P<pci>[^)]*)\): (?P<number>\d+)(?P<rest>[^\n]*)")
_PID = re.compile(r"\bpid='?(\d+)'?")
_NAME = re.compile(r"\bname=([^,\n]+)")
_OOM = re.compile(
    r"(?:Memory cgroup out of memory|Out of memory(?: \(\w+\))?): Kill(?:ed)? process (?P<pid>\d+),? "
    r"\((?P<name>[^)]*)\)(?P<rest>[^\n]*)"
)
_OOM_KILL = re.compile(r"oom-kill:(?P<rest>[^\n]*?)task=(?P<name>[^,\n]*),pid=(?P<pid>\d+)")
_GONE = re.compile(
    r"GPU at PCI:[^\n]*has fallen off the bus[^\n]*|GPU has fallen off the bus[^\n]*|RmInitAdapter failed[^\n]*|GSP (?:RPC|task) "
    r"timeout[^\n]*"
)
_HUNG = re.compile(r"task (?P<name>\S+?):(?P<pid>\d+) blocked for more than (?P<seconds>\d+) seconds")
_SEGFAULT = re.compile(
    r"(?P<name>[\w:./-]{1,64})\[(?P<pid>\d{1,9})\]: segfault at [^\n]*|traps: (?P<name2>[\w:./-]{1,64})\[(?P<pid2>\d{1,9})\] [^\n]*"
)
_LINK = re.compile(
    r"(?:mlx5|mlx4|bnxt|irdma|ib\d)[^\n]{0,80}(?:[Ll]ink (?:down|Down|DOWN)|port (?:down|error)|health (?:compromised|poll failed))"
    r"|NVLink[^\n]{0,60}(?:[Ee]rror|down|fatal)|pcieport[^\n]{0,60}(?:AER|link down)"
)
_UVM = re.compile(r"uvm_spin_loop|uvm_\w+\+0x")
_KERNEL_LINE = re.compile(r"(?m)^(?:<\d+>)?\[ *\d+\.\d+\] |^\[\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4}\]| kernel: ")


def read_kernel_log(section: Section, case: CaseFile) -> None:
    text = section.text
    looked = bool(_KERNEL_LINE.search(text)) or "dmesg" in section.heading.lower() or "journalctl -k" in section.heading.lower()
    if looked and not re.search(r"(?i)permitted|denied", text[:2000]):
        case.kernel_log_seen.append(section.whole())
        for index, line in enumerate(section.lines):
            if not section.claimed[index] and _KERNEL_LINE.search(line):
                section.claimed[index] = 1
    if "Xid (" in text or "SXid (" in text:
        for pattern, kind in ((_XID, "xid"), (_SXID, "sxid")):
            for match in pattern.finditer(text):
                rest = match.group("rest")
                pid, name = _PID.search(rest), _NAME.search(rest)
                _add(
                    section, case, match, kind, number=int(match.group("number")), pid=int(pid.group(1)) if pid else None,
                    name=name.group(1).strip() if name else "", pci=match.group("pci"), detail=rest.strip()[:300],
                )  # fmt: skip
    if "out of memory" in text or "Out of memory" in text or "oom-kill:" in text:
        for pattern in (_OOM, _OOM_KILL):
            for match in pattern.finditer(text):
                _add(
                    section,
                    case,
                    match,
                    "oom-kill",
                    pid=int(match.group("pid")),
                    name=match.group("name"),
                    detail=match.group("rest").strip()[:300],
                )
    for match in _GONE.finditer(text):
        _add(section, case, match, "gpu-gone", detail=match.group(0)[:300])
    if "blocked for more than" in text:
        for match in _HUNG.finditer(text):
            _add(
                section,
                case,
                match,
                "hung-task",
                pid=int(match.group("pid")),
                name=match.group("name"),
                number=int(match.group("seconds")),
            )
    if "segfault at" in text or "traps: " in text:
        for match in _SEGFAULT.finditer(text):
            _add(
                section, case, match, "segfault", pid=int(match.group("pid") or match.group("pid2")),
                name=match.group("name") or match.group("name2"), detail=match.group(0)[:300],
            )  # fmt: skip
    if "mlx" in text or "NVLink" in text or "bnxt" in text or "irdma" in text or "pcieport" in text:
        for match in _LINK.finditer(text):
            _add(section, case, match, "link", detail=match.group(0)[:300])
    if "uvm_" in text:
        for match in _UVM.finditer(text):
            _add(section, case, match, "uvm", detail=match.group(0)[:300])


def _add(
    section: Section, case: CaseFile, match: re.Match[str], kind: str, *,
    number: int | None = None, pid: int | None = None, name: str = "", pci: str = "", detail: str = "",
) -> None:  # fmt: skip
    index, ref = section.cite_match(match)
    stamp = line_stamp(section, index)
    case.note_time(section.source, stamp)
    case.kernel.append(KernelEvent(kind, ref, (section.order, index), stamp, number, pid, name, pci, detail))
