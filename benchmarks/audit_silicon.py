"""Does a chip agree with the audit? Lengths at every edge of the two decisions, on the kernels that the audit judged.

    python benchmarks/audit_silicon.py prepare DIR --sm 90          where there is network: cubins, and what the machine code says
    python benchmarks/audit_silicon.py record DIR OUT.json          on the GPU machine (cuda-bindings and numpy, no torch)

``prepare`` evaluates, for every length, the terms that the symbolic execution made of the machine code: does the leader wait
while its
peer has left? ``record`` launches that very code with that length in row 6 of eight rows and says whether it ended. Exit status 3
if
any launch differs. A launch that hangs is released by a second stream.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dsv4_repro.errors import KernelNotFoundError, ReproError
from dsv4_repro.kernels.abi import TOP_K_VALUES, VECTOR_WIDTHS
from dsv4_repro.kernels.cubin import kernel_images
from dsv4_repro.kernels.topk_cases import TopKCase

SCHEMA = "dsv4-repro/audit-silicon/1"
ROW = 6
#: (stride, max_seq_len) of the launches: the reproducer's, and one whose rows are wider than what is promised.
SHAPES = ((16384, 16384), (40000, 16384))
LENGTHS = (-(1 << 31), 1 - (1 << 31), -65536, -32769, -2, -1, 0, 1, 512, 513, 8192, 8193, 16384, 16385, 32767, 32768, 32769, 65536,
           (1 << 31) - 1)  # fmt: skip
SHIPPED = ("vllm==0.27.1", "vllm==0.28.0", "vllm==0.33.0")
OURS = ("", ":guard", ":guard-after-cast", ":guard-one-path", ":guard-stride-only", ":guard-max-seq-only", ":guard-min-only")


def prepare(folder: Path, sm: int) -> None:
    """Cubins, and for each launch the audit's answer."""
    from dsv4_repro.forensics.audit.conditions import LaunchConditions
    from dsv4_repro.forensics.audit.consumer import examine_images
    from dsv4_repro.forensics.audit.slices import SliceStore
    from dsv4_repro.kernels.devices import device_for_sm
    from dsv4_repro.kernels.plan import plan_launch
    from dsv4_repro.kernels.sass.symbolic_solver import Solver
    from dsv4_repro.kernels.select import select

    folder.mkdir(parents=True, exist_ok=True)
    store, solver = SliceStore(), Solver()
    conditions = LaunchConditions(store)
    wanted = [(kernel, k, vec) for kernel in SHIPPED for k in TOP_K_VALUES for vec in VECTOR_WIDTHS]
    wanted += [(f"builtin{variant}", 512, 4) for variant in OURS]
    launches: list[dict[str, Any]] = []
    for kernel, k, vec in wanted:
        image = select(kernel, sm=sm, top_k=k, vec=vec).image
        name = f"{image.cubin_sha256[:16]}.cubin"
        (folder / name).write_bytes(image.cubin)
        findings = examine_images([image], store=store, solver=solver, replay=None)
        (word,) = {item.word for item in findings if item.question == "agreement"}
        witnesses = [item.witness for item in findings if item.question == "agreement" and item.witness is not None]
        asked = [(stride, promised, length) for stride, promised in SHAPES for length in LENGTHS]
        asked += [(item.stride, item.max_seq_len, item.length) for item in witnesses if item.stride <= 1 << 18]
        for stride, promised, length in dict.fromkeys(asked):
            plan = plan_launch(8, stride, promised, k, device_for_sm(sm), registers=image.registers)
            waits = bool(conditions.waiting_rows(image, plan, [0] * ROW + [length, 0]))
            launches.append({
                "kernel": kernel, "verdict": word, "cubin": name, "k": k, "vec": vec, "stride": stride, "max_seq_len": promised,
                "chunk": plan.chunk_size, "ctas_per_group": plan.ctas_per_group, "groups": plan.groups, "length": length,
                "waits": waits,
            })  # fmt: skip
        print(f"{kernel} k {k} vec {vec}: {word}", file=sys.stderr, flush=True)
    (folder / "launches.json").write_text(json.dumps(launches, indent=0))


def record(folder: Path, device: int) -> dict[str, Any]:
    """Every launch on the GPU."""
    from kernel_correctness import Bench  # the script beside this one

    try:
        launches = json.loads((folder / "launches.json").read_text())
    except OSError as error:
        raise KernelNotFoundError(f"{folder}: {error.strerror}; make it with: audit_silicon.py prepare {folder}") from None
    bench = Bench(device, 0.1)
    images = {}
    for name in {item["cubin"] for item in launches}:
        for image in kernel_images((folder / name).read_bytes(), name, path=name):
            images[name, image.top_k, image.vec] = image
    for item in launches:
        case = TopKCase(
            "audit", item["k"], item["vec"], (0,) * ROW + (item["length"], 0), item["stride"], item["max_seq_len"],
            item["ctas_per_group"], item["groups"], item["chunk"],
        )  # fmt: skip
        outcome = bench.run(images[item["cubin"], item["k"], item["vec"]], case)
        item["hung"], item["counter"] = outcome.hung, outcome.counters[ROW]
        written = np.frombuffer(bench.host_out.view, np.int32, 8 * item["k"]).reshape(8, -1)[ROW]
        item["behind"] = int((written >= min(item["stride"], item["max_seq_len"])).sum())
    return {"schema": SCHEMA, "origin": "measured", "device": bench.info.document(), "launches": launches}


def summary(recorded: dict[str, Any]) -> tuple[list[str], int]:
    """A line a kernel, and how many launches differ from what the audit said."""
    lines, wrong = [], 0
    for kernel in dict.fromkeys(item["kernel"] for item in recorded["launches"]):
        mine = [item for item in recorded["launches"] if item["kernel"] == kernel]
        differ = [item for item in mine if item["hung"] != item["waits"]]
        wrong += len(differ)
        instances = len({(item["k"], item["vec"]) for item in mine})
        hung = [item for item in mine if item["hung"]]
        counters = sorted({item["counter"] for item in hung})
        ended_behind = [item for item in mine if item["behind"] and not item["hung"]]
        lines.append(
            f"{kernel}: {'/'.join(sorted({item['verdict'] for item in mine}))}; {len(mine)} launches of {instances} "
            f"instantiations, "
            f"{len(hung)} hung (arrival counter {counters}), {len(differ)} differ from the audit, "
            f"{len(ended_behind)} ended with indices behind the row"
        )
        lines += [f"  differs: {item}" for item in differ[:10]]
    return lines, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("prepare", "record", "show"))
    parser.add_argument("path", type=Path, help="the folder; for show: a recording")
    parser.add_argument("recording", type=Path, nargs="?")
    parser.add_argument("--sm", type=int, default=90)
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args()
    try:
        if options.action == "prepare":
            prepare(options.path, options.sm)
            return 0
        recorded = record(options.path, options.device) if options.action == "record" else json.loads(options.path.read_text())
    except ReproError as error:
        print(f"{type(error).__name__}: {error}\n{error.help_text}", file=sys.stderr, flush=True)
        os._exit(error.exit_status)
    if options.action == "record" and options.recording is not None:
        options.recording.write_text(json.dumps(recorded, separators=(",", ":")))
    lines, wrong = summary(recorded)
    print("\n".join(lines), flush=True)
    os._exit(3 if wrong else 0)  # not a plain exit: it would wait for a kernel that never ends


if __name__ == "__main__":
    sys.exit(main())
