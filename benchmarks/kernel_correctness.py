"""Run the builtin top-k kernel on a real GPU: every case of the sweep, and every defect with the outcome it must have.

    python benchmarks/kernel_correctness.py                              compile here, run on device 0, JSON on stdout
    python benchmarks/kernel_correctness.py --prepare DIR --sm 90        compile only, for a machine without NVRTC
    python benchmarks/kernel_correctness.py --cubins DIR                 run what was prepared

Needs cuda-bindings and numpy (and NVRTC unless --cubins), no torch. Each launch has its own deadline; one that hangs is released by
writing a large count into its counters on a second stream, and reported. Without a driver: exit status 5, and the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4_repro.clock import SYSTEM, Deadline
from dsv4_repro.errors import DeadlineError, KernelNotFoundError, ReproError
from dsv4_repro.kernels import build
from dsv4_repro.kernels.abi import ARRIVAL_COUNTER_OFFSET, RELEASE_COUNT, ROW_STATE_SIZE, TOP_K_VALUES, VECTOR_WIDTHS
from dsv4_repro.kernels.cubin import kernel_images
from dsv4_repro.kernels.driver import Driver
from dsv4_repro.kernels.image import KernelImage
from dsv4_repro.kernels.reference import check_rows
from dsv4_repro.kernels.topk_cases import TopKCase, all_cases

SENTINEL = -7
#: Device memory for one case: the widest is 16 rows of 32768 floats.
ARENA = 16 << 20
#: Builds that only some cases need, with their settings; all are built for k 512, vector width 4.
DEFECTS: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("bounded-spin", {"spin_limit": 20_000}),
    ("guard-after-cast", {}),
    ("guard-min-only", {}),
    ("guard-stride-only", {}),
    ("guard-max-seq-only", {}),
    ("guard-one-path", {}),
    ("init-race", {"widen_us": 50}),
    ("reset-race", {"widen_us": 50}),
    ("missing-fence", {}),
    ("early-arrival", {"widen_us": 5}),
    ("early-arrival", {}),
    ("early-exit", {}),
    ("ring-misaligned", {}),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One launch: done or hung (then whether the release retired it, and after how long), its wrong rows and its counters."""

    hung: bool
    milliseconds: float
    wrong: tuple[str, ...]
    counters: tuple[int, ...]
    released_ms: float | None
    states: NDArray[np.uint8]


class Bench:
    """One device, its buffers, and a launch with a deadline."""

    def __init__(self, device: int, deadline_s: float) -> None:
        self.driver = Driver()
        self.driver.init()
        self.info = self.driver.open(device)
        self.deadline_s = deadline_s
        self.work = self.driver.stream()
        self.side = self.driver.stream(highest_priority=True)
        self.input, self.output, self.lengths, self.states = (self.driver.alloc(size) for size in (ARENA, 1 << 20, 4096, 1 << 20))
        self.host_in, self.host_out = self.driver.pinned(ARENA), self.driver.pinned(2 << 20)
        self.release = self.driver.pinned(64)
        self.release.write(RELEASE_COUNT.to_bytes(4, "little"))
        self.begin, self.end, self.copied = self.driver.event(), self.driver.event(), self.driver.event()
        self.functions: dict[str, Any] = {}

    def function(self, image: KernelImage) -> Any:
        key = f"{image.cubin_sha256} {image.function}"  # a shipped cubin holds every instantiation
        if key not in self.functions:
            self.functions[key] = self.driver.load(image.cubin, image.function)
        return self.functions[key]

    def wait(self, event: Any, seconds: float) -> bool:
        deadline = Deadline(seconds)
        while not self.driver.finished(event):
            if deadline.expired:
                return False
            SYSTEM.sleep(0.0001)
        return True

    def run(self, image: KernelImage, case: TopKCase, logits: NDArray[np.float32] | None = None, *, zero: bool = True) -> Outcome:
        driver = self.driver
        logits = case.logits() if logits is None else logits
        rows, state_words = len(case.lengths), case.state_bytes // 4
        lengths = np.array(case.lengths, dtype=np.int32)
        raw = logits.tobytes()
        self.host_in.write(raw)
        self.host_in.write(lengths.tobytes(), ARENA - 4096)
        driver.copy_in(self.input, self.host_in.address, len(raw), self.work)
        driver.copy_in(self.lengths, self.host_in.address + ARENA - 4096, 4 * rows, self.work)
        driver.fill(self.output, SENTINEL, rows * case.k, self.work)
        if zero:
            driver.fill(self.states, 0, state_words, self.work)
        function = self.function(image)
        driver.allow_dynamic_smem(function, case.dynamic_smem)
        params = case.params(input=self.input, output=self.output, lengths=self.lengths, row_states=self.states)
        driver.record(self.begin, self.work)
        driver.launch(function, case.grid, 1024, case.dynamic_smem, params.pack(), self.work)
        driver.record(self.end, self.work)
        hung = not self.wait(self.end, self.deadline_s)
        states = self.read_states(case)
        released_ms = None
        if hung:
            started = SYSTEM.monotonic()
            for group in range(case.groups):
                address = self.states + group * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET
                driver.copy_in(address, self.release.address, 4, self.side)
            if not self.wait(self.end, 5.0):
                raise DeadlineError(f"{image.origin}, {case.name}: hung, and the release did not retire it")
            released_ms = (SYSTEM.monotonic() - started) * 1e3
        driver.copy_out(self.host_out.address, self.output, 4 * rows * case.k, self.work)
        driver.record(self.copied, self.work)
        if not self.wait(self.copied, 5.0):
            raise DeadlineError("the copy of the results did not end")
        indices = np.frombuffer(self.host_out.view, dtype=np.int32, count=rows * case.k).reshape(rows, case.k)
        wrong = tuple(verdict.text for verdict in check_rows(indices, logits, lengths, case.k) if not verdict.ok)
        return Outcome(hung, driver.milliseconds(self.begin, self.end), wrong, counters(states, case), released_ms, states)

    def read_states(self, case: TopKCase) -> NDArray[np.uint8]:
        """The row states as they are now, by a second stream."""
        self.driver.copy_out(self.host_out.address, self.states, case.state_bytes, self.side)
        self.driver.record(self.copied, self.side)
        if not self.wait(self.copied, 5.0):
            raise DeadlineError("the side stream's copy did not end")
        return np.frombuffer(self.host_out.view, dtype=np.uint8, count=case.state_bytes).copy()


