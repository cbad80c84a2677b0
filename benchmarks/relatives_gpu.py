"""The relatives on a real GPU: every row that silicon can show, so many launches each, as rates; JSON on stdout.

    python benchmarks/relatives_gpu.py --launches 20                    compile here, run on device 0
    python benchmarks/relatives_gpu.py --prepare DIR --sm 90            compile only, for a machine without NVRTC or network
    python benchmarks/relatives_gpu.py --cubins DIR --launches 20       run what was prepared (releases that are missing are named)
    python benchmarks/relatives_gpu.py --verb --out FILE --runs DIR     every row by the verb run NAME --on gpu --fix ROW
    python benchmarks/relatives_gpu.py --warm --sm 90                   fill the cache (DSV4_REPRO_CACHE) for --verb, no GPU needed

Beside the rows: a group larger than the card, a group that another kernel leaves too few slots, and the victim on the same and on
another stream. Each launch has its own deadline; one that hangs is released by writing a large count into its counters on a second
stream. Needs cuda-bindings and numpy, no torch. Without a driver: exit status 5, and the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kernel_correctness import Bench, Outcome

from dsv4_repro.clock import SYSTEM, Deadline
from dsv4_repro.errors import ReproError
from dsv4_repro.forensics.records import CLASSES
from dsv4_repro.forensics.wrong_rows import explain_wrong_rows
from dsv4_repro.kernels.abi import ROW_STATE_SIZE, SMEM_MEDIUM
from dsv4_repro.kernels.build import compile_kernel
from dsv4_repro.kernels.cooperative import cooperative_image
from dsv4_repro.kernels.cubin import kernel_images
from dsv4_repro.kernels.image import KernelImage
from dsv4_repro.kernels.reference import check_rows
from dsv4_repro.kernels.select import select_kernel
from dsv4_repro.kernels.topk_cases import TopKCase
from dsv4_repro.repro.bounds import bounds_of
from dsv4_repro.scenarios.launches import CooperativeLaunch, Launch, Row, long_row
from dsv4_repro.scenarios.registry import all_scenarios

#: Seconds that the whole may take; rows that are not reached are named.
TOTAL_S = 80.0
BLOCKER = "patients"


def gpu_rows() -> list[tuple[str, Row]]:
    return [
        (entry.name, row)
        for entry in all_scenarios()
        for row in entry.variants()
        if "gpu" in row.grounds and isinstance(row.what, Launch) and row.what.beyond is None and not row.what.leave
    ]


def file_of(kernel: str) -> str:
    return kernel.replace(":", "-").replace("=", "_").replace(",", "+") + ".cubin"


def kernels() -> list[str]:
    return sorted({row.kernel for _, row in gpu_rows()} | {"builtin:guard", "builtin:unguarded"})


def prepare(folder: Path, sm: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kernel in kernels():
        try:
            (folder / file_of(kernel)).write_bytes(select_kernel(kernel, sm=sm, top_k=512, vec=4).cubin)
        except ReproError as error:
            print(f"{kernel}: not prepared: {error}", file=sys.stderr)
    (folder / file_of(BLOCKER)).write_bytes(compile_kernel("patients.cu", sm).cubin)


def image_of(kernel: str, folder: Path | None, sm: int) -> KernelImage:
    if folder is None:
        return select_kernel(kernel, sm=sm, top_k=512, vec=4)
    path = folder / file_of(kernel)
    found = kernel_images(path.read_bytes(), kernel, path=str(path))
    return next(image for image in found if (image.top_k, image.vec) == (512, 4))


def launch(bench: Bench, image: KernelImage, what: Launch) -> tuple[Outcome, str | None]:
    """One launch of a row; and the cause of its wrong rows, None where nothing is wrong or no cause fits."""
    case = what.case
    bench.driver.fill(bench.states, 0, case.state_bytes // 4, bench.work)
    if what.counter:
        bench.release.write(what.counter.to_bytes(4, "little"), 4)
        for group in range(case.groups):
            address = bench.states + group * ROW_STATE_SIZE + 3080
            bench.driver.copy_in(address, bench.release.address + 4, 4, bench.work)
    logits = case.logits()
    outcome = bench.run(image, case, logits, zero=False)
    if outcome.hung or not outcome.wrong:
        return outcome, None
    rows = len(case.lengths)
    indices = np.frombuffer(bench.host_out.view, dtype=np.int32, count=rows * case.k).reshape(rows, case.k)
    verdicts = check_rows(indices, logits, np.array(case.lengths, np.int32), case.k)
    expected = () if what.early_exit or min(case.lengths) < 0 else case.counters()
    final = bench.read_states(case)
    words = final.view(np.int32).reshape(case.groups, ROW_STATE_SIZE // 4)
    counters = tuple(int(value) for value in words[:, 770])
    found = explain_wrong_rows(
        verdicts, case.lengths, logits, case.k, case.groups, counters=counters, expected_counters=expected
    )  # fmt: skip
    return outcome, found.cause


def run_row(bench: Bench, image: KernelImage, row: Row, launches: int, whole: Deadline) -> dict[str, Any]:
    assert isinstance(row.what, Launch)
    counts: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    first: dict[str, Any] = {}
    for _ in range(launches):
        if whole.expired:
            break
        outcome, cause = launch(bench, image, row.what)
        kind = "hang" if outcome.hung else "other" if outcome.wrong else "clean"
        counts[kind] += 1
        if kind == "other":
            causes[cause or "-"] += 1
        if kind != "clean" and not first:
            first = {
                "kind": kind, "counters": list(outcome.counters), "wrong": list(outcome.wrong[:3]),
                "released_ms": outcome.released_ms,
            }  # fmt: skip
    done = sum(counts.values())
    wanted = CLASSES[row.class_][1]
    named = row.cause is None or wanted != "other" or row.cause in causes
    good = counts["clean"] == done if row.fixed else counts[wanted] > 0 and named
    return {
        "launches": done,
        "hang": counts["hang"],
        "wrong": counts["other"],
        "clean": counts["clean"],
        "causes": dict(causes),
        "bounds": [
            {**bound.model_dump(), "of": "launch that does not end well"} for bound in bounds_of(done - counts["clean"], done)
        ],
        "first": first,
        "as_expected": bool(done) and good,
    }


# ---------------------------------------------------------------------------------------------------------------------------------
# What needs more than one launch


def words(*values: tuple[str, int]) -> list[bytes]:
    """Kernel parameters, each its own bytes."""
    return [struct.pack("<" + kind, value) for kind, value in values]


def too_large(bench: Bench, image: KernelImage, slots: int) -> dict[str, Any]:
    """One group of more CTAs than the card holds, and one that just fits."""
    result: dict[str, Any] = {}
    for name, ctas in (("larger", slots + 36), ("fits", slots)):
        length = max(ctas * 1024, 32772)
        case = TopKCase(f"{ctas} CTAs", 512, 4, (length,), length, length, ctas, 1, 1024)
        outcome = bench.run(image, case)
        result[name] = {
            "ctas": ctas, "slots": slots, "hung": outcome.hung, "counters": list(outcome.counters), "wrong": list(outcome.wrong),
            "released_ms": outcome.released_ms,
        }  # fmt: skip
    larger, fits = result["larger"], result["fits"]
    result["as_expected"] = larger["hung"] and larger["counters"] == [slots] and not fits["hung"] and not fits["wrong"]
    return result


def blocked(bench: Bench, image: KernelImage, patients: bytes, slots: int) -> dict[str, Any]:
    """Another kernel holds all slots but three; a group of four waits until that kernel ends."""
    driver = bench.driver
    function = driver.load(patients, "flag_wait")
    flag, done, other = driver.alloc(512), driver.alloc(4096 * slots), driver.stream()
    driver.fill(flag, 0, 128, other)
    driver.allow_dynamic_smem(function, SMEM_MEDIUM)
    driver.launch(function, slots - 3, 1024, SMEM_MEDIUM, words(("Q", flag), ("I", 1), ("Q", done)), other)
    held = driver.event()
    driver.record(held, other)
    case = long_row("one group of 4 CTAs", 4, 40000)
    driver.fill(bench.states, 0, case.state_bytes // 4, bench.work)
    logits = case.logits().tobytes()
    bench.host_in.write(logits)
    driver.copy_in(bench.input, bench.host_in.address, len(logits), bench.work)
    bench.release.write((40000).to_bytes(4, "little"), 8)
    driver.copy_in(bench.lengths, bench.release.address + 8, 4, bench.work)
    top = bench.function(image)
    driver.allow_dynamic_smem(top, case.dynamic_smem)
    params = case.params(input=bench.input, output=bench.output, lengths=bench.lengths, row_states=bench.states)
    SYSTEM.sleep(0.05)
    driver.launch(top, case.grid, 1024, case.dynamic_smem, params.pack(), bench.work)
    driver.record(bench.end, bench.work)
    hung = not bench.wait(bench.end, bench.deadline_s)
    counters = bench.read_states(case).view(np.int32)[770]
    bench.release.write((1).to_bytes(4, "little"), 12)
    driver.copy_in(flag, bench.release.address + 12, 4, bench.side)
    after = bench.wait(bench.end, 5.0) and bench.wait(held, 5.0)
    return {
        "slots": slots, "held": slots - 3, "hung_meanwhile": hung, "counter": int(counters), "ended_with_the_other": after,
        "as_expected": hung and int(counters) == 3 and after,
    }  # fmt: skip


def victim(bench: Bench, image: KernelImage, patients: bytes) -> dict[str, Any]:
    """A healthy kernel behind the wedged one: on the same stream it never starts, on another one it completes."""
    driver = bench.driver
    healthy = driver.load(patients, "grid_barrier_once")
    row = next(row for name, row in gpu_rows() if name == "victim" and not row.fixed)
    assert isinstance(row.what, Launch)
    case, other, arrivals = row.what.case, driver.stream(), driver.alloc(512)
    driver.fill(arrivals, 0, 128, bench.work)
    driver.fill(bench.states, 0, case.state_bytes // 4, bench.work)
    raw, lengths = case.logits().tobytes(), np.array(case.lengths, np.int32).tobytes()
    bench.host_in.write(raw)
    bench.host_in.write(lengths, len(raw))
    driver.copy_in(bench.input, bench.host_in.address, len(raw), bench.work)
    driver.copy_in(bench.lengths, bench.host_in.address + len(raw), len(lengths), bench.work)
    function = bench.function(image)
    driver.allow_dynamic_smem(function, case.dynamic_smem)
    params = case.params(input=bench.input, output=bench.output, lengths=bench.lengths, row_states=bench.states)
    same, elsewhere = driver.event(), driver.event()
    driver.launch(healthy, 1, 128, 0, words(("Q", arrivals + 128), ("I", 1)), bench.work)  # a first launch may load code, and wait
    driver.record(bench.begin, bench.work)
    if not bench.wait(bench.begin, 5.0):
        return {"as_expected": False, "why": "the copies did not end"}
    driver.launch(function, case.grid, 1024, case.dynamic_smem, params.pack(), bench.work)
    driver.launch(healthy, 4, 128, 0, words(("Q", arrivals), ("I", 4)), bench.work)
    driver.record(same, bench.work)
    driver.launch(healthy, 4, 128, 0, words(("Q", arrivals + 256), ("I", 4)), other)
    driver.record(elsewhere, other)
    behind, beside = not bench.wait(same, bench.deadline_s), bench.wait(elsewhere, 1.0)
    states = bench.read_states(case).view(np.int32).reshape(case.groups, ROW_STATE_SIZE // 4)[:, 770]
    for group in range(case.groups):
        driver.copy_in(bench.states + group * ROW_STATE_SIZE + 3080, bench.release.address, 4, bench.side)
    released = bench.wait(same, 5.0)
    return {
        "victim_on_the_same_stream_never_ran": behind, "kernel_on_another_stream_completed": beside,
        "counters": [int(value) for value in states], "victim_ran_after_the_release": released,
        "as_expected": behind and beside and released,
    }  # fmt: skip


def measure(bench: Bench, folder: Path | None, launches: int) -> dict[str, Any]:
    sm, whole = bench.info.sm, Deadline(TOTAL_S)
    rows: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name, row in gpu_rows():
        key = f"{name}/{row.name}"
        if whole.expired:
            skipped[key] = "no time was left"
            continue
        try:
            image = image_of(row.kernel, folder, sm)
        except (ReproError, OSError) as error:
            skipped[key] = str(error)
            continue
        hangs = CLASSES[row.class_][1] == "hang"
        rows[key] = {"kernel": row.kernel, **run_row(bench, image, row, min(launches, 10) if hangs else launches, whole)}
    guard, unguarded = image_of("builtin:guard", folder, sm), image_of("builtin:unguarded", folder, sm)
    patients = compile_kernel("patients.cu", sm).cubin if folder is None else (folder / file_of(BLOCKER)).read_bytes()
    slots = bench.info.sm_count * bench.driver.occupancy(bench.function(guard), 1024, SMEM_MEDIUM)
    more: dict[str, Any] = {}
    parts: tuple[tuple[str, Callable[[], dict[str, Any]]], ...] = (
        ("oversubscribe/too-large", lambda: too_large(bench, guard, slots)),
        ("oversubscribe/co-resident", lambda: blocked(bench, guard, patients, slots)),
        ("victim/streams", lambda: victim(bench, unguarded, patients)),
    )
    for name, part in parts:
        if whole.expired:
            skipped[name] = "no time was left"
        else:
            more[name] = part()
    return {"rows": rows, "more": more, "not_run": skipped, "slots": slots}


# ---------------------------------------------------------------------------------------------------------------------------------
# By the verb


def warm(sm: int) -> None:
    """Every kernel that ``--verb`` needs into the user's cache."""
    rows = [row for entry in all_scenarios() for row in entry.variants() if "gpu" in row.grounds]
    for kernel in sorted({row.kernel for row in rows if isinstance(row.what, CooperativeLaunch)}):
        try:
            print(kernel, "cooperative_topk", cooperative_image(kernel, sm, 512).cubin_sha256[:12], flush=True)
        except ReproError as error:
            print(f"{kernel}: cooperative_topk not prepared: {error}", file=sys.stderr, flush=True)
    for kernel in sorted({row.kernel for row in rows if isinstance(row.what, Launch)}):
        try:
            print(kernel, select_kernel(kernel, sm=sm, top_k=512, vec=4).cubin_sha256[:12], flush=True)
        except ReproError as error:
            print(f"{kernel}: not prepared: {error}", file=sys.stderr, flush=True)
    compile_kernel("companions.cu", sm)


