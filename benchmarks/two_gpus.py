"""Two GPUs of one host: both wedged, one held while the other spins, one process over both, a hunt over both. JSON, part by part.

    PYTHONPATH=PARENT python benchmarks/two_gpus.py --out DIR [--parts wedge,process,nccl,hunt,ray] [--share]

``wedge``: run drain on both cards at once: both hang, with one identity. ``process``: one process on both devices: device 0's top-k
hangs with an all-reduce of our own queued behind it, device 1's all-reduce polls device 0's word over peer memory; a GPU core dump
of that process, the same under cuda-gdb, what each says; the dump is kept packed. ``nccl``: two torch.distributed processes, rank
0 held by the top-k, rank 1 in NCCL's all-reduce: RAS asked twice, host stacks and cuda-gdb of each, the autopsy of all of it.
``hunt``: a hunt over both cards in which half of the trials hang: what each card did while the other hung. ``ray``: the same as
Ray tasks on two nodes of one GPU each.

Every part has its own deadline and runs in children that are ended with it; the JSON is written after each. Without two GPUs the
parts say so. ``--stand-in`` (tests): two devices that are none, no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4_repro.clock import SYSTEM, Deadline
from dsv4_repro.errors import ReproError
from dsv4_repro.forensics.collect import Collected, run_collector
from dsv4_repro.forensics.collect.core_trigger import CoreDumpCollector, DumpSettings
from dsv4_repro.forensics.collect.cuda_gdb import CudaGdbCollector, find_cuda_gdb, probe_cuda_gdb
from dsv4_repro.forensics.collect.host_stacks import HostStackCollector
from dsv4_repro.forensics.collect.nccl_ras import RasCollector, ras_address
from dsv4_repro.forensics.diagnose import diagnose_dump, diagnose_state
from dsv4_repro.kernels.abi import THREADS_PER_CTA, WORKSPACE_BYTES, TopKParams
from dsv4_repro.kernels.build import builtin_image, compile_kernel
from dsv4_repro.kernels.device_child import be_a_good_child
from dsv4_repro.kernels.driver import Driver

LENGTHS = (16000, 16001, 12000, 12001, 9000, 9001, -1, 0)
RAS = "127.0.0.1:28777"
#: A child that nobody ended ends by itself after so long, seconds.
LIFE_S = 150.0
SMEM = 35968
#: Code that is loaded at its first launch waits for what runs on the device: here everything is loaded beforehand.
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:7.2f}] {text}", file=sys.stderr, flush=True)


STARTED = time.monotonic()

# ---------------------------------------------------------------------------------------------------------------------------------
# Children


def hang_topk(driver: Driver, stream: Any) -> dict[str, Any]:
    """The unguarded top-k with a length of -1 on ``stream``: block 12 of 16 waits for ever. The current context is ``driver``'s."""
    import numpy as np

    assert driver.info is not None
    image = builtin_image("unguarded", driver.info.sm, 512, 4)
    function = driver.load(image.cubin, image.function)
    driver.allow_dynamic_smem(function, SMEM)
    rows, stride = len(LENGTHS), 16384
    host = driver.pinned(4 * rows * stride + 4096)
    logits = np.random.default_rng(0).standard_normal((rows, stride), dtype=np.float32).tobytes()
    host.write(logits)
    host.write(np.array(LENGTHS, dtype=np.int32).tobytes(), len(logits))
    at = {"input": driver.alloc(len(logits)), "lengths": driver.alloc(4 * rows), "output": driver.alloc(4 * rows * 512)}
    states = driver.alloc(WORKSPACE_BYTES)
    driver.copy_in(at["input"], host.address, len(logits), stream)
    driver.copy_in(at["lengths"], host.address + len(logits), 4 * rows, stream)
    driver.fill(states, 0, WORKSPACE_BYTES // 4, stream)
    params = TopKParams(
        **at, row_states=states, num_rows=rows, stride=stride, top_k=512, chunk_size=8192, ctas_per_group=2, max_seq_len=stride
    )
    driver.launch(function, 2 * rows, THREADS_PER_CTA, SMEM, params.pack(), stream)
    return {"row_states": states, "counter": states + 6 * 3088 + 3080, "params": params.pack().hex()}


def wait_here(facts: Mapping[str, Any], parent: int, finished: Callable[[], bool]) -> None:
    """Say that it stands, and stand until the parent ends this process."""
    time.sleep(0.5)
    print(json.dumps({**facts, "pending": not finished()}), flush=True)
    end = time.monotonic() + LIFE_S
    while time.monotonic() < end and os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)


