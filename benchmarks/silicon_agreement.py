"""Does the interpreter agree with a GPU? Record random launches on a card, then interpret the same code on any machine.

    python benchmarks/silicon_agreement.py record --out FILE.json.gz [--kernels builtin:guard,vllm==0.27.1] [--cases 540]
    python benchmarks/silicon_agreement.py compare FILE.json.gz [--limit N]

``record`` needs the card; the cubin of every kernel is named by its sha256, those of kernels written here are kept in the file,
so that exactly the same code is interpreted. Compared per row: the multiset of chosen values (ties are by value), the slots
filled with -1, whether the answer is right; per launch: hung or not, and every group's arrival counter. Where a build's answer is
wrong by a race between threads (candidate buffers that overflow), only the fact that it is wrong can be compared; that is told.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import gzip
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4_repro.clock import SYSTEM
from dsv4_repro.errors import ReproError
from dsv4_repro.kernels.image import KernelImage
from dsv4_repro.kernels.reference import check_rows, value_keys
from dsv4_repro.kernels.select import select_kernel
from dsv4_repro.kernels.topk_cases import TopKCase, random_cases

SCHEMA = "dsv4-repro/silicon-agreement/1"


def row_digest(chosen: NDArray[np.int32], row: NDArray[np.float32], length: int) -> str:
    """What one row answered, independent of order and of which of equal values was taken: values, -1 slots, stray indices."""
    bounded = min(max(length, 0), len(row))
    inside = chosen[(chosen >= 0) & (chosen < bounded)]
    empty = int((chosen == -1).sum())
    keys = np.sort(value_keys(row[inside])) if len(inside) else np.zeros(0, np.uint32)
    return f"{len(inside)}.{empty}.{hashlib.sha256(keys.tobytes()).hexdigest()[:12]}"


def answer(outputs: NDArray[np.int32], case: TopKCase, logits: NDArray[np.float32]) -> dict[str, Any]:
    lengths = np.array(case.lengths, np.int64)
    verdicts = check_rows(outputs, logits, lengths, case.k)
    return {
        "rows": [row_digest(outputs[row], logits[row], int(lengths[row])) for row in range(len(lengths))],
        "wrong": [verdict.row for verdict in verdicts if not verdict.ok],
    }


def describe(case: TopKCase) -> dict[str, Any]:
    return {**dataclasses.asdict(case), "lengths": list(case.lengths), "data": list(case.data)}


def case_of(document: dict[str, Any]) -> TopKCase:
    return TopKCase(**{**document, "lengths": tuple(document["lengths"]), "data": tuple(document["data"])})


def record(arguments: argparse.Namespace) -> int:
    from kernel_correctness import Bench  # type: ignore[import-not-found]

    bench = Bench(arguments.device, 0.3)
    document: dict[str, Any] = {
        "schema": SCHEMA, "device": bench.info.document(), "seed": arguments.seed, "kernels": {}, "launches": [],
    }  # fmt: skip
    began = SYSTEM.monotonic()
    for spec in arguments.kernels.split(","):
        images: dict[tuple[int, int], KernelImage] = {}
        for case in random_cases(arguments.cases, arguments.seed):
            place = (case.k, case.vec)
            if place not in images:
                image = images[place] = select_kernel(spec, sm=bench.info.sm, top_k=case.k, vec=case.vec)
                entry = {"spec": spec, "sm": image.sm, "function": image.function, "k": case.k, "vec": case.vec}
                if spec.startswith("builtin"):
                    entry["cubin"] = base64.b64encode(gzip.compress(image.cubin, mtime=0)).decode()
                document["kernels"][image.cubin_sha256 + "/" + image.function] = entry
            logits = case.logits()
            outcome = bench.run(images[place], case, logits)
            outputs = np.frombuffer(bench.host_out.view, np.int32, count=len(case.lengths) * case.k).reshape(-1, case.k).copy()
            document["launches"].append({
                "kernel": images[place].cubin_sha256 + "/" + images[place].function, "case": describe(case), "hung": outcome.hung,
                "counters": list(outcome.counters), "ms": round(outcome.milliseconds, 4), **answer(outputs, case, logits),
            })  # fmt: skip
        done = [entry for entry in document["launches"] if document["kernels"][entry["kernel"]]["spec"] == spec]
        print(
            f"{spec}: {len(done)} launches, {sum(entry['hung'] for entry in done)} hung, "
            f"{sum(bool(entry['wrong']) for entry in done)} with wrong rows, {SYSTEM.monotonic() - began:.1f} s",
            flush=True,
        )
    arguments.out.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":"), default=str).encode(), 9, mtime=0))
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")
    return 0


def programs_of(document: dict[str, Any]) -> dict[str, Any]:
    """The recorded code, ready to be interpreted: kept in the file, or selected again and held against its sha256."""
    from dsv4_repro.kernels.cubin import kernel_images
    from dsv4_repro.kernels.sass.program import Program

    found = {}
    for key, entry in document["kernels"].items():
        digest = key.partition("/")[0]
        if "cubin" in entry:
            cubin = gzip.decompress(base64.b64decode(entry["cubin"]))
            image = next(item for item in kernel_images(cubin, entry["spec"]) if item.function == entry["function"])
        else:
            image = select_kernel(entry["spec"], sm=entry["sm"], top_k=entry["k"], vec=entry["vec"])
        if image.cubin_sha256 != digest:
            raise SystemExit(f"{entry['spec']}: the cubin here is {image.cubin_sha256[:12]}, recorded was {digest[:12]}")
        found[key] = Program.from_image(image)
    return found


def differences(seen: dict[str, Any], program: Any) -> tuple[list[str], bool]:
    """(how the interpreter differs from what was recorded, whether some row could be compared by rightness alone)."""
    from dsv4_repro.kernels.sass.topk import run_case

    case = case_of(seen["case"])
    run, _ = run_case(program, case)
    hung = run.result.kind == "deadlock"
    if run.result.kind not in ("completed", "deadlock"):
        return [f"the interpreter ended with {run.result.kind}: {run.result.proof}"], False
    found = [] if hung == seen["hung"] else [f"hung: {seen['hung']} on the card, {hung} interpreted"]
    if list(run.counters) != seen["counters"]:
        found.append(f"counters {seen['counters']} on the card, {list(run.counters)} interpreted")
    if hung or seen["hung"]:
        return found, False
    mine = answer(run.outputs, case, case.logits())
    if mine["wrong"] != seen["wrong"]:
        found.append(f"wrong rows {seen['wrong']} on the card, {mine['wrong']} interpreted")
    partly = False
    for row, (theirs, ours) in enumerate(zip(seen["rows"], mine["rows"], strict=True)):
        if theirs != ours:
            if row in seen["wrong"] and row in mine["wrong"]:
                partly = True
            else:
                found.append(f"row {row}: {theirs} on the card, {ours} interpreted")
    return found, partly


def compare(arguments: argparse.Namespace) -> int:
    document = json.loads(gzip.decompress(arguments.file.read_bytes()))
    if document.get("schema") != SCHEMA:
        raise SystemExit(f"{arguments.file}: schema {document.get('schema')!r}, {SCHEMA!r} expected")
    programs = programs_of(document)
    counts: Counter[str] = Counter()
    failures = []
    began = SYSTEM.monotonic()
    for seen in document["launches"][: arguments.limit]:
        spec = document["kernels"][seen["kernel"]]["spec"]
        found, partly = differences(seen, programs[seen["kernel"]])
        counts[f"{spec}: {'differs' if found else 'agrees'}"] += 1
        counts[f"{spec}: hung on both"] += bool(seen["hung"] and not found)
        counts[f"{spec}: rows compared"] += len(seen["rows"])
        counts[f"{spec}: launches with a row wrong on both by a race of its threads"] += partly
        if found:
            failures.append({"spec": spec, "case": seen["case"]["name"], "differences": found[:5]})
    summary = {
        "recorded_on": document["device"].get("name"), "sm": document["device"].get("sm"), "counts": dict(sorted(counts.items())),
        "failures": failures[:40], "seconds": round(SYSTEM.monotonic() - began, 1),
    }  # fmt: skip
    print(json.dumps(summary, indent=1))
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("record")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--kernels", default="builtin:guard,builtin")
    one.add_argument("--cases", type=int, default=540)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--device", type=int, default=0)
    two = verbs.add_parser("compare")
    two.add_argument("file", type=Path)
    two.add_argument("--limit", type=int, default=None)
    arguments = parser.parse_args()
    return record(arguments) if arguments.verb == "record" else compare(arguments)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ReproError as error:
        print(f"{type(error).__name__}: {error}\n{error.help_text}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None
