"""A server that somebody started, with ``watch`` beside it from its first second: quiet hours, then a hang, ``why``, the release.

    PYTHONPATH=PARENT python benchmarks/server_by_hand.py --out DIR --vllm X/vl:X/site [--gpu 0] [--healthy-s 60] [--agent]

1. The server starts; ``watch`` is started with it and sees weights, JIT and graph capture. Its state is read once a second.
2. ``--healthy-s`` seconds of load that cannot wedge: prompts of 15 000 tokens in chunks of 2048, one or two requests at a time,
   pauses without any. Each look that says hung until here is a false alarm.
3. ``--cost-s`` seconds of the same, over which the processor time and memory of ``watch`` are measured.
4. The drain that wedges (guard never armed; without ``--agent`` no agent at all): when did ``watch`` say hung, ``why`` beside it,
   with ``--freeze`` an ``autopsy --attach --freeze``, then ``unwedge --yes``, the survivors and 100 further requests.

One JSON, written again after each step. ``--command`` as of ``server_experiments.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from server_bench import Server, descendants, run_drain, start_drain
from server_experiments import FLAGS, MTP, command, engine_environment, gpus, say

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Look:
    """One look at ``watch``: seconds, its /livez status, its state, memory of its own process and of it with its children (MiB),
    processor seconds of its own process, ended children included."""

    at: float
    livez: int | None
    state: str
    own_mib: float
    tree_mib: float
    cpu_s: float


@dataclass
class Watched:
    """``watch`` and what is seen of it, once a second, by a thread."""

    process: subprocess.Popen[bytes]
    url: str
    looks: list[Look] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        probe = Server([], {}, Path(os.devnull), self.url)
        while not self.stop.wait(1.0) and self.process.poll() is None:
            status, body = probe.get("/livez", 2.0)
            with contextlib.suppress(OSError, ValueError, IndexError):
                own = resident(self.process.pid)
                tree = sum(resident(pid) for pid in descendants(self.process.pid))
                self.looks.append(Look(time.monotonic(), status, body.strip()[:80], own, tree, cpu_of(self.process.pid)))

    def end(self) -> int | None:
        """SIGTERM; its exit status."""
        self.stop.set()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(40.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None

    def between(self, begin: float, end: float) -> dict[str, Any]:
        """Of the looks in that time: how many, the states, how many said hung, memory, share of a core."""
        looks = [look for look in self.looks if begin <= look.at <= end]
        states: dict[str, int] = {}
        for look in looks:
            states[look.state.partition(":")[0] or "no answer"] = states.get(look.state.partition(":")[0] or "no answer", 0) + 1
        cpu = None
        if len(looks) > 1:
            cpu = 100.0 * (looks[-1].cpu_s - looks[0].cpu_s) / (looks[-1].at - looks[0].at)
        return {
            "seconds": round(end - begin, 1), "looks": len(looks), "states": states,
            "hung": sum(look.livez == 503 for look in looks),
            "cpu_percent_of_a_core": cpu, "own_mib_most": max((look.own_mib for look in looks), default=None),
            "tree_mib_most": max((look.tree_mib for look in looks), default=None),
        }  # fmt: skip


def resident(pid: int) -> float:
    """Resident memory of a process, MiB; 0: it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE / 2**20
    except (OSError, ValueError, IndexError):
        return 0.0


