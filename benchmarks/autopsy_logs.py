"""How fast ``autopsy`` reads logs: a gigabyte of one engine log, and an ordinary incident of 20 files and 50 MB.

Writes its inputs to a temporary folder (about 1.1 GB), runs each measurement in a process of its own, and prints wall seconds, CPU
seconds and the peak of resident memory beside the budgets (20 s and 300 MB; 3 s). Run:
``python benchmarks/autopsy_logs.py``, ``--json`` for one document.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_CHILD = """
import json, resource, sys, time
from pathlib import Path
start = time.perf_counter()
from dsv4_repro.forensics.autopsy import autopsy_paths
loaded = time.perf_counter()
result = autopsy_paths([Path(p) for p in sys.argv[1:]])
usage = resource.getrusage(resource.RUSAGE_SELF)
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"import_s": loaded - start, "wall_s": time.perf_counter() - loaded, "cpu_s": usage.ru_utime + usage.ru_stime,
    "rss_mb": peak / 1024, "class": result.diagnosis.verdict.class_, "confidence": result.diagnosis.verdict.confidence}))
"""


def engine_log(megabytes: int, seed: int) -> Iterator[bytes]:
    """Lines as a busy server writes them: access lines, request lines, stats every so often, debug lines."""
    rng = random.Random(seed)
    second, written = 0.0, 0
    while written < megabytes << 20:
        lines = []
        for _ in range(20_000):
            second += 0.05
            clock = f"11-28 {int(second // 3600) % 24:02d}:{int(second // 60) % 60:02d}:{int(second) % 60:02d}"
            kind = rng.random()
            if kind < 0.45:
                lines.append(
                    f'INFO:     10.0.{rng.randrange(256)}.{rng.randrange(256)}:{rng.randrange(65536)} - "POST '
                    '/v1/chat/completions HTTP/1.1" 200 OK'
                )
            elif kind < 0.8:
                lines.append(
                    f"(APIServer pid=1) INFO {clock} [async_llm.py:{rng.randrange(900)}] Added request "
                    f"chatcmpl-{rng.getrandbits(128):032x}."
                )
            elif kind < 0.81:
                lines.append(
                    f"(APIServer pid=1) INFO {clock} [loggers.py:271] Engine 000: Avg prompt throughput: "
                    f"{rng.random() * 1000:.1f} tokens/s, "
                    f"Avg generation throughput: {rng.random() * 1000:.1f} tokens/s, Running: {rng.randrange(1, 16)} reqs, "
                    "Waiting: 0 reqs, "
                    "GPU KV cache usage: 4.1%, Prefix cache hit rate: 0.0%"
                )
            else:
                lines.append(
                    f"(Worker_TP{rng.randrange(8)} pid=4{rng.randrange(900)}) DEBUG {clock} "
                    f"[gpu_model_runner.py:{rng.randrange(3000)}] step of {rng.randrange(64)} tokens"
                )
        block = ("\n".join(lines) + "\n").encode()
        written += len(block)
        yield block


def write_inputs(folder: Path) -> tuple[Path, Path]:
    large = folder / "engine.log"
    base = b"".join(engine_log(64, 1))
    with large.open("wb") as handle:
        for _ in range(16):
            handle.write(base)
    incident = folder / "incident"
    incident.mkdir()
    for number in range(18):
        (incident / f"worker_{number}.log").write_bytes(b"".join(engine_log(2, number))[:2_700_000])
    rows = "".join(
        f"2026/11/28 {i // 3600 % 24:02d}:{i // 60 % 60:02d}:{i % 60:02d}.000, {i % 8}, 100 %, 0 %, 121.00 W\n"
        for i in range(20_000)
    )
    (incident / "gpu.csv").write_text("timestamp, index, utilization.gpu [%], utilization.memory [%], power.draw [W]\n" + rows)
    (incident / "dmesg.txt").write_text("".join(f"[{i}.123456] usb 1-1: new device number {i}\n" for i in range(10_000)))
    return large, incident


def measure(path: Path) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", _CHILD, str(path)], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        large, incident = write_inputs(Path(name))
        results = {
            "log of 1 GiB": {"budget_s": 20.0, "budget_mb": 300.0, "runs": [measure(large) for _ in range(arguments.repeat)]},
            "20 files, 50 MB": {"budget_s": 3.0, "budget_mb": 300.0, "runs": [measure(incident) for _ in range(arguments.repeat)]},
        }
    if arguments.json:
        print(json.dumps(results, indent=1))
        return 0
    for title, entry in results.items():
        for run in entry["runs"]:  # type: ignore[attr-defined]
            print(
                f"{title}: {run['wall_s']:.1f} s wall, {run['cpu_s']:.1f} s CPU with imports, {run['rss_mb']:.0f} MB  (budget "
                f"{entry['budget_s']} s, {entry['budget_mb']} MB)"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
