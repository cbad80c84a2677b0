"""The cheapest next measurement, as a command to paste: what would move this verdict most, least intrusive first.

Metrics and nvidia-smi disturb nothing; py-spy pauses for milliseconds; RAS is a query; a debugger freezes the process, and where a
tool was refused before, the command says what it needs.
"""

from __future__ import annotations

from .base import STRONG
from .view import View

__all__ = ["next_step"]

_METRICS = (
    "for i in 1 2; do curl -s --max-time 5 http://127.0.0.1:8000/metrics | "
    "grep -E '^vllm:(num_requests|generation_tokens|num_preemptions|kv_cache)'; sleep 30; done"
)
_SMI = "nvidia-smi --query-gpu=timestamp,index,utilization.gpu,utilization.memory,power.draw,power.limit --format=csv -l 5"
_RAS = "for i in 1 2; do echo 'verbose status' | nc -q 5 localhost 28028; sleep 30; done"
_DMESG = "sudo dmesg -T | grep -E 'NVRM|Xid|oom-kill|Killed process|segfault|blocked for more'"
_PS = "ps -eo pid,ppid,stat,wchan:32,pcpu,etime,args | grep -iE 'vllm|Engine|Worker|ptxas|cicc|nvcc|ninja'"
_GDB = (
    "sudo cuda-gdb -p {pid} -batch -iex 'set auto-solib-add off' -ex 'info cuda kernels' -ex 'info cuda blocks' -ex 'info "
    "cuda warps' "
    "-ex 'x/24i $pc-0x80' -ex 'info registers'"
)
_SPY = "for i in 1 2; do for p in {pids}; do sudo py-spy dump --pid $p; done; sleep 30; done"
_ALL_PIDS = "$(pgrep -f 'VLLM::|EngineCore|Worker_TP')"


def _pids(view: View) -> str:
    known = [p.pid for p in view.processes if p.pid is not None]
    named = [e.pid for e in view.case.events if e.pid is not None and e.process.startswith(("Worker", "EngineCore", "VllmWorker"))]
    unique = list(dict.fromkeys([*known, *named]))
    return " ".join(str(pid) for pid in unique[:16]) if unique else _ALL_PIDS


def _worker_pid(view: View) -> str:
    for process in view.workers:
        if process.pid is not None:
            return str(process.pid)
    for facts in view.case.devices:
        if facts.pid is not None:
            return str(facts.pid)
    for event in view.case.events:
        if event.pid is not None and event.process.startswith(("Worker", "VllmWorker")):
            return str(event.pid)
    return "WORKER_PID"


def _refused(view: View) -> bool:
    return any("ptrace" in f.why or "traced" in f.why or "may not trace" in f.why for f in view.case.failures)


def next_step(class_: str, strength: int, view: View, open_classes: list[str]) -> str:
    """One command. It is chosen by what is missing, in the order of the questions."""
    gpu_read, stacks, looked = bool(view.gpus), bool(view.case.threads), any(d.kernels is not None for d in view.case.devices)
    gdb = _GDB.format(pid=_worker_pid(view))
    if class_ == "unknown":
        if not gpu_read:
            return _SMI
        if view.flow.counters is None and not view.gave_up:
            return _METRICS
        if not stacks:
            return _SPY.format(pids=_pids(view))
        return _RAS if not view.case.ras and view.single_gpu is not True else gdb
    if class_ in ("gpu-kernel-stuck", "gpu-crossrank-spin"):
        if view.single_gpu is not True and not view.case.ras:
            return _RAS
        if _refused(view):
            return f"# as root, or with CAP_SYS_PTRACE, and nothing else attached:\n{gdb}"
        return gdb
    if class_ in ("gpu-spin-barrier", "gpu-barrier-intra-block"):
        if strength < STRONG or not looked:
            return gdb
        return "dsv4-repro audit installed    # is the loaded build one of the affected ones? read-only, no GPU"
    if class_ in ("collective-desync", "collective-stuck"):
        if len(view.case.ras) < 2:
            return _RAS
        return _SPY.format(pids=_pids(view)) if class_ == "collective-desync" else gdb
    if class_ in ("host-jit-compile", "host-jit-lock"):
        return _PS if not view.process_table else _SPY.format(pids=_pids(view))
    if class_ == "host-weight-load":
        pid = _worker_pid(view)
        return f"for i in 1 2; do grep rchar /proc/{pid}/io; cat /proc/{pid}/wchan; echo; sleep 30; done"
    if class_ in ("host-ipc-stall", "host-cpu-livelock"):
        return _SMI if not gpu_read else _SPY.format(pids=_pids(view))
    if class_ in ("scheduler-stall", "kv-pressure-thrash", "kv-transfer-stall"):
        return _METRICS
    if class_ == "worker-dead":
        return (
            _DMESG
            if not view.case.kernel_log_seen
            else "journalctl -k --since '-2h' | grep -E 'oom|Killed|segfault'; free -g; cat /sys/fs/cgroup/memory.max"
        )
    if class_ == "gpu-fault":
        return (
            _DMESG if not view.case.kernel_log_seen
            else "CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 CUDA_COREDUMP_SHOW_PROGRESS=1 CUDA_COREDUMP_FILE=/tmp/core_%h_%p.nvcudmp "
            "CUDA_COREDUMP_GENERATION_FLAGS=skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory "
            "vllm serve …"
        )  # fmt: skip
    if class_ == "gpu-lost":
        return "nvidia-smi -q | grep -E 'GPU 0|Xid|Recovery|Pending|Retired'; sudo dmesg -T | grep -E 'NVRM|Xid'"
    if class_ == "launch-refused":
        return "dsv4-repro doctor    # SMs, shared memory and resident CTAs of this card"
    if class_ == "wrong-result":
        return "dsv4-repro verify drain --on cpu    # the same kernel against the reference, no GPU needed"
    return _METRICS