def cpu_of(pid: int) -> float:
    """User and system seconds of a process and of those of its children that have ended (proc(5), fields 14 to 17)."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return sum(int(word) for word in words[11:15]) / TICKS


class Hand:
    """The record, the server, the watch."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.url = f"http://127.0.0.1:{args.port}"
        self.model = "tiny-dsv32"
        self.end_at = time.monotonic() + args.budget_s
        self.document: dict[str, Any] = {
            "schema": "dsv4-repro/benchmark-server-by-hand/1", "gpus": gpus(), "cpus": os.cpu_count(), "agent": args.agent,
        }  # fmt: skip

    def left(self, most: float = 1e9) -> float:
        return float(max(min(self.end_at - time.monotonic(), most), 0.0))

    def put(self, name: str, value: Any) -> None:
        self.document[name] = value
        (self.args.out / f"server_by_hand-{self.args.port}.json").write_text(json.dumps(self.document, indent=1, default=str))

    def server(self) -> Server:
        args = self.args
        if args.command:
            head = shlex.split(args.command)
        else:
            from dsv4_repro.repro.serving.dummy_model import write_dummy_model

            head = [
                sys.executable,
                "-m",
                "vllm.entrypoints.cli.main",
                "serve",
                str(write_dummy_model(args.out / "model", layers=2)),
            ]
        argv = [*head, *FLAGS, *MTP, "--no-enable-prefix-caching", "--port", str(args.port)]
        path = [args.vllm]
        environment = engine_environment(args.gpu, args.cache or args.out / "cache")
        if args.agent:
            from dsv4_repro.repro.agent_install import install_into_folder

            install_into_folder(args.out / "agent-package")
            path.insert(0, str(args.out / "agent-package"))
            folder = args.out / "agents"
            folder.mkdir(mode=0o700, exist_ok=True)
            environment |= {"DSV4_REPRO_AGENT": "1", "DSV4_REPRO_AGENT_DIR": str(folder), "DSV4_REPRO_GUARD": "0"}
        environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
        return Server(argv, environment, args.out / f"server-{args.port}.log", self.url)

    def verb(self, *words: str, seconds: float) -> dict[str, Any]:
        began = time.monotonic()
        done = command([sys.executable, "-m", "dsv4_repro.repro", *words], self.left(seconds))
        say(f"{words[0]}: status {done['status']} after {time.monotonic() - began:.1f} s")
        return {**done, "seconds": time.monotonic() - began}

    def healthy(self, seconds: float, seed: int) -> dict[str, Any]:
        """Load that no graph pads: one request of a long prompt, two alike, a pause."""
        end, done, failed = time.monotonic() + self.left(seconds), 0, 0
        shapes: list[list[tuple[int, int]]] = [[(15000, 64)], [(3000, 200)] * 2, [], [(64, 400)], [(12000, 100)] * 2]
        while time.monotonic() < end:
            shape = shapes[seed % len(shapes)]
            seed += 1
            if not shape:
                time.sleep(min(4.0, max(end - time.monotonic(), 0.0)))
                continue
            drain = run_drain(self.url, self.model, shape, seed=seed, timeout_s=60.0)
            done += sum(one.complete for one in drain.streams)
            failed += sum(not one.complete for one in drain.streams)
        return {"requests": done, "failed": failed}


def steps(hand: Hand, server: Server, watch: Watched, began: float) -> None:
    """Everything after the server and the watch were started."""
    args, put = hand.args, hand.put
    put("not_ready", server.wait_ready(hand.left(args.start_s)))
    if hand.document["not_ready"]:
        put("tail", server.tail())
        return
    say(f"ready after {server.ready_s:.1f} s")
    hand.model = server.model() or hand.model
    put("start", {"ready_s": server.ready_s, **watch.between(began, time.monotonic())})
    for name, seconds, seed in (("healthy", args.healthy_s, 0), ("cost", args.cost_s, 1)):
        at = time.monotonic()
        load = hand.healthy(seconds, seed)
        put(name, {**load, **watch.between(at, time.monotonic())})
        say(f"{name}: {json.dumps(hand.document[name])}")
    put("why_healthy", hand.verb("why", hand.url, "--json", "--out", str(args.out / "why-healthy"), seconds=20.0))
    hang(hand, server, watch)


