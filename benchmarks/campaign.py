"""The figures of campaigns. Prints as it goes and writes ``campaign.json`` part by part.

    PYTHONPATH=PARENT python benchmarks/campaign.py --out DIR [--parts cpu,verify,sqlite,ray,gpu,healthy,minimise] [--kernel SPEC]
    [--trials N] [--library vllm/_C.so]

``cpu``: trials a minute of the shrunk case on the interpreter, on two workers, and its identification. ``verify``: seconds of
``verify drain`` on the CPU. ``sqlite``: a million trials stored, their summary. ``ray``: the same plan on one and on two local
nodes. ``gpu`` (needs a card): kernel-level trials that hang, unwedged and reused, against a process a trial, side by side.
``healthy`` (needs a card): N healthy trials, of which none may be called a hang. ``minimise`` (needs a card): a run shrunk there
and its reproducer executed; with ``--library`` (and torch) that for vLLM's op too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4_repro.repro.__main__ import main as cli
from dsv4_repro.repro.campaign.cells import Cell, TrialResult
from dsv4_repro.repro.campaign.hunt import Hunt
from dsv4_repro.repro.campaign.launches import LaunchBench, LaunchCase
from dsv4_repro.repro.campaign.plan import HuntPlan
from dsv4_repro.repro.campaign.pools import LocalPool, Pool
from dsv4_repro.repro.campaign.sampler import Sampler
from dsv4_repro.repro.campaign.session import TrialSession, device_of
from dsv4_repro.repro.campaign.store import CampaignStore

STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:7.2f}] {text}", flush=True)


def shrunk_cell(ground: str, kernel: str = "builtin", **changes: Any) -> Cell:
    """The smallest plan that ``minimise`` finds for #51593."""
    plan = {"requests": 3, "min_live": 1, "steps": 1, "prompt": [1, 1], "output": [1, 1], "acceptance": 1.0, "layers": 1}
    return Cell(name="shrunk", ground=ground, kernel=kernel, plan=plan, **changes)


