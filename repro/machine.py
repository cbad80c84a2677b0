"""What this machine, container and user are: facts gathered for ``doctor``, ``list`` and the default ground. Reads only.

Every fact that could not be read is None with its reason in ``Machine.unread``; nothing here raises for a missing driver, tool or
permission. The slow ones (tools' versions) run under a deadline each.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..forensics.device_state import Unread

__all__ = ["Disk", "Gpu", "Machine", "Tool", "package_versions", "probe_gpus", "probe_machine", "run_versions"]

#: Distributions whose versions a report names; not imported.
PACKAGES = (
    "dsv4-repro", "cuda-bindings", "nvidia-ml-py", "nvidia-cuda-nvrtc", "nvidia-cuda-nvdisasm", "nvidia-cuda-cuobjdump",
    "numpy", "pyelftools", "z3-solver", "torch", "vllm", "flashinfer-python", "ray", "py-spy",
)  # fmt: skip

_CAPABILITIES = {"CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_SYSLOG": 34, "CAP_PERFMON": 38}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML describes it. ``sm``: e.g. 90. ``processes``: pids of compute processes, None if they cannot be listed."""

    index: int
    name: str
    sm: int | None
    memory_bytes: int | None
    processes: tuple[int, ...] | None
    display: bool | None = None
    mig: bool | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """An external program. ``version``: its own words, one line; None if it is not there or did not answer (``why``)."""

    name: str
    path: str | None
    version: str | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Disk:
    """A folder that runs write to. ``free_bytes`` None: cannot be read."""

    label: str
    path: str
    free_bytes: int | None
    writable: bool


@dataclass(frozen=True)
class Machine:
    """The facts. None: not known, and why is in ``unread``."""

    system: str
    kernel: str
    wsl: bool
    python: str
    uid: int
    driver: str | None
    cuda_driver: str | None
    libcuda: bool
    gpus: tuple[Gpu, ...] | None
    packages: Mapping[str, str | None]
    tools: Mapping[str, Tool]
    ptrace_scope: int | None
    capabilities: frozenset[str] | None
    no_new_privs: bool | None
    seccomp: int | None
    dmesg: bool
    dmesg_why: str
    hidepid: str | None
    container: str | None
    read_only_root: bool
    cpus: float
    memory_bytes: int | None
    pids_limit: int | None
    core_pipe: bool
    disks: tuple[Disk, ...] = ()
    unread: tuple[Unread, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)


def _read(path: str, limit: int = 65536) -> str | None:
    try:
        with open(path, "rb") as stream:
            return stream.read(limit).decode("utf-8", errors="replace")
    except OSError:
        return None


def _int(text: str | None) -> int | None:
    match = re.match(r"\s*(-?\d+)\s*$", text or "")
    return int(match.group(1)) if match else None


def _status_field(status: str | None, name: str) -> str | None:
    match = re.search(rf"^{name}:\s*(\S+)", status or "", re.MULTILINE)
    return match.group(1) if match else None


def _capabilities(status: str | None) -> frozenset[str] | None:
    effective = _status_field(status, "CapEff")
    if effective is None:
        return None
    bits = int(effective, 16)
    return frozenset(name for name, bit in _CAPABILITIES.items() if bits >> bit & 1)


def _container() -> str | None:
    if os.path.exists("/.dockerenv"):
        return "docker"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    match = re.search(r"(docker|containerd|libpod|kubepods|lxc)", _read("/proc/1/cgroup") or "")
    return match.group(1) if match else None


def _mount_options(target: str) -> tuple[str, ...]:
    """Options of the last mount on ``target`` (both the mount's and the file system's), empty if it is not a mount point."""
    options: tuple[str, ...] = ()
    for line in (_read("/proc/self/mountinfo", 1 << 20) or "").splitlines():
        head, _, tail = line.partition(" - ")
        parts = head.split()
        if len(parts) > 5 and parts[4] == target:
            options = (*parts[5].split(","), *(tail.split()[2].split(",") if len(tail.split()) > 2 else ()))
    return options


def _memory_limit() -> int | None:
    limits = [
        value
        for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
        if (value := _int(_read(path))) is not None
    ]
    match = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo") or "", re.MULTILINE)
    if match:
        limits.append(int(match.group(1)) * 1024)
    return min(limits) if limits else None


def _cpu_limit() -> float:
    count = float(len(os.sched_getaffinity(0)))
    quota = (_read("/sys/fs/cgroup/cpu.max") or "").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
        return min(count, int(quota[0]) / int(quota[1]))
    return count


def _dmesg() -> tuple[bool, str]:
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        restricted = _int(_read("/proc/sys/kernel/dmesg_restrict"))
        return False, f"/dev/kmsg: {error.strerror}" + (f"; dmesg_restrict={restricted}" if restricted is not None else "")
    try:
        os.read(fd, 8192)
    except BlockingIOError:
        pass  # readable, and nothing new in it
    except OSError as error:
        return False, f"/dev/kmsg: {error.strerror}"
    finally:
        os.close(fd)
    return True, ""


def _core_pipe() -> bool:
    """Whether a named pipe can be made where dumps are written: the driver makes one to be triggered by."""
    with tempfile.TemporaryDirectory(prefix="dsv4-repro-") as folder:
        try:
            os.mkfifo(os.path.join(folder, "pipe"))
        except OSError:
            return False
    return True


def _run_version(argv: Sequence[str], timeout_s: float = 10.0) -> str | None:
    """The last line with a digit of what a program prints as its version; None if it cannot be run or does not answer."""
    try:
        done = subprocess.run(argv, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in (done.stdout + done.stderr)[:20000].decode("utf-8", errors="replace").splitlines()]
    numbered = [line for line in lines if re.search(r"\d+\.\d+", line)]
    return numbered[0][:200] if numbered else None


