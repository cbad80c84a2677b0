"""What the sparse attention of a server does with the garbage indices of a released padding row. Runs in the server's own Python.

    PYTHONPATH=X/vl:X/site python benchmarks/garbage_rows.py --out DIR [--sanitizer /usr/local/cuda/bin/compute-sanitizer]

vLLM's own two consumers, in its own order (bf16 path of the FLASHMLA_SPARSE backend): the kernel that turns a request's
token indices into places in the KV cache, and the sparse attention that reads those places. Eight rows as in the wedge; row
6, the padding row, holds the worst: least and greatest int32, random bits, indices just past the block table, and plain
garbage. Shown: every place is -1 or inside the cache; no error of the device; the other rows are bit for bit those of a run
whose row 6 is all -1. With ``--sanitizer`` the same once more under compute-sanitizer, in a child with a deadline.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROWS, REQUESTS, TOP_K, BLOCK, BLOCKS, WIDTH, HEADS, DIM = 8, 4, 2048, 64, 1024, 256, 64, 576
PADDING_ROW = 6
LEAST, MOST = -(1 << 31), (1 << 31) - 1


def measure() -> dict[str, Any]:
    """The experiment in this process."""
    import torch
    from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    device = torch.device("cuda:0")
    chance = torch.Generator(device="cpu").manual_seed(1)

    def integers(low: int, high: int, *shape: int) -> Any:
        return torch.randint(low, high, shape, generator=chance, dtype=torch.int64).to(torch.int32).to(device)

    # Rows of the padding slot belong to request 0 (vLLM fills them with 0); entries past a request's blocks are stale block ids.
    requests = torch.tensor([0, 0, 1, 1, 2, 2, 0, 0], dtype=torch.int32, device=device)
    table = integers(0, BLOCKS, REQUESTS, WIDTH)
    plain = integers(0, 3060, ROWS, TOP_K)
    plain[PADDING_ROW] = -1
    cache = torch.randn(BLOCKS * BLOCK, 1, DIM, generator=chance).to(torch.bfloat16).to(device)
    query = torch.randn(ROWS, HEADS, DIM, generator=chance).to(torch.bfloat16).to(device)
    cycle = torch.arange(TOP_K) % 4
    edges = torch.tensor([LEAST, MOST, WIDTH * BLOCK, WIDTH * BLOCK - 1], dtype=torch.int64)
    worst = {
        "least": torch.full((TOP_K,), LEAST, dtype=torch.int64), "most": torch.full((TOP_K,), MOST, dtype=torch.int64),
        "past the block table": torch.full((TOP_K,), WIDTH * BLOCK, dtype=torch.int64), "edges": edges[cycle],
        "random bits": torch.randint(LEAST, MOST, (TOP_K,), generator=chance),
        "inside": torch.randint(0, WIDTH * BLOCK, (TOP_K,), generator=chance),
    }  # fmt: skip

    def run(indices: Any) -> tuple[Any, Any]:
        places = triton_convert_req_index_to_global_index(requests, table, indices, BLOCK_SIZE=BLOCK, NUM_TOPK_TOKENS=TOP_K)
        output = flash_mla_sparse_fwd(query, cache, places.view(ROWS, 1, -1), DIM**-0.5)[0]
        torch.cuda.synchronize()
        return places, output

    _, expected = run(plain)
    others = [row for row in range(ROWS) if row != PADDING_ROW]
    found = {}
    for name, row in worst.items():
        indices = plain.clone()
        indices[PADDING_ROW] = row.to(torch.int32).to(device)
        places, output = run(indices)
        inside = (places == -1) | ((places >= 0) & (places < BLOCKS * BLOCK))
        found[name] = {
            "places_inside": bool(inside.all()),
            "places_used": int((places[PADDING_ROW] >= 0).sum()),
            "other_rows_equal": bool(torch.equal(output[others], expected[others])),
            "padding_row_finite": bool(torch.isfinite(output[PADDING_ROW].float()).all()),
        }
    return {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "cases": found}


def sanitized(path: Path, seconds: float) -> dict[str, Any]:
    """The same under compute-sanitizer's memcheck."""
    argv = [str(path), "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(Path(__file__).resolve()), "--child"]
    began = time.monotonic()
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"ran": False, "why": f"{type(error).__name__}: {error}"[:300]}
    text = done.stdout + done.stderr
    lines = [line for line in text.splitlines() if "=========" in line]
    return {
        "ran": done.returncode in (0, 9), "errors": done.returncode == 9, "status": done.returncode,
        "seconds": time.monotonic() - began, "said": lines[-12:], "tail": text[-1500:],
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--sanitizer", type=Path, default=None)
    parser.add_argument("--timeout-s", type=float, default=240.0)
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args(words)
    if args.child:
        print(json.dumps(measure()))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "garbage_rows.json"
    document: dict[str, Any] = {"schema": "dsv4-repro/benchmark-garbage-rows/1"}
    try:
        argv = [sys.executable, str(Path(__file__).resolve()), "--child"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=args.timeout_s, check=False)
        plain = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": done.stderr[-3000:]}
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        plain = {"failed": f"{type(error).__name__}: {error}"[:3000]}
    document["plain"] = plain
    path.write_text(json.dumps(document, indent=1))
    if args.sanitizer is not None:
        document["sanitizer"] = sanitized(args.sanitizer, args.timeout_s)
        path.write_text(json.dumps(document, indent=1))
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