def verb_row(name: str, row: Row, args: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """One row through the command line in a process of its own, which is killed (with its children) at ``limit_s``."""
    folder = (args.runs / f"{name}-{row.name}").absolute()
    words = [sys.executable, "-m", "dsv4_repro.repro", "run", name, "--on", "gpu", "--fix", row.name, "--device", str(args.device)]
    words += ["--trials", str(args.launches), "--timeout", str(int(limit_s)), "--out", str(folder), "--json"]
    words += ["--share"] if args.share else []
    started = SYSTEM.monotonic()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=limit_s + 30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return {"status": "killed", "why": f"no answer within {limit_s + 30:g} s", "stderr": err[-600:], "as_expected": False}
    seconds = round(SYSTEM.monotonic() - started, 2)
    try:
        found = json.loads(out)
        verdict = found["verdict"]
    except (ValueError, KeyError):
        return {"status": process.returncode, "seconds": seconds, "why": (err or out)[-800:], "as_expected": False}
    record = json.loads((folder / "run.json").read_text()) if (folder / "run.json").is_file() else {}
    return {
        "status": process.returncode, "seconds": seconds, "outcome": found["outcome"], "class": verdict["class"],
        "cause": verdict["cause"], "confidence": verdict["confidence"], "signature": verdict["signature"],
        "sentence": verdict["sentence"], "trials": record.get("trials"), "unwedge": found.get("unwedge"),
        "queued": found.get("queued"), "held_slots": found.get("held_slots"), "timing": found.get("timing"),
        "device_evidence": sorted({item["kind"] for item in found["evidence"]}),
        "unread": [f"{item['what']}: {item['why']}"[:300] for item in found["unread"]],
        "expected": [row.class_, row.cause], "as_expected": [verdict["class"], verdict["cause"]] == [row.class_, row.cause],
    }  # fmt: skip


def by_verb(args: argparse.Namespace) -> dict[str, Any]:
    """Every row that a card can show, in turn; ``--out`` is written after each."""
    whole = Deadline(args.total)
    summary: dict[str, Any] = {"schema": "dsv4-repro/relatives-verb/1", "launches": args.launches, "rows": {}, "not_run": {}}
    wanted = [
        (entry.name, row)
        for entry in all_scenarios()
        for row in entry.variants()
        if "gpu" in row.grounds and args.only in f"{entry.name}/{row.name}"
    ]
    args.runs.mkdir(parents=True, exist_ok=True)
    for name, row in wanted:
        key = f"{name}/{row.name}"
        if whole.expired:
            summary["not_run"][key] = "no time was left"
            continue
        found = summary["rows"][key] = verb_row(name, row, args, min(args.row_timeout, max(whole.remaining(), 5)))
        word = "as expected" if found["as_expected"] else "NOT AS EXPECTED"
        print(
            f"{key}: {found.get('class')}/{found.get('cause')} {found['status']} {found.get('seconds')} s {word}", file=sys.stderr
        )
        if args.out is not None:
            args.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, help="only compile, into this folder")
    parser.add_argument("--sm", type=int, default=90, help="architecture for --prepare, e.g. 90")
    parser.add_argument("--cubins", type=Path, help="take the builds from this folder")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--launches", type=int, default=20, help="of each row; rows that hang get at most 10")
    parser.add_argument("--deadline", type=float, default=0.3, help="seconds after which a launch counts as hung")
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    parser.add_argument("--warm", action="store_true", help="only fill the user's cache for --verb")
    parser.add_argument("--verb", action="store_true", help="every row by dsv4-repro run NAME --on gpu, a process each")
    parser.add_argument("--runs", type=Path, default=Path("runs/relatives"), help="run directories of --verb")
    parser.add_argument("--row-timeout", type=float, default=60.0, help="seconds for one row of --verb")
    parser.add_argument("--total", type=float, default=540.0, help="seconds for all rows of --verb")
    parser.add_argument("--only", default="", help="rows of --verb whose NAME/ROW contains this")
    parser.add_argument("--share", action="store_true", help="as of run")
    args = parser.parse_args()
    if args.warm:
        warm(args.sm)
        return 0
    if args.verb:
        found = by_verb(args)
        print(json.dumps(found, indent=1))
        return 0 if found["rows"] and all(row["as_expected"] for row in found["rows"].values()) else 3
    if args.prepare is not None:
        prepare(args.prepare, args.sm)
        return 0
    try:
        bench = Bench(args.device, args.deadline)
        started = SYSTEM.monotonic()
        summary: dict[str, Any] = {"schema": "dsv4-repro/relatives-gpu/1", "device": bench.info.document()}
        summary |= measure(bench, args.cubins, args.launches)
        summary["seconds"] = round(SYSTEM.monotonic() - started, 2)
    except ReproError as error:
        print(f"{type(error).__name__}: {error}\n{error.help_text}", file=sys.stderr, flush=True)
        os._exit(error.exit_status)  # a context with a kernel that never ends would be waited for on the way out
    text = json.dumps(summary, indent=1, default=str)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    good = all(part["as_expected"] for part in (*summary["rows"].values(), *summary["more"].values()))
    os._exit(0 if good else 3)


if __name__ == "__main__":
    sys.exit(main())
