"""CPU and memory of the server watchdog: its share of a core, resident memory, open files, over time.

``python benchmarks/watchdog_cost.py --seconds 60 --ranks 8`` starts a fake server (an exposition of a large server's size, rings
of so many workers at 50 steps a second, a log that grows and is rotated, made-up NVML figures) and an observer in a process of its
own, and prints what that process used. ``--pid PID`` observes a real server instead, with the real NVML. Memory includes the
interpreter.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STATS = (
    "(APIServer pid=1) INFO 06-20 12:00:10 [loggers.py:259] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
    "throughput: 512.0 tokens/s, Running: 16 reqs, Waiting: 0 reqs, GPU KV cache usage: 12.0%, Prefix cache hit rate: 0.0%\n"
)


def exposition(tokens: float, kilobytes: int) -> bytes:
    """vLLM's counters among so many kilobytes of histograms."""
    label = '{engine="0",model_name="m"}'
    lines = [
        f"vllm:num_requests_running{label} 16.0", f"vllm:num_requests_waiting{label} 0.0", f"vllm:kv_cache_usage_perc{label} 0.12",
        f"vllm:generation_tokens_total{label} {tokens}", f"vllm:prompt_tokens_total{label} 3000.0",
        f"vllm:iteration_tokens_total_count{label} {tokens / 16}", f"vllm:num_preemptions_total{label} 0.0",
    ]  # fmt: skip
    filler = "".join(
        f'vllm:inter_token_latency_seconds_bucket{{engine="0",le="{number}.0",model_name="m"}} {tokens}\n'
        for number in range(kilobytes * 1024 // 84)
    )
    return (filler + "\n".join(lines) + "\n").encode()


#: With ``--still``: when the fake server stops moving, seconds after its start.
STILL_AFTER_S = 8.0


def worker(folder: Path, rank: int, still: bool) -> None:
    """One worker with the agent's ring: a step every 20 ms, or one at the end that does not end."""
    sys.path.insert(0, str(ROOT / "repro" / "agent" / "src"))
    from dsv4_repro_agent.ring import Ring

    ring = Ring(folder, slots=1024, rank=rank, device=rank, vllm="0.23.0", agent="0.1.0")
    began = time.monotonic()
    while os.getppid() != 1:
        if still and time.monotonic() - began > STILL_AFTER_S:
            ring.beat()
            time.sleep(0.02)
            continue
        step = ring.begin(1)
        step.graph_mode, step.requests, step.tokens = 2, 16, 32
        step.launch_ns = step.record_ns = time.monotonic_ns()
        ring.write(step)
        time.sleep(0.02)
        if still and time.monotonic() - began > STILL_AFTER_S:
            continue
        step.complete_ns = time.monotonic_ns()
        ring.write(step)
        ring.beat()


class FakeNvml:
    """Answers at once: the calls themselves cost nothing here."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_ERROR_TIMEOUT, nvmlEventTypeXidCriticalError = 1, 2, 10, 8  # noqa: N815

    class NVMLError(Exception):
        value = 10

    def __init__(self, cards: int) -> None:
        self.table: dict[str, Any] = {
            "nvmlInit": None, "nvmlDeviceGetCount": cards, "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=95, memory=40),
            "nvmlDeviceGetClockInfo": 1900, "nvmlDeviceGetPowerUsage": 560_000, "nvmlDeviceGetName": "card",
            "nvmlEventSetCreate": 1,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5, total=9), "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceRegisterEvents": None, "nvmlEventSetFree": None, "nvmlDeviceGetPciInfo": SimpleNamespace(busId="x"),
            "nvmlSystemGetDriverVersion": "1", "nvmlSystemGetNVMLVersion": "1", "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetMigMode": (0, 0), "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=0),
        }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        value = self.table[name]
        return lambda *_: value

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802
        return handle

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlEventSetWait_v2(self, *_: Any) -> Any:  # noqa: N802
        raise self.NVMLError("timeout")


def observe(argument: dict[str, Any]) -> None:
    """The observer's process: prints one JSON line a sample."""
    from dsv4_repro.forensics.collect.nvml import Nvml
    from dsv4_repro.repro.serving.observer import Observer
    from dsv4_repro.repro.serving.records import Rank, ServerTarget

    if argument["pid"]:
        from dsv4_repro.repro.serving.ranks import find_server

        target = find_server(argument["pid"])
    else:
        target = ServerTarget(
            base_url=argument["url"],
            ranks=tuple(Rank(pid, rank, 0, gpu_index=rank) for rank, pid in enumerate(argument["pids"])),
            tree=dict.fromkeys(argument["pids"], "worker") | {argument["api"]: "api"},
            api_pid=argument["api"],
            log_path=Path(argument["log"]),
            agent_folder=Path(argument["folder"]),
        )
    states: list[str] = []

    def emit(kind: str, **fields: Any) -> None:
        if kind == "state":
            states.append(fields["state"])

    observer = Observer(target, emit=emit, nvml=Nvml if argument["pid"] else lambda: Nvml(FakeNvml(argument["ranks"])))
    observer.start()
    began, last = time.monotonic(), 0.0
    time.sleep(argument["settle"])
    start, begin_cpu = time.monotonic(), _cpu()
    while time.monotonic() - began < argument["seconds"] + argument["settle"]:
        time.sleep(1.0)
        if time.monotonic() - last >= 10.0:
            last = time.monotonic()
            print(
                json.dumps({"t": round(last - start, 1), "rss_mb": _rss(), "files": len(os.listdir("/proc/self/fd"))}), flush=True
            )
    cpu, wall = _cpu() - begin_cpu, time.monotonic() - start
    latest = observer.latest()
    print(
        json.dumps(
            {
                "cpu_percent_of_a_core": round(100 * cpu / wall, 3),
                "cpu_s": round(cpu, 3),
                "wall_s": round(wall, 1),
                "rss_mb": _rss(),
                "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
                "files": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(),
                "states": states,
                "blind": sorted({blind.signal for blind in latest[1].blind}) if latest else None,
                "failures": observer.failures,
            }
        ),
        flush=True,
    )
    observer.stop()


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rss() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=5.0, help="seconds that are not counted: imports and first looks")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kilobytes", type=int, default=200, help="size of /metrics")
    parser.add_argument("--still", action="store_true", help="the fake server stops moving: what does a hung one cost?")
    parser.add_argument("--pid", type=int, default=0, help="observe this real server instead")
    parser.add_argument("--observe", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.observe:
        observe(json.loads(options.observe))
        return 0
    if options.worker:
        worker(Path(options.worker[0]), int(options.worker[1]), options.still)
        return 0
    common = {"pid": options.pid, "seconds": options.seconds, "settle": options.settle, "ranks": options.ranks}
    if options.pid:
        return subprocess.run([sys.executable, __file__, "--observe", json.dumps(common)], check=False).returncode
    with tempfile.TemporaryDirectory() as name:
        return _against_fake(Path(name), options, common)


def _against_fake(folder: Path, options: argparse.Namespace, common: dict[str, Any]) -> int:
    log = folder / "server.log"
    log.write_text("INFO vLLM API server version 0.23.0\nINFO:     Application startup complete.\n", encoding="utf-8")
    (folder / "rings").mkdir()
    began = time.monotonic()
    stop = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            age = time.monotonic() - began
            moved = min(age, STILL_AFTER_S) if options.still else age
            body = exposition(moved * 800, options.kilobytes) if self.path == "/metrics" else b""
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    def write_log() -> None:
        count = 0
        while not stop.wait(0.1):
            count += 1
            with log.open("a", encoding="utf-8") as stream:
                stream.write(
                    STATS if count % 100 == 0 else f'INFO:     10.0.0.1:{count % 60000} - "POST /v1/completions HTTP/1.1" 200 OK\n'
                )
            if count % 200 == 0:
                log.replace(log.with_suffix(".1"))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threads = [threading.Thread(target=server.serve_forever, daemon=True), threading.Thread(target=write_log, daemon=True)]
    for thread in threads:
        thread.start()
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", str(folder / "rings"), str(rank), *(["--still"] if options.still else [])]
        )
        for rank in range(options.ranks)
    ]
    try:
        argument = common | {
            "url": f"http://127.0.0.1:{server.server_port}",
            "pids": [one.pid for one in workers],
            "api": os.getpid(),
            "log": str(log),
            "folder": str(folder / "rings"),
        }
        return subprocess.run([sys.executable, __file__, "--observe", json.dumps(argument)], check=False).returncode
    finally:
        stop.set()
        for one in workers:
            one.kill()
        for one in workers:
            one.wait(10)
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    sys.exit(main())
