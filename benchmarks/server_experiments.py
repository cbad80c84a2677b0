"""Rescue, guard, unwedge and the agent's cost on a real server. Prints as it goes; one JSON, written again after every part.

    PYTHONPATH=PARENT python benchmarks/server_experiments.py --out DIR --vllm X/vl:X/site [--parts rescue,guard,…] [--gpu 0]
    PYTHONPATH=PARENT python benchmarks/server_experiments.py --out DIR … --tp 2 --gpu 0,1 --parts rescue,unwedge-one-rank
    python benchmarks/server_experiments.py --summarise DIR…      # the JSON files below, as Markdown tables

Several may run at once with their own ``--gpu`` and ``--port``. Parts, by the server that they need (each is started once):

* agent and rescue: ``rescue`` (N drains, the guard disarmed before each: do they end by themselves, at what stall), ``guard``
  (N drains with the guard on: none may wedge), ``outputs`` (guarded against guarded, then rescued against guarded; and requests
  that go on from each survivor's own output, which read the cache that was filled meanwhile);
* agent, no rescue: ``cost`` (one long wave a plan; recorder and guard are turned on and off every second through control.json;
  ``server_cost.py`` says how it is computed; the plan ``none`` turns nothing and shows what the method itself scatters),
  ``unwedge`` (a drain wedges, the tool frees it, outputs against a guarded run, then 100 requests), ``unwedge-gdb`` (the same
  through cuda-gdb), ``unwedge-one-rank`` (two ranks: one is released and watched, then the other; what happens is recorded);
* no MTP: ``control`` (the same drains).

``--cold-guard``: nothing arms the guard before a part's own first release; a guarded run to compare with comes afterwards.
``--pin``: the server on the lower three quarters of the processors, this program on the rest.

``--tp N`` spreads the server over N GPUs. Its environment is ours: NCCL_NVLS_ENABLE and the like are set by the caller.

A part that fails is told and the others go on; a server that does not recover is ended and started again for the next part.
Another server program: ``--command "python tests/standin serve tiny"``; flags and port are added.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from server_bench import Drain, Server, compare, gaps_of, percentile, run_drain, start_drain
from server_cost import Window, cost_document, measure, order_of
from server_tables import tables

STARTED = time.monotonic()
PARTS = {
    "rescue": "rescue", "guard": "rescue", "outputs": "rescue", "cost": "agent", "unwedge": "agent", "unwedge-gdb": "agent",
    "unwedge-one-rank": "agent", "control": "control",
}  # fmt: skip
FLAGS = [
    "--served-model-name", "tiny-dsv32", "--load-format", "dummy",
    "--distributed-executor-backend", "mp", "--max-model-len", "16384", "--max-num-seqs", "16",
    "--max-num-batched-tokens", "2048", "--gpu-memory-utilization", "0.2", "--host", "127.0.0.1",
    "--compilation-config", '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}',
]  # fmt: skip
MTP = ["--speculative-config", '{"method":"mtp","num_speculative_tokens":1}']
#: A stand-still of so long, with requests open, is called a wedge here, seconds.
WEDGED_S = 6.0


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:7.2f}] {text}", flush=True)


#: The agent reads control.json five times a second; what it arms holds from the next step on.
SETTLE_S = 0.35
#: Live counts that fill a graph of the default sizes with two rows a request. With the guard off, another count may wedge.
UNPADDED = (1, 2, 4, 8)
SWITCHES = {
    "recorder": ({"recorder": True, "guard": True}, {"recorder": False, "guard": True}),
    "guard": ({"recorder": True, "guard": True}, {"recorder": True, "guard": False}),
    "both": ({"recorder": True, "guard": True}, {"recorder": False, "guard": False}),
    "none": ({"recorder": True, "guard": True}, {"recorder": True, "guard": True}),
}
#: Of the caller's environment, what changes how ranks talk: kept in the record.
INHERITED = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "VLLM_ALLREDUCE_USE_SYMM_MEM", "NCCL_P2P_DISABLE")


def engine_environment(gpu: str, cache: Path) -> dict[str, str]:
    """What every server of a benchmark is started with: its GPUs, no network, deadlines that do not end it, compile caches."""
    return {
        "CUDA_VISIBLE_DEVICES": gpu, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "600",
        "VLLM_CACHE_ROOT": f"{cache}/vllm", "DG_JIT_CACHE_DIR": f"{cache}/deep_gemm", "TRITON_CACHE_DIR": f"{cache}/triton",
        "CUDA_HOME": os.environ.get("CUDA_HOME", "/usr/local/cuda"),
    }  # fmt: skip


class PartError(Exception):
    """A part cannot go on; the others can."""


def gpus() -> list[str]:
    """Index, name and driver of each GPU, by nvidia-smi; empty where it does not answer."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,name,driver_version", "--format=csv,noheader"], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=20.0, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()[:64]
    return []


