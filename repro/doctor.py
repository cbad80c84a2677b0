"""What this machine, container and user can do, each with its remedy: pure judgements over the facts of ``machine``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .atomic import keep_document
from .console import Screen, wrap
from .grounds import grounds_here
from .leftovers import Leftover, end_leftovers, find_leftovers
from .machine import Machine, Tool, probe_machine

if TYPE_CHECKING:
    from .options import Common

__all__ = ["DOCTOR_SCHEMA", "Check", "DoctorReport", "checks", "doctor_lines", "report", "run_doctor"]

DOCTOR_SCHEMA = "dsv4-repro/doctor/1"

State = Literal["yes", "limited", "no", "unknown"]
_GIB = 1 << 30
#: Below this a run with core dumps may not fit (bytes).
_DISK_WANTED = 2 * _GIB
_MEMORY_WANTED = 2 * _GIB


class Check(BaseModel):
    """One thing that can or cannot be done here. ``found``: what was seen; ``remedy``: what to do where ``state`` is not yes."""

    model_config = ConfigDict(frozen=True)

    id: str
    what: str
    state: State
    found: str
    remedy: str = ""


class DoctorReport(BaseModel):
    """The document of ``dsv4-repro doctor --json``."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    schema_: str = Field(default=DOCTOR_SCHEMA, alias="schema", serialization_alias="schema")
    outcome: Literal["clean"] = "clean"
    machine: dict[str, Any]
    checks: tuple[Check, ...]
    grounds: dict[str, str]
    leftovers: tuple[dict[str, Any], ...] = ()
    cleaned: dict[str, str] = Field(default_factory=dict)


def checks(machine: Machine) -> list[Check]:
    """Every check, in the order in which a run would need it."""
    return [
        _driver(machine),
        _gpus(machine),
        *_free_gpus(machine),
        _nvrtc(machine),
        _tool(machine.tools["nvdisasm"], "disassemble machine code", "pip install nvidia-cuda-nvdisasm"),
        _tool(machine.tools["cuobjdump"], "take kernels out of a vLLM wheel", "pip install nvidia-cuda-cuobjdump"),
        _cuda_gdb(machine),
        _tool(machine.tools["py-spy"], "read the host stacks of Python processes", "pip install py-spy"),
        _ptrace(machine),
        _core_pipe(machine),
        _dmesg(machine),
        _proc(machine),
        *_disks(machine),
        _limits(machine),
        _served(machine),
    ]


def _driver(machine: Machine) -> Check:
    what = "talk to an NVIDIA driver"
    if machine.driver is not None:
        return Check(id="driver", what=what, state="yes", found=f"driver {machine.driver}, CUDA {machine.cuda_driver}")
    why = next((item.why for item in machine.unread if item.what == "GPUs"), "no driver library")
    remedy = "Nothing is needed for --on cpu, autopsy and audit. For a GPU: install NVIDIA's driver"
    remedy += "; in a container start it with --gpus all." if machine.container else "."
    return Check(id="driver", what=what, state="no", found=why, remedy=remedy)


def _gpus(machine: Machine) -> Check:
    what = "run kernels on a GPU"
    if machine.gpus is None:
        return Check(id="gpus", what=what, state="no", found="no driver", remedy="dsv4-repro run drain --on cpu --arch sm_120")
    if not machine.gpus:
        remedy = "Check CUDA_VISIBLE_DEVICES and the container's --gpus; nvidia-smi -L must list a GPU."
        return Check(id="gpus", what=what, state="no", found="a driver, but no GPU", remedy=remedy)
    names = "; ".join(f"{gpu.index}: {gpu.name} (sm_{gpu.sm if gpu.sm is not None else '?'})" for gpu in machine.gpus)
    return Check(id="gpus", what=what, state="yes", found=names)


