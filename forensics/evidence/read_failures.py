"""Texts by which tools say that they could not look. Each becomes "could not read", never "there is nothing".

cuda-gdb's "No CUDA kernels" belongs here: it has been seen on GPUs that were surely hung (vllm-project/vllm#46145), after failed
attaches, with a second debugger on the process, and with the wrong pid.
"""

from __future__ import annotations

import re

from .casefile import CaseFile
from .facts import ReadFailure
from .refs import Section

__all__ = ["PTRACE_REMEDY", "read_failures"]

PTRACE_REMEDY = (
    "run as root, or sysctl kernel.yama.ptrace_scope=0; Docker: --cap-add=SYS_PTRACE; "
    "Kubernetes: securityContext.capabilities.add SYS_PTRACE"
)
_TEXTS: tuple[tuple[str, str, str, str], ...] = (
    (r"Error: Failed to get process[^\n]*|Failed to suspend process[^\n]*|Permission Denied: Try running again with elevated[^\n]*"
     r"|Error: Operation not permitted[^\n]*|Failed to open process \d+[^\n]*",
     "host stacks", "the tool may not trace the process", PTRACE_REMEDY),
    (r"UNW_EBADREG|Failed to merge native and python frames[^\n]*|Error: Failed to find (?:python version|a python "
     r"interpreter)[^\n]*",
     "host stacks", "the unwinder failed", "py-spy dump --nonblocking --pid PID without --native, or gdb -p PID -batch -ex "
                                           "'thread apply all bt'"),
    (r"ptrace: (?:Operation not permitted|No such process|Inappropriate ioctl)[^\n]*|Could not attach to process[^\n]*",
     "device state and native stacks", "ptrace was refused", PTRACE_REMEDY),
    (r"process \d+ is already traced by process \d+|already being debugged[^\n]*",
     "device state and native stacks", "another debugger holds the process", "detach the other debugger, then attach again"),
    (r"No CUDA (?:kernels|devices)\.?",
     "device state", "the debugger saw no kernel or no device; this also happens after a failed attach, on a wrong pid and on "
                     "hung GPUs",
     "cuda-gdb -p PID as root with nothing else attached, once for each worker; or a user-triggered GPU core dump"),
    (r"cudbgApiAttach[^\n]*|hit an internal error while attaching[^\n]*|could not allocate operating system resources for "
     r"attaching[^\n]*"
     r"|cudbgReportDriverInternalError[^\n]*|CUDA_DEBUGGER[^\n]*not supported[^\n]*",
     "device state", "the CUDA debugger interface refused the attach", "try again with cuda-gdb 13.3 or later; else a "
         "user-triggered GPU core dump"),
    (r"dmesg: read kernel buffer failed: Operation not permitted|klogctl[^\n]*denied",
     "kernel log", "dmesg is restricted", "as root: dmesg -T; or journalctl -k"),
    (r"py-spy: (?:command )?not found|(?:cuda-gdb|nvidia-smi|pystack|ncclras): (?:command )?not found",
     "a tool's output", "the tool is not installed there", "dsv4-repro doctor"),
    (r"curl: \(\d+\)[^\n]*|Connection refused[^\n]*/metrics",
     "metrics", "the endpoint did not answer", "curl -s --max-time 5 http://HOST:PORT/metrics"),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), what, why, remedy) for pattern, what, why, remedy in _TEXTS)
_GATE = ("ermitted", "Failed to", "UNW_", "ptrace", "already", "No CUDA", "cudbg", "internal error while",
    "resources for attaching", "not found",
         "curl: (", "refused", "Could not attach", "Permission Denied", "klogctl", "not supported")  # fmt: skip


def read_failures(section: Section, case: CaseFile) -> None:
    text = section.text
    if not any(word in text for word in _GATE):
        return
    for pattern, what, why, remedy in _COMPILED:
        for match in pattern.finditer(text):
            _, ref = section.cite_match(match)
            case.failures.append(ReadFailure(what, f"{why}: {match.group(0).strip()[:160]}", remedy, ref))