class Bench:
    """The options, the record on disk and the server in hand."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.end_at = STARTED + args.budget_s
        self.server: Server | None = None
        self.kind = ""
        self.agents = self.out / f"agents-{args.port}"
        self.base_url = f"http://127.0.0.1:{args.port}"
        self.model = "tiny-dsv32"
        self.document: dict[str, Any] = {
            "schema": "dsv4-repro/benchmark-server-experiments/1", "parts": {}, "servers": [],
            "machine": {"python": sys.version.split()[0], "kernel": platform.release(), "cpus": os.cpu_count(),
                        "gpus": gpus(), "environment": {name: os.environ[name] for name in INHERITED if name in os.environ}},
            "options": {name: str(value) for name, value in vars(args).items()},
        }  # fmt: skip

        self.taskset = self.pinned()

    def put(self, part: str, value: Any) -> None:
        self.document["parts"][part] = value
        path = self.out / f"server_experiments-{self.args.port}.json"
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(self.document, indent=1, default=str))
        partial.replace(path)

    def left(self, most: float = 1e9) -> float:
        """Seconds left of the whole budget, at most ``most``."""
        return float(max(min(self.end_at - time.monotonic(), most), 0.0))

    # -- the server ----------------------------------------------------------------------------------------------------------

    def command(self, kind: str) -> list[str]:
        more = [] if kind == "control" else MTP
        cache = ["--enable-prefix-caching"] if self.args.prefix_caching else ["--no-enable-prefix-caching"]
        head = shlex.split(self.args.command)
        head = head or [self.args.python, "-m", "vllm.entrypoints.cli.main", "serve", str(self.args.model_dir)]
        ranks = ["--tensor-parallel-size", str(self.args.tp)]
        return [*head, *FLAGS, *ranks, *more, *cache, "--port", str(self.args.port), *shlex.split(self.args.extra)]

    def pinned(self) -> list[str]:
        """With --pin: taskset for the server on three quarters of the processors; the others are ours from then on."""
        usable = sorted(os.sched_getaffinity(0))
        if not self.args.pin or len(usable) < 4:
            return []
        cut = len(usable) * 3 // 4
        os.sched_setaffinity(0, usable[cut:])
        self.document["processors"] = {"server": usable[:cut], "client": usable[cut:]}
        return ["taskset", "-c", ",".join(map(str, usable[:cut]))]

    def environment(self, kind: str) -> dict[str, str]:
        path = os.pathsep.join(part for part in (str(self.out / f"agent-package-{self.args.port}"), self.args.vllm) if part)
        return {
            **engine_environment(self.args.gpu, self.args.cache or self.out / "cache"), "PYTHONPATH": path,
            "VLLM_RINGBUFFER_WARNING_INTERVAL": "10",
            "DSV4_REPRO_AGENT": "1", "DSV4_REPRO_AGENT_DIR": str(self.agents), "DSV4_REPRO_PTRACE": "1",
            "VLLM_SERVER_DEV_MODE": "1" if self.args.prefix_caching else "0",
            "DSV4_REPRO_RESCUE": "1" if kind == "rescue" else "0", "DSV4_REPRO_GUARD": "0",
        }  # fmt: skip

    def need(self, kind: str) -> None:
        """The server of this kind, ready; PartError if it cannot be had."""
        if self.server is not None and self.kind == kind and self.server.alive and self.answers():
            return
        self.close()
        shutil.rmtree(self.agents, ignore_errors=True)
        self.agents.mkdir(mode=0o700, parents=True)
        log = self.out / f"server-{self.args.port}-{kind}-{len(self.document['servers'])}.log"
        argv = [*self.taskset, *self.command(kind)]
        server = Server(argv, self.environment(kind), log, self.base_url)
        self.server, self.kind = server, kind
        say(f"starting the {kind} server")
        server.start()
        why = server.wait_ready(self.left(self.args.start_s))
        facts = {"kind": kind, "ready_s": server.ready_s, "argv": server.argv, "log": log.name}
        self.document["servers"].append(facts)
        if why:
            facts["failed"], facts["tail"] = why, server.tail()
            self.close()
            raise PartError(f"{kind} server: {why}")
        self.model = server.model() or self.model
        say(f"ready after {server.ready_s:.1f} s; warming up")
        # What compiles at first use is compiled here: prefill alone, then each batch that does not pad (1, 2, 4 live).
        # With --cold-guard one and two live only, whose rows fill a graph, also when one leaves before the other.
        self.control(guard=not self.args.cold_guard)
        shapes = ([(64, 8)], [(3000, 24)], [(3000, 40)] * 2, [(3000, 40)] * 4)
        for shape in shapes[:3] if self.args.cold_guard else shapes:
            warm = run_drain(self.base_url, self.model, shape, seed=90, timeout_s=self.left(90.0))
            if not warm.complete:
                facts["failed"], facts["tail"] = f"warm-up: {[one.error for one in warm.streams]}", server.tail()
                self.close()
                raise PartError(f"{kind} server: warm-up did not end")
        facts["agent"] = self.agent_status()
        say(f"agent: {json.dumps(facts['agent'])[:1500]}")

    def answers(self) -> bool:
        """One short request alone: two rows, never padded."""
        return bool(run_drain(self.base_url, self.model, [(16, 4)], seed=91, timeout_s=20.0).complete)

    def close(self) -> None:
        if self.server is not None:
            self.server.end()
        self.server = None

    # -- the agent -----------------------------------------------------------------------------------------------------------

    def control(self, **switches: bool) -> None:
        """Write control.json and give the agent the time to read it (five times a second)."""
        self.switch(**switches)
        time.sleep(SETTLE_S)

    def switch(self, **switches: bool) -> None:
        """Write control.json; agents read it within a fifth of a second."""
        partial = self.agents / "control.tmp"
        partial.write_text(json.dumps(switches))
        partial.replace(self.agents / "control.json")

    def stand_as(self, **switches: bool) -> bool:
        """Whether every rank's agent says that its switches stand so."""
        found = [one["armed"] or {} for one in self.agent_status()]
        return bool(found) and all(one.get(name) is wanted for one in found for name, wanted in switches.items())

    def ranks(self) -> dict[int, str]:
        """Rank -> name of its agent (``PID-START``), of those with a ring, from each ring's header (ring.py: rank at offset 28)."""
        found = {}
        for path in sorted(self.agents.glob("ring-*.bin")):
            with contextlib.suppress(OSError), path.open("rb") as stream:
                stream.seek(28)
                found[int.from_bytes(stream.read(4), "little", signed=True)] = path.stem.removeprefix("ring-")
        return found

    def agent_status(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self.agents.glob("status-*.json")):
            with contextlib.suppress(OSError, ValueError):
                status = json.loads(path.read_text())
                if status.get("ring"):
                    keep = ("pid", "armed", "releases", "counters", "features")
                    events = [one for one in status.get("events", []) if isinstance(one, dict)]
                    rescued = [
                        {name: one.get(name) for name in ("launches", "seconds", "cause")}
                        for one in events
                        if one.get("kind") == "rescued"
                    ]
                    found.append({**{name: status.get(name) for name in keep}, "rescued": rescued, "events": events[-6:]})
        return found

    def releases(self) -> dict[str, int]:
        """Released so far by each rank, from its ring's live header (ring.py: LIVE at offset 256, <QII); empty: no ring."""
        found = {}
        for rank, name in self.ranks().items():
            with contextlib.suppress(OSError), (self.agents / f"ring-{name}.bin").open("rb") as stream:
                stream.seek(256 + 12)
                found[str(rank)] = int.from_bytes(stream.read(4), "little")
        return found

    # -- drains --------------------------------------------------------------------------------------------------------------

    def shape(self, output: int | None = None, leaver: int | None = None) -> list[tuple[int, int]]:
        """Four requests; the first leaves early, three remain."""
        output, leaver = output or self.args.output, leaver or self.args.leaver
        return [(self.args.prompt + index, leaver if index == 0 else output) for index in range(4)]

    def drain(self, seed: int, *, seconds: float | None = None, **shape: int) -> tuple[Drain, dict[str, Any]]:
        """One drain from start to end, with what it needed to be released."""
        before = self.releases()
        drain = run_drain(
            self.base_url, self.model, self.shape(**shape), seed=seed, timeout_s=self.left(seconds or self.args.drain_s)
        )
        after = self.releases()
        facts = drain.document()
        by_rank = {rank: total - before.get(rank, 0) for rank, total in after.items()}
        facts["releases"], facts["releases_by_rank"] = (sum(by_rank.values()) if by_rank else None), by_rank
        facts["seed"] = seed
        return drain, facts


