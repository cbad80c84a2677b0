"""Does the interpreter agree with the chip? The same launches on both, compared row by row.

    python benchmarks/silicon_agreement.py prepare DIR --sm 90 --kernel builtin:guard   where there is network
    python benchmarks/silicon_agreement.py record DIR OUT.json.gz                       on the GPU machine
    python benchmarks/silicon_agreement.py interpret DIR OUT.json.gz                    the interpreter in its place
    python benchmarks/silicon_agreement.py compare DIR OUT.json.gz                      anywhere; exit 3 if they differ

A recording holds for every case whether the launch hung, the arrival counters, and for every row how many slots hold a valid
index, -1 or something else, and a digest of the sorted values chosen: equal values may be chosen in any order. Cases: the sweep
of ``kernels.topk_cases`` with several seeds (four are 532 cases), NaN left out, and the batch of vLLM #51593 with one negative
length. Rows that are wrong on the chip may depend on the order in which its threads came: they are compared only in being
wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4_repro.errors import KernelNotFoundError, ReproError
from dsv4_repro.kernels.abi import TOP_K_VALUES, VECTOR_WIDTHS
from dsv4_repro.kernels.cubin import kernel_images
from dsv4_repro.kernels.image import KernelImage
from dsv4_repro.kernels.reference import check_rows, value_keys
from dsv4_repro.kernels.topk_cases import TopKCase, all_cases, random_cases

SCHEMA = "dsv4-repro/silicon-agreement/1"


#: Random launches beside the sweep, for kernels written here: others may fault on lengths that no launcher gives them.
RANDOM = 540


def cases(seeds: int, kernel: str) -> Iterator[TopKCase]:
    if kernel.startswith("builtin"):
        yield from random_cases(RANDOM, seeds)
    for seed in range(seeds):
        for case in all_cases(seed):
            if "nan" not in case.data:
                yield case
                if case.name == "peers leave":
                    yield dataclasses.replace(case, lengths=(*case.lengths[:6], -1, 0))


def describe(indices: NDArray[np.int32], logits: NDArray[np.float32], case: TopKCase) -> list[list[Any]]:
    """Of each row: right or not, valid indices, -1s, digest of the sorted values chosen."""
    lengths = np.minimum(np.array(case.lengths, np.int64), case.max_seq_len)
    keys = value_keys(logits)
    found = []
    for verdict, row, row_keys, length in zip(check_rows(indices, logits, lengths, case.k), indices, keys, lengths, strict=True):
        valid = row[(row >= 0) & (row < max(int(length), 0))]
        digest = hashlib.blake2b(np.sort(row_keys[valid]).tobytes(), digest_size=8).hexdigest()
        found.append([verdict.ok, len(valid), int((row == -1).sum()), digest])
    return found


def prepare(folder: Path, kernels: list[str], sm: int) -> None:
    """One cubin a kernel, k and width, and a list of them."""
    from dsv4_repro.kernels.select import select

    folder.mkdir(parents=True, exist_ok=True)
    listed: dict[str, dict[str, str]] = {}
    for kernel in kernels:
        for k in TOP_K_VALUES:
            for vec in VECTOR_WIDTHS:
                image = select(kernel, sm=sm, top_k=k, vec=vec).image
                name = f"{image.cubin_sha256[:16]}.cubin"
                (folder / name).write_bytes(image.cubin)
                listed.setdefault(kernel, {})[f"{k}.{vec}"] = name
    (folder / "kernels.json").write_text(json.dumps(listed, indent=1))


def prepared(folder: Path) -> dict[str, dict[tuple[int, int], KernelImage]]:
    try:
        listed = json.loads((folder / "kernels.json").read_text())
    except OSError as error:
        raise KernelNotFoundError(f"{folder}: {error.strerror}; make it with: silicon_agreement.py prepare {folder}") from None
    found: dict[str, dict[tuple[int, int], KernelImage]] = {}
    for kernel, names in listed.items():
        for name in set(names.values()):
            for image in kernel_images((folder / name).read_bytes(), kernel, path=name):
                if names.get(f"{image.top_k}.{image.vec}") == name:
                    found.setdefault(kernel, {})[image.top_k, image.vec] = image
    return found


def on_device(images: dict[str, dict[tuple[int, int], KernelImage]], seeds: int, device: int) -> dict[str, Any]:
    from kernel_correctness import Bench  # the script beside this one

    bench = Bench(device, 0.5)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "origin": "measured",
        "device": bench.info.document(),
        "seeds": seeds,
        "kernels": {},
    }
    for kernel, instances in images.items():
        rows = result["kernels"][kernel] = []
        for case in cases(seeds, kernel):
            logits = case.logits()
            outcome = bench.run(instances[case.k, case.vec], case, logits)
            indices = np.frombuffer(bench.host_out.view, np.int32, len(case.lengths) * case.k).reshape(-1, case.k)
            rows.append([case.name, case.seed, outcome.hung, list(outcome.counters), describe(indices, logits, case)])
    return result


def on_cpu(images: dict[str, dict[tuple[int, int], KernelImage]], seeds: int) -> dict[str, Any]:
    from dsv4_repro.kernels.sass.program import Program
    from dsv4_repro.kernels.sass.topk import run_case

    result: dict[str, Any] = {"schema": SCHEMA, "origin": "interpreted", "seeds": seeds, "kernels": {}}
    for kernel, instances in images.items():
        programs = {key: Program.from_image(image) for key, image in instances.items()}
        rows = result["kernels"][kernel] = []
        for case in cases(seeds, kernel):
            run, _ = run_case(programs[case.k, case.vec], case)
            if run.result.kind not in ("completed", "deadlock"):
                raise KernelNotFoundError(f"{kernel}, {case.name}: {run.result.kind}: {run.result.proof}")
            hung = run.result.kind == "deadlock"
            rows.append([case.name, case.seed, hung, list(run.counters), describe(run.outputs, case.logits(), case)])
    return result


def differences(one: dict[str, Any], other: dict[str, Any]) -> tuple[int, list[str]]:
    """(rows compared, sentences about those that differ)."""
    compared, found = 0, []
    for kernel, recorded in one["kernels"].items():
        for a, b in zip(recorded, other["kernels"].get(kernel, []), strict=True):
            place = f"{kernel}, {a[0]}, seed {a[1]}"
            if a[:4] != b[:4]:
                found.append(f"{place}: hung {a[2]}, counters {a[3]} against hung {b[2]}, counters {b[3]}")
                continue
            for row, (x, y) in enumerate(zip(a[4], b[4], strict=True)):
                # A hung launch was released before its rows were read on the chip.
                if a[2] and not (x[0] and y[0]):
                    continue
                compared += 1
                if x[0] != y[0] or (x[0] and x != y):
                    found.append(f"{place}, row {row}: {x} against {y}")
    return compared, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("prepare", "record", "interpret", "compare"))
    parser.add_argument("folder", type=Path, help="cubins, as prepare made them")
    parser.add_argument("recording", type=Path, nargs="?")
    parser.add_argument("--kernel", action="append")
    parser.add_argument("--sm", type=int, default=90)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args()
    try:
        if options.action == "prepare":
            prepare(options.folder, options.kernel or ["builtin:guard", "builtin", "vllm==0.27.1", "vllm==0.33.0"], options.sm)
            return 0
        images = prepared(options.folder)
        if options.recording is None:
            parser.error("the recording's path is missing")
        if options.action in ("record", "interpret"):
            made = (
                on_cpu(images, options.seeds) if options.action == "interpret" else on_device(images, options.seeds, options.device)
            )
            options.recording.write_bytes(gzip.compress(json.dumps(made, separators=(",", ":")).encode(), 9, mtime=0))
            print(f"{options.recording}: {sum(map(len, made['kernels'].values()))} launches", flush=True)
            if options.action == "record":
                os._exit(0)  # not a plain exit: it would wait for a kernel that never ends
            return 0
        recorded = json.loads(gzip.decompress(options.recording.read_bytes()))
        wanted = {kernel: instances for kernel, instances in images.items() if kernel in recorded["kernels"]}
        compared, found = differences(recorded, on_cpu(wanted, recorded["seeds"]))
    except ReproError as error:
        print(f"{type(error).__name__}: {error}\n{error.help_text}", file=sys.stderr, flush=True)
        return error.exit_status
    print("\n".join(found[:40]))
    launches = sum(map(len, recorded["kernels"].values()))
    print(f"{launches} launches, {compared} rows compared, {len(found)} differences")
    return 3 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