def counters(states: NDArray[np.uint8], case: TopKCase) -> tuple[int, ...]:
    words = states.view(np.int32).reshape(case.groups, ROW_STATE_SIZE // 4)
    return tuple(int(value) for value in words[:, ARRIVAL_COUNTER_OFFSET // 4])


# ---------------------------------------------------------------------------------------------------------------------------------
# Images


def wanted() -> Iterator[tuple[str, str, Mapping[str, int], int, int]]:
    """(key, variant, settings, k, vector width) of every build that the run needs."""
    for variant in ("guard", "unguarded"):
        for k in TOP_K_VALUES:
            for vec in VECTOR_WIDTHS:
                yield f"{variant}-{k}-{vec}", variant, {}, k, vec
    for variant, settings in DEFECTS:
        tail = "".join(f"+{name}={value}" for name, value in settings.items())
        yield f"{variant}{tail}-512-4", variant, settings, 512, 4


def prepare(folder: Path, sm: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for key, variant, settings, k, vec in wanted():
        (folder / f"{key}.cubin").write_bytes(build.builtin_image(variant, sm, k, vec, settings=settings).cubin)


def images(folder: Path | None, sm: int) -> dict[str, KernelImage]:
    found: dict[str, KernelImage] = {}
    for key, variant, settings, k, vec in wanted():
        if folder is None:
            found[key] = build.builtin_image(variant, sm, k, vec, settings=settings)
            continue
        path = folder / f"{key}.cubin"
        try:
            (found[key],) = kernel_images(path.read_bytes(), f"builtin:{key}", path=str(path))
        except OSError as error:
            raise KernelNotFoundError(f"{path}: {error.strerror}; make it with --prepare") from None
    return found


# ---------------------------------------------------------------------------------------------------------------------------------
# What is run


def sweep(bench: Bench, built: Mapping[str, KernelImage], seeds: int) -> dict[str, Any]:
    """Every case with the guard, and without it (negative lengths made 0): right sets, and six arrivals a CTA and long row."""
    failures: list[dict[str, Any]] = []
    launches = rows = 0
    for seed in range(seeds):
        for case in all_cases(seed):
            for variant in ("guard", "unguarded"):
                chosen = case
                if variant == "unguarded":
                    chosen = dataclasses.replace(case, lengths=tuple(max(length, 0) for length in case.lengths))
                outcome = bench.run(built[f"{variant}-{case.k}-{case.vec}"], chosen, case.logits())
                launches += 1
                rows += len(case.lengths)
                if outcome.hung or outcome.wrong or outcome.counters != case.counters():
                    failures.append({
                        "variant": variant, "case": case.name, "seed": seed, "hung": outcome.hung, "wrong": outcome.wrong[:4],
                        "counters": outcome.counters, "expected_counters": case.counters(),
                    })  # fmt: skip
    return {"launches": launches, "rows": rows, "failures": failures[:20], "failed": len(failures)}


def named(name: str, **changes: Any) -> TopKCase:
    (case,) = (case for case in all_cases() if case.name == name)
    return dataclasses.replace(case, **changes)


def defects(bench: Bench, built: Mapping[str, KernelImage], stress: int) -> dict[str, Any]:
    """Each defect with what must come of it; ``as_expected`` says whether it did. Races and stress report counts, not a verdict."""
    padded = named("peers leave", lengths=(16000, 16001, 12000, 12001, 9000, 9001, -1, 0))
    wide = named("peers leave", lengths=(33000, 16001, 12000, 12001, 9000, 9001, 0, 0), stride=40000, chunk_size=20000)
    ring = named("k512v4 long-short-long")
    long_rows = named("normal k512 four CTAs")
    one = (0, 0, 0, 0, 0, 0, 1, 0)
    checks: tuple[tuple[str, TopKCase, Callable[[Outcome], bool]], ...] = (
        (
            "unguarded-512-4",
            padded,
            lambda o: o.hung and o.counters == one and o.wrong[0].startswith("row 6") and len(o.wrong) == 1,
        ),
        ("guard-512-4", padded, lambda o: not o.hung and not o.wrong),
        (
            "bounded-spin+spin_limit=20000-512-4",
            padded,
            lambda o: not o.hung and o.counters == one and _record(o) == (12, 2, 0xB0DED000),
        ),
        ("guard-after-cast-512-4", padded, lambda o: o.hung and o.counters == one),
        ("guard-min-only-512-4", padded, lambda o: not o.hung and len(o.wrong) == 1),
        ("guard-stride-only-512-4", padded, lambda o: not o.hung and not o.wrong),
        ("guard-stride-only-512-4", wide, lambda o: o.hung and o.counters[0] == 1),
        ("guard-max-seq-only-512-4", wide, lambda o: not o.hung),
        ("guard-one-path-512-4", padded, lambda o: o.hung and o.counters == one),
        ("ring-misaligned-512-4", ring, lambda o: not o.hung and bool(o.wrong) and o.counters == (96,)),
        ("guard-512-4", ring, lambda o: not o.hung and not o.wrong and o.counters == (96,)),
        ("init-race+widen_us=50-512-4", long_rows, lambda o: o.hung),
        ("reset-race+widen_us=50-512-4", long_rows, lambda o: o.hung and o.counters == (0,)),
        ("early-exit-512-4", long_rows, lambda o: not o.hung and not o.wrong),
    )
    result = []
    for key, case, expected in checks:
        outcome = bench.run(built[key], case)
        result.append({
            "build": key, "case": case.name, "stride": case.stride, "as_expected": expected(outcome), "hung": outcome.hung,
            "counters": outcome.counters, "wrong_rows": len(outcome.wrong), "released_ms": outcome.released_ms,
        })  # fmt: skip
    counted = {}
    for key in ("missing-fence-512-4", "early-arrival-512-4", "early-arrival+widen_us=5-512-4", "early-exit-512-4"):
        logits = long_rows.logits()
        outcomes = [bench.run(built[key], long_rows, logits) for _ in range(stress if "widen" not in key else 3)]
        hung = sum(outcome.hung for outcome in outcomes)
        counted[key] = {"launches": len(outcomes), "hung": hung, "wrong": sum(bool(o.wrong) for o in outcomes if not o.hung)}
    return {"checks": result, "stress": counted}


def _record(outcome: Outcome) -> tuple[int, ...]:
    """remaining_k, prefix and output_counter of group 6: what a wait that gives up leaves there."""
    words = outcome.states.view(np.uint32)[6 * ROW_STATE_SIZE // 4 :]
    return int(words[768]), int(words[769]), int(words[771])


def timing(bench: Bench, built: Mapping[str, KernelImage]) -> dict[str, float]:
    """Milliseconds of one launch, the least of 20: 8 rows of 16384, and one row of 65536 over 4 CTAs."""
    image = built["guard-512-4"]
    result = {}
    for name, case in (("8 rows of 16384", named("peers leave")), ("2 long rows, 4 CTAs", named("normal k512 four CTAs"))):
        logits = case.logits()
        result[name] = min(bench.run(image, case, logits).milliseconds for _ in range(20))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, help="only compile, into this folder")
    parser.add_argument("--sm", type=int, default=90, help="architecture for --prepare, e.g. 90")
    parser.add_argument("--cubins", type=Path, help="take the builds from this folder")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=2, help="the sweep is run with this many seeds")
    parser.add_argument("--stress", type=int, default=200, help="launches of each build whose defect shows only now and then")
    parser.add_argument("--deadline", type=float, default=0.5, help="seconds after which a launch counts as hung")
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    args = parser.parse_args()
    try:
        if args.prepare is not None:
            prepare(args.prepare, args.sm)
            return 0
        bench = Bench(args.device, args.deadline)
        built = images(args.cubins, bench.info.sm)
        started = SYSTEM.monotonic()
        summary: dict[str, Any] = {"schema": "dsv4-repro/kernel-correctness/1", "device": bench.info.document()}
        summary["builds"] = {key: {"sha256": image.cubin_sha256, "registers": image.registers} for key, image in built.items()}
        summary["sweep"] = sweep(bench, built, args.seeds)
        summary["defects"] = defects(bench, built, args.stress)
        summary["timing_ms"] = timing(bench, built)
        summary["seconds"] = SYSTEM.monotonic() - started
    except ReproError as error:
        print(f"{type(error).__name__}: {error}\n{error.help_text}", file=sys.stderr, flush=True)
        # Not sys.exit: a context with a kernel that never ends would be waited for on the way out.
        os._exit(error.exit_status)
    text = json.dumps(summary, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    good = summary["sweep"]["failed"] == 0 and all(check["as_expected"] for check in summary["defects"]["checks"])
    os._exit(0 if good else 3)


if __name__ == "__main__":
    sys.exit(main())