def summary(drains: Sequence[Drain], facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a set of drains: how many completed, releases, the longest gap of each, inter-token times of all."""
    gaps = [gap for drain in drains for gap in gaps_of(drain.streams)]
    longest = [one["longest_gap_s"] for one in facts if one["longest_gap_s"] is not None]
    return {
        "drains": len(drains), "complete": sum(drain.complete for drain in drains),
        "with_releases": sum(1 for one in facts if one["releases"]),
        "releases": [one["releases"] for one in facts],
        "releases_by_rank": [one["releases_by_rank"] for one in facts], "stall_s": longest,
        "stall_s_median": statistics.median(longest) if longest else None, "stall_s_most": max(longest, default=None),
        "gap_p50_ms": percentile(gaps, 50), "gap_p99_ms": percentile(gaps, 99), "gaps": len(gaps),
    }  # fmt: skip


def many(bench: Bench, part: str, count: int, before: Callable[[], None], seconds: float) -> None:
    """``count`` drains; stops at the part's deadline, or where one does not end."""
    drains: list[Drain] = []
    facts: list[dict[str, Any]] = []
    end = time.monotonic() + bench.left(seconds)
    stopped = ""
    while len(drains) < count:
        if time.monotonic() + 3.0 > end:
            stopped = "the part's time is over"
            break
        before()
        drain, one = bench.drain(1000 + len(drains))
        drains.append(drain)
        facts.append(one)
        done = {**summary(drains, facts), "asked": count, "each": facts}
        bench.put(part, done)
        say(f"{part} {len(drains)}: complete {drain.complete}, releases {one['releases_by_rank']}, gap {one['longest_gap_s']}")
        if not drain.complete:
            stopped = f"drain {len(drains)} did not end: {[stream.error for stream in drain.streams if stream.error][:1]}"
            break
    bench.document["parts"].setdefault(part, {})["stopped"] = stopped
    bench.document["parts"][part]["agent"] = bench.agent_status()
    bench.put(part, bench.document["parts"][part])


def part_rescue(bench: Bench) -> None:
    many(bench, "rescue", bench.args.drains, lambda: bench.control(guard=False), bench.args.part_s)


def part_guard(bench: Bench) -> None:
    bench.control(guard=True)
    many(bench, "guard", bench.args.drains, lambda: None, bench.args.part_s)


def part_control(bench: Bench) -> None:
    many(bench, "control", min(bench.args.drains, 10), lambda: bench.control(guard=False), bench.args.part_s)


def follow(bench: Bench, drain: Drain) -> Drain:
    """Requests, one alone at a time, that go on from each stream's own prompt and output."""
    done = Drain([])
    for stream in drain.streams:
        prompt = [*stream.prompt, *stream.token_ids] if stream.token_ids else stream.prompt
        one = run_drain(bench.base_url, bench.model, [(0, 32)], seed=1, timeout_s=bench.left(30.0), prompts=[prompt])
        one.streams[0].index = stream.index
        done.streams += one.streams
    return done


def part_outputs(bench: Bench) -> None:
    """The same seed each time. With prefix caching each run begins with an empty cache, and what goes on from it reads what
    that run itself left there."""
    result: dict[str, Any] = {"prefix_caching": bench.args.prefix_caching, "cache_resets": [], "rounds": []}
    for seed in range(7, 7 + bench.args.rounds):
        runs: dict[str, tuple[Drain, Drain]] = {}
        for name, guard in (("guarded", True), ("guarded again", True), ("rescued", False)):
            bench.control(guard=guard)
            if bench.args.prefix_caching and bench.server is not None:
                result["cache_resets"].append(bench.server.post("/reset_prefix_cache"))
            drain, facts = bench.drain(seed)
            if not drain.complete:
                result["failed"] = f"{name}: {[stream.error for stream in drain.streams if stream.error]}"
                bench.put("outputs", result)
                raise PartError(result["failed"])
            bench.control(guard=True)
            runs[name] = (drain, follow(bench, drain))
            say(f"outputs {seed} {name}: releases {facts['releases']}")
        first = runs["guarded"]
        result["rounds"].append({
            "seed": seed,
            **{
                f"guarded / {name}": {"drain": compare(first[0], runs[name][0]), "after": compare(first[1], runs[name][1])}
                for name in ("guarded again", "rescued")
            },
        })  # fmt: skip
        bench.put("outputs", result)


def plans_of(text: str, seconds: float) -> list[tuple[str, int, float]]:
    """``recorder:8,guard:2:30`` -> switch, live requests and seconds (``seconds`` where none are said). Raises PartError."""
    found = []
    for word in text.split(","):
        name, live, own = [*word.strip().split(":"), "", ""][:3]
        if name not in SWITCHES or not live.isdigit() or int(live) not in UNPADDED or not (own or "0").isdigit():
            raise PartError(f"no plan {word!r}: one of {', '.join(SWITCHES)}, a colon, one of {UNPADDED} live requests, :seconds")
        found.append((name, int(live), float(own) if own else seconds))
    return found


def toggled(bench: Bench, name: str, live: int, end: float, most: int, number: int) -> list[Window]:
    """The measured windows, two a pair, of one wave, until it is nearly over, ``end``, or ``most`` pairs."""
    on, off = SWITCHES[name]
    windows: list[Window] = []
    bench.control(**on)
    shape = [(64 + index, bench.args.wave) for index in range(live)]
    drain = start_drain(bench.base_url, bench.model, shape, seed=5 + number, timeout_s=bench.left())
    try:
        begun = time.monotonic()
        while any(stream.tokens < 32 for stream in drain.streams):
            if time.monotonic() - begun > 30.0 or drain.live < live:
                raise PartError(f"a wave of {live} did not start: {[one.error for one in drain.streams if one.error][:1]}")
            time.sleep(0.05)
        pair_s = 2.0 * bench.args.window_s
        while len(windows) < 2 * most and time.monotonic() + pair_s + 0.5 < end:
            # No stream may come near its end while the guard is off: one that leaves makes a batch that is padded.
            now = time.monotonic()
            fastest = max(stream.tokens / (now - stream.arrivals[0][0]) for stream in drain.streams)
            if min(stream.max_tokens - stream.tokens for stream in drain.streams) < fastest * (pair_s + 3.0):
                break
            for which in order_of(len(windows) // 2):
                bench.switch(**(on if which else off))
                turned = time.monotonic()
                time.sleep(bench.args.window_s)
                told = bench.stand_as(**(on if which else off))
                windows.append(Window(which, turned + SETTLE_S, turned + bench.args.window_s, told))
            if drain.live < live or drain.stalled_for() > WEDGED_S:
                raise PartError(f"a wave of {live} lost a request or stands: {drain.document()}")
        time.sleep(0.2)
    finally:
        bench.control(recorder=True, guard=True)
        drain.stop()
    return [measure(window, [stream.arrivals for stream in drain.streams]) for window in windows]


def part_cost(bench: Bench) -> None:
    """The guard is off only at live counts that no graph pads."""
    result: dict[str, Any] = {}
    for name, live, seconds in plans_of(bench.args.cost_plans, bench.args.cost_s):
        end = time.monotonic() + bench.left(seconds)
        windows: list[Window] = []
        waves, failed = 0, ""
        while len(windows) < 2 * bench.args.pairs:
            try:
                more = toggled(bench, name, live, end, bench.args.pairs - len(windows) // 2, waves)
            except PartError as error:
                failed = str(error)
                break
            if not more:
                break
            windows, waves = [*windows, *more], waves + 1
        plan = f"{name}, {live} live"
        result[plan] = {**cost_document(windows), "live": live, "waves": waves, "window_s": bench.args.window_s, "failed": failed}
        for what in ("throughput_lost_percent", "steps_lost_percent", "gap_longer_percent"):
            found = result[plan][what]
            say(f"cost {plan}: {what} {found['mean']} ({found['low']} to {found['high']}), {found['n']} pairs")
        bench.put("cost", result)
        if failed:
            raise PartError(f"{plan}: {failed}")


def wedge(bench: Bench, part: str, result: dict[str, Any]) -> tuple[Drain | None, Drain]:
    """A guarded drain, twice, and the same unguarded, which wedges: (guarded, wedged). Raises PartError.

    With --cold-guard no guarded one: the guard has then never been armed in this server. ``freed`` makes it afterwards."""
    guarded = None
    if not bench.args.cold_guard:
        bench.control(guard=True)
        guarded, _ = bench.drain(77)
        again, _ = bench.drain(77)
        result["guarded / guarded again"] = compare(guarded, again)
    bench.control(guard=False)
    drain = start_drain(bench.base_url, bench.model, bench.shape(), seed=77, timeout_s=bench.left(240.0))
    end = time.monotonic() + bench.left(60.0)
    while time.monotonic() < end and drain.live and drain.stalled_for() < WEDGED_S:
        time.sleep(0.05)
    result["wedged"] = drain.live > 0 and drain.stalled_for() >= WEDGED_S
    result["live"], result["tokens_before"] = drain.live, drain.tokens
    bench.put(part, result)
    if not result["wedged"]:
        raise PartError(f"the drain did not wedge: {drain.document()}")
    say(f"{part}: wedged with {drain.live} live")
    return guarded, drain


def unwedge(bench: Bench, part: str, more: Sequence[str]) -> None:
    result: dict[str, Any] = {}
    guarded, drain = wedge(bench, part, result)
    before = bench.releases()
    server = bench.server
    assert server is not None
    assert server.process is not None
    head = [sys.executable, "-m", "dsv4_repro.repro", "unwedge", str(server.process.pid), "--url", bench.base_url]
    head += ["--agent-folder", str(bench.agents), "--json", "--out", str(bench.out / f"{part}-run"), *more]
    for name, words in (("dry", []), ("done", ["--yes"])):
        began = time.monotonic()
        done = command([*head, *words], bench.left(150.0))
        result[name] = {**done, "seconds": time.monotonic() - began}
        bench.put(part, result)
        say(f"{part} {name}: status {done['status']} after {result[name]['seconds']:.1f} s")
    after = bench.releases()
    result["releases_by_rank"] = {rank: total - before.get(rank, 0) for rank, total in after.items()}
    freed(bench, part, result, guarded, drain)


def freed(bench: Bench, part: str, result: dict[str, Any], guarded: Drain | None, drain: Drain) -> None:
    """What became of the survivors, and whether the server serves on."""
    drain.wait(bench.left(90.0))
    result["survivors"] = drain.document()
    result["tokens_flowed"] = drain.tokens > result["tokens_before"]
    alive = result["server_alive"] = bench.server is not None and bench.server.alive
    bench.put(part, result)
    say(f"{part}: complete {drain.complete}, server alive {alive}")
    if drain.complete and guarded is None:
        bench.control(guard=True)
        guarded, _ = bench.drain(77)
        result["guarded run came"] = "afterwards"
    if guarded is not None:
        result["guarded / unwedged"] = compare(guarded, drain)
    if not drain.complete:
        bench.put(part, result)
        raise PartError("the survivors did not complete")
    # Two at a time: four rows, never padded, with or without a guard.
    served, began = 0, time.monotonic()
    for number in range(50):
        if bench.left() < 5.0:
            break
        pair = run_drain(bench.base_url, bench.model, [(64, 16)] * 2, seed=2000 + number, timeout_s=bench.left(30.0))
        served += sum(stream.complete for stream in pair.streams)
        if not pair.complete:
            break
    result["further_requests"] = {"served": served, "of": 100, "seconds": time.monotonic() - began}
    result["agent"] = bench.agent_status()
    bench.put(part, result)
    say(f"{part}: {served} of 100 further requests served")


def part_unwedge(bench: Bench) -> None:
    unwedge(bench, "unwedge", ["--via", "agent"])


def part_unwedge_gdb(bench: Bench) -> None:
    unwedge(bench, "unwedge-gdb", ["--via", "debugger"])


def part_unwedge_one_rank(bench: Bench) -> None:
    """Rank 0 alone is asked to release, until it has nothing more; then rank 1; then both in turn. No word before on what must
    happen: each answer, the tokens and the row states after it are kept."""
    if bench.args.tp < 2:
        raise PartError("one rank of two: start it with --tp 2 --gpu 0,1")
    result: dict[str, Any] = {"steps": []}
    guarded, drain = wedge(bench, "unwedge-one-rank", result)
    before, ranks = bench.releases(), bench.ranks()
    if len(ranks) < 2:
        raise PartError(f"agents with a ring: {ranks}")
    one, other = sorted(ranks)[:2]
    # (who is asked, how long the tokens are watched after it)
    turns = [(one, 5.0), (one, 1.0), (other, 5.0), *[(rank, 0.5) for _ in range(20) for rank in (one, other)]]
    for rank, seconds in turns:
        if not drain.live or bench.left() < 20.0:
            break
        step: dict[str, Any] = {"asked": rank, "tokens_before": drain.tokens, "answer": ask(bench, ranks[rank], release=True)}
        end = time.monotonic() + seconds
        while time.monotonic() < end and drain.live:
            time.sleep(0.05)
        step |= {"tokens_after": drain.tokens, "live_after": drain.live, "stalled_s": drain.stalled_for()}
        if drain.live and len(result["steps"]) < 6:
            step["row_states"] = {str(each): ask(bench, name, release=False) for each, name in ranks.items()}
        after = bench.releases()
        step["releases_by_rank"] = {each: total - before.get(each, 0) for each, total in after.items()}
        step["guard"] = [status["armed"].get("guard") for status in bench.agent_status() if status["armed"]]
        result["steps"].append(step)
        bench.put("unwedge-one-rank", result)
        moved = step["tokens_after"] - step["tokens_before"]
        say(f"unwedge-one-rank: asked {rank}: {json.dumps(step['answer'])[:300]}; {moved} tokens, {drain.live} live")
    result["releases_by_rank"] = result["steps"][-1]["releases_by_rank"] if result["steps"] else {}
    freed(bench, "unwedge-one-rank", result, guarded, drain)


def ask(bench: Bench, name: str, *, release: bool) -> dict[str, Any]:
    """The agent's answer through its ask file, or why there is none."""
    from dsv4_repro.errors import ReproError
    from dsv4_repro.repro.agent_ask import ask_release, ask_row_states

    began = time.monotonic()
    try:
        answer = ask_release(bench.agents, name, guard=False) if release else ask_row_states(bench.agents, name)
        return {**answer.model_dump(), "seconds": time.monotonic() - began}
    except ReproError as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}


def command(argv: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run our own program; ended with Ctrl-C first, so that it can detach its debugger. What it printed, as JSON where it is."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    expired = False
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        expired = True
        process.send_signal(signal.SIGINT)
        try:
            output, errors = process.communicate(timeout=30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
    text = output.decode(errors="replace")
    try:
        document = json.loads(text)
    except ValueError:
        document = text[-8000:]
    return {
        "argv": list(argv), "status": process.returncode, "expired": expired, "document": document,
        "stderr": errors.decode(errors="replace")[-6000:],
    }  # fmt: skip


RUN: dict[str, Callable[[Bench], None]] = {
    "rescue": part_rescue, "guard": part_guard, "outputs": part_outputs, "cost": part_cost, "unwedge": part_unwedge,
    "unwedge-gdb": part_unwedge_gdb, "unwedge-one-rank": part_unwedge_one_rank, "control": part_control,
}  # fmt: skip


def prepare(bench: Bench) -> None:
    """The agent as PYTHONPATH wants it, and the model."""
    with contextlib.suppress(ImportError):
        from dsv4_repro.repro.agent_install import install_into_folder

        install_into_folder(bench.out / f"agent-package-{bench.args.port}")
    if bench.args.model_dir is None and not bench.args.command:
        from dsv4_repro.repro.serving.dummy_model import write_dummy_model

        bench.args.model_dir = write_dummy_model(bench.out / f"model-{bench.args.layers}", layers=bench.args.layers)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summarise", type=Path, nargs="+", metavar="DIR", help="Markdown tables of the JSON files there; no run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="", help=f"of {', '.join(PARTS)}; all that --tp allows")
    parser.add_argument("--port", type=int, default=8011)
    parser.add_argument("--gpu", default="", help="CUDA_VISIBLE_DEVICES of the server: 0,1 for --tp 2; the first ones")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the server, each with its GPU")
    parser.add_argument("--vllm", default="", help="PYTHONPATH of vLLM, if it is not installed")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--model-dir", type=Path, default=None)
    parser.add_argument("--layers", type=int, default=2, help="of the dummy model, where none is given")
    parser.add_argument("--cache", type=Path, default=None, help="compile caches; two servers may share them")
    parser.add_argument("--command", default="", help="another server program, up to its model; flags are added")
    parser.add_argument("--extra", default="", help="more flags of the server")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--cold-guard", action="store_true", help="the guard was never armed before a part's first release")
    parser.add_argument("--pin", action="store_true", help="server and client on processors of their own (taskset)")
    parser.add_argument("--drains", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cost-plans", default="recorder:8,recorder:1,guard:8,guard:2,both:8,none:8", help="switch:live[:seconds]")
    parser.add_argument("--cost-s", type=float, default=60.0, help="seconds of each cost plan")
    parser.add_argument("--pairs", type=int, default=60, help="of windows of a cost plan, at most")
    parser.add_argument("--window-s", type=float, default=1.0, help="between two turns of a switch; the first 0.35 s are dropped")
    parser.add_argument("--wave", type=int, default=12000, help="tokens of each request of a cost wave")
    parser.add_argument("--prompt", type=int, default=3000)
    parser.add_argument("--leaver", type=int, default=20)
    parser.add_argument("--output", type=int, default=60)
    parser.add_argument("--drain-s", type=float, default=30.0, help="a drain that has not ended then is a failure")
    parser.add_argument("--start-s", type=float, default=240.0)
    parser.add_argument("--part-s", type=float, default=180.0)
    parser.add_argument("--budget-s", type=float, default=580.0)
    args = parser.parse_args(words)
    if args.summarise:
        lines, wrong = tables(args.summarise)
        print("\n".join(lines))
        for line in wrong:
            print(line, file=sys.stderr)
        return 1 if wrong else 0
    if args.out is None:
        parser.error("--out DIR, or --summarise DIR")
    args.gpu = args.gpu or ",".join(str(index) for index in range(args.tp))
    if args.tp < 1 or len(args.gpu.split(",")) < args.tp:
        parser.error(f"--tp {args.tp} needs as many GPUs: --gpu {args.gpu}")
    if args.window_s < 2.0 * SETTLE_S:
        parser.error(f"--window-s is at least {2.0 * SETTLE_S:g}")
    asked = [part.strip() for part in args.parts.split(",") if part.strip()]
    asked = asked or [part for part in PARTS if part != "unwedge-one-rank" or args.tp > 1]
    unknown = [part for part in asked if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    try:
        plans_of(args.cost_plans, args.cost_s)
    except PartError as error:
        parser.error(str(error))
    bench = Bench(args)
    failed = 0

    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    # The end of the budget ends the server too, whatever a part is waiting for.
    guard = threading.Timer(bench.args.budget_s + 20.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    guard.daemon = True
    guard.start()
    try:
        prepare(bench)
        for part in sorted(asked, key=lambda name: list(PARTS.values()).index(PARTS[name])):
            if bench.left() < 15.0:
                bench.put(part, {**bench.document["parts"].get(part, {}), "not_run": "the budget is spent"})
                failed += 1
                continue
            try:
                bench.need(PARTS[part])
                say(f"part {part}")
                RUN[part](bench)
            except Exception as error:  # one part's failure is not the others'
                failed += 1
                say(f"part {part} failed: {type(error).__name__}: {error}")
                tail = bench.server.tail() if bench.server is not None else ""
                known = bench.document["parts"].get(part, {})
                bench.put(part, {**known, "error": f"{type(error).__name__}: {error}", "log_tail": tail})
    except KeyboardInterrupt:
        say("interrupted")
        failed += 1
    finally:
        bench.close()
        bench.put("_end", {"seconds": time.monotonic() - STARTED, "failed": failed})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