def _free_gpus(machine: Machine) -> list[Check]:
    found = []
    for gpu in machine.gpus or ():
        what = f"use GPU {gpu.index} alone"
        identity = f"gpu-{gpu.index}-free"
        if gpu.processes is None:
            remedy = "nvidia-smi shows who uses it; --share says that you know."
            found.append(Check(id=identity, what=what, state="unknown", found="its processes cannot be listed", remedy=remedy))
        elif gpu.processes:
            pids = ", ".join(map(str, gpu.processes[:8]))
            remedy = "Take another one (--device N), end them, or say --share."
            found.append(Check(id=identity, what=what, state="limited", found=f"compute processes: {pids}", remedy=remedy))
        elif gpu.display:
            remedy = "A display GPU has a run-time limit on kernels and cannot be debugged; use another one."
            found.append(Check(id=identity, what=what, state="limited", found="drives a display", remedy=remedy))
        else:
            found.append(Check(id=identity, what=what, state="yes", found="no compute process"))
    return found


def _nvrtc(machine: Machine) -> Check:
    what = "compile our own kernels"
    version = machine.packages.get("nvidia-cuda-nvrtc")
    if version is None:
        return Check(id="nvrtc", what=what, state="no", found="NVRTC is not installed", remedy="pip install nvidia-cuda-nvrtc")
    return Check(id="nvrtc", what=what, state="yes", found=f"nvidia-cuda-nvrtc {version}")


def _tool(tool: Tool, what: str, remedy: str) -> Check:
    if tool.path is None:
        return Check(id=tool.name, what=what, state="no", found=f"{tool.name} not found", remedy=remedy)
    if tool.version is None:
        return Check(id=tool.name, what=what, state="limited", found=f"{tool.path}: {tool.why}", remedy=remedy)
    return Check(id=tool.name, what=what, state="yes", found=f"{tool.version} ({tool.path})")


def _cuda_gdb(machine: Machine) -> Check:
    remedy = (
        "Install the CUDA toolkit's cuda-gdb (12.8 or later for SM120, 12.9 for SM121) and put it on PATH. "
        "A GPU core dump needs none of it."
    )
    check = _tool(machine.tools["cuda-gdb"], "attach to a hung GPU process", remedy)
    if check.state == "yes" and machine.wsl:
        return check.model_copy(
            update={"state": "limited", "remedy": "Under WSL attaching to the GPU is not supported: use Linux."}
        )
    return check


def _ptrace(machine: Machine) -> Check:
    what = "attach to processes (cuda-gdb, py-spy)"
    if machine.capabilities is not None and "CAP_SYS_PTRACE" in machine.capabilities:
        return Check(id="ptrace", what=what, state="yes", found="CAP_SYS_PTRACE")
    scope = machine.ptrace_scope
    in_container = "Docker: --cap-add=SYS_PTRACE; Kubernetes: securityContext.capabilities.add SYS_PTRACE. "
    remedy = (in_container if machine.container else "") + "Or run as root, or: sysctl kernel.yama.ptrace_scope=0"
    if scope is None:
        if machine.container and machine.seccomp == 2:
            found = "no Yama, but a seccomp filter that may forbid ptrace"
            return Check(id="ptrace", what=what, state="unknown", found=found, remedy=remedy)
        return Check(id="ptrace", what=what, state="yes", found="own processes; no Yama restriction")
    if scope == 0:
        return Check(id="ptrace", what=what, state="yes", found="ptrace_scope=0: own processes")
    if scope == 1:
        found = "ptrace_scope=1: only children that allow it; our own workload does, other processes do not"
        return Check(id="ptrace", what=what, state="limited", found=found, remedy=remedy)
    return Check(id="ptrace", what=what, state="no", found=f"ptrace_scope={scope} and no CAP_SYS_PTRACE", remedy=remedy)


