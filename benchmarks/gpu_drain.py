"""The figures of ``run drain --on gpu``, measured on the card at hand. Prints as it goes and writes one JSON, part by part.

    PYTHONPATH=PARENT python benchmarks/gpu_drain.py --out DIR [--parts demo,trials,…] [--kernels builtin,vllm==0.27.1,…]

Parts: ``demo`` (one hang of each kernel in full: watchdog, every collector, unwedge, dump, and whether cuda-gdb and the core
dump agree),
``plain`` (cuda-gdb without its Python), ``op`` (vLLM's own launcher; needs ``--library``), ``trials`` (N trials a
configuration, one process), ``fresh`` (a child a trial). Each part has its own deadline and is written as soon as it is done;
a part that fails is told and the others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsv4_repro.clock import SYSTEM
from dsv4_repro.errors import ReproError
from dsv4_repro.forensics.collect.cuda_gdb import SCRIPTS, find_cuda_gdb
from dsv4_repro.forensics.cuda_gdb_text import parse_transcript
from dsv4_repro.forensics.device_state import CtaState, DeviceState, GridState
from dsv4_repro.kernels.abi import ARRIVAL_COUNTER_OFFSET, RELEASE_COUNT, ROW_STATE_SIZE
from dsv4_repro.kernels.device_child import HEARTBEAT_S
from dsv4_repro.kernels.driver import Driver
from dsv4_repro.kernels.plan import DeviceDescription, LaunchPlan, device_for_sm, plan_launch, vector_width
from dsv4_repro.kernels.select import select_kernel
from dsv4_repro.repro.gpu_ground import GpuGround
from dsv4_repro.repro.gpu_trials import around_the_window, run_trials
from dsv4_repro.repro.ground import CaptureOutcome, GroundRequest
from dsv4_repro.repro.watchdog import Limits
from dsv4_repro.scenarios.drain import DrainPlan
from dsv4_repro.scenarios.drain_steps import DecodeStep, decode_steps

#: Between the loop's instructions a polling thread may be seen anywhere, bytes.
LOOP_BYTES = 0x80


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:7.2f}] {text}", flush=True)


STARTED = time.monotonic()


class Record:
    """The JSON document, written again after every part."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gpu_drain.json"
        self.document: dict[str, Any] = {"schema": "dsv4-repro/benchmark-gpu-drain/1", "parts": {}}

    def put(self, part: str, value: Any) -> None:
        self.document["parts"][part] = value
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(self.document, indent=1, default=str))
        partial.replace(self.path)