def child_process(parent: int) -> None:
    """One process, two devices, peer memory between them."""
    drivers = [Driver(), Driver()]
    words, streams, functions = [], [], []
    for ordinal, driver in enumerate(drivers):
        driver.init()
        info = driver.open(ordinal)
        streams.append(driver.stream())
        words.append(driver.alloc(256))
        driver.fill(words[-1], 0, 64, streams[-1])
        functions.append(driver.load(compile_kernel("companions.cu", info.sm).cubin, "cross_rank_all_reduce"))
    reach = [drivers[0].reaches(drivers[1]), drivers[1].reaches(drivers[0])]
    if not all(reach):
        raise SystemExit(f"no peer access between the devices: {reach}")
    drivers[0].open_peer(drivers[1])
    drivers[1].open_peer(drivers[0])
    events = []
    for driver, stream in zip(drivers, streams, strict=True):
        driver.use()
        events.append(driver.event())
        driver.record(events[-1], stream)
        while not driver.finished(events[-1]):
            time.sleep(0.001)
    drivers[0].use()
    facts = hang_topk(drivers[0], streams[0])
    for rank in (0, 1):
        drivers[rank].use()
        params = [struct.pack("<Q", words[rank]), struct.pack("<Q", words[1 - rank]), struct.pack("<I", 1)]
        drivers[rank].launch(functions[rank], 1, 32, 0, params, streams[rank])
        drivers[rank].record(events[rank], streams[rank])

    def finished() -> bool:
        done = []
        for rank in (0, 1):
            drivers[rank].use()
            done.append(drivers[rank].finished(events[rank]))
        return any(done)

    devices = [driver.info.document() for driver in drivers if driver.info is not None]
    wait_here({**facts, "words": words, "devices": devices, "peer_access": reach}, parent, finished)


def child_rank(parent: int, rank: int, stand_in: bool) -> None:
    """A rank of a torch.distributed job of two; with ``stand_in`` our own kernel is the all-reduce, and each rank is alone."""
    driver = Driver()
    driver.init()
    if stand_in:
        driver.open(0)
        stream = driver.stream()
        facts = hang_topk(driver, stream) if rank == 0 else {}
        if rank == 1:
            assert driver.info is not None
            words = driver.alloc(512)
            driver.fill(words, 0, 128, stream)
            function = driver.load(compile_kernel("companions.cu", driver.info.sm).cubin, "cross_rank_all_reduce")
            params = [struct.pack("<Q", words), struct.pack("<Q", words + 256), struct.pack("<I", 1)]
            driver.launch(function, 1, 32, 0, params, stream)
        event = driver.event()
        driver.record(event, stream)
        wait_here({**facts, "rank": rank, "stand_in": True}, parent, lambda: driver.finished(event))
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    data = torch.ones(1 << 20, device=f"cuda:{rank}")
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    for _ in range(3):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    driver.open(rank)
    stream = torch.cuda.Stream()
    facts = {
        "rank": rank,
        "torch": torch.__version__,
        "nccl": list(torch.cuda.nccl.version()),
        "device": torch.cuda.get_device_name(),
    }
    with torch.cuda.stream(stream):
        if rank == 0:
            facts |= hang_topk(driver, stream.cuda_stream)
        work = dist.all_reduce(data, async_op=True)
    wait_here(facts, parent, lambda: bool(work.is_completed()))


# ---------------------------------------------------------------------------------------------------------------------------------
# Parents


class Children:
    """Processes of one part, ended with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, words: Sequence[str], name: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.err").open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, *words], stdout=subprocess.PIPE, stderr=sink, env={**os.environ, **EAGER, **(environment or {})},
                start_new_session=True, bufsize=0,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def said(self, process: subprocess.Popen[bytes], name: str, seconds: float) -> dict[str, Any]:
        """The child's one JSON object; {"error"} if none came in time. Libraries print lines of their own before it (NCCL does)."""
        assert process.stdout is not None
        limit, other = Deadline(seconds, SYSTEM), b""
        while select.select([process.stdout], [], [], limit.remaining())[0]:
            line = process.stdout.readline()
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
            if not line:
                break
            other = (other + line)[-900:]
        how = "it ended" if process.poll() is not None else f"no word within {seconds:g} s"
        errors = (self.folder / f"{name}.err").read_text(errors="replace")[-900:]
        return {"error": f"{how}: {other.decode(errors='replace')}{errors}"}

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def me(*words: str) -> list[str]:
    return [str(Path(__file__).absolute()), *words, "--parent", str(os.getpid())]