def _core_pipe(machine: Machine) -> Check:
    what = "take a GPU core dump of a workload of ours"
    if machine.wsl:
        return Check(id="core-dump", what=what, state="no", found="WSL has no user-triggered dumps", remedy="Use Linux.")
    if not machine.core_pipe:
        remedy = "Point TMPDIR at a local file system that holds named pipes."
        return Check(
            id="core-dump", what=what, state="no", found="no named pipe can be made in the temporary folder", remedy=remedy
        )
    if machine.driver is None:
        return Check(
            id="core-dump", what=what, state="no", found="no driver", remedy="A dump from another machine can be read here."
        )
    return Check(id="core-dump", what=what, state="yes", found="named pipes work; the driver decides the rest when the run starts")


def _dmesg(machine: Machine) -> Check:
    what = "read the kernel log (Xid, out-of-memory kills)"
    if machine.dmesg:
        return Check(id="dmesg", what=what, state="yes", found="/dev/kmsg can be read")
    remedy = (
        "Run as root or: sysctl kernel.dmesg_restrict=0 (in a container also mount /dev/kmsg). Xid events come through NVML too."
    )
    return Check(id="dmesg", what=what, state="no", found=machine.dmesg_why, remedy=remedy)


def _proc(machine: Machine) -> Check:
    what = "see other processes in /proc"
    if machine.hidepid and machine.hidepid not in {"0", "off"} and machine.uid != 0:
        remedy = "Remount /proc with hidepid=0, or run as root or as the server's user."
        return Check(id="proc", what=what, state="limited", found=f"/proc is mounted with hidepid={machine.hidepid}", remedy=remedy)
    if machine.container:
        remedy = "Run inside the server's container, or start this one with --pid=container:NAME (or --pid=host)."
        return Check(
            id="proc", what=what, state="limited", found=f"in a container ({machine.container}): its own processes", remedy=remedy
        )
    return Check(id="proc", what=what, state="yes", found="all processes")


def _disks(machine: Machine) -> list[Check]:
    found = []
    for disk in machine.disks:
        identity = f"disk-{re.sub(r'[^a-z]+', '-', disk.label)}"
        what = f"write {disk.label}"
        remedy = {
            "runs": "Write elsewhere: --out DIR",
            "cache": "Put the cache elsewhere: DSV4_REPRO_CACHE=DIR",
            "temporary files": "Point TMPDIR elsewhere.",
        }.get(disk.label, "Docker: --shm-size 2g")
        if not disk.writable:
            found.append(Check(id=identity, what=what, state="no", found=f"{disk.path} cannot be written", remedy=remedy))
        elif disk.free_bytes is None:
            found.append(Check(id=identity, what=what, state="unknown", found=f"{disk.path}: free space unknown", remedy=remedy))
        else:
            free = f"{disk.path}: {disk.free_bytes / _GIB:.1f} GiB free"
            small = disk.free_bytes < (_DISK_WANTED if disk.label != "shared memory" else 64 << 20)
            found.append(
                Check(id=identity, what=what, state="limited" if small else "yes", found=free, remedy=remedy if small else "")
            )
    return found


def _limits(machine: Machine) -> Check:
    memory = f"{machine.memory_bytes / _GIB:.1f} GiB of memory" if machine.memory_bytes is not None else "memory unknown"
    found = f"{machine.cpus:g} CPUs, {memory}"
    if machine.pids_limit is not None:
        found += f", {machine.pids_limit} processes"
    tight = []
    if machine.memory_bytes is not None and machine.memory_bytes < _MEMORY_WANTED:
        tight.append("give it 2 GiB of memory")
    if machine.pids_limit is not None and machine.pids_limit < 128:
        tight.append("allow 128 processes")
    if machine.read_only_root:
        tight.append("the root file system is read-only: cuda-gdb needs it writable")
    state: State = "limited" if tight else "yes"
    remedy = "Raise the container's limits: " + "; ".join(tight) if tight else ""
    return Check(id="limits", what="use enough CPU and memory", state=state, found=found, remedy=remedy)