def describe_device() -> tuple[DeviceDescription, dict[str, Any]]:
    """The card at ordinal 0, from its driver's attributes, in a child of its own so that this process stays free of CUDA."""
    script = (
        "import json; from dsv4_repro.kernels.driver import Driver; d = Driver(); d.init(); "
        "print(json.dumps(d.describe(0).document()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise SystemExit(f"no usable GPU: {done.stderr[-800:]}")
    facts = json.loads(done.stdout.splitlines()[-1])
    base = device_for_sm(facts["sm"])
    described = dataclasses.replace(
        base, name=facts["name"], num_sms=facts["sm_count"], smem_per_sm=facts["smem_per_sm"], smem_optin=facts["smem_optin"],
        max_threads_per_sm=facts["threads_per_sm"], source="this card's driver",
    )  # fmt: skip
    return described, facts


def environment(facts: dict[str, Any]) -> dict[str, Any]:
    def output(*argv: str) -> str:
        try:
            return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{type(error).__name__}"

    return {
        "device": facts,
        "nvidia_smi": output("nvidia-smi", "--query-gpu=name,driver_version,uuid,pstate,power.draw", "--format=csv,noheader"),
        "python": sys.version.split()[0],
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "driver_class": Driver.__module__,
        "heartbeat_s": HEARTBEAT_S,
    }


def request_for(
    spec: str,
    device: DeviceDescription,
    *,
    layers: int,
    producer: str = "raw",
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> GroundRequest:
    plan = DrainPlan(layers=layers, **changes)
    steps = decode_steps(plan, producer, sm=device.sm)  # type: ignore[arg-type]
    kernel = select_kernel(spec, sm=device.sm, top_k=plan.top_k, vec=vector_width(plan.width))
    launches: dict[int, LaunchPlan] = {
        rows: plan_launch(
            rows, plan.width, plan.width, plan.top_k, device, registers=kernel.registers or None, static_smem=kernel.static_smem
        )
        for rows in sorted({step.graph_rows for step in steps})
    }
    return GroundRequest(plan, steps, kernel, launches, options=options or {})


# -- agreement of two views of one hang --------------------------------------------------------------------------------------------


def agreement(debugger: DeviceState, dump: DeviceState, *, same_hang: bool) -> dict[str, Any]:
    """Field by field, what cuda-gdb and the core dump say: ``same``, ``differ`` (with both), ``only_one``.

    ``same_hang``: both looked at one moment. Else they saw the same step hang in two processes: then addresses, the SM and the
    number that the hardware gave a warp are their own, and the polling thread may stand anywhere in its loop.
    """
    same: list[str] = []
    differ: dict[str, Any] = {}
    only: list[str] = []

    def compare(name: str, left: Any, right: Any) -> None:
        if left is None or right is None:
            only.append(name)
        elif left == right:
            same.append(name)
        else:
            differ[name] = {"cuda_gdb": left, "core": right}

    grids = [(one, other) for one in debugger.grids for other in dump.grids if one.grid_dim == other.grid_dim]
    compare("grids", len(debugger.grids), len(dump.grids))
    for one, other in grids[:1]:
        _grids(one, other, compare, same_hang)
    return {"same": same, "differ": differ, "only_one": only, "agree": bool(grids) and not differ}


def _grids(one: GridState, other: GridState, compare: Callable[..., None], same_hang: bool) -> None:
    compare("grid_dim", one.grid_dim, other.grid_dim)
    compare("block_dim", one.block_dim, other.block_dim)
    words = slice(0 if same_hang else 32, None)  # the four pointers come first
    compare("params", one.params[words].hex() if one.params else None, other.params[words].hex() if other.params else None)
    left = {cta.block_idx: cta for cta in one.ctas or ()}
    right = {cta.block_idx: cta for cta in other.ctas or ()}
    compare("resident blocks", sorted(left) if one.ctas is not None else None, sorted(right) if other.ctas is not None else None)
    for block in sorted(set(left) & set(right)):
        _blocks(block, left[block], right[block], compare, same_hang)


def _blocks(block: tuple[int, int, int], one: CtaState, other: CtaState, compare: Callable[..., None], same_hang: bool) -> None:
    a_lane, b_lane = thread_zero(one), thread_zero(other)
    if same_hang:
        compare(f"{block} sm", one.sm, other.sm)
        left = {warp.warp: warp for warp in one.warps}
        right = {warp.warp: warp for warp in other.warps}
        compare(f"{block} warps", sorted(left), sorted(right))
        for number in sorted(set(left) & set(right)):
            compare(f"{block} warp {number} active", left[number].active_mask, right[number].active_mask)
            compare(f"{block} warp {number} pc", left[number].pc_offset, right[number].pc_offset)
    else:
        waiting = [sorted((w.active_mask, w.pc_offset or -1) for w in cta.warps if w.active_mask != 1) for cta in (one, other)]
        compare(f"{block} waiting warps: mask and pc", *waiting)
        pcs = [lane.pc_offset if lane is not None else None for lane in (a_lane, b_lane)]
        if pcs[0] is not None and pcs[1] is not None:
            compare(f"{block} thread 0 in the same loop", True, abs(pcs[0] - pcs[1]) <= LOOP_BYTES)
    if a_lane is None or b_lane is None or a_lane.registers is None or b_lane.registers is None:
        compare(f"{block} thread 0 registers", None, None)
        return
    if same_hang:
        for index, (x, y) in enumerate(zip(a_lane.registers, b_lane.registers, strict=False)):
            compare(f"{block} thread 0 R{index}", x, y)
        compare(f"{block} thread 0 predicates", a_lane.predicates, b_lane.predicates)


def thread_zero(cta: CtaState) -> Any:
    """The lane of thread (0, 0, 0), in whichever warp slot the hardware put it."""
    return next((lane for warp in cta.warps for lane in warp.lanes if lane.thread_idx == (0, 0, 0)), None)


# -- parts -------------------------------------------------------------------------------------------------------------------------


def emitter(folder: Path, *, loud: bool) -> Callable[..., None]:
    log = folder / "timeline.jsonl"

    def emit(kind: str, **fields: Any) -> None:
        with log.open("a") as stream:
            stream.write(json.dumps({"at": time.monotonic() - STARTED, "kind": kind, **fields}, default=str) + "\n")
        if loud:
            say(f"  {kind}: " + ", ".join(f"{key}={str(value)[:160]}" for key, value in fields.items()))

    return emit


def told(captures: Sequence[CaptureOutcome]) -> list[dict[str, Any]]:
    return [
        {
            "collector": capture.collector, "seconds": capture.seconds, "facts": dict(capture.facts),
            "files": {artefact.kind: artefact.path.stat().st_size for artefact in capture.artefacts},
            "state": None if capture.state is None else {
                "grids": len(capture.state.grids),
                "ctas": [None if grid.ctas is None else len(grid.ctas) for grid in capture.state.grids],
                "memory": {f"{address:#x}": value for address, value in capture.state.memory.items()},
                "unread": [dataclasses.asdict(item) for item in capture.state.unread],
            },
            "unread": [dataclasses.asdict(item) for item in capture.unread],
        }
        for capture in captures
    ]  # fmt: skip


def demo(spec: str, device: DeviceDescription, folder: Path, layers: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """One hang in full, in the order of a real run."""
    folder.mkdir(parents=True, exist_ok=True)
    emit = emitter(folder, loud=True)
    began = time.monotonic()
    request = request_for(spec, device, layers=layers, options=options)
    found: dict[str, Any] = {"kernel": spec, "select_s": time.monotonic() - began}
    ground = GpuGround()
    try:
        opened = time.monotonic()
        ready = ground.open(request, emit)
        found["open_s"] = time.monotonic() - opened
        found["ready"] = ready.description
        found["environment"] = ready.environment
        say(f"  open {found['open_s']:.2f} s: {ready.description}; NVML {ready.environment.get('before')}")
        healthy: list[float] = []
        hung: DecodeStep | None = None
        for step in request.steps:
            outcome = ground.run_step(step)
            if outcome.state == "done":
                healthy.append(outcome.milliseconds)
                continue
            found["end"] = dataclasses.asdict(outcome)
            hung = step if outcome.state == "hung" else None
            say(
                f"  step {step.index} ({step.live_requests} live, {step.rows} -> {step.graph_rows} rows): {outcome.state} "
                + " | ".join(outcome.reasons)
            )
            break
        found["healthy_steps"] = len(healthy)
        found["healthy_ms"] = {"median": sorted(healthy)[len(healthy) // 2], "max": max(healthy)} if healthy else None
        say(f"  {len(healthy)} healthy steps, ms: {found['healthy_ms']}")
        if hung is None:
            return found
        first = list(ground.capture(folder / "hang", emit, allow_dump=False, attach=False))
        found["capture"] = told(first)
        for item in found["capture"]:
            say(
                f"  {item['collector']}: {item['seconds']:.3f} s, files {item['files']}, "
                f"CTAs {item['state'] and item['state']['ctas']}, unread {item['unread']}"
            )
            if item["collector"] in ("row_states", "cuda_gdb", "nvml"):
                say(f"    {json.dumps(item['facts'])[:900]}")
        states = next(item for item in found["capture"] if item["collector"] == "row_states")["facts"]
        stuck = [group for group, count in enumerate(states.get("arrivals", ())) if count]
        if stuck:
            experiment = ground.unwedge(states["address"] + stuck[0] * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET, RELEASE_COUNT)
            found["unwedge"] = dataclasses.asdict(experiment)
            say(f"  unwedge: {json.dumps(found['unwedge'])[:700]}")
        again = ground.run_step(hung)
        found["again"] = dataclasses.asdict(again)
        say(f"  the same step again: {again.state}")
        second = list(ground.capture(folder / "again", emit, allow_dump=True))
        found["capture_again"] = told(second)
        for item in found["capture_again"]:
            say(
                f"  {item['collector']}: {item['seconds']:.3f} s, files {item['files']}, unread {item['unread']}, "
                f"facts {json.dumps(item['facts'])[:600]}"
            )
        debugger = next((item.state for item in second if item.collector == "cuda_gdb"), None)
        dump = next((item.state for item in second if item.collector == "core_dump"), None)
        if debugger is not None and dump is not None:
            found["agreement"] = agreement(debugger, dump, same_hang=False)
            say(
                f"  agreement: {len(found['agreement']['same'])} same, only one {found['agreement']['only_one'][:8]}, "
                f"differ {json.dumps(found['agreement']['differ'], default=str)[:900]}"
            )
        core = next(
            (a.path for item in second if item.collector == "core_dump" for a in item.artefacts if a.kind == "gpu-core"), None
        )
        if core is not None and dump is not None:
            both = found["agreement_same_dump"] = on_the_dump(core, dump, folder)
            rest = {key: value for key, value in both.items() if key != "same"}
            say(f"  cuda-gdb on the same dump: {len(both['same'])} same, {json.dumps(rest, default=str)[:900]}")
    finally:
        closed = ground.close()
        found["close"] = dataclasses.asdict(closed)
        found["seconds"] = time.monotonic() - began
        say(f"  close: {closed}; {found['seconds']:.2f} s in all")
    return found


def on_the_dump(core: Path, dump: DeviceState, folder: Path) -> dict[str, Any]:
    """cuda-gdb reads the dump that this program's reader read: what each says, field by field."""
    tool = find_cuda_gdb()
    began = time.monotonic()
    done = subprocess.run(
        [str(tool), "-q", "-batch", "-iex", "set pagination off", "-ex", f"target cudacore {core}", "-x", str(SCRIPTS / "hang.py")],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    (folder / "cuda_gdb_on_dump.txt").write_text(done.stdout + done.stderr)
    state = parse_transcript(done.stdout)
    return {"seconds": time.monotonic() - began, "status": done.returncode, **agreement(state, dump, same_hang=True)}


def plain_debugger(spec: str, device: DeviceDescription, folder: Path) -> dict[str, Any]:
    """The same attach with cuda-gdb as if it had no Python."""
    folder.mkdir(parents=True, exist_ok=True)
    emit = emitter(folder, loud=False)
    request = request_for(spec, device, layers=2, options={"plain_debugger": True})
    ground = GpuGround()
    try:
        ground.open(request, emit)
        for step in request.steps:
            if ground.run_step(step).state != "done":
                break
        found = told(ground.capture(folder / "hang", emit, allow_dump=False))
        seen = next(item for item in found if item["collector"] == "cuda_gdb")
        say(f"  cuda-gdb without Python: {json.dumps(seen, default=str)[:1200]}")
        return seen
    finally:
        say(f"  close: {ground.close()}")


def trials(
    name: str, device: DeviceDescription, folder: Path, count: int, budget_s: float, *, spec: str, layers: int, floor_s: float,
    fresh: bool = False, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    request = request_for(spec, device, layers=layers, **changes)
    steps = around_the_window(request.steps)
    needed = {step.graph_rows for step in steps}
    request = dataclasses.replace(request, launches={rows: plan for rows, plan in request.launches.items() if rows in needed})
    limits = Limits(floor_s=floor_s)
    result = run_trials(
        request, steps, count, emitter(folder, loud=False), fresh=fresh, ground=lambda: GpuGround(limits=limits), budget_s=budget_s
    )
    document = {"configuration": name, "kernel": spec, "layers": layers, "floor_s": floor_s, **changes, **result.document()}
    document["live"] = [step.live_requests for step in steps]
    short = {
        key: document[key]
        for key in (
            "made",
            "counts",
            "hang_to_verdict_ms",
            "write_to_retirement_ms",
            "write_to_drained_ms",
            "recovered",
            "why",
            "others",
        )
    }
    say(f"  {name}: {json.dumps(short)}")
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-drain")))
    parser.add_argument("--parts", default="demo,plain,trials,fresh")
    parser.add_argument("--kernels", default="builtin,vllm==0.26.0,vllm==0.27.1", help="unfixed ones: expected to hang")
    parser.add_argument("--fixed", default="vllm==0.28.0,vllm==0.33.0", help="fixed ones: expected to run clean")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--floor", type=float, default=0.1, help="the watchdog's least deadline in trials, seconds")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for one configuration's trials")
    parser.add_argument("--library", default="", help="a _C library that torch here can load, for the part op")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = Record(arguments.out)
    parts = [part for part in arguments.parts.split(",") if part]
    unfixed = [spec for spec in arguments.kernels.split(",") if spec]
    fixed = [spec for spec in arguments.fixed.split(",") if spec]
    device, facts = describe_device()
    record.put("environment", environment(facts))
    say(f"{facts['name']} sm_{facts['sm']}, {facts['sm_count']} SMs, driver CUDA {facts['driver_version']}")
    failed = 0

    def part(name: str, work: Callable[[], Any]) -> None:
        nonlocal failed
        say(f"== {name}")
        began = SYSTEM.monotonic()
        try:
            value = work()
        except (ReproError, OSError, ValueError, LookupError, TypeError, AttributeError, subprocess.SubprocessError) as error:
            import traceback

            failed += 1
            value = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            say(f"  FAILED {value['error']}\n{value['traceback'][-1800:]}")
        if isinstance(value, dict):
            value["part_seconds"] = SYSTEM.monotonic() - began
        record.put(name, value)

    def folder(name: str) -> Path:
        return Path(arguments.out) / name.replace("=", "").replace(":", "-").replace("/", "_")

    if "demo" in parts:
        for spec in unfixed:
            part(f"demo {spec}", lambda spec=spec: demo(spec, device, folder(f"demo-{spec}"), arguments.layers))  # type: ignore[misc]
    if "plain" in parts:
        part("plain", lambda: plain_debugger(unfixed[0], device, folder("plain")))
    if "op" in parts:
        options = {"via": "op", "library": arguments.library}
        part("op", lambda: demo(unfixed[0], device, folder("op"), 2, options))
    if "trials" in parts:
        common = {"layers": arguments.layers, "floor_s": arguments.floor}
        cases: list[tuple[str, dict[str, Any]]] = [(f"{spec}, 3 live", {"spec": spec}) for spec in unfixed + fixed]
        cases += [(f"{spec}, 3 live, producer clamped", {"spec": spec, "producer": "clamped"}) for spec in unfixed]
        cases += [(f"{spec}, 4 live", {"spec": spec, "min_live": 4}) for spec in unfixed]
        for name, case in cases:
            part(
                f"trials {name}",
                lambda name=name, case=case: trials(  # type: ignore[misc]
                    name,
                    device,
                    folder(f"trials-{name.replace(', ', '-').replace(' ', '')}"),
                    arguments.trials,
                    arguments.budget,
                    **common,
                    **case,
                ),
            )
    if "fresh" in parts:
        part(
            "fresh",
            lambda: trials(
                f"{unfixed[0]}, 3 live, a child a trial", device, folder("fresh"), 5, 60.0, spec=unfixed[0],
                layers=arguments.layers, floor_s=0.25, fresh=True,
            ),
        )  # fmt: skip
    say(f"{len(record.document['parts']) - 1} parts, {failed} failed, {time.monotonic() - STARTED:.1f} s: {record.path}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
