"""The full sweep of right answers on the interpreter: every case of ``kernels.topk_cases`` for any kernel and architecture.

    python benchmarks/cpu_sweep.py                                              builtin:guard, all architectures
    python benchmarks/cpu_sweep.py --kernel vllm==0.27.1 --arch sm_90 --arch sm_120
    python benchmarks/cpu_sweep.py --kernel vllm==0.33.0 --only dense --checks --schedule random --seed 3

Prints each wrong case and a line a kernel and architecture. Exit status 0 if all was right, 3 if rows were wrong or a launch
did not complete. Known: releases up to 0.28.0 are wrong on rows that are dense in half precision; up to 0.27.1 on
long-short-long rows (vLLM #49139); up to 0.28.0 a long row can lose its k-th element where warps drift, because no CTA barrier
stands between its tie pass and the next row's load; and no release orders NaN as the reference does (those cases are left out
unless --nan).
"""

from __future__ import annotations

import argparse
import sys
import time

from dsv4_repro.errors import ReproError
from dsv4_repro.kernels.sass.program import Program
from dsv4_repro.kernels.sass.shipped import SHIPPED_ARCHITECTURES, shipped_image
from dsv4_repro.kernels.sass.topk import run_case
from dsv4_repro.kernels.topk_cases import TopKCase, all_cases, sample_cases


def program_for(kernel: str, sm: int, k: int, vec: int) -> Program:
    image = shipped_image(kernel.partition(":")[2] or "unguarded", sm, k, vec) if kernel.startswith("builtin") else None
    if image is None:
        from dsv4_repro.kernels.select import select

        image = select(kernel, sm=sm, top_k=k, vec=vec).image
    return Program.from_image(image)


def problem(program: Program, case: TopKCase, options: argparse.Namespace) -> str:
    """What is wrong with one case, "" if nothing."""
    run, verdicts = run_case(program, case, checks=options.checks, schedule=options.schedule, seed=options.seed)
    if not run.result.completed:
        return f"{run.result.kind}: {run.result.proof}"
    wrong = [verdict.text for verdict in verdicts if not verdict.ok]
    if wrong:
        return "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} rows more" if len(wrong) > 4 else "")
    return "" if run.counters == case.counters() else f"counters {run.counters}, {case.counters()} expected"


def sweep(kernel: str, sm: int, cases: list[TopKCase], options: argparse.Namespace) -> int:
    programs: dict[tuple[int, int], Program] = {}
    wrong = 0
    began = time.process_time()
    for case in cases:
        key = case.k, case.vec
        if key not in programs:
            programs[key] = program_for(kernel, sm, *key)
        found = problem(programs[key], case, options)
        if found:
            wrong += 1
            print(f"  {case.name}: {found}")
    print(
        f"{kernel} sm_{sm}: {len(cases) - wrong} of {len(cases)} cases right, {time.process_time() - began:.1f} s of CPU time",
        flush=True,
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append", help="builtin:guard (default), vllm==X, installed, a path; may be given again")
    parser.add_argument("--arch", action="append", help="sm_90 …; default: all")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--sample", type=int, default=0, help="a seeded choice of so many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checks", action="store_true", help="with memory checks")
    parser.add_argument("--schedule", default="smallest-pc", choices=("smallest-pc", "random"))
    parser.add_argument("--nan", action="store_true", help="also the cases with NaN")
    options = parser.parse_args()
    cases = sample_cases(options.sample, options.seed) if options.sample else list(all_cases(options.seed))
    cases = [case for case in cases if options.only in case.name and (options.nan or "nan" not in case.data)]
    wrong = 0
    for kernel in options.kernel or ["builtin:guard"]:
        for arch in options.arch or [f"sm_{sm}" for sm in SHIPPED_ARCHITECTURES]:
            try:
                wrong += sweep(kernel, int(arch.removeprefix("sm_")), cases, options)
            except ReproError as error:
                print(f"{kernel} {arch}: {error}", file=sys.stderr)
                return error.exit_status
    return 3 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