def _served(machine: Machine) -> Check:
    vllm, torch = machine.packages.get("vllm"), machine.packages.get("torch")
    what = "launch by vLLM's own code (--via op)"
    if vllm is None:
        remedy = "Only for --via op and --kernel installed: pip install vllm. Everything else works without it."
        return Check(id="vllm", what=what, state="no", found="vLLM is not installed here", remedy=remedy)
    return Check(id="vllm", what=what, state="yes", found=f"vllm {vllm}, torch {torch or 'not installed'}")


def report(
    machine: Machine,
    leftovers: Sequence[Leftover] = (),
    cleaned: dict[int, str] | None = None,
    more: Sequence[Check] = (),
) -> DoctorReport:
    """The document. ``more``: checks of a server, after those of the machine."""
    facts = {
        "system": machine.system,
        "kernel": machine.kernel,
        "python": machine.python,
        "container": machine.container,
        "driver": machine.driver,
        "gpus": [gpu.name for gpu in machine.gpus or ()],
        "packages": dict(machine.packages),
    }
    return DoctorReport(
        machine=facts,
        checks=(*checks(machine), *more),
        grounds=grounds_here(machine),
        leftovers=tuple({"pid": item.pid, "run": item.run, "command": item.command} for item in leftovers),
        cleaned={str(pid): how for pid, how in (cleaned or {}).items()},
    )


def doctor_lines(document: DoctorReport) -> list[str]:
    """What a person reads, at most 80 columns but for paths."""
    facts = document.machine
    where = f", container: {facts['container']}" if facts["container"] else ""
    lines = [f"{facts['system']}, Linux {facts['kernel']}, Python {facts['python']}{where}", ""]
    for check in document.checks:
        lines += wrap(f"{check.state:<8}{check.what}: {check.found}", indent=" " * 8)
        if check.remedy and check.state != "yes":
            lines += wrap(f"{'':8}→ {check.remedy}", indent=" " * 10)
    lines.append("")
    for ground, answer in document.grounds.items():
        lines += wrap(f"--on {ground:<7}{answer}", indent=" " * 12)
    for leftover in document.leftovers:
        how = document.cleaned.get(str(leftover["pid"]))
        lines += wrap(f"leftover process {leftover['pid']} of {leftover['run']}: {how or 'still there'}", indent="  ")
    if document.leftovers and not document.cleaned:
        lines.append("End them: dsv4-repro doctor --clean")
    return lines


def run_doctor(common: Common, *, clean: bool, pid: int | None = None, model: tuple[Path, int, int, str] | None = None) -> int:
    """The verb: 0 always, whatever is missing; a leftover is ended only with ``--clean`` and consent.

    ``pid``: of a server, whose workers are asked whether the agent is armed. UnavailableError: no such process.
    ``model``: (its folder or config.json, tensor-parallel size, draft tokens, release of FlashInfer). EvidenceError: none there.
    """
    screen = Screen(as_json=common.as_json)
    screen.progress("looking at this machine")
    machine = probe_machine(runs=common.out or Path("runs"))
    leftovers = find_leftovers()
    cleaned: dict[int, str] = {}
    if clean and leftovers and (common.yes or _consent(screen, leftovers)):
        cleaned = end_leftovers(leftovers)
    more: Sequence[Check] = ()
    if pid is not None:
        from .armed import armed_of

        more = armed_of(pid)
    if model is not None:
        from .sparse_instances import instance_checks

        more = [*more, *instance_checks(*model)]
    document = report(machine, leftovers, cleaned, more)
    screen.end_progress()
    screen.say(*doctor_lines(document))
    kept = document.model_dump(mode="json", by_alias=True)
    keep_document(common.out, "doctor", kept)
    screen.document(kept)
    return 0


def _consent(screen: Screen, leftovers: Sequence[Leftover]) -> bool:
    for leftover in leftovers:
        screen.note(f"{leftover.pid}: {leftover.command} (run {leftover.run})")
    if not sys.stdin.isatty():
        screen.note("Not ended: say --yes.")
        return False
    screen.note(f"End {len(leftovers)} processes? [y/N]")
    return sys.stdin.readline().strip().lower() in {"y", "yes"}