def until(condition: Callable[[], bool], seconds: float) -> float | None:
    """Seconds until it holds; None: it did not."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if condition():
            return time.monotonic() - began
        time.sleep(0.05)
    return None


def hang(hand: Hand, server: Server, watch: Watched) -> None:
    args, put = hand.args, hand.put
    drain = start_drain(
        hand.url, hand.model, [(3000 + n, 20 if n == 0 else 60) for n in range(4)], seed=77, timeout_s=hand.left(300.0)
    )
    until(lambda: not drain.live or drain.stalled_for() > 1.0, 30.0)
    put("wedged", {"live": drain.live, "tokens": drain.tokens})
    if not drain.live:
        return
    stood = drain.last_token_at or time.monotonic()
    until(lambda: watch.looks[-1].livez == 503, hand.left(40.0))
    put("watch_hung", {"after_last_token_s": watch.looks[-1].at - stood, "looks": watch.looks[-1].state})
    say(f"watch: {hand.document['watch_hung']}")
    before = server.get("/metrics")[1]
    put("why", hand.verb("why", hand.url, "--json", "--out", str(args.out / "why"), seconds=20.0))
    after = server.get("/metrics")[1]
    counted = ("vllm:iteration_tokens_total_count", "vllm:generation_tokens_total", "vllm:request_success_total")
    alike = [[line for line in text.splitlines() if line.startswith(counted)] for text in (before, after)]
    put("why_left_the_counters_alike", alike[0] == alike[1] and bool(alike[0]))
    put("on_hang_after_s", until(lambda: (args.out / "fired").is_file(), hand.left(90.0)))
    words: tuple[str, ...]
    if args.freeze:
        said = hand.document["why"]["document"]
        ranks = said.get("ranks", []) if isinstance(said, dict) else []
        words = ("autopsy", str(ranks[0]["pid"] if ranks else 0), "--attach", "--freeze", "--yes", "--json")
        put("autopsy_freeze", hand.verb(*words, "--out", str(args.out / "autopsy"), seconds=90.0))
    words = ("unwedge", str(server.process.pid if server.process else 0), "--url", hand.url, "--via", args.via, "--json")
    if args.agent:
        words = (*words, "--agent-folder", str(args.out / "agents"))
    put("unwedge_dry", hand.verb(*words, "--out", str(args.out / "unwedge-dry"), seconds=60.0))
    put("unwedge", hand.verb(*words, "--yes", "--out", str(args.out / "unwedge"), seconds=150.0))
    drain.wait(hand.left(60.0))
    put("survivors", drain.document())
    if drain.live or not server.alive:
        put("tail", server.tail())
        return
    at, served = time.monotonic(), 0
    for number in range(50):
        if hand.left() < 10.0:
            break
        pair = run_drain(hand.url, hand.model, [(64, 16)] * 2, seed=2000 + number, timeout_s=30.0)
        served += sum(one.complete for one in pair.streams)
    put("further_requests", {"served": served, "of": 100, "seconds": time.monotonic() - at})
    until(lambda: watch.looks[-1].livez == 200, hand.left(20.0))
    put("watch_after", watch.between(at, time.monotonic()))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vllm", default="", help="PYTHONPATH of vLLM, if it is not installed")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--port", type=int, default=8031)
    parser.add_argument("--listen", type=int, default=9531, help="port of watch on loopback")
    parser.add_argument("--agent", action="store_true", help="the server has the agent (recorder only)")
    parser.add_argument("--via", default="debugger", help="as of unwedge")
    parser.add_argument("--attach", action="store_true", help="as of watch")
    parser.add_argument("--freeze", action="store_true", help="try autopsy --attach --freeze on the wedged server")
    parser.add_argument("--cache", type=Path, default=None)
    parser.add_argument("--command", default="", help="another server program, up to its model; flags are added")
    parser.add_argument("--healthy-s", type=float, default=60.0)
    parser.add_argument("--cost-s", type=float, default=60.0)
    parser.add_argument("--start-s", type=float, default=240.0)
    parser.add_argument("--budget-s", type=float, default=560.0)
    args = parser.parse_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    hand = Hand(args)
    server = hand.server()
    began = time.monotonic()
    server.start()
    assert server.process is not None
    listen = f"127.0.0.1:{args.listen}"
    argv = [sys.executable, "-m", "dsv4_repro.repro", "watch", "--pid", str(server.process.pid), "--url", hand.url]
    argv += [
        "--listen",
        listen,
        "--out",
        str(args.out),  # its run directories are in watch/ of that
        "--on-hang",
        f"echo fired >> {shlex.quote(str(args.out / 'fired'))}",
    ]
    argv += ["--attach", "--yes"] if args.attach else []
    with (args.out / "watch.log").open("ab") as sink:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
    watch = Watched(process, f"http://{listen}")
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    try:
        steps(hand, server, watch, began)
    except (OSError, ValueError, IndexError) as error:
        hand.put("failed", f"{type(error).__name__}: {error}")
    finally:
        fired = args.out / "fired"
        hand.put("on_hang_fired", fired.read_text().count("fired") if fired.is_file() else 0)
        hand.put("watch_whole", watch.between(began, time.monotonic()))
        hand.put("watch_status", watch.end())
        server.end()
    return 0 if not hand.document.get("failed") and hand.document.get("further_requests", {}).get("served") else 1


if __name__ == "__main__":
    sys.exit(main())