def _cuda_gdb() -> str | None:
    found = shutil.which("cuda-gdb")
    if found:
        return found
    candidates = sorted(Path("/usr/local").glob("cuda*/bin/cuda-gdb"), reverse=True)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        candidates.insert(0, Path(home) / "bin" / "cuda-gdb")
    return next((str(path) for path in candidates if os.access(path, os.X_OK)), None)


def _wheel_tool(name: str) -> str | None:
    """A program of NVIDIA's wheels (``nvidia/cu*/bin``) beside this interpreter's packages, else on PATH."""
    import sysconfig

    for key in ("purelib", "platlib"):
        for folder in sorted(Path(sysconfig.get_paths()[key]).glob("nvidia/*/bin"), reverse=True):
            if os.access(folder / name, os.X_OK):
                return str(folder / name)
    return shutil.which(name)


def _tools(version: Callable[[Sequence[str]], str | None]) -> dict[str, Tool]:
    import sysconfig

    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    found: dict[str, str | None] = {
        "nvdisasm": _wheel_tool("nvdisasm"),
        "cuobjdump": _wheel_tool("cuobjdump"),
        "cuda-gdb": _cuda_gdb(),
        "py-spy": str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy"),
    }
    tools = {}
    for name, path in found.items():
        words = version([path, "--version"]) if path else None
        why = "not found" if path is None else "" if words else "does not answer --version"
        tools[name] = Tool(name, path, words, why)
    return tools


def _disk(label: str, path: Path) -> Disk:
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        free: int | None = shutil.disk_usage(existing).free
    except OSError:
        free = None
    return Disk(label, str(path), free, os.access(existing, os.W_OK))


def package_versions() -> dict[str, str | None]:
    """Versions of the distributions that a report names, None where one is not installed; none of them is imported."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def run_versions() -> dict[str, str]:
    """What made a run, for its record: Python, this package, and those of ``PACKAGES`` that are installed beside it."""
    installed = {name: text for name, text in package_versions().items() if text}
    return {"python": sys.version.split()[0], "dsv4-repro": __version__, **installed}


def _text(value: Any) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def _one_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *more: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *more)
        except (nvml.NVMLError, AttributeError):
            return None

    capability = ask("nvmlDeviceGetCudaComputeCapability")
    memory = ask("nvmlDeviceGetMemoryInfo")
    processes = ask("nvmlDeviceGetComputeRunningProcesses")
    display = ask("nvmlDeviceGetDisplayActive")
    mig = ask("nvmlDeviceGetMigMode")
    return Gpu(
        index=index,
        name=_text(ask("nvmlDeviceGetName") or "unknown"),
        sm=capability[0] * 10 + capability[1] if capability else None,
        memory_bytes=int(memory.total) if memory else None,
        processes=tuple(int(process.pid) for process in processes) if processes is not None else None,
        display=bool(display) if display is not None else None,
        mig=bool(mig[0]) if mig else None,
    )


def probe_gpus() -> tuple[str | None, str | None, tuple[Gpu, ...] | None, str]:
    """(driver version, CUDA version of the driver, GPUs, why not): through NVML, which makes no CUDA context."""
    try:
        import pynvml as nvml
    except ImportError as error:
        return None, None, None, f"nvidia-ml-py cannot be imported: {error}"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, None, None, f"NVML: {error}"
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        gpus = tuple(_one_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as error:
        return None, None, None, f"NVML: {error}"
    finally:
        nvml.nvmlShutdown()
    return driver, f"{number // 1000}.{number % 1000 // 10}", gpus, ""


def probe_machine(
    *, runs: Path = Path("runs"), cache: Path | None = None, version: Callable[[Sequence[str]], str | None] = _run_version
) -> Machine:
    """Gather the facts of this machine. ``version`` runs a program and returns its version line (a fake in tests)."""
    if cache is None:
        from ..kernels.cache import cache_root

        cache = cache_root()
    driver, cuda_driver, gpus, why_gpus = probe_gpus()
    unread = [Unread("GPUs", why_gpus)] if gpus is None else []
    status = _read("/proc/self/status")
    dmesg, dmesg_why = _dmesg()
    proc_options = _mount_options("/proc")
    scope = _int(_read("/proc/sys/kernel/yama/ptrace_scope"))
    release = platform.release()
    privs = _int(_status_field(status, "NoNewPrivs"))
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        kernel=release,
        wsl="microsoft" in release.lower(),
        python=platform.python_version(),
        uid=os.getuid(),
        driver=driver,
        cuda_driver=cuda_driver,
        libcuda=ctypes.util.find_library("cuda") is not None,
        gpus=gpus,
        packages=package_versions(),
        tools=_tools(version),
        ptrace_scope=scope,
        capabilities=_capabilities(status),
        no_new_privs=bool(privs) if privs is not None else None,
        seccomp=_int(_status_field(status, "Seccomp")),
        dmesg=dmesg,
        dmesg_why=dmesg_why,
        hidepid=next((option.partition("=")[2] for option in proc_options if option.startswith("hidepid=")), None),
        container=_container(),
        read_only_root="ro" in _mount_options("/"),
        cpus=_cpu_limit(),
        memory_bytes=_memory_limit(),
        pids_limit=_int(_read("/sys/fs/cgroup/pids.max")),
        core_pipe=_core_pipe(),
        disks=(
            _disk("runs", runs.absolute()),
            _disk("cache", cache),
            _disk("temporary files", Path(tempfile.gettempdir())),
            _disk("shared memory", Path("/dev/shm")),
        ),
        unread=tuple(unread),
    )