def plan_of(trials: int, kernels: list[str], name: str = "benchmark") -> HuntPlan:
    cell = shrunk_cell("cpu")
    return HuntPlan.from_document(
        {
            "name": name, "budget": {"trials": trials}, "search": {"mode": "exhaustive", "repeat": trials // len(kernels)},
            "matrix": {"kernel": kernels}, "fixed": dict(cell.plan), "minimise": False,
        }
    )  # fmt: skip


def hunt_rate(pool: Pool, trials: int, kernels: list[str], batch: int, warm: int) -> dict[str, Any]:
    """Trials a minute of one pool, after ``warm`` trials that start its processes."""
    with tempfile.TemporaryDirectory() as name:
        for part, count in (("warm", warm), ("timed", trials)):
            plan = plan_of(count, kernels, part)
            with CampaignStore.create(Path(name) / part, plan) as store:
                began = time.monotonic()
                Hunt(plan, store, pool, Sampler(plan, batch=batch)).run()
                seconds = time.monotonic() - began
                summary = store.summary()
    return {"trials": summary.trials, "seconds": round(seconds, 2), "trials_per_minute": round(60 * summary.trials / seconds, 1),
            "kinds": dict(summary.kinds)}  # fmt: skip


def part_cpu(_arguments: Any) -> dict[str, Any]:
    """The shrunk case: through a hunt of two processes, and as one launch with its identification."""
    pool = LocalPool([None, None])
    try:
        hunt = hunt_rate(pool, 600, ["builtin"], 10, 40)
    finally:
        pool.close()
    bench = LaunchBench("builtin", device_of(shrunk_cell("cpu"))[0])
    began, cpu = time.monotonic(), time.process_time()
    seen = bench.run(LaunchCase((-1,), 8473), 50)
    assert {one.kind for one in seen} == {"hang"}
    single = {"launches": 50, "seconds": round(time.monotonic() - began, 2), "cpu_seconds": round(time.process_time() - cpu, 2)}
    return {"hunt_two_workers": hunt, "one_launch_opened_and_diagnosed": single}


def part_verify(_arguments: Any) -> dict[str, Any]:
    """``verify drain --on cpu`` with its defaults."""
    seconds, cpu = [], []
    for _ in range(3):
        began, used = time.monotonic(), time.process_time()
        assert cli(["verify", "drain", "--on", "cpu"]) == 0
        seconds.append(round(time.monotonic() - began, 2))
        cpu.append(round(time.process_time() - used, 2))
    return {"seconds": seconds, "cpu_seconds": cpu}


def part_sqlite(_arguments: Any) -> dict[str, Any]:
    """A million trials, a twentieth of them hangs of three kinds, 1000 cells of five factors; then the summary, read by a new
    opening.
    """
    values = {"kernel": [f"builtin:{n}" for n in range(10)], "sms": list(range(1, 11)), "slots_per_sm": list(range(1, 11))}
    plan = HuntPlan.from_document({"name": "million", "budget": {"trials": 10**6}, "search": {"mode": "random"}, "matrix": values})
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        with CampaignStore.create(Path(name) / "c", plan) as store:
            for start in range(0, 10**6, 10_000):
                rows: list[tuple[int, int, Mapping[str, Any], TrialResult, str]] = []
                for number in range(start, start + 10_000):
                    hang = number % 20 == 0
                    kind: Any = "hang" if hang else "clean"
                    identity = f"{number % 3:012x}" if hang else None
                    result = TrialResult(
                        kind, number, True, identity=identity, windows=(f"w{number % 50}",), to_hang_s=0.1, seconds=0.01
                    )
                    cell = number % 1000
                    rows.append((number, cell, plan.values_of(cell), result, "w"))
                store.add_many(rows)
        filled = time.monotonic() - began
        times = []
        for _ in range(5):
            began = time.monotonic()
            with CampaignStore.read(Path(name) / "c") as store:
                summary = store.summary()
                hangs = store.times_to_hang()
            times.append(round(time.monotonic() - began, 4))
            assert summary.trials == 10**6
            assert len(hangs) == 10_000
        began = time.monotonic()
        with CampaignStore.resume(Path(name) / "c", plan) as store:
            assert store.done_numbers() == (10**6, [])
            resumed = time.monotonic() - began
            one = TrialResult("clean", 1, True, windows=("w1",))
            began = time.monotonic()
            for number in range(10**6, 10**6 + 500):
                store.add(number, 0, plan.values_of(0), one, "w")
            single = (time.monotonic() - began) / 500
        size = (Path(name) / "c" / "campaign.sqlite").stat().st_size
    return {"fill_seconds": round(filled, 1), "summary_seconds": times, "resume_seconds": round(resumed, 3),
            "one_trial_one_transaction_ms": round(1e3 * single, 3), "bytes": size}  # fmt: skip


def part_ray(_arguments: Any) -> dict[str, Any]:
    """The same trials on one node and on two, of one slot each; processes warm."""
    import ray
    from ray.cluster_utils import Cluster

    from dsv4_repro.repro.campaign.ray_runner import RayPool

    found: dict[str, Any] = {"ray": ray.__version__}
    for nodes in (1, 2):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20})
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        pool = RayPool(cluster.address)
        try:
            found[f"{nodes} nodes"] = hunt_rate(pool, 600, ["builtin"], 20, 80)
        finally:
            pool.close()
            ray.shutdown()
            cluster.shutdown()
    found["ratio"] = round(found["2 nodes"]["trials_per_minute"] / found["1 nodes"]["trials_per_minute"], 2)
    return found


def spread(values: list[float]) -> dict[str, float]:
    return {"n": len(values), "min": min(values), "median": statistics.median(values), "max": max(values)}


