"""How fast the interpreter is: the figures of the README's table of the CPU ground.

    python benchmarks/cpu_machine.py                                     vllm==0.27.1 and builtin, sm_120
    python benchmarks/cpu_machine.py --kernel builtin --arch sm_90 --repeats 15

Medians over the repeats, first runs (which compile blocks or load them from the cache) apart. "cpu" is user and system time of this
process, "wall" the clock. Warp-instructions are counted exactly: active warps times instructions of every block executed.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dsv4_repro.errors import ReproError
from dsv4_repro.kernels.sass.program import Program
from dsv4_repro.kernels.sass.shipped import shipped_image
from dsv4_repro.kernels.sass.topk import TopKRun, run_topk
from dsv4_repro.kernels.sass.verdict import RunResult

DRAINED = (16000, 16001, 12000, 12001, 9000, 9001)


@dataclass(frozen=True)
class Case:
    """One launch: row width, lengths, CTAs a group, groups, chunk; the limit on its CPU time in ms (0: none) and how it may end."""

    name: str
    width: int
    lengths: tuple[int, ...]
    ctas: int
    groups: int
    chunk: int
    limit: float = 0.0
    ends: tuple[str, ...] = ("completed",)


CASES = (
    # A repaired kernel completes it.
    Case("deadlock, 8 x 16384, executed and proven", 16384, (*DRAINED, -1, 0), 2, 8, 8192, 200.0, ("deadlock", "completed")),
    Case("correct top-k, 8 x 16384, medium path", 16384, (*DRAINED, 0, 0), 2, 8, 8192, 150.0),
    Case("early drain step, 8 rows below k, 16 CTAs", 16384, (25, 50, 75, 100, 125, 500, 510, 0), 2, 8, 8192, 15.0),
    Case("early drain step, 32 rows below k, 32 CTAs", 16384, tuple(range(3, 515, 16)), 1, 32, 16384, 15.0),
    Case("8 rows of 513 to 8192, short paths", 16384, (513, 600, 1000, 2000, 4000, 8191, 8192, 700), 2, 8, 8192),
    Case("one row of 40000 over 4 CTAs", 40000, (40000,), 4, 1, 10000, 60.0),
    Case("four rows of 33000 to 40000 over 8 CTAs", 40000, (33000, 35000, 38000, 40000), 8, 1, 5000),
)


@lru_cache(maxsize=1)
def logits(case: Case) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((len(case.lengths), case.width), np.float32)


def launch(program: Program, case: Case, checks: bool) -> TopKRun:
    """The case on random data, set-up of the machine and its memory included."""
    return run_topk(
        program, logits(case), np.array(case.lengths, np.int32), k=512, chunk_size=case.chunk, ctas_per_group=case.ctas,
        groups=case.groups, max_seq_len=case.width, checks=checks,
    )  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """Seconds of one run, and what it did."""

    wall: float
    cpu: float
    result: RunResult


def timed(action: Callable[[], TopKRun]) -> Timing:
    wall, cpu = time.perf_counter(), time.process_time()
    run = action()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu, run.result)


def load(kernel: str, sm: int) -> tuple[Program, str]:
    """The program, and how long it took to get it: from the package, from the cache, or by nvdisasm."""
    began = time.perf_counter()
    image = shipped_image(kernel.partition(":")[2] or "unguarded", sm, 512, 4) if kernel.startswith("builtin") else None
    if image is None:
        from dsv4_repro.kernels.select import select

        image = select(kernel, sm=sm, top_k=512, vec=4).image
    found = time.perf_counter()
    program = Program.from_image(image)
    decoded = time.perf_counter()
    return program, f"image {1000 * (found - began):.0f} ms, decoded in {1000 * (decoded - found):.0f} ms"


def measure(program: Program, repeats: int, checks: bool) -> bool:
    """Print a line a case; False if a limit was missed or an end was another one than expected."""
    fine = True
    for case in CASES:
        logits(case)
        first = timed(lambda case=case: launch(program, case, checks))  # type: ignore[misc]
        runs = [timed(lambda case=case: launch(program, case, checks)) for _ in range(repeats)]  # type: ignore[misc]
        wall = 1000 * statistics.median(run.wall for run in runs)
        cpu = 1000 * statistics.median(run.cpu for run in runs)
        result = first.result
        limit = f"  limit {case.limit:.0f}" if case.limit and not checks else ""
        missed = bool(case.limit and not checks and cpu > case.limit) or result.kind not in case.ends
        fine = fine and not missed
        print(
            f"{case.name:44s} {result.kind:9s} cpu {cpu:6.1f} ms  wall {wall:6.1f} ms  "
            f"{result.warp_instructions / cpu / 1000:5.1f} M warp-instr/s  {result.warp_instructions:7d} warp-instr  "
            f"{result.block_executions:5d} blocks  first {1000 * first.cpu:6.1f} ms{limit}{'  MISSED' if missed else ''}"
        )
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append", help="builtin, builtin:guard, vllm==X, a path; may be given again")
    parser.add_argument("--arch", default="sm_120")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    fine = True
    for kernel in options.kernel or ["vllm==0.27.1", "builtin"]:
        try:
            program, how = load(kernel, int(options.arch.removeprefix("sm_")))
        except ReproError as error:
            print(f"{kernel} {options.arch}: {error}", file=sys.stderr)
            fine = False
            continue
        for checks in (False, True):
            print(f"\n{kernel} {options.arch}, memory checks {'on' if checks else 'off'}; {how}; medians of {options.repeats}")
            fine = measure(program, options.repeats, checks) and fine
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