def told(collected: Collected) -> dict[str, Any]:
    return {
        "seconds": round(collected.seconds, 3), "files": [item.path.name for item in collected.files],
        "unread": [f"{item.what}: {item.why}"[:400] for item in collected.unread],
        "facts": {key: value for key, value in collected.facts.items() if key != "log"},
    }  # fmt: skip


_WAIT = ("device", "kernel", "block", "address", "value", "target", "scope")


def verdict_of(diagnosis: Any) -> dict[str, Any]:
    document = diagnosis.document()
    return {
        **document["verdict"], "notes": document.get("notes", []),
        "waits": [{key: wait.get(key) for key in _WAIT} for wait in document["waits"][:8]],
    }  # fmt: skip


def gdb_of(pid: int, folder: Path, name: str, addresses: Sequence[int] = ()) -> tuple[dict[str, Any], Collected | None]:
    try:
        tool = probe_cuda_gdb(find_cuda_gdb(), folder)
    except ReproError as error:
        return {"unread": [str(error)]}, None
    found = run_collector(CudaGdbCollector(pid, folder, tool, addresses=addresses, file_name=name, deadline_s=40.0))
    return told(found), found


def part_wedge(args: argparse.Namespace, folder: Path, limit: Deadline) -> dict[str, Any]:
    """Both cards at once, by the verb."""
    children = Children(folder)
    found: dict[str, Any] = {}
    try:
        running = []
        for card in ("0", "1"):
            words = [
                "-m",
                "dsv4_repro.repro",
                "run",
                "drain",
                "--on",
                "gpu",
                "--device",
                card,
                "--out",
                str(folder / f"gpu{card}"),
                "--json",
            ]
            words += ["--share"] if args.share else []
            running.append(children.start(words, f"gpu{card}"))
        for card, process in zip(("0", "1"), running, strict=True):
            try:
                out, _ = process.communicate(timeout=limit.remaining())
                document = json.loads(out)
                found[f"gpu{card}"] = {
                    "status": process.returncode, **document.get("verdict", {"error": document}), "timing": document.get("timing"),
                    "unwedge": document.get("unwedge"),
                    "waits": [{key: wait.get(key) for key in _WAIT} for wait in document.get("waits", [])],
                }  # fmt: skip
            except (subprocess.TimeoutExpired, ValueError) as error:
                text = (folder / f"gpu{card}.err").read_text(errors="replace")[-600:]
                found[f"gpu{card}"] = {"error": f"{type(error).__name__}", "stderr": text}
    finally:
        children.end()
    names = {found[card].get("identity") for card in ("gpu0", "gpu1")}
    found["same_identity"] = len(names) == 1 and None not in names
    found["as_expected"] = found["same_identity"] and all(found[card].get("cause") == "peer-left" for card in ("gpu0", "gpu1"))
    return found


def part_process(args: argparse.Namespace, folder: Path, limit: Deadline) -> dict[str, Any]:
    """One process on both devices: dumped, and another one under cuda-gdb."""
    found: dict[str, Any] = {}
    children = Children(folder)
    try:
        settings = DumpSettings.in_folder(folder / "dump")
        process = children.start(me("--child", "process"), "process", settings.environment())
        found["child"] = children.said(process, "process", min(60.0, limit.remaining()))
        if "error" not in found["child"]:
            dump = run_collector(CoreDumpCollector(process.pid, settings, folder, stderr=folder / "process.err", deadline_s=60.0))
            found["dump"] = told(dump)
            path = next((item.path for item in dump.files if item.kind == "gpu-core"), None)
            if path is not None:
                try:
                    found["dump"]["verdict"] = verdict_of(diagnose_dump(path, hung=True))
                except ReproError as error:
                    found["dump"]["verdict"] = {"error": f"{type(error).__name__}: {error}"}
                packed = folder / "two-devices.nvcudmp.xz"
                with path.open("rb") as source, lzma.open(packed, "wb", preset=6) as target:
                    while block := source.read(1 << 20):
                        target.write(block)
                found["dump"] |= {"bytes": path.stat().st_size, "packed": packed.name, "packed_bytes": packed.stat().st_size}
        children.end()
        again = children.start(me("--child", "process"), "again")
        second = children.said(again, "again", min(60.0, limit.remaining()))
        found["second_child"] = {key: value for key, value in second.items() if key != "devices"}
        if "error" not in second:
            found["cuda_gdb"], seen = gdb_of(again.pid, folder, "process.txt", [second["counter"], *second["words"]])
            if seen is not None and seen.state is not None:
                found["cuda_gdb"]["verdict"] = verdict_of(diagnose_state(seen.state, ground="process", hung=True))
    finally:
        children.end()
    verdicts = [found.get(key, {}).get("verdict", {}) for key in ("dump", "cuda_gdb")]
    found["as_expected"] = any(verdict.get("cause") == "peer-left" for verdict in verdicts) and not any(
        verdict.get("class") == "gpu-crossrank-spin" for verdict in verdicts
    )
    return found


