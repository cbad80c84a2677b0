"""Makes the core-dump fixtures of tests/fixtures/cores on the card at hand, from the kernels written here alone.

    PYTHONPATH=PARENT python benchmarks/make_fixtures.py --out DIR [--only hung-topk,…]

One child process a fixture: no torch in it, one launch (or two), light dump flags, the user-triggered pipe. Each dump is kept as
``NAME.nvcudmp.xz`` and listed in ``index.json`` with its sha256, size, card, driver, how it was made and what a reader must
find in it.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_repro.clock import SYSTEM
from dsv4_repro.forensics.collect import sha256_of
from dsv4_repro.forensics.collect.core_trigger import LIGHT_FLAGS, CoreDumpCollector, DumpSettings
from dsv4_repro.kernels.abi import THREADS_PER_CTA, WORKSPACE_BYTES, TopKParams
from dsv4_repro.kernels.build import builtin_image, compile_kernel
from dsv4_repro.kernels.device_child import be_a_good_child
from dsv4_repro.kernels.driver import Driver, Handle

#: A child that nobody dumped ends by itself after so long, seconds.
LIFE_S = 25.0


class Bench:
    """Device buffers and launches of one fixture."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.driver.init()
        self.info = self.driver.open(0)
        self.stream = self.driver.stream()
        self.second = self.driver.stream()
        self.facts: dict[str, Any] = {}
        self._loaded: dict[str, Handle] = {}

    def zeros(self, size: int) -> int:
        address = self.driver.alloc(size)
        self.driver.fill(address, 0, (size + 3) // 4, self.stream)
        return address

    def settle(self) -> None:
        event = self.driver.event()
        self.driver.record(event, self.stream)
        while not self.driver.finished(event):
            time.sleep(0.001)

    def patient_function(self, name: str) -> Handle:
        """A kernel of patients.cu, loaded. Loading waits for running kernels: load first what is launched beside a hang."""
        if name not in self._loaded:
            made = compile_kernel("patients.cu", self.info.sm, expressions=())
            self._loaded[name] = self.driver.load(made.cubin, name)
        return self._loaded[name]

    def patient(self, name: str, grid: int, threads: int, arguments: list[bytes], *, smem: int = 0, stream: Handle = None) -> None:
        """Launch a kernel of patients.cu; ``arguments``: one bytes object a parameter."""
        function = self.patient_function(name)
        if smem:
            self.driver.allow_dynamic_smem(function, smem)
        self.driver.launch(function, grid, threads, smem, arguments, stream or self.stream)

    def topk(
        self, variant: str, lengths: list[int], *, stride: int = 16384, ctas: int = 2, chunk: int = 8192, max_seq_len: int = 16384,
        groups: int | None = None, smem: int = 35968, settings: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        import numpy as np

        image = builtin_image(variant, self.info.sm, 512, 4, settings=settings)
        function = self.driver.load(image.cubin, image.function)
        self.driver.allow_dynamic_smem(function, smem)
        rows = len(lengths)
        logits = np.random.default_rng(0).standard_normal((rows, stride), dtype=np.float32)
        host = np.array(lengths, dtype=np.int32)
        self.keep = (logits, host)
        buffers = {"input": self.zeros(logits.nbytes), "lengths": self.zeros(4 * rows), "output": self.zeros(4 * rows * 512)}
        states = self.zeros(WORKSPACE_BYTES)
        self.driver.copy_in(buffers["input"], logits.ctypes.data, logits.nbytes, self.stream)
        self.driver.copy_in(buffers["lengths"], host.ctypes.data, host.nbytes, self.stream)
        self.settle()
        params = TopKParams(
            **buffers, row_states=states, num_rows=rows, stride=stride, top_k=512, chunk_size=chunk, ctas_per_group=ctas,
            max_seq_len=max_seq_len,
        )  # fmt: skip
        grid = (groups or rows) * ctas
        self.driver.launch(function, grid, THREADS_PER_CTA, smem, params.pack(), self.stream)
        self.facts.update(
            kernel=image.function,
            grid=grid,
            params=params.pack().hex(),
            row_states=states,
            occupancy=self.driver.occupancy(function, THREADS_PER_CTA, smem),
        )


HUNG_LENGTHS = [16000, 16001, 12000, 12001, 9000, 9001, -1, 0]


def _packed(*values: int) -> list[bytes]:
    """Parameters of ``patients.cu``, one bytes object each: pointers are values above 32 bits, the rest are 32-bit words."""
    return [value.to_bytes(8 if value > 0xFFFFFFFF else 4, "little") for value in values]


def hung_topk(bench: Bench) -> None:
    bench.topk("unguarded", HUNG_LENGTHS)


def bounded_spin(bench: Bench) -> None:
    bench.topk("bounded-spin", HUNG_LENGTHS, settings={"spin_limit": 1 << 28})


def healthy(bench: Bench) -> None:
    bench.patient("healthy_worker", 4, 128, _packed(bench.zeros(4096), 60_000, 200_000))


def not_co_resident(bench: Bench) -> None:
    grid = bench.info.sm_count + 8
    smem = min(bench.info.smem_optin, bench.info.smem_per_sm) - 4096
    bench.facts.update(grid=grid, slots=bench.info.sm_count)
    bench.patient("grid_barrier_once", grid, 32, _packed(bench.zeros(256), grid), smem=smem)


def not_co_resident_topk(bench: Bench) -> None:
    ctas = 2 * bench.info.sm_count + 36
    bench.topk(
        "unguarded", [1024 * ctas], stride=1024 * ctas, ctas=ctas, chunk=1024, max_seq_len=1024 * ctas, groups=1, smem=102400
    )


def two_grids(bench: Bench) -> None:
    bench.patient_function("healthy_worker")
    arguments = _packed(bench.zeros(4096), 60_000, 200_000)
    bench.topk("unguarded", HUNG_LENGTHS)
    bench.patient("healthy_worker", 2, 64, arguments, stream=bench.second)


def crossrank(bench: Bench) -> None:
    bench.patient("flag_wait", 2, 64, _packed(bench.zeros(256), 7, bench.zeros(4096)))


def named_barrier(bench: Bench) -> None:
    bench.patient("named_barrier_stuck", 1, 128, _packed(bench.zeros(4096), 1))


def mbarrier_phase(bench: Bench) -> None:
    bench.patient("mbarrier_phase_stuck", 1, 64, _packed(bench.zeros(4096), 1))


def cluster_peer(bench: Bench) -> None:
    bench.patient("cluster_peer_stuck", 2, 64, _packed(bench.zeros(256), bench.zeros(4096)))


@dataclass(frozen=True, slots=True)
class Fixture:
    make: Callable[[Bench], None]
    about: str
    expected: str
    heavy: bool = False


FIXTURES = {
    "hung-topk": Fixture(
        hung_topk, "builtin unguarded, 8 rows x 16384, lengths [..., -1, 0]: one leader waits", "gpu-spin-barrier/peer-left"
    ),
    "bounded-spin": Fixture(
        bounded_spin, "the same with a spin that gives up after 2^28 polls, dumped before", "gpu-spin-barrier/peer-left"
    ),
    "healthy": Fixture(healthy, "healthy_worker at work: rounds go on", "no wait loop at a barrier"),
    "not-co-resident": Fixture(
        not_co_resident, "one grid barrier of more CTAs than the device holds", "gpu-spin-barrier/not-co-resident"
    ),
    "two-grids": Fixture(
        two_grids, "hung-topk and healthy_worker on two streams", "gpu-spin-barrier/peer-left in one of two grids"
    ),
    "crossrank": Fixture(
        crossrank, "flag_wait: a system-scope acquire on a flag that nobody writes", "gpu-crossrank-spin or gpu-kernel-stuck"
    ),
    "named-barrier": Fixture(
        named_barrier, "half a CTA at named barrier 1, the other half gone", "gpu-barrier-intra-block/named-barrier"
    ),
    "mbarrier-phase": Fixture(mbarrier_phase, "an mbarrier that gets one arrival too few", "gpu-barrier-intra-block/phase-wait"),
    "cluster-peer": Fixture(cluster_peer, "CTA 0 of a cluster waits for its peer", "gpu-barrier-intra-block/cluster-peer"),
    "not-co-resident-topk": Fixture(
        not_co_resident_topk,
        "builtin, one group of more CTAs than slots (large: not a fixture)",
        "gpu-spin-barrier/not-co-resident",
        True,
    ),
}


def child(name: str, parent: int) -> int:
    """Launch, say so on stdout, and wait to be dumped."""
    be_a_good_child(parent)
    bench = Bench()
    FIXTURES[name].make(bench)
    probe = bench.driver.event()
    bench.driver.record(probe, bench.stream)
    time.sleep(0.3)
    pending = not bench.driver.finished(probe)
    print(json.dumps({"device": bench.info.document(), "pending": pending, **bench.facts}), flush=True)
    end = time.monotonic() + LIFE_S
    while time.monotonic() < end and os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)


def make(name: str, folder: Path) -> dict[str, Any]:
    fixture = FIXTURES[name]
    work = folder / f"work-{name}"
    settings = DumpSettings.in_folder(work)
    errors = work / "child.err"
    began = time.monotonic()
    with errors.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, __file__, "--child", name, "--parent", str(os.getpid())],
            stdout=subprocess.PIPE, stderr=sink, env={**os.environ, **settings.environment()},
        )  # fmt: skip
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], LIFE_S)
        line = process.stdout.readline() if ready else b""
        if not line:
            return {"error": errors.read_text(errors="replace")[-1500:]}
        facts = json.loads(line)
        collected = CoreDumpCollector(process.pid, settings, work, stderr=errors, clock=SYSTEM, deadline_s=60.0).collect()
    finally:
        process.kill()
        process.wait(20)
    entry: dict[str, Any] = {
        "about": fixture.about, "expected": fixture.expected, "flags": LIGHT_FLAGS, "facts": facts,
        "seconds": time.monotonic() - began,
        "dump": {key: value for key, value in collected.facts.items() if key != "log"},
        "unread": [f"{item.what}: {item.why}" for item in collected.unread],
    }  # fmt: skip
    dump = next((item.path for item in collected.files if item.kind == "gpu-core"), None)
    if dump is None:
        entry["error"] = (
            f"no dump: {entry['unread']}; log {collected.facts.get('log')}; {errors.read_text(errors='replace')[-500:]}"
        )
        return entry
    entry["size"], entry["sha256"] = dump.stat().st_size, sha256_of(dump)
    packed = folder / f"{name}.nvcudmp.xz"
    with dump.open("rb") as source, lzma.open(packed, "wb", preset=1 if fixture.heavy else 6) as target:
        while block := source.read(1 << 20):
            target.write(block)
    entry["packed"], entry["packed_size"] = packed.name, packed.stat().st_size
    dump.unlink()
    return entry


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "fixtures")))
    parser.add_argument("--only", default=",".join(name for name, fixture in FIXTURES.items() if not fixture.heavy))
    parser.add_argument("--child", default="")
    parser.add_argument("--parent", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child, arguments.parent)
    arguments.out.mkdir(parents=True, exist_ok=True)
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        driver = f"not read: {type(error).__name__}"
    index: dict[str, Any] = {"schema": "dsv4-repro/fixture-cores/1", "card_and_driver": driver, "fixtures": {}}
    failed = 0
    for name in arguments.only.split(","):
        try:
            entry = make(name, arguments.out)
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            entry = {"error": f"{type(error).__name__}: {error}"}
        failed += "error" in entry
        index["fixtures"][name] = entry
        short = {key: entry[key] for key in entry if key not in ("facts", "about", "flags")}
        print(
            f"{name}: {json.dumps(short, default=str)[:700]}",
            flush=True,
        )
        if "facts" in entry:
            print(f"    pending {entry['facts'].get('pending')}, {entry['seconds']:.1f} s", flush=True)
        (arguments.out / "index.json").write_text(json.dumps(index, indent=1, default=str))
    print(f"{len(index['fixtures'])} fixtures, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
