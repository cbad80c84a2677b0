"""Old memory read as KV indices, on a card: the shipped function's rows, read by a kernel of ours as a sparse kernel reads them.

    PYTHONPATH=PARENT python benchmarks/sentinel_gpu.py --out DIR [--releases 0.27.1,0.29.0,0.30.0]

For each release its own ``combine_topk_swa_indices`` fills a workspace that was used before (executed over NumPy, see
``kernels.shipped_python``; the release's Python comes from the cache or the index: ``--warm`` fetches it). A child process for each
uploads the rows and launches ``sparse_row_reader``, which trusts every entry that is not -1. Expected: an illegal access before
0.30.0, with a GPU core dump that the driver writes by itself; a sum from 0.30.0 on. JSON after each release.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from dsv4_repro.errors import ReproError
from dsv4_repro.forensics.diagnose import diagnose_dump
from dsv4_repro.kernels.build import compile_kernel
from dsv4_repro.kernels.device_child import be_a_good_child
from dsv4_repro.kernels.driver import CudaCallError, Driver
from dsv4_repro.kernels.release_sources import release_members
from dsv4_repro.kernels.shipped_python import call_combine
from dsv4_repro.repro.sentinel_cpu import call_of, stale_columns
from dsv4_repro.scenarios.launches import IndexWorkspace

SOURCE = "vllm/models/deepseek_v4/common/ops/cache_utils.py"
WORKSPACE = IndexWorkspace(0x7F7F7F7F)
KV_FLOATS = 64
LIMIT_S = 60.0


def source_of(release: str) -> str:
    return next(iter(release_members(f"vllm=={release}", [SOURCE]).values())).decode()


def child(path: Path) -> int:
    """Upload the rows of ``path``, launch, wait; one line of JSON."""
    be_a_good_child(os.getppid())
    rows = np.array(json.loads(path.read_text())["indices"], np.int32)
    driver = Driver()
    driver.init()
    info = driver.open(0)
    stream, event = driver.stream(), driver.event()
    reader = driver.load(compile_kernel("companions.cu", info.sm).cubin, "sparse_row_reader")
    kv_rows = WORKSPACE.rows_per_request * len(WORKSPACE.seq_lens)
    host = driver.pinned(rows.nbytes + 4096)
    host.write(rows.tobytes())
    indices, kv, out = driver.alloc(rows.nbytes), driver.alloc(4 * KV_FLOATS * kv_rows), driver.alloc(4096)
    driver.copy_in(indices, host.address, rows.nbytes, stream)
    driver.fill(kv, 0x3F800000, KV_FLOATS * kv_rows, stream)
    driver.fill(out, 0, 1024, stream)
    params = [struct.pack("<Q", indices), struct.pack("<Q", kv), struct.pack("<Q", out), struct.pack("<I", rows.shape[1])]
    answer: dict[str, Any] = {"device": info.name, "sm": info.sm}
    try:
        driver.launch(reader, rows.shape[0], 128, 0, params, stream)
        driver.copy_out(host.address, out, 4 * rows.shape[0], stream)
        driver.record(event, stream)
        until = time.monotonic() + 20.0
        while not driver.finished(event):
            if time.monotonic() > until:
                raise SystemExit("the reader did not end")
            time.sleep(0.001)
        answer["sums"] = np.frombuffer(host.view, np.float32, rows.shape[0]).tolist()
    except CudaCallError as error:
        answer["error"] = error.code
    print(json.dumps(answer), flush=True)
    os._exit(0)


def one(release: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    made = call_combine(source_of(release), call_of(WORKSPACE))
    found: dict[str, Any] = {"stale": sum(stale_columns(made["indices"], made["lens"])), "valid": made["lens"]}
    rows = folder / "rows.json"
    rows.write_text(json.dumps(made))
    environment = {**os.environ, "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1", "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP": "1",
                   "CUDA_COREDUMP_FILE": str((folder / "gpu.nvcudmp").absolute())}  # fmt: skip
    try:
        words = [sys.executable, __file__, "--child", str(rows)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {**found, "why": f"no end within {LIMIT_S:g} s", "as_expected": False}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found["child"] = json.loads(lines[-1]) if lines else {"status": done.returncode, "stderr": done.stderr[-600:]}
    dump = folder / "gpu.nvcudmp"
    if dump.is_file():
        try:
            found["verdict"] = diagnose_dump(dump).document()["verdict"]
        except ReproError as error:
            found["verdict"] = {"error": f"{type(error).__name__}: {error}"}
    faulted = (
        found["child"].get("error") == "CUDA_ERROR_ILLEGAL_ADDRESS" or found.get("verdict", {}).get("cause") == "illegal-access"
    )
    right = found["child"].get("sums") == [float(length) for length in made["lens"]]
    return {**found, "as_expected": faulted if found["stale"] else right}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "sentinel")))
    parser.add_argument("--releases", default="0.27.1,0.29.0,0.30.0")
    parser.add_argument("--warm", action="store_true", help="only fetch what the releases hold, and compile nothing")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        return child(args.child)
    summary: dict[str, Any] = {"schema": "dsv4-repro/sentinel-gpu/1", "releases": {}}
    args.out.mkdir(parents=True, exist_ok=True)
    for release in args.releases.split(","):
        if args.warm:
            print(release, len(source_of(release)))
            continue
        try:
            found = one(release, args.out / release)
        except ReproError as error:
            found = {"error": f"{type(error).__name__}: {error}", "as_expected": False}
        summary["releases"][release] = found
        (args.out / "sentinel_gpu.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))
    return 0 if all(found["as_expected"] for found in summary["releases"].values()) else 3


if __name__ == "__main__":
    sys.exit(main())