def autopsied(target: Path, limit: Deadline) -> dict[str, Any]:
    words = [sys.executable, "-m", "dsv4_repro.repro", "autopsy", str(target), "--json"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=max(limit.remaining(), 20.0))
        document = json.loads(done.stdout)
    except (ValueError, subprocess.TimeoutExpired) as error:
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    return {"status": done.returncode, **document.get("verdict", {"error": document.get("message")})}


def one_text(case: Path, folder: Path) -> Path:
    """What was collected, under headings that name the rank, as people paste it."""
    parts = []
    for path in sorted(case.iterdir()):
        rank = next((number for number in "01" if path.name.startswith(f"rank{number}-")), None)
        if path.suffix != ".txt" and "ras" not in path.name:
            continue
        kind = "cuda-gdb" if "gdb" in path.name else "py-spy" if "stacks" in path.name else "ncclras"
        heading = f"{kind} rank {rank}" if rank is not None else f"{kind}: {path.name}"
        parts.append(f"=== {heading} ===\n{path.read_text(errors='replace')}\n")
    target = folder / "case.txt"
    target.write_text("\n".join(parts), encoding="utf-8")
    return target


def part_nccl(args: argparse.Namespace, folder: Path, limit: Deadline) -> dict[str, Any]:
    """Rank 0 held by the barrier, rank 1 in NCCL's all-reduce."""
    found: dict[str, Any] = {}
    children = Children(folder)
    case = folder / "case"
    case.mkdir(exist_ok=True)
    try:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "NCCL_RAS_ADDR": RAS, "NCCL_DEBUG": "WARN",
                       "NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}  # fmt: skip
        words = ["--stand-in"] if args.stand_in else []
        ranks = [children.start(me("--child", f"rank{rank}", *words), f"rank{rank}", environment) for rank in (0, 1)]
        for rank, process in enumerate(ranks):
            found[f"rank{rank}"] = children.said(process, f"rank{rank}", min(90.0, limit.remaining()))
        if any("error" in found[f"rank{rank}"] for rank in (0, 1)):
            return {**found, "as_expected": False}
        ras = run_collector(RasCollector(case, world=2, address=ras_address({"NCCL_RAS_ADDR": RAS})))
        found["ras"] = told(ras)
        states = {}
        for rank, process in enumerate(ranks):
            stacks = run_collector(HostStackCollector(process.pid, case, file_name=f"rank{rank}-stacks.txt"))
            found[f"rank{rank}"]["host_stacks"] = told(stacks)
            counter = found[f"rank{rank}"].get("counter")
            found[f"rank{rank}"]["cuda_gdb"], seen = gdb_of(
                process.pid, case, f"rank{rank}-cuda-gdb.txt", [counter] if counter else []
            )
            if seen is not None and seen.state is not None:
                states[rank] = seen.state
                found[f"rank{rank}"]["verdict"] = verdict_of(diagnose_state(seen.state, ground="process", hung=True))
        found["autopsy"] = autopsied(case, limit)
        found["autopsy_of_one_text"] = autopsied(one_text(case, folder), limit)
    finally:
        children.end()
    verdicts = [found.get(key, {}) for key in ("autopsy", "autopsy_of_one_text")]
    blamed = found.get("rank1", {}).get("verdict", {}).get("class")
    named = [verdict.get("class") for verdict in verdicts]
    found["as_expected"] = "gpu-spin-barrier" in named and "gpu-crossrank-spin" not in named and blamed != "gpu-spin-barrier"
    return found


HUNT = """name = "two-gpus"
on = "gpu"
minimise = false
[budget]
trials = {trials}
minutes = 2
[search]
mode = "random"
seed = 1
[matrix]
kernel = ["builtin", "builtin:guard"]
[fixed]
layers = 3
"""


