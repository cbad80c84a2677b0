"""The whole of ``dsv4-repro run drain --on cpu`` as its user meets it: process start to report, cold and warm, and its memory.

    python benchmarks/cpu_drain.py                                    builtin and builtin:guard
    python benchmarks/cpu_drain.py --kernel vllm==0.27.1 --runs 5     a release: cold includes fetching its code, from the index

Cold: an empty cache (compiles the kernel, disassembles it, generates and compiles the interpreter's blocks). Warm: the cache of the
cold run. Medians; the memory is the largest resident set of the process and its children. Exit status 3 if a run of the builtin
kernel is over its limit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

#: Seconds, warm and cold, and MiB, that the default run was built against.
LIMITS = {"warm": 5.0, "cold": 12.0}
MOST_MIB = 400


@dataclass(frozen=True)
class Run:
    wall: float
    cpu: float
    mib: float
    status: int
    verdict: str


def once(arguments: list[str], cache: Path, folder: Path) -> Run:
    environment = {**os.environ, "DSV4_REPRO_CACHE": str(cache)}
    command = [sys.executable, "-m", "dsv4_repro.repro", "run", "drain", "--on", "cpu", *arguments, "--out", str(folder)]
    began = time.monotonic()
    with open(folder.with_suffix(".out"), "w+", encoding="utf-8") as out:
        child = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - began
        out.seek(0)
        words = [line.strip() for line in out if line.startswith(("HANG", "CLEAN", "OTHER", "INCONCLUSIVE"))]
    return Run(
        wall,
        used.ru_utime + used.ru_stime,
        used.ru_maxrss / 1024,
        child.returncode,
        words[0] if words else f"no verdict, exit status {child.returncode}",
    )


def line(name: str, state: str, runs: list[Run]) -> str:
    wall, cpu = (statistics.median(getattr(run, field) for run in runs) for field in ("wall", "cpu"))
    memory = max(run.mib for run in runs)
    return f"{name:<22} {state:<5} wall {wall:5.2f} s  cpu {cpu:5.2f} s  memory {memory:4.0f} MiB  {runs[0].verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("arguments", nargs="*", help="further flags of run drain, after --")
    options = parser.parse_args()
    over = False
    for kernel in options.kernel or ["builtin", "builtin:guard"]:
        found: dict[str, list[Run]] = {"cold": [], "warm": []}
        with tempfile.TemporaryDirectory() as scratch:
            for number in range(options.runs):
                for state in ("cold", "warm"):
                    place = Path(scratch, f"{state}{number}")
                    found[state].append(once(["--kernel", kernel, *options.arguments], Path(scratch, f"cache{number}"), place))
        for state, runs in found.items():
            print(line(kernel, state, runs), flush=True)
            if kernel.startswith("builtin") and not options.arguments:
                over |= statistics.median(run.wall for run in runs) > LIMITS[state] or max(run.mib for run in runs) > MOST_MIB
    return 3 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