def part_gpu(arguments: Any) -> dict[str, Any]:
    """Trials that hang: one process, unwedged and reused, against a process a trial; the first 5 of each are left out of
    neither.
    """
    found: dict[str, Any] = {}
    for way, count in (("reused", arguments.trials), ("a process a trial", max(arguments.trials // 50, 10))):
        session = TrialSession(shrunk_cell("gpu", arguments.kernel, share=arguments.share), identify=False)
        results: list[TrialResult] = []
        began = time.monotonic()
        try:
            for seed in range(count):
                results.append(session.trial(seed))
                if way != "reused":
                    session.close()
        finally:
            session.close()
        seconds = time.monotonic() - began
        kinds = {kind: sum(result.kind == kind for result in results) for kind in {result.kind for result in results}}
        found[way] = {
            "trials": count, "kinds": kinds, "seconds": round(seconds, 2), "trials_per_minute": round(60 * count / seconds, 1),
            "processes": session.opened, "reused": sum(result.reused is True for result in results),
            "device_idle_at_the_end": session.device_idle,
            "to_hang_s": spread([result.to_hang_s for result in results if result.to_hang_s is not None]) if kinds.get("hang")
            else None, "others": [result.why for result in results if result.kind not in ("hang", "clean")][:5],
        }  # fmt: skip
        say(f"{way}: {found[way]}")
    found["ratio"] = round(found["reused"]["trials_per_minute"] / found["a process a trial"]["trials_per_minute"], 1)
    return found


def part_healthy(arguments: Any) -> dict[str, Any]:
    """Healthy trials in the danger window: behind the clamped producer, and with the guard. Verdicts other than clean are false."""
    found: dict[str, Any] = {}
    for name, kernel, producer in (("clamped", arguments.kernel, "clamped"), ("guard", "builtin:guard", "raw")):
        cell = shrunk_cell("gpu", kernel, producer=producer, share=arguments.share)
        session = TrialSession(cell, identify=False)
        kinds: dict[str, int] = {}
        why: list[str] = []
        began = time.monotonic()
        try:
            for seed in range(arguments.healthy // 2):
                result = session.trial(seed)
                kinds[result.kind] = kinds.get(result.kind, 0) + 1
                if result.kind != "clean":
                    why.append(result.why)
        finally:
            session.close()
        seconds = time.monotonic() - began
        found[name] = {"kinds": kinds, "seconds": round(seconds, 2), "trials_per_minute": round(60 * sum(kinds.values()) /
        seconds, 1), "not_clean": why[:5], "processes": session.opened}  # fmt: skip
        say(f"{name}: {found[name]}")
    found["false_verdicts"] = sum(
        count for part in ("clamped", "guard") for kind, count in found[part]["kinds"].items() if kind != "clean"
    )
    return found


def part_minimise(arguments: Any) -> dict[str, Any]:
    """``minimise --on gpu`` of a run of ours, the reproducer it wrote, and (with ``--library``) the one for vLLM's op."""
    found: dict[str, Any] = {}
    folder = arguments.out / "minimise"

    def verb(*words: str, timeout: float) -> tuple[int, float, str]:
        began = time.monotonic()
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return -1, time.monotonic() - began, f"no end within {timeout:g} s"
        return done.returncode, time.monotonic() - began, (done.stdout + done.stderr)[-6000:]

    cases: list[tuple[str, str, list[str]]] = [("driver", arguments.kernel, [])]
    if arguments.library:
        cases.append(("op", arguments.op_kernel, ["0", arguments.library]))
    for name, kernel, more in cases:
        share = ["--share"] if arguments.share else []
        run = [
            sys.executable,
            "-m",
            "dsv4_repro.repro",
            "run",
            "drain",
            "--on",
            "gpu",
            "--kernel",
            kernel,
            "--out",
            str(folder / name),
        ]
        status, seconds, said = verb(*run, *share, timeout=120)
        entry: dict[str, Any] = {"run": {"status": status, "seconds": round(seconds, 2)}}
        found[name] = entry
        if status != 3:
            entry["said"] = said
            continue
        shrink = [sys.executable, "-m", "dsv4_repro.repro", "minimise", str(folder / name), "--on", "gpu", "--timeout", "200"]
        status, seconds, said = verb(*shrink, timeout=240)
        entry["minimise"] = {"status": status, "seconds": round(seconds, 2), "said": said}
        written = folder / name / "minimised" / "minimised.json"
        if written.is_file():
            document = json.loads(written.read_text())
            entry["minimise"] |= {key: document[key] for key in ("case", "launch", "candidates", "trials", "identity")}
            status, seconds, said = verb(sys.executable, str(folder / name / "minimised" / "reproducer.py"), *more, timeout=60)
            entry["reproducer"] = {"status": status, "seconds": round(seconds, 2), "said": said}
        say(f"minimise {name}: {entry}")
    return found


PARTS = {
    "cpu": part_cpu,
    "verify": part_verify,
    "sqlite": part_sqlite,
    "ray": part_ray,
    "gpu": part_gpu,
    "healthy": part_healthy,
    "minimise": part_minimise,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--library", default="", help="vLLM's _C library for the op reproducer of part minimise")
    parser.add_argument("--op-kernel", default="vllm==0.26.0", help="the release that --library is of")
    parser.add_argument("--parts", default="cpu,verify,sqlite,ray")
    parser.add_argument("--kernel", default="builtin")
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--healthy", type=int, default=2000)
    parser.add_argument("--share", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "schema": "dsv4-repro/benchmark-campaign/1",
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "python": sys.version.split()[0]},
        "parts": {},
    }
    status = 0
    for name in arguments.parts.split(","):
        say(f"part {name}")
        try:
            document["parts"][name] = PARTS[name](arguments)
        except Exception as error:  # a part that fails is told, the others go on
            document["parts"][name] = {"failed": f"{type(error).__name__}: {error}"}
            status = 1
        say(json.dumps(document["parts"][name]))
        (arguments.out / "campaign.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