def hunted(folder: Path) -> dict[str, Any]:
    """What each card did, from the store: by the part of a worker's name before the slash (a Ray node runs one task a process, so
    that its workers are many)."""
    import sqlite3

    with sqlite3.connect(f"file:{folder / 'campaign.sqlite'}?mode=ro", uri=True) as store:
        rows = store.execute("SELECT worker, kind, COUNT(*), MIN(at), MAX(at) FROM trials GROUP BY worker, kind").fetchall()
        order = [str(worker) for (worker,) in store.execute("SELECT worker FROM trials ORDER BY rowid")]
    workers: dict[str, dict[str, Any]] = {}
    for worker, kind, count, first, last in rows:
        entry = workers.setdefault(str(worker).partition("/")[0], {"first": first, "last": last})
        entry |= {kind: entry.get(kind, 0) + count, "first": min(entry["first"], first), "last": max(entry["last"], last)}
    overlap = len(workers) > 1 and max(item["first"] for item in workers.values()) < min(item["last"] for item in workers.values())
    return {"workers": workers, "trials": len(order), "at_the_same_time": overlap}


def part_hunt(args: argparse.Namespace, folder: Path, limit: Deadline, ray: str = "") -> dict[str, Any]:
    """Half of the trials hang, on both cards."""
    plan = folder / "plan.toml"
    plan.write_text(HUNT.format(trials=args.trials), encoding="utf-8")
    words = ["-m", "dsv4_repro.repro", "hunt", str(plan), "--out", str(folder / "hunt"), "--json"]
    words += ["--ray", ray] if ray else ["--gpus", "0,1"]
    children = Children(folder)
    began = time.monotonic()
    try:
        process = children.start(words, "hunt")
        try:
            process.communicate(timeout=limit.remaining())
        except subprocess.TimeoutExpired:
            return {
                "error": "no end in time",
                "stderr": (folder / "hunt.err").read_text(errors="replace")[-600:],
                "as_expected": False,
            }
    finally:
        children.end()
    seconds = time.monotonic() - began
    if not (folder / "hunt" / "campaign.sqlite").is_file():
        return {
            "status": process.returncode,
            "stderr": (folder / "hunt.err").read_text(errors="replace")[-900:],
            "as_expected": False,
        }
    found = {"status": process.returncode, "seconds": round(seconds, 2), **hunted(folder / "hunt")}
    both = len(found["workers"]) >= 2 and all(item.get("hang") and item.get("clean") for item in found["workers"].values())
    return {**found, "as_expected": process.returncode == 3 and both and found["at_the_same_time"]}


def part_ray(args: argparse.Namespace, folder: Path, limit: Deadline) -> dict[str, Any]:
    """Two Ray nodes of one GPU each on this host."""
    try:
        import ray
        from ray.cluster_utils import Cluster
    except ImportError as error:
        return {"error": f"not run: {error}", "as_expected": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, "object_store_memory": 80 << 20})
    kept = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        for card in ("0", "1"):
            os.environ["CUDA_VISIBLE_DEVICES"] = card
            cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=80 << 20)
        if kept is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = kept
        return {"ray": ray.__version__, **part_hunt(args, folder, limit, cluster.address)}
    finally:
        cluster.shutdown()


PARTS: dict[str, tuple[Callable[[argparse.Namespace, Path, Deadline], dict[str, Any]], float]] = {
    "wedge": (part_wedge, 90.0), "process": (part_process, 150.0), "nccl": (part_nccl, 200.0), "hunt": (part_hunt, 120.0),
    "ray": (part_ray, 150.0),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "two-gpus")))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--trials", type=int, default=800, help="of the hunts")
    parser.add_argument("--share", action="store_true", help="as of run")
    parser.add_argument("--stand-in", action="store_true", help="two devices that are none, no torch (a dry run)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        be_a_good_child(args.parent)
        if args.child == "process":
            child_process(args.parent)
        else:
            child_rank(args.parent, int(args.child[-1]), args.stand_in)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"schema": "dsv4-repro/two-gpus/1", "parts": {}}
    for name in args.parts.split(","):
        part, seconds = PARTS[name]
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=args.out))
        began = time.monotonic()
        say(f"{name}: at most {seconds:g} s")
        try:
            found = part(args, folder, Deadline(seconds, SYSTEM))
        except Exception as error:  # a part that fails is told, and the others go on
            found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-1500:], "as_expected": False}
        summary["parts"][name] = {**found, "part_seconds": round(time.monotonic() - began, 2), "folder": folder.name}
        (args.out / "two_gpus.json").write_text(json.dumps(summary, indent=1, default=str) + "\n", encoding="utf-8")
        say(f"{name}: {'as expected' if found.get('as_expected') else 'NOT as expected'}")
    print(json.dumps(summary, indent=1, default=str))
    return 0 if all(part["as_expected"] for part in summary["parts"].values()) else 3


if __name__ == "__main__":
    sys.exit(main())
